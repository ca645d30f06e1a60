"""The provider, on loopback: answers of the shapes that its reference shows, and every fault on request."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

OFFER = {
    "id": 7, "ask_contract_id": 7, "bundle_id": 311, "machine_id": 12, "host_id": 3, "gpu_name": "RTX 4090",
    "num_gpus": 1, "gpu_ram": 24576, "gpu_totalram": 24576, "gpu_frac": 1.0, "dph_base": 0.4,
    "dph_total": 0.41, "storage_cost": 0.15, "disk_space": 200.5, "disk_bw": 2100.0, "cpu_ram": 64303,
    "geolocation": "Sweden, SE", "reliability2": 0.993, "reliability": 0.993, "inet_down": 810.2,
    "inet_up": 300.0, "verification": "verified", "rentable": True, "rented": False, "external": None,
    "duration": 1209600.0, "cuda_max_good": 12.8, "driver_version": "570.86.15", "hosting_type": None,
}  # fmt: skip
INSTANCE = {
    "id": 77, "actual_status": "running", "cur_state": "running", "next_state": "running",
    "intended_status": "running", "label": "stoker:run", "template_id": None, "image_uuid": "a/b:c",
    "image_runtype": "ssh", "extra_env": [["WANDB_API_KEY", "x"]], "onstart": "#!/usr/bin/env bash",
    "status_msg": "success, running pytorch/ssh\n", "public_ipaddr": "192.0.2.45", "ssh_host": "ssh1.vast.ai",
    "ssh_port": 10600, "machine_id": 12, "start_date": 1668804745.1, "end_date": None, "uptime_mins": None,
    "cpu_cores_effective": 4.0, "gpu_name": "RTX 4090", "num_gpus": 1, "gpu_util": None, "dph_total": 0.41,
}  # fmt: skip


@dataclass
class Vast:
    """The provider."""

    url: str = ""
    asked: list[tuple[str, str, Any, str]] = field(default_factory=list)
    faults: list[Any] = field(default_factory=list)
    """For the next calls: a status, `(status, headers)`, bytes as the answer, or a word of `_broken`."""
    offers: list[dict[str, Any]] = field(default_factory=lambda: [OFFER])
    instances: list[dict[str, Any]] = field(default_factory=lambda: [dict(INSTANCE)])
    log_faults: list[Any] = field(default_factory=lambda: [404])
    released: threading.Event = field(default_factory=threading.Event)

    def content(self, method: str, where: str, query: dict[str, list[str]]) -> tuple[int, dict[str, Any]]:
        """What a call is answered."""
        known = {f"/v0/instances/{one['id']}/" for one in self.instances}
        if (method, where) == ("POST", "/v0/bundles/"):
            return 200, {"offers": self.offers}
        if (method, where) == ("GET", "/v1/instances/"):
            return 200, self._page(int(query.get("after_token", ["0"])[0]), int(query["limit"][0]))
        if method == "PUT" and where.startswith("/v0/asks/"):
            if not any(where == f"/v0/asks/{one['id']}/" for one in self.offers):
                return 404, {"success": False, "error": "no_such_ask", "msg": "Instance type by id is gone."}
            return 200, {"success": True, "new_contract": 78}
        if method == "PUT" and where.startswith("/v0/instances/request_logs/"):
            self.faults = list(self.log_faults)
            return 200, {"success": True, "result_url": f"{self.url}/log.txt", "msg": "Log request queued"}
        if where in known and method in ("PUT", "DELETE"):
            return 200, {"success": True, "msg": "done"}
        if method == "GET" and where.rstrip("/") == "/v0/instances":
            return 410, {"success": False, "error": "gone", "msg": "Use /api/v1/instances/"}
        return 404, {"success": False, "error": "not_found", "msg": f"no {method} {where}"}

    def _page(self, begin: int, limit: int) -> dict[str, Any]:
        end = begin + min(limit, 25)
        more = str(end) if end < len(self.instances) else None
        return {
            "success": True, "instances_found": len(self.instances), "total_instances": len(self.instances),
            "label_counts": {}, "next_token": more, "instances": self.instances[begin:end],
        }  # fmt: skip


@contextmanager
def serving() -> Iterator[Vast]:
    world = Vast()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

        def answer(self) -> None:
            size = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(size)) if size else None
            world.asked.append((self.command, self.path, body, self.headers.get("Authorization") or ""))
            fault = world.faults.pop(0) if world.faults else None
            status, headers = fault if isinstance(fault, tuple) else (fault, {})
            if isinstance(fault, str):
                self._broken(fault)
            elif isinstance(fault, bytes):
                self._send(200, fault, {})
            elif status == 429:
                self._send(429, b"API requests too frequent: endpoint threshold=2.0", headers)
            elif status is not None:
                text = json.dumps({"success": False, "msg": f"no, {self.headers.get('Authorization')}"})
                self._send(status, text.encode(), headers)
            else:
                self._right()

        do_GET = do_PUT = do_POST = do_DELETE = answer

        def _right(self) -> None:
            place = urlsplit(self.path)
            if place.path == "/log.txt":
                self._send(200, b"line 1\nline 2\n", {})
                return
            status, content = world.content(self.command, place.path, parse_qs(place.query))
            self._send(status, json.dumps(content).encode(), {})

        def _broken(self, fault: str) -> None:
            """A connection that does not end as it should."""
            head = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n"
            if fault == "hang":
                world.released.wait(20)
            elif fault == "hang-in-body":
                self.wfile.write(head + b'{"success": ')
                world.released.wait(20)
            elif fault == "half-closed":
                self.wfile.write(head + b'{"success": ')
                self.connection.shutdown(socket.SHUT_WR)
                world.released.wait(20)
            elif fault == "nothing":
                self.connection.shutdown(socket.SHUT_WR)
            elif fault == "reset":
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.connection.close()
            elif fault == "trickle":
                self.wfile.write(head)
                while not world.released.wait(0.05):
                    self.wfile.write(b" ")
            elif fault == "hang-in-error":
                self.wfile.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 100\r\n\r\n{")
                world.released.wait(20)

        def _send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        block_on_close = False

        def handle_error(self, request: Any, client_address: Any) -> None:
            """A client that has gone is no news here."""

    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    world.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield world
    finally:
        world.released.set()
        server.shutdown()
        server.server_close()
        time.sleep(0)
