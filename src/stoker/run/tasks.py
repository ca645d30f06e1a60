"""Several tasks, one operator: what the training loop is given for a mixture of their caches.

In addition to the conditions of all tasks the operator sees which of them a task has, and which task it is.
Each task is judged separately.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F

from stoker.config import Config
from stoker.encoders.wrappers import is_steady
from stoker.errors import ConfigError
from stoker.loader import Loader, TaskBatch
from stoker.loader.batch import time_field
from stoker.loader.mixture import Mixture
from stoker.schema import Json, Schema


class TaskMixture(Mixture):
    """A mixture as the training loop takes it: batches have the conditions of `with_task`."""

    def __iter__(self) -> Iterator[TaskBatch]:
        """Yield one pass, or the rest of the pass that a loaded state began."""
        tasks = len(self.names)
        return (with_task(cast("TaskBatch", batch), tasks) for batch in super().__iter__())


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskLoader:
    """One task of a mixture alone, for validation: a pass in order, with the conditions of all tasks."""

    mixture: Mixture
    task: str

    def __iter__(self) -> Iterator[TaskBatch]:
        """Yield all batches of the task."""
        tasks = len(self.mixture.names)
        return (with_task(batch, tasks) for batch in self.mixture.only(self.task))

    def __len__(self) -> int:
        """Return the number of batches of the task."""
        return len(self.mixture.loaders[self.task])

    def set_epoch(self, epoch: int) -> None:
        """Every pass is the same."""

    def state_dict(self) -> dict[str, Json]:
        """Return nothing: a pass always starts at its beginning."""
        return {}

    def load_state_dict(self, state: Any) -> None:
        """Do nothing: a pass always starts at its beginning."""


def with_task(batch: TaskBatch, tasks: int) -> TaskBatch:
    """Return the batch with more conditions: `<name>?`, 1 where its cache has that one, and `task`, one-hot.

    Raises:
        ConfigError: A condition has such a name.
    """
    _check_names(batch.cond)
    cond = dict(batch.cond)
    for name, mask in batch.mask.items():
        cond[f"{name}?"] = mask.to(torch.float32)
    cond["task"] = F.one_hot(batch.tasks, tasks).to(torch.float32)
    return batch._replace(cond=cond)


def _check_names(names: Iterable[str]) -> None:
    """Refuse a condition that would be lost under what `with_task` adds.

    Raises:
        ConfigError: As said.
    """
    names = set(names)
    if taken := sorted(names & {"task", *(f"{name}?" for name in names)}):
        raise ConfigError(
            f"a condition is called {taken[0]!r}, a name that training on several tasks needs",
            hint="Give it another name in its source, or train the tasks apart",
        )


def mix(config: Config, loaders: Mapping[str, Loader], **more: Any) -> TaskMixture:
    """Return the training loaders of all tasks, mixed as `training.mixture` says."""
    training = config.training
    return TaskMixture(
        list(loaders.values()),
        names=list(loaders),
        mode=training.mixture,
        weights=training.task_weights,
        exhausted="longest" if training.mixture == "round_robin" else None,
        mix="batch",
        seed=training.seed,
        **more,
    )


def apart(loaders: Mapping[str, Loader]) -> dict[str, TaskLoader]:
    """Return the validation loaders, each with the conditions of all tasks."""
    mixture = Mixture(list(loaders.values()), names=list(loaders), mix="batch")
    return {task: TaskLoader(mixture=mixture, task=task) for task in loaders}


def check_together(schemas: Mapping[str, Schema]) -> None:
    """Refuse tasks that one operator cannot take.

    Args:
        schemas: Fields of the records of each task.

    Raises:
        ConfigError: Their states differ in tokens or width, or a condition has a name that is needed; says
            which, and what would help.
    """
    if steady := [task for task, schema in schemas.items() if is_steady(schema)]:
        raise ConfigError(
            f"{', '.join(steady)} has an input and a solution for each sample, and no time (data.input)",
            hint=f"Such a task is trained alone: data.task={steady[0]}",
        )
    _check_names({name for schema in schemas.values() for name in schema.keys() - {time_field(schema, None)}})
    by_size: dict[tuple[int, int], list[str]] = {}
    for task, schema in schemas.items():
        step = schema[time_field(schema, None)].shape[1:]
        by_size.setdefault((math.prod(step[:-1]), step[-1] if step else 1), []).append(task)
    if len(by_size) > 1:
        sizes = [f"{', '.join(tasks)} ({n} tokens of {d} numbers)" for (n, d), tasks in by_size.items()]
        raise ConfigError(
            f"one operator cannot be trained on {' and '.join(sizes)} together: its weights are made for "
            "one number of tokens of one width",
            hint="Give these tasks the same latent.tokens and latent.dim, or train them apart, as "
            "data.task=NAME",
        )
