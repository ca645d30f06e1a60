"""How deep the disk tier reads: announced ahead while storage is waited for, quietly from the page cache."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from stoker.loader import Loader, Windows, disk
from stoker.store import Cache, Shard
from tests.loader.caches import trajectories, write_cache


@pytest.fixture
def announced(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Byte ranges that the system was told of."""
    found: list[tuple[int, int]] = []
    monkeypatch.setattr("os.posix_fadvise", lambda _fd, begin, size, _how: found.append((begin, size)))
    return found


def slow(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Make each read wait as a cold disk does."""
    read = getattr(Shard, name)

    def waiting(*arguments: Any, **named: Any) -> Any:
        time.sleep(0.002)
        return read(*arguments, **named)

    monkeypatch.setattr(Shard, name, waiting)


def ranges(cache: Cache, field: str, rows: int, first: int, steps: int) -> set[tuple[int, int]]:
    """Where windows of a field that begin at `first` lie in the only shard, for each of its rows."""
    column = cache.shard(0).columns[field]
    size = column.field.row_bytes
    return {(column.offset + row * column.row_bytes + first * size, steps * size) for row in range(rows)}


def test_what_is_waited_for_is_announced_byte_for_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, announced: list[tuple[int, int]]
) -> None:
    cache = write_cache(tmp_path, trajectories(24), timed=["latent", "time"])
    slow(monkeypatch, "read")
    windows = Windows(stride=8)  # one window a trajectory, from its first step to its last
    for _ in range(2):
        list(Loader(cache, batch_size=8, tier="disk", windows=windows))

    assert {*announced} >= ranges(cache, "latent", 24, 0, 9)
    assert len(announced) == 2 * 24 * 4


def test_nothing_is_announced_once_all_comes_from_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, announced: list[tuple[int, int]]
) -> None:
    monkeypatch.setattr(disk, "WAITED_S", 5.0)  # a busy machine's page cache is slow, and no disk
    cache = write_cache(tmp_path, trajectories(24), timed=["latent", "time"])
    loader = Loader(cache, batch_size=2, tier="disk")
    list(loader)
    assert announced
    announced.clear()
    list(loader)
    assert not announced


def test_a_page_cache_that_goes_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, announced: list[tuple[int, int]]
) -> None:
    loader = Loader(write_cache(tmp_path, trajectories(24)), batch_size=2, tier="disk")
    list(loader)
    announced.clear()
    slow(monkeypatch, "read_into")
    list(loader)
    assert len(announced) > 24


def test_a_system_without_announcements_serves_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stoker.loader.disk.ADVISED", False)
    monkeypatch.delattr(os, "posix_fadvise")
    loader = Loader(write_cache(tmp_path, trajectories(24)), batch_size=4, tier="disk")
    assert sorted(n for batch in loader for n in batch["index"].tolist()) == [*range(24)]
