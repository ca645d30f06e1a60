"""The scenario to simulate. Bytes, seconds, bytes a second; prices in any currency, but one."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypeAlias, get_args

from stoker.errors import ConfigError
from stoker.plan.rates import BatchLoad, Rates
from stoker.plan.trials import Interval
from stoker.units import SIZES, TIMES

Shuffle: TypeAlias = bool | Literal["block"]
SHUFFLES: Mapping[str, Shuffle] = {"true": True, "block": "block", "false": False}
Partition: TypeAlias = Literal["global", "static"]
PARTITIONS: tuple[Partition, ...] = get_args(Partition)
Order: TypeAlias = Literal["full", "block", "static"]
LOCAL = "local"
"""The name of a store that is each node's own disk; every other one is reached over the network."""

REQUESTS, FETCH_BYTES = 16, 1 << 20
"""Of a mirror of an address.

Source: `store/storage.py` and `store/mirror_blocks.py`, whose import costs torch; a test compares.
"""
COUNTS = ("records", "batch", "nodes", "gpus", "epochs", "depth", "requests", "fetch_bytes")
"""Of which there is at least one."""
ABOVE_0 = (
    "record_bytes", "example_bytes", "step_s", "cores", "store_bytes_s", "network_bytes_s", "disk_bytes_s",
    "copy_bytes_s", "h2d_bytes_s", "device_bytes_s",
)  # fmt: skip
"""By which something is divided."""
RANGED = ("step_s", "sync_s", "encode_s", "read_s", "write_s", "start_s", "fill_start_s")
"""Times that may have a range."""
MOST: Mapping[str, float] = {"records": 1e12, "examples": 1e12, "epochs": 1e6, "depth": 1e3, "cores": 1e5}
MOST_OF_ANY, MOST_RANKS = 1e15, 16_384
"""Beyond these a figure is a slip; so many ranks take minutes to go through."""
_TYPICAL = Rates()


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Prices; None: no price was given, and no cost is said."""

    node_hour: float | None = None
    """One node, an hour."""
    gb_month: float | None = None
    """Keeping 10^9 bytes in the store, a month."""
    gb_read: float | None = None
    """Reading 10^9 bytes out of the store."""

    @property
    def any_given(self) -> bool:
        """True if there is anything to reckon with."""
        return any(value is not None for value in (self.node_hour, self.gb_month, self.gb_read))

    def __post_init__(self) -> None:
        """Refuse what cannot be a price.

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
    workers: int = 1
    """Processes that read, for each encoder; 0: the encoder's process reads itself."""
    encoders: int | None = None
    """Encoders in all, one a rank; None: each number from 1 to all ranks is tried, and the quickest taken."""
    start_s: float = 0.0
    """From the start of a process to its first read: imports, weights."""
    fill_start_s: float | None = None
    """The same where training starts at once. The process that fills the cache imports torch, then, for more
    than a few encode batches, the one that encodes. None: `start_s`."""

    examples: int | None = None
    """Examples of an epoch; None: one for each record."""
    example_bytes: float | None = None
    """Bytes that one takes out of a tier; None: its record's."""
    epochs: int = 10
    shuffle: Shuffle = True
    """As of a loader."""
    partition: Partition = "global"
    """As of a loader; with `"static"`, each rank shuffles its part."""
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
    served: Mapping[str, BatchLoad] = field(default_factory=dict[str, BatchLoad])
    """Per tier what loading a batch was found to take on one rank; wins over rates."""
    fixed_s: Mapping[str, float] = field(default_factory=dict[str, float])
    """Per tier the part of what a step waits for in any case that is of a batch, not of its examples: threads
    that are woken. It is the same for a batch of which only a part comes from there."""
    ranges: Mapping[str, Interval] = field(default_factory=dict[str, Interval])
    """By time of this scenario (`step_s`, `read_s`, ...) the least and the largest that are likely. Loads in
    `served` have their own."""
    prices: Prices = field(default_factory=Prices)

    def bounds(self) -> tuple[Scenario, Scenario] | None:
        """Return this run with the least likely times, and with the largest; None: no range is known."""
        if not self.ranges and not any(load.alone_range for load in self.served.values()):
            return None
        low, high = (
            replace(
                self,
                served={tier: load.bounds()[side] for tier, load in self.served.items()},
                ranges={},
                **{name: likely[side] for name, likely in self.ranges.items()},
            )
            for side in (0, 1)
        )
        return low, high

    def __post_init__(self) -> None:
        """Refuse what means nothing.

        Raises:
            ConfigError: A number that cannot be, named.
        """
        for one in fields(self):
            _check(one.name, getattr(self, one.name))
        for name, likely in self.ranges.items():
            if name not in RANGED:
                raise ConfigError(f"{name} has no range", hint=f"Expected one of {', '.join(RANGED)}")
            for bound in likely:
                _check(name, bound)
        if self.world_size > MOST_RANKS:
            raise ConfigError(
                f"nodes of {self.nodes:,} with {self.gpus:,} ranks each are {self.world_size:,} ranks",
                hint=f"Expected {MOST_RANKS:,} at most",
            )
        if self.shuffle not in SHUFFLES.values():
            raise ConfigError(f"shuffle {self.shuffle!r} is unknown", hint="Expected True, 'block' or False")
        if self.partition not in PARTITIONS:
            expected = ", ".join(PARTITIONS)
            raise ConfigError(f"partition {self.partition!r} is unknown", hint=f"Expected {expected}")
        if self.shared and not self.network_bytes_s:
            raise ConfigError(
                f"store={self.store} is reached over the network, whose rate is not known",
                hint="Expected network=25Gb/s or the like, of one node",
            )
        if self.encoders is not None and not 1 <= self.encoders <= self.world_size:
            raise ConfigError(
                f"encoders={self.encoders} on {self.world_size} ranks", hint="Expected 1 to one a rank"
            )
        if self.batches < 1:
            raise ConfigError(
                f"{self.world_size} ranks with batches of {self.batch} take {self.world_size * self.batch} "
                f"examples a step, but an epoch has {self.epoch_examples}",
                hint="Use a smaller batch or fewer ranks",
            )

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.nodes * self.gpus

    @property
    def order(self) -> Order:
        """What is asked for together: anything, neighbors, or a rank's own part."""
        if self.partition == "static":
            return "static"
        # In the order of storage neighbors are used together, as in blocks.
        return "full" if self.shuffle is True else "block"

    @property
    def shared(self) -> bool:
        """True if all nodes read from one store over the network."""
        return self.store != LOCAL

    @property
    def on_cpu(self) -> bool:
        """True if ranks compute on the CPU, whose memory is the host's."""
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
        """The bytes that one example takes out of a tier."""
        return self.record_bytes if self.example_bytes is None else self.example_bytes

    @property
    def fetched_bytes(self) -> float:
        """What the read of one example moves where its neighbors are of no use: blocks that it touches.

        On average: in blocks of b bytes a record of r bytes at any place touches 1 + (r - 1) / b of them.
        """
        if self.order == "block" or not self.shared:
            return self.taken_bytes
        return self.taken_bytes + self.fetch_bytes - 1

    @property
    def batches(self) -> int:
        """Batches of one rank in an epoch."""
        return self.epoch_examples // (self.batch * self.world_size)

    @property
    def link_bytes_s(self) -> float:
        """The bytes a second that one node gets from the records' storage when all nodes read at once."""
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
        raise ConfigError(f"{name} is {value}", hint="Expected a number, not below 0")
    if name in COUNTS and value < 1:
        raise ConfigError(f"{name} is {value}", hint="Expected at least 1")
    if name in ABOVE_0 and not value:
        raise ConfigError(f"{name} is 0", hint="Expected more than 0")
    most = MOST.get(name, MOST_OF_ANY)
    if value > most:
        raise ConfigError(f"{name} is {value:.4g}", hint=f"Expected {most:g} at most")


# ----------------------------------------------------------------------------------------------------------
# Scenarios as people type them: `key=value` words, sizes, rates and times with their units.


NUMBER = re.compile(r"\s*([+-]?\d[\d_,]*(?:\.\d+)?(?:e[+-]?\d+)?)\s*(.*?)\s*", re.IGNORECASE)
MULTIPLES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "ki": 2.0**10, "mi": 2.0**20, "gi": 2.0**30}
STORES = (LOCAL, "s3", "gs", "az", "http", "nfs", "folder")
"""All but the first are alike here: reached over the network, and differ in rate, latency and blocks."""
SHORT_TIMES = {"ms": 1e-3, "us": 1e-6, "ns": 1e-9}


def count(text: str) -> int:
    """Return a whole number.

    >>> count("1_000_000"), count("1e9"), count("500")
    (1000000, 1000000000, 500)
    """
    number, unit = _split(text)
    if unit or number != int(number):
        raise ConfigError(f"{text!r} is not a whole number", hint="Expected 500, 1_000_000 or 1e9")
    return int(number)


def number(text: str) -> float:
    """Return a number without a unit.

    >>> number("2.59")
    2.59
    """
    value, unit = _split(text)
    if unit:
        raise ConfigError(f"{text!r} has a unit", hint="Expected a number alone")
    return value


def size(text: str) -> float:
    """Return bytes; the unit is required.

    >>> size("80GB"), size("1 TiB"), size("4096B")
    (80000000000.0, 1099511627776.0, 4096.0)
    """
    value, unit = _split(text)
    if not unit or unit.lower() not in SIZES:
        raise ConfigError(f"{text!r} has no unit of size", hint="Expected 80GB, 512MiB or 4096B")
    if unit.endswith("b"):
        raise ConfigError(
            f"{text!r} may be of bits: b is a bit, B a byte",
            hint=f"Expected {value:g}{unit[:-1].capitalize()}B",
        )
    return value * SIZES[unit.lower()]


def seconds(text: str) -> float:
    """Return seconds; the unit is required, unless it is 0.

    >>> seconds("20ms"), seconds("2us"), seconds("1.5h"), seconds("0")
    (0.02, 2e-06, 5400.0, 0.0)
    """
    value, unit = _split(text)
    known = {**TIMES, **SHORT_TIMES}
    if unit.lower() not in known and not (value == 0 and not unit):
        raise ConfigError(f"{text!r} has no unit of time", hint="Expected 20ms, 2s or 1h")
    return value * known.get(unit.lower(), 1.0)


def rate(text: str) -> float:
    """Return bytes a second. `Gb/s` is of bits, as networks are sold, `GB/s` of bytes; the unit is required.

    >>> rate("25Gb/s"), rate("2GB/s"), rate("100 MiB/s"), rate("400Gbit/s")
    (3125000000.0, 2000000000.0, 104857600.0, 50000000000.0)
    """
    value, unit = _split(text)
    match = re.fullmatch(r"([kmgt]?i?)(bit|b|B)(?:/s|ps)", unit, re.IGNORECASE)
    if match is None:
        raise ConfigError(f"{text!r} has no unit of rate", hint="Expected 25Gb/s (bits) or 3GB/s (bytes)")
    bits = match[2] != "B"
    return value * MULTIPLES[match[1].lower()] / (8 if bits else 1)


def part(text: str) -> float:
    """Return a fraction.

    >>> part("10%"), part("0.1")
    (0.1, 0.1)
    """
    value, unit = _split(text)
    if unit not in ("", "%"):
        raise ConfigError(f"{text!r} is not a fraction", hint="Expected 10% or 0.1")
    return value / 100 if unit else value


def _split(text: str) -> tuple[float, str]:
    match = NUMBER.fullmatch(text)
    if match is None:
        raise ConfigError(f"{text!r} does not begin with a number", hint="Expected a number and its unit")
    value = float(match[1].replace("_", "").replace(",", ""))
    if value < 0:
        raise ConfigError(f"{text!r} is below 0", hint="Expected 0 or more")
    if math.isinf(value):
        raise ConfigError(f"{text!r} is too large for a number", hint="Expected less")
    return value, match[2]


def _shuffle(text: str) -> Shuffle:
    if text not in SHUFFLES:
        raise ConfigError(f"{text!r} is unknown", hint=f"Expected {', '.join(SHUFFLES)}")
    return SHUFFLES[text]


def _partition(text: str) -> Partition:
    if text not in PARTITIONS:
        raise ConfigError(f"{text!r} is unknown", hint=f"Expected {', '.join(PARTITIONS)}")
    return text


def _store(text: str) -> str:
    if text not in STORES:
        raise ConfigError(
            f"{text!r} is unknown",
            hint=f"Expected {LOCAL}, each node's own disk, or a store that all nodes reach over the "
            f"network: {', '.join(STORES[1:])}",
        )
    return text


KEYS: Mapping[str, tuple[str, Callable[[str], Any], str]] = {
    "nodes": ("nodes", count, "machines"),
    "gpus": ("gpus", count, "ranks on each: GPUs, or processes where gpu_memory is 0"),
    "gpu_memory": ("gpu_memory_bytes", size, "of each GPU; left out: ranks compute on the CPU"),
    "model_memory": ("model_bytes", size, "GPU memory that the model takes"),
    "host_memory": ("host_memory_bytes", size, "of each node"),
    "cores": ("cores", number, "of each node"),
    "step_cores": ("step_cpus", number, "that a step keeps busy; 0: it sleeps"),
    "store": ("store", _store, "local, or what is reached over the network: s3, gs, az, http, nfs, folder"),
    "store_rate": ("store_bytes_s", rate, "of the store towards all nodes together"),
    "store_latency": ("store_latency_s", seconds, "until the first byte"),
    "requests": ("requests", count, "that one rank has under way at once"),
    "fetch": ("fetch_bytes", lambda text: int(size(text)), "that reads of the store move in steps of"),
    "network": ("network_bytes_s", rate, "of each node"),
    "disk": ("disk_bytes", size, "local disk of each node for records"),
    "disk_rate": ("disk_bytes_s", rate, "of it"),
    "records": ("records", count, "in the set"),
    "record_bytes": ("record_bytes", size, "of an encoded record"),
    "raw_bytes": ("raw_bytes", size, "of a sample before encoding"),
    "encode": ("encode_s", seconds, "of one encoder for one sample"),
    "read": ("read_s", seconds, "of a reader's core for one sample"),
    "write": ("write_s", seconds, "to convert, sum and write one record"),
    "workers": ("workers", count, "processes that read, for each encoder"),
    "encoders": ("encoders", count, "in all; left out: 1 to all ranks are tried"),
    "start": ("start_s", seconds, "of a process until its first read"),
    "fill_start": ("fill_start_s", seconds, "the same where training starts at once"),
    "batch": ("batch", count, "examples of one rank"),
    "examples": ("examples", count, "of an epoch"),
    "example_bytes": ("example_bytes", size, "that one takes out of a record"),
    "epochs": ("epochs", count, "of the run"),
    "shuffle": ("shuffle", _shuffle, "true, block or false, as of a loader"),
    "partition": ("partition", _partition, "global or static: each rank keeps one part"),
    "step": ("step_s", seconds, "of computing, loading left out"),
    "step_spread": ("step_spread", part, "of its length between ranks and steps"),
    "sync": ("sync_s", seconds, "after each step, for the sum of gradients"),
    "depth": ("depth", count, "batches loaded ahead"),
    "copy_rate": ("copy_bytes_s", rate, "within host memory, one thread"),
    "h2d_rate": ("h2d_bytes_s", rate, "from host memory to a GPU"),
    "device_rate": ("device_bytes_s", rate, "within a GPU"),
    "seed": ("seed", count, "of orders and step lengths"),
}
"""Key to (field of `Scenario`, how it is read, what it is)."""
PRICE_KEYS: Mapping[str, tuple[str, str]] = {
    "price_node_hour": ("node_hour", "of one node, an hour"),
    "price_gb_month": ("gb_month", "of 10^9 bytes in the store, a month"),
    "price_gb_read": ("gb_read", "of reading 10^9 bytes out of the store"),
}
REQUIRED = ("records", "record_bytes", "batch", "step", "host_memory")


def parse_scenario(words: Sequence[str], known: Mapping[str, Any] | None = None) -> Scenario:
    """Return a scenario from `key=value` words.

    Args:
        words: As typed.
        known: Fields of `Scenario` that are known from elsewhere; words win over them.

    Raises:
        ConfigError: A key is unknown, given twice or missing, or a value has no unit.

    >>> found = parse_scenario("records=1e6 record_bytes=1MB batch=32 step=20ms host_memory=64GB".split())
    >>> found.records, found.step_s, found.world_size
    (1000000, 0.02, 1)
    """
    values, prices, seen = dict(known or {}), dict[str, float](), set[str]()
    for word in words:
        key, equals, text = word.partition("=")
        if not equals:
            raise ConfigError(f"{word!r} is not of the form key=value", hint="Expected words like nodes=8")
        if key in seen:
            raise ConfigError(f"{key} is given twice", hint="Give it once")
        seen.add(key)
        try:
            if key in KEYS:
                field, read, _ = KEYS[key]
                values[field] = read(text)
            elif key in PRICE_KEYS:
                prices[PRICE_KEYS[key][0]] = number(text)
            else:
                raise ConfigError(f"{key} is not a key of a simulation ({_near(key)})")
        except ConfigError as error:
            fact = error.fact if error.fact.startswith(key) else f"{key}: {error.fact}"
            raise ConfigError(fact, hint=error.hint) from None
    lacking = [key for key in REQUIRED if KEYS[key][0] not in values]
    if lacking:
        raise ConfigError(
            f"a simulation needs {', '.join(f'{key}=' for key in lacking)}",
            hint="Give them, as records=1e6 record_bytes=100kB batch=64 step=20ms host_memory=64GB, or a "
            "CONFIG whose data and cache have them",
        )
    values["host_memory_bytes"] = int(values["host_memory_bytes"])
    try:
        return replace(Scenario(**values), prices=Prices(**prices))
    except ConfigError as error:
        raise ConfigError(_in_keys(error.fact), hint=error.hint) from None


def _in_keys(message: str) -> str:
    """Return a message that begins with a field of a scenario, with the key of that field in its place."""
    keys = {field: key for key, (field, *_) in [*KEYS.items(), *PRICE_KEYS.items()]}
    name, _, rest = message.partition(" ")
    return f"{keys.get(name, name)} {rest}"


def _near(key: str) -> str:
    every = [*KEYS, *PRICE_KEYS]
    found = difflib.get_close_matches(key, every, n=1, cutoff=0.5)
    return f"did you mean {found[0]}?" if found else f"there are: {', '.join(every)}"
