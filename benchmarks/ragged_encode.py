"""Question: how much faster is a transformer encoder when samples of similar length are encoded together?

Token sequences of 16 to 512, mostly short (log-normal, median 60), through `torch.nn.TransformerEncoder`. Three
ways: each sample alone; padded to the next of 16, 32, ... 512 with others of that length; all padded to 512.
The complete call of precompute is timed, the ways in turns, workers as by default. The row holds seconds of
the call and in the encoder, and the ratios to `alone`. Records are compared: relative to the largest value,
no number may differ by more than `TOLERANCE`.

Two models: in the small one calls are mostly overhead; in the other one sample of 60 tokens already keeps two
cores busy, so that the ratio shows padding. Attention does not write out all scores (torch's "fast path" does, and
is slower).

    python benchmarks/ragged_encode.py [--save] [--samples 1000] [--models 32x1 256x4] [--batch 8] [--device cpu]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import stoker
from measure import publish
from stoker.precompute import PrecomputeSettings, run_precompute
from stoker.precompute.encode import TOLERANCE, distance

LENGTHS = (16, 32, 64, 128, 256, 512)
TOKENS = 1000
WAYS = ("alone", "lengths", "all padded")


class Sequences(torch.utils.data.Dataset[dict[str, Any]]):
    """Random tokens of random length."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        rng = np.random.default_rng(index)
        return {"tokens": rng.integers(0, TOKENS, int(np.clip(rng.lognormal(np.log(60), 0.9), 16, 512)))}


class Transformer(nn.Module):
    """Embedding, layers, and the mean over the real tokens."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(TOKENS, width)
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    def forward(self, tokens: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        """Return one vector for each sequence."""
        states = self.layers(self.embed(tokens), src_key_padding_mask=~keep)
        return (states * (keep[..., None] / keep.sum(1)[:, None, None])).sum(1)


def encoder(way: str, model: Sequence[int], batch: int) -> stoker.ModuleEncoder:
    """Return the encoder of one way."""
    lengths = {"alone": None, "lengths": LENGTHS, "all padded": LENGTHS[-1:]}[way]
    return stoker.ModuleEncoder(
        Transformer(*model).eval().requires_grad_(requires_grad=False),
        field="tokens",
        mask="keep",
        lengths=lengths,
        encode_batch=None if lengths is None else batch,
        version="benchmark",
    )


def run(way: str, model: Sequence[int], options: argparse.Namespace, folder: Path) -> Any:
    """Fill one cache, and return the report."""
    settings = PrecomputeSettings(progress=None, device=options.device)
    source = stoker.TorchSource(Sequences(options.samples))
    return run_precompute(source, encoder(way, model, options.batch), folder, name="c", settings=settings)


def measure(model: Sequence[int], options: argparse.Namespace) -> dict[str, Any]:
    """Return the row of one model."""
    seconds: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    far = 0.0
    for turn in range(options.rounds):
        with tempfile.TemporaryDirectory() as folder:
            reports = {way: run(way, model, options, Path(folder) / way) for way in WAYS}
            for way, report in reports.items():
                seconds[way].append((report.seconds, report.encode_seconds))
                said = f"{report.seconds:.2f} s, encoder {report.encode_seconds:.2f} s"
                print(f"{model} round {turn}: {way} {said}", flush=True)
            for number in range(options.samples):
                alone = reports["alone"].cache[number]["latent"]
                for way in WAYS[1:]:
                    far = max(far, distance(reports[way].cache[number]["latent"], alone))
    assert far <= TOLERANCE, f"records differ by {far:.2g} of their largest value"
    whole, inside = (
        {way: statistics.median(one[place] for one in seconds[way]) for way in WAYS} for place in (0, 1)
    )
    return {
        "device": options.device,
        "samples": options.samples,
        "width": model[0],
        "layers": model[1],
        "batch": options.batch,
        "seconds": {way: round(value, 3) for way, value in whole.items()},
        "encoder_seconds": {way: round(value, 3) for way, value in inside.items()},
        "ratio": {way: round(whole["alone"] / whole[way], 2) for way in WAYS[1:]},
        "encoder_ratio": {way: round(inside["alone"] / inside[way], 2) for way in WAYS[1:]},
        "largest_difference": far,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--models", nargs="+", default=["32x1", "256x4"], help="width x layers")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.backends.mha.set_fastpath_enabled(False)
    rows = [measure([int(size) for size in model.split("x")], options) for model in options.models]
    publish("ragged_encode", rows, save=options.save)


if __name__ == "__main__":
    main()
