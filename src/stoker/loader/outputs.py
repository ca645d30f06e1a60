"""The tensors of a batch: which are handed out, and how a gather converts values on their way.

An output takes rows of one field: entire records, or steps of a trajectory at a lag from the window's start.
A gather is one `index_select` on a *view* of the field, shifted by the lag, or overlapping for several steps
at once. So `z0`, `z1` and `future` share one index.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import pairwise
from typing import TypeAlias, cast

import numpy as np
import torch

from stoker.arguments import check, finite, whole
from stoker.errors import ConfigError
from stoker.loader.batch import STATES, Role, Windows, check_conditions, condition_width, state_fields
from stoker.loader.choose import START, Choices, FieldGroup, OneOf, Taken
from stoker.loader.chunks import RECORD
from stoker.schema import (
    FLOATS,
    LENGTHS_SUFFIX,
    SCALE_SUFFIX,
    SHAPE_SUFFIX,
    Field,
    Schema,
    scale_field,
    without_points,
)
from stoker.units import KIB

# ----------------------------------------------------------------------------------------------------------
# Describe what a gather does to values on their way into a batch: normalize and cast, crop and flip.
#
# One rule holds on every device and tier. A stored value becomes float32 and is multiplied by a float32
# scale. The product, rounded, is added to a float32 shift. That sum, rounded, is cast to the batch's
# dtype, to the nearest. No step is contracted into another (a fused multiply-add rounds once where this
# rounds twice), so a processor, a GPU and a kernel of any make give the same bits.


@dataclass(frozen=True, slots=True, kw_only=True)
class Normalization:
    """Normalization of a field while it is served: `(value / divisor - mean) / std`, in float32.

    Raises:
        ConfigError: A number is not finite, a deviation or the divisor is 0, or `axis` is not negative.

    Examples:
        >>> import stoker, torch
        >>> data = [{"image": torch.full((3, 2, 2), 255, dtype=torch.uint8)}] * 4
        >>> normalize = {"image": stoker.Normalization(mean=0.5, std=0.5, divisor=255)}
        >>> batch = next(iter(stoker.cached(data, batch_size=4, normalize=normalize)))
        >>> batch["image"].dtype, batch["image"].max().item()
        (torch.float32, 1.0)
    """

    mean: float | Sequence[float]
    """One for all values, or one per channel."""
    std: float | Sequence[float]
    """One for all values, or one per channel; not 0."""
    axis: int = -3
    """The channels' axis of an example, counted from its end: -3 for images `(C, H, W)`, -1 for tokens."""
    divisor: float = 1.0
    """What values are divided by first: 255 for bytes with means that belong to 0..1."""

    def __post_init__(self) -> None:
        """Refuse numbers that no field can be normalized with."""
        object.__setattr__(self, "mean", _numbers("mean", self.mean))
        object.__setattr__(self, "std", _numbers("std", self.std))
        means, stds = self.channels
        if len(means) != len(stds):
            raise ConfigError(
                f"normalize: {len(means)} means and {len(stds)} deviations", hint="Give one each"
            )
        check({"normalize: axis": (self.axis, whole())})
        check({"normalize: divisor": (self.divisor, finite())})
        if 0.0 in stds or not self.divisor:
            raise ConfigError(
                f"normalize: std {self.std} and divisor {self.divisor} divide, so none may be 0"
            )
        if self.axis >= 0:
            raise ConfigError(
                f"normalize: axis {self.axis} counts from the front, where steps and batches come and go",
                hint="Count from the end: -3 for images (C, H, W), -1 for tokens",
            )

    @property
    def channels(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Means and deviations, of equal length."""
        means, stds = cast("Sequence[float]", self.mean), cast("Sequence[float]", self.std)
        most = max(len(means), len(stds))
        full = [tuple(values) * most if len(values) == 1 else tuple(values) for values in (means, stds)]
        return full[0], full[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """Steps from one output's stored values to served ones, in the order of the fields."""

    dtype: torch.dtype
    """What is handed out."""
    crop: tuple[int, int] | None = None
    """Rows and columns kept of an image's last two axes; where they begin differs by example."""
    flip: bool = False
    """Columns may be mirrored; each batch comes with which of its examples are."""
    scale: tuple[float, ...] = ()
    """Factor per channel, float32; empty: values are only cast."""
    shift: tuple[float, ...] = ()
    """What is added then, per channel, float32."""
    inner: int = 1
    """Consecutive stored values of one channel: value `i` of an example has channel
    `i // inner % len(scale)`."""


def find_conversion(field: Field, normalize: Normalization | None, dtype: str | None) -> Conversion | None:
    """Return what serving `field` takes in addition to copying; None: nothing.

    Args:
        normalize: How to; values that are not floats are then handed out as float32.
        dtype: Handed out instead of the stored one, for floats.

    Raises:
        ConfigError: The field has no such axis, or another number of channels.
    """
    if normalize is None:
        if dtype is None or dtype == field.dtype or not field.floating:
            return None
        return Conversion(dtype=getattr(torch, dtype))
    means, stds = normalize.channels
    inner = 1
    if len(means) > 1:
        inner = _inner(field, normalize.axis, len(means))
    factors = [1.0 / (normalize.divisor * std) for std in stds]
    return Conversion(
        dtype=getattr(torch, dtype or (field.dtype if field.dtype in FLOATS else "float32")),
        scale=_float32(factors),
        shift=_float32([-mean / std for mean, std in zip(means, stds, strict=True)]),
        inner=inner,
    )


def check_normalize(normalize: object, schema: Schema) -> Mapping[str, Normalization]:
    """`normalize=` of a loader, checked against the fields that there are.

    Raises:
        ConfigError: It is no mapping of fields to `Normalization`, or names a field that no record has.
    """
    if normalize is None:
        return {}
    given = cast("Mapping[object, object]", normalize) if isinstance(normalize, Mapping) else {None: None}
    if not all(isinstance(value, Normalization) for value in given.values()):
        raise ConfigError(
            f"normalize is {normalize!r}",
            hint='Expected fields and how to: {"image": stoker.Normalization(mean=..., std=...)}',
        )
    unknown = [name for name in given if name not in schema]
    if unknown:
        raise ConfigError(f"normalize names {unknown}, but records have {', '.join(schema)}")
    return cast("Mapping[str, Normalization]", normalize)


def _inner(field: Field, axis: int, channels: int) -> int:
    step = field.step_shape
    if field.plain and field.folded and -axis > len(step):
        shape = ", ".join((*field.axes, *map(str, step)))
        raise ConfigError(
            f"normalize: {channels} means for axis {axis} of a field of shape ({shape}), whose records "
            "differ in size and are stored as rows of their last axes",
            hint="Give one mean and std; or batch_by='shape' and, in place of normalize=, the transform "
            "stoker.transforms.Normalize with the same mean, std and axis, and fields= of that field",
        )
    if -axis > len(step) or step[axis] != channels:
        raise ConfigError(
            f"normalize: {channels} means for axis {axis} of a field whose "
            f"{'steps' if field.time or field.ragged else 'records'} are {step}",
            hint="Give one mean per channel, and axis= from the end",
        )
    return math.prod(step[axis + 1 :]) if axis < -1 else 1


def _numbers(name: str, given: object) -> tuple[float, ...]:
    try:
        array = np.asarray(given)
        flat: list[float] = array.reshape(-1).astype(np.float64).tolist() if array.dtype.kind in "iuf" else []
    except (TypeError, ValueError):
        flat = []
    if not flat or not all(math.isfinite(value) for value in flat):
        raise ConfigError(f"normalize: {name} is {given!r}", hint="Expected a number, or one per channel")
    return tuple(flat)


def _float32(values: Sequence[float]) -> tuple[float, ...]:
    return tuple(torch.tensor(values, dtype=torch.float64, device="cpu").to(torch.float32).tolist())


# ----------------------------------------------------------------------------------------------------------
# The tensors of a batch: one output per tensor handed out, and how to gather it from memory.


class Computation(Enum):
    """Rule by which a part of a window is made of gathered parts (`assembly.py`)."""

    PICK = "pick"
    """The steps `picks`, counted in the example's own strides, of the gathered run of steps."""
    DIFFERENCE = "difference"
    """The second source minus the first."""
    TIMES_STRIDE = "times stride"
    """The source times the example's stride."""
    STRIDE = "stride"
    """The example's stride."""
    MASK = "mask"
    """1 for the states of `future` that are within the example's horizon, else 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputSpec:
    """One tensor of every batch."""

    name: str
    field: str
    index: str
    """Which index the gather takes: `RECORD`, or one that counts steps."""
    shape: tuple[int, ...]
    """Shape of one example; `()` gives `(B,)`."""
    dtype: torch.dtype
    """Stored dtype; of a quantized field, what is handed out."""
    cast: torch.dtype | None = None
    """Dtype handed out, when it is another one."""
    role: Role = Role.FIELD
    conversion: Conversion | None = None
    """What is done to the values on the way, the cast included; None: nothing."""
    lag: int = 0
    """Steps from the window's start to the first step taken."""
    count: int | None = None
    """Steps taken, as an axis of their own; None: one step or record, without such an axis."""
    every: int = 1
    """Steps from one taken to the next."""
    ragged: bool = False
    """Whole records of varying length: a list of tensors."""
    quantized: str = ""
    """Dtype that a quantized field is stored as, else empty."""
    parts: tuple[OutputSpec, ...] = ()
    """What is gathered in its place for a quantized field: its bits, as int8, and its scales."""
    compute: Computation | None = None
    """Set when it is not gathered itself but made of `sources`."""
    sources: tuple[OutputSpec, ...] = ()
    picks: range = range(0)
    """Of `PICK`: steps of a window, in strides from `z0`."""
    group: str = ""
    """Of a field of which a part is chosen: the group that the choice is of (`choose.py`)."""
    taken: Taken | None = None
    """What it takes of that choice; None: nothing is chosen."""

    @property
    def example_bytes(self) -> int:
        """Bytes gathered for one example; 0 for a ragged output."""
        if self.parts:
            return sum(part.example_bytes for part in self.parts)
        return 0 if self.ragged else int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of one stored row that is converted: an example, or a step of a ragged output."""
        return self.shape[1:] if self.ragged else self.shape

    @property
    def served_bytes(self) -> int:
        """Bytes handed out for one example; 0 for a ragged output."""
        size = (self.cast or self.dtype).itemsize
        return 0 if self.ragged else int(np.prod(self.shape, dtype=np.int64)) * size

    @property
    def lags(self) -> range:
        """Steps taken, counted from the window's start."""
        count = 1 if self.count is None else self.count
        return range(self.lag, self.lag + count * self.every, self.every)


def make_outputs(
    schema: Schema,
    windows: Windows | None,
    dtype: str | None,
    normalize: object = None,
    *,
    device: str = "cpu",
    choices: Choices = (),
) -> tuple[OutputSpec, ...]:
    """Return the outputs of a loader: fields as they are, or `z0`, `z1`, `future` and conditions.

    Args:
        dtype: Handed out instead of the stored one, for fields that hold floats or are normalized. None
            decodes quantized ones to bfloat16 for a CUDA `device`, else to float32.
        normalize: `Normalization` by field; None: no field is.

    Raises:
        ConfigError: No field has time, or one cannot be a condition; `dtype` is no float; a field cannot be
            normalized so.
    """
    if dtype is not None:
        check_dtype(dtype)
    how = check_normalize(normalize, schema)
    decoded = dtype or ("bfloat16" if device == "cuda" else "float32")
    conversion = {
        name: find_conversion(field, how.get(name), decoded if field.quantized else dtype)
        for name, field in schema.items()
    }
    if windows is None:
        check_names(schema)
        groups = {name: group for group in choices for name in group.fields}
        records: list[OutputSpec] = []
        for name, field in schema.items():
            output = replace(
                _output(name, name, field, conversion[name]), role=_role_in_records(schema, name)
            )
            records += [output] if name not in groups else _chosen(output, field, groups[name], schema)
        return tuple(records)
    states = state_fields(schema, windows)
    for main in states:
        check_conditions(schema, main, rows=windows.rows)
    if any(schema[main].folded for main in states):
        return _point_outputs(schema, conversion)
    outputs = [output for main in states for output in _states(main, schema[main], conversion[main], windows)]
    for name, f in without_points(schema).items():
        if f.kept:
            outputs += _kept_outputs(name, f, conversion[name], windows)
        elif name not in states:
            lag, width = 0 if f.time or f.ragged else None, condition_width(f)
            condition = _output(name, name, f, conversion[name], lag=lag, width=width)
            outputs.append(replace(condition, role=Role.CONDITION))
    outputs = _with_time_step(outputs, schema, states, conversion, windows)
    if isinstance(windows.stride, tuple):
        outputs.append(_drawn("stride", states[0], Computation.STRIDE, (1,), torch.int64, Role.CONDITION))
    if isinstance(windows.horizon, tuple) and windows.horizons[1] > 1:
        shape = (windows.horizons[1] - 1, 1)
        outputs.append(_drawn("future_mask", states[0], Computation.MASK, shape, torch.bool, Role.MASK))
    _check_distinct(outputs)
    return tuple(outputs)


def _chosen(output: OutputSpec, field: Field, group: FieldGroup, schema: Schema) -> list[OutputSpec]:
    """Return the outputs of a field of which a part is chosen, in place of that of entire records."""
    conversion = output.conversion
    if not field.ragged and conversion is not None and len(conversion.scale) > 1:
        period = conversion.inner * len(conversion.scale)
        if math.prod(field.shape[1:]) % period:
            raise ConfigError(
                f"normalize: the channels of {output.name!r} are its axis 0, of which choose= takes a part",
                hint="Normalize it by one mean and std, or after the choice with stoker.transforms.Normalize",
            )
    count = () if isinstance(group.choice, OneOf) else (group.count,)
    found = [_rows_of(replace(output, role=Role.FIELD), group, count)]
    told = {LENGTHS_SUFFIX: Taken.LENGTHS} if group.tells_lengths(field) else {}
    told |= {START: Taken.START} if group.tells_start else {}
    for end, taken in told.items():
        if output.name + end in schema:
            raise ConfigError(
                f"choose= adds {output.name + end!r} to batches, and records have a field of that name",
                hint="Give it another name in the source",
            )
        found.append(
            OutputSpec(
                name=output.name + end,
                field=output.field,
                index=f"{taken.value}:{group.name}",
                shape=(),
                dtype=torch.int64,
                group=group.name,
                taken=taken,
            )
        )
    return found


def _rows_of(output: OutputSpec, group: FieldGroup, count: tuple[int, ...]) -> OutputSpec:
    return replace(
        output,
        index=f"{Taken.ROWS.value}:{output.field}",
        shape=(*count, *output.shape[1:]),
        ragged=False,
        group=group.name,
        taken=Taken.ROWS,
        parts=tuple(_rows_of(part, group, count) for part in output.parts),
    )


def _role_in_records(schema: Schema, name: str) -> Role:
    """Return what a field of entire records is in a batch."""
    field, points = schema[name], schema.get(name.removesuffix(SHAPE_SUFFIX))
    if name.endswith(SHAPE_SUFFIX) and points is not None and points.folded:
        return Role.SIZES
    return Role.FIELD if field.time or field.ragged or len(field.shape) > 1 else Role.CONDITION


def _point_outputs(schema: Schema, conversion: Mapping[str, Conversion | None]) -> tuple[OutputSpec, ...]:
    """Return the outputs of windows over points: rows of each window as a list, which `assembly.py` joins."""
    points = [
        replace(_output(name, name, field, conversion[name]), role=Role.STEPS if field.folded else Role.NODES)
        for name, field in schema.items()
        if field.axes and not field.kept and not field.plain
    ]
    for name, field in without_points(schema).items():
        if not field.kept:
            lag, width = 0 if field.time else None, condition_width(field)
            condition = _output(name, name, field, conversion[name], lag=lag, width=width)
            points.append(replace(condition, role=Role.CONDITION))
    return tuple(points)


def gathered_outputs(outputs: Sequence[OutputSpec]) -> tuple[OutputSpec, ...]:
    """Return the outputs to gather: each as it is, and of computed ones what they are made of, each once."""
    found = {
        (part.name, part.field): part
        for output in outputs
        for part in ((output,) if output.compute is None else gathered_outputs(output.sources))
    }
    return tuple(found.values())


def gathered_bytes(outputs: Sequence[OutputSpec]) -> int:
    """Return the bytes that are gathered for one example."""
    return sum(output.example_bytes for output in gathered_outputs(outputs))


def _states(main: str, field: Field, conversion: Conversion | None, windows: Windows) -> list[OutputSpec]:
    """`z0`, `z1` and, above horizon 1, `future` of one field."""
    horizon = windows.horizons[1]
    z0 = _output(Role.Z0.value, main, field, conversion, lag=0)
    if windows.rows:
        return [replace(z0, role=Role.Z0)]
    z1 = _later(Role.Z1.value, main, field, conversion, windows, range(1, 2), horizon)
    states = [replace(z0, role=Role.Z0), replace(z1, role=Role.Z1)]
    if horizon > 1:
        picks = range(2, horizon + 1)
        future = _later(Role.FUTURE.value, main, field, conversion, windows, picks, horizon, axis=True)
        states.append(replace(future, role=Role.FUTURE))
    return states


def _later(  # noqa: PLR0913, PLR0917 - as `_output`
    name: str,
    field_name: str,
    field: Field,
    conversion: Conversion | None,
    windows: Windows,
    picks: range,
    reach: int,
    *,
    axis: bool = False,
) -> OutputSpec:
    """Return the steps `picks` of a window, in strides from `z0`.

    Drawn strides pick them from a run of steps, which serves all picks up to step `reach`.
    """
    least, most = windows.strides
    if not windows.draws:
        lag, count = picks[0] * least, len(picks) if axis else None
        return _output(name, field_name, field, conversion, lag=lag, count=count, every=least)
    every = least if least == most else 1
    count = (reach * most - least) // every + 1
    run = _output(
        f"steps of {field_name}", field_name, field, conversion, lag=least, count=count, every=every
    )
    shape = field.shape[1:] if not axis else (len(picks), *field.shape[1:])
    return replace(
        run, name=name, shape=shape, count=None, quantized="", parts=(), compute=Computation.PICK,
        picks=picks, sources=(run,),
    )  # fmt: skip


def _drawn(
    name: str, main: str, compute: Computation, shape: tuple[int, ...], dtype: torch.dtype, role: Role
) -> OutputSpec:
    """Return an output that is computed, not gathered."""
    return OutputSpec(
        name=name, field=main, index=RECORD, shape=shape, dtype=dtype, compute=compute, role=role
    )


def _with_time_step(
    outputs: Sequence[OutputSpec],
    schema: Schema,
    states: Sequence[str],
    conversion: Mapping[str, Conversion | None],
    windows: Windows,
) -> list[OutputSpec]:
    """Return the outputs with the condition `dt`, the time from z0 to z1.

    It is a difference of `time` where records have that field with a time axis; else a field `dt` without
    one times the stride. Times are subtracted as they are stored: in a narrower dtype nothing might be left.
    """
    time, step = schema.get("time"), schema.get("dt")
    if windows.rows:
        return [*outputs]
    if time is not None and time.time and condition_width(time) == 1 and not (time.kept or time.quantized):
        if "time" in states:
            return [*outputs]
        first = _output("time at z0", "time", time, None, lag=0)
        second = replace(_later("time at z1", "time", time, None, windows, range(1, 2), 1), shape=(1,))
        own = conversion["time"]
        found = replace(
            _drawn("dt", "time", Computation.DIFFERENCE, (1,), first.dtype, Role.CONDITION),
            cast=None if own is None else own.dtype,
            sources=(first, second),
        )
        return [*(output for output in outputs if output.name != "dt"), found]
    if step is None or step.time or step.kept or windows.strides == (1, 1):
        return [*outputs]
    return [
        replace(output, compute=Computation.TIMES_STRIDE, sources=(output,), quantized="", parts=())
        if output.name == "dt" and output.role is Role.CONDITION
        else output
        for output in outputs
    ]


def _check_distinct(outputs: Sequence[OutputSpec]) -> None:
    """Refuse two conditions of one name: a kept field `x` gives `x0` and `x1`."""
    fields: dict[str, str] = {}
    for output in outputs:
        if output.role not in STATES and fields.setdefault(output.name, output.field) != output.field:
            raise ConfigError(
                f"fields {fields[output.name]!r} and {output.field!r} would both be cond[{output.name!r}] "
                "of a window",
                hint="Give one of them another name in its source",
            )


def _kept_outputs(
    name: str, field: Field, conversion: Conversion | None, windows: Windows
) -> list[OutputSpec]:
    """Return a raw field next to the latents: at z0 and at z1, or as it is where it has no time.

    It keeps its axes, with at least two of them, so that it is not taken for a condition `(B, C)`: at z1 it
    would tell what is to be predicted.
    """
    if field.time or field.ragged:
        found = [_output(f"{name}0", name, field, conversion, lag=0)]
        if not windows.rows:
            found.append(_later(f"{name}1", name, field, conversion, windows, range(1, 2), 1))
    else:
        found = [_output(name, name, field, conversion)]
    return [replace(o, shape=(*o.shape, 1, 1)[: max(2, len(o.shape))], role=Role.RAW) for o in found]


def check_dtype(dtype: object) -> None:
    """Refuse a dtype of batches that is not a float.

    Raises:
        ConfigError: As said.
    """
    if not isinstance(dtype, str) or dtype not in FLOATS:
        storage = "; dtypes by field are of storage, as precompute={'dtype': {'image': 'float16'}}"
        raise ConfigError(
            f"dtype {dtype!r} cannot be served",
            hint=f"Known: {', '.join(sorted(FLOATS))}{storage if isinstance(dtype, Mapping) else ''}",
        )


def check_names(schema: Schema) -> None:
    """Refuse a field of the name that batches give to something else.

    Raises:
        ConfigError: As said.
    """
    if "index" in schema:
        raise ConfigError(
            "records have a field 'index', which batches use for the sample index",
            hint="Give the field another name in its source",
        )


def _output(  # noqa: PLR0913 - the ways in which outputs differ, private to this module
    name: str,
    field_name: str,
    field: Field,
    conversion: Conversion | None,
    *,
    lag: int | None = None,
    count: int | None = None,
    every: int = 1,
    width: int | None = None,
) -> OutputSpec:
    """`lag=None` takes whole records; `width` flattens an example to `(C,)`."""
    if field.quantized:
        # Without `width`: blocks of the last axis are decoded before an example is flattened.
        bits = replace(field, dtype="int8", quantized=False)
        places = ((field_name, bits), (field_name + SCALE_SUFFIX, scale_field(field)))
        parts = tuple(_output(name, n, f, None, lag=lag, count=count, every=every) for n, f in places)
        return replace(
            parts[0],
            shape=parts[0].shape if width is None else (width,),
            dtype=torch.float32 if conversion is None else conversion.dtype,
            conversion=conversion,
            quantized=field.dtype,
            parts=parts,
        )
    stored = getattr(torch, field.dtype)
    if lag is None:
        index, shape = RECORD, field.shape
    else:
        index = f"steps:{field_name}" if field.ragged else f"steps:{field.shape[0]}"
        shape = field.shape[1:] if count is None else (count, *field.shape[1:])
    return OutputSpec(
        name=name,
        field=field_name,
        index=index,
        shape=shape if width is None else (width,),
        dtype=stored,
        cast=None if conversion is None or conversion.dtype is stored else conversion.dtype,
        conversion=conversion,
        lag=lag or 0,
        count=count,
        every=every,
        ragged=field.ragged and lag is None,
    )


def step_lengths(outputs: tuple[OutputSpec, ...], schema: Schema) -> Mapping[str, int]:
    """Return the steps per record behind each index that counts steps of fields of fixed length."""
    return {
        o.index: schema[o.field].shape[0]
        for o in outputs
        if o.index != RECORD and o.taken is None and not schema[o.field].ragged
    }


# ----------------------------------------------------------------------------------------------------------
# Steps of a field that are read from a shard together.


JOINED_GAP_BYTES = 64 * KIB
"""Steps of a window closer than this are read in one go."""
Target: TypeAlias = tuple[int, int, int, int, int]
"""`(output, size, at, begin, count)`, all in bytes but the first: `count` from `begin` of a run on go to `at`
in an example of this output, which has `size`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRun:
    """Steps of one field that are read together, counted from the window's start."""

    field: str
    first: int
    stop: int
    targets: tuple[Target, ...]


def plan_runs(schema: Schema, outputs: tuple[OutputSpec, ...]) -> list[StepRun]:
    """Join the steps that outputs take of each field into as few reads as pays."""
    wanted: dict[str, dict[int, list[tuple[int, int]]]] = {}
    for i, output in enumerate(outputs):
        if output.index != RECORD and output.taken is None:
            for place, lag in enumerate(output.lags):
                wanted.setdefault(output.field, {}).setdefault(lag, []).append((i, place))
    runs: list[StepRun] = []
    for field, by_lag in wanted.items():
        size = schema[field].row_bytes
        gap = 1 + JOINED_GAP_BYTES // max(1, size)
        lags = sorted(by_lag)
        cuts = [0, *(k for k in range(1, len(lags)) if lags[k] - lags[k - 1] > gap), len(lags)]
        for begin, end in pairwise(cuts):
            first = lags[begin]
            targets = tuple(
                (i, outputs[i].example_bytes, place * size, (lag - first) * size, size)
                for lag in lags[begin:end]
                for i, place in by_lag[lag]
            )
            runs.append(StepRun(field=field, first=first, stop=lags[end - 1] + 1, targets=_joined(targets)))
    return runs


def _joined(targets: tuple[Target, ...]) -> tuple[Target, ...]:
    """Return the same bytes in fewer pieces: steps that are neighbors at both ends become one."""
    joined: list[Target] = []
    for i, size, at, begin, count in sorted(targets):
        last = joined[-1] if joined else None
        if last is not None and (last[0], last[2] + last[4], last[3] + last[4]) == (i, at, begin):
            joined[-1] = (*last[:4], last[4] + count)
        else:
            joined.append((i, size, at, begin, count))
    return tuple(joined)
