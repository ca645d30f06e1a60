"""The public names, and what importing costs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

import stoker


def test_these_are_the_public_names() -> None:
    assert stoker.__all__ == [
        "ArraySource",
        "Cache",
        "CacheSource",
        "DatasetsSource",
        "Encoder",
        "FeatureEncoder",
        "GridEncoder",
        "HDF5Source",
        "HiddenStates",
        "ImageSource",
        "Loader",
        "MeshEncoder",
        "MeshSource",
        "Mixture",
        "ModuleEncoder",
        "Normalization",
        "OneOf",
        "Pad",
        "ParquetSource",
        "RemoteEncoder",
        "Rows",
        "SQLSource",
        "Source",
        "Span",
        "StokerError",
        "TarSource",
        "TextEncoder",
        "Timeouts",
        "Tokenize",
        "TopK",
        "TorchSource",
        "VAEEncoder",
        "Weights",
        "Windows",
        "Zip",
        "__version__",
        "adopt",
        "cached",
        "find_batch_size",
        "index_in_place",
        "open_cache",
        "precompute",
        "profile",
        "subset",
        "zip",
    ]


@pytest.mark.parametrize("name", stoker.__all__)
def test_every_public_name_is_there_and_explained(name: str) -> None:
    value = getattr(stoker, name)

    assert name in dir(stoker)
    assert name == "__version__" or value.__doc__


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'precomputed'"):
        stoker.precomputed  # noqa: B018


def test_public_modules_are_imported_when_asked_for() -> None:
    """Each in a process that has imported none of them, but torch."""
    code = """if True:
        import os, sys, torch, stoker
        names = {"transforms": "Flip", "integrations": "as_dataloader", "compat": "GPUDataLoader"}
        for module, name in names.items():
            assert f"stoker.{module}" not in sys.modules
            if pid := os.fork():
                assert os.waitpid(pid, 0)[1] == 0, module
                continue
            assert getattr(getattr(stoker, module), name).__doc__
            os._exit(0)
    """

    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_functions_stay_functions_after_their_modules_were_imported() -> None:
    """`import stoker.precompute.worker` sets the subpackage as an attribute of `stoker`."""
    import stoker.cached
    import stoker.precompute.settings

    assert callable(stoker.precompute)
    assert callable(stoker.cached)
    assert sys.modules["stoker.precompute"].__name__ == "stoker.precompute"


def test_importing_stoker_imports_nothing_heavy() -> None:
    code = "import sys, stoker; assert not {'torch', 'numpy', 'h5py'} & sys.modules.keys()"

    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


class Squares(Dataset[Tensor]):
    """Item i is three times i squared."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((3,), float(index) ** 2)


def test_cached_serves_a_dataset_in_one_line(tmp_path: Path) -> None:
    loader = stoker.cached(Squares(), cache_dir=tmp_path, batch_size=8, device="cpu", shuffle=False)

    batches = list(loader)

    assert torch.cat(batches)[:, 0].tolist() == [i**2 for i in range(20)]
    assert (tmp_path / "squares").is_dir()


def test_cached_encodes_once(tmp_path: Path) -> None:
    calls: list[int] = []

    class Doubling(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(len(x))
            return 2 * x

    encoder = stoker.ModuleEncoder(Doubling(), version="1")
    stoker.cached(Squares(), encoder, cache_dir=tmp_path, device="cpu", shuffle=True)
    first = len(calls)
    assert 256 in calls
    loader = stoker.cached(Squares(), encoder, cache_dir=tmp_path, device="cpu", shuffle=False)

    latent = next(iter(loader))

    assert np.allclose(latent[:, 0], [2 * i**2 for i in range(20)])
    assert [count for count in calls[first:] if count > 1] == [], "single samples are probes"
