"""Copies of a configuration's files on local storage, in the folders they have on the slow one.

Copies are kept once (`objects/`). A view of a set of files (`views/<key>/<their path>`) has a hard link for
each. So a path, a folder or a pattern means below the view what it means outside, and names and fingerprints
are the same.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path
from typing import Literal, TypeAlias

from stoker.config.models import DataConfig
from stoker.errors import ConfigError, ResourceError, SourceError, StalledError
from stoker.run.context import Run
from stoker.runtime.disk import explain_disk_errors, free_space
from stoker.runtime.files import PartialFile, link_file, make_folder, paths_of, replace_atomically
from stoker.runtime.jsonio import read_object
from stoker.runtime.locks import FileLock
from stoker.runtime.mounts import storage_of
from stoker.runtime.threads import ItemClock, call_within
from stoker.schema import JsonResult
from stoker.sources.containers import find_containers
from stoker.sources.files import find_files, open_regular, resolve_files
from stoker.store.gc import DAY_S, GcItem, GcReport
from stoker.store.remote import local_path
from stoker.units import MIB, format_bytes, format_count

# ----------------------------------------------------------------------------------------------------------
# Copy one file to local storage: verified, resumable, by one process at a time, with a timeout.
#
# A copy is an object named by where its file lies, its size and its time, so a file that changes gets
# another. It grows as a `PartialFile`: what a killed run left is checked and kept. The object appears under
# its name once all of it was read back.


POLL_S = 0.1
PIECE_BYTES = MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class OriginalFile:
    """A file to be copied, as it is now."""

    path: Path
    bytes: int
    mtime_ns: int

    @property
    def object(self) -> str:
        """Name of its copy."""
        return hashlib.sha256(f"{self.path}\0{self.bytes}\0{self.mtime_ns}".encode()).hexdigest()[:32]


def look_at(path: Path) -> OriginalFile:
    """Return the file behind a path.

    Raises:
        SourceError: It cannot be read.
    """
    try:
        found = path.stat()
    except OSError as error:
        raise SourceError(
            f"{path} cannot be staged: {error.strerror}", hint="Check the path or the mount"
        ) from error
    return OriginalFile(path=path, bytes=found.st_size, mtime_ns=found.st_mtime_ns)


def is_staged(original: OriginalFile, objects: Path) -> bool:
    """Return True if its copy is there, as it was when it was verified."""
    try:
        note = read_object(objects / f"{original.object}.json")
        found = (objects / original.object).stat()
        return [found.st_size, found.st_mtime_ns] == [note["bytes"], note["mtime_ns"]]
    except (OSError, ValueError, KeyError, TypeError):
        return False


def stage_file(original: OriginalFile, objects: Path, *, timeout_s: float) -> int:
    """Make the copy of a file, or wait for the process that makes it; return the bytes that were copied here.

    Raises:
        StalledError: A read, or the other process, made no progress for `timeout_s`.
        SourceError: The file changed, or cannot be read.
        ResourceError: No space left; what was copied is kept for the next time.
    """
    with _object_lock(original, objects, timeout_s):
        if is_staged(original, objects):
            return 0
        return _copy(original, objects, timeout_s)


@contextmanager
def _object_lock(original: OriginalFile, objects: Path, timeout_s: float) -> Generator[None]:
    """Hold the lock of an object; the wait ends when its partial copy has not grown for `timeout_s`."""
    part, _ = paths_of(objects / original.object)
    with FileLock(objects / f"{original.object}.lock") as lock:
        since, size = time.monotonic(), -1
        while not lock.acquire():
            try:
                grown = part.stat().st_size
            except FileNotFoundError:  # not begun, or renamed since it is complete
                grown = -1
            if grown != size:
                since, size = time.monotonic(), grown
            elif time.monotonic() - since > timeout_s:
                raise StalledError(
                    f"{original.path} is being staged by {lock.holder()}, which has made no progress for "
                    f"{timeout_s:g} s ({format_bytes(max(0, size))} so far)",
                    hint="End it, then run again",
                )
            time.sleep(POLL_S)
        yield


def _copy(original: OriginalFile, objects: Path, timeout_s: float) -> int:
    target = objects / original.object
    partial = PartialFile(target, bytes=original.bytes)
    begun = partial.at
    try:
        clock = ItemClock()
        call_within(
            timeout_s,
            lambda: _receive(original, partial, clock.begin),
            f"staging {original.path}",
            hint="Is the mount reachable? Run again: what was copied is kept",
            clock=clock,
        )
    except StalledError:
        partial.abandon()  # by the thread that is left behind
        raise
    except BaseException:
        partial.keep()
        raise
    partial.keep()
    if look_at(original.path) != original:
        for path in paths_of(target):
            path.unlink(missing_ok=True)
        raise SourceError(f"{original.path} changed while it was staged", hint="Run again once it is written")
    _publish(original, PartialFile(target, bytes=original.bytes), target)
    return original.bytes - begun


def _receive(original: OriginalFile, partial: PartialFile, begin: Callable[[int], None]) -> None:
    """Copy what is missing; `begin` is told before each piece of the original."""
    try:
        with open_regular(original.path) as file:
            found = os.fstat(file.fileno())
            partial.begin(partial.at, f"{found.st_size} {found.st_mtime_ns} {found.st_ino}")
            begin(partial.at)
            while piece := read_piece(file, partial.at):
                partial.write(piece)
                begin(partial.at)
    except OSError as error:
        raise SourceError(
            f"{original.path}: {error.strerror}", hint="Check the mount, then run again"
        ) from error
    if partial.at < original.bytes:
        raise SourceError(
            f"{original.path} ends at byte {partial.at:,}, it had {original.bytes:,}: cut short"
        )


def read_piece(file: FileIO, at: int) -> bytes:
    """Return what a file has from byte `at` on, a piece of it at most."""
    return os.pread(file.fileno(), PIECE_BYTES, at)


def _publish(original: OriginalFile, whole: PartialFile, target: Path) -> None:
    """Name the copy, once opening it again has read every block back."""
    try:
        if whole.at < original.bytes:
            raise SourceError(
                f"the copy of {original.path} does not read back as it was written",
                hint=f"Check the disk below {target.parent}, or choose another data.stage_dir",
            )
        whole.finish()
    finally:
        whole.keep()
    with explain_disk_errors(target.parent):
        found = target.stat()
        note = {"bytes": found.st_size, "mtime_ns": found.st_mtime_ns, "path": str(original.path)}
        with replace_atomically(target.with_name(f"{target.name}.json")) as temporary:
            temporary.write_text(json.dumps(note))


log = logging.getLogger("stoker")
StageMode: TypeAlias = Literal["auto", "never", "always"]
RESERVE_BYTES = 256 * MIB
"""Room that is left on the disk."""
SPARE_INODES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class StageResult(JsonResult):
    """Result of staging one set of files."""

    task: str
    staged: bool
    """True if samples are read from copies; False: from the original files."""
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
    """Results of staging for all tasks of a configuration."""

    tasks: tuple[StageResult, ...]


def stage_config(run: Run) -> StageReport:
    """Stage the files of every task.

    Raises:
        ConfigError: The settings say never.
    """
    if run.config.data.stage == "never":
        raise ConfigError(
            "data.stage is never, so no copy would be used", hint="Give data.stage=auto, or data.stage=always"
        )
    return StageReport(tasks=tuple(stage_task(part) for part in run.parts()))


def stage_task(run: Run, *, mode: StageMode | None = None) -> StageResult:
    """Copy the files of a task, if its settings and its storage ask for it.

    Args:
        mode: In place of `data.stage`.

    Raises:
        ResourceError: There is no room, with `always`; `auto` says so and reads from where files lie.
        SourceError, StalledError: As `stage_file`.
    """
    begin = time.monotonic()
    config, task = run.config, run.task
    mode = mode or config.data.stage
    files = _files(config.data, task)
    size = sum(file.bytes for file in files)
    folder = stage_folder(run)
    wanted, why = _decide(mode, files, folder)
    left = StageResult(task=task, staged=False, reason=why, files=len(files), bytes=size)
    if not wanted:
        return left
    objects = folder / "objects"
    make_folder(objects, 0o700)
    try:
        _check_room(files, objects)
    except ResourceError as error:
        if mode == "always":
            raise
        log.warning("not staged: %s", error)
        return replace(left, reason=str(error))
    timeout_s = config.precompute.timeouts.read
    copied = sum(stage_file(file, objects, timeout_s=timeout_s) for file in files)
    view = _make_view(files, folder)
    return replace(left, staged=True, copied_bytes=copied, path=view, seconds=time.monotonic() - begin)


def staged_data(run: Run) -> DataConfig:
    """Return the settings of data with paths of the copies, where all of them are there; else as they are."""
    data, task = run.config.data, run.task
    try:
        files = _files(data, task)
    except (ConfigError, SourceError):
        return data  # the source says what is wrong with it
    folder = stage_folder(run)
    view = _view_of(files, folder)
    if not files or not all((view / _below(file)).is_file() for file in files):
        return data
    given = resolve_files(data.root, task) if data.files is None and data.kind == "hdf5" else _given(data)
    moved = tuple(str(view / os.path.abspath(Path(path).expanduser()).lstrip("/")) for path in given)  # noqa: PTH100
    return data.model_copy(update={"files": moved[0] if len(moved) == 1 else moved})


def stage_folder(run: Run) -> Path:
    """Return the folder of the copies: `data.stage_dir`, else next to the caches.

    Raises:
        ConfigError: It is a URL.
    """
    own = run.config.data.stage_dir
    return local_path(own, "data.stage_dir") if own is not None else run.cache_dir / ".staged"


def _given(data: DataConfig) -> Sequence[str | Path]:
    if data.files is None:
        return [data.root]
    return [data.files] if isinstance(data.files, str) else [*data.files]


def _files(data: DataConfig, task: str) -> list[OriginalFile]:
    """Return all files behind the settings, as they are now."""
    if data.kind == "hdf5":
        paths = resolve_files(data.root, task) if data.files is None else find_files(data.files)[1]
    elif data.kind == "arrays":
        paths = [ref.path for one in find_containers([*_given(data)]) for ref in one.files()]
    elif data.kind == "tar":
        paths = find_files([*_given(data)], suffixes=(".tar",), what="tar")[1]
    elif data.kind == "parquet":
        paths = find_files([*_given(data)], suffixes=(".parquet", ".pq"), what="Parquet")[1]
    else:
        raise ConfigError(
            f"data.kind={data.kind} has no files that could be staged", hint="Give data.stage=never"
        )
    return [look_at(Path(os.path.abspath(path.expanduser()))) for path in paths]  # noqa: PTH100 - links stay


def _decide(mode: StageMode, files: Sequence[OriginalFile], folder: Path) -> tuple[bool, str]:
    """Return True if files are to be staged, and the reason."""
    if mode == "never":
        return False, "data.stage=never"
    if mode == "always":
        return True, "data.stage=always"
    far = {mount.point: mount for file in files if (mount := storage_of(file.path)) and mount.network}
    if not far:
        return False, "files are on local storage already"
    near = storage_of(folder)
    if near is not None and near.network:
        return False, f"{folder} is on {near.kind} itself; name local storage with data.stage_dir"
    return True, "files are on " + ", ".join(f"{mount.kind} ({mount.point})" for mount in far.values())


def _check_room(files: Sequence[OriginalFile], objects: Path) -> None:
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


def _below(file: OriginalFile) -> str:
    return str(file.path).lstrip("/")


def _view_of(files: Sequence[OriginalFile], folder: Path) -> Path:
    key = hashlib.sha256("\n".join(file.object for file in files).encode()).hexdigest()[:16]
    return folder.absolute() / "views" / key


def _make_view(files: Sequence[OriginalFile], folder: Path) -> Path:
    """Give every copy the path of its file below the view."""
    view = _view_of(files, folder)
    with explain_disk_errors(folder):
        for file in files:
            place = view / _below(file)
            place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            link_file(folder / "objects" / file.object, place)
    return view


# ----------------------------------------------------------------------------------------------------------
# Remove staged copies that no command would read any more.
#
# A copy is of use as long as the file that it was made of is as it was then: with another size or time the
# file has another copy. A view is of use as long as all of its copies are. What was read or made in the
# last day stays, since a command that is still running may read it; so does what somebody is copying right
# now, and the copy of a file whose whole folder is gone, which looks like storage that is not mounted.


_OBJECT = re.compile(r"[0-9a-f]{32}")
_USED = "used in the last day"


def prune_staged(folder: str | Path, *, dry_run: bool = False, force: bool = False) -> GcReport:
    """Remove staged copies that are of no use, or say which would go, and report what stayed.

    Args:
        folder: As `data.stage_dir`; one that is not there has nothing that could go.
        dry_run: Remove nothing.
        force: Also what was used in the last day.

    Raises:
        SourceError: The folder holds something else than staged copies.
        ReadOnlyError: It cannot be written.
    """
    folder = Path(folder)
    objects, report = folder / "objects", GcReport(cache_dir=str(folder), dry_run=dry_run)
    if not folder.exists():
        return report
    if not objects.is_dir():
        raise SourceError(
            f"{folder} holds no staged copies", hint="Expected the folder that data.stage_dir names"
        )
    report.bytes_before = sum(path.stat().st_size for path in objects.iterdir())
    stale = {path.name: why for path in objects.glob("?" * 32) if (why := _stale(path))}
    going = dict.fromkeys(sorted(_unfinished(objects)), "a copy that was never finished") | stale
    views = {view: _inodes(view.rglob("*")) for view in sorted((folder / "views").glob("*"))}
    # Asked before anything goes: removing one name of a copy counts as a use of the others.
    used = set[int]() if force else _inodes(path for path in folder.rglob("*") if _used(path))
    inodes = {(objects / name).stat().st_ino: why for name, why in stale.items()}
    with explain_disk_errors(folder):
        for view, own in views.items():
            if whys := [why for inode, why in inodes.items() if inode in own]:
                _prune_view(view, whys[0], report, used=not used.isdisjoint(own))
        for name, why in going.items():
            own = _inodes(_files_of(objects, name))
            _prune_copy(objects, name, why, report, used=not used.isdisjoint(own))
    return report


def _stale(copy: Path) -> str | None:
    """Say why a finished copy is of no use; None: it is, or cannot be judged."""
    try:
        path = Path(read_object(copy.with_name(f"{copy.name}.json"))["path"])
    except (OSError, ValueError, KeyError, TypeError):
        return None  # not noted yet: as one that was never finished
    try:
        return None if look_at(path).object == copy.name else f"{path} has changed since"
    except SourceError:
        return f"{path} is gone" if path.parent.is_dir() else None


def _unfinished(objects: Path) -> set[str]:
    """Return names of copies that lack their note, or the copy itself, whatever there is of them."""
    found = (_OBJECT.match(path.name) for path in objects.iterdir() if path.suffix != ".lock")
    names = {one[0] for one in found if one is not None}
    return {
        name for name in names if not (objects / f"{name}.json").exists() or not (objects / name).exists()
    }


def _prune_view(view: Path, why: str, report: GcReport, *, used: bool) -> None:
    if used:
        report.kept.append(GcItem(kind="view", path=str(view), bytes=0, reason=f"{_USED}; {why}"))
        return
    report.removed.append(GcItem(kind="view", path=str(view), bytes=0, reason=why))
    if not report.dry_run:
        shutil.rmtree(view)


def _prune_copy(objects: Path, name: str, why: str, report: GcReport, *, used: bool) -> None:
    files = _files_of(objects, name)
    size = sum(path.stat().st_size for path in files)
    with FileLock(objects / f"{name}.lock", create=False) as lock:
        free = lock.acquire()
        busy = _USED if used else None if free else "being copied now"
        reason = why if busy is None else f"{busy}; {why}"
        item = GcItem(kind="copy", path=str(objects / name), bytes=size, reason=reason)
        (report.removed if busy is None else report.kept).append(item)
        if busy is None and not report.dry_run:
            for path in (*files, lock.path):
                path.unlink(missing_ok=True)


def _files_of(objects: Path, name: str) -> list[Path]:
    """Return the files of a copy; the note first, since a copy without its note is unfinished."""
    found = [objects / f"{name}{ending}" for ending in (".json", "", ".part", ".journal", ".json.part")]
    return [path for path in found if path.exists()]


def _used(path: Path) -> bool:
    """Read, linked or made in the last day; storage with `relatime` notes reads once a day."""
    found = path.stat()
    return time.time() - max(found.st_atime, found.st_ctime) < DAY_S


def _inodes(paths: Iterable[Path]) -> set[int]:
    """Return the inodes below these paths, whatever their names; folders are left out."""
    return {path.stat().st_ino for path in paths if path.is_file()}
