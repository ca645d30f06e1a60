"""What each rank of a run is given, asked of one process that plays them in turn."""

from __future__ import annotations

import json

import pytest
import torch

from stoker.distributed.ranks import SINGLE_PROCESS, Ranks
from stoker.errors import ConfigError
from stoker.run.context import Run, on_own_device, write_diary
from stoker.run.loaders import make_loader, make_val_loader, own_trajectories, share_steps
from stoker.run.precompute import fill_caches
from tests.run.conftest import Configure


class Played(Ranks):
    """One rank of several; the others say what rank 0 would."""

    def __init__(self, rank: int, world_size: int, leader: str = "null") -> None:
        self.rank, self.world_size, self._leader = rank, world_size, leader

    def all_gather(self, text: str, what: str) -> list[str]:
        return [text if self.is_rank_zero else self._leader] * self.world_size


def test_a_new_run_has_the_batch_size_on_each_rank(configure: Configure) -> None:
    cache = fill_caches(Run(configure()), ["train"])[0].cache

    shared = share_steps(Run(configure(), ranks=Played(0, 4)), "digest", cache)

    assert (shared.resume, shared.begun, shared.batch_size, shared.drop_last) == (False, 4, 16, True)
    assert not share_steps(Run(configure(), ranks=SINGLE_PROCESS), "digest", cache).drop_last


@pytest.mark.parametrize(("world_size", "batch_size"), [(1, 64), (2, 32), (8, 8)])
def test_a_run_that_goes_on_keeps_its_global_batch(
    configure: Configure, world_size: int, batch_size: int
) -> None:
    config = configure("training.run_dir=.", "training.partition=static")
    cache = fill_caches(Run(config), ["train"])[0].cache
    write_diary(cache.path.parents[2].parent, digest="d", finished=False, work="w", step_s=None, ranks=4)

    shared = [
        share_steps(Run(config, ranks=Played(rank, world_size, "4")), "d", cache)
        for rank in range(world_size)
    ]

    assert {one.batch_size for one in shared} == {batch_size}
    assert {one.partition for one in shared} == {"static(4)"}
    assert all(one.resume and one.drop_last for one in shared)


def test_ranks_that_cannot_share_the_global_batch_are_refused(configure: Configure) -> None:
    config = configure("training.run_dir=.")
    cache = fill_caches(Run(config), ["train"])[0].cache
    write_diary(cache.path.parents[2].parent, digest="d", finished=False, work="w", step_s=None, ranks=4)

    with pytest.raises(ConfigError, match="64 examples a step, begun with 4 ranks, which 3 cannot"):
        share_steps(Run(config, ranks=Played(0, 3)), "d", cache)


def test_ranks_validate_on_whole_trajectories_each_once(configure: Configure) -> None:
    config = configure()
    cache = fill_caches(Run(config), ["val"])[0].cache

    for world_size in (2, 3, 7):
        parts = [own_trajectories(cache, Played(rank, world_size)) for rank in range(world_size)]
        assert [number for part in parts for number in part or ()] == cache.indices.tolist()
        loaders = [
            make_val_loader(Run(config, ranks=Played(rank, world_size)), cache) for rank in range(world_size)
        ]
        seen = [tuple(row) for one in loaders if one for batch in one for row in batch.index.tolist()]
        assert len(seen) == len(set(seen)) == 4 * 8
        assert [one is None for one in loaders] == [not part for part in parts]


def test_ranks_train_on_disjoint_slices_of_one_global_batch(configure: Configure) -> None:
    config = configure()
    cache = fill_caches(Run(config), ["train"])[0].cache
    ranks = [Played(rank, 2) for rank in range(2)]
    shared = [share_steps(Run(config, ranks=one), "none", cache) for one in ranks]
    whole = make_loader(Run(configure("training.batch_size=32")), cache)

    loaders = [make_loader(Run(config, ranks=ranks[n]), cache, shared=shared[n]) for n in range(2)]

    assert [len(one) for one in loaders] == [3, 3]
    for both, one in zip(zip(*loaders, strict=True), whole, strict=False):
        assert [row for part in both for row in part.index.tolist()] == one.index.tolist()


def test_a_rank_tells_what_it_encoded_and_all_hear_the_sum(configure: Configure) -> None:
    class Two(Played):
        def all_gather(self, text: str, what: str) -> list[str]:
            told = json.dumps([0, [[5, 0, 1.0]], [False]])
            return [text, told] if what == "the end of precompute" else [text] * 2

    fill_caches(Run(configure()), ["train"])

    result = fill_caches(Run(configure(), ranks=Two(0, 2)), ["train"])[0]

    assert (result.encoded, result.reused, result.encode_seconds) == (5, 7, 1.0)


def test_each_rank_uses_its_own_gpu(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: used.append(str(device)))
    rank = Played(3, 4)
    rank.local_rank = 3
    config = configure("training.device=cuda")

    assert on_own_device(Run(config, ranks=rank)).config.training.device == "cuda:3"
    assert used == ["cuda:3"]
