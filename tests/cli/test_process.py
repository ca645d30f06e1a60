"""Commands as processes: what a script or a shell sees."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

STOKER = [sys.executable, "-m", "stoker.cli.main"]
DEADLINE_S = 120


def stoker(project: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*STOKER, *args], cwd=project, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )


def test_help_does_not_import_torch() -> None:
    code = (
        "import sys\n"
        "from stoker.cli.main import app\n"
        "for words in (['--help'], ['train', '--help'], ['--version']):\n"
        "    try:\n"
        "        app(words)\n"
        "    except SystemExit as stop:\n"
        "        assert stop.code == 0\n"
        "heavy = {'torch', 'h5py', 'matplotlib', 'omegaconf', 'numpy'} & sys.modules.keys()\n"
        "assert not heavy, heavy\n"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE_S)

    assert done.returncode == 0, done.stderr
    assert "Commands:" in done.stdout


def test_json_is_the_only_thing_on_standard_output(project: Path) -> None:
    done = stoker(project, "train", "c.yaml", "training.epochs=1", "--json")

    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1
    assert json.loads(done.stdout)["epochs"] == 1
    assert "epoch 1" in done.stderr


@pytest.mark.parametrize(
    ("args", "exit_code", "words"),
    [
        pytest.param(["plan"], 2, "CONFIG", id="usage"),
        pytest.param(
            ["plan", "c.yaml", "latent.dimm=1"], 3, "did you mean latent.dim?", id="unknown-setting"
        ),
        pytest.param(["inspect", "raw"], 4, "raw", id="no-cache"),
    ],
)
def test_exit_codes(project: Path, args: list[str], exit_code: int, words: str) -> None:
    done = stoker(project, *args)

    assert done.returncode == exit_code, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_sigterm_ends_a_run_with_130(project: Path) -> None:
    running = subprocess.Popen(
        [*STOKER, "train", "c.yaml", "training.epochs=4000", "training.batch_size=4"],
        cwd=project,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert running.stderr is not None
        deadline = time.monotonic() + DEADLINE_S
        while "epoch 1" not in running.stderr.readline():
            assert time.monotonic() < deadline
        running.send_signal(signal.SIGTERM)
        _, rest = running.communicate(timeout=DEADLINE_S)
    finally:
        running.kill()

    assert running.returncode == 130, rest
    assert "Traceback" not in rest
