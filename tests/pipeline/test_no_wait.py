"""Training that begins before its caches are complete."""

from __future__ import annotations

import pytest

from stoker.errors import ConfigError
from stoker.pipeline.precompute import fill_caches
from stoker.pipeline.train import train_config
from tests.pipeline.conftest import Configure


def test_a_run_trains_at_once_and_leaves_complete_caches(configure: Configure) -> None:
    result = train_config(configure("precompute.wait=false", "training.epochs=2", "precompute.readers=1"))

    assert result.report.epochs == 2
    assert [cache.cache.complete for cache in result.caches] == [True, True]
    assert all(cache.encoded == len(cache.cache) for cache in result.caches)
    assert result.reason.endswith("from the fastest tier") or "host" in result.reason
    assert not any(cache.encoded for cache in fill_caches(configure(), ["train", "val"]))


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
    early = configure("precompute.wait=false", "precompute.readers=1", "training.epochs=1", setting)

    with pytest.raises(ConfigError, match=rf"{names} .* of \d+ records.*Leave --no-wait .*{cure}"):
        train_config(early)

    fill_caches(configure(), ["train", "val"])
    assert train_config(early).report.epochs == 1
