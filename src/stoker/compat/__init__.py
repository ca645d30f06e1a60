"""The names of the earlier systems, thin over what is here now; docs/migration.md maps every one.

Signatures are those of the earlier systems. What they got wrong is not kept: a cache is named by what is in
it, workers do not encode, nothing is dropped or zero-filled. A missing split is an error. A name whose call
cannot mean what it promised is an error that names today's way.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stoker.extras.compat.caches import (
        check_cache_complete,
        check_cache_valid,
        check_sufficient_ram,
        compute_cache_hash,
        estimate_cache_size_mb,
        get_optimal_workers,
        is_network_storage,
        save_cache_metadata,
        validate_cache,
        validate_ram_for_cache,
    )
    from stoker.extras.compat.encoder import EarlierGridEncoder as GridEncoder
    from stoker.extras.compat.encoder import GridEncoderConfig
    from stoker.extras.compat.images import (
        GPUCachedDataset,
        GPUDataLoader,
        create_gpu_cached_dataloaders,
        disable_compile_for_debug,
        disable_torch_compile,
        find_optimal_batch_size,
    )
    from stoker.extras.compat.latents import (
        LatentPair,
        MultiTaskDistributedSampler,
        PreloadedCacheDataset,
        RawFieldDataset,
        build_latent_pair_loader,
        build_parallel_latent_loader,
        latent_pair_collate,
    )
    from stoker.extras.compat.rows import collate_gpu_cached

__all__ = [
    "GPUCachedDataset",
    "GPUDataLoader",
    "GridEncoder",
    "GridEncoderConfig",
    "LatentPair",
    "MultiTaskDistributedSampler",
    "PreloadedCacheDataset",
    "RawFieldDataset",
    "build_latent_pair_loader",
    "build_parallel_latent_loader",
    "check_cache_complete",
    "check_cache_valid",
    "check_sufficient_ram",
    "collate_gpu_cached",
    "compute_cache_hash",
    "create_gpu_cached_dataloaders",
    "disable_compile_for_debug",
    "disable_torch_compile",
    "estimate_cache_size_mb",
    "find_optimal_batch_size",
    "get_optimal_workers",
    "is_network_storage",
    "latent_pair_collate",
    "save_cache_metadata",
    "validate_cache",
    "validate_ram_for_cache",
]

_NAMES = {
    "caches": (
        "check_cache_complete", "check_cache_valid", "check_sufficient_ram", "compute_cache_hash",
        "estimate_cache_size_mb", "get_optimal_workers", "is_network_storage", "save_cache_metadata",
        "validate_cache", "validate_ram_for_cache",
    ),
    "encoder": ("GridEncoder", "GridEncoderConfig"),
    "images": (
        "GPUCachedDataset", "GPUDataLoader", "create_gpu_cached_dataloaders", "disable_compile_for_debug",
        "disable_torch_compile", "find_optimal_batch_size",
    ),
    "rows": ("collate_gpu_cached",),
}  # fmt: skip
"""Names by the module of `stoker.extras.compat` that has them; all others are in `latents`."""

REMOVED = {
    "BatchedCacheWriter": "stoker.precompute writes the cache, in checksummed shards",
    "CollateFnWithEncoding": "a loader's workers must not encode: build_parallel_latent_loader, or "
    "stoker.precompute and stoker.Loader",
    "GridLatentPairDataset": "encoding is not a dataset's work: build_parallel_latent_loader with the same "
    "dataset, encoder, coords, grid_shape and field_name",
    "ProgressWatchdog": "stoker.precompute watches every stage from its start: timeouts={'encode': 120}, or "
    "`stoker compat precompute --watchdog-timeout 120`",
}
"""Earlier names that are not offered, and what does their work."""


def __getattr__(name: str) -> object:
    """Import a name when it is first asked for (PEP 562)."""
    if name in REMOVED:
        raise AttributeError(f"stoker.compat has no {name}. Instead: {REMOVED[name]} (docs/migration.md)")
    if name not in __all__:
        raise AttributeError(f"module 'stoker.compat' has no attribute {name!r}. Names: {', '.join(__all__)}")
    home = next((module for module, names in _NAMES.items() if name in names), "latents")
    module = import_module(f"stoker.extras.compat.{home}")
    return getattr(module, "EarlierGridEncoder" if name == "GridEncoder" else name)
