"""What the picture of a run shows, asked of the axes that matplotlib was given."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import matplotlib.figure
import pytest

from stoker.train.report import curves_as_svg, draw_curves


def epoch(number: int, **changes: Any) -> dict[str, Any]:
    errors = {
        "val_nrmse": 0.05 / number, "persistence_nrmse": 0.07,
        "rollout_nrmse": 0.5 / number, "rollout_persistence_nrmse": 1.7,
    }  # fmt: skip
    row = {"kind": "epoch", "epoch": number, "step": 10 * number, "loss": 1.0 / number, "stall": 0.003}
    return {**row, **errors, **changes}


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that were saved."""
    saved: list[Any] = []
    save = matplotlib.figure.Figure.savefig

    def keep(figure: Any, *arguments: Any, **named: Any) -> None:
        saved.append(figure)
        save(figure, *arguments, **named)

    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", keep)
    return saved


def draw(rows: list[dict[str, Any]], figures: list[Any], folder: Path) -> tuple[Any, Any, Any]:
    draw_curves(rows, folder / "curves.png")
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    loss, error, stall = figures[-1].axes
    return loss, error, stall


def test_each_error_is_drawn_beside_its_own_persistence(figures: list[Any], tmp_path: Path) -> None:
    _, error, _ = draw([epoch(1), epoch(2)], figures, tmp_path)

    lines = {line.get_label(): (list(line.get_ydata()), line.get_color()) for line in error.lines}

    assert lines["one step"][0] == [0.05, 0.025]
    assert lines["roll-out"][0] == [0.5, 0.25]
    assert set(lines["one step, persistence"][0]) == {0.07}
    assert set(lines["roll-out, persistence"][0]) == {1.7}
    assert lines["roll-out"][1] == lines["roll-out, persistence"][1] != lines["one step"][1]


@pytest.mark.draws
def test_pictures_of_the_page_take_its_color_and_share_no_name() -> None:
    loss, error, stall = curves_as_svg([epoch(1), epoch(2)])

    for svg, words in ((loss, "training loss"), (error, "roll-out, persistence"), (stall, "stall: 0.3 %")):
        assert words in svg
        assert "currentColor" in svg
        assert "#24313f" not in svg
    names = [re.findall(r'\bid="([^"]+)"', svg) for svg in (loss, error, stall)]
    assert len({name for some in names for name in some}) == sum(map(len, names))


def test_the_loss_says_what_its_unit_is(figures: list[Any], tmp_path: Path) -> None:
    loss, _, _ = draw([epoch(1)], figures, tmp_path)

    assert loss.get_title(loc="left") == "training loss: error² / (change in a step)²"


@pytest.mark.parametrize("epochs", [1, 2, 3, 20, 150])
def test_epochs_are_whole_numbers(figures: list[Any], tmp_path: Path, epochs: int) -> None:
    for axes in draw([epoch(number) for number in range(1, epochs + 1)], figures, tmp_path)[1:]:
        ticks = axes.get_xticks()

        assert 1 <= len(ticks) <= 10
        assert all(tick == round(tick) for tick in ticks)


@pytest.mark.parametrize(("stall", "top"), [(0.003, 10), (0.2, 25), (0.99, 100), (1.0, 100), (0.0, 10)])
def test_stall_is_in_per_cent_on_an_axis_that_holds_it(
    figures: list[Any], tmp_path: Path, stall: float, top: int
) -> None:
    _, _, axes = draw([epoch(1, stall=stall), epoch(2, stall=stall)], figures, tmp_path)

    assert list(axes.lines[0].get_ydata()) == [100 * stall, 100 * stall]
    assert axes.get_ylim() == (0, top)
    assert axes.yaxis.get_major_formatter()(top) == f"{top} %"


@pytest.mark.draws
@pytest.mark.parametrize(
    "rows",
    [
        [],
        [{"kind": "start", "step": 0}],
        [epoch(1, val_nrmse=None, persistence_nrmse=None, rollout_nrmse=None, stall=None)],
        [epoch(1, val_nrmse=0.0, loss=0.0, persistence_nrmse=0.0)],
        [epoch(1, loss=None)],
    ],
    ids=["none", "only-begun", "no-validation", "zeros", "infinite-loss"],
)
def test_what_is_missing_is_left_out(figures: list[Any], tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    assert len(draw(rows, figures, tmp_path)) == 3


def test_each_task_has_a_line_beside_its_own_persistence(figures: list[Any], tmp_path: Path) -> None:
    own = {"val_nrmse/a": 0.04, "persistence_nrmse/a": 0.06, "val_nrmse/b": 0.4, "persistence_nrmse/b": 0.6}

    _, error, _ = draw([epoch(1, **own), epoch(2, **own)], figures, tmp_path)
    lines = {line.get_label(): (set(line.get_ydata()), line.get_color()) for line in error.lines}

    assert lines.keys() == {"a", "a, persistence", "b", "b, persistence"}
    assert lines["b"][0] == {0.4}
    assert lines["b, persistence"][0] == {0.6}
    assert lines["a"][1] == lines["a, persistence"][1] != lines["b"][1]
