"""Packed fields in batches: bits and scales are gathered as they lie in memory, and multiplied afterwards.

So every tier holds and moves the packed bytes, and gathering knows nothing of packing: it has two outputs
where a batch has one. Nothing here runs for a cache without packed fields.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from stoker.loader.buffers import REUSE_FROM_BYTES, Buffers, lasting
from stoker.loader.kernels.choose import twin_for
from stoker.loader.kernels.twin import Twin
from stoker.loader.outputs import Output
from stoker.store.packing import unpack

CHUNK_BYTES = 1 << 20
"""Bytes decoded at a time, so that what was converted is still in the core's cache when it is multiplied."""


def stored_outputs(outputs: tuple[Output, ...]) -> tuple[Output, ...]:
    """What is gathered: every output as it is, packed ones as their bits and their scales."""
    return tuple(part for output in outputs for part in (output.parts or (output,)))


def unpacker(
    outputs: tuple[Output, ...], batch: int, *, static: bool
) -> Callable[[list[Iterable[Any]]], list[Iterable[Any]]] | None:
    """What turns columns of `stored_outputs` into those of `outputs`; None where nothing is packed.

    Columns are as `MemoryBatches.strips` gives them, with that of `index` last.
    """
    if not any(output.parts for output in outputs):
        return None
    decoders = [Decoder(output, batch, static=static) if output.parts else None for output in outputs]

    def merged(columns: list[Iterable[Any]]) -> list[Iterable[Any]]:
        rest = iter(columns)
        return [
            next(rest) if decoder is None else map(decoder, next(rest), next(rest)) for decoder in decoders
        ] + [*rest]

    return merged


class Decoder:
    """Makes one output of a batch from its gathered bits and scales."""

    def __init__(self, output: Output, batch: int, *, static: bool) -> None:
        self._output = output
        self._batch = batch
        self._fixed: Tensor | None = None
        self._static = static
        self._twin: Twin | None = None
        size = batch * output.served_bytes
        large = size >= REUSE_FROM_BYTES and not static
        self._buffers = Buffers((batch, *output.shape), output.dtype) if large else None

    def __call__(self, bits: Tensor | list[Tensor], scales: Tensor | list[Tensor]) -> Tensor | list[Tensor]:
        """The decoded values, in the output's dtype and shape; lists for whole records of varying length."""
        if isinstance(bits, list):
            pairs = zip(bits, cast("list[Tensor]", scales), strict=True)
            return [self._decoded(b, s, None) for b, s in pairs]
        out = self._room(bits)
        return self._decoded(bits, cast(Tensor, scales), out)

    def _room(self, bits: Tensor) -> Tensor:
        shape = (len(bits), *self._output.shape)
        if self._static:
            if self._fixed is None:
                self._fixed = lasting(shape, self._output.dtype, bits.device)
            return self._fixed
        if self._buffers is not None and len(bits) == self._batch and bits.device.type == "cpu":
            return self._buffers.take()
        return torch.empty(shape, dtype=self._output.dtype, device=bits.device)

    def _decoded(self, bits: Tensor, scales: Tensor, out: Tensor | None) -> Tensor:
        packed = self._output.packed
        if out is None:
            return self._normalised(unpack(bits, scales, packed)).to(self._output.dtype)
        shaped = out.view(bits.shape)
        for own in _chunks(bits):
            if out.dtype == torch.float32:
                self._normalised(unpack(bits[own], scales[own], packed, shaped[own]))
            else:
                shaped[own].copy_(self._normalised(unpack(bits[own], scales[own], packed)))
        return out

    def _normalised(self, values: Tensor) -> Tensor:
        if self._twin is None:
            self._twin = twin_for(self._output, values.device)
        return values if self._twin is None else self._twin.normalise_(values)


def _chunks(bits: Tensor) -> Sequence[slice]:
    """Runs of rows that decode to about `CHUNK_BYTES`; all at once on a device."""
    count = len(bits)
    if bits.device.type != "cpu" or not bits.numel():
        return [slice(0, count)]
    step = max(1, CHUNK_BYTES * count // (4 * bits.numel()))
    return [slice(begin, begin + step) for begin in range(0, count, step)]
