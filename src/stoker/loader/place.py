"""Where a loader is in its epochs, and what trainers tell that to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NoReturn

from stoker.errors import ConfigError
from stoker.loader.arguments import NOT_BY_NUMBER, whole_numbers


class Place:
    """Epoch and position of the next batch: what a pass moves, `set_epoch` sets and a state restores."""

    def __init__(self) -> None:
        self.at = (0, 0)
        self._restored = False
        """The next pass begins amid its epoch."""

    def set_epoch(self, epoch: object) -> None:
        """Have the next pass serve `epoch`; a restored position in this very epoch is kept.

        Raises:
            ConfigError: It is no number from 0 on.
        """
        (number,) = whole_numbers(epoch=epoch)
        if number < 0:
            raise ConfigError(f"epoch {number} is not one. Expected 0 or more")
        if number != self.at[0]:
            self.at, self._restored = (number, 0), False

    def restore(self, at: tuple[int, int]) -> None:
        """Have the next pass go on at `at`."""
        self.at, self._restored = at, True

    @property
    def amid(self) -> bool:
        """Whether the next pass goes on within an epoch, where a restored state was taken."""
        return self._restored and self.at[1] > 0

    def rewind(self) -> None:
        """An iterator is asked for: an epoch whose pass was abandoned begins again."""
        if not self._restored:
            self.at = (self.at[0], 0)

    def begin(self) -> tuple[int, int]:
        """Where a pass begins whose first batch is asked for."""
        self._restored = False
        return self.at

    def end(self, epoch: int, last: tuple[int, int]) -> None:
        """A pass over `epoch` has no batch after `last`, even if that is not the end of the epoch."""
        if self.at == last and last[0] == epoch:
            self.at = (epoch + 1, 0)


class EpochIterable(ABC):
    """What loaders and mixtures have in common: epochs to set, and no items by number."""

    _place: Place

    @property
    @abstractmethod
    def batch_size(self) -> int:
        """Examples in a full batch of this rank."""

    @abstractmethod
    def __len__(self) -> int:
        """Batches of this rank in an epoch."""

    @property
    def sampler(self) -> EpochSetter:
        """What trainers call `set_epoch` on."""
        return EpochSetter(self)

    @property
    def epoch(self) -> int:
        """The epoch of the next batch."""
        return self._place.at[0]

    def set_epoch(self, epoch: int) -> None:
        """Have the next pass serve `epoch`; a restored position in this very epoch is kept."""
        self._place.set_epoch(epoch)

    def __getitem__(self, _: object) -> NoReturn:
        """Refused: batches come in the order of an epoch."""
        raise ConfigError(NOT_BY_NUMBER)


class EpochSetter:
    """Stands where a `DataLoader` has its sampler."""

    def __init__(self, loader: EpochIterable) -> None:
        self._loader = loader

    def __len__(self) -> int:
        """Batches of this rank in an epoch, times the batch size at most."""
        return len(self._loader) * self._loader.batch_size

    def set_epoch(self, epoch: int) -> None:
        """As `Loader.set_epoch`."""
        self._loader.set_epoch(epoch)
