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
    local_world: int = 1
    """Ranks on this machine, which share its cores."""
    node: int = 0
    """The number of this machine."""
    nodes: int = 1
    """Machines of the run."""

    @property
    def leads(self) -> bool:
        """Whether this process speaks, and writes what a run writes once."""
        return self.rank == 0

    def tell(self, text: str, what: str) -> list[str]:
        """Say something; what each rank said, in their order.

        Args:
            text: Anything short.
            what: What the ranks are at, for the message when one does not come.

        Raises:
            StalledError: A rank ended, or did not come within the deadline.
        """
        del what
        return [text]

    def sums(self, values: Sequence[float], what: str) -> list[float]:
        """Each value summed over the ranks. Errors as `tell`."""
        del what
        return list(values)

    def mean(self, values: Tensor, what: str) -> Tensor:
        """The mean over the ranks, element by element. Errors as `tell`."""
        del what
        return values

    def any(self, flag: bool, what: str) -> bool:
        """Whether it is so on any rank. Errors as `tell`."""
        return self.sums([float(flag)], what)[0] > 0

    def wrapped(self, module: nn.Module) -> nn.Module:
        """The module, such that gradients of a backward pass are means over the ranks."""
        return module

    @contextmanager
    def waiting(self, what: str) -> Generator[None]:
        """Meanwhile this process may wait for others, in calls that are not ours. Errors as `tell`."""
        del what
        yield


ALONE = Ranks()
"""For a process without other ranks."""


# ----------------------------------------------------------------------------------------------------------
# Which machines of a run see the same files in a folder: found out, not asked.
#
# Each machine leaves a file with a random name, tells it to the others, and looks for theirs. Nothing else
# tells: a path that is equal on two machines may be one folder or two, and a file system that can be shared
# may not be.


_AT = "a look at which machines share the cache folder"


def nodes_that_share(folder: Path, ranks: Ranks) -> list[int]:
    """The machines that see what this one writes into `folder`, itself among them, ascending.

    All ranks are to make this call. A machine that cannot write there shares no folder.

    Raises:
        StalledError: A rank did not come.
    """
    if ranks.nodes == 1:
        return [0]
    mark = folder / f".node-{secrets.token_hex(8)}"
    left = ranks.local_rank == 0 and _leave(mark)
    try:
        told = [
            json.loads(text) for text in ranks.tell(json.dumps([ranks.node, mark.name if left else ""]), _AT)
        ]
        names = {node: name for node, name in told if name}
        seen = [node for node, name in names.items() if (folder / name).exists()] if left else []
        views = [json.loads(text) for text in ranks.tell(json.dumps([ranks.node, seen]), _AT)]
    finally:
        with suppress(OSError):
            mark.unlink()
    sees = {node: frozenset(found) for node, found in views if found}
    mine = sees.get(ranks.node, frozenset())
    both = {node for node in mine if ranks.node in sees.get(node, frozenset())}
    return sorted(both | {ranks.node})


def _leave(mark: Path) -> bool:
    try:
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.write_bytes(b"")
    except OSError:
        return False
    return True
