"""Records that meet a condition, by SQLite over the columns that hold one number a record."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stoker.errors import ConfigError
from stoker.schema import Schema
from stoker.store.access import Column
from stoker.store.cache import Cache, served_indices
from stoker.store.keys import SampleKeys

_ALLOWED = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION}
_STEPS_A_TICK, _TICKS = 1_000_000, 1_000
"""Limit on SQLite's work, so that every condition ends: 10^9 steps for each million records."""
_CHUNK = 1 << 14
"""Records whose values are Python objects at a time, on their way into SQLite."""
INDEX, KEY = "sample_index", "key"
"""What a condition calls the index and the key of a sample."""


@dataclass(frozen=True, slots=True)
class ConditionColumn:
    """What a condition may name."""

    name: str
    meaning: str
    """For messages: `field 'label'`."""
    read: Callable[[], NDArray[Any] | SampleKeys]
    """Returns the value of each record, `(n,)`; called only for a condition that uses the name."""


def find_where(cache: Cache, condition: str) -> NDArray[np.int64]:
    """Return the sample indices of served records that meet a condition; as `Cache.where`.

    Raises:
        ConfigError, MissingRecordError: As `select_rows`.
    """
    indices = served_indices(cache)
    columns = [*sample_columns(cache, indices), *field_columns(cache, indices)]
    return indices[select_rows(columns, condition, len(indices), cache.name)]


def sample_columns(cache: Cache, indices: NDArray[np.int64]) -> list[ConditionColumn]:
    """Return the index and the key of each of `n` samples, as a condition names them.

    Args:
        cache: Whose samples they are.
        indices: Their sample indices, `(n,)`.
    """
    return [
        ConditionColumn(INDEX, "the index of the sample", lambda: indices),
        ConditionColumn(KEY, "the key of the sample", lambda: cache.keys().select(indices)),
    ]


def field_columns(
    cache: Cache, indices: NDArray[np.int64], names: Mapping[str, str] | None = None
) -> list[ConditionColumn]:
    """Return the fields that hold one number a record, of `n` records; joined columns among them.

    Args:
        cache: Where the records are.
        indices: Their sample indices, `(n,)`; they may repeat.
        names: By field what a condition calls it; None: as the cache does. Fields left out are none.
    """
    places = np.searchsorted(cache.indices, indices)

    def stored(name: str) -> Callable[[], NDArray[Any]]:
        return lambda: _plain(Column(cache, name)[:])[places]

    def joined(values: Tensor) -> Callable[[], NDArray[Any]]:
        return lambda: _plain(values)[indices]

    readers = {name: stored(name) for name in _single(cache.schema)}
    if cache.joined is not None:
        readers |= {name: joined(cache.joined.values[name]) for name in _single(cache.joined.schema)}
    called = {name: name for name in readers} if names is None else names
    return [
        ConditionColumn(called[name], f"field {called[name]!r}", read)
        for name, read in readers.items()
        if name in called
    ]


def select_rows(
    columns: Sequence[ConditionColumn], condition: str, count: int, where: str
) -> NDArray[np.int64]:
    """Return the rows of a table that meet a condition, `(n,)`, sorted.

    Args:
        columns: What the condition may name. Values of those that it uses are read, and no others.
        condition: SQL as after WHERE.
        count: Rows.
        where: What the table is of, for messages.

    Raises:
        ConfigError: It is not a condition over these columns, or uses a name that several of them have.
        MissingRecordError: It uses the key, and the cache has no keys.
    """
    named: dict[str, list[ConditionColumn]] = {}
    for column in columns:
        named.setdefault(_folded(column.name), []).append(column)
    names = [same[0].name for same in named.values()]
    row = "_row"
    while row in named:
        row += "_"
    query = f"SELECT {row} FROM records WHERE ({condition}\n) ORDER BY {row}"  # noqa: S608 - it may read
    with closing(sqlite3.connect(":memory:")) as database:
        try:
            database.execute(
                f"CREATE TABLE records ({row} INTEGER PRIMARY KEY, {_listed(names)}) WITHOUT ROWID"
            )
            used = _used(database, query)
            for name in _in_double_quotes(condition):
                if _folded(name) not in named:  # SQLite takes it for a text
                    raise sqlite3.OperationalError(f"no such column: {name}")
            read = [_only_one(same, condition) for name, same in named.items() if name in used]
            database.set_authorizer(None)
            _fill(database, row, read, count)
            database.set_authorizer(_may)
            ticks = iter(range(_TICKS * (1 + count // 1_000_000)))
            database.set_progress_handler(lambda: next(ticks, None) is None, _STEPS_A_TICK)
            return np.fromiter((place for (place,) in database.execute(query)), np.int64)
        except (sqlite3.Error, sqlite3.Warning) as error:
            raise ConfigError(
                f"the condition {condition!r} is not understood: {error}",
                hint=f"Give SQL as after WHERE, as {_example(names)!r}. Columns of {where} are "
                f"{', '.join(names)}; a name with a dot goes in double quotes",
            ) from error


def _used(database: sqlite3.Connection, query: str) -> set[str]:
    """Return the names that a query reads, folded; SQLite tells them when it compiles the query.

    Raises:
        sqlite3.Error: It cannot be compiled, or would do more than read.
    """
    used: set[str] = set()

    def look(action: int, table: str | None, column: str | None, *_: object) -> int:
        if action == sqlite3.SQLITE_READ and column:
            used.add(_folded(column))
        return _may(action)

    database.set_authorizer(look)
    database.execute(f"EXPLAIN {query}").fetchall()
    return used


def _may(action: int, *_: object) -> int:
    """Let a condition read, and do nothing else."""
    return sqlite3.SQLITE_OK if action in _ALLOWED else sqlite3.SQLITE_DENY


def _only_one(columns: Sequence[ConditionColumn], condition: str) -> ConditionColumn:
    """Return the one column of a name.

    Raises:
        ConfigError: Several have it.
    """
    if len(columns) > 1:
        name = columns[-1].name
        raise ConfigError(
            f"{name!r} in the condition {condition!r} means {' and '.join(one.meaning for one in columns)}",
            hint="Names must differ in more than case. Give the field another name in its source, or compare "
            f"the values of cache[{name!r}][:]",
        )
    return columns[0]


def _fill(database: sqlite3.Connection, row: str, columns: Sequence[ConditionColumn], count: int) -> None:
    """Put the values of columns into the table, some rows at a time."""
    names = _listed([row, *(column.name for column in columns)])
    marks = ", ".join("?" * (1 + len(columns)))
    values = [column.read() for column in columns]
    for begin in range(0, count, _CHUNK):
        end = min(begin + _CHUNK, count)
        chunk = [one[begin:end] for one in values]
        lists = [one if isinstance(one, list) else one.tolist() for one in chunk]
        database.executemany(
            f"INSERT INTO records ({names}) VALUES ({marks})",  # noqa: S608 - names in quotes
            zip(range(begin, end), *lists, strict=True),
        )


def _folded(name: str) -> str:
    """Return a name as SQLite compares it: the case of ASCII letters does not count."""
    return re.sub("[A-Z]", lambda letter: letter[0].lower(), name)


def _listed(names: Iterable[str]) -> str:
    """Return names of columns for SQL, in double quotes."""
    return ", ".join('"' + name.replace('"', '""') + '"' for name in names)


def _in_double_quotes(condition: str) -> Iterator[str]:
    """Yield the names in double quotes of a condition, those inside of texts left out."""
    for name in re.findall(r"""'(?:[^']|'')*'|"((?:[^"]|"")*)\"""", condition):
        if name:
            yield name.replace('""', '"')


def _example(names: Iterable[str]) -> str:
    return f"{next(name for name in names if name != KEY)} > 3"


def _single(schema: Schema) -> list[str]:
    """Return the fields that hold one number a record."""
    return [name for name, field in schema.items() if field.shape in ((), (1,)) and not field.ragged]


def _plain(values: Tensor) -> NDArray[Any]:
    """Return one number a record, `(n,)`."""
    return (values.float() if values.dtype == torch.bfloat16 else values).numpy().reshape(-1)
