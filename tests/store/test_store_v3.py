"""Format 3, with compressed shards, stays readable: caches that were checked in as they were then."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from stoker.errors import FormatError
from stoker.store import index, load_recipe, open_cache
from stoker.store.index import load_index
from tests.data.make_store_v3 import CASES, record

STORE = Path(__file__).parents[1] / "data" / "store_v3"


@pytest.mark.parametrize(("name", "schema", "compression"), CASES)
def test_every_record_of_the_checked_in_cache_reads_back(
    name: str, schema: dict, compression: str, tmp_path: Path
) -> None:
    cache = open_cache(STORE / name)
    assert {cache.shard(i).compression for i in range(len(cache.index.shards))} == {compression}
    assert cache.recipe.entries["format"] == 1, "the recipe is that of the records, however they are stored"
    shutil.copytree(cache.path, tmp_path / name / cache.fingerprint)
    (tmp_path / name / cache.fingerprint / "index.json").unlink()

    for found in (cache, open_cache(tmp_path / name)):
        assert found.indices.tolist() == [*range(7)]
        assert found.index.stored_ratio is not None
        assert found.verify().ok
        for number in range(7):
            for field, value in record(schema, number).items():
                assert torch.equal(found[number][field], value)


def test_a_version_without_it_refuses_the_index_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index, "FORMATS", (1, 2))
    folder = next((STORE / "golden").iterdir())

    with pytest.raises(FormatError, match=r"has format 3.*Upgrade stoker"):
        load_index(folder, load_recipe(folder))
