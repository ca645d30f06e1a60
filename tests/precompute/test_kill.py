"""The whole run killed or interrupted, several runs at once, and what memory it takes."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from stoker.precompute import PrecomputeSettings, run_precompute
from stoker.store import open_cache
from tests.kit import forked as subprocess
from tests.precompute.fake_encoders import FakeEncoder
from tests.precompute.fake_sources import FakeSource

ROOT = Path(__file__).parents[2]


def start(folder, samples, workers, delay_s, *more):
    arguments = [str(argument) for argument in (folder, samples, workers, delay_s, *more)]
    command = [sys.executable, "-m", "tests.precompute.run_once", *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def workers_of(pid):
    """Process ids of the workers that belong to `pid`, by their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
        except OSError:
            continue
        if b"stoker.precompute.worker" in words and words[-1] == str(pid).encode():
            found.append(int(entry.name))
    return found


def wait_until(condition, limit_s=30.0):
    limit = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.005)


def gone(pid):
    try:
        return Path(f"/proc/{pid}/status").read_text().split("State:")[1].split()[0] == "Z"
    except OSError:
        return True


def same_records(a, b):
    assert a.indices.tolist() == b.indices.tolist()
    for number in a.indices.tolist():
        for name, value in a[number].items():
            assert torch.equal(value, b[number][name])


def at_one_go(folder, samples):
    source, settings = FakeSource((samples,)), PrecomputeSettings(workers=0, progress=None)
    return run_precompute(source, FakeEncoder(by_shape=True), folder, name="c", settings=settings).cache


@pytest.fixture(scope="module")
def unkilled(tmp_path_factory):
    return at_one_go(tmp_path_factory.mktemp("unkilled"), 60)


@pytest.mark.chaos
@pytest.mark.slow  # tests/test_guarantees.py kills in the plain run
@pytest.mark.timeout(600)  # each process imports torch once more, for the child that encodes
@pytest.mark.parametrize(("kills", "samples"), [(3, 60), (20, 500)])
def test_killed_at_random_moments_and_resumed_no_record_differs(tmp_path, kills, samples):
    """kill -9 of the caller: workers vanish with it, and the next run needs no cleaning up."""
    chance = random.Random(0)
    for _ in range(kills):
        process = start(tmp_path, samples, 2, 0.08)
        before = len(list(tmp_path.glob("c/*/shard-*.safetensors")))
        wait_until(lambda n=before: len(list(tmp_path.glob("c/*/shard-*.safetensors"))) > n)
        workers = workers_of(process.pid)
        time.sleep(chance.uniform(0, 0.3))
        process.kill()
        process.communicate()
        wait_until(lambda workers=workers: all(gone(pid) for pid in workers), 2.0)

    process = start(tmp_path, samples, 2, 0)
    out, err = process.communicate(timeout=60)

    assert process.returncode == 0, err
    stored, encoded = map(int, out.split()[:2])
    assert stored == samples
    assert encoded < samples, "nothing survived the kills, so the test proves nothing"
    same_records(at_one_go(tmp_path / "unkilled", samples), open_cache(tmp_path / "c"))


@pytest.mark.chaos
@pytest.mark.parametrize(("number", "workers"), [(signal.SIGINT, 2), (signal.SIGTERM, 0)])
def test_a_signal_seals_what_is_encoded_and_the_same_command_resumes(tmp_path, unkilled, number, workers):
    process = start(tmp_path, 60, workers, 0.03)
    wait_until(lambda: list(tmp_path.glob("c/*/*shard*")) or list(tmp_path.glob("c/*/.*shard*")))
    time.sleep(0.3)
    process.send_signal(number)
    _, err = process.communicate(timeout=10)

    assert process.returncode == 130, err
    assert f"stopped by {number.name}" in err
    assert "again" in err
    stored = int(err.split(":")[1].split(" of 60")[0])
    assert 0 < stored < 60

    second = start(tmp_path, 60, workers, 0)
    out, err = second.communicate(timeout=60)
    assert second.returncode == 0, err
    assert out.split()[:2] == ["60", str(60 - stored)]
    same_records(unkilled, open_cache(tmp_path / "c"))


@pytest.mark.slow
@pytest.mark.chaos
def test_a_second_signal_ends_at_once(tmp_path):
    process = start(tmp_path, 60, 0, 1.5)
    wait_until(lambda: list(tmp_path.glob("c/*/recipe.json")))
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=10)

    assert process.returncode in (130, -signal.SIGINT)  # the first may have ended the call by then


@pytest.mark.chaos
def test_a_reader_killed_from_outside_loses_nothing(tmp_path, unkilled):
    process = start(tmp_path, 60, 2, 0.02)
    for _ in range(2):
        wait_until(lambda: len(workers_of(process.pid)) >= 2)
        time.sleep(0.25)
        os.kill(random.Random(0).choice(workers_of(process.pid)), signal.SIGKILL)
        time.sleep(0.05)
    _, err = process.communicate(timeout=60)

    assert process.returncode == 0, err
    assert "signal 9 (SIGKILL)" in err
    same_records(unkilled, open_cache(tmp_path / "c"))


@pytest.mark.chaos
@pytest.mark.slow
def test_of_two_processes_one_waits_and_says_for_whom(tmp_path):
    both = [start(tmp_path, 60, 1, 0.1) for _ in range(2)]
    results = [process.communicate(timeout=60) for process in both]

    assert [process.returncode for process in both] == [0, 0]
    encoded = [int(out.split()[1]) for out, _ in results]
    assert sorted(encoded) == [0, 60]
    waiter = encoded.index(0)
    assert f"being encoded by process {both[1 - waiter].pid}" in results[waiter][1]


@pytest.mark.slow
def test_host_memory_does_not_grow_with_the_number_of_samples(tmp_path):
    """A sample has 400 KB; 4 times as many samples are 96 MB more, and must not be held."""
    peaks = []
    for samples in (80, 320):
        process = start(tmp_path / str(samples), samples, 1, 0, 20_000)
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        peaks.append(int(out.split()[2]))

    assert peaks[1] < peaks[0] * 1.1 + 20_000
