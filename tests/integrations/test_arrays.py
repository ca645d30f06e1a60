"""Batches of NumPy and JAX arrays, over the memory of the tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stoker
from stoker.integrations import to_jax, to_numpy


@pytest.fixture
def cache(tmp_path: Path) -> stoker.Cache:
    items: list[dict[str, Any]] = [
        {
            "x": torch.full((3,), i / 4),
            "half": torch.full((2,), i / 4, dtype=torch.bfloat16),
            "label": torch.tensor(i),
            "seen": torch.tensor(i % 2 == 0),
            "path": torch.arange(i + 1),
        }
        for i in range(10)
    ]
    return stoker.precompute(items, None, tmp_path, name="arrays", workers=0, progress=None)


def test_a_loader_hands_out_numpy_arrays(cache: stoker.Cache) -> None:
    tensors = next(iter(stoker.Loader(cache, 4, shuffle=True)))
    loader = stoker.Loader(cache, 4, shuffle=True, transforms=[to_numpy])

    batch = next(iter(loader))

    assert all(isinstance(batch[name], np.ndarray) for name in ("x", "half", "label", "seen", "index"))
    assert batch["half"].dtype == np.float32
    assert [len(path) for path in batch["path"]] == [len(path) for path in tensors["path"]]
    for name in ("x", "label", "seen", "index"):
        assert np.array_equal(batch[name], tensors[name].numpy())
    assert loader.position == batch.position


def test_numpy_arrays_share_the_memory_of_tensors(cache: stoker.Cache) -> None:
    batch = next(iter(stoker.Loader(cache, 4)))

    assert to_numpy(batch)["x"].__array_interface__["data"][0] == batch["x"].data_ptr()


def test_a_loader_hands_out_jax_arrays(cache: stoker.Cache) -> None:
    jax = pytest.importorskip("jax")
    tensors = next(iter(stoker.Loader(cache, 4, shuffle=True)))

    batch = next(iter(stoker.Loader(cache, 4, shuffle=True, transforms=[to_jax])))

    assert all(isinstance(batch[name], jax.Array) for name in ("x", "half", "label", "seen", "index"))
    assert batch["half"].dtype == jax.numpy.bfloat16
    for name in ("x", "label", "seen", "index"):
        assert np.array_equal(np.asarray(batch[name]), tensors[name].numpy())


def test_without_jax_the_error_says_what_to_install(
    cache: stoker.Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "jax.dlpack", None)

    with pytest.raises(stoker.StokerError, match="pip install jax"):
        to_jax(next(iter(stoker.Loader(cache, 4))))
