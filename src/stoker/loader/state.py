"""A loader's state: a few numbers that say which example comes next.

The state holds at another tier, another number of readers and another world size, because the order is a pure
function of what it contains. Anything else that decides an example must be the same when it is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import xxhash

from stoker.errors import StaleStateError
from stoker.schema import Json

VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What the meaning of a position depends on."""

    seed: int
    order: str
    global_batch: int
    """Examples per step over all ranks."""
    examples: int
    """Examples of an epoch."""
    fingerprint: str
    generation: int
    """Of the cache's index; kept for the reader of a state, what counts is `records`."""
    records: str
    """Digest of the sample numbers served, in order, and of their weights."""
    windows: str | None
    world: int
    """Ranks; matters in sequential order alone, where every rank has a piece of its own."""
    beside: str | None = None
    """How a pass beside the filling of its cache is ordered; None: a pass over a complete cache."""


def digest_of(*arrays: Any) -> str:
    """16 hex digits over the bytes of arrays."""
    digest = xxhash.xxh3_64()
    for array in arrays:
        digest.update(memoryview(array).cast("B"))
    return digest.hexdigest()


def dump(terms: Terms, at: tuple[int, int]) -> dict[str, Json]:
    """The state at epoch and position `at`, as plain JSON values."""
    return {
        "version": VERSION,
        "epoch": at[0],
        "position": at[1],
        "seed": terms.seed,
        "order": terms.order,
        "global_batch": terms.global_batch,
        "examples": terms.examples,
        "fingerprint": terms.fingerprint,
        "generation": terms.generation,
        "records": terms.records,
        "windows": terms.windows,
        "world": terms.world,
        **({} if terms.beside is None else {"beside": terms.beside}),
    }


def is_beside(state: Mapping[str, Any]) -> bool:
    """Whether a state was saved in a pass that began before its cache was complete.

    Raises:
        StaleStateError: It is no state.
    """
    if not isinstance(cast(object, state), Mapping):
        raise StaleStateError(f"a loader's state is a dict, as state_dict() gives it, not {state!r}")
    return state.get("beside") is not None


def restore(state: Mapping[str, Any], terms: Terms, *, allow_rebatch: bool) -> tuple[int, int]:
    """Epoch and position of a saved state, after a check that they mean the same here.

    Raises:
        StaleStateError: Not a state, or something that decides examples differs; the message names it.
    """
    here = dump(terms, (0, 0))
    if state.get("version") != VERSION or not here.keys() <= state.keys():
        lacking = ", ".join(sorted(here.keys() - state.keys())) or f"version {state.get('version')!r}"
        raise StaleStateError(
            f"this is not the state of a loader of version {VERSION} ({lacking}). Start the epoch anew"
        )
    if not all(isinstance(state[name], int) for name in ("epoch", "position")):
        raise StaleStateError(
            f"the saved state is at epoch {state['epoch']!r}, example {state['position']!r}. "
            "Expected whole numbers; start the epoch anew"
        )
    position = int(state["position"])
    ignored = {"version", "epoch", "position", "generation"}
    if terms.order != "sequential" or not position:
        ignored.add("world")
    if allow_rebatch and not terms.order.startswith("static"):
        ignored.add("global_batch")
    different = [f"{name} {state[name]!r} there, {here[name]!r} here" for name in here if name not in ignored
                 and state[name] != here[name]]  # fmt: skip
    if different:
        hint = (
            ". allow_rebatch=True goes on from the same example with other batches"
            if [name for name in here if name not in ignored and state[name] != here[name]]
            == ["global_batch"]
            else ". Make the loader as it was, or start the epoch anew"
        )
        raise StaleStateError(f"the saved state belongs to another loader: {'; '.join(different)}{hint}")
    epoch = int(state["epoch"])
    if epoch < 0 or not 0 <= position <= terms.examples:
        raise StaleStateError(
            f"the saved state is at epoch {epoch}, example {position}, but an epoch has {terms.examples} "
            "examples. Start the epoch anew"
        )
    return epoch, position
