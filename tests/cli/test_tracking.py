from __future__ import annotations

import json
import os
import sqlite3
import struct
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from stoker.monitor import GpuSample, MissingGpu
from stoker.monitor.meter import GpuWatch
from stoker.run.train import COST, GPU, RunTracking, Startup, StartupPhase, tracking
from tests.cli.commands import run, run_json


def rows(folder: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row for row in lines if row["kind"] == "metrics"]


def test_a_run_keeps_start_up_and_epochs_by_the_names_of_earlier_systems(project: Path) -> None:
    _, said = run("train", "c.yaml", "training.price_per_hour=3600")
    again = run_json("train", "c.yaml", "training.run_dir=again")

    startup, first, _ = rows(project / "runs" / "burgers1d")
    assert startup["startup/cache_reused"] == 0.0
    assert startup["startup/total_startup_time_min"] >= startup["startup/cache_precompute_time_min"] > 0
    assert [phase["name"] for phase in startup["phases"]] == [
        "program and settings", "caches", "plan and loaders", "first batch",
    ]  # fmt: skip
    assert first["training/epoch_time_sec"] >= 0
    assert first["training/samples_per_sec"] > 0
    assert 0 <= first["training/stall"] <= 1
    assert first["tier/host"] == 1.0
    assert first[COST] > 0
    assert GPU not in first
    for words in (
        "caches",
        "burgers1d_train 12 encoded",
        "first batch in all",
        "GPU not measured: the device is cpu",
    ):
        assert words in said, words
    assert again["metrics"]["startup/cache_reused"] == 1.0
    assert again["metrics"][GPU] is None
    assert again["gpu"] == "the device is cpu"
    assert [phase["note"] for phase in again["startup"]["phases"]][1] == "nothing to encode"


@pytest.mark.draws
def test_the_page_holds_start_up_tiers_caches_machine_settings_and_recipe(project: Path) -> None:
    run("train", "c.yaml")

    page = (project / "runs" / "burgers1d" / "report.html").read_text()
    for words in (
        "Start-up",
        "plan and loaders",
        "Tiers",
        "on the host tier",
        "Caches",
        "fingerprint",
        "Machine",
        "Recipe of burgers1d_train",
        "training.batch_size",
        "not measured: the device is cpu",
        "validation NRMSE</text>",
    ):
        assert words in page, words
    assert page.count("<svg") == 3
    assert "src=" not in page
    outside = page.replace("http://www.w3.org/", "").replace('xlink:href="#', "")
    assert "http" not in outside.partition("Settings")[0]
    assert "href=" not in outside


def test_an_absent_package_is_refused_before_anything_is_encoded(
    project: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("stoker.monitor.trackers.find_spec", lambda name: None)

    _, said = run("train", "c.yaml", "training.trackers=wandb", exit_code=3)

    assert "pip install 'stoker[trackers]'" in said
    assert not (project / "data").exists()


def a_tracking(project: Path, told: list[Any], **settings: Any) -> RunTracking:
    from stoker.config import load_config
    from stoker.run.context import Run

    (project / "run").mkdir(exist_ok=True)
    config = load_config(
        project / "c.yaml", ["training.run_dir=run", *(f"{k}={v}" for k, v in settings.items())]
    )
    startup = Startup(started_s=0.0, phases=[StartupPhase(name="caches", seconds=1.0)], values={})
    return RunTracking(Run(config), startup, tell=lambda kind, facts: told.append(facts))


def test_a_resumed_run_goes_on_counting_what_it_cost(project: Path) -> None:
    (project / "run").mkdir()
    (project / "run" / "metrics.jsonl").write_text(
        '{"kind": "metrics", "step": 5, "cost/run": 1000000000.0}\n'
    )
    told: list[Any] = []

    with tracking(a_tracking(project, told, **{"training.price_per_hour": 1})) as tracked:
        tracked.listen("start", {"step": 5})
        tracked.listen("ready", {"seconds": 0.5})
        tracked.listen("epoch", {"step": 9, "epoch": 2, "seconds": 1.0, "loss": 0.1})

    assert told[-1][COST] > 1e9
    assert [phase["name"] for phase in told[0]["phases"]] == ["caches", "first batch"]


def test_a_gpu_is_given_in_per_cent_and_its_absence_in_words(project: Path) -> None:
    class Watch:
        said: Any = 0.93

        def take(self) -> Any:
            return self.said

        def stop(self) -> None:
            pass

    told: list[Any] = []
    epoch = {"step": 9, "epoch": 2, "seconds": 1.0, "loss": 0.1}
    tracked = a_tracking(project, told)
    tracked._watch = Watch()  # pyright: ignore

    tracked.listen("epoch", epoch)
    Watch.said = MissingGpu(reason="fell off the bus")
    tracked.listen("epoch", epoch)

    assert told[0][GPU] == pytest.approx(93)
    assert GPU not in told[1]
    assert tracked.gpu is not None
    assert tracked.gpu.reason == "fell off the bus"


NAMES = {
    "startup/cache_precompute_time_min", "startup/cache_reused", "startup/total_startup_time_min",
    "training/epoch_time_sec", "training/epoch_loss", "training/stall", "training/samples_per_sec",
    "tier/host", "validation/nrmse", COST,
}  # fmt: skip
"""What a run on a CPU keeps, whoever keeps it."""
STEPS = {"training/loss", "training/lr", "training/grad_norm"}
"""What trackers get beside that; in `metrics.jsonl` they are lines of another kind."""
THEIRS = """
import json

class Keeper:
    def start(self, run):
        self.file = run.folder / "theirs.jsonl"
    def log(self, step, values):
        with self.file.open("a") as file:
            file.write(json.dumps({"step": step, **values}) + "\\n")
    def end(self, status):
        self.log(-1, {"status": status})
"""


@pytest.fixture
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A distribution of somebody else that brings a tracker."""
    info = tmp_path / "site" / "theirs-1.0.dist-info"
    info.mkdir(parents=True)
    (tmp_path / "site" / "keeper_of_theirs.py").write_text(THEIRS)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[stoker.trackers]\ntheirs = keeper_of_theirs:Keeper\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    path = os.pathsep.join([str(tmp_path / "site"), *filter(None, [os.environ.get("PYTHONPATH")])])
    monkeypatch.setenv("PYTHONPATH", path)
    return "theirs"


class Busy:
    """A GPU of a machine that has one; nothing computes on it."""

    def sample(self) -> GpuSample:
        return GpuSample(name="a GPU", utilization=0.5, used_bytes=1, total_bytes=2, power_w=None)

    def close(self) -> None:
        pass


def test_every_figure_reaches_console_metrics_and_a_tracker_of_others(
    project: Path, theirs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one GPU, without torchrun: by the driver's library, whose figures are made up here."""
    watch = partial(GpuWatch, "GPU-abc", opening=lambda uuid: cast("Any", Busy()), every_s=0.001)
    monkeypatch.setattr("stoker.run.train.watch_gpu", lambda device: watch())

    _, said = run("train", "c.yaml", f"training.trackers={theirs}", "training.price_per_hour=3600")

    folder = project / "runs" / "burgers1d"
    kept = rows(folder)
    own = {name: value for row in kept for name, value in row.items() if "/" in name}
    told = [json.loads(line) for line in (folder / "theirs.jsonl").read_text().splitlines()]
    assert own.keys() >= NAMES | {GPU}
    assert own[GPU] == 50.0
    assert told[-1] == {"step": -1, "status": "finished"}
    for row in kept:  # each to the last digit, at its own step
        values = {name: value for name, value in row.items() if "/" in name}
        assert {"step": row["step"], **values} in told
    assert {name for row in told for name in row} >= STEPS
    for words in ("GPU 50 % busy", "samples/s", "cost so far", "first batch in all", "stall"):
        assert words in said, words


def names_of_tensorboard(folder: Path) -> dict[str, float]:
    events = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator",
        reason="needs tensorboard: pip install 'stoker[trackers]'",
        exc_type=ImportError,
    )
    read = events.EventAccumulator(str(folder / "tensorboard"))
    read.Reload()
    return {name: read.Scalars(name)[-1].value for name in read.Tags()["scalars"]}


def names_of_wandb(folder: Path) -> dict[str, float]:
    """Of the history rows in the file of the offline run."""
    protocol = pytest.importorskip("wandb.proto.wandb_internal_pb2", exc_type=ImportError)
    (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    found: dict[str, float] = {}
    for data in records_of_a_log(file.read_bytes()):
        record = protocol.Record()
        record.ParseFromString(data)
        for item in record.history.item:
            found["/".join(item.nested_key) or item.key] = json.loads(item.value_json)
    return found


def records_of_a_log(data: bytes) -> Iterator[bytes]:
    """LevelDB's log format: blocks of 32 KiB, records in pieces of a kind (1 whole, 2 first, 3, 4 last)."""
    at, whole = 7, b""  # after the file's own header
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        size, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            yield whole
            whole = b""


def names_of_mlflow(folder: Path) -> dict[str, float]:
    with closing(sqlite3.connect(folder / "mlflow.db")) as store:
        return dict(store.execute("select key, value from metrics order by step"))


@pytest.mark.parametrize(
    ("tracker", "package", "read"),
    [
        ("tensorboard", "tensorboard", names_of_tensorboard),
        ("wandb", "wandb", names_of_wandb),
        ("mlflow", "mlflow", names_of_mlflow),
    ],
)
def test_every_figure_is_read_back_from_the_real_package(
    project: Path, monkeypatch: pytest.MonkeyPatch, tracker: str, package: str, read: Any
) -> None:
    pytest.importorskip(package, reason=f"needs {package}: pip install 'stoker[trackers]'")
    for name in ("WANDB_API_KEY", "WANDB_MODE", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(project))  # no credentials there

    run("train", "c.yaml", f"training.trackers={tracker}", "training.price_per_hour=3600")

    folder = project / "runs" / "burgers1d"
    found = read(folder)
    assert found.keys() >= NAMES | STEPS
    last = rows(folder)[-1]
    for name in NAMES & last.keys():
        assert found[name] == pytest.approx(last[name], rel=1e-6), name
