"""Ten ways to hang, mixed over many samples: nothing is lost, nothing is wrong, and everything ends in time.

docs/project/reliability-hangs.md has the figures of the large run.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stoker.errors import WorkerError
from stoker.precompute import PrecomputeSettings, Timeouts, run_precompute
from stoker.precompute import workers as workers_module
from tests.chaos.hang_source import KINDS, SLOW, UNKILLABLE, FreezesItself

ROOT = Path(__file__).parents[2]
FREEZER = Path("/sys/fs/cgroup/freezer")
GRACE_S = workers_module.GRACE_S
DUMP_S, REPLACE_S, EXIT_S = 0.5, 2.0, 5.0
"""Promised: how late a hang is noticed, how long a replacement takes, and the end of the process."""

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="worker processes need Linux"),
]


def fuse_is_there(folder):
    """Whether this user may mount; the server of the tests says so itself."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos.hang_fuse", str(folder)],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=30,
    )
    return done.stdout == b"mounted\n"


def hang(folder, *, samples, each, special, deadline):
    """Figures of `hang_run.py`, with the time from its last word to its end."""
    (folder / "trial").mkdir()
    if not fuse_is_there(folder / "trial"):
        special = 0
    words = ["--samples", samples, "--each", each, "--special", special, "--deadline", deadline]
    done = subprocess.run(
        [sys.executable, "-m", "tests.chaos.hang_run", "--folder", str(folder), *map(str, words)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=170,
    )
    ended = time.monotonic()
    assert done.returncode == 0, done.stderr
    text, last_word = done.stdout.splitlines()
    wait_until(lambda: str(folder) not in Path("/proc/mounts").read_text(), 10)
    return json.loads(text) | {"exit_s": ended - float(last_word), "special": special, "deadline_s": deadline}


def wait_until(condition, limit_s):
    limit = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.02)


def bound_s(found, workers=4):
    """What the run may take: every hang noticed and replaced, shared by the workers, and the graces."""
    each = found["deadline_s"] + DUMP_S + REPLACE_S
    special = len(UNKILLABLE) * GRACE_S + found["special"] * 2 if found["special"] else 0
    return found["hangs"] * each / workers + special + 20


def check_outcome(found):
    """0 lost, 0 wrong, the exact list, and no reader killed that was only slow."""
    bad = {int(number) for number in found["expected"]}
    assert (found["lost"], found["wrong"]) == (0, 0)
    assert set(found["quarantined"]) == bad
    assert found["stored"] == found["samples"] - len(bad)
    kinds = {*KINDS, *(UNKILLABLE if found["special"] else ())}
    assert set(found["expected"].values()) == kinds
    killable = sum(kind in KINDS for kind in found["expected"].values())
    assert found["workers_lost"] == found["hangs"] >= 2 * killable
    assert not [line for line in found["said"] if SLOW in line]
    assert found["workers_abandoned"] == (2 * len(UNKILLABLE) if found["special"] else 0)


def check_messages(found):
    """Path, sample, stage and attempt, in what is logged at once and in what is kept."""
    for number, kind in found["expected"].items():
        path, listed = found["names"][number], found["listed"][number]
        failure = found["failures"][number]
        tried = f"{failure['stage']}, attempts {failure['attempts']}"
        assert f"sample {int(number):,} ({tried}): {path}: " in listed
        assert failure["stage"] in ("open", "read")
        if kind in KINDS:
            assert failure["attempts"] == 2
            assert f'made no progress for {found["deadline_s"]:g} s in stage "{failure["stage"]}"' in listed
            for attempt in (1, 2):
                said = f"{path}: sample {number}, attempt {attempt} of 2: worker "
                (line,) = [line for line in found["said"] if line.startswith(said)]
                assert 'in stage "open"' in line or 'in stage "read"' in line


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    return hang(tmp_path_factory.mktemp("hangs"), samples=120, each=1, special=3, deadline=0.7)


def test_of_ten_kinds_of_hang_nothing_is_lost_or_wrong_and_exactly_the_bad_are_quarantined(few):
    check_outcome(few)


def test_every_hang_is_told_with_path_sample_stage_and_attempt(few):
    check_messages(few)


def test_the_process_ends_although_workers_cannot_be_killed(few):
    if not few["special"]:
        pytest.skip("FUSE cannot be mounted by this user")
    left = [line for line in few["said"] if "cannot be ended; left behind" in line]
    assert len(left) == few["workers_abandoned"]
    assert few["exit_s"] < 30


@pytest.mark.slow
def test_a_thousand_samples_with_five_percent_bad_keep_every_bound(tmp_path):
    found = hang(tmp_path, samples=1000, each=6, special=4, deadline=1.0)

    check_outcome(found)
    check_messages(found)
    assert len(found["quarantined"]) == (50 if found["special"] else 42)
    assert max(found["killed_after_s"]) <= found["deadline_s"] + DUMP_S
    assert max(found["replaced_after_s"]) <= REPLACE_S
    assert found["taken_s"] <= bound_s(found)
    assert found["exit_s"] <= EXIT_S


@pytest.fixture
def freezer():
    """A frozen cgroup (v1); thawed at the end, so that what was killed in it ends."""
    group = FREEZER / f"stoker-{os.getpid()}"
    try:
        group.mkdir()
        (group / "freezer.state").write_text("FROZEN")
    except OSError as error:
        pytest.skip(f"no cgroup v1 freezer that this user may write: {error}")
    yield group
    (group / "freezer.state").write_text("THAWED")
    wait_until(lambda: not (group / "tasks").read_text(), 10)
    group.rmdir()


@pytest.fixture
def spawned(monkeypatch, freezer):
    """Every reader that is started; all have ended after the test, and were waited for."""
    workers = []

    class Recorded(workers_module.Worker):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            workers.append(self)

    monkeypatch.setattr(workers_module, "Worker", Recorded)
    monkeypatch.setattr(workers_module, "GRACE_S", 0.3)
    yield workers
    (freezer / "freezer.state").write_text("THAWED")
    wait_until(lambda: all(one.reap() for one in workers), 10)


def run(source, folder, workers=2):
    settings = PrecomputeSettings(
        workers=workers, progress=None, max_quarantined=1, timeouts=Timeouts(start=20, open=0.5, read=0.5)
    )
    return run_precompute(source, None, folder, name="c", settings=settings)


def test_a_part_that_answered_and_then_holds_two_workers_is_read_no_more(tmp_path, spawned, freezer):
    source = FreezesItself((400, 400), frozen=range(300, 400), group=freezer)

    report = run(source, tmp_path)

    assert report.cache.indices.tolist()[-400:] == list(range(400, 800))
    assert set(report.cache.quarantined) >= set(range(300, 400))
    assert report.records + report.quarantined == 800
    assert 2 <= report.abandoned_workers <= 3
    errors = [failure.error for failure in report.cache.quarantined.values()]
    assert all("part0.h5" in error for error in errors)


def test_more_workers_than_may_be_left_behind_end_the_run_by_name(tmp_path, spawned, freezer):
    source = FreezesItself((1,) * 12, frozen=range(12), group=freezer)

    with pytest.raises(WorkerError, match=r"cannot be killed \(at most 2 are left behind\)") as caught:
        run(source, tmp_path)

    assert "sample " in str(caught.value)
    assert ".h5" in str(caught.value)
    assert caught.value.exit_code == 5
    assert len(spawned) <= 8


@pytest.mark.slow
def test_a_reader_that_outlives_its_killed_caller_does_not_block_the_next_run(tmp_path, freezer):
    words = [sys.executable, "-m", "tests.precompute.run_once", str(tmp_path), "60", "1", "0.1"]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as first:
        wait_until(lambda: list(tmp_path.glob("c/*/shard-*.safetensors")), 60)
        (server,) = Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text().split()
        children = Path(f"/proc/{server}/task/{server}/children").read_text().split()
        (freezer / "tasks").write_text(children[0])
        first.send_signal(signal.SIGKILL)
    assert children[0] in (freezer / "tasks").read_text().split()

    second = subprocess.run([*words[:-1], "0"], cwd=ROOT, capture_output=True, text=True, timeout=60)

    assert second.returncode == 0, second.stderr
    assert second.stdout.split()[0] == "60"
    assert children[0] in (freezer / "tasks").read_text().split(), "it had ended, so the test proves nothing"
