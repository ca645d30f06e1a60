"""A service to ask: in this process without a socket, or behind a real one in a thread."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import torch

import stoker
from stoker.service.database import DATASETS
from stoker.service.security import RequestLimits
from stoker.service.server import address_of, make_server, open_socket
from stoker.service.services import Services, open_services

HOST = b"127.0.0.1:8765"
_LOOP = asyncio.Runner()
CONFIG = {"dataset_ids": ["00000000-0000-4000-8000-000000000000"], "epochs": 3}


@dataclass
class Answer:
    """What came back."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    def json(self) -> Any:
        return json.loads(self.body)


def ask(
    app: Any,
    method: str,
    path: str,
    headers: Mapping[str, str] | Sequence[tuple[str, str]] = (),
    body: bytes | list[bytes] = b"",
    *,
    server: str = "127.0.0.1",
) -> Answer:
    """One request to an ASGI application.

    Args:
        server: The address of this machine that it came to.
    """
    pairs = list(headers.items()) if isinstance(headers, Mapping) else list(headers)
    if "host" not in {name.lower() for name, _ in pairs}:
        pairs.append(("host", HOST.decode()))
    raw, _, query = path.partition("?")
    pieces = [body] if isinstance(body, bytes) else list(body)
    answer = Answer()
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "scheme": "http",
        "path": raw,
        "raw_path": raw.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": [(name.lower().encode(), value.encode("latin-1")) for name, value in pairs],
        "server": (server, 8765),
        "client": ("127.0.0.1", 50000),
        "extensions": {},
        "method": method,
    }

    async def receive() -> dict[str, Any]:
        if pieces:
            return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        if message["type"].endswith("response.start"):
            answer.status = message["status"]
            answer.headers = {k.decode().lower(): v.decode() for k, v in message["headers"]}
        elif message["type"].endswith("response.body"):
            answer.body += message.get("body", b"")

    async def run() -> None:
        async with asyncio.timeout(30):
            await app(scope, receive, send)

    _LOOP.run(run())
    return answer


@dataclass
class Running:
    """A service behind a real socket."""

    services: Services
    address: str
    token: str
    client: httpx.Client
    """Has the token."""
    stop: Callable[[], None]
    """Let the server end as a signal would."""
    unsent: Callable[[], list[int]]
    """Bytes that each connection holds for its client."""

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def api(self, path: str) -> str:
        return f"{self.address}/api/v1/training{path}"


def note_radio(services: Services, id: str, name: str = "radio") -> None:
    """A data set in the registry; nobody looks whether its rows are there."""
    spec = {
        "url": f"sqlite:///{services.folder.data / 'radio.db'}",
        "table": "measurement_features",
        "set": id,
    }
    note(services, id, name, "radio", spec)


def note(services: Services, id: str, name: str, kind: str, spec: dict[str, str]) -> None:
    """A data set of any kind in the registry; it may not exist."""
    row = {"id": id, "name": name, "kind": kind, "origin": "registered", "spec": spec}
    with services.database.writing() as connection:
        connection.execute(
            services.database.insert(DATASETS).values(
                facts={"samples": 4030}, health="good", report=[], created=services.database.wall, **row
            )
        )


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Eight samples."""

    def __init__(self, factor: int) -> None:
        self.factor = factor

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.full((4,), float(index * self.factor))}


def cached_rows(folder: Path, name: str, factor: int = 1) -> str:
    """A small cache in a folder of caches; its fingerprint."""
    source = stoker.TorchSource(Rows(factor), version=f"rows {factor}")
    return stoker.precompute(source, None, folder, name=name, workers=0).fingerprint


@contextmanager
def serving(
    folder: Path,
    *,
    limits: RequestLimits | None = None,
    database: str | None = None,
    public_url: str | None = None,
    encoders: Sequence[str] = (),
) -> Generator[Running]:
    """Run the web server of a new state folder in a thread."""
    services = open_services(folder, database=database, public_url=public_url, encoders=encoders)
    if limits is not None:
        services = replace(services, limits=limits)
    token = (folder / "token").read_text().strip()
    ready = threading.Event()
    server = make_server(services, ready.set)
    listening = open_socket("127.0.0.1", 0)
    address = address_of(listening)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listening])), daemon=True)
    thread.start()
    assert ready.wait(30)

    def unsent() -> list[int]:
        return [one.transport.get_write_buffer_size() for one in list(server.server_state.connections)]

    try:
        with httpx.Client(
            headers={"Authorization": f"Bearer {token}"}, timeout=30, trust_env=False
        ) as client:
            stop = lambda: setattr(server, "should_exit", True)  # noqa: E731
            yield Running(services, address, token, client, stop, unsent)
    finally:
        server.should_exit = True
        thread.join(30)
        services.database.close()
        assert not thread.is_alive()
