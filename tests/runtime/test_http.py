"""The one HTTP client, against servers that hang, trickle, lie and send it elsewhere."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from stoker.errors import ServiceError
from stoker.runtime.http import FailureKind, HttpClient, HttpFailure, json_object

Serve = Callable[[BaseHTTPRequestHandler], None]


class Server:
    """Answers each path with a function, and notes what it was asked."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.paths: dict[str, Serve] = {}
        self.asked: list[tuple[str, str, dict[str, str], bytes]] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                size = int(self.headers.get("Content-Length") or 0)
                headers = {name.lower(): value for name, value in self.headers.items()}
                server.asked.append((self.command, self.path, headers, self.rfile.read(size)))
                with suppress(OSError):  # the client has gone
                    server.paths[self.path](self)
                self.close_connection = True

            do_POST = do_PUT = do_GET

            def log_message(self, *_: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.over.set()
        self._http.shutdown()
        self._http.server_close()


def answers(body: bytes, status: int = 200, **headers: str) -> Serve:
    def serve(request: BaseHTTPRequestHandler) -> None:
        request.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            request.send_header(name.replace("_", "-"), value)
        request.end_headers()
        request.wfile.write(body)

    return serve


@pytest.fixture
def servers() -> Iterator[tuple[Server, Server]]:
    both = Server(), Server()
    yield both
    for one in both:
        one.close()


@pytest.fixture
def server(servers: tuple[Server, Server]) -> Server:
    return servers[0]


def client(timeout_s: float = 5, total_s: float = 10, **more: Any) -> HttpClient:
    return HttpClient(timeout_s=timeout_s, total_s=total_s, uses_proxies=False, **more)


def failure(call: Callable[[], object]) -> HttpFailure:
    with pytest.raises(HttpFailure) as caught:
        call()
    return caught.value


def test_a_request_is_json_and_every_status_is_an_answer(server: Server) -> None:
    server.paths = {"/a": answers(b'{"x": 1}'), "/b": answers(b"why", 503, Retry_After="2")}

    found = client().ask("POST", f"{server.url}/a", headers={"Authorization": "Bearer k"}, body={"q": 2})
    busy = client().ask("GET", f"{server.url}/b")

    assert (found.status, json_object(found.body, "x")) == (200, {"x": 1})
    assert (busy.is_success, busy.shown_status, busy.body) == (False, "503 Service Unavailable", b"why")
    method, _, headers, body = server.asked[0]
    assert (method, json.loads(body), headers["authorization"]) == ("POST", {"q": 2}, "Bearer k")
    assert (headers["content-type"], headers["accept-encoding"]) == ("application/json", "identity")


def hang_before_the_header(server: Server) -> Serve:
    return lambda _: server.over.wait(30) and None


def hang_in_the_header(server: Server) -> Serve:
    def serve(request: BaseHTTPRequestHandler) -> None:
        request.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Le")
        server.over.wait(30)

    return serve


def hang_in_the_body(server: Server) -> Serve:
    def serve(request: BaseHTTPRequestHandler) -> None:
        request.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{")
        server.over.wait(30)

    return serve


HANGS = [hang_before_the_header, hang_in_the_header, hang_in_the_body]


@pytest.mark.parametrize("how", HANGS)
def test_a_server_that_hangs_ends_the_wait(server: Server, how: Callable[[Server], Serve]) -> None:
    server.paths = {"/": how(server)}
    began = time.monotonic()

    found = failure(lambda: client(timeout_s=0.3).ask("GET", f"{server.url}/"))

    assert found.kind is FailureKind.TIMEOUT
    assert time.monotonic() - began < 5


def trickle(server: Server, start: bytes, piece: bytes) -> Serve:
    """Something comes all the time, so that no single wait is long."""

    def serve(request: BaseHTTPRequestHandler) -> None:
        request.wfile.write(start)
        while not server.over.wait(0.05):
            request.wfile.write(piece)

    return serve


@pytest.mark.parametrize(
    "start",
    [b"HTTP/1.1 200 OK\r\nX-A: ", b"HTTP/1.1 200 OK\r\n\r\n"],
    ids=["header", "body"],
)
def test_an_answer_that_trickles_ends_in_time(server: Server, start: bytes) -> None:
    server.paths = {"/": trickle(server, start, b"a")}
    began = time.monotonic()

    found = failure(lambda: client(timeout_s=5, total_s=0.5).ask("GET", f"{server.url}/"))

    assert found.kind is FailureKind.TIMEOUT
    assert time.monotonic() - began < 5


def test_a_connection_that_is_not_accepted_ends_the_wait() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        port = full.getsockname()[1]
        waiting = []
        for _ in range(8):  # fill the queue: the kernel leaves those that follow without an answer
            one = socket.socket()
            one.setblocking(False)
            one.connect_ex(("127.0.0.1", port))
            waiting.append(one)
        time.sleep(0.2)
        began = time.monotonic()

        found = failure(lambda: client(timeout_s=0.3).ask("GET", f"http://127.0.0.1:{port}/"))

        assert found.kind is FailureKind.TIMEOUT
        assert time.monotonic() - began < 5
        for one in waiting:
            one.close()


def test_a_name_that_is_looked_up_for_ever_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: over.wait(30) and [])

    found = failure(lambda: client(total_s=0.3).ask("GET", "http://nowhere.invalid/"))
    over.set()

    assert found.kind is FailureKind.TIMEOUT


ENDS_WHILE_A_REQUEST_HANGS = """
import sys
from stoker.runtime.http import HttpClient, HttpFailure
try:
    HttpClient(timeout_s=600, total_s=0.3, uses_proxies=False).ask("GET", sys.argv[1])
except HttpFailure as error:
    print(error.kind.value)
"""


def test_a_request_that_hangs_does_not_keep_the_process_alive(server: Server) -> None:
    server.paths = {"/": hang_before_the_header(server)}

    done = subprocess.run(
        [sys.executable, "-c", ENDS_WHILE_A_REQUEST_HANGS, f"{server.url}/"],
        timeout=25, check=True, capture_output=True, text=True,
    )  # fmt: skip

    assert done.stdout == "timeout\n"


def test_what_is_not_there_was_not_asked() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]

    assert failure(lambda: client().ask("GET", f"http://127.0.0.1:{port}/")).kind is FailureKind.UNREACHABLE


def writes(data: bytes) -> Serve:
    return lambda request: request.wfile.write(data) and None


def test_what_is_no_sound_answer_is_a_failure_of_its_kind(server: Server) -> None:
    server.paths = {
        "/nothing": lambda _: None,
        "/other": writes(b"220 mail.example.org ESMTP\r\n"),
        "/short": writes(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nabc"),
        "/gzip": answers(b"\x1f\x8b", Content_Encoding="GZip"),
        "/large": answers(bytes(5000)),
        "/exact": answers(bytes(4096)),
    }
    small = client(limit_bytes=4096)

    kinds = {path: failure(lambda path=path: small.ask("GET", server.url + path)).kind
             for path in server.paths if path != "/exact"}  # fmt: skip

    assert kinds == {
        "/nothing": FailureKind.BROKEN,
        "/other": FailureKind.BROKEN,
        "/short": FailureKind.CUT,
        "/gzip": FailureKind.ENCODED,
        "/large": FailureKind.TOO_LARGE,
    }
    assert len(small.ask("GET", f"{server.url}/exact").body) == 4096


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://localhost/x", "data:,x", "http://[", "x"])
def test_only_web_servers_are_asked(url: str) -> None:
    assert failure(lambda: client().ask("GET", url)).kind is FailureKind.REFUSED


KEY = {"Authorization": "Bearer secret", "Cookie": "session=secret"}


def test_a_redirect_is_not_followed_with_a_credential(servers: tuple[Server, Server]) -> None:
    here, there = servers
    here.paths = {"/": answers(b"", 302, Location=f"{there.url}/")}
    there.paths = {"/": answers(b"stolen")}

    assert client().ask("GET", f"{here.url}/", headers=KEY).status == 302
    assert there.asked == []


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_followed_redirect_keeps_credentials_on_the_same_server_alone(
    servers: tuple[Server, Server], status: int
) -> None:
    here, there = servers
    here.paths = {
        "/": answers(b"", status, Location="/again"),
        "/again": answers(b"", status, Location=f"{there.url}/"),
    }
    there.paths = {"/": answers(b"there")}

    found = client(follows_redirects=True).ask("GET", f"{here.url}/", headers={**KEY, "X-Other": "y"})

    assert found.body == b"there"
    assert [one[2].get("authorization") for one in here.asked] == ["Bearer secret"] * 2
    headers = there.asked[0][2]
    assert "secret" not in str(headers)
    assert headers["x-other"] == "y"


def test_redirects_without_end_and_with_endless_bodies_end(server: Server) -> None:
    server.paths = {
        "/loop": answers(b"", 302, Location="/loop"),
        "/endless": trickle(server, b"HTTP/1.1 302 Found\r\nLocation: /end\r\n\r\n", b"a"),
        "/end": answers(b"end"),
        "/file": answers(b"", 302, Location="file:///etc/passwd"),
        "/ftp": answers(b"", 302, Location="ftp://127.0.0.1/x"),
    }
    follows = client(follows_redirects=True, total_s=5)

    assert follows.ask("GET", f"{server.url}/loop").status == 302
    assert follows.ask("GET", f"{server.url}/endless").body == b"end"
    assert follows.ask("GET", f"{server.url}/file").status == 302
    with pytest.raises(HttpFailure, match="ftp"):
        follows.ask("GET", f"{server.url}/ftp")


@pytest.mark.parametrize("body", [b"", b"[1]", b"{", b"<html>", b"[" * 100_000, b"\xff"])
def test_an_answer_that_is_no_json_object_is_said(body: bytes) -> None:
    with pytest.raises(ServiceError, match="GET /x: the answer is not a JSON object"):
        json_object(body, "GET /x")


def test_a_stream_is_read_as_it_comes(server: Server) -> None:
    server.paths = {"/": hang_in_the_body(server), "/lines": answers(b"a\nb\nc")}

    with client(timeout_s=0.5).open("GET", f"{server.url}/") as stream:
        assert stream.read(1000) == b"{"
        assert failure(lambda: stream.read(1000)).kind is FailureKind.TIMEOUT
    with client().open("GET", f"{server.url}/lines") as stream:
        assert list(stream.lines()) == [b"a\n", b"b\n", b"c"]
