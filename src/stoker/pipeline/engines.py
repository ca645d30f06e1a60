"""Who encodes, as the settings say: this machine, or a cluster."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from stoker.config import Config
from stoker.errors import ConfigError
from stoker.precompute.share import Engine
from stoker.scale.ranks import Ranks
from stoker.scale.ray_settings import RaySettings


@contextmanager
def engine_of(config: Config, ranks: Ranks) -> Generator[Engine | None]:
    """The engine of `precompute.engine`, connected from its first use to the end of the block; None: local.

    Raises:
        ConfigError: Ray is asked for by several ranks at once, or is not installed.
    """
    if config.precompute.engine == "local":
        yield None
        return
    if ranks.world > 1:
        raise ConfigError(
            f"precompute.engine=ray under torchrun: each of {ranks.world} ranks would drive the cluster. Run "
            "`stoker precompute --engine ray` once before, without torchrun"
        )
    try:
        from stoker.scale.ray_engine import RayEngine
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
    with RayEngine(settings) as engine:
        yield engine
