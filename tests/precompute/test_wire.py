"""Frames survive any cut, and the caller's end never blocks."""

from __future__ import annotations

import socket
import threading

import pytest

from stoker.errors import WorkerError
from stoker.runtime.processes.wire import Channel, Parser, WorkerChannel, pack


def test_frames_are_found_whatever_the_cuts():
    stream = pack({"kind": "a"}) + pack({"kind": "b", "x": [1, 2]}, b"raw") + b"raw" + pack({"kind": "c"})
    for size in (1, 7, 19, len(stream)):
        parser = Parser()
        frames = [f for i in range(0, len(stream), size) for f in parser.feed(stream[i : i + size])]
        assert frames == [{"kind": "a"}, {"kind": "b", "x": [1, 2], "payload": b"raw"}, {"kind": "c"}]


def test_a_stream_that_is_not_ours_is_refused():
    with pytest.raises(WorkerError, match="bytes arrived"):
        Parser().feed(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")


def test_a_large_payload_to_a_reader_that_does_not_read_does_not_block():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel = Channel(ours)
        payload = bytes(30_000_000)
        channel.send({"kind": "start"}, payload)
        assert channel.backlog

        received = []
        thread = threading.Thread(target=lambda: received.append(WorkerChannel(theirs).next()))
        thread.start()
        while channel.backlog:
            channel.flush()
        thread.join(10)

        assert len(received[0]["payload"]) == len(payload)


def test_frames_sent_before_the_end_are_still_received():
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    WorkerChannel(theirs).send({"kind": "parcel"})
    theirs.close()

    assert channel.receive() == [{"kind": "parcel"}]
    assert channel.closed
    channel.send({"kind": "free"})  # a reader that is gone is no error here
    channel.close()
