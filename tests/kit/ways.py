"""Ways to serve a cache, for tests that ask all of them one question on several devices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch

import stoker
from stoker.loader import Loader, Mixture, Normalization, OneOf, Pad, Rows, Span, Windows
from stoker.transforms import Crop, DrawLatent, DropCondition, Flip, Noise, Normalize, Roll, Take, Views
from tests.loader.caches import folded, trajectories, write_cache

COUNT = 48
SHARDS = (9, 7, 12)
SHAPES = ((2, 3, 4), (2, 4, 3), (2, 5, 5))


def write_caches(folder: Path) -> dict[str, Any]:
    """Caches of every kind of field, by name; of some kinds two that are joined."""
    generator = torch.Generator().manual_seed(3)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    pixels = torch.randint(0, 256, (COUNT, 3, 12, 12), dtype=torch.uint8, generator=generator)
    lengths = [(7 * number) % 23 for number in range(COUNT)]
    bags = {
        "features": [some(rows, 3) for rows in lengths],
        "places": [torch.arange(2 * rows).view(rows, 2) for rows in lengths],
        "large": [some(60 + rows, 2) for rows in lengths],
        "view": some(COUNT, 4, 2, 5).half(),
        "clip": torch.randint(0, 255, (COUNT, 9, 2), generator=generator, dtype=torch.uint8),
        "label": torch.arange(COUNT),
    }
    shaped = {
        **folded("image", [some(*SHAPES[number % 7 % 3]) for number in range(COUNT)], 3),
        **folded("spread", [some(*SHAPES[number % 7 % 3]).abs() for number in range(COUNT)], 3),
        "words": [torch.arange(1 + number % 2) for number in range(COUNT)],
        "kind": torch.arange(COUNT) % 5,
    }
    tokens = {
        "ids": [torch.arange(1 + number * 37 % 20) for number in range(COUNT)],
        "states": [some(1 + number * 37 % 20, 3) for number in range(COUNT)],
        "label": torch.arange(COUNT),
    }
    moments = {
        "mean": some(COUNT, 4, 3, 2).half(),
        "std": some(COUNT, 4, 3, 2).abs(),
        "label": torch.arange(COUNT),
    }
    text = {"hidden": [some(1 + number % 4, 3) for number in range(COUNT)]}
    kept = {
        "timed": (trajectories(COUNT), {"timed": ("latent", "time")}),
        "images": ({"image": pixels}, {}),
        "ragged": ({"u": [some(4 + number % 5, 6) for number in range(COUNT)]}, {}),
        "quantized": (
            {"z": some(COUNT, 4, 64), "bag": [some(rows + 1, 64) for rows in lengths]}, {"dtype": "int8"}
        ),
        "bags": (bags, {}),
        "shaped": (shaped, {"axes": dict.fromkeys(("image", "spread"), ("2", "*", "*"))}),
        "tokens": (tokens, {}),
        "moments": (moments, {}),
        "text": (text, {}),
    }  # fmt: skip
    made: dict[str, Any] = {
        name: write_cache(folder, values, shards=SHARDS, name=name, **how)
        for name, (values, how) in kept.items()
    }
    made["joined"] = stoker.zip(latent=made["moments"], text=made["text"], on="index")
    return made


IMAGE = {"image": Normalization(mean=(0.4, 0.5, 0.6), std=0.2, divisor=255)}
LATENT = Windows(field="latent", horizon=2)
HALF = Normalization(mean=0.5, std=0.5)
SPREAD = DrawLatent(mean="image", std="spread")
CUT = [Crop((8, 8), axes=(-2, -1)), Flip(axis=-1)]
SHIFTED = [Crop((8, 8), axes=(-2, -1), padding=2, border="reflect"), Flip(axis=-2), Roll(axes=(-1,))]
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "records": ("moments", {}),
    "windows": ("timed", {"windows": LATENT}),
    "windows, drawn": ("timed", {"windows": Windows(field="latent", stride=(1, 2), horizon=(1, 3))}),
    "windows, normalized": ("timed", {"windows": LATENT, "normalize": {"latent": HALF}}),
    "windows, transforms": (
        "timed", {"windows": LATENT, "transforms": [Normalize(mean=0.5, std=2.0), Roll(axes=(-2,))]},
    ),
    "rows as examples": ("ragged", {"windows": Windows(horizon=0)}),
    "normalized": ("images", {"normalize": IMAGE, "dtype": "bfloat16"}),
    "cropped": ("images", {"normalize": IMAGE, "transforms": CUT}),
    "lists": ("ragged", {}),
    "padded": ("ragged", {"ragged": Pad(multiple=4, value=-1)}),
    "packed": ("ragged", {"ragged": "pack"}),
    "quantized": ("quantized", {"dtype": "float16"}),
    "weights": ("timed", {"weights": range(1, COUNT + 1)}),
    "weights, no record twice": (
        "bags", {"weights": stoker.Weights(range(1, COUNT + 1), replacement=False, samples=30)},
    ),
    "the second of two ranks": ("ragged", {"rank": 1, "world_size": 2, "ragged": "pad"}),
    "tokens of the second rank": ("tokens", {"rank": 1, "world_size": 2, "batch_tokens": 64}),
    "blocks": ("timed", {"windows": LATENT, "shuffle": "block(3,12)"}),
    "buckets": ("ragged", {"shuffle": "bucket(2)"}),
    "random rows": ("bags", {"choose": {("features", "places"): Rows(5), "large": Rows(70)}}),
    "even rows": ("bags", {"choose": {"features": Rows(5, random=False), "clip": Rows(4)}}),
    "crops": ("bags", {"choose": {"large": Span(9), "clip": Span(4), "features": Span(6, random=False)}}),
    "one of several views": ("bags", {"choose": {"view": OneOf()}}),
    "views in turn": ("bags", {"choose": {"view": OneOf("rotate")}}),
    "the first view": ("bags", {"choose": {"view": OneOf(False)}}),
    "rows that are normalized": ("bags", {"choose": {"clip": Rows(4)}, "normalize": {"clip": HALF}}),
    "rows that are quantized": ("quantized", {"choose": {"bag": Rows(3), "z": Span(2)}}),
    "rows by weight": ("bags", {"choose": {"features": Rows(5)}, "weights": range(1, COUNT + 1)}),
    "batches of one shape": ("shaped", {"batch_by": "shape"}),
    "batches of one kind": ("shaped", {"batch_by": "kind"}),
    "many shapes, lists": ("shaped", {}),
    "many shapes, padded": ("shaped", {"ragged": "pad"}),
    "many shapes, packed": ("shaped", {"ragged": "pack"}),
    "a budget of tokens": ("tokens", {"batch_tokens": 64}),
    "joined caches": ("joined", {}),
    "joined caches, choices": ("joined", {"choose": {"text": Rows(2)}, "ragged": "pad"}),
    "two views": ("images", {"transforms": Views(transforms=CUT, count=2)}),
    "shifted and padded": ("images", {"transforms": SHIFTED}),
    "a piece": ("images", {"transforms": Take({-1: slice(0, 12, 3)})}),
    "dropped conditions": ("moments", {"transforms": DropCondition("label", p=0.5, null=1000)}),
    "dropped tokens": ("tokens", {"batch_tokens": 64, "transforms": DropCondition("ids", p=0.5, null=0)}),
    "dropped captions": (
        "joined",
        {"ragged": "pad", "transforms": DropCondition("text", p=0.5, null=torch.ones(2, 3))},
    ),
}  # fmt: skip
"""By name the cache and the settings of a loader; all but the device and the tier."""
DRAWN: dict[str, tuple[str, dict[str, Any]]] = {
    "noise": ("timed", {"windows": LATENT, "transforms": Noise(std=0.1)}),
    "latents from moments": ("moments", {"transforms": DrawLatent(scale=(1.0, 2.0, 0.5, 3.0), shift=0.25)}),
    "latents of one shape": ("shaped", {"batch_by": "shape", "transforms": SPREAD}),
}  # fmt: skip
"""The same with normal numbers, whose last bits differ between devices."""

SOME_WAITS = {"random rows", "even rows", "rows by weight", "joined caches, choices"} | {
    f"rows that are {how}" for how in ("normalized", "quantized")
}
"""Ways that draw different rows of a record at random, which the device is asked about until all differ."""


CHUNK_WAITS = ("bags", "ragged", "quantized", "shaped", "joined")
"""Caches with fields of varying length: the host has to know which records come, once for many batches."""


def most_chunk_waits(way: str) -> int:
    """Return how often, at most, the host asks the device which records come in a chunk of an epoch."""
    name, settings = {**WAYS, **DRAWN}[way]
    is_known_on_host = {"batch_by", "batch_tokens", "windows"} & settings.keys() or settings.get("shuffle")
    return 0 if is_known_on_host or name not in CHUNK_WAITS else 1


def loader_of(caches: Mapping[str, Any], way: str, **settings: Any) -> Loader:
    """Return a loader for one of the ways."""
    name, own = {**WAYS, **DRAWN}[way]
    size = {} if "batch_tokens" in own else {"batch_size": 32 if "windows" in own else 8}
    return Loader(caches[name], **{**size, "seed": 1, "shuffle": True, **own, **settings})


def mixture_of(caches: Mapping[str, Any], **settings: Any) -> Mixture:
    """Return a mixture, whose batches say which cache an example is of."""
    pair = [caches["timed"], caches["timed"]]
    return Mixture(pair, 6, windows=LATENT, names=["a", "b"], seed=2, **settings)


def tensors_of(batch: Any) -> dict[str, torch.Tensor]:
    """Return all tensors of a batch, or of a part of one, by where they are in it."""
    if isinstance(batch, torch.Tensor):
        return {"": batch}
    if isinstance(batch, Mapping):
        parts = [(str(name), part) for name, part in batch.items()]
    elif hasattr(batch, "_fields"):
        parts = [(name, getattr(batch, name)) for name in batch._fields]
    elif isinstance(batch, list | tuple):
        parts = [(str(place), part) for place, part in enumerate(batch)]
    elif is_dataclass(batch):
        parts = [(one.name, getattr(batch, one.name)) for one in fields(batch)]
    else:
        return {}
    return {f"{name}.{rest}": tensor for name, part in parts for rest, tensor in tensors_of(part).items()}


def check_batches(
    batches: Sequence[Any],
    expected: Sequence[Any],
    to_host: Callable[[str, torch.Tensor], torch.Tensor],
    *,
    tolerance: float = 0.0,
) -> None:
    """Compare batches on a device with those of the CPU.

    Args:
        batches: Those to check.
        expected: The same in host memory.
        to_host: Checks that a tensor, by its name, is on the device, and returns its values in host memory.
        tolerance: How far numbers with fractions may differ; 0: not by a bit.
    """
    assert len(batches) == len(expected)
    for batch, wanted in zip(batches, expected, strict=True):
        tensors, others = tensors_of(batch), tensors_of(wanted)
        assert tensors.keys() == others.keys()
        assert batch.position == wanted.position
        for name, tensor in tensors.items():
            values = to_host(name, tensor)
            assert tensor.dtype == others[name].dtype, name
            if tolerance and tensor.is_floating_point():
                torch.testing.assert_close(values, others[name], rtol=tolerance, atol=tolerance)
            else:
                assert torch.equal(values, others[name]), name
