"""What public encoders and sources say of themselves, as a digest: their part of a fingerprint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import h5py
import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.pins.names import (
    ArraySource,
    GridEncoder,
    HDF5Source,
    ModuleEncoder,
    Normalized,
    Statistics,
    TorchSource,
    digest_json,
)


def grid() -> Any:
    return GridEncoder(channels=2, grid=(8, 8), patch=(4, 4), tokens=4, dim=8)


def grid_3d() -> Any:
    return GridEncoder(channels=2, grid=(4, 6, 8), patch=(2, 2, 2), tokens=12, dim=8)


def normalized() -> Any:
    rule = Statistics(field="data", method="standard", shift=(0.5, -1.0), scale=(2.0, 1.0), digest="0" * 64)
    return Normalized(grid(), rule)


def sequential() -> Any:
    module = nn.Sequential(nn.Conv2d(1, 2, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(18, 4))
    state = {
        name: torch.arange(tensor.numel(), dtype=torch.float32).reshape(tensor.shape) / 16
        for name, tensor in module.state_dict().items()
    }
    module.load_state_dict(state)
    return ModuleEncoder(module)


def identity() -> Any:
    return ModuleEncoder(nn.Identity())


def hdf5(folder: Path) -> Any:
    with h5py.File(folder / "a_Nu0.01.hdf5", "w") as file:
        file["tensor"] = np.arange(96, dtype=np.float32).reshape(4, 3, 8)
        file["x-coordinate"] = np.arange(8, dtype=np.float32)
        file["t-coordinate"] = np.arange(4, dtype=np.float32)
    return HDF5Source(folder)


def arrays(folder: Path) -> Any:
    with h5py.File(folder / "a.h5", "w") as file:
        for name in ("one", "two"):
            file.create_group(name)["u"] = np.arange(12, dtype=np.float32).reshape(4, 3)
            file[name].attrs["nu"] = 0.25
    return ArraySource(folder / "a.h5", attributes=["nu"])


def tensors(_: Path) -> Any:
    return TorchSource(TensorDataset(torch.arange(24.0).reshape(6, 4), torch.arange(6)))


def of_encoder(make: Callable[[], Any]) -> str:
    """Return the digest of an encoder's identity."""
    return digest_json(make().identity())


def of_source(make: Callable[[Path], Any]) -> str:
    """Return the digest of a source's identity, without the content of its files."""
    with TemporaryDirectory() as folder:
        found = make(Path(folder)).identity()
    parts = [
        [part.name, part.count, dict(part.values), part.selection, part.digest, [f.name for f in part.files]]
        for part in found.parts
    ]
    return digest_json([found.kind, parts, dict(found.settings), found.sampled])


CASES: dict[str, Callable[[], str]] = {
    "grid": lambda: of_encoder(grid),
    "grid 3d": lambda: of_encoder(grid_3d),
    "normalized": lambda: of_encoder(normalized),
    "module of torch's parts": lambda: of_encoder(sequential),
    "module, identity": lambda: of_encoder(identity),
    "hdf5": lambda: of_source(hdf5),
    "arrays": lambda: of_source(arrays),
    "torch": lambda: of_source(tensors),
}
