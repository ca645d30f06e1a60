"""Remove what no cache needs any more: superseded shards, dead temporaries, old fingerprints, orphan weights.

Everything that goes is noted with its size and reason; a dry run ends there. Each thing is checked again
before it goes. Other processes see all of it or nothing: a folder is renamed to a hidden name, a shard
leaves the index. What a kill leaves behind, the next run removes.

Without `force` a folder stays that a process has open or has locked, that was used in the last day,
or is the newest complete one of its name. Weights go only once no recipe names them.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import time
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from stoker.errors import (
    ConfigError,
    ConflictError,
    FormatError,
    IncompleteError,
    ResourceError,
    StalledError,
)
from stoker.runtime.disk import explain_disk_errors
from stoker.runtime.files import TEMPORARY_NAME, RegularFile, dead_temporaries, rename, sync_folder
from stoker.runtime.locks import FOLDER_LOCK, lock_folder, lock_holder, try_lock
from stoker.schema import JsonResult
from stoker.store.cache import Cache
from stoker.store.format import DAMAGED, FINGERPRINT, INDEX_FILE, RECIPE_FILE, WEIGHTS_FOLDER, is_shard_name
from stoker.store.index import (
    Index,
    ShardCatalog,
    ShardInfo,
    build_index,
    dump_index,
    known_index,
    load_index,
    load_recipe,
    without_lost,
)
from stoker.store.mirror import MARKER, MirrorRoot
from stoker.store.recipe import Recipe
from stoker.store.remote import ReplacedError
from stoker.store.shard import Shard
from stoker.store.storage import (
    INDEX_WAIT_S,
    Storage,
    UsageLock,
    exclusive_use,
    has_locks,
    idle_seconds,
    open_storage,
    preserve_times,
)
from stoker.units import format_bytes, format_seconds

# ----------------------------------------------------------------------------------------------------------
# What is in a cache folder, for a clean-up: fingerprints with their use, weights, leftovers.


GONE = ".gone-"
"""Prefix of what is being removed."""
GONE_FOLDER = re.compile(rf"{re.escape(GONE)}{FINGERPRINT.pattern}-[0-9a-f]+")
WEIGHTS_NAME = re.compile(rf"({re.escape(GONE)})?[0-9a-f]{{16,64}}\.safetensors")
DAY_S = 86400.0
TWO_DAYS_S = 2 * DAY_S


@dataclass(slots=True, kw_only=True, eq=False)
class ScannedFolder:
    """One fingerprint's folder."""

    path: Path
    linked: bool
    """It is behind a symbolic link, so it is not ours to remove."""
    files: dict[str, int] = field(default_factory=dict[str, int])
    """Bytes by name of every regular file in it."""
    inodes: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    """Device and inode by name: a file may be linked from several folders."""
    unused_s: float = 0.0
    """0 where the folder cannot be looked into."""
    sequence: int | None = None
    """Of its index; None without a sound one."""
    complete: bool = False
    """Every sample is stored or quarantined, and not most of them quarantined: that is a run which failed."""
    weights: str = ""
    """Digest of its encoder's weights, as the recipe names it."""
    broken: str = ""
    """Why its recipe cannot be read; empty where it can."""

    @property
    def name(self) -> str:
        """The cache's name."""
        return self.path.parent.name

    @property
    def bytes(self) -> int:
        """Of all its files."""
        return sum(self.files.values())

    @property
    def unused_text(self) -> str:
        """Time since its last use."""
        return _long(self.unused_s)

    def live_claims(self) -> list[str]:
        """Return the purposes of the locks that a process holds now."""
        names = [name for name in sorted(self.files) if name.startswith(FOLDER_LOCK)]
        return [name.removeprefix(FOLDER_LOCK) for name in names if _is_held(self.path / name)]


def _long(seconds: float) -> str:
    return f"{seconds / DAY_S:.0f} days" if seconds >= TWO_DAYS_S else format_seconds(seconds)


def scan(cache_dir: Path) -> list[ScannedFolder]:
    """Return every fingerprint's folder below `cache_dir`, by name; folders behind links as well.

    Raises:
        FormatError: A folder of caches cannot be listed, so it is unknown which weights they need.
    """
    found: list[ScannedFolder] = []
    now = time.time()
    for parent in sorted(cache_dir.iterdir()):
        if parent.name.startswith(".") or parent.name == WEIGHTS_FOLDER or not parent.is_dir():
            continue
        try:
            paths = sorted(parent.iterdir())
        except PermissionError as error:
            raise FormatError(
                f"{parent} cannot be listed: {error.strerror}",
                hint="Run as somebody who may see every cache in it",
            ) from error
        for path in paths:
            if FINGERPRINT.fullmatch(path.name) and path.is_dir():
                found.append(_look(path, linked=parent.is_symlink() or path.is_symlink(), now=now))
    return found


def _look(path: Path, *, linked: bool, now: float) -> ScannedFolder:
    folder = ScannedFolder(path=path, linked=linked)
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):  # a temporary that has got its name meanwhile
                    if entry.is_file(follow_symlinks=False):
                        status = entry.stat(follow_symlinks=False)
                        folder.files[entry.name] = status.st_size
                        folder.inodes[entry.name] = (status.st_dev, status.st_ino)
        folder.unused_s = idle_seconds(path, now=now)
        recipe = load_recipe(path)
    except (FormatError, OSError) as error:
        folder.broken = str(error)
        return folder
    folder.weights = recipe.weights
    index = known_index(path, recipe)
    if index is not None:
        folder.sequence = index.sequence
        index = without_lost(index, path, folder.files)[0]
        folder.complete = index.complete and 2 * len(index.quarantined) <= recipe.count
    return folder


def _is_held(path: Path) -> bool:
    try:
        with RegularFile(path) as file:
            # A shared lock meets the holder's, and a descriptor that only reads can have it everywhere.
            return not try_lock(file.fileno(), shared=True)
    except (FormatError, OSError):
        return False


def leftovers(cache_dir: Path) -> Iterator[tuple[Path, int]]:
    """Folders whose removal was cut short, with their bytes."""
    for path in sorted(cache_dir.glob(f"*/{GONE}*")):
        linked = path.is_symlink() or path.parent.is_symlink()
        if GONE_FOLDER.fullmatch(path.name) and path.is_dir() and not linked:
            yield path, sum(file.lstat().st_size for file in path.rglob("*") if file.is_file())


def never_begun(folder: ScannedFolder) -> bool:
    """Return True if a kill came between the making of a folder and its recipe."""
    return RECIPE_FILE not in folder.files and all(map(TEMPORARY_NAME.fullmatch, folder.files))


def remove_never_begun(folder: ScannedFolder) -> None:
    """Remove such a folder, unless a process has begun it after all."""
    for _ in dead_temporaries(folder.path, remove=True):
        pass
    with suppress(OSError):  # not empty
        folder.path.rmdir()


def weights_in(cache_dir: Path) -> dict[Path, int]:
    """Return the bytes of each file of weights, those included whose removal was cut short.

    None where `encoders` is a link: other caches may need what is in there.
    """
    folder = cache_dir / WEIGHTS_FOLDER
    if folder.is_symlink():
        return {}
    paths = sorted(path for path in folder.glob("*.safetensors") if WEIGHTS_NAME.fullmatch(path.name))
    return {path: path.stat().st_size for path in paths if path.is_file() and not path.is_symlink()}


def digest_of(weights: Path) -> str:
    """Return the digest that a recipe names a file of weights by."""
    return weights.name.removeprefix(GONE).removesuffix(".safetensors")


def remove_weights(cache_dir: Path, path: Path) -> bool:
    """Remove weights unless a recipe that names them appeared; return True if they went.

    They are renamed away before recipes are read again. A writer stores its recipe first and then looks for
    the weights. So either we see its recipe, or it misses the weights and writes them again.
    """
    plain = path.with_name(f"{digest_of(path)}.safetensors")
    hidden = path.with_name(f"{GONE}{plain.name}")
    with explain_disk_errors(path):
        rename(path, hidden, durable=False)
        if any(folder.broken or folder.weights == plain.stem for folder in scan(cache_dir)):
            rename(hidden, plain, durable=False)
            return False
        hidden.unlink()
    return True


# ----------------------------------------------------------------------------------------------------------
# Shards that serve nothing in the current index, and their removal.
#
# Merging and work done twice leave them. Before one goes, every good record in it is read from where it
# serves now: otherwise a copy that rotted since would turn out to have been the last good one.


def remove_superseded(
    folder: Path,
    *,
    busy: Callable[[], str | None] = lambda: None,
    dry_run: bool,
    force: bool = False,
    damaged: bool = True,
) -> Iterator[tuple[str, int, str | None]]:
    """Remove shards of a folder that serve nothing any more.

    Args:
        folder: A fingerprint's folder.
        busy: Says why nothing may go from it now; asked only if there is something to remove.
        dry_run: Remove nothing.
        force: Remove also while the folder is open.
        damaged: Also those that a repair set aside, once the cache is complete without them.

    Yields:
        Name, bytes, and why it stays; None: it went, or would go.
    """
    view = _view(folder)
    found = {} if view is None else _superseded(folder, view[1])
    if not damaged:
        found = {name: size for name, size in found.items() if is_shard_name(name)}
    why = busy() if found else None
    needed: dict[str, str] = {}
    if why is None and any(map(is_shard_name, found)):
        needed = _still_needed(folder, found)
    going = found.keys() - needed.keys()
    if why is None and going and not dry_run:
        with preserve_times(folder):
            why = _drop(folder, going, force=force)
    for name, size in found.items():
        yield name, size, needed.get(name, why)


def _superseded(folder: Path, index: Index) -> dict[str, int]:
    """Return the bytes of what could go, by name; no record is read."""
    sizes = open_storage(folder).sizes()
    # An index is no proof that what it names are shards.
    idle = [shard.file for shard in index.shards if not len(shard.segments) and is_shard_name(shard.file)]
    found = {file: sizes[file] for file in idle if file in sizes}
    if index.complete:
        aside = [path for path in sorted(folder.glob(f"{DAMAGED}shard-*")) if path.is_file()]
        found |= {path.name: path.lstat().st_size for path in aside}
    return found


def _still_needed(folder: Path, names: Collection[str]) -> dict[str, str]:
    """Return those of the superseded shards that hold the last good copy of a record, each with why."""
    view = _view(folder)
    if view is None:
        return dict.fromkeys(names, "the index was lost meanwhile")
    recipe, index = view
    cache = Cache(folder, recipe, index, use=UsageLock(folder))
    lacking: dict[int, str] = {}
    read: set[int] = set()
    needed: dict[str, str] = {}
    for entry in index.shards:
        if entry.file not in names:
            continue
        for number in _good_numbers(folder, recipe, entry):
            if number not in read:
                read.add(number)
                try:
                    cache[number]
                except (FormatError, IncompleteError, OSError) as error:
                    lacking[number] = str(error)
            if number in lacking:
                needed[entry.file] = (
                    f"it may hold the last good copy of sample {number} ({lacking[number]}). "
                    "Run stoker cache verify --repair"
                )
                break
    return needed


def _drop(folder: Path, names: Collection[str], *, force: bool) -> str | None:
    """Take shards out of the index, then remove them.

    Returns:
        Why nothing was removed: the folder is open, or it changed; None where all went.
    """
    with ExitStack() as stack:
        if not stack.enter_context(exclusive_use(folder)) and not force:
            return "in use since a moment"
        # No waiting: a process that opens the folder meanwhile waits for us.
        if not stack.enter_context(lock_folder(folder, "index")):
            return "somebody writes its index"
        storage = open_storage(folder)
        version, view = storage.version(INDEX_FILE), _view(folder)
        # Asked again under both locks: writers may have changed the index since it was read without them.
        if view is None or not {*names} <= _superseded(folder, view[1]).keys():
            return "its shards changed meanwhile"
        recipe, index = view
        kept = tuple(shard for shard in index.shards if shard.file not in names)
        data = dump_index(replace(index, shards=kept), recipe)
        # Only files that a repair set aside, which no index names.
        if len(kept) == len(index.shards):
            _unlink(storage, names)
            return None
        # The index first: a process that opens the folder now must not find names of files that are gone.
        try:
            storage.put(INDEX_FILE, data, expected=version)
        except ReplacedError:
            return "another machine replaced its index meanwhile"
        except ResourceError:
            # The disk is full, so make room first; that an index names what serves nothing is no harm.
            _unlink(storage, names)
            storage.put(INDEX_FILE, data, expected=version)
        else:
            _unlink(storage, names)
    return None


def _unlink(storage: Storage, names: Collection[str]) -> None:
    with explain_disk_errors(storage.path):
        for name in names:
            storage.remove(name)
        sync_folder(storage.path)


def _view(folder: Path) -> tuple[Recipe, Index] | None:
    """Recipe and index as a writer would make it next; None where there is no sound index."""
    try:
        recipe = load_recipe(folder)
        index = load_index(folder, recipe)
        storage = open_storage(folder)
        listed = {shard.file for shard in index.shards}
        if all(name in listed for name in storage.list() if is_shard_name(name)):
            return recipe, replace(index, generation=index.generation + 1)
        infos = ShardCatalog(storage, recipe).refresh()
        return recipe, build_index(storage, recipe, infos, index)
    except (FormatError, OSError):
        return None


def _good_numbers(folder: Path, recipe: Recipe, entry: ShardInfo) -> list[int]:
    """Return the global numbers of the sound records of a shard; empty if it cannot be read."""
    try:
        shard = Shard(open_storage(folder).open(entry.file), folder / entry.file, recipe.schema)
    except (FormatError, OSError):
        return []
    return (np.delete(shard.numbers(), entry.bad) + recipe.parts[entry.part].offset).tolist()


def _kind_of(name: str) -> str:
    return "shard" if is_shard_name(name) else "damaged"


REASONS = {
    "shard": "its records serve from other shards",
    "damaged": "damaged; its records were encoded again",
}
"""Why what was superseded may go, by kind."""
log = logging.getLogger("stoker")


@dataclass(frozen=True, slots=True, kw_only=True)
class GcPolicy:
    """Limits on fingerprints to keep. With none of the three, only what no process can use any more goes."""

    keep: int | None = None
    """How many of each name stay: complete ones first, then those used last. Alone: all others go."""
    max_bytes: int | None = None
    """Least recently used ones go until the entire folder is not larger."""
    older_than_s: float | None = None
    """Those go that were not used for longer."""
    unprotected: bool = False
    """Do without the protections of folders just used, or newest. What is in use stays."""
    force: bool = False
    """Do without the protections of folders in use, just used, or newest."""

    def __post_init__(self) -> None:
        """Refuse numbers below zero."""
        for name in ("keep", "max_bytes", "older_than_s"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ConfigError(f"{name} is {value}, expected 0 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class GcItem:
    """One thing that goes, or stays although the policy names it."""

    kind: str
    """`fingerprint`, `shard`, `damaged`, `temporary`, `weights`, `copy`, or `leftover` of one cut short."""
    path: str
    bytes: int
    """What its removal sets free; files linked from other folders count nothing."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GcCache:
    """One cache, and what the clean-up decides about it."""

    name: str
    fingerprint: str
    bytes: int
    unused_s: float
    """Seconds since its last use, before the clean-up."""
    removed: bool
    """It went, or would go; else it stays."""
    rule: str
    """The rule that decides that, in words."""


@dataclass(slots=True, kw_only=True)
class GcReport(JsonResult):
    """Things that went, or would go, and things that stayed in spite of the policy."""

    json_keys = (
        "cache_dir", "dry_run", "caches", "removed", "kept", "bytes_before", "bytes_removed", "bytes_left",
        "unseen",
    )  # fmt: skip
    cache_dir: str
    dry_run: bool
    removed: list[GcItem] = field(default_factory=list[GcItem])
    kept: list[GcItem] = field(default_factory=list[GcItem])
    caches: list[GcCache] = field(default_factory=list[GcCache])
    """All caches of the folder, with the rule that removes or keeps each; none for copies of a URL."""
    bytes_before: int = 0
    unseen: str = ""
    """What was left alone because it was not asked for, and how to ask; empty if there is nothing to say."""

    @property
    def bytes_removed(self) -> int:
        """Bytes set free."""
        return sum(item.bytes for item in self.removed)

    @property
    def bytes_left(self) -> int:
        """Bytes of caches and weights afterwards."""
        return self.bytes_before - self.bytes_removed


def collect(cache_dir: str | Path, policy: GcPolicy | None = None, *, dry_run: bool = False) -> GcReport:
    """Remove from a cache folder what `policy` allows and no process uses.

    Args:
        cache_dir: The folder that holds caches by name.
        policy: Which fingerprints may go.
        dry_run: Only list.
    Raises:
        FormatError: There is no such folder, it holds other things and no cache, or is itself a cache.
        ReadOnlyError: Something cannot be removed.
        StalledError: Another process has been cleaning up all the time.
    """
    cache_dir = Path(cache_dir)
    if not cache_dir.is_dir():
        raise FormatError(f"there is no folder {cache_dir}", hint="Name the folder that holds caches by name")
    if (cache_dir / MARKER).exists():
        raise FormatError(
            f"{cache_dir} holds copies of an address, which go by another rule",
            hint="Use stoker cache gc, or from Python stoker.store.gc.clean",
        )
    inside = [cache_dir, *(path for path in cache_dir.iterdir() if FINGERPRINT.fullmatch(path.name))]
    if any((path / RECIPE_FILE).exists() for path in inside):
        raise FormatError(
            f"{cache_dir} is one cache", hint="Name the folder above, which holds caches by name"
        )
    if not scan(cache_dir) and not any(leftovers(cache_dir)) and _holds_others(cache_dir):
        raise FormatError(
            f"{cache_dir} holds no cache: no folder two levels below it has the name of a fingerprint",
            hint="Name the folder that holds caches by name",
        )
    with nullcontext() if dry_run else _cleaning(cache_dir):
        return _Collection(cache_dir, policy or GcPolicy(), dry_run=dry_run).run()


def _holds_others(cache_dir: Path) -> bool:
    """Return True if any folder holds something; those of caches that were removed are empty."""
    visible = (path for path in cache_dir.iterdir() if path.name != WEIGHTS_FOLDER and path.name[0] != ".")
    return any(path.is_dir() and any(path.iterdir()) for path in visible)


def remove_cache(path: str | Path) -> GcReport:
    """Remove one cache, and the weights that no other one needs.

    Args:
        path: Its folder, `CACHE_DIR/NAME/FINGERPRINT`.
    Raises:
        FormatError: It is no cache.
        ConflictError: Somebody has it open, or fills it.
        ReadOnlyError: It cannot be removed.
        StalledError: Another process has been cleaning up all the time.
    """
    path = Path(path)
    cache_dir = path.parent.parent
    with _cleaning(cache_dir):
        return _Collection(cache_dir, GcPolicy(), dry_run=False).remove_one(path)


@contextmanager
def _cleaning(cache_dir: Path) -> Generator[None]:
    """Clean up alone.

    Raises:
        StalledError: Another process does, all the time.
    """
    with lock_folder(cache_dir, "gc", timeout_s=INDEX_WAIT_S) as free:
        if not free:
            raise StalledError(
                f"{cache_dir} has been cleaned up by {lock_holder(cache_dir, 'gc')} for {INDEX_WAIT_S:g} s",
                hint="Run again when it is done",
            )
        yield


class _Collection:
    """One run: garbage, fingerprints, then weights that only those referred to."""

    def __init__(self, cache_dir: Path, policy: GcPolicy, *, dry_run: bool) -> None:
        self._cache_dir, self._policy, self._dry_run = cache_dir, policy, dry_run
        self._folders = scan(cache_dir)
        self._report = GcReport(cache_dir=str(cache_dir), dry_run=dry_run)
        self._links = Counter(inode for folder in self._folders for inode in folder.inodes.values())
        sizes = {folder.inodes[n]: size for folder in self._folders for n, size in folder.files.items()}
        self._weights = weights_in(cache_dir)
        self._report.bytes_before = sum(sizes.values()) + sum(self._weights.values())
        self._verdicts: dict[Path, GcCache] = {}
        for folder in self._folders:
            self._decide(folder, "behind a symbolic link" if folder.linked else "no limit was given")

    def run(self) -> GcReport:
        policy = self._policy
        self._leftovers()
        self._temporaries()
        if policy.older_than_s is not None or policy.max_bytes is None:
            self._fingerprints(self._by_age)
        for folder in self._own():
            self._shards(folder)
        self._orphans()
        if policy.max_bytes is not None:
            self._fingerprints(self._by_size)
        self._report.caches = [self._verdicts[path] for path in sorted(self._verdicts)]
        return self._report

    def _decide(self, folder: ScannedFolder, rule: str, *, removed: bool = False) -> None:
        known = self._verdicts.get(folder.path)
        size = folder.bytes if known is None else known.bytes
        self._verdicts[folder.path] = GcCache(
            name=folder.name,
            fingerprint=folder.path.name,
            bytes=size,
            unused_s=folder.unused_s,
            removed=removed,
            rule=rule,
        )

    def remove_one(self, path: Path) -> GcReport:
        """Remove one unused folder, and the weights that only it needed."""
        folder = next((one for one in self._own() if one.path == path), None)
        if folder is None:
            raise FormatError(f"there is no cache {path}", hint="Name the folder of a cache")
        if why := self._busy(folder) or self._remove(folder):
            raise ConflictError(f"{path} stays: {why}", hint="Wait for the job that uses it, or cancel it")
        self._note(
            "fingerprint", path, sum(self._take(folder, name) for name in [*folder.files]), "asked for"
        )
        self._folders.remove(folder)
        self._orphans()
        return self._report

    def _own(self) -> list[ScannedFolder]:
        return [folder for folder in self._folders if not folder.linked]

    def _leftovers(self) -> None:
        for path, size in leftovers(self._cache_dir):
            self._report.bytes_before += size
            self._note("leftover", path, size, "a removal that was cut short")
            if not self._dry_run:
                shutil.rmtree(path, ignore_errors=True)
        for folder in self._own():
            if never_begun(folder) and folder.unused_s > DAY_S:
                self._folders.remove(folder)
                why = "a kill came before its recipe was written"
                self._decide(folder, why, removed=True)
                self._note("leftover", folder.path, folder.bytes, why)
                if not self._dry_run:
                    remove_never_begun(folder)

    def _temporaries(self) -> None:
        for place in (self._cache_dir, self._cache_dir / WEIGHTS_FOLDER, self._cache_dir / ".statistics"):
            for path, size in dead_temporaries(place, remove=not self._dry_run):
                self._report.bytes_before += size
                self._note("temporary", path, size, "its writer is dead")
        for folder in self._own():
            for path, _ in dead_temporaries(folder.path, remove=not self._dry_run):
                self._note("temporary", path, self._take(folder, path.name), "its writer is dead")

    def _shards(self, folder: ScannedFolder) -> None:
        """Shards that serve nothing any more, unless a process may have an earlier generation open."""
        for name, size, why in remove_superseded(
            folder.path,
            busy=lambda: self._in_use(folder),
            dry_run=self._dry_run,
            force=self._policy.force,
        ):
            kind, path = _kind_of(name), folder.path / name
            if why is None:
                self._note(kind, path, self._take(folder, name), REASONS[kind])
            else:
                self._keep(kind, path, size, why)

    def _fingerprints(self, select: Callable[[ScannedFolder, int], str | None]) -> None:
        """Remove the folders that `select` gives a reason for, the least recently used first."""
        ranked = _ranked(self._folders)
        for folder in sorted(self._own(), key=lambda folder: -folder.unused_s):
            place = ranked[folder.name].index(folder)
            reason, keep = select(folder, place), self._policy.keep
            if reason is None:
                continue
            if keep is not None and place < keep:
                last = f"the last {keep} used" if keep > 1 else "the last one used"
                self._decide(folder, f"{last} of its name (complete ones first)")
                continue
            why = None if self._policy.force else self._protected(folder, ranked[folder.name])
            if why is None and not self._dry_run:
                why = self._remove(folder)
            if why is None:
                size = sum(self._take(folder, name) for name in [*folder.files])
                self._note("fingerprint", folder.path, size, reason)
                self._decide(folder, reason, removed=True)
                self._folders.remove(folder)
                self._orphans()  # its weights count as well, before another one goes for its size
            else:
                self._decide(folder, why)
                self._keep("fingerprint", folder.path, folder.bytes, why)

    def _by_age(self, folder: ScannedFolder, place: int) -> str | None:
        limit_s, keep = self._policy.older_than_s, self._policy.keep
        if limit_s is not None:
            if folder.unused_s > limit_s:
                return f"unused for {folder.unused_text}"
            self._decide(folder, f"used {folder.unused_text} ago, and the limit is {_long(limit_s)}")
            return None
        return None if keep is None else f"number {place + 1} of its name (complete ones first), {keep} stay"

    def _by_size(self, folder: ScannedFolder, _place: int) -> str | None:
        limit, size = self._policy.max_bytes, self._report.bytes_left
        if limit is None:
            return None
        if size <= limit:
            self._decide(folder, f"all that is left has {format_bytes(size)}, at most {format_bytes(limit)}")
            return None
        return f"least recently used; {format_bytes(size)} are more than {format_bytes(limit)}"

    def _protected(self, folder: ScannedFolder, of_its_name: Sequence[ScannedFolder]) -> str | None:
        if not self._policy.unprotected and folder is _newest(of_its_name):
            return "the newest complete one of its name"
        if folder.broken:
            return f"its recipe cannot be read: {folder.broken}"
        if not self._policy.unprotected and folder.unused_s < DAY_S:
            return f"used {folder.unused_text} ago"
        return self._busy(folder)

    def _busy(self, folder: ScannedFolder) -> str | None:
        """Return why a folder is in use; None: it is not."""
        if claims := folder.live_claims():
            return f"claimed ({claims[0]}) by {lock_holder(folder.path, claims[0])}"
        return self._in_use(folder)

    def _in_use(self, folder: ScannedFolder) -> str | None:
        if self._policy.force:
            return None
        with exclusive_use(folder.path) as is_unused:
            if is_unused:
                return None
        if has_locks(folder.path):
            return "in use: a process has it open"
        return (
            "its file system has no locks, so a process may have it open. stoker cache gc --force removes it"
        )

    def _remove(self, folder: ScannedFolder) -> str | None:
        """Rename a folder away and delete it; return why it stays, if a process opened it meanwhile."""
        gone = folder.path.with_name(f"{GONE}{folder.path.name}-{secrets.token_hex(4)}")
        with explain_disk_errors(folder.path):
            with exclusive_use(folder.path) as is_unused:
                if not is_unused and not self._policy.force:
                    return "in use since a moment"
                rename(folder.path, gone, durable=False)
            sync_folder(gone.parent)
            shutil.rmtree(gone, ignore_errors=True)
        return None

    def _orphans(self) -> None:
        """Weights of encoders that no recipe names; none while a recipe cannot be read."""
        if any(folder.broken for folder in self._folders):
            return
        named = {folder.weights for folder in self._folders}
        for path, size in [*self._weights.items()]:
            needed = digest_of(path) in named
            if needed and not path.name.startswith(GONE):
                continue
            del self._weights[path]
            gone = not needed if self._dry_run else remove_weights(self._cache_dir, path)
            if gone:
                self._note("weights", path, size, "no recipe names them")

    def _take(self, folder: ScannedFolder, name: str) -> int:
        """Strike a file from a folder; returns the bytes that this frees, none if it is linked twice."""
        size = folder.files.pop(name, 0)
        inode = folder.inodes.pop(name, (0, 0))
        self._links[inode] -= 1
        return size if self._links[inode] <= 0 else 0

    def _note(self, kind: str, path: Path, size: int, reason: str) -> None:
        self._report.removed.append(GcItem(kind=kind, path=str(path), bytes=size, reason=reason))

    def _keep(self, kind: str, path: Path, size: int, reason: str) -> None:
        item = GcItem(kind=kind, path=str(path), bytes=size, reason=reason)
        if item.path not in {kept.path for kept in self._report.kept}:
            self._report.kept.append(item)


def _newest(folders: Sequence[ScannedFolder]) -> ScannedFolder | None:
    """Return the complete folder that was indexed last, which is what the name alone opens."""
    complete = [folder for folder in folders if folder.complete]
    return max(complete, key=lambda folder: (folder.sequence or 0, folder.path.name), default=None)


def _ranked(folders: Sequence[ScannedFolder]) -> dict[str, list[ScannedFolder]]:
    """Folders by name: complete ones first, then those that were used last.

    A folder that is not complete must not take the place of a complete one among those that are kept. One
    without a sound index is being filled, so it counts as used later.
    """
    ranked: dict[str, list[ScannedFolder]] = {}
    for folder in sorted(
        folders,
        key=lambda f: (f.complete, f.sequence is None, -f.unused_s, f.sequence or 0, f.path.name),
        reverse=True,
    ):
        ranked.setdefault(folder.name, []).append(folder)
    return ranked


# ----------------------------------------------------------------------------------------------------------
# Clean up a mirror: copies here; at the URL only when asked, and only what serves nothing.


def clean(root: Path, policy: GcPolicy, *, dry_run: bool = False, at_address: bool = False) -> GcReport:
    """Give back copies as `policy` says; any of them is fetched again when it is read.

    Args:
        root: The mirror.
        policy: `max_bytes` and `older_than_s` are of copies; with neither, none go.
        dry_run: Only list.
        at_address: Also remove shards at the URL that serve nothing in the index there. Nobody can tell
            whether another machine has an earlier index open, so run it when none has.
    Raises:
        ConfigError: The policy is for complete caches.
        StokerError: The URL does not answer, or may not be written.
    """
    if policy.keep is not None or policy.force:
        raise ConfigError("--keep and --force are for folders of caches; here are copies of an address")
    mirror = MirrorRoot(root)
    report = GcReport(cache_dir=str(root), dry_run=dry_run)
    for recipe in sorted(root.glob(f"[!.]*/[!.]*/{RECIPE_FILE}")) if at_address else ():
        folder = recipe.parent
        for name, size, why in remove_superseded(folder, dry_run=dry_run, damaged=False):
            where = f"{mirror.url}/{folder.relative_to(root)}/{name}"
            item = GcItem(kind="shard", path=where, bytes=size, reason=why or REASONS["shard"])
            (report.kept if why else report.removed).append(item)
    held = kept = mirror.space.held()
    report.bytes_before = held + sum(item.bytes for item in [*report.removed, *report.kept])
    if policy.older_than_s is not None:
        kept = min(kept, mirror.space.held(time.time() - policy.older_than_s))
    if policy.max_bytes is not None:
        kept = min(kept, policy.max_bytes)
    if count := held - kept:
        gone = count if dry_run else mirror.space.free(count)
        reason = f"copies of {mirror.url} that were unused longest"
        report.removed.append(GcItem(kind="copy", path=str(root), bytes=gone, reason=reason))
    if not at_address:
        report.unseen = (
            f"these are copies here; --at-address also removes shards at {mirror.url} that serve nothing"
        )
    return report
