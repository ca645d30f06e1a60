"""The loader of the earlier systems over a set in the memory of a GPU, of images or of rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Generic, Protocol, TypeVar

from stoker.loader import Loader


class CachedSet(Protocol):
    """What a `GPUDataLoader` serves: a `GPUCachedDataset` of images or of rows."""

    shuffles: bool
    """Whether the earlier system shuffled where it was not told."""

    def __len__(self) -> int: ...

    def loader(self, batch_size: int, shuffle: bool = True, drop_last: bool = False, **loader: Any) -> Loader:
        """Return a loader of the set."""
        ...

    def shaped(self, batch: Any) -> dict[str, Any]:
        """Return a batch of that loader under the earlier names."""
        ...


Set = TypeVar("Set", bound=CachedSet)


class GPUDataLoader(Generic[Set]):
    """Batches of a `GPUCachedDataset`; further arguments are those of `Loader`, or of a DataLoader.

    Args:
        dataset: What to serve.
        batch_size, drop_last: As in a DataLoader.
        shuffle: As in a DataLoader; None: as the earlier systems did, images yes, rows no.
    """

    def __init__(
        self,
        dataset: Set,
        batch_size: int = 1,
        shuffle: bool | None = None,
        drop_last: bool = False,
        **loader: Any,
    ) -> None:
        self.dataset, self.batch_size, self.drop_last = dataset, batch_size, drop_last
        shuffle = dataset.shuffles if shuffle is None else shuffle
        self.loader = dataset.loader(batch_size, shuffle=shuffle, drop_last=drop_last, **loader)

    def __len__(self) -> int:
        """Batches in an epoch."""
        return len(self.loader)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        # A generator would keep each batch, and its memory, until the next one is there.
        return map(self.dataset.shaped, self.loader)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that decides the order, as `Loader.set_epoch`."""
        self.loader.set_epoch(epoch)
