"""A folder on shared storage as the place that caches lie in: `file:///mnt/share/caches`."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from stoker.atomic import READ_ONLY_ERRNOS, explained, make_folder
from stoker.errors import FormatError, ReadOnlyError
from stoker.store.claims import INDEX_WAIT_S, claim
from stoker.store.local import LocalFile
from stoker.store.pending import LocalPending
from stoker.store.protocols import Buffer
from stoker.store.remote.protocol import ChangedError, Expected, Object, PassingError
from stoker.units import MIB

PIECE_BYTES = MIB
PASSING_ERRNOS = (errno.EIO, errno.ETIMEDOUT, errno.ESTALE, errno.EAGAIN, errno.ENOTCONN, errno.EHOSTDOWN)
"""What a network file system says while its server is away."""


class FolderRemote:
    """Objects are files: written under a temporary name, durable, then renamed. See `Remote`."""

    def __init__(self, url: str) -> None:
        self._url, self._root = url, Path(url.removeprefix("file://"))

    @property
    def url(self) -> str:
        """Its address."""
        return self._url

    def list(self, folder: str = "") -> tuple[list[str], list[Object]]:
        """Folders and regular files right below `folder`."""
        folders: list[str] = []
        objects: list[Object] = []
        with (
            _passing(),
            suppress(FileNotFoundError, NotADirectoryError),
            os.scandir(self._root / folder) as found,
        ):
            for entry in found:
                if entry.name.startswith("."):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.name)
                elif entry.is_file(follow_symlinks=False):
                    status = entry.stat(follow_symlinks=False)
                    objects.append(Object(name=entry.name, bytes=status.st_size, etag=_etag(status)))
        return sorted(folders), sorted(objects, key=lambda one: one.name)

    def read(self, name: str, begin: int, end: int, *, etag: str, sink: Callable[[Buffer], None]) -> None:
        """Bytes of a file, as `Remote.read`."""
        with self._opened(name) as file:
            if etag and _etag(os.fstat(file.fileno())) != etag:
                raise ChangedError(name)
            for at in range(begin, end, PIECE_BYTES):
                piece = os.pread(file.fileno(), min(PIECE_BYTES, end - at), at)
                sink(piece)
                if len(piece) < min(PIECE_BYTES, end - at):
                    raise PassingError(f"it ended at byte {at + len(piece)}, expected {end}")

    def get(self, name: str, *, known: str = "") -> tuple[bytes, str] | None:
        """A whole small file, as `Remote.get`."""
        with self._opened(name) as file:
            etag = _etag(os.fstat(file.fileno()))
            if known and etag == known:
                return None
            data = bytearray(file.size)
            file.read_into(0, memoryview(data))
            return bytes(data), etag

    def head(self, name: str) -> Object:
        """Size and etag of a file."""
        with _passing():
            status = (self._root / name).lstat()
        return Object(name=name, bytes=status.st_size, etag=_etag(status))

    def put(self, name: str, data: bytes | Path, *, expected: Expected = "anything") -> str:
        """Write a file, whole or not at all; with `expected`, under the folder's claim."""
        path = self._root / name
        with _passing(), explained(self._root):
            make_folder(path.parent, 0o700)
            if expected == "anything":
                return self._write(path, data)
            with claim(path.parent, "put", wait_s=INDEX_WAIT_S) as got:
                if not got:
                    raise PassingError(f"somebody has been writing to {path.parent} for {INDEX_WAIT_S:g} s")
                now = _etag(path.lstat()) if path.exists() else None
                if now != expected:
                    raise ChangedError(name)
                return self._write(path, data)

    def rename(self, name: str, new: str) -> None:
        """Give a file another name."""
        with _passing(), explained(self._root):
            (self._root / name).replace(self._root / new)

    def remove(self, name: str) -> None:
        """Remove a file."""
        with _passing(), explained(self._root):
            (self._root / name).unlink(missing_ok=True)

    @staticmethod
    def _write(path: Path, data: bytes | Path) -> str:
        pending = LocalPending(path.parent, path.name)
        try:
            if isinstance(data, bytes):
                pending.write_at(0, data)
            else:
                with data.open("rb") as file:
                    while piece := file.read(4 * MIB):
                        pending.write_at(file.tell() - len(piece), piece)
            pending.commit()
        finally:
            pending.discard()
        return _etag(path.lstat())

    @contextmanager
    def _opened(self, name: str) -> Generator[LocalFile]:
        with _passing():
            file = LocalFile(self._root / name)
            try:
                yield file
            finally:
                file.close()


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
