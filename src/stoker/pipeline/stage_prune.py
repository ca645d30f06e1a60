"""Remove staged copies that no command would read any more.

A copy is of use as long as the file that it was made of is as it was then: with another size or time the file
has another copy. A view is of use as long as all of its copies are. What was read or made in the last day
stays, since a command that is still running may read it; so does what somebody is copying right now, and the
copy of a file whose whole folder is gone, which looks like storage that is not mounted.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from stoker.errors import SourceError
from stoker.pipeline.stage_copy import look_at
from stoker.runtime.disk import explained
from stoker.runtime.locks import FileLock
from stoker.store.gc import DAY_S, GcItem, GcReport

_OBJECT = re.compile(r"[0-9a-f]{32}")
_USED = "used in the last day"


def prune_staged(folder: str | Path, *, dry_run: bool = False, force: bool = False) -> GcReport:
    """What went from a folder of staged copies, or would go, and what stayed although it is of no use.

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
        raise SourceError(f"{folder} holds no staged copies. Expected the folder that data.stage_dir names")
    report.bytes_before = sum(path.stat().st_size for path in objects.iterdir())
    stale = {path.name: why for path in objects.glob("?" * 32) if (why := _stale(path))}
    going = dict.fromkeys(sorted(_unfinished(objects)), "a copy that was never finished") | stale
    views = {view: _inodes(view.rglob("*")) for view in sorted((folder / "views").glob("*"))}
    # Asked before anything goes: removing one name of a copy counts as a use of the others.
    used = set[int]() if force else _inodes(path for path in folder.rglob("*") if _used(path))
    inodes = {(objects / name).stat().st_ino: why for name, why in stale.items()}
    with explained(folder):
        for view, own in views.items():
            if whys := [why for inode, why in inodes.items() if inode in own]:
                _prune_view(view, whys[0], report, used=not used.isdisjoint(own))
        for name, why in going.items():
            own = _inodes(_files_of(objects, name))
            _prune_copy(objects, name, why, report, used=not used.isdisjoint(own))
    return report


def _stale(copy: Path) -> str | None:
    """Why a finished copy is of no use; None: it is, or cannot be judged."""
    try:
        note: dict[str, Any] = json.loads(copy.with_name(f"{copy.name}.json").read_bytes())
        path = Path(note["path"])
    except (OSError, ValueError, KeyError, TypeError):
        return None  # not noted yet: as one that was never finished
    try:
        return None if look_at(path).object == copy.name else f"{path} has changed since"
    except SourceError:
        return f"{path} is gone" if path.parent.is_dir() else None


def _unfinished(objects: Path) -> set[str]:
    """Names of copies that lack their note, or the copy itself, whatever there is of them."""
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
    """What there is of a copy; the note first, since without it the copy is one that was never finished."""
    found = [objects / f"{name}{ending}" for ending in (".json", "", ".part", ".journal", ".json.part")]
    return [path for path in found if path.exists()]


def _used(path: Path) -> bool:
    """Read, linked or made in the last day; storage with `relatime` notes reads once a day."""
    found = path.stat()
    return time.time() - max(found.st_atime, found.st_ctime) < DAY_S


def _inodes(paths: Iterable[Path]) -> set[int]:
    """What lies under these paths, whatever its names; folders are left out."""
    return {path.stat().st_ino for path in paths if path.is_file()}
