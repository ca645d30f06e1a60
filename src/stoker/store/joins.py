"""Columns of a table next to the records of a cache.

Read when the cache is opened: a corrected table needs no encoding.

A record is found in the table by its sample index, by an integer that it holds, or by its source's key.
The values are in memory once, by sample index; a loader adds those of a batch on the batch's device.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stoker.errors import Argument, ConfigError, SourceError, arg
from stoker.schema import Field, Schema
from stoker.store.cache import Cache, served_indices
from stoker.store.values import read_field
from stoker.units import format_count

if TYPE_CHECKING:
    from stoker.sources.sql.rules import Columns
    from stoker.sources.sql.tables import LabelTable

Rule = Literal["refuse", "mask", "drop"]
_log = logging.getLogger("stoker")
KNOWN = "_known"
"""Ends the name of the field that says whether a record has a value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """Table to join to the records of a cache, and how."""

    table: str | Path
    """A `.csv`, `.tsv` or `.parquet` file, a SQLite file, or a database's URL."""
    key: str | Sequence[str]
    """Column of the table that names the record, or columns that do together."""
    columns: Columns
    """Fields and their rules, as of `SQLSource`, or names of columns that hold numbers."""
    name: str | None = None
    """The table's name, in a database."""
    on: str | Sequence[str] = "index"
    """What the key names: `index`, that of the sample; a field that holds an integer; or a key per sample."""
    missing: Rule = "refuse"
    """Records without a row: refused; served as zeros with `<field>_known` False; or left out."""
    repeated: Rule = "refuse"
    """Keys with several rows: refused; or as records without a row are, masked or left out."""

    @property
    def by(self) -> str:
        """The key's columns, for messages."""
        return self.key if isinstance(self.key, str) else ", ".join(self.key)

    def __post_init__(self) -> None:
        """Refuse rules that are malformed."""
        for name, rule in (("missing", self.missing), ("repeated", self.repeated)):
            if rule not in get_args(Rule):
                raise ConfigError(f"{name} is {rule!r}", hint=f"Expected {', '.join(get_args(Rule))}")
        if {self.missing, self.repeated} == {"mask", "drop"}:
            raise ConfigError(
                "missing and repeated ask for mask and for drop", hint="Give both the same, or refuse"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinReport:
    """Comparison of a table with the records of a cache."""

    records: int
    """Stored records."""
    rows: int
    """Rows of the table."""
    matched: int
    """Records that have a value."""
    missing: int
    """Records without a row."""
    repeated: int
    """Records whose key has several rows."""
    malformed: int
    """Records whose row is malformed."""
    unused: int
    """Keys of the table that no record has."""


@dataclass(slots=True, kw_only=True)
class JoinedColumns:
    """Values by sample index."""

    schema: Schema
    """Fields that are added."""
    values: dict[str, Tensor]
    """`(samples, *shape)`, zeros where no value is known."""
    indices: NDArray[np.int64] | None
    """Sample indices of the records to serve, sorted; None: all."""
    report: JoinReport
    _on: dict[torch.device, dict[str, Tensor]] = field(default_factory=dict[torch.device, dict[str, Tensor]])

    def record(self, index: int) -> dict[str, Tensor]:
        """Return the values of one sample."""
        return {name: tensor[index].clone() for name, tensor in self.values.items()}

    def of(self, indices: Tensor, into: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Return the values of samples, `(B, *shape)`, on the device of `indices`, or written to `into`."""
        if indices.device not in self._on:
            self._on[indices.device] = {name: t.to(indices.device) for name, t in self.values.items()}
        return {
            name: torch.index_select(t, 0, indices, out=None if into is None else into[name])
            for name, t in self._on[indices.device].items()
        }


def join_table(cache: Cache, table: str | Path, **rules: Any) -> Cache:
    """Return another handle on `cache`, whose records have the columns of a table as well.

    Args:
        cache: Left as it was.
        table: As `Join.table`.
        rules: The other settings of `Join`; `key` and `columns` are needed.

    Raises:
        ConfigError, SourceError: As `join_columns`; or the cache has joined columns already, or lacks
            records: those that come later would have no values.
    """
    unknown = sorted(rules.keys() - {one.name for one in fields(Join)})
    if unknown or not {"key", "columns"} <= rules.keys():
        known = ", ".join(one.name for one in fields(Join) if one.name != "table")
        raise ConfigError(
            f"join_table got {', '.join(rules) or 'no rules'}",
            hint=f"It needs key and columns, and takes {known}",
        )
    join = Join(table=table, **rules)
    if cache.joined is not None:
        raise ConfigError(f"{cache.name} has joined columns already", hint="Join one table, made of both")
    if not cache.complete:
        raise ConfigError(
            f"{cache.path} holds {format_count(len(cache))} of {format_count(cache.recipe.count)} records, "
            "and a table is joined to the records that are there",
            hint=f"Run the same precompute to its end first, without {arg('wait', False)}, and join then",
        )
    other = copy.copy(cache)
    other.joined = join_columns(cache, join)
    return other


def join_columns(cache: Cache, join: Join) -> JoinedColumns:
    """Return the values of a table for the records of a cache.

    Raises:
        ConfigError: A field of the records has the name of a joined one; there is no field `on`.
        SourceError: A record has no row, several, or a malformed one, and that was not allowed for.
    """
    from stoker.sources.sql.tables import read_labels  # a cache without a join needs no reader of tables

    labels = read_labels(join.table, key=join.key, columns=join.columns, name=join.name)
    masked = "mask" in (join.missing, join.repeated)
    schema = _schema(cache, labels, masked=masked)
    keys = _keys(cache, join.on)
    indices = cache.indices
    repeated, own = set(labels.repeated), [keys[int(index)] for index in indices]
    state = np.array([_state(key, labels, repeated) for key in own], np.int8)
    where = f"{join.table}, joined to {cache.name}"
    _refuse(state, own, join, where, labels)
    found = state == _FOUND
    values = {name: np.zeros((cache.index.count, *f.shape), f.dtype) for name, f in schema.items()}
    for index, key in zip(indices[found].tolist(), np.array(own, object)[found], strict=True):
        for name in labels.schema:
            values[name][index] = labels.samples[key][name]
        for name in schema.keys() - labels.schema.keys():
            values[name][index] = True
    report = JoinReport(
        records=len(indices),
        rows=labels.rows,
        matched=int(found.sum()),
        missing=int((state == _MISSING).sum()),
        repeated=int((state == _REPEATED).sum()),
        malformed=int((state == _MALFORMED).sum()),
        unused=len({*labels.samples, *labels.malformed} - {*own}),
    )
    _log.info("%s: %s", where, _said(report))
    return JoinedColumns(
        schema=schema,
        values={name: torch.from_numpy(array) for name, array in values.items()},
        indices=None if masked or found.all() else indices[found],
        report=report,
    )


_FOUND, _MISSING, _REPEATED, _MALFORMED = range(4)


def _state(key: str, labels: LabelTable, repeated: set[str]) -> int:
    if key in repeated:
        return _REPEATED
    if key in labels.malformed:
        return _MALFORMED
    return _FOUND if key in labels.samples else _MISSING


def _refuse(state: NDArray[np.int8], own: Sequence[str], join: Join, where: str, labels: LabelTable) -> None:
    """Refuse what the rules do not allow for.

    Raises:
        SourceError: Names the first keys.
    """
    from stoker.sources.sql.tables import format_keys

    for kind, rule, fact in (
        (_MISSING, join.missing, "have no row"),
        (_REPEATED, join.repeated, "have several rows"),
        (_MALFORMED, join.missing, "have a malformed row"),
    ):
        keys = [key for key, found in zip(own, state.tolist(), strict=True) if found == kind]
        if keys and rule == "refuse":
            why = f" ({labels.malformed[keys[0]]})" if kind == _MALFORMED else ""
            name = "repeated" if kind == _REPEATED else "missing"
            raise SourceError(
                f"{where}: {format_count(len(keys))} of {format_count(len(own))} records {fact} by "
                f"{join.by}: {format_keys(keys)}{why}",
                hint=f"Fix the table, or allow for it: {arg(name, 'mask')} or 'drop'",
            )
    if not (state == _FOUND).any():
        on = arg("on", join.on) if isinstance(join.on, str) else f"{format_keys(join.on)} (the keys given)"
        raise SourceError(f"{where}: no record has a row", hint=f"{join.by} must hold what {on} names")


def rename_hint(column: str) -> str:
    """Return how to give a joined column another name in batches, for the message of an error."""
    return arg("columns", {"label": {"column": column, "dtype": "float32"}}, setting="data.join.columns")


def _schema(cache: Cache, labels: LabelTable, *, masked: bool) -> Schema:
    schema = dict(labels.schema)
    by_rules = labels.schema.keys() - {*labels.fields}  # `<field>_known` of null="mask" among them
    for name in labels.schema if masked else ():
        known = name + KNOWN
        if name in by_rules and name.removesuffix(KNOWN) in labels.fields:
            continue
        if known in labels.fields:
            raise ConfigError(
                f"joined columns {name!r} and {known!r}: the second name is needed, as it says which "
                "records have the first",
                hint=f"Name the second otherwise: {rename_hint(known)}",
            )
        schema.setdefault(known, Field(shape=(), dtype="bool"))
    taken = sorted(schema.keys() & {*cache.schema, "index"})
    if taken:
        raise ConfigError(
            f"{cache.name} has a field {taken[0]!r} already",
            hint=f"Name the joined one otherwise: {rename_hint(taken[0])}",
        )
    return schema


def _keys(cache: Cache, on: str | Sequence[str]) -> Mapping[int, str] | Sequence[str]:
    """Return the key of each stored record, by sample index."""
    if not isinstance(on, str):
        if len(on) != cache.index.count:
            raise ConfigError(f"on has {len(on)} keys for {cache.index.count} samples of {cache.name}")
        return list(on)
    if on == "index":
        return {int(index): str(index) for index in cache.indices}
    spec = cache.schema.get(on)
    if spec is None or spec.shape or spec.floating:
        whole = [name for name, f in cache.schema.items() if not f.shape and not f.floating]
        raise ConfigError(
            f"{arg('on', on)} is not a field of {cache.name} that holds a whole number",
            hint=f"Expected index{''.join(f', {name}' for name in whole)}, or a list of keys, one a "
            f"sample: {Argument('data.join.on', 'keys', 'on=cache.keys()').marked}",
        )
    segments, found = cache.segments, dict[int, str]()
    for shard, row, first, count in zip(
        segments.shard, segments.row, segments.first, segments.count, strict=True
    ):
        opened = cache.shard(int(shard))
        for step in range(int(count)):
            value: Any = read_field(opened, on, spec, int(row) + step).item()
            found[int(first) + step] = str(int(value))
    return found


def _said(report: JoinReport) -> str:
    parts = [f"{format_count(report.matched)} of {format_count(report.records)} records have a row"]
    for name in ("missing", "repeated", "malformed", "unused"):
        if count := getattr(report, name):
            parts.append(f"{format_count(count)} {name}")
    return ", ".join(parts)


def joint_columns(members: Sequence[Cache]) -> JoinedColumns:
    """Return the joined columns of several caches, by the indices that their samples have together."""
    found = [member.joined for member in members if member.joined is not None]
    first = np.cumsum([0, *(member.recipe.count for member in members)])
    indices = [begin + served_indices(member) for begin, member in zip(first, members, strict=False)]
    reports = [{one.name: getattr(joined.report, one.name) for one in fields(JoinReport)} for joined in found]
    return JoinedColumns(
        schema=found[0].schema,
        values={name: torch.cat([joined.values[name] for joined in found]) for name in found[0].schema},
        indices=None if all(joined.indices is None for joined in found) else np.concatenate(indices),
        report=JoinReport(**{name: sum(one[name] for one in reports) for name in reports[0]}),
    )
