"""Files and folders that appear under their name whole or not at all, and survive a power cut from then on.

Whatever writes a result (shards, checkpoints, reports, made-up data) does it here: under a temporary name
beside its own, synced, renamed, and the folder synced, since a rename is durable only with its folder.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from stoker.errors import ReadOnlyError
from stoker.runtime.disk import READ_ONLY_ERRNOS, explained

NO_FOLDER_ERRNOS = (
    *READ_ONLY_ERRNOS,
    errno.ENOTDIR,
    errno.EEXIST,
    errno.ENOENT,
    errno.ENAMETOOLONG,
    errno.ELOOP,
)
"""Why a folder can never be made where it is asked for: a file is in the way, the file system takes none."""


@contextmanager
def replacing(path: Path) -> Generator[Path]:
    """A temporary path to make a file or a folder of files at; it becomes `path` when the block ends well.

    Use it with `with replacing(path) as temporary:`. Nothing is there yet: open it for writing, or make it a
    folder. When the block raises, what was made is removed and `path` is as it was. A kill leaves a
    temporary `.<name>.<8 hex>.part` behind, which nobody reads.

    Raises:
        ResourceError: No space or quota left.
        ReadOnlyError: The place cannot be written.
        OSError: Another failure of the system, as it came.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        with explained(path):
            yield temporary
            publish(temporary, path)
    finally:
        with suppress(OSError):
            shutil.rmtree(temporary) if temporary.is_dir() else temporary.unlink(missing_ok=True)


def publish(temporary: Path, path: Path) -> None:
    """Make a finished file or folder durable, give it its name, and make the name durable.

    A file replaces a file in one step. Nothing replaces a folder that holds anything: that is an error.
    """
    if temporary.is_dir():
        for file in temporary.iterdir():
            _sync(file)
    _sync(temporary)
    temporary.replace(path)
    sync_folder(path.parent)


def make_folder(path: Path, mode: int = 0o777) -> Path:
    """Make a folder that a setting names, and those above it, unless it is there.

    Raises:
        ReadOnlyError: None can be made there.
        ResourceError: No space or quota left.
        OSError: Another failure of the system, as it came.
    """
    try:
        with explained(path):
            path.mkdir(mode=mode, parents=True, exist_ok=True)
    except OSError as error:
        if isinstance(error, ReadOnlyError) or error.errno not in NO_FOLDER_ERRNOS:
            raise
        raise ReadOnlyError(
            f"{path} cannot be made: {_in_the_way(path, str(error.strerror))}. Choose another folder"
        ) from error
    return path


def _in_the_way(path: Path, why: str) -> str:
    place = next(place for place in (path, *path.parents) if os.path.lexists(place) or place == Path())
    return f"{why} (in {place})" if place.is_dir() else f"{place} is not a folder"


def sync_folder(path: Path) -> None:
    """Make names in a folder durable; errors as `explained`."""
    with explained(path):
        _sync(path, os.O_DIRECTORY)


def _sync(path: Path, flags: int = 0) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | flags)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
