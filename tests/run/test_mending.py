"""A shard that is gone, or removed as an error advised, is made again by the commands that need it."""

from __future__ import annotations

import pytest

from stoker.errors import CorruptError
from stoker.run.context import Run
from stoker.run.precompute import fill_caches, precompute_config
from stoker.store import Cache, open_cache
from stoker.store.maintain import repair
from tests.run.conftest import Configure


@pytest.mark.parametrize("retry", [True, False], ids=["precompute", "train"])
@pytest.mark.parametrize("damaged", [True, False], ids=["damaged", "lost"])
def test_precompute_and_train_make_a_removed_shard_again(
    configure: Configure, retry: bool, damaged: bool
) -> None:
    config = configure("data.split=train")
    cache = next(c.cache for c in precompute_config(Run(config), splits=["train"]).caches)
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

    (mended,) = fill_caches(Run(config), ["train"], training=not retry)

    assert (mended.encoded, mended.reused) == (entry.rows, len(cache) - entry.rows)
    assert mended.cache.verify().ok
    assert {name: value.tolist() for name, value in open_cache(cache.path)[0].items()} == {
        name: value.tolist() for name, value in first.items()
    }


def flip(cache: Cache, number: int) -> None:
    """Damage one record where it serves from."""
    place = cache._find(number)
    assert place is not None
    shard = cache.shard(place[0], fresh=True)
    column = shard.columns["latent"]
    with (cache.path / shard.name).open("r+b") as file:
        file.seek(column.offset + place[1] * column.row_bytes)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))


def test_damage_that_precompute_meets_is_encoded_again_in_the_same_run(configure: Configure) -> None:
    """The statistics of a shard with a record set aside are counted anew, which reads its other records."""
    config = configure("data.split=train")
    (first,) = fill_caches(Run(config), ["train"])
    numbers = first.cache.indices.tolist()
    before = {number: first.cache[number]["latent"].tolist() for number in numbers}
    flip(first.cache, numbers[1])
    assert repair(first.cache.path).missing == [numbers[1]]
    flip(open_cache(first.cache.path, require_complete=False), numbers[3])

    (mended,) = fill_caches(Run(config), ["train"])

    assert (mended.cache.complete, mended.encoded) == (True, 2)
    assert mended.cache.verify().ok
    assert {number: open_cache(first.cache.path)[number]["latent"].tolist() for number in numbers} == before
