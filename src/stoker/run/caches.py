"""The caches of a configuration: which there are, what they hold, and in what two of them differ."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from stoker.config import Config, load_config
from stoker.encoders.wrappers import KEEPING, STEADY
from stoker.errors import ConfigError, FormatError, MissingRecordError, SourceError, StokerError
from stoker.run.build import CacheJob, build_jobs, grid_encoder_of
from stoker.run.context import Run, kept_fields, names_of_caches
from stoker.runtime.jsonio import as_object
from stoker.schema import Json, JsonResult, Schema
from stoker.sources.files import SUFFIXES, canonical_split, split_of
from stoker.sources.hdf5_declared import declared_fields
from stoker.sources.splits import DEFAULT_SPLITS, RULE
from stoker.store import (
    Cache,
    Difference,
    Digests,
    Recipe,
    diff_recipes,
    load_recipe,
    make_recipe,
    open_cache,
)
from stoker.store.access import first_values
from stoker.store.cache import peek_cache
from stoker.store.format import RECIPE_FILE
from stoker.store.index import ShardInfo
from stoker.store.recipe import stored_schema
from stoker.store.storage import display_path, mirror_url, note_use, resolve_local

log = logging.getLogger("stoker")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLocation:
    """One cache of a configuration."""

    recipe: Recipe
    folder: Path
    """The recipe's folder, which need not exist."""
    cache: Cache | None
    """The records stored so far, complete or not."""
    source_gone: bool = False

    @property
    def missing(self) -> int:
        """Samples neither stored nor quarantined."""
        done = 0 if self.cache is None else len(self.cache) + len(self.cache.index.quarantined)
        return self.recipe.count - done


def locate(run: Run, split: str) -> CacheLocation:
    """Return the recipe of one cache of a task, and the cache if it has been begun.

    Raises:
        StokerError: As `build_jobs`; a source that is gone is an error only where no cache matches the rest.
    """
    return locate_with_job(run, split)[1]


def locate_with_job(run: Run, split: str) -> tuple[CacheJob | None, CacheLocation]:
    """Return the job that makes the cache (None: the source is gone), then what `locate` returns."""
    try:
        (job,) = build_jobs(run, [split])
        return job, locate_job(run, job)
    except SourceError:
        found = find_without_source(run, [split])
        if found is None:
            raise
        cache = found[split]
        return None, CacheLocation(recipe=cache.recipe, folder=cache.path, cache=cache, source_gone=True)


def locate_job(run: Run, job: CacheJob) -> CacheLocation:
    """As `locate`, of a source that is there."""
    recipe = job_recipe(run, job)
    folder = run.cache_dir / job.name / recipe.fingerprint
    try:
        cache = open_cache(folder, require_complete=False)
    except (StokerError, OSError):
        cache = None  # nothing there yet, or nothing that can be served
    return CacheLocation(recipe=recipe, folder=folder, cache=cache)


def recipe_of(run: Run, split: str) -> Recipe:
    """Return the recipe of one cache of a task, its files digested.

    Raises:
        StokerError: As `build_jobs` and `make_recipe`.
    """
    return job_recipe(run, build_jobs(run, [split])[0])


def job_recipe(run: Run, job: CacheJob) -> Recipe:
    """As `recipe_of`, of sources and an encoder that are made already."""
    digests = Digests(run.cache_dir, run.config.identity)
    if run.config.precompute.in_place:
        from stoker.store.in_place import in_place_recipe  # few runs serve files in place

        return in_place_recipe(job.source, digests)
    dtype = run.config.training.latent_cache_dtype
    return make_recipe(job.source, job.encoder, dtype=dtype, encode_batch=job.encode_batch, digests=digests)


# ----------------------------------------------------------------------------------------------------------
# Single records, by key or by a condition.


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundRecords(JsonResult):
    """Records of a cache, as `stoker cache get` shows them."""

    path: str
    """The cache."""
    count: int
    """Records that were asked for, or that meet the condition."""
    records: list[dict[str, Json]]
    """The first of them: `index`, `key`, and by field shape, dtype and first values."""


def get_records(path: str, keys: Sequence[str], where: str | None, limit: int) -> FoundRecords:
    """Return records by key, or those that meet a condition; all where neither is given.

    Raises:
        MissingRecordError: No sample has a key, or the cache has no keys.
        ConfigError: `where` is no condition.
    """
    cache = open_cache(path, require_complete=False)
    indices = [cache.keys().index(key) for key in keys]
    if where is not None:
        met = cache.where(where).tolist()
        indices = [index for index in indices if index in met] if keys else met
    elif not keys:
        indices = cache.indices.tolist()
    records: list[dict[str, Json]] = []
    for index in indices[:limit]:
        fields: dict[str, Json] = {
            name: {
                "shape": [*value.shape],
                "dtype": str(value.dtype).removeprefix("torch."),
                "values": first_values(value),
            }
            for name, value in cache[index].items()
        }
        records.append({"index": index, "key": _key(cache, index), "fields": fields})
    return FoundRecords(path=str(cache.path), count=len(indices), records=records)


def _key(cache: Cache, index: int) -> str | None:
    try:
        return cache.keys()[index]
    except MissingRecordError:
        return None


# ----------------------------------------------------------------------------------------------------------
# What a cache holds, from its index alone.


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSummary(JsonResult):
    """One cache, as `stoker cache show` shows it."""

    name: str
    path: str
    address: str | None
    """Where it lies, if that is not this machine; `path` is then its mirror."""
    fingerprint: str
    records: int
    """Records stored."""
    count: int
    """Samples of the source; stored and quarantined together, when complete."""
    fields: Schema
    """Fields as stored."""
    shards: int
    """Shards that are there."""
    bytes: int
    """Bytes of these on disk."""
    raw_bytes: int
    """Bytes of these uncompressed."""
    missing_shards: tuple[dict[str, Json], ...]
    """Each shard that is gone (`bytes` is None), or has another size than was written: `shard`, `records`,
    `bytes`, `expected_bytes`."""
    complete: bool
    quarantined: tuple[dict[str, Json], ...]
    """Number, stage and error of each sample set aside."""
    statistics: Mapping[str, Any]
    """Per field, as kept in the index."""
    error: Mapping[str, Any]
    """Per field: largest and root-mean-square rounding error of the storage dtype, relative."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFolder(JsonResult):
    """The caches of one folder, as `stoker cache show` lists them."""

    path: str
    caches: tuple[CacheSummary, ...]
    """By name; those of one name from the newest recipe to the oldest."""
    unreadable: Mapping[str, str]
    """Why a cache that is there cannot be opened, by its name, with its fingerprint if there are several."""


def inspect_path(path: str | Path) -> CacheSummary | CacheFolder:
    """Return what a cache holds, or a folder of several caches.

    Args:
        path: Of the cache or the folder, or its URL.

    Raises:
        FormatError: There is no cache, or not one that this version reads.
        StokerError: As `resolve_local`, of a URL.
    """
    folder = resolve_local(path)
    names = names_in(folder)
    if not names:
        return inspect_cache(folder)
    caches: list[CacheSummary] = []
    unreadable: dict[str, str] = {}
    for name in names:
        recipes = sorted((folder / name).glob("*/recipe.json"), key=lambda file: -file.stat().st_mtime_ns)
        several = len(recipes) > 1
        for place in [file.parent for file in recipes] if several else [folder / name]:
            try:
                caches.append(inspect_cache(place))
            except StokerError as error:
                unreadable[f"{name}/{place.name}" if several else name] = str(error)
    return CacheFolder(path=display_path(folder), caches=tuple(caches), unreadable=unreadable)


def names_in(folder: Path) -> list[str]:
    """Return the names of the caches in a folder, sorted; none where it is a cache itself."""
    if next(folder.glob(f"*/{RECIPE_FILE}"), None) is not None:
        return []
    return sorted({recipe.parent.parent.name for recipe in folder.glob(f"*/*/{RECIPE_FILE}")})


def inspect_cache(path: str | Path) -> CacheSummary:
    """Read a cache's index; costs O(shards), no record is read.

    Raises:
        FormatError: There is no cache, or not one that this version reads.
    """
    cache = open_cache(path, require_complete=False)
    return CacheSummary(
        name=cache.name,
        path=str(cache.path),
        address=mirror_url(cache.path),
        fingerprint=cache.fingerprint,
        records=len(cache),
        count=cache.recipe.count,
        fields=cache.schema,
        shards=len(_present(cache)),
        bytes=shard_bytes(cache),
        raw_bytes=raw_bytes(cache),
        missing_shards=tuple(
            {
                "shard": lost.entry.file,
                "records": lost.entry.records,
                "bytes": lost.size,
                "expected_bytes": lost.entry.bytes,
            }
            for lost in cache.lost
        ),
        complete=cache.complete,
        quarantined=tuple(list_quarantined(cache)),
        statistics=cache.statistics,
        error=cache.index.error,
    )


def list_quarantined(cache: Cache) -> list[dict[str, Json]]:
    """Return number, stage, error and attempts of each sample set aside, by number."""
    return [
        {"number": number, "stage": f.stage, "error": f.error, "attempts": f.attempts, "kind": f.kind}
        for number, f in sorted(cache.index.quarantined.items())
    ]


def shard_bytes(cache: Cache) -> int:
    """Return bytes of all shards on disk."""
    return sum(shard.bytes for shard in _present(cache))


def raw_bytes(cache: Cache) -> int:
    """Return bytes of all shards uncompressed."""
    return sum(shard.raw_bytes for shard in _present(cache))


def _present(cache: Cache) -> list[ShardInfo]:
    """Return the shards of the index without those that are gone."""
    lost = {one.entry.file for one in cache.lost}
    return [shard for shard in cache.index.shards if shard.file not in lost]


def worst_error(cache: Cache) -> float | None:
    """Return the largest relative rounding error over all fields; None where nothing was rounded."""
    errors = [entry.get("max") for entry in cache.index.error.values()]
    return max((error for error in errors if error is not None), default=None)


# ----------------------------------------------------------------------------------------------------------
# Find the cache of a configuration whose raw data is not there any more.
#
# A cache outlives its source: raw files are deleted for space, or the cache alone was copied.
# The fingerprint cannot be made then, so the caches of the right name are compared entry by entry with what
# the settings say: split rule, file names, declared layout, encoder with its weights, storage dtype. What
# only the data could tell (its bytes, its grid) is taken from the recipe.
#
# A cache that `stoker cache adopt` made never had raw data or a recorded encoder. It is taken by its
# name, if the latents have the size that the settings give, and a line says what cannot be checked.


ADOPTED = "adopt/"
"""Begins the kind of a source of features that existed."""
IMPORTED = (ADOPTED, "import-pt/")
"""The same, and what its earlier form, of `.pt` files alone, was called."""


def find_without_source(run: Run, splits: Sequence[str]) -> dict[str, Cache] | None:
    """Return the newest complete matching cache of each split; None unless the data is gone and all exist."""
    if not data_is_gone(run) or run.config.precompute.in_place:
        return None
    found: dict[str, Cache] = {}
    for split in splits:
        folder = run.cache_dir / f"{run.task}_{split}"
        complete = _complete(folder)
        matching = [cache for cache in complete if matches(run, cache.recipe, split)]
        if not matching:
            _say_unused(run.config, folder, complete)
            return None
        found[split] = max(matching, key=lambda cache: cache.index.sequence)
    for cache in found.values():
        note_use(cache.path)
        if is_imported(cache.recipe):
            log.warning(
                "%s was made with `stoker cache adopt`: which data, encoder, normalization and split "
                "made it is recorded nowhere and cannot be checked",
                cache.path,
            )
    return found


def is_imported(recipe: Recipe) -> bool:
    """Return True for a cache that `stoker cache adopt` made of features on disk."""
    return str(recipe.entries["source"]["kind"]).startswith(IMPORTED)


def _imported_otherwise(config: Config, recipe: Recipe) -> str:
    """Say what of an imported cache contradicts the settings; empty if nothing is known to."""
    given, latent = config.latent.model_fields_set, recipe.encoded.get("latent")
    if latent is None or len(latent.shape) != 3 or not latent.time:
        return "it has no latents (T, L, D)"
    wanted = {"tokens": config.latent.tokens, "dim": config.latent.dim}
    for name, there in zip(wanted, latent.shape[-2:], strict=True):
        if name in given and wanted[name] != there:
            return f"latent.{name} is {wanted[name]}, and it has {there}"
    limit = config.data.limit
    if limit is not None and recipe.count > limit:
        return f"data.limit is {limit}, and it has {recipe.count} samples"
    return ""


def _say_unused(config: Config, folder: Path, complete: Sequence[Cache]) -> None:
    """Say why an earlier cache of the right name is not used: of another size, or never imported."""
    for cache in complete:
        if is_imported(cache.recipe):
            why = _imported_otherwise(config, cache.recipe)
            log.warning("the imported cache %s is not used: %s", cache.path, why)
    if not complete and next(folder.glob("sample_*.pt"), None) is not None:
        log.warning(
            "%s holds sample_*.pt files of the earlier cache. `stoker cache adopt %s --out %s --name %s` "
            "makes a cache of them, which is used where the raw data is gone",
            folder,
            folder,
            folder.parent,
            folder.name,
        )


def data_is_gone(run: Run) -> bool:
    """Return True if no file that the settings name exists; damaged files and some of several count."""
    data, task = run.config.data, run.task
    if data.kind != "hdf5":
        return False
    if data.files is None:
        root = Path(data.root).expanduser()
        return not root.is_dir() or not any(
            file.stem == task or file.stem.startswith(f"{task}_")
            for file in root.iterdir()
            if file.suffix.lower() in SUFFIXES
        )
    return not any(_exists(Path(path).expanduser()) for path in _paths(run.config))


def matches(run: Run, recipe: Recipe, split: str) -> bool:
    """Return True if `recipe` is what the settings ask for, as far as can be told without the data."""
    config = run.config
    if is_imported(recipe):
        return not _imported_otherwise(config, recipe)
    source = recipe.entries["source"]
    settings: Mapping[str, Any] = source["settings"]
    return (
        _same_split(config, settings.get("split") or {}, split)
        and _same_layout(config, source)
        and _same_files(config, recipe, run.task)
        and _same_limit(config, recipe)
        and not recipe.entries.get("in_place")  # its bytes are gone with the data
        and _same_encoder(config, recipe, kept_fields(run))
        and config.precompute.encode_batch in ("auto", None, recipe.encode_batch.samples)
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
            caches.append(peek_cache(path))
        except (StokerError, OSError):
            continue  # incomplete, damaged or no cache: not a candidate
    return caches


def _same_files(config: Config, recipe: Recipe, task: str) -> bool:
    """Return True if the parts are the files that the settings name: no others, and all without a pattern."""
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
    """Return True if a file of that name may be meant by a path, a pattern or a folder."""
    return fnmatch(name, pattern.name) or pattern.suffix.lower() not in SUFFIXES


def _plain_names(config: Config, rule: Mapping[str, Any]) -> list[str]:
    """Return names of the files that are named without a pattern and hold the samples that `rule` takes."""
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
    """Return True if preset and declared datasets agree; axes that only the files know are accepted."""
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


def _same_encoder(config: Config, recipe: Recipe, keep: Sequence[str]) -> bool:
    entry = recipe.entries["encoder"]
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
    """Return True if the module of the settings, created again, is the one that encoded."""
    from stoker.run.user_code import user_encoder

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


# ----------------------------------------------------------------------------------------------------------
# Name the entries in which two recipes differ, so that a cache that was not used explains itself.


WRAPPERS = {
    KEEPING: ("kept", "raw fields are kept on one side only"),
    "stoker.Normalized": ("normalized", "the encoder takes normalized values on one side only"),
}
"""Classes in the identity of encoders around another one, outermost first; their entry and its meaning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation(JsonResult):
    """Differences between two recipes."""

    json_keys = ("same", "differences", "a", "b")

    a: str
    """Where the first recipe is from: a folder, or a configuration and cache name."""
    b: str
    differences: tuple[Difference, ...]

    @property
    def same(self) -> bool:
        """True if both have the same fingerprint."""
        return not self.differences


@dataclass(frozen=True, slots=True, kw_only=True)
class _LabeledRecipe:
    """One of the two recipes."""

    label: str
    recipe: Recipe
    folder: Path
    """The recipe's own folder, which need not exist."""


def explain(a: str | Path, b: str | Path | None = None, *, overrides: Sequence[str] = ()) -> Explanation:
    """Compare the recipes of two caches or configurations.

    Args:
        a: A cache, a recipe's folder or a settings file.
        b: The other one. None: the folder next to `a` whose recipe differs least.
        overrides: `key=value`, over the settings files among the two.
    Raises:
        FormatError: There is no cache to compare with.
        ConfigError, SourceError: A settings file, or what it names, cannot be read.
    """
    if overrides and not any(path is not None and _is_config(path) for path in (a, b)):
        raise ConfigError(
            f"settings ({', '.join(overrides)}) were given, and only caches",
            hint="Settings go with a settings file: compare with one, as c.yaml",
        )
    first = _side(a, None, overrides)
    if b is None:
        second = _nearest(first)
    else:
        second = _side(b, first.folder.parent.name if _is_config(b) else None, overrides)
    differences = differences_of(first.recipe, second.recipe)
    return Explanation(a=first.label, b=second.label, differences=tuple(differences))


def differences_of(a: Recipe, b: Recipe) -> list[Difference]:
    """As `diff_recipes`, in the terms of the settings: what wraps one encoder is one difference.

    Parts of a torch Dataset have no bytes that were compared, but probed samples.
    """
    found: list[Difference] = []
    for wrapper, (name, note) in WRAPPERS.items():
        inside = [_inside(recipe, wrapper) for recipe in (a, b)]
        if (inside[0] is None) != (inside[1] is None):
            said = ["no" if recipe is None else "yes" for recipe in inside]
            found.append(Difference(entry=f"encoder.{name}", a=said[0], b=said[1], note=note))
            a, b = inside[0] or a, inside[1] or b
    found += diff_recipes(a, b)
    if not str(b.entries["source"]["kind"]).startswith("torch/"):
        return found
    return [
        replace(d, note="probed samples or code differ") if d.entry.endswith(".digest") else d for d in found
    ]


def _inside(recipe: Recipe, wrapper: str) -> Recipe | None:
    """Return the recipe without a wrapper around its encoder; None where the encoder has no such wrapper."""
    encoder = as_object(recipe.entries["encoder"]) or {}
    if encoder.get("class") != wrapper:
        return None
    return Recipe(entries={**recipe.entries, "encoder": encoder["config"]["inner"]})


def _is_config(path: str | Path) -> bool:
    return Path(path).suffix.lower() in {".yaml", ".yml"}


def _side(path: str | Path, name: str | None, overrides: Sequence[str]) -> _LabeledRecipe:
    """Return one side of a comparison; `name` picks one of a configuration's caches, None the first."""
    if not _is_config(path):
        at = resolve_local(path)
        folder = at if (at / "recipe.json").is_file() else open_cache(at, require_complete=False).path
        return _LabeledRecipe(label=display_path(folder), recipe=load_recipe(folder), folder=folder)
    run = Run(load_config(path, overrides))
    known = names_of_caches(run)
    if name is not None and name not in known:
        raise ConfigError(
            f"{path} describes {', '.join(known)}, not {name}", hint="Compare caches of one name"
        )
    chosen = name or next(iter(known))
    recipe = recipe_of(*known[chosen])
    folder = run.cache_dir / chosen / recipe.fingerprint
    return _LabeledRecipe(label=f"{path} ({chosen}, {recipe.fingerprint})", recipe=recipe, folder=folder)


def _nearest(side: _LabeledRecipe) -> _LabeledRecipe:
    """Return the recipe next to `side` that differs in the fewest entries; its own if that has a cache."""
    found: list[tuple[int, str, _LabeledRecipe]] = []
    parent = side.folder.parent
    for folder in sorted(parent.iterdir()) if parent.is_dir() else []:
        own = folder.resolve() == side.folder.resolve()
        if own and not _is_from_config(side):
            continue
        try:
            recipe = load_recipe(folder)
        except (StokerError, OSError):
            continue
        other = _LabeledRecipe(label=display_path(folder), recipe=recipe, folder=folder)
        found.append((len(differences_of(side.recipe, recipe)), folder.name, other))
    if not found:
        raise FormatError(
            f"{display_path(parent)} holds no other cache to compare with",
            hint="Give B, or run precompute first",
        )
    return min(found, key=lambda item: item[:2])[2]


def nearest_differences(recipe: Recipe, folder: Path) -> tuple[Path, list[Difference]] | None:
    """Return the folder next to `folder` whose recipe differs least from `recipe`, and the differences."""
    side = _LabeledRecipe(label=display_path(folder), recipe=recipe, folder=folder)
    try:
        other = _nearest(side)
    except FormatError:
        return None
    return other.folder, differences_of(other.recipe, recipe)


def _is_from_config(side: _LabeledRecipe) -> bool:
    return side.label != display_path(side.folder)
