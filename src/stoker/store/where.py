"""Records that meet a condition, by SQLite over the columns that hold one number a record."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stoker.errors import ConfigError, MissingRecordError
from stoker.schema import Schema

if TYPE_CHECKING:
    from stoker.store.cache import Cache

_ALLOWED = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION}
_STEPS_A_TICK, _TICKS = 1_000_000, 1_000
"""Steps of SQLite's machine between two looks, and looks for each million records: so a condition ends."""


def find_where(cache: Cache, condition: str) -> NDArray[np.int64]:
    """As `Cache.where`.

    Raises:
        ConfigError: It is no condition over these columns.
    """
    rows = select_rows(dict(columns_of(cache, cache.indices)), condition, len(cache), cache.name)
    return cache.indices[rows]


def select_rows(columns: dict[str, list[Any]], condition: str, count: int, where: str) -> NDArray[np.int64]:
    """Return the rows of a table that meet a condition, `(n,)`, sorted.

    Args:
        columns: Values of each row by name.
        condition: SQL as after WHERE.
        count: Rows.
        where: What the table is of, for messages.

    Raises:
        ConfigError: It is no condition over these columns.
    """
    names = ", ".join(f'"{name.replace(chr(34), chr(34) * 2)}"' for name in columns)
    with closing(sqlite3.connect(":memory:")) as database:
        database.execute(f"CREATE TABLE records ({names})")
        marks = ", ".join("?" * len(columns))
        rows = zip(*columns.values(), strict=True)
        database.executemany(f"INSERT INTO records VALUES ({marks})", rows)  # noqa: S608 - our own marks
        database.set_authorizer(_may)
        ticks = iter(range(_TICKS * (1 + count // 1_000_000)))
        database.set_progress_handler(lambda: next(ticks, None) is None, _STEPS_A_TICK)
        query = f"SELECT rowid FROM records WHERE ({condition}\n) ORDER BY rowid"  # noqa: S608 - it may read
        try:
            found = database.execute(query).fetchall()
        except (sqlite3.Error, sqlite3.Warning) as error:
            raise ConfigError(
                f"the condition {condition!r} is not understood: {error}",
                hint=f"Give SQL as after WHERE, as {_example(columns)!r}. Columns of {where} are "
                f"{', '.join(columns)}; a name with a dot goes in double quotes",
            ) from error
    return np.array([row for (row,) in found], np.int64) - 1


def _may(action: int, *_: object) -> int:
    """Let a condition read, and do nothing else."""
    return sqlite3.SQLITE_OK if action in _ALLOWED else sqlite3.SQLITE_DENY


def _example(columns: dict[str, Any]) -> str:
    return f"{next(name for name in columns if name != 'key')} > 3"


def columns_of(cache: Cache, numbers: NDArray[np.int64]) -> Iterator[tuple[str, list[Any]]]:
    """Yield what a condition may name, with a value for each of some stored records.

    Args:
        cache: Where they are stored.
        numbers: Their sample indices; they may repeat.
    """
    listed = numbers.tolist()
    yield "number", listed
    try:
        keys = cache.keys()
        yield "key", [keys[number] for number in listed]
    except MissingRecordError:
        pass
    places = np.searchsorted(cache.indices, numbers)
    for name in _single(cache.schema):
        yield name, _plain(cache[name][:])[places].tolist()
    if cache.joined is not None:
        for name in _single(cache.joined.schema):
            yield name, _plain(cache.joined.values[name])[numbers].tolist()


def _single(schema: Schema) -> list[str]:
    """Return the fields that hold one number a record."""
    return [name for name, field in schema.items() if field.shape in ((), (1,)) and not field.ragged]


def _plain(values: Tensor) -> NDArray[Any]:
    """Return one number a record, `(n,)`."""
    return (values.float() if values.dtype == torch.bfloat16 else values).numpy().reshape(-1)
