"""The client against a server with the shapes of the real one."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from stoker.errors import ConfigError, ServiceError, StalledError, StokerError
from stoker.launch.client import VastClient

KEY = "planted-account-key-55555"
OFFER = {
    "id": 7, "gpu_name": "RTX 4090", "num_gpus": 1, "gpu_ram": 24576, "dph_total": 0.41, "disk_space": 200.5,
    "geolocation": "Sweden, SE", "reliability2": 0.993, "inet_down": 810.2, "rentable": True,
}  # fmt: skip
INSTANCE = {
    "id": 77, "label": "stoker:run", "actual_status": "running", "intended_status": "running",
    "gpu_name": "RTX 4090", "num_gpus": 1, "dph_total": 0.41, "status_msg": "success, running",
}  # fmt: skip


@dataclass
class Vast:
    """The provider."""

    url: str = ""
    asked: list[tuple[str, str, Any, str]] = field(default_factory=list)
    faults: list[Any] = field(default_factory=list)
    """For the next calls: a status, `(status, headers)`, bytes as the answer, or `hang`."""
    offers: list[dict[str, Any]] = field(default_factory=lambda: [OFFER])
    instances: list[dict[str, Any]] = field(default_factory=lambda: [dict(INSTANCE)])
    log_tries: int = 1
    released: threading.Event = field(default_factory=threading.Event)


@pytest.fixture
def vast() -> Iterator[Vast]:
    world = Vast()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

        def answer(self) -> None:
            size = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(size)) if size else None
            world.asked.append((self.command, self.path, body, self.headers.get("Authorization") or ""))
            fault = world.faults.pop(0) if world.faults else None
            if fault == "hang":
                world.released.wait(20)
                return
            status, headers = fault if isinstance(fault, tuple) else (fault, {})
            if isinstance(fault, bytes):
                self._send(200, fault, {})
            elif status is not None:
                text = json.dumps({"success": False, "msg": f"no, {self.headers.get('Authorization')}"})
                self._send(status, text.encode(), headers)
            else:
                self._send(200, self._content(body), {})

        do_GET = do_PUT = do_DELETE = answer

        def _content(self, body: Any) -> bytes:
            path = urlsplit(self.path).path
            if path == "/log.txt":
                return b"line 1\nline 2\n"
            found: dict[str, Any] = {"success": True}
            if path == "/bundles/":
                found = {"offers": world.offers}
            elif path.startswith("/asks/"):
                found = {"success": True, "new_contract": 78}
            elif path.startswith("/instances/request_logs/"):
                world.faults = [404] * world.log_tries
                found = {"success": True, "result_url": f"{world.url}/log.txt"}
            elif path == "/instances/":
                found = {"instances": world.instances}
            return json.dumps(found).encode()

        def _send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.block_on_close = False
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    world.url = f"http://127.0.0.1:{server.server_address[1]}"
    yield world
    world.released.set()
    server.shutdown()
    server.server_close()


def client(vast: Vast, **more: float) -> VastClient:
    return VastClient(KEY, api=vast.url, **({"timeout_s": 5.0, "deadline_s": 20.0, "pause_s": 0.02} | more))


def test_offers_come_cheapest_first_and_the_query_is_sent(vast: Vast) -> None:
    vast.offers = [OFFER | {"id": 8, "dph_total": 0.9}, OFFER]

    offers = client(vast).offers({"gpu_name": {"eq": "RTX 4090"}})

    assert [one.id for one in offers] == [7, 8]
    assert (offers[0].gpu, offers[0].gpu_memory_gib, offers[0].region) == ("RTX 4090", 24.0, "Sweden, SE")
    method, path, _, key = vast.asked[0]
    query = json.loads(parse_qs(urlsplit(path).query)["q"][0])
    assert (method, key) == ("GET", f"Bearer {KEY}")
    assert query["gpu_name"] == {"eq": "RTX 4090"}
    assert query["rentable"] == {"eq": True}


def test_an_instance_is_made_listed_stopped_and_destroyed(vast: Vast) -> None:
    one = client(vast)

    assert one.create(7, {"image": "a", "onstart": "x"}) == 78
    assert [(found.id, found.label, found.status) for found in one.instances()] == [
        (77, "stoker:run", "running")
    ]
    one.stop(77)
    one.destroy(77)

    assert [(method, path, body) for method, path, body, _ in vast.asked] == [
        ("PUT", "/asks/7/", {"image": "a", "onstart": "x"}),
        ("GET", "/instances/", None),
        ("PUT", "/instances/77/", {"state": "stopped"}),
        ("DELETE", "/instances/77/", None),
    ]


def test_logs_are_waited_for_and_fetched_without_the_key(vast: Vast) -> None:
    vast.log_tries = 2

    assert client(vast).logs(77, 10) == "line 1\nline 2\n"
    assert [(path, key) for _, path, _, key in vast.asked[1:]] == [("/log.txt", "")] * 3


def test_a_limit_of_calls_is_kept(vast: Vast) -> None:
    vast.faults = [(429, {"Retry-After": "1"}), 429, 503]
    begin = time.monotonic()

    assert len(client(vast).instances()) == 1

    assert time.monotonic() - begin >= 1
    assert len(vast.asked) == 4


def test_busy_for_too_long_is_a_stall(vast: Vast) -> None:
    vast.faults = [(429, {"Retry-After": "60"})] * 9

    with pytest.raises(StalledError, match=r"GET /instances/: busy for 2 s"):
        client(vast, deadline_s=2).instances()

    assert len(vast.asked) == 1


def test_no_answer_is_a_stall(vast: Vast) -> None:
    vast.faults = ["hang"]

    with pytest.raises(StalledError, match=r"no answer within 0\.3 s"):
        client(vast, timeout_s=0.3).instances()


@pytest.mark.parametrize("fault", ["hang", 502, 500])
def test_a_machine_is_never_rented_twice_by_one_call(vast: Vast, fault: object) -> None:
    vast.faults = [fault] * 5

    with pytest.raises(StokerError, match="may have been rented all the same"):
        client(vast, timeout_s=0.3).create(7, {})

    assert len(vast.asked) == 1


def test_a_limit_of_calls_is_no_reason_to_give_up_renting(vast: Vast) -> None:
    vast.faults = [429]

    assert client(vast).create(7, {}) == 78


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        pytest.param(401, ConfigError, "the key is refused", id="key"),
        pytest.param(403, ConfigError, "the key is refused", id="rights"),
        pytest.param(404, ServiceError, "404 Not Found", id="missing"),
        pytest.param(500, ServiceError, "500 Internal", id="broken"),
        pytest.param(b"<html>", ServiceError, "no JSON object", id="html"),
        pytest.param(b"[]", ServiceError, "no JSON object", id="list"),
        pytest.param(b"[" * 100000, ServiceError, "no JSON object", id="deep"),
        pytest.param(b"{}", ServiceError, "has no instances", id="empty"),
        pytest.param((302, {"Location": "http://127.0.0.1:9/"}), ServiceError, "302", id="elsewhere"),
    ],
)
def test_errors_are_typed_and_never_show_the_key(
    vast: Vast, fault: Any, kind: type[Exception], message: str
) -> None:
    vast.faults = [fault] * 3

    with pytest.raises(kind, match=message) as error:
        client(vast).instances()

    assert KEY not in str(error.value)


def test_a_server_that_is_not_there_is_a_stall() -> None:
    with pytest.raises(StalledError):
        VastClient(KEY, api="http://127.0.0.1:9", deadline_s=0.3, pause_s=0.05).instances()
