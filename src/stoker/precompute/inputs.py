"""Make a source and an encoder of what users have: a Dataset, an `nn.Module`."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from stoker.encoders.protocol import Encoder
from stoker.errors import ConfigError
from stoker.schema import without_sizes
from stoker.sources.protocol import Source
from stoker.sources.torch_dataset import TorchSource
from stoker.sources.torch_items import first_array

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.data import Dataset


EncoderLike: TypeAlias = "Encoder | nn.Module | Sequence[str] | None"
"""What users give as an encoder: names of fields store these as they are, None all of them."""


def as_source(dataset: Dataset[Any] | Source, **settings: Any) -> Source:
    """Return a source as it is, and a Dataset as a `TorchSource` with these settings.

    Raises:
        ConfigError, SourceError: It is neither.
    """
    if isinstance(dataset, Source) and not isinstance(dataset, type):  # a class has the methods too
        return dataset
    return TorchSource(cast("Any", dataset), **settings)


def as_encoder(encoder: EncoderLike, source: Source) -> Encoder | None:
    """Return an encoder as it is, a module as a `ModuleEncoder`, and names of fields as what stores these.

    A module takes the field `data`, the only field, or the first of a tuple that is not a single number.

    Raises:
        ConfigError: It is neither, or a module, and several fields may be meant.
    """
    if encoder is None:
        return None
    if isinstance(encoder, list | tuple) and all(
        isinstance(name, str) for name in cast("list[object]", encoder)
    ):
        from stoker.encoders.wrappers import FieldSelectingEncoder

        return FieldSelectingEncoder(None, encoder)
    if not isinstance(encoder, type):  # a class has the methods too, but no weights
        if isinstance(encoder, Encoder):
            return encoder
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(encoder, torch.nn.Module):
            from stoker.encoders.module import ModuleEncoder

            return ModuleEncoder(cast("nn.Module", encoder), field=_field_of(source))
    raise ConfigError(
        f"encoder is {encoder!r}",
        hint="Expected an nn.Module, an Encoder such as stoker.GridEncoder(...), names of fields to store as "
        "they are, or None for all of them. Wrap a function as stoker.ModuleEncoder(function)",
    )


def _field_of(source: Source) -> str:
    """Return the field that a bare module takes.

    Raises:
        ConfigError: There are several.
    """
    schema = without_sizes(source.schema())
    if "data" in schema or not schema:
        return "data"
    if len(schema) == 1:
        return next(iter(schema))
    first = first_array(source.structure(), schema) if isinstance(source, TorchSource) else None
    if first is not None:
        return first
    largest = max(schema, key=lambda name: math.prod(map(abs, schema[name].shape)))
    raise ConfigError(
        f"samples have the fields {', '.join(map(repr, schema))}, and a module as encoder takes 'data'",
        hint=f"Say which field it takes, as encoder=stoker.ModuleEncoder(module, field={largest!r})",
    )
