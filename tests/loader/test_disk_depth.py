"""How the disk tier reads: quietly what the page cache has; what it lacks is announced, then waited for."""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from stoker.errors import CorruptError
from stoker.loader import Loader, Windows, disk, record_reads
from stoker.runtime import files
from stoker.store import Cache
from stoker.store.format import LocalFile
from tests.loader.caches import trajectories, write_cache

pytestmark = pytest.mark.usefixtures("twins_alone")


class PageCache:
    """Stands for the system's: it has everything, or nothing."""

    def __init__(self) -> None:
        self.has = True

    def read(self, file: LocalFile, offset: int, outs: Sequence[memoryview[Any]]) -> bool:
        if self.has:
            assert os.preadv(file.fileno(), outs, offset) == sum(map(len, outs))
        return self.has


@pytest.fixture
def page_cache(monkeypatch: pytest.MonkeyPatch) -> PageCache:
    found = PageCache()
    monkeypatch.setattr(LocalFile, "read_cached", lambda *arguments: found.read(*arguments))  # noqa: PLW0108 - tests replace it
    return found


@pytest.fixture
def announced(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Byte ranges that the system was told of."""
    found: list[tuple[int, int]] = []
    monkeypatch.setattr("os.posix_fadvise", lambda _fd, begin, size, _how: found.append((begin, size)))
    return found


def ranges(cache: Cache, field: str, rows: int, first: int, steps: int) -> set[tuple[int, int]]:
    """Where windows of a field that begin at `first` lie in the only shard, for each of its rows."""
    column = cache.shard(0).columns[field]
    size = column.field.row_bytes
    return {(column.offset + row * column.row_bytes + first * size, steps * size) for row in range(rows)}


def served(loader: Any) -> dict[int, dict[str, torch.Tensor]]:
    """What an epoch served of every number."""
    return {
        number: {name: value[place] for name, value in batch.items() if name != "index"}
        for batch in loader
        for place, number in enumerate(batch["index"].tolist())
    }


def assert_right(
    found: dict[int, dict[str, torch.Tensor]],
    fields: dict[str, torch.Tensor],
    chosen: Sequence[int] = range(24),
) -> None:
    assert sorted(found) == [*chosen]
    for number, values in found.items():
        assert values.keys() == fields.keys()
        assert all(torch.equal(value, fields[name][number]) for name, value in values.items())


@pytest.mark.parametrize(("verify", "steps"), [("off", 5), ("always", 400)])
def test_what_is_waited_for_is_announced_byte_for_byte(
    tmp_path: Path, page_cache: PageCache, announced: list[tuple[int, int]], verify: Any, steps: int
) -> None:
    """With sums it is whole blocks that are read: 512 steps of 32 bytes each, of which the record has 400."""
    cache = write_cache(tmp_path, trajectories(6, 400, (16,)), timed=["latent", "time"])
    page_cache.has = False

    list(
        Loader(
            cache,
            batch_size=3,
            tier="disk",
            windows=Windows(stride=4, start_every=396),
            verify=verify,
            shuffle=True,
        )
    )

    assert {*announced} >= ranges(cache, "latent", 6, 0, steps)
    assert len(announced) < 6 * 4 + 1


def test_nothing_is_announced_that_the_page_cache_has(
    tmp_path: Path, page_cache: PageCache, announced: list[tuple[int, int]]
) -> None:
    fields = trajectories(24)
    loader = Loader(write_cache(tmp_path, fields), batch_size=2, tier="disk", shuffle=True)

    assert_right(served(loader), fields)
    assert not announced
    page_cache.has = False
    assert_right(served(loader), fields)
    assert announced


@pytest.mark.parametrize(
    ("chosen", "joined_bytes", "wanted"),
    [
        (range(24), 1 << 20, {10: 4, 14: 4}),
        ([*range(5), *range(15, 20)], 1 << 20, {5: 8}),  # rows 0-4 of one shard, 5-9 of the other
        (range(5, 15), 1 << 20, {5: 8}),  # the same the other way round
        (range(24), 900, {2: 12, 10: 3, 14: 3}),  # two of `latent`, which has 432 bytes a record
    ],
    ids=["all", "some", "others", "large"],
)
def test_neighbours_in_one_shard_are_read_together(
    tmp_path: Path,
    page_cache: PageCache,
    monkeypatch: pytest.MonkeyPatch,
    chosen: Sequence[int],
    joined_bytes: int,
    wanted: dict[int, int],
) -> None:
    """Per field one read in each of two shards, up to a size that fits into a core's cache."""
    monkeypatch.setattr(record_reads, "JOINED_BYTES", joined_bytes)
    fields = trajectories(24)
    cache = write_cache(tmp_path, fields, shards=[10])
    loader = Loader(cache, batch_size=24, tier="disk", shuffle=False, indices=chosen)
    served(loader)  # from now on it is one piece a batch
    asked: Counter[int] = Counter()
    read = page_cache.read

    def counted(file: LocalFile, offset: int, outs: Sequence[memoryview[Any]]) -> bool:
        asked[len(outs)] += 1
        return read(file, offset, outs)

    page_cache.read = counted  # type: ignore[method-assign]
    assert_right(served(loader), fields, chosen)
    assert asked == wanted


@pytest.mark.parametrize(
    "way", ["no advice", "advice refused", "cannot say", "refuses", "has half", "has none"]
)
def test_whatever_the_system_cannot_the_batches_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    read, refused = os.preadv, []

    def refusing(number: int) -> Any:
        def preadv(fd: int, outs: Any, offset: int, flags: int = 0) -> int:
            if flags:
                refused.append(fd)
                raise OSError(number, "no")
            return read(fd, outs, offset)

        return preadv

    def half(fd: int, outs: Any, offset: int, flags: int = 0) -> int:
        return read(fd, [outs[0][: len(outs[0]) // 2]] if flags else outs, offset)

    if way == "no advice":
        monkeypatch.setattr(record_reads, "ADVISED", False)
        monkeypatch.delattr(os, "posix_fadvise")
        monkeypatch.setattr(LocalFile, "read_cached", lambda *_: False)
    elif way == "advice refused":
        monkeypatch.setattr("os.posix_fadvise", lambda *_: os.stat("/nonexistent"))
        monkeypatch.setattr(LocalFile, "read_cached", lambda *_: False)
    elif way == "cannot say":
        monkeypatch.setattr(files, "RWF_NOWAIT", 0)
    elif way == "has half":
        monkeypatch.setattr(os, "preadv", half)
    else:
        monkeypatch.setattr(os, "preadv", refusing(errno.EOPNOTSUPP if way == "refuses" else errno.EAGAIN))
    fields = trajectories(24)
    loader = Loader(write_cache(tmp_path, fields, shards=[10]), batch_size=4, tier="disk", shuffle=True)

    for _ in range(2):
        assert_right(served(loader), fields)
    if way == "refuses":
        assert max(Counter(refused).values()) <= 4, "it is not asked again and again"
    if way == "has none":
        assert len(refused) > 24


@pytest.mark.parametrize(("size", "told"), [(100, 0), (1 << 15, 3)], ids=["small", "large"])
def test_the_system_is_told_once_a_shard_to_read_nothing_around_large_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, told: int
) -> None:
    cache = write_cache(tmp_path, {"x": torch.zeros(12, size)}, shards=(4, 4, 4))
    advice: list[int] = []
    monkeypatch.setattr("os.posix_fadvise", lambda _fd, _begin, _size, how: advice.append(how))

    loader = Loader(cache, batch_size=4, tier="disk", shuffle=True)
    for _ in range(2):
        list(loader)

    assert advice.count(os.POSIX_FADV_RANDOM) == told


@pytest.mark.parametrize("verify", ["always", "first", "off"])
def test_a_large_record_is_compared_piece_by_piece_as_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page_cache: PageCache, verify: Any
) -> None:
    page_cache.has = False
    bags = [torch.randn(rows, 1000) for rows in (999, 64, 0, 301)]  # 4 MB and less
    cache = write_cache(tmp_path, {"bag": bags})
    sizes: list[int] = []
    read = LocalFile.read_into

    def noted(file: LocalFile, offset: int, out: memoryview[Any]) -> None:
        sizes.append(len(out))
        read(file, offset, out)

    loader = Loader(cache, batch_size=2, tier="disk", verify=verify)
    list(loader)
    monkeypatch.setattr(LocalFile, "read_into", noted)
    found = [bag for batch in loader for bag in batch["bag"]]

    assert all(torch.equal(bag, wanted) for bag, wanted in zip(found, bags, strict=True))
    assert max(sizes) <= record_reads.JOINED_BYTES
    assert sum(sizes) >= sum(bag.nbytes for bag in bags)
    assert len(sizes) < 40
    shard = cache.path / cache.index.shards[0].file
    place = cache.shard(0).columns["bag"].offset + 2_000_000
    with shard.open("r+b") as file:
        file.seek(place)
        file.write(b"damaged")
    if verify == "always":
        with pytest.raises(CorruptError, match=r"'bag' of sample 0"):
            list(loader)


@pytest.mark.parametrize(
    ("limit_bytes", "most"), [(1 << 30, 5), (1, 2)], ids=["small batches", "batches beyond it"]
)
def test_batches_that_come_late_are_read_further_ahead_only_while_they_fit_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit_bytes: int, most: int
) -> None:
    cache = write_cache(tmp_path, {"x": torch.arange(48.0).reshape(24, 2)})
    monkeypatch.setattr(disk, "PREFETCH_BYTES", limit_bytes)
    monkeypatch.setattr(disk.PendingBatch, "ready", lambda _: False)
    held = [0]
    seen: list[int] = []
    begin, finish = disk.DiskBatches.begin, disk.DiskBatches.finish

    def counted_begin(*words: Any) -> disk.PendingBatch:
        held[0] += 1
        seen.append(held[0])
        return begin(*words)

    def counted_finish(*words: Any) -> list[Any]:
        held[0] -= 1
        return finish(*words)

    monkeypatch.setattr(disk.DiskBatches, "begin", counted_begin)
    monkeypatch.setattr(disk.DiskBatches, "finish", counted_finish)

    assert sum(len(batch["index"]) for batch in Loader(cache, 2, tier="disk")) == 24

    assert max(seen) == most
