"""The JSON of results that is made from their fields: every key, and what becomes of paths and schemas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from stoker.errors import SourceError, arg
from stoker.extras.radio.demo import RadioSpec
from stoker.precompute.background import SpotReport
from stoker.precompute.measure import EncodeBatch
from stoker.run.bench import BenchFigure, BenchResult, EncodeBench
from stoker.run.caches import CacheFolder, CacheSummary, Explanation
from stoker.run.precompute import PrecomputeResult, TaskFailure
from stoker.run.staging import StageReport, StageResult
from stoker.run.train import StartupPhase, TrainResult
from stoker.run.validate import CheckRow, Validation
from stoker.schema import Field
from stoker.store import Difference
from stoker.train.config import TrainReport

FIGURE = BenchFigure(what="copying", bytes_s=2.5, scatter=0.125)
FIGURE_JSON: dict[str, Any] = {
    "what": "copying", "bytes_s": 2.5, "scatter": 0.125, "limit": None, "fraction": None, "batch_s": None,
}  # fmt: skip
SUMMARY = CacheSummary(
    name="a", path="/c/a", address=None, fingerprint="f0", records=2, count=3,
    fields={
        "u": Field(shape=(4, 2), dtype="float32", time=True),
        "r": Field(shape=(-1,), dtype="int64", ragged=True, axes=("p",)),
    },
    shards=1, bytes=10, raw_bytes=20,
    missing_shards=({"shard": "s", "records": 1, "bytes": None, "expected_bytes": 8},), complete=False,
    quarantined=({"number": 1, "stage": "read", "error": "x"},),
    statistics={"u": {"mean": [0.5]}}, error={"u": {"max": 0.25}},
)  # fmt: skip
SUMMARY_JSON: dict[str, Any] = {
    "name": "a", "path": "/c/a", "address": None, "fingerprint": "f0", "records": 2, "count": 3,
    "fields": {
        "u": {"shape": [4, 2], "dtype": "float32", "time": True, "ragged": False},
        "r": {"shape": [-1], "dtype": "int64", "time": False, "ragged": True, "axes": ["p"]},
    },
    "shards": 1, "bytes": 10, "raw_bytes": 20,
    "missing_shards": [{"shard": "s", "records": 1, "bytes": None, "expected_bytes": 8}], "complete": False,
    "quarantined": [{"number": 1, "stage": "read", "error": "x"}],
    "statistics": {"u": {"mean": [0.5]}}, "error": {"u": {"max": 0.25}},
}  # fmt: skip
REPORT = TrainReport(
    tier="host", stall=0.01, step_s=0.002, epochs=2, steps=8, val_nrmse=0.3, best_val_nrmse=0.2,
    persistence_nrmse=0.9, rollout_nrmse=0.5, rollout_persistence_nrmse=1.1, run_dir=Path("runs/x"),
    startup={"first_batch_s": 0.5}, tasks={"a": {"val_nrmse": 0.3}}, stages=[{"name": "operator"}],
    parts={"read": 0.25}, ceiling_step_s=0.001, lost=0.125, physical_nrmse=0.4,
    physical_persistence_nrmse=0.8, physical_rollout_nrmse=0.6, physical_rollout_persistence_nrmse=1.2,
    reconstruction_nrmse=0.05, target="y", val_loss=0.7, best_val_loss=0.6, accuracy=0.9,
    baseline_accuracy=0.5,
)  # fmt: skip
TRAIN = TrainResult(
    report=REPORT, phases=(StartupPhase(name="caches", seconds=1.5, note="none"),),
    metrics={"m": 1.0}, gpu="no GPU",
    caches=(), cache_s=1.5, total_s=3.0, train_s=4.0, reason="fits", epoch_steps=4, repaired=1,
    spot_check=SpotReport(wanted=2, checked=2, different=(), failed=()), over_budget="waited",
)  # fmt: skip
TRAIN_JSON: dict[str, Any] = {
    "tier": "host", "stall": 0.01, "stall_parts": {"read": 0.25}, "step_s": 0.002, "ceiling_step_s": 0.001,
    "lost": 0.125, "over_budget": "waited", "epochs": 2, "epoch_steps": 4, "steps": 8, "val_nrmse": 0.3,
    "best_val_nrmse": 0.2, "persistence_nrmse": 0.9, "rollout_nrmse": 0.5, "rollout_persistence_nrmse": 1.1,
    "tasks": {"a": {"val_nrmse": 0.3}}, "physical_nrmse": 0.4, "physical_persistence_nrmse": 0.8,
    "physical_rollout_nrmse": 0.6, "physical_rollout_persistence_nrmse": 1.2, "reconstruction_nrmse": 0.05,
    "target": "y", "val_loss": 0.7, "best_val_loss": 0.6, "accuracy": 0.9, "baseline_accuracy": 0.5,
    "stages": [{"name": "operator"}], "run_dir": "runs/x",
    "startup": {
        "first_batch_s": 0.5, "cache_s": 1.5, "total_s": 3.0,
        "phases": [{"name": "caches", "seconds": 1.5, "note": "none"}],
    },
    "metrics": {"m": 1.0, "training/gpu_utilization_pct": None}, "gpu": "no GPU", "cache_reused": True,
    "train_s": 4.0, "repaired": 1,
    "spot_check": {"wanted": 2, "checked": 2, "different": [], "failed": []}, "reason": "fits", "caches": [],
}  # fmt: skip
RESULTS: list[tuple[Any, dict[str, Any]]] = [
    (StartupPhase(name="caches", seconds=1.5), {"name": "caches", "seconds": 1.5, "note": ""}),
    (
        BenchResult(
            machine="m", cache="", limits={"copy": FIGURE}, tiers={}, advice="none",
            picture=Path("p.png"), seconds=2.0,
        ),
        {
            "machine": "m", "cache": "", "limits": {"copy": FIGURE_JSON}, "tiers": {}, "advice": "none",
            "picture": "p.png", "seconds": 2.0,
        },
    ),
    (
        StageReport(
            tasks=(StageResult(task="a", staged=True, reason="far", files=2, bytes=9, path=Path("/v")),)
        ),
        {
            "tasks": [{
                "task": "a", "staged": True, "reason": "far", "files": 2, "bytes": 9, "copied_bytes": 0,
                "path": "/v", "seconds": 0.0,
            }]
        },
    ),
    (SUMMARY, SUMMARY_JSON),
    (
        CacheFolder(path="/c", caches=(SUMMARY,), unreadable={"b": "damaged"}),
        {"path": "/c", "caches": [SUMMARY_JSON], "unreadable": {"b": "damaged"}},
    ),
    (
        PrecomputeResult(
            caches=(), failed=(TaskFailure(task="a", cause=SourceError(f"use {arg('preset', 'well')}")),)
        ),
        {"caches": [], "failed": [{"task": "a", "error": "use data.preset=well", "exit_code": 3}]},
    ),
    (
        EncodeBench(
            task="a", settled=None, fixed_rule=8,
            found=EncodeBatch(samples=4, device="cpu", trials=(), why="memory ends"),
        ),
        {
            "samples": 4, "device": "cpu", "trials": [], "why": "memory ends", "task": "a",
            "setting": "precompute.encode_batch=4", "fixed_rule": 8, "in_force": None,
        },
    ),
    (
        Validation(rows=(CheckRow(check="disk", status="fail", detail="full", exit_code=6),)),
        {"rows": [{"check": "disk", "status": "fail", "detail": "full"}], "exit_code": 6},
    ),
    (
        Explanation(a="x", b="y", differences=(Difference(entry="dtype", a="float16", b=None, note="n"),)),
        {
            "same": False, "differences": [{"entry": "dtype", "a": "float16", "b": None, "note": "n"}],
            "a": "x", "b": "y",
        },
    ),
    (
        RadioSpec(rows=5),
        {
            "rows": 5, "seed": 0, "power_dbm": 37.0, "present_snr_db": 3.0, "least_receivers": 3,
            "least_snr_db": 5.0, "most_gdop": 150.0, "name": "",
        },
    ),
    (TRAIN, TRAIN_JSON),
]  # fmt: skip


@pytest.mark.parametrize(("result", "expected"), RESULTS, ids=lambda one: type(one).__name__)
def test_every_key_that_scripts_rely_on_is_there_and_no_other(result: Any, expected: dict[str, Any]) -> None:
    assert result.to_json() == expected
