"""A failing sample is reported by the place where a user finds it: file and row, group, key or item."""

import io
import os
import sqlite3
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from stoker import HDF5Source, ImageSource, SQLSource, TorchSource
from stoker.errors import SourceError
from stoker.precompute import PrecomputeSettings, run_precompute
from stoker.sources.arrays import ArraySource
from stoker.sources.protocol import Source
from stoker.sources.splits import SplitOf, Subset
from stoker.sources.tables import ParquetSource
from stoker.sources.tar import TarSource

ROWS, BAD = 6, 4
"""Two files of so many samples; this one of the second file is NaN."""


def values(file: int) -> np.ndarray:
    array = np.arange(ROWS * 3, dtype="f4").reshape(ROWS, 3)
    if file:
        array[BAD, 1] = np.nan
    return array


def hdf5_rows(folder: Path) -> tuple[Source, str]:
    for file in range(2):
        with h5py.File(folder / f"{file}.h5", "w") as out:
            out["u"] = values(file)
    return HDF5Source(folder, fields={"u": "n c"}), f"{folder / '1.h5'}: row {BAD}"


def hdf5_groups(folder: Path) -> tuple[Source, str]:
    for file in range(2):
        with h5py.File(folder / f"{file}.h5", "w") as out:
            for row, array in enumerate(values(file)):
                out[f"run{row}/u"] = array
    return ArraySource(folder), f"{folder / '1.h5'}: group 'run{BAD}'"


def npy(folder: Path) -> tuple[Source, str]:
    for file in range(2):
        np.save(folder / f"{file}.npy", values(file))
    return ArraySource(folder), f"{folder / '1.npy'}: row {BAD}"


def parquet(folder: Path) -> tuple[Source, str]:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for file in range(2):
        pq.write_table(pa.table({"u": values(file)[:, 1]}), folder / f"{file}.parquet")
    return ParquetSource(folder), f"{folder / '1.parquet'}: row {BAD}"


def tar(folder: Path) -> tuple[Source, str]:
    for file in range(2):
        with tarfile.open(folder / f"{file}.tar", "w") as out:
            for row, array in enumerate(values(file)):
                data = io.BytesIO()
                np.save(data, array)
                info = tarfile.TarInfo(f"key{row}.npy")
                info.size = len(data.getvalue())
                out.addfile(info, io.BytesIO(data.getvalue()))
    return TarSource(folder), f"{folder / '1.tar'}: key 'key{BAD}'"


def sql(folder: Path) -> tuple[Source, str]:
    rows = [*values(0)[:, 1], *values(1)[:, 1]]
    with sqlite3.connect(folder / "lab.db") as database:
        database.execute("CREATE TABLE runs (id INTEGER PRIMARY KEY, u REAL)")
        inserted = [(10 * row, float("inf") if np.isnan(u) else float(u)) for row, u in enumerate(rows)]
        database.executemany("INSERT INTO runs VALUES (?, ?)", inserted)
    database.close()
    source = SQLSource(folder / "lab.db", table="runs", key="id", columns=["u"])
    return source, f"{folder / 'lab.db'}, runs, key {10 * (ROWS + BAD)}"


def images(folder: Path) -> tuple[Source, str]:
    image = pytest.importorskip("PIL.Image")
    for number in range(2 * ROWS):
        image.new("RGB", (4, 4)).save(folder / f"{number}.png")
    bad = folder / f"{ROWS + BAD}.png"
    os.truncate(bad, 40)
    return ImageSource(folder, size=(4, 4)), str(bad)


class Items:
    """A Dataset with one bad item."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((3,), float("nan") if index == 33 else 1.0)


def dataset(folder: Path) -> tuple[Source, str]:
    part = torch.utils.data.Subset(Items(), [*range(20, 20 + ROWS), *range(29, 29 + ROWS)])
    return TorchSource(part), f"item 33 of {__name__}.Items"


KINDS = [hdf5_rows, hdf5_groups, npy, parquet, tar, sql, images, dataset]


def failure(source: Source, folder: Path, **settings: Any) -> str:
    """The error of the one sample that fails."""
    report = run_precompute(
        source,
        None,
        folder / "cache",
        name="c",
        settings=PrecomputeSettings(progress=None, max_quarantined=1.0, **settings),
    )
    assert list(report.cache.quarantined) == [ROWS + BAD]
    return report.cache.quarantined[ROWS + BAD].error


@pytest.mark.parametrize("make", KINDS)
def test_a_failing_sample_is_named_by_its_place(tmp_path: Path, make: Callable[..., Any]) -> None:
    (tmp_path / "data").mkdir()
    source, place = make(tmp_path / "data")

    error = failure(source, tmp_path, workers=0)

    assert error.count(place) == 1, error


def test_workers_and_wrapped_sources_name_the_place_too(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    source, place = hdf5_rows(tmp_path / "data")

    assert failure(Subset(source, 11), tmp_path, workers=1).count(place) == 1


def test_a_split_names_the_row_in_the_file_not_the_number_in_the_split(tmp_path: Path) -> None:
    hdf5_rows(tmp_path)
    for source in (
        HDF5Source(tmp_path, fields={"u": "n c"}, split="val", splits={"train": 0.5, "val": 0.5}),
        SplitOf(ArraySource(tmp_path), "val", splits={"train": 0.5, "val": 0.5}),
    ):
        keys = [str(key) for key in source.keys()]  # noqa: SIM118 - not a dictionary
        assert keys
        assert keys != [f"{file}.h5:{row}" for file in range(2) for row in range(ROWS)][: len(keys)]
        for number, key in enumerate(keys):
            name, row = key.split(":")
            file = name if name.endswith(".h5") else f"{name}.h5"
            assert source.locate(number) == f"{tmp_path / file}: row {row}"


def test_a_damaged_chunk_is_named_once_by_file_and_row(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    path = tmp_path / "data" / "1.h5"
    for file in range(2):
        with h5py.File(tmp_path / "data" / f"{file}.h5", "w") as out:
            data = out.create_dataset("u", data=np.ones((ROWS, 64), "f4"), chunks=(1, 64), compression="gzip")
            at = data.id.get_chunk_info(BAD)
    content = bytearray(path.read_bytes())
    content[at.byte_offset : at.byte_offset + at.size] = b"\xff" * at.size
    path.write_bytes(content)

    error = failure(HDF5Source(tmp_path / "data", fields={"u": "n c"}), tmp_path, workers=0)

    assert error.count(f"{path}: row {BAD}") == 1
    assert error.count(str(path)) == 1


def test_of_two_files_the_truncated_one_is_named(tmp_path: Path) -> None:
    hdf5_rows(tmp_path)
    whole, cut = tmp_path / "0.h5", tmp_path / "1.h5"
    os.truncate(cut, cut.stat().st_size // 2)

    with pytest.raises(SourceError) as raised:
        len(HDF5Source(tmp_path, fields={"u": "n c"}))

    assert str(cut) in str(raised.value)
    assert str(whole) not in str(raised.value)
