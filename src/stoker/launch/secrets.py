"""Which variables of the environment are secrets, and messages without them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping

_SECRET = re.compile(r"KEY|SECRET|TOKEN|PASS|CREDENTIAL|AUTH", re.IGNORECASE)
SHORTEST = 6
"""Shorter values are words that messages have for other reasons."""


def secrets_of(environment: Mapping[str, str], names: Iterable[str] = ()) -> tuple[str, ...]:
    """Values that no output may show, the longest first: those of `names`, and of names that say so."""
    named = set(names)
    values = {
        value
        for name, value in environment.items()
        if (name in named or _SECRET.search(name)) and len(value) >= SHORTEST
    }
    return tuple(sorted(values, key=len, reverse=True))


def shown_in(text: str, environment: Mapping[str, str], names: Iterable[str] = ()) -> list[str]:
    """Names of variables whose values a text shows."""
    values = secrets_of(environment, names)
    return sorted(name for name, value in environment.items() if value in values and value in text)


def without_secrets(text: str) -> str:
    """A message of another program, with the secrets of our environment taken out."""
    for value in secrets_of(os.environ):
        text = text.replace(value, "***")
    return text
