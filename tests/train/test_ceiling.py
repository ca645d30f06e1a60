"""The step that never waits: measured beside the training, which it must not touch."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from stoker.errors import DivergedError
from stoker.monitor.meter import StallMeter
from stoker.train import loop
from stoker.train.config import TrainConfig, TrainReport
from stoker.train.loop import time_steps
from stoker.train.objective import OperatorObjective
from stoker.train.run import train
from stoker.train.state import load_checkpoint
from tests.train.fakes import FakeBatch, FakeLoader, waves

LONG: dict[str, Any] = {"epochs": 25, "width": 8, "depth": 1, "heads": 2, "lr": 0.01}
"""150 steps: enough for a ceiling to be worth its steps."""


class Metered(FakeLoader):
    """Writes into a meter, as the real one does."""

    def __init__(self, meter: StallMeter | None) -> None:
        super().__init__(waves())
        self.meter = meter

    def __iter__(self) -> Iterator[FakeBatch]:
        for batch in super().__iter__():
            if self.meter is not None:
                self.meter.waited(1e-5)
                self.meter.handed(100, len(batch.z0), "host")
            yield batch
        if self.meter is not None:
            self.meter.ended()


def run(folder: Path, meter: StallMeter | None, sink: Any = None, **changes: Any) -> TrainReport:
    return train(Metered(meter), None, TrainConfig(**{**LONG, **changes}), folder, meter=meter, on_event=sink)


def newest(folder: Path) -> Any:
    return load_checkpoint(sorted((folder / "checkpoints").glob("last-*"))[-1])


def test_the_ceiling_is_measured_and_changes_no_bit(tmp_path: Path) -> None:
    meter = StallMeter()
    torch.manual_seed(0)
    plain = run(tmp_path / "plain", None)
    torch.manual_seed(0)
    metered = run(tmp_path / "metered", meter)

    assert plain.ceiling_step_s is None
    assert metered.ceiling_step_s is not None
    assert metered.lost is not None
    assert meter.epoch().ceiling_step_s == metered.ceiling_step_s
    a, b = newest(tmp_path / "plain"), newest(tmp_path / "metered")
    assert all(torch.equal(a.model[name], b.model[name]) for name in a.model)
    assert all(torch.equal(a.optimizer[name], b.optimizer[name]) for name in a.optimizer)  # random state too


def test_a_resumed_run_measures_again_and_ends_with_the_same_bits(tmp_path: Path) -> None:
    class Stopped(Exception):
        pass

    def stop(kind: str, facts: Any) -> None:
        if kind == "checkpoint" and facts["step"] == 6:
            raise Stopped

    run(tmp_path / "whole", StallMeter())
    with pytest.raises(Stopped):
        run(tmp_path / "cut", StallMeter(), sink=stop)
    report = run(tmp_path / "cut", StallMeter(), resume=True)

    assert report.ceiling_step_s is not None
    a, b = newest(tmp_path / "whole"), newest(tmp_path / "cut")
    assert all(torch.equal(a.model[name], b.model[name]) for name in a.model)


def test_a_short_run_spends_no_steps_on_it(tmp_path: Path) -> None:
    report = run(tmp_path, StallMeter(), epochs=2)

    assert report.ceiling_step_s is None
    assert report.lost is None


def test_the_time_of_measuring_is_not_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meter, seen = StallMeter(), list[float]()
    monkeypatch.setattr(meter.__class__, "outside", lambda _self, seconds: seen.append(seconds))

    report = run(tmp_path, meter)

    assert len(seen) == 1
    assert report.ceiling_step_s is not None
    assert seen[0] > loop.MOST_STEPS * report.ceiling_step_s


@pytest.mark.parametrize("error", [DivergedError("nan"), torch.OutOfMemoryError("full")])
def test_a_twin_that_fails_costs_the_figure_alone(error: Exception) -> None:
    def step() -> None:
        raise error

    assert time_steps(step, torch.device("cpu")) is None


def test_a_long_step_is_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, steps = [0.0], []
    monkeypatch.setattr(loop.time, "perf_counter", lambda: now_s[0])

    def step() -> None:
        now_s[0] += 60.0
        steps.append(1)

    assert time_steps(step, torch.device("cpu")) == 60.0
    assert len(steps) == loop.WARM_STEPS + 1


def test_the_meter_leaves_lines_and_tells_intervals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.train.loop.TELL_S", 0.0)
    told: list[dict[str, Any]] = []

    report = run(tmp_path, StallMeter(), sink=lambda kind, facts: kind == "stall" and told.append(facts))

    rows = [json.loads(line) for line in (tmp_path / "stall.jsonl").read_text().splitlines()]
    assert rows[-1]["kind"] == "summary"
    assert rows[-1]["batches"] == sum(row["batches"] for row in rows[:-1]) == 150
    assert rows[-1]["ceiling_step_s"] == report.ceiling_step_s
    assert [facts["step"] for facts in told] == list(range(1, 151))
    assert all(0 <= facts["stall"] <= 1 and facts["total"] == 150 for facts in told)
    assert sum(report.parts.values()) == pytest.approx(rows[-1]["wait_s"], rel=1e-3)


def test_a_new_run_moves_the_lines_of_the_last_one_aside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stoker.train.loop.EVERY_S", 1e9)
    run(tmp_path, StallMeter(rank=1), epochs=1)
    run(tmp_path, StallMeter(rank=1), epochs=1)

    for name in ("stall-rank1.jsonl", "stall-rank1.previous.jsonl"):
        kinds = [json.loads(line)["kind"] for line in (tmp_path / name).read_text().splitlines()]
        assert kinds == ["interval", "summary"]


def test_passes_shorter_than_an_interval_are_told_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stoker.train.loop.TELL_S", 1e9)
    told: list[dict[str, Any]] = []

    def note(kind: str, facts: Any) -> None:
        if kind == "stall":
            told.append(dict(facts))

    run(tmp_path, StallMeter(), epochs=3, sink=note)

    assert [facts["step"] for facts in told] == [6, 12, 18]
    assert all(facts["batches"] == 6 for facts in told)


def test_the_twin_is_gone_when_the_peak_of_memory_is_measured_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise loaders leave room on the device for two models."""
    twins: list[weakref.ref[Any]] = []
    alive: list[bool] = []

    make = OperatorObjective.twin

    def noted(made: OperatorObjective) -> OperatorObjective:
        twin = make(made)
        twins.append(weakref.ref(twin.model))
        return twin

    def look(_: torch.device) -> None:
        gc.collect()  # parts of a model refer to each other
        alive.append(twins[-1]() is not None)

    monkeypatch.setattr(OperatorObjective, "twin", noted)
    monkeypatch.setattr(loop, "give_back", look)

    run(tmp_path / "run", StallMeter())

    assert alive == [False]
