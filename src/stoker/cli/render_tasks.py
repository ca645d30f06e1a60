"""Results of several tasks as people read them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape

from stoker.cli import render
from stoker.units import format_bytes, format_count

if TYPE_CHECKING:
    from stoker.pipeline.plan_tasks import TaskPlans
    from stoker.pipeline.precompute import PrecomputeResult
    from stoker.pipeline.train import TrainResult


COLUMNS = {
    "val_nrmse": "NRMSE",
    "persistence_nrmse": "persistence",
    "rollout_nrmse": "roll-out",
    "rollout_persistence_nrmse": "persistence",
    "physical_nrmse": "physical",
    "physical_persistence_nrmse": "persistence",
    "reconstruction_nrmse": "encoder's own",
}
"""Errors of a task in the order of their columns; those in physical space are there with a decoder."""


def precompute(result: PrecomputeResult, console: Console) -> None:
    """The caches, then the tasks that failed."""
    render.precompute(result, console)
    for failure in result.failed:
        console.print(escape(f"task {failure.task} failed: {failure.to_json()['error']}"), soft_wrap=True)


def plan(result: TaskPlans, console: Console) -> None:
    """A row for each task and tier that holds some of it, then the reasons."""
    rows: list[render.Cells] = [render.bold("task", "tier", "records", "bytes")]
    for task, each in result.plans.items():
        for row in each.plan.rows:
            if row.records:
                rows.append((escape(task), row.tier, format_count(row.records), format_bytes(row.bytes)))
    render.table(console, rows, fixed=4, right=range(2, 4), gap=2)
    for task, each in result.plans.items():
        console.print(escape(f"{task}: {each.reason}"), soft_wrap=True)


def train(result: TrainResult, console: Console) -> None:
    """What a run came to, then each task's own errors."""
    render.train(result, console)
    tasks = result.report.tasks
    names = [name for name in COLUMNS if any(name in errors for errors in tasks.values())]
    rows: list[render.Cells] = [render.bold("task", *(COLUMNS[name] for name in names))]
    for task, errors in tasks.items():
        rows.append((escape(task), *(_figure(errors.get(name)) for name in names)))
    if tasks:
        render.table(console, rows, fixed=len(names) + 1, right=range(1, len(names) + 1), gap=2)


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
