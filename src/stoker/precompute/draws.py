"""Whether an encoder draws random numbers: a cache would keep one draw, and another fill another."""

from __future__ import annotations

import pickle
import random
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from stoker.errors import EncoderError

RANDOM_ENCODER = (
    "the encoder gives other values when it is called again on the same samples: field {name!r} changes"
    "{far}, since the encoder draws random numbers, or keeps something from one call to the next; a cache "
    "would keep one draw, and each fill another. Return what does not change, as the mean in place of a "
    "sample (`vae.encode(x).latent_dist.mean`), or seed the generator at the start of each call "
    "(`torch.manual_seed(0)`)"
)

TOLERANCE = 1e-4
"""Relative to the largest value: what another machine, library or order of summation may change. As much as
`check_encoder` allows for a sample's neighbours."""


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


def refuse_random(first: Mapping[str, Tensor], second: Mapping[str, Tensor], *, exact: bool) -> None:
    """Compare what two calls gave for the same samples.

    Args:
        first, second: Each field `(n, *shape)` on the CPU.
        exact: Bit for bit; otherwise floats may differ by rounding. Encoders may sum in no fixed order also
            on a CPU: torch's `index_put_(accumulate=True)` on several threads never gives the same bits.

    Raises:
        EncoderError: A field differs by more.
    """
    for name, tensor in first.items():
        other = second.get(name)
        if other is not None and other.shape == tensor.shape and _bytes(tensor) == _bytes(other):
            continue
        far = float("inf") if other is None else distance(tensor, other)
        floats = tensor.is_floating_point() and not exact
        if not floats or far > max(TOLERANCE, 2 * torch.finfo(tensor.dtype).eps):
            by = f" by {far:.2g} of its largest value" if 0 < far < float("inf") else ""
            raise EncoderError(RANDOM_ENCODER.format(name=name, far=by))


def distance(stored: Tensor, fresh: Tensor) -> float:
    """Largest difference as a fraction of the largest value of `fresh`; infinite for another shape.

    >>> distance(torch.tensor([1.0, 4.0]), torch.tensor([1.0, 5.0]))
    0.2
    """
    if stored.shape != fresh.shape:
        return float("inf")
    if not fresh.numel():
        return 0.0
    a, b = stored.double(), fresh.double()
    same = (a == b) | (a.isnan() & b.isnan())
    if bool(same.all()):
        return 0.0
    far = (a - b).abs()[~same].nan_to_num(nan=float("inf"), posinf=float("inf"))
    return float(far.max()) / max(float(b.abs().nan_to_num(0.0).max()), 1e-300)


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
