"""Any map-style Dataset as a source.

Sixteen samples are probed, each twice: they give the schema, part of the identity, and the proof that
reading is repeatable. A Dataset whose output is random cannot be cached; augmentation belongs after the
cache. torch is not imported here unless the Dataset has brought it along.
"""

from __future__ import annotations

import copy
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, Protocol

from stoker.errors import ConfigError, SourceError
from stoker.runtime.threads import ItemClock, call_within
from stoker.schema import Json, Sample, Schema, digest_json
from stoker.sources.given import check_dataset
from stoker.sources.held import held_bytes
from stoker.sources.protocol import Part, SourceIdentity
from stoker.sources.torch_elsewhere import check_alike, read_elsewhere
from stoker.sources.torch_identity import Description, describe
from stoker.sources.torch_items import Item, Rule, TextRules, flatten_item, narrowed_fields
from stoker.sources.torch_members import obstacles, random_members, uses_module
from stoker.sources.torch_probe import (
    PROBES,
    Meaning,
    Probed,
    Prober,
    RandomStateKept,
    common_schema,
    digests_of,
    drawn_by,
    probe_numbers,
)
from stoker.units import MIB, format_count
from stoker.used_code import qualified_name

VERSION = 1
"""Bumped by hand when the same Dataset would give other samples."""

_RUN_BYTES = 8 * MIB
_RUN_SAMPLES = 256
_ALONE_S = 60.0
_AHEAD_BYTES = 256 * MIB
"""A Dataset that holds more has its data in memory, and would take long to send to another process."""

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


class TorchSource:
    """The items of a map-style Dataset, as samples.

    Args:
        dataset: Anything with `__len__` and `__getitem__`: tensors, arrays, numbers, PIL images, and tuples
            or (nested) dictionaries of these.
        identity: Names the content in place of what can be seen of it; change it when the data changes.
        time: Fields whose axis 0 is time, so that windows may be cut from them.
        ragged: Fields whose length along axis 0 varies; also found by probing.
        keys: One stable key per sample, for splits; absent: the sample number.
        text: What becomes of text, by field: a list of words (stored as the place in it), `"bytes"`, or
            `"drop"`, which leaves any field out.
        random: `"freeze"` stores one draw of a Dataset whose output is random; otherwise it is refused.

    A bare tensor is the field `data`; the elements of a tuple are `0`, `1`, ...; nested dictionaries are
    joined with `.`. Numbers are int64, float64 or bool; arrays of float64 become float32; images
    are `(H, W, C)` uint8.

    Raises:
        ConfigError: Text, a path or a dict.
        SourceError: Empty, a class or not map-style; later, on first use, random, textual or uneven items.
        StalledError: On first use, an item that is not there in time while the Dataset is probed.
    """

    probe_deadline_s: float | None = 60.0
    """Seconds for one item while probing, in a thread of its own. None: in the calling thread, without a
    deadline, for a Dataset that works in the thread that made it alone (sqlite3)."""

    def __init__(  # noqa: PLR0913 - the public face; every setting is named by the caller
        self,
        dataset: MapDataset,
        *,
        identity: str | None = None,
        time: Sequence[str] = (),
        ragged: Sequence[str] = (),
        keys: Sequence[str] | None = None,
        text: Mapping[str, Rule] | None = None,
        random: Literal["refuse", "freeze"] = "refuse",
    ) -> None:
        if isinstance(dataset, type):
            name = dataset.__name__
            raise SourceError(f"{name} is a class, which has no items. Give an object of it, as {name}(...)")
        check_dataset(dataset)
        self._name = qualified_name(type(dataset))
        torch_data = sys.modules.get("torch.utils.data")
        iterable = torch_data is not None and isinstance(dataset, torch_data.IterableDataset)
        if iterable or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise SourceError(
                f"{self._name} has no length and items by number. Give a map-style Dataset with __len__ and "
                "__getitem__"
            )
        self._count = self._length(dataset)
        if self._count == 0:
            raise SourceError(f"{self._name} is empty. Check the paths and filters it was made with")
        if keys is not None and len(keys) != self._count:
            raise ConfigError(f"{len(keys)} keys for {self._count} samples. Give one key per sample")
        if random not in ("refuse", "freeze"):
            raise ConfigError(
                f"random is {random!r}. Expected 'refuse', or 'freeze' to store one random draw"
            )
        self._dataset = dataset
        self._identity = identity
        self._text, self._freeze = TextRules(text or {}), random == "freeze"
        self._meaning = Meaning(time=tuple(time), ragged=tuple(ragged))
        self._keys = None if keys is None else [str(key) for key in keys]
        self._probed: Probed | None = None
        self._seen: Description | None = None
        self._proved = False
        self._ahead = False
        self._elsewhere: dict[int, dict[str, str] | str] | None = None
        self._narrowed: set[str] = set()
        self._live: MapDataset | None = None
        self._last: tuple[int, Sample] | None = None

    def _length(self, dataset: MapDataset) -> int:
        try:
            return len(dataset)
        except (TypeError, ValueError, RuntimeError) as error:
            raise SourceError(
                f"{self._name} has no length: len(dataset) raised {type(error).__name__}: {error}. Have "
                "__len__ return how many items there are"
            ) from error

    def __repr__(self) -> str:
        """The Dataset's class and length."""
        return f"TorchSource({self._name}, {format_count(self._count, 'sample')})"

    def __getstate__(self) -> dict[str, Any]:
        """The Dataset as it was given: handles it opened while being read stay here.

        A class of `__main__` has no source text where it is unpickled, so what was seen of it travels along.
        """
        seen = None if self._identity is not None else self._seen or describe(self._dataset)
        if seen is not None and not any(name.startswith("__main__.") for name in seen.code):
            seen = None
        return {**self.__dict__, "_live": None, "_last": None, "_elsewhere": None, "_seen": seen}

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

    def locate(self, number: int) -> str:
        """The item of the Dataset; of one inside `torch.utils.data.Subset`, by its own index."""
        subset = getattr(sys.modules.get("torch.utils.data"), "Subset", None)
        inner: Any = self._dataset
        while subset is not None and type(inner) is subset:
            inner, number = inner.dataset, inner.indices[number]
        return f"item {number} of {qualified_name(type(inner))}"

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
        meaning = self._meaning
        settings: dict[str, Json] = {"time": list(meaning.time), "ragged": list(meaning.ragged)}
        if self._text.names:
            settings["text"] = self._text.to_json()
        if self._freeze:
            settings["random"] = "freeze"
        if self._identity is not None:
            part = Part(name="dataset", count=self._count, digest=digest_json(self._identity))
            settings["identity"] = self._identity
            return SourceIdentity(kind=f"torch/{VERSION}", parts=(part,), settings=settings)
        probed = self._probe()
        seen = self._seen or describe(self._dataset)
        settings.update({"class": self._name, "code": seen.code, "held": seen.held, "folders": seen.folders})
        digest = digest_json({"probes": list[Json](probed.wholes), "held": seen.held})
        self._say(seen.unseen)
        part = Part(name=self._name, count=self._count, files=seen.files, digest=digest)
        return SourceIdentity(kind=f"torch/{VERSION}", parts=(part,), settings=settings, sampled=True)

    def _say(self, unseen: Sequence[str]) -> None:
        """What the cache does not notice, once for each Dataset."""
        text = "; ".join(unseen)
        if text and (self._name, text) not in _said:
            _said.add((self._name, text))
            _log.warning(
                "%s: the cache is recognized by code, held values and %d probed samples, and of these only a "
                "part is looked at: %s. Name the content yourself to be sure: "
                "stoker.TorchSource(dataset, identity='v1')",
                *(self._name, PROBES, text),
            )

    def prove(self) -> None:
        """Read the probed samples once more, in a process of their own, as readers will.

        Raises:
            SourceError: The Dataset cannot go there, or is another there; names the member or the field.
            StalledError: It is not there in time.
        """
        if self._proved:
            return  # by another split of the same Dataset
        deadline_s = self.probe_deadline_s or _ALONE_S
        here = self._probe().digests
        there = self._elsewhere or read_elsewhere(self, self._name, deadline_s=deadline_s)
        check_alike(here, there, self._name)
        self._proved = True

    def probed_numbers(self) -> list[int]:
        """Samples that were looked at, or are to be looked at in this process first."""
        return probe_numbers(self._count) if self._ahead else list(self._probe().digests)

    def probe_again(self, number: int) -> dict[str, str]:
        """Digests by field of a probed sample, of the fields that are the same whenever they are read."""
        changing = () if self._ahead else self._probe().changing
        return digests_of(self._item(number, seeded=self._freeze), without=changing)

    def _item(self, number: int, *, seeded: bool) -> Item:
        """One item of this process's copy of the Dataset.

        The copy is shallow: data is shared, but what a Dataset opens on first use (files, connections)
        lands on the copy, so that the original can still travel to reader processes.
        """
        if self._live is None:
            self._live = copy.copy(self._dataset)
        with drawn_by(number, seeded=seeded):
            item = self._live[number]
        found = flatten_item(item, where=self.locate(number), text=self._text)
        if self._probed is None:
            self._narrowed.update(narrowed_fields(item))
        return found

    def _checked(self, number: int, schema: Schema) -> Sample:
        found = self._item(number, seeded=self._freeze)
        where = self.locate(number)
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
                    f"as in the probed samples. Fix the item{cure if longer else ''}"
                )
        return {name: array for name, (array, _) in found.items()}

    def _look_ahead(self) -> None:
        """Read what will be probed in a second process first, where a read may stop all threads of this one.

        h5py keeps the interpreter's lock while it waits for storage, so that no deadline in this process
        would be noticed; the second process is killed. What it finds is kept for `prove`.

        Raises:
            StalledError: Storage does not answer.
        """
        if self._ahead or self.probe_deadline_s is None or not uses_module(self._dataset, "h5py"):
            return
        if held_bytes(self._dataset) > _AHEAD_BYTES:
            return
        other = copy.copy(self)
        other._ahead = True
        # What cannot go there can be read in this process all the same; `prove` says it where that matters.
        with suppress(SourceError):
            self._elsewhere = read_elsewhere(other, self._name, deadline_s=self.probe_deadline_s)

    def _probe(self) -> Probed:
        if self._probed is None:
            self._look_ahead()
            with RandomStateKept():
                if self.probe_deadline_s is None:
                    probes = self._probes(lambda _: None)
                else:
                    clock = ItemClock()
                    probes = call_within(
                        self.probe_deadline_s,
                        lambda: self._probes(clock.begin),
                        f"probing {self._name}",
                        hint="Fix what it waits for, or give it more time: source.probe_deadline_s = 300",
                        clock=clock,
                    )
            items, drawn, changing = probes
            self._check_text(items)
            schema = common_schema(self._name, items, self._meaning)
            if wide := sorted(self._narrowed - set(self._text.names)):
                _log.warning("%s: float64 is read as float32: %s", self._name, ", ".join(wide))
            if drawn:
                fields = ", ".join(sorted(drawn))
                _log.warning("%s: random='freeze': one random draw is stored of %s", self._name, fields)
            digests = {number: digests_of(item, without=tuple(changing)) for number, item in items.items()}
            self._probed = Probed(schema=schema, digests=digests, changing=tuple(sorted(changing)))
        return self._probed

    def _probes(self, begin: Callable[[int], None]) -> tuple[dict[int, Item], set[str], set[str]]:
        """Some items by number, each read again, and the fields that were another then."""
        prober = Prober(
            self._name,
            lambda number, seeded: self._item(number, seeded=seeded),
            freeze=self._freeze,
            suspects=lambda: random_members(self._dataset, "dataset"),
            obstacles=lambda: [f"{one}. {one.cure}" for one in obstacles(self._dataset, "dataset")],
        )
        try:
            return prober.items(self._count, begin)
        finally:
            self._live = None  # what it opened may work in this thread alone

    def _check_text(self, items: Mapping[int, Item]) -> None:
        fields = {name for item in items.values() for name in item}
        unknown = [name for name in self._text.names if name not in fields and not self._text.dropped(name)]
        if unknown:
            raise ConfigError(f"text names {sorted(unknown)}; the fields are {', '.join(sorted(fields))}")
