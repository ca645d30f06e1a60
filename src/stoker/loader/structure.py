"""Give batches the structure of a dataset's items: tuples, dictionaries, named tuples, dataclasses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from stoker.errors import ConfigError
from stoker.loader.batch import RecordBatch, TupleBatch
from stoker.sources.torch_items import Branch, ItemStructure


def structured(batch: RecordBatch, structure: ItemStructure) -> Any:
    """Return the fields of a batch in the structure of items.

    A dictionary becomes a `RecordBatch`, a tuple or list a `TupleBatch`, a named tuple or dataclass one of
    its own type, which is not initialized again. Dropped text is left out of dictionaries, else None.
    """
    try:
        made = _built(batch, structure)
    except KeyError as error:
        raise ConfigError(
            f"transforms left out {error}, which batches need to have the structure of the dataset's items",
            hint="Return all fields, or put a function of the batch last",
        ) from error
    if isinstance(made, RecordBatch | TupleBatch):
        made.position, made.index = batch.position, batch["index"]
    return made


def _built(fields: Mapping[str, Any], node: ItemStructure) -> Any:
    if not isinstance(node, Branch):
        return None if node is None else fields[node]
    kind: Any = node.kind
    if issubclass(kind, Mapping):
        return RecordBatch((key, _built(fields, one)) for key, one in node.parts if one is not None)
    values = [_built(fields, one) for _, one in node.parts]
    if issubclass(kind, tuple | list):
        make: Any = getattr(kind, "_make", TupleBatch)  # of named tuples
        return make(values)
    made = object.__new__(kind)  # `__init__` may check what is true of one sample alone
    for (name, _), value in zip(node.parts, values, strict=True):
        object.__setattr__(made, name, value)
    return made


def fields_of(batch: Any, structure: ItemStructure, index: Tensor, position: tuple[int, int]) -> RecordBatch:
    """Return the fields of a batch that has the structure of items; the other way round of `structured`.

    Raises:
        LookupError, AttributeError: It has another structure.
    """
    fields = RecordBatch(index=index)
    _collect(batch, structure, fields)
    fields.position = position
    return fields


def _collect(value: Any, node: ItemStructure, fields: dict[str, Any]) -> None:
    if isinstance(node, str):
        fields[node] = value
    elif node is not None:
        by_name = not issubclass(node.kind, Mapping | tuple | list) or hasattr(node.kind, "_fields")
        for key, one in node.parts:
            if one is not None:
                inner = getattr(value, key) if by_name else value[key]
                _collect(inner, one, fields)
