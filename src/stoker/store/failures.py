"""Quarantine: samples that could not be encoded, each with stage and error, one JSON line at a time.

Each writer appends to a file of its own and syncs what it adds. A line carries a checksum, so that a torn or
damaged one is ignored (the sample is then missing, and tried again) and never read as another sample's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

import xxhash

from stoker.errors import FormatError, RecordError
from stoker.runtime.files import append_file
from stoker.runtime.jsonio import canonical_json, is_count, read_strict
from stoker.store.format import is_failures_name
from stoker.units import MIB

if TYPE_CHECKING:
    from stoker.store.recipe import Recipe
    from stoker.store.storage import Storage

Kind = Literal["sample", "transient"]
MAX_FILE_BYTES = 256 * MIB
MAX_ERROR_CHARS = 2000
RUNS = 2
"""Runs in which a transient failure must have been met before it is taken as the sample's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Reason for which one sample is not in a cache."""

    number: int
    """Sample index."""
    stage: str
    """Where it failed: `open`, `read`, `decode`, `check`, `encode`, `write`."""
    error: str
    """Class and message."""
    attempts: int
    """Tries in the run that gave up."""
    kind: Kind
    """`sample`: its own fault, tried again only when forced. `transient`: a hang, a signal, EIO or lack of
    memory; the next precompute tries once more."""
    runs: int = 1
    """Runs that gave it up; set by the store."""

    @property
    def sticky(self) -> bool:
        """True if another run leaves it alone."""
        return self.kind == "sample" or self.runs >= RUNS


def append_failures(storage: Storage, token: str, failures: Sequence[Failure], recipe: Recipe) -> None:
    """Add a line each to `failures-<token>.jsonl` and make them durable at once.

    Raises:
        RecordError: There is no such sample, or an entry is malformed; then nothing is added.
    """
    data = "".join(_line(failure, recipe) for failure in failures).encode()
    path = storage.path / f"failures-{token}.jsonl"
    append_file(path, data)
    storage.share(path.name)


def _line(failure: Failure, recipe: Recipe) -> str:
    part, local = recipe.part_of(failure.number)
    if failure.kind not in get_args(Kind) or not is_count(failure.attempts):
        raise RecordError(f"not a failure that can be kept: {failure}")
    entry = {
        "part": recipe.parts[part].key,
        "number": local,
        "stage": failure.stage,
        "error": failure.error[:MAX_ERROR_CHARS],
        "attempts": failure.attempts,
        "kind": failure.kind,
    }
    return canonical_json({**entry, "check": _check(entry)}) + "\n"


def read_failures(storage: Storage, recipe: Recipe) -> dict[int, Failure]:
    """Return all failures of parts of `recipe`, by global number, sorted.

    Of several for one sample the last line of a file wins; between files `sample` beats `transient`, then
    the one with more attempts. `runs` counts the files.
    """
    offsets = {part.key: part for part in recipe.parts}
    found: dict[int, Failure] = {}
    for name in storage.list():
        if not is_failures_name(name):
            continue
        for (key, local), failure in _read_file(storage, name).items():
            part = offsets.get(key)
            if part is None or local >= part.count:
                continue
            number = part.offset + local
            found[number] = _stronger(found.get(number), replace(failure, number=number))
    return dict(sorted(found.items()))


def _stronger(a: Failure | None, b: Failure) -> Failure:
    if a is None:
        return b
    winner = max(a, b, key=lambda failure: (failure.kind == "sample", failure.attempts))
    return replace(winner, runs=a.runs + 1)


def _read_file(storage: Storage, name: str) -> dict[tuple[str, int], Failure]:
    failures: dict[tuple[str, int], Failure] = {}
    try:
        lines = storage.read(name, limit_bytes=MAX_FILE_BYTES).split(b"\n")
    except (FormatError, FileNotFoundError):
        return failures
    for line in lines:
        try:
            entry = read_strict(line, where=name)
            if entry.pop("check", None) == _check(entry):
                failure = failure_from_json(entry)
                failures[str(entry.get("part")), failure.number] = failure
        except (FormatError, TypeError):
            continue
    return failures


def failure_from_json(entry: Mapping[str, Any]) -> Failure:
    """Read one entry; its number is taken as it is.

    Raises:
        TypeError: An entry is missing or of another type.
    """
    number, attempts, kind = entry.get("number"), entry.get("attempts"), str(entry.get("kind"))
    runs = entry.get("runs", 1)
    kinds: dict[Any, Kind] = {"sample": "sample", "transient": "transient"}
    if not (is_count(number) and is_count(attempts) and is_count(runs) and kind in kinds):
        raise TypeError(f"not an entry of the quarantine: {dict(entry)!r:.200}")
    return Failure(
        number=number,
        stage=str(entry.get("stage")),
        error=str(entry.get("error")),
        attempts=attempts,
        kind=kinds[kind],
        runs=runs,
    )


def _check(entry: Mapping[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(canonical_json(dict(entry)).encode())
