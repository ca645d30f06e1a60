from __future__ import annotations

from typing import Any

from stoker.train.judge import by_task, judge


class Measured:
    """Errors by loader, and in which order they were asked for."""

    def __init__(self, errors: dict[Any, dict[str, float | None]]) -> None:
        self.errors = errors
        self.asked: list[Any] = []

    def __call__(self, loader: Any) -> dict[str, float | None]:
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


def test_every_rank_measures_every_task_in_the_same_order() -> None:
    measured = Measured({"A": {"val_nrmse": 0.2}, None: {"val_nrmse": 0.4}})

    judge({"a": "A", "b": None}, measured)  # type: ignore[dict-item]

    assert measured.asked == ["A", None]
