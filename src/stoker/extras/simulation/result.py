"""What a simulation comes to."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from stoker.extras.simulation.scenario import Scenario
from stoker.schema import Json

# ----------------------------------------------------------------------------------------------------------
# Precompute: workers, encoders, writers and links work at once, so the slowest of them sets the pace.


_STAGE_KEYS = {"workers": "readers"}
"""Names that differ in JSON, whose keys scripts rely on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodingEstimate:
    """The cost of encoding the complete set once."""

    encoders: int
    nodes: int
    """That take part."""
    seconds: float
    """Of the command: its start, the first sample through all stages, then the slowest stage's pace."""
    stages: dict[str, float]
    """Seconds that each alone would take for the entire set, from what waits longest."""
    read_bytes: float
    """Of all nodes together, from the place of the samples."""
    written_bytes: float
    node_read_bytes: float
    node_written_bytes: float

    @property
    def bottleneck(self) -> str:
        """The stage that sets the pace."""
        return next(iter(self.stages))

    @property
    def idle_encoders(self) -> float:
        """Part of the time that encoders wait for others, 0..1."""
        return 1 - self.stages.get("encoder", 0.0) / self.seconds if self.seconds else 0.0

    def to_json(self) -> dict[str, Json]:
        """Return all fields, and the bottleneck."""
        stages: dict[str, Json] = {
            _STAGE_KEYS.get(name, name): seconds for name, seconds in self.stages.items()
        }
        return {**asdict(self), "stages": stages, "bottleneck": self.bottleneck}


def encoding_with(scenario: Scenario, encoders: int) -> EncodingEstimate:
    """Encoding with so many encoders, nodes filled one after another.

    Workers of an encoder work in parallel; cores are what all processes of a node share (an encoder on
    a CPU takes one of them too). Reading from and writing to a local disk take turns; a network does both at
    once.
    """
    one = scenario
    nodes = min(one.nodes, math.ceil(encoders / one.gpus))
    pipe = one.disk_bytes_s * nodes
    if one.shared:
        pipe = min((one.network_bytes_s or math.inf) * nodes, one.store_bytes_s or math.inf)
    move_in, move_out = one.sample_bytes / pipe, one.record_bytes / pipe
    inline_s = 0.0 if one.workers else one.read_s
    work_s = one.read_s + one.write_s + (one.encode_s if one.on_cpu else 0.0)
    each_s = {
        "encoder": (one.encode_s + inline_s) / encoders,
        "workers": one.read_s / (one.workers * encoders) if one.workers else 0.0,
        "writer": one.write_s / encoders,
        "cores": work_s / (one.node_cores * nodes),
        "network" if one.shared else "disk": max(move_in, move_out) if one.shared else move_in + move_out,
    }
    if (
        one.shared
        and one.store_bytes_s is not None
        and one.store_bytes_s <= (one.network_bytes_s or 0) * nodes
    ):
        each_s["store"] = each_s.pop("network")
    through_s = one.read_s + one.encode_s + one.write_s + one.store_latency_s
    stages = dict(sorted(((k, v * one.records) for k, v in each_s.items()), key=lambda item: -item[1]))
    return EncodingEstimate(
        encoders=encoders,
        nodes=nodes,
        seconds=one.start_s + through_s + max(stages.values()),
        stages=stages,
        read_bytes=one.records * one.sample_bytes,
        written_bytes=one.set_bytes,
        node_read_bytes=one.records * one.sample_bytes / nodes,
        node_written_bytes=one.set_bytes / nodes,
    )


def beside_s(scenario: Scenario, encoding: EncodingEstimate, steps_s: float) -> float:
    """Return seconds of the first epoch where training starts at once and encoding continues during it.

    Batches come in the order in which records are stored, so an epoch ends with the later of both. Where an
    encoder has a rank's GPU, its calls and the steps take turns at it; on CPUs they share the cores.

    Args:
        scenario: The run.
        encoding: Of the complete set, with no training in parallel.
        steps_s: Of an epoch's steps with nothing to load.
    """
    one, stages = scenario, encoding.stages
    if one.on_cpu:
        shared_s = stages["cores"] + steps_s * one.busy_cores * one.gpus / one.node_cores
    else:
        shared_s = stages["encoder"] + steps_s
    return one.start_s + max(shared_s, steps_s, *stages.values())


def encodings(scenario: Scenario) -> tuple[EncodingEstimate, ...]:
    """With 1, 2, 4 ... encoders up to one a rank, or with the number that was given.

    >>> one = Scenario(records=1000, record_bytes=8, batch=1, step_s=1, host_memory_bytes=8, gpus=4,
    ...                gpu_memory_bytes=8, encode_s=0.1, read_s=0.2, cores=8)
    >>> [(each.encoders, each.bottleneck, round(each.seconds)) for each in encodings(one)]
    [(1, 'workers', 200), (2, 'workers', 100), (4, 'workers', 50)]
    """
    if scenario.encoders is not None:
        return (encoding_with(scenario, scenario.encoders),)
    counts = [
        1 << power for power in range(scenario.world_size.bit_length()) if 1 << power < scenario.world_size
    ]
    return tuple(encoding_with(scenario, count) for count in [*counts, scenario.world_size])


def pick_quickest(found: tuple[EncodingEstimate, ...]) -> EncodingEstimate:
    """Return the quickest estimate; of those within a hundredth the one with the fewest encoders."""
    least_s = min(one.seconds for one in found)
    return next(one for one in found if one.seconds <= 1.01 * least_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way of serving a run. If it does not fit, only `name`, `what` and `why_not` are set."""

    name: str
    what: str
    why_not: str = ""
    """Why it cannot be done, in words; empty: it can."""
    encoding_s: float = 0.0
    """Of precompute before it; 0 where samples are encoded in each epoch."""
    first_batch_s: float = 0.0
    """From the command to the first batch on every rank, precompute included."""
    first_epoch_s: float = 0.0
    """Of the first epoch, in which memories and disks are being filled during training; they may not be
    filled when it ends."""
    filling_epochs: int = 0
    """Epochs that begin before memory, and a disk with room for all, are filled; only those after them are as
    `epoch_s` and `epoch_bytes` say. 0: there is nothing to fill but by what batches read."""
    filled_s: float | None = 0.0
    """From the first batch until that is done; None: the run is over before."""
    epoch_s: float = 0.0
    """Of one with all of them filled."""
    stall: float = 0.0
    """Part of a later epoch that steps wait for data, 0..1, against the same steps without loading."""
    first_node_bytes: float = 0.0
    first_bytes: float = 0.0
    """Read from the place of the records in the first epoch, by one node and by all; without precompute."""
    epoch_node_bytes: float = 0.0
    epoch_bytes: float = 0.0
    """The same in every later one."""
    device_bytes: float = 0.0
    """Records on one device."""
    host_bytes: float = 0.0
    """Records in the host memory of one node."""
    disk_bytes: float = 0.0
    """Records on the local disk of one node, a copy of what a store has."""
    encoded_samples: float = 0.0
    """Encoded in every epoch, parts of a sample added up; 0 where precompute has encoded all."""
    read_bytes: float = 0.0
    """Read by all nodes in all epochs, precompute left out."""
    total_s: float = 0.0
    """Precompute and all epochs."""
    cost: float | None = None
    """Of that, and of a month of keeping the records; None: no price was given."""
    bottleneck: str = ""
    """What sets the pace of a later epoch."""
    cure: str = ""
    """What would change it, with the figure."""
    remark: str = ""
    """What else to know of it."""

    @property
    def fits(self) -> bool:
        """True if it can be done."""
        return not self.why_not


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """Every way, and which to take."""

    scenario: Scenario
    encodings: tuple[EncodingEstimate, ...]
    """By number of encoders."""
    encoding: EncodingEstimate
    """The estimate that the ways use."""
    beside_s: float
    """Seconds of the first epoch where training starts at once and encoding continues during it."""
    ways: tuple[Way, ...]
    fastest: str
    """Name of the way that is over first; empty where none fits."""
    cheapest: str
    """Name of the way that costs least; empty where no price was given."""
    reason: str
    """Both in words."""
    taken: tuple[str, ...]
    """What was not given and what was taken in its place, in words."""

    def way(self, name: str) -> Way:
        """Return the way of that name."""
        return next(one for one in self.ways if one.name == name)

    def to_json(self) -> dict[str, Json]:
        """Return the keys that scripts rely on."""
        return {
            "scenario": {_STAGE_KEYS.get(name, name): one for name, one in asdict(self.scenario).items()},
            "encodings": [one.to_json() for one in self.encodings],
            "encoding": self.encoding.to_json(),
            "beside_s": self.beside_s,
            "ways": [{**asdict(one), "fits": one.fits} for one in self.ways],
            "fastest": self.fastest,
            "cheapest": self.cheapest,
            "reason": self.reason,
            "taken": list(self.taken),
        }
