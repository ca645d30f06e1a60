"""`stoker profile CONFIG`: a training's own steps, and every stage before them."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from stoker.plan import Rates
from stoker.precompute import measure
from stoker.run.plan import served_loads
from stoker.sources.hdf5 import HDF5Source
from tests.cli.commands import run, run_json
from tests.conftest import write_burgers

FAST = ("--steps", "3")


@pytest.fixture(autouse=True)
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches are served from each tier for a moment, not for seconds, and no rate is measured."""
    monkeypatch.setattr("stoker.run.profile.measure_rates", lambda *_, **__: Rates())
    monkeypatch.setattr("stoker.run.profile.served_loads", partial(served_loads, seconds=0.01))


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a sample takes 5 ms; sample 7 takes 100."""
    plain = HDF5Source.read

    def read(self: HDF5Source, number: int, *span: Any) -> Any:
        time.sleep(0.1 if number == 7 else 0.005)
        return plain(self, number, *span)

    monkeypatch.setattr(HDF5Source, "read", read)


@pytest.mark.usefixtures("slow")
def test_stages_stragglers_and_tiers_of_a_configuration(project: Path) -> None:
    found = run_json("profile", "c.yaml", *FAST, "training.batch_size=8", "--price-per-hour", "3600")
    text, said = run("profile", "c.yaml", *FAST, "training.batch_size=8", "--price", "H100=2")

    stages = {stage["name"]: stage["seconds"] for stage in found["stages"]}
    assert list(stages) == ["open", "read", "encode", "write"]
    assert all(seconds > 0 for name, seconds in stages.items() if name != "open")
    assert stages["read"] >= 0.005
    assert found["bottleneck"].startswith("read, ")
    assert (found["stragglers"][0]["number"], found["stragglers"][0]["name"]) == (7, "burgers1d_train.h5")
    tiers = {tier["tier"]: tier for tier in found["tiers"]}
    assert tiers.keys() == {"host", "disk", "encode"}
    assert tiers["encode"]["wall_s"] > 0.005 * 12 / 12 > 0, "12 samples are read in an epoch of 12 batches"
    assert tiers["host"]["epoch_cost"] == pytest.approx(tiers["host"]["epoch_s"])
    assert found["served_from"] == "host"
    assert "without a cache" in found["verdict"]
    assert any("0 of 12 records are stored" in remark for remark in found["remarks"])
    for words in ("your loop", "encode", "H100 80 GB", "sample 7 takes", "(burgers1d_train.h5)"):
        assert words in text, words
    assert "runs/profile.html" in said
    page = (project / "runs" / "profile.html").read_text()
    for words in ("What is done to a sample", "On other GPUs", "sample 7 takes", "no cache"):
        assert words in page, words


def test_a_profile_leaves_neither_cache_nor_run_behind_and_takes_a_complete_cache(project: Path) -> None:
    run("profile", "c.yaml", *FAST)
    assert not list(project.glob("data/latent_cache/burgers1d_*"))
    assert not list(project.glob("data/latent_cache/.profile-*"))
    run("precompute", "c.yaml")

    found = run_json("profile", "c.yaml", *FAST, "training.tier=disk")

    assert found["remarks"] == []
    assert found["served_from"] == "disk"
    assert not (project / "runs" / "burgers1d").exists()


def test_a_few_samples_stand_for_many(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "SAMPLES", 4)
    write_burgers(project / "raw" / "burgers1d_train.h5", samples=300)

    found = run_json("profile", "c.yaml", *FAST, "training.batch_size=8")

    (remark,) = found["remarks"]
    assert "0 of 300 records are stored" in remark
    assert 0 < int(remark.split("fed from ")[1].split()[0]) < 300
    # nine steps make eight pairs, so each record is a batch
    assert found["epoch_s"] == pytest.approx((found["wait_s"] + found["step_s"]) * 300)


def test_samples_that_cannot_be_read_are_named_and_a_budget_is_kept(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = HDF5Source.read

    def read(self: HDF5Source, number: int, *span: Any) -> Any:
        if number == 5:
            raise OSError(5, "Input/output error", "burgers1d_train.h5")
        return plain(self, number, *span)

    monkeypatch.setattr(HDF5Source, "read", read)

    found = run_json("profile", "c.yaml", *FAST, "training.batch_size=8")
    _, said = run("profile", "c.yaml", *FAST, "training.batch_size=8", "--budget", "0%", exit_code=5)

    (failed,) = [remark for remark in found["remarks"] if remark.startswith("not readable")]
    assert "sample 5 (" in failed
    assert "--budget allows 0 %" in said


def test_a_sample_that_hangs_is_named(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = HDF5Source.read

    def read(self: HDF5Source, number: int, *span: Any) -> Any:
        if number == 4:
            time.sleep(60)
        return plain(self, number, *span)

    monkeypatch.setattr(HDF5Source, "read", read)

    _, said = run("profile", "c.yaml", "--timeout", "1.5", exit_code=5)

    assert "sample 4 of burgers1d_train stands at stage 'read'" in said


def test_what_cannot_be_profiled_says_why(project: Path) -> None:
    _, none = run("profile", "c.yaml", "data.root=nowhere", exit_code=3)
    _, script = run("profile", "nowhere.py", exit_code=3)

    assert "nowhere" in none
    assert "nowhere.py does not exist" in script
