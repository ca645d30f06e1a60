"""`precompute(wait=False)`: a process fills the cache while it is served; how that may end."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stoker
from stoker.errors import ConfigError, IncompleteError, Interrupted, ResourceError, SourceError, StokerError
from stoker.loader import Loader
from stoker.precompute import background
from stoker.precompute.background import ChildFill
from stoker.precompute.queue import PartSpan, WorkQueue
from stoker.runtime.processes.child import LoggedChild
from stoker.sources.files import confine_sources
from stoker.store import WriterSettings, make_recipe, open_cache, open_folder
from stoker.units import MIB
from tests.kit import forked as subprocess
from tests.precompute.fake_encoders import FakeEncoder
from tests.precompute.fake_sources import ConfinedSource, FakeSource

DEADLINE_S = 60.0


def begin(folder: Path, source: Any, **settings: Any) -> stoker.Cache:
    return stoker.precompute(source, None, folder, name="x", wait=False, workers=1, **settings)


def started_child(filling: ChildFill) -> LoggedChild:
    until(lambda: filling._start.child() is not None)
    child = filling._start.child()
    assert child is not None
    return child


def numbers(loader: Loader) -> list[int]:
    return sorted(n for batch in loader for n in batch["index"].tolist())


def until(what: Any) -> None:
    """Wait for `what()`, and no longer than a test may take."""
    end = time.monotonic() + DEADLINE_S
    while not what():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_it_returns_at_once_and_every_sample_is_served_once(tmp_path: Path) -> None:
    source = FakeSource((300, 100), faults={7: "raise"})
    cache = begin(tmp_path, source, max_quarantined=0.01)
    assert not cache.complete

    loader = Loader(cache, batch_size=16, shuffle=True)
    batches = list(loader)

    assert sorted(n for batch in batches for n in batch["index"].tolist()) == [
        n for n in range(400) if n != 7
    ]
    for batch in batches:
        wanted = np.stack([source.read(n)["data"] for n in batch["index"].tolist()])
        assert np.array_equal(batch["data"].numpy(), wanted)
    assert numbers(loader) == [n for n in range(400) if n != 7]
    assert loader.dataset.complete
    assert [*loader.dataset.quarantined] == [7]
    assert begin(tmp_path, source, max_quarantined=0.01).complete


def test_the_process_that_fills_is_confined_to_what_its_caller_is(tmp_path: Path) -> None:
    confine_sources(["/data/x"])
    try:
        cache = begin(tmp_path, ConfinedSource((20,)), max_quarantined=0.0)
    finally:
        confine_sources(None)

    assert numbers(Loader(cache, batch_size=8, shuffle=True)) == [*range(20)]


def test_packed_records_are_served_as_they_will_be(tmp_path: Path) -> None:
    loader = Loader(begin(tmp_path, FakeSource((60,)), dtype="int8"), batch_size=8, shuffle=True)
    first = {int(n): row for batch in loader for n, row in zip(batch["index"], batch["data"], strict=True)}
    later = {int(n): row for batch in loader for n, row in zip(batch["index"], batch["data"], strict=True)}
    assert first.keys() == later.keys() == {*range(60)}
    assert all(first[n].equal(later[n]) for n in later)


def test_a_fork_does_not_take_what_is_meant_for_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = begin(tmp_path, FakeSource((60,)))
    loader = Loader(cache, batch_size=8, shuffle=True)
    with monkeypatch.context() as patch:
        patch.setattr(cache.filling, "_owner", os.getpid() + 1)
        with pytest.raises(ConfigError, match="is a fork of that"):
            next(iter(loader))
    assert numbers(loader) == numbers(loader) == [*range(60)]


def test_what_ends_the_filling_ends_the_epoch_with_its_own_error(tmp_path: Path) -> None:
    loader = Loader(
        begin(tmp_path, FakeSource((300,), faults={7: "raise", 8: "raise"})), batch_size=16, shuffle=True
    )
    with pytest.raises(IncompleteError, match=r"while training failed.*2 quarantined") as found:
        assert numbers(loader) != numbers(loader)
    assert found.value.exit_code == 4


def test_the_first_records_are_encoded_in_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "is_preloaded", lambda _: False)
    monkeypatch.setattr(background, "_HERE_S", 1.0)
    source = FakeSource((600, 300), delay_s=0.004, run=20)
    begun = begin(tmp_path / "a", source, encode_batch=20)
    expected = [batch["index"].tolist() for batch in Loader(begun, batch_size=16, shuffle=True)]

    cache = stoker.precompute(source, None, tmp_path / "b", name="x", wait=False, encode_batch=20)

    assert 0 < len(cache) < 900
    assert [batch["index"].tolist() for batch in Loader(cache, batch_size=16, shuffle=True)] == expected


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call itself encodes, for longer than it may need to."""
    monkeypatch.setattr(background, "is_preloaded", lambda _: False)
    monkeypatch.setattr(background, "_HERE_S", 30.0)


def refuse(*_: Any, **__: Any) -> None:
    raise ResourceError("no process can be started")


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("encoder", [None, FakeEncoder()], ids=["none", "encoder"])
def test_a_small_set_is_complete_after_the_call_and_starts_no_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoder: Any
) -> None:
    monkeypatch.setattr(background, "LoggedChild", refuse)
    cache = stoker.precompute(FakeSource((40,)), encoder, tmp_path, name="x", wait=False)

    assert cache.complete
    assert numbers(Loader(cache, batch_size=16, shuffle=True)) == [*range(40)]
    assert open_cache(cache.path).complete


def test_the_order_of_the_first_epoch_does_not_tell_who_encoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def epochs(folder: Path) -> list[list[int]]:
        loader = Loader(begin(folder, FakeSource((200,), run=20)), batch_size=16, shuffle=True)
        return [[n for batch in loader for n in batch["index"].tolist()] for _ in range(2)]

    in_a_child = epochs(tmp_path / "a")
    monkeypatch.setattr(background, "is_preloaded", lambda _: False)
    monkeypatch.setattr(background, "_HERE_S", 30.0)
    monkeypatch.setattr(background, "LoggedChild", refuse)
    begin_here = partial(stoker.precompute, FakeSource((200,), run=20), None, tmp_path / "b", name="x")
    loader = Loader(begin_here(wait=False), batch_size=16, shuffle=True)

    assert [[n for batch in loader for n in batch["index"].tolist()] for _ in range(2)] == in_a_child
    assert in_a_child[0] != in_a_child[1]


@pytest.mark.usefixtures("here")
def test_what_failed_in_the_call_for_a_passing_reason_is_tried_again_once(tmp_path: Path) -> None:
    source = FakeSource((40,), faults={7: "raise", 9: "eio"})
    cache = stoker.precompute(source, None, tmp_path, name="x", wait=False, max_quarantined=0.1)

    assert numbers(Loader(cache, batch_size=16, shuffle=True)) == [n for n in range(40) if n not in (7, 9)]
    failures = open_cache(cache.path).quarantined
    assert not failures[9].sticky
    assert failures[7].sticky


@pytest.mark.usefixtures("here")
def test_a_sample_that_ends_the_call_is_left_to_workers_by_the_next(tmp_path: Path) -> None:
    source = FakeSource((60,), faults={17: "exit0"})
    again = partial(stoker.precompute, source, None, tmp_path, name="x", wait=False, max_quarantined=0.1)
    if (program := os.fork()) == 0:
        try:
            again()
        finally:
            os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(program, 0)[1]) == 0

    assert numbers(Loader(again(), batch_size=16, shuffle=True)) == [n for n in range(60) if n != 17]
    assert not [*tmp_path.rglob("begun-here-*")]


def test_a_child_that_cannot_be_started_ends_the_epoch_with_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "LoggedChild", refuse)

    with pytest.raises(ResourceError, match="no process can be started"):
        list(Loader(begin(tmp_path, FakeSource((60,))), batch_size=8, shuffle=True))


def test_what_is_stopped_before_its_child_is_there_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    going, started = threading.Event(), threading.Event()

    class Late(LoggedChild):
        def __init__(self, *given: Any, **named: Any) -> None:
            started.set()
            assert going.wait(DEADLINE_S)
            super().__init__(*given, **named)

    monkeypatch.setattr(background, "LoggedChild", Late)
    monkeypatch.setattr(background, "_COMMIT_S", 0.1)
    filling = begin(tmp_path, FakeSource((4000,), delay_s=0.005)).filling
    assert isinstance(filling, ChildFill)
    assert started.wait(DEADLINE_S)
    filling.stop()
    going.set()
    monkeypatch.setattr(background, "_COMMIT_S", 10.0)

    until(lambda: started_child(filling).exit is not None)


@pytest.mark.slow
def test_a_filling_that_is_killed_is_named_and_resumed(tmp_path: Path) -> None:
    cache = begin(tmp_path, FakeSource((1200,), delay_s=0.01))
    filling = cache.filling
    assert isinstance(filling, ChildFill)
    loader = Loader(cache, batch_size=16, shuffle=True)
    batches = iter(loader)
    next(batches)
    os.kill(started_child(filling).pid, signal.SIGKILL)
    with pytest.raises(StokerError, match=r"was killed by signal 9.*again"):
        list(batches)

    again = stoker.precompute(FakeSource((1200,)), None, tmp_path, name="x", wait=False)

    assert 0 < len(again) < 1200
    assert numbers(Loader(again, batch_size=16, shuffle=True)) == [*range(1200)]


@pytest.mark.slow
def test_a_filling_that_is_asked_to_end_interrupts_the_epoch(tmp_path: Path) -> None:
    cache = begin(tmp_path, FakeSource((1200,), delay_s=0.01))
    filling = cache.filling
    assert isinstance(filling, ChildFill)
    batches = iter(Loader(cache, batch_size=16, shuffle=True))
    next(batches)
    os.kill(started_child(filling).pid, signal.SIGTERM)

    with pytest.raises(Interrupted, match="SIGTERM"):
        list(batches)


def test_stopping_seals_what_is_encoded(tmp_path: Path) -> None:
    cache = begin(tmp_path, FakeSource((4000,), delay_s=0.005))
    filling = cache.filling
    assert isinstance(filling, ChildFill)
    until(lambda: len(filling.look()[0]))
    filling.stop()
    assert started_child(filling).exit is not None
    stored = len(open_cache(cache.path, require_complete=False))
    assert 0 < stored < 4000


@pytest.mark.slow
def test_it_ends_in_order_when_its_caller_is_killed(tmp_path: Path) -> None:
    words = (
        "import sys, time, stoker\n"
        "from tests.precompute.fake_sources import ConfinedSource, FakeSource\n"
        f"cache = stoker.precompute(FakeSource((4000,), delay_s=0.005), None, {str(tmp_path)!r}, name='x',"
        " wait=False, workers=1)\n"
        "while not len(cache.filling.look()[0]): time.sleep(0.05)\n"
        "while cache.filling._start.child() is None: time.sleep(0.05)\n"
        "print(cache.filling._start.child().pid, cache.path, flush=True)\n"
        "time.sleep(100)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", words], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    ) as caller:
        assert caller.stdout is not None
        pid, path = caller.stdout.readline().split()
        before = len(open_cache(path, require_complete=False))
        caller.kill()
    until(lambda: not Path(f"/proc/{pid}").exists())
    assert before <= len(open_cache(path, require_complete=False)) < 4000


class Unsendable(FakeSource):
    def __init__(self) -> None:
        super().__init__((10,))
        self.lock = threading.Lock()


def test_what_cannot_be_begun_is_refused_in_the_call(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"cannot be sent to another process.*leave wait=False out"):
        begin(tmp_path, Unsendable())
    with pytest.raises(ConfigError, match="overwrite removes what wait=False"):
        begin(tmp_path, FakeSource(), overwrite=True)


def test_cached_serves_at_once_too(tmp_path: Path) -> None:
    loader = stoker.cached(
        FakeSource((40,)),
        cache_dir=tmp_path,
        wait=False,
        batch_size=8,
        device="cpu",
        precompute={"workers": 1},
        shuffle=True,
    )
    assert loader.plan.tier == "encode"
    assert numbers(loader) == [*range(40)]


def test_blocks_are_handed_out_one_after_another_to_all_workers() -> None:
    missing = np.array([0, 1, 2, 3, 8, 9, 10, 11], np.int64)
    queue = WorkQueue([PartSpan(offset=0, count=12)], 2, missing, bad=lambda _: False)
    queue.follow_runs([range(12)], 100)
    queue.follow_blocks(np.array([[8, 12], [4, 8], [0, 4]], np.int64))
    taken = [queue.take(reader, 2)[0].numbers.start for reader in (0, 1, 0, 1)]
    assert taken == [8, 0, 10, 2]
    assert not queue.take(0, 2)


def test_early_seals_come_soon_and_then_ever_more_rarely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    now = [1000.0]
    monkeypatch.setattr("stoker.store.write.time.monotonic", lambda: now[0])
    folder = open_folder(tmp_path, "x", make_recipe(FakeSource((1000,)), None))
    writer = folder.writer(WriterSettings(early=True))
    seals = []
    for number in range(300):
        writer.append([number], {"data": torch.zeros(1, 6, 5), "nu": torch.zeros(1)})
        before, now[0] = len(list(folder.path.glob("shard-*"))), now[0] + 0.1
        writer.tick()
        if len(list(folder.path.glob("shard-*"))) > before:
            seals.append(now[0] - 1000)
    assert seals[:3] == pytest.approx([0.2, 0.4, 0.6])
    assert 1 < seals[-1] - seals[-2] < 1.7


class MallocInfo(ctypes.Structure):
    """`struct mallinfo2`; `hblkhd` counts the bytes that are mapped, outside all heaps."""

    _fields_ = [(name, ctypes.c_size_t) for name in ["a", "b", "c", "d", "hblkhd", "f", "g", "h", "i", "j"]]


class Allocating(FakeEncoder):
    """Notes in a file in which thread it is called and how much of a large allocation is mapped."""

    def __init__(self, noted: Path) -> None:
        super().__init__()
        self.noted = noted

    def encode(self, batch: Any) -> Any:
        libc = ctypes.CDLL(None)
        libc.mallinfo2.restype, libc.malloc.restype = MallocInfo, ctypes.c_void_p
        libc.malloc.argtypes, libc.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
        before = libc.mallinfo2().hblkhd
        taken = libc.malloc(100 * MIB)
        mapped = libc.mallinfo2().hblkhd - before
        libc.free(taken)
        with self.noted.open("a") as file:
            file.write(f"{threading.current_thread() is threading.main_thread()} {mapped}\n")
        return super().encode(batch)


def test_a_thread_that_encodes_does_not_map_large_activations_at_every_call(tmp_path: Path) -> None:
    if not hasattr(ctypes.CDLL(None), "mallinfo2"):
        pytest.skip("needs glibc 2.33")
    noted = tmp_path / "noted"

    stoker.precompute(FakeSource((8,)), Allocating(noted), tmp_path / "c", name="x", wait=False, workers=0)
    until(lambda: noted.exists() and len(noted.read_text().splitlines()) >= 3)

    assert set(noted.read_text().splitlines()[1:]) == {"False 0"}
