"""Question: how much faster is a transformer encoder when samples of similar length are encoded together?

Token sequences of 16 to 512, mostly short (log-normal, median 60), through `torch.nn.TransformerEncoder`. Three
ways: each sample alone; padded to the next of 16, 32, ... 512 with others of that length; all padded to 512.
The complete call of precompute is timed, the ways in turns, workers as by default. The row holds seconds of
the call and in the encoder, and the ratios to `alone`. Records are compared: relative to the largest value,
no number may differ by more than `TOLERANCE`.

On a CPU a call of one sample of 60 tokens already keeps both cores busy where the model is wide, so that the
ratio shows padding and overhead of a call. `--width 32 --layers 1` shows calls that are mostly overhead.

    python benchmarks/ragged_encode.py [--save] [--samples 2000] [--width 256] [--layers 4] [--batch 8]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
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


def encoder(way: str, options: argparse.Namespace) -> stoker.ModuleEncoder:
    """Return the encoder of one way."""
    lengths = {"alone": None, "lengths": LENGTHS, "all padded": LENGTHS[-1:]}[way]
    return stoker.ModuleEncoder(
        Transformer(options.width, options.layers).eval().requires_grad_(requires_grad=False),
        field="tokens",
        mask="keep",
        lengths=lengths,
        encode_batch=None if lengths is None else options.batch,
        version="benchmark",
    )


def run(way: str, options: argparse.Namespace, folder: Path) -> Any:
    """Fill one cache, and return the report."""
    settings = PrecomputeSettings(progress=None, device=options.device)
    source = stoker.TorchSource(Sequences(options.samples))
    return run_precompute(source, encoder(way, options), folder, name="c", settings=settings)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--sdpa", action="store_true", help="attention that does not write out all scores")
    options = parser.parse_args()
    torch.backends.mha.set_fastpath_enabled(not options.sdpa)
    ways = ("alone", "lengths", "all padded")
    seconds: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    far = 0.0
    for turn in range(options.rounds):
        with tempfile.TemporaryDirectory() as folder:
            reports = {way: run(way, options, Path(folder) / way) for way in ways}
            for way, report in reports.items():
                seconds[way].append((report.seconds, report.encode_seconds))
                print(
                    f"round {turn}: {way} {report.seconds:.2f} s, encoder {report.encode_seconds:.2f} s",
                    flush=True,
                )
            for number in range(options.samples):
                alone = reports["alone"].cache[number]["latent"]
                for way in ways[1:]:
                    far = max(far, distance(reports[way].cache[number]["latent"], alone))
    assert far <= TOLERANCE, f"records differ by {far:.2g} of their largest value"
    whole, inside = (
        {way: statistics.median(one[place] for one in seconds[way]) for way in ways} for place in (0, 1)
    )
    row = {
        "device": options.device,
        "samples": options.samples,
        "model": [options.width, options.layers],
        "batch": options.batch,
        "sdpa": options.sdpa,
        "seconds": {way: round(value, 3) for way, value in whole.items()},
        "encoder_seconds": {way: round(value, 3) for way, value in inside.items()},
        "ratio": {way: round(whole["alone"] / whole[way], 2) for way in ways[1:]},
        "encoder_ratio": {way: round(inside["alone"] / inside[way], 2) for way in ways[1:]},
        "largest_difference": far,
    }
    print(row["ratio"], row["encoder_ratio"], f"largest difference {far:.1e}")
    publish("ragged_encode", [row], save=options.save)


if __name__ == "__main__":
    main()
