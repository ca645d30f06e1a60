"""A service without its web server, to be killed: `python serve.py` reads one line of JSON and runs."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from stoker.errors import DegradedError
from stoker.runtime.files import replace_atomically
from stoker.service.database import Database
from stoker.service.executor import JobLimits, JobProgram
from stoker.service.folders import StateFolder
from stoker.service.jobs import AttemptPolicy
from stoker.service.supervisor import WorkerPlan, WorkerSupervisor
from stoker.service.worker import WorkerPace, WorkerSettings

sys.path.append(str(Path(__file__).parents[2]))
STAND_IN = JobProgram(target="tests.service.stand_in:serve", modules=("stoker.service.executor",))


def plan(workers: int = 2, **given: Any) -> WorkerPlan:
    """Workers that run the stand-in and are quick about everything."""
    values = {
        "program": STAND_IN,
        "retry": AttemptPolicy(timeout_s=1.5, room_wait_s=1.5, max_losses=1000, backoff_s=0.05),
        "pace": WorkerPace(poll_s=0.02, look_s=0.05, database_timeout_s=60.0),
        "limits": JobLimits(grace_s=3.0),
    }
    return WorkerPlan(workers=workers, settings=WorkerSettings(**{**values, **given}))


def main() -> None:
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO)
    wanted = json.loads(sys.stdin.readline())
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    while True:
        try:
            database = Database(wanted["url"])
            supervisor = WorkerSupervisor(
                database, StateFolder(Path(wanted["state"])), plan(workers=wanted["workers"])
            )
        except DegradedError as error:
            logging.warning("%s", error)
            if stop.wait(0.2):
                return
        else:
            break
    supervisor.start()
    (Path(wanted["state"]) / "ready").write_text(str(os.getpid()))
    listed = Path(wanted["state"]) / "workers.json"
    while not stop.wait(0.05):
        with replace_atomically(listed) as temporary:
            temporary.write_text(json.dumps({one.name: one.pid for one in supervisor.workers()}))
    supervisor.stop(limit_s=20.0)


if __name__ == "__main__":
    main()
