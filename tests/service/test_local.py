"""Processes of jobs on this machine: one of a job at a time, and none that nobody watches."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stoker.errors import StalledError
from stoker.service.executor import JobLimits, JobProgram, LocalExecutor, LocalProcess
from stoker.service.folders import JobFolder

PROGRAM = JobProgram(target="tests.service.stand_in:run_code", modules=("stoker.service.executor",))
ROOT = Path(__file__).parents[2]
SLEEP = "import time; time.sleep(600)"
SLEEPER = (sys.executable, "-I", "-S", "-c", SLEEP)


@pytest.fixture
def folder(tmp_path: Path) -> JobFolder:
    made = JobFolder(tmp_path / "job")
    made.make()
    return made


@pytest.fixture
def executor() -> LocalExecutor:
    return LocalExecutor(take_over_s=20.0)


def start(executor: LocalExecutor, folder: JobFolder, code: str, **limits: Any) -> LocalProcess:
    """A job whose process runs a piece of code."""
    (folder.path / "code.py").write_text(code)
    return executor.lock(folder).start(PROGRAM, JobLimits(**limits))


def soon(true: Callable[[], object], limit_s: float = 30.0) -> bool:
    deadline = time.monotonic() + limit_s
    while not true() and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(true())


def ended(run: LocalProcess) -> int:
    assert soon(lambda: run.poll() is not None)
    code = run.poll()
    assert code is not None
    return code


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_output_goes_to_the_log_and_the_status_is_told(executor: LocalExecutor, folder: JobFolder) -> None:
    code = "import os, sys; print(os.environ['CUDA_VISIBLE_DEVICES']); sys.exit('and here')"

    run = start(executor, folder, code, devices="3")

    assert ended(run) == 1
    assert sorted(folder.log.read_text().split("\n")) == ["", "3", "and here"]


def test_a_later_claim_ends_the_process_of_an_earlier_one(executor: LocalExecutor, folder: JobFolder) -> None:
    """Its worker was declared dead, for instance because it was stopped for an hour, and is not."""
    earlier = start(executor, folder, f"print('earlier', flush=True); {SLEEP}")
    assert soon(lambda: "earlier" in folder.log.read_text())  # its code is read, and replaced next

    later = start(executor, folder, "print('later')")

    assert ended(earlier) == -signal.SIGKILL
    assert ended(later) == 0
    assert folder.log.read_text() == "earlier\nlater\n"


def test_a_lock_that_nobody_can_be_made_to_give_up_is_reported(folder: JobFolder) -> None:
    """As of a process that hangs in the system, or on another machine that shares the folder."""
    held = LocalExecutor().lock(folder)
    folder.lock.write_text("group 1 12345 another-boot 1\n")

    with pytest.raises(StalledError, match=r"still held \(group 1 .*tried again later"):
        LocalExecutor(take_over_s=0.1).lock(folder)

    held.release()
    LocalExecutor(take_over_s=0.1).lock(folder).release()


def test_nobody_of_the_same_number_is_killed_in_its_place(folder: JobFolder) -> None:
    bystander = subprocess.Popen(SLEEPER, start_new_session=True)
    held = LocalExecutor().lock(folder)
    folder.lock.write_text(f"group {bystander.pid} 1 of-another-boot 1\n")

    with pytest.raises(StalledError):
        LocalExecutor(take_over_s=0.1).lock(folder)

    assert bystander.poll() is None
    held.release()
    bystander.kill()
    bystander.wait()


def test_what_a_process_left_behind_ends_with_it(executor: LocalExecutor, folder: JobFolder) -> None:
    code = f"import subprocess; p = subprocess.Popen({SLEEPER!r}); print(p.pid)"

    run = start(executor, folder, code)

    assert ended(run) == 0
    left_behind = int(folder.log.read_text())
    assert soon(lambda: not alive(left_behind))


def test_a_process_dies_with_its_worker(folder: JobFolder) -> None:
    (folder.path / "code.py").write_text(SLEEP)
    worker = f"""
import time
from pathlib import Path
from tests.service.test_local import PROGRAM, JobFolder, JobLimits, LocalExecutor
run = LocalExecutor().lock(JobFolder(Path({str(folder.path)!r}))).start(PROGRAM, JobLimits())
print(run.pid, flush=True)
time.sleep(600)
"""
    started = subprocess.Popen([sys.executable, "-c", worker], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert started.stdout is not None
    with started, started.stdout:
        pid = int(started.stdout.readline())
        assert alive(pid)
        started.kill()

    assert soon(lambda: not alive(pid))


def test_a_process_that_holds_too_much_memory_is_named_with_figures(
    executor: LocalExecutor, folder: JobFolder
) -> None:
    code = "import time; held = bytes(range(256)) * 4 * 250 * 1024; time.sleep(600)"
    run = start(executor, folder, code, memory_bytes=200 * 2**20)

    assert soon(run.exceeded)
    assert "200 MiB" in run.exceeded()
    run.kill()
    assert ended(run) == -signal.SIGKILL


def test_a_process_that_takes_too_long_is_named_with_figures(
    executor: LocalExecutor, folder: JobFolder
) -> None:
    run = start(executor, folder, SLEEP, wall_s=0.1)

    assert soon(run.exceeded)
    assert "an attempt may take" in run.exceeded()
    run.terminate()
    assert ended(run) == -signal.SIGTERM
