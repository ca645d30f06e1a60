"""Shards that serve nothing go, whatever the disk and the index are like; nothing else does."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from stoker.store import load_recipe, open_cache
from stoker.store.gc import collect
from stoker.store.index import dump_index, load_index
from stoker.store.storage import idle_seconds
from tests.store.fakes import assert_whole
from tests.store.kill_points import make_old
from tests.store.test_gc import CURRENT, gone, make_fingerprints, make_superseded


def test_gc_itself_is_no_use(tmp_path: Path) -> None:
    path = make_superseded(tmp_path)
    make_old(path)

    collect(tmp_path, dry_run=True)
    assert idle_seconds(path) > 39 * 86400
    assert gone(collect(tmp_path), "shard")

    assert idle_seconds(path) > 39 * 86400


@pytest.mark.parametrize("file", ["recipe.json", "failures-000000000000.jsonl"])
def test_what_an_index_calls_a_shard_and_is_none_stays(tmp_path: Path, file: str) -> None:
    (path,) = make_fingerprints(tmp_path, 1)
    (path / "failures-000000000000.jsonl").write_bytes(b"")
    recipe = load_recipe(path)
    index = load_index(path, recipe)
    extra = replace(index.shards[0], file=file, segments=index.shards[0].segments[:0])
    (path / "index.json").write_bytes(dump_index(replace(index, shards=(*index.shards, extra)), recipe))

    assert collect(tmp_path).removed == []
    assert (path / file).exists()


def test_room_is_made_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index must be written to drop shards; where it cannot, they go first."""
    path = make_superseded(tmp_path)
    real = os.pwrite

    def full_while_there_are_shards(fd: int, data: bytes, offset: int) -> int:
        if len([*path.glob("shard-*")]) > 2:
            raise OSError(28, "No space left on device")
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", full_while_there_are_shards)
    report = collect(tmp_path)
    monkeypatch.undo()

    assert len(gone(report, "shard")) == 7
    cache = open_cache(path)
    assert_whole(cache, CURRENT)
    assert {shard.file for shard in cache.index.shards} == {p.name for p in path.glob("shard-*")}
