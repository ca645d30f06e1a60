from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stoker.monitor import GpuAbsent
from stoker.pipeline.tracking import COST, GPU, Phase, RunTracking, Startup, tracking
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
        "GPU not measured: training.device",
    ):
        assert words in said, words
    assert again["metrics"]["startup/cache_reused"] == 1.0
    assert again["metrics"][GPU] is None
    assert again["gpu"] == "training.device is cpu"
    assert [phase["note"] for phase in again["startup"]["phases"]][1] == "nothing to encode"


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
        "not measured: training.device",
        "data:image/png;base64",
    ):
        assert words in page, words
    assert 'src="http' not in page
    assert "href=" not in page


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

    (project / "run").mkdir(exist_ok=True)
    config = load_config(
        project / "c.yaml", ["training.run_dir=run", *(f"{k}={v}" for k, v in settings.items())]
    )
    startup = Startup(started_s=0.0, phases=[Phase(name="caches", seconds=1.0)], values={})
    return RunTracking(config, startup, tell=lambda kind, facts: told.append(facts))


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
    Watch.said = GpuAbsent(reason="fell off the bus")
    tracked.listen("epoch", epoch)

    assert told[0][GPU] == pytest.approx(93)
    assert GPU not in told[1]
    assert tracked.gpu is not None
    assert tracked.gpu.reason == "fell off the bus"
