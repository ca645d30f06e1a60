"""Some items of a Dataset, read more than once: what they look like, and whether reading is repeatable.

A cache of random output would freeze one draw, so it is refused, with the cure. Whoever wants just that says
`random="freeze"`: the global random numbers are then a function of the sample, so that the draw is the same
in every process, and fields that change nevertheless (a generator of the Dataset's own) are left out of what
is compared. torch is not imported here unless the Dataset has brought it along.
"""

from __future__ import annotations

import hashlib
import logging
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError, DecodeError, SourceError, arg
from stoker.schema import Field, Schema
from stoker.sources.torch_items import Item

PROBES = 16
"""Items that are looked at, spread over the whole Dataset."""

log = logging.getLogger("stoker")


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """What the probes have shown."""

    schema: Schema
    digests: dict[int, dict[str, str]]
    """Sample number to digest of each field that is the same whenever it is read."""
    changing: tuple[str, ...] = ()
    """Fields that another reading would draw differently, where that is allowed."""

    @property
    def wholes(self) -> list[str]:
        """One digest for each probe, over all that is repeatable in it."""
        return [
            hashlib.sha256("\n".join(f"{n} {d}" for n, d in fields.items()).encode()).hexdigest()
            for fields in self.digests.values()
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """What the user has said of the fields."""

    time: tuple[str, ...] = ()
    """Axis 0 is time."""
    ragged: tuple[str, ...] = ()
    """The length of axis 0 varies."""


class Prober:
    """Reads probes of one Dataset.

    Args:
        name: Of the Dataset, for messages.
        read: One item by number; the random numbers are drawn as the second argument says.
        freeze: Whether random output is taken as it comes.
        suspects: What in the Dataset draws random numbers, in words, for the message.
        obstacles: What in the Dataset is bound to a thread or a process, in words with the cure.
    """

    def __init__(
        self,
        name: str,
        read: Callable[[int, bool], Item],
        *,
        freeze: bool,
        suspects: Callable[[], Sequence[str]],
        obstacles: Callable[[], Sequence[str]],
    ) -> None:
        self._name, self._read, self._freeze = name, read, freeze
        self._suspects, self._obstacles = suspects, obstacles

    def items(self, count: int, begin: Callable[[int], None]) -> tuple[dict[int, Item], set[str], set[str]]:
        """Some items by number; fields that are drawn; fields that another reading draws differently.

        Each is read twice, and three times where random output is frozen; `begin` is told which one comes.
        """
        numbers = probe_numbers(count)
        failed: dict[int, Exception] = {}
        found = {number: self._try(number, begin, failed) for number in numbers}
        items = {number: item for number, item in found.items() if item is not None}
        if not items:
            self._refuse_all(failed)
        for number, error in failed.items():
            self._warn(number, error)
        drawn, changing = set[str](), set[str]()
        for number in reversed(items):
            again = self._try(number, begin)
            found = differing(items[number], again)
            if found and not self._freeze:
                self._refuse(number, found[0])
            changing.update(found)
            if self._freeze:
                drawn.update(differing(items[number], self._try(number, begin, seeded=False)))
        return items, drawn | changing, changing

    def _try(
        self,
        number: int,
        begin: Callable[[int], None],
        failed: dict[int, Exception] | None = None,
        *,
        seeded: bool = True,
    ) -> Item | None:
        """An item, or None when the Dataset fails on it: such a sample is quarantined when it is read.

        The error is put into `failed`, or logged where there is none.
        """
        begin(number)
        try:
            return self._read(number, seeded and self._freeze)
        except Exception as error:  # a Dataset is foreign code and may raise anything
            if isinstance(error, SourceError) and not isinstance(error, DecodeError):
                raise
            if failed is None:
                self._warn(number, error)
            else:
                failed[number] = error
            return None

    def _warn(self, number: int, error: Exception) -> None:
        kind = type(error).__name__
        log.warning("%s: probing sample %d failed: %s: %s", self._name, number, kind, error)

    def _refuse_all(self, failed: Mapping[int, Exception]) -> None:
        number, error = next(iter(failed.items()))
        held = "; ".join(self._obstacles())
        hint = (
            f"It holds what may work in the thread that made it alone: {held}"
            if held
            else f"Call dataset[{number}] yourself to see where; fix the Dataset"
        )
        raise SourceError(
            f"{self._name}: all of {len(failed)} probed samples failed, sample {number} with "
            f"{type(error).__name__}: {str(error).rstrip('.')}. {hint}"
        ) from error

    def _refuse(self, number: int, field: str) -> None:
        suspects = "; ".join(self._suspects())
        held = f" (it holds {suspects})" if suspects else ""
        raise SourceError(
            f"{self._name}: sample {number}, field {field!r} changes when it is read again{held}; a cache "
            f"would freeze one random draw. {RANDOM_CURE}"
        )


RANDOM_CURE = (
    "Move augmentation behind the cache, as stoker.cached(..., transforms=[...]), which draws again for each "
    f"example in each epoch; or seed it by the sample number; or store one random draw with "
    f"{arg('random', 'freeze')}"
)


def probe_numbers(count: int) -> list[int]:
    """At most sixteen numbers, the first and the last among them."""
    return sorted({round(i * (count - 1) / (PROBES - 1)) for i in range(PROBES)})


def differing(first: Item, second: Item | None) -> list[str]:
    """Fields that are not the same in both."""
    return [
        name
        for name, (array, dtype) in first.items()
        if second is None
        or (again := second.get(name)) is None
        or again[1] != dtype
        or not _same(array, again[0])
    ]


def _same(one: NDArray[Any], other: NDArray[Any]) -> bool:
    return one.shape == other.shape and one.tobytes() == other.tobytes()


def digests_of(item: Item, *, without: Sequence[str] = ()) -> dict[str, str]:
    """The digest of each field."""
    return {
        name: hashlib.sha256(
            f"{dtype} {array.shape}\n".encode() + np.ascontiguousarray(array).tobytes()
        ).hexdigest()
        for name, (array, dtype) in item.items()
        if name not in without
    }


def common_schema(name: str, items: Mapping[int, Item], meaning: Meaning) -> Schema:
    """The fields that all items have.

    Raises:
        SourceError: They differ in more than the length of axis 0.
        ConfigError: A field that the user names is not there.
    """
    first_number = next(iter(items))
    first = items[first_number]
    schema: Schema = {}
    for number, item in items.items():
        if item.keys() != first.keys():
            raise SourceError(
                f"{name}: sample {number} has fields {sorted(item)}, sample {first_number} has "
                f"{sorted(first)}. Return the same fields in every item"
            )
    for field in first:
        others = {number: item[field] for number, item in items.items()}
        schema[field] = _common_field(f"{name}: field {field!r}", others, meaning, field)
    if unknown := ({*meaning.time, *meaning.ragged} - schema.keys()):
        raise ConfigError(f"time or ragged name {sorted(unknown)}; the fields are {', '.join(schema)}")
    return schema


def _common_field(
    where: str, others: Mapping[int, tuple[NDArray[Any], str]], meaning: Meaning, name: str
) -> Field:
    first_number, (array, dtype) = next(iter(others.items()))
    for number, (other, kind) in others.items():
        if kind != dtype or other.ndim != array.ndim or other.shape[1:] != array.shape[1:]:
            raise SourceError(
                f"{where} is {dtype} {array.shape} in sample {first_number} and "
                f"{kind} {other.shape} in sample {number}. Only axis 0 may vary; resize or pad"
            )
    lengths = {other.shape[:1] for other, _ in others.values()}
    ragged = len(lengths) > 1 or name in meaning.ragged
    if len(lengths) > 1 and name not in meaning.ragged:
        log.info("%s varies along axis 0 and is kept ragged", where)
    shape = (-1, *array.shape[1:]) if ragged else array.shape
    return Field(shape=shape, dtype=dtype, time=name in meaning.time, ragged=ragged)


class RandomStateKept:
    """Leaves the global random states as they were: probing must not change a user's training run.

    Args:
        seed: The states to work with meanwhile; None: as they are.
    """

    def __init__(self, seed: int | None = None) -> None:
        self._seed = seed

    def __enter__(self) -> None:
        self._torch = sys.modules.get("torch")
        self._states = (random.getstate(), np.random.get_state())
        self._torch_state = None if self._torch is None else self._torch.get_rng_state()
        if self._seed is not None:
            random.seed(self._seed)
            np.random.seed(self._seed % 2**32)
            if self._torch is not None:
                self._torch.default_generator.manual_seed(self._seed)  # the CPU's alone: no GPU is touched

    def __exit__(self, *exc: object) -> None:
        random.setstate(self._states[0])
        np.random.set_state(self._states[1])
        if self._torch_state is not None and self._torch is not None:
            self._torch.set_rng_state(self._torch_state)


def drawn_by(number: int, *, seeded: bool) -> AbstractContextManager[None]:
    """Global random numbers that are a function of the sample alone, where asked for."""
    return RandomStateKept(number) if seeded else nullcontext()
