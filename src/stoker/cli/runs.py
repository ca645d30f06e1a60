"""What commands that train share: when their process began, and whether it waited too long."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import psutil
import typer

from stoker.cli.edge import Edge
from stoker.errors import StalledError

if TYPE_CHECKING:
    from stoker.pipeline.train import TrainResult


def process_start() -> float:
    """When this process began, on the clock of `time.monotonic`."""
    return time.monotonic() - max(0.0, time.time() - psutil.Process().create_time())


def judge(out: Edge, result: TrainResult) -> None:
    """End with exit code 5 where a run waited longer than it was allowed to."""
    if result.over_budget is not None:
        from stoker.config.remedies import in_settings

        out.note(in_settings(result.over_budget))
        raise typer.Exit(StalledError.exit_code)
