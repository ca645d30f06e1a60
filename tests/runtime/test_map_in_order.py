"""Many files at once, in order, with a deadline."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from stoker.errors import StalledError
from stoker.runtime.threads import map_in_order
from stoker.store import make_recipe, open_cache, open_folder
from stoker.store.folder import Folder
from stoker.store.format import OpenFile
from stoker.store.storage import Storage
from tests.store.fakes import FakeSource, fill


class Together:
    """Lets `count` callers go on once all of them are here, as only threads of their own can be."""

    def __init__(self, count: int) -> None:
        self.barrier = threading.Barrier(count, timeout=20)

    def __call__(self, item: int) -> int:
        self.barrier.wait()
        return item * 2


def test_items_are_worked_on_together_and_come_in_order() -> None:
    assert list(map_in_order(Together(8), range(32), what="doubling", threads=8)) == [*range(0, 64, 2)]


def test_a_result_is_not_made_long_before_it_is_wanted() -> None:
    begun: list[int] = []
    results = map_in_order(lambda item: begun.append(item) or item, range(10_000), what="x", threads=2)

    assert next(results) == 0
    time.sleep(0.05)

    assert len(begun) <= 8
    results.close()


def test_an_error_comes_when_it_is_its_items_turn() -> None:
    def work(item: int) -> float:
        return 1 / (item - 3)

    results = map_in_order(work, range(6), what="dividing", threads=4)

    assert [next(results) for _ in range(3)] == [1 / -3, 1 / -2, 1 / -1]
    with pytest.raises(ZeroDivisionError):
        next(results)


def test_what_hangs_is_named_and_given_up() -> None:
    let_go = threading.Event()
    results = map_in_order(
        lambda item: let_go.wait(60) if item == 1 else True, range(3), what="reading", timeout_s=0.2
    )

    assert next(results)
    with pytest.raises(StalledError, match=r"reading: 1 was not done after 0\.2 s"):
        next(results)
    let_go.set()


def test_what_had_begun_has_ended_when_the_rest_is_given_up() -> None:
    begun, ended = list[int](), list[int]()

    def work(item: int) -> None:
        begun.append(item)
        time.sleep(0.2 * bool(item))
        ended.append(item)

    results = map_in_order(work, range(100), what="x", threads=4)
    next(results)
    results.close()

    assert len(begun) < 100
    assert sorted(ended) == sorted(begun)


def test_threads_end_with_the_work() -> None:
    before = threading.active_count()
    assert len(list(map_in_order(lambda item: item, range(100), what="x", threads=8))) == 100

    until = time.monotonic() + 20
    while threading.active_count() > before and time.monotonic() < until:
        time.sleep(0.01)
    assert threading.active_count() <= before


class Slow(Storage):
    """Storage that lets one open in only when others wait for theirs too, and each after another time."""

    def __init__(self, path: Path, together: int) -> None:
        super().__init__(path)
        self.opening, self.most = 0, 0
        self._together, self._lock = together, threading.Condition()

    def open(self, name: str) -> OpenFile:
        with self._lock:
            self.opening += 1
            self.most = max(self.most, self.opening)
            self._lock.notify_all()
            self._lock.wait_for(lambda: self.most >= self._together, timeout=5)
        time.sleep(hash(name) % 7 / 1000)
        with self._lock:
            self.opening -= 1
        return super().open(name)


def test_an_index_made_by_many_threads_is_that_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = FakeSource(parts=[("a", 30), ("b", 30)])
    folder = open_folder(tmp_path, "x", make_recipe(source, None))
    fill(folder, source, group=1, shard_bytes=1)
    fill(folder, source, [3, 4, 45], group=1, shard_bytes=1)  # stored twice
    (folder.path / "shard-ffffffffffff-000000.safetensors").write_bytes(b"damaged" * 1000)
    with monkeypatch.context() as patch:
        patch.setattr("stoker.store.shard.FEW_SHARDS", 1000)
        folder.finish()
    one = (folder.path / "index.json").read_bytes()
    (folder.path / "index.json").unlink()

    again = Folder(folder.path, "x", folder.recipe)
    storage = Slow(folder.path, together=8)
    again._catalog._storage = storage
    again.finish()

    assert (folder.path / "index.json").read_bytes() == one
    assert storage.most >= 8
    assert open_cache(folder.path).verify().ok
