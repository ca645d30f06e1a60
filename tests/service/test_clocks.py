"""Processes whose wall clock is a day off hold, keep and take jobs as all others do."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from stoker.errors import LeaseLost
from stoker.service.database import Database, State
from stoker.service.jobs import Jobs, Leases, Terms

DAY_S = 86_400
SOURCE = Path(__file__).with_name("clock.c")
ROOT = Path(__file__).parents[2]
STRANGER = """
import json, sys, time
from stoker.service.database import Database
from stoker.service.jobs import Leases

database = Database(sys.argv[1])
leases = Leases(database)
swept = [job.id for job in leases.sweep()]
claim = leases.claim("stranger")
leases.heartbeat(claim)
print(json.dumps({"now": time.time(), "swept": swept, "claimed": claim.job.id}))
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
def test_a_clock_that_is_a_day_off_changes_no_lease(url: str, library: Path, skew_s: int) -> None:
    database = Database(url)
    jobs, leases = Jobs(database), Leases(database, Terms(backoff_s=0.0))
    held, other = (jobs.create({}, name="n", epochs=1)[0] for _ in range(2))
    claim = leases.claim("here")
    assert claim is not None

    environment = {**os.environ, "LD_PRELOAD": str(library), "SKEW_S": str(skew_s)}
    done = subprocess.run(
        [sys.executable, "-c", STRANGER, database.address()],
        env=environment, cwd=ROOT, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)

    assert abs(told["now"] - jobs.get(held.id).created - skew_s) < 3600, "its clock is off"
    assert told["swept"] == [], "what is held here has not run out there"
    assert told["claimed"] == other.id
    assert leases.heartbeat(claim) is State.RUNNING
    assert leases.sweep() == [], "nor what is held there, here"
    assert leases.abandon("stranger") == 1
    assert [job.id for job in leases.sweep()] == [other.id], "and it does not hold for a day"
    assert leases.abandon("here") == 1
    leases.sweep()
    with pytest.raises(LeaseLost):
        leases.heartbeat(claim)
    database.close()
