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

_CHUNK = 4096


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

    def values(self, sample: Sample) -> NDArray[np.float64]:
        """Values that count, `(n, places)`."""
        array = np.asarray(sample[self.field], np.float64)
        if self.mask is not None:
            array = array[~sample[self.mask]]
        if self.known is not None and not sample[self.known]:
            return np.zeros((0, 1))
        return array.reshape(-1, 1) if not self.places else array.reshape(-1, array.shape[-1])[:, self.places]

    def apply(self, sample: Sample) -> None:
        """Standardise in place; what does not count stays 0."""
        if self.known is not None and not sample[self.known]:
            return
        array = np.array(sample[self.field], np.float64)
        if not self.places:
            array = (array - self.mean[0]) / self.deviation[0]
        else:
            counted = np.ones(array.shape[:-1], np.bool_) if self.mask is None else ~sample[self.mask]
            for place, mean, deviation in zip(self.places, self.mean, self.deviation, strict=True):
                array[counted, place] = (array[counted, place] - mean) / deviation
        sample[self.field] = array


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


def fitted(standards: Sequence[Standard], samples: Iterable[Sample]) -> tuple[Standard, ...]:
    """The same with mean and deviation of `samples`; a deviation of 0 becomes 1.

    Source: Chan, Golub and LeVeque, 1979, for sums of chunks that lose no digits to the mean.
    """
    sums: list[tuple[int, Any, Any]] = [(0, 0.0, 0.0) for _ in standards]
    held: list[list[NDArray[np.float64]]] = [[] for _ in standards]
    for number, sample in enumerate(samples, 1):
        for own, standard in zip(held, standards, strict=True):
            own.append(standard.values(sample))
        if number % _CHUNK == 0:
            sums, held = [*map(_joined, sums, held)], [[] for _ in standards]
    found: list[Standard] = []
    for standard, (count, mean, square) in zip(standards, map(_joined, sums, held), strict=True):
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


def _joined(known: tuple[int, Any, Any], held: list[NDArray[np.float64]]) -> tuple[int, Any, Any]:
    if not held:
        return known
    values = np.concatenate(held)
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
