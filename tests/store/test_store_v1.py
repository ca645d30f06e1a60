"""Format 1 stays readable for ever: a cache that was checked in, byte by byte as it was then."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from stoker.store import make_recipe, open_cache
from stoker.store.values import torch_dtype
from tests.data.make_store_v1 import NAME, QUARANTINED, RAGGED, SCHEMA, GoldenSource, record

STORE = Path(__file__).parents[1] / "data" / "store_v1"
CASES = [pytest.param(NAME, SCHEMA, id="fixed"), pytest.param(f"{NAME}_ragged", RAGGED, id="ragged")]


@pytest.mark.parametrize(("name", "schema"), CASES)
def test_every_record_of_the_checked_in_cache_reads_back(name: str, schema: dict) -> None:
    cache = open_cache(STORE / name)

    assert cache.indices.tolist() == [0, 1, 2, 3, 4, 6]
    assert cache.quarantined[QUARANTINED].error == "OSError: torn"
    for number in cache.indices.tolist():
        for field, value in record(schema, number).items():
            assert torch.equal(cache[number][field], value.to(torch_dtype(cache.schema[field].dtype)))
    assert cache.verify().bad == []


@pytest.mark.parametrize(("name", "schema"), CASES)
def test_its_index_can_be_made_again(name: str, schema: dict, tmp_path: Path) -> None:
    cache = open_cache(STORE / name)
    copy = tmp_path / name / cache.fingerprint
    shutil.copytree(cache.path, copy)
    (copy / "index.json").unlink()

    again = open_cache(tmp_path / name)

    assert again.indices.tolist() == cache.indices.tolist()
    assert again.statistics == cache.statistics
    assert again.quarantined == cache.quarantined


def test_its_recipe_is_what_the_same_source_gives_today() -> None:
    """Otherwise every cache of format 1 would be encoded anew after an update."""
    today = make_recipe(GoldenSource(SCHEMA), None, dtype={"latent": "float16", "half": "bfloat16"})  # type: ignore[arg-type]

    assert open_cache(STORE / NAME).recipe == today


def test_it_is_small() -> None:
    assert sum(path.stat().st_size for path in STORE.rglob("*") if path.is_file()) < 60_000
