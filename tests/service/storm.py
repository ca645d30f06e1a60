"""Jobs under random `kill -9` of the service, its workers and the jobs' processes, and workers that freeze.

On PostgreSQL connections are cut as well, whatever their transaction has come to.

    PYTHONPATH=src:. python tests/service/storm.py --jobs 1000 --kills 500 [--postgresql]

prints what was lost, done twice or stuck; all of it should be 0.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path

import psutil
import sqlalchemy as sa

from stoker.errors import DegradedError
from stoker.service.database import ENDED_STATES, HELD_STATES, JOBS, Database, Outbox, State
from stoker.service.folders import StateFolder
from stoker.service.jobs import Jobs
from tests.sources.sql.server import Server

WEIGHTS = {"service": 2, "worker": 8, "job": 4, "freeze": 1}
CUTS = 4
"""The same of cutting a connection to PostgreSQL."""
FROZEN_S = 3.0
SERVE = Path(__file__).with_name("serve.py")


@dataclass
class Report:
    """What a storm left behind."""

    jobs: int = 0
    seconds: float = 0.0
    kills: dict[str, int] = field(default_factory=dict)
    attempts: int = 0
    """Claims in all: one a job without kills."""
    lost: list[str] = field(default_factory=list)
    """Acknowledged, and not completed."""
    twice: list[str] = field(default_factory=list)
    """Completed other than once, or with a result its process did not write."""
    overlapping: list[str] = field(default_factory=list)
    """Two processes of one job at once."""
    incomplete: list[str] = field(default_factory=list)
    """Without a row for each epoch."""
    gaps: int = 0
    """Event numbers that are missing."""
    overdue_s: float = 0.0
    """The longest that a job stayed with a worker that was dead or frozen while a service was up."""


class Service:
    """The process under test, started again whenever it is killed."""

    def __init__(self, url: str, folder: Path, workers: int) -> None:
        self._given = json.dumps({"url": url, "state": str(folder), "workers": workers})
        self.folder = folder
        self._ready = folder / "ready"
        self._log = (folder.parent / "service.log").open("ab")
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, str(SERVE)], stdin=subprocess.PIPE, stdout=self._log, stderr=self._log
        )
        assert process.stdin is not None
        with process.stdin:
            process.stdin.write(self._given.encode() + b"\n")
        return process

    def is_up(self) -> bool:
        """Whether it has started to work since it was killed last."""
        with suppress(OSError):
            return self._ready.read_text() == str(self.process.pid)
        return False

    def find(self, what: str) -> int | None:
        """The process id of the service, of one of its workers, or of one of the jobs."""
        if what == "service":
            return self.process.pid
        mark = {"worker": "stoker.service.worker", "job": "tests.service.stand_in"}[what]
        with suppress(psutil.Error):
            found = [
                child.pid
                for child in psutil.Process(self.process.pid).children(recursive=True)
                if any(mark in word for word in _words(child))
            ]
            return random.choice(found) if found else None
        return None

    def strike(self, what: str) -> bool:
        """Kill one of those, or freeze a worker for twice its timeout; whether there was one."""
        if (pid := self.find("worker" if what == "freeze" else what)) is None:
            return False
        try:
            os.kill(pid, signal.SIGSTOP if what == "freeze" else signal.SIGKILL)
        except ProcessLookupError:
            return False
        if what == "freeze":
            thaw = threading.Timer(FROZEN_S, _thaw, [pid])
            thaw.start()
        if what == "service":
            self.process.wait(10)
            self.process = self._start()
        return True

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        finally:
            self.process.kill()
            self.process.wait(10)
            self._log.close()


def _thaw(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def _words(process: psutil.Process) -> list[str]:
    with suppress(psutil.Error):
        return process.cmdline()
    return []


@dataclass(frozen=True)
class Storm:
    """Settings of a storm."""

    jobs: int
    """At least this many; another is submitted when all have ended and kills remain."""
    kills: int
    workers: int = 3
    every_s: float = 0.3
    """Mean time between two kills."""
    limit_s: float = 900.0
    seed: int = 0


def blow(storm: Storm, url: str, folder: Path) -> Report:
    """Submit jobs while killing, wait until all have ended, and look at what is there."""
    random.seed(storm.seed)
    state = StateFolder(folder)
    state.make()
    database = Database(url)
    report = Report()
    started = time.monotonic()
    service = Service(url, folder, storm.workers)
    ids: dict[str, str] = {}
    kills_done, over = threading.Event(), threading.Event()
    helpers = [
        threading.Thread(target=_submit, args=(database, storm, ids, kills_done)),
        threading.Thread(target=_watch, args=(database, service, report, over)),
    ]
    try:
        for helper in helpers:
            helper.start()
        kills: Counter[str] = Counter()
        weights = WEIGHTS if database.is_sqlite else {**WEIGHTS, "cut": CUTS}
        while kills["service"] + kills["worker"] < storm.kills:
            time.sleep(random.expovariate(1 / storm.every_s))
            what = random.choices(list(weights), list(weights.values()))[0]
            while not (_cut(database) if what == "cut" else service.strike(what)):
                assert time.monotonic() < started + storm.limit_s, f"no {what} to kill; {kills} until now"
                time.sleep(0.02)  # there is none at the moment: the one before was killed just now
            kills[what] += 1
        kills_done.set()
        helpers[0].join(storm.limit_s)
        report.jobs = len(ids)
        deadline = started + storm.limit_s
        while _unended(database, ids.values()) and time.monotonic() < deadline:
            time.sleep(0.1)
        report.kills = {what: kills[what] for what in weights}
        report.seconds = time.monotonic() - started
    finally:
        kills_done.set()
        over.set()
        for helper in helpers:
            helper.join(storm.limit_s)
        service.stop()
    _inspect(database, state, ids, report)
    database.close()
    return report


def _cut(database: Database) -> bool:
    """End one of the connections to PostgreSQL, this process's among them; whether there was one."""
    others = "datname = current_database() AND pid <> pg_backend_pid() ORDER BY random() LIMIT 1"
    end = f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {others}"
    with suppress(DegradedError), database.reading() as connection:
        return bool(connection.execute(sa.text(end)).scalar())
    return False


def _submit(database: Database, storm: Storm, ids: dict[str, str], kills_done: threading.Event) -> None:
    jobs, rng = Jobs(database), random.Random(storm.seed + 1)
    pause_s = 0.9 * storm.kills * storm.every_s / storm.jobs
    for number in count():
        while number >= storm.jobs and _unended(database, ids.values()) and not kills_done.wait(0.1):
            pass
        if number >= storm.jobs and kills_done.is_set():
            return
        key, epochs = f"job {number}", rng.randint(1, 4)
        config = {"epoch_s": rng.choice((0.0, 0.02, 0.1))}
        for _ in range(rng.choice((1, 1, 2))):  # a client that repeats itself
            job, _ = _patiently(lambda: jobs.create(config, name=key, epochs=epochs, key=key))
            assert ids.setdefault(key, job.id) == job.id
        time.sleep(pause_s)


def _patiently(ask: Callable[[], object]):
    while True:
        with suppress(DegradedError):
            return ask()
        time.sleep(0.1)


def _watch(database: Database, service: Service, report: Report, over: threading.Event) -> None:
    """How long a job stays with a worker that is dead or frozen, while a service is up to take it away."""
    held = sa.select(JOBS.c.id, JOBS.c.worker).where(JOBS.c.state.in_(tuple(HELD_STATES)))
    since: dict[str, float] = {}
    pids: dict[str, int] = {}
    while not over.wait(0.1):
        with suppress(DegradedError), database.reading() as connection:
            jobs = connection.execute(held).all()
            with suppress(OSError):
                pids |= json.loads((service.folder / "workers.json").read_text())
            found = {id for id, worker in jobs if not _is_at_work(pids.get(worker))}
            now = time.monotonic()
            since = {id: since.get(id, now) for id in found} if service.is_up() else {}
            report.overdue_s = max([report.overdue_s, *(now - begun for begun in since.values())])


def _is_at_work(pid: int | None) -> bool:
    with suppress(psutil.Error):
        return bool(pid) and psutil.Process(pid).status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
    return False


def _unended(database: Database, ids: object) -> bool:
    query = sa.select(sa.func.count()).where(JOBS.c.state.not_in(tuple(ENDED_STATES)))
    with suppress(DegradedError), database.reading() as connection:
        return bool(connection.execute(query).scalar_one())
    return True


def _inspect(database: Database, state: StateFolder, ids: dict[str, str], report: Report) -> None:
    jobs, outbox = Jobs(database), Outbox(database)
    events, after = [], 0
    while more := outbox.read(after, limit=5000):
        events += more
        after = more[-1].number
    report.gaps = after - len(events)
    ends = [event for event in events if event.kind in ENDED_STATES]
    told = Counter(event.job for event in ends)
    results = {event.job: event.data.get("result") for event in ends}
    for id in ids.values():
        job = jobs.get(id)
        report.attempts += job.attempt
        folder = state.job(id)
        if job.state is not State.COMPLETED:
            report.lost.append(f"{id} is {job.state}: {job.error}")
            continue
        lines = [json.loads(line) for line in folder.events.read_text().splitlines() if line]
        written = [line["data"]["result"] for line in lines if line["kind"] == "completed"]
        if told[id] != 1 or written != [results[id]]:
            report.twice.append(f"{id}: {told[id]} ends, {written} written, {results[id]} told")
        if "OVERLAP" in (folder.path / "witness.txt").read_text():
            report.overlapping.append(id)
        if [row["epoch"] for row in jobs.metrics(id)] != [*range(1, job.epochs + 1)]:
            report.incomplete.append(id)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--every", type=float, default=0.3)
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--postgresql", action="store_true", help="on a server started for it")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        url = f"sqlite:///{folder}/stoker.db"
        if given.postgresql:
            server = Server()
            stack.callback(server.close)
            url = server.url()
        storm = Storm(
            jobs=given.jobs, kills=given.kills, every_s=given.every, limit_s=given.limit, seed=given.seed
        )
        report = blow(storm, url, Path(folder) / "state")
        sys.stdout.write(json.dumps(asdict(report), indent=1) + "\n")


if __name__ == "__main__":
    main()
