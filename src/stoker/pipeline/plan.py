"""Where the records of a configuration would be served from; nothing is read but limits and headers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from stoker.config import Config
from stoker.pipeline.build import device_of, tasks_of
from stoker.pipeline.diary import last_step_s
from stoker.pipeline.inspect import shard_bytes
from stoker.pipeline.locate import Located, batch_size_of, locate, trajectory_steps, windows_of
from stoker.plan import Demand, Plan, measure_rates, plan_tiers, probe
from stoker.schema import Json, Schema, columns_of
from stoker.sources.files import canonical_split
from stoker.store.layout import is_fixed, record_bytes
from stoker.units import format_count


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanResult:
    """Where the records of the training split would be served from, once they are encoded."""

    plan: Plan
    records: int
    missing: int
    """Records still to be encoded; the plan counts them as stored."""

    @property
    def reason(self) -> str:
        """The decision in words."""
        first = f"{format_count(self.missing)} records are to be encoded first; " if self.missing else ""
        return first + self.plan.reason

    def to_json(self) -> dict[str, Json]:
        """The keys that scripts rely on."""
        return {
            **self.plan.to_json(),
            "reason": self.reason,
            "records": self.records,
            "missing": self.missing,
        }


def plan_config(config: Config) -> PlanResult:
    """Plan the training split of the first task.

    Raises:
        ResourceError: The tier asked for cannot hold it.
        StokerError: As `locate`.
    """
    split = canonical_split(config.data.wanted_splits[0])
    return plan_located(config, locate(config, tasks_of(config)[0], split))


def plan_located(config: Config, located: Located) -> PlanResult:
    """Plan one cache, whose missing records count as stored."""
    cache_dir, device = Path(config.training.latent_cache_dir), device_of(config)
    plan = plan_tiers(
        demand_of(config, located, device),
        probe(device=device, path=cache_dir),
        tier=config.training.tier,
        reserve_bytes=config.training.reserve_bytes,
        step_s=last_step_s(config, located.recipe.schema),
        rates=measure_rates(located.folder if located.cache is not None else None, device=device),
    )
    records = sum(plan.records_by_tier().values())
    return PlanResult(plan=plan, records=records, missing=located.missing)


def demand_of(config: Config, located: Located, device: str) -> Demand:
    """What training would ask for: records, their size, and what one batch of windows takes."""
    schema, cache = located.recipe.schema, located.cache
    if is_fixed(schema):
        size = float(record_bytes(columns_of(schema)))
    else:
        size = shard_bytes(cache) / len(cache) if cache is not None and len(cache) else 0.0
    quarantined = 0 if cache is None else len(cache.index.quarantined)
    return Demand(
        records=located.recipe.count - quarantined,
        record_bytes=size,
        batch_examples=batch_size_of(config, trajectory_steps(schema)),
        example_bytes=example_bytes(config, schema, size),
        device=device,
        encoded_first=located.missing,
    )


def example_bytes(config: Config, schema: Schema, size: float) -> float:
    """Bytes of one window: its steps of the fields with time, and the other fields whole."""
    if not is_fixed(schema):
        return size
    steps = windows_of(config).horizon + 1
    return float(sum(f.row_bytes * steps if f.time else f.size_bytes() for f in columns_of(schema).values()))
