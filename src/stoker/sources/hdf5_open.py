"""Open HDF5 files, few at a time, per process, with errors that say what to do.

h5py raises OSError, RuntimeError, KeyError, ValueError or TypeError for the same damaged file, depending
on which bytes are hit; all of them become `SourceError` here and in `hdf5_blocks`.
"""

from __future__ import annotations

import os
import re
import time
import zipfile
import zlib
from collections import OrderedDict
from pathlib import Path
from typing import Any

import h5py  # pyright: ignore[reportMissingTypeStubs]

from stoker.errors import SourceError

FOREIGN_ERRORS = (
    OSError,
    RuntimeError,
    LookupError,
    ValueError,
    TypeError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    SystemError,
    EOFError,
    zipfile.BadZipFile,
    zlib.error,
)
"""What h5py, and zarr of a zip file, may raise for damaged, truncated or locked files: all but a lack of
memory."""

OPEN_FILES = 16
"""Files one copy of a source keeps open. Leaves room under a limit of 64 descriptors."""

_LOCK_ATTEMPTS = 4
_LOCK_WAIT_S = 0.25


def open_file(path: Path) -> Any:
    """An open, read-only `h5py.File`.

    Raises:
        SourceError: Missing, empty, truncated, locked by a writer, or no HDF5 file.
    """
    for attempt in range(_LOCK_ATTEMPTS):
        try:
            # `hdf5_blocks` keeps what is decoded; HDF5's own chunk cache would hold it twice.
            return h5py.File(path, "r", rdcc_nbytes=0)
        except BlockingIOError as error:
            if attempt + 1 == _LOCK_ATTEMPTS:
                raise SourceError(
                    f"{path} is locked by a process that writes it ({error}). Wait until it has finished; if "
                    "nothing writes (some network file systems), set HDF5_USE_FILE_LOCKING=FALSE"
                ) from error
            time.sleep(_LOCK_WAIT_S)
        except FOREIGN_ERRORS as error:
            raise SourceError(_open_message(path, error)) from cause_of(error)
    raise AssertionError("the last attempt returns or raises")


def _open_message(path: Path, error: Exception) -> str:
    text = str(error)
    if isinstance(error, FileNotFoundError) or not path.exists():
        return f"{path} does not exist (any more). Check the path or the mount"
    size = path.stat().st_size
    if "truncated file" in text:
        return f"{path} is truncated at {size:,} bytes ({text}). Copy or download it again"
    if isinstance(error, PermissionError):
        return f"{path} may not be read ({text}). Change its permissions"
    return f"{path} is no readable HDF5 file, {size:,} bytes ({text}). Copy or download it again"


def cause_of(error: Exception) -> Exception:
    """The error itself, or an `OSError` with errno where h5py states one (`errno = 5`) in its text alone.

    By errno a failure that passes (a lock, a lost mount) can be told from a damaged file.
    """
    stated = re.search(r"\berrno = ([1-9]\d*)", str(error))
    if stated is None or (isinstance(error, OSError) and error.errno is not None):
        return error
    clean = OSError(int(stated[1]), str(error))
    clean.__cause__ = error
    return clean


def require_inside(file: Any, name: str, *, where: str) -> None:
    """Refuse a dataset whose bytes are not in `file`: an identity has the content of `file` alone.

    Raises:
        SourceError: It is reached by an external link, virtual, or stored in other files.
    """
    dataset = file[name]
    if dataset.file.filename != file.filename:
        found = f"is an external link into {dataset.file.filename}"
    elif dataset.is_virtual:
        found = (
            f"is virtual, put together from {sorted({part.file_name for part in dataset.virtual_sources()})}"
        )
    elif dataset.external:
        found = f"is stored outside, in {sorted({part[0] for part in dataset.external})}"
    else:
        return
    raise SourceError(
        f"{where}: dataset {name!r} {found}, where a change would go unseen. Copy it into the file "
        "(h5repack), or name the inner file as source"
    )


class FilePool:
    """The few files a source has open; the least recently used is closed first.

    Belongs to one process: after a fork the inherited handles are forgotten, not closed, because HDF5's
    state in the child is a copy of the parent's.
    """

    def __init__(self, limit: int = OPEN_FILES) -> None:
        self._limit = limit
        self._owner = os.getpid()
        self._open: OrderedDict[Path, tuple[Any, dict[str, Any]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def dataset(self, path: Path, name: str, *, keep: bool) -> Any:
        """An open dataset.

        Args:
            path, name: File, and the dataset's path inside it.
            keep: Remember the handle. False for groups per sample, which are too many to keep.

        Raises:
            SourceError: The file cannot be opened or lacks the dataset.
        """
        if self._owner != os.getpid():
            self._open, self._owner = OrderedDict(), os.getpid()
        if path not in self._open:
            while len(self._open) >= self._limit:
                self._open.popitem(last=False)[1][0].close()
            self._open[path] = (open_file(path), {})
        self._open.move_to_end(path)
        file, known = self._open[path]
        if name in known:
            return known[name]
        try:
            found = file[name]
        except FOREIGN_ERRORS as error:
            raise SourceError(
                f"{path}: dataset {name!r} cannot be opened ({error}). Is the file whole, and written by the "
                "same program as the others?"
            ) from cause_of(error)
        if keep:
            known[name] = found
        return found

    def close(self) -> None:
        """Close every file."""
        if self._owner == os.getpid():
            for file, _ in self._open.values():
                file.close()
        self._open.clear()
