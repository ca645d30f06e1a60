"""Find the cache of a configuration whose raw data is not there any more.

A cache outlives its source: raw files are deleted for space, or the cache alone was copied elsewhere.
The fingerprint cannot be made then, so the caches of the right name are compared entry by entry with what
the settings say: split rule, file names, declared layout, encoder with its weights, storage dtype. What only
the data could tell (its bytes, its grid) is taken from the recipe.

A cache that `stoker import-pt` made never had raw data or a recorded encoder. It is taken by its
name, if the latents have the size that the settings give, and a line says what cannot be checked.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from stoker.config import Config
from stoker.encoders.keeping import KEEPING
from stoker.encoders.steady import STEADY
from stoker.errors import ConfigError, StokerError
from stoker.pipeline.build import grid_encoder_of
from stoker.pipeline.folders import cache_dir_of
from stoker.pipeline.stages import kept_fields
from stoker.pipeline.user_code import user_encoder
from stoker.sources.files import SUFFIXES, canonical_split, split_of
from stoker.sources.hdf5_layouts import declared_fields
from stoker.sources.splits import DEFAULT_SPLITS, RULE
from stoker.store import Cache, Recipe
from stoker.store.cache import open_unnoted
from stoker.store.recipe import stored_schema
from stoker.store.use import note_use

_log = logging.getLogger("stoker")
IMPORTED = "import-pt/"
"""Prefix of the kind of a source whose cache was imported."""


def find_without_source(config: Config, task: str, splits: Sequence[str]) -> dict[str, Cache] | None:
    """The newest complete matching cache of each split; None unless the data is gone and all are found."""
    if not data_is_gone(config, task):
        return None
    found: dict[str, Cache] = {}
    for split in splits:
        folder = cache_dir_of(config) / f"{task}_{split}"
        complete = _complete(folder)
        matching = [cache for cache in complete if matches(config, cache.recipe, task, split)]
        if not matching:
            _say_unused(config, folder, complete)
            return None
        found[split] = max(matching, key=lambda cache: cache.index.sequence)
    for cache in found.values():
        note_use(cache.path)
        if is_imported(cache.recipe):
            _log.warning(
                "%s was imported with `stoker import-pt`: which data, encoder, normalization and split made "
                "it is recorded nowhere and cannot be checked",
                cache.path,
            )
    return found


def is_imported(recipe: Recipe) -> bool:
    """Return True for a cache that `stoker import-pt` made of earlier files."""
    return str(recipe.entries["source"]["kind"]).startswith(IMPORTED)


def _imported_otherwise(config: Config, recipe: Recipe) -> str:
    """What of an imported cache contradicts the settings; empty: nothing that can be told."""
    given, latent = config.latent.model_fields_set, recipe.encoded["latent"]
    wanted = {"tokens": config.latent.tokens, "dim": config.latent.dim}
    for name, there in zip(wanted, latent.shape[-2:], strict=True):
        if name in given and wanted[name] != there:
            return f"latent.{name} is {wanted[name]}, and it has {there}"
    limit = config.data.limit
    if limit is not None and recipe.count > limit:
        return f"data.limit is {limit}, and it has {recipe.count} samples"
    return ""


def _say_unused(config: Config, folder: Path, complete: Sequence[Cache]) -> None:
    """Why an earlier cache of the right name is not taken: of another size, or never imported."""
    for cache in complete:
        if is_imported(cache.recipe):
            why = _imported_otherwise(config, cache.recipe)
            _log.warning("the imported cache %s is not used: %s", cache.path, why)
    if not complete and next(folder.glob("sample_*.pt"), None) is not None:
        _log.warning(
            "%s holds sample_*.pt files of the earlier cache. `stoker import-pt %s --out %s --name %s` makes "
            "a cache of them, which is used where the raw data is gone",
            folder,
            folder,
            folder.parent,
            folder.name,
        )


def data_is_gone(config: Config, task: str) -> bool:
    """Whether no file that the settings name exists: one that is damaged, or a part of them, is not gone."""
    data = config.data
    if data.kind != "hdf5":
        return False
    if data.files is None:
        root = Path(data.root).expanduser()
        return not root.is_dir() or not any(
            file.stem == task or file.stem.startswith(f"{task}_")
            for file in root.iterdir()
            if file.suffix.lower() in SUFFIXES
        )
    return not any(_exists(Path(path).expanduser()) for path in _paths(config))


def matches(config: Config, recipe: Recipe, task: str, split: str) -> bool:
    """Whether `recipe` is what `config` asks for, as far as can be told without the data."""
    if is_imported(recipe):
        return not _imported_otherwise(config, recipe)
    source = recipe.entries["source"]
    settings: Mapping[str, Any] = source["settings"]
    return (
        _same_split(config, settings.get("split") or {}, split)
        and _same_layout(config, source)
        and _same_files(config, recipe, task)
        and _same_limit(config, recipe)
        and _same_encoder(config, recipe)
        and config.precompute.encode_batch in ("auto", None, recipe.group.samples)
        and _same_dtypes(config, recipe)
    )


def _paths(config: Config) -> tuple[str, ...]:
    files = config.data.files
    return () if files is None else (files,) if isinstance(files, str) else files


def _exists(path: Path) -> bool:
    if path.exists():
        return True
    plain = next((i for i, part in enumerate(path.parts) if any(mark in part for mark in "*?[")), None)
    if plain is None:
        return False
    return any(Path(*path.parts[:plain]).glob("/".join(path.parts[plain:])))


def _complete(folder: Path) -> list[Cache]:
    if not folder.is_dir():
        return []
    caches: list[Cache] = []
    for path in sorted(folder.iterdir()):
        try:
            caches.append(open_unnoted(path))
        except (StokerError, OSError):
            continue  # incomplete, damaged or no cache: not a candidate
    return caches


def _same_files(config: Config, recipe: Recipe, task: str) -> bool:
    """Whether the parts are the files that the settings name: no others, and all that are named plainly."""
    names = [Path(part.name).name for part in recipe.parts]
    if config.data.files is None:
        return all(name.startswith(task) for name in names)
    patterns = [Path(path) for path in _paths(config)]
    if not all(any(_covers(pattern, name) for pattern in patterns) for name in names):
        return False
    wanted = _plain_names(config, recipe.entries["source"]["settings"]["split"])
    found = [name for name in names if name in wanted]
    return found == (wanted[: len(found)] if recipe.count == config.data.limit else wanted)


def _covers(pattern: Path, name: str) -> bool:
    """Whether a file of that name can be one of a path, a pattern or a folder."""
    return fnmatch(name, pattern.name) or pattern.suffix.lower() not in SUFFIXES


def _plain_names(config: Config, rule: Mapping[str, Any]) -> list[str]:
    """Names of the files that are named without a pattern and hold the samples that `rule` takes."""
    plain = [
        Path(path).expanduser().absolute()
        for path in _paths(config)
        if Path(path).suffix.lower() in SUFFIXES and not any(mark in path for mark in "*?[")
    ]
    if not plain:
        return []
    root = os.path.commonpath([path.parent for path in plain])
    label = "train" if "fractions" in rule else str(rule.get("split"))
    carried = {path: split_of(str(path.relative_to(root)), {*DEFAULT_SPLITS, label}) for path in plain}
    return [path.name for path in plain if carried[path] in (None, label)]


def _same_layout(config: Config, source: Mapping[str, Any]) -> bool:
    """Whether preset and declared datasets agree; axes that only the files tell are taken as they are."""
    settings = source["settings"]
    preset, found = config.data.preset, str(settings.get("preset"))
    if {*settings.get("include", ())} != {*config.data.include}:
        return False
    if config.data.fields is None:
        return found != "fields" if preset is None else found == preset
    declared = declared_fields(config.data.fields)
    pieces = {
        field["field"]: [(piece["name"], piece["axes"]) for piece in field["datasets"]]
        for field in settings["layout"]
    }
    if preset is None:
        # What is declared without axes may be a parameter of the files, which is no dataset.
        asked = {
            name: [(dataset, " ".join(axes))]
            for name, (dataset, axes) in declared.items()
            if axes or name in pieces
        }
        parameters = declared.keys() - asked.keys()
        return (
            found == "fields"
            and pieces == asked
            and all(part["values"].keys() == parameters for part in source["parts"])
        )
    stated = {(dataset, " ".join(axes)) for dataset, axes in declared.values()}
    return found == preset and stated <= {piece for field in pieces.values() for piece in field}


def _same_split(config: Config, rule: Mapping[str, Any], split: str) -> bool:
    if rule.get("split") != canonical_split(split):
        return False
    shares: Mapping[str, float] | None = rule.get("fractions")
    if shares is None:
        return True
    asked = config.data.splits or DEFAULT_SPLITS
    wanted = {canonical_split(name): share for name, share in asked.items()}
    if rule.get("rule") != RULE:
        return False  # cut by an earlier version, so that its val may hold what is train now
    if rule.get("seed") != config.data.seed or not shares.keys() <= wanted.keys():
        return False
    # Fractions may have been cut from the train files alone; then they are the same ones, scaled.
    total = sum(wanted[name] for name in shares) / sum(shares.values())
    return all(math.isclose(share * total, wanted[name], rel_tol=1e-9) for name, share in shares.items())


def _same_limit(config: Config, recipe: Recipe) -> bool:
    cut = any(str(part["selection"]).startswith("first ") for part in recipe.entries["source"]["parts"])
    limit = config.data.limit
    return not cut if limit is None else recipe.count == limit if cut else recipe.count <= limit


def _same_encoder(config: Config, recipe: Recipe) -> bool:
    entry, keep = recipe.entries["encoder"], kept_fields(config)
    if entry is not None and entry["class"] == KEEPING:
        if entry["config"]["fields"] != list(keep):
            return False
        entry = entry["config"]["inner"]
    elif keep and entry is not None:
        return False
    if config.data.normalize:
        if entry is None or entry["class"] != "stoker.Normalized" or entry["config"]["method"] != "standard":
            return False
        entry = entry["config"]["inner"]
    if config.encoder.kind == "identity" or entry is None:
        return entry is None and config.encoder.kind == "identity"
    if config.encoder.kind == "module":
        return _same_module(config, entry)
    if config.data.input is None:
        return _same_grid_encoder(config, entry, "data")
    if entry["class"] != STEADY:
        return False
    parts, fields = entry["config"], {"input": config.data.input, "solution": "data"}
    return all(_same_grid_encoder(config, parts[part], field) for part, field in fields.items())


def _same_grid_encoder(config: Config, entry: Mapping[str, Any], field: str) -> bool:
    if entry["class"] != "stoker.GridEncoder":
        return False
    made = entry["config"]
    try:
        encoder = grid_encoder_of(config, field, grid=tuple(made["grid"]), channels=made["channels"])
    except StokerError:
        return False
    return encoder.identity() == entry


def _same_module(config: Config, entry: Mapping[str, Any]) -> bool:
    """Whether the module of the settings, made again, is the one that encoded."""
    time = config.encoder.time or entry["config"].get("time")
    try:
        encoder = user_encoder(config.encoder.model_copy(update={"time": time}), {})
        return encoder.identity() == entry
    except StokerError:
        return False


def _same_dtypes(config: Config, recipe: Recipe) -> bool:
    try:
        return stored_schema(recipe.encoded, config.training.latent_cache_dtype) == recipe.schema
    except ConfigError:  # this dtype is not for all of these fields, so this is another's cache
        return False
