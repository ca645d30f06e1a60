"""Settings of engines beyond this machine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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


def beside_engine(engine: str, given: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Settings by dotted name that the engine in force takes no notice of, each with what to do instead.

    >>> [name for name, _ in beside_engine("local", {"precompute.ray.address": "auto"})]
    ['precompute.ray.address']
    """
    for name, value in given.items():
        if engine == "local" and name.startswith("precompute.ray.") and value is not None:
            yield name, "Give precompute.engine=ray (--engine ray) with it, or leave it out"
        elif engine == "ray" and name == "precompute.wait" and value is False:
            yield name, "Encoding while training runs is done on this machine. Leave one of them out"
        elif engine == "ray" and name == "precompute.devices" and value:
            yield name, "There precompute.ray.num_gpus says what a task takes. Leave one of them out"
