"""Read a cache like a sequence: by index, slice and list, field by field, and as a table to look at."""

from __future__ import annotations

import html
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, SupportsIndex, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stoker.errors import RecordError
from stoker.schema import Field, Schema
from stoker.store.shard import PIECE_BYTES, ColumnSink
from stoker.store.values import read_field, torch_dtype, view_bytes
from stoker.units import format_bytes, format_count

if TYPE_CHECKING:
    from stoker.store.cache import Cache

PREVIEW_VALUES = 4
"""Values of a record that a preview shows of each field."""


def sample_index(key: SupportsIndex, count: int) -> int:
    """Return the index of a sample; negative ones count from the end of the dataset, if it is that long.

    >>> sample_index(-1, 10), sample_index(-11, 10)
    (9, -11)
    """
    index = operator.index(key)
    return index + count if -count <= index < 0 else index


def is_index(key: object) -> bool:
    """Return True for one index, also as an array or tensor without axes."""
    return isinstance(key, SupportsIndex) and not (isinstance(key, Tensor | np.ndarray) and key.ndim)


def selected(key: object, count: int, stored: NDArray[np.int64], field: str) -> NDArray[np.int64]:
    """Return the sample indices of a slice, which are those stored, or of a list, array or mask of indices.

    Args:
        key: What is asked for.
        count: Samples of the dataset.
        stored: Indices of those that there are.
        field: Name of one, for the hint.

    Raises:
        RecordError: It is not an index, slice, or list of indices.
    """
    if isinstance(key, slice):
        steps = range(*key.indices(count))
        wanted = np.arange(steps.start, steps.stop, steps.step, dtype=np.int64)
        return wanted if len(stored) == count else wanted[np.isin(wanted, stored)]
    if isinstance(key, Tensor | Sequence | np.ndarray) and not isinstance(key, str | bytes):
        try:
            wanted = np.asarray(cast("Any", key))
        except ValueError:  # rows of different lengths
            wanted = np.empty((0, 0))
        if wanted.dtype == np.bool_ and wanted.shape == (count,):
            return np.flatnonzero(wanted)
        if wanted.ndim == 1 and (wanted.dtype.kind in "iu" or not len(wanted)):
            wanted = wanted.astype(np.int64)
            return np.where((-count <= wanted) & (wanted < 0), wanted + count, wanted)
    raise RecordError(
        f"a cache has no entry {key!r}",
        hint="Give a sample index, as cache[5], a slice, as cache[10:20], a list of indices, as cache[[3, "
        f"5]], or a field, as cache[{field!r}]",
    )


def read_many(
    read: Callable[[int], dict[str, Tensor]], schema: Schema, indices: NDArray[np.int64]
) -> dict[str, Any]:
    """Return the records of samples, fields stacked to `(n, *shape)`, and `index`, which samples they are.

    A field of varying length is a list of tensors.

    Args:
        read: Returns the record of a sample.
        schema: Fields of a record.
        indices: Sample indices.
    """
    records = [read(index) for index in indices.tolist()]
    names = records[0] if records else schema
    found = {name: _stacked([record[name] for record in records], schema.get(name)) for name in names}
    return {**found, "index": torch.from_numpy(indices.copy())}


def _stacked(values: list[Tensor], field: Field | None) -> Tensor | list[Tensor]:
    if field is not None and (field.ragged or field.folded):
        return values
    if not values and field is not None:
        dtype = torch.float32 if field.quantized else torch_dtype(field.dtype)
        return torch.empty((0, *field.shape), dtype=dtype)
    return torch.stack(values)


def read_column(cache: Cache, shard: int, name: str, sink: ColumnSink | None = None) -> None:
    """Read and verify one field of a shard, into `sink` if given, else only into the page cache.

    Rows that the index left out as damaged are neither checked nor served, nor given to `sink`.

    Raises:
        CorruptError: The bytes do not match their checksums.
    """
    handle, bad = cache.shard(shard), set(cache.index.shards[shard].bad)
    if not bad:
        handle.verify_column(name, sink)
        return
    size, begin = handle.columns[name].field.row_bytes, 0
    for row in range(handle.rows):
        length = handle.length(name, row)
        if row not in bad:
            data = np.ascontiguousarray(handle.read(name, row)).reshape(-1).view(np.uint8).data
            for at in range(0, 0 if sink is None else len(data), PIECE_BYTES):
                piece = data[at : at + PIECE_BYTES]
                cast("ColumnSink", sink).room(begin + at, len(piece))[:] = piece
                cast("ColumnSink", sink).filled(begin + at, len(piece))
        begin += length * size


class MemorySink:
    """Takes a column into memory that has room for all of it."""

    piece_bytes = PIECE_BYTES

    def __init__(self, out: Tensor) -> None:
        self._space = view_bytes(out.reshape(-1))

    def room(self, offset: int, size: int) -> memoryview[Any]:
        """Return the place where these bytes belong."""
        return self._space[offset : offset + size]

    def filled(self, offset: int, size: int) -> None:
        """Nothing is left to do."""


def read_whole(cache: Cache, name: str, field: Field) -> Tensor:
    """Return a field of all stored records, `(len(cache), *shape)`, in the order of `cache.indices`.

    Args:
        cache: Left as it is.
        name, field: A field of one shape that is not quantized.

    Raises:
        CorruptError: A record is damaged.
    """
    runs, out = cache.segments, torch.empty((len(cache), *field.shape), dtype=torch_dtype(field.dtype))
    begins = np.cumsum(runs.count) - runs.count
    for shard in sorted({*runs.shard.tolist()}):
        column = torch.empty((cache.shard(shard).rows, *field.shape), dtype=out.dtype)
        read_column(cache, shard, name, MemorySink(column))
        for place in np.flatnonzero(runs.shard == shard).tolist():
            begin, row, count = int(begins[place]), int(runs.row[place]), int(runs.count[place])
            out[begin : begin + count] = column[row : row + count]
    return out


class Column:
    """One field of a cache, `cache["latent"]`; records are read when it is indexed, every byte checked.

    `column[5]` is the field of sample 5. `column[10:20]` and `column[[3, 5]]` are stacked to `(n, *shape)`;
    they are lists of tensors if the length varies. `column[:]` and `numpy.asarray(column)` read all stored
    records.
    """

    def __init__(self, cache: Cache, name: str) -> None:
        self._cache, self.name = cache, name
        own = cache.schema.get(name)
        self._field = (
            cache.joined.schema[name] if own is None and cache.joined is not None else cache.schema[name]
        )
        self._alone = own is not None and not own.folded
        """It can be read without other fields: it is stored here, and its size is not in another field."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that values are read as."""
        return torch.float32 if self._field.quantized else torch_dtype(self._field.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """Stored records, then the shape of each; -1 for a length that varies."""
        return (len(self), *self._field.shape)

    def __len__(self) -> int:
        return len(self._cache)

    def __iter__(self) -> Iterator[Tensor]:
        for index in self._cache.indices.tolist():
            yield self[index]

    def __getitem__(self, key: Any) -> Any:
        """Return the field of one sample, or of several.

        Raises:
            MissingRecordError: A sample is not stored.
            CorruptError: A record is damaged.
        """
        if not self._alone:
            return self._cache[key][self.name]
        if is_index(key):
            return self._read(sample_index(key, self._cache.index.count))
        whole = isinstance(key, slice) and key == slice(None)
        if whole and not (self._field.ragged or self._field.quantized):
            return read_whole(self._cache, self.name, self._field)
        indices = selected(key, self._cache.index.count, self._cache.indices, self.name).tolist()
        return _stacked([self._read(index) for index in indices], self._field)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """Return all stored records, for numpy; a bfloat16 field as float32."""
        values = self[:]
        if not isinstance(values, Tensor):
            raise RecordError(
                f"field {self.name!r} varies in length, so it is not one array", hint="Use column[:]"
            )
        array: NDArray[Any] = (values.float() if values.dtype == torch.bfloat16 else values).numpy()
        return array if dtype is None else array.astype(dtype)

    def __repr__(self) -> str:
        return f"Column({self.name!r}, {self.dtype}, {self.shape})"

    def _read(self, index: int) -> Tensor:
        shard, row = self._cache.locate(index)
        return read_field(self._cache.shard(shard), self.name, self._field, row)


@dataclass(frozen=True, slots=True)
class Table:
    """Text in rows, printed in columns; a notebook shows it as HTML."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def __repr__(self) -> str:
        lines = (self.head, *self.rows)
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        cells = (
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        )
        return "\n".join((self.title, *cells))

    def _repr_html_(self) -> str:
        return self.html()

    def html(self) -> str:
        """Return it as HTML."""
        head = "".join(f"<th>{html.escape(cell)}</th>" for cell in self.head)
        rows = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in self.rows)
        body = "".join(f"<tr>{row}</tr>" for row in rows)
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        return f"<p>{html.escape(self.title)}</p>{table}"


def describe(cache: Cache) -> Table:
    """Return the fields of a cache as a table: dtype, shape, and the statistics of what is stored."""
    rows = tuple(
        (name, *_kind(field), *_figures(cache.statistics.get(name, {})))
        for name, field in cache.schema.items()
    )
    return Table(_title(cache), ("field", "dtype", "shape", "mean", "std", "min", "max"), rows)


def preview(cache: Cache, count: int) -> Table:
    """Return the first values of the first stored records, one record a row."""
    records = {index: cache[index] for index in cache.indices[:count].tolist()}
    names = next(iter(records.values()), cache.schema)
    rows = ((str(index), *map(first_values, record.values())) for index, record in records.items())
    return Table(_title(cache), ("index", *names), tuple(rows))


def _title(cache: Cache) -> str:
    size = format_bytes(sum(shard.bytes for shard in cache.index.shards))
    left = len(cache.quarantined)
    missing = "" if cache.complete else f" of {format_count(cache.index.count)}"
    failed = f", {format_count(left)} quarantined" if left else ""
    return f"{cache.name} ({cache.fingerprint}): {format_count(len(cache))}{missing} records, {size}{failed}"


def _kind(field: Field) -> tuple[str, str]:
    dtype = f"{field.dtype} with scales" if field.quantized else field.dtype
    shape = ", ".join("varies" if size < 0 else str(size) for size in field.shape)
    return dtype, f"({shape}{',' * (len(field.shape) == 1)})"


def _figures(statistics: Any) -> tuple[str, ...]:
    found = [statistics.get(name) for name in ("mean", "std", "min", "max")]
    return tuple("" if value is None else f"{value:.4g}" for value in found)


def first_values(value: Tensor) -> str:
    """Return the shape of a field of one record, and its first values; a number as it is."""
    flat = value.reshape(-1)[:PREVIEW_VALUES].tolist()
    shown = ", ".join(f"{one:.4g}" if isinstance(one, float) else str(one) for one in flat)
    if not value.ndim:
        return shown
    return f"{tuple(value.shape)} {shown}{', ...' if value.numel() > PREVIEW_VALUES else ''}"
