from __future__ import annotations

from typing import Any

from stoker.train.config import PhysicalSpace
from stoker.train.objective import by_task, judge, with_lost


class Measured:
    """Errors by loader, and in which order they were asked for."""

    def __init__(self, errors: dict[Any, dict[str, float | None]]) -> None:
        self.errors = errors
        self.asked: list[Any] = []

    def __call__(self, loader: Any, task: str) -> dict[str, float | None]:
        del task
        self.asked.append(loader)
        return self.errors[loader]


def test_one_set_gives_its_own_errors() -> None:
    measured = Measured({None: {"val_nrmse": 0.5}})

    assert judge(None, measured) == {"val_nrmse": 0.5}
    assert by_task({"val_nrmse": 0.5}) == {}


def test_tasks_count_the_same_and_keep_their_own_errors() -> None:
    measured = Measured(
        {"A": {"val_nrmse": 0.2, "rollout_nrmse": 1.0}, "B": {"val_nrmse": 0.4, "rollout_nrmse": None}}
    )

    errors = judge({"a": "A", "b": "B"}, measured)  # type: ignore[dict-item]

    assert errors["val_nrmse"] == (0.2 + 0.4) / 2
    assert errors["rollout_nrmse"] is None, "a mean of some tasks would pass for that of all"
    assert by_task(errors) == {
        "a": {"val_nrmse": 0.2, "rollout_nrmse": 1.0},
        "b": {"val_nrmse": 0.4, "rollout_nrmse": None},
    }


def test_what_only_some_tasks_have_is_no_figure_of_all() -> None:
    measured = Measured({"A": {"val_nrmse": 0.2, "physical_nrmse": 0.1}, "B": {"val_nrmse": 0.4}})

    errors = judge({"a": "A", "b": "B"}, measured)  # type: ignore[dict-item]

    assert "physical_nrmse" not in errors
    assert by_task(errors)["a"] == {"val_nrmse": 0.2, "physical_nrmse": 0.1}


def test_what_encoders_lose_stands_beside_the_errors() -> None:
    def space(lost: float | None) -> PhysicalSpace:
        return PhysicalSpace(decode=lambda states: states, reconstruction=lambda: lost)

    one = with_lost({"val_nrmse": 0.2}, {"": space(0.1)})
    both = with_lost({"val_nrmse/a": 0.2, "val_nrmse/b": 0.2}, {"a": space(0.1), "b": space(0.3)})
    some = with_lost({"val_nrmse/a": 0.2, "val_nrmse/b": 0.2}, {"b": space(0.3)})

    assert one == {"val_nrmse": 0.2, "reconstruction_nrmse": 0.1}
    assert both["reconstruction_nrmse"] == 0.2
    assert [task["reconstruction_nrmse"] for task in by_task(both).values()] == [0.1, 0.3]
    assert some["reconstruction_nrmse"] is None
    assert by_task(some)["b"]["reconstruction_nrmse"] == 0.3


def test_every_rank_measures_every_task_in_the_same_order() -> None:
    measured = Measured({"A": {"val_nrmse": 0.2}, None: {"val_nrmse": 0.4}})

    judge({"a": "A", "b": None}, measured)  # type: ignore[dict-item]

    assert measured.asked == ["A", None]
