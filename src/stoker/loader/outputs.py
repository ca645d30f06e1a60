"""What a batch is made of: one output per tensor handed out, and how to gather it from memory.

An output takes rows of one field: whole records, or steps of a trajectory at a lag from the window's start.
A gather is one `index_select` on a *view* of the field: shifted by the lag, or overlapping for several steps
at once, so that `z0`, `z1` and `future` share one index.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np
import torch
from torch import Tensor

from stoker.errors import ConfigError
from stoker.loader.fused import Fused, check_normalise, fused_of
from stoker.loader.windows import Windows, check_conditions, condition_width, time_field
from stoker.schema import FLOATS, SCALE_SUFFIX, Field, Schema, scale_field

RECORD = "record"
"""The index that counts virtual rows of records; others are `steps:<length or field>`."""


class Role(Enum):
    """What an output is in a batch. A name cannot tell: a field may be called `future`."""

    FIELD = "field"
    """A field of whole records, or a condition of windows."""
    STATE = "state"
    """`z0` or `z1`."""
    FUTURE = "future"
    """The states after `z1`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """One tensor of every batch."""

    name: str
    field: str
    index: str
    """Which index the gather takes: `RECORD`, or one that counts steps."""
    shape: tuple[int, ...]
    """Shape of one example; `()` gives `(B,)`."""
    dtype: torch.dtype
    """Stored dtype; of a packed field, what is handed out."""
    cast: torch.dtype | None = None
    """Dtype handed out, when it is another one."""
    role: Role = Role.FIELD
    fused: Fused | None = None
    """What is done to the values on the way, the cast included; None: nothing."""
    lag: int = 0
    """Steps from the window's start to the first step taken."""
    count: int | None = None
    """Steps taken, as an axis of their own; None: one step or record, without such an axis."""
    every: int = 1
    """Steps from one taken to the next."""
    ragged: bool = False
    """Whole records of varying length: a list of tensors."""
    packed: str = ""
    """Dtype that a packed field is stored as, else empty."""
    parts: tuple[Output, ...] = ()
    """What is gathered in its place for a packed field: its bits, as int8, and its scales."""

    @property
    def example_bytes(self) -> int:
        """Bytes gathered for one example; 0 for a ragged output."""
        if self.parts:
            return sum(part.example_bytes for part in self.parts)
        return 0 if self.ragged else int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of one stored row that is gathered: an example, or a step of a ragged output."""
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
    normalise: object = None,
    *,
    device: str = "cpu",
) -> tuple[Output, ...]:
    """The outputs of a loader: fields as they are, or `z0`, `z1`, `future` and conditions.

    Args:
        dtype: Handed out instead of the stored one, for fields that hold floats or are normalised. None
            decodes packed ones to bfloat16 for a CUDA `device`, else to float32.
        normalise: `Normalise` by field; None: no field is.

    Raises:
        ConfigError: No field has time, or one cannot be a condition; `dtype` is no float; a field cannot be
            normalised so.
    """
    if dtype is not None:
        check_dtype(dtype)
    how = check_normalise(normalise, schema)
    unpacked = dtype or ("bfloat16" if device == "cuda" else "float32")
    fused = {
        name: fused_of(field, how.get(name), unpacked if field.packed else dtype)
        for name, field in schema.items()
    }
    if windows is None:
        check_names(schema)
        return tuple(_output(name, name, field, fused[name]) for name, field in schema.items())
    main = time_field(schema, windows.field)
    check_conditions(schema, main)
    field, stride = schema[main], windows.stride
    outputs = [
        replace(_output(name, main, field, fused[main], lag=lag), role=Role.STATE)
        for name, lag in (("z0", 0), ("z1", stride))
    ]
    if windows.horizon > 1:
        count = windows.horizon - 1
        future = _output("future", main, field, fused[main], lag=2 * stride, count=count, every=stride)
        outputs.append(replace(future, role=Role.FUTURE))
    for name, f in schema.items():
        if f.kept:
            outputs += _kept_outputs(name, f, fused[name], stride)
        elif name != main:
            lag, width = 0 if f.time else None, condition_width(f)
            outputs.append(_output(name, name, f, fused[name], lag=lag, width=width))
    _check_distinct(outputs)
    return tuple(outputs)


def _check_distinct(outputs: Sequence[Output]) -> None:
    """Refuse two conditions of one name: a kept field `x` gives `x0` and `x1`."""
    fields: dict[str, str] = {}
    for output in outputs:
        if output.role is Role.FIELD and fields.setdefault(output.name, output.field) != output.field:
            raise ConfigError(
                f"fields {fields[output.name]!r} and {output.field!r} would both be cond[{output.name!r}] of "
                "a window. Give one of them another name in its source"
            )


def _kept_outputs(name: str, field: Field, fused: Fused | None, stride: int) -> list[Output]:
    """A raw field beside the latents: at z0 and at z1, or as it is where it has no time.

    It keeps its axes, with at least two of them, so that nobody takes it for a condition `(B, C)`: at z1 it
    would tell what is to be predicted.
    """
    if field.time:
        found = [_output(f"{name}{k}", name, field, fused, lag=lag) for k, lag in enumerate((0, stride))]
    else:
        found = [_output(name, name, field, fused)]
    return [replace(o, shape=(*o.shape, 1, 1)[: max(2, len(o.shape))]) for o in found]


def check_dtype(dtype: str) -> None:
    """Refuse a dtype of batches that is no float.

    Raises:
        ConfigError: As said.
    """
    if dtype not in FLOATS:
        raise ConfigError(f"dtype {dtype!r} cannot be served. Known: {', '.join(sorted(FLOATS))}")


def check_names(schema: Schema) -> None:
    """Refuse a field of the name that batches give to something else.

    Raises:
        ConfigError: As said.
    """
    if "index" in schema:
        raise ConfigError(
            "records have a field 'index', which is what batches call the sample number. "
            "Give the field another name in its source"
        )


def _output(  # noqa: PLR0913 - the ways in which outputs differ, private to this module
    name: str,
    field_name: str,
    field: Field,
    fused: Fused | None,
    *,
    lag: int | None = None,
    count: int | None = None,
    every: int = 1,
    width: int | None = None,
) -> Output:
    """`lag=None` takes whole records; `width` flattens an example to `(C,)`."""
    if field.packed:
        # Without `width`: blocks of the last axis are decoded before an example is flattened.
        bits = replace(field, dtype="int8", packed=False)
        places = ((field_name, bits), (field_name + SCALE_SUFFIX, scale_field(field)))
        parts = tuple(_output(name, n, f, None, lag=lag, count=count, every=every) for n, f in places)
        return replace(
            parts[0],
            shape=parts[0].shape if width is None else (width,),
            dtype=torch.float32 if fused is None else fused.dtype,
            fused=fused,
            packed=field.dtype,
            parts=parts,
        )
    stored = getattr(torch, field.dtype)
    if lag is None:
        index, shape = RECORD, field.shape
    else:
        index = f"steps:{field_name}" if field.ragged else f"steps:{field.shape[0]}"
        shape = field.shape[1:] if count is None else (count, *field.shape[1:])
    return Output(
        name=name,
        field=field_name,
        index=index,
        shape=shape if width is None else (width,),
        dtype=stored,
        cast=None if fused is None or fused.dtype is stored else fused.dtype,
        fused=fused,
        lag=lag or 0,
        count=count,
        every=every,
        ragged=field.ragged and lag is None,
    )


def view_for(output: Output, field: Field, source: Tensor) -> Tensor:
    """The tensor whose axis 0 the output's index counts, `(n, *output.shape)`, without copying.

    Args:
        source: `Memory.sources` of the field.
    """
    if output.index == RECORD:
        return source if output.ragged else source.reshape(len(source), *output.shape)
    steps = source if field.ragged else source.reshape(-1, *field.shape[1:])
    if output.count is None:
        return steps[output.lag :].reshape(-1, *output.shape)
    length = len(steps) - output.lags[-1]
    stride = steps.stride()
    return steps.as_strided(
        (length, *output.shape),
        (stride[0], output.every * stride[0], *stride[1:]),
        steps.storage_offset() + output.lag * stride[0],
    )


def step_lengths(outputs: tuple[Output, ...], schema: Schema) -> Mapping[str, int]:
    """Steps per record behind each index that counts steps of fields of fixed length."""
    return {
        o.index: schema[o.field].shape[0] for o in outputs if o.index != RECORD and not schema[o.field].ragged
    }
