"""The small pure pieces: layouts, retry decisions, pace, space, beats, displays."""

from __future__ import annotations

import io
import itertools
import time

import pytest

from stoker.errors import ConfigError, EncoderError
from stoker.precompute import Timeouts
from stoker.precompute.arena import ALIGNMENT, Arena, layout_from_json, plan_layout, slot_size
from stoker.precompute.checks import needed_bytes
from stoker.precompute.loop import WorkerPacing
from stoker.precompute.progress import LineProgress, LiveProgress, Snapshot, WorkerView, automatic
from stoker.precompute.queue import SampleLedger
from stoker.precompute.worker import SampleFault
from stoker.runtime.processes.child import oom_kills
from stoker.runtime.processes.heartbeat import HeartbeatPage
from stoker.schema import Field

MIB = 1024**2
DATA = {"data": Field(shape=(1000, 256), dtype="float32", time=True), "nu": Field(shape=(), dtype="float32")}


@pytest.mark.parametrize(
    ("samples", "steps", "memory", "mode", "rows"),
    [
        pytest.param(4, None, 100 * MIB, "group", 0, id="a-group-fits"),
        pytest.param(4, None, 4 * MIB, "pieces", 0, id="a-group-does-not-fit-twice"),
        pytest.param(1, 300, 100 * MIB, "steps", 1200, id="all-chunks-in-a-slot"),
        pytest.param(1, 300, MIB, "steps", 300, id="one-chunk-in-a-slot"),
    ],
)
def test_the_layout_follows_from_sizes(samples, steps, memory, mode, rows):
    layout = plan_layout(DATA, samples, steps, memory)

    assert (layout.mode, layout.steps) == (mode, rows)
    assert layout.slot_bytes % ALIGNMENT == 0
    assert layout_from_json(layout.to_json()) == layout


def test_chunks_need_one_time_axis():
    two = {**DATA, "other": Field(shape=(7, 2), dtype="float32", time=True)}
    with pytest.raises(EncoderError, match="no common length"):
        plan_layout(two, 1, 300, MIB)


def test_every_field_of_a_slot_begins_on_a_page_and_is_shared():
    layout = plan_layout(DATA, 3, None, 100 * MIB)
    assert layout.slot_bytes == slot_size(DATA, 3)
    arena = Arena.create(layout)
    arena.reserve()
    arrays = arena.arrays(1)

    arrays["nu"][2] = 7

    assert arrays["data"].shape == (3, 1000, 256)
    assert all(array.__array_interface__["data"][0] % ALIGNMENT == 0 for array in arrays.values())
    assert Arena(arena.fd, layout).arrays(1)["nu"].tolist() == [0, 0, 7]
    assert arena.arrays(0)["nu"].tolist() == [0, 0, 0]
    arena.close()


def test_a_beat_says_stage_sample_and_progress():
    page = HeartbeatPage.create()
    assert (page.look().stage, page.look().time_ns) == ("start", 0)
    page.write("read", 12)
    first = page.look()
    time.sleep(0.002)
    page.progress(100)
    second = page.look()
    assert (second.stage, second.number, second.done) == ("read", 12, 100)
    assert second.time_ns > first.time_ns
    page.close()


def ledger(bad=()):
    kept = []
    return SampleLedger(bad, quarantine=kept.extend, wanted=lambda number: number < 100), kept


def fault(number, *, retry=True):
    return SampleFault(number=number, stage="read", error="x", kind="sample", retry=retry)


def test_one_retry_then_quarantine():
    book, kept = ledger()
    assert book.fault(fault(3))
    assert not kept
    assert not book.fault(fault(3))
    assert not book.fault(fault(4, retry=False))
    assert [(f.number, f.attempts) for f in kept] == [(3, 2), (4, 1)]
    assert book.is_bad(3)


def test_a_stored_sample_that_cannot_be_read_again_is_no_failure():
    book, kept = ledger()
    book.fault(fault(100, retry=False))
    assert book.is_bad(100)
    assert not kept


def test_a_part_is_given_up_after_three_of_its_samples_or_eight_if_it_ever_answered():
    book, kept = ledger()
    assert not book.part_is_dead(0, 5)
    assert not book.part_is_dead(0, 5)
    assert not book.part_is_dead(0, 7)
    assert book.part_is_dead(0, 6)
    assert book.give_up(range(5, 8), fault(6)) == 3
    assert [f.number for f in kept] == [5, 6, 7]
    book.answered(1)
    assert [book.part_is_dead(1, number) for number in range(10, 18)] == [False] * 7 + [True]
    book.answered(1)
    assert not book.part_is_dead(1, 18)


def test_a_second_try_that_fails_as_expected_says_nothing_about_the_part():
    """The second tries come one after another at the end of a run."""
    book, _ = ledger()
    for number in range(10):
        book.fault(fault(number))
        book.answered(0)
    for number in range(10):
        book.fault(fault(number))
        assert not book.part_is_dead(0, number)


def test_a_part_that_holds_a_second_reader_is_given_up_even_if_it_answered():
    book, _ = ledger()
    book.answered(0)
    assert [book.part_holds_workers(part) for part in (0, 1, 0)] == [False, False, True]


def test_a_part_given_up_is_recorded_in_one_go():
    """Each call syncs a file; a part may have a million samples."""
    calls = []
    book = SampleLedger((), quarantine=calls.append, wanted=lambda number: number != 7)

    book.fault(fault(6))
    assert book.give_up(range(5, 10), fault(6)) == 5

    assert [[(f.number, f.attempts) for f in call] for call in calls] == [[(5, 1), (6, 1), (8, 1), (9, 1)]]
    assert book.failures == calls[0]


def windows(pace, workers, *told):
    """What the pace says after each window of one second: `(waited, groups, idle)`."""
    changes = []
    for waited, groups, idle in told:
        pace.step(waited, 1.0, groups, idle)
        changes.append(pace.change(workers))
        workers += changes[-1]
    return changes


def test_workers_are_added_while_the_encoder_waits_and_it_helps():
    assert windows(WorkerPacing(most=8), 1, (0.9, 10, 0), (0.5, 20, 0), (0.3, 30, 0), (0.1, 40, 0)) == [
        1,
        1,
        1,
        0,
    ]


def test_a_reader_that_brought_nothing_is_taken_back_and_the_next_trial_comes_later_each_time():
    pace = WorkerPacing(most=8)
    slow = [(0.9, 40, 0)] * 40
    changes = windows(pace, 1, *slow)
    tried = [at for at, change in enumerate(changes) if change > 0]
    assert [changes[at + 1] for at in tried] == [-1] * len(tried)
    gaps = [later - at for at, later in itertools.pairwise(tried)]
    assert gaps == sorted(gaps)
    assert gaps[0] >= 8
    assert gaps[1] >= 16


def test_workers_that_stand_idle_while_the_encoder_is_busy_are_sent_away_one_by_one():
    told = [(0.0, 40, 3), (0.0, 40, 2), (0.0, 40, 1), (0.0, 40, 1)]
    assert windows(WorkerPacing(most=8), 4, *told) == [-1, -1, 0, 0]


def test_a_reader_is_called_back_when_the_encoder_waits_without_it():
    assert windows(WorkerPacing(most=8), 4, (0.0, 40, 3), (0.5, 30, 0), (0.5, 30, 0)) == [-1, 1, 0]


def test_no_reader_is_tried_while_all_processors_are_in_use():
    """It would cost a start, and could only take turns with those that are there."""
    for used, tried in ((2.0, 0), (1.9, 0), (1.5, 1)):
        pace = WorkerPacing(most=8, processors=2.0)
        pace.step(0.9, 1.0, 40)
        assert pace.change(2, used) == tried


def test_no_reader_is_added_when_the_encoder_is_busy_or_there_are_enough():
    assert windows(WorkerPacing(most=2), 1, (0.05, 10, 0)) == [0]
    assert windows(WorkerPacing(most=2), 2, (0.9, 10, 0)) == [0]


def test_no_reader_is_added_without_memory_for_it_and_one_goes_when_memory_is_short():
    pace = WorkerPacing(most=8)
    changes = []
    for workers, fitting in ((2, 2), (2, 3), (3, 3), (3, 2), (2, 2)):
        pace.step(0.9, 1.0, 40 * workers)
        changes.append((pace.change(workers, 0.0, fitting), pace.is_held_back))
    assert changes == [(0, True), (1, False), (0, True), (-1, True), (0, True)]


def test_the_space_needed_follows_from_the_schema():
    assert 1000 * 1_024_004 < needed_bytes(DATA, 1000) < 1.02 * 1000 * 1_024_100


def test_deadlines_are_above_zero():
    with pytest.raises(ConfigError, match=r"timeouts\.read must be above 0"):
        Timeouts(read=0)


def test_out_of_memory_kills_are_counted_in_both_versions_of_cgroups(tmp_path):
    proc = tmp_path / "cgroup"
    proc.write_text("0::/a\n")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "memory.events").write_text("low 0\noom 3\noom_kill 2\n")
    assert oom_kills(proc, tmp_path) == 2
    proc.write_text("5:cpu:/b\n4:memory:/b\n0::/nothing\n")
    (tmp_path / "memory" / "b").mkdir(parents=True)
    (tmp_path / "memory" / "b" / "memory.oom_control").write_text("under_oom 0\noom_kill 5\n")
    assert oom_kills(proc, tmp_path) == 5
    assert oom_kills(tmp_path / "none", tmp_path) == 0


SNAPSHOT = Snapshot(
    name="burgers1d_train",
    total=10_000,
    done=7_412,
    encoded=7_000,
    seconds=60,
    rate=1830,
    written_bytes=1_500_000_000,
    workers=(WorkerView(number=1, stage="read", sample=7430, seconds=0.2),),
    device="cpu",
    group=range(7408, 7424),
    call_s=0.0081,
    busy=0.93,
    shard_fill=(212 * MIB, 256 * MIB),
    quarantined=1,
    last_failure="sample 5,119 (read: nu0.02.hdf5: truncated file)",
)


def test_lines_say_where_the_run_stands():
    out = io.StringIO()
    sink = LineProgress(out, first_s=0, every_s=1000)
    sink.update(SNAPSHOT)
    sink.update(SNAPSHOT)

    assert out.getvalue() == (
        "burgers1d_train  7,412/10,000 · 1,830/s · 1.4 GiB · 0:00:01 left · encoder busy 93 % · "
        "1 quarantined · worker 1 reading sample 7,430 for 0.2 s\n"
    )


def test_the_live_view_shows_workers_encoder_writer_and_failures():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    out = Terminal()
    sink = automatic(out)
    assert isinstance(sink, LiveProgress)
    sink.update(SNAPSHOT)
    sink.note("a [note]")
    sink.close()

    for text in (
        "7,412/10,000",
        "worker 1",
        "sample 7,430",
        "busy 93 %",
        "212 of 256 MiB",
        "truncated",
        "[note]",
    ):
        assert text in out.getvalue()
