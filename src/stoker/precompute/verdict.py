"""Whether a finished cache is good enough, and how to say which samples it lacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stoker.errors import IncompleteError, RecordError, arg
from stoker.precompute.settings import PrecomputeSettings
from stoker.store import Cache, Failure, Folder
from stoker.units import format_count, format_percent

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
    raise IncompleteError(
        f"{format_count(count - len(failures))} of {format_count(count, 'sample')} stored, "
        f"{format_count(len(failures))} quarantined ({format_percent(len(failures) / count)}; "
        f"at most {format_percent(max_quarantined)} are allowed)\n"
        + "\n".join(describe_failures(failures))
        + f"\nAll of them, with stage and error: failures-*.jsonl in {folder.path}. "
        f"{_advice(failures, settings.nan)}\n"
        f"To continue without them: {arg('max_quarantined', enough)} "
        f"(cached: precompute={{'max_quarantined': {enough}}})"
    )


def too_many(folder: Folder, max_quarantined: float) -> bool:
    """Whether more samples were set aside than is allowed."""
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
                f"{cache.path}: field {name!r} holds {format_count(statistics['nonfinite'])} values that are "
                f"NaN or infinite, stored with {arg('nan', 'allow')}. {again}, or allow them again"
            )
    for name, error in cache.index.error.items():
        if settings.max_error is not None and error["max"] > settings.max_error:
            raise RecordError(
                f"{cache.path}: field {name!r} was rounded by up to {error['max']:.2g} of a record's "
                f"largest value, max_error is {settings.max_error:.2g}. "
                "Use a wider storage dtype, or raise it"
            )


def describe_failures(failures: Mapping[int, Failure]) -> list[str]:
    """A line for each of the first twenty errors, with the samples that have it."""
    alike: dict[tuple[str, int, str], list[int]] = {}
    for number, failure in sorted(failures.items()):
        alike.setdefault((failure.stage, failure.attempts, failure.error), []).append(number)
    listed = [*alike.items()][:_LISTED]
    lines = [
        f"  {_samples(numbers)} ({stage}, attempts {attempts}): {error}"
        for (stage, attempts, error), numbers in listed
    ]
    if more := len(failures) - sum(len(numbers) for _, numbers in listed):
        lines.append(f"  and {format_count(more)} more")
    return lines


def _samples(numbers: Sequence[int]) -> str:
    """Samples by number, the first few of many.

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


def retry_hint(stages: set[str], nan: str) -> str:
    """Return how to have samples tried again that failed in one of `stages`, where NaN is `nan`."""
    again = f"run again with {arg('retry_quarantined', True)}"
    cached = f"{again} (cached: precompute={{'retry_quarantined': True}})"
    if nan == "allow" or stages.isdisjoint(("check", "encode")):
        return cached
    return (
        f"{cached}. To store NaN and infinity as they are, run again with {arg('nan', 'allow')} and "
        f"{arg('retry_quarantined', True)} (cached: precompute={{'nan': 'allow', 'retry_quarantined': True}})"
    )


def _allowing(share: float) -> float:
    """A round share that is no smaller: 0.01, 0.05, 0.1, ...

    >>> _allowing(0.026), _allowing(0.6)
    (0.05, 1.0)
    """
    return next((step for step in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5) if step >= share), 1.0)
