"""`precompute.in_place`: files that hold samples as they are stored are served themselves."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

from stoker.errors import ConfigError, SourceError
from stoker.loader import Loader
from stoker.run.context import Run
from stoker.run.plan import plan_config
from stoker.run.precompute import precompute_config
from stoker.run.train import train_config
from tests.run.conftest import Configure

SETTINGS = ("data.files=plain.h5", 'data.fields={data: "u: n t x c"}', "encoder.kind=identity")
OPTION = "precompute.in_place"


@pytest.fixture
def values(configure: Configure) -> np.ndarray:
    made = np.random.default_rng(0).standard_normal((24, 6, 512, 2)).astype("f4")
    with h5py.File("plain.h5", "w") as file:
        file["u"] = made
    return made


def test_the_plan_offers_it_where_nothing_needs_encoding(configure: Configure, values: np.ndarray) -> None:
    assert OPTION in plan_config(Run(configure(*SETTINGS))).advice
    assert OPTION not in plan_config(Run(configure(*SETTINGS, f"{OPTION}=true"))).advice
    assert OPTION not in plan_config(Run(configure(*SETTINGS, "training.latent_cache_dtype=float16"))).advice
    assert OPTION not in plan_config(Run(configure("latent.dim=8"))).advice, "a grid encoder"

    with h5py.File("plain.h5", "w") as file:
        file.create_dataset("u", data=values, chunks=(1, *values.shape[1:]), compression="gzip")
    assert OPTION not in plan_config(Run(configure(*SETTINGS))).advice, "compressed"


def test_the_offer_works_as_it_is_written(configure: Configure, values: np.ndarray) -> None:
    run = Run(configure(*SETTINGS, f"{OPTION}=true"))
    first, again = precompute_config(run), precompute_config(run)

    assert [cache.encoded for cache in (*first.caches, *again.caches)] == [0, 0, 0, 0]
    for cache in first.caches:
        assert sum(file.stat().st_blocks for file in cache.path.glob("shard-*")) * 512 < values.nbytes / 4
        for batch in Loader(cache.cache, 4):
            for number, data in zip(batch["index"].tolist(), batch["data"].numpy(), strict=True):
                assert any(np.array_equal(data[:, 0], one) for one in values), number
    assert train_config(run).report.epochs == 2
    assert plan_config(run).missing == 0


def test_a_cache_of_copies_is_another_one(configure: Configure, values: np.ndarray) -> None:
    copied = precompute_config(Run(configure(*SETTINGS))).caches
    served = precompute_config(Run(configure(*SETTINGS, f"{OPTION}=true"))).caches
    Path("plain.h5").unlink()

    found = precompute_config(Run(configure(*SETTINGS))).caches

    assert [cache.path for cache in found] == [cache.path for cache in copied]
    assert {cache.path for cache in found}.isdisjoint(cache.path for cache in served)


@pytest.mark.parametrize(
    "other",
    [
        "encoder.kind=grid",
        "data.normalize=true",
        "training.latent_cache_dtype=float16",
        "precompute.compression=zstd",
    ],
)
def test_what_would_change_the_samples_is_refused(configure: Configure, other: str) -> None:
    with pytest.raises(ConfigError, match=other):
        configure(*[one for one in SETTINGS if one.partition("=")[0] not in other], f"{OPTION}=true", other)


def test_files_that_cannot_be_served_are_refused_with_the_cure(
    configure: Configure, values: np.ndarray
) -> None:
    with h5py.File("plain.h5", "w") as file:
        file.create_dataset("u", data=values, chunks=(1, *values.shape[1:]), compression="gzip")

    with pytest.raises((ConfigError, SourceError), match=f"{OPTION}=false"):
        precompute_config(Run(configure(*SETTINGS, f"{OPTION}=true")))
