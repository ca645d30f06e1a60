"""A local folder that stands for an address, and what all processes that use it share.

`<root>/.mirror.json` says which address and how large it may be. Every folder below that is not hidden stands
for the one of that name below the address, so that any process that is told a path finds the rest by itself.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal, TypeAlias, cast

from stoker.errors import ConfigError, FormatError, ResourceError
from stoker.runtime.files import make_folder
from stoker.runtime.threads import Pool, map_in_order
from stoker.schema import canonical_json
from stoker.store.catalog import FINGERPRINT
from stoker.store.index import INDEX_FILE
from stoker.store.mirror.blocks import BLOCK_BYTES, USED_FILE, Space, require_holes
from stoker.store.recipe import RECIPE_FILE
from stoker.store.remote import Object, Remote, Retries, is_url, local_path, open_remote, parse_url
from stoker.store.storage import LocalStorage
from stoker.store.strict_json import is_count, read_strict
from stoker.store.use import alone
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


# ----------------------------------------------------------------------------------------------------------
# From an address to the local folder that stands for it.


MIRROR_DIR = Path(".stoker/mirror")
Limit: TypeAlias = "int | Literal['as it is'] | None"


def here(place: str | Path, *, must_exist: bool = True) -> Path:
    """The local path of a place: of an address that of its mirror, of a path itself.

    Raises:
        ConfigError: It is no place at all: empty, or not text.
        FormatError: There is nothing at the address, and `must_exist`.
        StokerError: As `attach`.
    """
    text = str(place) if isinstance(cast("object", place), str | Path) else ""
    if not text or "\0" in text:
        raise ConfigError(f"the path of the cache is {place!r}. Expected a path, as 'data/latent_cache'")
    return attach(place, must_exist=must_exist) if is_url(place) else Path(place)


def attach(
    url: str | Path,
    mirror_dir: str | Path = MIRROR_DIR,
    limit_bytes: Limit = "as it is",
    *,
    must_exist: bool = False,
) -> Path:
    """The local folder that stands for an address, with recipes and indexes as they are there now.

    Args:
        url: Of a folder of caches, of one cache (its folders by fingerprint), or of one fingerprint.
        mirror_dir: Where mirrors are kept, each in a folder of its own.
        limit_bytes: Bytes of shards that are kept here; None: as many as fit; by default as it was, and at
            first None.
        must_exist: Refuse an address at which there is nothing.
    Raises:
        ConfigError: The address is none, or lacks a package; or the limit cannot be kept there.
        FormatError: There is nothing.
        ServiceError, StalledError: The place refuses, or does not answer.
    """
    url = parse_url(url)
    folders, objects = _list(open_remote(url), "")
    if must_exist and not folders and not objects:
        raise FormatError(f"there is no cache at {url}. Check the address, or run precompute")
    depth = _depth(folders, objects)
    top, inside = _split(url, depth)
    root = local_path(mirror_dir, "mirror_dir").absolute() / _folder_name(top)
    make_root(root, top, limit_of(root) if limit_bytes == "as it is" else limit_bytes)
    remote = open_remote(top)
    if depth == 2:
        names = [inside]
    elif depth == 1:
        names = [f"{inside}/{folder}" for folder in folders]
    else:
        below = map_in_order(lambda name: (name, _list(remote, name)[0]), folders, what=f"listing {url}")
        names = [f"{name}/{folder}" for name, found in below for folder in found]
    names = [name for name in names if FINGERPRINT.fullmatch(name.rpartition("/")[2])]
    for _ in map_in_order(lambda name: _bring(root / name), names, what=f"reading what is at {url}"):
        pass
    _remove_gone(root, inside, {*names}, remote)
    (root / inside).mkdir(mode=0o700, parents=True, exist_ok=True)
    return root / inside


def mirrors(mirror_dir: str | Path = MIRROR_DIR) -> Iterator[Path]:
    """The mirrors that are kept in a folder."""
    for marker in sorted(Path(mirror_dir).glob(f"*/{MARKER}")):
        yield marker.parent


def _list(remote: Remote, folder: str) -> tuple[list[str], list[Object]]:
    folders, objects = Retries().run(lambda: remote.list(folder), f"list {remote.url}/{folder}".rstrip("/"))
    return [name for name in folders if not name.startswith(".") and name != "encoders"], objects


def _depth(folders: list[str], objects: list[Object]) -> int:
    """How many folders below the one that holds caches by name."""
    if any(one.name == RECIPE_FILE for one in objects):
        return 2
    return 1 if any(map(FINGERPRINT.fullmatch, folders)) else 0


def _split(url: str, depth: int) -> tuple[str, str]:
    """The address of the folder that holds caches by name, and what is below it."""
    top, inside = url, ""
    for _ in range(depth):
        top, _, last = top.rpartition("/")
        inside = f"{last}/{inside}" if inside else last
    if depth and (top.endswith((":/", "//"))):
        raise ConfigError(f"{url}: caches lie in <folder>/<name>/<fingerprint>, and here a folder is missing")
    return top, inside


def _folder_name(url: str) -> str:
    """A folder's name that says which address it stands for, and differs for each."""
    plain = re.sub(r"[^A-Za-z0-9]+", "-", url).strip("-")[-60:].strip("-")
    return f"{plain}-{hashlib.sha256(url.encode()).hexdigest()[:8]}"


def _bring(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    mirror = LocalStorage(folder).mirror
    assert mirror is not None
    for name in (RECIPE_FILE, INDEX_FILE):
        with suppress(FileNotFoundError):  # it is being filled, or was begun and never was
            mirror.names.fresh(name)


def _remove_gone(root: Path, inside: str, names: set[str], remote: Remote) -> None:
    """Remove what stands for a folder that is not there any more, unless somebody has it open."""
    for recipe in root.glob(f"[!.]*/[!.]*/{RECIPE_FILE}"):
        name = str(recipe.parent.relative_to(root))
        if name in names or not (name == inside or name.startswith(inside and f"{inside}/")):
            continue
        if _is_there(remote, f"{name}/{RECIPE_FILE}"):
            continue  # begun since the list was made
        with alone(recipe.parent) as nobody:
            if nobody:
                shutil.rmtree(recipe.parent, ignore_errors=True)


def _is_there(remote: Remote, name: str) -> bool:
    try:
        Retries().run(lambda: remote.head(name), f"head {remote.url}/{name}")
    except FileNotFoundError:
        return False
    return True
