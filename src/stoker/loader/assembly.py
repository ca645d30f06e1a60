"""Put batches together from gathered columns: records and all kinds of windows in one way.

Records, and windows as they are gathered, are put together by `map` and `zip` in C. Windows over points come
as records, whose lists are joined. Other windows have parts that are computed: steps of a drawn
stride, time steps, several states. A drawn stride is known only when the example is. So the gather takes the
run of steps that any stride may need, and the example's own are picked from it. That is the same on every
tier, for the price of a longer gather: `horizon * largest stride` steps where a fixed stride takes `horizon`.
Strides and horizons are a pure function of seed, epoch and example, as the order is, so that ranks, resuming
and tiers change nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stoker.arguments import NUMBER, check
from stoker.errors import ConfigError, RecordError, arg
from stoker.loader.batch import (
    REUSE_FROM_BYTES,
    STATES,
    Buffers,
    PointBatch,
    RecordBatch,
    Role,
    WindowBatch,
    allocate,
    main_field,
    to_device,
)
from stoker.loader.choose import Taken
from stoker.loader.gather import RowConverter, make_converter
from stoker.loader.order import child_keys, integers
from stoker.loader.outputs import Computation, OutputSpec, gathered_outputs
from stoker.loader.records import stacked_fields
from stoker.schema import LENGTHS_SUFFIX, SHAPE_SUFFIX, Schema
from stoker.splitmix import Salt, keys_of, stream
from stoker.store.values import unpack

if TYPE_CHECKING:
    from stoker.loader.batch import Windows
    from stoker.loader.options import Options
    from stoker.loader.records import RecordTable
    from stoker.store import Cache

# ----------------------------------------------------------------------------------------------------------
# Quantized fields in batches: bits and scales are gathered as they are in memory, and multiplied afterwards.
#
# So every tier holds and moves the quantized bytes, and gathering knows nothing of scales: it has two outputs
# where a batch has one. Nothing here runs for a cache without quantized fields.


CHUNK_BYTES = 1 << 20
"""Bytes decoded at a time, so that what was converted is still in the core's cache when it is multiplied."""


def stored_outputs(outputs: tuple[OutputSpec, ...]) -> tuple[OutputSpec, ...]:
    """Return what is gathered: every output as it is, quantized ones as their bits and their scales."""
    return tuple(part for output in outputs for part in (output.parts or (output,)))


def make_decoder(
    outputs: tuple[OutputSpec, ...], batch: int, *, static: bool
) -> Callable[[list[Iterable[Any]]], list[Iterable[Any]]] | None:
    """Return what turns columns of `stored_outputs` into those of `outputs`; None where nothing is quantized.

    Columns are as `MemoryBatches.columns` gives them, with that of `index` last.
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
        self._converter: RowConverter | None = None
        size = batch * output.served_bytes
        large = size >= REUSE_FROM_BYTES and not static
        self._buffers = Buffers((batch, *output.shape), output.dtype) if large else None

    def __call__(self, bits: Tensor | list[Tensor], scales: Tensor | list[Tensor]) -> Tensor | list[Tensor]:
        """Return the decoded values, in the output's dtype and shape; lists for records of varying length."""
        if isinstance(bits, list):
            pairs = zip(bits, cast("list[Tensor]", scales), strict=True)
            return [self._decoded(b, s, None) for b, s in pairs]
        out = self._room(bits)
        return self._decoded(bits, cast(Tensor, scales), out)

    def _room(self, bits: Tensor) -> Tensor:
        shape = (len(bits), *self._output.shape)
        if self._static:
            if self._fixed is None:
                self._fixed = allocate(shape, self._output.dtype, bits.device)
            return self._fixed
        if self._buffers is not None and len(bits) == self._batch and bits.device.type == "cpu":
            return self._buffers.take()
        return torch.empty(shape, dtype=self._output.dtype, device=bits.device)

    def _decoded(self, bits: Tensor, scales: Tensor, out: Tensor | None) -> Tensor:
        dtype = self._output.quantized
        if out is None:
            return self._normalized(unpack(bits, scales, dtype)).to(self._output.dtype)
        shaped = out.view(bits.shape)
        for own in _chunks(bits):
            if out.dtype == torch.float32:
                self._normalized(unpack(bits[own], scales[own], dtype, shaped[own]))
            else:
                shaped[own].copy_(self._normalized(unpack(bits[own], scales[own], dtype)))
        return out

    def _normalized(self, values: Tensor) -> Tensor:
        if self._converter is None:
            self._converter = make_converter(self._output, values.device)
        return values if self._converter is None else self._converter.normalize_(values)


def _chunks(bits: Tensor) -> Sequence[slice]:
    """Return runs of rows that decode to about `CHUNK_BYTES`; all at once on a device."""
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
                every = drawn_windows(self._windows, self._seed, epoch, to_device(examples, index.device))
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
        states: dict[Role, dict[str, Tensor]] = {role: {} for role in STATES}
        for output in self._outputs:
            value = self._value(output, gathered, draws, len(index))
            if output.role in states:
                states[output.role][output.field] = value
            else:
                cond[output.name] = value
        parts: list[Any] = [values or None for values in states.values()]
        if not isinstance(self._windows.field, tuple):
            parts = [next(iter(values.values()), None) for values in states.values()]
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
        if output.compute is Computation.PICK:
            assert draws is not None
            value = self._picked(output, gathered, draws, count)
        elif output.compute is Computation.DIFFERENCE:
            first, second = (
                self._value(source, gathered, draws, count).reshape(count, -1) for source in output.sources
            )
            value = second - first
        elif output.compute is Computation.TIMES_STRIDE:
            (source,) = output.sources
            value = gathered[source.name, source.field]
            value = value * (self._windows.strides[0] if draws is None else draws[0][:, None].to(value.dtype))
        else:
            assert draws is not None
            strides, horizons = draws
            value = (
                strides[:, None] if output.compute is Computation.STRIDE else self._mask(horizons)[..., None]
            )
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
        """Return the value, with `static` always in the same memory."""
        if not self._static:
            return value.contiguous()
        key = (output.name, output.field)
        if key not in self._fixed:
            self._fixed[key] = allocate(tuple(value.shape), value.dtype, value.device)
        return self._fixed[key].copy_(value)


class BatchAssembly:
    """Puts the batches of one loader together, in one process."""

    def __init__(self, outputs: tuple[OutputSpec, ...], options: Options, join: Joiner | None) -> None:
        windows, static = options.windows, options.static
        gathered = gathered_outputs(outputs)
        self.columns = stored_outputs(gathered)
        """What is gathered, an output for each column."""
        self._outputs = outputs
        self._names = (*(output.name for output in outputs), "index")
        self._has_states = any(output.role in STATES for output in outputs)
        self._join = join
        self._unpack = make_decoder(gathered, options.batch_size, static=static)
        self._short = [output.field for output in outputs if output.taken is Taken.LENGTHS]
        """Fields of which a record may have fewer rows than are chosen."""
        reads_sizes = join is not None and windows is None and not static
        self._sizes = [i for i, o in enumerate(outputs) if reads_sizes and o.role is Role.SIZES]
        self.host_sizes = tuple(outputs[place].field for place in self._sizes)
        """Fields of sizes, which the host takes to give records their axes."""
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
        for place in self._sizes:
            columns[place] = on_host(columns[place])
        if self._computed is not None:
            return self._computed.batches(columns, positions, examples, epoch, size)
        if self._has_states:
            return _windows(self._outputs, columns, positions)
        batches: Iterator[Any] = _records(self._names, columns, positions)
        if self._short:
            batches = map(self._cleared, batches)
        return batches if self._join is None else map(self._join, batches)

    def _cleared(self, batch: RecordBatch) -> RecordBatch:
        """Return the batch with zeros behind the rows of short records."""
        for name in self._short:
            values, lengths = batch[name], batch[name + LENGTHS_SUFFIX]
            count = values.shape[1]
            if values.device.type == "cpu":
                for place in (lengths < count).nonzero().flatten().tolist():
                    values[place, int(lengths[place]) :] = 0
            else:
                behind = torch.arange(count, device=values.device) >= lengths[:, None]
                values.masked_fill_(behind.view(*behind.shape, *[1] * (values.dim() - 2)), 0)
        return batch


def on_host(column: Iterable[Tensor]) -> Iterable[Tensor]:
    """Return the small tensors of consecutive batches in host memory.

    All are copied at once, so that the host waits for a device once, and not at each batch.
    """
    values = [*column]
    if not values or values[0].device.type == "cpu":
        return values
    whole: Any = torch.cat(values).cpu()
    return whole.split([len(value) for value in values])


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
    roles = {output.role for output in outputs}
    names = tuple(output.name for output in outputs if output.role not in STATES)
    first = len(outputs) - len(names)
    conditions: Iterable[Any] = map(dict[str, Tensor], repeat(()))  # an empty one for every batch
    if names:
        conditions = map(dict, map(partial(zip, names), zip(*columns[first:-1], strict=False)))
    seconds: Iterable[Any] = columns[1] if Role.Z1 in roles else repeat(None)
    futures: Iterable[Any] = columns[2] if Role.FUTURE in roles else repeat(None)
    rows: Iterable[Any] = zip(columns[0], seconds, futures, conditions, columns[-1], positions, strict=False)
    return map(_window_batch, rows)


# ----------------------------------------------------------------------------------------------------------
# Fields of varying length as one tensor: padded with a mask, or one after another with offsets.
#
# Every tier gathers such a field as a list of tensors; what is here joins that list, so that all tiers hand
# out the same bytes. `u` padded comes as `u` `(B, L, *step)`, `u.lengths` `(B,)` and `u.mask` `(B, L)`;
# packed as `u` `(sum of lengths, *step)` and `u.offsets` `(B + 1,)`. A folded field of particles or meshes
# (`stoker.schema.Field.axes`) is stored as one row for each point of each step, so a window is consecutive
# rows of it, which are given their axes here.


MASK, OFFSETS = ".mask", ".offsets"
"""With `LENGTHS_SUFFIX`, end the names of what comes with a joined field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pad:
    """Padding of records of varying length, at their end; `ragged="pad"` is `Pad()`.

    Raises:
        ConfigError: A length is below 1, or `to` is not a multiple of `multiple`.

    Examples:
        >>> import stoker, torch
        >>> data = [{"path": torch.ones(steps, 3)} for steps in (5, 2, 7, 4)]
        >>> loader = stoker.cached(data, batch_size=4, ragged=stoker.Pad(multiple=8))
        >>> batch = next(iter(loader))
        >>> batch["path"].shape, batch["path.lengths"].tolist()
        (torch.Size([4, 8, 3]), [5, 2, 7, 4])
    """

    to: int | None = None
    """Steps of every batch; None: those of the longest record in the batch."""
    multiple: int = 1
    """Round the longest up to a multiple, so that a compiled model meets few shapes."""
    value: float | Mapping[str, float] = 0
    """What is put after the end: one number, or by field (0 where a field is not named)."""

    def __post_init__(self) -> None:
        """Refuse lengths below 1."""
        for name, size in (("to", self.to), ("multiple", self.multiple)):
            if size is not None and (
                not isinstance(cast("object", size), int) or size is True or not 1 <= size < 1 << 31
            ):
                raise ConfigError(
                    f"Pad({name}={size!r}) is not a length", hint="Expected a whole number from 1 on"
                )
        if self.to is not None and self.to % self.multiple:
            raise ConfigError(
                f"Pad(to={self.to}, multiple={self.multiple}): {self.to} is not a multiple of {self.multiple}"
            )
        values = [*self.value.values()] if isinstance(self.value, Mapping) else [self.value]
        for value in values:
            if not isinstance(cast("object", value), bool):  # the value of fields of bools
                check({"Pad: value": (value, NUMBER)})

    def length(self, longest: int) -> int:
        """Return the steps of a batch whose longest record has `longest`.

        Args:
            longest: Steps of the longest record.

        Examples:
            >>> import stoker
            >>> stoker.Pad().length(13), stoker.Pad(multiple=8).length(13), stoker.Pad(to=20).length(13)
            (13, 16, 20)
        """
        return -(-longest // self.multiple) * self.multiple if self.to is None else self.to

    def value_of(self, name: str) -> float:
        """Return what is put after the end of one field.

        Args:
            name: Name of the field.
        """
        return self.value.get(name, 0) if isinstance(self.value, Mapping) else self.value


Ragged: TypeAlias = "str | Pad"
"""`list`, `pad`, `pack`, or a `Pad`."""


def too_long(name: str, number: int, length: int, to: int) -> RecordError:
    """Return the error for a record that does not fit the length that batches are padded to."""
    return RecordError(
        f"field {name!r} of sample {number} has {length} steps, ragged=Pad(to={to}) leaves room for {to}",
        hint=f"Give at least Pad(to={length}), or leave such samples out with indices=",
    )


def pad(tensors: Sequence[Tensor], length: int, value: float = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return the records side by side.

    Returns:
        `(B, length, *step)`; lengths `(B,)` int64; and a mask `(B, length)` that is True at what is real.
    """
    first = tensors[0]
    sizes = np.array([len(tensor) for tensor in tensors], dtype=np.int64)
    out = first.new_full((len(tensors), length, *first.shape[1:]), value)
    own = np.arange(int(sizes.sum())) + np.repeat(np.arange(len(sizes)) * length - _starts(sizes)[:-1], sizes)
    lengths = to_device(sizes, first.device)
    # One copy by index: a copy for each record would be a kernel for each on a GPU.
    out.view(-1, *first.shape[1:]).index_copy_(0, to_device(own, first.device), torch.cat([*tensors]))
    mask = torch.arange(length, device=first.device)[None, :] < lengths[:, None]
    return out, lengths, mask


def pack(tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the records one after another, and where each begins: `(B + 1,)` int64, the total last."""
    sizes = np.array([len(tensor) for tensor in tensors], dtype=np.int64)
    return torch.cat([*tensors]), to_device(_starts(sizes), tensors[0].device)


PACKED = ("cu_seqlens", "position_ids", "max_seqlen")
"""Names of what comes with records packed by tokens."""


def _sequences(lengths: list[int], device: torch.device) -> dict[str, Any]:
    """Return what kernels for sequences of varying length take, as `PACKED`."""
    sizes = np.array(lengths, np.int64)
    starts = _starts(sizes)
    places = np.arange(starts[-1]) - np.repeat(starts[:-1], sizes)
    values = to_device(starts.astype(np.int32), device), to_device(places, device), max(lengths)
    return dict(zip(PACKED, values, strict=True))


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    """Return the records one after another, without a copy where they are parts of one tensor already."""
    base, total = tensors[0]._base, sum(map(len, tensors))  # pyright: ignore[reportPrivateUsage]
    if base is None or base.shape != (total, *tensors[0].shape[1:]) or not base.is_contiguous():
        return torch.cat([*tensors])
    parts = all(tensor._base is base for tensor in tensors)  # pyright: ignore[reportPrivateUsage]
    return base if parts else torch.cat([*tensors])


def _starts(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])


def _check_values(how: Pad, outputs: Mapping[str, OutputSpec]) -> None:
    if isinstance(how.value, Mapping) and (unknown := sorted(how.value.keys() - outputs.keys())):
        raise ConfigError(
            f"Pad(value=...) names {', '.join(unknown)}; fields of varying length are {', '.join(outputs)}"
        )
    for name, output in outputs.items():
        dtype, value = output.cast or output.dtype, how.value_of(name)
        if dtype.is_floating_point:
            fits = not math.isfinite(value) or abs(value) <= torch.finfo(dtype).max
        else:
            fits = value in (0, 1) if dtype == torch.bool else _is_whole(value, torch.iinfo(dtype))
        if not fits:
            raise ConfigError(
                f"Pad(value={value!r}) cannot be held by field {name!r} of {dtype}",
                hint=f"Give a value by field, as Pad(value={{{name!r}: 0}})",
            )


def _check_fits(name: str, tensors: Sequence[Tensor], index: Tensor, to: int) -> None:
    for place, tensor in enumerate(tensors):
        if len(tensor) > to:
            raise too_long(name, int(index[place]), len(tensor), to)


def _is_whole(value: float, info: Any) -> bool:
    return value == value // 1 and info.min <= value <= info.max


POINTS = "points"
"""Prefix of the names that say which point belongs to which window."""
BATCH = ".batch"


def make_joiner(options: Options, outputs: tuple[OutputSpec, ...], schema: Schema) -> Joiner | None:
    """Return what joins the lists of a batch; None: they stay lists, without axes to restore.

    Raises:
        ConfigError: `ragged` is unknown, a name that joining adds is taken, or `Pad(to=...)` is asked for of
            fields with several axes.
    """
    windows, tokens = options.windows, options.batch_tokens is not None
    ragged = "pack" if tokens else options.ragged
    stacked = stacked_fields(schema, options.batch_by)
    if not (isinstance(ragged, Pad) or ragged in ("list", "pad", "pack")):
        raise ConfigError(
            f"ragged is {ragged!r}", hint="Expected list, pad, pack or stoker.loader.Pad(to=..., value=...)"
        )
    folded = any(schema[output.field].axes for output in outputs if output.field in schema)
    lists = {o.name: o for o in outputs if o.ragged and o.field not in stacked}
    how = ragged if isinstance(ragged, Pad) else Pad() if ragged == "pad" else None
    if ragged != "list" and lists:
        added = {*PACKED} if tokens else {n + end for n in lists for end in (LENGTHS_SUFFIX, MASK, OFFSETS)}
        if taken := sorted(added & {output.name for output in outputs}):
            by, also = (
                (arg("batch_tokens"), "") if tokens else (f"ragged={ragged!r}", ", or take ragged='list'")
            )
            raise ConfigError(
                f"{by} adds {', '.join(taken)} to batches, and records have fields of that name",
                hint=f"Give them other names in the source{also}",
            )
        if how is not None:
            _check_values(how, lists)
    elif not folded and not stacked:
        return None
    folded = any(schema[output.field].folded for output in lists.values())
    if folded and how is not None and how.to is not None:
        raise ConfigError(
            f"ragged={how!r} gives one length, and fields of this cache have several axes that vary",
            hint="Use ragged='pad', or Pad(multiple=...)",
        )
    return Joiner(
        schema=schema,
        outputs=outputs,
        pad=how,
        pack=ragged == "pack",
        windows=windows,
        main=None if windows is None else main_field(schema, windows),
        stacked=stacked,
        tokens=tokens,
    )


def check_lengths(join: Joiner, cache: Cache, table: RecordTable) -> None:
    """Refuse records that are longer than batches are padded to, before any is read.

    Raises:
        RecordError: As said; names the longest.
    """
    if join.pad is None or join.pad.to is None:
        return
    for name in (o.name for o in join.outputs if o.ragged and o.field not in join.stacked):
        lengths = table.of_all(cache.lengths(name))
        longest = int(np.argmax(lengths)) if len(lengths) else 0
        if len(lengths) and lengths[longest] > join.pad.to:
            raise too_long(name, int(table.indices[longest]), int(lengths[longest]), join.pad.to)


@dataclass(frozen=True, slots=True, kw_only=True)
class Joiner:
    """Gives the lists of a batch their axes, and joins them as asked."""

    schema: Schema
    outputs: tuple[OutputSpec, ...]
    pad: Pad | None
    pack: bool
    windows: Windows | None
    main: str | None
    """The field that windows are cut from; None: records are served entire."""
    stacked: frozenset[str] = frozenset()
    """Fields of which all examples of a batch have one shape."""
    tokens: bool = False
    """Fields of varying length come as one sequence, with `PACKED`."""

    def __call__(self, batch: RecordBatch) -> Any:
        """Return the batch as handed out: a `RecordBatch`, or a `PointBatch` of windows.

        Raises:
            RecordError: A record is longer than `Pad.to`; names it.
        """
        return self._records(batch) if self.windows is None else self._windows(batch, self.windows)

    # ------------------------------------------------------------------ entire records

    def _records(self, batch: RecordBatch) -> RecordBatch:
        counts = None
        made = RecordBatch()
        made.position = batch.position
        lengths: list[int] = []
        for output in self.outputs:
            name, value = output.name, batch[output.name]
            if not output.ragged:
                # Lists have their axes already, and need no sizes.
                joined = self.pad is not None or self.pack
                if output.role is Role.SIZES and name.removesuffix(SHAPE_SUFFIX) in self.stacked:
                    joined = False
                if output.role is not Role.SIZES:
                    made[name] = value
                elif joined:  # they are on the host
                    made[name] = to_device(value, batch["index"].device)
                continue
            field, tensors = self.schema[output.field], cast("list[Tensor]", value)
            if output.field in self.stacked:
                shape = batch[name + SHAPE_SUFFIX][0].tolist() if field.folded else [len(tensors[0])]
                made[name] = _joined(tensors).view(len(tensors), *shape, *tensors[0].shape[1:])
                continue
            if self.tokens:
                made[name], lengths = _joined(tensors), [len(tensor) for tensor in tensors]
                continue
            if field.folded and not self.pack:
                shapes = batch[name + SHAPE_SUFFIX].tolist()
                tensors = [t.view(*s, *t.shape[1:]) for t, s in zip(tensors, shapes, strict=True)]
            if field.numbers_points and self.pack:
                counts = self._counts(batch) if counts is None else counts
                tensors = _shifted(tensors, counts)
            if self.pad is not None and self.pad.to is not None:
                _check_fits(name, tensors, batch["index"], self.pad.to)
            self._put(made, name, tensors, axes=max(1, len(field.axes)))
        made["index"] = batch["index"]
        if self.tokens:
            made.update(_sequences(lengths, batch["index"].device))
        return made

    def _counts(self, batch: RecordBatch) -> list[int]:
        """Points of each record."""
        for name, field in self.schema.items():
            if field.axes == ("p",) and name in batch:
                return [len(tensor) for tensor in batch[name]]
            if "p" in field.axes and name + SHAPE_SUFFIX in batch:
                return batch[name + SHAPE_SUFFIX][:, field.axes.index("p")].tolist()
        raise ConfigError("records number points and have no field of points", hint="Serve them as lists")

    def _put(self, made: dict[str, Any], name: str, tensors: list[Tensor], *, axes: int) -> None:
        """Add a field to what is handed out, joined as asked."""
        if self.pack:
            made[name], made[name + OFFSETS] = pack(tensors)
        elif self.pad is None:
            made[name] = tensors
        elif axes == 1:
            length = self.pad.length(max(map(len, tensors)))
            found = pad(tensors, length, self.pad.value_of(name))
            made[name], made[name + LENGTHS_SUFFIX], made[name + MASK] = found
        else:
            made[name], made[name + MASK] = self._padded(name, tensors, range(axes))

    def _padded(self, name: str, tensors: Sequence[Tensor], varying: range) -> tuple[Tensor, Tensor]:
        """Return tensors that differ along the axes `varying` as one, padded, and a mask of what is real."""
        assert self.pad is not None
        first, axes = tensors[0], varying.stop
        most = [
            self.pad.length(max(t.shape[axis] for t in tensors)) if axis in varying else first.shape[axis]
            for axis in range(axes)
        ]
        out = first.new_full((len(tensors), *most, *first.shape[axes:]), self.pad.value_of(name))
        mask = torch.zeros((len(tensors), *most), dtype=torch.bool, device=first.device)
        for place, tensor in enumerate(tensors):
            own = (place, *(slice(size) for size in tensor.shape[:axes]))
            out[own], mask[own] = tensor, True
        return out, mask

    # ------------------------------------------------------------------ windows

    def _windows(self, batch: RecordBatch, windows: Windows) -> PointBatch:
        main, schema = cast("str", self.main), self.schema
        steps = windows.span + 1
        states: dict[str, list[Tensor]] = {}
        cond: dict[str, Tensor] = {}
        nodes: dict[str, Any] = {}
        rest: dict[str, list[Tensor]] = {}
        for output in self.outputs:
            value = batch[output.name]
            if output.role is Role.STEPS:
                states[output.name] = [t.view(steps, -1, *t.shape[1:]) for t in cast("list[Tensor]", value)]
            elif output.role is Role.NODES:
                rest[output.name] = cast("list[Tensor]", value)
            else:
                cond[output.name] = value
        counts = [tensor.shape[1] for tensor in states[main]]
        for name, tensors in rest.items():
            shift = self.pack and schema[name].numbers_points
            of_points = schema[name].axes == ("p",)
            self._put(nodes, name, _shifted(tensors, counts) if shift else tensors, axes=1)
            if of_points:  # told by `points.*`
                for end in (LENGTHS_SUFFIX, MASK, OFFSETS):
                    nodes.pop(name + end, None)
        self._tell_apart(nodes, counts, states[main][0].device)
        made = {name: self._states(name, tensors, windows) for name, tensors in states.items()}
        for name, (first, second, future) in made.items():
            if name != main:
                nodes |= {f"{name}0": first, f"{name}1": second}
                nodes |= {} if future is None else {f"{name}.future": future}
        return PointBatch(*made[main], cond, nodes, batch["index"], batch.position)

    def _states(self, name: str, tensors: list[Tensor], windows: Windows) -> tuple[Any, Any, Any]:
        """z0, z1 and future of windows `(steps, N, *rest)`."""
        stride = windows.stride
        future = None if windows.horizon == 1 else [tensor[2 * stride :: stride] for tensor in tensors]
        pairs = [[tensor[at] for tensor in tensors] for at in (0, stride)]
        if self.pack:
            packed = None if future is None else torch.cat(future, dim=1)
            return torch.cat(pairs[0]), torch.cat(pairs[1]), packed
        if self.pad is None:
            return pairs[0], pairs[1], future
        length = self.pad.length(max(tensor.shape[1] for tensor in tensors))
        value = self.pad.value_of(name)
        sides = [pad(pair, length, value)[0] for pair in pairs]
        if future is None:
            return sides[0], sides[1], None
        return sides[0], sides[1], self._padded(name, future, range(1, 2))[0]

    def _tell_apart(self, nodes: dict[str, Any], counts: list[int], device: torch.device) -> None:
        sizes = np.array(counts, np.int64)
        if self.pack:
            nodes[POINTS + OFFSETS] = to_device(_starts(sizes), device)
            nodes[POINTS + BATCH] = to_device(np.repeat(np.arange(len(sizes)), sizes), device)
        elif self.pad is not None:
            length = self.pad.length(max(counts))
            nodes[POINTS + LENGTHS_SUFFIX] = to_device(sizes, device)
            nodes[POINTS + MASK] = to_device(np.arange(length)[None] < sizes[:, None], device)


def _shifted(tensors: Sequence[Tensor], counts: Sequence[int]) -> list[Tensor]:
    """Return the numbers of points within each record as numbers of points of the batch."""
    before = np.cumsum([0, *counts[:-1]]).tolist()
    return [tensor + first for tensor, first in zip(tensors, before, strict=True)]
