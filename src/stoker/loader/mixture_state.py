"""A mixture's state: a few numbers that say which step comes next, and what they depend on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from stoker.errors import StaleStateError
from stoker.loader.state import NOTED, VERSION, check_within, checked, note_transforms, place_in
from stoker.schema import Json

_FREE = ("version", "epoch", "position", "generation", "fingerprint", NOTED)
"""Entries of a loader's state that are no terms of it here: fingerprints are compared by cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What the meaning of a step depends on."""

    mode: str
    seed: int
    counts: tuple[int, ...]
    """Steps of each cache in an epoch; empty in sequential order, where each rank has its own."""
    caches: Mapping[str, str]
    """Fingerprint of each cache by name, in order."""
    loaders: Mapping[str, Mapping[str, Any]]
    """State of each loader at its begin."""
    steps: int
    """Steps of an epoch; a position is one of them."""
    beside: int | None = None
    """The epoch that was served beside the filling of caches."""


def dump(terms: Terms, at: tuple[int, int]) -> dict[str, Json]:
    """The state at epoch and step `at`, as plain JSON values."""
    return {
        "version": VERSION,
        "epoch": at[0],
        "position": at[1],
        "mode": terms.mode,
        "seed": terms.seed,
        "counts": list(terms.counts),
        "caches": [[name, fingerprint] for name, fingerprint in terms.caches.items()],
        "loaders": {name: dict(state) for name, state in terms.loaders.items()},
        **({} if terms.beside is None else {"beside": terms.beside}),
    }


def loaders_in(state: object) -> Mapping[str, dict[str, Any]]:
    """The states of its loaders at their begin, by name, where a state has them."""
    found = checked(state, "mixture", ()).get("loaders")
    return cast("dict[str, dict[str, Any]]", found) if isinstance(found, dict) else {}


def restore(state: object, terms: Terms) -> tuple[int, int]:
    """Epoch and step of a saved state, after a check that they mean the same here.

    Raises:
        StaleStateError: Not a state of a mixture, or something that decides examples differs; names it.
    """
    here = dump(terms, (0, 0))
    there = checked(state, "mixture", here.keys() - {"beside"})
    at = place_in(there, "step")
    different = _caches_that_differ(cast("list[list[str]]", there["caches"]), terms.caches)
    if not different:
        different = _loaders_that_differ(there["loaders"], terms.loaders, at[1])
        different += [
            f"{name} {there[name]!r} there, {here[name]!r} here"
            for name in ("mode", "seed", "counts")
            if there[name] != here[name]
        ]
    if different:
        raise StaleStateError(
            f"the saved state belongs to another mixture: {'; '.join(different)}. "
            "Make the mixture as it was, or start the epoch again"
        )
    check_within(at, terms.steps, "step")
    for name, loader in terms.loaders.items():
        note_transforms(there["loaders"][name], loader)
    return at


def _caches_that_differ(there: list[list[str]], here: Mapping[str, str]) -> list[str]:
    saved = {pair[0]: pair[1] for pair in there}
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
        free = [*_FREE, *(["world"] if terms["order"] != "sequential" or not position else [])]
        different += [
            f"{name!r} has {key} {saved.get(key)!r} there, {value!r} here"
            for key, value in terms.items()
            if key not in free and saved.get(key) != value
        ]
    return different
