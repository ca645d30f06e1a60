"""Processes whose wall clock is a day off hold, keep and take jobs as all others do."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stoker.errors import LostAttemptError
from stoker.service.database import JOBS, Database, State
from stoker.service.jobs import JobQueue, Jobs

DAY_S = 86_400
SOURCE = Path(__file__).with_name("clock.c")
ROOT = Path(__file__).parents[2]
STRANGER = """
import json, sys, time
from stoker.service.database import Database
from stoker.service.jobs import JobQueue

database = Database(sys.argv[1])
queue = JobQueue(database)
taken = []
while (attempt := queue.take("stranger")) is not None:
    taken.append(attempt.job.id)
    queue.report(attempt, [], 0)
print(json.dumps({"now": time.time(), "taken": taken}))
database.close()
"""


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What turns the clock of a process, when preloaded."""
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    made = tmp_path_factory.mktemp("clock") / "clock.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(made), str(SOURCE), "-ldl"], check=True, timeout=60)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("skew_s", [DAY_S, -DAY_S])
def test_a_clock_that_is_a_day_off_takes_and_keeps_no_job_from_anybody(
    url: str, library: Path, skew_s: int
) -> None:
    database = Database(url)
    jobs, queue = Jobs(database), JobQueue(database)
    held, waiting, lost = (jobs.create({}, name="n", epochs=1)[0] for _ in range(3))
    attempt = queue.take("here")
    with database.writing() as connection:  # its worker died a moment ago
        soon = {"state": State.PENDING, "not_before": database.wall + 2.0}
        connection.execute(JOBS.update().where(JOBS.c.id == lost.id).values(**soon))
    assert attempt is not None
    time.sleep(2.0)

    environment = {**os.environ, "LD_PRELOAD": str(library), "SKEW_S": str(skew_s)}
    done = subprocess.run(
        [sys.executable, "-c", STRANGER, database.address()],
        env=environment, cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)

    assert abs(told["now"] - jobs.get(held.id).created - skew_s) < 3600, "its clock is off"
    assert told["taken"] == [waiting.id, lost.id], "what is held here is not taken, and no wait lasts a day"
    assert queue.look(attempt) is State.RUNNING
    assert {job.id for job in queue.release("stranger")} == {waiting.id, lost.id}
    assert [job.id for job in queue.release("here")] == [held.id]
    with pytest.raises(LostAttemptError):
        queue.look(attempt)
    database.close()
