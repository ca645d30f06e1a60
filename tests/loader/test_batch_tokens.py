"""Records packed to a budget of tokens."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import stoker
from stoker.errors import ConfigError, StaleStateError
from stoker.loader import Loader, Mixture, Windows
from stoker.loader.batching import BatchPlan, TokenPlanner, best_fit
from stoker.store import Cache
from tests.loader.caches import folded, write_cache
from tests.loader.test_partial import move

COUNT, BUDGET = 80, 32


def length(number: int) -> int:
    return (number * 37) % 21


def states(number: int) -> torch.Tensor:
    return torch.randn((length(number), 3), generator=torch.Generator().manual_seed(number))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    fields = {
        "ids": [torch.arange(length(number)) for number in range(COUNT)],
        "states": [states(number) for number in range(COUNT)],
        "label": torch.arange(COUNT),
    }
    return write_cache(tmp_path_factory.mktemp("tokens"), fields, shards=(30, 20))


def planner(lengths: Any, budget: int, world: int = 1, **settings: Any) -> TokenPlanner:
    settings = {"seed": 0, "shuffle": True, "drop_last": False, **settings}
    return TokenPlanner(np.asarray(lengths), budget, world_size=world, **settings)


def batches_of(plan: BatchPlan) -> list[list[int]]:
    return [part.tolist() for part in np.split(plan.ids, plan.bounds[1:-1])]


@settings(max_examples=300, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 20), min_size=1, max_size=80),
    world=st.integers(1, 5),
    epoch=st.integers(0, 3),
    shuffle=st.booleans(),
)
def test_every_record_comes_once_within_the_budget_and_ranks_have_as_many_batches(
    lengths: list[int], world: int, epoch: int, shuffle: bool
) -> None:
    made = planner(lengths, 20, world, shuffle=shuffle)
    alone = planner(lengths, 20, shuffle=shuffle).epoch(epoch)
    if -(-alone.steps // world) * world > len(lengths):  # no way to do it
        with pytest.raises(ConfigError, match="equal numbers of batches"):
            made.epoch(epoch)
        return

    plan = made.epoch(epoch)

    assert sorted(plan.ids.tolist()) == [*range(len(lengths))]
    assert plan.ids.tolist() == alone.ids.tolist()  # whatever the number of ranks
    found = batches_of(plan)
    assert len(found) == plan.steps * world
    assert all(one and sum(lengths[i] for i in one) <= 20 for one in found)


@settings(max_examples=200, deadline=None)
@given(lengths=st.lists(st.integers(0, 30), min_size=1, max_size=60))
def test_best_fit_leaves_no_two_batches_that_would_fit_into_one(lengths: list[int]) -> None:
    batches = best_fit(np.array(lengths, np.int64), 30)
    tokens = np.bincount(batches, lengths)
    assert tokens.max() <= 30
    assert len(tokens) <= -(-sum(lengths) // 30) * 11 / 9 + 2 + lengths.count(0)  # Johnson (1973)
    positive = np.sort(tokens[tokens > 0])
    assert len(positive) < 2 or positive[0] + positive[1] > 30


def test_a_large_epoch_is_packed_almost_full_and_differs_by_epoch() -> None:
    rng = np.random.default_rng(0)
    lengths = np.minimum(4096, rng.lognormal(6, 1, 50_000).astype(np.int64) + 1)
    made = planner(lengths, 4096, 8)
    first, second = made.epoch(0), made.epoch(1)
    tokens = np.add.reduceat(lengths[first.ids], first.bounds[:-1])
    assert tokens.max() <= 4096
    assert tokens.sum() / (len(tokens) * 4096) > 0.99
    assert not np.array_equal(first.ids, second.ids)
    assert abs(first.steps - second.steps) <= 2
    # A shuffle: the first tenth of an epoch has long and short records as the entire epoch has.
    tenth = lengths[first.ids[: len(lengths) // 10]]
    assert abs(tenth.mean() / lengths.mean() - 1) < 0.1


GOLDEN = {
    "shuffled": [[6, 7], [2, 3], [8, 4], [0, 9], [5, 1]],
    "ranks": [[0, 9], [6, 7], [1], [5], [4], [8], [2], [3]],
    "in order": [[0, 9], [1, 5], [2, 3], [4, 8], [6, 7]],
}


def test_golden_plans_never_change() -> None:
    lengths = [5, 3, 9, 1, 4, 7, 2, 8, 6, 2]
    assert batches_of(planner(lengths, 10, seed=5).epoch(2)) == GOLDEN["shuffled"]
    assert batches_of(planner(lengths, 10, 4).epoch(0)) == GOLDEN["ranks"]
    assert batches_of(planner(lengths, 10, shuffle=False).epoch(1)) == GOLDEN["in order"]


# -------------------------------------------------------------------------------------------------- loaders


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
@pytest.mark.parametrize("shuffle", [True, False])
def test_batches_are_packed_with_what_kernels_take(cache: Cache, tier: str, shuffle: bool) -> None:
    loader = Loader(cache, batch_tokens=BUDGET, tier=tier, shuffle=shuffle)
    numbers: list[int] = []
    for batch in loader:
        own = batch["index"].tolist()
        assert torch.equal(batch["states"], torch.cat([states(n) for n in own]))
        assert batch["ids"].tolist() == batch["position_ids"].tolist()
        assert len(batch["ids"]) <= BUDGET
        assert batch["cu_seqlens"].dtype == torch.int32
        assert batch["cu_seqlens"].tolist() == [0, *np.cumsum([length(n) for n in own])]
        assert batch["max_seqlen"] == max(length(n) for n in own)
        assert batch["label"].tolist() == own
        numbers += own
    assert sorted(numbers) == [*range(COUNT)]
    assert "up to 32 tokens" in repr(loader)


@pytest.mark.parametrize("dtype", [None, "float16"])
def test_every_tier_gives_the_same_bytes(cache: Cache, dtype: str | None) -> None:
    def made(tier: str) -> Loader:
        return Loader(cache, batch_tokens=BUDGET, tier=tier, seed=4, shuffle=True, dtype=dtype)

    found = [list(made(tier)) for tier in ("host", "disk", "device")]
    with torch.inference_mode():
        found.append(list(made("host")))
    for homes in (["device", "host", "disk"], ["disk", "device", "host"], ["host", "disk", "disk"]):
        mixed = made("auto")
        move(mixed, homes)
        found.append(list(mixed))
    for batches in zip(*found, strict=True):
        assert all(batch.keys() == batches[0].keys() for batch in batches)
        for name, value in batches[0].items():
            assert all(torch.equal(torch.as_tensor(b[name]), torch.as_tensor(value)) for b in batches)


def test_batches_own_their_memory(cache: Cache) -> None:
    loader = Loader(cache, batch_tokens=BUDGET, tier="host", shuffle=True)
    for batch in loader:
        batch["states"].zero_()
    loader.set_epoch(0)
    assert all(torch.equal(b["states"], torch.cat([states(n) for n in b["index"].tolist()])) for b in loader)


@pytest.mark.parametrize("world", [1, 3, 4])
def test_ranks_serve_all_records_once_in_as_many_batches(cache: Cache, world: int) -> None:
    for epoch in (0, 1, 2):
        numbers: list[int] = []
        counts: set[int] = set()
        for rank in range(world):
            loader = Loader(cache, batch_tokens=BUDGET, shuffle=True, rank=rank, world_size=world)
            loader.set_epoch(epoch)
            expected = len(loader)
            batches = list(loader)
            counts |= {len(batches), expected}
            numbers += [n for batch in batches for n in batch["index"].tolist()]
        assert sorted(numbers) == [*range(COUNT)]
        assert len(counts) == 1


@settings(max_examples=25, deadline=None)
@given(stop=st.integers(0, 30), world=st.sampled_from([1, 2]), epoch=st.integers(0, 2), shuffle=st.booleans())
def test_it_resumes_after_any_batch_at_another_tier(
    cache: Cache, stop: int, world: int, epoch: int, shuffle: bool
) -> None:
    setting = {"batch_tokens": BUDGET, "rank": world - 1, "world_size": world, "shuffle": shuffle}
    whole = Loader(cache, tier="disk", **setting)
    whole.set_epoch(epoch)
    every = list(whole)
    stop = min(stop, len(every) - 1)
    again = Loader(cache, tier="host", **setting)
    again.load_state_dict(whole.state_dict(every[stop].position))

    rest = list(again) if again.epoch == epoch else []

    assert [b["index"].tolist() for b in rest] == [b["index"].tolist() for b in every[stop + 1 :]]


def test_other_ranks_resume_where_their_steps_begin(cache: Cache) -> None:
    four = Loader(cache, batch_tokens=BUDGET, shuffle=True, world_size=4)
    states_ = [batch.position for batch in four]
    one = Loader(cache, batch_tokens=BUDGET, shuffle=True)
    every = list(one)
    one.load_state_dict(four.state_dict(states_[0]))
    assert [b["index"].tolist() for b in one] == [b["index"].tolist() for b in every[4:]]

    state = one.state_dict(every[0].position)
    with pytest.raises(StaleStateError, match="world 1 there, 4 here"):
        four.load_state_dict(state)
    with pytest.raises(StaleStateError, match="'32 tokens' there, '40 tokens' here"):
        Loader(cache, batch_tokens=40, shuffle=True).load_state_dict(state)


def test_drop_last_leaves_out_what_ranks_cannot_share(cache: Cache) -> None:
    one = len(Loader(cache, batch_tokens=BUDGET, shuffle=True))
    three = Loader(cache, batch_tokens=BUDGET, shuffle=True, world_size=3, drop_last=True)
    assert len(three) == len(list(three)) == one // 3
    with pytest.raises(ConfigError, match="drop_last leaves no batch"):
        Loader(cache, batch_tokens=10_000, shuffle=True, world_size=3, drop_last=True)


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"batch_size": 4}, "batch_size= do not go together"),
        ({"batch_tokens": 0}, "Expected at least 1"),
        ({"batch_tokens": "many"}, "Expected a whole number, as batch_tokens=4096"),
        ({"batch_tokens": 19}, r"sample \d+ has 20 tokens, more than batch_tokens=19.*batch_tokens=20"),
        ({"ragged": "pad"}, "packed one after another"),
        ({"windows": Windows()}, "windows have one shape"),
        ({"weights": [1.0] * COUNT}, "drawn records"),
        ({"static": True, "tier": "device"}, "differ in size"),
        ({"shuffle": "bucket"}, "the order is 'bucket'"),
    ],
)
def test_what_makes_no_sense_together_is_refused(cache: Cache, setting: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Loader(cache, **{"batch_tokens": BUDGET, **setting})


def test_records_that_have_no_one_length_are_refused(cache: Cache, tmp_path: Path) -> None:
    def made(name: str, fields: dict[str, Any], **settings: Any) -> Cache:
        return write_cache(tmp_path, fields, name=name, **settings)

    uneven = made("uneven", {"a": [torch.ones(1), torch.ones(2)], "b": [torch.ones(1), torch.ones(3)]})
    with pytest.raises(ConfigError, match="sample 1 has 2 in 'a' and 3 in 'b'"):
        Loader(uneven, batch_tokens=8)
    fixed = made("fixed", {"a": torch.ones(4, 2)})
    with pytest.raises(ConfigError, match="all records have one shape"):
        Loader(fixed, batch_tokens=8)
    images = made("images", folded("x", [torch.ones(1, 2), torch.ones(2, 1)], 2), axes={"x": ("*", "*")})
    with pytest.raises(ConfigError, match="'x' has other axes that vary"):
        Loader(images, batch_tokens=8)
    taken = made("taken", {"a": [torch.ones(1), torch.ones(2)], "cu_seqlens": torch.ones(2)})
    with pytest.raises(ConfigError, match="batch_tokens= adds cu_seqlens"):
        Loader(taken, batch_tokens=8)
    with pytest.raises(ConfigError, match="batches of varying size"):
        Mixture([Loader(cache, batch_tokens=BUDGET), Loader(fixed, 1)])


def test_a_cache_that_is_filled_is_refused(tmp_path: Path) -> None:
    data = [{"ids": torch.arange(1 + n % 9)} for n in range(40)]
    for setting, why in (
        ({"batch_tokens": 16}, "lengths are known"),
        ({"batch_by": "ids"}, "shapes and keys"),
    ):
        with pytest.raises(ConfigError, match=why):
            stoker.cached(data, wait=False, cache_dir=tmp_path / why, shuffle=True, **setting)


def test_a_dataset_is_served_by_tokens_with_fields_by_name(tmp_path: Path) -> None:
    data = [{"ids": torch.arange(1 + n % 9), "label": n} for n in range(40)]
    loader = stoker.cached(data, batch_tokens=16, shuffle=True, cache_dir=tmp_path)
    numbers = [n for batch in loader for n in batch["label"].tolist()]
    assert sorted(numbers) == [*range(40)]
    assert all(batch["position_ids"].tolist() == batch["ids"].tolist() for batch in loader)
