"""The main job on generated data: simulate, encode, plan, train. Needs no download and no GPU."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py  # pyright: ignore[reportMissingTypeStubs]
import numpy as np
from numpy.typing import NDArray

from stoker.config import Config, load_config
from stoker.errors import ConfigError, ReadOnlyError, ResourceError, SourceError
from stoker.run.caches import CacheLocation
from stoker.run.context import Run, describe_machine
from stoker.run.plan import PlanResult, plan_located
from stoker.run.precompute import CacheResult
from stoker.run.train import TrainResult, prepare, train_prepared
from stoker.runtime.files import make_folder, replace_atomically
from stoker.schema import JsonResult
from stoker.train.config import EventSink
from stoker.units import format_count

# ----------------------------------------------------------------------------------------------------------
# Burgers' equation, solved here, so that a first run needs no download.
#
#     u_t + u u_x = nu u_xx,    x in [0, 1), periodic
#
# Pseudo-spectral in space (float64, the 2/3 rule against aliasing), fourth-order Runge-Kutta in time on the
# variable from which diffusion has been integrated out exactly, so that the step is bound by advection
# alone. All trajectories advance together as one array. Files have PDEBench's 1D layout, and its workers
# open them.


COURANT = 0.5
"""Cells that the fastest wave may cross in one inner step; the scheme is stable up to about 1.3."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BurgersSpec:
    """Settings of the simulation; equal values give equal bytes on one machine."""

    trajectories: int = 64
    """Independent initial states."""
    steps: int = 101
    """Stored states of each trajectory, the initial one included."""
    points: int = 256
    """Grid points on [0, 1); even."""
    interval: float = 0.02
    """Time between stored states."""
    viscosity: float = 0.01
    """The factor of u_xx."""
    seed: int = 0
    """Decides the initial states."""

    def __post_init__(self) -> None:
        """Refuse sizes that cannot be simulated."""
        if min(self.trajectories, self.steps) < 1 or self.points < 8 or self.points % 2:
            raise ConfigError(
                f"{self.trajectories} trajectories, {self.steps} steps on {self.points} points are refused",
                hint="Give at least one trajectory, one step, and an even number of points from 8",
            )
        if self.interval <= 0 or self.viscosity <= 0:
            raise ConfigError(
                f"interval {self.interval} and viscosity {self.viscosity} must both be above zero"
            )


def initial_states(count: int, points: int, seed: int) -> NDArray[np.float64]:
    """Return random smooth periodic states, `(count, points)` float64: sine waves of wave number 1 to 4."""
    rng = np.random.default_rng(seed)
    amplitude = rng.uniform(-1.0, 1.0, (count, 4, 1)) / np.sqrt(np.arange(1, 5)[:, None])
    phase = rng.uniform(0.0, 2 * np.pi, (count, 4, 1))
    angle = 2 * np.pi * np.arange(1, 5)[:, None] * (np.arange(points) / points)
    return np.sum(amplitude * np.sin(angle + phase), axis=1)


def solve_burgers(
    initial: NDArray[np.float64], *, viscosity: float, interval: float, steps: int
) -> NDArray[np.float64]:
    """Advance states in time.

    Args:
        initial: States at time 0, `(n, points)` float64 on the grid `i / points`.
        viscosity, interval: The factor of u_xx; the time between stored states.
        steps: Stored states, the initial one included.
    Returns:
        `(n, steps, points)` float64; `[:, 0]` is `initial`.
    Source:
        Integrating-factor RK4: Trefethen, Spectral Methods in MATLAB (2000), chapter 10.
    """
    points = initial.shape[1]
    out = np.empty((initial.shape[0], steps, points))
    out[:, 0] = initial
    state = np.fft.rfft(initial)
    for step in range(1, steps):
        # Viscosity only slows waves down, so the last stored state bounds the next stretch.
        fastest = float(np.abs(out[:, step - 1]).max())
        inner = max(4, int(np.ceil(interval * fastest * points / COURANT)))
        for _ in range(inner):
            state = _advance(state, viscosity, interval / inner, points)
        out[:, step] = np.fft.irfft(state, n=points)
    return out


def _advance(
    state: NDArray[np.complex128], viscosity: float, dt: float, points: int
) -> NDArray[np.complex128]:
    """Return one inner step of `dt` for all trajectories, in Fourier space."""
    wave = 2 * np.pi * np.arange(points // 2 + 1)
    half = np.exp(-viscosity * wave**2 * (dt / 2))
    # The kept third: products of two kept waves alias only onto waves that are cut.
    advect = np.where(np.arange(points // 2 + 1) < points / 3, -0.5j * wave, 0)

    def slope(spectrum: NDArray[np.complex128]) -> NDArray[np.complex128]:
        return advect * np.fft.rfft(np.fft.irfft(spectrum, n=points) ** 2)

    a = slope(state)
    b = slope(half * (state + (dt / 2) * a))
    c = slope(half * state + (dt / 2) * b)
    d = slope(half**2 * state + dt * half * c)
    return half**2 * state + (dt / 6) * (half**2 * a + 2 * half * (b + c) + d)


def write_burgers(path: Path, spec: BurgersSpec) -> Path:
    """Simulate, and write a file in PDEBench's 1D layout.

    `tensor` is `(trajectories, steps, points)` float32, `x-coordinate` holds cell centers, `t-coordinate`
    has one entry more than there are steps, as PDEBench's files do, and the attribute `Nu` is the viscosity.
    The file appears under its name complete, or not at all.

    Raises:
        ReadOnlyError, ResourceError, SourceError: The folder cannot be written, is full, or is not a folder.
    """
    states = solve_burgers(
        initial_states(spec.trajectories, spec.points, spec.seed),
        viscosity=spec.viscosity,
        interval=spec.interval,
        steps=spec.steps,
    )
    try:
        make_folder(path.parent)
        with replace_atomically(path) as temporary, h5py.File(temporary, "w") as opened:
            file: Any = opened
            file.create_dataset("tensor", data=states.astype(np.float32))
            file["x-coordinate"] = ((np.arange(spec.points) + 0.5) / spec.points).astype(np.float32)
            file["t-coordinate"] = (np.arange(spec.steps + 1) * spec.interval).astype(np.float32)
            file.attrs["Nu"] = spec.viscosity
    except (ReadOnlyError, ResourceError):
        raise
    except OSError as error:
        raise SourceError(f"{path} cannot be written: {error}", hint="Choose another folder") from error
    return path


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
"""Settings of the demo; the command line wins over them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult(JsonResult):
    """The four steps of the demo."""

    json_within = "train"
    json_keys = ("data_s", "encode_s", "data", "plan")

    machine: str
    """One line: version, device, memory, build of torch."""
    data: str
    """The file."""
    data_line: str
    """The simulated data in words, or that the file exists."""
    data_s: float
    plan: PlanResult
    train: TrainResult

    @property
    def caches(self) -> tuple[CacheResult, ...]:
        """The training cache, then the validation cache."""
        return self.train.caches

    @property
    def encode_s(self) -> float:
        """Seconds inside the encoder."""
        return sum(cache.encode_seconds for cache in self.caches)


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
    run = Run(config)
    result = train_prepared(run, prepare(run), started=started, on_event=on_event)
    cache = result.caches[0].cache
    # Only now: it serves batches for two seconds to find out what they take, and knows a step by then.
    plan = plan_located(run.parts()[0], CacheLocation(recipe=cache.recipe, folder=cache.path, cache=cache))
    return DemoResult(
        machine=describe_machine(),
        data=str(config.data.files),
        data_line=data_line,
        data_s=data_s,
        plan=plan,
        train=result,
    )


def demo_config(overrides: Sequence[str]) -> Config:
    """Return the demo's settings with `overrides` in place of their own."""
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
    """Return True if `path` holds what this version simulates."""
    try:
        with h5py.File(path) as opened:
            file: Any = opened
            shape = (SPEC.trajectories, SPEC.steps, SPEC.points)
            return file["tensor"].shape == shape and float(file.attrs["Nu"]) == SPEC.viscosity
    except (OSError, KeyError):
        return False
