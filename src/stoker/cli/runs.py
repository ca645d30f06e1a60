"""What commands that train share: the verdict on a run that waited too long."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from stoker.cli.edge import Edge
from stoker.errors import StalledError

if TYPE_CHECKING:
    from stoker.pipeline.train import TrainResult


def judge(out: Edge, result: TrainResult) -> None:
    """End with exit code 5 where a run waited longer than it was allowed to."""
    if result.over_budget is not None:
        out.note(result.over_budget)
        raise typer.Exit(StalledError.exit_code)
