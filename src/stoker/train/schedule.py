"""The learning rate of a step."""

from __future__ import annotations

import math

from stoker.train.config import TrainConfig

FINAL_RATE = 0.01
"""Part of the peak learning rate at which the cosine ends."""


def learning_rate(config: TrainConfig, step: int, total: int) -> float:
    """Rate of a step, counted from 0: a linear rise, then a cosine down to a hundredth of the peak.

    >>> [round(learning_rate(TrainConfig(lr=1.0, warmup=0.5), step, 4), 3) for step in range(4)]
    [0.5, 1.0, 1.0, 0.505]
    """
    rise = round(config.warmup * total)
    if step < rise:
        return config.lr * (step + 1) / rise
    part = (step - rise) / max(1, total - rise)
    return config.lr * (FINAL_RATE + (1 - FINAL_RATE) * 0.5 * (1 + math.cos(math.pi * part)))
