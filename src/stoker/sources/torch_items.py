"""Items of a Dataset as flat dictionaries of numpy arrays.

Dictionaries are flattened with `.`, tuples give fields `0`, `1`, ... (or their names), a bare tensor or
number is the field `data`. float64 becomes float32, complex gets a trailing axis of 2, bfloat16 travels as
its bits in uint16; text is refused, because a store holds numbers.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from stoker.errors import SourceError


def flatten_item(item: Any, *, where: str) -> dict[str, tuple[NDArray[Any], str]]:
    """All values of an item, each as a fresh array and the name of its dtype.

    Raises:
        SourceError: A value is text, None or anything else that is not numbers; names the field.
    """
    return {
        name or "data": _to_array(value, f"{where}, field {name or 'data'!r}")
        for name, value in _walk(item, "")
    }


def narrowed_fields(item: Any) -> set[str]:
    """Fields that are arrays or tensors of more precision than is stored.

    >>> sorted(narrowed_fields({"a": np.ones(2), "b": np.ones(2, "f4"), "c": 0.5}))
    ['a']
    """
    wide = ("float64", "complex128", "longdouble", "float128", "clongdouble", "complex256")
    return {
        name or "data"
        for name, value in _walk(item, "")
        if str(getattr(value, "dtype", "")).rpartition(".")[2].lstrip("<>=") in wide
    }


def _walk(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Leaves of nested dictionaries, tuples and lists; lists of plain numbers below the top are leaves."""
    if isinstance(value, Mapping):
        items = [(str(key), inner) for key, inner in cast("Mapping[Any, Any]", value).items()]
    else:
        values = cast("Sequence[Any]", value) if isinstance(value, tuple | list) else ()
        if not values or (name and _plain_numbers(values)):
            yield name, value
            return
        names = getattr(values, "_fields", range(len(values)))
        items = [(str(key), inner) for key, inner in zip(names, values, strict=True)]
    for key, inner in items:
        yield from _walk(inner, f"{name}.{key}" if name else key)


def _plain_numbers(values: Sequence[Any]) -> bool:
    return all(isinstance(value, bool | int | float | np.number | np.bool_) for value in values)


def _to_array(value: Any, where: str) -> tuple[NDArray[Any], str]:
    if isinstance(value, str | bytes):
        raise SourceError(
            f"{where} is text ({value[:40]!r}), and a store holds numbers. Return a class number and keep "
            "the names beside the Dataset, or leave the field out"
        )
    if value is None:
        raise SourceError(f"{where} is None. Return an array, a number, or leave the field out of every item")
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return _from_tensor(value, where)
    image = sys.modules.get("PIL.Image")
    if image is not None and isinstance(value, image.Image):
        return _from_image(value)
    if isinstance(value, bool | np.bool_):
        return np.asarray(value, dtype=np.bool_), "bool"
    if isinstance(value, int):
        return np.asarray(value, dtype=np.int64), "int64"
    if isinstance(value, float):
        return np.asarray(value, dtype=np.float32), "float32"
    if isinstance(value, list | tuple | complex | np.ndarray | np.generic):
        return _from_numpy(np.asarray(value), where)
    kind = type(cast("object", value)).__name__
    raise SourceError(f"{where} is of type {kind}. Return tensors, arrays, numbers or images")


def _from_tensor(tensor: Any, where: str) -> tuple[NDArray[Any], str]:
    import torch

    if tensor.layout != torch.strided:
        raise SourceError(f"{where} is a tensor of layout {tensor.layout}. Return it dense (`to_dense()`)")
    plain = tensor.detach().cpu().resolve_conj().resolve_neg()
    if plain.dtype == torch.bfloat16:
        return plain.contiguous().view(torch.int16).numpy().view(np.uint16).copy(), "bfloat16"
    try:
        array = plain.numpy()
    except (TypeError, RuntimeError) as error:
        raise SourceError(
            f"{where} has dtype {tensor.dtype}, which cannot be stored ({error}). Convert it in the Dataset"
        ) from error
    return _from_numpy(array, where)


def _from_image(image: Any) -> tuple[NDArray[Any], str]:
    """A PIL image as `(H, W, C)`; palettes become RGB, bitmaps grey."""
    plain = image.convert({"P": "RGB", "1": "L"}.get(image.mode, image.mode))
    array = np.array(plain)
    return _from_numpy(array if array.ndim == 3 else array[..., None], "image")


def _from_numpy(array: NDArray[Any], where: str) -> tuple[NDArray[Any], str]:
    kind, size = array.dtype.kind, array.dtype.itemsize
    if kind == "c":
        array = np.ascontiguousarray(array, dtype=np.complex64)[..., None].view(np.float32)
    elif kind == "f":
        array = np.array(array, dtype=np.float16 if size == 2 else np.float32, order="C")
    elif kind == "u" and size in {2, 4}:
        array = array.astype(np.int32 if size == 2 else np.int64)
    elif kind in "bi" or (kind == "u" and size == 1):
        array = np.array(array, dtype=array.dtype.newbyteorder("="), order="C")
    else:
        raise SourceError(
            f"{where} has dtype {array.dtype}, which cannot be stored. Return bool, integers up to 64 bits "
            "or floating point numbers"
        )
    return array, array.dtype.name
