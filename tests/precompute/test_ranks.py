"""Ranks that fill one cache together: each group once, whoever dies, and the records of one process."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from stoker.errors import ConfigError
from stoker.precompute import Timeouts, engine
from stoker.precompute.engine import part_of
from stoker.store import make_recipe, open_folder
from tests.precompute.fake_encoders import FakeEncoder
from tests.precompute.fake_sources import FakeSource
from tests.precompute.test_engine import assert_same, records, run


def test_groups_go_round_over_all_parts() -> None:
    """Counted over all groups, so that a resumed run deals them as the first one did."""
    recipe = make_recipe(FakeSource((10, 7)), FakeEncoder(samples=4), dtype=None)
    every = np.arange(17)

    shares = [part_of(recipe, every, (rank, 2)).tolist() for rank in range(2)]

    assert shares == [[0, 1, 2, 3, 8, 9, 14, 15, 16], [4, 5, 6, 7, 10, 11, 12, 13]]
    assert part_of(recipe, np.array([5, 9, 15]), (0, 2)).tolist() == [9, 15]
    assert sorted(np.concatenate([part_of(recipe, every, (rank, 3)) for rank in range(3)])) == [*every]


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_share_the_groups_and_store_what_one_process_would(tmp_path: Path, world_size: int) -> None:
    source = FakeSource((30, 18), delay_s=0.01)
    whole = run(source, FakeEncoder(by_shape=True), tmp_path / "one", workers=0)
    together = threading.Barrier(world_size)

    def fill(rank: int) -> tuple[int, dict]:
        together.wait(60)
        report = run(
            source, FakeEncoder(by_shape=True), tmp_path / "many", workers=0, part=(rank, world_size)
        )
        return report.encoded, records(report.cache)

    with ThreadPoolExecutor() as pool:
        done = list(pool.map(fill, range(world_size)))

    assert sum(encoded for encoded, _ in done) == 48
    assert all(encoded for encoded, _ in done)
    for _, found in done:
        assert_same(found, records(whole.cache))


def test_the_part_of_a_rank_that_never_came_is_taken_over(tmp_path: Path) -> None:
    report = run(FakeSource((24,)), FakeEncoder(), tmp_path, workers=0, part=(1, 3))

    assert (report.encoded, report.records) == (24, 24)
    assert run(FakeSource((24,)), FakeEncoder(), tmp_path, workers=0, part=(0, 3)).encoded == 0


def test_a_rank_waits_for_one_that_lives_and_takes_over_when_it_is_gone(tmp_path: Path) -> None:
    recipe = make_recipe(FakeSource((24,)), FakeEncoder(), dtype=None)
    folder = open_folder(tmp_path, "c", recipe)
    with ThreadPoolExecutor() as pool:
        with folder.lock("encode-1-of-2"):
            waiting = pool.submit(run, FakeSource((24,)), FakeEncoder(), tmp_path, workers=0, part=(0, 2))
            until = time.monotonic() + 30
            while len(folder.missing()) > 12 and time.monotonic() < until:
                time.sleep(0.05)
            time.sleep(4 * engine.POLL_S)
            assert not waiting.done()
            assert folder.missing().tolist() == [*range(4, 8), *range(12, 16), *range(20, 24)]
        report = waiting.result(60)

    assert report.encoded == 24


def test_who_shows_nothing_for_long_is_not_waited_for(tmp_path: Path) -> None:
    recipe = make_recipe(FakeSource((24,)), FakeEncoder(), dtype=None)
    folder = open_folder(tmp_path, "c", recipe)
    timeouts = Timeouts(start=0.2, open=0.2, read=0.2, encode=2.0, write=0.2)

    with folder.lock("encode-1-of-2"):
        report = run(FakeSource((24,)), FakeEncoder(), tmp_path, workers=0, part=(0, 2), timeouts=timeouts)

    assert report.records == 24


def test_a_process_alone_waits_for_ranks_and_ranks_for_it(tmp_path: Path) -> None:
    recipe = make_recipe(FakeSource((24,)), FakeEncoder(), dtype=None)
    folder = open_folder(tmp_path, "c", recipe)

    with folder.lock(shared=True) as first, folder.lock(shared=True) as second, folder.lock() as alone:
        assert (first, second, alone) == (True, True, False)
    with folder.lock() as alone, folder.lock(shared=True) as rank:
        assert (alone, rank) == (True, False)


def test_what_fails_for_a_passing_reason_is_tried_again_by_its_own_rank_alone(tmp_path: Path) -> None:
    """Or every rank that looks after the others' parts would wait for the same hang once more."""
    tried: list[int] = []

    class Failing(FakeSource):
        def read(self, number, start=None, stop=None):
            if number == 13:
                tried.append(number)
            return super().read(number, start, stop)

    source = Failing((24,), faults={13: "eio"})
    for rank, times in ((1, 2), (0, 2), (1, 4)):
        report = run(source, FakeEncoder(), tmp_path, workers=0, part=(rank, 2))

        assert list(report.cache.quarantined) == [13]
        assert len(tried) == times


def test_ranks_do_not_overwrite(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="one would remove what another has just encoded"):
        run(FakeSource((4,)), FakeEncoder(), tmp_path, overwrite=True, part=(0, 2))
