"""Any map-style Dataset as a source.

Sixteen samples are probed, each twice: they give the schema, part of the identity, and the proof that
reading is repeatable. A Dataset whose output is random cannot be cached; augmentation belongs after the
cache. torch is not imported here unless the Dataset has brought it along.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import math
import os
import random
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from stoker.arguments import NAME, Kind, check, or_none, several
from stoker.errors import ConfigError, DecodeError, SourceError, arg
from stoker.runtime.mounts import are_local
from stoker.runtime.threads import ItemClock, call_within
from stoker.schema import SHAPE_SUFFIX, Json, Sample, Schema, digest_json
from stoker.sources.arguments import check_dataset
from stoker.sources.pickling import (
    estimate_pickle_bytes,
    obstacles,
    random_members,
    uses_module,
)
from stoker.sources.protocol import Part, SourceIdentity, check_index, even_runs
from stoker.sources.torch_elsewhere import check_alike, read_elsewhere, read_probes
from stoker.sources.torch_identity import Description, describe, held_paths
from stoker.sources.torch_items import (
    Item,
    ItemStructure,
    PlainItems,
    Rule,
    TextRules,
    common_schema,
    fits_field,
    flatten_item,
    fold,
    missing_text,
    narrowed_fields,
    ragged_cure,
    shape_text,
    structure_of,
    varying_axes,
)
from stoker.units import MIB, format_count
from stoker.used_code import qualified_name

# ----------------------------------------------------------------------------------------------------------
# Some items of a Dataset, read more than once: what they look like, and whether reading is repeatable.
#
# A cache of random output would freeze one draw, so it is refused, with the cure. A user who wants that
# says `random="freeze"`: the global random numbers are then a function of the sample, so that the draw is
# the same in every process, and fields that change nevertheless (a generator of the Dataset's own) are left
# out of what is compared. torch is not imported here unless the Dataset has brought it along.


PROBES = 16
"""Items that are looked at, spread over the whole Dataset."""

T = TypeVar("T")
_log = logging.getLogger("stoker")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """Schema and digests that the probes gave."""

    schema: Schema
    digests: dict[int, dict[str, str]]
    """Index of a sample to the digest of each field that is the same whenever it is read."""
    changing: tuple[str, ...] = ()
    """Fields that another reading would draw differently, where that is allowed."""

    @property
    def item_digests(self) -> list[str]:
        """One digest for each probe, over all that is repeatable in it."""
        return [
            hashlib.sha256("\n".join(f"{n} {d}" for n, d in fields.items()).encode()).hexdigest()
            for fields in self.digests.values()
        ]


class DatasetProber:
    """Reads probes of one Dataset.

    Args:
        dataset, name: The Dataset, and its name for messages.
        read: One item by index; the second argument says if global random numbers are seeded by the index.
        freeze: Take random output as it comes.
    """

    def __init__(
        self,
        dataset: MapDataset,
        name: str,
        read: Callable[[int, bool], Item],
        *,
        freeze: bool,
    ) -> None:
        self._dataset, self._name, self._read, self._freeze = dataset, name, read, freeze
        self.read_s = math.inf
        """Seconds of the fastest read."""

    def items(self, count: int, begin: Callable[[int], None]) -> tuple[dict[int, Item], set[str], set[str]]:
        """Return some items by index; fields that are drawn; fields that another reading draws differently.

        Each is read twice, and three times where random output is frozen; `begin` is told which one comes.
        """
        indices = probe_indices(count)
        failed: dict[int, Exception] = {}
        found = {index: self._try(index, begin, failed) for index in indices}
        items = {index: item for index, item in found.items() if item is not None}
        if not items:
            self._refuse_all(failed)
        for index, error in failed.items():
            self._warn(index, error)
        drawn, changing = set[str](), set[str]()
        for index in reversed(items):
            again = self._try(index, begin)
            found = differing(items[index], again)
            if found and not self._freeze:
                self._refuse(index, found[0])
            changing.update(found)
            if self._freeze:
                drawn.update(differing(items[index], self._try(index, begin, seeded=False)))
        return items, drawn | changing, changing

    def _try(
        self,
        index: int,
        begin: Callable[[int], None],
        failed: dict[int, Exception] | None = None,
        *,
        seeded: bool = True,
    ) -> Item | None:
        """Return an item, or None when the Dataset fails on it: such a sample is quarantined when it is read.

        The error is put into `failed`, or logged where `failed` is None.
        """
        begin(index)
        started = time.perf_counter()
        try:
            item = self._read(index, seeded and self._freeze)
            self.read_s = min(self.read_s, time.perf_counter() - started)
            return item
        except Exception as error:  # a Dataset is foreign code and may raise anything
            if isinstance(error, SourceError) and not isinstance(error, DecodeError):
                raise
            if failed is None:
                self._warn(index, error)
            else:
                failed[index] = error
            return None

    def _warn(self, index: int, error: Exception) -> None:
        kind = type(error).__name__
        _log.warning("%s: probing sample %d failed: %s: %s", self._name, index, kind, error)

    def _refuse_all(self, failed: Mapping[int, Exception]) -> None:
        index, error = next(iter(failed.items()))
        held = "; ".join(f"{one}. {one.cure}" for one in obstacles(self._dataset, "dataset"))
        hint = (
            f"It holds what may work in the thread that made it alone: {held}"
            if held
            else f"Call dataset[{index}] yourself to see where; fix the Dataset"
        )
        raise SourceError(
            f"{self._name}: all of {len(failed)} probed samples failed, sample {index} with "
            f"{type(error).__name__}: {str(error).rstrip('.')}",
            hint=hint,
        ) from error

    def _refuse(self, index: int, field: str) -> None:
        suspects = "; ".join(random_members(self._dataset, "dataset"))
        held = f" (it holds {suspects})" if suspects else ""
        raise SourceError(
            f"{self._name}: sample {index}, field {field!r} changes when it is read again{held}; a cache "
            "would freeze one random draw",
            hint=RANDOM_CURE,
        )


RANDOM_CURE = (
    "Move augmentation behind the cache, as stoker.cached(..., transforms=[...]), which draws again for each "
    f"example in each epoch; or seed it by the sample number; or store one random draw with "
    f"{arg('random', 'freeze')}"
)


def probe_indices(count: int) -> list[int]:
    """Return at most sixteen indices, the first and the last among them."""
    return sorted({round(i * (count - 1) / (PROBES - 1)) for i in range(PROBES)})


def differing(first: Item, second: Item | None) -> list[str]:
    """Return fields that are not the same in both."""
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
    """Return the digest of each field."""
    return {
        name: hashlib.sha256(
            f"{dtype} {array.shape}\n".encode() + np.ascontiguousarray(array).tobytes()
        ).hexdigest()
        for name, (array, dtype) in item.items()
        if name not in without
    }


@contextmanager
def preserve_random_state(seed: int | None = None) -> Generator[None]:
    """Leave the global random states as they were: probing must not change a user's training run.

    Args:
        seed: The states to work with meanwhile; None: as they are.
    """
    torch = sys.modules.get("torch")
    states = random.getstate(), np.random.get_state()
    torch_state = None if torch is None else torch.get_rng_state()
    on_gpus = torch.cuda.get_rng_state_all() if torch is not None and torch.cuda.is_initialized() else []
    if seed is not None:
        random.seed(seed)
        np.random.seed(seed % 2**32)
        if torch is not None:
            torch.default_generator.manual_seed(seed)  # the CPU's alone: no GPU is touched
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        if torch is not None:
            torch.set_rng_state(torch_state)
            if on_gpus:
                torch.cuda.set_rng_state_all(on_gpus)


VERSION = 1
"""Bumped by hand when the same Dataset would give other samples."""

_VERSION = or_none(Kind("text", lambda value: isinstance(value, str | int)))
_TIME = several(NAME, "a list of names of fields, as ['u']")
_RUN_BYTES = 8 * MIB
_RUN_SAMPLES = 256
_ALONE_S = 60.0
_HDF5_SUFFIXES = (".h5", ".hdf5", ".hdf", ".he5", ".nc", ".nc4", ".mat")
_HELD_BYTES = 32 * MIB
"""Larger blocks are never part of glibc's heap (`DEFAULT_MMAP_THRESHOLD_MAX`): holding one saves nothing."""
_AHEAD_BYTES = 256 * MIB
"""A Dataset that holds more has its data in memory, and would take long to send to another process."""

_said: set[tuple[str, str]] = set()


class MapDataset(Protocol):
    """The methods of a map-style Dataset."""

    def __len__(self) -> int:
        """Return the number of items."""
        ...

    def __getitem__(self, index: int, /) -> Any:
        """Return one item; the same for the same index."""
        ...


class _LazyDescription:
    """Description of a Dataset for another process, made only when pickled because that takes time.

    It unpickles to None if the other process sees the same: no code is from `__main__`.
    """

    def __init__(self, dataset: object, seen: Description | None) -> None:
        self._dataset = dataset
        self.seen = seen

    def __reduce__(self) -> tuple[Any, ...]:
        seen = self.seen or describe(self._dataset)
        main = any(name.startswith("__main__.") for name in seen.code)
        return _restore_description, (seen if main else None,)


def _restore_description(seen: Description | None) -> Description | None:
    return seen


def _checked_keys(keys: Sequence[str], count: int) -> list[str]:
    """Return the keys of the samples, as text.

    Raises:
        ConfigError: There are not as many, or one is neither text nor a whole number.
    """
    given = None if isinstance(keys, str | bytes) or not hasattr(keys, "__len__") else list[object](keys)
    if given is None or len(given) != count:
        number = repr(keys)[:40] if given is None else f"{len(given)} keys"
        raise ConfigError(f"{number} for {count} samples", hint="Give a list with one key per sample")
    for index, key in enumerate(given):
        if isinstance(key, bool) or not isinstance(key, str | int | np.integer | os.PathLike):
            raise ConfigError(
                f"keys[{index}], the key of sample {index}, is {key!r}",
                hint="Expected text or whole numbers; of a tensor or an array give keys.tolist()",
            )
    return [str(key) for key in given]


class TorchSource:
    """The items of a map-style Dataset, as samples.

    Args:
        dataset: Anything with `__len__` and `__getitem__`: tensors, arrays, numbers, PIL images, and tuples,
            dataclasses or (nested) dictionaries of these.
        version: Names the content in place of what can be seen of it; change it when the data changes.
        time: Fields whose axis 0 is time, so that windows may be cut from them.
        ragged: Fields whose length along axis 0 varies; or by field the axes that vary, as
            `{"image": (1, 2)}`. Axes that vary among the probed samples are found without it.
        keys: One stable key per sample, text or a whole number; absent: the sample's index. Samples with
            equal keys are in the same split. `Cache.get` and `stoker.zip` need keys that differ.
        text: What becomes of text, by field: a list of words (stored as the place in it), `"bytes"`, or
            `"drop"`, which leaves any field out.
        random: `"freeze"` stores one draw of a Dataset whose output is random; otherwise it is refused.

    A bare tensor is the field `data`; the elements of a tuple are `0`, `1`, ...; nested dictionaries are
    joined with `.`. Numbers are int64, float64 or bool; arrays of float64 become float32; images
    are `(H, W, C)` uint8.

    Raises:
        ConfigError: Text, a path or a dict; keys that are not one for each sample.
        SourceError: Empty, a class or not map-style; later, on first use, random, textual or uneven items.
        StalledError: On first use, an item that is not there in time while the Dataset is probed.

    Examples:
        >>> import stoker, torch
        >>> dataset = torch.utils.data.TensorDataset(torch.rand(100, 11, 16), torch.arange(100))
        >>> source = stoker.TorchSource(dataset, time=["0"], version="2025-01")
        >>> {name: field.shape for name, field in source.schema().items()}
        {'0': (11, 16), '1': ()}
    """

    probe_timeout_s: float | None = 60.0
    """Seconds for one item while probing, in a thread of its own. None: in the calling thread, without a
    deadline, for a Dataset that works in the thread that made it alone (sqlite3)."""

    def __init__(  # noqa: PLR0913 - the public face; every setting is named by the caller
        self,
        dataset: MapDataset,
        *,
        version: str | None = None,
        time: Sequence[str] = (),
        ragged: Sequence[str] | Mapping[str, Sequence[int]] = (),
        keys: Sequence[str] | None = None,
        text: Mapping[str, Rule] | None = None,
        random: Literal["refuse", "freeze"] = "refuse",
    ) -> None:
        if isinstance(dataset, type):
            name = dataset.__name__
            raise SourceError(
                f"{name} is a class, which has no items", hint=f"Give an object of it, as {name}(...)"
            )
        check_dataset(dataset)
        self._name = qualified_name(type(dataset))
        torch_data = sys.modules.get("torch.utils.data")
        iterable = torch_data is not None and isinstance(dataset, torch_data.IterableDataset)
        if iterable or not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise SourceError(
                f"{self._name} has no length and items by index",
                hint="Give a map-style Dataset with __len__ and __getitem__",
            )
        self._count = self._length(dataset)
        if self._count == 0:
            raise SourceError(f"{self._name} is empty", hint="Check the paths and filters it was made with")
        if random not in ("refuse", "freeze"):
            raise ConfigError(
                f"random is {random!r}", hint="Expected 'refuse', or 'freeze' to store one random draw"
            )
        check({"version": (version, _VERSION), "time": (time, _TIME)})
        self._dataset = dataset
        self._version = version
        self._text, self._freeze = TextRules(text or {}), random == "freeze"
        self._time, self._ragged = tuple(time), varying_axes(ragged)
        self._keys = None if keys is None else _checked_keys(keys, self._count)
        self._probed: ProbeResult | None = None
        self._seen: Description | None = None
        self._proved = False
        self._ahead = False
        self._elsewhere: dict[int, dict[str, str] | str] | None = None
        self._narrowed: set[str] = set()
        self._structure: ItemStructure = None
        self._live: MapDataset | None = None
        self._read_s = 0.0
        self._last: tuple[int, Sample] | None = None
        self._holds = False
        self._held: Any = None
        """The item read last. If it was freed at once, malloc would return its pages to the system. New ones
        for the next item may cost more than decoding it: an image of 0.9 MB took 3.4 ms instead of 1.1."""
        self._sent_by = 0
        """Process that pickled this copy; 0: this is the original."""
        self._plain: PlainItems | None = None

    def _length(self, dataset: MapDataset) -> int:
        try:
            return len(dataset)
        except (TypeError, ValueError, RuntimeError) as error:
            raise SourceError(
                f"{self._name} has no length: len(dataset) raised {type(error).__name__}: {error}",
                hint="Have __len__ return how many items there are",
            ) from error

    def __repr__(self) -> str:
        """Return the Dataset's class and length."""
        return f"TorchSource({self._name}, {format_count(self._count, 'sample')})"

    def __getstate__(self) -> dict[str, Any]:
        """The Dataset as it was given: handles it opened while being read stay here.

        A class of `__main__` has no source text where it is unpickled, so what was seen of it travels along.
        """
        return {
            **self.__dict__,
            "_live": None,
            "_last": None,
            "_held": None,
            "_elsewhere": None,
            "_plain": None,
            "_sent_by": os.getpid(),
            "_seen": None if self._version is not None else _LazyDescription(self._dataset, self._seen),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the state. A copy in the same process keeps the description, or makes its own."""
        self.__dict__.update(state)
        if isinstance(self._seen, _LazyDescription):
            self._seen = self._seen.seen

    def __len__(self) -> int:
        """Return the Dataset's length when the source was made."""
        return self._count

    def schema(self) -> Schema:
        """Return the fields of every sample, as found by probing."""
        return dict(self._probe().schema)

    def structure(self) -> ItemStructure:
        """Return how an item is built from its fields, as found by probing."""
        self._probe()
        return self._structure

    def read(self, index: int, start: int | None = None, stop: int | None = None) -> Sample:
        """Read item `index`, flattened; `start:stop` cuts the fields named in `time`.

        Raises:
            SourceError: The item is not like the probed ones; names sample and field.
            IndexError: There is no such sample.
        """
        check_index(index, self._count)
        schema = self._probe().schema
        if (start is None and stop is None) or self._last is None or self._last[0] != index:
            sample = self._checked(self._get(index, seeded=self._freeze), index, schema)
            if start is None and stop is None:
                return sample
            self._last = (index, sample)  # the next piece of a long sample is likely to follow
        whole = self._last[1]
        return {
            name: (array[start:stop] if schema[name].time else array).copy() for name, array in whole.items()
        }

    def read_into(self, index: int, rows: Sample) -> Sample | None:
        """See `RowSource.read_into`: an item that is stored as it is goes there in one copy."""
        check_index(index, self._count)
        schema = self._probe().schema
        item = self._get(index, seeded=self._freeze)
        if self._plain is not None and self._plain.read_into(item, rows):
            return None
        return self._checked(item, index, schema)

    def locate(self, index: int) -> str:
        """Return the item of the Dataset; of one inside `torch.utils.data.Subset`, by its own index."""
        subset = getattr(sys.modules.get("torch.utils.data"), "Subset", None)
        inner: Any = self._dataset
        while subset is not None and type(inner) is subset:
            inner, index = inner.dataset, inner.indices[index]
        return f"item {index} of {qualified_name(type(inner))}"

    def runs(self) -> Sequence[range]:
        """Return ranges of at most 256 samples or about 8 MiB."""
        sizes = [field.size_bytes(1 if field.ragged else None) for field in self._probe().schema.values()]
        length = max(1, min(_RUN_SAMPLES, _RUN_BYTES // max(1, sum(sizes))))
        return even_runs(self._count, length)

    def keys(self) -> Sequence[str]:
        """Return the keys given, else the indices."""
        return list(self._keys) if self._keys is not None else [str(index) for index in range(self._count)]

    def identity(self) -> SourceIdentity:
        """Return the user's word, or what can be seen: code, files, indices and probed samples."""
        axes: dict[str, Json] = {name: list[Json](own) for name, own in self._ragged.items()}
        along_first = all(own == (0,) for own in self._ragged.values())
        settings: dict[str, Json] = {
            "time": list(self._time),
            "ragged": list[Json](axes) if along_first else axes,
        }
        if self._text.names:
            settings["text"] = self._text.to_json()
        if self._freeze:
            settings["random"] = "freeze"
        if self._version is not None:
            part = Part(name="dataset", count=self._count, digest=digest_json(self._version))
            settings["identity"] = self._version
            return SourceIdentity(kind=f"torch/{VERSION}", parts=(part,), settings=settings)
        probed = self._probe()
        seen = self._seen or describe(self._dataset)
        settings.update({"class": self._name, "code": seen.code, "held": seen.held, "folders": seen.folders})
        digest = digest_json({"probes": list[Json](probed.item_digests), "held": seen.held})
        self._say(seen.unseen)
        part = Part(name=self._name, count=self._count, files=seen.files, digest=digest)
        return SourceIdentity(kind=f"torch/{VERSION}", parts=(part,), settings=settings, sampled=True)

    def _say(self, unseen: Sequence[str]) -> None:
        """Warn of what the cache does not notice, once for each Dataset."""
        text = "; ".join(unseen)
        if text and (self._name, text) not in _said:
            _said.add((self._name, text))
            _log.warning(
                "%s: the cache is recognized by code, held values and %d probed samples, and of these only a "
                "part is looked at: %s. Name the content yourself to be sure: "
                "stoker.TorchSource(dataset, version='v1')",
                *(self._name, PROBES, text),
            )

    def check_in_child(self) -> None:
        """Read the probed samples once more, in a process of their own, as workers will.

        In another process than the one that made the source, this process reads them.

        Raises:
            SourceError: The Dataset cannot go there, or is another there; names the member or the field.
            StalledError: It is not there in time.
        """
        if self._proved:
            return  # by another split of the same Dataset
        timeout_s = self.probe_timeout_s or _ALONE_S
        here = self._probe().digests
        if self._sent_by not in (0, os.getpid()):
            there = self._read_probes(timeout_s)
        else:
            there = self._elsewhere or read_elsewhere(self, self._name, timeout_s=timeout_s)
        check_alike(here, there, self._name)
        self._proved = True

    def _read_probes(self, timeout_s: float) -> dict[int, dict[str, str] | str]:
        try:
            return self._within(timeout_s, lambda begin: dict(read_probes(self, begin)))
        finally:
            self._live = None  # what it opened may work in that thread alone

    def _within(self, timeout_s: float, probe: Callable[[Callable[[int], None]], T]) -> T:
        """Return what `probe` does in another thread. It is told what to call before it reads an item."""
        clock = ItemClock()
        return call_within(
            timeout_s,
            lambda: probe(clock.begin),
            f"probing {self._name}",
            hint="Fix what it waits for, or give it more time: source.probe_timeout_s = 300",
            clock=clock,
        )

    def probed_indices(self) -> list[int]:
        """Return the indices of probed samples, or of those to be probed first in this process."""
        return probe_indices(self._count) if self._ahead else list(self._probe().digests)

    @property
    def seconds_per_item(self) -> float:
        """Seconds that the fastest probe took; 0 before any was read."""
        return self._read_s

    def probe_again(self, index: int) -> dict[str, str]:
        """Return digests by field of a probed sample, of fields that are the same at every read."""
        changing = () if self._ahead else self._probe().changing
        return digests_of(self._item(index, seeded=self._freeze), without=changing)

    def _item(self, index: int, *, seeded: bool) -> Item:
        """Return one item of this process's copy of the Dataset.

        The copy is shallow, so data is shared. Whatever a Dataset opens on first use (files, connections)
        lands on the copy, so the original can still be sent to workers.
        """
        item = self._get(index, seeded=seeded)
        found = flatten_item(item, where=self.locate(index), text=self._text)
        if self._probed is None:
            self._narrowed.update(narrowed_fields(item))
            self._structure = structure_of(item, self._text)
        return found

    def _get(self, index: int, *, seeded: bool) -> Any:
        if self._live is None:
            self._live = copy.copy(self._dataset)
        if seeded:
            with preserve_random_state(index):
                item = self._live[index]
        else:
            item = self._live[index]
        if self._holds:
            self._held = item
        return item

    def _checked(self, item: Any, index: int, schema: Schema) -> Sample:
        if self._plain is not None and (sample := self._plain.read(item)) is not None:
            return sample
        where = self.locate(index)
        found = flatten_item(item, where=where, text=self._text)
        folded = [name for name, field in schema.items() if field.folded]
        expected = schema.keys() - {name + SHAPE_SUFFIX for name in folded}
        if found.keys() != expected:
            raise SourceError(
                f"{where} has fields {sorted(found)}, expected {sorted(expected)} as in the probed samples",
                hint="Return the same fields in every item",
            )
        for name, (array, dtype) in found.items():
            field = schema[name]
            if dtype != field.dtype or not fits_field(array.shape, field):
                raise SourceError(
                    f"{where}, field {name!r} is {dtype} {array.shape}, expected {field.dtype} "
                    f"{shape_text(field)} as in the probed samples",
                    hint=f"Fix the item{ragged_cure(name, array, dtype, field)}",
                )
        sample = {name: array for name, (array, _) in found.items()}
        if not folded:
            self._plain = self._plain or PlainItems(item, found)
            return sample
        return fold(sample, schema)

    def _look_ahead(self) -> None:
        """Read what will be probed in a second process first, where a read may stop all threads of this one.

        This applies to a Dataset that uses h5py and holds no path of an HDF5 file or a folder, or a path on
        another machine. Links inside an HDF5 file are not followed.

        h5py keeps the interpreter's lock while it waits for storage, so that no deadline in this process
        would be noticed; the second process is killed. What it finds is kept for `check_in_child`.

        Raises:
            StalledError: Storage does not answer.
        """
        if self._ahead or self.probe_timeout_s is None or not uses_module(self._dataset, "h5py"):
            return
        if estimate_pickle_bytes(self._dataset) > _AHEAD_BYTES:
            return
        with suppress(Exception):  # storage that does not answer, or objects of others: then it is read there
            if call_within(self.probe_timeout_s, self._is_on_this_machine, f"looking at {self._name}"):
                return  # its disk answers, and another process would have to import torch first
        other = copy.copy(self)
        other._ahead = True
        # What cannot go there can be read in this process all the same; `check_in_child` says it where
        # that matters.
        with suppress(SourceError):
            self._elsewhere = read_elsewhere(other, self._name, timeout_s=self.probe_timeout_s)

    def _is_on_this_machine(self) -> bool:
        """Return True if the Dataset holds the path of an HDF5 file or a folder, and no path elsewhere."""
        paths = held_paths(self._dataset)
        found = any(path.suffix.lower() in _HDF5_SUFFIXES or path.is_dir() for path in paths)
        return found and are_local(paths)

    def _probe(self) -> ProbeResult:
        if self._probed is None:
            self._look_ahead()
            with preserve_random_state():
                if self.probe_timeout_s is None:
                    probes = self._probes(lambda _: None)
                else:
                    probes = self._within(self.probe_timeout_s, self._probes)
            items, drawn, changing = probes
            self._check_text(items)
            # Captions that were probed may happen to be of one length.
            strings = [name for name in self._text.bytes_fields() if next(iter(items.values()))[name][0].ndim]
            ragged = {**self._ragged, **dict.fromkeys(strings, (0,))}
            schema = common_schema(self._name, items, time=self._time, ragged=ragged)
            if wide := sorted(self._narrowed - set(self._text.names)):
                _log.warning("%s: float64 is read as float32: %s", self._name, ", ".join(wide))
            if drawn:
                fields = ", ".join(sorted(drawn))
                _log.warning("%s: random='freeze': one random draw is stored of %s", self._name, fields)
            digests = {index: digests_of(item, without=tuple(changing)) for index, item in items.items()}
            self._probed = ProbeResult(schema=schema, digests=digests, changing=tuple(sorted(changing)))
            known = not self._text.names and not any(field.ragged for field in schema.values())
            self._holds = known and sum(field.size_bytes() for field in schema.values()) <= _HELD_BYTES
        return self._probed

    def _probes(self, begin: Callable[[int], None]) -> tuple[dict[int, Item], set[str], set[str]]:
        """Return some items by index, each read again, and the fields that were another then."""
        prober = DatasetProber(
            self._dataset,
            self._name,
            lambda index, seeded: self._item(index, seeded=seeded),
            freeze=self._freeze,
        )
        try:
            found = prober.items(self._count, begin)
            self._read_s = prober.read_s
            return found
        finally:
            self._live = None  # what it opened may work in this thread alone

    def _check_text(self, items: Mapping[int, Item]) -> None:
        fields = {name for item in items.values() for name in item}
        if (unknown := self._text.missing(fields)) is not None:
            raise ConfigError.of_all([missing_text(self._name, unknown, sorted(fields))])
