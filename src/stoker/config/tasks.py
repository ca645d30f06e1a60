"""Settings of single tasks: `tasks: {name: {...}}`, over those of all.

A block may set what decides a task's records and the size of its batches. Everything else is one for the
whole run, since one operator is trained on all tasks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, cast

from stoker.config.models import Config
from stoker.config.names import all_settings, as_name, nearest
from stoker.errors import ConfigError

SECTIONS = ("data", "latent", "encoder", "precompute")
"""Sections of which a task may have its own settings."""
SINGLE = ("training.batch_size", "training.latent_cache_dtype")
"""Further settings that a task may have of its own."""
_ENTRY = re.compile(rf"(?P<task>.+?)\.(?P<setting>(?:{'|'.join(SECTIONS)}|training)\..+)")


def blocks_of(given: object, where: str) -> dict[str, dict[str, object]]:
    """The blocks by task, each by dotted name.

    Args:
        given: `{task: {section: {name: value}}}`, with dots or nested, and `task.section.name` as from the
            command line.

    Raises:
        ConfigError: It is no such mapping, or a name is none that a task can set.
    """
    if not isinstance(given, Mapping):
        raise ConfigError(f"{where}: tasks is {given!r}. Expected settings by task, as {_EXAMPLE}")
    blocks: dict[str, dict[str, object]] = {}
    for key, value in cast("Mapping[str, Any]", given).items():
        entry = _ENTRY.fullmatch(str(key))
        task, flat = (
            (entry["task"], {entry["setting"]: value}) if entry else (str(key), _flat(value, where, key))
        )
        for name, one in flat.items():
            _check_name(name, f"{where}: tasks.{task}.{name}")
            blocks.setdefault(task, {})[name] = one
    return blocks


def task_settings(tasks: Sequence[str], merged: Mapping[str, object]) -> dict[str, dict[str, object]]:
    """What differs for each task by dotted name: its block, and that it is the task."""
    blocks = cast("Mapping[str, Mapping[str, object]]", merged.get("tasks") or {})
    if len(tasks) == 1 and not blocks.get(tasks[0]):
        return {}
    found: dict[str, dict[str, object]] = {}
    for task in tasks:
        found[task] = {"data.task": task, **blocks.get(task, {})}
        if "training.batch_size" in found[task]:  # which is the other way to say it
            found[task]["training.batch_trajectories"] = None
    return found


def unused_blocks(config: Config, where: str) -> list[str]:
    """A note for each block whose task is not among those of the run, with the name that may be misspelt."""
    blocks, tasks = config.tasks or {}, config.data.tasks
    bare = [task for task in tasks if task not in blocks]
    notes: list[str] = []
    for block in blocks:
        if block not in tasks:
            near = get_close_matches(block, bare, n=1)
            hint = f". Did you mean data.task {block} for {near[0]}, or tasks.{near[0]} here?" if near else ""
            notes.append(f"{where}: tasks.{block} has no effect: data.task is {', '.join(tasks)}{hint}")
    return notes


def check_weights(config: Config, where: str) -> None:
    """Refuse `training.task_weights` that do not fit the tasks, before anything is encoded for them.

    Raises:
        ConfigError: As said.
    """
    weights, tasks = config.training.task_weights, config.data.tasks
    if weights is None or len(tasks) == 1:
        return
    said = f"{where}: training.task_weights"
    if config.training.mixture != "weighted":
        raise ConfigError(
            f"{said} are of training.mixture=weighted, but it is {config.training.mixture}. "
            "Set it, or leave the weights out"
        )
    lacking = [task for task in tasks if task not in weights]
    for name in weights:
        if name not in tasks:
            near = get_close_matches(name, lacking, n=1)
            hint = f"Did you mean {near[0]}?" if near else "Leave it out"
            raise ConfigError(f"{said} has {name}, but data.task is {', '.join(tasks)}. {hint}")
    if lacking:
        raise ConfigError(f"{said} has nothing for {', '.join(lacking)}. Give each task a number above 0")


_EXAMPLE = "tasks: {burgers1d: {data: {preset: pdebench}}}"


def _flat(block: object, where: str, task: str, prefix: str = "") -> dict[str, object]:
    if not isinstance(block, Mapping):
        raise ConfigError(f"{where}: tasks.{task} is {block!r}. Expected settings, as {_EXAMPLE}")
    flat: dict[str, object] = {}
    for key, value in cast("Mapping[str, Any]", block).items():
        name = f"{prefix}{as_name(key)}"
        if name in all_settings() or not isinstance(value, Mapping):
            flat[name] = value
        else:
            flat.update(_flat(cast("Mapping[str, Any]", value), where, task, f"{name}."))
    return flat


def _check_name(name: str, said: str) -> None:
    if name not in all_settings():
        near = nearest(name, all_settings())
        raise ConfigError(
            f"{said} is not a setting ({f'did you mean {near}?' if near else 'see docs/config.md'})"
        )
    if name == "data.task" or (name.partition(".")[0] not in SECTIONS and name not in SINGLE):
        raise ConfigError(
            f"{said}: a task has no {name} of its own. Set it for all of them; of its own it has "
            f"{', '.join(f'{section}.*' for section in SECTIONS)}, {', '.join(SINGLE)}"
        )
