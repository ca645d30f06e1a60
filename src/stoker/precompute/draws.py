"""Whether an encoder draws random numbers: a cache would keep one draw, and another fill another."""

from __future__ import annotations

import pickle
import random
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

RANDOM_ENCODER = (
    "the encoder gives other values when it is called again on the same samples: field {name!r} changes, "
    "since the encoder draws random numbers; a cache would keep one draw, and each fill another. Return what "
    "does not change, as the mean in place of a sample (`vae.encode(x).latent_dist.mean`), or call "
    "torch.manual_seed(0) at the start of each call"
)


def random_states(device: torch.device) -> tuple[object, ...]:
    """Return the global random states that code on `device` draws from, to be compared."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    return (
        random.getstate(),
        pickle.dumps(np.random.get_state()),
        *(state.numpy().tobytes() for state in states),
    )


def differing_field(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> str | None:
    """Return the first field whose bytes are not the same in both."""
    for name, tensor in first.items():
        other = second.get(name)
        if other is None or other.shape != tensor.shape or _bytes(tensor) != _bytes(other):
            return name
    return None


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
