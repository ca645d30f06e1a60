"""Statistics of stored values agree with numpy, whatever shards and orders they came in."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from stoker.schema import Field, canonical_json
from stoker.store.values import Accumulator, summarize, widest_partial
from tests.store.fakes import FakeSource, make_cache


def accumulate(field: Field, *batches: torch.Tensor) -> Accumulator:
    accumulator = Accumulator(field)
    for batch in batches:
        accumulator.update(batch)
    return accumulator


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int64", "uint8", "bool"])
@pytest.mark.parametrize("shape", [(7, 3), (101, 16, 32), (5, 1), (300,), (), (2, 65), (4, 64)])
def test_they_agree_with_numpy(dtype: str, shape: tuple[int, ...]) -> None:
    values = (torch.randn(9, *shape, generator=torch.Generator().manual_seed(0)) * 10 + 3).abs()
    values = values.to(getattr(torch, dtype))

    found = summarize([accumulate(Field(shape=shape, dtype=dtype), values[:4], values[4:]).partial()])

    exact = values.to(torch.float64).numpy()
    assert found["count"] == exact.size
    assert found["nonfinite"] == 0
    assert (found["min"], found["max"]) == (exact.min(), exact.max())
    assert found["mean"] == pytest.approx(exact.mean(), rel=1e-8)
    assert found["std"] == pytest.approx(exact.std(), rel=1e-7)
    channels = shape[-1] if shape and 1 < shape[-1] <= 64 else 1
    if channels == 1:
        assert "channels" not in found
        return
    axes = tuple(range(exact.ndim - 1))
    assert found["channels"]["min"] == exact.min(axes).tolist()
    assert found["channels"]["mean"] == pytest.approx(exact.mean(axes).tolist(), rel=1e-7)
    assert found["channels"]["std"] == pytest.approx(exact.std(axes).tolist(), rel=1e-6)


@pytest.mark.parametrize(
    ("dtype", "low", "high"), [("uint8", 250, 256), ("int8", -128, -120), ("bool", 0, 2)]
)
@pytest.mark.parametrize("shape", [(3, 224, 224), (64, 64, 3), (300, 61), (1,)])
def test_bytes_are_added_up_exactly(dtype: str, low: int, high: int, shape: tuple[int, ...]) -> None:
    drawn = torch.randint(low, high, (5, *shape), generator=torch.Generator().manual_seed(0))
    values = drawn.to(getattr(torch, dtype))

    found = accumulate(Field(shape=shape, dtype=dtype), values[:2], values[2:]).partial()

    channels = shape[-1] if shape[-1] <= 64 else 1
    table = drawn.numpy().reshape(-1, channels)
    assert found["sum"] == table.sum(0).tolist()
    assert found["squares"] == (table * table).sum(0).tolist()


def test_time_is_not_a_channel() -> None:
    found = summarize([accumulate(Field(shape=(8,), dtype="float32", time=True), torch.ones(3, 8)).partial()])

    assert "channels" not in found


def test_values_that_are_not_finite_are_counted_and_left_out() -> None:
    values = torch.tensor([[1.0, math.nan], [3.0, math.inf], [5.0, -math.inf]])
    field = Field(shape=(2,), dtype="float32")

    found = summarize([accumulate(field, values).partial()])

    assert (found["count"], found["nonfinite"]) == (3, 3)
    assert (found["mean"], found["min"], found["max"]) == (3.0, 1.0, 5.0)
    assert found["channels"]["mean"] == [3.0, None]
    canonical_json(found)


def test_nothing_has_no_statistics() -> None:
    field = Field(shape=(0, 3), dtype="float32")

    for partials in ([], [accumulate(field, torch.ones(4, 0, 3)).partial()]):
        found = summarize(partials)
        assert (found["count"], found["mean"], found["min"]) == (0, None, None)


def test_equal_records_have_equal_statistics_whatever_the_shards(tmp_path: Path) -> None:
    field = Field(shape=(33, 7), dtype="float32")
    source = FakeSource({"z": field}, [("a", 40), ("b", 24)])
    texts = set()
    for i, (shard_bytes, group) in enumerate([(1 << 20, 64), (1 << 20, 1), (5000, 3), (1, 5)]):
        cache = make_cache(tmp_path / str(i), source, shard_bytes=shard_bytes, group=group)
        texts.add(canonical_json(cache.statistics))

    assert len(texts) == 1


def test_a_record_stored_twice_counts_once(tmp_path: Path) -> None:
    from stoker.store import open_folder
    from tests.store.fakes import fill

    source = FakeSource()
    cache = make_cache(tmp_path, source)
    before = cache.statistics
    folder = open_folder(tmp_path, "x", cache.recipe)
    fill(folder, source, [3, 4, 11])
    (cache.path / "index.json").unlink()

    assert canonical_json(folder.finish().statistics) == canonical_json(before)


def test_room_for_a_partial_suffices(tmp_path: Path) -> None:
    field = Field(shape=(4, 64), dtype="float32")
    values = torch.from_numpy(np.random.default_rng(0).standard_normal((50, 4, 64)) * -1e-30).float()

    partial = accumulate(field, values).partial()

    assert len(canonical_json(partial)) <= len(canonical_json(widest_partial(field)))
