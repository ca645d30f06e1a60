"""Pictures are whole for the tests that look at them, and small for all others."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from matplotlib.figure import Figure


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.draws)])
def test_a_picture_is_drawn_where_it_is_asked_for(tmp_path: Path, whole: bool) -> None:
    figure, svg = Figure(), io.StringIO()
    figure.subplots().plot([1, 2])
    figure.savefig(tmp_path / "a.png", format="png")
    figure.savefig(svg, format="svg")
    figure.savefig(tmp_path / "a.pdf", format="pdf")  # of which there is no sketch

    assert ((tmp_path / "a.png").stat().st_size > 1000) == whole
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert (svg.getvalue().count("<path") > 0) == whole
    assert "<svg" in svg.getvalue()
    assert (tmp_path / "a.pdf").stat().st_size > 1000
