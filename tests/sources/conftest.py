from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

SHARED = Path(__file__).parents[3] / "shared" / "data"


@pytest.fixture
def exponax() -> Path:
    """Solver output in the layouts of PDEBench and The Well."""
    folder = SHARED / "pde_exponax"
    if not folder.is_dir():
        pytest.skip(f"{folder} is absent: real simulation files are not part of the project")
    return folder


@pytest.fixture
def openpmd() -> Path:
    path = SHARED / "sim_openpmd" / "example-femm-3d.h5"
    if not path.is_file():
        pytest.skip(f"{path} is absent: real simulation files are not part of the project")
    return path


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write an HDF5 file: `write("a.h5", {"tensor": array}, Nu=0.1, chunks={"tensor": (1, 2, 3)})`."""

    def _write(name: str, datasets: dict, *, chunks: dict | None = None, gzip: bool = False, **attrs) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with h5py.File(path, "w") as file:
            for key, value in datasets.items():
                options = {"compression": "gzip", "compression_opts": 1} if gzip else {}
                if chunks and key in chunks:
                    options["chunks"] = chunks[key]
                file.create_dataset(key, data=value, **options)
            for key, value in attrs.items():
                file.attrs[key] = value
        return path

    return _write


@pytest.fixture
def ramp() -> Callable[..., np.ndarray]:
    """Distinct float32 values of a shape."""

    def _ramp(*shape: int, dtype: str = "float32") -> np.ndarray:
        return np.arange(np.prod(shape)).reshape(shape).astype(dtype)

    return _ramp
