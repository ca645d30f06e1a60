"""Many processes and kill -9 at random: what a mirror holds is right, and no writer loses another's work."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.store import make_recipe, open_cache, open_folder
from stoker.store.storage import attach_mirror
from stoker.units import MIB
from tests.store.fakes import fill
from tests.store.mirror_rounds import SOURCE, storm, write
from tests.store.test_block_map import check as check_map
from tests.store.test_mirror import check

pytestmark = [pytest.mark.slow, pytest.mark.chaos]
SECONDS = 40.0


@pytest.mark.timeout(400)
def test_workers_of_one_mirror_smaller_than_the_cache_survive_kills(tmp_path: Path) -> None:
    url = f"file://{tmp_path / 'there'}"
    folder = open_folder(attach_mirror(url, tmp_path / "a"), "x", make_recipe(SOURCE, None, dtype=None))
    fill(folder, SOURCE, shard_bytes=3 * MIB)
    path = folder.finish().path
    root = attach_mirror(url, tmp_path / "b", 6 * MIB)

    failed = storm("read", url, [tmp_path / "b"] * 3, seconds=SECONDS, seed=1)

    assert failed == []
    cache = open_cache(root / "x")
    for entry in cache.index.shards:
        truth = (tmp_path / "there" / "x" / path.name / entry.file).read_bytes()
        check_map(cache.path, truth, entry.file)
    check(cache, SOURCE)
    assert cache.verify().ok


@pytest.mark.timeout(400)
def test_writers_on_several_machines_survive_kills(tmp_path: Path) -> None:
    url = f"file://{tmp_path / 'there'}"
    machines = [tmp_path / name for name in "abc"]

    failed = storm("write", url, machines, seconds=SECONDS, seed=2)
    write(url, str(tmp_path / "d"), 3)

    assert failed == []
    cache = open_cache(attach_mirror(f"{url}/x", tmp_path / "e"))
    check(cache, SOURCE)
    assert cache.verify().ok
