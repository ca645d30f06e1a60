"""The main job on generated data: simulate, encode, plan, train. Needs no download and no GPU."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py  # pyright: ignore[reportMissingTypeStubs]

from stoker.config import Config, load_config
from stoker.pipeline.burgers import BurgersSpec, write_burgers
from stoker.pipeline.locate import Located
from stoker.pipeline.machine import describe_machine
from stoker.pipeline.plan import PlanResult, plan_located
from stoker.pipeline.precompute import CacheResult
from stoker.pipeline.train import TrainResult, prepare, train_prepared
from stoker.schema import Json
from stoker.train.config import EventSink
from stoker.units import format_count

DATA = "data/demo/burgers.hdf5"
SPEC = BurgersSpec()
SETTINGS = {
    "data.files": DATA,
    "data.splits": "{train: 0.8, val: 0.2}",
    "training.run_dir": "runs/demo",
    "training.epochs": "3",
    "training.batch_size": "64",
    "training.start_every": "2",
    "training.lr": "3e-3",
    "model.width": "64",
    "model.depth": "2",
}
"""What the demo sets; anything given on the command line wins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult:
    """The four steps of the demo."""

    machine: str
    """One line: version, device, memory, build of torch."""
    data_path: str
    data_line: str
    """What was simulated, or that the file was there."""
    data_s: float
    plan: PlanResult
    train: TrainResult

    @property
    def caches(self) -> tuple[CacheResult, ...]:
        """The training cache, then the validation cache."""
        return self.train.caches

    def to_json(self) -> dict[str, Json]:
        """The keys of `train`, and `data_s` and `encode_s`."""
        return {
            **self.train.to_json(),
            "data_s": self.data_s,
            "encode_s": sum(cache.encode_seconds for cache in self.caches),
            "data": self.data_path,
            "plan": self.plan.to_json(),
        }


def run_demo(
    overrides: Sequence[str] = (), *, started: float | None = None, on_event: EventSink | None = None
) -> DemoResult:
    """Make `data/demo/burgers.hdf5` unless it is there, then do the main job on it.

    Args:
        overrides: Settings as `key=value`, over the demo's own.
        started: When the process began, on the clock of `time.monotonic`; None: now.
        on_event: Told of what happens in the training loop.
    Raises:
        StokerError: As `train_config`.
    """
    started = time.monotonic() if started is None else started
    config = demo_config(overrides)
    began = time.monotonic()
    data_line = _make_data(config)
    data_s = time.monotonic() - began
    prepared = prepare(config)
    result = train_prepared(config, prepared, started=started, on_event=on_event)
    cache = result.caches[0].cache
    # Only now: it serves batches for two seconds to find out what they take, and knows a step by then.
    plan = plan_located(config, Located(recipe=cache.recipe, folder=cache.path, cache=cache))
    return DemoResult(
        machine=describe_machine(),
        data_path=str(config.data.files),
        data_line=data_line,
        data_s=data_s,
        plan=plan,
        train=result,
    )


def demo_config(overrides: Sequence[str]) -> Config:
    """The demo's settings with `overrides` in place of their own."""
    given = {text.partition("=")[0].strip() for text in overrides}
    own = [f"{key}={value}" for key, value in SETTINGS.items() if key not in given]
    return load_config(None, [*own, *overrides])


def _make_data(config: Config) -> str:
    """Simulate unless the file is there; a file that the user named is taken as it is."""
    size = (
        f"{SPEC.trajectories} Burgers trajectories, {SPEC.steps} steps x {format_count(SPEC.points)} points"
    )
    if config.data.files != DATA:
        return "as given"
    if _is_made(Path(DATA)):
        return f"{size}, made before"
    write_burgers(Path(DATA), SPEC)
    return size


def _is_made(path: Path) -> bool:
    """Whether `path` holds what this version simulates."""
    try:
        with h5py.File(path) as opened:
            file: Any = opened
            shape = (SPEC.trajectories, SPEC.steps, SPEC.points)
            return file["tensor"].shape == shape and float(file.attrs["Nu"]) == SPEC.viscosity
    except (OSError, KeyError):
        return False
