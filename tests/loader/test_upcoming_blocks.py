"""What is said to come next is what is read, in the order in which it is; and how much to have under way."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from stoker.loader import Loader, Windows
from stoker.loader.assembly import stored_outputs
from stoker.loader.loader import design_of
from stoker.loader.order import RankShare
from stoker.loader.prefetch import BlockLocator, RequestDepth, UpcomingBlocks
from stoker.store import Cache
from stoker.store.format import LocalFile
from tests.loader.caches import trajectories, write_cache

BLOCK = 4096


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    """Records of 36 KiB, so that a window takes a part of one, and one takes several blocks."""
    fields = trajectories(24, 9, (64, 32))
    return write_cache(tmp_path_factory.mktemp("wide"), fields, timed=("latent", "time"), shards=(5, 7, 1))


@pytest.fixture(scope="module")
def varying(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(3, 9, (20,), generator=generator).tolist()
    fields: dict[str, Any] = {"latent": [torch.randn((n, 700), generator=generator) for n in lengths]}
    return write_cache(tmp_path_factory.mktemp("varying"), fields, timed=("latent",), shards=(6, 9))


def horizon_of(loader: Loader, *, most: int = 1000) -> tuple[BlockLocator, UpcomingBlocks]:
    design = design_of(loader)
    reach = BlockLocator(
        design.cache, design.table, design.examples, stored_outputs(design.outputs), block_bytes=BLOCK
    )
    return reach, UpcomingBlocks(design.share, design.order.epoch, reach.blocks, lambda: most)


@pytest.mark.usefixtures("twins_alone")
@pytest.mark.parametrize(
    ("which", "settings"),
    [
        ("wide", {"indices": list(range(0, 24, 3))}),
        ("wide", {"windows": Windows(stride=1, horizon=2), "indices": [1, 2, 8, 23], "batch_size": 3}),
        ("wide", {"shuffle": "block(2,6)", "indices": list(range(3, 14))}),
        ("varying", {"indices": [0, 3, 4, 11, 19]}),
        ("varying", {"windows": Windows(stride=1, horizon=1), "indices": [2, 5, 17]}),
        ("varying", {"windows": Windows(horizon=0), "indices": [2, 5, 17]}),
        ("varying", {"batch_by": "shape", "indices": [0, 3, 4, 11, 19]}),
        ("varying", {"batch_by": "shape", "indices": [*range(12)], "rank": 1, "world_size": 2}),
        ("varying", {"batch_tokens": 9, "batch_size": 1, "indices": [0, 3, 4, 11, 19]}),
    ],
)
def test_the_blocks_that_come_next_are_those_that_are_read(
    which: str, settings: dict[str, Any], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache: Cache = request.getfixturevalue(which)
    loader = Loader(cache, **{"shuffle": True, "batch_size": 2, "seed": 5, **settings}, tier="disk")
    reach, horizon = horizon_of(loader)
    horizon.at(0, 0)
    while horizon.extend():
        pass
    said = {int(block) for s in horizon.stretches if s.begin < (1, 0) for block in s.own}
    names = {id(cache.shard(i).fields["latent"]._file.file): i for i in range(len(cache.index.shards))}
    read: set[int] = set()
    original = LocalFile.read_into

    def noted(self: LocalFile, offset: int, out: memoryview) -> None:
        original(self, offset, out)
        first, last = offset // BLOCK, -(-(offset + len(out)) // BLOCK)
        read.update(int(reach.first[names[id(self)]]) + block for block in range(first, last))

    monkeypatch.setattr(LocalFile, "read_cached", lambda *_: False)
    monkeypatch.setattr(LocalFile, "read_into", noted)
    served = list(loader)

    assert len(served) >= 2
    assert read == said
    assert len(said) < reach.first[-1] * 0.9


def test_a_horizon_goes_over_the_end_of_an_epoch_and_knows_every_next_use(wide: Cache) -> None:
    loader = Loader(wide, batch_size=2, seed=5, rank=1, world_size=2, tier="disk", shuffle=True)
    reach, horizon = horizon_of(loader, most=60)
    share = design_of(loader).share
    horizon.at(0, 8)
    while horizon.extend():
        pass

    ends = [s.end for s in horizon.stretches]
    assert ends[:-1] == [s.begin for s in list(horizon.stretches)[1:]]
    assert ends[-1] >= (1, 8) > horizon.stretches[-1].begin
    order = {epoch: design_of(loader).order.epoch(epoch) for epoch in (0, 1)}
    for stretch in horizon.stretches:
        epoch, begin = stretch.begin
        end = stretch.end[1] if stretch.end[0] == epoch else share.positions
        both = order[epoch](begin, end)
        assert set(stretch.every) == set(reach.blocks(both))
        assert set(stretch.own) < set(stretch.every)
    uses = horizon.next_use(int(reach.first[-1]))
    for block in range(len(uses)):
        away = [i for i, s in enumerate(horizon.stretches) if block in s.every]
        assert uses[block] == (away[0] if away else len(horizon.stretches))

    passed = horizon.stretches[1].begin
    horizon.at(*passed)
    assert horizon.passed == 1
    assert horizon.stretches[0].begin == passed
    horizon.at(3, 0)  # somebody went elsewhere
    assert horizon.stretches[0].begin == (3, 0)


def test_the_blocks_of_a_stretch_come_in_the_order_of_their_first_use(wide: Cache) -> None:
    loader = Loader(wide, batch_size=1, seed=2, tier="disk", shuffle=True)
    reach, horizon = horizon_of(loader)
    share: RankShare = design_of(loader).share
    ids = design_of(loader).order.epoch(0)

    one_by_one = [block for i in range(share.steps()) for block in reach.blocks(ids(i, i + 1)).tolist()]

    assert reach.blocks(ids(0, share.positions)).tolist() == list(dict.fromkeys(one_by_one))
    assert np.all(np.diff(one_by_one[:3]) != 0)
    del horizon


def test_as_much_is_under_way_as_the_way_holds() -> None:
    """A way of 100 MB/s whose answers take 0.2 s holds 20 MB."""
    depth = RequestDepth(least_bytes=4_000_000, most_bytes=400_000_000)
    assert depth.bytes == 4_000_000

    for _ in range(40):
        together = max(1, depth.bytes // 1_000_000)
        took_s = max(0.2, together * 1e6 / 100e6)
        came = depth.came
        for _ in range(together):
            depth.ended(1_000_000, came, took_s)

    assert 39e6 < depth.bytes < 45e6
    assert depth.bytes_s == pytest.approx(100e6, rel=0.05)
