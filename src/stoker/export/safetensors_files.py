"""Plain safetensors files: each field one tensor over all records, or over those in a file of several.

One file is `records.safetensors`. Several have the form in which large models are published: files
`records-00001-of-00003.safetensors`, tensors named apart by the file's number (`latent.00001`), and
`records.safetensors.index.json`, which says in which file each tensor is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.export.columns import ExportSettings, Tensor, cut, tensors_of
from stoker.export.files import ExportedFile, Making
from stoker.schema import DTYPE_BYTES, Schema
from stoker.store.header import TENSOR_DTYPES

NAME = "records"
ALIGN = 8
"""Tensors of the widest items come first, after a header of a multiple of this: all of them lie aligned."""


def stretches(
    fields: Schema, settings: ExportSettings, count: int, lengths: Mapping[str, NDArray[np.int64]]
) -> list[list[Tensor]]:
    """The tensors of each file; `lengths`: of all records, per ragged field."""
    longest = {name: int(own.max(initial=0)) for name, own in lengths.items()}
    return [
        tensors_of(fields, settings, end - begin, _between(lengths, begin, end), longest)
        for begin, end in bounds(fields, settings, count, lengths)
    ]


def bounds(
    fields: Schema, settings: ExportSettings, count: int, lengths: Mapping[str, NDArray[np.int64]]
) -> list[tuple[int, int]]:
    """The places of the records in each file."""
    longest = {name: int(own.max(initial=0)) for name, own in lengths.items()}
    nothing = {name: np.zeros(1, np.int64) for name in lengths}
    one = sum(tensor.nbytes for tensor in tensors_of(fields, settings, 1, nothing, longest))
    if settings.ragged == "pad" or not lengths:
        return cut(one, count, settings.file_bytes)
    sizes = np.full(count, one, np.int64)
    for tensor in tensors_of(fields, settings, 1, {name: np.ones(1, np.int64) for name in lengths}, longest):
        if tensor.field in lengths and tensor.part == "values":
            sizes += lengths[tensor.field] * tensor.nbytes
    return cut(sizes, count, settings.file_bytes)


def write(
    making: Making, fields: Schema, settings: ExportSettings, lengths: Mapping[str, NDArray[np.int64]]
) -> list[ExportedFile]:
    """Write all files; returns what they are, the index apart.

    Raises:
        StokerError: As `Records.pieces`; or there is no room.
    """
    cuts = bounds(fields, settings, making.records.count, lengths)
    of_each = stretches(fields, settings, making.records.count, lengths)
    found: list[ExportedFile] = []
    weight_map: dict[str, str] = {}
    for i, (between, tensors) in enumerate(zip(cuts, of_each, strict=True), 1):
        name = f"{NAME}-{i:05d}-of-{len(cuts):05d}.safetensors" if len(cuts) > 1 else f"{NAME}.safetensors"
        suffix = f".{i:05d}" if len(cuts) > 1 else ""
        own = _between(lengths, *between)
        found.append(making.file(name, between, _pieces(making, tensors, between, own, suffix)))
        weight_map |= {tensor.name + suffix: name for tensor in tensors}
    if len(cuts) > 1:
        total = sum(tensor.nbytes for tensors in of_each for tensor in tensors)
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)
        (making.folder / f"{NAME}.safetensors.index.json").write_text(text + "\n")
    return found


def _between(lengths: Mapping[str, NDArray[np.int64]], begin: int, end: int) -> dict[str, NDArray[np.int64]]:
    return {name: own[begin:end] for name, own in lengths.items()}


def _pieces(
    making: Making,
    tensors: list[Tensor],
    between: tuple[int, int],
    lengths: Mapping[str, NDArray[np.int64]],
    suffix: str,
) -> Iterator[Any]:
    """The bytes of one file."""
    ordered = sorted(tensors, key=lambda tensor: (-DTYPE_BYTES[tensor.dtype], tensor.name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in ordered:
        header[tensor.name + suffix] = {
            "dtype": TENSOR_DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // ALIGN) * ALIGN)
    yield len(text).to_bytes(8, "little") + text
    for tensor in ordered:
        yield from making.values(tensor, between, lengths.get(tensor.field))
