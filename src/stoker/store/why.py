"""Why two recipes have different fingerprints, entry by entry."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from stoker.schema import Json
from stoker.store.recipe import Recipe
from stoker.store.strict_json import as_object

NOTES: Mapping[str, str] = {
    "format": "another format of the cache",
    "encoder": "another encoder",
    "encoder.class": "another encoder",
    "encoder.weights": "the encoder's weights differ",
    "encoder.version": "the encoder's code has another version",
    "encoder.config": "a setting of the encoder",
    "dtype": "stored with another dtype",
    "encoded": "the encoder's output has another dtype",
    "group": "samples are encoded in other groups",
    "schema": "records have another shape",
    "source.kind": "another kind of source, or another version of its code",
    "source.settings": "a setting of the source",
    "source.sampled": "content was read in full on one side and sampled on the other",
}
PART_NOTES: Mapping[str, str] = {
    "digest": "the bytes of the data differ",
    "bytes": "the size of the data differs",
    "count": "the number of samples differs",
    "values": "a value parsed from the name or an attribute differs",
    "selection": "other samples were selected (split, limit)",
    "sampled": "digested in full on one side and sampled on the other",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One entry that differs."""

    entry: str
    """Where, e.g. `"encoder.weights"` or `"source.parts[1].digest"` (its index in the second recipe)."""
    a: Json
    """Value in the first recipe; None where it is absent."""
    b: Json
    """Value in the second."""
    note: str
    """What it means, in words."""


def diff_recipes(a: Recipe, b: Recipe) -> list[Difference]:
    """All entries in which two recipes differ; empty when their fingerprints are equal.

    Parts are compared by name, so that one added file is one difference.
    """
    found: list[Difference] = []
    left, right = dict(a.entries), dict(b.entries)
    left_source, right_source = dict(left.pop("source")), dict(right.pop("source"))
    found += _diff_parts(left_source.pop("parts"), right_source.pop("parts"))
    found += _noted(_diff("source", left_source, right_source))
    found += _noted(_diff("", left, right))
    # `dtype.<field>` has said it already.
    said = {f"schema.{d.entry.removeprefix('dtype.')}.dtype" for d in found if d.entry.startswith("dtype.")}
    return [d for d in found if d.entry not in said]


def _noted(pairs: Iterator[tuple[str, Json, Json]]) -> list[Difference]:
    return [Difference(entry=entry, a=a, b=b, note=_note(entry)) for entry, a, b in pairs]


def _note(entry: str) -> str:
    while entry not in NOTES and "." in entry:
        entry = entry.rpartition(".")[0]
    return NOTES.get(entry, "")


def _diff(path: str, a: Any, b: Any) -> Iterator[tuple[str, Json, Json]]:
    left, right = as_object(a), as_object(b)
    if left is not None and right is not None:
        for key in sorted(left.keys() | right.keys()):
            yield from _diff(f"{path}.{key}" if path else key, left.get(key), right.get(key))
    elif a != b or type(a) is not type(b):
        yield path, a, b


def _diff_parts(a: list[Any], b: list[Any]) -> list[Difference]:
    found: list[Difference] = []
    left = {part["name"]: part for part in a}
    right = {part["name"]: (i, part) for i, part in enumerate(b)}
    for i, part in enumerate(a):
        if part["name"] not in right:
            found.append(Difference(entry=f"source.parts[{i}]", a=part, b=None, note="only in the first"))
    for name, (i, part) in right.items():
        if name not in left:
            found.append(Difference(entry=f"source.parts[{i}]", a=None, b=part, note="only in the second"))
            continue
        for entry, x, y in _diff("", left[name], part):
            note = PART_NOTES.get(entry.partition(".")[0], "")
            found.append(Difference(entry=f"source.parts[{i}].{entry}", a=x, b=y, note=f"{name}: {note}"))
    orders = [name for name in left if name in right], [name for name in right if name in left]
    if orders[0] != orders[1]:
        found.append(
            Difference(entry="source.parts", a=orders[0], b=orders[1], note="the same parts in another order")
        )
    return found
