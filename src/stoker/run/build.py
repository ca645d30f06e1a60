"""Turn settings into sources, an encoder and cache names.

One configuration describes one cache per task and split. All splits share the encoder, and a
normalization's statistics come from the train split alone, so that nothing leaks from val or test.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from stoker.config import Config
from stoker.config.models import DataConfig
from stoker.config.sections import Names
from stoker.encoders.grid import GridEncoder
from stoker.encoders.protocol import Encoder
from stoker.encoders.wrappers import (
    FieldStatistics,
    NormalizedEncoder,
    SteadyEncoder,
    fit_statistics,
    keep_fields,
)
from stoker.errors import (
    ConfigError,
    FormatError,
    ReadOnlyError,
    ResourceError,
    StalledError,
    StokerError,
    docs_url,
)
from stoker.plan.resources import resolve_device
from stoker.plugins import find_plugin
from stoker.run.context import Run, encode_devices, kept_fields
from stoker.runtime.files import make_folder
from stoker.runtime.jsonio import read_strict
from stoker.runtime.locks import lock_folder
from stoker.schema import Schema, as_json, canonical_json, digest_json
from stoker.sources.files import resolve_files
from stoker.sources.protocol import Source, SplittableSource
from stoker.sources.splits import SplitOf, Subset
from stoker.store import Digests, load_recipe, make_recipe
from stoker.store.cache import peek_cache
from stoker.store.storage import open_storage
from stoker.units import format_count

if TYPE_CHECKING:
    from stoker.encoders.features import FeatureEncoder
    from stoker.precompute import EncodeBatch
    from stoker.sources.meshes import MeshLayout, MeshSource

log = logging.getLogger("stoker")

# ----------------------------------------------------------------------------------------------------------
# Sources by kind: what `data.kind` names, made from the settings of one task and split.
#
# A builder imports its source itself: most need an optional package, and a run needs one of them. It gives
# all samples of the split; `data.limit` is applied to what it returns. Builders are entry points of the group
# `stoker.sources`, these here as well as those of other packages. `stoker.config.sections` says what belongs
# to another kind.


Builder: TypeAlias = Callable[[DataConfig, str, str], Source]
"""Settings, name of the task and split to the source of that split."""


def hdf5_source(data: DataConfig, task: str, split: str) -> Source:
    """Return the source of simulations in HDF5 files."""
    from stoker.sources.hdf5 import HDF5Source

    paths = data.files if data.files is not None else resolve_files(data.root, task)
    return HDF5Source(
        paths,
        preset=data.preset,
        fields=data.fields,
        split=split,
        splits=data.splits,
        seed=data.seed,
        include=data.include,
    )


def images_source(data: DataConfig, task: str, split: str) -> Source:
    """Return the source of images and their labels."""
    from stoker.sources.images import ImageSource, Labels

    own = data.images.model_dump()
    labels = Labels(**{name: own.pop(name) for name in Labels.__dataclass_fields__})
    return ImageSource(
        data.root,
        own.pop("annotations"),
        labels=labels,
        split=split,
        splits=data.splits,
        seed=data.seed,
        **own,
    )


def sql_source(data: DataConfig, task: str, split: str) -> Source:
    """Return rows of a database."""
    from stoker.sources.sql.query import QueryTimeouts
    from stoker.sources.sql.source import SQLSource

    sql = data.sql
    if sql.url is None or sql.key is None or sql.columns is None:
        given = {"url": sql.url, "table": sql.table or sql.query, "key": sql.key, "columns": sql.columns}
        missing = [f"data.sql.{name}" for name, value in given.items() if value is None]
        database = "DATABASE-URL" if sql.url is None else sql.url
        raise ConfigError(
            f"data.kind=sql also needs {', '.join(missing)}",
            hint=f"Give them, or let `stoker init {database}` find them ({docs_url('how-to/sql')})",
        )
    return SQLSource(
        sql.url,
        key=sql.key,
        columns=sql.columns,
        table=sql.table,
        query=sql.query,
        where=sql.where,
        split=split,
        splits=data.splits,
        seed=data.seed,
        version_query=sql.version_query,
        timeouts=QueryTimeouts(
            connect_s=sql.connect_s, statement_s=sql.statement_s, lock_s=sql.lock_s, attempts=sql.attempts
        ),
    )


def arrays_source(data: DataConfig, task: str, split: str) -> Source:
    """Return the source of trajectories and grids in HDF5, Zarr and `.npy`."""
    from stoker.sources.arrays import ArraySource

    own = data.arrays
    if own.layout in ("particles", "mesh", "grid"):
        return SplitOf(_mesh_source(data, own.layout), split, splits=data.splits, seed=data.seed)
    source = ArraySource(
        _files(data),
        layout=own.layout,
        fields=data.fields,
        offsets=own.offsets,
        attributes=own.attributes,
        fill_missing=own.fill_missing,
    )
    return SplitOf(source, split, splits=data.splits, seed=data.seed)


def _mesh_source(data: DataConfig, layout: MeshLayout) -> MeshSource:
    """Return the source of particles, meshes, and grids with a group `fields`."""
    from stoker.sources.meshes import MeshSource

    own = data.arrays
    if own.offsets is not None:
        raise ConfigError(
            f"data.arrays.offsets is for data.arrays.layout=offsets, and it is {layout}", hint="Remove it"
        )
    return MeshSource(
        _files(data),
        layout=layout,
        fields=data.fields,
        attributes=own.attributes or None,
        fill_missing=own.fill_missing,
    )


def tar_source(data: DataConfig, task: str, split: str) -> Source:
    """Return the source of samples in archives."""
    from stoker.sources.tar import TarSource

    source = TarSource(_files(data), fields=data.tar.members)
    return SplitOf(source, split, splits=data.splits, seed=data.seed)


def parquet_source(data: DataConfig, task: str, split: str) -> Source:
    """Return rows of tables."""
    from stoker.sources.tables import ParquetSource

    source = ParquetSource(_files(data), columns=data.parquet.columns, key=data.parquet.key)
    return SplitOf(source, split, splits=data.splits, seed=data.seed)


def cache_source(data: DataConfig, task: str, split: str) -> Source:
    """Return the records of caches."""
    from stoker.store.source import CacheSource

    return SplitOf(CacheSource(_files(data)), split, splits=data.splits, seed=data.seed)


def _files(data: DataConfig) -> Names:
    """Return `data.files`, else `data.root` where that is given.

    Raises:
        ConfigError: Neither is.
    """
    if data.files is not None:
        return data.files
    if "root" in data.model_fields_set:
        return data.root
    raise ConfigError(
        f"data.kind={data.kind} reads data.files, which is not given", hint="Name a path or pattern"
    )


# ----------------------------------------------------------------------------------------------------------
# Statistics of the train split, fitted once and kept next to the caches.
#
# They belong to the encoder, so a fingerprint needs them on every start; reading all samples again for that
# would undo what a cache is for. What is kept is found by the content of the train split, not by its name.


STATISTICS_FOLDER = ".statistics"
LIMIT_BYTES = 1 << 20


def train_statistics(source: Source, field: str, *, digests: Digests, cache_dir: Path) -> FieldStatistics:
    """Mean and deviation of `field` over all samples of `source`, the train split; from disk when known.

    Raises:
        EncoderError, RecordError: As `fit_statistics`.
    """
    content = make_recipe(source, None, digests=digests).entries["source"]
    name = f"{digest_json([content, field])[:32]}.json"
    folder = open_storage(cache_dir / STATISTICS_FOLDER)
    with suppress(OSError, FormatError, KeyError, TypeError):
        kept = read_strict(folder.read(name, limit_bytes=LIMIT_BYTES), where=name)
        if kept.get("check") == digest_json(kept["statistics"]):
            values: dict[str, Any] = kept["statistics"]
            values |= {"shift": tuple(values["shift"]), "scale": tuple(values["scale"])}
            return FieldStatistics(**values)
    statistics = fit_statistics(source, field)
    data = as_json(statistics)
    # A folder that cannot be written is no error here: then they are fitted again next time.
    with suppress(ReadOnlyError, ResourceError, OSError):
        folder.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.put(name, canonical_json({"statistics": data, "check": digest_json(data)}).encode())
    return statistics


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheJob:
    """One cache of a configuration: what to encode, with what, under which name."""

    name: str
    """Folder below the cache directory, `{task}_{split}`."""
    split: str
    source: Source
    encoder: Encoder | None
    encode_batch: int | None = None
    """Samples in one call of the encoder; None: by the fixed rule."""


def build_jobs(run: Run, splits: Sequence[str]) -> list[CacheJob]:
    """Return one job per split of a task, in that order; all have one encoder.

    Raises:
        ConfigError, EncoderError: The encoder's settings do not fit the data.
        SplitError, SourceError: A split or its files are not there.
    """
    sources = build_sources(run, splits)
    fitted_on = None
    if run.config.data.normalize:
        fitted_on = sources.get("train") or build_source(run, "train")
    first = next(iter(sources.values()))
    encoder = keep_fields(build_encoder(run, first.schema(), fitted_on=fitted_on), kept_fields(run))
    if encoder is not None:
        encoder = run.encoders.setdefault(digest_json(encoder.identity()), encoder)
    settled = settled_batch(run, encoder, first)
    batch = None if settled is None else settled.samples
    return [
        CacheJob(name=f"{run.task}_{split}", split=split, source=source, encoder=encoder, encode_batch=batch)
        for split, source in sources.items()
    ]


def record_schema(job: CacheJob) -> Schema:
    """Return fields of the records as encoded; storing may narrow their dtypes.

    Raises:
        EncoderError: The encoder does not fit the samples.
    """
    samples = job.source.schema()
    return samples if job.encoder is None else job.encoder.schema(samples)


def build_source(run: Run, split: str) -> Source:
    """Return the samples of one split of a task."""
    return build_sources(run, [split])[split]


def build_sources(run: Run, splits: Sequence[str]) -> dict[str, Source]:
    """Return the samples of some splits of a task, of one reading of the data where the source can share it.

    A table may change between two readings, and then one row would be in two splits.
    """
    data, found = run.config.data, dict[str, Source]()
    if data.stage != "never":
        from stoker.run.staging import staged_data  # few runs stage files

        data = staged_data(run)
    make: Builder = find_plugin("stoker.sources", data.kind, "data.kind").load()
    shared: Source | None = None
    for split in splits:
        if isinstance(shared, SplittableSource):
            source = shared.for_split(split)
        else:
            source = shared = make(data, run.task, split)
        found[split] = source if data.limit is None else Subset(source, data.limit)
    return found


def build_encoder(run: Run, schema: Schema, *, fitted_on: Source | None) -> Encoder | None:
    """Return the encoder that the settings describe; None stores samples as they are.

    Args:
        run: `latent` and `encoder` of its settings decide; grid and channels come from the samples.
        schema: Fields of the samples.
        fitted_on: The train split, where samples are normalized.
    Raises:
        ConfigError: The samples have no grid.
        EncoderError: The patch does not divide the grid.
    """
    config = run.config
    encoder = ENCODERS[config.encoder.kind](config, schema)
    if config.data.input is not None:
        if config.data.input == "data":
            raise ConfigError(
                "data.input is 'data', which is the solution that is to be predicted",
                hint=f"Name the field that it follows from. Samples have {', '.join(schema)}",
            )
        if not isinstance(encoder, GridEncoder):
            raise ConfigError(
                f"data.input is {config.data.input!r}, which the grid encoder encodes as it does 'data', "
                f"and encoder.kind is {config.encoder.kind}",
                hint="Set encoder.kind=grid, or leave data.input out",
            )
        encoder = SteadyEncoder(grid_encoder(config, schema, config.data.input), encoder)
    if fitted_on is None:
        return encoder
    digests = Digests(run.cache_dir, config.identity)
    statistics = train_statistics(fitted_on, "data", digests=digests, cache_dir=run.cache_dir)
    return NormalizedEncoder(encoder, statistics)


def feature_encoder(config: Config, _schema: Schema) -> FeatureEncoder:
    """Return the vision model of `encoder.folder`.

    Raises:
        ConfigError: No folder is given.
        EncoderError: It holds no such model.
    """
    from stoker.encoders.features import FeatureEncoder

    own = config.encoder
    if own.folder is None:
        raise ConfigError(
            "encoder.kind=features needs encoder.folder, which is not given",
            hint="Give encoder.folder=FOLDER, a local folder with a vision model "
            f"({docs_url('how-to/images')})",
        )
    return FeatureEncoder(own.folder, own.pooling, processor=own.processor)


def grid_encoder(config: Config, schema: Schema, name: str = "data") -> GridEncoder:
    """Return the `GridEncoder` of one field of `schema`; see `build_encoder`."""
    field = schema.get(name)
    axes = 0 if field is None else len(field.shape)
    if field is None or axes not in (3, 4, 5):
        shown = {name: field.shape for name, field in schema.items()}
        if name == "data":
            raise ConfigError(
                "the grid encoder takes a field 'data' of shape (T, H, W, C) or (T, D, H, W, C), samples "
                f"have {shown}",
                hint="Set encoder.kind=identity to store samples as they are, or name the dataset with "
                "data.fields",
            )
        fitting = {
            other: shape for other, shape in shown.items() if other != "data" and len(shape) in (3, 4, 5)
        }
        fact = "samples have no such field" if field is None else f"that field has shape {field.shape}"
        raise ConfigError(
            f"data.input is {name!r}, and {fact}",
            hint="Expected one on a grid, (H, W, C) or (D, H, W, C). Fields that data.input may name: "
            f"{fitting or 'none'}",
        )
    patch = config.encoder.patch_size
    # Four axes without time are steps all the same, unless three numbers of the patch say otherwise.
    deep = axes == 5 or (axes == 4 and not field.time and isinstance(patch, tuple) and len(patch) == 3)
    *grid, channels = field.shape[-4 if deep else -3 :]
    return grid_encoder_of(config, name, grid=tuple(grid), channels=channels)


def grid_encoder_of(config: Config, field: str, *, grid: tuple[int, ...], channels: int) -> GridEncoder:
    """Return the `GridEncoder` that the settings describe for a field of this size."""
    return GridEncoder(
        channels=channels,
        grid=grid,
        patch=config.encoder.patch(grid),
        field=field,
        tokens=config.latent.tokens,
        dim=config.latent.dim,
        fourier=config.encoder.fourier,
        seed=config.encoder.seed,
        checkpoint=config.encoder.checkpoint,
    )


def _mesh_encoder(config: Config, schema: Schema) -> Encoder:
    from stoker.encoders.mesh import mesh_encoder_for

    own = config.encoder
    return mesh_encoder_for(
        schema,
        tokens=config.latent.tokens,
        dim=config.latent.dim,
        seed=own.seed,
        checkpoint=own.checkpoint,
    )


def _module_encoder(config: Config, schema: Schema) -> Encoder:
    from stoker.run.user_code import user_encoder

    return user_encoder(config.encoder, schema)


ENCODERS: Mapping[str, Callable[[Config, Schema], Encoder | None]] = {
    "grid": grid_encoder,
    "features": feature_encoder,
    "mesh": _mesh_encoder,
    "module": _module_encoder,
    "identity": lambda _config, _schema: None,
}
"""By `encoder.kind`, the function that makes the encoder from the settings and the fields of the samples."""


# ----------------------------------------------------------------------------------------------------------
# Decide `precompute.encode_batch: auto`, so that all runs over the same data use one number.
#
# The number of samples in a call is in the recipe. It would be another on another machine, or on a busy
# day, and then everything would be encoded again. So what is stored decides first: the number under which
# this encoder has most records of this shape. Then what was measured before, noted in the cache folder. Only
# when there is neither is it measured, by one process for all. See docs/design/039-encode-batch-size.md.


BATCH_FOLDER = ".encode_batch"
WAIT_S = 600.0
"""Seconds to wait for a process that measures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodeBatchChoice:
    """The number in force."""

    samples: int | None
    """None: the fixed rule."""
    where: str
    """The reason for it, in words."""


def settled_batch(run: Run, encoder: Encoder | None, source: Source) -> EncodeBatchChoice | None:
    """Return the number in force for the caches of a task; None where `auto` has nothing to go by yet.

    Args:
        run: Of the task.
        encoder, source: Of one of its caches; all splits share the number.

    Raises:
        EncoderError: The encoder does not fit the samples.
    """
    asked = run.config.precompute.encode_batch
    if asked != "auto" or encoder is None:
        return EncodeBatchChoice(samples=None if asked == "auto" else asked, where="precompute.encode_batch")
    folder, records = run.cache_dir, encoder.schema(source.schema())
    identity = encoder.identity()
    counts = Counter[int | None]()
    for path in sorted(folder.glob(f"{run.task}_*/*/recipe.json")):
        with suppress(StokerError, OSError, KeyError):
            recipe = load_recipe(path.parent)
            same = recipe.entries["encoder"] == json.loads(canonical_json(identity))
            if same and _shapes(recipe.encoded) == _shapes(records):
                samples = recipe.encode_batch.samples if recipe.encode_batch.steps is None else None
                counts[samples] += 1 + _stored(path.parent)
    if counts:
        best = max(counts, key=lambda samples: (counts[samples], -(samples or 0)))
        return EncodeBatchChoice(samples=best, where="the number of the cache that is there")
    return _noted(folder, _key(identity, records))


def measured_jobs(run: Run, jobs: Sequence[CacheJob]) -> list[CacheJob]:
    """Return the jobs of a task with the number of samples that their encoder is to be given in a call.

    Where `auto` has nothing to go by, it is measured here, by the first rank, and noted.

    Args:
        run: Of the task; all of its ranks are to make this call.
        jobs: As `build_jobs` gives them.

    Raises:
        EncoderError, ResourceError: The encoder does not work.
        StalledError: The encoder, or the process that measures, does not come back.
    """
    first = jobs[0]
    if run.config.precompute.encode_batch != "auto" or first.encoder is None:
        return list(jobs)
    told = "null"
    if run.ranks.is_rank_zero:
        settled = settled_batch(run, first.encoder, first.source) or _measure(run, jobs)
        log.info("%s: encode batch %s (%s)", run.task, _say(settled.samples), settled.where)
        told = json.dumps(settled.samples)
    samples = json.loads(run.ranks.all_gather(told, "the size of an encode batch")[0])
    return [replace(job, encode_batch=samples) for job in jobs]


def measure_jobs(run: Run, jobs: Sequence[CacheJob]) -> EncodeBatch:
    """Measure the encoder of a task, up to the samples of its largest file.

    Raises:
        StokerError: As `measure_encode_batch`.
    """
    from stoker.precompute import measure_encode_batch  # the number is nearly always known

    first = jobs[0]
    assert first.encoder is not None
    most = max(part.count for job in jobs for part in job.source.identity().parts)
    return measure_encode_batch(
        first.encoder,
        first.source.schema(),
        str(resolve_device(encode_devices(run)[0])),
        most=max(1, most),
        timeout_s=run.config.precompute.timeouts.encode,
    )


def _measure(run: Run, jobs: Sequence[CacheJob]) -> EncodeBatchChoice:
    """Measure once for all processes that share the cache folder, and note what came out."""
    first, folder = jobs[0], run.cache_dir
    assert first.encoder is not None
    key = _key(first.encoder.identity(), first.encoder.schema(first.source.schema()))
    try:
        make_folder(folder / BATCH_FOLDER)
        with lock_folder(folder / BATCH_FOLDER, key, timeout_s=WAIT_S) as got:
            if not got:
                raise StalledError(
                    f"another process has measured the encode batch in {folder / BATCH_FOLDER} for "
                    f"{WAIT_S:g} s",
                    hint="End it, or give precompute.encode_batch a number",
                )
            known = _noted(folder, key)
            if known is not None:
                return known
            found = measure_jobs(run, jobs)
            note = canonical_json(found.to_json()).encode()
            open_storage(folder / BATCH_FOLDER).put(f"{key}.json", note)
    except (ReadOnlyError, OSError):  # nothing can be stored there either
        found = measure_jobs(run, jobs)
    return EncodeBatchChoice(samples=found.samples, where=f"measured on {found.device}: {found.why}")


def _noted(folder: Path, key: str) -> EncodeBatchChoice | None:
    with suppress(OSError, FormatError, KeyError):
        note = open_storage(folder / BATCH_FOLDER).read(f"{key}.json", limit_bytes=LIMIT_BYTES)
        found = read_strict(note, where=f"{BATCH_FOLDER}/{key}.json")
        samples = found["samples"]
        if samples is None or (type(samples) is int and samples > 0):
            return EncodeBatchChoice(samples=samples, where=f"measured before on {found['device']}")
    return None


def _key(identity: object, records: Schema) -> str:
    return digest_json([identity, _shapes(records)])[:32]


def _shapes(schema: Schema) -> list[list[object]]:
    return [[name, list(field.shape)] for name, field in sorted(schema.items())]


def _stored(folder: Path) -> int:
    try:
        return len(peek_cache(folder, require_complete=False))
    except (StokerError, ResourceError, OSError):
        return 0


def _say(samples: int | None) -> str:
    return "by the fixed rule" if samples is None else f"of {format_count(samples, 'sample')}"
