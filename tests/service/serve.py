"""A service without its web server, to be killed: `python serve.py` reads one line of JSON and runs."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from pathlib import Path

from stoker.errors import Degraded
from stoker.service.database import Database
from stoker.service.executor import Limits
from stoker.service.folders import StateFolder
from stoker.service.jobs import Terms
from stoker.service.supervise import Staff, Supervisor
from stoker.service.worker import Pace

STAND_IN = (sys.executable, "-I", "-S", str(Path(__file__).with_name("stand_in.py")))


def staff(**given: object) -> Staff:
    """Workers that run the stand-in and are quick about everything."""
    terms = Terms(lease_s=1.5, max_losses=1000, backoff_s=0.05)
    pace = Pace(poll_s=0.02, look_s=0.05, silence_s=60.0)
    values = {"workers": 2, "child": STAND_IN, "terms": terms, "pace": pace, "limits": Limits(grace_s=3.0)}
    return Staff(**{**values, **given})  # type: ignore[arg-type]


def main() -> None:
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO)
    wanted = json.loads(sys.stdin.readline())
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    while True:
        try:
            database = Database(wanted["url"])
            supervisor = Supervisor(
                database, StateFolder(Path(wanted["state"])), staff(workers=wanted["workers"]), os.environ
            )
        except Degraded as error:
            logging.warning("%s", error)
            if stop.wait(0.2):
                return
        else:
            break
    supervisor.start()
    (Path(wanted["state"]) / "ready").write_text(str(os.getpid()))
    stop.wait()
    supervisor.stop(limit_s=20.0)


if __name__ == "__main__":
    main()
