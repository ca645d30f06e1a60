"""Workers that die, hang, spin or never start: bounded, named, retried once, and nothing else is lost."""

from __future__ import annotations

import errno
import gc
import itertools
import os
import time
from pathlib import Path

import pytest
import torch

from stoker.errors import ResourceError, SourceError, WorkerError
from stoker.plan.resources import MemoryLimit
from stoker.precompute import PrecomputeSettings, Timeouts, run_precompute
from stoker.precompute import loop as loop_module
from stoker.precompute import queue as queue_module
from stoker.precompute import run as run_module
from stoker.precompute import workers as workers_module
from stoker.runtime.processes import child
from tests.precompute.broken_sources import BreaksAtUnpickling, LoadsOnce
from tests.precompute.fake_encoders import FakeEncoder
from tests.precompute.fake_sources import ChattySource, FakeSource, TorchLater, TorchWatcher

MIB = 1 << 20

SHORT = Timeouts(start=20, open=0.7, read=0.7)


def run(source, folder, *, workers=2, timeouts=SHORT, encoder=None, **settings):
    settings = {"progress": None, "max_quarantined": 0.9, **settings}
    settings = PrecomputeSettings(workers=workers, timeouts=timeouts, **settings)
    return run_precompute(source, encoder or FakeEncoder(), folder, name="c", settings=settings)


@pytest.fixture
def spawned(monkeypatch):
    """Every reader that is started, in order."""
    workers = []

    class Recorded(workers_module.Worker):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            workers.append(self)

    monkeypatch.setattr(workers_module, "Worker", Recorded)
    return workers


def assert_no_reader_left(workers):
    for worker in workers:
        assert worker.reap(), f"reader {worker.number} is still there"


@pytest.mark.chaos
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("fault", ["kill", "exit0"])
def test_a_reader_that_dies_is_replaced_and_its_sample_tried_once_more(tmp_path, spawned, fault, workers):
    source = FakeSource((20,), faults={9: fault, 14: f"{fault}-once"}, marker=str(tmp_path), run=4)

    report = run(source, tmp_path / "c", workers=workers)

    assert report.cache.indices.tolist() == [n for n in range(20) if n != 9]
    failure = report.cache.quarantined[9]
    assert (failure.stage, failure.attempts, failure.kind) == ("read", 2, "transient")
    assert ("signal 9 (SIGKILL)" if fault == "kill" else "exited with code 0") in failure.error
    assert "part0.h5" in failure.error
    assert report.lost_workers == 3
    assert_no_reader_left(spawned)


@pytest.mark.chaos
@pytest.mark.parametrize("fault", ["hang", "spin", "fifo", "stop"])
def test_a_reader_past_its_deadline_is_killed_named_and_its_sample_quarantined(tmp_path, spawned, fault):
    os.mkfifo(tmp_path / "fifo")
    source = FakeSource((20,), faults={9: fault}, marker=str(tmp_path), run=4)
    began = time.monotonic()

    report = run(source, tmp_path / "c")

    assert time.monotonic() - began < 20
    assert report.cache.indices.tolist() == [n for n in range(20) if n != 9]
    failure = report.cache.quarantined[9]
    assert (failure.stage, failure.attempts, failure.kind) == ("read", 2, "transient")
    assert 'made no progress for 0.7 s in stage "read"' in failure.error
    assert_no_reader_left(spawned)
    logs = [path.read_text() for path in (tmp_path / "c" / ".workers").glob("*.txt")]
    assert len(logs) == 2
    if fault != "stop":  # a stopped process cannot write its stack
        assert all("fake_sources.py" in text and "_misbehave" in text for text in logs)


@pytest.mark.chaos
def test_a_file_that_never_answers_is_given_up_after_three_of_its_samples(tmp_path):
    faults = dict.fromkeys(range(4, 16), "hang")
    source = FakeSource((4, 12, 4), faults=faults, run=4)

    report = run(source, tmp_path)

    assert report.cache.indices.tolist() == [0, 1, 2, 3, 16, 17, 18, 19]
    assert report.quarantined == 12
    assert report.lost_workers <= 6  # three samples, two tries each, where trying all takes 24
    assert all("part1.h5" in failure.error for failure in report.cache.quarantined.values())


@pytest.mark.chaos
def test_slow_but_alive_is_not_killed(tmp_path):
    report = run(FakeSource((6,), delay_s=0.4), tmp_path, workers=1)

    assert (report.lost_workers, report.records) == (0, 6)


@pytest.mark.chaos
def test_waiting_for_a_slow_encoder_is_not_a_hang(tmp_path):
    timeouts = Timeouts(start=20, open=0.3, read=0.3)

    report = run(FakeSource((24,)), tmp_path, timeouts=timeouts, encoder=FakeEncoder(sleep_s=0.5))

    assert (report.lost_workers, report.records) == (0, 24)


@pytest.mark.chaos
def test_an_error_while_loading_the_source_fails_at_once_with_its_traceback(tmp_path, spawned):
    with pytest.raises(SourceError, match="broken on purpose") as caught:
        run(BreaksAtUnpickling((20,), "raise"), tmp_path)

    assert "Traceback" in str(caught.value)
    assert "misbehave" in str(caught.value)
    assert len(spawned) <= 3
    assert_no_reader_left(spawned)


@pytest.mark.chaos
@pytest.mark.parametrize(("mode", "says"), [("exit", "exited with code 7"), ("hang", 'in stage "start"')])
def test_workers_that_never_start_do_not_storm(tmp_path, spawned, mode, says):
    with pytest.raises(WorkerError, match=says) as caught:
        run(BreaksAtUnpickling((20,), mode), tmp_path, workers=1, timeouts=Timeouts(start=0.8))

    assert len(spawned) <= 3
    assert caught.value.exit_code == 5
    assert_no_reader_left(spawned)


@pytest.mark.chaos
def test_workers_lost_in_a_row_end_the_run(tmp_path, monkeypatch):
    """Every sample of every file kills: it is the machine or the code, not the data."""
    monkeypatch.setattr(workers_module, "_MAX_IN_A_ROW", 5)
    source = FakeSource((1,) * 60, faults=dict.fromkeys(range(60), "kill"))

    with pytest.raises(WorkerError, match="in a row without a sample read"):
        run(source, tmp_path)


@pytest.mark.chaos
def test_a_flood_on_standard_output_does_not_block(tmp_path):
    report = run(ChattySource((6,)), tmp_path)

    assert report.records == 6


def test_workers_do_not_import_torch(tmp_path):
    report = run(TorchWatcher((6,)), tmp_path, workers=1)

    assert report.records == 6


def test_torch_has_one_thread_in_a_reader_whenever_it_is_imported(tmp_path, monkeypatch):
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.setenv(name, "2")

    cache = run(TorchLater((4,)), tmp_path, workers=1, timeouts=Timeouts()).cache

    assert [float(cache[number]["nu"]) for number in range(4)] == [1.0] * 4


def test_automatic_workers_grow_while_the_encoder_waits(tmp_path, monkeypatch):
    monkeypatch.setattr(loop_module, "_WINDOW_S", 0.2)
    monkeypatch.setattr(queue_module, "FIRST_START_S", 0.0)

    report = run(FakeSource((240,), delay_s=0.02), tmp_path, workers=None)

    assert report.workers >= 2
    assert report.records == 240


def test_automatic_workers_are_no_more_than_memory_has_room_for_and_that_is_said(
    tmp_path, monkeypatch, spawned
):
    class Notes:
        interval_s = 60.0

        def __init__(self):
            self.texts = []

        def update(self, snapshot): ...

        def note(self, text):
            self.texts.append(text)

        def close(self): ...

    def little(*_):
        return MemoryLimit(limit_bytes=64 * MIB, held_bytes=60 * MIB, label="memory.max of /job")

    monkeypatch.setattr(loop_module, "host_memory", little, raising=False)
    monkeypatch.setattr(loop_module, "_WINDOW_S", 0.2)
    monkeypatch.setattr(queue_module, "FIRST_START_S", 0.0)
    notes = Notes()

    report = run(FakeSource((240,), delay_s=0.02), tmp_path / "few", workers=None, progress=notes)

    assert (report.workers, report.records) == (1, 240)
    (said,) = [text for text in notes.texts if "memory allows" in text]
    assert "c: memory allows 1 worker: one has held " in said
    assert "4.0 MiB are free (memory.max of /job)" in said
    assert run(FakeSource((60,)), tmp_path / "asked", workers=2, progress=notes).workers == 2
    assert len([text for text in notes.texts if "memory allows" in text]) == 1


@pytest.mark.parametrize("workers", [None, 2])
def test_an_automatic_worker_that_is_killed_for_memory_is_not_started_again(
    tmp_path, monkeypatch, spawned, caplog, workers
):
    monkeypatch.setattr(loop_module, "_WINDOW_S", 0.2)
    monkeypatch.setattr(queue_module, "FIRST_START_S", 0.0)
    monkeypatch.setattr(child, "oom_kills", itertools.count().__next__)
    monkeypatch.setattr(workers_module, "_SPARE_TRIES", 0)
    source = FakeSource((400,), delay_s=0.02, faults={300: "kill-once"}, marker=str(tmp_path))

    report = run(source, tmp_path / "c", workers=workers)

    assert (report.records, report.lost_workers) == (400, 1)
    assert ("memory is too short for" in caplog.text) == (workers is None)
    assert report.workers == len(spawned) - 1


def test_a_reader_that_is_not_needed_gets_no_work_and_comes_back_without_a_new_process(
    tmp_path, monkeypatch, spawned
):
    plan, handed = iter([1, -1, -1, 1, -1, 1] * 10), []  # of two at first
    monkeypatch.setattr(loop_module, "_WINDOW_S", 0.05)
    change = loop_module.WorkerPacing.change

    monkeypatch.setattr(loop_module, "_WINDOW_GROUPS", 1)

    def scripted(self, workers, *told):
        change(self, workers, *told)
        return next(plan, 0)

    monkeypatch.setattr(loop_module.WorkerPacing, "change", scripted)
    hand_out = workers_module.Worker.hand_out

    def noted(self, works, absent):
        handed.append((self.number, frozenset(crew[0].parked)))
        hand_out(self, works, absent)

    crew, make = [], workers_module.WorkerRoster.__init__
    monkeypatch.setattr(
        workers_module.WorkerRoster,
        "__init__",
        lambda self, launch: (make(self, launch), crew.append(self))[0],
    )
    monkeypatch.setattr(workers_module.Worker, "hand_out", noted)
    monkeypatch.setattr(workers_module, "_SPARE_TRIES", 0)

    report = run(FakeSource((300,), delay_s=0.01), tmp_path, workers=None)

    assert report.records == 300
    assert any(parked for _, parked in handed)
    assert all(number not in parked for number, parked in handed)
    assert len(spawned) <= 3
    assert_no_reader_left(spawned)
    alone = run(FakeSource((300,)), tmp_path / "alone", workers=0).cache
    assert all(torch.equal(report.cache[n]["latent"], alone[n]["latent"]) for n in range(0, 300, 7))


def target(descriptor):
    """What a descriptor refers to; the one that lists them is gone by then."""
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except FileNotFoundError:
        return ""


def refuse_all_but(monkeypatch, allowed):
    """The system starts `allowed` workers and no more; returns the tries."""
    tries = []
    start = child._started

    def limited(*arguments):
        tries.append(arguments)
        if len(tries) > allowed:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return start(*arguments)

    monkeypatch.setattr(child, "_started", limited)
    return tries


@pytest.mark.chaos
@pytest.mark.parametrize("workers", [3, None])
def test_a_further_reader_that_cannot_be_started_is_said_and_does_not_end_the_run(
    tmp_path, monkeypatch, caplog, workers
):
    monkeypatch.setattr(loop_module, "_WINDOW_S", 0.2)
    tries = refuse_all_but(monkeypatch, 1)
    before = held()

    report = run(FakeSource((300,), delay_s=0.02), tmp_path, workers=workers)

    assert (report.records, report.workers) == (300, 1)
    assert len(tries) > 1
    assert "another worker cannot be started; continuing with 1: a worker process cannot" in caplog.text
    gc.collect()
    assert held() <= before  # tests before this one may have left some to be collected


def held():
    return sum("stoker" in target(fd) for fd in os.listdir("/proc/self/fd"))


@pytest.mark.chaos
def test_no_reader_at_all_is_an_error_with_advice(tmp_path, monkeypatch):
    refuse_all_but(monkeypatch, 0)

    with pytest.raises(ResourceError, match=r"temporarily unavailable\. Use fewer workers"):
        run(FakeSource((6,)), tmp_path)


@pytest.mark.chaos
@pytest.mark.parametrize("mode", ["raise", "exit"])
def test_a_further_reader_that_cannot_load_the_source_does_not_end_the_run(
    tmp_path, monkeypatch, caplog, mode
):
    monkeypatch.setattr(loop_module, "_WINDOW_S", 0.2)
    monkeypatch.setattr(queue_module, "FIRST_START_S", 0.0)
    monkeypatch.setattr(run_module.StageBuilder, "is_ready", lambda _: True)
    source = LoadsOnce((200,), mode, delay_s=0.02, marker=str(tmp_path))

    report = run(source, tmp_path / "c", workers=None)

    assert (report.records, report.workers) == (200, 1)
    assert report.lost_workers >= 3
    assert "another worker cannot be started; continuing with 1" in caplog.text
    assert ("broken on purpose" in caplog.text) == (mode == "raise")


@pytest.mark.chaos
def test_a_reader_in_reserve_takes_over_without_loading_the_source_first(tmp_path, monkeypatch, spawned):
    monkeypatch.setattr(workers_module, "_SPARE_AFTER_S", 0.1)
    put_to_work, add = [], workers_module.WorkerRoster.add
    monkeypatch.setattr(
        workers_module.WorkerRoster,
        "add",
        lambda self: put_to_work.append(self.spare and self.spare.state) or add(self),
    )
    faults = {55: "kill-once"}
    source = BreaksAtUnpickling((60,), "slow", delay_s=0.05, faults=faults, marker=str(tmp_path), run=4)

    report = run(source, tmp_path / "c", workers=1)

    assert put_to_work == [None, "ready"]
    assert (report.records, report.workers, report.lost_workers) == (60, 1, 1)
    assert_no_reader_left(spawned)


@pytest.mark.chaos
def test_a_reserve_that_cannot_be_had_is_not_tried_for_ever(tmp_path, monkeypatch, spawned):
    monkeypatch.setattr(workers_module, "_SPARE_AFTER_S", 0)
    source = LoadsOnce((60,), "exit", delay_s=0.05, marker=str(tmp_path))

    report = run(source, tmp_path / "c", workers=1, timeouts=Timeouts(read=150))

    assert (report.records, report.workers) == (60, 1)
    assert len(spawned) == 4
    assert_no_reader_left(spawned)


@pytest.mark.chaos
def test_what_a_reader_has_started_ends_with_it(tmp_path):
    run(FakeSource((4,), faults={1: "starts-another"}, marker=str(tmp_path)), tmp_path / "c", workers=1)

    started = [int(path.read_text()) for path in tmp_path.glob("started-*")]
    assert len(started) == 2
    limit = time.monotonic() + 10
    while any(alive(pid) for pid in started):
        assert time.monotonic() < limit
        time.sleep(0.02)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.chaos
def test_a_reader_that_sends_nonsense_is_replaced(tmp_path, caplog):
    report = run(
        FakeSource((20,), faults={9: "nonsense-once"}, marker=str(tmp_path)), tmp_path / "c", workers=1
    )

    assert (report.records, report.lost_workers) == (20, 1)
    assert "a frame" in caplog.text


@pytest.mark.chaos
def test_the_log_of_a_loss_names_path_sample_stage_and_attempt(tmp_path, caplog):
    run(FakeSource((8,), faults={5: "exit0"}), tmp_path, workers=1)

    for attempt in (1, 2):
        assert f"part0.h5: sample 5, attempt {attempt} of 2: worker " in caplog.text
    assert 'exited with code 0 in stage "read"' in caplog.text


@pytest.mark.chaos
def test_many_bad_samples_of_one_group_do_not_make_its_part_look_dead(tmp_path):
    """What was read before the bad one is lost with the reader, but it was read."""
    bad = range(1, 20, 2)
    source = FakeSource((20,), faults=dict.fromkeys(bad, "kill"))

    report = run(source, tmp_path, workers=1, encoder=FakeEncoder(samples=20))

    assert sorted(report.cache.quarantined) == list(bad)
