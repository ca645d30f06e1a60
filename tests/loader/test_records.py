"""Where records lie, over many shards."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from stoker.loader.records import find_records, lengths_of
from tests.store.fakes import RAGGED, FakeSource, make_cache


@pytest.mark.parametrize("chosen", [None, [9, 2, 2, 15, 0]])
def test_records_by_shard_and_their_lengths(chosen: list[int] | None, tmp_path: Path) -> None:
    cache = make_cache(tmp_path, FakeSource(RAGGED), shard_bytes=1, group=1)
    assert len(cache.index.shards) == 16

    places = find_records(cache, chosen)

    found = dict(places.by_shard())
    assert [*found] == places.shards()
    for shard, own in found.items():
        assert own.tolist() == np.flatnonzero(places.shard == shard).tolist()
    wanted = cache.indices if chosen is None else chosen
    assert lengths_of(cache, places, "tokens").tolist() == [len(cache[n]["tokens"]) for n in wanted]
    assert cache.lengths("tokens").tolist() == [len(cache[n]["tokens"]) for n in cache.indices]


def test_each_shard_is_opened_once_for_its_lengths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make_cache(tmp_path, FakeSource(RAGGED), shard_bytes=1, group=1)
    opened: list[int] = []
    plain = type(cache).shard
    monkeypatch.setattr(type(cache), "shard", lambda self, i: opened.append(i) or plain(self, i))

    lengths_of(cache, find_records(cache, None), "tokens")

    assert sorted(opened) == [*range(16)]
