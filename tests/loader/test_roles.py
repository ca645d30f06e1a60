"""What an output is in a batch follows from its role; a name says nothing."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import torch

import stoker
from stoker.loader.order import example_keys
from stoker.splitmix import Salt, stream
from stoker.store import Cache

COUNT, STEPS = 6, 5


def cache_with(tmp_path: Path, condition: str) -> Cache:
    rng = np.random.default_rng(0)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["latent"] = rng.standard_normal((COUNT, STEPS, 3), dtype=np.float32)
        file[condition] = np.arange(2.0 * COUNT, dtype=np.float32).reshape(COUNT, 2)
    source = stoker.HDF5Source(tmp_path / "a.h5", fields={"latent": "n t c", condition: "n c"})
    return stoker.precompute(source, None, tmp_path / "c", name="a", workers=0)


def test_a_condition_may_have_the_name_of_a_part_of_the_batch(tmp_path: Path) -> None:
    for name in ("future", "z2", "cond"):
        cache = cache_with(tmp_path / name if (tmp_path / name).mkdir() is None else tmp_path, name)
        for horizon in (1, 2):
            windows = stoker.Windows(stride=1, horizon=horizon)
            batch = next(iter(stoker.Loader(cache, batch_size=4, shuffle=False, windows=windows)))

            assert set(batch.cond) == {name}
            assert batch.cond[name].shape == (4, 2)
            assert torch.equal(batch.cond[name][0], torch.tensor([0.0, 1.0]))
            assert (batch.future is None) == (horizon == 1)


def test_each_purpose_has_random_keys_of_its_own() -> None:
    assert len(Salt.__members__) == len({stream(0, 0, salt) for salt in Salt})
    # Another value would change orders, draws or subsets that saved states and papers refer to.
    assert {salt.name: salt.value for salt in Salt} == {
        "ORDER": 0,
        "TRANSFORM": 2,
        "SUBSET": 3,
        "TURNS": 4,
        "FILLING": 5,
        "WINDOW": 6,
        "CHOICE": 7,
    }


def test_keys_do_not_depend_on_the_default_dtype() -> None:
    examples = torch.arange(10)
    before = example_keys(0, 0, examples)
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(example_keys(0, 0, examples), before)
    finally:
        torch.set_default_dtype(torch.float32)
