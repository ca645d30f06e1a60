"""What a plan knows of the tiers from having some batches served."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console

from stoker.cli.output import plan as show_plan
from stoker.errors import StalledError
from stoker.loader import Loader, Windows
from stoker.plan import BatchLoad, Demand, Interval, Rates, Resources, plan_tiers
from stoker.plan.trials import LEAST_TRIALS
from stoker.run import plan
from stoker.run.plan import TimedStep, _apart, served_loads
from stoker.store import Cache, open_cache
from stoker.store.storage import attach_mirror
from stoker.store.transfer import push
from tests.loader.caches import trajectories, write_cache


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return write_cache(tmp_path, trajectories(40), timed=("latent",))


@pytest.mark.parametrize("windows", [Windows(), None])
def test_each_tier_is_served_in_the_batches_asked_for(cache: Cache, windows: Windows | None) -> None:
    loads = served_loads(cache, windows, 8, seconds=0.05)

    assert set(loads) == {"disk", "host"}
    for load in loads.values():
        assert 0 <= load.direct_s <= load.alone_s
        assert 0 <= load.overlapped_s <= load.alone_s
    disk = loads["disk"]
    assert disk.direct_s + disk.overlapped_s == pytest.approx(disk.alone_s)


@pytest.mark.parametrize("cpus", [0.0, 1.0])
def test_a_known_step_is_imitated(cache: Cache, cpus: float) -> None:
    loads = served_loads(cache, Windows(), 8, seconds=0.05, step=TimedStep(seconds=3e-3, cpus=cpus))

    for load in loads.values():
        assert load.at_step is not None
        tried_s, lost_s = load.at_step
        assert tried_s >= 3e-3
        assert lost_s >= 0
        assert (load.lost_range is None) == (load.trials == 1)
        if load.lost_range is not None:
            assert load.lost_range.low <= lost_s <= load.lost_range.high


def test_trials_from_disk_have_records_of_their_own(tmp_path: Path) -> None:
    large = write_cache(tmp_path, trajectories(2048), timed=("latent",))
    trials = plan._Trials(partial(Loader, large, 2, tier="disk"), range(2048), "disk")
    parts = [trials._part(number) for number in range(LEAST_TRIALS)]

    assert len(set().union(*parts)) == sum(map(len, parts))
    few = plan._Trials(partial(Loader, large, 64, tier="disk"), range(2048), "disk")
    assert len(few._part(0)) >= 2 * plan.LEAST_TIMED * 64


def test_no_record_is_read_twice_where_there_are_enough() -> None:
    """What was read once comes from memory the second time, whatever the disk does."""
    parts = _apart(range(1024), 8)

    assert sorted([*parts[0], *parts[1], *parts[2]]) == list(range(1024))
    assert [len(part) for part in parts] == [256, 256, 512]
    for part in parts:  # of neighbors, and over all of the cache
        assert sum(b - a == 1 for a, b in pairwise(part)) > 0.9 * len(part)
        assert part[0] < 128
        assert part[-1] >= 1024 - 128
    assert [len(part) for part in _apart(range(100), 8)] == [100] * 3


def test_a_tier_that_cannot_serve_is_left_to_arithmetic(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Loader) -> None:
        raise StalledError("no answer")

    monkeypatch.setattr(Loader, "__iter__", broken)

    assert served_loads(cache, None, 8, seconds=0.05) == {}


def test_a_plan_that_meets_damaged_records_says_so(
    cache: Cache, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    for shard in cache.path.glob("shard-*"):
        data = bytearray(shard.read_bytes())
        data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
        shard.write_bytes(data)

    assert served_loads(open_cache(cache.path), None, 8, seconds=0.05) == {}
    assert "disk tier was not timed" in caplog.text
    assert "damaged" in caplog.text


def test_a_mirror_that_has_nothing_yet_is_served_from_its_address(cache: Cache, tmp_path: Path) -> None:
    there = f"file://{tmp_path}/there"
    push(cache.path, there, mirror_dir=tmp_path / "first")
    here = open_cache(attach_mirror(f"{there}/{cache.name}", tmp_path / "mirror"))
    assert not list(here.path.glob("shard-*"))

    assert set(served_loads(here, None, 8, seconds=0.05)) == {"disk", "host"}


def test_the_table_of_a_plan_has_the_likely_range(capsys: pytest.CaptureFixture[str]) -> None:
    load = BatchLoad(
        alone_s=4e-3, direct_s=1e-3, overlapped_s=0.0, at_step=(20e-3, 1e-3), lost_range=Interval(4e-4, 2e-3)
    )
    demand = Demand(records=10, record_bytes=1.0, batch_examples=1, example_bytes=1.0)
    machine = Resources(host_bytes=100, host_total_bytes=100, host_limit="made up", cpus=2.0)
    rates = Rates(served={"host": load}, measured=True)
    found = plan_tiers(demand, machine, step_s=20e-3, rates=rates)

    show_plan(plan.PlanResult(plan=found, records=10, missing=0), Console(width=200))

    shown = capsys.readouterr().out
    host = next(line for line in shown.splitlines() if line.startswith("host"))
    assert "4.8 %" in host
    assert "2 to 9 %" in host
    assert "waits 4.8 % of its time" in shown
