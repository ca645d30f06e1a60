"""What is to be simulated. Bytes, seconds, bytes a second; prices in any currency, but one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Literal, TypeAlias, get_args

from stoker.errors import ConfigError
from stoker.plan.rates import Load, Rates

Order: TypeAlias = Literal["full", "block", "static"]
ORDERS: tuple[Order, ...] = get_args(Order)
LOCAL = "local"
"""The name of a store that is each node's own disk; every other one is reached over the network."""

REQUESTS, FETCH_BYTES = 16, 1 << 20
"""Of a mirror of an address.

Source: `store/mirror/root.py` and `store/mirror/block_map.py`, whose import costs torch; a test compares.
"""
COUNTS = ("records", "batch", "nodes", "gpus", "epochs", "depth", "requests", "fetch_bytes")
"""Of which there is at least one."""
ABOVE_0 = (
    "record_bytes", "example_bytes", "step_s", "cores", "store_bytes_s", "network_bytes_s", "disk_bytes_s",
    "copy_bytes_s", "h2d_bytes_s", "device_bytes_s",
)  # fmt: skip
"""By which something is divided."""
MOST: Mapping[str, float] = {"records": 1e12, "examples": 1e12, "epochs": 1e6, "depth": 1e3, "cores": 1e5}
MOST_OF_ANY, MOST_RANKS = 1e15, 16_384
"""Beyond these a figure is a slip; so many ranks take minutes to go through."""
_TYPICAL = Rates()


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """What things cost; None: no price was given, and no cost is said."""

    node_hour: float | None = None
    """One node, an hour."""
    gb_month: float | None = None
    """Keeping 10^9 bytes in the store, a month."""
    gb_read: float | None = None
    """Reading 10^9 bytes out of the store."""

    @property
    def any_given(self) -> bool:
        """Whether there is anything to reckon with."""
        return any(value is not None for value in (self.node_hour, self.gb_month, self.gb_read))

    def __post_init__(self) -> None:
        """Refuse what is no price.

        Raises:
            ConfigError: It is named.
        """
        for one in fields(self):
            _check(one.name, getattr(self, one.name))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Machines, storage, data and times of one run. What was not given has the default that is named here."""

    records: int
    record_bytes: float
    """Of one encoded record as it is stored."""
    batch: int
    """Examples in the batch of one rank."""
    step_s: float
    """Seconds that a step computes, loading left out."""
    host_memory_bytes: int
    """Of one node, free for records before any reserve."""

    nodes: int = 1
    gpus: int = 1
    """Ranks on a node: one for each GPU, or processes on the CPU where `gpu_memory_bytes` is 0."""
    gpu_memory_bytes: int = 0
    model_bytes: int | None = None
    """GPU memory that the model takes; None: the planner's rule for a model not seen yet, half of it."""
    cores: float | None = None
    """Of one node; None: two for each rank, one that starts kernels and one that loads. Of cores that share
    what they compute with, as many as they are worth together."""
    step_cpus: float | None = None
    """Cores that a step keeps busy; None: 1."""

    store: str = LOCAL
    """`local`, or the name of what all nodes read from over the network (s3, nfs, folder)."""
    store_bytes_s: float | None = None
    """Of the store towards all nodes together; None: no limit but the nodes' network."""
    store_latency_s: float = 0.0
    """Until the first byte of a request."""
    requests: int = REQUESTS
    """Requests that one rank has under way at once; as many as a mirror waits for."""
    fetch_bytes: int = FETCH_BYTES
    """What a read of the store moves in steps of, as a mirror of an address does. 1: only what is asked for,
    as from a folder that is mounted."""
    network_bytes_s: float | None = None
    """Of one node; needed where the store is not local."""
    disk_bytes: int = 0
    """Local disk of a node that records may take."""
    disk_bytes_s: float = _TYPICAL.disk_bytes_s
    """Of a node's local disk, at random places; the planner's typical figure."""

    raw_bytes: float | None = None
    """Of one sample before encoding; None: as many as its record."""
    encode_s: float = 0.0
    """Seconds of one encoder for one sample."""
    read_s: float = 0.0
    """Seconds of a reader's core for one sample: opening and decoding, the transfer left out."""
    write_s: float = 0.0
    """Seconds for one record to be converted, summed and written, the transfer left out."""
    readers: int = 1
    """Processes that read, for each encoder; 0: the encoder's process reads itself."""
    encoders: int | None = None
    """Encoders in all, one a rank; None: each number from 1 to all ranks is tried, and the quickest taken."""
    start_s: float = 0.0
    """From the start of a process to its first read: imports, weights."""

    examples: int | None = None
    """Examples of an epoch; None: one for each record."""
    example_bytes: float | None = None
    """Bytes that one takes out of a tier; None: its record's."""
    epochs: int = 10
    order: Order = "full"
    step_spread: float = 0.0
    """Standard deviation of a step's time between ranks and steps, as a part of it."""
    sync_s: float = 0.0
    """Seconds after each step in which ranks wait for the sum of their gradients."""
    depth: int = 4
    """Batches that are loaded ahead, at most; as many as the disk tier reads ahead."""
    seed: int = 0

    copy_bytes_s: float = _TYPICAL.copy_bytes_s
    h2d_bytes_s: float = _TYPICAL.h2d_bytes_s
    device_bytes_s: float = _TYPICAL.device_bytes_s
    served: Mapping[str, Load] = field(default_factory=dict[str, Load])
    """Per tier what loading a batch was found to take on one rank; wins over rates."""
    fixed_s: Mapping[str, float] = field(default_factory=dict[str, float])
    """Per tier the part of what a step waits for in any case that is of a batch, not of its examples: threads
    that are woken. It is the same for a batch of which only a part comes from there."""
    prices: Prices = field(default_factory=Prices)

    def __post_init__(self) -> None:
        """Refuse what means nothing.

        Raises:
            ConfigError: A number that cannot be, named.
        """
        for one in fields(self):
            _check(one.name, getattr(self, one.name))
        if self.world > MOST_RANKS:
            raise ConfigError(
                f"nodes of {self.nodes:,} with {self.gpus:,} ranks each are {self.world:,} ranks. "
                f"Expected {MOST_RANKS:,} at most"
            )
        if self.order not in ORDERS:
            raise ConfigError(f"order {self.order!r} is unknown. Expected {', '.join(ORDERS)}")
        if self.shared and not self.network_bytes_s:
            raise ConfigError(
                f"store={self.store} is reached over the network, whose rate is not known. "
                "Expected network=25Gb/s or the like, of one node"
            )
        if self.encoders is not None and not 1 <= self.encoders <= self.world:
            raise ConfigError(
                f"encoders={self.encoders} on {self.world} ranks. Expected one a rank at most, and at least 1"
            )
        if self.batches < 1:
            raise ConfigError(
                f"{self.world} ranks with batches of {self.batch} take {self.world * self.batch} examples "
                f"a step, but an epoch has {self.epoch_examples}. Use a smaller batch or fewer ranks"
            )

    @property
    def world(self) -> int:
        """Ranks in all."""
        return self.nodes * self.gpus

    @property
    def shared(self) -> bool:
        """Whether all nodes read from one store over the network."""
        return self.store != LOCAL

    @property
    def on_cpu(self) -> bool:
        """Whether ranks compute on the CPU, whose memory is the host's."""
        return not self.gpu_memory_bytes

    @property
    def node_cores(self) -> float:
        """Cores of one node."""
        return 2.0 * self.gpus if self.cores is None else self.cores

    @property
    def busy_cores(self) -> float:
        """Cores that one rank's step keeps busy."""
        return 1.0 if self.step_cpus is None else self.step_cpus

    @property
    def set_bytes(self) -> float:
        """All records."""
        return self.records * self.record_bytes

    @property
    def sample_bytes(self) -> float:
        """One sample before it is encoded."""
        return self.record_bytes if self.raw_bytes is None else self.raw_bytes

    @property
    def epoch_examples(self) -> int:
        """Examples of an epoch, on all ranks together."""
        return self.records if self.examples is None else self.examples

    @property
    def taken_bytes(self) -> float:
        """What one example takes out of a tier."""
        return self.record_bytes if self.example_bytes is None else self.example_bytes

    @property
    def fetched_bytes(self) -> float:
        """What the read of one example moves where its neighbours are of no use: blocks that it touches.

        On average: in blocks of b bytes a record of r bytes at any place touches 1 + (r - 1) / b of them.
        """
        if self.order == "block" or not self.shared:
            return self.taken_bytes
        return self.taken_bytes + self.fetch_bytes - 1

    @property
    def batches(self) -> int:
        """Batches of one rank in an epoch."""
        return self.epoch_examples // (self.batch * self.world)

    @property
    def link_bytes_s(self) -> float:
        """What one node gets from where the records lie when all nodes ask at once."""
        if not self.shared:
            return self.disk_bytes_s
        network = self.network_bytes_s or math.inf
        return min(network, (self.store_bytes_s or math.inf) / self.nodes)


def _check(name: str, value: object) -> None:
    """Refuse a number that is impossible or absurd.

    Raises:
        ConfigError: It is one.
    """
    if not isinstance(value, int | float):
        return
    if not (math.isfinite(value) and value >= 0):
        raise ConfigError(f"{name} is {value}. Expected a number, not below 0")
    if name in COUNTS and value < 1:
        raise ConfigError(f"{name} is {value}. Expected at least 1")
    if name in ABOVE_0 and not value:
        raise ConfigError(f"{name} is 0. Expected more than 0")
    most = MOST.get(name, MOST_OF_ANY)
    if value > most:
        raise ConfigError(f"{name} is {value:.4g}. Expected {most:g} at most")
