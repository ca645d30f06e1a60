"""One folder of caches at an address, and the local folder that stands for it.

Shards are here in part, block by block: `ensure` has what is needed here, `ahead` begins to fetch what will
be, `release` says what may go first.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from stoker.errors import CorruptError
from stoker.store.mirror.block_map import BLOCK_BYTES, BlockMap
from stoker.store.mirror.fetch import Fetcher, Ranges, size_of
from stoker.store.mirror.file import MirrorFile
from stoker.store.mirror.names import Names
from stoker.store.mirror.place import Place
from stoker.store.mirror.root import MirrorRoot, root_of
from stoker.store.mirror.space import MAP_PREFIX
from stoker.store.mirror.stand import Stand, make_stand
from stoker.store.remote import Object
from stoker.store.remote.retries import DEADLINE_S


class MirrorFolder:
    """The folder `name` of a mirror, in this process. Safe to use from several threads."""

    def __init__(self, root: MirrorRoot, name: str) -> None:
        self.root = root
        self.counters = root.counters
        """What all folders of this mirror did, in this process."""
        self._place = Place(root, name)
        self.names = Names(self._place)
        """Which files there are, and small ones whole."""
        self._fetcher = Fetcher(self._place)
        self._stands: WeakValueDictionary[str, Stand] = WeakValueDictionary()
        self._lock = threading.Lock()

    def url_of(self, name: str) -> str:
        """The address of a file; of the folder for an empty name."""
        return self._place.url_of(name).rstrip("/")

    @property
    def url(self) -> str:
        """Its address."""
        return f"{self._place.root.url}/{self._place.name}"

    def open(self, name: str) -> MirrorFile:
        """Open a shard for reading; nothing of it is fetched yet.

        Raises:
            FileNotFoundError: There is no such object.
        """
        return MirrorFile(self._fetcher, self._stand(name))

    def ensure(self, name: str, ranges: Ranges, deadline_s: float = DEADLINE_S) -> None:
        """Have these bytes of a shard here, as far as the mirror's limit allows to keep them.

        Raises:
            StalledError: `deadline_s` passed; what came is kept.
            FileNotFoundError, ServiceError, ResourceError: They cannot be had, or there is no room.
        """
        self._fetcher.fetch(self._stand(name), ranges, deadline_s)

    def ahead(self, name: str, ranges: Ranges) -> int:
        """Begin to fetch bytes that will be needed; returns how many were begun, in whole blocks.

        Fewer than `absent_bytes` means that enough is under way: ask again later. What goes wrong is not
        said: whoever reads those bytes will meet it.
        """
        return self._fetcher.ahead(self._stand(name), ranges)

    def bring(self, name: str, ranges: Ranges) -> bool:
        """As `ahead`, in the thread that calls; whether they came."""
        return self._fetcher.bring(self._stand(name), ranges)

    def rank(self, name: str, used: NDArray[np.uint32]) -> None:
        """Say for each block of a shard how late it goes when there is no room, those with the least first:
        in seconds since 1970, as if it had last been read then.
        """
        with suppress(FileNotFoundError, CorruptError):  # nothing of it is here
            blocks = BlockMap(self._place.path / f"{MAP_PREFIX}{name}")
            if len(used) == blocks.count:
                blocks.used[:] = used

    def absent_bytes(self, name: str, ranges: Ranges) -> int:
        """How many bytes have to be fetched before these are here: whole blocks."""
        stand = self._stand(name)
        return sum(size_of(stand, run) for run in self._fetcher.runs_of(stand, ranges))

    def release(self, name: str, ranges: Ranges) -> None:
        """Say that these bytes will not be needed soon: they go first when there is no room."""
        blocks = self._stand(name).map
        for begin, end in ranges:
            first, last = blocks.blocks(begin, end)
            blocks.used[first:last] = 0

    def _stand(self, name: str) -> Stand:
        listed = self.names.listed.get(name)
        with self._lock:
            stand = self._stands.get(name)
            if stand is not None and _is_of(stand, listed):
                return stand
        stand = self._opened(name, listed) or self._made(name, listed)
        with self._lock:
            self._stands[name] = stand
        return stand

    def _opened(self, name: str, listed: Object | None) -> Stand | None:
        """What is here of a shard, if it is of the version that was listed."""
        with suppress(FileNotFoundError, CorruptError):
            stand = Stand(self._place.path, name)
            if _is_of(stand, listed):
                return stand
        return None

    def _made(self, name: str, listed: Object | None) -> Stand:
        with self._place.locked():
            if (stand := self._opened(name, listed)) is not None:  # another process was quicker
                return stand
            if listed is None:
                found = self._place.ask("head", name, lambda remote: remote.head(self._place.key(name)))
                listed = Object(name=name, bytes=found.bytes, etag=found.etag)
            make_stand(self._place.path, listed, block_bytes=BLOCK_BYTES)
            return Stand(self._place.path, name)


def _is_of(stand: Stand, listed: Object | None) -> bool:
    """Whether what is here is of the version that was listed, as far as that can be told."""
    if listed is None:
        return True
    tags = {stand.map.etag, listed.etag} - {""}
    return stand.map.size == listed.bytes and len(tags) < 2


_folders: dict[tuple[int, str], MirrorFolder] = {}


def mirror_of(path: Path) -> MirrorFolder | None:
    """The mirror that stands behind a cache's local folder; None: it is a plain one."""
    found = root_of(path)
    if found is None:
        return None
    root, name = found
    return _folders.setdefault((id(root), name), MirrorFolder(root, name))
