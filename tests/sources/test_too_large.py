"""A number that the dtype it is read as cannot hold costs its sample, and the error says the number."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from stoker.errors import DecodeError
from stoker.precompute import PrecomputeSettings, run_precompute
from stoker.sources.arrays import ArraySource
from stoker.sources.hdf5 import HDF5Source
from stoker.sources.protocol import Source
from stoker.sources.tables import ParquetSource
from stoker.sources.tar import TarSource
from stoker.sources.torch_dataset import TorchSource

VALUES = np.random.default_rng(0).standard_normal((12, 2, 3))
VALUES[5, 1, 2] = -1e300


class Items(torch.utils.data.Dataset[Any]):
    """Arrays of float64, made by `convert`."""

    def __init__(self, convert: Callable[[Any], Any]) -> None:
        self.convert = convert

    def __len__(self) -> int:
        return len(VALUES)

    def __getitem__(self, index: int) -> Any:
        return {"a": self.convert(VALUES[index])}


def hdf5(folder: Path) -> Source:
    with h5py.File(folder / "a.h5", "w") as file:
        file.create_dataset("a", data=VALUES, chunks=(3, 2, 3))
    return HDF5Source(folder, fields={"a": "n x c"})


def arrays(folder: Path) -> Source:
    np.save(folder / "a.npy", VALUES)
    return ArraySource(folder / "a.npy")


def parquet(folder: Path) -> Source:
    rows = [row.reshape(-1).tolist() for row in VALUES]
    pq.write_table(pa.table({"a": pa.array(rows, pa.list_(pa.float64(), 6))}), folder / "a.parquet")
    return ParquetSource(folder)


def tar(folder: Path) -> Source:
    with tarfile.open(folder / "a.tar", "w") as archive:
        for number, values in enumerate(VALUES):
            file = io.BytesIO()
            np.save(file, values)
            info = tarfile.TarInfo(f"{number:02d}.npy")
            info.size = file.tell()
            archive.addfile(info, io.BytesIO(file.getvalue()))
    return TarSource(folder)


SOURCES = {
    "numpy": lambda _: TorchSource(Items(np.array)),
    "tensor": lambda _: TorchSource(Items(torch.tensor)),
    "complex": lambda _: TorchSource(Items(lambda values: values + 1j)),
    "hdf5": hdf5,
    "arrays": arrays,
    "parquet": parquet,
    "tar": tar,
}


@pytest.mark.parametrize("kind", SOURCES)
def test_a_number_too_large_is_said_and_costs_its_sample_alone(tmp_path: Path, kind: str) -> None:
    source = SOURCES[kind](tmp_path)

    with pytest.raises(DecodeError, match="1e\\+300"):
        source.read(5)
    settings = PrecomputeSettings(workers=0, progress=None, max_quarantined=0.1, nan="allow")
    cache = run_precompute(source, None, tmp_path / "caches", name="c", settings=settings).cache
    assert {number: failure.stage for number, failure in cache.quarantined.items()} == {5: "decode"}


def test_infinities_of_a_wider_dtype_are_no_overflow(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["a"] = np.full((4, 2, 3), np.inf)
    source = HDF5Source(tmp_path, fields={"a": "n x c"})

    assert np.isinf(source.read(2)["a"]).all()
