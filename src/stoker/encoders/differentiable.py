"""The frozen encoder of a recipe as a function that gradients pass, for losses on encoded fields.

`Encoder.encode` works in inference mode and in scratch memory, so that filling a cache is fast. These are the
same maps in plain torch, made of the identity and the weights that a cache keeps: no raw data is needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

from stoker.encoders.keeping import KEEPING

Encode: TypeAlias = "Callable[[Tensor], Tensor]"
"""From fields `(B, H, W, C)` to states `(B, L, D)`, float32, on the same device."""


def encode_of(identity: Mapping[str, Any] | None, weights: Mapping[str, Tensor]) -> Encode | None:
    """The encoder from its identity and weights in a recipe; None: it has no form that gradients pass.

    Raises:
        KeyError: The weights are not those of this encoder.
    """
    if identity is None:
        return None
    kind, config = identity["class"], identity["config"]
    if kind == KEEPING:
        return encode_of(config["inner"], weights)
    if kind == "stoker.Normalized":
        inner = encode_of(config["inner"], weights)
        return (
            None if inner is None else _scaled(inner, weights["normalize.shift"], weights["normalize.scale"])
        )
    if kind != "stoker.GridEncoder":
        return None
    return _grid(config, weights)


def _grid(config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Encode:
    from stoker.encoders.grid import plan_cells

    cells = plan_cells(tuple(config["grid"]), tuple(config["patch"]), config["tokens"])
    project, position = weights["project"].float(), weights["position"].float()
    parts = [size for pair in zip(cells.layout, cells.size, strict=True) for size in pair]
    axes = range(1, 1 + len(parts), 2)

    def encode(fields: Tensor) -> Tensor:
        with torch.autocast(fields.device.type, enabled=False):
            for axis, index in enumerate(cells.points_of, 1):
                if index is not None:
                    fields = fields.index_select(axis, torch.as_tensor(index, device=fields.device))
            split = fields.float().reshape(len(fields), *parts, fields.shape[-1])
            order = (0, *axes, *(axis + 1 for axis in axes), 1 + len(parts))
            values = split.permute(order).reshape(len(fields), math.prod(cells.layout), -1)
            return values @ project.to(fields.device) + position.to(fields.device)

    return encode


def _scaled(inner: Encode, shift: Tensor, scale: Tensor) -> Encode:
    def encode(fields: Tensor) -> Tensor:
        return inner((fields - shift.to(fields.device)) / scale.to(fields.device))

    return encode
