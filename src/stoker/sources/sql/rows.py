"""Rows of a database as bytes, and the file that holds them for every process that needs them."""

from __future__ import annotations

import datetime
import decimal
import errno
import json
import mmap
import os
import secrets
import struct
import tempfile
import uuid
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, groupby
from types import NoneType
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ResourceError, arg
from stoker.units import format_bytes

# ----------------------------------------------------------------------------------------------------------
# A row as bytes: a tag and a value for each column, the same bytes for the same values from every
# database.
#
# These bytes are what is digested and what is kept, so a row is parsed once, where its sample is read.
# Numbers and times take 9 bytes (int64, float64, microseconds since 1970 UTC), everything else its length
# in 4 bytes and then its text.


INT, FLOAT, BOOL, TIME, TEXT, BYTES, JSON, PICKED, NUMBERS, NULL, OTHER = b"IFBDTYJPVN?"
FOREVER_US = 2**63 - 1
"""A time that is infinite, or past 64 bits; its negative for the past."""
FIXED = frozenset({INT, FLOAT, BOOL, TIME})
"""Tags whose values take 8 bytes."""
KEYS = frozenset({INT, TEXT, TIME, BYTES})
"""Tags whose values may be keys."""
NAMES = {
    INT: "integer", FLOAT: "float", BOOL: "boolean", TIME: "time", TEXT: "text", BYTES: "bytes",
    JSON: "JSON", PICKED: "JSON", NUMBERS: "JSON", NULL: "NULL", OTHER: "of another type",
}  # fmt: skip
REAL = "real"
"""Type of a column of floats of 4 bytes, as a session names it."""
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_MICRO = datetime.timedelta(microseconds=1)
_HEAD = struct.Struct("<BI")
_NO_VALUE = bytes((NULL,))
_FEW = 16
"""Fewer rows are cut one by one."""
_FLOAT, _WHOLE, _LENGTH = (struct.Struct(kind).unpack_from for kind in ("<d", "<q", "<I"))


class Text(bytes):
    """Text of a database as its bytes in UTF-8, sound or not."""


class JsonText(bytes):
    """A JSON value as a database wrote it."""


class PickedText(bytes):
    """Of a JSON list of objects the values that rules use, as a JSON list of lists: some are no numbers."""


class PickedNumbers(bytes):
    """The same where all are numbers: float64 of each entry in turn, NaN for those that are not there."""


class Micros(int):
    """Microseconds since 1970, UTC."""


class Value(NamedTuple):
    """One value of a row."""

    tag: int
    value: Any
    """int, float, bool, or bytes for text, bytes and JSON; None."""


class Values(NamedTuple):
    """One column of some rows; two lists, since a pair for each would keep the garbage collector busy."""

    tags: list[int]
    values: list[Any]

    def each(self) -> Iterator[Value]:
        """Yield the values one by one."""
        return map(Value, self.tags, self.values)


class Packed(NamedTuple):
    """Some rows as bytes."""

    data: bytes | memoryview
    lengths: NDArray[np.int64]
    """Bytes of each row."""
    tags: list[Counter[int]]
    """By column how many values have which tag."""


class NumberColumn(NamedTuple):
    """A column of numbers or times, all there."""

    tag: int
    values: NDArray[Any]


Column: TypeAlias = "NumberColumn | Sequence[Any]"
"""Values as their driver gave them."""


def as_list(column: Column) -> Sequence[Any]:
    """Return values of a column one by one."""
    return column.values.tolist() if isinstance(column, NumberColumn) else column


def pack_rows(rows: Sequence[Sequence[Any]]) -> Packed:
    """Return rows as their driver gave them, as bytes."""
    return pack_columns(list(zip(*rows, strict=True)))


def pack_columns(columns: Sequence[Column]) -> Packed:
    """Return columns of equal length as the bytes of rows."""
    counted: list[Counter[int]] = []
    parts: list[Sequence[bytes]] = []
    lengths: NDArray[np.int64] | int = 0
    # Numbers side by side are packed at once.
    for is_fixed, some in groupby(map(_plain, columns), key=NumberColumn.__instancecheck__):
        if is_fixed:
            packed = pack_fixed(cast("list[NumberColumn]", [*some]))
            if len(packed.tags) == len(columns):
                return packed
            parts.append(_slices(packed))
            counted += packed.tags
            lengths = lengths + packed.lengths
            continue
        for column in some:
            own, tags = _parts(cast("Sequence[Any]", column))
            parts += own
            counted.append(tags)
            for part in own:
                lengths = lengths + np.fromiter(map(len, part), np.int64, len(part))
    # Long values are copied once, here.
    data = b"".join(chain.from_iterable(zip(*parts, strict=True)))
    return Packed(data, cast("NDArray[np.int64]", lengths), counted)


def _slices(packed: Packed) -> list[bytes]:
    """Return rows of one length one by one."""
    data, count = bytes(packed.data), len(packed.lengths)
    length = len(data) // count
    return [data[at : at + length] for at in range(0, len(data), length)]


def pack_fixed(columns: Sequence[NumberColumn]) -> Packed:
    """Return columns of numbers and times, all there, as bytes: a tag and 8 bytes each."""
    count = len(columns[0].values)
    names = [(f"{part}{place}", kind) for place, (tag, _) in enumerate(columns)
             for part, kind in (("t", "u1"), ("v", "<f8" if tag == FLOAT else "<i8"))]  # fmt: skip
    table = np.empty(count, np.dtype(names))
    for place, (tag, values) in enumerate(columns):
        table[f"t{place}"] = tag
        table[f"v{place}"] = values
    lengths = np.full(count, table.dtype.itemsize, np.int64)
    return Packed(table.tobytes(), lengths, [Counter({tag: count}) for tag, _ in columns])


_PLAIN = {int: INT, float: FLOAT, bool: BOOL, Micros: TIME}
_TEXTS = {Text: TEXT, JsonText: JSON, PickedText: PICKED, PickedNumbers: NUMBERS}


def _plain(column: Column) -> Column:
    if isinstance(column, NumberColumn):
        return column
    kinds = {*map(type, column)}
    tag = _PLAIN.get(kinds.pop()) if len(kinds) == 1 else None
    return column if tag is None else NumberColumn(tag, np.asarray(column))


def _parts(column: Sequence[Any]) -> tuple[list[Sequence[bytes]], Counter[int]]:
    """For each value its bytes, or those that go before it and its own; and how many are of which kind."""
    kinds = {*map(type, column)}
    one = kinds.pop() if len(kinds) == 1 else None
    if one in _TEXTS:
        tag = _TEXTS[one]
        return [[_HEAD.pack(tag, len(value)) for value in column], column], Counter({tag: len(column)})
    if one is None and kinds <= {float, NoneType}:
        there = [0.0 if value is None else value for value in column]
        packed = _slices(pack_fixed([NumberColumn(FLOAT, np.asarray(there))]))
        filled = [_NO_VALUE if value is None else own for value, own in zip(column, packed, strict=True)]
        nulls = column.count(None)
        return [filled], Counter({FLOAT: len(column) - nulls, NULL: nulls})
    pairs = [(*_pack(value), b"")[:2] for value in column]
    heads, bodies = zip(*pairs, strict=True)
    return [heads, bodies], Counter(head[0] for head in heads)


def _pack(value: Any) -> tuple[bytes, ...]:
    kind = type(value)
    if value is None:
        return (_NO_VALUE,)
    if kind is float:
        return (struct.pack("<Bd", FLOAT, value),)
    if kind in _PLAIN:
        return (struct.pack("<Bq", _PLAIN[kind], value),)
    tag, data = _long(value)
    if tag == FLOAT:
        return (struct.pack("<Bd", FLOAT, data),)
    if tag == TIME:
        return (struct.pack("<Bq", TIME, data),)
    return _HEAD.pack(tag, len(data)), data


def _long(value: Any) -> tuple[int, Any]:
    if (tag := _TEXTS.get(type(value))) is not None:
        return tag, value
    if isinstance(value, bytes | bytearray | memoryview):
        return BYTES, bytes(value)
    if isinstance(value, str | uuid.UUID):
        return TEXT, str(value).encode("utf-8", "surrogateescape")
    if isinstance(value, decimal.Decimal):
        return FLOAT, float(value)
    if isinstance(value, datetime.datetime):
        return TIME, micros_of(value)
    if isinstance(value, datetime.date):
        return TIME, (value - _EPOCH.date()) // _MICRO
    if isinstance(value, list):
        return JSON, _json_list(value)  # pyright: ignore[reportUnknownArgumentType]
    return OTHER, type(value).__name__.encode()


def micros_of(moment: datetime.datetime) -> int:
    """Microseconds since 1970; without a zone it is UTC."""
    aware = moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)
    return (aware - _EPOCH) // _MICRO


def _json_list(values: list[Any]) -> bytes:
    """Return an array of a database, as a JSON list."""
    parts = (bytes(v) if isinstance(v, JsonText) else json.dumps(v, default=str).encode() for v in values)
    return b"[" + b",".join(parts) + b"]"


def unpack_row(data: memoryview, most: int = 1 << 30) -> list[Value]:
    """Return the values of one row, of the first `most` columns."""
    found: list[Value] = []
    at, end = 0, len(data)
    while at < end and len(found) < most:
        tag = data[at]
        value, at = _unpacked(data, tag, at + 1)
        found.append(Value(tag, value))
    return found


def _unpacked(data: memoryview, tag: int, at: int) -> tuple[Any, int]:
    """Return the value after a tag, and where the next begins."""
    if tag == FLOAT:
        return _FLOAT(data, at)[0], at + 8
    if tag in FIXED:
        (value,) = _WHOLE(data, at)
        return bool(value) if tag == BOOL else value, at + 8
    if tag == NULL:
        return None, at
    (length,) = _LENGTH(data, at)
    return bytes(data[at + 4 : at + 4 + length]), at + 4 + length


def shown_key(values: Sequence[Value]) -> str:
    """Return a key as text: the value, or a JSON list of several.

    >>> shown_key([Value(INT, 7)]), shown_key([Value(TEXT, b"a"), Value(INT, 1)])
    ('7', '["a",1]')
    """
    plain = [value.decode("utf-8", "surrogateescape") if tag in (TEXT, JSON) else
             value.hex() if tag == BYTES else value for tag, value in values]  # fmt: skip
    return str(plain[0]) if len(plain) == 1 else json.dumps(plain, separators=(",", ":"))


# ----------------------------------------------------------------------------------------------------------
# Rows in a file without a name, mapped by every process that needs them.
#
# The file is unlinked from the start, so nothing can be left behind; workers of the same machine open it
# through the descriptor of the process that holds it. Its pages belong to the system: rows take no more
# memory than there is.


_TOKEN_BYTES = 16


_FIXED_TAGS = np.isin(np.arange(256), [*FIXED])


def _gathered(data: NDArray[np.uint8], at: NDArray[np.int64], dtype: str) -> NDArray[Any]:
    """Return the numbers that begin at some bytes."""
    return data[at[:, None] + np.arange(np.dtype(dtype).itemsize)].view(dtype)[:, 0]


class SpillLostError(Exception):
    """The process that holds the rows has ended, or is on another machine."""


class Spill:
    """Rows as bytes; first appended, then read by index."""

    def __init__(self, folder: str | None = None) -> None:
        """Make the file in a folder; None: in the system's for temporary files.

        Raises:
            ResourceError: The file cannot be made there, or the disk is full.
        """
        self._folder = folder
        try:
            self._file = tempfile.TemporaryFile(prefix="stoker-rows-", dir=folder)  # noqa: SIM115
        except OSError as error:
            raise ResourceError(
                f"no file for rows in {folder or 'the folder for temporary files'}: {error.strerror}",
                hint=self._elsewhere(),
            ) from error
        weakref.finalize(self, self._file.close)
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._lengths: list[NDArray[np.int64]] = []
        self._pid = os.getpid()
        self._map: mmap.mmap | None = None
        self._offsets: NDArray[np.int64] | None = None
        self.size_bytes = 0
        self._write(self._token)

    def append(self, data: bytes | memoryview, lengths: NDArray[np.int64]) -> None:
        """Add rows.

        Raises:
            ResourceError: The disk is full.
        """
        self._write(data)
        self._lengths.append(lengths)
        self.size_bytes += len(data)

    def finish_writing(self) -> None:
        """End writing; where rows begin is written after them, for every process that maps the file."""
        lengths = np.concatenate([np.zeros(0, np.int64), *self._lengths])
        offsets = np.zeros(len(lengths) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        self._write(bytes(-(_TOKEN_BYTES + self.size_bytes) % 8))
        self._write(offsets.tobytes(), flush=True)
        self._lengths = []
        self._open(self._file.fileno(), len(lengths))

    def __len__(self) -> int:
        assert self._offsets is not None
        return len(self._offsets) - 1

    def row(self, number: int) -> memoryview:
        """Return the bytes of one row."""
        assert self._offsets is not None
        assert self._map is not None
        low, high = self._offsets[number] + _TOKEN_BYTES, self._offsets[number + 1] + _TOKEN_BYTES
        return memoryview(self._map)[int(low) : int(high)]

    def some(self, numbers: NDArray[np.int64]) -> list[memoryview]:
        """Return the bytes of some rows."""
        return [self.row(number) for number in numbers.tolist()]

    def columns(self, numbers: NDArray[np.int64], names: Mapping[str, bool]) -> dict[str, Values]:
        """Return values of some rows by column.

        Args:
            numbers: The rows.
            names: All columns in their order, and whether their values are wanted.
        """
        if len(numbers) < _FEW:
            rows = zip(*map(unpack_row, self.some(numbers)), strict=True)
            pairs = zip(names.items(), rows, strict=True)
            return {name: Values(*map(list, zip(*own, strict=True))) for (name, used), own in pairs if used}
        assert self._offsets is not None
        data = np.frombuffer(cast("mmap.mmap", self._map), np.uint8)
        at, found = self._offsets[numbers] + _TOKEN_BYTES, dict[str, Values]()
        for name, is_wanted in names.items():
            tags, at = data[at], at + 1
            fixed, null = _FIXED_TAGS[tags], tags == NULL
            bodies = ~(fixed | null)
            lengths = np.where(fixed, 8, 0)
            if bodies.any():
                lengths[bodies] = _gathered(data, at[bodies], "<u4") + 4
            if is_wanted:
                found[name] = Values(tags.tolist(), self._values(data, tags, at, lengths))
            at = at + lengths
        return found

    def _values(
        self, data: NDArray[np.uint8], tags: NDArray[np.uint8], at: NDArray[np.int64], lengths: NDArray[Any]
    ) -> list[Any]:
        """Return the values of one column, by the tags and the places of their rows."""
        values = np.full(len(tags), None, object)
        for tag in np.unique(tags).tolist():
            own = tags == tag
            if tag in FIXED:
                numbers = _gathered(data, at[own], "<f8" if tag == FLOAT else "<i8")
                if len(numbers) == len(tags):
                    return (numbers.astype(np.bool_) if tag == BOOL else numbers).tolist()
                values[own] = numbers.astype(np.bool_) if tag == BOOL else numbers
            elif tag != NULL:
                whole = cast("mmap.mmap", self._map)
                ends = (at[own] + lengths[own]).tolist()
                texts = [whole[low:high] for low, high in zip((at[own] + 4).tolist(), ends, strict=True)]
                if len(texts) == len(tags):
                    return texts
                values[own] = texts
        return values.tolist()

    def reference(self) -> dict[str, Any]:
        """Return what another process of this machine needs to map the rows."""
        return {
            "pid": self._pid,
            "fd": self._file.fileno(),
            "token": self._token,
            "rows": len(self),
            "bytes": self.size_bytes,
        }

    @classmethod
    def open_reference(cls, reference: dict[str, Any]) -> Spill:
        """Return the rows that another process holds.

        Raises:
            GoneError: They are not there any more.
        """
        path = f"/proc/{reference['pid']}/fd/{reference['fd']}"
        spill = cls.__new__(cls)
        try:
            spill._file = open(path, "rb")  # noqa: SIM115, PTH123 - a descriptor, not a path
            weakref.finalize(spill, spill._file.close)
            spill._token, spill._pid = reference["token"], os.getpid()
            spill._lengths, spill.size_bytes = [], reference["bytes"]
            spill._open(spill._file.fileno(), reference["rows"])
        except (OSError, ValueError) as error:
            raise SpillLostError(path) from error
        return spill

    def close(self) -> None:
        """Give the file back; workers that have mapped it keep it."""
        self._offsets = self._map = None
        self._file.close()

    def _open(self, fd: int, rows: int) -> None:
        """Map the file.

        Raises:
            ValueError: It is another file.
        """
        begin = _TOKEN_BYTES + self.size_bytes + -(_TOKEN_BYTES + self.size_bytes) % 8
        size = begin + 8 * (rows + 1)
        if os.fstat(fd).st_size != size:
            raise ValueError("another file")
        mapped = mmap.mmap(fd, size, access=mmap.ACCESS_READ)
        if mapped[:_TOKEN_BYTES] != self._token:
            raise ValueError("another file")
        self._map = mapped
        self._offsets = np.frombuffer(mapped, np.int64, rows + 1, begin)

    def _elsewhere(self) -> str:
        """Return a hint: how to have the file in another folder."""
        given = arg("spill_dir", ..., call="SQLSource")
        if self._folder is not None:
            return f"Give {given} on a larger disk"
        return f"Set TMPDIR to a folder on a larger disk (in Python {given} does it too)"

    def _write(self, data: bytes | memoryview, *, flush: bool = False) -> None:
        try:
            self._file.write(data)
            if flush:
                self._file.flush()
        except OSError as error:
            with suppress(OSError):  # it tries to write what is buffered once more
                self._file.close()
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            raise ResourceError(
                f"rows of {format_bytes(self.size_bytes + len(data))} and more do not fit in "
                f"{self._folder or tempfile.gettempdir()}: {error.strerror}",
                hint=f"{self._elsewhere()}, or read fewer columns",
            ) from error
