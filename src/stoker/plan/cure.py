"""What would cure a stall, said from what was measured and from what a plan knows of the other tiers.

Text only, and a pure function: the run's figures come from its meter, the room and the load times of the
tiers from a plan made with the step that was measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stoker.plan.tiers import Plan
from stoker.units import format_bytes, format_count, format_percent, format_seconds

MEANINGS = {
    "read": "reading from disk",
    "gather": "putting batches together in memory",
    "copy": "copying them to the device",
    "transform": "the transforms",
    "wait": "waiting for another thread",
}
"""What a wait was for, in words, by the names of the meter's parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """What a run's meter came to."""

    stall: float
    step_s: float
    """Seconds of a step, loading left out."""
    wait_s: float
    parts: Mapping[str, float]
    """Seconds of `wait_s` by what they were for."""
    tier: str
    """The tier that served most examples."""


def over_budget(waiting: Waiting, budget: float, plan: Plan) -> str | None:
    """The verdict where a stall is above `budget`: the fact, what was expected, a cure; None: it is not.

    Args:
        plan: Of the same records with `tier="auto"` and the step that was measured.
    """
    if waiting.stall <= budget:
        return None
    return (
        f"stall {format_percent(waiting.stall)}: steps waited {format_seconds(waiting.wait_s)} for data, "
        f"{said_parts(waiting.parts) or 'cause unknown'}. The limit is {format_percent(budget)}. "
        f"{cure(waiting, plan)}"
    )


def said_parts(parts: Mapping[str, float]) -> str:
    """The parts of a wait in words, the longest first; those below a twentieth are left out.

    >>> said_parts({"read": 5.5, "gather": 0.5, "wait": 0.01})
    '5.5 s of it reading from disk, 500 ms putting batches together in memory'
    """
    total = sum(parts.values())
    shown = sorted((item for item in parts.items() if item[1] >= total / 20 > 0), key=lambda item: -item[1])
    return ", ".join(
        f"{format_seconds(seconds)} {'' if place else 'of it '}{MEANINGS[part]}"
        for place, (part, seconds) in enumerate(shown)
    )


def cure(waiting: Waiting, plan: Plan) -> str:
    """What to do about the longest part of a wait."""
    main = max(waiting.parts, key=lambda part: waiting.parts[part], default="gather")
    faster = plan.tier
    if faster != waiting.tier and waiting.tier == "disk":
        expected, held = plan.predicted_stall(waiting.step_s), plan.records_by_tier()
        whole = held[faster] == sum(held.values())
        room = "the" if whole else f"{format_count(held[faster])} of the {format_count(sum(held.values()))}"
        return f"Use training.tier=auto: the {faster} tier has room for {room} records" + (
            "" if expected is None else f", and would stall {format_percent(expected)}"
        )
    if main == "read":
        size = format_bytes(sum(row.bytes for row in plan.rows))
        host = next(row for row in plan.rows if row.tier == "host")
        return (
            f"The records take {size}, more than the host tier has room for ({host.note}). Free memory for "
            "them, store a smaller dtype (latent_cache_dtype), or put the cache on a faster disk"
        )
    if main == "copy":
        device = next(row for row in plan.rows if row.tier == "device")
        return (
            "The device tier copies nothing, but has no room for the records "
            f"({device.note}). Store a smaller dtype (latent_cache_dtype), or lower reserve_bytes"
        )
    if main == "transform":
        return "Make the transforms cheaper, or have them work on batches that are on the device already"
    if main == "wait":
        return "Another thread was late: give this process a core that no other process uses"
    return (
        f"A step of {format_seconds(waiting.step_s)} is short for a batch of this size: give this process "
        "a core that the step leaves free, or store a smaller dtype (latent_cache_dtype)"
    )
