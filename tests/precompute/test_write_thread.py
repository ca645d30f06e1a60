"""The writer's limits, deadline and errors."""

from __future__ import annotations

import errno
import threading
from collections import Counter
from pathlib import Path

import pytest

from stoker.errors import RecordError, ResourceError, StalledError
from stoker.precompute.encode import EncodedRecords
from stoker.precompute.loop import WriteThread
from tests.precompute.fake_encoders import FakeEncoder
from tests.precompute.fake_sources import FakeSource
from tests.precompute.test_engine import assert_same, records, run


class FakeWriter:
    """Counts; fails or blocks when told to."""

    def __init__(self, *, error=None, gate=None):
        self.error, self.gate = error, gate
        self.rows = self.bytes = 0
        self.shard_fill = (5, 100)
        self.numbers = []
        self.ended = []

    def append(self, numbers, records, *, marked=(), contents=None):
        if self.gate is not None:
            self.gate.wait(10)
        if self.error is not None and len(self.numbers) >= 1:
            raise self.error
        self.numbers.append(numbers)

    def tick(self):
        pass

    def commit(self):
        self.ended.append("seal")

    def abort(self):
        self.ended.append("abort")


def encoded(number, size=10):
    return EncodedRecords(numbers=[number], records={}, marked=[], size_bytes=size)


def test_bytes_in_flight_are_bounded(tmp_path):
    gate = threading.Event()
    thread = WriteThread(FakeWriter(gate=gate), tmp_path, limit_bytes=25, timeout_s=60)
    assert thread.offer(encoded(0, 1000), 1)
    while thread._queue:
        pass
    assert thread.offer(encoded(1, 1000), 1), "one group above the limit may wait"
    assert not thread.offer(encoded(2), 0.01)
    gate.set()
    assert thread.offer(encoded(2), 5)
    thread.close()


def test_a_writer_past_its_deadline_is_reported(tmp_path):
    gate = threading.Event()
    thread = WriteThread(FakeWriter(gate=gate), tmp_path, limit_bytes=100, timeout_s=0.2)
    thread.offer(encoded(0), 1)
    with pytest.raises(StalledError, match=r"no progress for 0\.2 s"):
        thread.close()
    gate.set()
    thread.abandon()


def test_a_failing_disk_is_named_with_what_to_do_and_drops_the_open_shard(tmp_path):
    writer = FakeWriter(error=OSError(errno.EIO, "Input/output error"))
    thread = WriteThread(writer, tmp_path, limit_bytes=100, timeout_s=60)
    thread.offer(encoded(0), 1)
    thread.offer(encoded(1), 1)
    with pytest.raises(ResourceError, match=rf"writing to {tmp_path} failed: .*Input/output error.*again"):
        thread.close()
    assert writer.ended == ["abort"]


def test_a_refused_record_does_not_spoil_those_before_it(tmp_path):
    writer = FakeWriter(error=RecordError("sample 1: field overflows"))
    thread = WriteThread(writer, tmp_path, limit_bytes=100, timeout_s=60)
    thread.offer(encoded(0), 1)
    thread.offer(encoded(1), 1)
    with pytest.raises(RecordError, match="sample 1"):
        thread.close()
    assert (writer.numbers, writer.ended) == ([[0]], ["seal"])


def test_closing_writes_what_is_queued_and_seals(tmp_path):
    writer = FakeWriter()
    thread = WriteThread(writer, tmp_path, limit_bytes=1000, timeout_s=60)
    for number in range(20):
        assert thread.offer(encoded(number), 1)
    thread.close()
    assert (len(writer.numbers), writer.ended, thread.written) == (20, ["seal"], 20)


def test_a_disk_that_is_slow_does_not_mix_up_groups_read_in_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading here fills one buffer again and again: nothing is read while a group waits for the writer."""
    source = FakeSource((64,))
    whole = run(source, FakeEncoder(), tmp_path / "fast", workers=0)
    offer, refused = WriteThread.offer, Counter[int]()

    def slow(self: WriteThread, encoded: EncodedRecords, timeout_s: float) -> bool:
        refused[encoded.numbers[0]] += 1
        return refused[encoded.numbers[0]] > 3 and offer(self, encoded, timeout_s)

    monkeypatch.setattr(WriteThread, "offer", slow)
    late = run(source, FakeEncoder(), tmp_path / "slow", workers=0)

    assert_same(records(late.cache), records(whole.cache))
