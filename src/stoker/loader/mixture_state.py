"""A mixture's state: a few numbers that say which step comes next, and what they depend on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from stoker.errors import StaleStateError
from stoker.loader.state import NOTED, check_within, checked, note_transforms, place_in

_FREE = ("version", "epoch", "position", "generation", "fingerprint", NOTED)
"""Entries of a loader's state that are no terms of it here: fingerprints are compared by cache."""


def loaders_in(state: object) -> Mapping[str, dict[str, Any]]:
    """The states of its loaders at their begin, by name, where a state has them."""
    found = checked(state, "mixture", ()).get("loaders")
    return cast("dict[str, dict[str, Any]]", found) if isinstance(found, dict) else {}


def restore(state: object, here: Mapping[str, Any], steps: int) -> tuple[int, int]:
    """Epoch and step of a saved state, after a check that they mean the same here.

    Args:
        here: The state of this mixture, wherever it is.
        steps: Of an epoch.

    Raises:
        StaleStateError: Not a state of a mixture, or something that decides examples differs; names it.
    """
    there = checked(state, "mixture", here.keys() - {"beside"})
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
            f"the saved state belongs to another mixture: {'; '.join(different)}. "
            "Make the mixture as it was, or start the epoch again"
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
        free = [*_FREE, *(["world"] if terms["order"] != "sequential" or not position else [])]
        different += [
            f"{name!r} has {key} {saved.get(key)!r} there, {value!r} here"
            for key, value in terms.items()
            if key not in free and saved.get(key) != value
        ]
    return different
