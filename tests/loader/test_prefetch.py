"""Batches made beside the step: chosen by the clock, the same in every way."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from stoker.loader import Loader, Windows
from stoker.loader.prefetch import BatchPrefetcher, PendingStrip, Strips
from stoker.runtime.threads import Pool
from stoker.store import Cache
from tests.kit import forked as subprocess
from tests.loader.caches import trajectories, write_cache


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    return write_cache(tmp_path_factory.mktemp("c"), trajectories(40), timed=("latent",))


class Clock:
    """Seconds that pass as a batch is made and a step is taken."""

    def __init__(self, make_s: float, step_s: float, handover_s: float = 0.0) -> None:
        self.make_s, self.step_s, self.handover_s = make_s, step_s, handover_s
        self.now_s = 0.0
        self.main = threading.get_ident()

    def __call__(self) -> float:
        return self.now_s

    def made(self, count: int) -> Iterator[int]:
        for number in range(count):
            if threading.get_ident() == self.main:
                self.now_s += self.make_s
            yield number

    def strip(self, chooser: BatchPrefetcher, count: int = 32) -> list[int]:
        found: list[int] = []
        for number in chooser.of(self.made(count), count):
            found.append(number)
            busy_s = max(self.step_s, self.make_s) if chooser.in_thread else self.step_s
            self.now_s += busy_s + (self.handover_s if chooser.in_thread else 0)
        chooser.ended()
        return found


@pytest.mark.parametrize(
    ("make_s", "step_s", "cores", "expected"),
    [
        pytest.param(200e-6, 2e-3, 2, True, id="a-batch-worth-a-thread"),
        pytest.param(27e-6, 2e-3, 2, False, id="a-small-batch"),
        pytest.param(200e-6, 0.0, 2, False, id="no-step-to-hide-behind"),
        pytest.param(200e-6, 10.0, 2, False, id="nothing-to-gain"),
        pytest.param(200e-6, 2e-3, 1, False, id="no-core-free"),
    ],
)
def test_the_thread_is_taken_where_it_can_pay(
    make_s: float, step_s: float, cores: int, expected: bool
) -> None:
    clock = Clock(make_s, step_s)
    chooser = BatchPrefetcher(cores=cores, clock=clock)

    for _ in range(4):
        assert clock.strip(chooser) == list(range(32))

    assert chooser.in_thread is expected


def test_a_thread_that_does_not_pay_is_given_up_and_tried_ever_more_rarely() -> None:
    clock = Clock(200e-6, 2e-3, handover_s=1e-3)
    chooser = BatchPrefetcher(cores=2, clock=clock)

    ways = []
    for _ in range(200):
        ways.append(chooser.in_thread)
        clock.strip(chooser)

    assert 4 <= sum(ways) <= 18
    assert sum(ways[:20]) > sum(ways[100:120])


def test_one_slow_strip_does_not_end_it() -> None:
    clock = Clock(200e-6, 2e-3)
    chooser = BatchPrefetcher(cores=2, clock=clock)
    for _ in range(4):
        clock.strip(chooser)
    clock.step_s = 1.0
    clock.strip(chooser)
    clock.step_s = 2e-3
    clock.strip(chooser)

    assert chooser.in_thread


def test_batches_are_the_same_and_places_too(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    made = {False: 0, True: 0}

    def epoch(*, beside: bool) -> list[tuple[Any, ...]]:
        chooser = BatchPrefetcher(cores=2)
        chooser.in_thread = beside
        chooser._made.append(1e-4)
        monkeypatch.setattr(chooser, "ended", lambda: None)
        submit = chooser._pool.submit

        def counted(work: Any) -> Any:
            made[beside] += 1
            return submit(work)

        monkeypatch.setattr(chooser._pool, "submit", counted)
        loader = Loader(
            cache, batch_size=7, windows=Windows(field="latent"), tier="host", seed=3, shuffle=True
        )
        loader._serving._make_prefetcher = lambda: chooser
        return [(batch.z0.clone(), batch.index.clone(), loader.state_dict()) for batch in loader]

    for (z0, index, state), (other_z0, other_index, other_state) in zip(
        epoch(beside=False), epoch(beside=True), strict=True
    ):
        assert torch.equal(z0, other_z0)
        assert torch.equal(index, other_index)
        assert state == other_state
    assert made[False] == 0
    assert made[True] > 2


def test_an_abandoned_pass_leaves_no_thread_at_work() -> None:
    """The next pass gathers into the same buffers."""
    at_work = threading.Event()

    def slow() -> Iterator[int]:
        for number in range(100):
            at_work.set()
            time.sleep(0.02)
            at_work.clear()
            yield number

    chooser = BatchPrefetcher(cores=2)
    chooser.in_thread = True
    chooser._made.append(1.0)
    batches = chooser.of(slow(), 100)
    next(batches)
    assert at_work.wait(10)
    batches.close()

    assert not at_work.is_set()


def test_an_error_comes_out_where_batches_are_asked_for() -> None:
    def broken() -> Iterator[int]:
        yield 1
        raise ValueError("no more")

    chooser = BatchPrefetcher(cores=2)
    chooser.in_thread = True
    chooser._made.append(1.0)

    with pytest.raises(ValueError, match="no more"):
        list(chooser.of(broken(), 5))


def test_nothing_is_timed_per_batch() -> None:
    """A small batch takes 27 us; what is added to it is added to every one."""
    asked: list[float] = []

    def clock() -> float:
        asked.append(0.0)
        return 0.0

    chooser = BatchPrefetcher(cores=2, clock=clock)
    assert list(chooser.of(iter(range(1000)), 1000)) == list(range(1000))
    chooser.ended()

    assert len(asked) == 3


def test_a_child_of_a_fork_has_a_thread_of_its_own(cache: Cache) -> None:
    code = f"""
import os, sys
from stoker.loader import Loader, Windows
from stoker.store import open_cache
cache = open_cache({str(cache.path)!r})
loader = Loader(cache, 7, shuffle=True, windows=Windows(field="latent"), tier="host")
list(loader)
loader._serving.prefetcher.in_thread = True
assert list(loader._serving.prefetcher.of(iter(range(50)), 50)) == list(range(50))  # its thread is there now
child = os.fork()
if not child:
    before = loader._serving.prefetcher
    list(loader)
    os._exit(int(loader._serving.prefetcher is before))
assert os.waitpid(child, 0)[1] == 0
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=60)


def test_a_pass_that_a_fork_inherits_is_left_or_refused_at_once() -> None:
    """What it waits for is made by a thread that a child does not have."""
    code = """
import os, sys, threading, time
from stoker.errors import StalledError
from stoker.loader.prefetch import BatchPrefetcher
go = threading.Event()
def source():
    for number in range(20):
        if number == 1:
            go.wait(50)
        yield number
def begun():
    chooser = BatchPrefetcher(cores=2)
    chooser.in_thread = True
    chooser._made.append(1e-3)
    batches = chooser.of(source(), 20)
    assert next(batches) == 0  # the thread is at the next one, and stays there
    return batches
left, gone_on = begun(), begun()
child = os.fork()
if not child:
    begin = time.monotonic()
    left.close()
    try:
        next(gone_on)
    except StalledError as error:
        assert "this one was forked from it without its threads" in str(error), error
        chooser = BatchPrefetcher(cores=2)
        chooser.in_thread = True
        chooser._made.append(1e-3)
        assert list(chooser.of(iter(range(50)), 50)) == list(range(50))
        os._exit(int(time.monotonic() - begin > 40))
    os._exit(2)
code = os.waitpid(child, 0)[1]
go.set()
assert list(gone_on) == list(range(1, 20))
assert code == 0, code
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=120)


def test_the_next_strip_is_begun_beside_the_last_batches_of_this_one() -> None:
    """Beginning one takes milliseconds, which the step would wait for."""
    begun: list[int] = []
    by: list[bool] = []

    def source() -> Iterator[list[int]]:
        for number in range(3):
            begun.append(number)
            by.append(threading.current_thread() is threading.main_thread())
            yield [number] * 20

    chooser = BatchPrefetcher(cores=2)
    chooser.in_thread = True
    chooser._made.append(1e-3)
    found: list[int] = []
    for strip in (strips := Strips(source(), PendingStrip())):
        for place, batch in enumerate(chooser.of(strip, len(strip), strips)):
            found.append(batch)
            if place == 19 and batch < 2:
                strips._turn.wait()
                assert begun[-1] == batch + 1
        chooser.ended()

    assert found == [0] * 20 + [1] * 20 + [2] * 20
    assert by == [True, False, False]


def test_two_passes_never_begin_strips_at_one_time() -> None:
    at_work: list[int] = []
    seen: list[int] = []

    def source() -> Iterator[int]:
        for number in range(3):
            at_work.append(number)
            seen.append(len(at_work))
            time.sleep(0.05)
            at_work.pop()
            yield number

    turn, pool = PendingStrip(), Pool(1, "t")
    left, other = Strips(source(), turn), Strips(source(), turn)
    next(left)
    left.begin(pool)
    assert [*other] == [0, 1, 2]
    assert [*left] == [1, 2]
    left.close()

    assert set(seen) == {1}


def test_an_error_while_the_next_strip_begins_comes_out_in_its_place() -> None:
    def source() -> Iterator[int]:
        yield 0
        raise ValueError("no more")

    strips = Strips(source(), PendingStrip())
    assert next(strips) == 0
    strips.begin(Pool(1, "t"))

    with pytest.raises(ValueError, match="no more"):
        next(strips)
    strips.close()
