"""splitmix64: random 64-bit words that are a pure function of a base and a number.

Nothing here depends on a library's random number generator, so words are the same on every device, version
and machine. The steps are written down once and run on a Python int, on numpy's uint64, and on torch's int64
of the same bits (torch has no arithmetic on uint64).

Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014).
"""

from __future__ import annotations

from enum import IntEnum, unique
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

GAMMA, MIX_A, MIX_B = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
MASK = (1 << 64) - 1
STEPS = ((30, MIX_A), (27, MIX_B), (31, 1))
"""Of the finalizer: exclusive or with the word shifted right by this, then times this."""


@unique
class Salt(IntEnum):
    """Purpose of a sequence of random words: equal numbers would give equal words. Part of every order."""

    ORDER = 0
    TRANSFORM = 2
    SUBSET = 3
    TURNS = 4
    FILLING = 5
    WINDOW = 6
    CHOICE = 7


def mix(value: int) -> int:
    """Apply the finalizer to one number.

    >>> hex(mix(0x9E3779B97F4A7C15))  # first output of splitmix64 seeded with 0
    '0xe220a8397b1dcdaf'
    """
    value &= MASK
    for shift, factor in STEPS:
        value = (value ^ (value >> shift)) * factor & MASK
    return value


def mix_(words: Any, scratch: NDArray[np.uint64] | None = None) -> Any:
    """Apply the finalizer to an array of words in place, and return it.

    Args:
        words: numpy uint64 or torch int64.
        scratch: For numpy, room for as many words.
    """
    on_host = isinstance(words, np.ndarray)
    for shift, factor in STEPS:
        words ^= shifted(words, shift, scratch)
        if factor != 1:
            words *= np.uint64(factor) if on_host else signed(factor)
    return words


def stream(seed: int, epoch: int, salt: Salt = Salt.ORDER) -> int:
    """Return the base of the words of one epoch; other salts give independent ones."""
    return mix(mix(mix(seed + GAMMA) ^ (epoch + 1) * GAMMA) + salt * MIX_A)


@overload
def keys_of(base: int, numbers: NDArray[Any]) -> NDArray[np.uint64]: ...
@overload
def keys_of(base: int, numbers: Tensor) -> Tensor: ...
def keys_of(base: int, numbers: Any) -> Any:
    """Return word `i` of the sequence that starts at `base` for each `i` of `numbers`, in the same shape."""
    if isinstance(numbers, np.ndarray):
        words = (numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(GAMMA) + np.uint64(base)
        return mix_(words, np.empty_like(words))
    return mix_((numbers + 1).mul_(signed(GAMMA)).add_(signed(base)))


def shifted(words: Any, shift: int, out: NDArray[np.uint64] | None = None) -> Any:
    """Shift words right as if they had no sign; numpy's may go to `out`."""
    if isinstance(words, np.ndarray):
        return np.right_shift(words, np.uint64(shift), out=out)
    return (words >> shift).bitwise_and_((1 << (64 - shift)) - 1)


def remainders(words: Any, below: Any) -> Any:
    """Return each word, as a number without sign, modulo the int64 number at its place; int64."""
    if isinstance(words, np.ndarray):
        return (words % below.astype(np.uint64)).astype(np.int64)
    # Of a word without sign, in two steps that int64 can hold.
    return (shifted(words, 1) % below * 2 + (words & 1)) % below


def signed(value: int) -> int:
    """Return the int64 that has the same bits."""
    return value - (1 << 64) if value >> 63 else value
