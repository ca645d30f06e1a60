"""A web server on loopback that misbehaves on request."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Files:
    """What is served, and how."""

    content: dict[str, bytes] = field(default_factory=dict)
    faults: dict[str, list[str]] = field(default_factory=dict)
    """By path: what goes wrong at the first, second ... request; then nothing."""
    etags: dict[str, str] = field(default_factory=dict)
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    """Path and Range of each request."""
    url: str = ""
    released: threading.Event = field(default_factory=threading.Event)


@contextmanager
def serving() -> Iterator[Files]:
    files = Files()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None: ...

        def do_GET(self) -> None:
            self.close_connection = True
            path = self.path.partition("?")[0]
            files.asked.append((path, self.headers.get("Range")))
            faults = files.faults.get(path, [])
            fault = faults.pop(0) if faults else ""
            body = files.content.get(path)
            if fault.isdigit() or body is None:
                self.send_response(int(fault or 404))
                if fault == "429":
                    self.send_header("Retry-After", "0")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            if fault == "garbled":
                self.wfile.write(b"declared was\r\n\r\n")
                return
            if fault == "silent":
                files.released.wait(30)
                return
            if fault == "elsewhere":
                self.send_response(302)
                self.send_header("Location", "file:///etc/passwd")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            self._send(path, body, fault)

        def _send(self, path: str, body: bytes, fault: str) -> None:
            etag = files.etags.get(path, "")
            start = self._start(etag, fault)
            self.send_response(206 if start else 200)
            if etag:
                self.send_header("ETag", etag)
            if fault == "gzip":
                self.send_header("Content-Encoding", "gzip")
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
            self.send_header("Content-Length", str(len(body) - start))
            self.end_headers()
            rest = body[start:]
            if fault == "wrong":
                rest = bytes([rest[0] ^ 1]) + rest[1:]
            half = len(rest) // 2
            if fault in ("short", "stuck"):  # never more than the first hundred bytes of all
                rest = rest[: max(0, 100 - start)]
            self.wfile.write(rest if fault not in ("cut", "hang") else rest[:half])
            if fault in ("hang", "stuck"):
                self.wfile.flush()
                files.released.wait(30)

        def _start(self, etag: str, fault: str) -> int:
            wanted, same = self.headers.get("Range"), self.headers.get("If-Range")
            if wanted is None or fault == "no-ranges" or (same is not None and same != etag):
                return 0
            return int(wanted.removeprefix("bytes=").rstrip("-"))

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.block_on_close = False
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    files.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield files
    finally:
        files.released.set()
        server.shutdown()
        server.server_close()
        time.sleep(0)
