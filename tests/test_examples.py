"""The examples run as they are, and come to what they promise."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name: str, *arguments: str) -> str:
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_dataset_in_ten_lines_is_encoded_once_and_trained_on(tmp_path: Path) -> None:
    out = run("torch_dataset.py", str(tmp_path))

    found = re.search(r"NRMSE ([\d.]+) \(persistence ([\d.]+)\)", out)
    assert found
    assert float(found[1]) < float(found[2])


def test_one_line_serves_a_dataset(tmp_path: Path) -> None:
    assert "1,000 examples" in run("one_line.py", str(tmp_path))
    assert "1,000 examples" in run("one_line.py", str(tmp_path))


def test_two_tasks_come_in_one_stream_as_often_as_their_weights_say(tmp_path: Path) -> None:
    out = run("mixture.py", str(tmp_path))

    assert "conditions rate, speed" in out
    assert "steps {'fading': 8, 'plain': 24}" in out
