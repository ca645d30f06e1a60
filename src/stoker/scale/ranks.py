"""What the ranks of a run do together. A single process does the same without waiting.

Whatever is agreed on is the same on every rank to the last bit: values are gathered and summed in the order
of ranks by each of them.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn


class Ranks:
    """One process, alone."""

    rank: int = 0
    world: int = 1
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
