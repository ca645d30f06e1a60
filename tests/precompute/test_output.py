"""Output of workers is taken at once, kept up to a bound, and never in anybody's way."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from stoker.runtime.processes.child import MAX_LOG_BYTES, Drain, Output


def flooding(output, text):
    """A process that prints to the pipe of `output`."""
    process = subprocess.Popen([sys.executable, "-c", text], stdout=output.write_fd, stderr=output.write_fd)
    output.handed_over()
    return process


def test_a_flood_is_taken_in_and_the_log_keeps_its_beginning_and_its_end(tmp_path):
    drain, output = Drain(), Output(tmp_path / "log")
    drain.add(output)
    text = "print('first words'); [print('x' * 999) for _ in range(20_000)]; print('last words')"

    assert flooding(output, text).wait(60) == 0
    tail = output.tail(200)
    drain.close()
    output.close(keep=True)

    log = (tmp_path / "log").read_text()
    assert log.startswith("first words\n")
    assert tail.endswith("last words")
    assert log.endswith("last words\n")
    assert "bytes of output are left out here" in log
    assert len(log) <= MAX_LOG_BYTES + 100


def test_nothing_is_left_of_a_reader_that_printed_and_was_not_lost(tmp_path):
    output = Output(tmp_path / "log")
    assert flooding(output, "print('x')").wait(60) == 0

    output.close(keep=False)

    assert not list(tmp_path.iterdir())


def test_a_disk_that_takes_no_log_ends_nothing(tmp_path):
    output = Output(tmp_path / "no-folder" / "log")
    assert flooding(output, "print('x')").wait(60) == 0

    output.append("y")

    assert output.tail(100) == ""
    output.close(keep=True)


def test_pipes_that_come_and_go_under_the_same_number_are_not_confused(tmp_path):
    drain = Drain()
    for turn in range(30):
        output = Output(tmp_path / str(turn))
        drain.add(output)
        os.write(output.write_fd, b"hello")
        output.handed_over()
        limit = time.monotonic() + 10
        while not output.path.exists() and time.monotonic() < limit:
            time.sleep(0.001)
        drain.remove(output)
        output.close(keep=True)
    drain.close()
    drain.close()

    assert [path.read_text() for path in tmp_path.iterdir()] == ["hello"] * 30
