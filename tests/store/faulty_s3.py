"""A wire to an S3 server that fails on request: `a_wire(server.url)`.

Which request meets which fault is a function of the seed, the request (method, path and range) and how often
that was made before: it does not depend on which thread comes first, so a run can be repeated.
"""

from __future__ import annotations

import hashlib
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

BODY_FAULTS = ("cut", "slow", "hang", "short", "padded", "flipped")
"""What happens to the body of an answer to GET: it breaks off, drips, stops, is shorter (with a length that
says so), ends in zeros, has one bit turned. An answer to another method is lost, after the server did it."""
FAULTS = (*BODY_FAULTS, "refused", "busy", "broken")
"""Also: closed before anything is answered, 503 SlowDown with Retry-After, 500."""
SLOW_DOWN = b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Reduce your rate.</Message></Error>"
DROPPED = ("connection", "keep-alive", "transfer-encoding", "content-length", "expect")


@dataclass(frozen=True, kw_only=True)
class Faults:
    """What goes wrong, and how often."""

    rate: float = 0.0
    """Part of the requests that fail."""
    kinds: tuple[str, ...] = FAULTS
    seed: int = 0
    methods: tuple[str, ...] = ("GET",)
    under: str = ""
    """Only where the path contains this."""
    most: int = 2
    """Failures of one and the same request; then it succeeds."""
    slow_bytes_s: float = 200_000.0
    hang_s: float = 3600.0
    """Seconds that a wire hangs, unless `Wire.release` comes first."""
    latency_s: float = 0.0
    """Every answer is late by so much."""
    bytes_s: float = 0.0
    """All answers together come at this rate; 0: as they can."""

    def of(self, method: str, path: str, place: str, before: int) -> str:
        """The fault of a request that was made so often before and failed `before` times; empty: none."""
        if method not in self.methods or self.under not in path or before >= self.most:
            return ""
        text = f"{self.seed} {method} {path} {place} {before}"
        drawn = hashlib.sha256(text.encode()).digest()
        if int.from_bytes(drawn[:8], "big") >= self.rate * 2**64:
            return ""
        return self.kinds[int.from_bytes(drawn[8:12], "big") % len(self.kinds)]


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request that came over the wire."""

    method: str
    path: str
    place: str
    """Its Range header."""
    fault: str
    sent: int
    """Bytes of the answer's body that went out."""


@dataclass
class Wire:
    """What is wrong with a wire now, and what has come over it."""

    url: str
    faults: Faults = Faults()
    requests: list[Request] = field(default_factory=list)
    failed: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    at_once: int = 0
    """The most answers to GET that were under way together."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _released: threading.Event = field(default_factory=threading.Event)
    _now: int = 0
    _next_s: float = 0.0

    def release(self) -> None:
        """Let what hangs end."""
        self._released.set()

    def hang(self) -> None:
        """Until this hang is over."""
        self._released.wait(self.faults.hang_s)

    def fault_of(self, method: str, path: str, place: str) -> str:
        """Of the next request like this."""
        with self._lock:
            asked = (method, path, place)
            fault = self.faults.of(*asked, self.failed[asked])
            self.failed[asked] += bool(fault)
            return fault

    def note(self, request: Request) -> None:
        """It is over."""
        with self._lock:
            self.requests.append(request)

    def count(self, change: int) -> None:
        """So many more answers are under way."""
        with self._lock:
            self._now += change
            self.at_once = max(self.at_once, self._now)

    def settle(self) -> None:
        """Wait until all that was asked for is noted: an answer is read before its end is noted."""
        until = time.monotonic() + 10
        while self._now and time.monotonic() < until:
            time.sleep(0.005)

    def pass_by(self, size: int) -> None:
        """Wait until so many bytes have their turn."""
        if not self.faults.bytes_s:
            return
        with self._lock:
            begin = max(self._next_s, time.monotonic())
            self._next_s = begin + size / self.faults.bytes_s
            wait = self._next_s - time.monotonic()
        time.sleep(max(0.0, wait))

    def gets(self, under: str = "") -> list[Request]:
        """The GETs of objects (not listings) whose path contains `under`."""
        with self._lock:
            return [r for r in self.requests if r.method == "GET" and under in r.path and "?" not in r.path]


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 256

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that has gone is no news here."""


@contextmanager
def a_wire(url: str, faults: Faults = Faults()) -> Iterator[Wire]:
    """A wire to the server at `url`, which may be given other faults at any time."""
    there = urlsplit(url)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True
        upstream: HTTPConnection | None = None

        def log_message(self, *_: object) -> None: ...

        def answer(self) -> None:
            size = int(self.headers.get("Content-Length") or 0)
            body = self.rfile.read(size) if size else None
            path, place = self.path, self.headers.get("Range") or ""
            fault = wire.fault_of(self.command, path, place)
            sent = 0
            wire.count(self.command == "GET")
            try:
                sent = self.serve(body, fault)
            except (OSError, HTTPException):
                self.drop()
            finally:
                wire.note(Request(method=self.command, path=path, place=place, fault=fault, sent=sent))
                wire.count(-(self.command == "GET"))

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = answer

        def serve(self, body: bytes | None, fault: str) -> int:
            if wire.faults.latency_s:
                time.sleep(wire.faults.latency_s)
            if fault == "refused":
                self.drop()
                return 0
            if fault in ("busy", "broken"):
                extra = {"Retry-After": "1"} if fault == "busy" else {}
                self.head(503 if fault == "busy" else 500, len(SLOW_DOWN), extra)
                self.wfile.write(SLOW_DOWN)
                return 0
            if self.upstream is None:
                self.upstream = HTTPConnection(there.hostname or "", there.port, timeout=60)
            kept = {n: v for n, v in self.headers.items() if n.lower() not in DROPPED}
            self.upstream.request(self.command, self.path, body or (b"" if body else None), kept)
            got = self.upstream.getresponse()
            content = got.read()
            if fault and self.command != "GET":
                self.drop()
                return 0
            extra = {n: v for n, v in got.getheaders() if n.lower() not in (*DROPPED, "server", "date")}
            length = len(content)
            if self.command == "HEAD":
                length = int(got.getheader("Content-Length") or 0)
            return self.send(got.status, extra, content, length, fault if got.status < 300 else "")

        def send(self, status: int, extra: dict[str, str], content: bytes, length: int, fault: str) -> int:
            middle = len(content) // 2
            if fault == "short":
                content, length = content[:middle], middle
            elif fault == "padded":
                content = content[:middle] + bytes(len(content) - middle)
            elif fault == "flipped" and content:
                content = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
            self.head(status, length, extra)
            if fault in ("cut", "hang"):
                self.write(content[:middle])
                if fault == "hang":
                    wire.hang()
                self.drop()
                return middle
            self.write(content, wire.faults.slow_bytes_s if fault == "slow" else 0.0)
            return len(content)

        def head(self, status: int, length: int, extra: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in extra.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(length))
            self.end_headers()

        def write(self, content: bytes, rate: float = 0.0) -> None:
            piece = max(1, int(rate / 20)) if rate else 1 << 18
            for begin in range(0, len(content), piece):
                some = memoryview(content)[begin : begin + piece]
                wire.pass_by(len(some))
                self.wfile.write(some)
                if rate:
                    time.sleep(len(some) / rate)

        def drop(self) -> None:
            """Close with a reset: nothing that was not sent yet arrives."""
            self.close_connection = True
            with suppress(OSError):
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

        def finish(self) -> None:
            if self.upstream is not None:
                self.upstream.close()
            super().finish()

    server = _Server(("127.0.0.1", 0), Handler)
    wire = Wire(url=f"http://127.0.0.1:{server.server_address[1]}", faults=faults)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield wire
    finally:
        wire.release()
        with suppress(OSError):
            server.shutdown()
            server.server_close()
