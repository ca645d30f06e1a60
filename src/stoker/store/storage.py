"""The files of one cache folder: on this machine, or at a URL of which a mirror keeps what was read.

`open_storage` gives the one that a path needs. Both write files so that they appear complete or not at all.
A temporary that no process holds was left by one that died, and is swept. Opening never follows a link and
never waits on a pipe or device.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import re
from contextlib import suppress
from pathlib import Path

from stoker.errors import FormatError, StokerError
from stoker.runtime.disk import explain_disk_errors
from stoker.runtime.files import (
    PendingFile,
    RegularFile,
    dead_temporaries,
    link_file,
    rename,
    sync_folder,
    write_file,
)
from stoker.store.format import (
    RECIPE_FILE,
    SOURCES_FILE,
    LocalFile,
    OpenFile,
    PendingWrite,
    check_name,
    is_shard_name,
    places_name,
)
from stoker.store.mirror.blocks import BLOCK_BYTES, mark_complete, remove_block_file
from stoker.store.mirror.folder import MirrorFolder, mirror_of
from stoker.store.places import open_placed
from stoker.store.remote import Expected, ReplacedError
from stoker.units import KIB, MIB, format_bytes

log = logging.getLogger("stoker")
NO_LINK_ERRNOS = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP)
"""What linking says where a file has to be copied."""


class Storage:
    """The files of one local folder. Names are plain: no `/`, no `..`, not a link or a device."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def mirror(self) -> MirrorFolder | None:
        """The mirror that the folder is in; None: its files are all there is."""
        return None

    def create(self, name: str) -> PendingWrite:
        """Begin a new file called `name`."""
        return PendingFile(self.path, check_name(name, where=str(self.path)))

    def put(self, name: str, data: bytes, *, expected: Expected = "anything") -> None:
        """Write a small file atomically and durably, replacing one of that name.

        Raises:
            ReplacedError: What is there is not what was `expected`.
        """
        write_file(self.path / name, data)

    def version(self, name: str) -> Expected:
        """Return what `put` is to expect if no other process replaces the file. Ask before reading it."""
        return "anything"

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each regular file by name, sorted; hidden ones left out."""
        with os.scandir(self.path) as entries:
            found = {
                entry.name: entry.stat(follow_symlinks=False).st_size
                for entry in entries
                if not entry.name.startswith(".") and entry.is_file(follow_symlinks=False)
            }
        return dict(sorted(found.items()))

    def list(self) -> list[str]:
        """Return the names of the regular files, sorted; hidden ones left out."""
        return [*self.sizes()]

    def open(self, name: str) -> OpenFile:
        """Open `name` for positional reads; of a shard that is served in place, also the user's files.

        Raises:
            FormatError: It is a link, pipe or device, which is not touched.
        """
        places = places_name(check_name(name, where=str(self.path)))
        file = LocalFile(self.path / name)
        if places is None or not (self.path / places).exists():
            return file
        return open_placed(file, self.path / places)

    def read(self, name: str, *, limit_bytes: int) -> bytes:
        """Return all of a small file.

        Raises:
            FormatError: It is larger than `limit_bytes`.
        """
        with RegularFile(self.path / name) as file:
            if file.size > limit_bytes:
                raise FormatError(
                    f"{self.path / name} has {format_bytes(file.size)}, "
                    f"expected {format_bytes(limit_bytes)} at most"
                )
            return file.read_all()

    def link(self, other: Storage, name: str) -> None:
        """Take over the file `name` of `other`: a hard link, or a copy where links are not possible."""
        try:
            if not link_file(other.path / name, self.path / name):
                return
        except OSError as error:
            if error.errno not in NO_LINK_ERRNOS:
                with explain_disk_errors(self.path):
                    raise
            self._copy(other, name)
        sync_folder(self.path)

    def _copy(self, other: Storage, name: str) -> None:
        """Copy the file `name` of `other`."""
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
        """Let others see a small file that was written in place; they see this folder already."""

    def rename(self, name: str, new: str) -> None:
        """Give a file another name, which may be hidden; no error if it is missing."""
        with suppress(FileNotFoundError):
            rename(self.path / name, self.path / new)

    def remove(self, name: str) -> None:
        """Remove a file; no error if it is missing."""
        (self.path / name).unlink(missing_ok=True)


class MirrorStorage(Storage):
    """The files of a folder at a URL, and the local folder that stands for it.

    What the URL lists is the truth. A small file that may change (the index, failures) is requested again at
    each read. That costs one request, whose answer is empty if the file is unchanged.
    """

    def __init__(self, path: Path, mirror: MirrorFolder) -> None:
        super().__init__(path)
        self._mirror = mirror

    @property
    def mirror(self) -> MirrorFolder:
        """The mirror that the folder is in."""
        return self._mirror

    def create(self, name: str) -> PendingWrite:
        """Begin a shard."""
        return MirrorPending(self, check_name(name, where=str(self.path)))

    def put(self, name: str, data: bytes, *, expected: Expected = "anything") -> None:
        """Put a small file there, then here; as `Storage.put`."""
        key = self._mirror.key(name)
        with self._mirror.locked():
            etag = self._mirror.ask("put", name, lambda remote: remote.put(key, data, expected=expected))
            self._keep(name, data, etag)

    def put_file(self, name: str, path: Path) -> str:
        """Put a file that no other process writes, as one object; return its etag."""
        mirror = self._mirror
        try:
            return mirror.ask("put", name, lambda remote: remote.put(mirror.key(name), path, expected=None))
        except ReplacedError:
            # An attempt whose answer was lost had put it.
            found = mirror.head(name)
            if found.bytes != path.stat().st_size:
                raise
            return found.etag

    def version(self, name: str) -> Expected:
        """Return what a put of a file would replace; the copy here is of this version, or of a later one."""
        try:
            return self._fresh(name)
        except FileNotFoundError:
            return None

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each object by name, sorted; hidden ones left out."""
        _, objects = self._mirror.ask("list", "", lambda remote: remote.list(self._mirror.name))
        self._mirror.listed = {one.name: one for one in objects if not one.name.startswith(".")}
        return {name: one.bytes for name, one in self._mirror.listed.items()}

    def open(self, name: str) -> OpenFile:
        """Open a file; nothing of a shard is fetched yet."""
        if is_shard_name(check_name(name, where=str(self.path))):
            return self._mirror.open(name)
        self._fresh(name)
        return super().open(name)

    def read(self, name: str, *, limit_bytes: int) -> bytes:
        """Return all of a small file as it is there; as `Storage.read`."""
        self._fresh(name)
        return super().read(name, limit_bytes=limit_bytes)

    def link(self, other: Storage, name: str) -> None:
        """Copy the file `name` of `other`: nothing can be linked to a URL."""
        self._copy(other, name)

    def share(self, name: str) -> None:
        """Put a small file as it is here; no other process writes one of this name."""
        self.put(name, (self.path / name).read_bytes())

    def rename(self, name: str, new: str) -> None:
        """Give a shard another name there; what was here of it goes."""
        mirror = self._mirror
        with suppress(FileNotFoundError):
            mirror.ask("put", new, lambda remote: remote.move(mirror.key(name), mirror.key(new)))
            mirror.forget(name)

    def remove(self, name: str) -> None:
        """Remove a file there, then here."""
        mirror = self._mirror
        mirror.ask("delete", name, lambda remote: remote.remove(mirror.key(name)))
        mirror.forget(name)
        super().remove(name)

    def _fresh(self, name: str) -> str:
        """Have a small file here as it is there; return its etag.

        Raises:
            FileNotFoundError: It is missing.
        """
        path, mirror = self.path / name, self._mirror
        if name.startswith("."):
            return ""  # locks and the like are of this machine
        if path.exists() and (name in (RECIPE_FILE, SOURCES_FILE) or name.endswith(".safetensors")):
            return ""  # it never changes under its name
        with mirror.locked():
            known = self._etag(name) if path.exists() else ""
            try:
                answer = self._get(name, known)
            except FileNotFoundError:
                path.unlink(missing_ok=True)
                raise
            if answer is None:
                return known
            self._keep(name, *answer)
            return answer[1]

    def _get(self, name: str, known: str) -> tuple[bytes, str] | None:
        """Return a small file and its etag, fetched again if it came damaged; None if it has not changed."""
        mirror, answer = self._mirror, None
        for _ in range(2):
            answer = mirror.ask("get", name, lambda remote: remote.get(mirror.key(name), known=known))
            if answer is None or _matches(*answer):
                break
        return answer

    def _keep(self, name: str, data: bytes, etag: str) -> None:
        write_file(self.path / name, data)
        write_file(self.path / f"{ETAG_PREFIX}{name}", etag.encode())

    def _etag(self, name: str) -> str:
        with suppress(FileNotFoundError):
            return (self.path / f"{ETAG_PREFIX}{name}").read_bytes()[:KIB].decode(errors="replace")
        return ""


ETAG_PREFIX = ".etag-"
_MD5 = re.compile(r'"?([0-9a-f]{32})"?')


def _matches(data: bytes, etag: str) -> bool:
    """Return True if bytes are those of their etag, where that is their MD5: as a rule, for small objects."""
    found = _MD5.fullmatch(etag)
    return found is None or hashlib.md5(data, usedforsecurity=False).hexdigest() == found[1]


class MirrorPending:
    """A shard being written here; `commit` puts it there, and keeps it here as what is fetched already."""

    def __init__(self, storage: MirrorStorage, name: str) -> None:
        self._storage, self._name = storage, name
        self._pending = PendingFile(storage.path, name)
        self.write_at, self.read_at = self._pending.write_at, self._pending.read_at
        self.truncate, self.discard = self._pending.truncate, self._pending.discard

    def commit(self) -> None:
        """Put the object; it is visible when this returns, and not before."""
        path, mirror = self._storage.path, self._storage.mirror
        etag, size = self._storage.put_file(self._name, self._pending.path), self._pending.path.stat().st_size
        mirror.counters.add(put_bytes=size)
        try:
            mirror.root.space.take(size)
            with mirror.locked():
                remove_block_file(path, self._name)
                self._pending.show()
                mark_complete(path, self._name, block_bytes=BLOCK_BYTES, etag=etag)
            mirror.root.space.take(0)  # alone it may be more than there is room for
        except (StokerError, OSError) as error:
            log.warning("%s is stored; no copy is kept here: %s", mirror.url_of(self._name), error)
            self._pending.discard()


def open_storage(path: Path) -> Storage:
    """Return the files of a folder: of a mirror those at its URL, else those that are in it."""
    mirror = mirror_of(path)
    return Storage(path) if mirror is None else MirrorStorage(path, mirror)


def sweep(folder: Path) -> int:
    """Remove temporaries whose writers are dead from a folder; return how many."""
    return sum(1 for _ in dead_temporaries(folder, remove=True))
