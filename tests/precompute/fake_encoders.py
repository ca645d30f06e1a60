"""Encoders for the tests of precompute."""

from __future__ import annotations

import time

import numpy as np
import torch

from stoker.encoders.protocol import EncodeBatchSize
from stoker.schema import Field


class FakeEncoder:
    """A linear map of each time step, `latent` (T, 3), and `nu` passed through.

    With `by_shape` the output depends on the batch's shape, so that a wrong group changes every record.
    """

    def __init__(
        self,
        *,
        samples=4,
        steps=None,
        by_shape=False,
        ragged=False,
        raises=None,
        oom_above=None,
        sleep_s=0.0,
        nan_at=None,
    ):
        self.samples, self.steps = samples, steps
        self.by_shape, self.ragged = by_shape, ragged
        self.raises, self.oom_above, self.sleep_s, self.nan_at = raises, oom_above, sleep_s, nan_at
        self.calls: list[tuple[int, ...]] = []
        generator = torch.Generator().manual_seed(0)
        self.weight = torch.randn(5, 3, generator=generator)

    @property
    def independent_steps(self):
        return self.steps is not None

    def schema(self, sample_schema):
        data = sample_schema["data"]
        return {
            "latent": Field(shape=(data.shape[0], 3), dtype="float32", time=data.time, ragged=data.ragged),
            "nu": Field(shape=(), dtype="float32"),
        }

    def encode_batch_size(self, sample_schema):
        return EncodeBatchSize(samples=self.samples, steps=self.steps)

    def encode(self, batch):
        data = batch["data"]
        self.calls.append(tuple(data.shape))
        if self.sleep_s:
            time.sleep(self.sleep_s)
        if self.oom_above is not None and data.shape[0] > self.oom_above:
            raise torch.OutOfMemoryError("CUDA out of memory (fake)")
        if self.raises is not None and bool((batch["nu"] == np.float32(self.raises) / np.float32(7)).any()):
            raise ValueError("this encoder does not like that sample")
        latent = data @ self.weight
        if self.by_shape:
            latent = latent * (1 + 0.125 * data.shape[0] + 0.25 * data.shape[1])
        if self.nan_at is not None:
            latent = latent.clone()
            latent[batch["nu"] == np.float32(self.nan_at) / np.float32(7)] = float("nan")
        return {"latent": latent, "nu": batch["nu"]}

    def to(self, device):
        self.weight = self.weight.to(device)

    def weights(self):
        return {"weight": self.weight}

    def identity(self):
        return {
            "class": "FakeEncoder",
            "config": {"samples": self.samples, "by_shape": self.by_shape},
            "version": 1,
        }
