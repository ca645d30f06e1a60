"""The wire that other tests rely on: each fault is what it says, and the same ones come again."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import pytest

from tests.store.faulty_s3 import Faults, Wire, a_wire

BODY = bytes(range(1, 251)) * 40


@pytest.fixture
def upstream() -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None: ...

        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(BODY)))
            self.end_headers()
            self.wfile.write(BODY)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def ask(wire: Wire, path: str = "/bucket/key", *, timeout: float = 10.0) -> tuple[int, int, bytes]:
    """Status, announced length and body."""
    there = HTTPConnection("127.0.0.1", urlsplit(wire.url).port, timeout=timeout)
    try:
        there.request("GET", path)
        got = there.getresponse()
        return got.status, int(got.getheader("Content-Length") or -1), got.read()
    finally:
        there.close()


def test_each_fault_is_what_it_says_and_the_next_try_succeeds(upstream: str) -> None:
    half = len(BODY) // 2

    def failing(kind: str) -> Wire:
        wire.failed.clear()
        wire.faults = Faults(rate=1.0, kinds=(kind,), most=1, slow_bytes_s=40_000.0)
        return wire

    with a_wire(upstream) as wire:
        assert ask(wire) == (200, len(BODY), BODY)
        for kind in ("cut", "refused"):
            with pytest.raises((HTTPException, OSError)):
                ask(failing(kind))
            assert ask(wire)[2] == BODY
        assert ask(failing("short")) == (200, half, BODY[:half])
        assert ask(failing("padded")) == (200, len(BODY), BODY[:half] + bytes(half))
        flipped = ask(failing("flipped"))[2]
        assert [a ^ b for a, b in zip(flipped, BODY, strict=True) if a != b] == [1]
        assert ask(failing("busy"))[0] == 503
        assert ask(failing("broken"))[0] == 500
        begin = time.monotonic()
        assert ask(failing("slow"))[2] == BODY
        assert time.monotonic() - begin > 0.2
        with pytest.raises((HTTPException, OSError)):
            ask(failing("hang"), timeout=0.2)
        assert ask(wire)[2] == BODY


def test_the_same_requests_meet_the_same_faults_in_any_order(upstream: str) -> None:
    paths = [f"/bucket/{i}" for i in range(40)]
    seen: list[dict[str, str]] = []
    for order in (paths, paths[::-1]):
        with a_wire(upstream, Faults(rate=0.4, kinds=("short", "padded", "flipped"), seed=3)) as wire:
            for path in order:
                ask(wire, path)
            wire.settle()
            seen.append({request.path: request.fault for request in wire.requests})

    assert seen[0] == seen[1]
    assert 5 < sum(map(bool, seen[0].values())) < 30
    assert set(seen[0].values()) == {"", "short", "padded", "flipped"}
