from __future__ import annotations

import subprocess
import sys
import threading
import time
import weakref

import pytest

from stoker import threads as pools
from stoker.errors import StalledError
from stoker.threads import Pool


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


def test_no_wait_without_a_deadline() -> None:
    gate = threading.Event()

    with pytest.raises(StalledError, match=r"reading x made no progress for 0\.05 s"):
        Pool(1, "test").submit(lambda: gate.wait(30)).result(0.05, "reading x")
    gate.set()


def test_a_thread_that_cannot_be_started_takes_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, start = Pool(1, "test"), threading.Thread.start

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError):
        pool.submit(lambda: 1)
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
    code = "import time; from stoker.threads import Pool; Pool(1, 'x').submit(lambda: time.sleep(600))"

    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)


EXIT_WITH_TORCH_AT_WORK = """
import time
import torch
from stoker.threads import Pool

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
from stoker.loader import Loader, ahead
from tests.loader.caches import write_cache
cache = write_cache(Path(tempfile.mkdtemp()), {"x": torch.randn(4096, 2048)})
loader = Loader(cache, 128, tier="host")
while loader._serving.running().residency.serving() is None:
    pass
loader._serving.ahead = ahead.Ahead(cores=2)
loader._serving.ahead.beside = True
loader._serving.ahead._made.extend([1e-3, 1e-3])
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

    monkeypatch.setattr("stoker.threads.threading.Event", Slow)
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
