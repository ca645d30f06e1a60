"""What a loop would do on GPUs that are not here: arithmetic on one step counted here, and on data sheets.

A step there takes as long as its matrix products do at the part of the data sheet's rate that is reached
here, or at `USED` of it where this is no GPU of the table; but no less than calling its kernels takes. So it
is the best case: memory traffic is not counted. Its use is to say whether data would come fast enough.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from stoker.errors import ConfigError
from stoker.plan import Demand, Rates, Resources, plan_tiers
from stoker.plan.gpus import MEMORY_GIB, known_gpu, peak_flops
from stoker.schema import Json
from stoker.units import GIB, format_seconds

if TYPE_CHECKING:
    from stoker.profile.result import Loop

USED = 0.3
"""Part of a data sheet's rate that a step is taken to reach where none was measured."""
CALL_S = 5e-6
"""What a call of a kernel takes in Python. Source: ordinary figures for eager steps; graphs take less."""
TO_MODEL = 0.5
"""Part of a GPU's memory left to the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Elsewhere:
    """One GPU."""

    gpu: str
    share: float
    """Part of the data that its memory holds, 0..1."""
    step_s: float | None
    """A step without a wait, at best; None: the products of a step are not known."""
    stall: float | None
    """The wait at such steps, with the rest of the data in host memory or on disk."""
    epoch_s: float | None
    cost: float | None
    """Of an epoch; None without a price."""

    def to_json(self) -> dict[str, Json]:
        """All fields by name."""
        return asdict(self)


def part_used(loop: Loop, resources: Resources) -> tuple[float, bool]:
    """The part of the data sheet's rate that a step reaches, and whether that was measured here."""
    here = known_gpu(resources.device_name, resources.device_total_bytes)
    if here is None or not loop.flops or not loop.compute_s:
        return USED, False
    return min(1.0, loop.flops / loop.compute_s / peak_flops(here)), True


def elsewhere(
    loop: Loop, demand: Demand, resources: Resources, rates: Rates, prices: Mapping[str, float]
) -> tuple[Elsewhere, ...]:
    """What each GPU of the table would do with the loop.

    Args:
        loop, demand: What was measured, and what is to be served.
        resources, rates: Of this machine: the host memory and the disk that a GPU is put beside.
        prices: What an hour costs, by the beginning of a GPU's name.
    """
    unknown = [name for name in prices if not any(gpu.startswith(name) for gpu in MEMORY_GIB)]
    if unknown:
        raise ConfigError(f"no GPU of the table is called {unknown[0]!r}. Known are {', '.join(MEMORY_GIB)}")
    used, _ = part_used(loop, resources)
    there = replace(demand, device="cuda", step_cpus=1.0)
    speeds = Rates(copy_bytes_s=rates.copy_bytes_s, disk_bytes_s=rates.disk_bytes_s, measured=True)
    found: list[Elsewhere] = []
    for gpu, gib in MEMORY_GIB.items():
        memory = int(gib * GIB)
        step_s = (
            None
            if loop.flops is None
            else max(loop.flops / (used * peak_flops(gpu)), CALL_S * loop.calls) or None
        )
        machine = replace(
            resources, device="cuda", device_bytes=memory, device_total_bytes=memory, device_name=gpu,
            device_again_bytes=None,
        )  # fmt: skip
        reserve = int(TO_MODEL * memory)
        plan = plan_tiers(there, machine, reserve_bytes=reserve, step_s=step_s, rates=speeds)
        stall = None if step_s is None else plan.predicted_stall(step_s)
        epoch_s = None if step_s is None or stall is None else step_s / (1 - stall) * loop.batches
        price = next((prices[name] for name in prices if gpu.startswith(name)), None)
        found.append(
            Elsewhere(
                gpu=gpu,
                share=plan.records_by_tier()["device"] / demand.records if demand.records else 1.0,
                step_s=step_s,
                stall=stall,
                epoch_s=epoch_s,
                cost=None if price is None or epoch_s is None else price * epoch_s / 3600,
            )
        )
    return tuple(found)


def say_used(loop: Loop, resources: Resources) -> str:
    """How far the times are to be trusted."""
    if loop.flops is None:
        return "one step could not be counted, so its time on other GPUs is not known"
    used, known = part_used(loop, resources)
    of = f"{100 * used:.3g} % of its data sheet"
    as_if = f"was used as well as this one, {of}" if known else f"reached {of}"
    return (
        f"at best: {loop.flops:.3g} operations in matrix products as if each GPU {as_if}, and no less than "
        f"{format_seconds(CALL_S)} for each of {loop.calls:,} kernels"
    )
