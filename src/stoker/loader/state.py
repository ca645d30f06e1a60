"""Save and restore a loader's state: a few numbers that say which example comes next.

The state holds at another tier, another number of workers and another world size, because the order is a pure
function of what it contains. Anything else that decides an example must be the same when it is loaded.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, cast

from stoker.errors import ConfigError, StaleStateError
from stoker.loader.choose import describe_choices
from stoker.loader.options import whole_numbers

if TYPE_CHECKING:
    from stoker.loader.design import Design
    from stoker.loader.order import Order
    from stoker.loader.transform import Transform
    from stoker.schema import Json

VERSION = 1


def dump(design: Design, at: tuple[int, int], *, filled: bool = False) -> dict[str, Json]:
    """Return the state at epoch and position `at` as JSON values: all that the meaning of a position needs.

    `generation` is kept for people who read a state; what counts is `records`. `world_size` matters
    in sequential order alone, where every rank has its own piece. Transforms do not change which examples
    come, so other `transforms` do not refuse a state.
    """
    order, cache, options = design.order, design.cache, design.options
    transforms: list[Json] = [*describe_transforms(options.transforms)]
    return {
        "version": VERSION,
        "epoch": at[0],
        "position": at[1],
        "seed": order.seed,
        "order": str(order.kind),
        "global_batch": order.global_batch if order.batches is None else order.batches.global_batch,
        **({} if order.batches is None else {BATCHES: order.batches.text}),
        "examples": _examples(order),
        "fingerprint": cache.fingerprint,
        "generation": cache.index.generation,
        "records": design.records_digest,
        "windows": None if options.windows is None else options.windows.text(),
        "world": design.share.world_size,
        **({"zipped": [*options.zipped]} if options.zipped else {}),
        **({} if design.fill is None else {"beside": design.fill.kind}),
        **({FILLED: True} if filled and design.fill is not None else {}),
        **({NOTED: transforms} if transforms else {}),
        **({} if (chosen := describe_choices(options.choose)) is None else {CHOSEN: chosen}),
    }


def _examples(order: Order) -> int:
    """Return the examples of an epoch; in static order those of all parts, also what is cut off."""
    return order.count if order.draws is None else order.positions


def was_filling(state: object) -> bool:
    """Return True if a state is of an epoch that was served while its cache was being filled.

    Raises:
        StaleStateError: It is no state.
    """
    there = check_state(state, "loader", ())
    return there.get("beside") is not None and FILLED not in there


def restore(state: object, design: Design, *, allow_rebatch: bool) -> tuple[int, int]:
    """Return the epoch and position of a saved state, after a check that they mean the same here.

    Raises:
        StaleStateError: Not a state, or something that decides examples differs; the message names it.
    """
    here = {CHOSEN: None, **dump(design, (0, 0))}
    there = {CHOSEN: None, **check_state(state, "loader", here.keys() - {NOTED, BATCHES, CHOSEN})}
    at = place_in(there, "example")
    ignored = {"version", "epoch", "position", "generation", NOTED}
    if FILLED in there and not at[1]:  # between two epochs; counted with samples that may be quarantined now
        ignored |= {"records", "examples"}
    batches = design.order.batches
    if not at[1] or (
        here["order"] != "sequential"
        if batches is None
        else there.get(BATCHES) == batches.text and batches.resumes(*at, int(there["world"] or 0))
    ):
        ignored.add("world")
    # Amid an epoch, what is behind a position in these orders depends on the size of a step.
    may_rebatch = not at[1] or (batches is None and design.order.kind.kind not in ("static", "bucket"))
    if allow_rebatch and may_rebatch:
        ignored.add("global_batch")
    names = [*here, *({BATCHES} & there.keys() - here.keys())]
    differing = [name for name in names if name not in ignored and there.get(name) != here.get(name)]
    if differing:
        hint = "Make the loader as it was, or start the epoch again"
        if differing == ["global_batch"] and may_rebatch:
            hint = (
                "load_state_dict(state, allow_rebatch=True) continues from the same example, batches differ"
            )
        elif {*differing} <= {"global_batch", "world"} and there["world"]:
            hint = (
                "In the middle of an epoch this order takes ranks and batch_size as they were: "
                f"{_ranks_of(there)}. Or start the epoch again: loader.set_epoch({at[0]})"
            )
        different = "; ".join(
            f"{name} {there.get(name)!r} there, {here.get(name)!r} here" for name in differing
        )
        raise StaleStateError(f"the saved state belongs to another loader: {different}", hint=hint)
    check_within(at, _examples(design.order), "example")
    note_transforms(there, here)
    return at


def _ranks_of(state: Mapping[str, Any]) -> str:
    """Return the number of ranks and their batch size, as a state has them."""
    world, step = state["world"], state["global_batch"]
    ranks = "1 rank" if world == 1 else f"{world} ranks"
    return f"{ranks} of batch_size={step // world}" if step else ranks


BATCHES = "batches"
"""The entry that says by what examples are put into batches, where these differ in size."""
FILLED = "filled"
"""The entry that says: this place is after the epoch in which the cache was filled."""
NOTED = "transforms"
"""The entry that may differ, with a word on it; it is there where there are some."""
CHOSEN = "choose"
"""The entry that says what part of each record is read; it is there where not all is."""


def check_state(state: object, of: str, entries: Iterable[str]) -> Mapping[str, Any]:
    """Return a saved state that has these entries, and if there are any, this version.

    Args:
        state: What was given as one.
        of: What it is to be the state of, for messages.
        entries: Names that it must have.

    Raises:
        StaleStateError: It is not one.
    """
    if not isinstance(state, Mapping):
        raise StaleStateError(f"a {of}'s state is a dict, as state_dict() gives it, not {state!r}")
    there = cast("Mapping[str, Any]", state)
    lacking = sorted({*entries} - there.keys())
    if entries and (lacking or there.get("version") != VERSION):
        why = f"without {', '.join(lacking)}" if lacking else f"its version is {there.get('version')!r}"
        raise StaleStateError(
            f"this is not the state of a {of} of version {VERSION} ({why})", hint="Start the epoch again"
        )
    return there


def place_in(state: Mapping[str, Any], unit: str) -> tuple[int, int]:
    """Return the epoch and position as a state has them.

    Raises:
        StaleStateError: They are no whole numbers.
    """
    epoch, position = state["epoch"], state["position"]
    if not isinstance(epoch, int) or not isinstance(position, int):
        raise StaleStateError(
            f"the saved state is at epoch {epoch!r}, {unit} {position!r}",
            hint="Expected whole numbers; start the epoch again",
        )
    return epoch, position


def check_within(at: tuple[int, int], most: int, unit: str) -> None:
    """Refuse a place that no epoch has.

    Raises:
        StaleStateError: As said.
    """
    if at[0] < 0 or not 0 <= at[1] <= most:
        raise StaleStateError(
            f"the saved state is at epoch {at[0]}, {unit} {at[1]}, but an epoch has {most} {unit}s",
            hint="Start the epoch again",
        )


def note_transforms(there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Say so where batches continue with other transforms than they began with."""
    was, now = there.get(NOTED, []), here.get(NOTED, [])
    if was != now:
        logging.getLogger("stoker").warning(
            "the saved state is of batches with transforms=%s, this loader has %s: the same examples follow, "
            "made into batches in the new way",
            *(", ".join(map(str, names)) or "none" for names in (was, now)),
        )


# ----------------------------------------------------------------------------------------------------------
# A mixture's state: a few numbers that say which step comes next, and what they depend on.


_MAY_DIFFER = ("version", "epoch", "position", "generation", "fingerprint", NOTED)
"""Entries of a loader's state that are no terms of it here: fingerprints are compared by cache."""


def loaders_in(state: object) -> Mapping[str, dict[str, Any]]:
    """Return the states of its loaders at their begin, by name, where a state has them."""
    found = check_state(state, "mixture", ()).get("loaders")
    return cast("dict[str, dict[str, Any]]", found) if isinstance(found, dict) else {}


def restore_mixture(state: object, here: Mapping[str, Any], steps: int) -> tuple[int, int]:
    """Return the epoch and step of a saved state, after a check that they mean the same here.

    Args:
        here: The state of this mixture, wherever it is.
        steps: Of an epoch.

    Raises:
        StaleStateError: Not a state of a mixture, or something that decides examples differs; names it.
    """
    there = check_state(state, "mixture", here.keys() - {"beside"})
    at = place_in(there, "step")
    saved, caches = (dict(cast("list[list[str]]", one["caches"])) for one in (there, here))
    different = _caches_that_differ(saved, caches)
    if not different:
        different = _loaders_that_differ(there["loaders"], here["loaders"], at[1])
        different += [
            f"{name} {there[name]!r} there, {here[name]!r} here"
            for name in ("mode", "seed", "counts")
            if there[name] != here[name]
        ]
    if different:
        raise StaleStateError(
            f"the saved state belongs to another mixture: {'; '.join(different)}",
            hint="Make the mixture as it was, or start the epoch again",
        )
    check_within(at, steps, "step")
    for name, loader in here["loaders"].items():
        note_transforms(there["loaders"][name], loader)
    return at


def _caches_that_differ(saved: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    if list(saved) != list(here):
        return [f"caches {', '.join(saved)} there, {', '.join(here)} here"]
    return [
        f"cache {name!r} has fingerprint {saved[name]} there, {fingerprint} here"
        for name, fingerprint in here.items()
        if saved[name] != fingerprint
    ]


def _loaders_that_differ(there: Mapping[str, Any], here: Mapping[str, Any], position: int) -> list[str]:
    different: list[str] = []
    for name, terms in here.items():
        saved = there.get(name, {})
        may_differ = [*_MAY_DIFFER, *(["world"] if terms["order"] != "sequential" or not position else [])]
        different += [
            f"{name!r} has {key} {saved.get(key)!r} there, {value!r} here"
            for key, value in {CHOSEN: None, **terms}.items()
            if key not in may_differ and saved.get(key) != value
        ]
    return different


# ----------------------------------------------------------------------------------------------------------
# Where a loader is in its epochs, and what trainers tell that to.


class EpochPlace:
    """Epoch and position of the next batch: what a pass moves, `set_epoch` sets and a state restores."""

    def __init__(self) -> None:
        self.at = (0, 0)
        self._restored = False
        """The next pass begins amid its epoch."""

    def set_epoch(self, epoch: object) -> None:
        """Have the next pass serve `epoch`; a restored position in this very epoch is kept.

        Raises:
            ConfigError: It is no number from 0 on.
        """
        (number,) = whole_numbers(epoch=epoch)
        if number < 0:
            raise ConfigError(f"the epoch is {number}", hint="Expected 0 or more")
        if number != self.at[0]:
            self.at, self._restored = (number, 0), False

    def restore(self, at: tuple[int, int]) -> None:
        """Have the next pass resume at `at`."""
        self.at, self._restored = at, True

    @property
    def amid(self) -> bool:
        """True if the next pass resumes within an epoch, where a restored state was taken."""
        return self._restored and self.at[1] > 0

    def rewind(self) -> None:
        """Begin an epoch again whose pass was abandoned: called when an iterator is asked for."""
        if not self._restored:
            self.at = (self.at[0], 0)

    def begin(self) -> tuple[int, int]:
        """Return where a pass begins whose first batch is asked for."""
        self._restored = False
        return self.at

    def end(self, epoch: int, last: tuple[int, int]) -> None:
        """Note that a pass over `epoch` has no batch after `last`, even if the epoch is longer."""
        if self.at == last and last[0] == epoch:
            self.at = (epoch + 1, 0)


class EpochIterable(ABC):
    """Epochs that can be set, shared by loaders and mixtures. Examples cannot be indexed."""

    _place: EpochPlace

    @property
    @abstractmethod
    def batch_size(self) -> int:
        """Examples in a full batch of this rank."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the batches of this rank in an epoch."""

    @property
    def sampler(self) -> EpochSetter:
        """The object on which trainers call `set_epoch`."""
        return EpochSetter(self)

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, from 0."""
        return self._place.at[0]

    @property
    def position(self) -> tuple[int, int]:
        """Epoch and example at which it resumes after the batches handed out so far; see `state_dict`."""
        return self._place.at

    def set_epoch(self, epoch: int) -> None:
        """Have the next pass serve `epoch`; a restored position in this very epoch is kept.

        Args:
            epoch: From 0. Trainers call this; without it each finished pass is followed by the next epoch.
        """
        self._place.set_epoch(epoch)

    def __getitem__(self, _: object) -> NoReturn:
        """Refused: batches come in the order of an epoch."""
        raise ConfigError(  # for `loader[0]`, which is also what a DataLoader around a Loader asks for
            "a Loader has no items by number: it takes the place of a DataLoader, and gives whole batches",
            hint="Iterate over the Loader itself, as `for batch in loader`; one record by its sample index "
            "is `loader.dataset[number]`",
        )


class EpochSetter:
    """Stands where a `DataLoader` has its sampler."""

    def __init__(self, loader: EpochIterable) -> None:
        self._loader = loader

    def __len__(self) -> int:
        """Return the batches of this rank in an epoch, times the batch size at most."""
        return len(self._loader) * self._loader.batch_size

    def set_epoch(self, epoch: int) -> None:
        """As `Loader.set_epoch`."""
        self._loader.set_epoch(epoch)


def describe_transforms(transforms: Sequence[Transform]) -> tuple[str, ...]:
    """Return the names of transforms for a state, with the settings of those that are dataclasses."""
    return tuple(_name_of(transform) for transform in transforms)


def _name_of(value: object) -> str:
    if is_dataclass(value) and not isinstance(value, type):
        settings = (f"{field.name}={_name_of(getattr(value, field.name))}" for field in fields(value))
        return f"{type(value).__qualname__}({', '.join(settings)})"
    if isinstance(value, partial):
        return _name_of(value.func)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_name_of, cast('Sequence[object]', value)))}]"
    if isinstance(value, Mapping):
        return (
            f"{{{', '.join(f'{k}: {_name_of(v)}' for k, v in cast('Mapping[Any, object]', value).items())}}}"
        )
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    return str(getattr(value, "__qualname__", type(value).__qualname__))
