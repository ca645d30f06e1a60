"""A local folder as `Storage`: files appear whole or not at all, as `runtime/files.py` writes them.

A temporary that nobody holds belongs to somebody dead and is swept. Opening never follows a link and never
waits on a pipe or device. A folder that is a mirror asks the place that it stands for.
"""

from __future__ import annotations

import errno
import functools
import os
import re
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from stoker.errors import CorruptError, FormatError
from stoker.runtime.disk import explained
from stoker.runtime.files import PendingFile, dead_temporaries, sync_folder, write_file
from stoker.units import MIB, format_bytes

if TYPE_CHECKING:
    from stoker.store.cache import Cache
    from stoker.store.mirror.folder import MirrorFolder
    from stoker.store.remote import Expected


# ----------------------------------------------------------------------------------------------------------
# What the store asks of the place that holds its files, and of whoever can fill a gap.
#
# `Storage` is a flat folder of named files (local first, object stores later). `Filler` is how a loader
# asks for records that are missing without knowing who encodes.


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


NOT_A_FILE_ERRNOS = (errno.ELOOP, errno.ENXIO)
"""What opening with `O_NOFOLLOW | O_NONBLOCK` says of a link, and of a pipe or device nobody serves."""
RWF_NOWAIT: int = getattr(os, "RWF_NOWAIT", 0)
"""Reads what needs no wait, or nothing; 0 where the system does not know it."""
MAX_BUFFERS = 1024
"""Buffers that one read fills at most (`IOV_MAX` of every system that Stoker runs on)."""
PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")


def check_name(name: str, *, where: str) -> str:
    """Return `name` if it is a plain file name.

    Raises:
        FormatError: It is absolute, has a parent or hidden part, or characters that the store never uses.
    """
    if not PLAIN_NAME.fullmatch(name) or ".." in name:
        raise FormatError(f"{where} names the file {name!r}, which is not a plain name in this folder")
    return name


def places_name(shard: str) -> str | None:
    """The file that says where the columns of a shard lie, if not in it; None: it is no shard.

    >>> places_name("shard-0a1b-000000.safetensors")
    'places-0a1b-000000.json'
    """
    if not (shard.startswith("shard-") and shard.endswith(".safetensors")):
        return None
    return f"places-{shard[len('shard-') : -len('.safetensors')]}.json"


class LocalFile:
    """A regular file opened for positional reads; closed when nobody refers to it any more."""

    origin: str | None = None
    generation: tuple[int, int] | None = None

    def __init__(self, path: Path) -> None:
        self._fd = -1
        self._path = path
        try:
            # Without O_NONBLOCK, opening a planted FIFO would wait for a writer for ever.
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            if error.errno in NOT_A_FILE_ERRNOS:
                raise FormatError(
                    f"{path} is a link, pipe or device; a cache holds regular files only"
                ) from error
            raise
        self._fd = fd
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise FormatError(f"{path} is a pipe, folder or device; a cache holds regular files only")
        self._size = status.st_size
        self._asks = RWF_NOWAIT != 0
        """Whether the file system reads without waiting; network ones, FUSE and tmpfs do not."""

    @property
    def size(self) -> int:
        """Bytes in the file when it was opened."""
        return self._size

    def read_into(self, offset: int, out: memoryview[Any]) -> None:
        """Fill `out` from `offset`.

        Raises:
            CorruptError: The file ends before `out` is full.
            OSError: Reading failed twice.
        """
        at, retried = 0, False
        while at < len(out):
            try:
                count = os.preadv(self._fd, [out[at:]], offset + at)
            except OSError as error:
                if error.errno != errno.EIO or retried:
                    raise OSError(
                        error.errno, f"{error.strerror} at byte {offset + at}", str(self._path)
                    ) from error
                retried = True
                continue
            if count == 0:
                raise CorruptError(
                    f"{self._path} ends at byte {offset + at}, expected {offset + len(out)}: truncated"
                )
            at += count

    def read_cached(self, offset: int, outs: Sequence[memoryview[Any]]) -> bool:
        """Fill `outs` from `offset` on out of the page cache; False: it lacks some, or cannot be asked."""
        if not self._asks or len(outs) > MAX_BUFFERS:
            return False
        try:
            count = os.preadv(self._fd, outs, offset, RWF_NOWAIT)
        except OSError as error:
            # What is wrong, if anything, is for `read_into` to find out.
            self._asks = error.errno in (errno.EAGAIN, errno.EIO, errno.EINTR)
            return False
        return count == sum(map(len, outs))

    def ahead(self, offset: int, size: int) -> None:
        """Have the system read these bytes ahead: it may have been told not to by itself."""
        if hasattr(os, "posix_fadvise"):
            with suppress(OSError):  # a file system that takes no advice
                os.posix_fadvise(self._fd, offset, size, os.POSIX_FADV_WILLNEED)

    def mend(self, offset: int, size: int) -> bool:
        """Nothing can be had anew: this is where the bytes are."""
        return False

    def fileno(self) -> int:
        """The descriptor."""
        return self._fd

    def close(self) -> None:
        """Release the descriptor; safe to call twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        self.close()


class LocalStorage:
    """The files of one local folder. See `Storage` for what each method promises."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @functools.cached_property
    def mirror(self) -> MirrorFolder | None:
        """The mirror that this folder is; None: it is a plain one, whose files are all there is."""
        from stoker.store.mirror.folder import mirror_of  # which uses this module for what is here

        return mirror_of(self.path)

    def create(self, name: str) -> Pending:
        """Begin a new file called `name`."""
        check_name(name, where=str(self.path))
        return PendingFile(self.path, name) if self.mirror is None else self.mirror.names.create(name)

    def put(self, name: str, data: bytes, *, expected: Expected = "anything") -> None:
        """Write a small file atomically and durably; a `ChangedError` if it is not what was `expected`."""
        if self.mirror is not None:
            self.mirror.names.put(name, data, expected)
        else:
            write_file(self.path / name, data)

    def version(self, name: str) -> Expected:
        """What `put` is to expect if nobody else replaces the file meanwhile. Ask before reading it."""
        return "anything" if self.mirror is None else self.mirror.names.version(name)

    def sizes(self) -> dict[str, int]:
        """Bytes by name of the regular files there are, sorted by name; hidden ones left out."""
        if self.mirror is not None:
            return self.mirror.names.sizes()
        with os.scandir(self.path) as entries:
            found = {
                entry.name: entry.stat(follow_symlinks=False).st_size
                for entry in entries
                if not entry.name.startswith(".") and entry.is_file(follow_symlinks=False)
            }
        return dict(sorted(found.items()))

    def list(self) -> list[str]:
        """Names of the regular files here, sorted."""
        return [*self.sizes()]

    def open(self, name: str) -> OpenFile:
        """Open `name` for positional reads; of a shard that is served in place, also the user's files."""
        places = places_name(check_name(name, where=str(self.path)))
        if self.mirror is not None:
            if places is not None:
                return self.mirror.open(name)
            self.mirror.names.fresh(name)
        file = LocalFile(self.path / name)
        if places is None or not (self.path / places).exists():
            return file
        from stoker.store.in_place import placed_file  # which opens files as this module does

        return placed_file(self, file, places)

    def read(self, name: str, *, limit_bytes: int) -> bytes:
        """All of a small file.

        Raises:
            FormatError: It is larger than `limit_bytes`.
        """
        if self.mirror is not None:
            self.mirror.names.fresh(name)
        file = LocalFile(self.path / name)
        try:
            if file.size > limit_bytes:
                raise FormatError(
                    f"{self.path / name} has {format_bytes(file.size)}, "
                    f"expected {format_bytes(limit_bytes)} at most"
                )
            data = bytearray(file.size)
            file.read_into(0, memoryview(data))
            return bytes(data)
        finally:
            file.close()

    def link(self, other: LocalStorage, name: str) -> None:
        """Take over the file `name` of `other`: a hard link, or a copy where links are not possible."""
        if self.mirror is not None:
            self._copy(other, name)
            return
        try:
            os.link(other.path / name, self.path / name, follow_symlinks=False)
        except FileExistsError:
            return
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP):
                with explained(self.path):
                    raise
            self._copy(other, name)
        sync_folder(self.path)

    def _copy(self, other: LocalStorage, name: str) -> None:
        file, pending = other.open(name), self.create(name)
        piece = memoryview(bytearray(4 * MIB))
        try:
            for offset in range(0, file.size, len(piece)):
                part = piece[: min(len(piece), file.size - offset)]
                file.read_into(offset, part)
                pending.write_at(offset, part)
            pending.commit()
        finally:
            pending.discard()
            file.close()

    def share(self, name: str) -> None:
        """Let others see a small file that was written in place; nothing where they see this folder."""
        if self.mirror is not None:
            self.mirror.names.share(name)

    def remove(self, name: str) -> None:
        """Remove a file; no error where there is none."""
        if self.mirror is not None:
            self.mirror.names.remove(name)
        (self.path / name).unlink(missing_ok=True)

    def sweep(self) -> int:
        """Remove temporaries whose writers are dead; returns how many."""
        return sum(1 for _ in dead_temporaries(self.path, remove=True))
