"""What a folder holds, read from the shards themselves, and the index made from that.

Shards are trusted for what their own digests prove; nothing here relies on an index, except for rows that an
earlier one noted as damaged.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.errors import CorruptError, FormatError, ResourceError, StalledError
from stoker.runtime.files import sync_folder
from stoker.runtime.retry import FailedAttempt, RetryPolicy, retry
from stoker.runtime.threads import map_in_order
from stoker.store.failures import Failure, read_failures
from stoker.store.index import (
    INDEX_FILE,
    Index,
    ShardEntry,
    choose_rows,
    dump_index,
    load_index,
    numbers_of,
    read_index_entries,
    runs_of,
)
from stoker.store.recipe import Recipe, load_recipe
from stoker.store.remote import ChangedError, Expected
from stoker.store.shard import Shard, repair_advice
from stoker.store.storage import LocalStorage
from stoker.store.use import Use
from stoker.store.values import Accumulator, read_field, summarise

log = logging.getLogger("stoker")
INDEX_TRIES = 20
"""Times that an index is made while other machines replace it; each of them gets on meanwhile."""
FEW_SHARDS = 8
"""Fewer are read one after another: they take less than the threads would."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardInfo:
    """One shard of a folder whose header, numbers and sums are sound."""

    file: str
    part: int
    rows: int
    bytes: int
    header: str
    runs: NDArray[np.int64]
    """`(k, 3)`: row, first part-local number, count. Not a number per row: a cache may have 10^9 of them."""
    statistics: Mapping[str, Any]
    error: Mapping[str, Any]
    bad: tuple[int, ...] = ()
    """Rows known to be damaged."""
    raw: int | None = None
    """As in `ShardEntry`."""

    @property
    def numbers(self) -> NDArray[np.int64]:
        """Part-local number of each row."""
        return numbers_of(self.runs)


def is_shard_name(name: str) -> bool:
    """Whether a file of a cache folder is a shard, by its name."""
    return name.startswith("shard-") and name.endswith(".safetensors")


def read_info(storage: LocalStorage, name: str, recipe: Recipe) -> ShardInfo:
    """Read header, numbers and sums of one shard.

    Raises:
        FormatError: It is damaged (`CorruptError`), or of no part of `recipe`.
    """
    shard = Shard(storage.open(name), storage.path / name, recipe.schema)
    part = part_of(shard, recipe)
    if part is None:
        raise FormatError(f"{storage.path / name} belongs to another cache. Remove it")
    return ShardInfo(
        file=name,
        part=part,
        rows=shard.rows,
        bytes=shard.size,
        header=shard.header_digest,
        runs=runs_of(shard.numbers()),
        statistics=shard.described("statistics"),
        error=shard.described("error"),
        raw=None if shard.compression == "none" else shard.raw_bytes,
    )


def part_of(shard: Shard, recipe: Recipe) -> int | None:
    """The part of `recipe` whose records a shard holds; None for one of another cache."""
    part = recipe.part_by_key.get(shard.part)
    return None if part is None or int(shard.numbers().max()) >= recipe.parts[part].count else part


class DamagedShardError(CorruptError):
    """A shard that serves in part turned out to be damaged while the rest of its records was counted."""

    def __init__(self, path: Path, why: Exception) -> None:
        fact = why.fact if isinstance(why, CorruptError) else str(why)
        fact, folder = f"{path} can no longer be read: {fact}", path.parent
        super().__init__(fact, advice=repair_advice(folder), shard=path.name, folder=folder)


class Catalog:
    """Shards of one folder. They are immutable, so each is read once however often `refresh` is called.

    Args:
        storage, recipe: The folder.
        noted: Leave out the rows that the index notes as damaged; False: look afresh.
    """

    def __init__(self, storage: LocalStorage, recipe: Recipe, *, noted: bool = True) -> None:
        self._storage, self._recipe = storage, recipe
        self._infos: dict[str, ShardInfo] = {}
        self._refused: set[tuple[str, int]] = set()
        self._bad: dict[str, tuple[int, ...]] | None = None if noted else {}

    def refresh(self) -> list[ShardInfo]:
        """Sound shards here now, by name. Others are left out with a warning, their records are missing."""
        if self._bad is None:
            self._bad = noted_damage(self._storage.path, self._recipe)
        sizes = {name: size for name, size in self._storage.sizes().items() if is_shard_name(name)}
        self._infos = {name: info for name, info in self._infos.items() if sizes.get(name) == info.bytes}
        new = [n for n, size in sizes.items() if n not in self._infos and (n, size) not in self._refused]
        for name, info in zip(new, self._read(new), strict=True):
            if isinstance(info, ShardInfo):
                self._infos[name] = replace(info, bad=self._bad.get(name, ()))
            else:
                self._refused.add((name, sizes[name]))
                log.warning(
                    "shard left out: %s. Precompute encodes again what only it held; then it may be deleted",
                    info,
                )
        return [self._infos[name] for name in sizes if name in self._infos]

    def _read(self, names: Sequence[str]) -> Iterator[ShardInfo | str]:
        """What each shard holds, or what is wrong with it, in their order."""

        def read(name: str) -> ShardInfo | str:
            try:
                return read_info(self._storage, name, self._recipe)
            except (FormatError, OSError) as error:
                return str(error)  # an error that is kept would hold the folder open

        if len(names) < FEW_SHARDS:
            return map(read, names)
        return map_in_order(read, names, what=f"reading the shards of {self._storage.path}")

    def exclude(self, file: str, rows: Sequence[int]) -> None:
        """Note damaged rows of a shard; they count as missing from now on."""
        if info := self._infos.get(file):
            self._infos[file] = _without(info, rows)

    def verify(self) -> None:
        """Read every byte of every shard and exclude the rows that are damaged."""
        for info in self.refresh():
            self._verify(info)

    def _verify(self, info: ShardInfo) -> bool:
        """Read every byte of a shard and exclude what is damaged; returns whether that is any more."""
        rows = damaged_rows(self._storage, info, self._recipe)
        if {*rows} <= {*info.bad}:
            return False
        log.warning("shard %s: %d of %d records are damaged and left out", info.file, len(rows), info.rows)
        self.exclude(info.file, rows)
        return True

    def write_index(self) -> Index:
        """`write_index` of what is here now; damage that it meets is left out, and counts as missing."""
        while True:
            try:
                return write_index(self._storage, self._recipe, self.refresh)
            except DamagedShardError as error:
                if not self._verify(self._infos[error.shard]):
                    raise


def _without(info: ShardInfo, rows: Sequence[int]) -> ShardInfo:
    """The same with more rows known to be damaged."""
    bad = {*info.bad, *(row for row in rows if row < info.rows)}
    return info if len(bad) == len(info.bad) else replace(info, bad=tuple(sorted(bad)))


def noted_damage(folder: Path, recipe: Recipe) -> dict[str, tuple[int, ...]]:
    """Rows that the index of a folder notes as damaged, by file."""
    index = known_index(folder, recipe)
    return {} if index is None else {shard.file: shard.bad for shard in index.shards if shard.bad}


def damaged_rows(storage: LocalStorage, info: ShardInfo, recipe: Recipe) -> list[int]:
    """Rows of a shard that do not match their sums, over all fields; empty when every column is right."""
    try:
        shard = Shard(storage.open(info.file), storage.path / info.file, recipe.schema)
    except (FormatError, OSError) as error:
        log.warning("shard %s cannot be read any more: %s", info.file, error)
        return [*range(info.rows)]
    rows: set[int] = set()
    for field in shard.columns:
        if damage := shard.damage(field):
            rows.update(damage)
            log.warning("shard %s: %s", info.file, next(iter(damage.values())))
    return sorted(rows)


def presence(infos: Sequence[ShardInfo], recipe: Recipe) -> NDArray[np.bool_]:
    """Which samples are stored: `(recipe.count,)` bool.

    Raises:
        ResourceError: There is no memory for a byte per sample.
    """
    try:
        stored = np.zeros(recipe.count, np.bool_)
    except (MemoryError, ValueError) as error:
        raise ResourceError(
            f"the recipe has {recipe.count:,} samples, and a byte for each does not fit in memory"
        ) from error
    for info in infos:
        stored[np.delete(info.numbers, info.bad) + recipe.parts[info.part].offset] = True
    return stored


def write_index(
    storage: LocalStorage,
    recipe: Recipe,
    list_shards: Callable[[], Sequence[ShardInfo]],
    first: Collection[str] = (),
    *,
    reread: Collection[str] = (),
) -> Index:
    """Make the index of a folder and put it in place; an unchanged one stays as it is.

    Call it under the claim `index`, so that a later index never knows less. Other machines do not see that
    claim at a URL: there, the index is made again when another machine has replaced it meanwhile.

    Args:
        storage, recipe: The folder.
        list_shards: Returns its sound shards.
        first: Shards that serve before those that the previous index knew.
        reread: Shards of which every byte was read again: what the previous index noted as damaged in them
            is forgotten.
    Raises:
        DamagedShardError: Nothing was written.
        StalledError: Other machines replaced it each time.
    """

    def attempt() -> Index:
        # Before the list: a shard that another machine adds to both after the list makes the put fail.
        version = storage.version(INDEX_FILE)
        return _write_index(storage, recipe, list_shards(), first, version, reread)

    def give_up(failed: FailedAttempt) -> StalledError:
        return StalledError(
            f"the index of {storage.path} was replaced by other machines {failed.attempts} times while it "
            "was made. See how many are writing to it, then run again"
        )

    policy = RetryPolicy(first_s=0.0, attempts=INDEX_TRIES)
    return retry(attempt, ChangedError, policy, give_up=give_up)


def _write_index(
    storage: LocalStorage,
    recipe: Recipe,
    infos: Sequence[ShardInfo],
    first: Collection[str],
    version: Expected,
    reread: Collection[str],
) -> Index:
    previous = known_index(storage.path, recipe)
    if previous is not None:
        noted = {shard.file: shard.bad for shard in previous.shards if shard.file not in reread}
        infos = [_without(info, noted.get(info.file, ())) for info in infos]
    index = build_index(storage, recipe, infos, previous, first)
    if previous is not None:
        same = replace(index, generation=previous.generation)
        if dump_index(same, recipe) == dump_index(previous, recipe):
            sync_folder(storage.path)  # whoever put it there may have been killed before that
            return previous
    storage.put(INDEX_FILE, dump_index(index, recipe), expected=version)
    return index


def known_index(folder: Path, recipe: Recipe) -> Index | None:
    """The index of a folder, or None where it is missing, damaged or foreign."""
    try:
        return load_index(folder, recipe)
    except (FormatError, OSError):
        return None


def build_index(
    storage: LocalStorage,
    recipe: Recipe,
    infos: Sequence[ShardInfo],
    previous: Index | None,
    first: Collection[str] = (),
) -> Index:
    """The index over `infos`, the next generation after `previous`: `first`, shards that it knew, others."""
    order = {} if previous is None else {shard.file: i for i, shard in enumerate(previous.shards)}
    infos = sorted(
        infos, key=lambda info: (info.file not in first, order.get(info.file, len(order)), info.file)
    )
    offsets = [recipe.parts[info.part].offset for info in infos]
    chosen = choose_rows([info.runs for info in infos], [info.bad for info in infos], offsets)
    stored = sum(int(segments[:, 2].sum()) for segments in chosen)
    present = presence(infos, recipe)
    quarantined: dict[int, Failure] = {
        number: failure for number, failure in read_failures(storage, recipe).items() if not present[number]
    }
    return Index(
        fingerprint=recipe.fingerprint,
        name=storage.path.absolute().parent.name,
        generation=1 if previous is None else previous.generation + 1,
        sequence=next_sequence(storage.path) if previous is None else previous.sequence,
        count=recipe.count,
        stored=stored,
        complete=stored + len(quarantined) == recipe.count,
        shards=tuple(
            ShardEntry(
                file=info.file,
                part=info.part,
                rows=info.rows,
                bytes=info.bytes,
                header=info.header,
                segments=segments,
                bad=info.bad,
                raw=info.raw,
            )
            for info, segments in zip(infos, chosen, strict=True)
        ),
        quarantined=quarantined,
        statistics=_statistics(storage, recipe, infos, chosen),
        error=_error(recipe, infos),
    )


def next_sequence(folder: Path) -> int:
    """One more than the largest sequence among the fingerprints beside `folder`."""
    sequences = [0]
    for sibling in folder.parent.iterdir():
        try:
            sequences.append(int(read_index_entries(sibling)["sequence"]))
        except (FormatError, OSError, KeyError, TypeError, ValueError):
            continue
    return max(sequences) + 1


def _statistics(
    storage: LocalStorage, recipe: Recipe, infos: Sequence[ShardInfo], chosen: Sequence[NDArray[np.int64]]
) -> dict[str, Any]:
    partials: list[Mapping[str, Any]] = []
    for info, segments in zip(infos, chosen, strict=True):
        served = int(segments[:, 2].sum())
        if served == info.rows:
            partials.append(info.statistics)
        elif served:
            # Some of its rows are served from elsewhere: count only the rest.
            partials.append(_recount(storage, info, segments, recipe))
    return {name: summarise([partial[name] for partial in partials]) for name in recipe.schema}


def _recount(
    storage: LocalStorage, info: ShardInfo, segments: NDArray[np.int64], recipe: Recipe
) -> dict[str, Any]:
    path = storage.path / info.file
    partial: dict[str, Any] = {}
    try:
        shard = Shard(storage.open(info.file), path, recipe.schema, offset=recipe.parts[info.part].offset)
        for name, field in recipe.schema.items():
            accumulator = Accumulator(field)
            for row, _, count in segments.tolist():
                for at in range(row, row + count):
                    accumulator.update(read_field(shard, name, field, at).reshape(-1))
            partial[name] = accumulator.partial()
    except (FormatError, OSError) as error:
        raise DamagedShardError(path, error) from error
    return partial


def _error(recipe: Recipe, infos: Sequence[ShardInfo]) -> dict[str, Any]:
    return {
        name: {
            key: max((float(info.error[name][key]) for info in infos), default=0.0) for key in ("max", "rms")
        }
        for name in recipe.schema
    }


# ----------------------------------------------------------------------------------------------------------
# Take over what a sibling cache has encoded already.
#
# When files are added to a source, the parts that were there keep their keys; their shards carry part-local
# numbers, so they serve in the new cache as they are: by a hard link, or a copy.


FINGERPRINT = re.compile(r"[0-9a-f]{16}")


def siblings(folder: Path) -> list[Path]:
    """Folders of other fingerprints of the same name."""
    paths = sorted(path for path in folder.parent.iterdir() if FINGERPRINT.fullmatch(path.name))
    return [path for path in paths if path.name != folder.name and path.is_dir()]


def adopt_shards(storage: LocalStorage, recipe: Recipe, catalog: Catalog) -> tuple[int, list[Failure]]:
    """Link shards of unchanged parts into our folder where they hold records that we lack.

    Returns:
        How many records were gained, and failures of the sample's own kind in those parts, in our numbering.
    """
    stored = presence(catalog.refresh(), recipe)
    before = int(stored.sum())
    failures: list[Failure] = []
    for path in siblings(storage.path):
        try:
            theirs = load_recipe(path)
        except (FormatError, OSError):
            continue
        ours = {part.key: part for part in recipe.parts}
        common = {part.key for part in theirs.parts if part.count} & ours.keys()
        if not common:
            continue
        try:
            _use = Use(path)  # so that no clean-up removes it while shards are linked
        except (FormatError, StalledError, OSError):
            continue
        _link_shards(storage, recipe, catalog, LocalStorage(path), theirs)
        stored = presence(catalog.refresh(), recipe)
        for number, failure in read_failures(LocalStorage(path), theirs).items():
            part, local = theirs.part_of(number)
            key = theirs.parts[part].key
            if failure.kind == "sample" and key in common and not stored[ours[key].offset + local]:
                failures.append(replace(failure, number=ours[key].offset + local))
    return int(stored.sum()) - before, failures


def _link_shards(
    storage: LocalStorage, recipe: Recipe, catalog: Catalog, sibling: LocalStorage, theirs: Recipe
) -> None:
    bad = noted_damage(sibling.path, theirs)
    index = known_index(storage.path, recipe)
    stored, here = presence(catalog.refresh(), recipe), {*storage.list()}
    # Indexed here and gone: removed as damaged, as errors advise. A sibling's link is the same damaged file.
    removed = set[str]() if index is None else {shard.file for shard in index.shards} - here
    linked: list[str] = []
    for name in filter(is_shard_name, sibling.list()):
        if name in here:
            continue
        try:
            info = read_info(sibling, name, recipe)
        except (FormatError, OSError):
            continue  # of a part that we do not have, or damaged
        if name in removed:
            bad[name] = (*damaged_rows(sibling, info, recipe),)
        sound = np.delete(info.numbers, bad.get(name, ())) + recipe.parts[info.part].offset
        if not stored[sound].all():
            storage.link(sibling, name)
            linked.append(name)
            stored[sound] = True
    catalog.refresh()
    for name in linked:
        catalog.exclude(name, bad.get(name, ()))
