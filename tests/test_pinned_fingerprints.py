"""Identities of public encoders and sources as released: another digest means that caches are encoded again.

Change a digest only together with a line in the changelog that says whose caches are encoded again.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from stoker import HDF5Source, TorchSource
from stoker.encoders.grid import GridEncoder
from stoker.encoders.module import ModuleEncoder
from stoker.encoders.normalize import Normalized, Statistics
from stoker.schema import digest_json
from stoker.sources.arrays import ArraySource
from stoker.sources.protocol import Source


def grid() -> GridEncoder:
    return GridEncoder(channels=2, grid=(8, 8), patch=(4, 4), tokens=4, dim=8)


def grid_3d() -> GridEncoder:
    return GridEncoder(channels=2, grid=(4, 6, 8), patch=(2, 2, 2), tokens=12, dim=8)


def normalized() -> Normalized:
    rule = Statistics(field="data", method="standard", shift=(0.5, -1.0), scale=(2.0, 1.0), digest="0" * 64)
    return Normalized(grid(), rule)


def sequential() -> ModuleEncoder:
    module = nn.Sequential(nn.Conv2d(1, 2, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(18, 4))
    state = {
        name: torch.arange(tensor.numel(), dtype=torch.float32).reshape(tensor.shape) / 16
        for name, tensor in module.state_dict().items()
    }
    module.load_state_dict(state)
    return ModuleEncoder(module)


def identity() -> ModuleEncoder:
    return ModuleEncoder(nn.Identity())


@pytest.mark.parametrize(
    ("make", "digest"),
    [
        (grid, "c56d00c15698466eb3c2c9d40438c4968fbf1cd220954639c5f25f04892e077b"),
        (grid_3d, "b8e76f20a0a00ddbc42523212ca82f992caf6a30342fb7925b81ab32fff58179"),
        (normalized, "84c4144aeb53b0f00e7ef5fdcc0fdf2e0b73d5d035c5b3126edf85e17d0c71b3"),
        (sequential, "3ab8a2c853c43af5d15b9426cce3da47c354e625c37c37fb4dee3250282a7717"),
        (identity, "a0f1663a5a22e327a74e29454187ef54e1d96fe346ca40ef94279e7637cd2ea4"),
    ],
)
def test_an_encoder_keeps_its_identity(
    make: Callable[[], GridEncoder | Normalized | ModuleEncoder], digest: str
) -> None:
    assert digest_json(make().identity()) == digest


def hdf5(folder: Path) -> Source:
    with h5py.File(folder / "a_Nu0.01.hdf5", "w") as file:
        file["tensor"] = np.arange(96, dtype=np.float32).reshape(4, 3, 8)
        file["x-coordinate"] = np.arange(8, dtype=np.float32)
        file["t-coordinate"] = np.arange(4, dtype=np.float32)
    return HDF5Source(folder)


def arrays(folder: Path) -> Source:
    with h5py.File(folder / "a.h5", "w") as file:
        for name in ("one", "two"):
            file.create_group(name)["u"] = np.arange(12, dtype=np.float32).reshape(4, 3)
            file[name].attrs["nu"] = 0.25
    return ArraySource(folder / "a.h5", attributes=["nu"])


def tensors(folder: Path) -> Source:
    return TorchSource(TensorDataset(torch.arange(24.0).reshape(6, 4), torch.arange(6)))


@pytest.mark.parametrize(
    ("make", "digest"),
    [
        (hdf5, "8c37502afd6a58d093d4d19d44a4ba158e17e73336045946aec0ab4bb0825fa7"),
        (arrays, "e54474cd345dfb85a1a06c58fa149a8e67e8f4cb61d56305e2518597f114bcdc"),
        (tensors, "1c8dca3229fb45cac678788dadaf10e9e2dc2ead74b4ebb1f72513ee46bc8e89"),
    ],
)
def test_a_source_keeps_its_identity(make: Callable[[Path], Source], digest: str, tmp_path: Path) -> None:
    found = make(tmp_path).identity()
    parts = [
        [part.name, part.count, dict(part.values), part.selection, part.digest, [f.name for f in part.files]]
        for part in found.parts
    ]
    assert digest_json([found.kind, parts, dict(found.settings), found.sampled]) == digest
