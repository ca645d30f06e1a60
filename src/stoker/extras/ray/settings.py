"""How precompute uses a Ray cluster. This module does not import Ray."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from stoker.config import Config
from stoker.errors import ConfigError, arg

if TYPE_CHECKING:
    from stoker.extras.ray.engine import RayEngine

Placement: TypeAlias = Literal["spread", "pack"]
_ADDRESS = re.compile(r"auto|(\[[0-9a-fA-F:]+\]|[\w.-]+):\d{1,5}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RaySettings:
    """Which cluster, what a task takes of it, and how long it is waited for.

    Raises:
        ConfigError: A value means nothing.
    """

    address: str | None = None
    """`auto` or `host:port` of a cluster that runs; None: one on this machine, while it is needed."""
    num_cpus: float | None = None
    """CPUs that a task takes; None: as many as torch has threads here, or a GPU's share of its node."""
    num_gpus: float | None = None
    """GPUs that a task takes; None: one where the encoder is to run on `cuda`, else none."""
    max_retries: int = 3
    """How often what a lost worker had may be lost again before the run ends."""
    placement: Placement = "spread"
    """`spread` tasks over nodes, or `pack` one node after the other."""
    connect_s: float = 60.0
    """How long the cluster may take to answer."""
    wait_s: float = 300.0
    """How long the cluster may have no place for any task, and a task may take before it encodes."""
    slice_s: float = 600.0
    """Work in one task at most."""

    def __post_init__(self) -> None:
        for name in ("connect_s", "wait_s", "slice_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is a time above 0 seconds, got {getattr(self, name)!r}")
        if self.max_retries < 0 or (self.num_cpus or 0) < 0 or (self.num_gpus or 0) < 0:
            raise ConfigError(
                f"{arg('max_retries', self.max_retries)}, {arg('num_cpus', self.num_cpus)}, "
                f"{arg('num_gpus', self.num_gpus)}: "
                "expected 0 at least"
            )
        if self.placement not in get_args(Placement):
            raise ConfigError(f"placement is {self.placement!r}, expected {' or '.join(get_args(Placement))}")
        if self.address is not None and self.address.startswith("ray://"):
            raise ConfigError(
                f"address {self.address} is that of a Ray client, which would be far from the cache folder. "
                "Run this on a node of the cluster, or submit it as a Ray job, with address auto"
            )
        if self.address is not None and not _ADDRESS.fullmatch(self.address):
            raise ConfigError(
                f"address is {self.address!r}, expected auto or HOST:PORT, as 10.0.0.1:6379, which "
                "`ray start --head` prints; without one a cluster starts on this machine"
            )


def ray_engine(config: Config) -> RayEngine:
    """Return the engine that the settings in `precompute.ray` describe, to be entered.

    Raises:
        ConfigError: Ray is not installed, or a setting means nothing.
    """
    try:
        from stoker.extras.ray.engine import RayEngine
    except ImportError as error:
        raise ConfigError(
            "precompute.engine=ray (--engine ray) needs Ray. Install it: pip install 'stoker[ray]'"
        ) from error
    wanted = config.precompute.ray
    settings = RaySettings(
        address=wanted.address,
        num_cpus=wanted.num_cpus,
        num_gpus=wanted.num_gpus,
        max_retries=wanted.max_retries,
        placement=wanted.placement,
        connect_s=wanted.connect,
        wait_s=wanted.wait,
        slice_s=wanted.slice,
    )
    return RayEngine(settings)
