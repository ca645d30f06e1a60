"""Commands as processes: what a script or a shell sees."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from stoker.cli.main import app
from tests.kit import forked

STOKER = [sys.executable, "-m", "stoker"]
DEADLINE_S = 120
CACHE = "data/latent_cache/burgers1d_train"


def stoker(project: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*STOKER, *args], cwd=project, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )


@pytest.fixture
def cached_project(project: Path) -> Path:
    """The project, its caches filled."""
    result = CliRunner().invoke(app, ["precompute", "c.yaml"])
    assert result.exit_code == 0, result.output
    return project


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
    assert "precompute" in done.stdout


@pytest.mark.slow
def test_start_up_does_not_count_what_a_shell_did_before_the_command(cached_project: Path) -> None:
    words = [*STOKER, "train", "c.yaml", "training.epochs=1", "--json"]
    waited_s = 5

    began = time.monotonic()
    done = subprocess.run(
        ["sh", "-c", f'sleep {waited_s}; exec "$@"', "sh", *words],
        cwd=cached_project,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["startup"]["total_s"] <= time.monotonic() - began - waited_s


def test_json_is_the_only_thing_on_standard_output(project: Path) -> None:
    done = stoker(project, "train", "c.yaml", "training.epochs=1", "--json")

    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1
    assert json.loads(done.stdout)["epochs"] == 1
    assert "epoch 1" in done.stderr


@pytest.mark.parametrize(
    ("args", "exit_code", "words"),
    [
        pytest.param(["cache", "gc"], 2, "CACHE_DIR", id="usage"),
        pytest.param(
            ["plan", "c.yaml", "latent.dimm=1"], 3, "Did you mean latent.dim?", id="unknown-setting"
        ),
        pytest.param(["cache", "show", "raw"], 4, "raw", id="no-cache"),
    ],
)
def test_exit_codes(project: Path, args: list[str], exit_code: int, words: str) -> None:
    done = forked.run([*STOKER, *args], cwd=project, capture_output=True, text=True, timeout=DEADLINE_S)

    assert done.returncode == exit_code, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


COMMANDS = [
    pytest.param(
        ["train", "c.yaml", "training.max_steps=1", "--json"], id="in-a-child", marks=pytest.mark.slow
    ),
    pytest.param(["cache", "show", CACHE], id="text"),
    pytest.param(["--help"], id="help"),
]


@pytest.mark.parametrize("args", COMMANDS)
def test_a_full_standard_output_is_one_line_and_an_exit_code(cached_project: Path, args: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        done = forked.run(
            [*STOKER, *args], cwd=cached_project, stdout=full, stderr=subprocess.PIPE, text=True,
            timeout=DEADLINE_S, check=False,
        )  # fmt: skip

    assert done.returncode == 6
    assert done.stderr.count("standard output cannot be written: No space left on device") == 1
    assert "Traceback" not in done.stderr
    assert "unexpected" not in done.stderr


@pytest.mark.parametrize(
    "args",
    [
        pytest.param(COMMANDS[0].values[0], id="in-a-child", marks=pytest.mark.slow),
        pytest.param(["plan", "--json"], id="usage"),
    ],
)
def test_a_reader_that_went_away_is_no_fault_to_talk_about(cached_project: Path, args: list[str]) -> None:
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    done = forked.run(
        [*STOKER, *args], cwd=cached_project, stdout=write_fd, stderr=subprocess.PIPE, text=True,
        timeout=DEADLINE_S, check=False,
    )  # fmt: skip
    os.close(write_fd)

    assert "Traceback" not in done.stderr
    assert "Broken pipe" not in done.stderr
    assert "cannot be written" not in done.stderr


@pytest.mark.slow
def test_closed_standard_streams_change_nothing(cached_project: Path) -> None:
    """Else the next file opened would be standard output, and what libraries print would go into it."""
    command = [*STOKER, "train", "c.yaml", "training.max_steps=1", "--json"]
    shell = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command]

    done = subprocess.run(shell, cwd=cached_project, timeout=DEADLINE_S, check=False)

    assert done.returncode == 0


@pytest.mark.slow
def test_a_full_standard_error_ends_no_run(project: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*STOKER, "train", "c.yaml", "training.max_steps=1", "--json"],
            cwd=project, stdout=subprocess.PIPE, stderr=full, text=True, timeout=DEADLINE_S, check=False,
        )  # fmt: skip

    assert done.returncode == 0
    assert json.loads(done.stdout)["steps"] == 1


@pytest.mark.slow
def test_a_second_run_in_one_folder_is_refused_at_once_and_names_the_first(project: Path) -> None:
    started = [*STOKER, "train", "c.yaml", "training.epochs=4000", "training.batch_size=4"]
    with subprocess.Popen(started, cwd=project, stderr=subprocess.PIPE, text=True) as first:
        try:
            assert first.stderr is not None
            deadline = time.monotonic() + DEADLINE_S
            while "epoch 1" not in first.stderr.readline():
                assert time.monotonic() < deadline
            # Other latents: it would have to encode first, were it let in.
            second = stoker(project, "train", "c.yaml", "latent.dim=4", "--json")
            assert first.poll() is None
        finally:
            first.kill()

    assert second.returncode == 3
    error = json.loads(second.stdout)["error"]
    assert re.match(
        rf"process \d+ on {re.escape(os.uname().nodename)} is training in runs/burgers1d\.", error
    )
    assert "training.run_dir" in error
    assert len(list(project.glob("data/latent_cache/burgers1d_train/*"))) == 1


def test_sigterm_ends_a_run_with_130(project: Path) -> None:
    running = forked.Popen(
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
