"""Sizes, times and shares as people type them."""

from __future__ import annotations

import re

import typer

from stoker.units import TIMES, parse_bytes


def size(text: str) -> int:
    """Bytes.

    >>> size("20GB"), size("1.5 GiB"), size("4096")
    (20000000000, 1610612736, 4096)
    """
    found = parse_bytes(text)
    if found is None:
        raise typer.BadParameter(f"{text!r} is no size. Write 20GB, 512MiB or a number of bytes")
    return found


def duration(text: str) -> float:
    """Seconds.

    >>> duration("30d"), duration("12 h")
    (2592000.0, 43200.0)
    """
    number, unit = _split(text)
    if unit not in TIMES:
        raise typer.BadParameter(f"{text!r} is no time. Write 30d, 12h or 90min")
    return number * TIMES[unit]


def share(text: str) -> float:
    """A fraction above 0 and at most 1.

    >>> share("5%"), share("0.05"), share("1")
    (0.05, 0.05, 1.0)
    """
    number, unit = _split(text)
    fraction = number / 100 if unit == "%" else number
    if unit not in ("", "%") or not 0 < fraction <= 1:
        raise typer.BadParameter(f"{text!r} is no share. Write 5% or 0.05, more than 0 and at most all")
    return fraction


def _split(text: str) -> tuple[float, str]:
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d+)?)\s*([A-Za-z]*|%)\s*", text)
    return (float(match[1]), match[2].lower()) if match else (0.0, "?")
