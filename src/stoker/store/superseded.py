"""Shards that serve nothing in the current index, and their removal.

Merging and work done twice leave them. Before one goes, every good record in it is read from where it serves
now: otherwise a copy that rotted since would turn out to have been the last good one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from stoker.errors import FormatError, IncompleteError, ResourceError
from stoker.runtime.disk import explained
from stoker.runtime.files import sync_folder
from stoker.runtime.locks import lock_folder
from stoker.store.cache import Cache
from stoker.store.catalog import Catalog, build_index, is_shard_name
from stoker.store.index import INDEX_FILE, Index, ShardEntry, dump_index, load_index
from stoker.store.local import LocalStorage
from stoker.store.recipe import Recipe, load_recipe
from stoker.store.remote.protocol import ChangedError, Expected
from stoker.store.repair import DAMAGED
from stoker.store.shard_read import Shard
from stoker.store.use import Use, alone


@dataclass(slots=True, kw_only=True)
class Superseded:
    """What could go from one folder: bytes by name."""

    shards: dict[str, int] = field(default_factory=dict[str, int])
    damaged: dict[str, int] = field(default_factory=dict[str, int])
    """Shards set aside by a repair, once the cache is complete without them."""


def find_superseded(folder: Path) -> Superseded:
    """Shards of a folder that serve nothing; none where it has no sound index. Reads no record."""
    view = _view(folder)
    return Superseded() if view is None else _superseded(folder, view[1])


def _superseded(folder: Path, index: Index) -> Superseded:
    sizes = LocalStorage(folder).sizes()
    aside = [path for path in sorted(folder.glob(f"{DAMAGED}shard-*")) if path.is_file()]
    idle = [entry.file for entry in index.shards if not len(entry.segments)]
    return Superseded(
        # An index is no proof that what it names are shards.
        shards={file: sizes[file] for file in idle if file in sizes and is_shard_name(file)},
        damaged={path.name: path.lstat().st_size for path in aside} if index.complete else {},
    )


def still_needed(folder: Path, names: Collection[str]) -> dict[str, str]:
    """Those of the superseded shards that hold the last good copy of a record, each with why."""
    view = _view(folder)
    if view is None:
        return dict.fromkeys(names, "the index was lost meanwhile")
    recipe, index = view
    cache = Cache(folder, recipe, index, use=Use(folder))
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
                    "Run stoker verify --repair"
                )
                break
    return needed


def drop_superseded(folder: Path, found: Superseded, *, force: bool = False) -> str | None:
    """Take shards out of the index, then remove them.

    Returns:
        Why nothing was removed: somebody has the folder open, or it changed; None where all went.
    """
    with ExitStack() as stack:
        if not stack.enter_context(alone(folder)) and not force:
            return "in use since a moment"
        # No waiting: whoever opens the folder meanwhile waits for us.
        if not stack.enter_context(lock_folder(folder, "index")):
            return "somebody writes its index"
        version = LocalStorage(folder).version(INDEX_FILE)
        view = _view(folder)
        now = Superseded() if view is None else _superseded(folder, view[1])
        same = found.shards.keys() <= now.shards.keys() and found.damaged.keys() <= now.damaged.keys()
        if view is None or not same:
            return "its shards changed meanwhile"
        recipe, index = view
        kept = tuple(shard for shard in index.shards if shard.file not in found.shards)
        data = dump_index(replace(index, shards=kept), recipe)
        try:
            _put(folder, data, found, version)
        except ChangedError:
            return "another machine replaced its index meanwhile"
        except ResourceError:
            # The disk is full, so make room first; that an index names what serves nothing is no harm.
            _unlink(folder, found)
            _put(folder, data, found, version)
        else:
            _unlink(folder, found)
    return None


def _put(folder: Path, index: bytes, found: Superseded, version: Expected) -> None:
    if found.shards:
        LocalStorage(folder).put(INDEX_FILE, index, expected=version)


def _unlink(folder: Path, found: Superseded) -> None:
    with explained(folder):
        for name in [*found.shards, *found.damaged]:
            LocalStorage(folder).remove(name)
        sync_folder(folder)


def _view(folder: Path) -> tuple[Recipe, Index] | None:
    """Recipe and index as a writer would make it next; None where there is no sound index."""
    try:
        recipe = load_recipe(folder)
        index = load_index(folder, recipe)
        storage = LocalStorage(folder)
        listed = {shard.file for shard in index.shards}
        if all(name in listed for name in storage.list() if is_shard_name(name)):
            return recipe, replace(index, generation=index.generation + 1)
        infos = Catalog(storage, recipe).refresh()
        return recipe, build_index(storage, recipe, infos, index)
    except (FormatError, OSError):
        return None


def _good_numbers(folder: Path, recipe: Recipe, entry: ShardEntry) -> list[int]:
    """Global numbers of the records of a shard that were not found damaged; none where it cannot be read."""
    try:
        shard = Shard(LocalStorage(folder).open(entry.file), folder / entry.file, recipe.schema)
    except (FormatError, OSError):
        return []
    return (np.delete(shard.numbers(), entry.bad) + recipe.parts[entry.part].offset).tolist()


def reasons(found: Superseded) -> Mapping[str, str]:
    """Why each of them may go."""
    return {
        **dict.fromkeys(found.shards, "its records serve from other shards"),
        **dict.fromkeys(found.damaged, "damaged; its records were encoded again"),
    }
