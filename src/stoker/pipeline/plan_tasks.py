"""Where the records of several tasks would be served from, each in the memory that those before it leave."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stoker.config import Config
from stoker.pipeline.build import device_of, tasks_of
from stoker.pipeline.folders import cache_dir_of, require_folder
from stoker.pipeline.locate import locate
from stoker.pipeline.plan import PlanResult, left_by, plan_located
from stoker.plan import probe
from stoker.plan.tiers import TIERS
from stoker.schema import Json
from stoker.sources.files import canonical_split


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskPlans:
    """The plans of all tasks."""

    plans: Mapping[str, PlanResult]
    """By task, in the order of the settings."""

    @property
    def reason(self) -> str:
        """The decisions in words."""
        return "; ".join(f"{task}: {plan.reason}" for task, plan in self.plans.items())

    def to_json(self) -> dict[str, Json]:
        """The keys of one plan, summed over the tasks, and each task's own below `tasks`.

        `predicted_stall` is that of the task whose steps wait longest; null until all are known.
        """
        every = list(self.plans.values())
        stalls = [each.to_json()["predicted_stall"] for each in every]
        known = [stall for stall in stalls if isinstance(stall, float)]
        return {
            "tiers": {tier: sum(each.plan.records_by_tier()[tier] for each in every) for tier in TIERS},
            "bytes": sum(row.bytes for each in every for row in each.plan.rows),
            "reason": self.reason,
            "predicted_stall": max(known) if len(known) == len(stalls) else None,
            "records": sum(each.records for each in every),
            "missing": sum(each.missing for each in every),
            "tasks": {task: each.to_json() for task, each in self.plans.items()},
        }


def plan_tasks(config: Config) -> TaskPlans:
    """Plan the training split of every task.

    Raises:
        ConfigError: The cache folder is not a folder.
        ResourceError: The tier asked for cannot hold them.
        StokerError: As `locate`.
    """
    plans: dict[str, PlanResult] = {}
    cache_dir = require_folder(cache_dir_of(config), "training.latent_cache_dir")
    resources = probe(device=device_of(config), path=cache_dir)
    for task in tasks_of(config):
        own = config.for_task(task)
        split = canonical_split(own.data.wanted_splits[0])
        plans[task] = plan_located(own, locate(own, task, split), resources)
        resources = left_by(plans[task].plan, resources)
    return TaskPlans(plans=plans)
