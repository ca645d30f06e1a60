from __future__ import annotations

import json
import os
import signal
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stoker.errors import ConfigError
from stoker.monitor.trackers import TrackedRun, TrackerProcesses, check_trackers, serve

TRACKERS = """
import json, os, time

class Base:
    def start(self, run):
        self.file = run.folder / "kept.jsonl"
        self.keep({"name": run.name, "lr": run.settings["training"]["lr"], "resumed": run.resumed})
    def keep(self, row):
        with self.file.open("a") as file:
            file.write(json.dumps(row) + "\\n")
    def log(self, step, values):
        self.keep({"step": step, **values})
    def end(self, status):
        self.keep({"status": status})

class Hanging(Base):
    def log(self, step, values):
        time.sleep(1000)

class HangsAtStart(Base):
    def start(self, run):
        time.sleep(1000)

class Dying(Base):
    def log(self, step, values):
        os._exit(3)

class Failing(Base):
    def start(self, run):
        raise RuntimeError("the server said no")

class Stumbling(Base):
    def log(self, step, values):
        if step == 1:
            raise OSError("lost the line")
        super().log(step, values)
"""


@pytest.fixture
def others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package of somebody else, with trackers as entry points."""
    site = tmp_path / "site"
    info = site / "theirs-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "theirs.py").write_text(textwrap.dedent(TRACKERS))
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    names = {"base": "Base", "hanging": "Hanging", "hangs-at-start": "HangsAtStart", "dying": "Dying",
             "failing": "Failing", "stumbling": "Stumbling"}  # fmt: skip
    points = "".join(f"{name} = theirs:{made}\n" for name, made in names.items())
    (info / "entry_points.txt").write_text(f"[stoker.trackers]\n{points}")
    monkeypatch.syspath_prepend(str(site))
    path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    monkeypatch.setenv("PYTHONPATH", path)
    yield
    sys.modules.pop("theirs", None)


def a_run(folder: Path, **changes: Any) -> TrackedRun:
    return TrackedRun(**{"name": "a", "folder": folder, "settings": {"training": {"lr": 0.1}}, **changes})


def kept(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "kept.jsonl").read_text().splitlines()]


@pytest.mark.usefixtures("others")
def test_a_tracker_of_others_gets_settings_rows_and_the_end(tmp_path: Path) -> None:
    said: list[str] = []

    tracking = TrackerProcesses(["base"], a_run(tmp_path), said.append)
    tracking.log(3, {"training/stall": 0.5, "training/loss": float("nan")})
    tracking.log(4, {"training/loss": float("inf")})
    tracking.end("finished")

    assert kept(tmp_path) == [
        {"name": "a", "lr": 0.1, "resumed": False},
        {"step": 3, "training/stall": 0.5},
        {"status": "finished"},
    ]
    assert said == []


@pytest.mark.usefixtures("others")
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("hanging", "not done 0.5 s after the run"),
        ("hangs-at-start", "not done 0.5 s after the run"),
        ("dying", "failed, the run continues"),
        ("failing", "RuntimeError: the server said no"),
        ("stumbling", "1 rows were not kept"),
    ],
)
def test_one_that_fails_or_hangs_costs_the_run_a_remark_and_others_nothing(
    tmp_path: Path, name: str, words: str
) -> None:
    said: list[str] = []
    end_s = 0.5 if name.startswith("hang") else 60.0

    (tmp_path / "beside").mkdir()
    tracking = TrackerProcesses([name], a_run(tmp_path), said.append, end_s=end_s)
    beside = TrackerProcesses(["base"], a_run(tmp_path / "beside"), said.append)
    for step in range(3):
        tracking.log(step, {"a": 1.0})
        beside.log(step, {"a": 1.0})
    tracking.end("finished")
    beside.end("finished")

    assert len(said) == 1, said
    assert name in said[0]
    assert words in said[0]
    assert [row["step"] for row in kept(tmp_path / "beside") if "step" in row] == [0, 1, 2]


@pytest.mark.usefixtures("others")
def test_a_full_pipe_drops_rows_and_counts_them(tmp_path: Path) -> None:
    said: list[str] = []
    values = {f"training/figure_{number}": 0.1 for number in range(100)}

    tracking = TrackerProcesses(["hanging"], a_run(tmp_path), said.append, end_s=0.2)
    for step in range(1000):  # some 3 MB, and nothing is read of it
        tracking.log(step, values)
    tracking.end("finished")

    assert "does not keep up" in said[0]
    assert any("rows dropped" in line for line in said)


@pytest.mark.usefixtures("others")
def test_ctrl_c_is_for_the_run_which_says_how_it_ended(tmp_path: Path) -> None:
    tracking = TrackerProcesses(["base"], a_run(tmp_path), pytest.fail)
    while not (tmp_path / "kept.jsonl").exists():
        pass
    for pipe in tracking._pipes:
        os.kill(pipe._child.pid, signal.SIGINT)
    tracking.end("interrupted")

    assert kept(tmp_path)[-1] == {"status": "interrupted"}


class Listed:
    def __init__(self) -> None:
        self.calls: list[Any] = []

    def start(self, run: TrackedRun) -> None:
        self.calls.append(run.folder)

    def log(self, step: int, values: Any) -> None:
        self.calls.append((step, values))

    def end(self, status: str) -> None:
        self.calls.append(status)


def test_a_run_that_was_killed_is_told_by_the_end_of_the_pipe() -> None:
    tracker = Listed()
    facts = {"name": "a", "folder": "runs/a", "settings": {}, "resumed": True}

    failed = serve(tracker, [json.dumps({"start": facts}), '{"step": 1, "values": {}}'], sys.stderr)

    assert tracker.calls == [Path("runs/a"), (1, {}), "killed"]
    assert failed == 0


def test_unknown_names_and_absent_packages_are_refused_beforehand(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"'wandbb', which is not a tracker. Expected some of tensorboard"):
        check_trackers(["wandbb"])
    monkeypatch.setattr("stoker.monitor.trackers.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'stoker\[trackers\]'"):
        check_trackers(["mlflow"])
