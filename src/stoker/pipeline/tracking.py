"""What a run is told by while it goes on: start-up, stall, GPU and cost by name, to wherever they are kept.

The names `startup/*` and `training/*` are those of the earlier systems. Every row also goes to
`metrics.jsonl` (`kind: metrics`) and to whoever listens to the run, as the event `metrics`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch

from stoker.monitor.gpu import GpuAbsent, GpuWatch
from stoker.monitor.trackers import Ending, TrackedRun
from stoker.monitor.tracking import Tracking
from stoker.pipeline.context import Run
from stoker.schema import Json, JsonResult
from stoker.train.config import EventSink
from stoker.train.run import MetricsLog

log = logging.getLogger("stoker")

EVERY_S = 10.0
"""Seconds between two rows within an epoch."""
COST = "cost/run"
GPU = "training/gpu_utilization_pct"
ERRORS = {
    "val_nrmse": "validation/nrmse",
    "rollout_nrmse": "validation/rollout_nrmse",
    "physical_nrmse": "validation/physical_nrmse",
    "physical_rollout_nrmse": "validation/physical_rollout_nrmse",
}
"""Errors of an epoch by the names under which they are tracked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase(JsonResult):
    """A part of what passes before the first step."""

    name: str
    seconds: float
    note: str = ""
    """What it did, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Startup:
    """What passed before training."""

    started_s: float
    """When the process began, on the clock of `time.monotonic`."""
    phases: list[Phase]
    """In order; the first batch is added when it is there."""
    values: Mapping[str, float]
    """Figures by name, as far as they are known."""


@dataclass(slots=True)
class _Sum:
    """What the meter said over some intervals."""

    wait_s: float = 0.0
    step_s: float = 0.0
    examples: int = 0
    tiers: dict[str, int] | None = None

    def add(self, facts: Mapping[str, Any]) -> None:
        """Take in one event `stall`."""
        self.wait_s += facts["wait_s"]
        self.step_s += facts["step_s"]
        self.examples += facts["examples"]
        tiers = self.tiers or {}
        for tier, examples in facts["tiers"].items():
            tiers[tier] = tiers.get(tier, 0) + examples
        self.tiers = tiers

    def values(self) -> dict[str, float]:
        """Stall, rate, and the part of the examples that each tier served; empty without a meter."""
        spent_s = self.wait_s + self.step_s
        if not spent_s or not self.examples:
            return {}
        shares = {f"tier/{tier}": n / self.examples for tier, n in (self.tiers or {}).items()}
        rate = self.examples / spent_s
        return {"training/stall": self.wait_s / spent_s, "training/samples_per_sec": rate, **shares}


class RunTracking:
    """Listens to the training loop; `tracking` makes one and ends it."""

    def __init__(self, run: Run, startup: Startup, *, tell: EventSink | None = None) -> None:
        """`tell`: told every row too."""
        self.startup = startup
        self.values: dict[str, float] = dict(startup.values)
        """The newest figure by name."""
        self.gpu: GpuAbsent | None = None
        """Why there is no figure of the GPU, as far as that is known."""
        self._run, self._started, self._tell = run, startup.started_s, tell
        self._folder = run.run_dir
        self._price = run.config.training.price_per_hour
        self._paid = 0.0
        self._trackers: Tracking | None = None
        self._watch: GpuWatch | None = None
        self._step = 0
        self._due_s = 0.0
        self._interval, self._epoch = _Sum(), _Sum()

    def listen(self, kind: str, facts: Mapping[str, Json]) -> None:
        """Take in one event of the loop."""
        known = cast("Mapping[str, Any]", facts)
        self._step = known.get("step", self._step)
        if kind == "start":
            self._start(resumed=self._step > 0)
        elif kind == "ready":
            self.startup.phases.append(Phase(name="first batch", seconds=known["seconds"]))
            total_s = time.monotonic() - self._started
            self.values["startup/total_startup_time_min"] = total_s / 60
        elif kind == "stall":
            self._take_interval(known)
        elif kind == "step" and self._trackers is not None:
            row = {"training/loss": known["loss"], "training/lr": known["lr"]}
            self._trackers.log(self._step, {**row, "training/grad_norm": known["grad_norm"]})
        elif kind == "epoch":
            self._take_epoch(known)
        if kind in ("start", "ready") and self._trackers is not None and self._is_up:
            startup = {name: v for name, v in self.values.items() if name.startswith("startup/")}
            phases: list[Json] = [phase.to_json() for phase in self.startup.phases]
            self._keep(startup, {"phases": phases, "gpu": None if self.gpu is None else self.gpu.reason})

    @property
    def _is_up(self) -> bool:
        """The first batch was there."""
        return "startup/total_startup_time_min" in self.values

    def end(self, status: Ending) -> None:
        """Let go of everything, trackers last: they have a deadline."""
        if self._watch is not None:
            self._watch.stop()
        if self._trackers is not None:
            self._trackers.end(status)

    def _start(self, *, resumed: bool) -> None:
        """Only now: until here an earlier run in the folder had not been moved aside."""
        if resumed:
            costs = [row[COST] for row in MetricsLog(self._folder / "metrics.jsonl").rows() if COST in row]
            self._paid = costs[-1] if costs else 0.0
        run = TrackedRun(
            name=self._folder.resolve().name,
            folder=self._folder,
            settings=self._run.config.to_dict(),
            resumed=resumed,
        )
        self._trackers = Tracking(self._run.config.training.trackers, run, log.warning)
        watched = watch_gpu(self._run.device)
        if isinstance(watched, GpuAbsent):
            self.gpu = watched
        else:
            self._watch = watched
        self._due_s = time.monotonic() + EVERY_S

    def _take_interval(self, facts: Mapping[str, Any]) -> None:
        self._interval.add(facts)
        self._epoch.add(facts)
        now_s = time.monotonic()
        if now_s >= self._due_s and self._trackers is not None:
            self._due_s = now_s + EVERY_S
            self._trackers.log(self._step, {**self._interval.values(), **self._costs()})
            self._interval = _Sum()

    def _take_epoch(self, facts: Mapping[str, Any]) -> None:
        values = {**self._epoch.values(), "training/epoch_time_sec": float(facts["seconds"])}
        values |= {"training/epoch_loss": float(facts["loss"]), **self._costs()}
        values |= {name: facts[key] for key, name in ERRORS.items() if facts.get(key) is not None}
        if self._watch is not None:
            found = self._watch.take()
            if isinstance(found, GpuAbsent):
                self.gpu = found
            else:
                self.gpu, values[GPU] = None, 100 * found
        self._interval, self._epoch = _Sum(), _Sum()
        self.values |= values
        self._keep(values, {"epoch": facts["epoch"]})

    def _costs(self) -> dict[str, float]:
        if self._price is None:
            return {}
        return {COST: self._paid + self._price * (time.monotonic() - self._started) / 3600}

    def _keep(self, values: Mapping[str, float], more: Mapping[str, Json]) -> None:
        """A row for everybody."""
        row: dict[str, Json] = {"kind": "metrics", "step": self._step, **more, **values}
        MetricsLog(self._folder / "metrics.jsonl").append(row)
        if self._trackers is not None:
            self._trackers.log(self._step, values)
        if self._tell is not None:
            self._tell("metrics", row)


@contextmanager
def tracking(tracked: RunTracking) -> Generator[RunTracking]:
    """Track a run while the block lasts, and tell how it ended."""
    status: Ending = "failed"
    try:
        yield tracked
        status = "finished"
    except KeyboardInterrupt:
        status = "interrupted"
        raise
    finally:
        tracked.end(status)


def watch_gpu(device: str) -> GpuWatch | GpuAbsent:
    """Return a watch on the GPU that a run computes on; why there is none on a CPU."""
    if device == "cpu":
        return GpuAbsent(reason="training.device is cpu")
    # As the driver's library knows the GPU, which numbers them without regard to CUDA_VISIBLE_DEVICES.
    return GpuWatch(str(torch.cuda.get_device_properties(device).uuid))
