"""Normalise a field with statistics of the training samples before it is encoded.

The identity carries the rule (method, field, digest of the samples it was fitted on). The numbers are derived
from it; they are kept to seven digits, so that the last bits of a sum, which may differ between machines, do
not make another encoder.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stoker.encoders.protocol import Encoder, Group, fixed_group
from stoker.encoders.weights import digest_weights
from stoker.errors import EncoderError, RecordError
from stoker.schema import Field, Json, Sample, Schema
from stoker.units import MIB

PIECE_BYTES = 64 * MIB
"""Samples larger than this are read in pieces along time."""


class Samples(Protocol):
    """What fitting needs of a source; every `Source` has it."""

    def __len__(self) -> int:
        """Number of samples."""
        ...

    def schema(self) -> Schema:
        """Fields of every sample."""
        ...

    def read(self, number: int, start: int | None = None, stop: int | None = None) -> Sample:
        """One sample, or `start:stop` of its fields with time."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """What maps raw values to normalised ones: `(value - shift) / scale`, one pair per channel."""

    field: str
    """Field of the sample that they belong to."""
    method: Literal["standard", "minmax"]
    """`standard`: mean 0, deviation 1. `minmax`: the range of the training samples becomes [0, 1]."""
    shift: tuple[float, ...]
    """Mean or minimum per channel (the last axis; a scalar field has one)."""
    scale: tuple[float, ...]
    """Deviation or range per channel; 1 where the channel is constant."""
    digest: str
    """The sha256 of the values fitted on, in order: which training samples these are."""


def fit_statistics(
    source: Samples, field: str, method: Literal["standard", "minmax"] = "standard"
) -> Statistics:
    """Go once over `source` in number order and sum in float64. Give it the training split only.

    Raises:
        EncoderError: The field is missing or the source is empty.
        RecordError: A value is NaN or infinite.
    """
    schema = source.schema()
    if method not in ("standard", "minmax"):
        raise EncoderError(f"method must be 'standard' or 'minmax', got {method!r}")
    if field not in schema or len(source) == 0:
        raise EncoderError(f"no values of field {field!r} in {len(source)} samples with {sorted(schema)}")
    digest = hashlib.sha256()
    sums: _Sums | None = None
    for number in range(len(source)):
        for piece in _pieces(source, number, field, schema[field]):
            values = np.ascontiguousarray(piece).reshape(-1, piece.shape[-1] if piece.ndim else 1)
            digest.update(values.view(np.uint8).data)
            part = _Sums.of(_from_bfloat16(values) if schema[field].dtype == "bfloat16" else values)
            if not np.isfinite(part.square).all():
                raise RecordError(
                    f"sample {number}, field {field!r}: NaN or infinity, so it has no statistics. Exclude it"
                )
            sums = part if sums is None else sums.joined(part)
    assert sums is not None
    standard = method == "standard"
    spread = np.sqrt(sums.square / sums.count) if standard else sums.high - sums.low
    shift = sums.mean if standard else sums.low
    scale = np.where(spread > 1e-12 * np.abs(shift), spread, 1.0)
    return Statistics(
        field=field,
        method=method,
        shift=tuple(float(f"{value:.7g}") for value in shift),
        scale=tuple(float(f"{value:.7g}") for value in scale),
        digest=digest.hexdigest(),
    )


class Normalized:
    """Encoder that normalises one field, then hands on to `inner` (None: keeps it as the record).

    Satisfies `Encoder`. The field reaches `inner` as float32.
    """

    def __init__(self, inner: Encoder | None, statistics: Statistics) -> None:
        self.inner = inner
        self._statistics = statistics
        self._shift = torch.tensor(statistics.shift, dtype=torch.float32, device="cpu")
        self._scale = torch.tensor(statistics.scale, dtype=torch.float32, device="cpu")

    @property
    def independent_steps(self) -> bool:
        """As `inner`; without one, normalising is by element."""
        return self.inner is None or self.inner.independent_steps

    def schema(self, sample_schema: Schema) -> Schema:
        """The schema of `inner` for the normalised samples.

        Raises:
            EncoderError: The field is missing or has another number of channels.
        """
        normalised = self._normalised(sample_schema)
        return normalised if self.inner is None else self.inner.schema(normalised)

    def group(self, sample_schema: Schema) -> Group:
        """The group of `inner`; without one about 8 MiB."""
        normalised = self._normalised(sample_schema)
        if self.inner is None:
            return fixed_group(sample_schema, normalised, cut_time=True)
        return self.inner.group(normalised)

    def encode(self, batch: dict[str, Tensor], /) -> dict[str, Tensor]:
        """Normalise to fresh memory, then encode."""
        name = self._statistics.field
        values = batch[name].to(torch.float32)
        scaled = {**batch, name: (values - self._shift_for(values)).div_(self._scale_for(values))}
        return scaled if self.inner is None else self.inner.encode(scaled)

    def to(self, device: torch.device) -> None:
        """Move statistics and `inner` to `device`."""
        self._shift, self._scale = self._shift.to(device), self._scale.to(device)
        if self.inner is not None:
            self.inner.to(device)

    def weights(self) -> Mapping[str, Tensor]:
        """`normalize.shift` and `normalize.scale` per channel, then the weights of `inner`."""
        inner: Mapping[str, Tensor] = {} if self.inner is None else self.inner.weights()
        return {"normalize.shift": self._shift, "normalize.scale": self._scale, **inner}

    def identity(self) -> dict[str, Json]:
        """The rule, the training samples it was fitted on, and the identity of `inner`."""
        rule = self._statistics
        inner: dict[str, Json] | None = None if self.inner is None else self.inner.identity()
        config: dict[str, Json] = {"field": rule.field, "method": rule.method, "fitted_on": rule.digest}
        return {
            "class": "stoker.Normalized",
            "config": {**config, "inner": inner},
            "weights": digest_weights(self.weights()),
            "version": 1,
        }

    def _normalised(self, sample_schema: Schema) -> Schema:
        name, channels = self._statistics.field, len(self._statistics.shift)
        field = sample_schema.get(name)
        if field is None or (field.shape[-1] if field.shape else 1) != channels:
            shape = None if field is None else field.shape
            raise EncoderError(
                f"statistics are of field {name!r} with {channels} channels, samples have "
                f"{name!r} of shape {shape}. Fit them on the source that is encoded"
            )
        plain = Field(shape=field.shape, dtype="float32", time=field.time, ragged=field.ragged)
        return {**sample_schema, name: plain}

    def _shift_for(self, values: Tensor) -> Tensor:
        return self._shift if values.ndim > 1 else self._shift[0]

    def _scale_for(self, values: Tensor) -> Tensor:
        return self._scale if values.ndim > 1 else self._scale[0]


@dataclass(frozen=True, slots=True)
class _Sums:
    """Count, mean, summed square of deviations and range per channel, all float64."""

    count: int
    mean: NDArray[np.float64]
    square: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]

    @staticmethod
    def of(values: NDArray[Any]) -> _Sums:
        """Sums of `(count, channels)`."""
        exact = values.astype(np.float64)
        mean = exact.mean(0)
        return _Sums(len(exact), mean, np.square(exact - mean).sum(0), exact.min(0), exact.max(0))

    def joined(self, other: _Sums) -> _Sums:
        """Both together. Source: Chan, Golub and LeVeque, 1979, which loses no digits to the mean."""
        count = self.count + other.count
        step = other.mean - self.mean
        return _Sums(
            count,
            self.mean + step * (other.count / count),
            self.square + other.square + np.square(step) * (self.count * other.count / count),
            np.minimum(self.low, other.low),
            np.maximum(self.high, other.high),
        )


def _from_bfloat16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _pieces(source: Samples, number: int, field: str, spec: Field) -> Iterator[NDArray[Any]]:
    """The field of one sample, large ones cut along time."""
    whole = spec.ragged or not spec.time or spec.size_bytes() <= PIECE_BYTES
    steps = 0 if whole else max(1, PIECE_BYTES // max(1, spec.row_bytes))
    if whole:
        yield source.read(number)[field]
        return
    for start in range(0, spec.shape[0], steps):
        yield source.read(number, start, min(start + steps, spec.shape[0]))[field]
