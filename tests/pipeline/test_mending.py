"""A shard that is gone, or removed as an error advised, is made again by the commands that need it."""

from __future__ import annotations

import pytest

from stoker.errors import CorruptError
from stoker.pipeline.precompute import fill_caches, precompute_config
from stoker.store import open_cache
from tests.pipeline.conftest import Configure


@pytest.mark.parametrize("retry", [True, False], ids=["precompute", "train"])
@pytest.mark.parametrize("damaged", [True, False], ids=["damaged", "lost"])
def test_precompute_and_train_make_a_removed_shard_again(
    configure: Configure, retry: bool, damaged: bool
) -> None:
    config = configure("data.split=train")
    cache = next(c.cache for c in precompute_config(config, splits=["train"]).caches)
    first = cache[0]
    entry = cache.index.shards[0]
    path = cache.path / entry.file
    if damaged:
        data = bytearray(path.read_bytes())
        data[cache.shard(0).columns[next(iter(first))].offset] ^= 1
        path.write_bytes(data)
        with pytest.raises(CorruptError, match=rf"{path.name}.*verify .* --repair"):
            open_cache(cache.path)[0]
    path.unlink()

    (mended,) = fill_caches(config, ["train"], training=not retry)

    assert (mended.encoded, mended.reused) == (entry.rows, len(cache) - entry.rows)
    assert mended.cache.verify().ok
    assert {name: value.tolist() for name, value in open_cache(cache.path)[0].items()} == {
        name: value.tolist() for name, value in first.items()
    }
