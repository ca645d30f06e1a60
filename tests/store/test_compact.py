"""Short shards become full ones, and nobody notices but the number of files."""

from __future__ import annotations

import os
import sys
import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from stoker.errors import ConfigError, IncompleteError, ResourceError, StalledError
from stoker.loader import Loader
from stoker.schema import Field, Schema
from stoker.store import Cache, WriterSettings, make_recipe, open_cache, open_folder, storage
from stoker.store.maintain import compact
from stoker.store.write import OpenShard
from tests.kit import forked as subprocess
from tests.store.fakes import RAGGED, SCHEMA, FakeSource, assert_whole, batch_of, fill, make_cache

ROOT = Path(__file__).parents[2]
FULL = 10 * 1156
"""Bytes of ten records of `SCHEMA`."""


def make_short(root: Path, source: FakeSource, *, dtype: str | None = None, step: int = 3) -> Cache:
    """A cache of shards of `step` records, written by writers that took turns."""
    folder = open_folder(root, "x", make_recipe(source, None, dtype=dtype))
    for begin in range(0, len(source), step):
        fill(folder, source, range(begin, min(begin + step, len(source))))
    return folder.finish()


def serving(cache: Cache) -> list[int]:
    return [int(shard.segments[:, 2].sum()) for shard in cache.index.shards if len(shard.segments)]


@pytest.mark.parametrize("dtype", [None, "float16", "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("schema", [SCHEMA, RAGGED], ids=["fixed", "ragged"])
def test_records_statistics_and_errors_stay_as_they_were(tmp_path: Path, schema: dict, dtype: str) -> None:
    source = FakeSource(schema, [("a", 24), ("b", 9)])
    before = make_short(tmp_path, source, dtype=dtype)

    report = compact(tmp_path / "x", shard_bytes=FULL)

    after = open_cache(tmp_path / "x")
    assert_whole(after, source)
    assert after.verify().ok
    assert (after.statistics, after.index.error) == (before.statistics, before.index.error)
    assert after.index.generation > before.index.generation
    assert report.shards_before == len(serving(before)) > report.shards_after == len(serving(after))


def test_full_shards_hold_equal_rows_in_number_order(tmp_path: Path) -> None:
    source = FakeSource(parts=[("a", 35)])
    folder = open_folder(tmp_path, "x", make_recipe(source, None))
    for first in (0, 1):  # two writers, each with every other sample
        for begin in range(first, 35, 6):
            fill(folder, source, range(begin, min(begin + 6, 35), 2))
    folder.finish()

    report = compact(folder.path, shard_bytes=FULL)

    cache = open_cache(folder.path)
    assert serving(cache) == [10, 10, 10, 5]
    assert all(len(shard.segments) <= 1 for shard in cache.index.shards)
    assert (report.written, report.records) == (4, 35)


def test_a_second_call_finds_nothing_to_do(tmp_path: Path) -> None:
    cache = make_short(tmp_path, FakeSource())
    compact(cache.path, shard_bytes=FULL)
    before = sorted(path.name for path in cache.path.iterdir()), (cache.path / "index.json").read_bytes()

    report = compact(cache.path, shard_bytes=FULL)

    assert (report.merged, report.written) == (0, 0)
    assert (sorted(p.name for p in cache.path.iterdir()), (cache.path / "index.json").read_bytes()) == before


def test_nothing_is_rewritten_where_it_would_not_lessen_the_shards(tmp_path: Path) -> None:
    cache = make_short(tmp_path, FakeSource(parts=[("a", 27)]), step=9)

    assert compact(cache.path, shard_bytes=FULL).merged == 0
    assert len(serving(open_cache(cache.path))) == 3


@pytest.mark.parametrize("schema", [SCHEMA, RAGGED], ids=["fixed", "ragged"])
def test_shards_of_no_bytes_are_refused(tmp_path: Path, schema: Schema) -> None:
    cache = make_cache(tmp_path, FakeSource(schema))

    with pytest.raises(ConfigError, match="shard_bytes is 0, expected 1 at least"):
        compact(cache.path, shard_bytes=0)


def test_marks_and_environments_travel_with_their_records(tmp_path: Path) -> None:
    source = FakeSource(parts=[("a", 12)])
    folder = open_folder(tmp_path, "x", make_recipe(source, None))
    for begin, device in ((0, "cpu"), (3, "cpu"), (6, "tpu"), (9, "tpu")):
        writer = folder.writer(WriterSettings(device=device))
        numbers = range(begin, begin + 3)
        writer.append(numbers, batch_of(source, numbers), marked=[begin + 1])
        writer.commit()
    folder.finish()

    compact(folder.path, shard_bytes=100 * 1156)

    cache = open_cache(folder.path)
    found = {
        cache.shard(i).described("environment")["device"]: (
            cache.shard(i).numbers().tolist(),
            cache.shard(i).marked.tolist(),
        )
        for i, shard in enumerate(cache.index.shards)
        if len(shard.segments)
    }
    assert found == {"cpu": ([*range(6)], [1, 4]), "tpu": ([*range(6, 12)], [7, 10])}


def test_workers_of_the_earlier_generation_go_on(tmp_path: Path) -> None:
    source = FakeSource()
    early = make_short(tmp_path, source)

    compact(early.path, shard_bytes=FULL)

    assert_whole(early, source)
    assert early.verify().ok


def test_training_resumes_in_a_compacted_cache(tmp_path: Path) -> None:
    early = make_short(tmp_path, FakeSource())
    loader = Loader(early, batch_size=4, seed=1, shuffle=True)
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    rest = [batch["index"] for batch in batches]

    compact(early.path, shard_bytes=FULL)
    again = Loader(open_cache(early.path), batch_size=4, seed=1, shuffle=True)
    again.load_state_dict(state)

    assert torch.equal(torch.cat(rest), torch.cat([batch["index"] for batch in again]))


def test_a_shard_with_a_damaged_record_is_named_and_left(tmp_path: Path) -> None:
    source = FakeSource(parts=[("a", 12)])
    cache = make_short(tmp_path, source)
    i = next(i for i, shard in enumerate(cache.index.shards) if shard.segments[0, 1] == 3)
    path = cache.path / cache.index.shards[i].file
    data = bytearray(path.read_bytes())
    data[cache.shard(i).columns["latent"].offset] ^= 1
    path.write_bytes(data)

    report = compact(cache.path, shard_bytes=100 * 1156)

    assert [one.shard for one in report.left] == [path.name]
    assert "sample 3 " in report.left[0].why
    after = open_cache(cache.path)
    assert serving(after) in ([9, 3], [3, 9])
    assert_whole_but(after, source, {3})
    assert [bad.index for bad in after.verify().bad] == [3]


def assert_whole_but(cache: Cache, source: FakeSource, damaged: set[int]) -> None:
    for number in {*range(len(source))} - damaged:
        assert torch.equal(cache[number]["latent"], source.record(number)["latent"])


def test_a_lost_shard_is_refused(tmp_path: Path) -> None:
    cache = make_short(tmp_path, FakeSource())
    (cache.path / cache.index.shards[0].file).unlink()

    with pytest.raises(IncompleteError, match="is missing"):
        compact(cache.path)


def test_a_full_disk_leaves_the_cache_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = FakeSource()
    cache = make_short(tmp_path, source)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(Exception, match="No space left"):
            compact(cache.path, shard_bytes=FULL)

    assert_whole(open_cache(cache.path), source)
    assert not [*cache.path.glob(".tmp-*")]


def test_one_compacts_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = make_short(tmp_path, FakeSource())
    monkeypatch.setattr(storage, "INDEX_WAIT_S", 0.05)

    with (
        storage.lock_maintenance(cache.path),
        pytest.raises(StalledError, match=f"process {os.getpid()} on"),
    ):
        compact(cache.path)


def test_the_index_may_be_lost_before_the_old_shards_go(tmp_path: Path) -> None:
    """Old and new copies hold the same bits, so whichever wins, the records are the same ones."""
    source = FakeSource()
    cache = make_short(tmp_path, source)
    compact(cache.path, shard_bytes=FULL)
    (cache.path / "index.json").unlink()

    again = open_cache(cache.path)

    assert_whole(again, source)
    assert again.statistics == cache.statistics
    names = [shard.file for shard in again.index.shards]
    (cache.path / "index.json").unlink()
    assert [shard.file for shard in open_cache(cache.path).index.shards] == names


def test_records_written_meanwhile_are_kept(tmp_path: Path) -> None:
    source = FakeSource(parts=[("a", 20)])
    folder = open_folder(tmp_path, "x", make_recipe(source, None))
    for begin in range(0, 12, 3):
        fill(folder, source, range(begin, begin + 3))
    folder.finish()
    thread = threading.Thread(target=lambda: fill(folder, source, range(12, 20)))
    thread.start()

    compact(folder.path, shard_bytes=FULL)
    thread.join(30)

    assert_whole(folder.finish(), source)


def test_shards_full_of_tiny_records_are_not_merged_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ragged shard is full by its bytes or by its rows."""
    monkeypatch.setattr("stoker.store.format.MAX_ROWS", 4)
    source = FakeSource(RAGGED, [("a", 12)])
    folder = open_folder(tmp_path, "x", make_recipe(source, None))
    for begin in range(0, 12, 3):
        fill(folder, source, range(begin, begin + 3))
    path = folder.finish().path

    assert compact(path).written == 3
    assert compact(path).written == 0
    assert_whole(open_cache(path), source)


def test_a_cache_named_from_inside_its_folder_keeps_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = make_short(tmp_path, FakeSource())
    monkeypatch.chdir(cache.path.parent)
    compact(cache.path.name, shard_bytes=FULL)
    monkeypatch.chdir(cache.path)
    (cache.path / "index.json").unlink()

    assert open_cache(".").name == "x"
    assert open_cache(cache.path).name == "x"


@pytest.mark.slow  # gc, repair and folder are killed at every call in the plain run
@pytest.mark.chaos
@pytest.mark.parametrize("what", ["compact", "compress"])
def test_killed_at_every_writing_call_nothing_is_lost(tmp_path: Path, what: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.store.kill_points", what, str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, timeout=150,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) > 40


def test_numbers_come_as_plain_integers(tmp_path: Path) -> None:
    cache = make_short(tmp_path, FakeSource())
    compact(cache.path, shard_bytes=FULL)

    assert open_cache(cache.path).indices.dtype == np.int64


def test_an_index_is_not_written_for_every_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It names every shard: with as many parts as shards that would cost their square."""
    source = FakeSource(parts=[(f"p{i}", 4) for i in range(12)])
    before = make_short(tmp_path, source, step=2)

    report = compact(before.path)

    assert (report.shards_before, report.shards_after, report.merged) == (24, 12, 24)
    assert report.generation <= before.index.generation + 2
    assert_whole(open_cache(before.path), source)

    monkeypatch.setattr("stoker.store.maintain.PUBLISH_S", 0.0)
    monkeypatch.setattr("stoker.store.maintain.PUBLISH_TIMES", 0.0)
    before = make_short(tmp_path / "again", source, step=2)
    assert compact(before.path).generation == before.index.generation + 12, "as soon as they may serve"


def test_what_was_merged_serves_though_the_rest_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = FakeSource(parts=[(f"p{i}", 4) for i in range(6)])
    before = make_short(tmp_path, source, step=2)
    committed: list[int] = []
    plain = OpenShard.commit

    def commit(self: OpenShard) -> None:
        if len(committed) == 4:
            raise ResourceError("the disk is full")
        committed.append(self.rows)
        plain(self)

    with monkeypatch.context() as patch:
        patch.setattr(OpenShard, "commit", commit)
        with pytest.raises(ResourceError, match="the disk is full"):
            compact(before.path)

    after = open_cache(before.path)
    assert sorted(serving(after)) == [2, 2, 2, 2, 4, 4, 4, 4]
    assert_whole(after, source)
    assert compact(before.path).merged == 4, "the next one goes on with what is left"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_ten_thousand_short_shards_become_a_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a thousand descriptors, in little memory, while somebody reads the earlier generation."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    schema: Schema = {"x": Field(shape=(16,), dtype="float32")}
    source = FakeSource(schema, parts=[("a", 20_000)])
    folder = open_folder(tmp_path, "x", make_recipe(source, None))
    values = torch.arange(20_000 * 16, dtype=torch.float32).reshape(20_000, 16)
    writer = folder.writer(WriterSettings(shard_bytes=128))
    for begin in (0, 1):  # interleaved, as two writers leave it
        for first in range(begin * 1000, 20_000, 2000):
            writer.append(range(first, first + 1000), {"x": values[first : first + 1000]})
    writer.commit()
    before = folder.finish()
    assert len(before.index.shards) == 10_000
    code = f"""
        import resource
        from stoker.store.maintain import compact
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        report = compact({str(before.path)!r})
        assert (report.merged, report.shards_after, report.records) == (10_000, 1, 20_000), report
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    """

    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )

    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) < 400 * 1024, "KiB"
    for cache in (before, open_cache(before.path)):
        (batch,) = Loader(cache, 20_000, tier="disk", shuffle=False, device="cpu")
        assert torch.equal(batch["x"], values)
