"""Caches at an address, through the local folder that stands for it: here a shared folder, `file://`."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest
import torch

from stoker.errors import (
    ConfigError,
    CorruptError,
    FormatError,
    ReadOnlyError,
    ResourceError,
    StalledError,
)
from stoker.runtime.locks import lock_range
from stoker.schema import Field, Schema
from stoker.store import make_recipe, open_cache, open_folder
from stoker.store import mirror as folder_module
from stoker.store import remote as remote_module
from stoker.store.cache import Cache
from stoker.store.gc import GcPolicy, clean, collect
from stoker.store.maintain import compact, repair
from stoker.store.mirror import MirrorFolder
from stoker.store.mirror_blocks import BlockFile, BlockMap
from stoker.store.remote import FolderRemote, Retries, TransientError
from stoker.store.storage import attach_mirror, open_storage
from stoker.units import MIB
from tests.store.fakes import RAGGED, SCHEMA, FakeSource, expected, fill, make_cache

BIG = {"latent": Field(shape=(64, 64, 32), dtype="float32", time=True)}
"""Half a mebibyte a record."""


def shared(tmp_path: Path) -> str:
    """An address, and nothing there."""
    return f"file://{tmp_path / 'shared'}"


def machine(tmp_path: Path, name: str, limit: int | None = None) -> Path:
    """The mirror of the address on a machine of its own."""
    return attach_mirror(shared(tmp_path), tmp_path / name, limit)


def mirror_of(cache: Cache) -> MirrorFolder:
    mirror = open_storage(cache.path).mirror
    assert mirror is not None
    return mirror


def raising(error: Exception) -> Callable[..., None]:
    """A function that always fails."""

    def fail(*_: object) -> None:
        raise error

    return fail


def check(cache: Cache, source: FakeSource) -> None:
    """Every record is there and right."""
    assert len(cache) == len(source)
    for number in range(len(source)):
        wanted = expected(source, cache.recipe, number)
        found = cache[number]
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("schema", [pytest.param(SCHEMA, id="fixed"), pytest.param(RAGGED, id="ragged")])
def test_what_one_machine_encodes_another_reads(tmp_path: Path, schema: Schema) -> None:
    source = FakeSource(schema)
    make_cache(machine(tmp_path, "a"), source, shard_bytes=8192)

    cache = open_cache(machine(tmp_path, "b") / "x")

    check(cache, source)
    assert cache.verify().ok
    assert not [*(tmp_path / "shared" / "x" / cache.fingerprint).glob(".tmp-*")]


def test_any_depth_of_an_address_is_one_mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = make_cache(machine(tmp_path, "a"))

    below = open_cache(f"{shared(tmp_path)}/x")
    exact = open_cache(Path(f"{shared(tmp_path)}/x/{made.fingerprint}"))  # a Path has lost a slash

    assert below.path == exact.path
    with pytest.raises(FormatError, match=r"there is no cache at file://.*/none"):
        open_cache(f"{shared(tmp_path)}/none")


def test_a_block_is_fetched_once_however_often_it_is_read(tmp_path: Path) -> None:
    source = FakeSource()
    make_cache(machine(tmp_path, "a"), source)
    cache = open_cache(machine(tmp_path, "b") / "x")
    check(cache, source)
    counters = mirror_of(cache).counters
    fetched = counters.requests

    check(open_cache(cache.path), source)

    assert fetched > 0
    assert counters.requests == fetched


def test_a_mirror_smaller_than_the_cache_serves_all_of_it(tmp_path: Path) -> None:
    source = FakeSource(BIG, [("a", 24)])
    make_cache(machine(tmp_path, "a"), source, shard_bytes=4 * MIB)
    limit = 4 * MIB
    cache = open_cache(machine(tmp_path, "b", limit) / "x")

    for _ in range(2):
        check(cache, source)

    mirror = mirror_of(cache)
    on_disk = sum(path.stat().st_blocks * 512 for path in cache.path.glob("shard-*"))
    assert mirror.root.space.evicted_bytes > 0
    assert mirror.root.space.used() <= limit
    assert on_disk <= limit + MIB


def test_what_was_released_goes_before_what_was_read_last(tmp_path: Path) -> None:
    make_cache(machine(tmp_path, "a"), FakeSource(BIG, [("a", 16)]), shard_bytes=64 * MIB)
    cache = open_cache(machine(tmp_path, "b", 6 * MIB) / "x")
    mirror, name = mirror_of(cache), cache.index.shards[0].file
    mirror.ensure(name, [(0, 4 * MIB)])

    mirror.release(name, [(2 * MIB, 4 * MIB)])
    mirror.ensure(name, [(5 * MIB, 8 * MIB)])

    assert mirror.absent_bytes(name, [(0, 2 * MIB)]) == 0
    assert mirror.absent_bytes(name, [(2 * MIB, 4 * MIB)]) > 0


def test_what_is_fetched_ahead_is_there_when_it_is_read(tmp_path: Path) -> None:
    make_cache(machine(tmp_path, "a"), FakeSource(BIG, [("a", 8)]))
    cache = open_cache(machine(tmp_path, "b") / "x")
    mirror, entry = mirror_of(cache), cache.index.shards[0]

    begun = mirror.prefetch(entry.file, [(0, entry.bytes)])
    until = time.monotonic() + 60
    while mirror.counters.ahead_bytes < begun and time.monotonic() < until:
        time.sleep(0.01)

    assert begun == entry.bytes
    assert mirror.absent_bytes(entry.file, [(0, entry.bytes)]) == 0
    assert mirror.counters.ahead_bytes == entry.bytes


def test_bytes_past_the_end_of_an_object_are_not_here(tmp_path: Path) -> None:
    make_cache(machine(tmp_path, "a"), FakeSource(BIG, [("a", 4)]))
    cache = open_cache(machine(tmp_path, "b") / "x")
    name = cache.index.shards[0].file
    mirror = mirror_of(cache)
    mirror.ensure(name, [(0, cache.index.shards[0].bytes)])
    file = mirror.open(name)

    begins = np.array([0, file.size - 1, file.size + 9 * MIB], np.int64)
    assert file.here(begins, begins + 1).tolist() == [True, True, False]


def damage(path: Path) -> None:
    """Turn a bit of a record in a shard."""
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        file.seek(8 + size + json.loads(file.read(size))["latent"]["data_offsets"][0] + 5)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def test_a_damaged_copy_is_fetched_again_and_a_damaged_object_is_named(tmp_path: Path) -> None:
    source = FakeSource(BIG, [("a", 4)])
    made = make_cache(machine(tmp_path, "a"), source)
    cache = open_cache(machine(tmp_path, "b") / "x")
    check(cache, source)
    file = cache.index.shards[0].file

    damage(cache.path / file)
    check(cache, source)
    assert mirror_of(cache).counters.refetched == 1
    assert cache.verify().ok

    damage(tmp_path / "shared" / "x" / made.fingerprint / file)
    fresh = open_cache(machine(tmp_path, "c") / "x")
    with pytest.raises(CorruptError, match=r"fetched again from file://.*/shard-"):
        check(fresh, source)


@pytest.mark.parametrize("way", ["evicted", "past a full mirror"])
def test_what_is_fetched_again_is_compared_with_its_sums_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Also by who compares only the first read of each block, of whole records and of windows."""
    source = FakeSource(BIG, [("a", 4)])
    make_cache(machine(tmp_path, "a"), source)
    cache = open_cache(machine(tmp_path, "b") / "x")
    mirror, shard = mirror_of(cache), cache.shard(0, fresh=True)
    wanted = [expected(source, cache.recipe, int(number))["latent"].numpy() for number in shard.numbers()]

    def read(row: int, stop: int | None = None) -> bool:
        return bool((shard.read("latent", row, 0, stop, verify="first") == wanted[row][:stop]).all())

    if way != "evicted":
        monkeypatch.setattr(BlockFile, "write", raising(ResourceError("no space left")))
    assert all(read(row) for row in range(4))
    whole = FolderRemote.read
    left = [2]

    def flipped(self: FolderRemote, name: str, begin: int, end: int, *, etag: str, sink: Any) -> None:
        def turn(piece: bytes) -> None:
            if left[0]:
                left[0] -= 1
                piece = bytes(byte ^ 1 for byte in piece)
            sink(piece)

        whole(self, name, begin, end, etag=etag, sink=turn)

    mirror.root.space.free(64 * MIB)
    monkeypatch.setattr(FolderRemote, "read", flipped)

    assert read(0)
    assert all(read(row, 3) for row in range(4))
    assert mirror.counters.refetched > 0
    assert left == [0]


def test_blocks_that_another_process_is_fetching_are_not_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = FakeSource(BIG, [("a", 4)])
    make_cache(machine(tmp_path, "a"), source)
    cache = open_cache(machine(tmp_path, "b") / "x")
    check(cache, source)
    name = cache.index.shards[0].file
    mirror, path = mirror_of(cache), cache.path / f".map-{name}"
    before = BlockMap(path).state.tolist()
    monkeypatch.setattr(folder_module, "TIMEOUT_S", 0.05)

    with lock_range(path, 0, 1, timeout_s=0) as got:
        assert got
        with pytest.raises(StalledError):
            mirror.open(name).refetch(0, 100)

    assert BlockMap(path).state.tolist() == before
    mirror.open(name).refetch(0, 100)
    assert BlockMap(path).state.tolist() != before


def test_a_damaged_object_is_set_aside_and_only_its_records_are_missing(tmp_path: Path) -> None:
    source = FakeSource(BIG, [("a", 4)])
    made = make_cache(machine(tmp_path, "a"), source)
    damage(tmp_path / "shared" / "x" / made.fingerprint / made.index.shards[0].file)

    report = repair(machine(tmp_path, "b") / "x" / made.fingerprint)

    cache = open_cache(machine(tmp_path, "c") / "x", require_complete=False)
    assert [*report.missing] == sorted({*range(4)} - {*cache.indices.tolist()})
    assert len(report.missing) == 1


@pytest.mark.parametrize("after", ["ShardCatalog.refresh", "build_index"])
def test_two_machines_fill_one_cache_and_neither_loses_what_the_other_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: str
) -> None:
    source = FakeSource()
    recipe = make_recipe(source, None, dtype=None)
    a = open_folder(machine(tmp_path, "a"), "x", recipe)
    b = open_folder(machine(tmp_path, "b"), "x", recipe)
    fill(a, source, range(8))
    target = f"stoker.store.index.{after}"
    original: Callable[..., Any] = resolve_name(target)
    between: list[str] = []

    def interrupted(*args: Any) -> Any:
        result = original(*args)
        if not between:
            between.append("now")
            fill(b, source, range(8, 16))
            b.finish()  # the other machine stores, and writes the index, before this one's is put
        return result

    monkeypatch.setattr(target, interrupted)

    a.finish()

    check(open_cache(machine(tmp_path, "c") / "x"), source)


def test_quarantined_samples_are_known_to_other_machines(tmp_path: Path) -> None:
    source = FakeSource()
    recipe = make_recipe(source, None, dtype=None)
    a = open_folder(machine(tmp_path, "a"), "x", recipe)
    from stoker.store import Failure

    a.quarantine(Failure(number=3, stage="read", error="OSError", attempts=2, kind="sample"))

    assert [*open_folder(machine(tmp_path, "b"), "x", recipe).failures()] == [3]


def test_an_address_that_may_not_be_written_serves_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = FakeSource()
    make_cache(machine(tmp_path, "a"), source)

    def refuse(*_: object, **__: object) -> str:
        raise ReadOnlyError("put file://...: it may not be written")

    monkeypatch.setattr(FolderRemote, "put", refuse)
    folder = open_folder(machine(tmp_path, "b"), "x", make_recipe(source, None, dtype=None))

    complete = folder.complete()

    assert complete is not None
    check(complete, source)


def test_what_is_gone_from_the_address_is_not_served_from_the_copy(tmp_path: Path) -> None:
    made = make_cache(machine(tmp_path, "a"))
    path = machine(tmp_path, "b") / "x" / made.fingerprint
    assert (path / "recipe.json").exists()
    for file in (tmp_path / "shared" / "x" / made.fingerprint).iterdir():
        file.unlink()
    (tmp_path / "shared" / "x" / made.fingerprint).rmdir()

    machine(tmp_path, "b")

    assert not path.exists()


def test_a_place_that_does_not_answer_is_named_with_attempts_when_the_deadline_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_cache(machine(tmp_path, "a"))
    cache = open_cache(machine(tmp_path, "b") / "x")
    entry = cache.index.shards[0]

    def cut(*_: object, **__: object) -> None:
        raise TransientError("the connection was cut")

    monkeypatch.setattr(FolderRemote, "read", cut)

    with pytest.raises(StalledError, match=r"get file://.*/shard-.* failed \d+ times in .* was cut"):
        mirror_of(cache).ensure(entry.file, [(0, entry.bytes)], timeout_s=0.3)


def test_a_folder_is_read_no_faster_than_what_was_read_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_module, "PIECE_BYTES", 1024)
    remote, sent = FolderRemote(shared(tmp_path)), os.urandom(200 * 1024)
    remote.put("object", sent)
    pread, came, ahead = os.pread, list[bytes](), list[int]()
    read = 0

    def counted(fd: int, size: int, at: int) -> bytes:
        nonlocal read
        read += 1
        return pread(fd, size, at)

    def slow(piece: Any) -> None:
        time.sleep(0.001)
        came.append(bytes(piece))
        ahead.append(read - len(came))

    monkeypatch.setattr(remote_module.os, "pread", counted)
    remote.read("object", 0, len(sent), etag="", sink=slow)
    assert b"".join(came) == sent
    assert max(ahead) <= remote_module.PIECES_AHEAD + 1


@pytest.mark.parametrize("call", ["list", "open", "read", "write"])
def test_a_folder_that_does_not_answer_is_an_error_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """As a hard mount does whose server is away; when it is back, all goes on."""
    make_cache(machine(tmp_path, "a"), FakeSource())
    remote, sent = FolderRemote(shared(tmp_path)), b"x" * 100
    remote.put("there", sent)
    away, back = Event(), Event()

    def hanging(whole: Callable[..., Any]) -> Callable[..., Any]:
        def wait(*args: Any, **more: Any) -> Any:
            if away.is_set():
                back.wait(60)
            return whole(*args, **more)

        return wait

    at = {"list": "os.scandir", "open": "RegularFile", "read": "os.pread", "write": "PendingFile"}[call]
    target = f"stoker.store.remote.{at}"
    owner, _, name = target.rpartition(".")
    monkeypatch.setattr(target, hanging(getattr(resolve_name(owner), name)))
    monkeypatch.setattr(remote_module, "ANSWER_S", 0.1)
    monkeypatch.setattr(remote_module, "PUT_S", 0.1)
    got = bytearray()
    doing: dict[str, Callable[[], Any]] = {
        "list": lambda: remote.list("x"),
        "open": lambda: remote.get("there"),
        "read": lambda: remote.read("there", 0, 100, etag="", sink=got.extend),
        "write": lambda: remote.put("new", sent),
    }

    away.set()
    with pytest.raises(StalledError):
        Retries().run(doing[call], "asking", 0.4)
    away.clear()
    back.set()

    doing[call]()
    assert bytes(got) in (b"", sent)


def test_reads_go_past_a_mirror_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = FakeSource()
    make_cache(machine(tmp_path, "a"), source)
    cache = open_cache(machine(tmp_path, "b") / "x")
    monkeypatch.setattr(BlockFile, "write", raising(ResourceError("no space left")))

    check(cache, source)
    assert mirror_of(cache).counters.direct > 0


def test_who_reads_from_a_mirror_that_somebody_removed_is_served_or_told(tmp_path: Path) -> None:
    source = FakeSource(BIG, [("a", 4)])
    make_cache(machine(tmp_path, "a"), source)
    cache = open_cache(machine(tmp_path, "b") / "x")
    mirror = mirror_of(cache)
    assert torch.equal(cache[0]["latent"], expected(source, cache.recipe, 0)["latent"])
    shutil.rmtree(tmp_path / "b")

    check(cache, source)

    with pytest.raises(ResourceError, match=r"was removed while it was in use.*open the cache again"):
        mirror.open("shard-other-000000.safetensors")
    assert not (tmp_path / "b").exists()


def test_a_read_goes_on_when_its_own_blocks_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not when all are that somebody fetches ahead in the same request."""
    make_cache(machine(tmp_path, "a"), FakeSource(BIG, [("a", 8)]))
    cache = open_cache(machine(tmp_path, "b") / "x")
    mirror, entry, goes_on, read = mirror_of(cache), cache.index.shards[0], Event(), FolderRemote.read
    file, out = mirror.open(entry.file), bytearray(64)

    def slow(self: FolderRemote, name: str, begin: int, end: int, *, etag: str, sink: Any) -> None:
        read(self, name, begin, begin + MIB, etag=etag, sink=sink)
        under_way.set()
        goes_on.wait(300)
        read(self, name, begin + MIB, end, etag=etag, sink=sink)

    monkeypatch.setattr(FolderRemote, "read", slow)
    under_way = Event()
    mirror.prefetch(entry.file, [(0, entry.bytes)])
    assert under_way.wait(60)  # else the read may come first, and fetch its blocks itself
    reader = Thread(target=file.read_into, args=(0, memoryview(out)), daemon=True)
    reader.start()
    reader.join(40)
    alone = not reader.is_alive()
    goes_on.set()
    reader.join(20)

    assert alone
    assert bytes(out) == (tmp_path / "shared" / "x" / cache.path.name / entry.file).read_bytes()[:64]


def test_a_read_is_done_again_if_its_blocks_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may give blocks back between the look at the map and the read."""
    source = FakeSource(BIG, [("a", 4)])
    make_cache(machine(tmp_path, "a"), source)
    cache = open_cache(machine(tmp_path, "b") / "x")
    check(cache, source)
    mirror = mirror_of(cache)
    holds = BlockMap.holds
    monkeypatch.setattr(
        BlockMap, "holds", lambda self, *at: holds(self, *at) and (mirror.root.space.free(64 * MIB) >= 0)
    )

    check(cache, source)
    assert mirror.counters.refetched == 0
    assert mirror.root.space.evicted_bytes > 0


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("s3://KEY:planted-secret@bucket/x", "holds a user"),
        ("s3://bucket/x?sig=planted-secret", "a query"),
        ("s3://bucket/x#planted-secret", "a fragment"),
        ("s3://", "names no bucket"),
        ("s3://bucket/../other", "has a part"),
        ("ftp://bucket/x", "is not an address"),
        (
            "http://KEY:planted-secret@host/x",
            r"http://host/x is not an address of caches. Expected s3://BUCKET",
        ),
        (Path("gs://"), "names no bucket. Expected gs://BUCKET/FOLDER"),
        ("s3://ab", "'ab' is not the name of a bucket. Expected three characters or more"),
        ("file://share/x", r"three slashes, as file:///share/x"),
    ],
)
def test_an_address_with_more_than_a_place_is_refused_and_not_repeated(url: str | Path, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        open_cache(url)

    assert "planted-secret" not in str(caught.value)


def test_runs_of_blocks_are_fetched_together(tmp_path: Path) -> None:
    make_cache(machine(tmp_path, "a"), FakeSource(BIG, [("a", 24)]), shard_bytes=64 * MIB)
    cache = open_cache(machine(tmp_path, "b") / "x")
    mirror, entry = mirror_of(cache), cache.index.shards[0]

    mirror.ensure(entry.file, [(0, 10), (20, MIB + 1), (5 * MIB, 5 * MIB + 1)])
    assert mirror.counters.requests == 2

    mirror.ensure(entry.file, [(0, entry.bytes)])
    blocks = -(-entry.bytes // MIB)
    assert mirror.counters.bytes == entry.bytes
    assert mirror.counters.requests <= 2 + blocks // mirror.root.run_blocks + 3


def test_a_clean_up_takes_copies_and_leaves_the_address_alone(tmp_path: Path) -> None:
    source = FakeSource(BIG, [("a", 8)])
    make_cache(machine(tmp_path, "a"), source, shard_bytes=2 * MIB)
    root = machine(tmp_path, "b")
    cache = open_cache(root / "x")
    check(cache, source)
    there = sorted((tmp_path / "shared").rglob("shard-*"))

    planned = clean(root, GcPolicy(max_bytes=MIB), dry_run=True)
    done = clean(root, GcPolicy(max_bytes=MIB))
    assert planned.bytes_removed == done.bytes_removed == done.bytes_before - MIB
    assert clean(root, GcPolicy(older_than_s=3600)).removed == []
    check(cache, source)

    assert sorted((tmp_path / "shared").rglob("shard-*")) == there
    with pytest.raises(FormatError, match="copies of an address"):
        collect(root)


def test_shards_that_serve_nothing_leave_the_address_when_that_is_asked_for(tmp_path: Path) -> None:
    source = FakeSource()
    root = machine(tmp_path, "a")
    made = make_cache(root, source, shard_bytes=4096)
    merged = compact(root / "x")
    before = len([*(tmp_path / "shared").rglob("shard-*")])
    del made

    planned = clean(root, GcPolicy(), dry_run=True, at_address=True)
    report = clean(root, GcPolicy(), at_address=True)

    assert planned.bytes_removed == report.bytes_removed > 0
    assert report.bytes_left == clean(root, GcPolicy()).bytes_before
    assert len(report.removed) == merged.merged > 1
    assert len([*(tmp_path / "shared").rglob("shard-*")]) == before - merged.merged
    check(open_cache(machine(tmp_path, "b") / "x"), source)


@pytest.mark.parametrize("where", ["address", "mirror"])
def test_a_place_where_no_folder_can_be_made_is_a_wrong_setting(tmp_path: Path, where: str) -> None:
    file = tmp_path / "file"
    file.touch()
    url, mirrors = (shared(tmp_path), file) if where == "mirror" else (f"file://{file}/x", tmp_path / "m")

    with pytest.raises(ReadOnlyError, match=rf"cannot be made.*{file} is not a folder") as caught:
        make_cache(attach_mirror(url, mirrors), FakeSource())

    assert caught.value.exit_code == 3
