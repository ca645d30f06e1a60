"""Scenarios as people type them: `key=value` words, sizes, rates and times with their units."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from stoker.errors import ConfigError
from stoker.plan.simulation.scenario import LOCAL, ORDERS, Order, Prices, Scenario
from stoker.units import SIZES, TIMES

NUMBER = re.compile(r"\s*([+-]?\d[\d_,]*(?:\.\d+)?(?:e[+-]?\d+)?)\s*(.*?)\s*", re.IGNORECASE)
MULTIPLES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "ki": 2.0**10, "mi": 2.0**20, "gi": 2.0**30}
STORES = (LOCAL, "s3", "gs", "az", "http", "nfs", "folder")
"""All but the first are alike here: reached over the network, and differ in rate, latency and blocks."""
SHORT_TIMES = {"ms": 1e-3, "us": 1e-6, "ns": 1e-9}


def count(text: str) -> int:
    """A whole number.

    >>> count("1_000_000"), count("1e9"), count("500")
    (1000000, 1000000000, 500)
    """
    number, unit = _split(text)
    if unit or number != int(number):
        raise ConfigError(f"{text!r} is not a whole number. Expected 500, 1_000_000 or 1e9")
    return int(number)


def number(text: str) -> float:
    """A number without a unit.

    >>> number("2.59")
    2.59
    """
    value, unit = _split(text)
    if unit:
        raise ConfigError(f"{text!r} has a unit. Expected a number alone")
    return value


def size(text: str) -> float:
    """Bytes; the unit is required.

    >>> size("80GB"), size("1 TiB"), size("4096B")
    (80000000000.0, 1099511627776.0, 4096.0)
    """
    value, unit = _split(text)
    if not unit or unit.lower() not in SIZES:
        raise ConfigError(f"{text!r} has no unit of size. Expected 80GB, 512MiB or 4096B")
    if unit.endswith("b"):
        raise ConfigError(
            f"{text!r} may be of bits: b is a bit, B a byte. Expected {value:g}{unit[:-1].capitalize()}B"
        )
    return value * SIZES[unit.lower()]


def seconds(text: str) -> float:
    """Seconds; the unit is required, unless it is 0.

    >>> seconds("20ms"), seconds("2us"), seconds("1.5h"), seconds("0")
    (0.02, 2e-06, 5400.0, 0.0)
    """
    value, unit = _split(text)
    known = {**TIMES, **SHORT_TIMES}
    if unit.lower() not in known and not (value == 0 and not unit):
        raise ConfigError(f"{text!r} has no unit of time. Expected 20ms, 2s or 1h")
    return value * known.get(unit.lower(), 1.0)


def rate(text: str) -> float:
    """Bytes a second. `Gb/s` is of bits, as networks are sold, `GB/s` of bytes; the unit is required.

    >>> rate("25Gb/s"), rate("2GB/s"), rate("100 MiB/s"), rate("400Gbit/s")
    (3125000000.0, 2000000000.0, 104857600.0, 50000000000.0)
    """
    value, unit = _split(text)
    match = re.fullmatch(r"([kmgt]?i?)(bit|b|B)(?:/s|ps)", unit, re.IGNORECASE)
    if match is None:
        raise ConfigError(f"{text!r} has no unit of rate. Expected 25Gb/s (bits) or 3GB/s (bytes)")
    bits = match[2] != "B"
    return value * MULTIPLES[match[1].lower()] / (8 if bits else 1)


def part(text: str) -> float:
    """A fraction.

    >>> part("10%"), part("0.1")
    (0.1, 0.1)
    """
    value, unit = _split(text)
    if unit not in ("", "%"):
        raise ConfigError(f"{text!r} is not a fraction. Expected 10% or 0.1")
    return value / 100 if unit else value


def _split(text: str) -> tuple[float, str]:
    match = NUMBER.fullmatch(text)
    if match is None:
        raise ConfigError(f"{text!r} does not begin with a number. Expected a number and its unit")
    value = float(match[1].replace("_", "").replace(",", ""))
    if value < 0:
        raise ConfigError(f"{text!r} is below 0. Expected 0 or more")
    if math.isinf(value):
        raise ConfigError(f"{text!r} is too large for a number. Expected less")
    return value, match[2]


def _order(text: str) -> Order:
    if text not in ORDERS:
        raise ConfigError(f"{text!r} is unknown. Expected {', '.join(ORDERS)}")
    return text


def _store(text: str) -> str:
    if text not in STORES:
        raise ConfigError(
            f"{text!r} is unknown. Expected {LOCAL}, each node's own disk, or a store that all nodes "
            f"reach over the network: {', '.join(STORES[1:])}"
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
    "readers": ("readers", count, "processes that read, for each encoder"),
    "encoders": ("encoders", count, "in all; left out: 1 to all ranks are tried"),
    "start": ("start_s", seconds, "of a process until its first read"),
    "batch": ("batch", count, "examples of one rank"),
    "examples": ("examples", count, "of an epoch"),
    "example_bytes": ("example_bytes", size, "that one takes out of a record"),
    "epochs": ("epochs", count, "of the run"),
    "order": ("order", _order, "full, block or static"),
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
    """A scenario from `key=value` words.

    Args:
        words: As typed.
        known: Fields of `Scenario` that are known from elsewhere; words win over them.

    Raises:
        ConfigError: A key is unknown, given twice or missing, or a value has no unit.

    >>> found = parse_scenario("records=1e6 record_bytes=1MB batch=32 step=20ms host_memory=64GB".split())
    >>> found.records, found.step_s, found.world
    (1000000, 0.02, 1)
    """
    values, prices, seen = dict(known or {}), dict[str, float](), set[str]()
    for word in words:
        key, equals, text = word.partition("=")
        if not equals:
            raise ConfigError(f"{word!r} is not of the form key=value. Expected words like nodes=8")
        if key in seen:
            raise ConfigError(f"{key} is given twice. Give it once")
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
            said = str(error)
            raise ConfigError(said if said.startswith(key) else f"{key}: {said}") from None
    lacking = [key for key in REQUIRED if KEYS[key][0] not in values]
    if lacking:
        raise ConfigError(
            f"a simulation needs {', '.join(f'{key}=' for key in lacking)}. "
            "Give them, as records=1e6 record_bytes=100kB batch=64 step=20ms host_memory=64GB, "
            "or a CONFIG whose data and cache have them"
        )
    values["host_memory_bytes"] = int(values["host_memory_bytes"])
    try:
        return replace(Scenario(**values), prices=Prices(**prices))
    except ConfigError as error:
        raise ConfigError(_in_keys(str(error))) from None


def _in_keys(message: str) -> str:
    """A message that begins with a field of a scenario, with the key of that field in its place."""
    keys = {field: key for key, (field, *_) in [*KEYS.items(), *PRICE_KEYS.items()]}
    name, _, rest = message.partition(" ")
    return f"{keys.get(name, name)} {rest}"


def _near(key: str) -> str:
    every = [*KEYS, *PRICE_KEYS]
    found = difflib.get_close_matches(key, every, n=1, cutoff=0.5)
    return f"did you mean {found[0]}?" if found else f"there are: {', '.join(every)}"
