"""What a simulation comes to."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from stoker.plan.simulation.pace import Encoding
from stoker.plan.simulation.scenario import Scenario
from stoker.schema import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way of doing it. Of one that does not fit only `name`, `what` and `why_not` mean something."""

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
    """Read from where the records lie in the first epoch, by one node and by all; precompute is not in it."""
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
        """Whether it can be done."""
        return not self.why_not


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """Every way, and which to take."""

    scenario: Scenario
    encodings: tuple[Encoding, ...]
    """By number of encoders."""
    encoding: Encoding
    """The one that the ways reckon with."""
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
        """The way of that name."""
        return next(one for one in self.ways if one.name == name)

    def to_json(self) -> dict[str, Json]:
        """The keys that scripts rely on."""
        return {
            "scenario": asdict(self.scenario),
            "encodings": [one.to_json() for one in self.encodings],
            "encoding": self.encoding.to_json(),
            "beside_s": self.beside_s,
            "ways": [{**asdict(one), "fits": one.fits} for one in self.ways],
            "fastest": self.fastest,
            "cheapest": self.cheapest,
            "reason": self.reason,
            "taken": list(self.taken),
        }
