"""When losing readers must end: it is the machine or the code then, not the data."""

from __future__ import annotations

from stoker.errors import ReaderError
from stoker.precompute.ledger import ATTEMPTS

_MAX_IN_A_ROW = 16
_LOST_OFTEN = 0.125
"""Readers may be lost on this part of the samples, or on what the settings allow to be quarantined."""


class LossLimits:
    """Compares the readers lost with the samples read.

    Args:
        max_quarantined: Fraction of the samples that the settings allow to fail.
    """

    def __init__(self, max_quarantined: float) -> None:
        self._lost_often = max(_LOST_OFTEN, max_quarantined)
        self._in_a_row = 0
        self.losses = 0
        """Readers that died or were killed."""
        self.read = 0
        """Samples read."""

    def delivered(self, samples: int) -> None:
        """So many samples have been read, some of them a moment ago."""
        self.read += samples
        self._in_a_row = 0

    def lost(self, *, attempt: int) -> None:
        """One more reader is lost, at that attempt at a sample; 0: it had none in hand."""
        self.losses += 1
        self._in_a_row += attempt < ATTEMPTS  # what failed once is expected to fail again

    def check(self, readers: int, quarantined: int, last: str) -> None:
        """Go on while losses stay within what bad samples explain.

        Args:
            readers: Those that are wanted.
            quarantined: Samples set aside by this run.
            last: The last loss in words.

        Raises:
            ReaderError: Too many in a row, or in all.
        """
        few = _MAX_IN_A_ROW + 2 * readers
        if self._in_a_row > few:
            what = f"{self._in_a_row} readers were lost in a row without a sample read"
        elif self.losses > few + ATTEMPTS * self._lost_often * (self.read + quarantined):
            what = (
                f"{self.losses} readers were lost while {self.read} samples were read, more than "
                f"{100 * self._lost_often:g} % of bad samples explains; a larger max_quarantined allows more"
            )
        else:
            return
        raise ReaderError(f"{what}. The last: {last}. What is stored stays; fix the cause and run it again")
