"""Copies of a configuration's files on local storage, in the folders they have on the slow one.

Copies are kept once (`objects/`), and a view of a set of files (`views/<key>/<their path>`) has a hard link
for each, so that a path, a folder or a pattern means below the view what it means outside, and names and
fingerprints are the same.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from stoker.config import Config
from stoker.config.models import DataConfig
from stoker.errors import ConfigError, ResourceError, SourceError
from stoker.fetch.partial import paths_of
from stoker.pipeline.folders import cache_dir_of
from stoker.pipeline.stage_copy import Original, is_staged, look_at, stage_file
from stoker.plan.resources import storage_of
from stoker.runtime.disk import explained, free_space
from stoker.runtime.files import make_folder
from stoker.schema import JsonResult
from stoker.sources.containers import find_containers
from stoker.sources.files import find_files, resolve_files
from stoker.store.remote import local_path
from stoker.units import MIB, format_count

log = logging.getLogger("stoker")
StageMode: TypeAlias = Literal["auto", "never", "always"]
RESERVE_BYTES = 256 * MIB
"""Room that is left on the disk."""
SPARE_INODES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class StageResult(JsonResult):
    """What was staged."""

    task: str
    staged: bool
    """Whether samples are read from copies; False: from where they lie."""
    reason: str
    files: int
    bytes: int
    """Of all files."""
    copied_bytes: int = 0
    """Of those that were copied now."""
    path: Path | None = None
    """The view, below which files have the paths that they have outside."""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StageReport(JsonResult):
    """What was staged for all tasks of a configuration."""

    tasks: tuple[StageResult, ...]


def stage_config(config: Config) -> StageReport:
    """Stage the files of every task.

    Raises:
        ConfigError: The settings say never.
    """
    if config.data.stage == "never":
        raise ConfigError(
            "data.stage is never, so no copy would be used. Give data.stage=auto, or data.stage=always"
        )
    from stoker.pipeline.build import tasks_of  # which asks this module where data lies

    tasks = tasks_of(config)
    return StageReport(tasks=tuple(stage_task(config.for_task(task), task) for task in tasks))


def stage_task(config: Config, task: str, *, mode: StageMode | None = None) -> StageResult:
    """Copy the files of a task, if its settings and its storage ask for it.

    Args:
        mode: In place of `data.stage`.

    Raises:
        ResourceError: There is no room, with `always`; `auto` says so and reads from where files lie.
        SourceError, StalledError: As `stage_file`.
    """
    begin = time.monotonic()
    mode = mode or config.data.stage
    files = _files(config.data, task)
    size = sum(file.bytes for file in files)
    folder = stage_folder(config)
    why = _why(mode, files, folder)
    done = StageResult(task=task, staged=False, reason=why.removeprefix("-"), files=len(files), bytes=size)
    if why.startswith("-"):
        return done
    objects = folder / "objects"
    make_folder(objects, 0o700)
    try:
        _check_room(files, objects)
    except ResourceError as error:
        if mode == "always":
            raise
        log.warning("not staged: %s", error)
        return StageResult(task=task, staged=False, reason=str(error), files=len(files), bytes=size)
    deadline_s = config.precompute.deadlines.read
    copied = 0
    for file in files:
        copied += stage_file(file, objects, deadline_s=deadline_s)
    view = _make_view(files, folder)
    return StageResult(
        task=task,
        staged=True,
        reason=why,
        files=len(files),
        bytes=size,
        copied_bytes=copied,
        path=view,
        seconds=time.monotonic() - begin,
    )


def staged_data(config: Config, task: str) -> DataConfig:
    """The settings of data with paths of the copies, where all of them are there; else as they are."""
    data = config.data
    if data.stage == "never":
        return data
    try:
        files = _files(data, task)
    except (ConfigError, SourceError):
        return data  # whoever reads the data says what is wrong with it
    folder = stage_folder(config)
    view = _view_of(files, folder)
    if not files or not all((view / _below(file)).is_file() for file in files):
        return data
    given = resolve_files(data.root, task) if data.files is None and data.kind == "hdf5" else _given(data)
    moved = tuple(str(view / os.path.abspath(Path(path).expanduser()).lstrip("/")) for path in given)  # noqa: PTH100
    return data.model_copy(update={"files": moved[0] if len(moved) == 1 else moved})


def stage_folder(config: Config) -> Path:
    """Where copies lie: `data.stage_dir`, else beside the caches.

    Raises:
        ConfigError: It is an address.
    """
    own = config.data.stage_dir
    return local_path(own, "data.stage_dir") if own is not None else cache_dir_of(config) / ".staged"


def _given(data: DataConfig) -> Sequence[str | Path]:
    if data.files is None:
        return [data.root]
    return [data.files] if isinstance(data.files, str) else [*data.files]


def _files(data: DataConfig, task: str) -> list[Original]:
    """All files behind the settings, as they are now."""
    if data.kind == "hdf5":
        paths = resolve_files(data.root, task) if data.files is None else find_files(data.files)[1]
    elif data.kind == "arrays":
        paths = [ref.path for one in find_containers([*_given(data)]) for ref in one.files()]
    elif data.kind == "tar":
        paths = find_files([*_given(data)], suffixes=(".tar",), what="tar")[1]
    elif data.kind == "parquet":
        paths = find_files([*_given(data)], suffixes=(".parquet", ".pq"), what="Parquet")[1]
    else:
        raise ConfigError(f"data.kind={data.kind} has no files that could be staged. Give data.stage=never")
    return [look_at(Path(os.path.abspath(path.expanduser()))) for path in paths]  # noqa: PTH100 - links stay


def _why(mode: StageMode, files: Sequence[Original], folder: Path) -> str:
    """Why files are staged; begins with `-` where they are not."""
    if mode == "never":
        return "-data.stage=never"
    if mode == "always":
        return "data.stage=always"
    far = {mount.point: mount for file in files if (mount := storage_of(file.path)) and mount.network}
    if not far:
        return "-files are on local storage already"
    near = storage_of(folder)
    if near is not None and near.network:
        return f"-{folder} is on {near.kind} itself; name local storage with data.stage_dir"
    return "files are on " + ", ".join(f"{mount.kind} ({mount.point})" for mount in far.values())


def _check_room(files: Sequence[Original], objects: Path) -> None:
    """Compare what is still to be copied with what is free.

    Raises:
        ResourceError: It does not fit, in bytes or in files.
    """
    missing = [file for file in files if not is_staged(file, objects)]
    needed = 0
    for file in missing:
        needed += file.bytes
        with suppress(OSError):
            needed -= paths_of(objects / file.object)[0].stat().st_size
    free_space(objects).require(
        objects.parent,
        needed if missing else 0,
        f"staging {format_count(len(missing))} files needs",
        reserve_bytes=RESERVE_BYTES if missing else 0,
        files=4 * len(files) + SPARE_INODES,
        advice="or name another data.stage_dir",
    )


def _below(file: Original) -> str:
    return str(file.path).lstrip("/")


def _view_of(files: Sequence[Original], folder: Path) -> Path:
    key = hashlib.sha256("\n".join(file.object for file in files).encode()).hexdigest()[:16]
    return folder.absolute() / "views" / key


def _make_view(files: Sequence[Original], folder: Path) -> Path:
    """Give every copy the path of its file below the view."""
    view = _view_of(files, folder)
    with explained(folder):
        for file in files:
            place = view / _below(file)
            place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with suppress(FileExistsError):
                os.link(folder / "objects" / file.object, place)
    return view
