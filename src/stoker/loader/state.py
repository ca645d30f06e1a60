"""A loader's state: a few numbers that say which example comes next.

The state holds at another tier, another number of readers and another world size, because the order is a pure
function of what it contains. Anything else that decides an example must be the same when it is loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

import xxhash

from stoker.errors import StaleStateError
from stoker.loader.transform import names_of
from stoker.schema import Json

if TYPE_CHECKING:
    from stoker.loader.engine import Design
    from stoker.loader.order import Order

VERSION = 1


def digest_of(*arrays: Any) -> str:
    """16 hex digits over the bytes of arrays."""
    digest = xxhash.xxh3_64()
    for array in arrays:
        digest.update(memoryview(array).cast("B"))
    return digest.hexdigest()


def dump(design: Design, at: tuple[int, int]) -> dict[str, Json]:
    """The state at epoch and position `at`, as plain JSON values: what the meaning of a position depends on.

    `generation` is kept for the reader of a state, what counts is `records`. `world` matters in sequential
    order alone, where every rank has a piece of its own. Examples are the same whatever the `transforms` are,
    so others are no reason to refuse a state.
    """
    order, cache, options = design.order, design.cache, design.options
    transforms: list[Json] = [*names_of(options.transforms)]
    return {
        "version": VERSION,
        "epoch": at[0],
        "position": at[1],
        "seed": order.seed,
        "order": str(order.kind),
        "global_batch": order.global_batch,
        "examples": _examples(order),
        "fingerprint": cache.fingerprint,
        "generation": cache.index.generation,
        "records": design.records_digest,
        "windows": None if options.windows is None else options.windows.text(),
        "world": design.share.world,
        **({} if design.beside is None else {"beside": design.beside}),
        **({NOTED: transforms} if transforms else {}),
    }


def _examples(order: Order) -> int:
    """Examples of an epoch; in static order those of all parts, also what is cut off."""
    return order.count if order.draws is None else order.positions


def is_beside(state: object) -> bool:
    """Whether a state was saved in a pass that began before its cache was complete.

    Raises:
        StaleStateError: It is no state.
    """
    return checked(state, "loader", ()).get("beside") is not None


def restore(state: object, design: Design, *, allow_rebatch: bool) -> tuple[int, int]:
    """Epoch and position of a saved state, after a check that they mean the same here.

    Raises:
        StaleStateError: Not a state, or something that decides examples differs; the message names it.
    """
    here = dump(design, (0, 0))
    there = checked(state, "loader", here.keys() - {NOTED})
    at = place_in(there, "example")
    ignored = {"version", "epoch", "position", "generation", NOTED}
    if here["order"] != "sequential" or not at[1]:
        ignored.add("world")
    if allow_rebatch and design.order.kind.kind not in ("static", "bucket"):
        ignored.add("global_batch")
    differing = [name for name in here if name not in ignored and there[name] != here[name]]
    if differing:
        hint = (
            "load_state_dict(state, allow_rebatch=True) continues from the same example with other batches"
            if differing == ["global_batch"]
            else "Make the loader as it was, or start the epoch again"
        )
        different = "; ".join(f"{name} {there[name]!r} there, {here[name]!r} here" for name in differing)
        raise StaleStateError(f"the saved state belongs to another loader: {different}. {hint}")
    check_within(at, _examples(design.order), "example")
    note_transforms(there, here)
    return at


NOTED = "transforms"
"""The entry that may differ, with a word on it; it is there where there are some."""


def checked(state: object, of: str, entries: Iterable[str]) -> Mapping[str, Any]:
    """A saved state, if it is one: with these entries, and of this version where there are any.

    Args:
        state: What was given as one.
        of: What it is to be the state of, for messages.
        entries: Names that it must have.

    Raises:
        StaleStateError: It is none.
    """
    if not isinstance(state, Mapping):
        raise StaleStateError(f"a {of}'s state is a dict, as state_dict() gives it, not {state!r}")
    there = cast("Mapping[str, Any]", state)
    lacking = sorted({*entries} - there.keys())
    if entries and (lacking or there.get("version") != VERSION):
        why = ", ".join(lacking) or f"version {there.get('version')!r}"
        raise StaleStateError(
            f"this is not the state of a {of} of version {VERSION} ({why}). Start the epoch again"
        )
    return there


def place_in(state: Mapping[str, Any], unit: str) -> tuple[int, int]:
    """Epoch and position as a state has them.

    Raises:
        StaleStateError: They are no whole numbers.
    """
    epoch, position = state["epoch"], state["position"]
    if not isinstance(epoch, int) or not isinstance(position, int):
        raise StaleStateError(
            f"the saved state is at epoch {epoch!r}, {unit} {position!r}. "
            "Expected whole numbers; start the epoch again"
        )
    return epoch, position


def check_within(at: tuple[int, int], most: int, unit: str) -> None:
    """Refuse a place that no epoch has.

    Raises:
        StaleStateError: As said.
    """
    if at[0] < 0 or not 0 <= at[1] <= most:
        raise StaleStateError(
            f"the saved state is at epoch {at[0]}, {unit} {at[1]}, but an epoch has {most} {unit}s. "
            "Start the epoch again"
        )


def note_transforms(there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Say so where batches go on with other transforms than they were begun with."""
    was, now = there.get(NOTED, []), here.get(NOTED, [])
    if was != now:
        logging.getLogger("stoker").warning(
            "the saved state is of batches with transforms=%s, this loader has %s: the same examples follow, "
            "made into batches in the new way",
            *(", ".join(map(str, names)) or "none" for names in (was, now)),
        )
