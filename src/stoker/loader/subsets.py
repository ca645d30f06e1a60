"""Parts of a cache that stand for the whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError
from stoker.splitmix import Salt, keys_of, stream

if TYPE_CHECKING:
    from stoker.store import Cache


def subset(cache: Cache, fraction: float, *, seed: int = 0) -> NDArray[np.int64]:
    """Sample numbers of a part of the stored records, sorted, for `indices=`.

    Each part of the source (a file, say) gives its share, to within one record. A smaller fraction with the
    same seed is a part of a larger one, so that runs on 1 %, 10 % and all of the data are comparable.

    Raises:
        ConfigError: `fraction` is not above 0 and at most 1.
    """
    if isinstance(fraction, str) or not 0 < fraction <= 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"subset: fraction {fraction!r}. Expected a number above 0 and at most 1")
    numbers = cache.numbers
    keys = keys_of(stream(seed, 0, Salt.SUBSET), numbers)
    ends = np.array([part.offset + part.count for part in cache.recipe.parts])
    part = np.searchsorted(ends, numbers, side="right")
    shuffled = np.lexsort((keys, part))
    sizes = np.bincount(part)
    first = np.cumsum(sizes) - sizes
    # The place of each record among those of its part, 0..1: taking the lowest takes the same share of each.
    place = (np.arange(len(numbers)) - first[part[shuffled]] + 0.5) / sizes[part[shuffled]]
    lowest = np.lexsort((keys[shuffled], place))[: max(1, round(fraction * len(numbers)))]
    return np.sort(numbers[shuffled[lowest]])
