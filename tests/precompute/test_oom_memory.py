"""Out of memory while encoding: what the failed call held is free before the next one begins."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor

from stoker import TorchSource, precompute
from stoker.encoders.module import ModuleEncoder

ALIVE: list[int] = []
HELD: list[weakref.ref[Tensor]] = []


class Hungry(torch.nn.Module):
    """Has no memory for more than one sample, and holds a tensor of each call while it runs."""

    def forward(self, data: Tensor) -> Tensor:
        gc.collect()
        ALIVE.append(sum(ref() is not None for ref in HELD))
        activations = data * 2
        HELD.append(weakref.ref(activations))
        if data.shape[0] > 1:
            raise torch.OutOfMemoryError("CUDA out of memory (fake)")
        return activations


@pytest.mark.slow  # each half is a call of a process that checks itself first
def test_halving_keeps_nothing_of_the_calls_that_failed(tmp_path: Path) -> None:
    source = TorchSource(torch.utils.data.TensorDataset(torch.randn(8, 4)))
    field = next(iter(source.schema()))

    encoder = ModuleEncoder(Hungry(), field=field, time="none", version="1")

    gc.freeze()  # what other tests have left makes each collection take seconds
    try:
        cache = precompute(source, encoder, tmp_path, name="a", workers=0)
    finally:
        gc.unfreeze()

    assert len(cache) == 8
    assert max(ALIVE) == 0
