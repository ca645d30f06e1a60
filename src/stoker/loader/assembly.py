"""Batches from gathered columns: the one way by which records and all kinds of windows are put together.

Records, and windows as they are gathered, are put together by `map` and `zip` in C. Windows over points come
as records, whose lists `points.py` joins. Other windows have parts that are computed: steps of a drawn
stride, time steps, several states. A drawn stride is known only when the example is, so the gather takes the
run of steps that any stride may need, and the example's own are picked from it. That is the same on every
tier, for the price of a longer gather: `horizon * largest stride` steps where a fixed stride takes `horizon`.
Strides and horizons are a pure function of seed, epoch and example, as the order is, so that ranks, resuming
and tiers change nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from stoker.loader.batch import REUSE_FROM_BYTES, Buffers, RecordBatch, Role, WindowBatch, lasting, sent
from stoker.loader.gather import Twin, twin_for
from stoker.loader.order import child_keys, integers
from stoker.loader.outputs import Compute, OutputSpec, gathered_outputs
from stoker.splitmix import Salt, keys_of, stream
from stoker.store.values import unpack

if TYPE_CHECKING:
    from stoker.loader.options import Options
    from stoker.loader.windows import Windows

# ----------------------------------------------------------------------------------------------------------
# Packed fields in batches: bits and scales are gathered as they lie in memory, and multiplied afterwards.
#
# So every tier holds and moves the packed bytes, and gathering knows nothing of packing: it has two outputs
# where a batch has one. Nothing here runs for a cache without packed fields.


CHUNK_BYTES = 1 << 20
"""Bytes decoded at a time, so that what was converted is still in the core's cache when it is multiplied."""


def stored_outputs(outputs: tuple[OutputSpec, ...]) -> tuple[OutputSpec, ...]:
    """What is gathered: every output as it is, packed ones as their bits and their scales."""
    return tuple(part for output in outputs for part in (output.parts or (output,)))


def unpacker(
    outputs: tuple[OutputSpec, ...], batch: int, *, static: bool
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

    def __init__(self, output: OutputSpec, batch: int, *, static: bool) -> None:
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


def drawn_windows(windows: Windows, seed: int, epoch: int, examples: Tensor) -> tuple[Tensor, Tensor]:
    """Return the stride and the horizon of each example in this epoch, both `(n,)` int64 on its device.

    Args:
        windows: The ranges; a fixed number is given to all.
        seed, epoch: Of the loader.
        examples: Example numbers, `(n,)` int64.
    """
    keys = keys_of(stream(seed, epoch, Salt.WINDOW), examples)
    found: list[Tensor] = []
    for place, (least, most) in enumerate((windows.strides, windows.horizons)):
        drawn = integers(child_keys(keys, place), 1, most - least + 1)[:, 0]
        found.append(drawn + least)
    return found[0], found[1]


class _ComputedWindows:
    """Puts windows with computed parts together."""

    def __init__(self, outputs: tuple[OutputSpec, ...], windows: Windows, seed: int, *, static: bool) -> None:
        self._outputs, self._windows, self._seed, self._static = outputs, windows, seed, static
        self._keys = [(output.name, output.field) for output in gathered_outputs(outputs)]
        self._fixed: dict[tuple[str, str], Tensor] = {}

    def batches(
        self,
        columns: Sequence[Iterable[Any]],
        positions: Iterable[tuple[int, int]],
        examples: Any,
        epoch: int,
        size: int,
    ) -> Iterator[WindowBatch]:
        """Yield the windows of consecutive batches.

        Args:
            columns: Of `gathered_outputs`, then `index`.
            positions: As `WindowBatch.position`.
            examples: Numbers of all their examples, numpy or torch.
            epoch, size: The epoch, and how many examples a batch has.
        """
        draws: tuple[Any, ...] | None = None
        for number, (values, position) in enumerate(
            zip(zip(*columns, strict=False), positions, strict=False)
        ):
            *gathered, index = values
            if self._windows.draws and draws is None:
                every = drawn_windows(self._windows, self._seed, epoch, sent(examples, index.device))
                draws = tuple(cast(Any, drawn).split(size) for drawn in every)
            own = None if draws is None else (draws[0][number], draws[1][number])
            yield self._batch(dict(zip(self._keys, gathered, strict=True)), own, index, position)

    def _batch(
        self,
        gathered: dict[tuple[str, str], Tensor],
        draws: tuple[Tensor, Tensor] | None,
        index: Tensor,
        position: tuple[int, int],
    ) -> WindowBatch:
        cond: dict[str, Tensor] = {}
        states: dict[str, dict[str, Tensor]] = {"z0": {}, "z1": {}, "future": {}}
        for output in self._outputs:
            value = self._value(output, gathered, draws, len(index))
            if output.role is Role.FIELD:
                cond[output.name] = value
            else:
                states[output.name][output.field] = value
        if isinstance(self._windows.field, tuple):
            parts: list[Any] = [states["z0"], states["z1"], states["future"] or None]
        else:
            parts = [next(iter(states[name].values()), None) for name in ("z0", "z1", "future")]
        return WindowBatch(*parts, cond=cond, index=index, position=position)

    def _value(
        self,
        output: OutputSpec,
        gathered: dict[tuple[str, str], Tensor],
        draws: tuple[Tensor, Tensor] | None,
        count: int,
    ) -> Tensor:
        if output.compute is None:
            return gathered[output.name, output.field]
        if output.compute is Compute.PICK:
            assert draws is not None
            value = self._picked(output, gathered, draws, count)
        elif output.compute is Compute.DIFFERENCE:
            first, second = (
                self._value(source, gathered, draws, count).reshape(count, -1) for source in output.sources
            )
            value = second - first
        elif output.compute is Compute.TIMES_STRIDE:
            (source,) = output.sources
            value = gathered[source.name, source.field]
            value = value * (self._windows.strides[0] if draws is None else draws[0][:, None].to(value.dtype))
        else:
            assert draws is not None
            strides, horizons = draws
            value = strides[:, None] if output.compute is Compute.STRIDE else self._mask(horizons)[..., None]
        return self._kept(output, value if output.cast is None else value.to(output.cast))

    def _picked(
        self,
        output: OutputSpec,
        gathered: dict[tuple[str, str], Tensor],
        draws: tuple[Tensor, Tensor],
        count: int,
    ) -> Tensor:
        (run,) = output.sources
        steps, (strides, horizons) = gathered[run.name, run.field], draws
        picks = torch.arange(output.picks.start, output.picks.stop, device=strides.device)
        places = (strides[:, None] * picks - run.lag).div_(run.every, rounding_mode="floor")
        begins = torch.arange(count, device=strides.device)[:, None] * steps.shape[1]
        rows = steps.reshape(-1, *steps.shape[2:]).index_select(0, (places + begins).reshape(-1))
        value = rows.reshape(count, *output.shape)
        if output.role is Role.FUTURE and isinstance(self._windows.horizon, tuple):
            outside = ~self._mask(horizons)
            value.masked_fill_(outside.reshape(*outside.shape, *[1] * (value.ndim - 2)), 0)
        return value

    def _mask(self, horizons: Tensor) -> Tensor:
        """True for the states after z1 that are within the example's horizon, `(B, H - 1)` bool."""
        return torch.arange(2, self._windows.horizons[1] + 1, device=horizons.device) <= horizons[:, None]

    def _kept(self, output: OutputSpec, value: Tensor) -> Tensor:
        """The value, with `static` always in the same memory."""
        if not self._static:
            return value.contiguous()
        key = (output.name, output.field)
        if key not in self._fixed:
            self._fixed[key] = lasting(tuple(value.shape), value.dtype, value.device)
        return self._fixed[key].copy_(value)


class BatchAssembly:
    """Puts the batches of one loader together, in one process."""

    def __init__(self, outputs: tuple[OutputSpec, ...], options: Options) -> None:
        windows, static = options.windows, options.static
        gathered = gathered_outputs(outputs)
        self.columns = stored_outputs(gathered)
        """What is gathered, an output for each column."""
        self._outputs = outputs
        self._names = (*(output.name for output in outputs), "index")
        self._has_states = any(output.role is Role.STATE for output in outputs)
        self._unpack = unpacker(gathered, options.batch_size, static=static)
        self._computed: _ComputedWindows | None = None
        several = windows is not None and isinstance(windows.field, tuple)
        if windows is not None and (several or any(output.compute is not None for output in outputs)):
            self._computed = _ComputedWindows(outputs, windows, options.seed, static=static)

    def batches(
        self,
        columns: list[Iterable[Any]],
        positions: Sequence[tuple[int, int]],
        examples: Any,
        epoch: int,
        size: int,
    ) -> Iterator[Any]:
        """Return consecutive batches, made as they are asked for.

        Args:
            columns: Values of `self.columns` by batch, then `index`.
            positions: Where to resume after each batch.
            examples: Numbers of all their examples, numpy or torch.
            epoch, size: The epoch, and how many examples a batch has.
        """
        if self._unpack is not None:
            columns = self._unpack(columns)
        if self._computed is not None:
            return self._computed.batches(columns, positions, examples, epoch, size)
        if self._has_states:
            return _windows(self._outputs, columns, positions)
        return _records(self._names, columns, positions)


def _records(
    names: tuple[str, ...], columns: list[Iterable[Any]], positions: Iterable[tuple[int, int]]
) -> Iterator[RecordBatch]:
    """Put whole records into dicts; `names` are those of `columns`."""
    for values, position in zip(zip(*columns, strict=False), positions, strict=False):
        batch = RecordBatch(zip(names, values, strict=False))
        batch.position = position
        yield batch


_window_batch: Callable[[Any], WindowBatch] = partial(cast(Any, tuple).__new__, WindowBatch)
"""Makes a batch of a tuple of its values, in half the time of `WindowBatch(...)`."""


def _windows(
    outputs: tuple[OutputSpec, ...], columns: list[Iterable[Any]], positions: Iterable[tuple[int, int]]
) -> Iterator[WindowBatch]:
    """Put windows into named tuples; `columns` are those of `outputs`, then `index`."""
    with_future = any(output.role is Role.FUTURE for output in outputs)
    names = tuple(output.name for output in outputs if output.role is Role.FIELD)
    first = len(outputs) - len(names)
    conditions: Iterable[Any] = map(dict[str, Tensor], repeat(()))  # an empty one for every batch
    if names:
        conditions = map(dict, map(partial(zip, names), zip(*columns[first:-1], strict=False)))
    futures: Iterable[Any] = columns[2] if with_future else repeat(None)
    rows: Iterable[Any] = zip(
        columns[0], columns[1], futures, conditions, columns[-1], positions, strict=False
    )
    return map(_window_batch, rows)
