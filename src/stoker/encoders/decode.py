"""Back from latents to fields, by the least-squares inverse of the frozen grid encoder.

The encoder is linear on each cell: `latent = cell @ project + position`. So the best a decoder can do,
without knowing anything of the data, is the pseudo-inverse of `project`. With at least as many latent numbers
as a cell has values nothing is lost but rounding. With fewer, what `project` does not see is lost: for the
seeded weights the waves of a cell beyond its lowest, so the field comes back smoothed within each cell. It is
exact arithmetic on the recorded weights: nothing is learnt, and nothing depends on data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stoker.encoders.keeping import KEEPING
from stoker.units import MIB

if TYPE_CHECKING:
    from stoker.encoders.grid import Cells

Decode: TypeAlias = "Callable[[Tensor], Tensor]"
"""From latents `(..., L, D)` to fields, float32, on the same device."""
CHUNK_BYTES = 16 * MIB
"""Fields decoded at a time."""


class GridDecoder:
    """Latents of a `GridEncoder` back to fields on its grid."""

    def __init__(self, cells: Cells, channels: int, weights: Mapping[str, Tensor]) -> None:
        self._cells, self._channels = cells, channels
        project = weights["project"].detach().cpu().double()
        self._position = weights["position"].detach().cpu().float()
        self._inverse: Tensor = torch.linalg.pinv(project).float()

    def __call__(self, latents: Tensor) -> Tensor:
        """Latents `(..., L, D)` as fields `(..., H, W, C)` float32; points of several cells are averaged."""
        tokens, dim = latents.shape[-2:]
        if self._inverse.device != latents.device:
            self._inverse = self._inverse.to(latents.device)
            self._position = self._position.to(latents.device)
        steps = latents.reshape(-1, tokens, dim)
        size = 4 * tokens * self._inverse.shape[1]
        count = max(1, CHUNK_BYTES // max(1, size))
        with torch.autocast(latents.device.type, enabled=False):
            pieces = [self._fields(steps[at : at + count]) for at in range(0, max(1, len(steps)), count)]
        fields = torch.cat(pieces)
        return fields.view(*latents.shape[:-2], *fields.shape[1:])

    def _fields(self, latents: Tensor) -> Tensor:
        cells, channels = self._cells, self._channels
        (down, across), (height, width) = cells.layout, cells.size
        values = (latents.float() - self._position) @ self._inverse
        split = values.view(len(latents), down, across, height, width, channels).permute(0, 1, 3, 2, 4, 5)
        fields = split.reshape(len(latents), down * height, across * width, channels)
        for axis, index in ((1, cells.rows), (2, cells.cols)):
            if index is not None:
                fields = _averaged(fields, axis, index)
        return fields


def _averaged(fields: Tensor, axis: int, index: NDArray[np.int64]) -> Tensor:
    """Points of cells put back on their place of the grid, those of several cells averaged."""
    places = torch.as_tensor(index, device=fields.device)
    counts = torch.bincount(places).to(fields.dtype)
    shape = [*fields.shape]
    shape[axis] = len(counts)
    summed = fields.new_zeros(shape).index_add_(axis, places, fields)
    return summed / counts.view([-1 if i == axis else 1 for i in range(fields.ndim)])


def decoder_of(identity: Mapping[str, Any] | None, weights: Mapping[str, Tensor]) -> Decode | None:
    """The decoder of an encoder, from its identity and weights in a recipe; None: it has no decoder.

    Raises:
        KeyError: The weights are not those of this encoder.
    """
    from stoker.encoders.grid import plan_cells

    if identity is None:
        return None
    kind, config = identity["class"], identity["config"]
    if kind == KEEPING:
        return decoder_of(config["inner"], weights)
    if kind == "stoker.Normalized":
        inner = decoder_of(config["inner"], weights)
        if inner is None and config["inner"] is not None:
            return None
        return _rescaled(inner, weights["normalize.shift"], weights["normalize.scale"])
    if kind != "stoker.GridEncoder":
        return None
    height, width = config["grid"]
    down, across = config["patch"]
    return GridDecoder(
        plan_cells((height, width), (down, across), config["tokens"]), config["channels"], weights
    )


def _rescaled(inner: Decode | None, shift: Tensor, scale: Tensor) -> Decode:
    def decode(latents: Tensor) -> Tensor:
        fields = latents.float() if inner is None else inner(latents)
        return fields * scale.to(fields.device) + shift.to(fields.device)

    return decode
