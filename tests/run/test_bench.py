"""What `stoker bench` measures, says and draws; the figures themselves are the machine's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stoker.errors import ConfigError
from stoker.plan import rates as rates_module
from stoker.run import bench
from stoker.run.bench import BenchFigure, BenchResult, draw_bench, job_of_cache, run_bench
from stoker.store import Cache
from tests.loader.caches import trajectories, write_cache


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    return write_cache(tmp_path_factory.mktemp("c"), trajectories(40), timed=("latent",))


@pytest.fixture(autouse=True)
def short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "LEAST_S", 0.01)


def figure(bytes_s: float, **more: Any) -> BenchFigure:
    return BenchFigure(**{"what": "made up", "bytes_s": bytes_s, "scatter": 0.0, **more})


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
