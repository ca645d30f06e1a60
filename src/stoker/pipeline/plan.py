"""Where the records of a configuration would be served from; nothing is read but limits and headers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import torch

from stoker.config import Config
from stoker.loader.order import parse_order
from stoker.loader.read_ahead import elsewhere_of
from stoker.pipeline.build import device_of, tasks_of
from stoker.pipeline.diary import last_step_s
from stoker.pipeline.folders import cache_dir_of, require_folder
from stoker.pipeline.inspect import raw_bytes
from stoker.pipeline.locate import Located, batch_size_of, locate, trajectory_steps, windows_for, windows_of
from stoker.pipeline.served import Step, served_loads
from stoker.pipeline.smaller import Smaller, say, smaller_dtypes
from stoker.pipeline.together import encoders_of
from stoker.plan import Demand, Elsewhere, Plan, Resources, measure_rates, plan_tiers, probe
from stoker.plan.gpus import GpuRow, gpu_table, say_gpus, say_together
from stoker.scale.ranks import ALONE
from stoker.schema import Json, Schema, columns_of
from stoker.sources.files import canonical_split
from stoker.store import Cache
from stoker.store.layout import is_fixed, record_bytes
from stoker.units import format_count


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanResult:
    """Where the records of the training split would be served from, once they are encoded."""

    plan: Plan
    records: int
    missing: int
    """Records still to be encoded; the plan counts them as stored."""
    smaller: tuple[Smaller, ...] = ()
    """Storage dtypes that would take fewer bytes, what they would buy and cost."""
    advice: str = ""
    """The best of those in words; empty where there is none."""
    gpus: tuple[GpuRow, ...] = ()
    """What the memory of GPUs would hold, half of it left to the model."""
    on_gpus: str = ""
    """That in words."""
    together: str = ""
    """How many devices hold together what one does not; empty where one holds it, or there is none."""

    @property
    def reason(self) -> str:
        """The decision in words."""
        first = f"{format_count(self.missing, 'record')} to be encoded first; " if self.missing else ""
        return first + self.plan.reason

    def to_json(self) -> dict[str, Json]:
        """The keys that scripts rely on."""
        return {
            **self.plan.to_json(),
            "reason": self.reason,
            "records": self.records,
            "missing": self.missing,
            "smaller": [one.to_json() for one in self.smaller],
            "advice": self.advice,
            "gpus": [one.to_json() for one in self.gpus],
            "together": self.together,
        }


def plan_config(config: Config) -> PlanResult:
    """Plan the training split of the first task.

    Raises:
        ConfigError: The cache folder is not a folder.
        ResourceError: The tier asked for cannot hold it.
        StokerError: As `locate`.
    """
    require_folder(cache_dir_of(config), "training.latent_cache_dir")
    split = canonical_split(config.data.wanted_splits[0])
    task = tasks_of(config)[0]
    config = config.for_task(task)
    return plan_located(config, locate(config, task, split))


def plan_located(config: Config, located: Located, resources: Resources | None = None) -> PlanResult:
    """Plan one cache, whose missing records count as stored; `resources`: None asks the machine."""
    cache_dir, device = cache_dir_of(config), device_of(config)
    encoders_of(config, ALONE)  # one that is not there is refused before anything is measured
    demand = demand_of(config, located, device)
    cache = located.cache if located.cache is not None and not located.missing else None
    step_s = last_step_s(config, located.recipe.schema)
    rates = measure_rates(located.folder if located.cache is not None else None, device=device)
    if cache is not None and device == "cpu":
        batch_size = batch_size_of(config, trajectory_steps(cache.schema))
        step = None if step_s is None else Step(seconds=step_s, cpus=demand.step_cpus)
        windows = windows_for(config, cache.schema)
        rates = replace(rates, served=served_loads(cache, windows, batch_size, step=step))
    planned = partial(
        plan_tiers,
        resources=probe(device=device, path=cache_dir) if resources is None else resources,
        reserve_bytes=config.training.reserve_bytes,
        step_s=step_s,
        rates=rates,
    )
    plan = planned(demand, tier=config.training.tier)
    smaller = smaller_dtypes(located, demand, planned)
    return PlanResult(
        plan=plan,
        records=sum(plan.records_by_tier().values()),
        missing=located.missing,
        smaller=smaller,
        advice=say(smaller, plan, config.precompute.max_error),
        gpus=gpu_table(demand.record_bytes, demand.records) if demand.record_bytes else (),
        on_gpus=say_gpus(demand.record_bytes, demand.records) if demand.record_bytes else "",
        together="" if device == "cpu" else say_together(plan.records_by_tier()["device"], demand.records),
    )


def left_by(plan: Plan, resources: Resources) -> Resources:
    """What a plan leaves to the next one."""
    held = {row.tier: row.bytes for row in plan.rows}
    return replace(
        resources,
        host_bytes=max(0, resources.host_bytes - held["host"]),
        device_bytes=max(0, resources.device_bytes - held["device"]),
    )


def demand_of(config: Config, located: Located, device: str) -> Demand:
    """What training would ask for: records, their size, and what one batch of windows takes."""
    schema, cache = located.recipe.schema, located.cache
    if is_fixed(schema):
        size = float(record_bytes(columns_of(schema)))
    else:
        size = raw_bytes(cache) / len(cache) if cache is not None and len(cache) else 0.0
    quarantined = 0 if cache is None else len(cache.index.quarantined)
    return Demand(
        stored_ratio=None if cache is None else cache.index.stored_ratio,
        elsewhere=None if cache is None else _elsewhere(config, cache, size),
        records=located.recipe.count - quarantined,
        record_bytes=size,
        batch_examples=batch_size_of(config, trajectory_steps(schema)),
        example_bytes=example_bytes(config, schema, size),
        device=device,
        encoded_first=located.missing,
        step_cpus=1.0 if device != "cpu" else float(torch.get_num_threads()),
    )


def _elsewhere(config: Config, cache: Cache, size: float) -> Elsewhere | None:
    """Where the cache lies, if not here, and how training would go through it."""
    steps = trajectory_steps(cache.recipe.schema)
    windows = windows_for(config, cache.recipe.schema)
    each = 1 if windows is None else windows.count(steps)
    example = example_bytes(config, cache.recipe.schema, size)
    return elsewhere_of(
        cache,
        parse_order(config.training.order, world=1, example_bytes=max(1, int(example))),
        examples=max(1, each * len(cache)),
        example_bytes=example,
        step_examples=batch_size_of(config, steps),
    )


def example_bytes(config: Config, schema: Schema, size: float) -> float:
    """Bytes of one window: its steps of the fields with time, and the other fields whole."""
    if not is_fixed(schema):
        return size
    steps = windows_of(config).horizons[1] + 1
    return float(sum(f.row_bytes * steps if f.time else f.size_bytes() for f in columns_of(schema).values()))
