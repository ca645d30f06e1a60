"""The names of the earlier system that kept rows of a database in the memory of a GPU.

Two earlier systems had a `GPUCachedDataset`. That of images is `stoker.compat.GPUCachedDataset`.
"""

from stoker.extras.compat.images import GPUDataLoader
from stoker.extras.compat.rows import GPUCachedRows as GPUCachedDataset
from stoker.extras.compat.rows import collate_gpu_cached, create_gpu_cached_dataloaders

__all__ = ["GPUCachedDataset", "GPUDataLoader", "collate_gpu_cached", "create_gpu_cached_dataloaders"]
