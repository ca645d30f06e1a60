"""Back from latents to fields, by the least-squares inverse of the frozen grid encoder.

The encoder is linear on each cell: `latent = cell @ project + position`. So the best a decoder can do,
without knowing anything of the data, is the pseudo-inverse of `project`. With at least as many latent numbers
as a cell has values nothing is lost but rounding. With fewer, what `project` does not see is lost: for the
seeded weights the waves of a cell beyond its lowest, so the field comes back smoothed within each cell. It is
exact arithmetic on the recorded weights: nothing is learnt, and nothing depends on data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stoker.encoders.keeping import KEEPING
from stoker.encoders.steady import STEADY, weights_of
from stoker.units import MIB

if TYPE_CHECKING:
    from stoker.encoders.grid import Cells

Decode: TypeAlias = "Callable[[Tensor], Tensor]"
"""From latents `(..., L, D)` to fields, float32, on the same device."""


@runtime_checkable
class DecodeByRecord(Protocol):
    """Decodes states of encoders whose fields are at points that every record has of its own."""

    def of(self, number: int, latents: Tensor, /) -> Tensor:
        """Latents `(..., L, D)` of sample `number` as fields `(..., N, C)`, float32, on the same device."""
        ...


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
        """Latents `(..., L, D)` as fields `(..., *grid, C)` float32; points of several cells are averaged."""
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
        axes = range(len(cells.layout))
        values = (latents.float() - self._position) @ self._inverse
        split = values.view(len(latents), *cells.layout, *cells.size, channels).permute(
            0, *(1 + axis + half for axis in axes for half in (0, len(axes))), 2 * len(axes) + 1
        )
        sizes = (count * size for count, size in zip(cells.layout, cells.size, strict=True))
        fields = split.reshape(len(latents), *sizes, channels)
        for axis, index in enumerate(cells.points_of, 1):
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


def decoder_of(
    identity: Mapping[str, Any] | None, weights: Mapping[str, Tensor], own: Decode | None = None
) -> Decode | None:
    """The decoder of an encoder, from its identity and weights in a recipe; None: it has no decoder.

    Args:
        identity, weights: As recorded with a cache.
        own: What decodes in place of the encoder at the center, where that is not a `GridEncoder`.

    Raises:
        KeyError: The weights are not those of this encoder.
    """
    from stoker.encoders.grid import plan_cells

    if identity is None:
        return None
    kind, config = identity["class"], identity["config"]
    if kind == KEEPING:
        return decoder_of(config["inner"], weights, own)
    if kind == "stoker.Normalized":
        inner = decoder_of(config["inner"], weights, own)
        if inner is None and config["inner"] is not None:
            return None
        return _rescaled(inner, weights["normalize.shift"], weights["normalize.scale"])
    if kind == STEADY:
        return decoder_of(config["solution"], weights_of("solution", weights))
    if kind != "stoker.GridEncoder":
        return own
    cells = plan_cells(tuple(config["grid"]), tuple(config["patch"]), config["tokens"])
    return GridDecoder(cells, config["channels"], weights)


def _rescaled(inner: Decode | None, shift: Tensor, scale: Tensor) -> Decode:
    def decode(latents: Tensor) -> Tensor:
        fields = latents.float() if inner is None else inner(latents)
        return fields * scale.to(fields.device) + shift.to(fields.device)

    return decode
