"""With the real packages: `pip install 'stoker[trackers]'`."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest

from stoker.monitor.trackers import TrackedRun, TrackerProcesses

SETTINGS: dict[str, Any] = {"training": {"lr": 0.1, "order": "full"}}
ROWS = {3: {"training/stall": 0.5, "startup/cache_reused": 1.0}, 7: {"training/stall": 0.25}}


def track(name: str, folder: Path, *, resumed: bool = False, rows: Any = ROWS) -> None:
    said: list[str] = []
    run = TrackedRun(name="mine", folder=folder, settings=SETTINGS, resumed=resumed)
    tracking = TrackerProcesses([name], run, said.append, end_s=120.0)
    for step, values in rows.items():
        tracking.log(step, values)
    tracking.end("finished")
    assert said == [], (folder / f"tracker-{name}.log").read_text()


def test_tensorboard_reads_the_figures_back(tmp_path: Path) -> None:
    events = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator",
        reason="needs tensorboard: pip install 'stoker[trackers]'",
        exc_type=ImportError,
    )

    track("tensorboard", tmp_path)

    read = events.EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    assert [(e.step, e.value) for e in read.Scalars("training/stall")] == [(3, 0.5), (7, 0.25)]
    assert [(e.step, e.value) for e in read.Scalars("startup/cache_reused")] == [(3, 1.0)]


def test_an_mlflow_store_holds_figures_settings_and_the_end_and_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("mlflow", reason="needs mlflow-skinny: pip install 'stoker[trackers]'")
    pytest.importorskip("alembic", reason="needs alembic: pip install 'stoker[trackers]'")

    track("mlflow", tmp_path)
    track("mlflow", tmp_path, resumed=True, rows={9: {"training/stall": 0.125}})

    with sqlite3.connect(tmp_path / "mlflow.db") as store:
        rows = store.execute(
            "select step, value from metrics where key = 'training/stall' order by step"
        ).fetchall()
        runs = store.execute("select name, status from runs").fetchall()
        params = dict(store.execute("select key, value from params").fetchall())
    store.close()
    assert rows == [(3, 0.5), (7, 0.25), (9, 0.125)]
    assert runs == [("mine", "FINISHED")]
    assert params == {"training.lr": "0.1", "training.order": "full"}


def test_an_offline_run_of_weights_and_biases_holds_the_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="needs wandb: pip install 'stoker[trackers]'")
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))  # no credentials there

    track("wandb", tmp_path)

    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    held = file.read_bytes()
    for word in (b"training/stall", b"startup/cache_reused", b"0.25", b"mine"):
        assert word in held, word
