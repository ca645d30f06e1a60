"""Memory that comes and goes while a loader serves. The machine is made up; the device is a CPU's memory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stoker.loader import Windows, placement
from stoker.plan import MemoryLedger
from stoker.store import Cache
from tests.loader.caches import trajectories, write_cache
from tests.loader.placement.machine import ROWS, SHARD_BYTES, SHARDS, STEP, Machine, Running
from tests.loader.test_partial import equal


def test_a_lowered_limit_shrinks_host_memory_and_no_batch_changes(
    cache: Cache, expected: list[Any], clock: Callable[[float], None], caplog: pytest.LogCaptureFixture
) -> None:
    machine = Machine()
    running = Running(cache, machine, MemoryLedger())
    batches = iter(running.loader)
    got = [next(batches), next(batches)]
    assert running.held() == (0, SHARDS)

    machine.host = 5
    clock(2.0)
    got += [next(batches) for _ in range(len(expected) - len(got))]
    running.settle()

    assert running.held() == (0, 4), "four fifths of what is left"
    assert running.placement.serving() is None
    assert running.loader.plan.records_by_tier() == {"device": 0, "host": 16, "disk": 16, "encode": 0}
    assert "host memory is short" in caplog.text
    assert all(equal(a, b) for a, b in zip(got, expected, strict=True))


def test_what_is_about_to_go_serves_not_everything_any_more(cache: Cache) -> None:
    running = Running(cache, Machine(), MemoryLedger())
    assert running.placement.serving() is not None

    running.placement._settle({"device": frozenset(), "host": frozenset(range(4))})

    assert running.placement.serving() is None


def test_memory_that_wavers_moves_nothing(cache: Cache, clock: Callable[[float], None]) -> None:
    machine = Machine(host=10)
    running = Running(cache, machine, MemoryLedger())
    assert running.held() == (0, SHARDS)

    for host in (9.1, 9.9, 9.0, 11, 9.2):
        machine.host = host
        clock(2.0)
        assert running.look() == (0, SHARDS)


def test_memory_that_became_free_is_filled_only_after_a_while(
    cache: Cache, clock: Callable[[float], None]
) -> None:
    machine = Machine(host=10)
    running = Running(cache, machine, MemoryLedger())
    machine.host = 5
    clock(2.0)
    assert running.look() == (0, 4)

    machine.host = 100
    clock(30.0)
    assert running.look() == (0, 4), "a shortage doubles the patience"
    clock(31.0)
    assert running.look() == (0, SHARDS)


def test_host_memory_that_batches_were_mixed_from_is_let_go_of(
    cache: Cache, expected: list[Any], monkeypatch: pytest.MonkeyPatch, clock: Callable[[float], None]
) -> None:
    monkeypatch.setattr("stoker.loader.tiers._choose_mapped", lambda *_: None)
    machine = Machine(device=5)
    running = Running(cache, machine, MemoryLedger(), reserve_bytes=SHARD_BYTES)
    assert running.held() == (4, 4)
    host = running.placement.held.host
    assert host is not None
    gone = weakref.ref(host.sources["latent"])
    del host
    batches = iter(running.loader)
    got = [next(batches), next(batches)]

    machine.host = 1 - 4 + 2  # what it holds itself is added
    clock(2.0)
    got += batches
    running.settle()
    partial = running.loader._serving.running()._partial
    assert partial is not None
    partial._pool.submit(lambda: None).result(30, "what was staged before")

    assert running.held()[1] < 4
    assert gone() is None
    assert all(equal(a, b) for a, b in zip(got, expected, strict=True))


def test_memory_that_is_made_while_a_model_is_evaluated_is_ordinary_memory(
    cache: Cache, expected: list[Any], clock: Callable[[float], None]
) -> None:
    """The thread that fills it is in no such mode, nor is who trains on it later."""
    machine = Machine(device=4)
    running = Running(cache, machine, MemoryLedger(), reserve_bytes=0)
    machine.device = 6
    clock(40.0)

    with torch.inference_mode():
        assert running.look() == (SHARDS, 0)
        got = list(running.loader)

    held = running.placement.held.device
    assert held is not None
    assert not any(source.is_inference() for source in held.sources.values())
    assert all(equal(a, b) for a, b in zip(got, expected, strict=True))


def test_two_loaders_of_a_process_share_one_account(
    cache: Cache, tmp_path: Path, clock: Callable[[float], None]
) -> None:
    ledger, machine = MemoryLedger(), Machine(host=15)
    other = write_cache(
        tmp_path, trajectories(SHARDS * ROWS, step=STEP), timed=("latent", "time"), shards=(ROWS,) * SHARDS
    )
    first = Running(cache, machine, ledger)
    second = Running(other, machine, ledger)
    same = Running(cache, machine, ledger)

    assert first.held() == (0, SHARDS)
    assert second.held() == (0, 5), "four fifths of what the first one leaves"
    assert same.held() == (0, SHARDS), "the same shards cost nothing twice"
    del first, same
    gc.collect()
    clock(40.0)
    assert second.look() == (0, SHARDS)


def test_shards_that_the_system_put_out_are_read_from_disk(
    cache: Cache, expected: list[Any], monkeypatch: pytest.MonkeyPatch, clock: Callable[[float], None]
) -> None:
    """A map whose pages are gone reads them back one fault at a time, much slower than a read."""
    running = Running(cache, Machine(), MemoryLedger())
    host = running.placement.held.host
    assert host is not None
    assert host.resident is not None
    assert host.resident(3) == 1.0
    host.resident = lambda shard: 0.2 if shard in (3, 5) else 1.0
    faults = iter([1000, 1000, 1000, 1000])
    monkeypatch.setattr(placement, "major_faults", lambda: next(faults))

    clock(2.0)

    assert running.look() == (0, SHARDS - 2)
    assert all(equal(a, b) for a, b in zip(running.loader, expected, strict=True))
    clock(100.0)
    running.look()
    assert running.held() == (0, SHARDS)


def test_what_was_let_go_of_still_gives_the_same_bytes(cache: Cache) -> None:
    """A batch that is being gathered does not have to be waited for."""
    running = Running(cache, Machine(), MemoryLedger())
    host = running.placement.held.host
    assert host is not None
    assert host.drop is not None
    before = {name: source[host.rows].clone() for name, source in host.sources.items()}

    for shard in range(SHARDS):
        host.ready[shard] = 0
        host.drop(shard)

    for name, source in host.sources.items():
        assert torch.equal(source[host.rows], before[name])


def test_memory_that_is_copied_is_let_go_of_as_a_whole(
    cache: Cache, expected: list[Any], monkeypatch: pytest.MonkeyPatch, clock: Callable[[float], None]
) -> None:
    monkeypatch.setattr("stoker.loader.tiers._choose_mapped", lambda *_: None)
    machine = Machine()
    running = Running(cache, machine, MemoryLedger())
    batches = iter(running.loader)
    got = [next(batches)]

    machine.host = 1 - SHARDS + 4  # what it holds itself is added
    clock(2.0)
    got += batches
    running.settle()

    assert running.held() == (0, 4)
    assert all(equal(a, b) for a, b in zip(got, expected, strict=True))


def test_a_long_epoch_is_left_within_seconds_of_a_shortage(
    cache: Cache, expected: list[Any], clock: Callable[[float], None]
) -> None:
    """Batches come in strips of up to 128; with slow steps the strips are short."""
    machine = Machine()
    windows = Windows(field="latent")
    running = Running(cache, machine, MemoryLedger(), batch_size=1, windows=windows)
    batches = iter(running.loader)
    for _ in range(60):
        next(batches)
        clock(3.0)

    machine.host = 5
    for _ in range(4):
        next(batches)
        clock(3.0)
    running.settle()

    assert running.held() == (0, 4)
