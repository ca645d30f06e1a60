"""Which files a request may name: those below the roots given at start, reached without a symbolic link.

A path is walked folder by folder, each opened from the one before and never through a link. So what was
checked is what is open: nobody can swap a folder for a link between the two. Links within a root are refused
as well, since where they lead may change later; the roots themselves may be links.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from stoker.errors import ConfigError, PathRefusedError

LONGEST = 4096
"""Characters of a path (PATH_MAX of Linux)."""
Kind = Literal["file", "folder"]
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
        """Raises: ConfigError: one is no folder."""
        self._roots: list[_Root] = []
        for root in roots:
            real = Path(os.path.realpath(root))
            if not real.is_dir():
                raise ConfigError(f"--root {root} is no folder. Name one that holds data")
            self._roots.append(_Root(PurePosixPath(root.absolute()), PurePosixPath(real)))

    def __str__(self) -> str:
        return ", ".join(str(root.given) for root in self._roots)

    def check(self, path: str) -> Path:
        """The real path of a regular file or a folder below a root.

        Raises:
            PathRefusedError: It lies elsewhere, leads through a link, is no file or folder, or is not there.
        """
        with self.opened(path) as (_, real):
            return real

    @contextmanager
    def opened(self, path: str, *, kind: Kind | None = None) -> Generator[tuple[int, Path]]:
        """A descriptor that reads the file or folder, and its real path; closed with the block.

        Args:
            path: Absolute, or below any of the roots, which are tried in turn.
            kind: What it must be; None: either.
        Raises:
            PathRefusedError: As `check`.
        """
        fd, real = self._open_first(path)
        try:
            _check_kind(path, os.fstat(fd).st_mode, kind)
            yield fd, real
        finally:
            os.close(fd)

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


def _check_kind(path: str, mode: int, kind: Kind | None) -> None:
    found = (
        "folder" if stat.S_ISDIR(mode) else "file" if stat.S_ISREG(mode) else "neither a file nor a folder"
    )
    if found != kind and (kind is not None or found not in ("file", "folder")):
        raise PathRefusedError(
            f"{_shown(path)} is {found}, expected a {kind or 'file or a folder'}. Name another"
        )


def _why(path: str, error: OSError) -> str:
    if isinstance(error, NotADirectoryError) or error.errno == errno.ELOOP:
        return f"{_shown(path)} leads through a symbolic link, or through a file. Name the real path"
    return f"{_shown(path)} cannot be opened: {error.strerror}. Let the service read it, or name another"


def _shown(path: str) -> str:
    return ascii(path[:200])[1:-1]
