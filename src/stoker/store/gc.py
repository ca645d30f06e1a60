"""Remove what no cache needs any more: superseded shards, dead temporaries, old fingerprints, orphan weights.

Everything that goes is noted with its size and reason; a dry run ends there. Each thing is looked at again
before it goes, and goes so that others see it whole or not at all: a folder is renamed to a hidden name, a
shard leaves the index. What a kill leaves behind, the next run removes.

Without `force` a folder stays that somebody has open, that has a live claim, that was used in the last day,
or is the newest complete one of its name. Weights go only once no recipe names them.
"""

from __future__ import annotations

import logging
import secrets
import shutil
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from stoker.errors import ConfigError, Conflict, FormatError, StalledError
from stoker.runtime.disk import explained
from stoker.runtime.files import dead_temporaries, sync_folder
from stoker.runtime.locks import lock_folder, lock_holder
from stoker.schema import Json
from stoker.store.adopt import FINGERPRINT
from stoker.store.gc_scan import (
    GONE,
    WEIGHTS,
    FoundFolder,
    digest_of,
    leftovers,
    never_begun,
    remove_never_begun,
    remove_weights,
    scan,
    weights_in,
)
from stoker.store.mirror.root import MARKER
from stoker.store.recipe import RECIPE_FILE
from stoker.store.superseded import drop_superseded, find_superseded, reasons, still_needed
from stoker.store.use import INDEX_WAIT_S, alone, unnoted
from stoker.units import format_bytes

log = logging.getLogger("stoker")
DAY_S = 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GcPolicy:
    """Which fingerprints may go. With none of the three, none: only what nobody can use any more."""

    keep: int | None = None
    """How many of each name stay: complete ones first, then those used last. Alone: all others go."""
    max_bytes: int | None = None
    """Least recently used ones go until the whole folder is not larger."""
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
    """What its removal sets free; files linked from elsewhere count nothing."""
    reason: str


@dataclass(slots=True, kw_only=True)
class GcReport:
    """What went, or would go, and what stayed in spite of the policy."""

    cache_dir: str
    dry_run: bool
    removed: list[GcItem] = field(default_factory=list[GcItem])
    kept: list[GcItem] = field(default_factory=list[GcItem])
    bytes_before: int = 0
    unseen: str = ""
    """What was left alone because nobody asked, and how to ask; empty where there is nothing to say."""

    @property
    def bytes_removed(self) -> int:
        """Bytes set free."""
        return sum(item.bytes for item in self.removed)

    @property
    def bytes_left(self) -> int:
        """Bytes of caches and weights afterwards."""
        return self.bytes_before - self.bytes_removed

    def to_json(self) -> dict[str, Json]:
        """The keys that scripts rely on."""
        return {
            "cache_dir": self.cache_dir,
            "dry_run": self.dry_run,
            "removed": [_json(item) for item in self.removed],
            "kept": [_json(item) for item in self.kept],
            "bytes_before": self.bytes_before,
            "bytes_removed": self.bytes_removed,
            "bytes_left": self.bytes_left,
            "unseen": self.unseen,
        }


def _json(item: GcItem) -> dict[str, Json]:
    return {"kind": item.kind, "path": item.path, "bytes": item.bytes, "reason": item.reason}


def collect(cache_dir: str | Path, policy: GcPolicy | None = None, *, dry_run: bool = False) -> GcReport:
    """Remove from a cache folder what `policy` and nobody's use allow.

    Args:
        cache_dir: The folder that holds caches by name.
        policy: Which fingerprints may go.
        dry_run: Only list.
    Raises:
        FormatError: There is no such folder, it holds other things and no cache, or is itself a cache.
        ReadOnlyError: Something cannot be removed.
        StalledError: Somebody else has been cleaning up all the while.
    """
    cache_dir = Path(cache_dir)
    if not cache_dir.is_dir():
        raise FormatError(f"there is no folder {cache_dir}. Name the folder that holds caches by name")
    if (cache_dir / MARKER).exists():
        raise FormatError(
            f"{cache_dir} holds copies of an address, which go by another rule. Use stoker gc, or from "
            "Python stoker.store.mirror.clean.clean"
        )
    inside = [cache_dir, *(path for path in cache_dir.iterdir() if FINGERPRINT.fullmatch(path.name))]
    if any((path / RECIPE_FILE).exists() for path in inside):
        raise FormatError(f"{cache_dir} is one cache. Name the folder above, which holds caches by name")
    if not scan(cache_dir) and not any(leftovers(cache_dir)) and _holds_others(cache_dir):
        raise FormatError(
            f"{cache_dir} holds no cache: no folder two levels below it has the name of a fingerprint. "
            "Name the folder that holds caches by name"
        )
    with nullcontext() if dry_run else _cleaning(cache_dir):
        return _Collection(cache_dir, policy or GcPolicy(), dry_run=dry_run).run()


def _holds_others(cache_dir: Path) -> bool:
    """Whether there are folders with something in them; those of caches that were removed are empty."""
    visible = (path for path in cache_dir.iterdir() if path.name != WEIGHTS and path.name[0] != ".")
    return any(path.is_dir() and any(path.iterdir()) for path in visible)


def remove_cache(path: str | Path) -> GcReport:
    """Remove one cache, and the weights that no other one needs.

    Args:
        path: Its folder, `CACHE_DIR/NAME/FINGERPRINT`.
    Raises:
        FormatError: It is no cache.
        Conflict: Somebody has it open, or fills it.
        ReadOnlyError: It cannot be removed.
        StalledError: Somebody else has been cleaning up all the while.
    """
    path = Path(path)
    cache_dir = path.parent.parent
    with _cleaning(cache_dir):
        return _Collection(cache_dir, GcPolicy(), dry_run=False).remove_one(path)


@contextmanager
def _cleaning(cache_dir: Path) -> Generator[None]:
    """Clean up alone.

    Raises:
        StalledError: Somebody else does, all the while.
    """
    with lock_folder(cache_dir, "gc", timeout_s=INDEX_WAIT_S) as free:
        if not free:
            raise StalledError(
                f"{cache_dir} has been cleaned up by {lock_holder(cache_dir, 'gc')} for {INDEX_WAIT_S:g} s. "
                "Run again when it is done"
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
        return self._report

    def remove_one(self, path: Path) -> GcReport:
        """Remove one unused folder, and the weights that only it needed."""
        folder = next((one for one in self._own() if one.path == path), None)
        if folder is None:
            raise FormatError(f"there is no cache {path}. Name the folder of a cache")
        if why := self._busy(folder) or self._remove(folder):
            raise Conflict(f"{path} stays: {why}. Wait for the job that uses it, or cancel it")
        self._note(
            "fingerprint", path, sum(self._take(folder, name) for name in [*folder.files]), "asked for"
        )
        self._folders.remove(folder)
        self._orphans()
        return self._report

    def _own(self) -> list[FoundFolder]:
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
                self._note("leftover", folder.path, folder.bytes, "a kill came before its recipe was written")
                if not self._dry_run:
                    remove_never_begun(folder)

    def _temporaries(self) -> None:
        for place in (self._cache_dir, self._cache_dir / WEIGHTS, self._cache_dir / ".statistics"):
            for path, size in dead_temporaries(place, remove=not self._dry_run):
                self._report.bytes_before += size
                self._note("temporary", path, size, "its writer is dead")
        for folder in self._own():
            for path, _ in dead_temporaries(folder.path, remove=not self._dry_run):
                self._note("temporary", path, self._take(folder, path.name), "its writer is dead")

    def _shards(self, folder: FoundFolder) -> None:
        """Shards that serve nothing any more, unless somebody may have an earlier generation open."""
        found = find_superseded(folder.path)
        names = {**found.shards, **found.damaged}
        why = self._in_use(folder) if names else None
        if why is None and found.shards:
            for name, needed in still_needed(folder.path, found.shards).items():
                self._keep("shard", folder.path / name, found.shards.pop(name), needed)
            names = {**found.shards, **found.damaged}
        if why is None and names and not self._dry_run:
            with unnoted(folder.path):
                why = drop_superseded(folder.path, found, force=self._policy.force)
        for name, size in names.items():
            kind = "shard" if name in found.shards else "damaged"
            if why is None:
                reason = reasons(found)[name]
                self._note(kind, folder.path / name, self._take(folder, name), reason)
            else:
                self._keep(kind, folder.path / name, size, why)

    def _fingerprints(self, select: Callable[[FoundFolder, int], str | None]) -> None:
        """Remove the folders that `select` gives a reason for, the least recently used first."""
        ranked = _ranked(self._folders)
        for folder in sorted(self._own(), key=lambda folder: -folder.unused_s):
            place = ranked[folder.name].index(folder)
            reason = select(folder, place)
            if reason is None or (self._policy.keep is not None and place < self._policy.keep):
                continue
            why = None if self._policy.force else self._protected(folder, ranked[folder.name])
            if why is None and not self._dry_run:
                why = self._remove(folder)
            if why is None:
                size = sum(self._take(folder, name) for name in [*folder.files])
                self._note("fingerprint", folder.path, size, reason)
                self._folders.remove(folder)
                self._orphans()  # its weights count as well, before another one goes for its size
            else:
                self._keep("fingerprint", folder.path, folder.bytes, why)

    def _by_age(self, folder: FoundFolder, place: int) -> str | None:
        limit_s, keep = self._policy.older_than_s, self._policy.keep
        if limit_s is not None:
            return f"unused for {folder.unused_text}" if folder.unused_s > limit_s else None
        return None if keep is None else f"number {place + 1} of its name (complete ones first), {keep} stay"

    def _by_size(self, _folder: FoundFolder, _place: int) -> str | None:
        limit, size = self._policy.max_bytes, self._report.bytes_left
        if limit is None or size <= limit:
            return None
        return f"least recently used; {format_bytes(size)} are more than {format_bytes(limit)}"

    def _protected(self, folder: FoundFolder, of_its_name: Sequence[FoundFolder]) -> str | None:
        if not self._policy.unprotected and folder is _newest(of_its_name):
            return "the newest complete one of its name"
        if folder.broken:
            return f"its recipe cannot be read: {folder.broken}"
        if not self._policy.unprotected and folder.unused_s < DAY_S:
            return f"used {folder.unused_text} ago"
        return self._busy(folder)

    def _busy(self, folder: FoundFolder) -> str | None:
        """Why a folder is in use; None: it is not."""
        if claims := folder.live_claims():
            return f"claimed ({claims[0]}) by {lock_holder(folder.path, claims[0])}"
        return self._in_use(folder)

    def _in_use(self, folder: FoundFolder) -> str | None:
        if self._policy.force:
            return None
        with alone(folder.path) as nobody:
            return None if nobody else "in use: somebody has it open, or its file system has no locks"

    def _remove(self, folder: FoundFolder) -> str | None:
        """Rename a folder away and delete it; returns why it stays, if somebody opened it meanwhile."""
        gone = folder.path.with_name(f"{GONE}{folder.path.name}-{secrets.token_hex(4)}")
        with explained(folder.path):
            with alone(folder.path) as nobody:
                if not nobody and not self._policy.force:
                    return "in use since a moment"
                folder.path.rename(gone)
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

    def _take(self, folder: FoundFolder, name: str) -> int:
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


def _newest(folders: Sequence[FoundFolder]) -> FoundFolder | None:
    """Return the complete folder that was indexed last, which is what the name alone opens."""
    complete = [folder for folder in folders if folder.complete]
    return max(complete, key=lambda folder: (folder.sequence or 0, folder.path.name), default=None)


def _ranked(folders: Sequence[FoundFolder]) -> dict[str, list[FoundFolder]]:
    """Folders by name: complete ones first, then those that were used last.

    A folder that is not complete must not take the place of a complete one among those that are kept. One
    without a sound index is being filled, so it counts as used later.
    """
    ranked: dict[str, list[FoundFolder]] = {}
    for folder in sorted(
        folders,
        key=lambda f: (f.complete, f.sequence is None, -f.unused_s, f.sequence or 0, f.path.name),
        reverse=True,
    ):
        ranked.setdefault(folder.name, []).append(folder)
    return ranked
