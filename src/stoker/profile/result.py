"""What a profile found, and what each tier would make of it: arithmetic on measured seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from stoker.errors import ResourceError
from stoker.plan import Demand, Rates, Resources, plan_tiers
from stoker.plan.gpus import say_gpus
from stoker.profile.elsewhere import Elsewhere
from stoker.profile.stacks import Stacks
from stoker.schema import Json
from stoker.units import format_bytes, format_percent, format_seconds

STRAGGLER, STRAGGLER_S = 5.0, 0.001
"""A sample that takes so many times the median is one, and at least so many seconds."""
SHOWN = 5
NOTHING = 0.02
"""A stall that no cure is offered for: the rest of the gap is how steps vary."""
ENCODE = "encode"
"""The row of a loop that reads and encodes every sample each time it is needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """What was measured of a loop; seconds are per batch."""

    wait_s: float
    """Waited for the loader, while the loop ran as it is."""
    step_s: float
    """A step of it, with a batch that the loader has just made."""
    cached_s: float
    """A step with a batch at hand: no loading beside it."""
    compute_s: float
    """A step with a batch that lies on the device."""
    flops: float | None = None
    """Operations in matrix products of a step; None: not known."""
    calls: int = 0
    """Kernels that a step calls."""
    samples_s: dict[int, float]
    """Seconds to read single samples in this process, by number."""
    names: Mapping[int, str] = field(default_factory=dict[int, str])
    """What a sample is read from, by number, as far as that is known."""
    batch_bytes: int
    batch_examples: int
    examples: int
    """Of the whole data set."""
    workers: int
    device: str

    @property
    def wall_s(self) -> float:
        """A step and its wait."""
        return self.wait_s + self.step_s

    @property
    def stall(self) -> float:
        """Waiting as a part of that, 0..1."""
        return self.wait_s / self.wall_s if self.wall_s else 0.0

    @property
    def copy_s(self) -> float:
        """What bringing a batch to the device adds to a step; a CPU has its batches already."""
        return 0.0 if self.device == "cpu" else max(0.0, self.cached_s - self.compute_s)

    @property
    def batches(self) -> int:
        """Steps of an epoch."""
        return -(-self.examples // max(1, self.batch_examples))

    @property
    def sample_s(self) -> float:
        """Median of reading one sample."""
        ordered = sorted(self.samples_s.values())
        return ordered[len(ordered) // 2] if ordered else 0.0

    def stragglers(self) -> list[tuple[int, float]]:
        """Samples that take far longer than the others, the slowest first."""
        slow = [(n, s) for n, s in self.samples_s.items() if s > max(STRAGGLER_S, STRAGGLER * self.sample_s)]
        return sorted(slow, key=lambda pair: -pair[1])[:SHOWN]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One thing that is done to every sample before it can be in a batch."""

    name: str
    seconds: float
    """For one sample."""
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """One tier in place of the loader."""

    tier: str
    wall_s: float
    """A step and its wait, predicted."""
    stall: float
    fits: bool
    why: str

    def to_json(self) -> dict[str, Json]:
        """All fields by name."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Where the time goes, and what would help."""

    loop: Loop
    tiers: tuple[Served, ...]
    stages: tuple[Stage, ...] = ()
    """What is done to a sample, one thing after another, each timed with nothing beside it."""
    bottleneck: str
    """What most of loading passes in, and its part; empty where samples could not be read alone."""
    stacks: Stacks
    gpus: str
    """What memory of GPUs would hold the data."""
    elsewhere: tuple[Elsewhere, ...] = ()
    elsewhere_note: str = ""
    """How far the times on other GPUs can be trusted."""
    price_per_hour: float | None = None
    served_from: str = ""
    """The tier that the loop is fed from as it is; empty: a loader of somebody else."""
    remarks: tuple[str, ...] = ()
    """What else was noticed, as samples that cannot be read."""

    @property
    def best(self) -> Served | None:
        """The fastest tier that fits; None: there is none."""
        return min((t for t in self.tiers if t.fits), key=lambda t: t.wall_s, default=None)

    @property
    def unkept(self) -> Served | None:
        """Without a cache; None: not known."""
        return next((tier for tier in self.tiers if tier.tier == ENCODE), None)

    @property
    def batches(self) -> int:
        """Steps of an epoch."""
        return self.loop.batches

    def cost(self, wall_s: float) -> float | None:
        """Of one epoch; None without a price."""
        return None if self.price_per_hour is None else self.price_per_hour * wall_s * self.batches / 3600

    @property
    def verdict(self) -> str:
        """One sentence."""
        loop, best = self.loop, self.best
        begin = f"{format_percent(loop.stall)} of each step is waiting for data"
        if self.served_from:
            return f"{begin} from the {self.served_from} tier{self._without_cache()}"
        why = f", most of it in {self.bottleneck}" if self.bottleneck and loop.stall > NOTHING else ""
        if best is None:
            return f"{begin}{why}; no tier holds {format_bytes(loop.batch_bytes * self.batches)} here"
        gain = loop.wall_s / best.wall_s if best.wall_s else 1.0
        if gain < 1.05 or loop.stall <= NOTHING:
            return (
                f"{begin}{why}: this loop is bound by its own steps, and serving from memory would not help"
            )
        return (
            f"{begin}{why}; served from the {best.tier} tier a step would take {format_seconds(best.wall_s)} "
            f"instead of {format_seconds(loop.wall_s)}, {gain:.1f}x"
        )

    def _without_cache(self) -> str:
        """What the cache is worth, and what another tier would be."""
        best, unkept = self.best, self.unkept
        if self.loop.stall <= NOTHING:
            said = ": this loop is bound by its own steps"
        elif best is not None and best.wall_s * 1.05 < self.loop.wall_s:
            said = f"; from the {best.tier} tier a step would take {format_seconds(best.wall_s)}"
        else:
            said = ", and no tier that fits is faster"
        if unkept is None:
            return said
        most = f", most of it in {self.bottleneck}" if self.bottleneck else ""
        return f"{said}; without a cache {format_percent(unkept.stall)} would be{most}"

    def to_json(self) -> dict[str, Json]:
        """The keys that scripts rely on."""
        loop = self.loop
        slow: list[Json] = [
            {"number": n, "seconds": s, "name": loop.names.get(n, "")} for n, s in loop.stragglers()
        ]
        return {
            "verdict": self.verdict,
            "stall": loop.stall,
            "wait_s": loop.wait_s,
            "step_s": loop.step_s,
            "cached_s": loop.cached_s,
            "compute_s": loop.compute_s,
            "copy_s": loop.copy_s,
            "sample_s": loop.sample_s,
            "stages": [asdict(stage) for stage in self.stages],
            "bottleneck": self.bottleneck,
            "stragglers": slow,
            "tiers": [
                {**t.to_json(), "epoch_s": t.wall_s * self.batches, "epoch_cost": self.cost(t.wall_s)}
                for t in self.tiers
            ],
            "epoch_s": loop.wall_s * self.batches,
            "epoch_cost": self.cost(loop.wall_s),
            "served_from": self.served_from,
            "flops": loop.flops,
            "gpus": self.gpus,
            "elsewhere": [one.to_json() for one in self.elsewhere],
            "remarks": list(self.remarks),
        }


def demand_of(loop: Loop, cpus: float) -> Demand:
    """What serving a loop's batches would ask for, with records stored as the batches are."""
    record = loop.batch_bytes / max(1, loop.batch_examples)
    return Demand(
        records=loop.examples,
        record_bytes=record,
        batch_examples=max(1, loop.batch_examples),
        example_bytes=record,
        device=loop.device,
        step_cpus=cpus if loop.device == "cpu" else 1.0,
    )


def predict(loop: Loop, demand: Demand, resources: Resources, rates: Rates) -> tuple[Served, ...]:
    """What a step would take with records served from each tier."""
    step_s = max(loop.compute_s, 1e-9)
    found: list[Served] = []
    for tier in ("device", "host", "disk"):
        if tier == "device" and loop.device == "cpu":
            continue
        try:
            plan_tiers(demand, resources, tier=tier, step_s=step_s, rates=rates)
            fits, why = True, ""
        except ResourceError as error:
            fits, why = False, str(error)
        plan = plan_tiers(demand, resources, tier="disk", step_s=step_s, rates=rates)
        stall = next(row.stall for row in plan.rows if row.tier == tier) or 0.0
        found.append(Served(tier=tier, wall_s=step_s / (1 - stall), stall=stall, fits=fits, why=why))
    return tuple(found)


def largest(stages: tuple[Stage, ...]) -> str:
    """The stage that takes most of making a record, and its part; empty without any."""
    whole_s = sum(stage.seconds for stage in stages)
    if not whole_s:
        return ""
    most = max(stages, key=lambda stage: stage.seconds)
    return f"{most.name}, {100 * most.seconds / whole_s:.0f} % of making a record"


def gpus_for(demand: Demand) -> str:
    """Which GPUs would hold the data, in a sentence."""
    return say_gpus(max(1.0, demand.record_bytes), demand.records)
