"""Stalls, notices, kills, and what is safe elsewhere by then."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.launch.box import KILL, Box, is_running, wait_for
from tests.launch.conftest import model
from tests.launch.test_script import ORDER

TRAIN = "?train?c.yaml"


def busy(box: Box, name: str, body: str) -> str:
    """A fault that runs these lines in place of training, until it is ended."""
    path = box.root / name
    path.write_text(f"{body}\ntouch $BOX/begun\nwhile :; do sleep 0.05; done\n")
    return f"{TRAIN}:exec${{IFS}}bash${{IFS}}{path}"


def test_a_stall_ends_the_run_and_stops_the_machine(box: Box) -> None:
    script = model(box, stall_minutes=0.06).render()

    code, output = box.run(script, fail=f"{TRAIN}:exec${{IFS}}sleep${{IFS}}300")

    assert code == 5, output
    assert "stoker-launch: stall in step train" in output
    assert box.stopped()


def test_a_notice_lets_the_run_seal_and_then_uploads_and_stops(box: Box) -> None:
    """What a provider or Slurm sends before it takes the machine away."""
    fail = busy(box, "sealing", 'trap "touch $BOX/sealed; mkdir -p runs/a; exit 130" TERM')
    process = box.start(model(box).render(), fail=fail)
    wait_for((box.root / "begun").exists)

    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)

    assert process.returncode == 130, output
    assert (box.root / "sealed").exists()
    assert "signal in step train" in output
    assert [call[1] for call in box.calls() if call[0] == "rclone"][-2:] == ["copy", "sync"]
    assert box.stopped()


def test_a_notice_reaches_a_command_and_what_it_made_goes_up(box: Box) -> None:
    body = 'trap "touch $BOX/saved; exit 130" TERM; touch $BOX/begun; while :; do sleep 0.05; done'
    command = f"mkdir -p data/cache runs/a && bash -c '{body}' && echo never"
    one = model(box, command=command, target="box")
    process = box.start(one.render())
    wait_for((box.root / "begun").exists)

    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)

    assert process.returncode == 130, output
    assert (box.root / "saved").exists()
    assert "signal in step command" in output
    sent = [call[-1] for call in box.calls() if call[0] == "rclone"][-3:]
    assert sent == [f"far:{box.root}/{place}" for place in ("up/run", "up/run/run", "cache")]


def test_a_command_without_a_line_is_a_stall(box: Box) -> None:
    code, output = box.run(model(box, command="sleep 300", stall_minutes=0.06).render())

    assert code == 5, output
    assert "stoker-launch: stall in step command" in output


def test_neither_a_deaf_run_nor_a_hanging_upload_outlives_the_grace(box: Box) -> None:
    fail = busy(box, "deaf", 'trap "" TERM\necho $$ >$BOX/pid') + " copy?-q:exec${IFS}sleep${IFS}300"
    process = box.start(model(box, grace=4).render(), fail=fail)
    wait_for((box.root / "begun").exists)
    begin = time.monotonic()

    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)

    assert time.monotonic() - begin < 40, "a bound against hangs: rclone would have slept for 300 s"
    assert process.returncode == 130
    assert not is_running(int((box.root / "pid").read_text()))
    assert "step upload failed with exit code" in output
    assert box.stopped()


def test_log_and_run_go_up_while_it_trains(box: Box) -> None:
    """A machine that vanishes without a word takes nothing along but the last minutes."""
    fail = busy(box, "working", "mkdir -p runs/a/checkpoints")
    process = box.start(model(box, upload_minutes=0.01).render(), fail=fail)
    wait_for(lambda: sum(call[:2] == ["rclone", "sync"] for call in box.calls()) > 1)

    assert process.poll() is None
    assert next(call for call in box.calls() if call[1] == "sync")[-3:] == [
        "--", "./runs/a", f"far:{box.root}/up/run/run",
    ]  # fmt: skip
    box.clear()
    process.communicate(timeout=60)


def test_an_upload_that_fails_meanwhile_is_told_once_and_tried_again(box: Box) -> None:
    fail = busy(box, "working", "") + " copy?-q:exit${IFS}1"
    process = box.start(model(box, upload_minutes=0.01).render(), fail=fail)
    wait_for(lambda: sum(call[:3] == ["rclone", "copy", "-q"] for call in box.calls()) > 2)

    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)

    assert output.count("upload failed, tried again later") == 1
    assert process.returncode == 130


def test_nothing_is_removed_elsewhere_before_it_has_come_here(box: Box) -> None:
    """`sync` makes the far folder what the near one is, which is empty on a new machine."""
    script = model(box).render()
    (box.workdir / "code/runs/a").mkdir(parents=True)

    box.run(script, fail="stoker?data?fetch:exit${IFS}3")
    assert not [call for call in box.calls() if call[:2] == ["rclone", "sync"]]
    box.run(script, fail="copy?-uv:exit${IFS}3")
    assert not [call for call in box.calls() if call[:2] == ["rclone", "sync"]]
    box.run(script, fail=f"{TRAIN}:exit${{IFS}}3")
    words = [call[1] for call in box.calls() if call[0] == "rclone"]
    assert words.index("sync") > words.index("copy"), words


def kill_at(box: Box, script: str, number: int) -> bool:
    """Take the power away before the script's n-th command; False: it had fewer."""
    (box.root / "kill_at").write_text(f"{number}\n")
    process = box.start(script)
    process.wait(timeout=100)
    box.clear()
    process.communicate(timeout=60)
    (box.root / "kill_at").unlink(missing_ok=True)
    return process.returncode == -signal.SIGKILL


def prepare_kills(box: Box) -> None:
    (box.root / "kill.sh").write_text(KILL)
    box.environment["BASH_ENV"] = str(box.root / "kill.sh")


@pytest.mark.chaos
def test_killed_at_some_commands_the_next_start_goes_through(box: Box) -> None:
    script = model(box).render()
    prepare_kills(box)

    assert all(kill_at(box, script, number) for number in (100, 160, 220))

    code, output = box.run(script)
    assert code == 0, output
    assert box.commands() == ORDER


@pytest.mark.chaos
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("number", range(4))
def test_killed_at_every_command_the_next_start_goes_through(box: Box, number: int) -> None:
    """Every fourth command, from the `number`th on."""
    script = model(box).render()
    prepare_kills(box)
    while kill_at(box, script, number):
        number += 4
        code, output = box.run(script)
        assert code == 0, (number, output)
        assert box.commands() == ORDER or "finished before" in output, (number, output)
        assert box.asked.pop()[1] == "/v0/instances/77/"
        shutil.rmtree(box.workdir)
    assert number > 200


def test_locks_of_a_killed_git_are_no_obstacle(box: Box) -> None:
    script = model(box).render()
    (box.workdir / "code" / ".git").mkdir(parents=True)
    for name in ("index.lock", "shallow.lock"):
        (box.workdir / "code" / ".git" / name).touch()

    assert box.run(script)[0] == 0


def slurm(box: Box, state: str) -> None:
    """Programs of Slurm; jobs are in this state."""
    scontrol = box.root / "bin" / "scontrol"
    text = (box.root / "bin" / "apt-get").read_text().replace("apt-get", "scontrol")
    scontrol.write_text(text.replace("exit 100", f'echo "   JobState={state} Reason=None"'))
    scontrol.chmod(0o755)
    box.environment |= {"SLURM_JOB_ID": "4711", "SLURM_TMPDIR": str(box.root / "node local")}


@pytest.mark.parametrize(
    ("state", "again"),
    [pytest.param("RUNNING", True, id="preempted"), pytest.param("CANCELLED", False, id="cancelled")],
)
def test_a_job_of_slurm_is_put_back_in_the_queue_unless_it_was_cancelled(
    box: Box, state: str, again: bool
) -> None:
    script = model(box, target="slurm", scratch=True).render()
    slurm(box, state)
    process = box.start(script, fail=busy(box, "working", ""))
    wait_for((box.root / "begun").exists)

    os.kill(process.pid, signal.SIGTERM)
    process.communicate(timeout=60)

    assert process.returncode == 130
    assert (["scontrol", "requeue", "4711"] in box.calls()) == again
    assert box.asked == []
    scratch = f"data.stage_dir={box.root}/node local/stoker"
    assert all(call[-2:] == ["data.stage=auto", scratch] for call in box.stokers())
    begun = box.root / "begun"
    begun.unlink()
    assert box.run(script)[0] == 0, "the job comes again"
    assert box.commands() == ORDER
    assert not [call for call in box.calls() if call[0] == "scontrol"]


def test_sbatch_reads_its_lines_before_the_first_command(box: Box, tmp_path: Path) -> None:
    script = model(box, target="slurm", gpus=2).render()
    lines = script.splitlines()
    first = next(number for number, line in enumerate(lines) if number and not line.startswith("#"))
    assert lines[1:first] == [line for line in lines if line.startswith("#SBATCH")]
    assert {"#SBATCH --requeue", "#SBATCH --signal=B:TERM@80", "#SBATCH --gpus-per-node=2"} <= set(lines)
    done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, timeout=60)
    assert done.stderr == ""


def test_uploads_that_have_hardly_begun_end_with_the_script(box: Box) -> None:
    """Until its process has a group of its own, killing the group reaches nobody."""
    setsid = box.root / "bin" / "setsid"
    real = setsid.resolve()
    setsid.unlink()
    setsid.write_text(
        f'#!/bin/bash\ncase "$*" in "bash -c uploads") sleep 5 >/dev/null 2>&1;; esac\nexec {real} "$@"\n'
    )
    setsid.chmod(0o755)

    exit_code, output = box.run(model(box).render(), timeout=100)

    assert exit_code == 0, output
    assert box.stopped()
