"""A folder on shared storage as the place that caches lie in: `file:///mnt/share/caches`."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TypeAlias, TypeVar

from stoker.errors import FormatError, ReadOnlyError
from stoker.runtime.disk import READ_ONLY_ERRNOS, explained
from stoker.runtime.files import PendingFile, make_folder
from stoker.runtime.locks import lock_folder
from stoker.runtime.threads import Pool, ending
from stoker.store.local import LocalFile
from stoker.store.protocols import Buffer
from stoker.store.remote.protocol import ChangedError, Expected, Object, PassingError
from stoker.store.use import INDEX_WAIT_S
from stoker.units import MIB

T = TypeVar("T")
Tell: TypeAlias = Callable[[bytes], None]

PIECE_BYTES = MIB
ANSWER_S = 60.0
"""One call that the folder does not answer for so long failed, and is tried again."""
PUT_S = 300.0
"""The same while a file is written: making it durable takes its time."""
PIECES_AHEAD = 8
"""Pieces of a file that may be in memory before the caller has taken them."""
THREADS = 64
"""Calls at a time, those included that were given up and still hang."""
PASSING_ERRNOS = (errno.EIO, errno.ETIMEDOUT, errno.ESTALE, errno.EAGAIN, errno.ENOTCONN, errno.EHOSTDOWN)
"""What a network file system says while its server is away."""


class FolderRemote:
    """Objects are files: written under a temporary name, durable, then renamed. See `Remote`.

    Every call to the system is made by a thread that is left behind when the storage does not answer: a hard
    mount whose server is away holds its callers for ever.
    """

    def __init__(self, url: str) -> None:
        self._url, self._root = url, Path(url.removeprefix("file://"))
        self._pool = Pool(THREADS, "stoker-folder")

    @property
    def url(self) -> str:
        """Its address."""
        return self._url

    def list(self, folder: str = "") -> tuple[list[str], list[Object]]:
        """Folders and regular files right below `folder`."""

        def work(tell: Tell) -> tuple[list[str], list[Object]]:
            folders: list[str] = []
            objects: list[Object] = []
            with suppress(FileNotFoundError, NotADirectoryError), os.scandir(self._root / folder) as found:
                for entry in found:
                    tell(b"")
                    if entry.name.startswith("."):
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.name)
                    elif entry.is_file(follow_symlinks=False):
                        status = entry.stat(follow_symlinks=False)
                        objects.append(Object(name=entry.name, bytes=status.st_size, etag=_etag(status)))
            return sorted(folders), sorted(objects, key=lambda one: one.name)

        return self._answer(work)

    def read(self, name: str, begin: int, end: int, *, etag: str, sink: Callable[[Buffer], None]) -> None:
        """Bytes of a file, as `Remote.read`."""

        def work(tell: Tell) -> None:
            with self._opened(name) as file:
                if etag and _etag(os.fstat(file.fileno())) != etag:
                    raise ChangedError(name)
                for at in range(begin, end, PIECE_BYTES):
                    piece = os.pread(file.fileno(), min(PIECE_BYTES, end - at), at)
                    tell(piece)
                    if len(piece) < min(PIECE_BYTES, end - at):
                        raise PassingError(f"it ended at byte {at + len(piece)}, expected {end}")

        self._answer(work, sink)

    def get(self, name: str, *, known: str = "") -> tuple[bytes, str] | None:
        """A whole small file, as `Remote.get`."""

        def work(_: Tell) -> tuple[bytes, str] | None:
            with self._opened(name) as file:
                etag = _etag(os.fstat(file.fileno()))
                if known and etag == known:
                    return None
                data = bytearray(file.size)
                file.read_into(0, memoryview(data))
                return bytes(data), etag

        return self._answer(work)

    def head(self, name: str) -> Object:
        """Size and etag of a file."""
        status = self._answer(lambda _: (self._root / name).lstat())
        return Object(name=name, bytes=status.st_size, etag=_etag(status))

    def put(self, name: str, data: bytes | Path, *, expected: Expected = "anything") -> str:
        """Write a file, whole or not at all; with `expected`, under the folder's claim."""
        path = self._root / name

        def work(tell: Tell) -> str:
            with explained(self._root):
                make_folder(path.parent, 0o700)
                if expected == "anything":
                    return self._write(path, data, tell)
                with lock_folder(path.parent, "put", timeout_s=INDEX_WAIT_S) as got:
                    if not got:
                        raise PassingError(
                            f"somebody has been writing to {path.parent} for {INDEX_WAIT_S:g} s"
                        )
                    now = _etag(path.lstat()) if path.exists() else None
                    if now != expected:
                        raise ChangedError(name)
                    return self._write(path, data, tell)

        return self._answer(work, silence_s=PUT_S)

    def rename(self, name: str, new: str) -> None:
        """Give a file another name."""

        def work(_: Tell) -> None:
            with explained(self._root):
                (self._root / name).replace(self._root / new)

        self._answer(work)

    def remove(self, name: str) -> None:
        """Remove a file."""

        def work(_: Tell) -> None:
            with explained(self._root):
                (self._root / name).unlink(missing_ok=True)

        self._answer(work)

    def _answer(
        self,
        work: Callable[[Tell], T],
        sink: Callable[[Buffer], None] | None = None,
        silence_s: float | None = None,
    ) -> T:
        """What `work` returns, done by a thread. It calls `tell` as it gets on, with bytes for `sink`.

        Raises:
            PassingError: It told nothing for `silence_s` seconds.
        """
        told: SimpleQueue[bytes | None] = SimpleQueue()
        given_up, room = threading.Event(), threading.Semaphore(PIECES_AHEAD)

        def tell(piece: bytes) -> None:
            # While the interpreter exits, this is the caller's own thread: nobody takes pieces meanwhile.
            while piece and not ending() and not room.acquire(timeout=0.25):
                if given_up.is_set():
                    break
            if given_up.is_set():
                raise _GivenUpError
            told.put(piece)

        def run() -> T:
            try:
                tell(b"")  # it may have waited in line until nobody waits for it any more
                with _passing():
                    return work(tell)
            finally:
                told.put(None)

        limit_s = ANSWER_S if silence_s is None else silence_s
        ticket = self._pool.submit(run)
        try:
            while (piece := told.get(timeout=limit_s)) is not None:
                if piece:
                    room.release()
                    if sink is not None:
                        sink(piece)
        except Empty:
            raise PassingError(f"the folder has not answered for {limit_s:g} s") from None
        finally:
            given_up.set()
        try:
            return ticket.result(limit_s, self._url)
        finally:
            del ticket  # an error keeps this frame, and the ticket keeps the error: a circle

    @staticmethod
    def _write(path: Path, data: bytes | Path, tell: Tell) -> str:
        pending = PendingFile(path.parent, path.name)
        try:
            if isinstance(data, bytes):
                pending.write_at(0, data)
            else:
                with data.open("rb") as file:
                    while piece := file.read(4 * MIB):
                        pending.write_at(file.tell() - len(piece), piece)
                        tell(b"")
            pending.commit()
        finally:
            pending.discard()
        return _etag(path.lstat())

    @contextmanager
    def _opened(self, name: str) -> Generator[LocalFile]:
        file = LocalFile(self._root / name)
        try:
            yield file
        finally:
            file.close()


class _GivenUpError(Exception):
    """Nobody waits for this work any more."""


def _etag(status: os.stat_result) -> str:
    return f"{status.st_ino:x}-{status.st_size:x}-{status.st_mtime_ns:x}"


@contextmanager
def _passing() -> Generator[None]:
    try:
        yield
    except (FormatError, ReadOnlyError):
        raise
    except OSError as error:
        if error.errno in PASSING_ERRNOS:
            raise PassingError(f"{error.strerror} ({error.filename})") from error
        if error.errno in READ_ONLY_ERRNOS:
            raise ReadOnlyError(f"{error.filename} may not be used: {error.strerror}") from error
        raise
