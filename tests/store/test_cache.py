"""A cache is found by name, opened in little time and few descriptors, and says what it lacks."""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from stoker.errors import ConfigError, FormatError, IncompleteError, MissingRecordError, RecordError
from stoker.schema import Field
from stoker.store import FileDigest, make_recipe, open_cache, open_folder
from stoker.store import shard as shard_module
from stoker.store.cache import Cache
from stoker.store.index import LISTED_SEGMENTS
from tests.kit import forked as subprocess
from tests.loader.caches import write_cache
from tests.store.fakes import RAGGED, FakeSource, assert_whole, fill, make_cache

ROOT = Path(__file__).parents[2]


def test_a_record_is_a_copy(tmp_path: Path) -> None:
    cache = make_cache(tmp_path)

    cache[3]["latent"].zero_()

    assert_whole(cache, FakeSource())
    assert cache[np.int64(3)]["nu"].shape == ()


def test_a_cache_knows_what_it_holds(tmp_path: Path) -> None:
    source = FakeSource()
    folder = open_folder(tmp_path, "x", make_recipe(source, None))
    fill(folder, source, [1, 2, 3, 12, 14])
    cache = folder.finish()

    assert len(cache) == 5
    assert [number in cache for number in (0, 1, 3, 4, 12, 13, 14, 15, -1, "1")] == [
        False, True, True, False, True, False, True, False, False, False,
    ]  # fmt: skip
    segments = cache.segments
    assert segments.first.tolist() == [1, 12, 14]
    assert segments.count.tolist() == [3, 1, 1]
    assert segments.row.tolist() == [0, 0, 1]
    assert len(set(segments.shard.tolist())) == 2
    assert repr(cache) == f"Cache('x', {cache.fingerprint}, 5 records, 5 of 16)"
    assert not cache.indices.flags.writeable


def test_a_missing_record_says_why(tmp_path: Path) -> None:
    source = FakeSource()
    folder = open_folder(tmp_path, "x", make_recipe(source, None))
    fill(folder, source, [1])
    cache = folder.finish()

    for number, message in (
        (2, "not encoded yet"),
        (16, "sample 16 does not exist"),
        (-17, "sample -17 does not exist"),
    ):
        with pytest.raises(MissingRecordError, match=message):
            cache[number]


def test_an_incomplete_cache_is_opened_only_when_asked_for(tmp_path: Path) -> None:
    source = FakeSource()
    folder = open_folder(tmp_path, "x", make_recipe(source, None))
    fill(folder, source, [1])

    for _ in range(2):  # without an index, and with the one that this makes
        with pytest.raises(IncompleteError, match="holds 1 of 16 records"):
            open_cache(tmp_path / "x")
    assert_whole(open_cache(tmp_path / "x", require_complete=False), source, [1])


def test_the_newest_complete_one_is_opened_by_name_and_others_are_mentioned_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caches = [make_cache(tmp_path, dtype=dtype) for dtype in ("float16", "bfloat16", "float32")]
    unfinished = open_folder(tmp_path, "x", make_recipe(FakeSource(salt={"a": "new"}), None))
    fill(unfinished, FakeSource(), [0])
    unfinished.finish()
    for cache in caches[1:]:  # neither name nor time decides
        (cache.path / "index.json").touch()

    with caplog.at_level(logging.WARNING):
        opened = [open_cache(tmp_path / "x") for _ in range(2)]

    assert [cache.fingerprint for cache in opened] == [caches[2].fingerprint] * 2
    assert caplog.text.count("holds 3 complete caches") == 1
    assert open_cache(caches[0].path).fingerprint == caches[0].fingerprint


def test_only_shards_without_an_index_are_told_of_as_after_a_kill(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = FakeSource()
    files = (FileDigest(name="a.h5", bytes=1, digest="0" * 32, sampled=False),)
    with caplog.at_level(logging.INFO):
        first_run = open_folder(tmp_path, "x", replace(make_recipe(source, None), files=files))
        open_cache(first_run.path, require_complete=False)
        assert (first_run.path / "sources.jsonl").exists()
        assert "no index" not in caplog.text

        (first_run.path / "index.json").unlink()
        fill(first_run, source, [0])
        open_cache(first_run.path, require_complete=False)

    assert "has no index, as after a kill" in caplog.text


def test_no_cache_is_a_clear_error(tmp_path: Path) -> None:
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(FormatError, match="stoker precompute"):
            open_cache(path)


def test_lengths_follow_the_order_of_numbers(tmp_path: Path) -> None:
    source = FakeSource(RAGGED, [("a", 9), ("b", 5)])
    folder = open_folder(tmp_path, "x", make_recipe(source, None))
    fill(folder, source, [3, 1, 2, 0, 8, 13, 9])
    cache = folder.finish()

    assert cache.lengths("tokens").tolist() == [len(cache[number]["tokens"]) for number in cache.indices]
    for field in ("label", "absent"):
        with pytest.raises(RecordError, match="has no axis 0"):
            cache.lengths(field)


def test_numbers_in_any_order_keep_the_index_small(tmp_path: Path) -> None:
    """What is per record stays out of JSON, also when no two rows follow one another."""
    source = FakeSource({"n": Field(shape=(), dtype="int64")}, [("a", 2000)])
    folder = open_folder(tmp_path, "x", make_recipe(source, None))
    order = np.random.default_rng(0).permutation(2000).tolist()

    fill(folder, source, order, group=500)
    cache = folder.finish()

    (shard,) = json.loads((cache.path / "index.json").read_text())["shards"]
    assert isinstance(shard["segments"], str)
    assert len(cache.segments.first) > LISTED_SEGMENTS
    assert_whole(open_cache(cache.path), source)


def test_a_sample_of_the_records_can_be_verified(tmp_path: Path) -> None:
    cache = make_cache(tmp_path)

    report = cache.verify(0.25)

    assert (report.records, report.ok, report.bad) == (4, True, [])
    for subset in (0, -1, 1.5):
        with pytest.raises(ConfigError):
            cache.verify(subset)


FEW = """
import resource, sys
from pathlib import Path
from tests.store.fakes import *
from stoker.store import open_cache
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
cache = open_cache(sys.argv[1])
assert len(cache.index.shards) == 150
for _ in range(2):
    assert_whole(cache, FakeSource(parts=[("a", 150)]))
assert cache.verify().bad == []
print("served")
"""


def test_64_descriptors_are_enough(tmp_path: Path) -> None:
    cache = make_cache(tmp_path, FakeSource(parts=[("a", 150)]), shard_bytes=1)

    result = subprocess.run(
        [sys.executable, "-c", FEW, str(cache.path)], capture_output=True, text=True, timeout=60, cwd=ROOT
    )

    assert result.stdout == "served\n", result.stderr


def test_opening_reads_no_shard(tmp_path: Path) -> None:
    """It costs O(shards) of the index alone; a shard is opened when a record of it is asked for."""
    cache = make_cache(tmp_path)
    for path in cache.path.glob("shard-*"):
        path.write_bytes(bytes(path.stat().st_size))

    assert isinstance(open_cache(cache.path), Cache)


def test_bfloat16_comes_back_as_such(tmp_path: Path) -> None:
    cache = make_cache(tmp_path, dtype="bfloat16")

    assert cache[0]["latent"].dtype == torch.bfloat16


def test_a_cache_that_may_not_be_read_says_how_its_owner_shares_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The superuser may read everything, so the system's answer is played."""
    cache = make_cache(tmp_path)

    def refused(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "exists", refused)

    with pytest.raises(FormatError, match=rf"{cache.path}.* Permission denied.*chmod -R g\+rX"):
        open_cache(cache.path)


def test_a_column_that_is_read_whole_is_announced_once_from_end_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loader may have told the system to read nothing ahead by itself."""
    monkeypatch.setattr(shard_module, "PIECE_BYTES", 1000)
    monkeypatch.setattr(shard_module, "AHEAD_BYTES", 4000)
    cache = write_cache(tmp_path, {"x": torch.arange(12_345, dtype=torch.uint8)})
    announced: list[tuple[int, int]] = []
    monkeypatch.setattr("os.posix_fadvise", lambda _fd, begin, size, _how: announced.append((begin, size)))

    cache.shard(0).verify_column("x")

    at = cache.shard(0).columns["x"].offset
    assert announced[0] == (at, 4000)
    for begin, size in announced:
        assert begin == at
        at += size
    assert sum(size for _, size in announced) == 12_345
