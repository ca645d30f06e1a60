"""Rows in a file without a name, mapped by every process that needs them.

The file is unlinked from the start, so nothing can be left behind; readers of the same machine open it
through the descriptor of the process that holds it. Its pages belong to the system: rows take no more memory
than there is.
"""

from __future__ import annotations

import errno
import mmap
import os
import secrets
import tempfile
import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ResourceError
from stoker.units import format_bytes

_TOKEN_BYTES = 16


class GoneError(Exception):
    """The process that holds the rows has ended, or is on another machine."""


class Spill:
    """Rows as bytes; first appended, then sealed, then read by number."""

    def __init__(self, folder: str | None = None) -> None:
        try:
            self._file = tempfile.TemporaryFile(prefix="stoker-rows-", dir=folder)  # noqa: SIM115
        except OSError as error:
            raise ResourceError(
                f"no file for rows in {folder or tempfile.gettempdir()}: {error.strerror}. Give spill_dir="
            ) from error
        weakref.finalize(self, self._file.close)
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._lengths: list[NDArray[np.int64]] = []
        self._pid = os.getpid()
        self._map: mmap.mmap | None = None
        self._offsets: NDArray[np.int64] | None = None
        self.size_bytes = 0
        self._write(self._token)

    def append(self, data: bytes | memoryview, lengths: NDArray[np.int64]) -> None:
        """Add rows.

        Raises:
            ResourceError: The disk is full.
        """
        self._write(data)
        self._lengths.append(lengths)
        self.size_bytes += len(data)

    def seal(self) -> None:
        """End writing; where rows begin is written behind them, for whoever maps the file."""
        lengths = np.concatenate([np.zeros(0, np.int64), *self._lengths])
        offsets = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        self._write(bytes(-(_TOKEN_BYTES + self.size_bytes) % 8))
        self._write(offsets.tobytes())
        self._file.flush()
        self._lengths = []
        self._open(self._file.fileno(), len(lengths))

    def __len__(self) -> int:
        assert self._offsets is not None
        return len(self._offsets) - 1

    def row(self, number: int) -> memoryview:
        """The bytes of one row."""
        assert self._offsets is not None
        assert self._map is not None
        low, high = self._offsets[number] + _TOKEN_BYTES, self._offsets[number + 1] + _TOKEN_BYTES
        return memoryview(self._map)[int(low) : int(high)]

    def some(self, numbers: NDArray[np.int64]) -> list[memoryview]:
        """The bytes of some rows."""
        assert self._offsets is not None
        assert self._map is not None
        lows = (self._offsets[numbers] + _TOKEN_BYTES).tolist()
        highs = (self._offsets[numbers + 1] + _TOKEN_BYTES).tolist()
        whole = memoryview(self._map)
        return [whole[low:high] for low, high in zip(lows, highs, strict=True)]

    def reference(self) -> dict[str, Any]:
        """What another process of this machine needs to map the rows."""
        return {
            "pid": self._pid,
            "fd": self._file.fileno(),
            "token": self._token,
            "rows": len(self),
            "bytes": self.size_bytes,
        }

    @classmethod
    def of(cls, reference: dict[str, Any]) -> Spill:
        """The rows that another process holds.

        Raises:
            GoneError: They are not there any more.
        """
        path = f"/proc/{reference['pid']}/fd/{reference['fd']}"
        spill = cls.__new__(cls)
        try:
            spill._file = open(path, "rb")  # noqa: SIM115, PTH123 - a descriptor, not a path
            weakref.finalize(spill, spill._file.close)
            spill._token, spill._pid = reference["token"], os.getpid()
            spill._lengths, spill.size_bytes = [], reference["bytes"]
            spill._open(spill._file.fileno(), reference["rows"])
        except (OSError, ValueError) as error:
            raise GoneError(path) from error
        return spill

    def close(self) -> None:
        """Give the file back; readers that have mapped it keep it."""
        self._offsets = self._map = None
        self._file.close()

    def _open(self, fd: int, rows: int) -> None:
        """Map the file.

        Raises:
            ValueError: It is another file.
        """
        begin = _TOKEN_BYTES + self.size_bytes + -(_TOKEN_BYTES + self.size_bytes) % 8
        size = begin + 8 * (rows + 1)
        if os.fstat(fd).st_size != size:
            raise ValueError("another file")
        mapped = mmap.mmap(fd, size, access=mmap.ACCESS_READ)
        if mapped[:_TOKEN_BYTES] != self._token:
            raise ValueError("another file")
        self._map = mapped
        self._offsets = np.frombuffer(mapped, np.int64, rows + 1, begin)

    def _write(self, data: bytes | memoryview) -> None:
        try:
            self._file.write(data)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            raise ResourceError(
                f"rows of {format_bytes(self.size_bytes + len(data))} and more do not fit in the folder for "
                f"temporary files: {error.strerror}. Give spill_dir= on a larger disk, or read fewer columns"
            ) from error
