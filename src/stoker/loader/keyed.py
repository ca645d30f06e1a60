"""Random numbers for transforms: row `i` depends on key `i` alone, never on how many rows there are.

splitmix64 with an increment of its own per key (`split` of Steele, Lea, Flood, OOPSLA 2014). Integers are
equal on every device and machine; so are uniform numbers, which are exact in float32. Normal numbers go
through the device's logarithm and cosine, and are equal on one kind of device.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from stoker.errors import ConfigError
from stoker.splitmix import GAMMA, MASK, MIX_A, MIX_B, Salt, keys_of, mix_, shifted, signed, stream

MASK_32 = (1 << 32) - 1


def example_keys(seed: int, epoch: int, examples: Tensor) -> Tensor:
    """The random key of each example in this epoch, int64, on the device of `examples`."""
    return keys_of(stream(seed, epoch, Salt.TRANSFORM), examples)


def child_keys(keys: Tensor, place: int) -> Tensor:
    """Keys of their own for part `place` of whatever `keys` stand for; same shape.

    A transform that draws for several purposes uses one child for each, so that none repeats another.
    """
    return mix_(mix_(keys + signed(GAMMA)) + signed(MIX_A * (place + 1) & MASK))


def bits(keys: Tensor, count: int) -> Tensor:
    """`(B, count)` int64, all 64 bits random; column `j` is the same whatever `count` is.

    Args:
        keys: `(B,)` int64, as a transform is given them.
    """
    steps = mix_(keys ^ signed(MIX_B)) | 1
    places = torch.arange(1, count + 1, device=keys.device)
    return mix_(torch.addcmul(keys[:, None], steps[:, None], places))


def uniform(keys: Tensor, count: int) -> Tensor:
    """`(B, count)` float32, multiples of 2^-24 in [0, 1)."""
    return shifted(bits(keys, count), 40).to(torch.float32).mul_(2.0**-24)


def integers(keys: Tensor, count: int, below: int) -> Tensor:
    """`(B, count)` int64 from 0 to `below - 1`, each as likely as another to within `below` / 2^32.

    Raises:
        ConfigError: `below` is not between 1 and 2^31.
    """
    if not 1 <= below <= 1 << 31:
        raise ConfigError(f"integers below {below} cannot be drawn. Expected 1 to {1 << 31}")
    return shifted(bits(keys, count), 32).mul_(below).bitwise_right_shift_(32)


def normal(keys: Tensor, count: int) -> Tensor:
    """`(B, count)` float32 of mean 0 and deviation 1, at most 6.8 in size.

    Box and Muller (1958): the halves of one word give radius and angle of two numbers.
    """
    words = bits(keys, (count + 1) // 2)
    radius = shifted(words, 32).to(torch.float32).add_(0.5).mul_(2.0**-32)
    radius.log_().mul_(-2).clamp_min_(0).sqrt_()
    angle = words.bitwise_and_(MASK_32).to(torch.float32).mul_(math.tau * 2.0**-32)
    pairs = torch.stack((angle.cos().mul_(radius), angle.sin_().mul_(radius)), dim=-1)
    return pairs.reshape(len(keys), -1)[:, :count]
