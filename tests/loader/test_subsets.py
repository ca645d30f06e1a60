from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stoker.errors import ConfigError
from stoker.loader import Loader, subset
from stoker.store import Cache
from tests.loader.caches import trajectories, write_cache

PARTS = (40, 10, 30, 20)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    fields = {"nu": trajectories(100)["nu"]}
    return write_cache(tmp_path_factory.mktemp("c"), fields, parts=PARTS, skip=(3, 41), shards=(17, 60))


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(fraction=st.floats(0.01, 1), larger=st.floats(0.01, 1), seed=st.integers(0, 9))
def test_every_part_gives_its_share_and_smaller_subsets_lie_in_larger_ones(
    cache: Cache, fraction: float, larger: float, seed: int
) -> None:
    found = subset(cache, fraction, seed=seed)

    assert len(found) == max(1, round(fraction * 98))
    assert set(found) <= set(cache.indices)
    assert (np.diff(found) > 0).all()
    ends = np.cumsum(PARTS)
    stored = np.bincount(np.searchsorted(ends, cache.indices, side="right"))
    shares = np.bincount(np.searchsorted(ends, found, side="right"), minlength=4)
    assert (np.abs(shares - stored * len(found) / 98) <= 1).all()
    small, large = sorted((fraction, larger))
    assert set(subset(cache, small, seed=seed)) <= set(subset(cache, large, seed=seed))


def test_seeds_choose_differently(cache: Cache) -> None:
    assert subset(cache, 0.2, seed=0).tolist() != subset(cache, 0.2, seed=1).tolist()
    assert subset(cache, 1.0).tolist() == cache.indices.tolist()


def test_a_loader_serves_the_subset(cache: Cache) -> None:
    chosen = subset(cache, 0.3)
    loader = Loader(cache, batch_size=8, indices=chosen, shuffle=True)

    assert sorted(n for batch in loader for n in batch["index"].tolist()) == chosen.tolist()


@pytest.mark.parametrize("fraction", [0, -0.1, 1.1, float("nan")])
def test_no_fraction_is_refused(cache: Cache, fraction: float) -> None:
    with pytest.raises(ConfigError, match="above 0 and at most 1"):
        subset(cache, fraction)


def test_a_share_in_words_is_refused(cache: Cache) -> None:
    with pytest.raises(ConfigError, match=r"fraction is '10%'"):
        subset(cache, "10%")  # type: ignore[arg-type]


def test_an_empty_selection_is_named_and_nothing_is_said_to_be_missing(cache: Cache) -> None:
    for indices in ([], cache.where("sample_index > 100000")):
        with pytest.raises(ConfigError, match="indices= is empty") as refused:
            Loader(cache, batch_size=4, indices=indices)
        assert "precompute" not in str(refused.value)
