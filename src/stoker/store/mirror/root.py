"""A local folder that stands for an address, and what all processes that use it share.

`<root>/.mirror.json` says which address and how large it may be. Every folder below that is not hidden stands
for the one of that name below the address, so that any process that is told a path finds the rest by itself.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from stoker.errors import FormatError, ResourceError
from stoker.runtime.files import make_folder
from stoker.runtime.threads import Pool
from stoker.schema import canonical_json
from stoker.store.local import LocalStorage
from stoker.store.mirror.block_map import BLOCK_BYTES
from stoker.store.mirror.space import USED_FILE, Space, require_holes
from stoker.store.remote import Remote, open_remote, parse_url
from stoker.store.remote.retries import Retries
from stoker.store.strict_json import is_count, read_strict
from stoker.units import MIB

MARKER = ".mirror.json"
RUN_BLOCKS = 8
"""Blocks that one request asks for at most."""
AT_ONCE = 16
"""Requests of one process at a time that a reader waits for; half as many for what is fetched ahead of need,
beside them, so that it never fills their queue."""
SHARE = 4
"""What is on its way takes at most this part of the limit, one half and the other."""


@dataclass(slots=True)
class Counters:
    """What this process had a mirror do."""

    requests: int = 0
    """Requests for parts of shards, repeated ones included."""
    bytes: int = 0
    """Bytes of shards that came."""
    ahead_bytes: int = 0
    """Those of them that came ahead of need."""
    hits: int = 0
    """Reads that found all of their bytes here."""
    misses: int = 0
    """Reads that had to wait for the place."""
    direct: int = 0
    """Reads that went past the mirror: it is full, or what it held was given back too soon."""
    mended: int = 0
    """Times that bytes here did not match their sums and were fetched again."""
    put_bytes: int = 0
    """Bytes of shards that were written here and put there."""
    wait_s: float = 0.0
    """Seconds that reads waited for the place, all threads together."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, **counts: float) -> None:
        """Count what happened; safe from several threads."""
        with self._lock:
            for name, count in counts.items():
                setattr(self, name, getattr(self, name) + count)


class MirrorRoot:
    """One mirror, in this process."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.url, limit = _read_marker(path)
        self.space = Space(path, limit, self.require)
        self.counters = Counters()
        self.retries = Retries()

    def require(self) -> None:
        """Check that it is still there; nothing is written where somebody has removed it.

        Raises:
            ResourceError: It is not.
        """
        if not (self.path / MARKER).exists():
            raise ResourceError(
                f"{self.path} was removed while it was in use. What it stood for is at {self.url}: open the "
                "cache again. `stoker gc` gives room back without harm to who reads"
            )

    @cached_property
    def remote(self) -> Remote:
        """The place itself; opened when first asked for, in this process."""
        return open_remote(self.url)

    @cached_property
    def run_blocks(self) -> int:
        """Blocks that one request asks for at most: fewer in a small mirror."""
        limit = self.space.limit_bytes
        return RUN_BLOCKS if limit is None else max(1, min(RUN_BLOCKS, limit // (16 * SHARE * BLOCK_BYTES)))

    @cached_property
    def pool(self) -> Pool:
        """Threads that fetch what is needed now."""
        return Pool(self._at_once(AT_ONCE), "stoker-fetch")

    @cached_property
    def ahead_pool(self) -> Pool:
        """Threads that fetch what will be."""
        return Pool(self._at_once(AT_ONCE // 2), "stoker-ahead")

    def _at_once(self, most: int) -> int:
        limit = self.space.limit_bytes
        if limit is None:
            return most
        return max(1, min(most, limit // (SHARE * self.run_blocks * BLOCK_BYTES)))


_roots: dict[tuple[int, Path], MirrorRoot] = {}
_roots_lock = threading.Lock()


def root_of(folder: Path) -> tuple[MirrorRoot, str] | None:
    """The mirror that a cache's folder belongs to, and the folder's name there; None: it is a plain one."""
    folder = folder.absolute()
    for root in (folder.parent, folder.parent.parent):
        name = str(folder.relative_to(root))
        if not name.startswith(".") and (root / MARKER).exists():
            with _roots_lock:
                key = (os.getpid(), root)  # a fork has none of our threads
                if key not in _roots:
                    _roots[key] = MirrorRoot(root)
                return _roots[key], name
    return None


def limit_at(folder: Path) -> int | None:
    """How many bytes are kept here of what is put into a folder, or below it; None: all."""
    found = root_of(folder) or root_of(folder / "name" / "fingerprint")
    return None if found is None else found[0].space.limit_bytes


def address_of(folder: Path) -> str | None:
    """The address that a mirror, or a folder in one, stands for; None: it is a plain folder."""
    folder = folder.absolute()
    if (folder / MARKER).exists():
        return _read_marker(folder)[0]
    found = root_of(folder)
    return None if found is None else f"{found[0].url}/{found[1]}"


def shown(folder: Path) -> str:
    """A folder for messages: its address where it has one, else its path."""
    return address_of(folder) or str(folder)


def make_root(path: Path, url: str, limit_bytes: int | None) -> None:
    """Make a folder stand for an address, or change its limit.

    Raises:
        FormatError: It stands for another address.
        ConfigError: A limit cannot be kept there.
        ReadOnlyError: The folder cannot be made.
    """
    known = _read_marker(path) if (path / MARKER).exists() else None
    if known == (url, limit_bytes):
        return
    if known is not None and known[0] != url:
        raise FormatError(f"{path} stands for {known[0]}, not for {url}. Choose another mirror_dir")
    make_folder(path, 0o700)
    if limit_bytes is not None:
        require_holes(path)
    (path / USED_FILE).touch(mode=0o600)
    text = canonical_json({"format": 1, "limit_bytes": limit_bytes, "url": url})
    LocalStorage(path).put(MARKER, text.encode())
    with _roots_lock:
        if root := _roots.get((os.getpid(), path.absolute())):
            root.space.limit_bytes = limit_bytes


def limit_of(path: Path) -> int | None:
    """How many bytes a mirror may have; None: any number, or there is no mirror yet."""
    return _read_marker(path)[1] if (path / MARKER).exists() else None


def _read_marker(root: Path) -> tuple[str, int | None]:
    """The address that a folder stands for, and its limit."""
    where = root / MARKER
    entries = read_strict(LocalStorage(root).read(MARKER, limit_bytes=MIB), where=str(where))
    url, limit = entries.get("url"), entries.get("limit_bytes")
    if entries.get("format") != 1 or not isinstance(url, str) or not (limit is None or is_count(limit)):
        raise FormatError(f"{where} is not understood. Remove {root}, which is a copy, or upgrade stoker")
    return parse_url(url), limit
