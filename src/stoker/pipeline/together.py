"""How the ranks of a run share its steps and its validation set.

A run keeps the global batch that it was begun with: `training.batch_size` times the ranks at its beginning.
So the same command goes on with another number of ranks where it stopped, over the same global batches.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stoker.config import Config
from stoker.errors import ConfigError
from stoker.pipeline.build import device_of
from stoker.pipeline.diary import run_dir_of, unfinished
from stoker.pipeline.locate import batch_size_of, trajectory_steps
from stoker.plan.devices import encode_on, require_devices
from stoker.plan.resources import use_device
from stoker.scale.ranks import Ranks
from stoker.scale.storage import nodes_that_share
from stoker.store import Cache
from stoker.store.remote import is_url

log = logging.getLogger("stoker")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """Which part of a run's steps is this rank's."""

    resume: bool
    """An interrupted run of these settings goes on."""
    begun: int
    """Ranks that the run was begun with."""
    batch_size: int
    """Examples of one rank in one step."""

    drop_last: bool
    """A last step too short for every rank to have its part is left out, also when one rank goes on alone."""
    order: str
    """Of examples; the parts of a static one are those that the run was begun with."""


def share_steps(config: Config, digest: str, cache: Cache, ranks: Ranks) -> Shared:
    """Decide on rank 0, by its run folder, and check that the global batch can be shared.

    Raises:
        ConfigError: It cannot.
    """
    begun = unfinished(config, digest) if ranks.leads else None
    begun = json.loads(ranks.tell(json.dumps(begun), "the start of training")[0])
    size = batch_size_of(config, trajectory_steps(cache.schema)) * (begun or ranks.world)
    if size % ranks.world:
        raise ConfigError(
            f"{run_dir_of(config)} holds a run of {size} examples a step, begun with {begun} ranks, which "
            f"{ranks.world} cannot share evenly. Go on with a number of ranks that divides {size}, or begin "
            "again in another training.run_dir"
        )
    world, order = begun or ranks.world, config.training.order
    return Shared(
        resume=begun is not None,
        begun=world,
        batch_size=size // ranks.world,
        drop_last=max(world, ranks.world) > 1,
        order=f"static({world})" if order == "static" else order,
    )


def own_trajectories(cache: Cache, ranks: Ranks) -> Sequence[int] | None:
    """The records that this rank validates on: whole ones, so that roll-outs lie on one rank; None: all."""
    if ranks.world == 1:
        return None
    count = len(cache.numbers)
    return cache.numbers[count * ranks.rank // ranks.world : count * (ranks.rank + 1) // ranks.world].tolist()


def cache_sharing(config: Config, ranks: Ranks) -> list[int]:
    """The machines that share the cache folder with this one (an address: all); where not all do, it is said.

    Errors as `nodes_that_share`.
    """
    folder = config.training.latent_cache_dir
    if is_url(folder):
        return list(range(ranks.nodes))
    nodes = nodes_that_share(Path(folder), ranks)
    if ranks.leads and len(nodes) < ranks.nodes:
        log.info(
            "%d of %d machines see the same %s: each of the others encodes all of it for itself. In a folder "
            "that all of them see, each would encode 1/%d",
            len(nodes),
            ranks.nodes,
            folder,
            ranks.nodes,
        )
    return nodes


def encoders_of(config: Config, ranks: Ranks) -> tuple[str, ...]:
    """The devices that encode on this machine: those asked for, else that of each rank here.

    Raises:
        ConfigError: A device that was asked for is not there.
    """
    if config.precompute.devices:
        devices = encode_on(config.precompute.devices)
        if config.precompute.engine == "local":
            require_devices(*devices)
        return devices
    device, count = device_of(config), ranks.local_world
    if count == 1:
        return (config.training.device,)  # `auto` is resolved, and said, where encoding begins
    if not device.startswith("cuda"):
        return (device,) * count
    return tuple(f"cuda:{place}" for place in range(count))


def on_own_device(config: Config, ranks: Ranks) -> Config:
    """The settings with this rank's own GPU, made the current one, where there are several of each."""
    if ranks.world == 1 or device_of(config) != "cuda":
        return config
    own = f"cuda:{ranks.local_rank}"
    use_device(own)
    training = config.training.model_copy(update={"device": own})
    return config.model_copy(update={"training": training})
