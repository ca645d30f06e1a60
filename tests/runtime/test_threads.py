from __future__ import annotations

import gc
import linecache
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from stoker.errors import ResourceError, StalledError
from stoker.runtime import threads as pools
from stoker.runtime.threads import ItemClock, Pool, call_within, frame_of, map_in_order, start_thread


def test_work_runs_beside_and_gives_its_result_or_error() -> None:
    pool = Pool(2, "test")
    gate = threading.Event()
    slow = pool.submit(lambda: gate.wait(10))
    quick = pool.submit(lambda: 42)

    assert quick.result(10, "quick") == 42
    assert not slow.done()
    gate.set()
    assert slow.result(10, "slow") is True
    with pytest.raises(ZeroDivisionError):
        pool.submit(lambda: 1 // 0).result(10, "division")


def test_every_wait_has_a_timeout() -> None:
    gate = threading.Event()

    with pytest.raises(StalledError, match=r"reading x made no progress for 0\.05 s"):
        Pool(1, "test").submit(lambda: gate.wait(30)).result(0.05, "reading x")
    gate.set()


def test_a_thread_that_cannot_be_started_takes_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, start = Pool(1, "test"), threading.Thread.start

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    for call in (lambda: pool.submit(lambda: 1), lambda: start_thread(lambda: 1, "x")):
        with pytest.raises(ResourceError):
            call()
    monkeypatch.setattr(threading.Thread, "start", start)

    assert pool.submit(lambda: 2).result(60, "the next") == 2


def test_idle_threads_end_and_new_work_starts_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "IDLE_S", 0.01)
    pool = Pool(3, "idle-test")
    for _ in range(3):
        assert [t.result(10, "x") for t in [pool.submit(lambda i=i: i) for i in range(20)]] == [*range(20)]
        deadline = time.monotonic() + 10
        while any(t.name == "idle-test" for t in threading.enumerate()) and time.monotonic() < deadline:
            time.sleep(0.01)

    assert not any(t.name == "idle-test" for t in threading.enumerate())


def test_a_thread_that_hangs_does_not_keep_the_process_alive() -> None:
    code = (
        "import time; from stoker.runtime.threads import Pool; Pool(1, 'x').submit(lambda: time.sleep(600))"
    )

    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)


EXIT_WITH_TORCH_AT_WORK = """
import time
import torch
from stoker.runtime.threads import Pool

def work():
    for _ in range(2000):
        torch.add(source, 1, out=target)

source, target, pool = torch.zeros(1 << 16), torch.zeros(1 << 16), Pool(8, "x")
tickets = [pool.submit(work) for _ in range(8)]
time.sleep(0.05)
"""


def test_an_exit_while_torch_works_in_threads_is_no_abort() -> None:
    subprocess.run([sys.executable, "-c", EXIT_WITH_TORCH_AT_WORK], timeout=60, check=True)


EXIT_WITH_BATCHES_AHEAD = """
import tempfile
from pathlib import Path
import torch
from stoker.loader import Loader, prefetch
from tests.loader.caches import write_cache
cache = write_cache(Path(tempfile.mkdtemp()), {"x": torch.randn(4096, 2048)})
loader = Loader(cache, 128, shuffle=True, tier="host")
while loader._serving.running().placement.serving() is None:
    pass
loader._serving.prefetcher = prefetch.BatchPrefetcher(cores=2)
loader._serving.prefetcher.in_thread = True
loader._serving.prefetcher._made.extend([1e-3, 1e-3])
it = iter(loader)
next(it)
"""


def test_an_exit_with_an_iterator_alive_is_neither_a_hang_nor_an_abort() -> None:
    """Batches are made ahead, and the module's names are cleared after the threads were told to end."""
    for _ in range(3):
        subprocess.run([sys.executable, "-c", EXIT_WITH_BATCHES_AHEAD], timeout=60, check=True)


def test_what_is_done_is_held_by_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that was opened by a thread may be removed as soon as the caller has let go of it."""

    class Slow(threading.Event):
        def set(self) -> None:
            super().set()
            time.sleep(0.5)  # as if another thread were at work from here on

    class Opened:
        pass

    monkeypatch.setattr("stoker.runtime.threads.threading.Event", Slow)
    held, made = Opened(), []

    def work(held: Opened = held) -> Opened:
        made.append(weakref.ref(held))
        made.append(weakref.ref(value := Opened()))
        return value

    ticket = Pool(1, "test").submit(work)
    del held, work
    ticket.result(30.0, "the work")
    del ticket

    assert [one() for one in made] == [None, None]


HANGS_AT_A_FIFO = """
import os, sys, time
from stoker.errors import StalledError
from stoker.runtime.threads import Pool, call_within, map_in_order

def read() -> bytes:
    return open(sys.argv[1], "rb").read()  # nobody ever writes: the open itself does not come back

began = time.monotonic()
for hang in (
    lambda: call_within(0.2, read, "reading the pipe"),
    lambda: Pool(1, "x").call_within(0.2, read, "reading the pipe"),
    lambda: list(map_in_order(lambda _: read(), range(40), what="reading", timeout_s=0.2)),
):
    try:
        hang()
    except StalledError as error:
        print(error)
print(time.monotonic() - began)
"""


def test_calls_that_never_return_end_neither_late_nor_with_the_exit(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    began = time.monotonic()

    done = subprocess.run(
        [sys.executable, "-c", HANGS_AT_A_FIFO, str(tmp_path / "pipe")],
        timeout=60, check=True, capture_output=True, text=True,
    )  # fmt: skip

    *stalled, took = done.stdout.splitlines()
    assert len(stalled) == 3
    assert float(took) < 10
    assert time.monotonic() - began < 10 + pools.EXIT_S + float(took)


CALLS = {
    "alone": lambda work: call_within(10, work, "x"),
    "of a pool": lambda work: Pool(1, "x").call_within(10, work, "x"),
    "of a map": lambda work: next(map_in_order(lambda _: work(), [0], what="x")),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_call_gives_its_result_or_its_error_and_keeps_neither(
    call: Callable[[Callable[[], object]], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What work has opened is closed when the caller lets go of it, without waiting for the collector."""

    class Slow(threading.Event):
        def set(self) -> None:
            super().set()
            time.sleep(0.5)  # as if another thread were at work from here on

    class Opened:
        pass

    def fails() -> None:
        opened = Opened()
        made.append(weakref.ref(opened))
        raise ZeroDivisionError

    monkeypatch.setattr("stoker.runtime.threads.threading.Event", Slow)
    made: list[weakref.ref[object]] = []
    gc.disable()
    try:
        result = call(Opened)
        made.append(weakref.ref(result))
        del result
        with suppress(ZeroDivisionError):
            call(fails)
        assert [one() for one in made] == [None, None]
    finally:
        gc.enable()


def test_a_call_that_cannot_have_a_thread_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    pool = Pool(1, "x")
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        for call in (call_within, pool.call_within):
            with pytest.raises(ResourceError, match=r"the disk.*can't start new thread"):
                call(10, lambda: 1, "the disk")

    assert pool.call_within(10, lambda: 1, "the disk") == 1


def test_each_item_restarts_the_timeout() -> None:
    gate, clock = threading.Event(), ItemClock()

    def work(until: int) -> int:
        for number in range(until):
            clock.begin(number)
            gate.wait(0.3)
        return until

    assert call_within(0.8, lambda: work(4), "reading", clock=clock) == 4


def test_an_item_that_hangs_is_named_with_the_line_at_which_it_is() -> None:
    gate, clock = threading.Event(), ItemClock()

    def work() -> None:
        clock.begin(0)
        clock.begin(1)
        gate.wait(30)

    with pytest.raises(StalledError, match=r"reading: item 1 did not .* in work.*\. Look at it"):
        call_within(0.2, work, "reading", hint="Look at it", clock=clock)
    gate.set()


def test_calls_of_a_pool_that_hang_are_limited() -> None:
    pool, gate = Pool(2, "test"), threading.Event()

    for _ in range(2):
        with pytest.raises(StalledError, match="did not answer"):
            pool.call_within(0.1, lambda: gate.wait(30), "the disk")
    begun: list[int] = []
    with pytest.raises(StalledError, match="2 calls"):
        pool.call_within(0.1, lambda: begun.append(1), "the disk")
    gate.set()

    assert pool.call_within(30, lambda: 7, "the disk") == 7
    assert begun == [], "what was given up is not done later"


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_child_forked_while_a_pool_works_makes_threads_of_its_own() -> None:
    """Other threads submit all the time, so that forks meet locks that are held."""
    pool, over = Pool(4, "test"), threading.Event()

    def submit() -> None:
        while not over.is_set():
            pool.submit(lambda: time.sleep(0.001)).result(30, "x")

    threads = [threading.Thread(target=submit, daemon=True) for _ in range(8)]
    for thread in threads:
        thread.start()
    gate = threading.Event()
    pending = Pool(1, "other").submit(lambda: gate.wait(30))
    try:
        for _ in range(30):
            assert _forked(lambda: _use(pool, pending)) == 0
    finally:
        over.set()
        gate.set()
        for thread in threads:
            thread.join(30)


def _use(pool: Pool, pending: pools.Ticket[bool]) -> None:
    tickets = [pool.submit(lambda i=i: i) for i in range(8)]
    assert [ticket.result(20, "x") for ticket in tickets] == [*range(8)]
    assert list(map_in_order(lambda i: i, range(20), what="x")) == [*range(20)]
    with pytest.raises(StalledError, match="forked"):
        pending.result(20, "x")


def _forked(work: Callable[[], object], limit_s: float = 60.0) -> int:
    """Return the exit status of a forked child that does `work`; -9 when it hung."""
    child = os.fork()
    if not child:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    until = time.monotonic() + limit_s
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > until:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return -9
        time.sleep(0.005)
    return os.waitstatus_to_exitcode(ended[1])


def test_no_garbage_is_collected_while_the_threads_are_listed() -> None:
    """In Python 3.11 that can stop all of them for ever."""
    over, inside = threading.Event(), list[str]()

    def rest() -> None:
        over.wait(0.001)  # each call has a frame of its own: an object that counts for the collector

    def work() -> None:
        while not over.is_set():
            rest()

    def note(phase: str, _: object) -> None:
        caller = sys._getframe(1)
        line = linecache.getline(caller.f_code.co_filename, caller.f_lineno)
        if phase == "start" and "_current_frames" in line:
            inside.append(line)

    before = gc.get_threshold()
    threads = [start_thread(work, "busy") for _ in range(40)]
    gc.callbacks.append(note)
    gc.set_threshold(1)
    try:
        found = [frame_of(threads[turn % 40].ident or 0) for turn in range(200)]
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(note)
        over.set()
        for thread in threads:
            thread.join()

    assert None not in found
    assert gc.isenabled()
    assert not inside


def test_a_child_forked_while_threads_are_listed_lists_its_own_and_collects_garbage() -> None:
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            frame_of(threading.main_thread().ident or 0)

    def child() -> None:
        assert gc.isenabled()
        assert frame_of(threading.get_ident()) is not None

    thread = start_thread(look, "look")
    try:
        ended = [_forked(child, limit_s=20.0) for _ in range(20)]
    finally:
        over.set()
        thread.join()

    assert ended == [0] * 20
