from __future__ import annotations

from pathlib import Path
from typing import Any

from stoker.train.config import TrainReport
from stoker.train.report import write_report


def report(**changes: Any) -> TrainReport:
    facts: dict[str, Any] = {
        "tier": "host", "stall": 0.003, "step_s": 0.0123, "epochs": 2, "steps": 1500, "val_nrmse": 0.0264,
        "best_val_nrmse": 0.0261, "persistence_nrmse": 0.0748, "rollout_nrmse": 0.331,
        "rollout_persistence_nrmse": 1.77, "run_dir": Path("runs"), "startup": {},
    }  # fmt: skip
    return TrainReport(**{**facts, **changes})


def page(folder: Path, rows: list[dict[str, Any]], found: TrainReport) -> str:
    write_report(folder, rows, found, {"lr": 1e-3, "run": "<b>"})
    return (folder / "report.html").read_text()


def test_each_error_stands_beside_its_own_persistence(tmp_path: Path) -> None:
    text = page(tmp_path, [], report())

    assert "0.0264 <small>persistence 0.0748</small>" in text
    assert "0.331 <small>persistence 1.77</small>" in text
    assert "0.3 % <small>host tier</small>" in text
    assert "12.3 ms" in text


def test_a_step_stands_beside_one_that_never_waits(tmp_path: Path) -> None:
    text = page(tmp_path, [], report(ceiling_step_s=0.0111))

    assert "12.3 ms <small>11.1 ms without loading</small>" in text


def test_epochs_settings_and_how_it_was_computed_are_on_the_page(tmp_path: Path) -> None:
    rows = [
        {"kind": "start", "step": 0, "float32_matmul": "tf32"},
        {"kind": "step", "step": 50, "loss": 0.5},
        {
            "kind": "epoch",
            "epoch": 1,
            "step": 1500,
            "loss": 0.5,
            "val_nrmse": None,
            "stall": 0.25,
            "seconds": 2.0,
        },
    ]

    text = page(tmp_path, rows, report())

    assert "<td>1</td><td>1,500</td><td>0.5</td><td>-</td>" in text
    assert "<td>25 %</td><td>2 s</td>" in text
    assert "<td>float32_matmul</td><td>tf32</td>" in text
    assert "<td>run</td><td>&lt;b&gt;</td>" in text


def test_a_run_without_validation_or_meter_has_dashes(tmp_path: Path) -> None:
    nothing = dict.fromkeys(
        ("stall", "step_s", "val_nrmse", "best_val_nrmse", "persistence_nrmse", "rollout_nrmse",
         "rollout_persistence_nrmse")
    )  # fmt: skip

    text = page(tmp_path, [], report(tier="", **nothing))

    assert "<dt>validation NRMSE</dt><dd>-</dd>" in text
    assert "None" not in text
