"""What is damaged is set aside, what is good serves on, and what has to be made again is named."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from stoker.errors import ConfigError, CorruptError, FormatError
from stoker.store import Cache, make_recipe, open_cache, open_folder
from stoker.store.cache import rebuild_index
from stoker.store.gc import collect
from stoker.store.maintain import compact, folder_to_repair, repair
from stoker.store.storage import lock_index
from tests.kit import forked as subprocess
from tests.store.fakes import FakeSource, assert_whole, fill, make_cache

ROOT = Path(__file__).parents[2]
SOURCE = FakeSource()


def damage(cache: Cache, number: int) -> Path:
    """Flip a bit of one record."""
    place = next(
        (i, row + number - first - offset)
        for i, shard in enumerate(cache.index.shards)
        for offset in [cache.recipe.parts[shard.part].offset]
        for row, first, count in shard.segments.tolist()
        if first + offset <= number < first + offset + count
    )
    shard = cache.shard(place[0])
    column = shard.columns["latent"]
    path = cache.path / shard.name
    data = bytearray(path.read_bytes())
    data[column.offset + place[1] * column.row_bytes + 5] ^= 4
    path.write_bytes(data)
    return path


def encode_again(cache: Cache) -> Cache:
    folder = open_folder(cache.path.parent.parent, "x", cache.recipe)
    fill(folder, SOURCE, folder.missing().tolist())
    return folder.finish()


def test_a_sound_cache_stays_as_it_is(tmp_path: Path) -> None:
    cache = make_cache(tmp_path)
    before = {p.name: p.read_bytes() for p in cache.path.iterdir() if not p.name.startswith(".claim")}

    report = repair(cache.path)

    assert (report.ok, report.bad, report.records) == (True, [], 16)
    after = {p.name: p.read_bytes() for p in cache.path.iterdir() if not p.name.startswith(".claim")}
    assert after == before


def test_a_damaged_record_is_set_aside_and_its_neighbours_serve(tmp_path: Path) -> None:
    cache = make_cache(tmp_path)
    path = damage(cache, 7)

    report = repair(cache.path)

    assert [(bad.index, bad.shard) for bad in report.bad] == [(7, path.name)]
    assert (report.ok, report.missing) == (False, [7])
    after = open_cache(cache.path, require_complete=False)
    assert after.index.generation == cache.index.generation + 1 == report.generation
    assert_whole(after, SOURCE, {*range(16)} - {7})
    assert after.verify().ok

    whole = encode_again(cache)
    assert_whole(whole, SOURCE)
    assert whole.verify().ok
    assert repair(cache.path).ok


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda p: p.write_bytes(p.read_bytes()[:-1]), id="truncated"),
        pytest.param(lambda p: p.write_bytes(p.read_bytes()[:20] + b"\0" + p.read_bytes()[21:]), id="header"),
        pytest.param(lambda p: p.unlink(), id="gone"),
    ],
)
def test_a_shard_that_cannot_be_used_is_kept_aside_until_its_records_are_back(
    tmp_path: Path, change: object
) -> None:
    cache = make_cache(tmp_path)
    path = cache.path / cache.index.shards[0].file
    served = [n for _, first, count in cache.index.shards[0].segments for n in range(first, first + count)]
    change(path)  # type: ignore[operator]
    was_there = path.exists()

    report = repair(cache.path)

    assert {bad.index for bad in report.bad} == {*served} == {*report.missing}
    assert (report.set_aside, report.lost) == (([path.name], []) if was_there else ([], [path.name]))
    aside = path.with_name(f".damaged-{path.name}")
    assert aside.exists() == was_there
    assert_whole(open_cache(cache.path, require_complete=False), SOURCE, {*range(16)} - {*served})
    del cache
    collect(tmp_path)
    assert aside.exists() == was_there, "its records are not back yet"

    whole = encode_again(open_cache(path.parent, require_complete=False))
    assert_whole(whole, SOURCE)
    del whole
    collect(tmp_path)
    assert not aside.exists()


def test_padding_is_made_zero_again(tmp_path: Path) -> None:
    cache = make_cache(tmp_path)
    (offset, size), *_ = cache.shard(0).padding
    path = cache.path / cache.index.shards[0].file
    good = path.read_bytes()
    data = bytearray(good)
    data[offset + size - 1] = 9
    path.write_bytes(data)
    assert not cache.verify().ok

    report = repair(cache.path)

    assert (report.ok, [bad.index for bad in report.bad]) == (True, [-1])
    assert path.read_bytes() == good


@pytest.mark.parametrize("content", [None, b"{}"], ids=["lost", "damaged"])
def test_the_index_is_made_again(tmp_path: Path, content: bytes | None) -> None:
    cache = make_cache(tmp_path)
    index = cache.path / "index.json"
    index.unlink() if content is None else index.write_bytes(content)

    report = repair(cache.path)

    assert report.ok
    assert report.index
    assert_whole(open_cache(cache.path), SOURCE)


def test_a_record_with_another_good_copy_needs_no_encoding(tmp_path: Path) -> None:
    folder = open_folder(tmp_path, "x", make_recipe(SOURCE, None))
    for begin in range(0, 16, 3):
        fill(folder, SOURCE, range(begin, min(begin + 3, 16)))
    path = folder.finish().path
    compact(path, shard_bytes=10 * 1156)
    damage(open_cache(path), 2)

    report = repair(path)

    assert ([bad.index for bad in report.bad], report.ok) == ([2], True)
    assert_whole(open_cache(path), SOURCE)
    assert open_cache(path).verify().ok


def test_what_was_set_aside_before_is_not_told_again_and_looked_at_anew(tmp_path: Path) -> None:
    cache = make_cache(tmp_path)
    path = cache.path / cache.index.shards[0].file
    good = path.read_bytes()
    damage(cache, 1)
    repair(cache.path)

    again = repair(cache.path)
    path.write_bytes(good)  # from a backup

    assert (again.bad, again.missing) == ([], [1])
    assert repair(cache.path).ok
    assert_whole(open_cache(cache.path), SOURCE)


def test_temporaries_of_the_dead_are_swept(tmp_path: Path) -> None:
    cache = make_cache(tmp_path)
    (cache.path / ".tmp-00-shard").write_bytes(b"half")

    assert repair(cache.path).swept == 1
    assert not [*cache.path.glob(".tmp-*")]


def test_an_unreadable_disk_is_told_apart_from_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = make_cache(tmp_path)
    file = cache.index.shards[0].file
    real = os.open

    def failing(path: object, *args: int, **named: int) -> int:
        if str(path).endswith(file):
            raise OSError(5, "Input/output error", str(path))
        return real(path, *args, **named)  # type: ignore[call-overload]

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", failing)
        report = repair(cache.path)

    assert [one.shard for one in report.unread] == [file]
    assert not report.set_aside
    assert (cache.path / file).exists()
    assert repair(cache.path).ok
    assert_whole(open_cache(cache.path), SOURCE)


def test_a_bad_sector_between_columns_harms_no_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = make_cache(tmp_path)
    file = cache.index.shards[0].file
    bad_sector = cache.shard(0).padding[0][0]
    real = os.preadv

    def failing(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        within = offset <= bad_sector < offset + len(buffers[0])
        if within and os.readlink(f"/proc/self/fd/{fd}").endswith(file):
            raise OSError(5, "Input/output error")
        return real(fd, buffers, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", failing)
        report = repair(cache.path)

    assert [one.shard for one in report.unread] == [file]
    assert (report.ok, report.bad, report.set_aside) == (True, [], [])
    assert_whole(open_cache(cache.path), SOURCE)


def test_repairing_some_shards_keeps_what_was_noted_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may note damage in them while these are read."""
    cache = make_cache(tmp_path)
    path = damage(cache, 3)
    damage(cache, 12)

    @contextmanager
    def noted_by_another(folder: Path) -> Generator[None]:
        rebuild_index(folder, cache.recipe)
        with lock_index(folder):
            yield

    monkeypatch.setattr("stoker.store.maintain.lock_index", noted_by_another)

    assert repair(cache.path, shards=[path.name]).missing == [3, 12]
    assert_whole(open_cache(cache.path, require_complete=False), SOURCE, {*range(16)} - {3, 12})


def test_a_subset_is_seeded_and_says_what_was_not_looked_at(tmp_path: Path) -> None:
    cache = make_cache(tmp_path)
    damage(cache, 7)

    found = [
        any(bad.index == 7 for bad in open_cache(cache.path).verify(0.25, seed=seed).bad)
        for seed in (*range(12), *range(12))
    ]

    assert found[:12] == found[12:]
    assert {True, False} == {*found}
    report = open_cache(cache.path).verify(0.25)
    assert (report.records, report.unchecked[0]) == (4, "12 of 16 records")
    assert open_cache(cache.path).verify().unchecked == []
    with pytest.raises(ConfigError, match="subset is 0"):
        cache.verify(0)


def test_only_one_cache_is_repaired_and_it_is_named(tmp_path: Path) -> None:
    cache = make_cache(tmp_path)
    assert folder_to_repair(tmp_path / "x") == cache.path

    other = make_cache(tmp_path, FakeSource(settings={"i": 1}))
    with pytest.raises(FormatError, match="Name the folder of one"):
        folder_to_repair(tmp_path / "x")
    assert folder_to_repair(other.path) == other.path
    (other.path / "recipe.json").write_bytes(b"{}")
    with pytest.raises(CorruptError, match=r"recipe\.json has digest"):
        repair(other.path)
    (other.path / "recipe.json").unlink()
    with pytest.raises(FormatError, match=r"holds no recipe\.json"):
        repair(folder_to_repair(other.path))


@pytest.mark.chaos
def test_killed_at_every_writing_call_it_is_never_worse_than_before(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.store.kill_points", "repair", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=150,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) > 8
