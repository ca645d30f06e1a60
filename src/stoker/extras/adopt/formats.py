"""Decode the bytes of one file, or of one member of an archive, to named arrays.

Everything here works on bytes that were read completely, so a file that is cut short is seen as such. Nothing
is executed: a pickle in a `.npy` is refused, and `.pt` goes through `pt.py`.
"""

from __future__ import annotations

import io
import json
import math
import zipfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from stoker.errors import DecodeError, StokerError
from stoker.runtime.jsonio import parse_json
from stoker.schema import DTYPE_BYTES, numpy_dtype
from stoker.units import GIB, MIB

MAX_UNPACKED_BYTES = 4 * GIB
"""Bytes that one npz, or one member of a zip, may unpack to."""
SMALL_UNPACKED_BYTES = 256 * MIB
MAX_RATIO = 100
"""Beyond `SMALL_UNPACKED_BYTES`: bytes to unpack for each packed one. Features pack to a tenth at best."""
MAX_HEADER_BYTES = 100 * MIB
SAFETENSORS_DTYPES: Mapping[str, str] = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "I16": "int16", "I32": "int32", "I64": "int64",
    "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
}  # fmt: skip
NUMBERS = ("cls", "cls2", "id", "index", "inx")
"""Suffixes of one whole number as text."""


class Array(NamedTuple):
    """An array, and the name of its dtype; bfloat16 comes as its bits."""

    values: NDArray[Any]
    dtype: str


Arrays: TypeAlias = dict[str, Array]


@contextmanager
def decode_errors(fact: str) -> Generator[None]:
    """Turn whatever a damaged or odd file makes Python raise into a `DecodeError`; errors of ours pass.

    Args:
        fact: What cannot be done; the text of the error follows in brackets.
    """
    try:
        yield
    except StokerError:
        raise
    except Exception as error:  # noqa: BLE001 (zipfile, NumPy and h5py raise what they like at foreign bytes)
        said = error.strerror if isinstance(error, OSError) else str(error).partition("\n")[0]
        text = (said or str(error) or type(error).__name__)[:200]
        raise DecodeError(f"{fact} ({text})") from None


def decode(suffix: str, data: bytes) -> Arrays:
    """Return the arrays in the bytes of a file.

    Args:
        suffix: Of the file, in lower case and without the dot: `npy`, `npz`, `safetensors`, `json`, `cls`.
        data: All of its bytes.

    Raises:
        DecodeError: They are not of this format, or cut short; says why, but not which file.
    """
    if not data:
        raise DecodeError("empty, 0 bytes")
    with decode_errors(f"not a readable .{suffix}"):
        if suffix == "npy":
            return {"data": of_numpy(_npy(io.BytesIO(data), len(data)))}
        if suffix == "npz":
            return _npz(data)
        if suffix == "safetensors":
            return _safetensors(data)
        if suffix == "json":
            return of_json(parse_json(data))
        if suffix in NUMBERS:
            return {"label": Array(np.asarray(int(data.decode().strip()), np.int64), "int64")}
    raise DecodeError(f"files that end in .{suffix} are not read")


def of_numpy(values: NDArray[Any]) -> Array:
    """Return an array as a cache can hold it: float64 as float32, unless it is one number.

    Raises:
        DecodeError: It holds text, objects, or numbers that no cache can hold.
    """
    kind, size = values.dtype.kind, values.dtype.itemsize
    name = values.dtype.newbyteorder("=").name
    if kind == "f" and size == 8 and values.ndim:
        name = "float32"
        finite = values[np.isfinite(values)]
        if finite.size and float(np.abs(finite).max()) > float(np.finfo(np.float32).max):
            raise DecodeError("holds float64 numbers beyond the range of float32")
    elif kind == "u" and size > 1:
        name = "int32" if size == 2 else "int64"
        if size == 8 and values.size and int(values.max()) > np.iinfo(np.int64).max:
            raise DecodeError("holds uint64 numbers beyond the range of int64")
    elif name not in DTYPE_BYTES:
        raise DecodeError(f"holds {values.dtype}, which no cache can hold")
    return Array(np.array(values, dtype=numpy_dtype(name), order="C"), name)


def of_json(value: object) -> Arrays:
    """Return the numbers, and the lists of numbers, of a JSON object."""
    if not isinstance(value, dict):
        raise DecodeError("its JSON is not an object")
    found: Arrays = {}
    for name, entry in cast("dict[str, object]", value).items():
        if isinstance(entry, bool | int | float | list):
            try:
                array = np.asarray(entry)
            except ValueError:  # lists of unequal length
                continue
            if array.dtype.kind in "bif" and array.size:
                found[name] = of_numpy(array)
    return found


def safetensors_header_bytes(first: bytes, size: int) -> int:
    """Return how many bytes of a file come before its tensors: the length that it states, and the header.

    Args:
        first: The first 8 bytes of the file.
        size: Bytes of the file.

    Raises:
        DecodeError: It is no safetensors file, or the header is too long to be read.
    """
    length = int.from_bytes(first[:8], "little")
    if len(first) < 8 or 8 + length > size:
        raise DecodeError("not a safetensors file, or cut short in its header")
    if length > MAX_HEADER_BYTES:
        raise DecodeError(f"its header claims {length:,} bytes, {MAX_HEADER_BYTES:,} are allowed")
    return 8 + length


def safetensors_header(data: bytes, size: int) -> dict[str, tuple[str, tuple[int, ...], int, int]]:
    """Return dtype, shape, first byte and end of each tensor, from the first bytes of a file.

    Args:
        data: At least the header.
        size: Bytes of the file.

    Raises:
        DecodeError: It is no safetensors file, or shorter than its header says.
    """
    start = safetensors_header_bytes(data, size)
    if len(data) < start:
        raise DecodeError("cut short in its header")
    with decode_errors("not a safetensors file: its header cannot be read"):
        return _tensor_places(json.loads(data[8:start]), start, size)


def _tensor_places(header: object, start: int, size: int) -> dict[str, tuple[str, tuple[int, ...], int, int]]:
    if not isinstance(header, dict):
        raise DecodeError("not a safetensors file: its header is not a JSON object")
    end = start
    found: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
    for name, entry in cast("dict[str, Any]", header).items():
        if name == "__metadata__":
            continue
        shape = tuple(int(count) for count in entry["shape"])
        first, last = (start + int(offset) for offset in entry["data_offsets"])
        dtype = SAFETENSORS_DTYPES.get(entry["dtype"])
        if dtype is None:
            raise DecodeError(f"tensor {name!r} is {entry['dtype']}, which no cache can hold")
        if (
            first < start
            or min(shape, default=0) < 0
            or last - first != math.prod(shape) * DTYPE_BYTES[dtype]
        ):
            raise DecodeError(f"tensor {name!r} has {last - first} bytes, its shape is {shape} {dtype}")
        found[name] = (dtype, shape, first, last)
        end = max(end, last)
    if end != size:
        raise DecodeError(f"its tensors end at byte {end:,}, the file at {size:,}: cut short or damaged")
    return found


def _safetensors(data: bytes) -> Arrays:
    found: Arrays = {}
    for name, (dtype, shape, first, last) in safetensors_header(data, len(data)).items():
        values = np.frombuffer(data[first:last], numpy_dtype(dtype)).reshape(shape)
        found[name] = Array(values.copy(), dtype) if dtype == "bfloat16" else of_numpy(values)
    return found


def _npy(file: io.BytesIO, size: int) -> NDArray[Any]:
    if file.getvalue()[:6] != b"\x93NUMPY":
        raise DecodeError("not a .npy file: its first bytes are not those of NumPy")
    values = cast("NDArray[Any]", np.load(file, allow_pickle=False))
    if file.tell() != size:
        raise DecodeError(f"holds {size - file.tell():,} bytes after its array")
    return values


def unpack_limit(packed_bytes: int) -> int:
    """Return how many bytes so many packed ones may unpack to."""
    return min(MAX_UNPACKED_BYTES, max(SMALL_UNPACKED_BYTES, MAX_RATIO * packed_bytes))


def _npz(data: bytes) -> Arrays:
    found: Arrays = {}
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        entries = archive.infolist()
        total = sum(entry.file_size for entry in entries)
        if total > unpack_limit(len(data)):
            raise DecodeError(f"has {len(data):,} bytes and claims to unpack to {total:,}")
        for entry in entries:
            if entry.filename.endswith(".npy"):
                if entry.filename.removesuffix(".npy") in found:
                    raise DecodeError(f"holds {entry.filename!r} twice")
                unpacked = archive.read(entry)  # which compares the checksum
                values = _npy(io.BytesIO(unpacked), len(unpacked))
                if values.dtype.kind not in "US":
                    found[entry.filename.removesuffix(".npy")] = of_numpy(values)
    if not found:
        raise DecodeError("holds no arrays")
    return found
