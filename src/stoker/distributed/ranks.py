"""What the ranks of a run do together. A single process does the same without waiting.

Whatever is agreed on is the same on every rank to the last bit: values are gathered and summed in the order
of ranks by each of them.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

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
