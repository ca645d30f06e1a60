"""Stored records as a map-style `Dataset`, for trainers whose samplers decide what comes next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch.utils.data import Dataset

from stoker.store.cache import Cache, served_indices

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor


class CacheDataset(Dataset["dict[str, Tensor]"]):
    """The records of a cache that a `Loader` serves, item after item, every byte checked.

    Items are numbered from 0 without gaps; `indices` has the sample index of each. Quarantined samples are
    left out, and samples that a joined table leaves out.
    """

    def __init__(self, records: Any) -> None:
        self.records = records
        """The cache, or the caches joined by `stoker.zip`."""

    @property
    def indices(self) -> NDArray[np.int64]:
        """Sample index of each item, `(len(self),)`."""
        return served_indices(self.records) if isinstance(self.records, Cache) else self.records.indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, item: int) -> dict[str, Tensor]:
        """Return an item, `{field: tensor}`; negative ones count from the end.

        Raises:
            IndexError: There is no such item.
        """
        return self.records[int(self.indices[item])]

    def __getitems__(self, items: Sequence[int]) -> list[dict[str, Tensor]]:
        """Return several items, read in the order in which they are stored; a `DataLoader` calls this."""
        found = {item: self[item] for item in sorted({*items})}
        return [found[item] for item in items]

    def __repr__(self) -> str:
        return f"CacheDataset({self.records!r})"
