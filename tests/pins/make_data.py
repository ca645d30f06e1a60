"""Make `tests/pins/data/`: one small file, or folder, of each kind that a public source reads.

The files are checked in, because their bytes decide fingerprints, and another version of a library may write
other bytes for the same values. So this ran once. To add a kind of file, run it into another folder and copy
the new ones alone: `python -m tests.pins.make_data FOLDER`.
"""

from __future__ import annotations

import contextlib
import io
import json
import sqlite3
import sys
import tarfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
import zarr

from tests.encoders.tiny_dinov2 import PROCESSOR
from tests.pins.names import write_dexycb
from tests.sources.images.pictures import square, write_coco, write_list, write_voc

LENGTHS = (5, 3, 6, 4)


def ramp(*shape: int, dtype: str = "float32", step: float = 0.25) -> Any:
    """Return numbers that every float dtype holds exactly, none of them twice in a row."""
    count = int(np.prod(shape))
    return ((np.arange(count) % 241) * step).reshape(shape).astype(dtype)


def hdf5(folder: Path) -> None:
    """PDEBench in its layouts, The Well, and datasets that the user names."""
    folder.mkdir()
    for nu, low in ((0.01, 0), (0.1, 40)):
        with h5py.File(folder / f"1D_Burgers_Sols_Nu{nu}.hdf5", "w") as file:
            file["tensor"] = ramp(4, 5, 8) + low
            file["x-coordinate"] = ramp(8)
            file["t-coordinate"] = ramp(6)
    with h5py.File(folder / "2D_diff-react_NA_NA.h5", "w") as file:
        for number in range(3):
            file[f"{number:04d}/data"] = ramp(4, 6, 8, 2) + number
            file[f"{number:04d}/grid/x"] = ramp(6)
            file[f"{number:04d}/grid/y"] = ramp(8)
            file[f"{number:04d}/grid/t"] = ramp(4)
    with h5py.File(folder / "2D_DarcyFlow_beta1.0_Train.hdf5", "w") as file:
        file["nu"] = ramp(4, 8, 8)
        file["tensor"] = ramp(4, 1, 8, 8)
        file["x-coordinate"] = ramp(8)
        file["y-coordinate"] = ramp(8)
    with h5py.File(folder / "1D_CFD_Rand_Eta1.e-8_Zeta1.e-8_periodic_Train.hdf5", "w") as file:
        for name in ("Vx", "density", "pressure"):
            file[name] = ramp(3, 4, 8) + len(name)
        file["x-coordinate"] = ramp(8)
        file["t-coordinate"] = ramp(5)
    for split, count in (("train", 6), ("val", 2)):
        with h5py.File(folder / f"burgers1d_{split}.h5", "w") as file:
            file["tensor"] = ramp(count, 5, 8) + count
            file.attrs["Nu"] = 0.25
    with h5py.File(folder / "declared.h5", "w") as file:
        file.create_dataset("latent", data=ramp(6, 3, 4), chunks=(2, 3, 4), compression="gzip")
        file["run/u"] = ramp(6, 7, 2, dtype="float64")
        file["count"] = np.arange(6)
    (folder / "well" / "train").mkdir(parents=True)
    with h5py.File(folder / "well" / "train" / "w.hdf5", "w") as file:
        file.create_group("dimensions").attrs["spatial_dims"] = ["x", "y"]
        file["dimensions/time"] = ramp(4)
        fields = {
            "t0_fields/pressure": (ramp(2, 4, 3, 5), True, True),
            "t0_fields/mask": (ramp(3, 5), False, False),
            "t1_fields/velocity": (ramp(2, 4, 3, 5, 2) + 1, True, True),
            "scalars/nu": (np.float32(0.5), False, False),
            "scalars/drive": (ramp(2, 4), True, True),
        }
        for name, (value, by_sample, by_time) in fields.items():
            file[name] = value
            file[name].attrs["sample_varying"] = by_sample
            file[name].attrs["time_varying"] = by_time
            file[name].attrs["dim_varying"] = [True, True]
        file.create_group("boundary_conditions/x_wall").attrs["bc_type"] = "WALL"


def arrays(folder: Path) -> None:
    """Groups, offsets and rows, in HDF5, Zarr 2 and 3, and `.npy`."""
    folder.mkdir()
    grouped = {f"t{i}/u": ramp(n, 4) + i for i, n in enumerate(LENGTHS)}
    flat = {"u": ramp(sum(LENGTHS), 4), "nu": ramp(len(LENGTHS)), "offsets": np.cumsum([0, *LENGTHS])}
    rows = {"a": ramp(6, 3), "b": np.arange(6)}
    for name, content in (("groups", grouped), ("offsets", flat), ("rows", rows)):
        with h5py.File(folder / f"{name}.h5", "w") as file:
            for key, values in content.items():
                file[key] = values
            if name == "groups":
                for number in range(len(LENGTHS)):
                    file[f"t{number}"].attrs["nu"] = number / 4
        for version in (2, 3):
            root = zarr.open_group(str(folder / f"{name}{version}.zarr"), mode="w", zarr_format=version)  # type: ignore[arg-type]
            for key, values in content.items():
                root.create_array(key, shape=values.shape, chunks=values.shape, dtype=values.dtype)[...] = (
                    values
                )
    np.save(folder / "rows.npy", ramp(6, 3))


def meshes(folder: Path) -> None:
    """Particle sets and meshes of several sizes, and a grid."""
    folder.mkdir()
    sizes = ((3, 4), (4, 6), (3, 5))
    with h5py.File(folder / "particles.h5", "w") as file:
        for number, (steps, points) in enumerate(sizes):
            file[f"s{number}/positions"] = ramp(steps, points, 2, step=0.0625) + number
            file[f"s{number}/velocities"] = ramp(steps, points, 2)
            file[f"s{number}/time"] = ramp(steps)
            file[f"s{number}/neighbors/edges"] = np.arange(2 * points).reshape(points, 2) % points
            file[f"s{number}/neighbors"].attrs["radius"] = 0.25
    with h5py.File(folder / "mesh.h5", "w") as file:
        for number, (steps, points) in enumerate(sizes):
            file[f"m{number}/coords"] = ramp(points, 2, step=0.0625)
            file[f"m{number}/edges"] = np.arange(2 * points).reshape(points, 2) % points
            file[f"m{number}/cells"] = np.arange(3 * points).reshape(points, 3) % points
            file[f"m{number}/fields/u"] = ramp(steps, points, 1) + number
    with h5py.File(folder / "grid.h5", "w") as file:
        file["fields/u"] = ramp(5, 3, 4, 1)
        file["fields/v"] = ramp(5, 3, 4, 2)
        file["time"] = ramp(5)
        file.attrs.update({"dt": 0.5, "H": 3, "W": 4})


def images(folder: Path) -> None:
    """Images alone and in all layouts of labels."""
    for name in ("cats", "dogs"):
        (folder / "folders" / name).mkdir(parents=True)
        for number in range(3):
            picture = square((12, 16), (number, 1, 8 + number, 9))
            picture.save(folder / "folders" / name / f"{number}.png")
    boxes = {
        "a": [("cat", 2, 3, 12, 10), ("dog", 1, 1, 5, 6)],
        "b": [("dog", 4, 4, 9, 9)],
        "c": [("cat", 0, 0, 8, 8)],
    }
    write_voc(folder / "voc", boxes, size=(12, 16))  # type: ignore[arg-type]
    for split, names in (("train", ["a", "b"]), ("val", ["c"])):
        write_list(folder / "voc", split, names)
    write_coco(folder / "coco", {"train": 3, "val": 1})
    write_dexycb(folder / "dexycb", sequences=5, cameras=1, frames=1, subjects=2, size=(24, 32))


def tables(folder: Path) -> None:
    """Rows of SQLite, Parquet and tar archives."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir()
    with contextlib.closing(sqlite3.connect(folder / "rows.db")) as base, base:
        base.execute("create table points (id integer primary key, x real, word text, at text, code text)")
        base.execute("create table facts (revision integer)")
        base.execute("insert into facts values (3)")
        for number in range(8):
            words = ("hill", "town", "coast")[number % 3]
            listed = json.dumps([number, number / 2])
            row = (number, None if number == 5 else number / 4, words, f"2026-01-0{number + 1}", listed)
            base.execute("insert into points values (?, ?, ?, ?, ?)", row)
    table = pa.table(
        {
            "x": pa.array([number / 4 for number in range(8)]),
            "flag": pa.array([number % 2 == 0 for number in range(8)]),
            "pos": pa.array([[float(number), 1.0, 2.0] for number in range(8)], pa.list_(pa.float32(), 3)),
            "path": pa.array([[*range(number)] for number in range(8)], pa.list_(pa.int32())),
            "name": pa.array([f"k{number}".encode() for number in range(8)]),
        }
    )
    pq.write_table(table, folder / "rows.parquet", row_group_size=4)
    for first, name in ((0, "b-000000"), (3, "b-000001")):
        with tarfile.open(folder / f"{name}.tar", "w") as archive:
            for number in range(first, first + 3):
                array = io.BytesIO()
                np.save(array, ramp(2, 3) + number)
                members = {
                    "cls": f"{number % 3}\n".encode(),
                    "jpg": bytes([number]) * (10 + number),
                    "json": b'{"box": [1, 2.5], "id": %d}' % number,
                    "npy": array.getvalue(),
                }
                for end, data in members.items():
                    info = tarfile.TarInfo(f"set/{number:04d}.{end}")
                    info.size = len(data)
                    archive.addfile(info, io.BytesIO(data))


def vision_model(folder: Path) -> None:
    """A vision model of a few numbers, and the file that says how images are prepared for it."""
    from transformers import Dinov2Config, Dinov2Model

    config = Dinov2Config(
        hidden_size=4, num_hidden_layers=1, num_attention_heads=1, image_size=28, patch_size=14, mlp_ratio=1
    )
    model = Dinov2Model(config)
    for tensor in model.state_dict().values():
        tensor.copy_(torch.from_numpy(ramp(*tensor.shape, step=0.015625)))
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))


def write(folder: Path) -> None:
    """Write all of it to a folder that does not exist yet."""
    folder.mkdir(parents=True)
    hdf5(folder / "hdf5")
    arrays(folder / "arrays")
    meshes(folder / "meshes")
    images(folder / "images")
    tables(folder / "tables")
    vision_model(folder / "vision")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
