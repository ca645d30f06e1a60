"""The web server's socket: connections that do nothing are closed; the process starts and ends in order."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import httpx
import pytest

from stoker.errors import ConfigError
from stoker.service import server
from stoker.service.client import Client
from stoker.service.security import RequestLimits
from stoker.service.supervisor import WorkerPlan
from tests.cli.commands import run
from tests.service.running import serving


def answer_to(port: int, *pieces: bytes, wait_s: float = 20.0) -> bytes:
    """All that comes back until the other side closes."""
    with closing(socket.create_connection(("127.0.0.1", port), timeout=wait_s)) as raw:
        found = b""
        try:
            for piece in pieces:
                raw.sendall(piece)
            while data := raw.recv(65536):
                found += data
        except ConnectionError:
            pass
        return found


def status_from(raw: socket.socket) -> int:
    """The status of one answer, read whole."""
    answer = HTTPResponse(raw)
    answer.begin()
    answer.read()
    return answer.status


def test_connections_that_send_no_whole_request_are_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "LOOK_S", 0.2)
    with serving(tmp_path / "state") as running:
        host = f"Host: 127.0.0.1:{running.port}\r\n".encode()
        assert answer_to(running.port) == b"", "nothing was ever sent"
        assert answer_to(running.port, b"GET /health HTTP/1.1\r\n" + host + b"X-Slow: ") == b""
        large = b"GET /health HTTP/1.1\r\n" + host + b"X-Large: " + b"x" * 20_000
        assert b" 400 " in answer_to(running.port, large).partition(b"\r\n")[0]
        answered = b"GET /health HTTP/1.1\r\n" + host + b"\r\n"
        assert answer_to(running.port, answered).startswith(b"HTTP/1.1 200")
        refused = b"POST /api/v1/training/jobs HTTP/1.1\r\n" + host + b"Content-Length: 500\r\n\r\nbegun"
        assert answer_to(running.port, refused).startswith(b"HTTP/1.1 401"), "closed without its body"


def test_a_refusal_reaches_whoever_sends_a_body_with_it(tmp_path: Path) -> None:
    """A connection that is closed before the body has come is reset, and the answer lost with it."""
    with serving(tmp_path / "state") as running:
        host = f"Host: 127.0.0.1:{running.port}\r\n"
        with closing(socket.create_connection(("127.0.0.1", running.port), timeout=20)) as raw:
            raw.sendall(
                f"POST /api/v1/training/jobs HTTP/1.1\r\n{host}Content-Length: 100000\r\n\r\n".encode()
            )
            time.sleep(0.2)
            raw.sendall(b"x" * 100_000)
            assert status_from(raw) == 401
            raw.sendall(f"GET /health HTTP/1.1\r\n{host}\r\n".encode())
            assert status_from(raw) == 200, "the connection is as good as before"
        assert running.client.post(running.api("/jobs"), content=b"x" * 3_000_000).status_code == 413


def test_a_body_that_never_ends_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(tmp_path / "state", limits=RequestLimits(body_s=0.3)) as running:
        begun = (
            f"POST /api/v1/training/jobs HTTP/1.1\r\nHost: 127.0.0.1:{running.port}\r\n"
            f"Content-Length: 500\r\nAuthorization: Bearer {running.token}\r\n\r\nbegun"
        )
        assert answer_to(running.port, begun.encode()).startswith(b"HTTP/1.1 408")


def test_many_who_send_a_byte_at_a_time_hold_up_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads and then bodies that come in drops, on three times as many connections as there may be."""
    monkeypatch.setattr(server, "CONNECTIONS", 24)
    monkeypatch.setattr(server, "LOOK_S", 1.0)
    with serving(tmp_path / "state", limits=RequestLimits(body_s=2.0)) as running, ExitStack() as stack:
        host = f"Host: 127.0.0.1:{running.port}\r\n"
        begun = (
            f"GET /health HTTP/1.1\r\n{host}X-Slow: ",
            f"POST /login HTTP/1.1\r\n{host}Content-Length: 500\r\n\r\n",
            f"POST /api/v1/training/jobs HTTP/1.1\r\n{host}Authorization: Bearer {running.token}\r\n"
            "Content-Length: 500\r\n\r\n",
        )
        slow: list[socket.socket] = []
        for n in range(72):
            raw = stack.enter_context(closing(socket.create_connection(("127.0.0.1", running.port), 20)))
            raw.sendall(begun[0 if n < 24 else 1 + n % 2].encode())
            slow.append(raw)
        deadline = time.monotonic() + 60
        while slow:
            assert time.monotonic() < deadline, f"{len(slow)} were never ended"
            for _ in range(10):  # those that were ended in one go are counted for a moment longer
                answer = running.client.get(running.api("/jobs"), headers={"Connection": "close"})
                if answer.status_code == 200:
                    break
                time.sleep(0.02)
            assert answer.status_code == 200, f"while {len(slow)} are slow"
            for raw in list(slow):
                try:
                    raw.sendall(b"x")
                except ConnectionError:
                    slow.remove(raw)
            time.sleep(0.2)


def test_a_port_that_is_taken_is_told() -> None:
    with (
        closing(server.open_socket("127.0.0.1", 0)) as taken,
        pytest.raises(ConfigError, match="cannot be opened"),
    ):
        server.open_socket("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(ConfigError, match="cannot be opened"):
        server.open_socket("no.such.host.invalid", 0)


@contextmanager
def service(folder: Path, *words: str) -> Iterator[tuple[subprocess.Popen[bytes], dict[str, Any]]]:
    """`stoker serve` as a process, once it answers."""
    command = [
        sys.executable,
        "-m",
        "stoker",
        "serve",
        "--port",
        "0",
        "--state-dir",
        str(folder),
        "--json",
        *words,
    ]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        assert process.stdout is not None
        yield process, json.loads(process.stdout.readline())
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=30)


def test_a_service_starts_answers_and_ends_in_order(tmp_path: Path) -> None:
    state = tmp_path / "state"
    with service(state, "--workers", "0") as (process, started):
        address = started["address"]
        assert address == (state / "address").read_text().strip()
        assert httpx.get(f"{address}/health", trust_env=False).json() == {"status": "ok"}
        assert httpx.get(started["login"], trust_env=False).status_code == 303
        token = (state / "token").read_text().strip()
        assert Client(address, token).jobs()["jobs"] == []
        assert token not in Path(f"/proc/{process.pid}/cmdline").read_text()
        modes = {path.name: path.stat().st_mode & 0o777 for path in state.iterdir()}
        assert {name for name, mode in modes.items() if mode & 0o077} == set(), "for nobody else"

        process.send_signal(signal.SIGTERM)
        _, notes = process.communicate(timeout=60)

    assert process.returncode == 0, notes
    assert token.encode() not in notes
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{address}/health", trust_env=False)


def test_limits_of_jobs_reach_the_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[WorkerPlan] = []

    class NoWorkers:
        def __init__(self, _database: object, _folder: object, told: WorkerPlan) -> None:
            plans.append(told)

        def start(self) -> None:
            pass

        def stop(self, **_limit: float) -> bool:
            return True

    monkeypatch.setattr(server, "WorkerSupervisor", NoWorkers)
    monkeypatch.setattr(server, "run_server", lambda _server, listening: listening.close())
    words = ["serve", "--port", "0", "--state-dir", str(tmp_path / "state"), "--workers", "2"]

    run(*words)
    run(*words, "--job-memory", "2GiB", "--job-time", "90min")

    limits = [one.settings.limits for one in plans]
    assert [(one.memory_bytes, one.wall_s) for one in limits] == [(None, None), (2 << 30, 5400.0)]
    for flag, value in (("--job-memory", "0"), ("--job-time", "0s")):
        _, notes = run(*words, flag, value, exit_code=3)
        assert "--job-memory and --job-time above 0" in notes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limit", "said"),
    [(("--job-memory", "1MiB"), "1.0 MiB"), (("--job-time", "1s"), "an attempt may take 1")],
)
def test_a_job_that_passes_a_limit_fails_and_says_which(
    tmp_path: Path, limit: tuple[str, str], said: str
) -> None:
    with service(tmp_path / "state", "--workers", "1", *limit) as (_, started):
        client = Client(started["address"], (tmp_path / "state" / "token").read_text().strip())
        job = client.generate({"kind": "radio", "name": "radio", "rows": 1_000_000})["job"]["id"]
        deadline = time.monotonic() + 120
        while (found := client.job(job)["job"])["status"] not in ("failed", "completed"):
            assert time.monotonic() < deadline, found
            time.sleep(0.2)

    assert found["status"] == "failed"
    assert said in found["error_message"]


@pytest.mark.slow
def test_the_guides_job_trains_and_is_read_back_also_after_a_restart(tmp_path: Path) -> None:
    state = tmp_path / "state"

    def wait(client: Client, job: str, *states: str) -> dict[str, Any]:
        deadline = time.monotonic() + 120
        while (found := client.job(job)["job"])["status"] not in states:
            assert time.monotonic() < deadline, found
            assert found["status"] != "failed", found
            time.sleep(0.3)
        return found

    with service(state, "--workers", "1") as (process, started):
        client = Client(started["address"], (state / "token").read_text().strip())
        headers = {"Authorization": f"Bearer {(state / 'token').read_text().strip()}"}
        made = httpx.post(
            f"{started['address']}/api/v1/training/datasets/generate",
            json={"kind": "radio", "name": "radio", "rows": 4030},
            headers=headers,
            timeout=60.0,
        ).json()
        wait(client, made["job"]["id"], "completed")
        config = {
            "dataset_ids": [made["dataset"]["id"]],
            "batch_size": 256,
            "epochs": 60,
            "early_stop_patience": 0,
            "learning_rate": 0.001,
            "preload_to_gpu": True,
            "accelerator": "auto",
        }
        body = {"job_name": "rx-night-run", "config": config}
        address = f"{started['address']}/api/training/jobs"
        answer = httpx.post(address, json=body, headers=headers, timeout=60.0)
        assert answer.status_code == 201
        job = answer.json()["id"]
        deadline = time.monotonic() + 120
        while not client.metrics(job) and time.monotonic() < deadline:
            time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(90) == 0
    with service(state, "--workers", "1") as (process, started):
        client = Client(started["address"], (state / "token").read_text().strip())
        found = wait(client, job, "completed")
        assert (found["attempt"], found["current_epoch"]) == (2, 60)
        assert [row["epoch"] for row in client.metrics(job, limit=1000)] == list(range(1, 61))
        assert client.log(job)["lines"]
        assert found["tier"] in ("host", "device")
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(90) == 0
