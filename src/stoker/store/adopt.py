"""Take over what a sibling cache has encoded already.

When files are added to a source, the parts that were there keep their keys; their shards carry part-local
numbers, so they serve in the new cache as they are: by a hard link, or a copy.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np

from stoker.errors import FormatError, StalledError
from stoker.store.catalog import (
    Catalog,
    damaged_rows,
    is_shard_name,
    known_index,
    noted_damage,
    presence,
    read_info,
)
from stoker.store.failures import Failure, read_failures
from stoker.store.local import LocalStorage
from stoker.store.recipe import Recipe, load_recipe
from stoker.store.use import Use

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
