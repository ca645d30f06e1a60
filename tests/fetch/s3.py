"""An S3 server on loopback for the real rclone, with a wire that fails on request in front of it."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

KEY_ID, SECRET_KEY = "planted-key-id-00001", "planted-s3-secret-112233445566"
LOST = 100_000
"""Bytes of an object after which a wire that is cut, or hangs, brings nothing more."""
SERVER = """
import logging, sys, time
logging.disable()
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


@dataclass
class Bucket:
    """One bucket, and the wire to it."""

    url: str
    direct: str
    name: str = "bucket"
    faults: dict[str, str] = field(default_factory=dict)
    """By the key of an object: what goes wrong whenever it is fetched."""
    asked: list[tuple[str, str]] = field(default_factory=list)
    """Method and path of each request."""
    released: threading.Event = field(default_factory=threading.Event)

    def put(self, key: str, content: bytes) -> None:
        """Store an object."""
        self._ask("PUT", f"/{self.name}/{key}", content)

    def get(self, key: str) -> bytes:
        """Read one."""
        return self._ask("GET", f"/{self.name}/{key}")

    def make(self) -> None:
        """Be there."""
        self._ask("PUT", f"/{self.name}")

    def _ask(self, method: str, path: str, content: bytes | None = None) -> bytes:
        request = urllib.request.Request(self.direct + path, data=content, method=method)
        request.add_header("Content-Type", "application/octet-stream")
        request.add_header(
            "Authorization", "AWS4-HMAC-SHA256 Credential=a/20200101/us-east-1/s3/aws4_request"
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.read()

    def variables(self, remote: str = "S3") -> dict[str, str]:
        """What describes it to rclone."""
        prefix = f"RCLONE_CONFIG_{remote}_"
        return {
            f"{prefix}TYPE": "s3", f"{prefix}PROVIDER": "Other", f"{prefix}ENDPOINT": self.url,
            f"{prefix}ACCESS_KEY_ID": KEY_ID, f"{prefix}SECRET_ACCESS_KEY": SECRET_KEY,
            f"{prefix}REGION": "us-east-1",
        }  # fmt: skip


def missing() -> str | None:
    """Why there can be none here."""
    if shutil.which("rclone") is None:
        return "rclone is not installed"
    return None if importlib.util.find_spec("moto") else "moto is not installed (moto[server])"


@contextmanager
def a_bucket() -> Iterator[Bucket]:
    """An empty bucket."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    child = subprocess.Popen(
        [sys.executable, "-c", SERVER],
        env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    try:
        assert child.stdout is not None
        port = int(child.stdout.readline())
        with _wire(port) as bucket:
            bucket.make()
            yield bucket
    finally:
        child.kill()
        child.communicate()


@contextmanager
def _wire(port: int) -> Iterator[Bucket]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None: ...

        def answer(self) -> None:
            self.close_connection = True
            size = int(self.headers.get("Content-Length") or 0)
            body = self.rfile.read(size) if size else None
            bucket.asked.append((self.command, self.path))
            path = self.path.partition("?")[0]
            fault = bucket.faults.get(path.removeprefix(f"/{bucket.name}/"), "")
            if fault.isdigit():
                self.send_response(int(fault))
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            there = HTTPConnection("127.0.0.1", port, timeout=30)
            there.request(self.command, self.path, body, dict(self.headers.items()))
            got = there.getresponse()
            content = got.read()
            self.send_response(got.status)
            for name, value in got.getheaders():
                if name.lower() not in (
                    "content-length",
                    "connection",
                    "transfer-encoding",
                    "server",
                    "date",
                ):
                    self.send_header(name, value)
            length = got.getheader("Content-Length") if self.command == "HEAD" else str(len(content))
            self.send_header("Content-Length", length or "0")
            self.end_headers()
            place = (self.headers.get("Range") or "bytes=0-").removeprefix("bytes=").partition("-")[0]
            self._send(content, fault if self.command == "GET" else "", int(place))

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = answer

        def _send(self, content: bytes, fault: str, begin: int) -> None:
            if fault == "wrong":
                content = bytes([content[0] ^ 1]) + content[1:]
            some = max(0, LOST - begin) if fault in ("cut", "hang") else len(content)
            self.wfile.write(content[:some])
            if fault == "hang":
                self.wfile.flush()
                bucket.released.wait(60)

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        block_on_close = False

        def handle_error(self, request: object, client_address: object) -> None:
            """A client that has gone is no news here."""

    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    bucket = Bucket(url=f"http://127.0.0.1:{server.server_address[1]}", direct=f"http://127.0.0.1:{port}")
    try:
        yield bucket
    finally:
        bucket.released.set()
        with suppress(OSError):
            server.shutdown()
            server.server_close()
        time.sleep(0)
