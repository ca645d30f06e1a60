"""Memory of a device that comes and goes while a loader serves."""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from stoker.loader import Loader, Windows, gather, placement
from stoker.loader import tiers as device_tier
from stoker.loader.placement import replan
from stoker.monitor.meter import StallMeter
from stoker.plan import MemoryLedger
from stoker.store import Cache
from tests.loader.placement.machine import SHARD_BYTES, SHARDS, Machine, Running
from tests.loader.test_partial import equal


def test_the_device_waits_until_three_steps_have_shown_the_peak(
    cache: Cache, expected: list[Any], clock: Callable[[float], None]
) -> None:
    running = Running(cache, Machine(device=10), MemoryLedger())
    clock(100.0)
    assert running.look() == (0, SHARDS), "however long the first step takes"
    held: list[tuple[int, int]] = []

    batches = iter(running.loader)
    got = []
    for _ in expected:
        got.append(next(batches))
        running.settle()
        held.append(running.held())

    assert running.loader.plan.tier == "device"
    assert held[0] == (0, SHARDS), "the host serves until then"
    assert held[-1] == (SHARDS, 0), "promoted, and host memory is given back"
    assert all(equal(a, b) for a, b in zip(got, expected, strict=True))


def test_what_the_model_wants_again_is_left_to_it(
    cache: Cache, monkeypatch: pytest.MonkeyPatch, clock: Callable[[float], None]
) -> None:
    """Torch gave some of the peak's memory back, so the driver reports it as free."""
    monkeypatch.setattr(placement, "device_again", lambda _: 6 * SHARD_BYTES)
    running = Running(cache, Machine(device=10), MemoryLedger())

    running.placement.turn(3)
    running.settle()

    assert running.held() == (3, SHARDS - 3)


@pytest.mark.parametrize("settings", [{"tier": "device"}, {"reserve_bytes": 0}], ids=["tier", "reserve"])
def test_the_device_is_filled_at_once_where_that_was_asked_for(cache: Cache, settings: dict) -> None:
    tier = {"tier": settings.get("tier", "auto")}
    running = Running.__new__(Running)
    loader = Loader(cache, batch_size=5, shuffle=True)
    machine = Machine(device=10)
    design = loader._serving.design
    design = replace(
        design,
        demand=replace(design.demand, device="cuda:0"),
        options=replace(design.options, **{"reserve_bytes": None, **tier, **settings}),
        measure=machine.look,
        reservation=MemoryLedger().claim(),
    )
    loader._serving.design = replace(design, plan=replan(design, machine.look()))
    running.loader = loader
    running.settle()

    assert running.held() == (SHARDS, 0)


def test_another_process_that_takes_the_device_costs_the_tier_and_no_batch(
    cache: Cache, expected: list[Any], clock: Callable[[float], None]
) -> None:
    machine = Machine(device=10)
    running = Running(cache, machine, MemoryLedger(), reserve_bytes=SHARD_BYTES)
    batches = iter(running.loader)
    got = [next(batches), next(batches)]
    assert running.held() == (SHARDS, 0)

    held = running.placement.held.device
    assert held is not None
    gone = weakref.ref(held.sources["latent"])
    del held
    machine.device = 0.1  # and the loader's own memory, which is not free
    clock(2.0)
    got += [next(batches) for _ in range(len(expected) - len(got))]
    running.settle()
    assert gone() is None, "nobody refers to it, so the device has it back"
    assert running.held() == (0, SHARDS)
    machine.device = 10
    clock(1.0)
    assert running.look() == (0, SHARDS), "not at once again"
    clock(100.0)
    assert running.look() == (SHARDS, 0)

    assert all(equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("meter", [False, True])
@pytest.mark.parametrize(("free", "then"), [(5, 7), (10, 0.1), (5, 0.1)], ids=["grow", "leave", "leave part"])
def test_the_old_memory_is_free_before_the_device_is_asked_for_other(
    cache: Cache,
    monkeypatch: pytest.MonkeyPatch,
    clock: Callable[[float], None],
    free: float,
    then: float,
    meter: bool,
) -> None:
    monkeypatch.setattr(gather, "GPU_CALL_BYTES", 0)  # as large batches are made: one by one
    settings: dict[str, Any] = {"shuffle": True, "windows": Windows(field="latent"), "seed": 2}
    expected = list(Loader(cache, 5, tier="disk", **settings))
    machine = Machine(device=free)
    if meter:
        settings["meter"] = StallMeter()
    running = Running(cache, machine, MemoryLedger(), reserve_bytes=SHARD_BYTES, **settings)
    held = running.placement.held.device
    assert held is not None
    gone = weakref.ref(held.sources["latent"])
    del held
    asked: list[bool] = []
    turn = placement.Placement.turn

    def noted(self: placement.Placement, batches: int) -> placement.MemorySet:
        if self._freed is not None:  # it may be given back in this turn
            asked.append(gone() is None)
        return turn(self, batches)

    monkeypatch.setattr(placement.Placement, "turn", noted)
    gc.disable()  # nobody may have to wait for a collection
    try:
        batches = iter(running.loader)
        got = [next(batches), next(batches)]
        machine.device = then
        clock(40.0)
        got += batches
        running.settle()
    finally:
        gc.enable()

    assert asked
    assert all(asked)
    assert all(equal(a, b) for a, b in zip(got, expected, strict=True))


def test_the_device_is_not_asked_while_the_old_memory_is_being_filled(
    cache: Cache, expected: list[Any], clock: Callable[[float], None]
) -> None:
    machine = Machine(device=5)
    running = Running(cache, machine, MemoryLedger(), reserve_bytes=SHARD_BYTES)
    over = threading.Event()

    def fill(held: placement.MemorySet | None) -> None:
        over.wait(30)

    running.placement._line.submit(functools.partial(fill, running.placement.held))
    machine.device = 7
    clock(40.0)

    got = list(running.loader)

    assert running.placement.held.device is None
    over.set()
    running.settle()
    assert running.held() == (SHARDS, 0)
    assert all(equal(a, b) for a, b in zip(got, expected, strict=True))


def test_a_device_that_is_full_after_all_is_done_without(
    cache: Cache, expected: list[Any], monkeypatch: pytest.MonkeyPatch, clock: Callable[[float], None]
) -> None:
    """Two processes may see the same free bytes; the driver decides who gets them."""

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(device_tier, "allocate_on_device", full)
        running = Running(cache, Machine(device=10), MemoryLedger(), reserve_bytes=0)

        assert running.held() == (0, SHARDS)
        assert all(equal(a, b) for a, b in zip(running.loader, expected, strict=True))
    clock(100.0)
    assert running.look() == (SHARDS, 0)


def test_a_part_of_the_device_grows_when_there_is_more(cache: Cache, clock: Callable[[float], None]) -> None:
    machine = Machine(device=4)
    running = Running(cache, machine, MemoryLedger(), reserve_bytes=0)
    assert running.held() == (4, 4)

    machine.device = 6  # free besides the four
    clock(40.0)

    assert running.look() == (SHARDS, 0)


def test_fixed_addresses_are_never_moved(cache: Cache, clock: Callable[[float], None]) -> None:
    machine = Machine()
    loader = Loader(cache, batch_size=4, tier="device", static=True, shuffle=True)
    loader._serving.design = replace(loader._serving.design, measure=machine.look)
    list(loader)
    machine.host = 0.0
    clock(10.0)

    list(loader)

    assert loader._serving.engine is not None
    assert loader._serving.engine.placement.serving() is not None


def test_memory_that_is_let_go_of_is_read_by_nobody_and_in_no_peak(
    cache: Cache, monkeypatch: pytest.MonkeyPatch, clock: Callable[[float], None]
) -> None:
    """Torch frees a block in the stream that it was made in, while another may still read it; and its peak is
    what is left to the model from then on.
    """
    done: list[tuple[str, bool]] = []
    machine = Machine(device=10)
    running = Running(cache, machine, MemoryLedger(), reserve_bytes=SHARD_BYTES)
    next(iter(running.loader))
    held = running.placement.held.device
    assert held is not None
    memory = weakref.ref(held.sources["latent"])
    del held
    for module, name in ((device_tier, "finish_reads"), (placement, "give_back")):
        monkeypatch.setattr(module, name, lambda _, name=name: done.append((name, memory() is not None)))

    machine.device = 0.1
    clock(2.0)
    list(running.loader)
    running.settle()

    assert done == [("finish_reads", True), ("give_back", False)]


def test_a_filling_that_is_refused_holds_nothing_when_the_device_is_looked_at_again(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fields that there was room for are in the frames of the error."""
    parts: list[weakref.ref[torch.Tensor]] = []
    alive: list[bool] = []

    def refusing(*_: object) -> None:
        first = torch.empty(1000)
        parts.append(weakref.ref(first))
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(device_tier, "allocate_on_device", refusing)
    monkeypatch.setattr(placement, "give_back", lambda _: alive.append(parts[-1]() is not None))
    running = Running(cache, Machine(device=10), MemoryLedger(), reserve_bytes=0)

    assert running.held() == (0, SHARDS)
    assert alive
    assert not any(alive)
