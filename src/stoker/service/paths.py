"""Which files a request may name: those below the roots given at start, reached without a symbolic link.

A path is walked folder by folder, each opened from the one before and never through a link. Links within a
root are refused as well, since where they lead may change later; the roots themselves may be links.

What comes out is a name, and other processes open it later. A folder may have been swapped for a link by
then, so these are confined to the data sets that they work on (`data_paths`): they ask the kernel where each
file is that they have open (`stoker.sources.files.confine_sources`).
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from stoker.errors import ConfigError, PathRefusedError
from stoker.sources.sql.address import parse_address

LONGEST = 4096
"""Characters of a path (PATH_MAX of Linux)."""
_STEP = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN = (
    os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
)  # O_NONBLOCK: a pipe must not wait for a writer


@dataclass(frozen=True, slots=True)
class _Root:
    given: PurePosixPath
    """As the operator wrote it, absolute."""
    real: PurePosixPath


class Roots:
    """The folders below which requests may name files. Read-only: nothing is ever written through it."""

    def __init__(self, roots: Sequence[Path]) -> None:
        """Raises: ConfigError: one is not a folder."""
        self._roots: list[_Root] = []
        for root in roots:
            real = Path(os.path.realpath(root))
            if not real.is_dir():
                raise ConfigError(f"--root {root} is not a folder. Name one that holds data")
            self._roots.append(_Root(PurePosixPath(root.absolute()), PurePosixPath(real)))

    def __str__(self) -> str:
        return ", ".join(str(root.given) for root in self._roots)

    @property
    def places(self) -> tuple[str, ...]:
        """The roots as they were written and, where that is another path, as they really are."""
        both = ((str(root.given), str(root.real)) for root in self._roots)
        return tuple(dict.fromkeys(place for pair in both for place in pair))

    def check(self, path: str) -> Path:
        """The real path of a regular file or a folder below a root.

        Args:
            path: Absolute, or below any of the roots, which are tried in turn.
        Raises:
            PathRefusedError: It is elsewhere, leads through a link, does not exist, or is something else.
        """
        fd, real = self._open_first(path)
        try:
            mode = os.fstat(fd).st_mode
        finally:
            os.close(fd)
        if not stat.S_ISDIR(mode) and not stat.S_ISREG(mode):
            raise PathRefusedError(
                f"{_shown(path)} is neither a file nor a folder. Name a file or a folder with data"
            )
        return real

    def _open_first(self, path: str) -> tuple[int, Path]:
        """Open the path below the first root that has it."""
        places = self._places(_parts(path))
        if not places:
            raise PathRefusedError(
                f"{_shown(path)} is outside the folders that jobs may read ({self}). "
                "Move the data, or start the service with --root"
            )
        for root, inside in places:
            try:
                return _walk(str(root.real), inside), Path(root.real, *inside)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise PathRefusedError(_why(path, error)) from None
        raise PathRefusedError(f"there is no {_shown(path)} below {self}. Name what is there")

    def _places(self, parts: tuple[str, ...]) -> list[tuple[_Root, tuple[str, ...]]]:
        """Roots with the parts of the path below each."""
        if parts[:1] != ("/",):
            return [(root, parts) for root in self._roots]
        found: list[tuple[_Root, tuple[str, ...]]] = []
        for root in self._roots:
            for base in dict.fromkeys((root.given, root.real)):
                if parts[: len(base.parts)] == base.parts:
                    found.append((root, parts[len(base.parts) :]))
        return found


def data_paths(specs: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the files and folders of data sets, as they were checked; rows on a server have none.

    Args:
        specs: Of registered data sets, see `Dataset.spec`.
    """
    found: list[str] = []
    for spec in specs:
        path = str(spec.get("path", ""))
        if "url" in spec:
            address = parse_address(str(spec["url"]))
            path = address.target if address.kind == "sqlite" else ""
        if "make" in spec:  # in the state folder, which only the service writes to; it may be behind links
            path = os.path.realpath(path)
        found += [path] if path else []
    return found


def _parts(path: str) -> tuple[str, ...]:
    """The parts of a path as it was written; `.` and doubled slashes mean nothing.

    Raises:
        PathRefusedError: It is empty or too long, goes up, or has characters that no path needs.
    """
    if not path or len(path) > LONGEST:
        raise PathRefusedError(f"a path of {len(path):,} characters. Expected 1 to {LONGEST:,}")
    if not path.isprintable():  # also lone surrogates, which no file system would take
        raise PathRefusedError(f"{_shown(path)} has characters that cannot be printed. Rename the file")
    if ".." in path.split("/"):
        raise PathRefusedError(f"{_shown(path)} goes up with `..`. Write the path without it")
    parts = PurePosixPath(path).parts
    return ("/", *parts[1:]) if parts[:1] == ("//",) else parts


def _walk(root: str, parts: Sequence[str]) -> int:
    fd = os.open(root, _STEP)
    for place, part in enumerate(parts):
        step = _OPEN if place == len(parts) - 1 else _STEP
        try:
            deeper = os.open(part, step, dir_fd=fd)
        finally:
            os.close(fd)
        fd = deeper
    return fd


def _why(path: str, error: OSError) -> str:
    if isinstance(error, NotADirectoryError) or error.errno == errno.ELOOP:
        return f"{_shown(path)} leads through a symbolic link, or through a file. Name the real path"
    return f"{_shown(path)} cannot be opened: {error.strerror}. Let the service read it, or name another"


def _shown(path: str) -> str:
    return ascii(path[:200])[1:-1]
