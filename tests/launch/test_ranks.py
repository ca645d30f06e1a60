"""What the start-up script runs under torchrun: exit codes, and an end in time."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.launch.box import wait_for

START = [sys.executable, "-m", "stoker.extras.launch.ranks"]


def project(where: Path, script: str) -> Path:
    """A folder in which `-m stoker` runs this in place of the product."""
    (where / "stoker").mkdir(parents=True)
    (where / "stoker" / "__init__.py").touch()
    (where / "stoker" / "__main__.py").write_text(f"import os, signal, sys, time\n{script}\n")
    return where


@pytest.mark.parametrize(
    ("script", "code"),
    [
        pytest.param("sys.exit(6 if os.environ['RANK'] == '1' else 0)", 6, id="one-fails"),
        pytest.param("os.kill(os.getpid(), signal.SIGKILL)", 137, id="killed", marks=pytest.mark.slow),
        pytest.param("assert sys.argv[1:] == ['train', 'a b']", 0, id="well", marks=pytest.mark.slow),
    ],
)
def test_the_exit_code_is_that_of_the_rank_that_failed(tmp_path: Path, script: str, code: int) -> None:
    """torchrun itself says 1 whatever happened."""
    runner = tmp_path / "run.py"
    where = project(tmp_path / "fake", script)
    runner.write_text(
        "import sys; from stoker.extras.launch.ranks import run_ranks\n"
        f"import os; os.chdir({str(where)!r}); os.environ['PYTHONPATH'] = {str(where)!r}\n"
        "sys.exit(run_ranks(2, 5, ['train', 'a b']))\n"
    )

    done = subprocess.run([sys.executable, str(runner)], capture_output=True, text=True, timeout=120)

    assert done.returncode == code, done.stderr


@pytest.mark.slow
def test_ranks_have_their_time_to_end_and_no_more(tmp_path: Path) -> None:
    body = (
        "r = os.environ['RANK']\n"
        "def end(*_):\n"
        "    if r == '0':\n"
        "        time.sleep(1); open('sealed', 'w').close(); sys.exit(130)\n"
        "signal.signal(signal.SIGTERM, end); open('begun' + r, 'w').close()\n"
        "while True: time.sleep(0.1)"
    )
    where = project(tmp_path / "fake", body)
    runner = tmp_path / "run.py"
    runner.write_text(
        "import sys; from stoker.extras.launch.ranks import run_ranks\n"
        f"import os; os.chdir({str(where)!r}); os.environ['PYTHONPATH'] = {str(where)!r}\n"
        "sys.exit(run_ranks(2, 4, ['train']))\n"
    )
    process = subprocess.Popen([sys.executable, str(runner)], stderr=subprocess.DEVNULL)
    wait_for(lambda: (where / "begun0").exists() and (where / "begun1").exists())
    ranks = psutil.Process(process.pid).children(recursive=True)

    process.send_signal(signal.SIGTERM)

    assert process.wait(60) == 130
    assert (where / "sealed").exists()
    assert not [one for one in ranks if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.slow
def test_a_command_that_is_refused_is_refused_with_its_code(tmp_path: Path) -> None:
    done = subprocess.run(
        [*START, "1", "5", "train", "none.yaml"], capture_output=True, text=True, timeout=120, cwd=tmp_path
    )

    assert done.returncode == 3, done.stderr
    assert "none.yaml" in done.stderr
