"""Numbers as people read them: bytes, seconds, counts, fractions.

Only faces (command line, reports, messages) format; everything below them passes plain
numbers with the unit in the name (`size_bytes`, `wait_s`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

KIB = 1024
MIB = 1024**2
GIB = 1024**3

SIZES = {
    "": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
"""Bytes of a unit as people type it, in lower case."""
TIMES = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
"""Seconds of one."""


def parse_bytes(text: str) -> int | None:
    """Return the bytes of a size as people type it; None if it is not one.

    >>> parse_bytes("20GB"), parse_bytes("1.5 GiB"), parse_bytes("4096"), parse_bytes("many")
    (20000000000, 1610612736, 4096, None)
    """
    found = re.fullmatch(r"\s*(\d{1,15}(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = None if found is None else SIZES.get(found[2].lower())
    return None if found is None or unit is None else int(float(found[1]) * unit)


def format_bytes(size_bytes: float) -> str:
    """Binary units with three significant figures at most.

    >>> format_bytes(0), format_bytes(900), format_bytes(6_606_029), format_bytes(18.8 * GIB)
    ('0 B', '900 B', '6.3 MiB', '18.8 GiB')
    """
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"


def format_seconds(duration_s: float) -> str:
    """Return a duration from nanoseconds to hours.

    >>> format_seconds(27e-6), format_seconds(0.0093), format_seconds(4.9), format_seconds(190)
    ('27 us', '9.3 ms', '4.9 s', '3 min 10 s')
    """
    if duration_s < 0.9995e-3:
        return f"{duration_s * 1e6:.3g} us"
    if duration_s < 0.9995:
        return f"{duration_s * 1e3:.3g} ms"
    if duration_s < 120:
        return f"{duration_s:.3g} s"
    minutes, seconds = divmod(round(duration_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s"


def format_rate(bytes_s: float) -> str:
    """Return bytes a second in decimal units, as networks and disks are sold.

    >>> format_rate(1e12), format_rate(3.13e9), format_rate(999.9e6), format_rate(math.inf)
    ('1 TB/s', '3.13 GB/s', '1 GB/s', 'no limit')
    """
    if math.isinf(bytes_s):
        return "no limit"
    units = ((1e12, "TB/s"), (1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s"))
    unit, name = next(((unit, name) for unit, name in units if bytes_s >= 0.9995 * unit), (1.0, "B/s"))
    return f"{bytes_s / unit:.3g} {name}"


def format_count(count: float, noun: str = "") -> str:
    """Thousands separated by commas, and what was counted.

    >>> format_count(1234567), format_count(1, "record"), format_count(2, "record")
    ('1,234,567', '1 record', '2 records')
    """
    number = f"{count:,.0f}"
    return f"{number} {noun}{'' if number == '1' else 's'}" if noun else number


def format_few(items: Iterable[object], most: int, separator: str = ", ") -> str:
    """Return the first `most` of some items, and how many more there are.

    >>> format_few(["a", "b"], 2), format_few("abcde", 3)
    ('a, b', 'a, b, c and 2 more')
    """
    shown = [str(item) for item in items]
    more = f" and {format_count(len(shown) - most)} more" if len(shown) > most else ""
    return separator.join(shown[:most]) + more


def format_percent(fraction: float) -> str:
    """Return a fraction as per cent, one decimal below ten.

    >>> format_percent(0.003), format_percent(0.56), format_percent(0)
    ('0.3 %', '56 %', '0 %')
    """
    percent = fraction * 100
    return f"{percent:.0f} %" if percent >= 9.95 or percent == 0 else f"{percent:.1f} %"
