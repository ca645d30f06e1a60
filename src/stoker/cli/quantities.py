"""Sizes, times and shares as people type them."""

from __future__ import annotations

import re

import typer

from stoker.units import TIMES, parse_bytes


def size(text: str) -> int:
    """Return bytes. A number without a unit is refused: who types 20 rarely means 20 bytes. 0 needs none.

    >>> size("20GB"), size("1.5 GiB"), size("4096B"), size("0")
    (20000000000, 1610612736, 4096, 0)
    """
    found = parse_bytes(text)
    if found is None:
        raise typer.BadParameter(f"{text!r} is not a size. Write a number with a unit, as 20GB or 512MiB")
    if found and text.strip()[-1].isdigit():
        raise typer.BadParameter(
            f"{text!r} has no unit. Write {text.strip()}GB, or {text.strip()}B for bytes"
        )
    return found


def duration(text: str) -> float:
    """Return seconds.

    >>> duration("30d"), duration("12 h")
    (2592000.0, 43200.0)
    """
    number, unit = _split(text)
    if unit not in TIMES:
        raise typer.BadParameter(f"{text!r} is not a time. Write a number with a unit, as 30d, 12h or 90min")
    return number * TIMES[unit]


def share(text: str) -> float:
    """Return a fraction above 0 and at most 1.

    >>> share("5%"), share("0.05"), share("1")
    (0.05, 0.05, 1.0)
    """
    number, unit = _split(text)
    fraction = number / 100 if unit == "%" else number
    if unit not in ("", "%") or not 0 < fraction <= 1:
        raise typer.BadParameter(f"{text!r} is not a share. Write 5% or 0.05, more than 0 and at most all")
    return fraction


def _split(text: str) -> tuple[float, str]:
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d+)?)\s*([A-Za-z]*|%)\s*", text)
    return (float(match[1]), match[2].lower()) if match else (0.0, "?")
