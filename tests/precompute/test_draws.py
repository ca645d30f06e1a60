"""An encoder that draws random numbers is refused, as a Dataset that does is."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import stoker
from stoker.encoders.module import ModuleEncoder
from stoker.errors import EncoderError


class Sampling(nn.Module):
    """A variational encoder that returns a sample of its distribution, or its mean."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.calls = 0
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "torch":
            return x + torch.randn_like(x)
        if self.way == "numpy":
            return x + float(np.random.rand())
        if self.way == "dropout":
            return F.dropout(x)
        if self.way == "own numpy":
            # One number for all could be within the tolerance of the next one.
            return x + torch.from_numpy(np.random.default_rng().random(x.shape)).to(x.dtype)
        if self.way == "own random":
            return x + torch.tensor([random.Random().random() for _ in range(x.shape[-1])])
        if self.way == "own torch":
            return x + torch.randn(x.shape, generator=self.generator)
        if self.way == "counter":
            self.calls += 1
            return x + self.calls
        if self.way == "unordered":
            self.calls += 1  # as torch's index_put_(accumulate=True) on several threads
            return x * (1 + 1e-6 * (self.calls % 2))
        if self.way == "seeded":
            torch.manual_seed(0)
            return x + torch.randn_like(x)
        if self.way == "own coins":  # a flip of half of the samples
            coins = torch.randint(0, 2, (len(x), 1), generator=self.generator).bool()
            return torch.where(coins, x.flip(1), x)
        if self.way == "own torch, whole batches":
            if 1 < len(x) < 256:
                raise ValueError("a part of a batch")
            return x + torch.randn(x.shape, generator=self.generator)
        if self.way == "drawn in vain":
            torch.randn(3)
        return x


def fill(folder: Path, way: str) -> Any:
    dataset = TensorDataset(torch.arange(1.0, 65.0).reshape(8, 8))
    return stoker.cached(
        dataset,
        ModuleEncoder(Sampling(way), field="0", version="1"),
        cache_dir=folder,
        precompute={"workers": 0},
        shuffle=True,
    )


@pytest.mark.parametrize(
    "way",
    [
        "torch", "numpy", "dropout", "own numpy", "own random", "own torch", "counter",
        "own torch, whole batches", "own coins",
    ],
)  # fmt: skip
def test_an_encoder_that_draws_random_numbers_is_refused(tmp_path: Path, way: str) -> None:
    with pytest.raises(EncoderError, match=r"'latent'.*random numbers"):
        fill(tmp_path, way)
    with pytest.raises(EncoderError, match=r"'latent'.*random numbers"):
        fill(tmp_path, way)  # nothing was stored that another run would take


@pytest.mark.parametrize("way", ["mean", "seeded", "drawn in vain", "unordered"])
def test_an_encoder_that_gives_the_same_again_is_taken(tmp_path: Path, way: str) -> None:
    ((latents,),) = list(fill(tmp_path, way))

    assert latents.shape == (8, 8)


def test_a_set_of_one_batch_is_encoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padded to 256 samples; those that are not padding twice more, to see whether the encoder draws."""
    monkeypatch.delitem(sys.modules, "torch._inductor", raising=False)
    samples: list[int] = []

    def encode(x: Tensor) -> Tensor:
        if x.any():
            samples.append(len(x))
        return x

    dataset = TensorDataset(torch.arange(1.0, 65.0).reshape(8, 8))
    stoker.cached(dataset, ModuleEncoder(encode, field="0", version="1"), cache_dir=tmp_path, shuffle=True)

    assert samples == [256, 8, 8]


@pytest.mark.parametrize("workers", [0, 1])
def test_an_encoder_that_changes_its_input_is_taken(tmp_path: Path, workers: int) -> None:
    """As a normalization with `inplace=True` does. Its second call needs the input of the first."""
    values = torch.arange(1.0, 65.0).reshape(8, 8)
    encoder = ModuleEncoder(lambda x: x.sub_(3).div_(2), field="0", version="1")
    cache = stoker.precompute(
        stoker.TorchSource(TensorDataset(values), version="a"), encoder, tmp_path, name="c", workers=workers
    )

    assert torch.equal(torch.stack([cache[n]["latent"] for n in range(8)]), (values - 3) / 2)
