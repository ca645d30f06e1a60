"""Which rank of how many a process is. This module does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stoker.errors import ConfigError

NEEDED = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What a launcher sets in addition to WORLD_SIZE."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnvironment:
    """One process among those of a run."""

    rank: int
    world_size: int
    local_rank: int
    """Its number on this machine, which is that of its GPU."""
    local_world_size: int
    """Ranks on this machine."""
    node_rank: int = 0
    """The index of this machine among those of the run."""
    num_nodes: int = 1
    """Machines of the run."""
    host: str
    """Where the ranks meet."""
    port: int
    launcher_store: bool
    """The launcher keeps the meeting point open, so that it outlives every rank; else rank 0 does."""
    attempt: str
    """Tells what earlier starts of the same ranks left at the meeting point from what is said now."""


def find_rank_environment(environ: Mapping[str, str]) -> RankEnvironment | None:
    """Return the environment that a launcher gave this process; None: it runs alone.

    >>> find_rank_environment({"WORLD_SIZE": "1", "RANK": "0"}) is None
    True

    Raises:
        ConfigError: WORLD_SIZE is above 1, and the rest is missing or makes no sense.
    """
    if environ.get("WORLD_SIZE", "1") in ("", "1"):
        return None
    lacking = [name for name in NEEDED if not environ.get(name)]
    if lacking:
        raise ConfigError(
            f"WORLD_SIZE is {environ['WORLD_SIZE']}, but {', '.join(lacking)} is not set. Start with "
            "`torchrun --nproc-per-node N -m stoker ...`, or unset WORLD_SIZE to run one process"
        )
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
    try:
        rank, world_size, local_rank, local_world_size, port = (int(environ[name]) for name in names)
        node, nodes = _node(environ, rank, world_size, local_world_size)
    except ValueError as error:
        found = ", ".join(f"{name}={environ[name]}" for name in names)
        raise ConfigError(f"{found}: expected whole numbers, as torchrun sets them") from error
    if not (
        0 <= rank < world_size
        and 0 <= local_rank < local_world_size <= world_size
        and 0 <= node < nodes <= world_size
    ):
        raise ConfigError(
            f"RANK={rank} of WORLD_SIZE={world_size}, LOCAL_RANK={local_rank} of LOCAL_WORLD_SIZE="
            f"{local_world_size}. Expected ranks below their number, as torchrun sets them"
        )
    return RankEnvironment(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        node_rank=node,
        num_nodes=nodes,
        host=environ["MASTER_ADDR"],
        port=port,
        launcher_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=f"{environ.get('TORCHELASTIC_RUN_ID', '')}/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}",
    )


def _node(environ: Mapping[str, str], rank: int, world_size: int, local_world_size: int) -> tuple[int, int]:
    """Return node rank and count as torchrun gives them; other launchers number ranks node by node."""
    if environ.get("GROUP_RANK") and environ.get("GROUP_WORLD_SIZE"):
        return int(environ["GROUP_RANK"]), int(environ["GROUP_WORLD_SIZE"])
    return rank // max(1, local_world_size), -(-world_size // max(1, local_world_size))
