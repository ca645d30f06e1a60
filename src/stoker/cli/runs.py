"""What commands that train share: when their process began, and whether it waited too long."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import psutil
import typer

from stoker.cli.edge import Edge
from stoker.errors import StalledError
from stoker.precompute.guarded import guard_page

if TYPE_CHECKING:
    from stoker.pipeline.train import TrainResult


def process_start() -> float:
    """When the command began, on the clock of `time.monotonic`: its guardian did, where there is one."""
    process = psutil.Process()
    began = (process.parent() or process) if guard_page() is not None else process
    return time.monotonic() - max(0.0, time.time() - began.create_time())


def judge(out: Edge, result: TrainResult) -> None:
    """End with exit code 5 where a run waited longer than it was allowed to."""
    if result.over_budget is not None:
        from stoker.config.remedies import in_settings

        out.note(in_settings(result.over_budget))
        raise typer.Exit(StalledError.exit_code)
