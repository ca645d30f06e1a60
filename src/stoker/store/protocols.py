"""What the store asks of the place that holds its files, and of whoever can fill a gap.

`Storage` is a flat folder of named files (local first, object stores later). `Filler` is how a loader asks
for records that are missing without knowing who encodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from stoker.store.cache import Cache

Buffer: TypeAlias = "bytes | bytearray | memoryview[Any]"

SOURCES_FILE = "sources.jsonl"
"""A cache's list of its source files: name, bytes and digest of each as one JSON line."""


class Pending(Protocol):
    """A file being written under a temporary name; it exists for others only after `commit`."""

    def write_at(self, offset: int, data: Buffer) -> None:
        """Write all of `data` at `offset`, whatever short writes and interrupts the system makes."""
        ...

    def read_at(self, offset: int, size: int) -> bytes:
        """Read back what was written."""
        ...

    def truncate(self, size: int) -> None:
        """Cut or extend the file to `size` bytes."""
        ...

    def commit(self) -> None:
        """Make the file durable, then visible under its name, then make the name durable.

        Raises:
            OSError: The file was not made durable; it is discarded and must be made again.
        """
        ...

    def discard(self) -> None:
        """Remove the temporary; safe to call twice and after `commit`."""
        ...


class OpenFile(Protocol):
    """A file opened for positional reads; safe to use from several threads."""

    @property
    def size(self) -> int:
        """Bytes in the file when it was opened."""
        ...

    @property
    def origin(self) -> str | None:
        """The address that its bytes come from; None: they are here."""
        ...

    @property
    def generation(self) -> tuple[int, int] | None:
        """Another value whenever bytes may have been fetched again; None: they are here."""
        ...

    def read_into(self, offset: int, out: memoryview[Any]) -> None:
        """Fill `out` from `offset`; a short file is a `CorruptError` that names it."""
        ...

    def read_cached(self, offset: int, outs: Sequence[memoryview[Any]]) -> bool:
        """Fill buffers one after another from `offset` on with what needs no wait for storage.

        False: not all of it can be had so, or nobody knows; the buffers may hold anything then.
        """
        ...

    def ahead(self, offset: int, size: int) -> None:
        """Begin to bring bytes near that will be read soon; waits for nothing."""
        ...

    def mend(self, offset: int, size: int) -> bool:
        """Have bytes that do not match their sums come anew at the next read; False: from nowhere."""
        ...

    def fileno(self) -> int:
        """The descriptor, for mapping; -1 where there is none."""
        ...

    def close(self) -> None:
        """Release the file; safe to call twice."""
        ...


class ColumnSink(Protocol):
    """Takes a column that is read in pieces, from the first to the last. Called by the reading thread."""

    def room(self, offset: int, size: int) -> memoryview[Any]:
        """Memory, format `B`, for the `size` bytes from `offset` of the column on."""
        ...

    def filled(self, offset: int, size: int) -> None:
        """What `room` gave last holds its bytes now."""
        ...


class Storage(Protocol):
    """One folder of a cache. Names are plain: no `/`, no `..`, nothing that is a link or a device."""

    def create(self, name: str) -> Pending:
        """Begin a new file called `name`."""
        ...

    def put(self, name: str, data: bytes) -> None:
        """Write a small file atomically, replacing one of that name."""
        ...

    def list(self) -> list[str]:
        """Names of the regular files here, sorted, temporaries left out."""
        ...

    def open(self, name: str) -> OpenFile:
        """Open a file for reading; refuses links, pipes and devices without touching them."""
        ...


class Filler(Protocol):
    """Encodes what is missing. Precompute implements it; a cache handle may carry one."""

    def fill(self, numbers: Sequence[int], deadline_s: float) -> None:
        """Encode and store at least these samples (whole groups) before returning.

        Raises:
            StalledError: `deadline_s` passed.
            MissingRecordError: A sample was quarantined; the message says why.
        """
        ...

    def begin(self) -> Filling:
        """Begin to encode all that is missing, beside this process, block by block (`fill_blocks`)."""
        ...


class Filling(Protocol):
    """A cache that is being filled while others read what is there."""

    def look(self) -> tuple[Cache, NDArray[np.bool_]]:
        """What is stored now, and which samples are settled: stored, or quarantined for good, `(count,)`.

        Raises:
            StokerError: Filling ended with an error; the same at every call.
        """
        ...

    def done(self) -> bool:
        """Whether filling has ended well: the cache is complete and has its index.

        Raises:
            StokerError: As `look`.
        """
        ...

    def wait(self, timeout_s: float) -> None:
        """Wait until more may be there, `timeout_s` at most.

        Raises:
            StalledError: Nothing has been stored for longer than all deadlines together.
        """
        ...

    def forget(self) -> None:
        """Look afresh at which records are damaged; call it when some were mended."""
        ...
