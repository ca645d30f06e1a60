"""One line for any torch `Dataset`: encode once, then serve."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from stoker.encoders.module import ModuleEncoder
from stoker.encoders.protocol import Encoder
from stoker.loader import Loader
from stoker.precompute import precompute
from stoker.sources.protocol import Source
from stoker.sources.torch_dataset import TorchSource

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.data import Dataset


def cached(
    dataset: Dataset[Any] | Source,
    encoder: Encoder | nn.Module | None = None,
    *,
    cache_dir: str | Path = ".stoker",
    batch_size: int = 64,
    device: str = "auto",
    **loader: Any,
) -> Loader:
    """A loader over everything in `dataset`, which is read and encoded on the first call alone.

    Args:
        dataset: Any map-style dataset, or a `Source`. Its class names the cache.
        encoder: An `Encoder`, or a frozen module that takes the field `data` (for more, wrap it in a
            `ModuleEncoder`). None: samples as they are.
        cache_dir: The cache is made in `<cache_dir>/<name>/<fingerprint>`.
        batch_size: Samples, or windows, in a batch.
        device: Where the encoder runs and batches are wanted; `auto`: a GPU where there is one.
        **loader: Further arguments of `Loader`.
    Raises:
        StokerError: As `precompute` and `Loader`.
    """
    import torch

    source = dataset if isinstance(dataset, Source) else TorchSource(cast("Any", dataset))
    if isinstance(encoder, torch.nn.Module) and not isinstance(encoder, Encoder):
        encoder = ModuleEncoder(encoder)
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    cache = precompute(
        source, cast("Encoder | None", encoder), Path(cache_dir), name=name_of(dataset), device=device
    )
    return Loader(cache, batch_size=batch_size, device=device, **loader)


def name_of(dataset: object) -> str:
    """The cache's name: the class of the dataset, in lower case."""
    return type(dataset).__name__.lower()
