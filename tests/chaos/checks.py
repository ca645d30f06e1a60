"""What must hold after a fault, looked at by a fresh process."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stoker.errors import FormatError, StokerError
from stoker.runtime.files import TEMPORARY
from stoker.store import load_recipe, open_cache, open_folder
from stoker.store.format import is_shard_name
from stoker.store.gc import GONE
from stoker.store.index import damaged_rows, load_index, read_info
from stoker.store.storage import open_storage
from tests.chaos.scenarios import NAME, Scenario
from tests.store.fakes import expected, same_bits


@dataclass(slots=True, kw_only=True)
class Promises:
    """What a scenario has promised so far."""

    stored: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)
    complete: bool = False

    def note(self, kind: str, numbers: Sequence[int] = ()) -> None:
        """Add one promise."""
        if kind == "complete":
            self.complete = True
        else:
            getattr(self, kind).update(numbers)

    @staticmethod
    def of(scenario: Scenario, said: Sequence[Any]) -> Promises:
        """What holds before the scenario begins, and what its process said."""
        promises = Promises(stored={*scenario.kept})
        for value in said:
            if isinstance(value, list):
                promises.note(*value)
        return promises


def broken(scenario: Scenario, root: Path, promises: Promises) -> list[str]:
    """What is wrong with a folder as a fault left it: each as `kind: what`. Workers may mend the index."""
    # Workers come last: they make a lost index anew, and it may have been promised.
    return [
        *torn_files(root, scenario.damaged),
        *broken_promises(scenario, root, promises),
        *wrong_records(scenario, root),
    ]


def torn_files(root: Path, damaged: str = "") -> list[str]:
    """Files under final names that are not whole, and indexes that name a shard which is not there.

    The file `damaged` was so to begin with.
    """
    wrong: list[str] = []
    for path in sorted((root / "caches" / NAME).glob("*")):
        if path.name.startswith(".") or not (path / "recipe.json").exists():
            continue  # hidden: being removed
        try:
            recipe = load_recipe(path)
        except (FormatError, OSError) as error:
            wrong.append(f"torn: {error}")
            continue
        storage = open_storage(path)
        headers: dict[str, str] = {}
        for name in filter(is_shard_name, storage.list()):
            if name == damaged:
                continue
            try:
                info = read_info(storage, name, recipe)
            except (FormatError, OSError) as error:
                wrong.append(f"torn: {error}")
                continue
            headers[name] = info.header
            if rows := damaged_rows(storage, info, recipe):
                wrong.append(f"torn: {name} has damaged rows {rows}")
        try:
            index = load_index(path, recipe)
        except FileNotFoundError:
            continue
        except (FormatError, OSError) as error:
            wrong.append(f"torn: {error}")
            continue
        wrong += [
            f"dangling: the index names {shard.file}, which is {headers.get(shard.file, 'not there')}"
            for shard in index.shards
            if len(shard.segments) and headers.get(shard.file) != shard.header
        ]
    return wrong


def wrong_records(scenario: Scenario, root: Path) -> list[str]:
    """Records that a reader is given and that are not what was encoded."""
    path = scenario.folder_path(root)
    if not (path / "recipe.json").exists():
        return []
    cache = open_cache(path, require_complete=False)
    return [
        f"corrupt served: record {number}"
        for number in cache.indices.tolist()
        if not same_bits(cache[number], expected(scenario.source, scenario.recipe, number))
    ]


def broken_promises(scenario: Scenario, root: Path, promises: Promises) -> list[str]:
    """What was promised and is not there."""
    folder = open_folder(root / "caches", NAME, scenario.recipe)
    lost = sorted(promises.stored & {*folder.missing(retry_quarantined=True).tolist()})
    forgotten = sorted(promises.failed - folder.failures().keys())
    wrong = [f"lost: records {lost} were promised"] if lost else []
    wrong += [f"lost: the failures of samples {forgotten} were promised"] if forgotten else []
    if promises.complete and folder.complete() is None:
        wrong.append("lost: the cache was promised to be complete")
    return wrong


def not_finished(scenario: Scenario, root: Path) -> list[str]:
    """What is wrong after the scenario has been run again without faults."""
    try:
        cache = open_cache(scenario.folder_path(root))
    except StokerError as error:
        return [f"not resumed: {error}"]
    wrong = [] if cache.indices.tolist() == scenario.stored else [f"not resumed: {cache.indices.tolist()}"]
    if {*cache.quarantined} != scenario.failed:
        wrong.append(f"not resumed: quarantined are {sorted(cache.quarantined)}")
    wrong += [] if cache.verify().ok else ["not resumed: verify finds damage"]
    return wrong + wrong_records(scenario, root) + left_behind(root)


def left_behind(root: Path) -> list[str]:
    """Temporary files below a folder."""
    return [
        f"left behind: {path.relative_to(root)}"
        for path in sorted(root.rglob("*"))
        if path.name.startswith((TEMPORARY, GONE)) or path.name.endswith(".part")
    ]


def silence() -> None:
    """Warnings by the thousand are no help."""
    logging.getLogger("stoker").setLevel(logging.ERROR)
