"""Every name of the product that the pins use. A rename is followed here, and nowhere else in this folder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from numpy.typing import NDArray

from stoker import (
    FeatureEncoder,
    GridEncoder,
    HDF5Source,
    ImageSource,
    Loader,
    Mixture,
    ModuleEncoder,
    SQLSource,
    TorchSource,
    Windows,
    cached,
    open_cache,
    precompute,
)
from stoker.cli.main import app
from stoker.encoders.mesh import MeshEncoder
from stoker.encoders.wrappers import FieldStatistics as Statistics
from stoker.encoders.wrappers import NormalizedEncoder as Normalized
from stoker.encoders.wrappers import SteadyEncoder
from stoker.errors import StokerError
from stoker.loader import Normalization, Pad, Weights
from stoker.loader.order import Draws, Order, epoch_on, parse_order
from stoker.schema import digest_json
from stoker.sources.arrays import ArraySource
from stoker.sources.meshes import MeshSource
from stoker.sources.splits import SplitOf, Subset
from stoker.sources.tables import DatasetsSource, ParquetSource
from stoker.sources.tar import TarSource
from stoker.store.joins import join_table
from stoker.testing import write_dexycb
from stoker.transforms import CropImages, Decode, Flip, Noise, Normalize, Roll

__all__ = [
    "ArraySource",
    "CropImages",
    "DatasetsSource",
    "Decode",
    "Draws",
    "FeatureEncoder",
    "Flip",
    "GridEncoder",
    "HDF5Source",
    "ImageSource",
    "Loader",
    "MeshEncoder",
    "MeshSource",
    "Mixture",
    "ModuleEncoder",
    "Noise",
    "Normalization",
    "Normalize",
    "Normalized",
    "Pad",
    "ParquetSource",
    "Roll",
    "SQLSource",
    "SplitOf",
    "Statistics",
    "SteadyEncoder",
    "StokerError",
    "Subset",
    "TarSource",
    "TorchSource",
    "Weights",
    "Windows",
    "app",
    "cached",
    "digest_json",
    "global_order",
    "join_table",
    "open_cache",
    "precompute",
    "write_dexycb",
]

CPU = torch.device("cpu")


def global_order(
    kind: str, count: int, seed: int, epoch: int, *, on_torch: bool, draws: Draws | None = None
) -> tuple[Callable[[int, int], Any], int]:
    """Return one epoch's order as a function of positions, made by numpy or by torch, and its length."""
    order = Order(
        kind=parse_order(kind, world_size=2, example_bytes=1024),
        count=count,
        seed=seed,
        global_batch=8,
        draws=draws,
    )
    made: Callable[[int, int], NDArray[Any] | torch.Tensor]
    made = epoch_on(order, epoch, CPU) if on_torch else order.epoch(epoch)
    return made, order.positions
