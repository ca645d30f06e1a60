"""More shards than a process may have files open."""

from __future__ import annotations

import os
import resource
import sys
import textwrap
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from stoker.errors import CorruptError, ResourceError
from stoker.loader import Loader
from stoker.schema import Field
from stoker.store import Cache, shard
from stoker.store.format import LocalFile
from tests.kit import forked as subprocess
from tests.store.fakes import FakeSource, make_cache, same_bits

SMALL = {"x": Field(shape=(3,), dtype="float32")}


def shards_of(root: Path, count: int, *, salt: str = "") -> Cache:
    """A cache with a record in each shard."""
    source = FakeSource(SMALL, parts=[("a", count)], salt={"a": salt})
    return make_cache(root, source, shard_bytes=1, group=count)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def take_all(taken: list[int]) -> None:
    """Open files until the process may not open another one."""
    try:
        while True:
            taken.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        pass


Check = Callable[[Path, pytest.MonkeyPatch], None]
FEW_FILES: dict[str, Check] = {}
"""What holds where a process may have few files open. All of it is checked in one child: how many files a
process that runs tests has open, and opens meanwhile in other threads, nobody knows."""


def with_few_files(check: Check) -> Check:
    FEW_FILES[check.__name__] = check
    return check


def check_with_few_files(root: Path) -> dict[str, str]:
    """Run the checks with room for some forty files more than are open now, and return what failed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    failures: dict[str, str] = {}
    for name, check in FEW_FILES.items():
        with pytest.MonkeyPatch.context() as monkeypatch:
            # Caches of earlier checks have a part in everything.
            monkeypatch.setattr(shard, "_living", {})
            monkeypatch.setattr(shard, "most_open", lambda: 10)
            resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors() + 40, hard))
            try:
                check(root / name, monkeypatch)
            except (Exception, pytest.fail.Exception):
                failures[name] = traceback.format_exc()
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return failures


@with_few_files
def a_cache_keeps_few_of_its_shards_open(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = shards_of(root, 60)
    before = descriptors()

    records = [cache[number] for number in cache.indices]

    assert len(records) == 60
    assert descriptors() - before <= 10


@with_few_files
def caches_share_the_descriptors(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    caches = [shards_of(root / name, 30, salt=name) for name in "abcde"]
    before = descriptors()
    for cache in caches:
        for number in cache.indices:
            assert cache[number]

    assert descriptors() - before <= 12, "two for each, and what the first had before there were others"


@with_few_files
def what_others_have_open_is_made_room_for(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    cache = shards_of(root, 30)
    for number in range(10):
        assert cache[number]
    taken: list[int] = []
    try:
        take_all(taken)
        assert cache[20], "those of its own are closed"
        cache._shards.trim(0)
        take_all(taken)
        with pytest.raises(ResourceError, match=rf"all of its {allowed} file descriptors open"):
            cache[21]
    finally:
        for fd in taken:
            os.close(fd)
    assert cache[21]


@with_few_files
def a_shard_is_parsed_once_however_often_it_is_opened(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = shards_of(root, 30)
    first = [cache[number] for number in cache.indices]
    monkeypatch.setattr("stoker.store.shard.read_facts", None)

    again = [cache[number] for number in cache.indices]

    assert all(map(same_bits, first, again))


@with_few_files
def what_is_known_of_shards_takes_so_much_memory(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = shards_of(root, 30)
    monkeypatch.setattr(shard, "FACTS_BYTES", 100_000)
    for number in cache.indices:
        assert cache[number]

    assert 30_000 < sum(facts.nbytes for facts in cache._shards._facts.values()) <= 100_000


@with_few_files
def another_file_in_place_of_a_known_shard_is_noticed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = shards_of(root, 30)
    for number in cache.indices:
        assert cache[number]
    assert cache.index.shards[0].bytes == cache.index.shards[1].bytes
    (cache.path / cache.index.shards[1].file).replace(cache.path / cache.index.shards[0].file)

    with pytest.raises(CorruptError, match="not the shard that the index pins"):
        cache[0]


@with_few_files
def a_loader_serves_from_a_cache_of_one_shard_a_record(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = shards_of(root, 60)

    (batch,) = Loader(cache, 60, tier="disk", shuffle=False)

    assert torch.equal(batch["x"], torch.stack([cache[number]["x"] for number in cache.indices]))


def test_what_holds_where_few_files_may_be_open(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.store.test_open_shards", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
        cwd=Path(__file__).parents[2],
    )

    assert done.returncode == 0, done.stderr[-4000:]
    assert len(done.stdout.split()) == len(FEW_FILES) == 7


def test_shards_are_opened_while_another_one_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock that is held while a file is opened makes sixteen workers one."""
    cache = shards_of(tmp_path, 4)
    opened: list[int] = []
    plain = LocalFile.__init__

    def opening(self: LocalFile, path: Path) -> None:
        if path.name == cache.index.shards[0].file:
            opened.extend(int(cache[number]["x"].numel()) for number in (1, 2))
        plain(self, path)

    monkeypatch.setattr(LocalFile, "__init__", opening)

    assert cache[0]
    assert opened == [3, 3]


TIGHT = """
import resource, sys
from pathlib import Path
import torch
from stoker.loader import Loader
from stoker.store import open_cache

cache = open_cache(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[2]), int(sys.argv[2])))
size = int(sys.argv[3])
batches = {tier: list(Loader(cache, size, shuffle=True, tier=tier, seed=1)) for tier in ("disk", "host")}
for a, b in zip(batches["disk"], batches["host"], strict=True):
    assert torch.equal(a["x"], b["x"]) and torch.equal(a["index"], b["index"])
print(len(batches["disk"]))
"""


def tight(cache: Cache, files: int, batch: int) -> str:
    """What a process prints that may have so many files open, and serves such batches from disk."""
    code = textwrap.dedent(TIGHT)
    done = subprocess.run(
        [sys.executable, "-c", code, str(cache.path), str(files), str(batch)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


def test_a_batch_may_lie_in_more_shards_than_files_may_be_open(tmp_path: Path) -> None:
    cache = shards_of(tmp_path, 400)

    assert tight(cache, 100, 200) == "2"


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_ten_thousand_shards_are_served_with_a_thousand_descriptors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    cache = shards_of(tmp_path, 10_000)

    assert tight(cache, 1024, 1024) == "10"


if __name__ == "__main__":
    failed = check_with_few_files(Path(sys.argv[1]))
    sys.stdout.write(" ".join(FEW_FILES))
    sys.exit("\n".join(f"{name}\n{text}" for name, text in failed.items()) or None)
