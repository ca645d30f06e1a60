"""Settings of engines beyond this machine."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from stoker.config.section import CountInt, NonNegativeFloat, PositiveFloat, SettingsSection


class RayConfig(SettingsSection):
    """Precompute on a Ray cluster, with `precompute.engine: ray` (docs/ray.md)."""

    address: Annotated[str, Field(examples=["auto", "10.0.0.1:6379"])] | None = None
    """`auto` or `host:port` of a cluster that runs; null: one on this machine, while it is needed."""
    num_cpus: NonNegativeFloat | None = None
    """CPUs that a task takes; null: as many as torch has threads here, or a GPU's share of its node."""
    num_gpus: NonNegativeFloat | None = None
    """GPUs that a task takes; null: one where `training.device` is a GPU, else none."""
    max_retries: CountInt = 3
    """How often what a lost worker had may be lost again before the run ends."""
    placement: Literal["spread", "pack"] = "spread"
    """`spread` tasks over nodes, or `pack` one node after the other."""
    connect: PositiveFloat = 60.0
    """Seconds that the cluster may take to answer."""
    wait: PositiveFloat = 300.0
    """Seconds that it may have no place for any task, and that a task may take before it encodes."""
    slice: PositiveFloat = 600.0
    """Seconds of work in one task at most."""
