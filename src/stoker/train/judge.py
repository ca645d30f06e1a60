"""What a validation comes to: the errors of one task, or those of each of several and their means.

All errors are kept side by side, `val_nrmse` and for a task `val_nrmse/<task>`: so they go through metrics,
checkpoints and pictures like any other figure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from stoker.train.batches import PairLoader
from stoker.train.config import PhysicalSpace

Errors: TypeAlias = "dict[str, float | None]"
Validation: TypeAlias = "PairLoader | Mapping[str, PairLoader | None] | None"
"""What is validated on: one set, or one for each task; None where this rank has no part of it."""

LOST = "reconstruction_nrmse"
OF_TASK = "/"
"""Stands between the name of an error and that of the task."""


def judge(loader: Validation, errors_of: Callable[[PairLoader | None, str], Errors]) -> Errors:
    """The errors on a set; of several tasks each one's, and their means without weights.

    An error that only some tasks have (their encoder has a decoder) has no mean.

    Args:
        loader: The set, or the sets by task.
        errors_of: Measures the errors on one set, that of a task (empty: there is one set); called for every
            task, in their order, on every rank.
    """
    if not isinstance(loader, Mapping):
        return errors_of(loader, "")
    found = {task: errors_of(one, task) for task, one in loader.items()}
    first, *others = found.values()
    shared = [name for name in first if all(name in other for other in others)]
    errors: Errors = {name: mean([own[name] for own in found.values()]) for name in shared}
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


def with_lost(errors: Mapping[str, float | None], spaces: Mapping[str, PhysicalSpace]) -> Errors:
    """The errors, and what each task's encoder loses, with its mean."""
    lost = {task: space.reconstruction() for task, space in spaces.items()}
    tasks = by_task(errors).keys() or {""}
    own = {f"{LOST}{OF_TASK}{task}" if task else LOST: value for task, value in lost.items()}
    return {**errors, LOST: mean([lost.get(task) for task in tasks]), **own}


def mean(errors: list[float | None]) -> float | None:
    """The mean of errors that are all known."""
    known = [error for error in errors if error is not None]
    return sum(known) / len(known) if known and len(known) == len(errors) else None
