"""What the ranks of a run do together, and which rank a process is. This module does not import torch.

Whatever is agreed on is the same on every rank to the last bit: values are gathered and summed in the order
of ranks by each of them.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor, nn


class Ranks:
    """One process, alone."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    """The number of this rank's GPU."""
    local_world_size: int = 1
    """Ranks on this machine, which share its cores."""
    node_rank: int = 0
    """The index of this machine."""
    num_nodes: int = 1
    """Machines of the run."""

    @property
    def is_rank_zero(self) -> bool:
        """True if this process speaks, and writes what a run writes once."""
        return self.rank == 0

    def all_gather(self, text: str, what: str) -> list[str]:
        """Return the texts of all ranks, in their order.

        Args:
            text: Of this rank; short.
            what: What the ranks are doing, for the message when one does not come.

        Raises:
            StalledError: A rank ended, or did not come within the timeout.
        """
        del what
        return [text]

    def all_sum(self, values: Sequence[float], what: str) -> list[float]:
        """Each value summed over the ranks. Errors as `all_gather`."""
        del what
        return list(values)

    def all_mean(self, values: Tensor, what: str) -> Tensor:
        """Return the mean over the ranks, element by element. Errors as `all_gather`."""
        del what
        return values

    def any(self, flag: bool, what: str) -> bool:
        """Return True if it is so on any rank. Errors as `all_gather`."""
        return self.all_sum([float(flag)], what)[0] > 0

    def data_parallel(self, module: nn.Module) -> nn.Module:
        """Return the module, such that gradients of a backward pass are means over the ranks."""
        return module

    @contextmanager
    def waiting(self, what: str) -> Generator[None]:
        """Name what this process waits for, in calls that are not ours. Errors as `all_gather`."""
        del what
        yield


SINGLE_PROCESS = Ranks()
"""For a process without other ranks."""


# ----------------------------------------------------------------------------------------------------------
# Which machines of a run see the same files in a folder: found out, not asked.
#
# Each machine leaves a file with a random name, tells it to the others, and looks for theirs. Nothing else
# tells: a path that is equal on two machines may be one folder or two, and a file system that can be shared
# may not be.


_AT = "a look at which machines share the cache folder"


def nodes_that_share(folder: Path, ranks: Ranks) -> list[int]:
    """Return the machines that see what this one writes into `folder`, itself among them, ascending.

    All ranks are to make this call. A machine that cannot write there shares no folder.

    Raises:
        StalledError: A rank did not come.
    """
    if ranks.num_nodes == 1:
        return [0]
    mark = folder / f".node-{secrets.token_hex(8)}"
    left = ranks.local_rank == 0 and _leave(mark)
    try:
        told = [
            json.loads(text)
            for text in ranks.all_gather(json.dumps([ranks.node_rank, mark.name if left else ""]), _AT)
        ]
        names = {node: name for node, name in told if name}
        seen = [node for node, name in names.items() if (folder / name).exists()] if left else []
        views = [json.loads(text) for text in ranks.all_gather(json.dumps([ranks.node_rank, seen]), _AT)]
    finally:
        with suppress(OSError):
            mark.unlink()
    sees = {node: frozenset(found) for node, found in views if found}
    mine = sees.get(ranks.node_rank, frozenset())
    both = {node for node in mine if ranks.node_rank in sees.get(node, frozenset())}
    return sorted(both | {ranks.node_rank})


def _leave(mark: Path) -> bool:
    try:
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.write_bytes(b"")
    except OSError:
        return False
    return True


# ----------------------------------------------------------------------------------------------------------
# Which rank of how many a process is. This module does not import torch.


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
            f"WORLD_SIZE is {environ['WORLD_SIZE']}, but {', '.join(lacking)} is not set",
            hint="Start with `torchrun --nproc-per-node N -m stoker ...`, or unset WORLD_SIZE to run one "
            "process",
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
            f"RANK={rank} of WORLD_SIZE={world_size}, LOCAL_RANK={local_rank} of "
            f"LOCAL_WORLD_SIZE={local_world_size}",
            hint="Expected ranks below their number, as torchrun sets them",
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
