"""`stoker serve` as a whole while its database or its disk is away: it stays up, says so, and gets over it.

Real processes throughout: the service, its worker, a job that trains. What is away is a PostgreSQL server
behind a network of ours (`proxy.py`), or the room on the disk of the state folder.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.service.conftest import made_on
from tests.service.proxy import Proxy
from tests.sources.sql.server import Server

pytestmark = [pytest.mark.slow, pytest.mark.chaos, pytest.mark.timeout(900)]
EPOCHS = 400
QUICK_S = 5.0
"""An answer takes longer only where the machine is far too busy."""
OWN_MOUNTS = ("unshare", "-r", "-m")


@dataclass
class Site:
    """A service from outside."""

    process: subprocess.Popen[bytes]
    address: str
    state: Path
    """Where the tests find the state folder."""
    client: httpx.Client
    browser: httpx.Client
    worker: int
    job: str = ""
    slowest_s: float = 0.0
    statuses: set[int] = field(default_factory=set)

    def ask(self, method: str, path: str, **given: Any) -> httpx.Response:
        began = time.monotonic()
        answer = self.client.request(method, f"{self.address}/api/v1/training{path}", **given)
        self.slowest_s = max(self.slowest_s, time.monotonic() - began)
        self.statuses.add(answer.status_code)
        return answer

    def health(self) -> str:
        began = time.monotonic()
        found = httpx.get(f"{self.address}/health", trust_env=False, timeout=30).json()["status"]
        self.slowest_s = max(self.slowest_s, time.monotonic() - began)
        return found

    def submit(self, name: str, epochs: int) -> httpx.Response:
        config = {"dataset_ids": ["radio"], "batch_size": 256, "epochs": epochs, "early_stop_patience": 0}
        body = {"job_name": name, "config": config}
        return self.ask("POST", "/jobs", json=body, headers={"Idempotency-Key": name})

    def made(self, name: str, epochs: int) -> str:
        """A job, asked for until there is an answer."""
        return until(lambda: (answer := self.submit(name, epochs)).is_success and answer.json()["id"])

    def look(self, job: str) -> dict[str, Any]:
        """A job, asked for until there is an answer."""
        return until(lambda: (answer := self.ask("GET", f"/jobs/{job}")).is_success and answer.json()["job"])

    def trained(self, job: str) -> int:
        return self.look(job)["current_epoch"]

    def begin(self, name: str = "long") -> None:
        """A job that has come to train."""
        self.job = self.made(name, EPOCHS)
        until(lambda: self.trained(self.job) >= 2, 120)

    def gets_over_it(self) -> None:
        until(lambda: self.health() == "ok", 60)
        until(lambda: self.ask("GET", "/ready").status_code == 200)
        assert self.process.poll() is None
        epoch = self.trained(self.job)
        until(lambda: self.trained(self.job) > epoch or self.look(self.job)["status"] == "completed", 120)

    def is_whole(self, *, attempts: int) -> None:
        """The job comes to its end, with all its epochs, in as many attempts."""
        until(lambda: (found := self.look(self.job))["status"] == "completed" and found, 400)
        found = self.look(self.job)
        assert (found["attempt"], found["current_epoch"]) == (attempts, EPOCHS), found
        rows = self.ask("GET", f"/jobs/{self.job}/metrics", params={"limit": 1000}).json()["metrics"]
        assert [row["epoch"] for row in rows] == [*range(1, EPOCHS + 1)]

    def workers(self) -> list[dict[str, Any]]:
        return self.ask("GET", "/machine").json()["workers"]


def until(found: Callable[[], Any], limit_s: float = 60.0) -> Any:
    deadline = time.monotonic() + limit_s
    while not (value := found()):
        assert time.monotonic() < deadline, "not in time"
        time.sleep(0.1)
    return value


@contextmanager
def site(state: Path, *words: str, before: Sequence[str] = ()) -> Iterator[Site]:
    """A service with a data set of radio rows, and its end."""
    command = [*before, sys.executable, "-m", "stoker", "serve", "--port", "0", "--json", "--workers", "1"]
    with (state.parent / "serve.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--state-dir", str(state), *words], stdout=subprocess.PIPE, stderr=log
        )
        try:
            assert process.stdout is not None
            started = json.loads(process.stdout.readline())
            inside = Path(f"/proc/{process.pid}/root") / str(state).lstrip("/") if before else state
            token = (inside / "token").read_text().strip()
            headers = {"Authorization": f"Bearer {token}"}
            with (
                httpx.Client(headers=headers, timeout=40, trust_env=False) as client,
                httpx.Client(headers={"Accept": "text/html"}, timeout=40, trust_env=False) as browser,
            ):
                assert browser.get(started["login"]).status_code == 303
                found = Site(process, started["address"], inside, client, browser, 0)
                made = found.ask(
                    "POST", "/datasets/generate", json={"kind": "radio", "name": "radio", "rows": 1000}
                ).json()
                until(lambda: found.look(made["job"]["id"])["status"] == "completed", 120)
                (worker,) = found.workers()
                found.worker = worker["pid"]
                assert "stoker_database_up 1" in found.client.get(found.address + "/metrics").text
                found.begin()
                yield found
                (worker,) = found.workers()
                assert (worker["pid"], worker["deaths"]) == (found.worker, 0), "the same worker all along"
                process.send_signal(signal.SIGTERM)
                assert process.wait(90) == 0
        finally:
            process.kill()
            process.wait(30)
            process.stdout.close()  # type: ignore[union-attr]
    assert b"Traceback" not in (state.parent / "serve.log").read_bytes()


@pytest.fixture(scope="module")
def own_server() -> Iterator[Server]:
    """A server of these tests' own: it is stopped and frozen."""
    try:
        made = Server()
    except Exception as error:
        pytest.skip(str(error))
    yield made
    made.close()


@pytest.fixture
def proxy(own_server: Server) -> Iterator[Proxy]:
    made = Proxy(own_server)
    yield made
    made.close()


@pytest.fixture
def on_postgresql(own_server: Server, proxy: Proxy, tmp_path: Path) -> Iterator[Site]:
    with site(tmp_path / "state", "--database", proxy.url(new_name(own_server))) as found:
        yield found


def new_name(server: Server) -> str:
    """The name of a new database."""
    return made_on(server).partition("@/")[2].partition("?")[0]


def says_so_quickly(found: Site, within_s: float) -> None:
    """Everything is answered, soon and in words, while the database is away."""
    until(lambda: found.health() == "degraded", within_s)
    found.slowest_s, found.statuses = 0.0, set()
    pages = [("GET", path) for path in ("/", "/jobs/new", f"/jobs/{found.job}", "/parts/jobs")]
    calls = [("GET", "/ready"), ("GET", "/jobs"), ("GET", f"/jobs/{found.job}"), ("GET", "/datasets")]

    def call(what: tuple[str, str]) -> None:
        answer = found.ask(*what)
        assert answer.status_code == 503, answer.text
        assert "the database does not do it" in answer.json()["error"]

    def show(what: tuple[str, str]) -> None:
        answer = found.browser.get(found.address + what[1])
        assert answer.status_code == 503
        assert "the database does not do it" in answer.text
        assert 'http-equiv="refresh"' in answer.text

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(call, calls * 10))
        list(pool.map(show, pages * 5))
        refused = pool.submit(lambda: found.submit("while it is away", 1))
        assert refused.result().status_code == 503
    scraped = found.client.get(found.address + "/metrics")
    assert scraped.status_code == 200
    assert {"stoker_up 1", "stoker_database_up 0"} <= {*scraped.text.splitlines()}
    assert 'stoker_figure_age_seconds{figure="jobs"}' in scraped.text, "what was known is told, with its age"
    assert found.browser.get(found.address + "/machine").status_code == 200, "which asks no database"
    assert found.browser.get(found.address + "/static/stoker.js").status_code == 200


def frozen(server: Server, whether: bool) -> None:
    """Stop every process of the server in its tracks, or let them go on."""
    first = psutil.Process(int((Path(server.data) / "postmaster.pid").read_text().split()[0]))
    for process in (first, *first.children(recursive=True)):
        with suppress(psutil.Error):
            process.suspend() if whether else process.resume()


def test_a_server_that_restarts_is_cut_off_or_says_nothing_costs_a_job_nothing(
    on_postgresql: Site, own_server: Server, proxy: Proxy
) -> None:
    found = on_postgresql
    own_server.stop()
    says_so_quickly(found, 30)
    own_server.start()
    found.gets_over_it()
    found.is_whole(attempts=1)

    found.begin("while nobody is let in")
    proxy.refuse(True)
    says_so_quickly(found, 30)
    proxy.refuse(False)
    found.gets_over_it()
    found.is_whole(attempts=1)

    found.begin("while nothing is said")
    frozen(own_server, True)
    try:
        says_so_quickly(found, 60)
        assert found.slowest_s < QUICK_S * 4, "at most one waits to find out"
        time.sleep(35.0)  # longer than a lease
        assert found.health() == "degraded"
    finally:
        frozen(own_server, False)
    found.gets_over_it()
    assert found.made("while it is away", 1)
    found.is_whole(attempts=1)


def test_connections_cut_at_random_lose_nothing_and_make_nothing_twice(
    on_postgresql: Site, proxy: Proxy
) -> None:
    found = on_postgresql
    ids: dict[str, str] = {}
    cuts, until_s = 0, time.monotonic() + 30
    while time.monotonic() < until_s or cuts < 30:
        cuts += proxy.cut(0.5)
        name = f"job {len(ids)}"
        with ThreadPoolExecutor(4) as pool:
            made = set(pool.map(lambda name: found.made(name, 1), [name] * 4))
        assert len(made) == 1, "one key, one job"
        ids[name] = made.pop()
        found.ask("POST", f"/jobs/{ids[name]}/cancel")
    found.gets_over_it()
    total = found.ask("GET", "/jobs", params={"limit": 1}).json()["total"]

    assert found.statuses <= {200, 201, 202, 503}
    assert total == len(ids) + 2, "and the one that trains, and the one that made its data"
    found.is_whole(attempts=1)


def fill(folder: Path) -> Path:
    """Take all the room that is left below a folder."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        for size in (1 << 20, 4096, 1):
            with suppress(OSError):
                while file.write(b"x" * size):
                    pass
    return ballast


@pytest.mark.parametrize("system", ["sqlite", "postgresql"])
def test_a_full_disk_stops_what_writes_and_nothing_else(
    system: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    probe = [*OWN_MOUNTS, "mount", "-t", "tmpfs", "tmpfs", str(state)]
    if shutil.which("unshare") is None or subprocess.run(probe, capture_output=True, timeout=30).returncode:
        pytest.skip("a mount of one's own is not allowed here")
    mount = 'mount -t tmpfs -o size=64m,mode=700 tmpfs "$1" && shift && exec "$@"'
    words: list[str] = []
    if system == "postgresql":
        name = new_name(request.getfixturevalue("own_server"))
        words = ["--database", request.getfixturevalue("proxy").url(name)]  # its socket is for others
    with site(state, *words, before=(*OWN_MOUNTS, "sh", "-c", mount, "-", str(state))) as found:
        ballast = fill(found.state)
        assert os.statvfs(found.state).f_bavail == 0
        until(lambda: found.health() == "degraded", 60)
        assert found.look(found.job)["status"] in ("running", "pending"), "it can be read"
        page = found.browser.get(found.address)
        assert page.status_code == 200
        assert "The service is degraded: <span>" in page.text
        ready = found.ask("GET", "/ready")
        assert ready.status_code == 503
        assert "is full: " in ready.json()["error"]
        fill(found.state)
        made = found.submit("while it is full", 1)
        if system == "sqlite":
            assert made.status_code == 503
            assert "Free space on its disk" in made.json()["error"]
        else:
            assert made.status_code == 201, "its row is elsewhere"
            waiting = made.json()["id"]
        time.sleep(20.0)
        assert found.look(found.job)["status"] in ("running", "pending"), "it waits"
        if system == "postgresql":
            assert found.look(waiting)["status"] == "queued"

        ballast.unlink()
        found.gets_over_it()
        last = found.made("while it is full", 1)
        until(lambda: (one := found.look(found.job))["status"] == "completed" and one, 400)
        until(lambda: found.look(last)["status"] == "completed", 60)
        rows = found.ask("GET", f"/jobs/{found.job}/metrics", params={"limit": 1000}).json()["metrics"]
        assert [row["epoch"] for row in rows] == [*range(1, EPOCHS + 1)]


def take_all(server: Server) -> None:
    """Fill the server's log until it takes nothing more: it ends then, as it should."""
    with server.connect() as connection:
        while True:
            connection.execute("SELECT pg_logical_emit_message(false, 'x', repeat('x', 1000000))")


def test_a_server_whose_disk_is_full_costs_a_job_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(tempfile.mkdtemp(prefix="full-"))
    mount = ["mount", "-t", "tmpfs", "-o", "size=160m,mode=777", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, timeout=30).returncode:
        folder.rmdir()
        pytest.skip("a disk of one's own for a server needs root")
    try:
        with monkeypatch.context() as there:
            there.setattr(tempfile, "tempdir", str(folder))
            server = Server()
        try:
            with site(tmp_path / "state", "--database", made_on(server)) as found:
                ballast = fill(folder)
                with pytest.raises(Exception, match=r"No space left|closed the connection|terminat"):
                    take_all(server)
                until(lambda: found.health() == "degraded", 60)
                assert found.ask("GET", "/jobs").status_code in (200, 503)
                assert found.submit("while it is full", 1).status_code == 503
                assert "The service is degraded" in found.browser.get(found.address).text

                ballast.unlink()
                with suppress(subprocess.CalledProcessError):  # it may not even have ended
                    server.start()
                found.gets_over_it()
                found.is_whole(attempts=1)
        finally:
            server.close()
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True, timeout=30)
        folder.rmdir()
