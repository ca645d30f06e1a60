"""What a validation comes to: the errors of one task, or those of each of several and their means.

All errors are kept side by side, `val_nrmse` and for a task `val_nrmse/<task>`: so they go through metrics,
checkpoints and pictures like any other figure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

from stoker.train.batches import PairBatch, PairLoader
from stoker.train.evaluate import evaluate
from stoker.train.run import Run

Errors: TypeAlias = "dict[str, float | None]"
Watched: TypeAlias = Callable[[PairLoader], Iterator[PairBatch]]
"""Iterates over a loader, and raises when training was asked to stop."""

OF_TASK = "/"
"""Stands between the name of an error and that of the task."""


def judge(run: Run, loader: PairLoader | Mapping[str, PairLoader], watched: Watched) -> Errors:
    """The errors of the run's weights; of several tasks each one's, and their means without weights."""
    if not isinstance(loader, Mapping):
        return _judge_one(run, loader, watched)
    found = {task: _judge_one(run, one, watched) for task, one in loader.items()}
    errors: Errors = {
        name: _mean([own[name] for own in found.values()]) for name in next(iter(found.values()))
    }
    for task, own in found.items():
        errors |= {f"{name}{OF_TASK}{task}": error for name, error in own.items()}
    return errors


def by_task(errors: Mapping[str, float | None]) -> dict[str, Errors]:
    """The errors of each task by their names; empty where there is only one task.

    >>> by_task({"val_nrmse": 2.0, "val_nrmse/a": 1.0, "val_nrmse/b": 3.0})
    {'a': {'val_nrmse': 1.0}, 'b': {'val_nrmse': 3.0}}
    """
    found: dict[str, Errors] = {}
    for key, error in errors.items():
        name, mark, task = key.partition(OF_TASK)
        if mark:
            found.setdefault(task, {})[name] = error
    return found


def _judge_one(run: Run, loader: PairLoader, watched: Watched) -> Errors:
    loader.set_epoch(0)
    found = evaluate(
        run.model,
        watched(loader),
        run.widths,
        stride=run.config.stride,
        samples=run.config.rollout_samples,
        amp=run.amp,
    )
    return {
        "val_nrmse": _finite(found.nrmse),
        "persistence_nrmse": _finite(found.persistence),
        "rollout_nrmse": _finite(found.rollout),
        "rollout_persistence_nrmse": _finite(found.rollout_persistence),
    }


def _mean(errors: list[float | None]) -> float | None:
    """The mean of errors that are all known."""
    known = [error for error in errors if error is not None]
    return sum(known) / len(known) if len(known) == len(errors) else None


def _finite(value: float | None) -> float | None:
    """JSON holds no infinity: an error too large to tell is reported as absent."""
    return value if value is not None and math.isfinite(value) else None
