"""The job on rows of a database: make them, read them once, cache, plan, train, and say how far off it is."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from stoker.config import Config, load_config
from stoker.errors import ConfigError
from stoker.loader import Loader
from stoker.monitor import StallMeter
from stoker.pipeline.build import build_sources, device_of, tasks_of
from stoker.pipeline.fit_terms import FitSettings
from stoker.pipeline.fitting import fit, one_thread
from stoker.pipeline.locate import Located
from stoker.pipeline.machine import describe_machine
from stoker.pipeline.plan import PlanResult, plan_located
from stoker.pipeline.precompute import CacheResult, precompute_config
from stoker.pipeline.radio import RadioSpec
from stoker.pipeline.radio_regressor import (
    Errors,
    Triangulation,
    TriangulationModel,
    position_errors,
    position_losses,
    save_regressor,
)
from stoker.pipeline.radio_store import sql_settings, write_radio
from stoker.schema import Json
from stoker.sources.protocol import Source
from stoker.sources.sql.source import SQLSource
from stoker.train.config import EventSink
from stoker.units import format_count

DATABASE = "sqlite:///data/demo/radio.db"
SPEC = RadioSpec()
SETTINGS = {
    "data.task": "radio",
    "data.splits": "{train: 0.8, val: 0.2}",
    "training.latent_cache_dtype": "null",
    "training.run_dir": "runs/demo-radio",
    "training.epochs": "30",
    "training.batch_size": "256",
    "training.lr": "6e-3",
}
"""What the demo sets; anything given on the command line wins."""
COMPARED = 4
"""Batches whose loss is taken from the database as well as from the cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RadioResult:
    """What came of it."""

    machine: str
    database: str
    """Without user or password."""
    rows: int
    made: bool
    """Whether the rows had to be made."""
    data_s: float
    caches: tuple[CacheResult, ...]
    plan: PlanResult
    tier: str
    steps: int
    epochs: int
    train_s: float
    stall: float
    """Of the last epoch."""
    loss: float
    """Mean of the last epoch."""
    trained: Errors
    """Over the validation split."""
    untrained: Errors
    """The same network before its first step."""
    losses: tuple[float, float]
    """Of the untrained network over the first batches: from the cache, and from the database."""
    run_dir: str

    @property
    def record_bytes(self) -> int:
        """Bytes of one record."""
        return sum(field.size_bytes() for field in self.caches[0].cache.schema.values())

    @property
    def data_line(self) -> str:
        """What the rows are."""
        return f"{format_count(self.rows)} measurements of transmitters{'' if self.made else ', made before'}"

    def to_json(self) -> dict[str, Json]:
        """All figures by name."""
        return {
            "database": self.database,
            "rows": self.rows,
            "made": self.made,
            "data_s": self.data_s,
            "encode_s": sum(cache.seconds for cache in self.caches if cache.encoded),
            "caches": [cache.to_json() for cache in self.caches],
            "cache_reused": not any(cache.encoded for cache in self.caches),
            "record_bytes": self.record_bytes,
            "plan": self.plan.to_json(),
            "tier": self.tier,
            "steps": self.steps,
            "epochs": self.epochs,
            "train_s": self.train_s,
            "stall": self.stall,
            "loss": self.loss,
            "position_error_m": self.trained.mean_m,
            "median_position_error_m": self.trained.p50_m,
            "untrained_position_error_m": self.untrained.mean_m,
            "loss_from_cache": self.losses[0],
            "loss_from_database": self.losses[1],
            "run_dir": self.run_dir,
        }


def run_radio(
    overrides: Sequence[str] = (),
    *,
    database: str = DATABASE,
    spec: RadioSpec = SPEC,
    say: Callable[[str], None] = lambda _: None,
) -> RadioResult:
    """Make the rows unless they are there, then precompute, plan and train.

    Args:
        overrides: Settings as `key=value`, over the demo's own.
        database: A SQLite file or URL, or PostgreSQL's.
        spec: What rows there are to be.
        say: Told of each sixth of the epochs.
    Raises:
        StokerError: As `SQLSource`, `precompute` and `Loader`.
    """
    config = radio_config(overrides, database, spec)
    began = time.monotonic()
    made = write_radio(database, spec)
    data_s = time.monotonic() - began
    caches = precompute_config(config, splits=["train", "val"]).caches
    cache = caches[0].cache
    plan = plan_located(config, Located(recipe=cache.recipe, folder=cache.path, cache=cache))
    source = _sql_source(build_sources(config, tasks_of(config)[0], ["train"])["train"])
    meter = StallMeter()
    train, val = _loader(config, cache, meter=meter), _loader(config, caches[1].cache, order="sequential")
    device = device_of(config)
    torch.manual_seed(config.training.seed)
    model = TriangulationModel()
    model.set_statistics(source.statistics)
    model.to(device)
    losses = compare_losses(model, train, source)
    untrained = position_errors(model, val)
    began, epochs = time.monotonic(), config.training.epochs
    meter.reset()

    settings = FitSettings(epochs=epochs, lr=config.training.lr, weight_decay=config.training.weight_decay)
    with one_thread():
        report = fit(Triangulation(model), train, val, settings, meter=meter, on_event=_telling(say, epochs))
    train_s = time.monotonic() - began
    run_dir = Path(config.training.run_dir or "runs/demo-radio")
    save_regressor(run_dir / "regressor.safetensors", model, {"statistics": dict(source.statistics)})
    return RadioResult(
        machine=describe_machine(),
        database=source.where_it_is,
        rows=spec.rows,
        made=made,
        data_s=data_s,
        caches=tuple(caches),
        plan=plan,
        tier=train.plan.tier,
        steps=epochs * len(train),
        epochs=epochs,
        train_s=train_s,
        stall=cast("float", report.row["stall"]),
        loss=cast("float", report.row["train_loss"]),
        trained=position_errors(model, val),
        untrained=untrained,
        losses=losses,
        run_dir=str(run_dir),
    )


def _telling(say: Callable[[str], None], epochs: int) -> EventSink:
    """Tells of each sixth of the epochs how far off it is."""
    every = max(1, epochs // 6)

    def tell(kind: str, facts: Mapping[str, Json]) -> None:
        told = cast("Mapping[str, Any]", facts)
        if kind == "epoch" and told["epoch"] < epochs and told["epoch"] % every == 0:
            say(f"epoch {told['epoch']} · {format_count(told['mean_m'])} m off")

    return tell


def radio_config(overrides: Sequence[str], database: str, spec: RadioSpec) -> Config:
    """The demo's settings with `overrides` in place of their own.

    Raises:
        ConfigError: The database's URL holds a password.
    """
    given = {text.partition("=")[0].strip() for text in overrides}
    own = {**sql_settings(database, spec), **SETTINGS}
    return load_config(None, [*(f"{key}={v}" for key, v in own.items() if key not in given), *overrides])


def _loader(config: Config, cache: Any, *, order: str = "full", meter: StallMeter | None = None) -> Loader:
    training = config.training
    return Loader(
        cache,
        training.batch_size,
        tier=training.tier,
        device=device_of(config),
        seed=training.seed,
        order=order,
        meter=meter,
    )


def _sql_source(source: Source) -> SQLSource:
    if not isinstance(source, SQLSource):
        raise ConfigError("data.limit leaves out rows, and the demo compares all. Leave it out")
    return source


@torch.no_grad()
def compare_losses(model: torch.nn.Module, loader: Loader, source: Source) -> tuple[float, float]:
    """Loss over the first batches as the loader gives them, and as the database does for the same rows."""
    cached, read = [], []
    for batch in islice(loader, COMPARED):
        cached.append(position_losses(model, batch).mean())
        rows = read_batch(source, batch["index"])
        read.append(
            position_losses(
                model, {name: value.to(batch["index"].device) for name, value in rows.items()}
            ).mean()
        )
    loader.load_state_dict(loader.state_dict((0, 0)))
    return float(torch.stack(cached).mean()), float(torch.stack(read).mean())


def read_batch(source: Source, index: Tensor) -> dict[str, Tensor]:
    """The samples of some numbers, stacked; read from the source, not from a cache."""
    samples = [source.read(number) for number in index.tolist()]
    return {name: torch.stack([torch.from_numpy(sample[name]) for sample in samples]) for name in samples[0]}
