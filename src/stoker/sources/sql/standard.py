"""Mean and deviation of the training rows, and fields shifted and scaled by them.

The recipe holds the rule (which fields, which rows); the numbers are derived from it, in float64, in the
order of the keys, and kept to seven digits, so that the last bits of a sum do not make other samples.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.schema import Sample
from stoker.sources.sql.nested import Entries, Place
from stoker.sources.sql.values import Number, Rule


@dataclass(frozen=True, slots=True, kw_only=True)
class Standard:
    """What maps values of one field to mean 0 and deviation 1: `(value - mean) / deviation`."""

    field: str
    places: tuple[int, ...]
    """Places on the last axis that it is about; of a scalar none."""
    mask: str | None
    """Field that is True where a value does not count, or `None`."""
    known: str | None = None
    """Field that is False where a value does not count."""
    mean: tuple[float, ...] = ()
    deviation: tuple[float, ...] = ()

    def values(self, samples: Sample) -> NDArray[np.float64]:
        """Values that count, `(n, places)`."""
        array = np.asarray(samples[self.field], np.float64)
        if self.mask is not None:
            array = array[~samples[self.mask]]
        if self.known is not None:
            array = array[samples[self.known]]
        return array.reshape(-1, 1) if not self.places else array.reshape(-1, array.shape[-1])[:, self.places]

    def apply(self, samples: Sample) -> None:
        """Standardise in place; what does not count stays as it is."""
        array = np.array(samples[self.field], np.float64)
        if not self.places:
            counted = True if self.known is None else samples[self.known]
            array = np.where(counted, (array - self.mean[0]) / self.deviation[0], array)
        else:
            counted = np.ones(array.shape[:-1], np.bool_) if self.mask is None else ~samples[self.mask]
            for place, mean, deviation in zip(self.places, self.mean, self.deviation, strict=True):
                array[counted, place] = (array[counted, place] - mean) / deviation
        samples[self.field] = array


def standards_of(rules: Sequence[Rule]) -> tuple[Standard, ...]:
    """What rules ask to be standardised; mean and deviation are still to be found."""
    found: list[Standard] = []
    for rule in rules:
        if isinstance(rule, Number) and rule.standardize:
            known = f"{rule.field}_known" if rule.null == "mask" else None
            found.append(Standard(field=rule.field, places=(), mask=None, known=known))
        elif isinstance(rule, Place) and rule.standardize:
            found.append(Standard(field=rule.field, places=(0, 1), mask=None))
        elif isinstance(rule, Entries) and rule.standardize:
            paths = [feature.path for feature in rule.features]
            places = tuple(paths.index(path) for path in rule.standardize)
            found.append(Standard(field=rule.field, places=places, mask=rule.mask))
    return tuple(found)


def fitted(standards: Sequence[Standard], batches: Iterable[Sample]) -> tuple[Standard, ...]:
    """The same with mean and deviation of samples that come in batches; a deviation of 0 becomes 1.

    Source: Chan, Golub and LeVeque, 1979, for sums of chunks that lose no digits to the mean.
    """
    sums: list[tuple[int, Any, Any]] = [(0, 0.0, 0.0) for _ in standards]
    for samples in batches:
        sums = [_joined(own, standard.values(samples)) for own, standard in zip(sums, standards, strict=True)]
    found: list[Standard] = []
    for standard, (count, mean, square) in zip(standards, sums, strict=True):
        width = len(standard.places) or 1
        means = np.broadcast_to(mean, width)
        spread = np.broadcast_to(np.sqrt(square / max(count, 1)), width)
        found.append(
            Standard(
                field=standard.field,
                places=standard.places,
                mask=standard.mask,
                known=standard.known,
                # A mean of 0 comes out as some 1e-17 of the deviation, which differs between machines.
                mean=tuple(
                    float(f"{value:.7g}") if abs(value) > 1e-9 * around else 0.0
                    for value, around in zip(means, spread, strict=True)
                ),
                deviation=tuple(float(f"{value:.7g}") if value > 0 else 1.0 for value in spread),
            )
        )
    return tuple(found)


def _joined(known: tuple[int, Any, Any], values: NDArray[np.float64]) -> tuple[int, Any, Any]:
    if not len(values):
        return known
    count, mean, square = known
    own = values.mean(0)
    total, step = count + len(values), own - mean
    squares = square + np.square(values - own).sum(0) + np.square(step) * (count * len(values) / total)
    return total, mean + step * (len(values) / total), squares


def to_json(standards: Sequence[Standard]) -> Mapping[str, Any]:
    """Mean and deviation by field, to be kept with a model that predicts it."""
    return {s.field: {"places": list(s.places), "mean": list(s.mean), "deviation": list(s.deviation)}
            for s in standards}  # fmt: skip
