"""`precompute.in_place`: files that hold samples as they are stored are served themselves."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

from stoker.errors import ConfigError, SourceError
from stoker.loader import Loader
from stoker.run.caches import locate
from stoker.run.context import Run
from stoker.run.plan import plan_config
from stoker.run.precompute import precompute_config, repair_cache
from stoker.run.train import train_config
from stoker.store import open_cache
from stoker.store import recipe as store_recipe
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
        file["u"] = values.astype("f8")
    assert OPTION not in plan_config(Run(configure(*SETTINGS))).advice, "a copy of float64 is half as large"

    with h5py.File("plain.h5", "w") as file:
        file.create_dataset("u", data=values, chunks=(1, *values.shape[1:]), compression="gzip")
    assert OPTION not in plan_config(Run(configure(*SETTINGS))).advice, "compressed"


def test_the_offer_works_as_it_is_written(configure: Configure, values: np.ndarray) -> None:
    run = Run(configure(*SETTINGS, f"{OPTION}=true"))
    first, again = precompute_config(run), precompute_config(run)

    assert [cache.encoded for cache in (*first.caches, *again.caches)] == [0, 0, 0, 0]
    for cache in first.caches:
        assert sum(file.stat().st_blocks for file in cache.path.glob("shard-*")) * 512 < values.nbytes / 4
        for batch in Loader(cache.cache, 4, shuffle=True):
            for number, data in zip(batch["index"].tolist(), batch["data"].numpy(), strict=True):
                assert any(np.array_equal(data[:, 0], one) for one in values), number
    assert train_config(run).report.epochs == 2
    assert plan_config(run).missing == 0


def test_a_cache_of_copies_is_another_one_and_outlives_the_files(
    configure: Configure, values: np.ndarray
) -> None:
    copied = precompute_config(Run(configure(*SETTINGS))).caches
    served = precompute_config(Run(configure(*SETTINGS, f"{OPTION}=true"))).caches
    Path("plain.h5").unlink()

    found = precompute_config(Run(configure(*SETTINGS))).caches

    assert [cache.path for cache in found] == [cache.path for cache in copied]
    assert {cache.path for cache in found}.isdisjoint(cache.path for cache in served)
    with pytest.raises(SourceError):
        precompute_config(Run(configure(*SETTINGS, f"{OPTION}=true")))


@pytest.mark.parametrize("identity", ["auto", "full"])
def test_every_command_finds_the_same_cache(
    configure: Configure, values: np.ndarray, monkeypatch: pytest.MonkeyPatch, identity: str
) -> None:
    monkeypatch.setattr(store_recipe, "FULL_BYTES", 1000)
    run = Run(configure(*SETTINGS, f"{OPTION}=true", f"identity={identity}"))
    (made, _) = precompute_config(run).caches

    assert locate(run.parts()[0], "train").folder == made.path


def test_a_damaged_index_is_repaired_where_it_is(configure: Configure, values: np.ndarray) -> None:
    run = Run(configure(*SETTINGS, f"{OPTION}=true"))
    (made, _) = precompute_config(run).caches
    for shard in made.path.glob("shard-*"):
        shard.unlink()
    before = set(Path(run.cache_dir).rglob("recipe.json"))

    assert repair_cache(made.path, run).ok

    assert len(open_cache(made.path)) == made.records
    assert set(Path(run.cache_dir).rglob("recipe.json")) == before, "no copy"


def test_values_that_a_copy_would_leave_out_are_refused(configure: Configure, values: np.ndarray) -> None:
    values[:, 0, 0, 0] = np.nan
    with h5py.File("plain.h5", "w") as file:
        file["u"] = values

    with pytest.raises(SourceError, match=r"precompute\.nan=allow"):
        precompute_config(Run(configure(*SETTINGS, f"{OPTION}=true")))
    assert precompute_config(Run(configure(*SETTINGS, f"{OPTION}=true", "precompute.nan=allow"))).caches


def test_a_complete_index_does_not_begin_early(configure: Configure, values: np.ndarray) -> None:
    """Orders that a cache in the making cannot serve are served."""
    run = Run(configure(*SETTINGS, f"{OPTION}=true", "precompute.wait=false", "training.partition=static"))

    assert train_config(run).report.epochs == 2


@pytest.mark.parametrize(
    "other",
    [
        "encoder.kind=grid",
        "data.normalize=true",
        "training.latent_cache_dtype=float16",
        "precompute.compression=zstd",
        "precompute.overwrite=true",
        "precompute.engine=ray",
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
