"""Fingerprints of caches: one of every public source, and one of every public encoder."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.pins.names import (
    ArraySource,
    DatasetsSource,
    FeatureEncoder,
    GridEncoder,
    HDF5Source,
    ImageSource,
    MeshEncoder,
    MeshSource,
    ModuleEncoder,
    Normalized,
    ParquetSource,
    SplitOf,
    SQLSource,
    Statistics,
    SteadyEncoder,
    Subset,
    TarSource,
    TorchSource,
    precompute,
)
from tests.pins.objects import Drawn, Files, Held, Pooled, Two, halved

DATA = Path(__file__).parent / "data"
HDF5, ARRAYS, MESHES, IMAGES, TABLES = (
    DATA / name for name in ("hdf5", "arrays", "meshes", "images", "tables")
)
BURGERS = HDF5 / "1D_Burgers_Sols_Nu0.01.hdf5"
HALVES = {"train": 0.5, "val": 0.25, "test": 0.25}
SQLITE = f"sqlite:///{TABLES / 'rows.db'}"
COLUMNS = {
    "x": {"dtype": "float32", "null": 50},
    "word": {"text": ["hill", "town", "coast"]},
    "at": {"timestamp": "ms"},
    "code": {"json": "float32", "shape": [2]},
}


def declared(**more: Any) -> Any:
    """Return a source of datasets with axes that the user names."""
    return HDF5Source(HDF5 / "declared.h5", fields={"latent": "n t c", "u": "run/u: n t c"}, **more)


def listed() -> Any:
    """Return a source of Hugging Face's Dataset, or of what looks like one."""
    from tests.pins.tables import listed_rows

    return DatasetsSource(listed_rows())


SOURCES: dict[str, Callable[[], Any]] = {
    "hdf5/pdebench 1d, two files": lambda: HDF5Source(sorted(HDF5.glob("1D_Burgers*"))),
    "hdf5/pdebench 1d, split by fractions": lambda: HDF5Source(BURGERS, split="train", splits=HALVES, seed=3),
    "hdf5/pdebench 1d, subsample": lambda: HDF5Source(BURGERS, subsample={"t": 2, "x": 4}),
    "hdf5/pdebench 1d, include": lambda: HDF5Source(BURGERS, include=("time", "dt", "coordinates")),
    "hdf5/pdebench 1d, axes stated": lambda: HDF5Source(
        BURGERS, preset="pdebench", fields={"tensor": "n x t"}
    ),
    "hdf5/pdebench 1d, channels": lambda: HDF5Source(next(HDF5.glob("1D_CFD*"))),
    "hdf5/pdebench 2d, groups": lambda: HDF5Source(HDF5 / "2D_diff-react_NA_NA.h5"),
    "hdf5/pdebench 2d, steady": lambda: HDF5Source(next(HDF5.glob("2D_Darcy*"))),
    "hdf5/split by file": lambda: HDF5Source(sorted(HDF5.glob("burgers1d_*")), split="val"),
    "hdf5/well": lambda: HDF5Source(HDF5 / "well", preset="well", split="train"),
    "hdf5/well, boundary": lambda: HDF5Source(HDF5 / "well" / "train", include="boundary"),
    "hdf5/declared": declared,
    "hdf5/declared, split": lambda: declared(split="val", splits={"train": 0.5, "val": 0.5}),
    "arrays/groups": lambda: ArraySource(ARRAYS / "groups.h5", attributes=["nu"]),
    "arrays/offsets": lambda: ArraySource(ARRAYS / "offsets.h5", offsets="offsets"),
    "arrays/rows": lambda: ArraySource(ARRAYS / "rows.h5", fields={"a": "a: n c"}),
    "arrays/npy": lambda: ArraySource(ARRAYS / "rows.npy"),
    "arrays/zarr2 groups": lambda: ArraySource(ARRAYS / "groups2.zarr"),
    "arrays/zarr2 rows": lambda: ArraySource(ARRAYS / "rows2.zarr", fill_missing=True),
    "arrays/zarr3 groups": lambda: ArraySource(ARRAYS / "groups3.zarr"),
    "arrays/zarr3 offsets": lambda: ArraySource(ARRAYS / "offsets3.zarr", layout="offsets"),
    "meshes/particles": lambda: MeshSource(
        MESHES / "particles.h5", layout="particles", attributes=["neighbors/radius"]
    ),
    "meshes/mesh": lambda: MeshSource(MESHES / "mesh.h5"),
    "meshes/grid": lambda: MeshSource(MESHES / "grid.h5", layout="grid"),
    "meshes/declared": lambda: MeshSource(
        MESHES / "particles.h5", fields={"positions": "t p d", "edges": "neighbors/edges: e i"}
    ),
    "images/alone": lambda: ImageSource(IMAGES / "folders", size=(8, 8)),
    "images/folders": lambda: ImageSource(IMAGES / "folders", "folder", (8, 8), split="train", splits=HALVES),
    "images/letterbox, grey, nearest": lambda: ImageSource(
        IMAGES / "folders", "folder", (8, 8), fit="letterbox", color="L", filter="nearest", max_samples=4
    ),
    "images/short side": lambda: ImageSource(IMAGES / "folders", None, 8, fit="short", turned=False),
    "images/encoded": lambda: ImageSource(IMAGES / "folders", "folder", (8, 8), store="encoded"),
    "images/voc": lambda: ImageSource(IMAGES / "voc", "voc", (8, 8), split="train"),
    "images/coco": lambda: ImageSource(
        IMAGES / "coco", "coco", (8, 8), split="train", labels={"ragged": True}
    ),
    "images/dexycb": lambda: ImageSource(IMAGES / "dexycb", "dexycb", (8, 8), split="train"),
    "sql/rules": lambda: SQLSource(SQLITE, table="points", key="id", columns=COLUMNS),
    "sql/where, split": lambda: SQLSource(
        SQLITE, table="points", key="id", columns=["id"], where="id > 1", split="train", splits=HALVES, seed=2
    ),
    "sql/query, version, standardize": lambda: SQLSource(
        SQLITE,
        query="select id, x from points where x is not null",
        key="id",
        columns={"x": {"dtype": "float32", "standardize": True}},
        version_query="select revision from facts",
    ),
    "tables/parquet": lambda: ParquetSource(TABLES / "rows.parquet", columns=["x", "flag", "pos", "path"]),
    "tables/parquet, key": lambda: ParquetSource(TABLES / "rows.parquet", columns=["x"], key="name"),
    "tables/datasets": listed,
    "tables/tar": lambda: TarSource(TABLES),
    "tables/tar, members": lambda: TarSource(sorted(TABLES.glob("*.tar")), fields=["npy", "cls"]),
    "torch/tensors": lambda: TorchSource(
        TensorDataset(torch.arange(24.0).reshape(6, 4), torch.arange(6)), version="tensors 1"
    ),
    "torch/tensor": lambda: TorchSource(Held("tensor")),
    "torch/tuple": lambda: TorchSource(Held("tuple"), version="v1"),
    "torch/nested": lambda: TorchSource(Held("nested")),
    "torch/ragged": lambda: TorchSource(Held("ragged"), ragged=("x",)),
    "torch/text": lambda: TorchSource(Held("text"), text={"kind": ["even", "odd"], "note": "bytes"}),
    "torch/time": lambda: TorchSource(Held("time"), time=("x",), keys=[f"k{i}" for i in range(8)]),
    "torch/wide": lambda: TorchSource(TensorDataset(torch.arange(256.0).reshape(4, 64)), version="wide"),
    "torch/random": lambda: TorchSource(Drawn(), random="freeze", version="drawn"),
    "torch/files": lambda: TorchSource(Files(str(ARRAYS))),
    "any/split": lambda: SplitOf(ArraySource(ARRAYS / "rows.h5"), "train", splits=HALVES, seed=5),
    "any/first samples": lambda: Subset(declared(), 4),
}
"""Every public source, by its kind and what is asked of it."""


def grid() -> Any:
    """Return the encoder of the files of two channels."""
    return GridEncoder(channels=2, grid=(6, 8), patch=(3, 4), tokens=4, dim=8)


def sequential() -> nn.Module:
    """Return a module of torch's own parts, with weights that are exact everywhere."""
    module = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2))
    for tensor in module.state_dict().values():
        tensor.copy_(torch.arange(tensor.numel(), dtype=torch.float32).reshape(tensor.shape) / 16)
    return module


def rule(channels: int = 2) -> Any:
    """Return statistics that no sample was read for."""
    return Statistics(
        field="data", method="standard", shift=(0.5,) * channels, scale=(2.0,) * channels, digest="0" * 64
    )


def still(field: str) -> Any:
    """Return an encoder of one plane."""
    return GridEncoder(channels=1, grid=(8, 8), patch=(4, 4), tokens=4, dim=8, field=field)


def plane() -> Any:
    """Return the simulations in two dimensions."""
    return SOURCES["hdf5/pdebench 2d, groups"]()


def line() -> Any:
    """Return the simulations in one dimension."""
    return HDF5Source(BURGERS)


def mesh_encoder(*fields: str, **more: Any) -> Any:
    """Return the encoder of points in two dimensions."""
    channels = {"u": 1, "positions": 2, "velocities": 2}
    return MeshEncoder(
        fields=fields, channels=sum(channels[name] for name in fields), space=2, tokens=3, dim=12, **more
    )


ENCODERS: dict[str, Callable[[], tuple[Any, Any, dict[str, Any]]]] = {
    "none": lambda: (line(), None, {}),
    "none, stored dtypes": lambda: (declared(), None, {"dtype": {"latent": "float16", "u": "int8"}}),
    "none, float8": lambda: (SOURCES["torch/wide"](), None, {"dtype": "float8_e4m3fn"}),
    "grid 1d": lambda: (
        line(),
        GridEncoder(channels=1, grid=(1, 8), patch=(1, 4), tokens=2, dim=4, fourier=(), seed=7),
        {"dtype": "float16"},
    ),
    "grid 2d": lambda: (plane(), grid(), {}),
    "grid, keeping": lambda: (plane(), grid(), {"keep": "data"}),
    "grid, encode batch": lambda: (plane(), grid(), {"encode_batch": 2, "dtype": "bfloat16"}),
    "normalized grid": lambda: (plane(), Normalized(grid(), rule()), {}),
    "normalized alone": lambda: (line(), Normalized(None, rule(1)), {}),
    "steady": lambda: (
        SOURCES["hdf5/pdebench 2d, steady"](),
        SteadyEncoder(still("nu"), still("data")),
        {},
    ),
    "mesh": lambda: (SOURCES["meshes/mesh"](), mesh_encoder("u"), {}),
    "mesh, moving": lambda: (
        SOURCES["meshes/particles"](),
        mesh_encoder("velocities", "positions", moving="positions", coords="positions"),
        {},
    ),
    "module, torch's parts": lambda: (plane(), ModuleEncoder(sequential()), {}),
    "module, own class, steps": lambda: (plane(), ModuleEncoder(Pooled(), time="steps", encode_batch=4), {}),
    "module, function, version": lambda: (plane(), ModuleEncoder(halved, version="1", output="half"), {}),
    "module, two fields": lambda: (
        declared(),
        ModuleEncoder(Two(), field=("u", "latent"), output=("a", "b"), time="whole"),
        {},
    ),
    "module, identity": lambda: (line(), ModuleEncoder(nn.Identity()), {}),
    "features": lambda: (
        ImageSource(IMAGES / "folders", size=(28, 28)),
        FeatureEncoder(DATA / "vision", pooling="mean", encode_batch=2),
        {},
    ),
    "features, tokens, processor": lambda: (
        SOURCES["images/alone"](),
        FeatureEncoder(DATA / "vision", pooling="tokens", processor="pil", output="t"),
        {},
    ),
}
"""Every public encoder with a source that it takes, and what is said to `precompute` about the records."""


DECODER = "pillow 13.0.0, libjpeg-turbo 3.2.0, webp 1.6.0"


def recipe(source: Any, encoder: Any, settings: dict[str, Any]) -> dict[str, Any]:
    """Return the fingerprint of a cache that is made now, and everything that the fingerprint is made of."""
    with TemporaryDirectory() as folder, ExitStack() as versions:
        # A recipe names the libraries that decode and prepare its images.
        if isinstance(source, ImageSource):
            versions.enter_context(mock.patch("stoker.sources.image_decoding.decoder", return_value=DECODER))
        if isinstance(encoder, FeatureEncoder):
            versions.enter_context(mock.patch("transformers.__version__", "5.23.0"))
            versions.enter_context(mock.patch("PIL.__version__", "13.0.0"))
        cache = precompute(source, encoder, folder, name="pin", workers=0, progress=None, **settings)
        return {"fingerprint": cache.fingerprint, "recipe": dict(cache.recipe.entries)}


CASES: dict[str, Callable[[], Any]] = {
    **{f"source: {name}": lambda make=make: recipe(make(), None, {}) for name, make in SOURCES.items()},
    **{f"encoder: {name}": lambda make=make: recipe(*make()) for name, make in ENCODERS.items()},
}
