"""Checks before and after a run: disk space and memory, failures and stored values."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from stoker.encoders.protocol import EncodeBatchSize
from stoker.errors import IncompleteError, RecordError, ResourceError, arg
from stoker.plan.resources import Resources
from stoker.precompute.arena import PIECE_BYTES, slot_size
from stoker.precompute.queue import precompute_argument, retry_hint
from stoker.precompute.settings import PrecomputeSettings
from stoker.runtime.disk import FreeSpace
from stoker.schema import Schema, columns_of
from stoker.store import Cache, Failure, Folder
from stoker.store.recipe import Recipe
from stoker.store.storage import mirror_limit
from stoker.store.write import OPEN_PARTS
from stoker.units import MIB, format_bytes, format_count, format_percent

log = logging.getLogger("stoker")

# ----------------------------------------------------------------------------------------------------------
# Whether a finished cache is good enough, and how to say which samples it lacks.


_LISTED = 20
_FEW = 8


def check_quarantined(folder: Folder, settings: PrecomputeSettings) -> None:
    """Compare the samples set aside with what these settings allow.

    Raises:
        IncompleteError: Too many; lists them with stage and error.
    """
    failures = folder.failures()
    count, max_quarantined = folder.recipe.count, settings.max_quarantined
    if not too_many(folder, max_quarantined):
        return
    enough = _allowing(len(failures) / count)
    without = precompute_argument(f"max_quarantined={enough}", f"{{'max_quarantined': {enough}}}")
    raise IncompleteError(
        f"{format_count(count - len(failures))} of {format_count(count, 'sample')} stored, "
        f"{format_count(len(failures))} quarantined ({format_percent(len(failures) / count)}; "
        f"at most {format_percent(max_quarantined)} are allowed)\n"
        + "\n".join(describe_failures(failures))
        + f"\nAll of them, with stage and error: failures-*.jsonl in {folder.path}",
        hint=f"{_advice(failures, settings.nan)}. To continue without them: {without}",
    )


def too_many(folder: Folder, max_quarantined: float) -> bool:
    """Return True if more samples were set aside than is allowed."""
    return len(folder.failures()) > max_quarantined * folder.recipe.count


def check_values(cache: Cache, settings: PrecomputeSettings) -> None:
    """Compare what is stored with what these settings allow; an earlier run may have allowed more.

    Raises:
        RecordError: Values that are NaN or infinite, or rounding above `max_error`.
    """
    again = f"Encode it again with {arg('overwrite', True)}"
    for name, statistics in cache.statistics.items():
        if settings.nan == "reject" and statistics["nonfinite"]:
            raise RecordError(
                f"{cache.path}: field {name!r} holds {format_count(statistics['nonfinite'])} values that "
                f"are NaN or infinite, stored with {arg('nan', 'allow')}",
                hint=f"{again}, or allow them again",
            )
    for name, error in cache.index.error.items():
        if settings.max_error is not None and error["max"] > settings.max_error:
            raise RecordError(
                f"{cache.path}: field {name!r} was rounded by up to {error['max']:.2g} of a record's "
                f"largest value, max_error is {settings.max_error:.2g}",
                hint="Use a wider storage dtype, or raise it",
            )


_OWN = re.compile(r"\S*/\S+|\d+")
"""Parts of an error that are those of one sample: paths and numbers."""


def describe_failures(failures: Mapping[int, Failure]) -> list[str]:
    """Return a line for each of the first twenty kinds of errors, with the samples that have it.

    Errors are of one kind if they differ in a path or a number alone: ten images that cannot be read.
    """
    alike: dict[tuple[str, int, str], list[int]] = {}
    for number, failure in sorted(failures.items()):
        kind = _OWN.sub("", failure.error)
        alike.setdefault((failure.stage, failure.attempts, kind), []).append(number)
    listed = [*alike.items()][:_LISTED]
    lines: list[str] = []
    for (stage, attempts, _), numbers in listed:
        errors = {failures[number].error for number in numbers}
        first = "" if len(errors) == 1 else f"sample {format_count(numbers[0])}: "
        error = failures[numbers[0]].error
        lines.append(f"  {_samples(numbers)} ({stage}, attempts {attempts}): {first}{error}")
    if more := len(failures) - sum(len(numbers) for _, numbers in listed):
        lines.append(f"  and {format_count(more)} more")
    return lines


def _samples(numbers: Sequence[int]) -> str:
    """Return samples by number, the first few of many.

    >>> _samples([7]), _samples([2, 3]), _samples(range(12))
    ('sample 7', '2 samples: 2, 3', '12 samples: 0, 1, 2, 3, 4, 5, 6, 7, ...')
    """
    if len(numbers) == 1:
        return f"sample {format_count(numbers[0])}"
    few = ", ".join(format_count(number) for number in numbers[:_FEW])
    return f"{format_count(len(numbers), 'sample')}: {few}" + (", ..." if len(numbers) > _FEW else "")


def _advice(failures: Mapping[int, Failure], nan: str) -> str:
    if all(failure.kind == "transient" for failure in failures.values()):
        return "These may pass: when the storage answers, run it again to try them again"
    return f"Once they are fixed, {retry_hint({failure.stage for failure in failures.values()}, nan)}"


def _allowing(share: float) -> float:
    """Return the next larger round share: 0.01, 0.05, 0.1, ...

    >>> _allowing(0.026), _allowing(0.6)
    (0.05, 1.0)
    """
    return next((step for step in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5) if step >= share), 1.0)


# ----------------------------------------------------------------------------------------------------------
# Whether the disk holds what is about to be written; asked before the first sample.


_SHARD_BYTES = 256 * MIB
_RESERVE_BYTES = 16 * MIB
_OVERHEAD = 1.01
_SPARE_INODES = 16


def needed_bytes(schema: Schema, records: int) -> int:
    """Return the bytes of that many records with checksums; ragged fields count as empty."""
    columns = columns_of(schema)
    each = sum(field.size_bytes(0 if field.ragged else None) for field in columns.values())
    return int(records * (each + 8 + 8 * len(columns)) * _OVERHEAD)


def check_space(folder: Path, schema: Schema, records: int, resources: Resources) -> None:
    """Compare what is needed with what is free, in bytes and in inodes.

    Raises:
        ResourceError: It does not fit; nothing has been written.
    """
    check_space_together(folder, [(schema, records)], resources)


def check_space_together(folder: Path, wanted: Sequence[tuple[Schema, int]], resources: Resources) -> None:
    """Do as `check_space`, for records of several caches of one folder."""
    needed, records = sum(needed_bytes(*one) for one in wanted), sum(count for _, count in wanted)
    if (limit := mirror_limit(folder)) is not None:  # what is uploaded makes room here
        needed = min(needed, limit + OPEN_PARTS * _SHARD_BYTES)
    files = needed // _SHARD_BYTES + 1 + _SPARE_INODES
    free_bytes = sys.maxsize if resources.disk_bytes is None else resources.disk_bytes
    FreeSpace(free_bytes, resources.disk_inodes).require(
        folder,
        needed,
        f"{format_count(records)} records need",
        reserve_bytes=_RESERVE_BYTES,
        files=files,
        advice="choose another cache folder, or a smaller dtype",
    )


# ----------------------------------------------------------------------------------------------------------
# How much memory and how many workers a run may have.


_WORKER_BYTES = 64 * MIB
"""What a worker takes in addition to its arena: an interpreter, numpy and h5py are 35 MiB of its own."""
_RAGGED_BYTES = MIB
_COPIES_AT_LEAST = 2
"""A sample is there that often while it is read: as it is stored, and as it is returned."""
_COPIES_AT_MOST = 8
"""Where it is decoded as float64, scaled and cast it is there six times."""


def predict_worker_bytes(samples: Schema, largest_bytes: int = 0, *, at_most: bool = False) -> int:
    """Return the bytes that a worker will hold without its arena, before one was seen.

    Args:
        samples: Fields of a sample; ragged ones count as empty.
        largest_bytes: Of the largest sample that was read so far.
        at_most: Return what it may hold; else what it will hold at least.
    """
    # Long samples are read in pieces along time.
    fields = [(field.size_bytes(0 if field.ragged else None), field.time) for field in samples.values()]
    fixed = sum(min(size, PIECE_BYTES) if time else size for size, time in fields)
    return _WORKER_BYTES + (_COPIES_AT_MOST if at_most else _COPIES_AT_LEAST) * max(fixed, largest_bytes)


def fit_memory(
    samples: Schema, recipe: Recipe, settings: PrecomputeSettings, resources: Resources
) -> tuple[PrecomputeSettings, int]:
    """Have the settings ask for no more memory than there is.

    Half of what is free may be in flight and a quarter may be workers; the rest is the encoder's.

    Args:
        samples: Fields of a raw sample.
        recipe: Its group, and its records as encoded and as stored.
        settings: Their `memory_bytes` and `workers` are upper bounds.
        resources: What is free for this process.

    Returns:
        The settings, and how many workers there may be at most.

    Raises:
        ResourceError: Not even one group with its records and a worker fit; nothing has been read.
    """
    group = recipe.encode_batch
    needed = _WORKER_BYTES + sum(
        _group_bytes(schema, group)
        # In a slot and on its way to the encoder; as encoded; as stored.
        for schema in (samples, samples, recipe.encoded, recipe.columns)
    )
    if needed > resources.host_bytes:
        raise ResourceError(
            f"{format_bytes(resources.host_bytes)} of host memory are free ({resources.host_limit}, "
            f"{format_bytes(resources.host_total_bytes)} in all), a worker and one group of "
            f"{format_count(group.samples)} samples need {format_bytes(needed)}",
            hint="Raise the limit, end other programs, or give the encoder a smaller group",
        )
    workers = settings.workers
    # A number that a user gives counts as it is: who gives it may know better what a worker holds.
    each = predict_worker_bytes(samples) if workers is None else _WORKER_BYTES
    most = max(1, resources.host_bytes // 4 // each)
    if workers is not None and workers > most:
        log.warning(
            "%s instead of %d: %s of host memory are free (%s)",
            format_count(most, "worker"),
            workers,
            format_bytes(resources.host_bytes),
            resources.host_limit,
        )
        workers = most
    memory_bytes = min(settings.memory_bytes, resources.host_bytes // 2)
    return replace(settings, memory_bytes=memory_bytes, workers=workers), most


def fit_copies(
    held_bytes: int, settings: PrecomputeSettings, resources: Resources, *, wanted: int
) -> tuple[PrecomputeSettings, int]:
    """Bound workers by the data that each of them has a copy of.

    A copy is there twice while a worker unpickles it, and once more here, for workers that have to be
    replaced. All of that may take a quarter of what is free.

    Args:
        held_bytes: Data that the source holds in memory.
        settings: Their `workers` are an upper bound.
        resources: What is free for all processes that read on this machine.
        wanted: Workers that there would be at most without this bound.

    Returns:
        The settings, whose `workers` are 0 where not even one copy fits, and how many there may be at most.
    """
    room = resources.host_bytes // 4
    most = max(0, room - held_bytes) // max(1, 2 * held_bytes)
    if settings.workers == 0 or most >= wanted:
        return settings, most
    log.warning(
        "the source holds %s in memory, of which each worker has a copy; %s of host memory are free (%s): "
        "%s. Data in files, opened in __getitem__, is read by as many as pay",
        format_bytes(held_bytes),
        format_bytes(resources.host_bytes),
        resources.host_limit,
        f"{most} workers at most" if most else "samples are read in this process, without timeouts",
    )
    fewest = most if settings.workers is not None or not most else None
    return replace(settings, workers=fewest), most


def _group_bytes(schema: Schema, group: EncodeBatchSize) -> int:
    """Return the bytes of one group, or of one chunk over time."""
    if any(field.ragged for field in schema.values()):
        longest = max(group.lengths, default=0)
        sample = sum(field.size_bytes(longest if field.ragged else None) for field in schema.values())
        return max(_RAGGED_BYTES, group.samples * sample if group.lengths else 0)
    return slot_size(schema, group.samples, group.steps or 0)
