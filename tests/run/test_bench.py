"""What `stoker bench` measures, says and draws; the figures themselves are the machine's."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from stoker.errors import ConfigError, CorruptError, ServiceError
from stoker.loader import Loader, Windows
from stoker.plan import rates as rates_module
from stoker.run import bench
from stoker.run.bench import (
    BenchFigure,
    BenchJob,
    BenchResult,
    draw_bench,
    job_of_cache,
    job_of_url,
    run_bench,
)
from stoker.runtime import threads as threads_module
from stoker.store import Cache
from stoker.store.mirror import MirrorFolder
from stoker.store.transfer import push
from tests.loader.caches import trajectories, write_cache


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    return write_cache(tmp_path_factory.mktemp("c"), trajectories(40), timed=("latent",))


@pytest.fixture(autouse=True)
def short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "LEAST_S", 0.01)


def figure(bytes_s: float, **more: Any) -> BenchFigure:
    return BenchFigure(**{"what": "made up", "bytes_s": bytes_s, "scatter": 0.0, **more})


def test_a_batch_larger_than_all_windows_is_refused_with_their_number(cache: Cache) -> None:
    with Loader(cache, 1, windows=Windows()) as loader:
        count = len(loader)

    with pytest.raises(ConfigError, match=f"--batch-size {count} or less"):
        job_of_cache(cache.path, count + 1)
    assert job_of_cache(cache.path, count).batch_size == count
    assert job_of_cache(cache.path, count + 1, or_all=True).batch_size == count


def test_each_tier_stands_beside_its_limit(cache: Cache, tmp_path: Path) -> None:
    result = run_bench(job_of_cache(cache.path, 8), seconds=0.1, picture=tmp_path / "runs" / "b.png")

    assert list(result.tiers) == ["host", "disk, warm", "disk, cold"]
    for tier in result.tiers.values():
        assert tier.bytes_s > 0
        assert tier.batch_s is not None
    host = result.tiers["host"]
    assert host.limit == "gather"
    assert host.fraction == pytest.approx(host.bytes_s / result.limits["gather"].bytes_s)
    assert "fit the host tier: leave tier=auto" in result.advice
    assert (tmp_path / "runs" / "b.png").read_bytes().startswith(b"\x89PNG")
    json.dumps(result.to_json(), allow_nan=False)


def test_without_a_cache_there_are_the_limits_of_memory(tmp_path: Path) -> None:
    result = run_bench(None, seconds=0.1, picture=None)

    assert list(result.limits) == ["copy", "gather"]
    assert not result.tiers
    assert result.advice.startswith("Name a CONFIG or the folder of a cache")


def test_rounds_that_differ_are_said_to(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = iter([1e9, 4e9])
    monkeypatch.setattr(rates_module, "copy_limit", lambda: lambda _seconds: next(rates))

    result = run_bench(None, seconds=0.1, picture=None)

    assert (result.limits["copy"].bytes_s, result.limits["copy"].scatter) == (4e9, 0.75)
    assert "Two rounds differ by up to" in result.advice


def test_the_whole_cache_is_not_needed_to_measure(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    size = sum((cache.path / shard.file).stat().st_size for shard in cache.index.shards)
    monkeypatch.setattr(bench, "SERVED_BYTES", size // 4)

    assert list(job_of_cache(cache.path, 8).served) == list(range(10))


class Ticks:
    """A clock that goes on by a tick whenever it is read."""

    now_s = 0.0

    def perf_counter(self) -> float:
        self.now_s += 0.001
        return self.now_s

    monotonic = perf_counter


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_turn_includes_the_time_of_filling(
    cache: Cache, monkeypatch: pytest.MonkeyPatch, tier: str
) -> None:
    clock = Ticks()
    monkeypatch.setattr(bench, "time", clock)

    assert bench._TierMeasurement(job_of_cache(cache.path, 8), tier, 60.0)(0.5) > 0

    assert clock.now_s == pytest.approx(0.5, abs=0.03)


def test_a_tier_that_cannot_be_filled_in_time_is_named_and_not_tried_again(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []

    class Watched(bench._TierMeasurement):
        def __call__(self, seconds: float) -> float:
            tried.append(self._tier)
            return super().__call__(seconds)

    monkeypatch.setattr(bench, "LEAST_FILL_S", 0.0)
    monkeypatch.setattr(bench, "_TierMeasurement", Watched)
    result = run_bench(job_of_cache(cache.path, 8), seconds=1e-9, picture=None)

    assert list(result.tiers) == ["disk, cold"]
    assert "host, disk, warm" in result.advice
    assert "--seconds" in result.advice
    assert tried == ["host", "disk", "disk", "disk"]  # the last is the second round of "disk, cold"


@pytest.fixture(scope="module")
def url(cache: Cache, tmp_path_factory: pytest.TempPathFactory) -> str:
    return pushed(cache, tmp_path_factory.mktemp("there"))


def pushed(cache: Cache, folder: Path) -> str:
    push(cache.path, f"file://{folder}/store", mirror_dir=folder / "mirror")
    return f"file://{folder}/store/{cache.name}"


@pytest.fixture
def job(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[BenchJob]:
    monkeypatch.chdir(tmp_path)
    with job_of_url(url, 8) as job:
        yield job


def wait_for_end(name: str, before: Sequence[threading.Thread] = ()) -> None:
    """Wait until no thread whose name begins so is alive, other than those `before`."""
    until = time.monotonic() + 10
    while alive := [one for one in threading.enumerate() if one.name.startswith(name) and one not in before]:
        assert time.monotonic() < until, alive
        time.sleep(0.01)


def test_threads_that_measure_end_with_the_measurement(cache: Cache) -> None:
    run_bench(job_of_cache(cache.path, 8), seconds=0.1, picture=None)

    wait_for_end("stoker-limits")


def test_no_thread_stays_when_idle_ones_have_ended(
    cache: Cache, job: BenchJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = threading.enumerate()
    monkeypatch.setattr(threads_module, "IDLE_S", 0.1)
    run_bench(job_of_cache(cache.path, 8), seconds=0.1, picture=None)
    run_bench(job, seconds=0.1, picture=None)

    wait_for_end("stoker-", before)


def test_a_store_that_fails_leaves_no_threads_behind(job: BenchJob, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ServiceError("no access")

    monkeypatch.setattr(MirrorFolder, "read_plain", refuse)

    with pytest.raises(ServiceError, match="no access"):
        run_bench(job, seconds=0.1, picture=None)

    wait_for_end("stoker-get")


@pytest.mark.parametrize("ending", [None, KeyboardInterrupt, CorruptError("a bad record")])
def test_a_first_epoch_is_closed_before_its_files_are_removed(
    job: BenchJob, monkeypatch: pytest.MonkeyPatch, ending: Any
) -> None:
    there_when_closed: list[bool] = []

    class Watched(Loader):
        def __iter__(self) -> Iterator[Any]:
            yield next(super().__iter__())
            if ending is not None:
                raise ending

        def close(self) -> None:
            there_when_closed.append(self.dataset.path.is_dir())
            super().close()

    monkeypatch.setattr(bench, "Loader", Watched)
    assert job.remote is not None
    before = {*job.remote.root.path.iterdir()}

    with suppress(KeyboardInterrupt, CorruptError):
        bench._FirstEpoch(job)(60.0)

    assert there_when_closed == [True]
    assert {*job.remote.root.path.iterdir()} == before


@pytest.mark.parametrize("there", ["", ".stoker", ".stoker/mirror", ".stoker/mirror/other"])
def test_a_bench_of_an_address_leaves_no_folder_that_was_not_there(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: str
) -> None:
    (tmp_path / there).mkdir(parents=True, exist_ok=True)
    monkeypatch.chdir(tmp_path)
    before = {*tmp_path.rglob("*")}

    with job_of_url(url, 8):
        assert [*(tmp_path / ".stoker" / "mirror").glob(".bench-*")]

    assert {*tmp_path.rglob("*")} == before


def test_a_folder_that_another_process_uses_meanwhile_stays(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    with job_of_url(url, 8):
        (tmp_path / ".stoker/mirror/other").mkdir()

    assert [one.name for one in (tmp_path / ".stoker/mirror").iterdir()] == ["other"]


@pytest.mark.parametrize("at_url", [False, True])
def test_a_cache_without_records_is_refused_by_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_url: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    empty = write_cache(tmp_path / "c", trajectories(4), timed=("latent",), skip=range(4))
    place = pushed(empty, tmp_path) if at_url else str(empty.path)

    with pytest.raises(ConfigError) as refused, ExitStack() as stack:
        run_bench(
            stack.enter_context(job_of_url(place, 8)) if at_url else job_of_cache(empty.path, 8),
            seconds=0.1,
            picture=None,
        )

    assert place in refused.value.fact
    assert "stoker precompute" in (refused.value.hint or "")
    assert not (tmp_path / ".stoker").exists()


@pytest.mark.parametrize(
    ("scatter", "blamed"),
    [
        ({"store": 0.6}, ["the store, the network to it", "Copying in memory was not"]),
        ({"store": 0.6, "copy": 0.3}, ["the store, the network to it", "copy", "this machine was busy too"]),
        ({"store": 0.3, "copy": 0.6}, ["something else is using this machine"]),
        ({"store": 0.1, "copy": 0.1}, []),
    ],
)
def test_the_machine_is_not_blamed_where_a_store_differs(
    scatter: dict[str, float], blamed: list[str]
) -> None:
    said = bench._say_scatter({name: figure(1e9, scatter=part) for name, part in scatter.items()})

    assert len(said) == bool(blamed)
    for words in blamed:
        assert words in said[0]


def test_no_time_is_no_measurement() -> None:
    with pytest.raises(ConfigError, match="more than 0"):
        run_bench(None, seconds=0, picture=None)


@pytest.mark.draws
@pytest.mark.parametrize("tiers", [{}, {"host": figure(5e9, limit="gather", fraction=0.8, batch_s=1e-4)}])
def test_a_picture_of_anything(tiers: dict[str, BenchFigure], tmp_path: Path) -> None:
    found = {"gather": figure(6e9), "copy": figure(8e9, scatter=0.5)}
    result = BenchResult(
        machine="m", cache="", limits=found, tiers=tiers, advice="Do. " * 90, picture=None, seconds=1.0
    )

    draw_bench(result, tmp_path / "b.png")

    assert (tmp_path / "b.png").stat().st_size > 1000
