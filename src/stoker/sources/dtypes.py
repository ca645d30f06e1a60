"""The dtypes that numbers of files and Datasets are read as."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from stoker.errors import DecodeError, SourceError


def read_dtype(stored: np.dtype[Any], *, where: str) -> np.dtype[Any]:
    """The dtype a dataset is read as.

    Raises:
        SourceError: Not numbers, or numbers that no store holds.
    """
    kind, size = stored.kind, stored.itemsize
    if kind == "f" and size >= 2:
        return np.dtype("float16" if size == 2 else "float32")
    if kind == "c":
        return np.dtype("complex64")
    if kind == "b" or (kind == "i" and size <= 8) or (kind == "u" and size == 1):
        return stored.newbyteorder("=")
    if kind == "u" and size in {2, 4}:
        return np.dtype("int32" if size == 2 else "int64")
    raise SourceError(
        f"{where} has dtype {stored}, which cannot be stored. Readable are bool, int8 to int64, uint8 to "
        "uint32, float16 to float64 and complex numbers; leave it out of `fields` or convert it"
    )


def read_as(values: ArrayLike, dtype: np.dtype[Any], *, where: str) -> NDArray[Any]:
    """Return a fresh array of `dtype`, in C order.

    Raises:
        DecodeError: A finite number is beyond what `dtype` holds, and would become infinite.
    """
    try:
        with np.errstate(over="raise"):
            return np.array(values, dtype=dtype, order="C")
    except FloatingPointError:
        exact = np.asarray(values)
        with np.errstate(over="ignore"):
            lost = np.isfinite(exact) & ~np.isfinite(exact.astype(dtype))
        place = [*map(int, np.argwhere(lost)[0])]
        value, most = exact[lost].flat[0], np.finfo(dtype).max
        raise DecodeError(
            f"{where} holds {value:.4g} at {place}, is read as {dtype}, and that ends at {most:.4g}. "
            "Scale the values, or leave the sample or the field out"
        ) from None
