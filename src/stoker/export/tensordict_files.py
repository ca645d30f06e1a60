"""The memory-mapped layout of tensordict: `TensorDict.load_memmap(folder)` reads it back.

A file of raw values per tensor, `<name>.memmap`, and `meta.json`, which has shape and dtype of each and the
batch size. Written by its documented form, so that tensordict need not be installed here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError, arg
from stoker.export.columns import ExportSettings, Tensor, tensors_of
from stoker.export.files import ExportedFile, Making
from stoker.schema import Schema

META = "meta.json"
TAKEN = ("shape", "device")
"""What `meta.json` says of the whole, beside the names of tensors. Others of its own begin with `_`."""


def tensors(
    fields: Schema, settings: ExportSettings, count: int, lengths: Mapping[str, NDArray[np.int64]]
) -> list[Tensor]:
    """The tensors; `lengths`: of all records, per ragged field.

    Raises:
        ConfigError: A name cannot be one of a file, or means something else in `meta.json`.
    """
    longest = {name: int(own.max(initial=0)) for name, own in lengths.items()}
    found = tensors_of(fields, settings, count, lengths, longest)
    for tensor in found:
        if tensor.name in TAKEN or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", tensor.name):
            raise ConfigError(
                f"export: a field is called {tensor.name!r}, which the layout of tensordict has no file name "
                f"for. Leave it out with {arg('fields', setting='--fields')}, or export to safetensors"
            )
    return found


def write(
    making: Making, fields: Schema, settings: ExportSettings, lengths: Mapping[str, NDArray[np.int64]]
) -> list[ExportedFile]:
    """Write a file for each tensor, then `meta.json`.

    Raises:
        StokerError: As `Records.pieces`; or there is no room.
    """
    count = making.records.count
    meta: dict[str, Any] = {}
    found: list[ExportedFile] = []
    for tensor in tensors(fields, settings, count, lengths):
        meta[tensor.name] = {
            "device": "cpu",
            "shape": list(tensor.shape),
            "dtype": f"torch.{tensor.dtype}",
            "is_nested": False,
        }
        if tensor.nbytes:  # a file of no bytes cannot be mapped: the shape says it all
            pieces = making.values(tensor, (0, count), lengths.get(tensor.field))
            found.append(making.file(f"{tensor.name}.memmap", (0, count), pieces))
    # Steps of nested records are not as many as records: then the whole has no batch dimension.
    nested = bool(lengths) and settings.ragged == "nested"
    meta |= {
        "shape": [] if nested else [count],
        "device": "cpu",
        "_type": "<class 'tensordict._td.TensorDict'>",
    }
    (making.folder / META).write_text(json.dumps(meta) + "\n")
    return found
