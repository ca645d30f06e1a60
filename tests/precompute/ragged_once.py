"""Ragged samples, an encoder that shows the row and shape of each call, and a run of both as a program.

`ragged_once.py FOLDER SAMPLES WORKERS DELAY`; shards are committed early, so that a kill finds some.
"""

from __future__ import annotations

import sys
import time

import numpy as np

from stoker.schema import Field
from tests.precompute.fake_sources import FakeSource

LENGTHS = (8, 16, 32)
FIELDS = {
    "data": Field(shape=(-1, 5), dtype="float32", ragged=True),
    "nu": Field(shape=(), dtype="float32"),
}


def length_of(number):
    """Mostly short; a few are empty, and a few are longer than the largest length."""
    rng = np.random.default_rng(number)
    return 0 if number % 37 == 5 else int(rng.integers(1, 45) if number % 3 else rng.integers(1, 9))


class RaggedData(FakeSource):
    """`data` (length, 5) and `nu`."""

    def schema(self):
        return FIELDS

    def read(self, number, start=None, stop=None):
        sample = super().read(number, start, stop)
        rng = np.random.default_rng(number)
        return sample | {"data": rng.standard_normal((length_of(number), 5), dtype=np.float32)}


class PlacedEncoder:
    """A linear map of each row whose result shows the shape of the call, and the sample's row in it."""

    independent_steps = False

    def __init__(self, *, samples=4, lengths=LENGTHS, shows=True, raises=(), oom_above=None, sleep_s=0.0):
        self.samples, self.lengths, self.shows = samples, lengths, shows
        self.raises, self.oom_above, self.sleep_s = raises, oom_above, sleep_s
        self.calls = []
        self.at = []

    def schema(self, sample_schema):
        return {
            "latent": Field(shape=(-1, 3), dtype="float32", ragged=True),
            "sum": Field(shape=(), dtype="float32"),
            "nu": Field(shape=(), dtype="float32"),
        }

    def encode_batch_size(self, sample_schema):
        from stoker.encoders.protocol import EncodeBatchSize

        return EncodeBatchSize(samples=self.samples, lengths=self.lengths)

    def encode(self, batch):
        import torch

        data, nu = batch["data"], batch["nu"]
        self.calls.append(tuple(data.shape))
        self.at.append(time.monotonic())
        time.sleep(self.sleep_s)
        if self.oom_above is not None and len(data) > self.oom_above:
            raise torch.OutOfMemoryError("CUDA out of memory (fake)")
        if any(bool((nu == np.float32(number) / np.float32(7)).any()) for number in self.raises):
            raise ValueError("this encoder does not like that sample")
        generator = torch.Generator().manual_seed(0)
        latent = data @ torch.randn(5, 3, generator=generator)
        if self.shows:
            rows = torch.arange(len(data), dtype=torch.float32)
            latent = latent * (1 + len(data) + 0.25 * data.shape[1] + 0.01 * rows[:, None, None])
        if self.lengths:
            real = torch.arange(data.shape[1])[None] < batch["data.lengths"][:, None]
            latent = torch.where(
                real[..., None], latent, torch.nan
            )  # what is behind the end is never looked at
            return {"latent": latent, "sum": data.sum((1, 2)), "nu": nu}
        return {"latent": latent, "sum": data.sum((1, 2)), "nu": nu}

    def to(self, device):
        pass

    def weights(self):
        return {}

    def identity(self):
        return {"class": "PlacedEncoder", "config": {"shows": self.shows}, "weights": "", "version": 1}


def main(folder, samples, workers, delay_s):
    from stoker.precompute import PrecomputeSettings, run_precompute
    from tests.precompute.run_once import seal_early

    seal_early()
    source = RaggedData((int(samples) // 3, int(samples) - int(samples) // 3), delay_s=float(delay_s), run=3)
    settings = PrecomputeSettings(workers=int(workers), progress=None)
    report = run_precompute(source, PlacedEncoder(sleep_s=0.01), folder, name="c", settings=settings)
    sys.stdout.write(f"{report.records} {report.encoded}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
