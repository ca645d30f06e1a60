"""Memory that comes and goes while a loader serves. The machine is made up; the device is a CPU's memory."""

from __future__ import annotations

import functools
import gc
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stoker.loader import Loader, Windows, gather, residency, watch
from stoker.loader import device as device_tier
from stoker.loader.watch import Ask
from stoker.monitor.meter import StallMeter
from stoker.plan import Ledger, Resources
from stoker.store import Cache
from tests.loader.caches import trajectories, write_cache
from tests.loader.test_partial import equal

SHARDS = 8
ROWS = 4
STEP = (4, 64)
RECORD_BYTES = 9 * 256 * 2 + 4 + 12 + 36
SHARD_BYTES = ROWS * RECORD_BYTES


@dataclass
class Machine:
    """Free memory in shards, which a test changes while a loader runs."""

    host: float = 100
    device: float = 0
    again: float = 0

    def look(self) -> Resources:
        return Resources(
            host_bytes=int(self.host * SHARD_BYTES),
            host_total_bytes=1 << 30,
            host_limit="a made-up limit",
            device="cuda:0" if self.device else "cpu",
            device_bytes=int(self.device * SHARD_BYTES),
            device_total_bytes=int(10 * SHARD_BYTES),
            device_name="a made-up device",
            cpus=2.0,
        )


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    fields = trajectories(SHARDS * ROWS, step=STEP)
    return write_cache(
        tmp_path_factory.mktemp("even"), fields, timed=("latent", "time"), shards=(ROWS,) * SHARDS
    )


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Time that passes only when told to."""
    now = [1000.0]
    monkeypatch.setattr(residency.time, "monotonic", lambda: now[0])

    def forward(seconds: float) -> None:
        now[0] += seconds

    return forward


class Running:
    """A loader over a made-up machine, moved by hand: every look is followed by its filling."""

    def __init__(self, cache: Cache, machine: Machine, ledger: Ledger, **settings: Any) -> None:
        self.loader = Loader(cache, **{"batch_size": 5, "seed": 2, **settings})
        design = self.loader._design
        device = "cuda:0" if machine.device else "cpu"
        reserve = settings.get("reserve_bytes")
        ask = Ask(
            demand=replace(design.ask.demand, device=device),
            tier=settings.get("tier", "auto"),
            reserve_bytes=reserve,
            look=machine.look,
        )
        claim = ledger.claim()
        keys = residency.parts_of(cache, design.places.shards(), 0)
        plan = ask.plan(claim.usable(machine.look(), keys))
        self.loader._design = replace(design, ask=ask, claim=claim, plan=plan)
        self.settle()

    @property
    def residency(self) -> residency.Residency:
        return self.loader._running().residency

    def settle(self) -> None:
        """Wait until what is planned is where it is meant to be."""
        until = time.perf_counter() + 30
        while time.perf_counter() < until:
            self.residency._line.submit(lambda: None).result(30, "filling")
            if self.residency.complete and not self.residency._freed:
                return
            self.residency.turn(0)
        raise AssertionError("memory was not filled")

    def held(self) -> tuple[int, int]:
        """Shards that may be served from the device and from host memory."""
        held = self.residency.held
        return tuple(0 if m is None else sum(m.ready) for m in (held.device, held.host))  # type: ignore[return-value]

    def look(self) -> tuple[int, int]:
        self.residency.turn(1)
        self.settle()
        return self.held()


@pytest.fixture
def expected(cache: Cache) -> list[Any]:
    return list(Loader(cache, tier="disk", batch_size=5, seed=2))


def test_the_device_waits_until_three_steps_have_shown_the_peak(
    cache: Cache, expected: list[Any], clock: Callable[[float], None]
) -> None:
    running = Running(cache, Machine(device=10), Ledger())
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
    monkeypatch.setattr(watch, "device_again", lambda _: 6 * SHARD_BYTES)
    running = Running(cache, Machine(device=10), Ledger())

    running.residency.turn(3)
    running.settle()

    assert running.held() == (3, SHARDS - 3)


@pytest.mark.parametrize("settings", [{"tier": "device"}, {"reserve_bytes": 0}], ids=["tier", "reserve"])
def test_the_device_is_filled_at_once_where_that_was_asked_for(cache: Cache, settings: dict) -> None:
    tier = {"tier": settings.get("tier", "auto")}
    running = Running.__new__(Running)
    loader = Loader(cache, batch_size=5)
    machine = Machine(device=10)
    demand = replace(loader._design.ask.demand, device="cuda:0")
    ask = Ask(demand=demand, **{"reserve_bytes": None, **tier, **settings}, look=machine.look)
    loader._design = replace(loader._design, ask=ask, claim=Ledger().claim(), plan=ask.plan(machine.look()))
    running.loader = loader
    running.settle()

    assert running.held() == (SHARDS, 0)


def test_a_lowered_limit_shrinks_host_memory_and_no_batch_changes(
    cache: Cache, expected: list[Any], clock: Callable[[float], None], caplog: pytest.LogCaptureFixture
) -> None:
    machine = Machine()
    running = Running(cache, machine, Ledger())
    batches = iter(running.loader)
    got = [next(batches), next(batches)]
    assert running.held() == (0, SHARDS)

    machine.host = 5
    clock(2.0)
    got += [next(batches) for _ in range(len(expected) - len(got))]
    running.settle()

    assert running.held() == (0, 4), "four fifths of what is left"
    assert running.residency.serving() is None
    assert running.loader.plan.records_by_tier() == {"device": 0, "host": 16, "disk": 16, "encode": 0}
    assert "host memory is short" in caplog.text
    assert all(equal(a, b) for a, b in zip(got, expected, strict=True))


def test_what_is_about_to_go_serves_not_everything_any_more(cache: Cache) -> None:
    running = Running(cache, Machine(), Ledger())
    assert running.residency.serving() is not None

    running.residency._settle({"device": frozenset(), "host": frozenset(range(4))})

    assert running.residency.serving() is None


def test_memory_that_wavers_moves_nothing(cache: Cache, clock: Callable[[float], None]) -> None:
    machine = Machine(host=10)
    running = Running(cache, machine, Ledger())
    assert running.held() == (0, SHARDS)

    for host in (9.1, 9.9, 9.0, 11, 9.2):
        machine.host = host
        clock(2.0)
        assert running.look() == (0, SHARDS)


def test_memory_that_became_free_is_filled_only_after_a_while(
    cache: Cache, clock: Callable[[float], None]
) -> None:
    machine = Machine(host=10)
    running = Running(cache, machine, Ledger())
    machine.host = 5
    clock(2.0)
    assert running.look() == (0, 4)

    machine.host = 100
    clock(30.0)
    assert running.look() == (0, 4), "a shortage doubles the patience"
    clock(31.0)
    assert running.look() == (0, SHARDS)


def test_another_process_that_takes_the_device_costs_the_tier_and_no_batch(
    cache: Cache, expected: list[Any], clock: Callable[[float], None]
) -> None:
    machine = Machine(device=10)
    running = Running(cache, machine, Ledger(), reserve_bytes=SHARD_BYTES)
    batches = iter(running.loader)
    got = [next(batches), next(batches)]
    assert running.held() == (SHARDS, 0)

    held = running.residency.held.device
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
    monkeypatch.setattr(gather, "STRIP_OUTPUT_BYTES", 0)  # as large batches are made: one by one
    settings: dict[str, Any] = {"windows": Windows(field="latent"), "seed": 2}
    expected = list(Loader(cache, 5, tier="disk", **settings))
    machine = Machine(device=free)
    if meter:
        settings["meter"] = StallMeter()
    running = Running(cache, machine, Ledger(), reserve_bytes=SHARD_BYTES, **settings)
    held = running.residency.held.device
    assert held is not None
    gone = weakref.ref(held.sources["latent"])
    del held
    asked: list[bool] = []
    turn = residency.Residency.turn

    def noted(self: residency.Residency, batches: int) -> residency.Held:
        if self._freed is not None:  # it may be given back in this turn
            asked.append(gone() is None)
        return turn(self, batches)

    monkeypatch.setattr(residency.Residency, "turn", noted)
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
    running = Running(cache, machine, Ledger(), reserve_bytes=SHARD_BYTES)
    over = threading.Event()

    def fill(held: residency.Held | None) -> None:
        over.wait(30)

    running.residency._line.submit(functools.partial(fill, running.residency.held))
    machine.device = 7
    clock(40.0)

    got = list(running.loader)

    assert running.residency.held.device is None
    over.set()
    running.settle()
    assert running.held() == (SHARDS, 0)
    assert all(equal(a, b) for a, b in zip(got, expected, strict=True))


def test_host_memory_that_batches_were_mixed_from_is_let_go_of(
    cache: Cache, expected: list[Any], monkeypatch: pytest.MonkeyPatch, clock: Callable[[float], None]
) -> None:
    monkeypatch.setattr("stoker.loader.mapped._choose_mapped", lambda *_: None)
    machine = Machine(device=5)
    running = Running(cache, machine, Ledger(), reserve_bytes=SHARD_BYTES)
    assert running.held() == (4, 4)
    host = running.residency.held.host
    assert host is not None
    gone = weakref.ref(host.sources["latent"])
    del host
    batches = iter(running.loader)
    got = [next(batches), next(batches)]

    machine.host = 1 - 4 + 2  # what it holds itself is added
    clock(2.0)
    got += batches
    running.settle()
    partial = running.loader._running()._partial
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
    running = Running(cache, machine, Ledger(), reserve_bytes=0)
    machine.device = 6
    clock(40.0)

    with torch.inference_mode():
        assert running.look() == (SHARDS, 0)
        got = list(running.loader)

    held = running.residency.held.device
    assert held is not None
    assert not any(source.is_inference() for source in held.sources.values())
    assert all(equal(a, b) for a, b in zip(got, expected, strict=True))


def test_a_device_that_is_full_after_all_is_done_without(
    cache: Cache, expected: list[Any], monkeypatch: pytest.MonkeyPatch, clock: Callable[[float], None]
) -> None:
    """Two processes may see the same free bytes; the driver decides who gets them."""

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(device_tier, "resident", full)
        running = Running(cache, Machine(device=10), Ledger(), reserve_bytes=0)

        assert running.held() == (0, SHARDS)
        assert all(equal(a, b) for a, b in zip(running.loader, expected, strict=True))
    clock(100.0)
    assert running.look() == (SHARDS, 0)


def test_a_part_of_the_device_grows_when_there_is_more(cache: Cache, clock: Callable[[float], None]) -> None:
    machine = Machine(device=4)
    running = Running(cache, machine, Ledger(), reserve_bytes=0)
    assert running.held() == (4, 4)

    machine.device = 6  # free besides the four
    clock(40.0)

    assert running.look() == (SHARDS, 0)


def test_two_loaders_of_a_process_share_one_account(
    cache: Cache, tmp_path: Path, clock: Callable[[float], None]
) -> None:
    ledger, machine = Ledger(), Machine(host=15)
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
    running = Running(cache, Machine(), Ledger())
    host = running.residency.held.host
    assert host is not None
    assert host.resident is not None
    assert host.resident(3) == 1.0
    host.resident = lambda shard: 0.2 if shard in (3, 5) else 1.0
    faults = iter([1000, 1000, 1000, 1000])
    monkeypatch.setattr(watch, "major_faults", lambda: next(faults))

    clock(2.0)

    assert running.look() == (0, SHARDS - 2)
    assert all(equal(a, b) for a, b in zip(running.loader, expected, strict=True))
    clock(100.0)
    running.look()
    assert running.held() == (0, SHARDS)


def test_what_was_let_go_of_still_gives_the_same_bytes(cache: Cache) -> None:
    """A batch that is being gathered does not have to be waited for."""
    running = Running(cache, Machine(), Ledger())
    host = running.residency.held.host
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
    monkeypatch.setattr("stoker.loader.mapped._choose_mapped", lambda *_: None)
    machine = Machine()
    running = Running(cache, machine, Ledger())
    batches = iter(running.loader)
    got = [next(batches)]

    machine.host = 1 - SHARDS + 4  # what it holds itself is added
    clock(2.0)
    got += batches
    running.settle()

    assert running.held() == (0, 4)
    assert all(equal(a, b) for a, b in zip(got, expected, strict=True))


def test_fixed_addresses_are_never_moved(cache: Cache, clock: Callable[[float], None]) -> None:
    machine = Machine()
    loader = Loader(cache, batch_size=4, tier="device", static=True)
    loader._design = replace(loader._design, ask=replace(loader._design.ask, look=machine.look))
    list(loader)
    machine.host = 0.0
    clock(10.0)

    list(loader)

    assert loader._engine is not None
    assert loader._engine.residency.serving() is not None


def test_a_long_epoch_is_left_within_seconds_of_a_shortage(
    cache: Cache, expected: list[Any], clock: Callable[[float], None]
) -> None:
    """Batches come in strips of up to 128; with slow steps the strips are short."""
    machine = Machine()
    windows = Windows(field="latent")
    running = Running(cache, machine, Ledger(), batch_size=1, windows=windows)
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
