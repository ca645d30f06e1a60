"""Sources by kind: what `data.kind` names, made from the settings of one task and split.

A builder imports its source itself, since most need an optional package. It gives all samples of the split;
`data.limit` is applied to what it returns. `stoker.config.kinds` says what belongs to another kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from stoker.config.kinds import Kind
from stoker.config.models import DataConfig
from stoker.config.section import Names
from stoker.errors import ConfigError
from stoker.pipeline.user_dataset import torch_source
from stoker.sources.files import resolve_files
from stoker.sources.hdf5 import HDF5Source
from stoker.sources.meshes import MeshLayout, MeshSource
from stoker.sources.protocol import Source
from stoker.sources.split_of import SplitOf

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
    from stoker.sources.sql.request import Timeouts
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
    from stoker.sources.parquet import ParquetSource

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
