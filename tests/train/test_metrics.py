from __future__ import annotations

import json
from pathlib import Path

from stoker.train.state import MetricsLog


def test_lines_are_read_back_and_infinities_become_null(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.append({"kind": "step", "step": 1, "loss": 0.5})
    log.append({"kind": "epoch", "step": 2, "loss": float("inf")})

    assert log.rows() == [
        {"kind": "step", "step": 1, "loss": 0.5},
        {"kind": "epoch", "step": 2, "loss": None},
    ]


def test_a_half_written_line_is_passed_over_and_dropped_by_keep(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl")
    for step in range(3):
        log.append({"step": step})
    with log.path.open("a") as file:
        file.write('{"step": 3, "lo')

    log.keep(lambda row: row["step"] < 2)
    log.append({"step": 9})

    assert [json.loads(line)["step"] for line in log.path.read_text().splitlines()] == [0, 1, 9]
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]
