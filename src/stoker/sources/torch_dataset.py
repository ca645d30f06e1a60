"""Any map-style Dataset as a source.

Sixteen samples are probed, each twice: they give the schema, part of the identity, and the proof that
reading is repeatable. A Dataset whose output is random cannot be cached; augmentation belongs after the
cache. torch is not imported here unless the Dataset has brought it along.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError, SourceError
from stoker.schema import Field, Json, Sample, Schema, digest_json
from stoker.sources.protocol import Part, SourceIdentity
from stoker.sources.torch_code import qualified_name
from stoker.sources.torch_identity import describe
from stoker.sources.torch_items import flatten_item, narrowed_fields
from stoker.sources.watched import watched
from stoker.units import MIB

VERSION = 1
"""Bumped by hand when the same Dataset would give other samples."""

PROBES = 16
_RUN_BYTES = 8 * MIB
_RUN_SAMPLES = 256

Item: TypeAlias = "dict[str, tuple[NDArray[Any], str]]"
"""Fields of one item: array, and dtype as a schema names it."""

_log = logging.getLogger("stoker")
_said: set[tuple[str, str]] = set()


class MapDataset(Protocol):
    """What a map-style Dataset has."""

    def __len__(self) -> int:
        """Number of items."""
        ...

    def __getitem__(self, index: int, /) -> Any:
        """One item; the same for the same index."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Probed:
    schema: Schema
    digests: tuple[str, ...]


class TorchSource:
    """The items of a map-style Dataset, as samples.

    Args:
        dataset: Anything with `__len__` and `__getitem__`: tensors, arrays, numbers, PIL images, and tuples
            or (nested) dictionaries of these.
        identity: Names the content in place of what can be seen of it; change it when the data changes.
        time: Fields whose axis 0 is time, so that windows may be cut from them.
        ragged: Fields whose length along axis 0 varies; also found by probing.
        keys: One stable key per sample, for splits; absent: the sample number.

    A bare tensor is the field `data`; the elements of a tuple are `0`, `1`, ...; nested dictionaries are
    joined with `.`. Numbers are int64, float32 or bool; images `(H, W, C)` uint8.

    Raises:
        SourceError: Empty, a class or not map-style; later, on first use, random, textual or uneven items.
        StalledError: On first use, an item that is not there in time while the Dataset is probed.
    """

    probe_deadline_s: float | None = 60.0
    """Seconds for one item while probing, in a thread of its own. None: in the calling thread, without a
    deadline, for a Dataset that works in the thread that made it alone (sqlite3)."""

    def __init__(
        self,
        dataset: MapDataset,
        *,
        identity: str | None = None,
        time: Sequence[str] = (),
        ragged: Sequence[str] = (),
        keys: Sequence[str] | None = None,
    ) -> None:
        if isinstance(dataset, type):
            name = dataset.__name__
            raise SourceError(f"{name} is a class, which has no items. Give an object of it, as {name}(...)")
        self._name = qualified_name(type(dataset))
        torch_data = sys.modules.get("torch.utils.data")
        iterable = torch_data is not None and isinstance(dataset, torch_data.IterableDataset)
        if iterable or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise SourceError(
                f"{self._name} has no length and items by number. Give a map-style Dataset with __len__ and "
                "__getitem__"
            )
        self._count = len(dataset)
        if self._count == 0:
            raise SourceError(f"{self._name} is empty. Check the paths and filters it was made with")
        if keys is not None and len(keys) != self._count:
            raise ConfigError(f"{len(keys)} keys for {self._count} samples. Give one key per sample")
        self._dataset = dataset
        self._identity = identity
        self._time, self._ragged = tuple(time), tuple(ragged)
        self._keys = None if keys is None else [str(key) for key in keys]
        self._probed: _Probed | None = None
        self._narrowed: set[str] = set()
        self._live: MapDataset | None = None
        self._last: tuple[int, Sample] | None = None

    def __repr__(self) -> str:
        """The Dataset's class and length."""
        return f"TorchSource({self._name}, {self._count} samples)"

    def __getstate__(self) -> dict[str, Any]:
        """The Dataset as it was given: handles it opened while being read stay here."""
        return {**self.__dict__, "_live": None, "_last": None}

    def __len__(self) -> int:
        """The Dataset's length when the source was made."""
        return self._count

    def schema(self) -> Schema:
        """Fields as found by probing."""
        return dict(self._probe().schema)

    def read(self, number: int, start: int | None = None, stop: int | None = None) -> Sample:
        """Item `number`, flattened; `start:stop` cuts the fields named in `time`.

        Returns:
            Fresh arrays as in `schema()`.
        Raises:
            SourceError: The item is not like the probed ones; names sample and field.
            IndexError: No such number.
        """
        if not 0 <= number < self._count:
            raise IndexError(f"sample {number} does not exist: this source has {self._count}")
        schema = self._probe().schema
        if (start is None and stop is None) or self._last is None or self._last[0] != number:
            sample = self._checked(number, schema)
            if start is None and stop is None:
                return sample
            self._last = (number, sample)  # the next piece of a long sample is likely to follow
        whole = self._last[1]
        return {
            name: (array[start:stop] if schema[name].time else array).copy() for name, array in whole.items()
        }

    def runs(self) -> Sequence[range]:
        """Ranges of at most 256 samples or about 8 MiB."""
        sizes = [field.size_bytes(1 if field.ragged else None) for field in self._probe().schema.values()]
        length = max(1, min(_RUN_SAMPLES, _RUN_BYTES // max(1, sum(sizes))))
        return [range(first, min(first + length, self._count)) for first in range(0, self._count, length)]

    def keys(self) -> Sequence[str]:
        """The keys given, else sample numbers."""
        return list(self._keys) if self._keys is not None else [str(number) for number in range(self._count)]

    def identity(self) -> SourceIdentity:
        """The user's word, or what can be seen: code, files, indices and probed samples."""
        settings: dict[str, Json] = {"time": list(self._time), "ragged": list(self._ragged)}
        if self._identity is not None:
            part = Part(name="dataset", count=self._count, digest=digest_json(self._identity))
            settings["identity"] = self._identity
            return SourceIdentity(kind=f"torch/{VERSION}", parts=(part,), settings=settings)
        probed = self._probe()
        seen = describe(self._dataset)
        settings.update({"class": self._name, "code": seen.code, "held": seen.held, "folders": seen.folders})
        digest = digest_json({"probes": list(probed.digests), "held": seen.held})
        self._say(seen.unseen)
        part = Part(name=self._name, count=self._count, files=seen.files, digest=digest)
        return SourceIdentity(kind=f"torch/{VERSION}", parts=(part,), settings=settings, sampled=True)

    def _say(self, unseen: Sequence[str]) -> None:
        """What the cache does not notice, once for each Dataset."""
        text = "; ".join(unseen)
        if text and (self._name, text) not in _said:
            _said.add((self._name, text))
            _log.warning(
                "%s: the cache is recognised by code, values held and %d probed samples, but of these a part "
                "alone is looked at: %s. Name the content yourself to be sure: "
                "stoker.TorchSource(dataset, identity='v1')",
                *(self._name, PROBES, text),
            )

    def _item(self, number: int) -> Item:
        """One item of this process's copy of the Dataset.

        The copy is shallow: data is shared, but what a Dataset opens on first use (files, connections)
        lands on the copy, so that the original can still travel to reader processes.
        """
        if self._live is None:
            self._live = copy.copy(self._dataset)
        item = self._live[number]
        if self._probed is None:
            self._narrowed.update(narrowed_fields(item))
        return flatten_item(item, where=f"{self._name}: sample {number}")

    def _checked(self, number: int, schema: Schema) -> Sample:
        found = self._item(number)
        where = f"{self._name}: sample {number}"
        if found.keys() != schema.keys():
            raise SourceError(
                f"{where} has fields {sorted(found)}, expected {sorted(schema)} as in the probed samples. "
                "Return the same fields in every item"
            )
        for name, (array, dtype) in found.items():
            field = schema[name]
            shape = (-1, *array.shape[1:]) if field.ragged and array.ndim else array.shape
            if shape != field.shape or dtype != field.dtype:
                longer = dtype == field.dtype and array.ndim and array.shape[1:] == field.shape[1:]
                cure = f"; if its length may vary, give stoker.TorchSource(dataset, ragged=({name!r},))"
                raise SourceError(
                    f"{where}, field {name!r} is {dtype} {array.shape}, expected {field.dtype} {field.shape} "
                    f"as in the probed samples. Mend the item{cure if longer else ''}"
                )
        return {name: array for name, (array, _) in found.items()}

    def _probe(self) -> _Probed:
        if self._probed is None:
            with _RandomStateKept():
                if self.probe_deadline_s is None:
                    items = self._probed_items(lambda _: None)
                else:
                    items = watched(
                        self._probed_items,
                        self.probe_deadline_s,
                        where=f"probing {self._name}",
                        advice="Mend what it waits for, or give it more time: source.probe_deadline_s = 300",
                    )
            schema = self._common_schema(items)
            if wide := sorted(self._narrowed):
                _log.warning("%s: float64 is read as float32: %s", self._name, ", ".join(wide))
            self._probed = _Probed(schema=schema, digests=tuple(_digest(item) for item in items.values()))
        return self._probed

    def _probed_items(self, begin: Callable[[int], None]) -> dict[int, Item]:
        """Some items by number, each read twice; `begin` is told which one comes."""
        numbers = sorted({round(i * (self._count - 1) / (PROBES - 1)) for i in range(PROBES)})
        try:
            items = {number: item for number in numbers if (item := self._try(number, begin)) is not None}
            if not items:
                self._item(numbers[0])  # raises what every probe raised
            for number in reversed(items):
                self._compare(number, items[number], self._try(number, begin))
        finally:
            self._live = None  # what it opened may work in this thread alone
        return items

    def _try(self, number: int, begin: Callable[[int], None]) -> Item | None:
        """An item, or None when the Dataset fails on it: such a sample is quarantined when it is read."""
        begin(number)
        try:
            return self._item(number)
        except SourceError:
            raise
        except Exception as error:  # noqa: BLE001 - a Dataset is foreign code and may raise anything
            kind = type(error).__name__
            _log.warning("%s: probing sample %d failed: %s: %s", self._name, number, kind, error)
            return None

    def _compare(
        self,
        number: int,
        first: Item,
        second: Item | None,
    ) -> None:
        for name, (array, dtype) in first.items():
            again = None if second is None else second.get(name)
            if again is None or again[1] != dtype or not _same(array, again[0]):
                raise SourceError(
                    f"{self._name}: sample {number}, field {name!r} changes when it is read again; a cache "
                    "would freeze one random draw. Move augmentation behind the cache, or seed it by the "
                    "sample number"
                )

    def _common_schema(self, items: Mapping[int, Item]) -> Schema:
        first_number = next(iter(items))
        first = items[first_number]
        schema: Schema = {}
        for number, item in items.items():
            if item.keys() != first.keys():
                raise SourceError(
                    f"{self._name}: sample {number} has fields {sorted(item)}, sample {first_number} has "
                    f"{sorted(first)}. Return the same fields in every item"
                )
        for name, (array, dtype) in first.items():
            others = {number: item[name] for number, item in items.items()}
            for number, (other, kind) in others.items():
                if kind != dtype or other.ndim != array.ndim or other.shape[1:] != array.shape[1:]:
                    raise SourceError(
                        f"{self._name}: field {name!r} is {dtype} {array.shape} in sample {first_number} and "
                        f"{kind} {other.shape} in sample {number}. Only axis 0 may vary; resize or pad"
                    )
            lengths = {other.shape[:1] for other, _ in others.values()}
            ragged = len(lengths) > 1 or name in self._ragged
            if len(lengths) > 1 and name not in self._ragged:
                _log.info("%s: field %r varies along axis 0 and is kept ragged", self._name, name)
            shape = (-1, *array.shape[1:]) if ragged else array.shape
            schema[name] = Field(shape=shape, dtype=dtype, time=name in self._time, ragged=ragged)
        if unknown := ({*self._time, *self._ragged} - schema.keys()):
            raise ConfigError(f"time or ragged name {sorted(unknown)}; the fields are {', '.join(schema)}")
        return schema


def _same(one: NDArray[Any], other: NDArray[Any]) -> bool:
    return one.shape == other.shape and one.tobytes() == other.tobytes()


def _digest(item: Item) -> str:
    digest = hashlib.sha256()
    for name, (array, dtype) in item.items():
        digest.update(f"{name} {dtype} {array.shape}\n".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


class _RandomStateKept:
    """Leaves the global random states as they were: probing must not change a user's training run."""

    def __enter__(self) -> None:
        self._torch = sys.modules.get("torch")
        self._states = (random.getstate(), np.random.get_state())
        self._torch_state = None if self._torch is None else self._torch.get_rng_state()

    def __exit__(self, *exc: object) -> None:
        random.setstate(self._states[0])
        np.random.set_state(self._states[1])
        if self._torch is not None:
            self._torch.set_rng_state(self._torch_state)
