"""Format 2, with packed fields, stays readable for ever: caches that were checked in as they were then."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from stoker.store import make_recipe, open_cache
from tests.data.make_store_v1 import QUARANTINED, GoldenSource
from tests.data.make_store_v2 import CASES, record

STORE = Path(__file__).parents[1] / "data" / "store_v2"


@pytest.mark.parametrize(("name", "schema", "dtype"), CASES)
def test_every_record_of_the_checked_in_cache_reads_back(name: str, schema: dict, dtype: str) -> None:
    cache = open_cache(STORE / name)

    assert cache.recipe.entries["format"] == 2
    assert cache.indices.tolist() == [0, 1, 2, 3, 4, 6]
    assert cache.quarantined[QUARANTINED].error == "OSError: torn"
    for number in cache.indices.tolist():
        for field, value in record(schema, number, dtype).items():
            assert cache[number][field].dtype == value.dtype
            assert torch.equal(cache[number][field], value)
    assert cache.verify().bad == []
    assert {error["max"] for error in cache.index.error.values()} == {0.0}


@pytest.mark.parametrize(("name", "schema", "dtype"), CASES)
def test_its_index_can_be_made_again(name: str, schema: dict, dtype: str, tmp_path: Path) -> None:
    cache = open_cache(STORE / name)
    shutil.copytree(cache.path, tmp_path / name / cache.fingerprint)
    (tmp_path / name / cache.fingerprint / "index.json").unlink()

    again = open_cache(tmp_path / name)

    assert again.indices.tolist() == cache.indices.tolist()
    assert again.statistics == cache.statistics


@pytest.mark.parametrize(("name", "schema", "dtype"), CASES)
def test_its_recipe_is_what_the_same_source_gives_today(name: str, schema: dict, dtype: str) -> None:
    assert open_cache(STORE / name).recipe == make_recipe(GoldenSource(schema), None, dtype=dtype)  # type: ignore[arg-type]


def test_it_is_small() -> None:
    assert sum(path.stat().st_size for path in STORE.rglob("*") if path.is_file()) < 150_000
