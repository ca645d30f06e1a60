"""Which files a folder has at its address, and the small ones of them whole, here and there.

The place's own list is the truth. A small file that may change (the index, failures) is asked for again at
each read, at the cost of one request that is answered with nothing where it is the same.
"""

from __future__ import annotations

import hashlib
import logging
import re
from contextlib import suppress
from pathlib import Path

from stoker.errors import StokerError
from stoker.runtime.files import PendingFile, write_file
from stoker.store.mirror.block_map import BLOCK_BYTES
from stoker.store.mirror.place import Place
from stoker.store.mirror.stand import mark_whole, remove_stand
from stoker.store.protocols import SOURCES_FILE, Buffer
from stoker.store.remote import ChangedError, Expected, Object
from stoker.units import KIB

log = logging.getLogger("stoker")
ETAG_PREFIX = ".etag-"
_MD5 = re.compile(r'"?([0-9a-f]{32})"?')
LASTING = ("recipe.json", SOURCES_FILE)
"""Small files that never change under their name; weights neither."""


class Names:
    """The names of one folder. Safe to use from several threads."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self.listed: dict[str, Object] = {}
        """Objects as the last list had them."""

    def sizes(self) -> dict[str, int]:
        """Bytes by name of the objects there are, sorted by name."""
        place = self._place
        _, objects = place.ask("list", "", lambda remote: remote.list(place.name))
        self.listed = {one.name: one for one in objects if not one.name.startswith(".")}
        return {name: one.bytes for name, one in self.listed.items()}

    def fresh(self, name: str) -> str:
        """Have a small file here as it is there; returns its etag.

        Raises:
            FileNotFoundError: There is none.
        """
        place, path = self._place, self._place.path / name
        if name.startswith("."):
            return ""  # claims and the like are of this machine
        if path.exists() and (name in LASTING or name.endswith(".safetensors")):
            return ""
        with place.locked():
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
        """A small file and its etag, fetched twice where the first one came wrong; None: it is as it was."""
        place, answer = self._place, None
        for _ in range(2):
            answer = place.ask("get", name, lambda remote: remote.get(place.key(name), known=known))
            if answer is None or _matches(*answer):
                break
        return answer

    def version(self, name: str) -> Expected:
        """What a put of a file would replace; the copy here is of this version, or of a later one."""
        try:
            return self.fresh(name)
        except FileNotFoundError:
            return None

    def put(self, name: str, data: bytes, expected: Expected) -> None:
        """Put a small file there, then here.

        Raises:
            ChangedError: It is not the version that was expected.
        """
        place = self._place
        with place.locked():
            etag = place.ask("put", name, lambda remote: remote.put(place.key(name), data, expected=expected))
            self._keep(name, data, etag)

    def put_file(self, name: str, path: Path) -> str:
        """Put a file that nobody else writes, as one object; returns its etag."""
        place = self._place
        try:
            return place.ask("put", name, lambda remote: remote.put(place.key(name), path, expected=None))
        except ChangedError:
            # An attempt whose answer was lost had put it.
            found = place.ask("head", name, lambda remote: remote.head(place.key(name)))
            if found.bytes != path.stat().st_size:
                raise
            return found.etag

    def share(self, name: str) -> None:
        """Put a small file as it is here; nobody else writes one of this name."""
        self.put(name, (self._place.path / name).read_bytes(), "anything")

    def rename(self, name: str, new: str) -> None:
        """Give a shard another name there; what was here of it goes."""
        place = self._place
        place.ask("put", new, lambda remote: remote.rename(place.key(name), place.key(new)))
        place.forget(name)

    def remove(self, name: str) -> None:
        """Remove a file there, then here."""
        place = self._place
        place.ask("delete", name, lambda remote: remote.remove(place.key(name)))
        place.forget(name)

    def create(self, name: str) -> MirrorPending:
        """Begin a shard."""
        return MirrorPending(self, self._place, name)

    def _keep(self, name: str, data: bytes, etag: str) -> None:
        write_file(self._place.path / name, data)
        write_file(self._place.path / f"{ETAG_PREFIX}{name}", etag.encode())

    def _etag(self, name: str) -> str:
        with suppress(FileNotFoundError):
            path = self._place.path / f"{ETAG_PREFIX}{name}"
            return path.read_bytes()[:KIB].decode(errors="replace")
        return ""


def _matches(data: bytes, etag: str) -> bool:
    """Whether bytes are those of their etag, where that is their MD5: as a rule, for small objects."""
    found = _MD5.fullmatch(etag)
    return found is None or hashlib.md5(data, usedforsecurity=False).hexdigest() == found[1]


class MirrorPending:
    """A shard being written here; `commit` puts it there, and keeps it here as what is fetched already."""

    def __init__(self, names: Names, place: Place, name: str) -> None:
        self._names, self._place, self._name = names, place, name
        self._pending = PendingFile(place.path, name)

    def write_at(self, offset: int, data: Buffer) -> None:
        """Write all of `data` at `offset`."""
        self._pending.write_at(offset, data)

    def read_at(self, offset: int, size: int) -> bytes:
        """Read back `size` bytes."""
        return self._pending.read_at(offset, size)

    def truncate(self, size: int) -> None:
        """Cut or extend the file to `size` bytes."""
        self._pending.truncate(size)

    def commit(self) -> None:
        """Put the object; it exists for everybody when this returns, and for nobody before."""
        place = self._place
        etag, size = self._names.put_file(self._name, self._pending.path), self._pending.path.stat().st_size
        place.root.counters.add(put_bytes=size)
        try:
            place.root.space.take(size)
            with place.locked():
                remove_stand(place.path, self._name)
                self._pending.show()
                mark_whole(place.path, self._name, block_bytes=BLOCK_BYTES, etag=etag)
            place.root.space.take(0)  # alone it may be more than there is room for
        except (StokerError, OSError) as error:
            log.warning("%s is stored; no copy is kept here: %s", place.url_of(self._name), error)
            self._pending.discard()

    def discard(self) -> None:
        """Remove the temporary; safe to call twice and after `commit`."""
        self._pending.discard()
