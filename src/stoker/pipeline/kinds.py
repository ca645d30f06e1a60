"""Sources by kind: what `data.kind` names, made from the settings of one task and split.

A builder imports its source itself, since most need an optional package. It gives all samples of the split;
`data.limit` is applied to what it returns. `stoker.config.kinds` says what belongs to another kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from stoker.config.kinds import Kind
from stoker.config.models import DataConfig
from stoker.errors import ConfigError
from stoker.sources.files import resolve_files
from stoker.sources.hdf5 import HDF5Source
from stoker.sources.protocol import Source

Builder: TypeAlias = Callable[[DataConfig, str, str], Source]
"""Settings, name of the task and split to the source of that split."""


def hdf5_source(data: DataConfig, task: str, split: str) -> Source:
    """Simulations in HDF5 files."""
    paths = data.files if data.files is not None else resolve_files(data.root, task)
    return HDF5Source(
        paths, preset=data.preset, fields=data.fields, split=split, splits=data.splits, seed=data.seed
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


BUILDERS: Mapping[Kind, Builder] = {"hdf5": hdf5_source, "images": images_source, "sql": sql_source}
