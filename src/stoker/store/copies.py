"""Copy records from the shards of one cache into another shard, with everything that is known of them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.schema import numpy_dtype
from stoker.store.cache import Cache
from stoker.store.convert import StoredRows, from_array
from stoker.store.shard_read import Shard
from stoker.store.shard_write import OpenShard


def copy_rows(out: OpenShard, cache: Cache, table: NDArray[np.int64]) -> None:
    """Append records of `cache` to `out`; each is checked against its sums as it is read.

    Bits, conversion errors, marks and the digests of their samples stay.

    Args:
        out: The shard that is being filled, of the same schema.
        cache: Where the records are.
        table: `(n, 3)`: the part-local number to store a record under, its shard in `cache`, and its row.

    Raises:
        CorruptError: A record is damaged; nothing was appended.
    """
    numbers, places = table[:, 0].copy(), table[:, 1:].tolist()
    origins = {i: _Origin(cache.shard(i)) for i in dict.fromkeys(table[:, 1].tolist())}
    records = {name: _read(cache, name, origins, places) for name in cache.recipe.columns}
    contents = np.array([origins[i].contents_of(row) for i, row in places], np.uint64).reshape(-1, 2)
    out.add(numbers, records, 0, len(table), contents=contents)
    pairs = zip(numbers.tolist(), places, strict=True)
    out.mark([number for number, (i, row) in pairs if origins[i].is_marked(row)])


class _Origin:
    """Errors, digests and marks of the records of a shard. It does not hold the shard open."""

    def __init__(self, shard: Shard) -> None:
        self.error = shard.described("error")
        self._numbers, self._contents = shard.numbers(), shard.contents
        self._marked = frozenset(shard.marked.tolist())

    def contents_of(self, row: int) -> tuple[int, int]:
        """Return the digest of a record's raw sample; zeros: unknown."""
        return (*self._contents[row].tolist(),) if len(self._contents) else (0, 0)

    def is_marked(self, row: int) -> bool:
        """Return whether a record was encoded in a smaller group than the recipe's."""
        return bool(self._marked) and int(self._numbers[row]) in self._marked


def _read(cache: Cache, name: str, origins: dict[int, _Origin], places: list[list[int]]) -> StoredRows:
    f = cache.recipe.columns[name]
    lengths = [cache.shard(i).length(name, row) for i, row in places]
    ends = np.cumsum([0, *(length * f.row_bytes for length in lengths)]).tolist()
    data: Any = np.empty(ends[-1], np.uint8)
    view = memoryview(data)
    for (i, row), length, begin, end in zip(places, lengths, ends, ends[1:], strict=False):
        cache.shard(i).read_into(name, row, 0, length, view[begin:end])
    none = {"max": 0.0, "rms": 0.0}  # what is said of a packed field, not of its scales
    errors = [origins[i].error.get(name, none) for i, _ in places]
    return StoredRows(
        values=from_array(data.view(numpy_dtype(f.dtype)), f.dtype),
        starts=[end // f.itemsize for end in ends],
        lengths=lengths,
        # What the shard says of its worst record stands for each of them.
        max_error=np.array([error["max"] for error in errors]),
        rms_error=np.array([error["rms"] for error in errors]),
    )
