"""List and read what is in files of many samples: archives, tensors of rows, HDF5, LMDB and Parquet.

Listing yields one `Member` at a time, so a zip of a million members takes no memory for all of them. Of a tar
file, all members are held while it is listed: those of one sample may be far apart in it.
"""

from __future__ import annotations

import io
import json
import os
import re
import struct
import threading
import zipfile
import zlib
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, cast

import numpy as np

from stoker.errors import ConfigError, DecodeError, SourceError
from stoker.extras.adopt.formats import (
    Array,
    Arrays,
    decode_errors,
    of_numpy,
    safetensors_header,
    safetensors_header_bytes,
    unpack_limit,
)
from stoker.schema import DTYPE_BYTES, numpy_dtype
from stoker.sources.files import open_regular
from stoker.sources.hdf5_open import open_file, readable_dataset
from stoker.sources.tables import ParquetSource, import_arrow
from stoker.sources.tar import list_members
from stoker.units import MIB

ROWS = ("safetensors-rows", "hdf5-rows", "lmdb", "parquet")
"""Kinds of containers whose samples are rows; those of the others are members with an offset."""


class Member(NamedTuple):
    """One sample, or one part of a sample, in a container."""

    name: str
    """Of a member: its name in the archive; of a row: what names it, within the container, if anything."""
    offset: int = -1
    """First byte of a member; -1 for rows."""
    size: int = -1
    row: int = -1
    """Number of a row; -1 for members."""


def members(kind: str, path: Path) -> Iterator[Member]:
    """Yield what a container holds.

    Args:
        kind: `tar`, `zip`, or one of `ROWS`.
        path: The file; of an LMDB its `data.mdb`.

    Raises:
        DecodeError: It is damaged, cut short, or does not hold samples.
        ConfigError: A package that reads it is not installed.
    """
    with _row_errors(path, "its content cannot be listed"):
        if kind == "tar":
            archive = list_members(path.name, path)
            for key, found in zip(archive.keys, archive.members, strict=True):
                for ending, member in found.items():
                    yield Member(f"{key}.{ending}", member.offset, member.size)
        elif kind == "zip":
            yield from _zip_directory(path)
        else:
            with Rows(kind, path) as rows:
                for row, name in enumerate(rows.names()):
                    yield Member(name, row=row)


class Rows:
    """An open container of rows.

    Args:
        kind: One of `ROWS`.
        path: The file; of an LMDB its `data.mdb`.
    """

    def __init__(self, kind: str, path: Path) -> None:
        opened = {
            "safetensors-rows": _SafetensorsRows,
            "hdf5-rows": _Hdf5Rows,
            "lmdb": _LmdbRows,
            "parquet": _ParquetRows,
        }
        with _row_errors(path, "cannot be opened"):
            self._rows: Any = opened[kind](path)
        self._path = path

    def __enter__(self) -> Rows:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def names(self) -> Iterator[str]:
        """Yield what names each row, in their order.

        Raises:
            DecodeError: The names cannot be read.
        """
        with _row_errors(self._path, "its rows cannot be listed"):
            yield from self._rows.names()

    def read(self, row: int) -> Arrays:
        """Return the arrays of a row.

        Raises:
            DecodeError: It cannot be read.
        """
        with _row_errors(self._path, "cannot be read", f"row {row}, "):
            return self._rows.read(row)

    def close(self) -> None:
        """Close the file."""
        self._rows.close()


@contextmanager
def _row_errors(path: Path, fact: str, place: str = "") -> Generator[None]:
    """As `decode_errors`; a `SourceError` of what other sources use as well becomes a `DecodeError` too."""
    try:
        with decode_errors(fact):
            yield
    except DecodeError:
        raise
    except SourceError as error:
        raise DecodeError(error.fact.removeprefix(f"{path}: ").removeprefix(place)) from error


def _safetensors_places(file: io.FileIO) -> dict[str, tuple[str, tuple[int, ...], int, int]]:
    """Return dtype, shape, first byte and end of each tensor of a safetensors file.

    Raises:
        DecodeError: Its header is damaged or too long; it is read once it is known not to be.
    """
    fd = file.fileno()
    size = os.fstat(fd).st_size
    header_bytes = safetensors_header_bytes(os.pread(fd, 8, 0), size)
    return safetensors_header(os.pread(fd, header_bytes, 0), size)


class _SafetensorsRows:
    """Tensors whose axis 0 numbers the samples, `latents` and so on, read row by row."""

    def __init__(self, path: Path) -> None:
        with ExitStack() as undo:
            self._file = undo.enter_context(open_regular(path))
            self._tensors = _safetensors_places(self._file)
            self.count = self._count()
            undo.pop_all()

    def _count(self) -> int:
        counts = {name: shape[0] for name, (_, shape, _, _) in self._tensors.items() if shape}
        if not counts or len(counts) < len(self._tensors) or len(set(counts.values())) > 1:
            raise DecodeError(f"its tensors do not have one number of rows: {counts}")
        return next(iter(counts.values()))

    def names(self) -> Iterator[str]:
        return map(str, range(self.count))

    def read(self, row: int) -> Arrays:
        found: Arrays = {}
        for name, (dtype, shape, first, last) in self._tensors.items():
            row_bytes = (last - first) // max(1, self.count)
            data = os.pread(self._file.fileno(), row_bytes, first + row * row_bytes)
            if len(data) != row_bytes:
                raise DecodeError(f"tensor {name!r} is cut short")
            values = np.frombuffer(data, numpy_dtype(dtype)).reshape(shape[1:])
            found[name] = Array(values.copy(), dtype) if dtype == "bfloat16" else of_numpy(values)
        return found

    def close(self) -> None:
        self._file.close()


class _Hdf5Rows:
    """`state` `(N, T, ...)`, one trajectory per row, and further datasets of N rows."""

    def __init__(self, path: Path) -> None:
        with ExitStack() as undo:
            self._file = undo.enter_context(open_file(path))
            names = [name for name in ("state", "label") if name in self._file]
            if "state" not in names:
                raise DecodeError("it has no dataset 'state'")
            self._data = {name: _dataset(self._file, name, path) for name in names}
            if any(not data.shape for data in self._data.values()):
                raise DecodeError("its 'state' or 'label' is a single number, expected rows")
            self.count = int(self._data["state"].shape[0])
            if any(len(data) != self.count for data in self._data.values()):
                raise DecodeError("'state' and 'label' have different numbers of rows")
            undo.pop_all()

    def names(self) -> Iterator[str]:
        return map(str, range(self.count))

    def read(self, row: int) -> Arrays:
        return {name: of_numpy(np.asarray(data[row])) for name, data in self._data.items()}

    def close(self) -> None:
        self._file.close()


def _dataset_names(file: Any) -> list[str]:
    """Return the names of the datasets at the root of an HDF5 file."""
    return [name for name in file if _is_dataset(file, name)]


def _is_dataset(file: Any, name: str) -> bool:
    return file.get(name, getclass=True).__name__ == "Dataset"


def _dataset(file: Any, name: str, path: Path) -> Any:
    """Return a dataset.

    Raises:
        SourceError: It is a group, or its values are in other files.
    """
    if not _is_dataset(file, name):
        raise DecodeError(f"{name!r} is not a dataset")
    return readable_dataset(file, name, path)


def read_hdf5(path: Path, names: tuple[str, ...] = ()) -> Arrays:
    """Return the datasets of a file with one sample: those named, or all of numbers.

    Raises:
        DecodeError: It cannot be read.
    """
    try:
        file = open_file(path)
    except SourceError as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno is not None:
            raise
        raise DecodeError(error.fact.removeprefix(f"{path} ")) from None
    found: Arrays = {}
    with file, _row_errors(path, "cannot be read"):
        for name in names or _dataset_names(file):
            if name not in file:
                raise DecodeError(f"it has no dataset {name!r}")
            data = _dataset(file, name, path)
            if data.dtype.kind in "biuf":
                found[name] = of_numpy(np.asarray(data[()]))
    if not found:
        raise DecodeError("it has no dataset of numbers at its root")
    return found


def stated_shapes(path: Path) -> dict[str, tuple[int, ...]] | None:
    """Return the shapes of the arrays that the header of a file states; None for formats without one.

    Raises:
        SourceError: It cannot be read.
    """
    suffix = path.suffix.lower()
    if suffix == ".safetensors":
        with open_regular(path) as file:
            return {name: shape for name, (_, shape, _, _) in _safetensors_places(file).items()}
    if suffix in (".h5", ".hdf5"):
        with open_file(path) as file, _row_errors(path, "cannot be read"):
            return {name: tuple(_dataset(file, name, path).shape) for name in _dataset_names(file)}
    return None


_ROW_KEY = re.compile(rb"(.+)_(\d+)_data")


class _LmdbRows:
    """Raw arrays by name and row: `latents_shape` (text, with the count first) and `latents_0_data`.

    The dtype is written nowhere: it is the one of 2, 4 or 8 bytes (float16, float32, int64) that the bytes
    of a row and its shape make up.
    """

    def __init__(self, path: Path) -> None:
        self._place = (str(path), os.getpid())
        self._environment: Any = _opened_lmdb(self._place)
        try:
            self._shapes = self._stated_shapes()
        except BaseException:
            self.close()
            raise
        self.count = max(shape[0] for shape in self._shapes.values())

    def _stated_shapes(self) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}
        with self._environment.begin() as transaction:
            cursor = transaction.cursor()
            found = cursor.first()
            while found:
                key = bytes(cursor.key())
                if key.endswith(b"_shape"):
                    shape = tuple(int(size) for size in bytes(cursor.value()).split())
                    shapes[key.removesuffix(b"_shape").decode()] = shape
                row = _ROW_KEY.fullmatch(key)
                # Past all rows of this name: ":" follows "9".
                found = cursor.next() if row is None else cursor.set_range(row[1] + b"_:")
            entries = transaction.stat()["entries"]
        if not shapes or not all(shapes.values()):
            raise DecodeError("it has no <name>_shape, which says how the arrays of a row are shaped")
        for name, shape in shapes.items():
            if min(shape) < 0 or shape[0] > entries:
                raise DecodeError(f"'{name}_shape' is {shape}, and it has {entries:,} entries")
        return shapes

    def names(self) -> Iterator[str]:
        return map(str, range(self.count))

    def read(self, row: int) -> Arrays:
        found: Arrays = {}
        with self._environment.begin() as transaction:
            for name, (_, *shape) in self._shapes.items():
                value = transaction.get(f"{name}_{row}_data".encode())
                if value is None:
                    raise DecodeError(f"it has no '{name}_{row}_data'")
                if (array := _raw(bytes(value), tuple(shape))) is not None:
                    found[name] = array
                elif not _is_text(bytes(value)):
                    raise DecodeError(f"'{name}_{row}_data' has {len(value)} bytes, its shape is {shape}")
        return found

    def close(self) -> None:
        if self._environment is not None:
            self._environment = None
            _close_lmdb(self._place)


_environments: dict[tuple[str, int], tuple[Any, int]] = {}
"""Open LMDBs by path and process, and how many read each: a process may open one only once."""
_lock = threading.Lock()


def _opened_lmdb(place: tuple[str, int]) -> Any:
    """Return an LMDB, opened for one more reader.

    Raises:
        ConfigError: lmdb is not installed.
        DecodeError: It cannot be read.
    """
    try:
        lmdb = import_module("lmdb")
    except ImportError as error:
        raise ConfigError(
            "an LMDB is read with lmdb, which is not installed", hint="Run pip install 'stoker[adopt]'"
        ) from error
    with _lock:
        environment, users = _environments.get(place, (None, 0))
        if environment is None:
            try:
                environment = lmdb.open(
                    place[0], readonly=True, lock=False, readahead=False, subdir=False, create=False
                )
            except lmdb.Error as error:
                raise DecodeError(f"not a readable LMDB ({error})") from None
            # A page beyond the end of the file would end the process by SIGBUS when it is looked at.
            pages = environment.info()["last_pgno"] + 1
            size, needed = os.stat(place[0]).st_size, pages * environment.stat()["psize"]  # noqa: PTH116
            if size < needed:
                environment.close()
                raise DecodeError(f"cut short: it has {size:,} bytes, its {pages:,} pages {needed:,}")
        _environments[place] = (environment, users + 1)
        return environment


def _close_lmdb(place: tuple[str, int]) -> None:
    """Note that one reader is done; the last one closes."""
    with _lock:
        environment, users = _environments.pop(place)
        if users > 1:
            _environments[place] = (environment, users - 1)
        else:
            environment.close()


def _raw(value: bytes, shape: tuple[int, ...]) -> Array | None:
    count = int(np.prod(shape))
    dtype = {2: "float16", 4: "float32", 8: "int64"}.get(len(value) // count if count else 0)
    if dtype is None or len(value) != count * DTYPE_BYTES[dtype]:
        return None
    return Array(np.frombuffer(value, dtype).reshape(shape).copy(), dtype)


def _is_text(value: bytes) -> bool:
    try:
        return value.decode().isprintable()
    except UnicodeDecodeError:
        return False


class _ParquetRows:
    """Rows of a Parquet file, named by a column of text where there is one."""

    KEYS = ("__key__", "key", "id", "name", "filename", "file_name", "path")

    def __init__(self, path: Path) -> None:
        import_arrow(str(path))
        parquet = import_module("pyarrow.parquet")
        with parquet.ParquetFile(path) as file:
            schema = file.schema_arrow
            self._types = {name: str(schema.field(name).type) for name in schema.names}
        text = [name for name, kind in self._types.items() if kind in ("string", "large_string")]
        self._key = next((name for name in self.KEYS if name in text), None)
        columns = [name for name in self._types if name not in text]
        self._source = ParquetSource(path, columns=columns)
        self._path = path

    def names(self) -> Iterator[str]:
        if self._key is None:
            yield from map(str, range(len(self._source)))
            return
        with import_module("pyarrow.parquet").ParquetFile(self._path) as file:
            for batch in file.iter_batches(columns=[self._key]):
                yield from (key or "" for key in batch.column(0).to_pylist())

    def read(self, row: int) -> Arrays:
        return {name: of_numpy(values) for name, values in self._source.read(row).items()}

    def close(self) -> None:
        pass


# ----------------------------------------------------------------------------------------------------------
# The directory of a zip file, entry by entry. `zipfile` makes an object of half a kilobyte for each.


_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_PIECE = MIB


def _zip_directory(path: Path) -> Iterator[Member]:
    with open_regular(path) as raw, io.BufferedReader(raw, _PIECE) as file:
        size = file.seek(0, os.SEEK_END)
        tail = min(size, 65_557)
        file.seek(size - tail)
        data = file.read(tail)
        at = data.rfind(b"PK\x05\x06")
        if at < 0 or len(data) - at < _END.size:
            raise SourceError(f"{path} has no end of a zip file: cut short", hint="Copy it again")
        *_, count, _, start, _ = _END.unpack_from(data, at)
        at64 = data.rfind(b"PK\x06\x06", 0, at)
        if at64 >= 0 and len(data) - at64 >= _END64.size:
            *_, count, _, start = _END64.unpack_from(data, at64)
        file.seek(start)
        for _ in range(count):
            head = file.read(_ENTRY.size)
            if len(head) < _ENTRY.size or head[:4] != b"PK\x01\x02":
                raise SourceError(f"{path} has a damaged directory", hint="Copy it again")
            entry = _ENTRY.unpack(head)
            packed, unpacked, offset = entry[8], entry[9], entry[16]
            name, extra = file.read(entry[10]), file.read(entry[11])
            file.seek(entry[12], os.SEEK_CUR)
            packed, offset = _wide(extra, packed, unpacked, offset)
            if not name.endswith(b"/"):
                yield Member(name.decode("utf-8", "replace"), offset, packed)


def _wide(extra: bytes, packed: int, unpacked: int, offset: int) -> tuple[int, int]:
    """Return size and offset of an entry, which are in its extra field where 32 bits do not suffice."""
    at, most = 0, 0xFFFFFFFF
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            numbers = [n for (n,) in struct.iter_unpack("<Q", extra[at + 4 : at + 4 + length // 8 * 8])]
            if unpacked == most and numbers:
                numbers.pop(0)
            packed = numbers.pop(0) if packed == most and numbers else packed
            offset = numbers.pop(0) if offset == most and numbers else offset
        at += 4 + length
    return packed, offset


def read_zip_member(fd: int, member: Member) -> bytes:
    """Return the bytes of a member of a zip file, its checksum compared.

    Raises:
        DecodeError: It is damaged, or packed in an unknown way.
    """
    head = os.pread(fd, _LOCAL.size, member.offset)
    if len(head) < _LOCAL.size or head[:4] != b"PK\x03\x04":
        raise DecodeError("no member of a zip file begins there")
    local = _LOCAL.unpack(head)
    flags, method, crc, name_bytes, extra_bytes = local[2], local[3], local[6], local[9], local[10]
    first, size = member.offset + _LOCAL.size + name_bytes + extra_bytes, os.fstat(fd).st_size
    if first + member.size > size:
        raise DecodeError(f"cut short, it ends at byte {first + member.size:,} and the archive at {size:,}")
    data = os.pread(fd, member.size, first)
    if len(data) != member.size:
        raise DecodeError(f"cut short, {len(data)} of {member.size} bytes are there")
    if method == zipfile.ZIP_DEFLATED:
        unpacker = zlib.decompressobj(-15)
        try:
            data = unpacker.decompress(data, unpack_limit(member.size))
        except zlib.error as error:
            raise DecodeError(f"cannot be unpacked ({error})") from None
        if not unpacker.eof:
            raise DecodeError("cannot be unpacked: cut short, or too large")
    elif method != zipfile.ZIP_STORED:
        raise DecodeError(f"packed by method {method}, which is not read")
    if not flags & 8 and zlib.crc32(data) != crc:  # with the flag, the sum is behind the data
        raise DecodeError("its bytes do not match their checksum")
    return data


# ----------------------------------------------------------------------------------------------------------
# The labels of `dataset.json`, pair by pair.


_PAIR = re.compile(rb'\[\s*("(?:[^"\\]|\\.)*")\s*,\s*(-?\d+)\s*\]')


def label_pairs(file: io.BufferedIOBase) -> Iterator[tuple[str, int]]:
    """Yield file name and label of each pair in `{"labels": [["00000/img0.npy", 3], ...]}`.

    Raises:
        DecodeError: A name is not text, or a label has too many digits.
    """
    rest = b""
    while piece := file.read(_PIECE):
        rest += piece
        end = 0
        for match in _PAIR.finditer(rest):
            with decode_errors("its labels cannot be read"):
                name, label = PurePosixPath(str(json.loads(match[1])).replace("\\", "/")), int(match[2])
            yield name.as_posix(), label
            end = match.end()
        rest = rest[end:][-_PIECE:]


def says_no_labels(data: bytes) -> bool:
    """Return True if a `dataset.json` says that there are no labels: `{"labels": null}`."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and cast("dict[str, object]", found).get("labels") is None
