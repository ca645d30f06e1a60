"""How many random examples a test tries: all where slow tests run too, a quarter of them in a plain run."""

from __future__ import annotations

_PLAIN_SHARE = 4
_LEAST = 10
_run = {"plain": False}


def set_plain(plain: bool) -> None:
    """Say, before tests are collected, whether this is a plain run (`./run test`)."""
    _run["plain"] = plain


def example_count(full: int) -> int:
    """Return how many of `full` random examples this run tries; the next run draws others."""
    return max(min(full, _LEAST), full // _PLAIN_SHARE) if _run["plain"] else full
