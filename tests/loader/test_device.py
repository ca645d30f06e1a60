"""The device tier's own code on the CPU, where its buffers are plain memory. `tests/gpu` runs it on a GPU."""

from __future__ import annotations

import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stoker.errors import CorruptError, StalledError
from stoker.loader import Loader, disk, placement
from stoker.loader import tiers as device_tier
from stoker.loader.gather import MemoryBatches, gather_into
from stoker.loader.outputs import OutputSpec
from stoker.loader.records import find_records
from stoker.loader.tiers import STAGING_BUFFERS, STAGING_BYTES, Memory, Staging, allocate_on_device
from stoker.runtime.threads import Pool
from stoker.store import Cache, open_cache
from stoker.store.shard import PIECE_BYTES
from stoker.units import MIB
from tests.loader.caches import write_cache

CPU = torch.device("cpu")


def on_cpu(cache: Cache) -> Memory:
    return allocate_on_device(
        cache, find_records(cache, None), frozenset(range(len(cache.index.shards))), CPU
    )


def test_columns_larger_than_all_buffers_arrive_whole(tmp_path: Path) -> None:
    count = (2 * STAGING_BUFFERS + 1) * STAGING_BYTES // 100_000
    fields = {"x": torch.randint(0, 256, (count, 100_000), dtype=torch.uint8), "y": torch.randn(count, 3)}
    cache = write_cache(tmp_path, fields, shards=(count - 7,))
    memory = on_cpu(cache)

    for shard in memory.shards:
        memory.load(shard)

    rows = torch.as_tensor(memory.rows)
    for name, values in fields.items():
        assert torch.equal(memory.sources[name][rows], values)


@pytest.mark.slow
def test_loading_takes_no_more_host_memory_than_its_buffers(tmp_path: Path) -> None:
    """On a GPU the set itself is not on the host at all; here it is, so it is taken off."""
    records = torch.zeros((300, MIB), dtype=torch.uint8)
    records[:, ::4096] = 1
    cache = write_cache(tmp_path, {"x": records})
    child = f"""
import torch
from pathlib import Path
from stoker.loader.tiers import allocate_on_device
from stoker.loader.records import find_records
from stoker.store import open_cache

def rss(key):
    line = next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith(key))
    return int(line.split()[1]) * 1024

cache = open_cache({str(cache.path)!r})
memory = allocate_on_device(cache, find_records(cache, None), frozenset([0]), torch.device("cpu"))
Path("/proc/self/clear_refs").write_text("5")  # forget the peak of importing torch
before = rss("VmRSS")
memory.load(0)
print(rss("VmHWM") - before - memory.sources["x"].nbytes)
"""

    done = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True, timeout=120)

    assert done.returncode == 0, done.stderr
    most = STAGING_BUFFERS * STAGING_BYTES + 16 * PIECE_BYTES
    assert int(done.stdout) < most, "a column was held a second time"


def test_a_damaged_shard_is_refused_while_it_is_loaded(tmp_path: Path) -> None:
    cache = write_cache(tmp_path, {"x": torch.zeros((10, PIECE_BYTES), dtype=torch.uint8)}, shards=(5,))
    shard = cache.path / cache.index.shards[1].file
    with shard.open("r+b") as file:
        file.seek(cache.shard(1).columns["x"].offset + 3 * PIECE_BYTES)
        file.write(b"\x01")
    memory = on_cpu(open_cache(cache.path))

    memory.load(0)
    with pytest.raises(CorruptError, match=r"does not match its digest; damaged samples: [38]"):
        memory.load(1)


def test_records_known_to_be_damaged_are_passed_over(tmp_path: Path) -> None:
    fields = {"x": torch.randn(10, 700), "y": torch.randn(10, 3)}
    cache = write_cache(tmp_path, fields)
    places = find_records(cache, [n for n in range(10) if n != 4])
    shard = cache.path / cache.index.shards[0].file
    with shard.open("r+b") as file:
        file.seek(cache.shard(0).columns["x"].offset + 4 * 2800)
        file.write(b"\x01\x02\x03\x04")
    index = replace(cache.index, shards=(replace(cache.index.shards[0], bad=(4,)),))
    cache = Cache(cache.path, cache.recipe, index)
    memory = allocate_on_device(cache, places, frozenset([0]), CPU)

    memory.load(0)

    rows = torch.as_tensor(memory.rows)
    keep = torch.from_numpy(np.delete(np.arange(10), 4))
    assert torch.equal(memory.sources["x"][rows], fields["x"][keep])


class Copy:
    """A copy to a device that takes a while."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    def query(self) -> bool:
        self.looks -= 1
        return self.looks < 0


def test_a_buffer_is_filled_again_only_after_it_was_copied() -> None:
    staging: Any = Staging(CPU)
    copy = Copy(looks=3)
    staging._copied[0] = copy

    staging.room(0, 10)

    assert copy.looks == -1


def test_pieces_that_are_neighbours_are_copied_in_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    staging: Any = Staging(CPU)
    target = torch.zeros(8 * PIECE_BYTES, dtype=torch.uint8)
    staging.into(target)
    sent: list[tuple[int, int]] = []
    send = staging._send

    def note() -> None:
        if staging._held:
            sent.append((staging._begin // PIECE_BYTES, staging._held // PIECE_BYTES))
        send()

    monkeypatch.setattr(staging, "_send", note)
    assert staging.piece_bytes == 4 * PIECE_BYTES
    for place in (0, 1, 2, 3, 5, 6):  # the one between them is damaged
        staging.room(place * PIECE_BYTES, PIECE_BYTES)[:] = bytes([place + 1]) * PIECE_BYTES
        staging.filled(place * PIECE_BYTES, PIECE_BYTES)
    staging.wait()

    assert sent == [(0, 4), (5, 2)]
    assert target[::PIECE_BYTES].tolist() == [1, 2, 3, 4, 0, 6, 7, 0]


def placed_on_device(cache: Cache, monkeypatch: pytest.MonkeyPatch, threads: int) -> placement.Placement:
    shards = {"device": frozenset(range(4)), "host": frozenset[int]()}
    monkeypatch.setattr(placement, "assign", lambda *_: shards)
    return placement.Placement(replace(Loader(cache, 4, shuffle=True)._serving.design, fill_threads=threads))


def test_several_threads_fill_a_memory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits in its shard until another thread is in one."""
    values = torch.randn(24, 3)
    at_once = threading.Barrier(2, timeout=30)
    load = device_tier._load_device

    def meeting(*arguments: Any) -> None:
        at_once.wait()
        load(*arguments)

    monkeypatch.setattr(device_tier, "_load_device", meeting)
    filling = placed_on_device(write_cache(tmp_path, {"x": values}, shards=(6, 6, 6)), monkeypatch, 2)

    filling.fill(60.0)

    assert filling.complete
    memory = filling.serving()
    assert memory is not None
    assert torch.equal(memory.sources["x"][torch.as_tensor(memory.rows)], values)


def allow_threads(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Let that many threads start, and no further one."""
    left, start = iter(range(count)), threading.Thread.start

    def limited(thread: threading.Thread) -> None:
        if next(left, None) is None:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)


def test_memory_is_filled_by_the_threads_that_can_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = write_cache(tmp_path, {"x": torch.randn(24, 3)}, shards=(6, 6, 6))
    filling = placed_on_device(cache, monkeypatch, 3)
    allow_threads(monkeypatch, 1)

    filling.fill(60.0)

    assert filling.complete
    assert filling.serving() is not None


def test_damage_that_one_of_several_threads_meets_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = write_cache(tmp_path, {"x": torch.randn(24, 3)}, shards=(6, 6, 6))
    shard = cache.path / cache.index.shards[2].file
    with shard.open("r+b") as file:
        file.seek(cache.shard(2).columns["x"].offset)
        file.write(b"\x01\x02\x03\x04")
    filling = placed_on_device(open_cache(cache.path), monkeypatch, 3)

    filling.fill(60.0)

    with pytest.raises(CorruptError, match="does not match its digest"):
        filling.serving()


@pytest.mark.parametrize("threads", [0, 1, 3])
@pytest.mark.parametrize("width", [100_000, 100_001])
def test_rows_gathered_by_several_threads_are_those_of_one(
    monkeypatch: pytest.MonkeyPatch, width: int, threads: int
) -> None:
    """Rows of whole words, and others; to all of a batch, and to some places of it."""
    allow_threads(monkeypatch, threads)
    rows = torch.randint(0, 256, (90, width), dtype=torch.uint8)
    index, pool = torch.randperm(90)[:64], Pool(3, "test-gather")
    whole, some = torch.empty((64, width), dtype=torch.uint8), torch.zeros((100, width), dtype=torch.uint8)
    places = torch.randperm(100)[:64]

    gather_into(rows, index, whole, None, pool)
    gather_into(rows, index, some, places, pool)

    assert torch.equal(whole, rows[index])
    assert torch.equal(some[places], rows[index])
    assert int(some.any(1).sum()) == 64


def test_a_device_that_does_not_answer_ends_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_tier, "COPY_TIMEOUT_S", 0.05)
    staging: Any = Staging(CPU)
    staging._copied[1] = Copy(looks=10**9)

    with pytest.raises(StalledError, match="was not done after"):
        staging.wait()


def test_threads_that_copy_use_the_loaders_own_gpu_and_have_no_part_in_captures(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise each process has a context on GPU 0, and a capture beside a filling fails."""
    used: list[Any] = []
    modes: list[int] = []

    class Driver:
        def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:
            modes.append(mode._obj.value)
            return 0

    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    monkeypatch.setattr(device_tier, "_driver", Driver)

    device_tier.begin_thread(CPU)
    assert not used
    device_tier.begin_thread(torch.device("cuda:3"))

    assert used == [torch.device("cuda:3")]
    assert modes == [2]  # CU_STREAM_CAPTURE_MODE_RELAXED


def test_both_threads_that_copy_to_a_device_begin_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: set[str] = set()

    def note(device: torch.device) -> None:
        begun.add(threading.current_thread().name)

    for module in (device_tier, disk):
        monkeypatch.setattr(module, "begin_thread", note)
    cache = write_cache(tmp_path, {"x": torch.randn(12, 3)}, shards=(6,))
    monkeypatch.setattr(placement, "assign", lambda *_: {"device": frozenset([0]), "host": frozenset()})

    list(Loader(cache, 4, tier="device", shuffle=True))

    assert {name.split("_")[0].rstrip("-0123456789") for name in begun} == {"stoker-fill", "stoker-stage"}


class Gathers(TorchDispatchMode):
    """Counts calls of `index_select`."""

    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += func.overloadpacket is torch.ops.aten.index_select
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("width", "calls"), [(8, 1), (65_536, 2), (2_097_152, 5)])
@pytest.mark.usefixtures("twins_alone")  # as on a device
def test_one_call_gathers_many_batches_on_a_device(tmp_path: Path, width: int, calls: int) -> None:
    """Starting a call takes longer than gathering a batch of small records."""
    values = torch.randint(0, 256, (20, width), dtype=torch.uint8)
    cache = write_cache(tmp_path, {"x": values})
    memory = on_cpu(cache)
    memory.load(0)
    output = OutputSpec(name="x", field="x", index="record", dtype=torch.uint8, shape=(width,))
    batches = MemoryBatches(memory, cache.recipe.columns, (output,), 2, static=False, threads=1)
    rows = torch.arange(19).flip(0)  # nine batches and a short one
    if width == 65_536:
        rows = rows.repeat(8)[:150]  # 75 batches of 128 KiB

    with Gathers() as made:
        taken, _ = (list(column) for column in batches.columns({"record": rows}, rows, 2, {}))

    assert made.calls == calls
    assert [len(batch) for batch in taken] == [len(part) for part in rows.split(2)]
    assert torch.equal(torch.cat(taken), values[rows])
