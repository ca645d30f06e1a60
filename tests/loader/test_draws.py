from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.errors import ConfigError, StaleStateError
from stoker.loader import Loader, Weights, Windows
from stoker.loader.order import natural_log, without_repeats
from stoker.splitmix import keys_of
from stoker.store import Cache
from tests.kit.amount import example_count
from tests.loader.caches import trajectories, write_cache

COUNT = 24


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    return write_cache(
        tmp_path_factory.mktemp("c"), trajectories(COUNT), timed=("latent", "time"), shards=(5, 7)
    )


def drawn(cache: Cache, weights: Any, epoch: int = 0, **changes: Any) -> list[int]:
    loader = Loader(cache, weights=weights, **{"batch_size": 4, "seed": 1, **changes})
    loader.set_epoch(epoch)
    return [number for batch in loader for number in batch["index"].tolist()]


@given(st.lists(st.floats(2.0**-60, 1.0, exclude_max=False), min_size=1, max_size=50))
def test_the_logarithm_is_that_of_the_library(values: list[float]) -> None:
    for value, found in zip(values, natural_log(np.array(values)), strict=True):
        assert found == pytest.approx(math.log(value), rel=1e-14, abs=1e-15)


def test_these_draws_never_change() -> None:
    """Golden: a saved run goes on with the examples that it would have drawn."""
    weights = np.array([1.0, 0.0, 2.0, 5.0, 0.5, 1.0])

    found = without_repeats(weights, keys_of(17, np.arange(6)), 4)

    assert found.tolist() == [3, 2, 0, 5]


def test_without_repeats_the_heavy_come_first_as_often_as_their_weight_says() -> None:
    """The first draw is by weight; the second by weight among the others."""
    weights = np.array([1.0, 2.0, 5.0])
    found = [without_repeats(weights, keys_of(seed * 977, np.arange(3)), 2).tolist() for seed in range(6000)]

    first = Counter(pair[0] for pair in found)
    second_after_2 = Counter(pair[1] for pair in found if pair[0] == 2)

    for example in range(3):
        assert first[example] / 6000 == pytest.approx(weights[example] / 8, abs=0.02)
    assert second_after_2[1] / second_after_2.total() == pytest.approx(2 / 3, abs=0.03)


@settings(deadline=None, max_examples=example_count(25))
@given(samples=st.integers(1, 20), epoch=st.integers(0, 3), tier=st.sampled_from(["host", "disk"]))
def test_an_epoch_without_repeats_has_each_at_most_once(
    cache: Cache, samples: int, epoch: int, tier: str
) -> None:
    values = np.arange(COUNT) % 7  # three or four of weight 0

    found = drawn(cache, Weights(values=values, samples=samples, replacement=False), epoch, tier=tier)

    assert len(found) == len(set(found)) == samples
    assert all(values[number] for number in found)
    assert found == drawn(cache, Weights(values=values, samples=samples, replacement=False), epoch)


def test_with_repeats_an_epoch_may_be_longer_than_the_data(cache: Cache) -> None:
    values = [0.0] * COUNT
    values[3] = 3.0
    values[8] = 1.0

    found = Counter(drawn(cache, Weights(values=values, samples=1000)))

    assert found.total() == 1000
    assert found[3] / 1000 == pytest.approx(0.75, abs=0.05)
    assert drawn(cache, Weights(values=values)) == drawn(cache, values)


def test_windows_share_the_weight_of_their_record(cache: Cache) -> None:
    weights = Weights(values=[0.0] * 20 + [1.0] * 4, samples=10, replacement=False)
    loader = Loader(cache, batch_size=5, windows=Windows(field="latent"), weights=weights)

    found = [tuple(index) for batch in loader for index in batch.index.tolist()]

    assert len(set(found)) == 10
    assert {number for number, _ in found} <= {20, 21, 22, 23}


def test_ranks_share_out_the_draws_and_a_state_goes_on(cache: Cache) -> None:
    weights = Weights(values=np.arange(COUNT) + 1.0, samples=16, replacement=False)
    whole = drawn(cache, weights)

    parts = [drawn(cache, weights, batch_size=2, rank=rank, world_size=2) for rank in (0, 1)]
    assert [n for step in range(4) for part in parts for n in part[2 * step : 2 * step + 2]] == whole

    begun = Loader(cache, batch_size=4, seed=1, weights=weights)
    next(iter(begun))
    again = Loader(cache, batch_size=4, seed=1, weights=weights, tier="disk")
    again.load_state_dict(begun.state_dict())
    assert [n for batch in again for n in batch["index"].tolist()] == whole[4:]


@pytest.mark.parametrize(
    "other",
    [
        Weights(values=np.ones(COUNT), samples=12, replacement=False),
        Weights(values=np.ones(COUNT), samples=16),
        Weights(values=np.arange(COUNT) + 1.0, samples=16, replacement=False),
    ],
)
def test_a_state_of_other_draws_is_refused(cache: Cache, other: Weights) -> None:
    state = Loader(
        cache, batch_size=4, weights=Weights(values=np.ones(COUNT), samples=16, replacement=False)
    ).state_dict((0, 4))

    with pytest.raises(StaleStateError, match="belongs to another loader"):
        Loader(cache, batch_size=4, weights=other).load_state_dict(state)


def test_what_cannot_be_drawn_is_refused(cache: Cache) -> None:
    with pytest.raises(ConfigError, match="24 examples cannot be drawn without repeats: 23 of 24 have"):
        Loader(cache, weights=Weights(values=[0.0] + [1.0] * 23, replacement=False))
    with pytest.raises(ConfigError, match="samples is 0"):
        Weights(values=[1.0], samples=0)
