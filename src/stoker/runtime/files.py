"""Files and folders that appear under their name complete or not at all, and survive a power cut.

Everything that writes a result (shards, checkpoints, reports, made-up data) does it here. The order is: write
under a temporary name in the same folder, sync the bytes, rename, sync the folder. Each step needs the one
before: a name must not lead to bytes that are not on the disk, and a rename is durable only with its
folder. A failed fsync is never tried again: the kernel has dropped the pages that it could not write, and the
second call would report success.

| you write | use |
|---|---|
| a small file, from bytes | `write_file` |
| a file or folder by other code, to a path | `replace_atomically` |
| a large file, piece by piece, in a folder that is swept | `PendingFile` |
| a file that must not replace one that is there | `create_file` |
| lines at the end of a file | `append_file` |
| another name for what is there | `rename`, `link_file` |

To read, `RegularFile` opens a file and refuses links, pipes and devices.

A kill leaves a temporary behind, which is never read. Those of `PendingFile` are locked by their writer, so
`dead_temporaries` finds the ones whose writer is dead.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import Any, Literal, Self, TypeAlias

import xxhash

from stoker.errors import CorruptError, DigestError, FormatError, ReadOnlyError, StokerError, TransferError
from stoker.runtime.disk import READ_ONLY_ERRNOS, explain_disk_errors
from stoker.runtime.libc import start_writeback
from stoker.runtime.locks import try_lock
from stoker.units import MIB

NO_FOLDER_ERRNOS = (
    *READ_ONLY_ERRNOS,
    errno.ENOTDIR,
    errno.EEXIST,
    errno.ENOENT,
    errno.ENAMETOOLONG,
    errno.ELOOP,
)
"""Why a folder can never be made where it is asked for: a file is in the way, the file system takes none."""
TEMPORARY = ".tmp-"
"""Prefix of what `PendingFile` writes. Every version of Stoker uses it, so it must never change."""
TEMPORARY_NAME = re.compile(r"\.tmp-[0-9a-f]+-[A-Za-z0-9_.-]+")
"""What is swept: a folder may hold others' files that begin alike."""
NOT_A_FILE_ERRNOS = (errno.ELOOP, errno.ENXIO)
"""What opening with `O_NOFOLLOW | O_NONBLOCK` says of a link, and of a pipe or device without a reader."""
RWF_NOWAIT: int = getattr(os, "RWF_NOWAIT", 0)
"""Reads what needs no wait, or nothing; 0 where the system does not know it."""
MAX_BUFFERS = 1024
"""Buffers that one read fills at most (`IOV_MAX` of every system that Stoker runs on)."""
FLUSH_BYTES = 8 * MIB
"""Bytes after which the kernel is asked to begin writing them out, so that the final fsync is short."""


@contextmanager
def replace_atomically(path: Path) -> Generator[Path]:
    """Yield a temporary path to make a file or a folder of files at; it becomes `path` if the block succeeds.

    Nothing is there yet: open it for writing, or make it a folder. When the block raises, what was made is
    removed and `path` is as it was. A kill leaves a temporary `.<name>.<8 hex>.part`, which nothing reads.

    Raises:
        ResourceError: No space or quota left.
        ReadOnlyError: The place cannot be written.
        OSError: Another failure of the system, as it came.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        with explain_disk_errors(path):
            yield temporary
            publish(temporary, path)
    finally:
        _remove(temporary)


def _remove(path: Path) -> None:
    with suppress(OSError):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def remove_unfinished(folder: Path) -> None:
    """Remove what `replace_atomically` left in a folder when it was killed.

    Nothing tells these temporaries from ones that are being written, so hold the lock that their
    writers hold.
    """
    for temporary in folder.glob(".*.part"):
        _remove(temporary)


def create_file(path: Path, data: bytes, *, mode: int = 0o666) -> bool:
    """Write a small file atomically and durably, unless there is one; returns whether this process made it.

    Args:
        path: Its name.
        data: All of it.
        mode: Permissions, from its first byte on.

    Raises:
        ResourceError: No space or quota left.
        ReadOnlyError: The place cannot be written.
        OSError: Another failure of the system, as it came.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        with explain_disk_errors(path):
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
            with os.fdopen(fd, "wb") as file:
                file.write(data)
            sync_file(temporary)
            try:
                os.link(temporary, path)  # a rename would replace what another process has put there
            except FileExistsError:
                return False
            sync_folder(path.parent)
            return True
    finally:
        _remove(temporary)


def publish(temporary: Path, path: Path) -> None:
    """Make a finished file or folder durable, give it its name, and make the name durable.

    A file replaces a file in one step. Nothing replaces a folder that holds anything: that is an error.
    """
    if temporary.is_dir():
        for file in temporary.iterdir():
            sync_file(file)
    sync_file(temporary)
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
        with explain_disk_errors(path):
            path.mkdir(mode=mode, parents=True, exist_ok=True)
    except OSError as error:
        if isinstance(error, ReadOnlyError) or error.errno not in NO_FOLDER_ERRNOS:
            raise
        raise ReadOnlyError(
            f"{path} cannot be made: {_in_the_way(path, str(error.strerror))}", hint="Choose another folder"
        ) from error
    return path


def _in_the_way(path: Path, why: str) -> str:
    place = next(place for place in (path, *path.parents) if os.path.lexists(place) or place == Path())
    return f"{why} (in {place})" if place.is_dir() else f"{place} is not a folder"


def sync_folder(path: Path) -> None:
    """Make names in a folder durable; errors as `explain_disk_errors`."""
    with explain_disk_errors(path):
        sync_file(path, flags=os.O_DIRECTORY)


def sync_file(file: Path | int, *, flags: int = 0) -> None:
    """Make the bytes of a file durable, given its path or an open descriptor of it."""
    if isinstance(file, int):
        os.fsync(file)
        return
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | flags)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def append_file(path: Path, data: bytes) -> None:
    """Add bytes at the end of a file, which is made if need be, and make them durable.

    A kill may leave the first part of them, so what reads the file has to know a torn end.

    Raises:
        ResourceError: No space or quota left.
        ReadOnlyError: The place cannot be written.
        OSError: Another failure of the system, as it came.
    """
    with explain_disk_errors(path):
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            is_new = not os.fstat(fd).st_size
            while data:
                data = data[os.write(fd, data) :]
            os.fsync(fd)
        finally:
            os.close(fd)
        if is_new:
            sync_folder(path.parent)


def zero_ranges(path: Path, ranges: Iterable[tuple[int, int]]) -> None:
    """Overwrite ranges of a file, each an offset and a number of bytes, with zeros, durably.

    Raises:
        ReadOnlyError, ResourceError, OSError: As `append_file`.
    """
    with explain_disk_errors(path):
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            for offset, size in ranges:
                at = 0
                while at < size:
                    at += os.pwrite(fd, bytes(size - at), offset + at)
            os.fsync(fd)
        finally:
            os.close(fd)


def rename(path: Path, new: Path, *, durable: bool = True) -> None:
    """Give a file or folder another name in its folder.

    Args:
        path: What is there; a `FileNotFoundError` if nothing is.
        new: Its new path. A file there is replaced, a folder that holds anything is not.
        durable: Return only when the name survives a power cut.

    Raises:
        ReadOnlyError, ResourceError, OSError: As `append_file`.
    """
    with explain_disk_errors(path):
        path.replace(new)
        if durable:
            sync_folder(new.parent)


def link_file(path: Path, new: Path) -> bool:
    """Give a file a second name; returns whether this call did, False if there is a file of that name.

    Raises:
        OSError: As it came; `EXDEV`, `EPERM`, `EMLINK` or `ENOTSUP` where the file cannot be linked there.
    """
    try:
        os.link(path, new, follow_symlinks=False)
    except FileExistsError:
        return False
    return True


class RegularFile:
    """A regular file opened for positional reads; closed when nothing refers to it any more.

    Threads may share it. Opening follows no link and waits for no pipe or device.

    Raises:
        FormatError: It is not a regular file.
        OSError: It cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._fd = -1
        self._path = path
        try:
            # Without O_NONBLOCK, opening a planted FIFO would wait for a writer for ever.
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            if error.errno in NOT_A_FILE_ERRNOS:
                raise FormatError(f"{path} is a link, pipe or device, not a regular file") from error
            raise
        self._fd = fd
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise FormatError(f"{path} is a pipe, folder or device, not a regular file")
        self._size = status.st_size
        self._asks = RWF_NOWAIT != 0
        """True if the file system reads without waiting; network ones, FUSE and tmpfs do not."""

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

    def read_all(self) -> bytes:
        """Return all bytes that it had when it was opened; errors as `read_into`."""
        data = bytearray(self._size)
        self.read_into(0, memoryview(data))
        return bytes(data)

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

    def prefetch(self, offset: int, size: int) -> None:
        """Have the system read these bytes ahead: it may have been told not to do so automatically."""
        if hasattr(os, "posix_fadvise"):
            with suppress(OSError):  # a file system that takes no advice
                os.posix_fadvise(self._fd, offset, size, os.POSIX_FADV_WILLNEED)

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._fd

    def close(self) -> None:
        """Release the descriptor; safe to call twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


class PendingFile:
    """A temporary file that `commit` turns into `name`."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self._unflushed = 0
        with explain_disk_errors(folder):
            self._fd, self._temporary = self._begin()

    def _begin(self) -> tuple[int, Path]:
        while True:
            path = self._folder / f"{TEMPORARY}{secrets.token_hex(6)}-{self._name}"
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
            try:
                # Without locks it is unknown whether we are dead, so our file is not swept.
                if try_lock(fd) and os.fstat(fd).st_nlink:
                    return fd, path
            except OSError:
                os.close(fd)
                raise
            os.close(fd)  # a sweeper came between creating and locking: the file is going, make another

    def write_at(self, offset: int, data: bytes | bytearray | memoryview[Any]) -> None:
        """Write all of `data` at `offset`."""
        view = memoryview(data).cast("B")
        with explain_disk_errors(self._folder):
            at = 0
            while at < len(view):
                at += os.pwrite(self._fd, view[at:], offset + at)
        self._unflushed += len(view)
        if self._unflushed >= FLUSH_BYTES:
            self._unflushed = 0
            start_writeback(self._fd)

    def read_at(self, offset: int, size: int) -> bytes:
        """Read back `size` bytes."""
        data = os.pread(self._fd, size, offset)
        if len(data) != size:
            raise OSError(errno.EIO, f"read {len(data)} of {size} bytes back from {self._temporary}")
        return data

    def truncate(self, size: int) -> None:
        """Cut or extend the file to `size` bytes."""
        with explain_disk_errors(self._folder):
            os.ftruncate(self._fd, size)

    @property
    def path(self) -> Path:
        """The temporary."""
        return self._temporary

    def show(self) -> None:
        """Give the file its name without making anything durable: it is a copy that can be had again."""
        with explain_disk_errors(self._folder):
            self._temporary.replace(self._folder / self._name)
        self._close()

    def commit(self) -> None:
        """Make the bytes durable, then the name."""
        try:
            with explain_disk_errors(self._folder):
                publish(self._temporary, self._folder / self._name)
        except BaseException:
            self.discard()
            raise
        self._close()

    def discard(self) -> None:
        """Remove the temporary, or leave it to be swept later; safe to call twice and after `commit`."""
        if self._fd >= 0:
            with suppress(OSError):  # the error that led here is the one to report
                self._temporary.unlink(missing_ok=True)
            self._close()

    def _close(self) -> None:
        # Synced or given up, so an error means nothing; the number is free even then: never close it again.
        fd, self._fd = self._fd, -1
        with suppress(OSError):
            os.close(fd)

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            self.discard()


def write_file(path: Path, data: bytes) -> None:
    """Write a small file atomically and durably, replacing one of that name.

    Raises:
        ResourceError: No space or quota left.
        ReadOnlyError: The place cannot be written.
        OSError: Another failure of the system, as it came.
    """
    pending = PendingFile(path.parent, path.name)
    try:
        pending.write_at(0, data)
        pending.commit()
    finally:
        pending.discard()


def dead_temporaries(folder: Path, *, remove: bool) -> Iterator[tuple[Path, int]]:
    """Yield temporaries of `PendingFile` whose writers are dead, with their bytes.

    On a file system without locks none counts as dead.

    Args:
        folder: Where they are; one that is not there has none.
        remove: Remove each before it is yielded.
    """
    with suppress(FileNotFoundError), os.scandir(folder) as entries:
        for name in sorted(entry.name for entry in entries if TEMPORARY_NAME.fullmatch(entry.name)):
            with suppress(OSError):  # it has got its name meanwhile
                size = _dead_bytes(folder / name, remove=remove)
                if size is not None:
                    yield folder / name, size


def _dead_bytes(path: Path, *, remove: bool) -> int | None:
    """Return the size of a temporary, removed if asked; None: its writer lives, or it is something else."""
    try:
        file = RegularFile(path)
    except FormatError:
        return None
    with file:
        # A shared lock meets the writer's, and a descriptor that only reads can have it everywhere.
        if not try_lock(file.fileno(), shared=True, without_locks=False):
            return None
        if remove:
            path.unlink()
        else:
            path.lstat()
        return file.size


# ----------------------------------------------------------------------------------------------------------
# A file that is not complete yet, `.<name>.part`, and the journal of its sound blocks.
#
# The journal's first line names the content; then there is a line for each block on the disk, with its
# digest. A killed run leaves both: blocks that still match are kept, the rest is cut off. So a resumed
# file is as good as one that came in one go, whether or not a digest of the file was declared.


Algorithm: TypeAlias = Literal["sha256", "sha1", "md5"]
BLOCK_BYTES = 16 * MIB
LOCK_S = 2.0
HEAD = "stoker part 1 "


class PartialFile:
    """Opened by one thread; `abandon` may come from another, and nothing of it is written after that."""

    def __init__(
        self,
        target: Path,
        beat: Callable[[int], None] = lambda _: None,
        *,
        bytes: int | None = None,
        algorithm: Algorithm | None = None,
        digest: str = "",
    ) -> None:
        """Open what is there, or begin again.

        Args:
            target: The name that it gets once it is complete.
            beat: Called with the bytes that were read back so far.
            bytes: Its declared size; None: none was declared.
            algorithm, digest: Its declared digest, in hexadecimal.
        """
        self._target, self._bytes = target, bytes
        self._algorithm: Algorithm | None = algorithm
        self._digest = digest
        self._part, self.journal = paths_of(target)
        self._lock = Lock()
        self._abandoned = self._named = False
        self.at = 0
        """Bytes that are there and right."""
        self.tag = ""
        """Which content they are of."""
        self._lines: list[str] = []
        self._reset_digests()
        with explain_disk_errors(self._part):
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._fd = os.open(self._part, flags, 0o666)
        with suppress(OSError, ValueError):
            self._read_back(beat)
        os.ftruncate(self._fd, self.at)

    def _reset_digests(self) -> None:
        self._whole = None if self._algorithm is None else new_digest(self._algorithm)
        self._block, self._block_bytes = xxhash.xxh3_128(), 0

    def _read_back(self, beat: Callable[[int], None]) -> None:
        head, *lines = self.journal.read_text().splitlines()
        if not head.startswith(HEAD):
            return
        self.tag = head.removeprefix(HEAD)
        for line in lines:
            size, wanted = line.split()
            block = os.pread(self._fd, min(int(size), 2 * BLOCK_BYTES), self.at)
            if len(block) != int(size) or xxhash.xxh3_128_hexdigest(block) != wanted:
                return
            if self._whole is not None:
                self._whole.update(block)
            self._lines.append(line)
            self.at += len(block)
            beat(self.at)

    def begin(self, offset: int, tag: str) -> None:
        """Continue at `offset` with the content that `tag` names; 0 throws away what is there."""
        with self._lock:
            self._check()
            if offset == 0:
                self.at, self._lines = 0, []
                self._reset_digests()
                os.ftruncate(self._fd, 0)
            assert offset == self.at
            self.tag = tag
            self._write_journal()

    def write(self, piece: bytes) -> None:
        """Add what came next.

        Raises:
            ResourceError: No space left; what was journalled stays for the next run.
        """
        with self._lock:
            self._check()
            view, done = memoryview(piece), 0
            with explain_disk_errors(self._part):
                while done < len(piece):
                    done += os.pwrite(self._fd, view[done:], self.at + done)
            self.at += len(piece)
            self._block.update(piece)
            self._block_bytes += len(piece)
            if self._whole is not None:
                self._whole.update(piece)
            if self._block_bytes >= BLOCK_BYTES:
                self._commit_block()

    def _commit_block(self) -> None:
        """Write down that a block is there, once it really is."""
        if not self._block_bytes:
            return
        with explain_disk_errors(self._part):
            os.fsync(self._fd)
            self._lines.append(f"{self._block_bytes} {self._block.hexdigest()}")
            with self.journal.open("a") as journal:  # a torn last line is a block that is fetched again
                journal.write(self._lines[-1] + "\n")
        self._block, self._block_bytes = xxhash.xxh3_128(), 0

    def _write_journal(self) -> None:
        with replace_atomically(self.journal) as temporary:
            temporary.write_text("\n".join([HEAD + self.tag.replace("\n", " "), *self._lines]) + "\n")

    def finish(self) -> None:
        """Compare the file with what was declared, and give it its name.

        Raises:
            TransferError: Size or digest are others; what was fetched is thrown away.
        """
        with self._lock:
            self._check()
            if self._bytes is not None and self.at != self._bytes:
                at = self.at
                self._throw_away()
                raise TransferError(f"has {at:,} bytes, {self._bytes:,} were declared")
            if self._whole is not None and self._whole.hexdigest() != self._digest:
                found = self._whole.hexdigest()
                self._throw_away()
                raise DigestError(f"{self._algorithm} is {found}, declared was {self._digest}")
            with explain_disk_errors(self._target):
                publish(self._part, self._target)
                self.journal.unlink(missing_ok=True)
            self._block_bytes, self._named = 0, True

    def keep(self) -> None:
        """Close it for now; what is there is journalled, so that the next try continues from here."""
        with self._lock:
            if not self._abandoned and not self._named:
                with suppress(OSError, StokerError):
                    self._commit_block()
                    if not self.at:
                        self._part.unlink(missing_ok=True)
                        self.journal.unlink(missing_ok=True)
            self._close()

    def abandon(self) -> bool:
        """Let nothing more be written by the thread that has it; False: it is still writing."""
        free = self._lock.acquire(timeout=LOCK_S)
        self._abandoned = True
        if free:
            self._lock.release()
        return free

    def _check(self) -> None:
        if self._abandoned or self._fd < 0:
            raise TransferError("given up")

    def _throw_away(self) -> None:
        self.at, self._lines = 0, []
        self._reset_digests()
        with suppress(OSError):
            os.ftruncate(self._fd, 0)
            self.journal.unlink(missing_ok=True)

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def new_digest(algorithm: Algorithm) -> Any:
    """Return a digest of `hashlib`; they tell damage from no damage, and need not withstand an attacker."""
    return hashlib.new(algorithm, usedforsecurity=False)


def paths_of(target: Path) -> tuple[Path, Path]:
    """Return the partial file of a file, and its journal."""
    return target.with_name(f".{target.name}.part"), target.with_name(f".{target.name}.part.journal")
