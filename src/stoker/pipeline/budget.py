"""Whether a run kept its budget of waiting (`training.max_stall`), and what would have helped where not."""

from __future__ import annotations

from stoker.config import Config
from stoker.pipeline.build import device_of
from stoker.pipeline.locate import Located
from stoker.pipeline.plan import demand_of
from stoker.plan import measure_rates, plan_tiers, probe
from stoker.plan.cure import Waiting, over_budget
from stoker.store import Cache
from stoker.train.config import TrainReport


def verdict_of(config: Config, cache: Cache, report: TrainReport) -> str | None:
    """What is wrong with a run's stall, and the cure; None: it is within `training.max_stall`, if set.

    Args:
        cache: The one that was trained on.
    """
    budget = config.training.max_stall
    if budget is None or report.stall is None or report.step_s is None or report.stall <= budget:
        return None
    device = device_of(config)
    located = Located(recipe=cache.recipe, folder=cache.path, cache=cache)
    plan = plan_tiers(
        demand_of(config, located, device),
        probe(device=device, path=cache.path),
        reserve_bytes=config.training.reserve_bytes,
        step_s=max(report.step_s, 1e-9),
        rates=measure_rates(cache.path, device=device),
    )
    waiting = Waiting(
        stall=report.stall,
        step_s=report.step_s,
        wait_s=sum(report.parts.values()),
        parts=report.parts,
        tier=report.tier,
    )
    return over_budget(waiting, budget, plan)
