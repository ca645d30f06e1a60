"""Several ranks that serve a cache while it is filled: each has its part of the same order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stoker.errors import ConfigError, IncompleteError
from stoker.loader import Loader, Mixture, Windows
from stoker.store import open_cache
from stoker.store.cache import FilledCache
from tests.loader.caches import trajectories
from tests.loader.test_filling import COUNT, Steps, damage, groups_of_one, numbers, same
from tests.loader.test_filling_kinds import varying

WINDOWS = Windows(stride=2, horizon=2)


@pytest.fixture(autouse=True)
def _groups(monkeypatch: pytest.MonkeyPatch) -> None:
    groups_of_one(monkeypatch)


def of_ranks(folder: Path, fields: dict[str, Any], world: int, **settings: Any) -> list[Loader]:
    """A loader for each rank; to each its records become available in another order."""
    return [
        Loader(
            Steps(folder / f"{world}-{rank}", fields, chance=rank or None).cache(),
            rank=rank,
            world_size=world,
            **{"shuffle": True, **settings},
        )
        for rank in range(world)
    ]


def indices(batches: Any) -> list[Any]:
    """What each batch is of."""
    return [(batch["index"] if isinstance(batch, dict) else batch.index).tolist() for batch in batches]


def joined(by_rank: list[list[Any]]) -> list[Any]:
    """The global batches: those of all ranks, one after another."""
    steps = max(map(len, by_rank))
    return [[i for own in by_rank for i in (own[step] if step < len(own) else [])] for step in range(steps)]


@pytest.mark.parametrize("settings", [{}, {"windows": WINDOWS}], ids=["records", "windows"])
@pytest.mark.parametrize(("world", "size"), [(2, 5), (3, 4), (4, 7)])
@pytest.mark.parametrize("drop_last", [None, False])
def test_ranks_have_the_batches_of_one_rank_with_their_global_batch(
    tmp_path: Path, world: int, size: int, drop_last: bool | None, settings: dict[str, Any]
) -> None:
    fields = trajectories(COUNT)
    ranks = of_ranks(tmp_path, fields, world, batch_size=size, seed=3, drop_last=drop_last, **settings)
    (alone,) = of_ranks(
        tmp_path, fields, 1, batch_size=size * world, seed=3, drop_last=drop_last is None, **settings
    )

    by_rank = [indices(loader) for loader in ranks]

    assert joined(by_rank) == indices(alone)
    if drop_last is None:
        assert len({len(own) for own in by_rank}) == 1
    assert [len(loader) for loader in ranks] == [len(own) for own in by_rank]
    assert {loader.state_dict()["epoch"] for loader in ranks} == {1}


def test_ranks_share_windows_of_varying_trajectories(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"shuffle": True, "windows": WINDOWS, "seed": 3}
    ranks = of_ranks(tmp_path, varying(), 2, batch_size=5, **settings)
    (alone,) = of_ranks(tmp_path, varying(), 1, batch_size=10, drop_last=True, **settings)

    assert joined([indices(loader) for loader in ranks]) == indices(alone)


@pytest.mark.parametrize("drop_last", [None, False, True])
@pytest.mark.parametrize("settings", [{}, {"windows": WINDOWS}], ids=["records", "windows"])
def test_in_sequential_order_a_rank_has_the_piece_that_it_has_of_a_complete_cache(
    tmp_path: Path, drop_last: bool | None, settings: dict[str, Any]
) -> None:
    settings = {**settings, "shuffle": False, "batch_size": 5, "drop_last": drop_last}
    ranks = of_ranks(tmp_path, trajectories(COUNT), 3, **settings)
    path = filled(tmp_path / "filled", trajectories(COUNT)).path

    for rank, loader in enumerate(ranks):
        place = iter(loader)
        head = [next(place) for _ in range(2)]
        state = loader.state_dict()
        rest = indices(place)
        complete = Loader(open_cache(path), rank=rank, world_size=3, **settings)
        assert indices(head) + rest == indices(complete)
        assert len(loader) == len(complete)
        again = Loader(open_cache(path), rank=rank, world_size=3, **settings)
        again.load_state_dict(state)
        assert indices(again) == rest


def test_a_sequential_piece_is_not_continued_over_a_cache_with_a_quarantined_sample(tmp_path: Path) -> None:
    """The pieces of the other ranks would have other lengths."""
    settings: dict[str, Any] = {"shuffle": False, "batch_size": 4, "world_size": 2, "rank": 1}
    loader = Loader(Steps(tmp_path / "a", trajectories(COUNT)).cache(), **settings)
    next(iter(loader))
    steps = Steps(tmp_path / "b", trajectories(COUNT), bad=[50])
    while not steps.done():
        steps.wait(0)
    again = Loader(open_cache(steps.folder.path), **settings)
    again.load_state_dict(loader.state_dict())
    with pytest.raises(IncompleteError, match=r"sample 50 .*begin the next epoch"):
        list(again)


@pytest.mark.parametrize("stop", [1, 3, 6])
def test_a_place_of_two_ranks_is_continued_by_two_or_by_one(tmp_path: Path, stop: int) -> None:
    fields = trajectories(COUNT)
    first, other = of_ranks(tmp_path / "a", fields, 2, batch_size=4, seed=3)
    places = iter(first), iter(other)
    for _ in range(stop):
        for place in places:
            next(place)
    state, rest = first.state_dict(), joined([indices(place) for place in places])

    two = of_ranks(tmp_path / "b", fields, 2, batch_size=4, seed=3)
    (one,) = of_ranks(tmp_path / "b", fields, 1, batch_size=8, seed=3, drop_last=True)
    for loader in (*two, one):
        loader.load_state_dict(state)

    assert rest
    assert joined([indices(loader) for loader in two]) == rest
    assert indices(one) == rest


def test_ranks_pass_over_no_sample_while_the_cache_is_filled(tmp_path: Path) -> None:
    fields = trajectories(COUNT)
    for settings in ({}, {"shuffle": False}):
        steps = Steps(tmp_path / str(settings), fields, bad=[3])
        loader = Loader(steps.cache(), batch_size=4, world_size=2, **settings)
        expected = len(loader)
        with pytest.raises(IncompleteError, match=r"sample 3 .*broken.*Leave wait=False .*next epoch"):
            list(loader)
        assert len(loader) == expected

        while not steps.done():  # the hint
            steps.wait(0)
        complete = [
            Loader(open_cache(steps.folder.path), 4, rank=r, world_size=2, **settings) for r in range(2)
        ]
        found = sorted(n for loader in complete for n in numbers(loader))
        assert 3 not in found
        assert len(found) == len({*found}) >= COUNT - 1 - 7  # of a last global batch of 8


def test_ranks_that_did_not_agree_need_a_complete_cache(tmp_path: Path) -> None:
    steps = Steps(tmp_path, trajectories(COUNT))
    steps.agreed = False
    with pytest.raises(ConfigError, match=r"world_size=2 needs a complete cache.*Leave wait=False out"):
        Loader(steps.cache(), batch_size=4, world_size=2, shuffle=True)


def test_an_epoch_given_up_is_followed_by_one_of_a_complete_cache(tmp_path: Path) -> None:
    """Else a rank whose filling has ended would serve another order than one whose filling has not."""
    fields = trajectories(COUNT)
    ranks = of_ranks(tmp_path, fields, 2, batch_size=4, seed=3)
    for loader in ranks:
        next(iter(loader))
        loader.set_epoch(1)
    path = filled(tmp_path / "filled", fields).path
    for rank, loader in enumerate(ranks):
        complete = Loader(open_cache(path), batch_size=4, seed=3, rank=rank, world_size=2, shuffle=True)
        complete.set_epoch(1)
        assert indices(loader) == indices(complete)


@pytest.mark.parametrize("bad", [(), (9,)])
def test_a_place_at_the_end_of_the_first_epoch_is_one_of_a_complete_cache(tmp_path: Path, bad: Any) -> None:
    """A state that is saved with the last batch, before the epoch is over."""
    steps = Steps(tmp_path, trajectories(COUNT), bad=bad)
    loader = Loader(steps.cache(), batch_size=5, seed=3, shuffle=True)
    for _batch in loader:
        state = loader.state_dict()
    expected = indices(loader)
    for cache in (steps.cache(), open_cache(steps.folder.path)):
        again = Loader(cache, batch_size=5, seed=3, shuffle=True)
        again.load_state_dict(state)
        assert indices(again) == expected


@pytest.mark.parametrize("mode", ["concat", "round_robin"])
def test_ranks_share_a_mixture_of_caches_that_are_filled(tmp_path: Path, mode: Any) -> None:
    fields = trajectories(COUNT), {name: rows + 1 for name, rows in trajectories(40).items()}

    def mixed(folder: Path, rank: int, world: int, size: int) -> Mixture:
        caches = [Steps(folder / f"{world}-{rank}-{n}", own).cache() for n, own in enumerate(fields)]
        settings: dict[str, Any] = {
            "shuffle": True,
            "rank": rank,
            "world_size": world,
            "drop_last": True,
            "seed": 3,
        }
        return Mixture(caches, size, names=["a", "b"], mode=mode, windows=WINDOWS, **settings)

    ranks = [indices(mixed(tmp_path, rank, 2, 5)) for rank in range(2)]
    assert joined(ranks) == indices(mixed(tmp_path, 0, 1, 10))


# ----------------------------------------------------------------------------------------------------------
# A rank that finds the cache complete, while another does not.


def filled(folder: Path, fields: dict[str, Any]) -> Any:
    """A complete cache as such a rank has it."""
    steps = Steps(folder, fields)
    while not steps.done():
        steps.wait(0)
    cache = open_cache(steps.folder.path)
    cache.filling = FilledCache(cache)
    return cache


def test_a_rank_with_a_complete_cache_serves_its_part_of_the_same_order(tmp_path: Path) -> None:
    fields = trajectories(COUNT)
    first, other = of_ranks(tmp_path, fields, 2, batch_size=5, seed=3)
    complete = Loader(
        filled(tmp_path / "filled", fields), batch_size=5, seed=3, rank=1, world_size=2, shuffle=True
    )
    for _epoch in range(3):
        assert indices(complete) == indices(other)
    assert not {n for batch in indices(first)[:1] for n in batch} & {n for b in indices(other)[:1] for n in b}


def test_no_loader_of_a_rank_depends_on_what_its_other_loaders_did(tmp_path: Path) -> None:
    """The filling of one rank goes on, since its loader serves half. The other rank has it all."""
    fields = trajectories(COUNT)
    steps = Steps(tmp_path / "steps", fields)
    half = [number for block in steps.blocks[:32] for number in block]
    caches = [steps.cache(), filled(tmp_path / "filled", fields)]

    def check(epochs: tuple[int, ...]) -> None:
        ranks = [
            Loader(cache, 4, seed=3, rank=rank, world_size=2, indices=half, shuffle=True)
            for rank, cache in enumerate(caches)
        ]
        for epoch in epochs:
            for loader in ranks:
                loader.set_epoch(epoch)
            assert sorted(n for loader in ranks for n in numbers(loader)) == sorted(half), epoch

    check((0, 0))
    assert not steps.done()
    list(Loader(caches[1], 4, shuffle=True))  # an evaluation on this rank alone
    check((0, 0))
    check((0, 1, 1))


def test_one_cache_of_a_mixture_is_not_completed_by_one_rank(tmp_path: Path) -> None:
    cache = Steps(tmp_path, trajectories(COUNT)).cache()
    mixture = Mixture([cache], 4, names=["a"], windows=WINDOWS, world_size=2)
    with pytest.raises(ConfigError, match=r"only\('a'\) needs complete caches.*after that epoch"):
        mixture.only("a")
    list(mixture)


def test_a_state_that_is_loaded_is_of_its_own_epoch(tmp_path: Path) -> None:
    fields = trajectories(COUNT)
    first = Loader(Steps(tmp_path / "a", fields).cache(), 4, seed=3, shuffle=True)
    first.set_epoch(2)
    state, rest = first.state_dict(), indices(first)

    other = Loader(Steps(tmp_path / "b", fields).cache(), 4, seed=3, shuffle=True)
    next(iter(other))  # of epoch 0
    other.load_state_dict(state)
    assert other.state_dict().keys() == state.keys()
    assert indices(other) == rest


def test_a_damaged_record_is_repaired_there(tmp_path: Path) -> None:
    fields = trajectories(COUNT)
    cache = filled(tmp_path, fields)
    steps = Steps(tmp_path, fields)
    steps.filled, cache.filler = [31], steps
    damage(steps)
    loader = Loader(cache, batch_size=5, seed=3, shuffle=True)

    batches = list(loader)

    assert loader.repaired > 0
    assert sorted(numbers(batches)) == [*range(COUNT)]
    assert all(same(batch, fields) for batch in batches)
    assert sorted(numbers(loader)) == [*range(COUNT)]
