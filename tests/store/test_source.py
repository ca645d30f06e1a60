"""A cache is a source: its records are the samples, by the numbers that are stored."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

import stoker
from stoker.errors import FormatError, SourceError
from stoker.sources.splits import SplitOf
from stoker.store import make_recipe, open_folder
from stoker.store.cache import Cache
from tests.store.fakes import FakeSource, fill, make_cache


def made(folder: Path, name: str, count: int = 6, dtype: str | None = None) -> Cache:
    items = [{"u": torch.randn(4, 128, generator=torch.Generator().manual_seed(n))} for n in range(count)]
    return stoker.precompute(items, None, cache_dir=folder, name=name, dtype=dtype)


def test_its_samples_are_the_stored_records_of_all_caches(tmp_path: Path) -> None:
    source = FakeSource()
    folder = open_folder(tmp_path, "y", make_recipe(source, None))
    fill(folder, source, [1, 3, 12])
    part, whole = folder.finish(), make_cache(tmp_path)

    found = stoker.CacheSource([part, whole])

    assert len(found) == len(part) + len(whole) == len([*found.keys()]) == len({*found.keys()})
    stored = [(cache, number) for cache in (part, whole) for number in cache.indices.tolist()]
    for index, (cache, number) in enumerate(stored):
        record = cache[number]
        assert {name: values.tolist() for name, values in found.read(index).items()} == {
            name: values.tolist() for name, values in record.items()
        }
        assert str(cache.path) in found.locate(index)
    assert [one for run in found.runs() for one in run] == [*range(len(found))]


def test_a_copy_of_a_cache_holds_the_same_and_identity_follows_what_is_stored(tmp_path: Path) -> None:
    cache = made(tmp_path, "a")
    source = pickle.loads(pickle.dumps(stoker.CacheSource(cache.path)))

    copy = stoker.precompute(source, None, cache_dir=tmp_path / "copies", name="a")

    assert all(torch.equal(copy[n]["u"], cache[n]["u"]) for n in range(6))
    assert stoker.CacheSource(copy).identity() != source.identity()
    assert stoker.CacheSource(str(cache.path)).identity() == source.identity()


@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
def test_quantized_fields_and_bfloat16_are_read_as_float32(tmp_path: Path, dtype: str) -> None:
    cache = made(tmp_path, "a", dtype=dtype)
    source = stoker.CacheSource(cache)

    values = source.read(2)["u"]

    assert (source.schema()["u"].dtype, source.schema()["u"].quantized) == ("float32", False)
    assert values.dtype == np.float32
    assert np.array_equal(values, cache[2]["u"].float().numpy())


def test_a_folder_of_caches_is_split_by_their_names(tmp_path: Path) -> None:
    train, val = made(tmp_path, "a_train", 5), made(tmp_path, "a_val", 2)

    found = {split: SplitOf(stoker.CacheSource(tmp_path), split) for split in ("train", "val")}

    assert {split: len(one) for split, one in found.items()} == {"train": len(train), "val": len(val)}


def test_what_cannot_be_read_together_is_refused(tmp_path: Path) -> None:
    made(tmp_path, "a")
    stoker.precompute([{"v": torch.ones(2)}] * 3, None, cache_dir=tmp_path, name="b")

    with pytest.raises(SourceError, match=r"v \(2,\) float32.* u \(4, 128\) float32"):
        stoker.CacheSource(tmp_path).schema()
    with pytest.raises(FormatError, match="no cache"):
        len(stoker.CacheSource(tmp_path / "none"))
