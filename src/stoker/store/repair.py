"""Set aside what is damaged or lost, so that the rest serves and precompute knows what to make again.

Nothing good is deleted. Damaged records are noted in a new generation of the index and never serve; the other
records of their shard do. A shard that cannot be read at all becomes `.damaged-<name>`, and stays until gc.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from stoker.errors import CorruptError, FormatError
from stoker.runtime.disk import explained
from stoker.runtime.files import sync_folder
from stoker.schema import Json
from stoker.store.adopt import FINGERPRINT
from stoker.store.catalog import Catalog, is_shard_name, part_of, write_index
from stoker.store.index import Index, load_index
from stoker.store.local import LocalStorage
from stoker.store.mirror.attach import here
from stoker.store.recipe import RECIPE_FILE, Recipe, load_recipe
from stoker.store.shard_read import Shard
from stoker.store.use import Use, indexing, maintaining, note_use
from stoker.store.verify import BadRecord

log = logging.getLogger("stoker")
DAMAGED = ".damaged-"
"""Prefix of shards that were set aside."""
REPAIR_ADVICE = ". `stoker verify"
"""Where errors of damaged records begin to say what a repair need not."""


@dataclass(slots=True, kw_only=True)
class RepairReport:
    """What was found and done, and what has to be encoded again."""

    path: str
    records: int = 0
    """Records read, in all shards."""
    bad: list[BadRecord] = field(default_factory=list[BadRecord])
    """Everything damaged or lost, as `verify` lists it."""
    set_aside: list[str] = field(default_factory=list[str])
    """Shards that cannot be read at all, by their names before."""
    lost: list[str] = field(default_factory=list[str])
    """Shards that the index named and that are gone."""
    unread: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    """Shards that the system failed to read: file and why. They stay where they are."""
    swept: int = 0
    """Temporaries of dead writers removed."""
    index: str = ""
    """Why the index was made again from the shards; empty where it was sound."""
    generation: int = 0
    """Of the index, afterwards."""
    missing: list[int] = field(default_factory=list[int])
    """Samples neither stored nor quarantined, afterwards."""

    @property
    def ok(self) -> bool:
        """Whether the cache is complete afterwards."""
        return not self.missing

    def to_json(self) -> dict[str, Json]:
        """The keys that scripts rely on."""
        return {
            "path": self.path,
            "records": self.records,
            "ok": self.ok,
            "bad": [record.to_json() for record in self.bad],
            "set_aside": [*self.set_aside],
            "lost": [*self.lost],
            "unread": [{"shard": shard, "why": why} for shard, why in self.unread],
            "swept": self.swept,
            "index": self.index,
            "generation": self.generation,
            "missing": [*self.missing],
        }


def repair(folder: str | Path, *, shards: Collection[str] | None = None) -> RepairReport:
    """Read every byte of a fingerprint's folder, and set aside what is wrong.

    Killed at any moment, nothing is worse than before, and the next call goes on.

    Args:
        folder: What to read.
        shards: Read only these, by file name, as long as the index is sound; None: all.

    Raises:
        FormatError: It is no cache, or its recipe is damaged: then nothing says what it holds.
        ReadOnlyError: It cannot be written.
        StalledError: Somebody else has been compacting or repairing it all the while.
    """
    folder = here(folder)
    recipe = load_recipe(folder)
    _use = Use(folder)
    note_use(folder)
    with maintaining(folder):
        return _Repair(folder, recipe, shards).run()


class _Repair:
    """One repair of one folder."""

    def __init__(self, folder: Path, recipe: Recipe, only: Collection[str] | None) -> None:
        self._folder, self._recipe = folder, recipe
        self._storage = LocalStorage(folder)
        self._report = RepairReport(path=str(folder))
        self._previous = self._load_index()
        # Without an index nothing says what is damaged in the others.
        self._only = only if self._previous is not None else None
        self._catalog = Catalog(self._storage, recipe, noted=self._only is not None)
        self._noted: dict[str, set[int]] = {}
        """Rows by shard that were known to be damaged before."""

    def run(self) -> RepairReport:
        report = self._report
        report.swept = self._storage.sweep()
        previous = self._previous
        self._noted = {shard.file: {*shard.bad} for shard in (previous.shards if previous else ())}
        names = [name for name in self._storage.list() if is_shard_name(name)]
        chosen = [name for name in names if self._only is None or name in self._only]
        unusable = [name for name in chosen if not self._examine(name)]
        self._note_unserved(previous, unusable)
        with indexing(self._folder):
            # Rows of shards that were not read stay noted, whoever noted them meanwhile.
            reread = chosen if self._only is None else ()
            index = write_index(self._storage, self._recipe, self._catalog.refresh, reread=reread)
        for name in unusable:
            self._set_aside(name)
        report.generation = index.generation
        done = np.zeros(self._recipe.count, np.bool_)
        done[[*index.quarantined]] = True
        for shard in index.shards:
            for _, first, count in shard.segments.tolist():
                begin = self._recipe.parts[shard.part].offset + first
                done[begin : begin + count] = True
        report.missing = np.flatnonzero(~done).tolist()
        return report

    def _load_index(self) -> Index | None:
        try:
            return load_index(self._folder, self._recipe)
        except FileNotFoundError:
            self._report.index = "there was none"
        except (FormatError, OSError) as error:
            self._report.index = str(error)
        return None

    def _examine(self, name: str) -> bool:
        """Read a shard in full and note its damaged rows; returns False where nothing of it can be used."""
        report, path = self._report, self._folder / name
        try:
            shard = Shard(self._storage.open(name), path, self._recipe.schema)
        except FormatError as error:
            log.warning("shard set aside: %s", str(error))
            return False
        except OSError as error:
            report.unread.append((name, str(error)))
            return True
        place = part_of(shard, self._recipe)
        if place is None:
            log.warning("shard set aside: %s belongs to another cache", path)
            return False
        report.records += shard.rows
        damage: dict[int, str] = {}
        for column in shard.columns:
            damage |= shard.damage(column)
        numbers = shard.numbers() + self._recipe.parts[place].offset
        report.bad += [
            BadRecord(index=int(numbers[row]), shard=name, why=why.partition(REPAIR_ADVICE)[0])
            for row, why in sorted(damage.items())
            if row not in self._noted.get(name, ())
        ]
        if damage:
            self._catalog.refresh()
            self._catalog.exclude(name, [*damage])
        self._mend_padding(shard, path)
        return True

    def _mend_padding(self, shard: Shard, path: Path) -> None:
        """Zeros between columns are the one thing whose right value is known; no record is touched."""
        try:
            shard.check_padding()
        except CorruptError as error:
            self._report.bad.append(BadRecord(index=-1, shard=path.name, why=str(error)))
            if self._storage.mirror is not None:
                return  # an object is not changed in place, and nothing is read from there
            with explained(path):
                fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
                try:
                    for offset, size in shard.padding:
                        at = 0
                        while at < size:
                            at += os.pwrite(fd, bytes(size - at), offset + at)
                    os.fsync(fd)
                finally:
                    os.close(fd)
        except OSError as error:  # a bad sector where no record lies
            self._report.unread.append((path.name, str(error)))

    def _note_unserved(self, previous: Index | None, unusable: Sequence[str]) -> None:
        """Name the records that served from shards which are gone or cannot be used."""
        here = {*self._storage.list()}
        for shard in () if previous is None else previous.shards:
            if shard.file in here and shard.file not in unusable:
                continue
            if shard.file not in here and len(shard.segments):
                self._report.lost.append(shard.file)
            offset = self._recipe.parts[shard.part].offset
            why = f"{self._folder / shard.file} " + (
                "cannot be used: it is damaged or foreign" if shard.file in here else "is missing"
            )
            self._report.bad += [
                BadRecord(index=offset + first + k, shard=shard.file, why=why)
                for _, first, count in shard.segments.tolist()
                for k in range(count)
            ]

    def _set_aside(self, name: str) -> None:
        mirror = self._storage.mirror
        with explained(self._folder), suppress(FileNotFoundError):
            if mirror is not None:
                mirror.names.rename(name, f"{DAMAGED}{name}")
            else:
                (self._folder / name).rename(self._folder / f"{DAMAGED}{name}")
            sync_folder(self._folder)
        self._report.set_aside.append(name)


def folder_to_repair(path: str | Path) -> Path:
    """The fingerprint's folder that `path` names: itself, or the only one below it.

    Raises:
        FormatError: There is none, or several: a damaged one among them must not be passed over.
    """
    path = here(path)
    if (path / RECIPE_FILE).exists() or (FINGERPRINT.fullmatch(path.resolve().name) and path.is_dir()):
        return path
    found: list[Path] = []
    if path.is_dir():
        visible = (p for p in path.iterdir() if not p.name.startswith("."))
        found = sorted(p for p in visible if (p / RECIPE_FILE).exists())
    if len(found) != 1:
        names = ", ".join(p.name for p in found) or "none"
        raise FormatError(f"{path}: one cache to repair was expected, found {names}. Name the folder of one")
    return found[0]
