"""Checks of arguments: each of one kind, before anything is read or encoded.

Later, a wrong argument would be an error of Python's own, which names neither the argument nor what was
expected. Or it would be taken for something else: `overwrite="no"` is true.
"""

from __future__ import annotations

import math
import os
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from stoker.errors import ConfigError, StokerError


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of argument."""

    wanted: str
    """What it is, for the hint."""
    accepts: Callable[[object], bool]
    """Returns True for a value of the kind."""


def check(given: Mapping[str, tuple[object, Kind]], error: type[StokerError] = ConfigError) -> None:
    """Refuse arguments that are not of their kind.

    Args:
        given: Value and kind of each, by name.
        error: What is raised.

    Raises:
        StokerError: Names the argument, its value and what was expected; of the class `error`.

    >>> check({"overwrite": ("no", FLAG)})
    Traceback (most recent call last):
    stoker.errors.ConfigError: overwrite is 'no'. Expected True or False
    """
    for name, (value, kind) in given.items():
        if not kind.accepts(value):
            raise error(f"{name} is {reprlib.repr(value)}", hint=f"Expected {kind.wanted}")


def whole(*, least: int | None = None) -> Kind:
    """Return the kind of whole numbers; numpy's count too, booleans do not."""

    def accepts(value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            return False
        return least is None or int(value) >= least

    return Kind("a whole number" + ("" if least is None else f" of at least {least}"), accepts)


def number(wanted: str, *, least: float = -math.inf, most: float = math.inf, above: bool = False) -> Kind:
    """Return the kind of numbers within bounds; NaN is refused.

    Args:
        wanted: What it is, for the hint.
        least, most: The bounds.
        above: `least` itself is too small.
    """

    def accepts(value: object) -> bool:
        if isinstance(value, bool | np.bool_) or not isinstance(value, int | float | np.number):
            return False
        found = cast("float", value)
        return bool(least <= found <= most) and not (above and found == least)

    return Kind(wanted, accepts)


def finite(*, least: float | None = None, most: float | None = None, above: float | None = None) -> Kind:
    """Return the kind of finite numbers within bounds, named by them."""
    limits = "" if least is None else f" of at least {least}"
    limits += "" if above is None else f" above {above}"
    limits += "" if most is None else f" and at most {most}"
    if least is not None and most is not None:
        limits = f" from {least} to {most}"
    low = above if least is None else least
    kind = number(
        f"a finite number{limits}",
        least=-math.inf if low is None else low,
        most=math.inf if most is None else most,
        above=above is not None,
    )
    return Kind(kind.wanted, lambda value: kind.accepts(value) and math.isfinite(cast("float", value)))


def one_or_several(kind: Kind) -> Kind:
    """Return the kind of values of a kind, or lists of at least one of them."""
    each = several(kind, "")

    def accepts(value: object) -> bool:
        return kind.accepts(value) or (each.accepts(value) and len(cast("Sequence[object]", value)) > 0)

    return Kind(f"{kind.wanted}, or a list of such numbers", accepts)


def or_none(kind: Kind) -> Kind:
    """Return the kind of values that may be left out."""
    return Kind(f"{kind.wanted}, or None", lambda value: value is None or kind.accepts(value))


def several(kind: Kind, wanted: str) -> Kind:
    """Return the kind of lists of a kind; text is refused, and not taken for its letters."""

    def accepts(value: object) -> bool:
        if isinstance(value, str | bytes) or not isinstance(value, Sequence | np.ndarray | range):
            return False
        return all(kind.accepts(one) for one in cast("Sequence[object]", value))

    return Kind(wanted, accepts)


FLAG = Kind("True or False", lambda value: isinstance(value, bool | np.bool_))
TEXT = Kind("text", lambda value: isinstance(value, str) and value != "")
NAME = Kind("the name of a field", TEXT.accepts)
PATH = Kind("a path", lambda value: isinstance(value, str | os.PathLike) and str(cast("str", value)) != "")
NUMBER = Kind(
    "a number",
    lambda value: isinstance(value, int | float | np.number) and not isinstance(value, bool),
)
SIZES = several(whole(), "whole numbers, as (64, 64)")
_SIDES = several(whole(least=1), "")
IMAGE_SIZE = Kind(
    "(height, width) in pixels, as (224, 224)",
    lambda value: _SIDES.accepts(value) and len(cast("Sequence[object]", value)) == 2,
)
BATCH = or_none(whole(least=1))
"""Samples in one call of an encoder."""
LENGTHS = or_none(several(whole(least=1), "rising whole numbers, as (64, 128, 256)"))
"""Lengths that samples are padded to."""
_LIST_OF_NAMES = several(NAME, "")
NAMES = Kind(
    "the name of a field, or a list of names",
    lambda value: NAME.accepts(value) or isinstance(value, set | frozenset) or _LIST_OF_NAMES.accepts(value),
)
_LIST_OF_FUNCTIONS = several(Kind("", callable), "")
FUNCTIONS = Kind(
    "a function f(batch, keys), or a list of functions",
    lambda value: callable(value) or _LIST_OF_FUNCTIONS.accepts(value),
)
_LIST_OF_WHOLE = several(whole(), "")


def _are_axes(value: object) -> bool:
    if not _LIST_OF_WHOLE.accepts(value):
        return False
    axes = list(cast("Sequence[int]", value))
    return bool(axes) and max(axes) < 0 and len(set(axes)) == len(axes)


AXES = Kind(
    "a list of different negative numbers, counted from the last axis: -3 and -2 are height and width of "
    "(H, W, C)",
    _are_axes,
)
MAPPING = Kind("a mapping by name", lambda value: isinstance(value, Mapping))
