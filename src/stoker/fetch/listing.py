"""What a wanted folder holds, as the place itself lists it: each file with its size and, where known, digest.

Names of a listing are trusted no more than those of a manifest. Hidden files are passed over.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from stoker.errors import StalledError, StokerError, TransferError
from stoker.fetch.origin import Listed, is_remote, origin_of, shown_source
from stoker.fetch.rclone import list_remote
from stoker.fetch.wanted import Wanted, WantedFolder, check_names
from stoker.runtime.retry import RetryPolicy, retry
from stoker.runtime.threads import ItemClock, call_within

LIST_S = 600.0
"""For one listing; that of a remote may ask for each file."""
Tell = Callable[[str], None]


def expand(
    wanted: Sequence[Wanted | WantedFolder], base: Path, *, tries: int, pause_s: float, tell: Tell
) -> tuple[list[Wanted], dict[WantedFolder, StokerError]]:
    """All files that are wanted, folders listed; and why a folder could not be.

    Args:
        base: Folder that paths are relative to.
        tell: Gets a line for each try that failed.
    """
    files: list[Wanted] = []
    failed: dict[WantedFolder, StokerError] = {}
    for one in wanted:
        if isinstance(one, Wanted):
            files.append(one)
            continue
        try:
            files += _listed(one, base, tries, pause_s, tell)
        except StokerError as error:
            failed[one] = error
    check_names(files)
    return files, failed


def _listed(one: WantedFolder, base: Path, tries: int, pause_s: float, tell: Tell) -> list[Wanted]:
    return retry(
        lambda: _checked(one, _list(one.source, base)),
        is_passing,
        RetryPolicy(first_s=pause_s, attempts=tries),
        on_retry=lambda failure: tell(f"{one.name}: {failure.error}; trying again"),
    )


def is_passing(error: Exception) -> bool:
    """Return whether another try may help after an error."""
    return isinstance(error, StalledError) or (isinstance(error, TransferError) and error.passing)


def _checked(one: WantedFolder, found: list[Listed]) -> list[Wanted]:
    """The files that are meant, by name.

    Raises:
        TransferError: There are none, or another number than was declared.
    """
    meant = [
        file
        for file in found
        if not any(part.startswith(".") for part in file.name.split("/"))
        and (one.match is None or PurePosixPath(file.name).match(one.match))
    ]
    which = "" if one.match is None else f" that match {one.match}"
    if not meant or one.count not in (None, len(meant)):
        expected = "at least one" if one.count is None else f"{one.count:,}"
        raise TransferError(
            f"{shown_source(one.source)} has {len(meant):,} files{which}, expected {expected} "
            f"({len(found):,} files in all)"
        )
    prefix = one.name.removeprefix("./")
    return [
        Wanted(
            name=prefix + file.name,
            source=_below(one.source, file.name),
            bytes=file.bytes,
            algorithm=file.algorithm,
            digest=file.digest,
        )
        for file in sorted(meant, key=lambda file: file.name)
    ]


def _below(source: str, name: str) -> str:
    return source + name if source.endswith(("/", ":")) else f"{source}/{name}"


def _list(source: str, base: Path) -> list[Listed]:
    origin_of(source, base)  # refuses what carries a secret
    if is_remote(source):
        return list_remote(source, LIST_S)
    if "://" in source and not source.startswith("file://"):
        raise TransferError(
            f"{shown_source(source)}: web servers list no folders. Name the files, in a manifest: "
            '{"files": {name: {"from": "https://...", "sha256": "..."}}}'
        )
    top = Path(urlsplit(source).path) if "://" in source else base / Path(source).expanduser()
    clock = ItemClock()
    return call_within(
        LIST_S,
        lambda: list(_walk(top, clock.begin)),
        f"listing {top}",
        hint="Is the mount reachable?",
        clock=clock,
    )


def _walk(top: Path, begin: Callable[[int], None]) -> Iterator[Listed]:
    """Regular files below a folder; links to files count, links to folders are not followed."""
    if not top.is_dir():
        raise TransferError(f"{top} is no folder")

    def fail(error: OSError) -> None:
        raise TransferError(f"{error.filename}: {error.strerror}", passing=True) from error

    for number, (folder, _, names) in enumerate(os.walk(top, onerror=fail)):
        begin(number)
        for name in names:
            path = Path(folder, name)
            try:
                found = path.stat()
            except OSError as error:
                raise TransferError(f"{path}: {error.strerror}. Remove it, or fix it") from error
            if stat.S_ISREG(found.st_mode):
                yield Listed(name=path.relative_to(top).as_posix(), bytes=found.st_size)
