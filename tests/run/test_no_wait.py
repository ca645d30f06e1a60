"""Training that begins before its caches are complete."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.distributed.ranks import SINGLE_PROCESS
from stoker.errors import ConfigError
from stoker.run.context import Run
from stoker.run.loaders import check_beside
from stoker.run.precompute import fill_caches
from stoker.run.train import train_config
from stoker.schema import Field
from tests.run.conftest import Configure


def test_a_run_trains_at_once_and_leaves_complete_caches(configure: Configure) -> None:
    result = train_config(
        Run(configure("precompute.wait=false", "training.epochs=2", "precompute.workers=1"))
    )

    assert result.report.epochs == 2
    assert [cache.cache.complete for cache in result.caches] == [True, True]
    assert all(cache.encoded == len(cache.cache) for cache in result.caches)
    assert result.reason.endswith("from the fastest tier") or "host" in result.reason
    assert not any(cache.encoded for cache in fill_caches(Run(configure()), ["train", "val"]))


@pytest.mark.parametrize(
    ("setting", "names", "cure"),
    [
        ("training.transforms=[{kind: normalize}]", "training.transforms: normalize", "a mean and a std"),
        ("training.subset=0.5", "training.subset=0.5", "training.indices_file"),
    ],
)
def test_what_needs_the_whole_cache_is_refused_until_it_is_complete(
    configure: Configure, setting: str, names: str, cure: str
) -> None:
    early = configure("precompute.wait=false", "precompute.workers=1", "training.epochs=1", setting)

    with pytest.raises(ConfigError, match=rf"{names} .* of \d+ records.*Leave --no-wait .*{cure}"):
        train_config(Run(early))

    fill_caches(Run(configure()), ["train", "val"])
    assert train_config(Run(early)).report.epochs == 1


def test_what_cannot_be_served_beside_the_filling_is_refused_before_it_begins(
    configure: Configure, tmp_path: Path
) -> None:
    with pytest.raises(
        ConfigError, match=r"training\.partition=static needs a complete cache.*Leave --no-wait"
    ):
        train_config(Run(configure("precompute.wait=false", "training.partition=static")))
    assert not list((tmp_path / "data").rglob("*.safetensors"))


def test_a_joined_table_and_lengths_that_vary_are_refused_as_well(configure: Configure) -> None:
    fixed = {"latent": Field(shape=(9, 4, 6), dtype="float32", time=True)}
    varying = {"latent": Field(shape=(-1, 4, 6), dtype="float32", time=True, ragged=True)}

    check_beside(Run(configure("training.weights_file=weights.npy"), ranks=SINGLE_PROCESS), fixed)
    with pytest.raises(ConfigError, match=r"data\.join needs a complete cache"):
        check_beside(Run(configure("data.join.table=labels.csv"), ranks=SINGLE_PROCESS), fixed)
    with pytest.raises(ConfigError, match="trajectories of varying length needs a complete cache"):
        check_beside(Run(configure(), ranks=SINGLE_PROCESS), varying)
