"""Caches as files: those of every format are read, and one that is written now has the bytes of before."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.pins import caches, files, golden
from tests.pins.batches import digest
from tests.pins.names import Loader, open_cache

GOLDEN = golden.load("files")
BATCHES = golden.load("batches")


@pytest.mark.parametrize("case", files.WRITTEN)
def test_a_cache_is_written_as_before(case: str) -> None:
    assert golden.plain(files.CASES[case]()) == GOLDEN[case]


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("case", files.KEPT)
def test_a_cache_written_before_serves_the_batches_of_one_written_now(
    case: str, tier: str, tmp_path: Path
) -> None:
    shutil.copytree(caches.DATA / "caches" / case, tmp_path / case)
    cache = open_cache(tmp_path / case)

    assert cache.fingerprint == caches.get(case).fingerprint
    assert cache.verify().ok
    loader = Loader(cache, 3, tier=tier, shuffle=True, seed=11)
    assert golden.plain(digest([*loader, *loader])) == BATCHES[f"records: {case}"]


def test_every_golden_value_is_compared() -> None:
    assert set(GOLDEN) == set(files.CASES)
