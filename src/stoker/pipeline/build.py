"""Turn settings into sources, an encoder and cache names.

One configuration describes one cache per task and split. All splits share the encoder, and a
normalisation's statistics come from the train split alone, so that nothing leaks from val or test.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from stoker.config import Config
from stoker.config.models import DataConfig
from stoker.config.sections import Kind, Names
from stoker.encoders.features import FeatureEncoder
from stoker.encoders.grid import GridEncoder
from stoker.encoders.keeping import keeping
from stoker.encoders.mesh import mesh_encoder_for
from stoker.encoders.normalize import Normalized, Statistics, fit_statistics
from stoker.encoders.protocol import Encoder
from stoker.encoders.steady import SteadyEncoder
from stoker.errors import ConfigError, FormatError, ReadOnlyError, ResourceError
from stoker.pipeline.encode_batch import settled_batch
from stoker.pipeline.folders import cache_dir_of
from stoker.pipeline.stages import kept_fields
from stoker.pipeline.staging import staged_data
from stoker.pipeline.user_code import torch_source, user_encoder
from stoker.plan.resources import automatic_device
from stoker.runtime.jsonio import read_strict
from stoker.schema import Schema, canonical_json, digest_json
from stoker.sources.files import canonical_split, resolve_files
from stoker.sources.hdf5 import HDF5Source
from stoker.sources.meshes import MeshLayout, MeshSource
from stoker.sources.protocol import Source, Splitting
from stoker.sources.splits import SplitOf, Subset
from stoker.store import Digests, make_recipe
from stoker.store.storage import open_storage

# ----------------------------------------------------------------------------------------------------------
# Sources by kind: what `data.kind` names, made from the settings of one task and split.
#
# A builder imports its source itself, since most need an optional package. It gives all samples of the
# split; `data.limit` is applied to what it returns. `stoker.config.sections` says what belongs to another
# kind.


Builder: TypeAlias = Callable[[DataConfig, str, str], Source]
"""Settings, name of the task and split to the source of that split."""


def hdf5_source(data: DataConfig, task: str, split: str) -> Source:
    """Simulations in HDF5 files."""
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
    """Images and their labels."""
    from stoker.sources.images.source import ImageSource, Labels

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
    """Rows of a database."""
    from stoker.sources.sql.query import Timeouts
    from stoker.sources.sql.source import SQLSource

    sql = data.sql
    if sql.url is None or sql.key is None or sql.columns is None:
        raise ConfigError(
            "data.kind=sql needs data.sql.url, data.sql.table (or query), data.sql.key and data.sql.columns "
            "(docs/sql.md)"
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
        timeouts=Timeouts(
            connect_s=sql.connect_s, statement_s=sql.statement_s, lock_s=sql.lock_s, attempts=sql.attempts
        ),
    )


def arrays_source(data: DataConfig, task: str, split: str) -> Source:
    """Trajectories and grids in HDF5, Zarr and `.npy`."""
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
    """Particles, meshes, and grids with a group `fields`."""
    own = data.arrays
    if own.offsets is not None:
        raise ConfigError(
            f"data.arrays.offsets is for data.arrays.layout=offsets, and it is {layout}. Remove it"
        )
    return MeshSource(
        _files(data),
        layout=layout,
        fields=data.fields,
        attributes=own.attributes or None,
        fill_missing=own.fill_missing,
    )


def tar_source(data: DataConfig, task: str, split: str) -> Source:
    """Archives of samples."""
    from stoker.sources.tar import TarSource

    source = TarSource(_files(data), fields=data.tar.members)
    return SplitOf(source, split, splits=data.splits, seed=data.seed)


def parquet_source(data: DataConfig, task: str, split: str) -> Source:
    """Rows of tables."""
    from stoker.sources.tables import ParquetSource

    source = ParquetSource(_files(data), columns=data.parquet.columns, key=data.parquet.key)
    return SplitOf(source, split, splits=data.splits, seed=data.seed)


def _files(data: DataConfig) -> Names:
    """`data.files`, else `data.root` where that is given.

    Raises:
        ConfigError: Neither is.
    """
    if data.files is not None:
        return data.files
    if "root" in data.model_fields_set:
        return data.root
    raise ConfigError(f"data.kind={data.kind} reads data.files, which is not given. Name a path or pattern")


BUILDERS: Mapping[Kind, Builder] = {
    "hdf5": hdf5_source,
    "images": images_source,
    "sql": sql_source,
    "torch": torch_source,
    "arrays": arrays_source,
    "tar": tar_source,
    "parquet": parquet_source,
}


# ----------------------------------------------------------------------------------------------------------
# Statistics of the train split, fitted once and kept beside the caches.
#
# They belong to the encoder, so a fingerprint needs them on every start; reading all samples again for that
# would undo what a cache is for. What is kept is found by the content of the train split, not by its name.


FOLDER = ".statistics"
LIMIT_BYTES = 1 << 20


def train_statistics(source: Source, field: str, *, digests: Digests, cache_dir: Path) -> Statistics:
    """Mean and deviation of `field` over all samples of `source`, the train split; from disk when known.

    Raises:
        EncoderError, RecordError: As `fit_statistics`.
    """
    content = make_recipe(source, None, digests=digests).entries["source"]
    name = f"{digest_json([content, field])[:32]}.json"
    folder = open_storage(cache_dir / FOLDER)
    with suppress(OSError, FormatError, KeyError, TypeError):
        kept = read_strict(folder.read(name, limit_bytes=LIMIT_BYTES), where=name)
        if kept.get("check") == digest_json(kept["statistics"]):
            return _from_json(kept["statistics"])
    statistics = fit_statistics(source, field)
    data = asdict(statistics)
    # A folder that cannot be written is no error here: then they are fitted again next time.
    with suppress(ReadOnlyError, ResourceError, OSError):
        folder.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.put(name, canonical_json({"statistics": data, "check": digest_json(data)}).encode())
    return statistics


def _from_json(data: dict[str, Any]) -> Statistics:
    return Statistics(
        field=data["field"],
        method=data["method"],
        shift=tuple(data["shift"]),
        scale=tuple(data["scale"]),
        digest=data["digest"],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One cache of a configuration: what to encode, with what, under which name."""

    name: str
    """Folder below the cache directory, `{task}_{split}`."""
    split: str
    source: Source
    encoder: Encoder | None
    encode_batch: int | None = None
    """Samples in one call of the encoder; None: by the fixed rule."""


def build_jobs(config: Config, task: str, splits: Sequence[str]) -> list[Job]:
    """One job per split of `task`, in that order.

    Raises:
        ConfigError, EncoderError: The encoder's settings do not fit the data.
        SplitError, SourceError: A split or its files are not there.
    """
    sources = build_sources(config, task, splits)
    fitted_on = None
    if config.data.normalize:
        fitted_on = sources.get("train") or build_source(config, task, "train")
    encoder = build_encoder(config, next(iter(sources.values())).schema(), fitted_on=fitted_on)
    encoder = keeping(encoder, kept_fields(config))
    settled = settled_batch(config, task, encoder, next(iter(sources.values())))
    batch = None if settled is None else settled.samples
    return [
        Job(name=f"{task}_{split}", split=split, source=source, encoder=encoder, encode_batch=batch)
        for split, source in sources.items()
    ]


def share_encoders(jobs: Sequence[Job], known: dict[str, Encoder]) -> list[Job]:
    """The jobs with one object for all encoders that are equal; `known` holds those so far by identity."""
    shared: list[Job] = []
    for job in jobs:
        own = job.encoder
        same = None if own is None else known.setdefault(digest_json(own.identity()), own)
        shared.append(replace(job, encoder=same))
    return shared


def record_schema(job: Job) -> Schema:
    """Fields of the records as encoded; storing may narrow their dtypes.

    Raises:
        EncoderError: The encoder does not fit the samples.
    """
    samples = job.source.schema()
    return samples if job.encoder is None else job.encoder.schema(samples)


def tasks_of(config: Config) -> list[str]:
    """Names of the tasks; where none is given, made from `data.files`, or from the folder or kind of data."""
    data = config.data
    given = data.model_fields_set
    if "task" not in given and data.files is not None:
        return [stem_of(data.files)]
    if "task" not in given and data.dataset is not None:
        return [stem_of(data.dataset.rpartition(":")[2]).lower()]
    if "task" not in given and data.kind != "hdf5":
        return [stem_of(data.root) if "root" in given else data.kind]
    return list(data.tasks)


def names_of_caches(config: Config) -> dict[str, tuple[str, str]]:
    """Return task and split of each cache that the settings may make, by name; `data.split` comes first."""
    splits = dict.fromkeys([*map(canonical_split, config.data.wanted_splits), "train", "val", "test"])
    return {f"{task}_{split}": (task, split) for task in tasks_of(config) for split in splits}


def stem_of(files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> str:
    """A cache's name from the first path of `data.files`: its stem, or its folder's name for a pattern.

    Later entries do not count, so that a file added to the list keeps the name and its records are reused.

    >>> stem_of("raw/1D_Burgers_Sols_Nu0.01.hdf5"), stem_of(["raw/sols_*.h5"]), stem_of("raw/*.h5")
    ('1D_Burgers_Sols_Nu0.01', 'sols', 'raw')
    """
    first = Path(files if isinstance(files, str | os.PathLike) else next(iter(files), "data"))
    known = first.suffix.lower() in {".h5", ".hdf5", ".hdf", ".he5", ".zarr", ".npy", ".tar", ".parquet"}
    name = first.stem if known else first.name
    for text in (name, first.parent.name, "data"):
        plain = re.sub(r"[^A-Za-z0-9._-]+", "_", re.sub(r"\[[^]]*\]|[*?]+", "", text)).strip("._-")
        if plain:
            return plain
    return "data"


def build_source(config: Config, task: str, split: str) -> Source:
    """The samples of one split of one task."""
    return build_sources(config, task, [split])[split]


def build_sources(config: Config, task: str, splits: Sequence[str]) -> dict[str, Source]:
    """The samples of some splits of one task, of one reading of the data where the source can share it.

    A table may change between two readings, and then one row would be in two splits.
    """
    data, found = staged_data(config, task), dict[str, Source]()
    shared: Source | None = None
    for split in splits:
        if isinstance(shared, Splitting):
            source = shared.for_split(split)
        else:
            source = shared = BUILDERS[data.kind](data, task, split)
        found[split] = source if data.limit is None else Subset(source, data.limit)
    return found


def build_encoder(config: Config, schema: Schema, *, fitted_on: Source | None) -> Encoder | None:
    """The encoder that the settings describe; None stores samples as they are.

    Args:
        config: `latent` and `encoder` decide; grid and channels come from the samples.
        schema: Fields of the samples.
        fitted_on: The train split, where samples are normalised.
    Raises:
        ConfigError: The samples have no grid.
        EncoderError: The patch does not divide the grid.
    """
    encoder = ENCODERS[config.encoder.kind](config, schema)
    if config.data.input is not None:
        if config.data.input == "data":
            raise ConfigError(
                "data.input is 'data', which is the solution that is to be predicted. Name the field that it "
                f"follows from. Samples have {', '.join(schema)}"
            )
        if not isinstance(encoder, GridEncoder):
            raise ConfigError(
                f"data.input is {config.data.input!r}, which the grid encoder encodes as it does 'data', and "
                f"encoder.kind is {config.encoder.kind}. Set encoder.kind=grid, or leave data.input out"
            )
        encoder = SteadyEncoder(grid_encoder(config, schema, config.data.input), encoder)
    if fitted_on is None:
        return encoder
    cache_dir = cache_dir_of(config)
    digests = Digests(cache_dir, config.identity)
    return Normalized(encoder, train_statistics(fitted_on, "data", digests=digests, cache_dir=cache_dir))


def feature_encoder(config: Config, _schema: Schema) -> FeatureEncoder:
    """The vision model of `encoder.folder`.

    Raises:
        ConfigError: No folder is given.
        EncoderError: It holds no such model.
    """
    own = config.encoder
    if own.folder is None:
        raise ConfigError(
            "encoder.kind=features needs encoder.folder, a local folder with a vision model (docs/images.md)"
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
                f"have {shown}. Set encoder.kind=identity to store samples as they are, or name the "
                "dataset with data.fields"
            )
        fitting = {
            other: shape for other, shape in shown.items() if other != "data" and len(shape) in (3, 4, 5)
        }
        fact = "samples have no such field" if field is None else f"that field has shape {field.shape}"
        raise ConfigError(
            f"data.input is {name!r}, and {fact}. Expected one on a grid, (H, W, C) or (D, H, W, C). Fields "
            f"that data.input may name: {fitting or 'none'}"
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
    own = config.encoder
    return mesh_encoder_for(
        schema,
        tokens=config.latent.tokens,
        dim=config.latent.dim,
        seed=own.seed,
        checkpoint=own.checkpoint,
    )


ENCODERS: Mapping[str, Callable[[Config, Schema], Encoder | None]] = {
    "grid": grid_encoder,
    "features": feature_encoder,
    "mesh": _mesh_encoder,
    "module": lambda config, schema: user_encoder(config.encoder, schema),
    "identity": lambda _config, _schema: None,
}
"""By `encoder.kind`, the function that makes the encoder from the settings and the fields of the samples."""


def device_of(config: Config) -> str:
    """`training.device`, with `auto` resolved: a GPU where there is one."""
    wanted = config.training.device
    if wanted != "auto":
        return wanted
    return automatic_device()[0]
