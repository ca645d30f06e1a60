"""What commands that train share: the run with its screen, and the verdict on one that waited too long."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from stoker.cli.edge import Edge
from stoker.cli.together import joined
from stoker.errors import StalledError
from stoker.precompute.guarded import started_ns

if TYPE_CHECKING:
    from stoker.config.models import Config
    from stoker.pipeline.train import TrainResult


def load_settings(out: Edge, path: Path, overrides: Sequence[str], *, earlier: bool = False) -> Config:
    """Return the settings of a file and a command line; what of them has no effect any more is said."""
    from stoker.config import load_config

    settings = load_config(path, overrides, earlier=earlier)
    for note in settings.notes:
        out.note(note)
    return settings


def run_training(out: Edge, settings: Config, *, live: bool | None = None, stage: str | None = None) -> None:
    """Encode what is missing, train and print the result; `live` None: a screen on a terminal alone."""
    from stoker.cli import render, render_tasks
    from stoker.cli.live import watching
    from stoker.pipeline.train import train_config

    drawn = out.notes.is_terminal if live is None else live
    started = started_ns() / 1e9
    with joined(settings) as ranks, watching(out.notes, out.note, live=drawn) as watch:
        listeners = (watch, render.events(out.note))

        def listen(kind: str, facts: Mapping[str, Any]) -> None:
            for listener in listeners:
                listener(kind, facts)

        result = train_config(settings, started=started, on_event=listen, ranks=ranks, stage=stage)
    out.show(result, render_tasks.train)
    judge(out, result)


def judge(out: Edge, result: TrainResult) -> None:
    """End with exit code 5 where a run waited longer than it was allowed to."""
    if result.over_budget is not None:
        out.note(result.over_budget)
        raise typer.Exit(StalledError.exit_code)
