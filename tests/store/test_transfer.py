"""Push and pull: what arrives is what was sent, whatever was stopped on the way."""

from __future__ import annotations

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest

from stoker.errors import ConfigError, CorruptError, FormatError, IncompleteError, StalledError
from stoker.runtime.locks import lock_folder
from stoker.store import make_recipe, open_cache, open_folder, storage
from stoker.store.maintain import repair
from stoker.store.remote import FolderRemote
from stoker.store.storage import attach_mirror
from stoker.store.transfer import RecordSelection, TransferProgress, pull, push
from tests.store.fakes import FakeSource, make_cache
from tests.store.test_mirror import check, damage


class StoppedError(BaseException):
    """The process ends here."""


def pushed(tmp_path: Path, source: FakeSource | None = None) -> str:
    """A cache of several shards at an address."""
    make_cache(tmp_path / "a", source or FakeSource(), shard_bytes=4096)
    push(tmp_path / "a" / "x", f"file://{tmp_path / 'there'}", mirror_dir=tmp_path / "m")
    return f"file://{tmp_path / 'there'}/x"


def test_what_is_pushed_and_pulled_is_the_same_cache(tmp_path: Path) -> None:
    source = FakeSource()
    url = pushed(tmp_path, source)

    report = pull(url, tmp_path / "b")

    cache = open_cache(tmp_path / "b" / "x")
    check(cache, source)
    assert cache.verify().ok
    assert report.complete
    assert report.shards == len(open_cache(tmp_path / "a" / "x").index.shards)
    assert sorted(p.name for p in (tmp_path / "b").iterdir()) == [".coming", "x"]
    assert not [path for path in (tmp_path / "b" / ".coming").iterdir() if path.is_dir()]
    assert (tmp_path / "there" / "x" / cache.fingerprint / "index.json").exists()


def test_doing_it_again_brings_nothing(tmp_path: Path) -> None:
    url = pushed(tmp_path)
    pull(url, tmp_path / "b")

    again = push(tmp_path / "a" / "x", url.removesuffix("/x"), mirror_dir=tmp_path / "m")
    back = pull(url, tmp_path / "b")

    assert (again.shards, back.shards) == (0, 0)
    assert again.present == back.present > 1


@pytest.mark.parametrize("way", ["push", "pull"])
def test_what_was_stopped_goes_on_and_is_no_cache_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    source = FakeSource()
    url = pushed(tmp_path, source)
    there = tmp_path / "there2"

    def run(listen: Any = None) -> Any:
        if way == "pull":
            return pull(url, tmp_path / "b", listen=listen)
        return push(tmp_path / "a" / "x", f"file://{there}", mirror_dir=tmp_path / "m", listen=listen)

    def stop(now: TransferProgress) -> None:
        if now.done == 2:
            raise StoppedError

    with pytest.raises(StoppedError):
        run(stop)
    assert not [*(tmp_path / "b").glob("x/*/index.json"), *there.glob("x/*/index.json")]

    report = run()

    assert report.complete
    assert report.present >= 2
    check(open_cache(tmp_path / "b" / "x" if way == "pull" else f"file://{there}/x"), source)


def test_a_part_is_pulled_and_the_rest_later(tmp_path: Path) -> None:
    source = FakeSource()
    url = pushed(tmp_path, source)

    part = pull(url, tmp_path / "b", wanted=RecordSelection(records=(0, 3)))
    cache = open_cache(tmp_path / "b" / "x", require_complete=False)
    assert {0, 1, 2} <= {*cache.indices.tolist()} < {*range(16)}
    assert not part.complete
    assert cache.verify().ok

    assert pull(url, tmp_path / "b").complete
    check(open_cache(tmp_path / "b" / "x"), source)


def test_the_parts_of_all_ranks_are_the_whole(tmp_path: Path) -> None:
    url = pushed(tmp_path)
    held: list[set[int]] = []

    for rank in range(3):
        pull(url, tmp_path / str(rank), wanted=RecordSelection(rank=rank, world_size=3))
        cache = open_cache(tmp_path / str(rank) / "x", require_complete=False)
        held.append({*cache.indices.tolist()})
        assert {*range(16 * rank // 3, 16 * (rank + 1) // 3)} <= held[-1]

    assert set.union(*held) == {*range(16)}
    assert all(len(own) < 16 for own in held)


def test_what_is_damaged_neither_goes_nor_comes(tmp_path: Path) -> None:
    url = pushed(tmp_path)
    damage(next((tmp_path / "there").glob("x/*/shard-*")))

    with pytest.raises(CorruptError, match=r"file://.*/shard-.* is damaged"):
        pull(url, tmp_path / "b")
    assert not [*(tmp_path / "b").glob("x/*/index.json")]

    damage(next((tmp_path / "a").glob("x/*/shard-*")))
    with pytest.raises(CorruptError, match="Nothing of it was pushed"):
        push(tmp_path / "a" / "x", f"file://{tmp_path / 'there2'}", mirror_dir=tmp_path / "m")


def test_bytes_that_came_wrong_come_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = FakeSource()
    url = pushed(tmp_path, source)
    read, turned = FolderRemote.read, list[str]()

    def flipped(self: FolderRemote, name: str, begin: int, end: int, *, etag: str, sink: Any) -> None:
        def turn(piece: bytes) -> None:
            sink(piece if name in turned else piece[:5000] + bytes([piece[5000] ^ 1]) + piece[5001:])
            turned.append(name)

        read(self, name, begin, end, etag=etag, sink=turn)

    monkeypatch.setattr(FolderRemote, "read", flipped)

    assert pull(url, tmp_path / "b").complete
    check(open_cache(tmp_path / "b" / "x"), source)


def test_a_mirror_is_not_pushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    url = pushed(tmp_path)

    with pytest.raises(FormatError, match="copy of an address"):
        push(open_cache(url).path, f"file://{tmp_path / 'there2'}")


@pytest.mark.parametrize(
    "wrong",
    [
        {"rank": 1},
        {"rank": 2, "world_size": 2},
        {"rank": 0, "world_size": 2, "records": (0, 1)},
        {"records": (3, 3)},
    ],
)
def test_a_part_that_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        RecordSelection(**wrong)


def test_a_pull_of_records_that_are_not_there_is_refused(tmp_path: Path) -> None:
    url = pushed(tmp_path)

    with pytest.raises(IncompleteError, match=f"{url}/[0-9a-f]+ has no record of samples 100 to 199"):
        pull(url, tmp_path / "b", wanted=RecordSelection(records=(100, 200)))

    assert not (tmp_path / "b" / "x").exists()


def test_a_pull_without_a_name_says_which_addresses_there_are(tmp_path: Path) -> None:
    url = pushed(tmp_path)

    with pytest.raises(FormatError, match=f"Name one, as {url}$"):
        pull(url.removesuffix("/x"), tmp_path / "b")
    with pytest.raises(ConfigError, match=r"s3://bucket/x, an address. Expected a folder of this machine"):
        pull(url, "s3://bucket/x")


def test_two_pulls_at_once_into_one_folder_keep_the_shards_of_both(tmp_path: Path) -> None:
    source = FakeSource()
    url = pushed(tmp_path, source)
    begin = threading.Barrier(2)

    def half(rank: int) -> None:
        begin.wait(60)
        pull(url, tmp_path / "b", wanted=RecordSelection(rank=rank, world_size=2))

    with ThreadPoolExecutor(2) as pool:
        for one in [pool.submit(half, rank) for rank in (0, 1)]:
            one.result(60)

    check(open_cache(tmp_path / "b" / "x"), source)


def test_a_pull_counts_what_came_while_it_waited_for_the_index(tmp_path: Path) -> None:
    source = FakeSource()
    url = pushed(tmp_path, source)
    pulled = Path(pull(url, tmp_path / "b", wanted=RecordSelection(rank=0, world_size=2)).path)
    (pulled / "index.json").unlink()
    rest = {path.name: path for path in Path(pull(url, tmp_path / "c").path).glob("shard-*")}
    with ThreadPoolExecutor(1) as pool:
        with lock_folder(pulled, "index"):
            again = pool.submit(pull, url, tmp_path / "b", wanted=RecordSelection(rank=0, world_size=2))
            wait([again], timeout=0.5)
            for name, path in rest.items():
                shutil.copy(path, pulled / name)
        again.result(60)

    check(open_cache(pulled), source)


@pytest.mark.parametrize("way", ["pull", "push", "finish", "repair"])
def test_no_index_is_written_while_another_process_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    source = FakeSource()
    url = pushed(tmp_path, source)
    there, mirrors = f"file://{tmp_path / 'there2'}", tmp_path / "m"
    folder = Path(pull(url, tmp_path / "b", wanted=RecordSelection(rank=0, world_size=2)).path)
    if way == "push":
        folder = Path(push(tmp_path / "a" / "x", there, mirror_dir=mirrors).path)
        folder = attach_mirror(there, mirrors) / "x" / folder.name
    index = (tmp_path / "there2" / "x" / folder.name if way == "push" else folder) / "index.json"
    index.unlink()
    doing = {
        "pull": lambda: pull(url, tmp_path / "b"),
        "push": lambda: push(tmp_path / "a" / "x", there, mirror_dir=mirrors),
        "finish": lambda: open_folder(tmp_path / "b", "x", make_recipe(source, None)).finish(),
        "repair": lambda: repair(folder),
    }
    monkeypatch.setattr(storage, "INDEX_WAIT_S", 0.05)

    with lock_folder(folder, "index"), pytest.raises(StalledError):
        doing[way]()

    assert not index.exists()
    doing[way]()
    assert open_cache(index.parent, require_complete=False).index.stored
