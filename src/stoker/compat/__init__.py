"""The names of the earlier systems, thin over what is here now; docs/migration.md maps every one.

caches.py    whether a cache is complete, what it takes in memory, what names it
latents.py   trajectories of latents: datasets and loaders of the latent cache
images.py    a set of images in the memory of a GPU
rows.py      a table of rows in the memory of a GPU

Signatures are those of the earlier systems. What they got wrong is not kept: a cache is named by what is in
it, workers do not encode, nothing is dropped or zero-filled, a missing split is an error.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stoker.compat.caches import (
        check_cache_complete,
        check_sufficient_ram,
        compute_cache_hash,
        estimate_cache_size_mb,
    )
    from stoker.compat.images import GPUCachedDataset, GPUDataLoader, create_gpu_cached_dataloaders
    from stoker.compat.latents import (
        LatentPair,
        PreloadedCacheDataset,
        RawFieldDataset,
        build_latent_pair_loader,
        build_parallel_latent_loader,
        latent_pair_collate,
    )

__all__ = [
    "GPUCachedDataset",
    "GPUDataLoader",
    "LatentPair",
    "PreloadedCacheDataset",
    "RawFieldDataset",
    "build_latent_pair_loader",
    "build_parallel_latent_loader",
    "check_cache_complete",
    "check_sufficient_ram",
    "compute_cache_hash",
    "create_gpu_cached_dataloaders",
    "estimate_cache_size_mb",
    "latent_pair_collate",
]

_HOMES = {
    **dict.fromkeys(
        ("check_cache_complete", "check_sufficient_ram", "compute_cache_hash", "estimate_cache_size_mb"),
        "caches",
    ),
    **dict.fromkeys(("GPUCachedDataset", "GPUDataLoader", "create_gpu_cached_dataloaders"), "images"),
}


def __getattr__(name: str) -> object:
    """Import a name when it is first asked for (PEP 562)."""
    if name not in __all__:
        raise AttributeError(f"module 'stoker.compat' has no attribute {name!r}. Names: {', '.join(__all__)}")
    return getattr(import_module(f"stoker.compat.{_HOMES.get(name, 'latents')}"), name)
