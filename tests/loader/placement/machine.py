"""A made-up machine whose memory tests change, and a loader over it; its device is a CPU's memory."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

from stoker.loader import Loader, placement
from stoker.plan import MemoryLedger, Resources
from stoker.store import Cache

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


class Running:
    """A loader over a made-up machine, moved by hand: every look is followed by its filling."""

    def __init__(self, cache: Cache, machine: Machine, ledger: MemoryLedger, **settings: Any) -> None:
        self.loader = Loader(cache, **{"shuffle": True, "batch_size": 5, "seed": 2, **settings})
        design = self.loader._serving.design
        device = "cuda:0" if machine.device else "cpu"
        design = replace(
            design,
            demand=replace(design.demand, device=device),
            measure=machine.look,
            reservation=ledger.claim(),
        )
        keys = placement.shard_parts(cache, design.table.shards(), 0)
        plan = placement.replan(design, design.reservation.usable(machine.look(), keys))
        self.loader._serving.design = replace(design, plan=plan)
        self.settle()

    @property
    def placement(self) -> placement.Placement:
        return self.loader._serving.running().placement

    def settle(self) -> None:
        """Wait until what is planned is where it is meant to be."""
        until = time.perf_counter() + 30
        while time.perf_counter() < until:
            self.placement._line.submit(lambda: None).result(30, "filling")
            if self.placement.complete and not self.placement._freed:
                return
            self.placement.turn(0)
        raise AssertionError("memory was not filled")

    def held(self) -> tuple[int, int]:
        """Shards that may be served from the device and from host memory."""
        held = self.placement.held
        return tuple(0 if m is None else sum(m.ready) for m in (held.device, held.host))  # type: ignore[return-value]

    def look(self) -> tuple[int, int]:
        self.placement.turn(1)
        self.settle()
        return self.held()
