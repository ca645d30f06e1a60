"""What is interrupted: small uses of the store, each a state to begin from and what can be done again.

A scenario promises as it goes: `promise("stored", numbers)` when the store has said that these records are
sealed, `promise("failed", numbers)` for quarantined samples, `promise("complete")` when the index is written.
Whatever happens after a promise must not break it.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from stoker.errors import IncompleteError
from stoker.extras.adopt import source as adopt_source
from stoker.extras.adopt.digest import digest_blocks
from stoker.extras.adopt.layouts import LAYOUTS
from stoker.extras.adopt.listing import make_listing
from stoker.extras.adopt.pt import PtContent
from stoker.extras.adopt.run import AdoptSettings, run_adopt
from stoker.precompute.engine import clear, run_precompute
from stoker.precompute.settings import PrecomputeSettings
from stoker.store import (
    Failure,
    Folder,
    Recipe,
    WriterSettings,
    make_recipe,
    open_cache,
    open_folder,
)
from stoker.store.gc import GcPolicy, collect
from stoker.store.maintain import compact, repair
from tests.chaos import program
from tests.store.fakes import RAGGED, FakeSource, batch_of, fill

NAME = "x"
GROUP = 4
SHARD_BYTES = GROUP * 1156
DAMAGED = "shard-00112233aabb-000000.safetensors"
Promise = Callable[[str, Sequence[int]], None]


def small_shards() -> None:
    """Let whatever writes in this process fill shards of `SHARD_BYTES`."""
    program.limit_shards(SHARD_BYTES)


class Readable(FakeSource):
    """The same source, also for whoever reads it sample by sample; each record is made once."""

    @functools.cached_property
    def records(self) -> list[dict[str, Tensor]]:
        """All of them: what a process has made before it forks is there for its children."""
        return [FakeSource.record(self, number) for number in range(len(self))]

    def record(self, number: int) -> dict[str, Tensor]:
        """The record of a number."""
        return self.records[number]

    def read(self, number: int, start: int | None = None, stop: int | None = None) -> dict[str, Any]:
        """Arrays of one sample; scalars have no axis to cut."""
        return {n: v.numpy()[start:stop] if v.ndim else v.numpy() for n, v in self.record(number).items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One use of the store in a folder."""

    source: FakeSource
    run: Callable[[Path, Promise], None]
    """Does it, or what is left of it."""
    prepare: Callable[[Path], None] = lambda root: None
    """Makes the state it begins from."""
    failed: frozenset[int] = frozenset()
    """Samples that end quarantined."""
    kept: frozenset[int] = frozenset()
    """Records that are stored before it begins and must survive it."""
    damaged: str = ""
    """A shard that is damaged to begin with."""
    make: Callable[[FakeSource], Recipe] = lambda source: make_recipe(source, None)
    """The recipe of what it makes."""

    @property
    def recipe(self) -> Recipe:
        """The recipe of what it makes, always the same one."""
        return _recipe_of(self.make, self.source)

    @property
    def stored(self) -> list[int]:
        """Numbers of the records that are there in the end."""
        return [number for number in range(len(self.source)) if number not in self.failed]

    def folder_path(self, root: Path) -> Path:
        """Where its cache lies below `root`."""
        return root / "caches" / NAME / self.recipe.fingerprint


@functools.cache
def _recipe_of(make: Callable[[FakeSource], Recipe], source: FakeSource) -> Recipe:
    return make(source)


def nothing(kind: str, numbers: Sequence[int] = ()) -> None:
    """A promise that nobody notes."""


def write_missing(folder: Folder, source: FakeSource, promise: Promise) -> None:
    """Append what is missing, promising whatever has been sealed."""
    writer = folder.writer(WriterSettings(shard_bytes=SHARD_BYTES))
    by_part: dict[int, list[int]] = {}
    for number in folder.missing().tolist():
        by_part.setdefault(folder.recipe.part_of(number)[0], []).append(number)
    for members in by_part.values():
        for begin in range(0, len(members), GROUP):
            chunk = members[begin : begin + GROUP]
            writer.append(chunk, batch_of(source, chunk))
            if writer.shard_fill[0]:  # a full shard has sealed itself
                writer.commit()
            promise("stored", chunk)


def finish(folder: Folder, promise: Promise) -> None:
    """Write the index; complete only if it says so, since a shard may have become unreadable."""
    cache = folder.finish()
    if not cache.complete:
        raise IncompleteError(f"{cache!r}: a shard could not be read")
    promise("complete", [])


def commit(source: FakeSource, root: Path, promise: Promise) -> None:
    """Make the folder, write shards, seal, write the index."""
    folder = open_folder(root / "caches", NAME, make_recipe(source, None))
    write_missing(folder, source, promise)
    finish(folder, promise)


def half_filled(source: FakeSource, count: int, root: Path) -> None:
    """A folder with its first records, an index that says so, and what a killed writer leaves."""
    folder = open_folder(root / "caches", NAME, make_recipe(source, None))
    fill(folder, source, range(count), group=GROUP, shard_bytes=SHARD_BYTES)
    folder.finish()
    (folder.path / ".tmp-00112233aabb-shard-00112233aabb-000000.safetensors").write_bytes(b"torn" * 1000)


def sibling(source: FakeSource, root: Path) -> None:
    """A whole cache of a source that has grown since."""
    commit(source, root, nothing)


def quarantine(
    source: FakeSource, failed: frozenset[int], root: Path, promise: Promise, *, dtype: str | None = None
) -> None:
    """Note samples as failed, in two goes, store the others."""
    folder = open_folder(root / "caches", NAME, make_recipe(source, None, dtype=dtype))
    for number in sorted(failed - folder.failures().keys()):
        failure = Failure(number=number, stage="read", error="planted", attempts=2, kind="sample")
        folder.quarantine(failure)
        promise("failed", [number])
    write_missing(folder, source, promise)
    finish(folder, promise)


def adopt(source: FakeSource, root: Path, promise: Promise) -> None:
    """Take over a sibling's shards, then write what is new."""
    folder = open_folder(root / "caches", NAME, make_recipe(source, None))
    before = {*folder.missing().tolist()}
    folder.adopt()
    promise("stored", sorted(before - {*folder.missing().tolist()}))
    write_missing(folder, source, promise)
    finish(folder, promise)


def overwrite(source: FakeSource, root: Path, promise: Promise) -> None:
    """Clear the folder and fill it again."""
    clear(open_folder(root / "caches", NAME, make_recipe(source, None)))
    commit(source, root, promise)


def rebuild(source: FakeSource, root: Path, promise: Promise) -> None:
    """Open a cache whose index is lost, which makes it again; in memory where it cannot be written."""
    cache = open_cache(root / "caches" / NAME / make_recipe(source, None).fingerprint)
    promise("stored", cache.indices.tolist())


def lose_index(source: FakeSource, root: Path) -> None:
    """A whole cache, its index removed."""
    half_filled(source, len(source), root)
    (root / "caches" / NAME / make_recipe(source, None).fingerprint / "index.json").unlink()


def whole_precompute(source: FakeSource, root: Path, promise: Promise) -> None:
    """The engine itself, reading in its own process."""
    small_shards()
    settings = PrecomputeSettings(workers=0, progress=None)
    run_precompute(source, None, root / "caches", name=NAME, settings=settings)
    promise("complete", [])


def compact_all(source: FakeSource, root: Path, promise: Promise) -> None:
    """Merge short shards."""
    compact(root / "caches" / NAME / make_recipe(source, None).fingerprint, shard_bytes=4 * SHARD_BYTES)
    promise("complete", [])


def collect_garbage(root: Path, promise: Promise) -> None:
    """Remove an older fingerprint, and shards that were merged into others."""
    collect(root / "caches", GcPolicy(keep=1, force=True))
    promise("complete", [])


def make_garbage(old: FakeSource, new: FakeSource, root: Path) -> None:
    """An older fingerprint, a newer one whose shards were merged, and what a killed writer leaves."""
    commit(old, root, nothing)
    half_filled(new, len(new), root)
    compact_all(new, root, nothing)


def repair_all(source: FakeSource, root: Path, promise: Promise) -> None:
    """Set aside what is damaged."""
    repair(root / "caches" / NAME / make_recipe(source, None).fingerprint)
    promise("complete", [])


def damage_one(source: FakeSource, root: Path) -> None:
    """A whole cache, and beside it a shard that is cut short."""
    half_filled(source, len(source), root)
    path = next((root / "caches" / NAME / make_recipe(source, None).fingerprint).glob("shard-*"))
    (path.parent / DAMAGED).write_bytes(path.read_bytes()[:9000])


class Reader:
    """Stands in for the limited process that reads `.pt` files, which writes nothing."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def read(self, path: Path, **_: Any) -> PtContent:
        """Tensors of a file."""
        return PtContent(payload=save(torch.load(path, weights_only=True)))

    def close(self) -> None:
        """Nothing is open."""


def write_pt(source: FakeSource, root: Path) -> dict[int, Path]:
    """An earlier cache: a `.pt` file for each sample."""
    (root / "pt").mkdir()
    files = {number: root / "pt" / f"sample_{number:05d}.pt" for number in range(len(source))}
    for number, path in files.items():
        torch.save(source.record(number), path)
    return files


def write_only_pt(source: FakeSource, root: Path) -> None:
    """The state that adopting begins from."""
    write_pt(source, root)


def pt_recipe(source: FakeSource) -> Recipe:
    """The recipe that adopting these files has."""
    adopt_source.PtReader = Reader  # type: ignore[misc,assignment]
    with tempfile.TemporaryDirectory() as folder:
        root = write_pt(source, Path(folder))[0].parent
        listing = make_listing(root, LAYOUTS["sample-pt"], Path(folder), NAME)
        named = adopt_source.AdoptSource(root, LAYOUTS["sample-pt"], listing, adopt_source.AdoptRules())
        digest_blocks(named, Path(folder) / "memo.json", print)
        named.close()
        return make_recipe(named, None)


def adopt_all(root: Path, promise: Promise) -> None:
    """Take over an earlier cache."""
    small_shards()
    adopt_source.PtReader = Reader  # type: ignore[misc,assignment]
    settings = AdoptSettings(layout="sample-pt", workers=0, progress=None)
    cache = run_adopt(root / "pt", root / "caches", name=NAME, settings=settings).cache
    if not cache.complete:
        raise IncompleteError(f"{cache!r}: a shard could not be read")
    promise("complete", [])


PARTS = [("a", 6), ("b", 3)]
SMALL = Readable(parts=PARTS)
GROWN = Readable(parts=[*PARTS, ("c", 4)])
MIXED = Readable({**RAGGED, "nu": SMALL.fields["nu"]}, parts=PARTS)
OTHER = Readable(parts=PARTS, salt={"a": "before"})
PT = Readable(parts=[("samples", 5)])
FAILED = frozenset({1, 7})
ALL = frozenset(range(len(SMALL)))

SCENARIOS: dict[str, Scenario] = {
    "commit": Scenario(source=SMALL, run=functools.partial(commit, SMALL)),
    "resume": Scenario(
        source=SMALL,
        prepare=functools.partial(half_filled, SMALL, 4),
        run=functools.partial(commit, SMALL),
        kept=frozenset(range(4)),
    ),
    "ragged": Scenario(source=MIXED, run=functools.partial(commit, MIXED)),
    "quarantine": Scenario(source=SMALL, run=functools.partial(quarantine, SMALL, FAILED), failed=FAILED),
    "adopt": Scenario(
        source=GROWN,
        prepare=functools.partial(sibling, SMALL),
        run=functools.partial(adopt, GROWN),
    ),
    "overwrite": Scenario(
        source=SMALL,
        prepare=functools.partial(half_filled, SMALL, len(SMALL)),
        run=functools.partial(overwrite, SMALL),
    ),
    "rebuild": Scenario(
        source=SMALL,
        prepare=functools.partial(lose_index, SMALL),
        run=functools.partial(rebuild, SMALL),
        kept=ALL,
    ),
    "compact": Scenario(
        source=SMALL,
        prepare=functools.partial(half_filled, SMALL, len(SMALL)),
        run=functools.partial(compact_all, SMALL),
        kept=ALL,
    ),
    "gc": Scenario(
        source=SMALL, prepare=functools.partial(make_garbage, OTHER, SMALL), run=collect_garbage, kept=ALL
    ),
    "repair": Scenario(
        source=SMALL,
        prepare=functools.partial(damage_one, SMALL),
        run=functools.partial(repair_all, SMALL),
        damaged=DAMAGED,
        kept=ALL,
    ),
    "import": Scenario(
        source=PT, prepare=functools.partial(write_only_pt, PT), run=adopt_all, make=pt_recipe
    ),
    "precompute": Scenario(source=SMALL, run=functools.partial(whole_precompute, SMALL)),
}
"""To add one: a function that can be repeated, promises as it goes, and ends with the whole cache."""
