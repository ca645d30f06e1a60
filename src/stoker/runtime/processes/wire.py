"""Frames between the calling process and one worker: a length, JSON, and at times raw bytes.

One socketpair per worker and nothing shared between workers, so that a kill in the middle of a frame damages
one channel only. The caller's end never blocks: what the socket does not take waits in a buffer until the
poll loop finds room. So neither a large source nor a worker that stopped reading can block the caller.
"""

from __future__ import annotations

import json
import socket
import struct
from collections import deque
from typing import Any, TypeAlias

from stoker.errors import WorkerError

Frame: TypeAlias = "dict[str, Any]"
"""One message; `"kind"` says which. Raw bytes that came along are under `"payload"`."""

_HEAD = struct.Struct("<IQ")
_MAX_JSON_BYTES = 64 * 1024**2
_RECEIVE_BYTES = 1 << 18


def pack(frame: Frame, payload: bytes = b"") -> bytes:
    """Return the head and the JSON of a frame; `payload` follows them on the wire."""
    text = json.dumps(frame, separators=(",", ":")).encode()
    return _HEAD.pack(len(text), len(payload)) + text


class Parser:
    """Cuts a stream of bytes into frames."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """Frames completed by `data`, in order.

        Raises:
            WorkerError: The stream is not ours.
        """
        self._bytes += data
        frames: list[Frame] = []
        while len(self._bytes) >= _HEAD.size:
            text_bytes, payload_bytes = _HEAD.unpack_from(self._bytes)
            if text_bytes > _MAX_JSON_BYTES:
                raise WorkerError(
                    f"a frame of {text_bytes} bytes arrived, at most {_MAX_JSON_BYTES} are expected"
                )
            end = _HEAD.size + text_bytes
            if len(self._bytes) < end + payload_bytes:
                break
            try:
                frame: Frame = json.loads(self._bytes[_HEAD.size : end])
            except ValueError as error:
                raise WorkerError(f"a frame arrived that is not JSON: {error}") from error
            if payload_bytes:
                frame["payload"] = bytes(self._bytes[end : end + payload_bytes])
            del self._bytes[: end + payload_bytes]
            frames.append(frame)
        return frames


class Channel:
    """The caller's end: never blocks."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._parser = Parser()
        self._outgoing: deque[memoryview] = deque()
        self.closed = False
        """The other end is gone; no more frames will come."""

    def fileno(self) -> int:
        """Return the descriptor, for polling."""
        return self._socket.fileno()

    @property
    def backlog(self) -> bool:
        """True if bytes wait for the socket to take them."""
        return bool(self._outgoing)

    def send(self, frame: Frame, payload: bytes = b"") -> None:
        """Queue a frame and write what the socket takes now."""
        self._outgoing.append(memoryview(pack(frame, payload)))
        if payload:
            self._outgoing.append(memoryview(payload))
        self.flush()

    def flush(self) -> bool:
        """Write what the socket takes; whether anything moved."""
        moved = False
        while self._outgoing and not self.closed:
            try:
                sent = self._socket.send(self._outgoing[0])
            except BlockingIOError:
                break
            except OSError:
                self._outgoing.clear()  # the worker is gone; `receive` still finds what it sent before
                break
            moved = moved or sent > 0
            if sent == len(self._outgoing[0]):
                self._outgoing.popleft()
            else:
                self._outgoing[0] = self._outgoing[0][sent:]
        return moved

    def receive(self) -> list[Frame]:
        """Return every complete frame that has arrived; sets `closed` at end of file."""
        frames: list[Frame] = []
        while not self.closed:
            try:
                data = self._socket.recv(_RECEIVE_BYTES)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if data:
                frames += self._parser.feed(data)
            else:
                self.closed = True
        return frames

    def close(self) -> None:
        """Close our end, which ends a worker that is still alive."""
        self.closed = True
        self._socket.close()


class WorkerChannel:
    """The worker's end: waits for the caller, and ends when the caller is gone."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._parser = Parser()
        self._waiting: deque[Frame] = deque()

    def send(self, frame: Frame) -> None:
        """Send all of a frame."""
        self._socket.sendall(pack(frame))

    def next(self) -> Frame | None:
        """Return the next frame, or None once the caller has closed its end."""
        while not self._waiting:
            data = self._socket.recv(_RECEIVE_BYTES)
            if not data:
                return None
            self._waiting.extend(self._parser.feed(data))
        return self._waiting.popleft()
