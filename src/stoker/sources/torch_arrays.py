"""Digest of arrays and tensors that a Dataset holds in memory, without a copy of them.

They are hashed in blocks of 1 MiB, so that neither a transposed array nor one on a GPU is copied whole. Above
`LIMIT_BYTES` in all, blocks are drawn with a fixed seed instead: hashing must stay cheaper than encoding.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import xxhash

from stoker.units import GIB, MIB

LIMIT_BYTES = 4 * GIB
"""Arrays of one Dataset up to this are hashed in full."""
_BLOCK_BYTES = MIB


def plain_array(value: Any) -> Any:
    """The values as plain tensor or numpy array in the same memory (of a sparse tensor a pair); else None."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        with torch._C.DisableTorchFunctionSubclass():  # a subclass must not run its own code
            tensor = value.detach()
            if tensor.layout == torch.strided:
                return tensor.as_subclass(torch.Tensor)
            entries = tensor.to_sparse_coo()
            return entries._indices(), entries._values()
    if isinstance(value, np.ndarray):
        return np.ndarray.view(value, np.ndarray)
    if isinstance(value, np.generic):
        return np.asarray(value)
    if isinstance(value, bytes | bytearray):
        return np.asarray(memoryview(value))
    return None


def digest_array(array: Any, fraction: float) -> str:
    """The xxh3 of dtype, shape and values; of `fraction` of its blocks, drawn with a fixed seed."""
    order = _memory_order(array)
    digest = xxhash.xxh3_128(f"{array.dtype} {tuple(array.shape)} {order} {min(fraction, 1.0)}".encode())
    array = array.transpose(order) if isinstance(array, np.ndarray) else array.permute(order)
    if getattr(array, "is_meta", False):
        return digest.hexdigest()
    draw = np.random.default_rng(0)
    for place, block in enumerate(_blocks(array)):
        if fraction >= 1 or place == 0 or draw.random() < fraction:
            digest.update(_bytes(block))
    return digest.hexdigest()


def _memory_order(array: Any) -> list[int]:
    """Axes from the slowest in memory to the fastest, so that a transposed array is read in one go."""
    strides = array.strides if isinstance(array, np.ndarray) else array.stride()
    return sorted(range(array.ndim), key=lambda axis: -abs(strides[axis]) if array.shape[axis] > 1 else 0)


def _blocks(array: Any) -> Iterator[Any]:
    """Views of at most 1 MiB, in order."""
    if array.ndim == 0 or array.nbytes <= _BLOCK_BYTES:
        yield array
        return
    row_bytes = array.nbytes // len(array)
    if row_bytes > _BLOCK_BYTES:
        for row in array:
            yield from _blocks(row)
        return
    step = _BLOCK_BYTES // row_bytes
    for first in range(0, len(array), step):
        yield array[first : first + step]


def _bytes(block: Any) -> Any:
    if not isinstance(block, np.ndarray | np.generic):
        import torch

        flat = block.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        block = flat.view(torch.uint8).numpy()
    return np.ascontiguousarray(block).reshape(-1).view(np.uint8).data
