"""A database that is new, old, away, cut off or full."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
import sqlalchemy as sa

from stoker.errors import ConfigError, DegradedError, FormatError
from stoker.runtime.mounts import Mount
from stoker.service.database import JOBS, META, Database, State
from stoker.service.folders import StateFolder
from stoker.service.jobs import JobQueue, Jobs
from stoker.service.supervisor import WorkerPlan, WorkerSupervisor
from tests.sources.sql.server import Server

ROOT = Path(__file__).parents[2]


def test_a_new_database_is_for_its_owner_alone(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path}/state/stoker.db")
    Jobs(database).create({}, name="n", epochs=1)

    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in (tmp_path / "state").iterdir()}
    assert modes == {"stoker.db": "0o600", "stoker.db-wal": "0o600", "stoker.db-shm": "0o600"}
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700
    database.close()


def test_on_storage_of_another_machine_no_memory_is_shared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel would not end a process that maps a file there, for as long as that storage is away."""
    remote = Mount(point="/", kind="fuse.sshfs", source="host:")
    monkeypatch.setattr("stoker.service.database.storage_of", lambda _: remote)
    url = f"sqlite:///{tmp_path}/state/stoker.db"
    databases = [Database(url) for _ in range(2)]
    threads = [
        threading.Thread(
            target=lambda d=database: [Jobs(d).create({}, name="n", epochs=1) for _ in range(20)]
        )
        for database in databases
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert Jobs(databases[0]).count() == 40
    assert not [*(tmp_path / "state").glob("*-shm")]
    for database in databases:
        database.close()


def test_it_is_found_as_it_was_left(url: str) -> None:
    first = Database(url)
    job, _ = Jobs(first).create({"a": 1}, name="n", epochs=1)
    first.close()

    again = Database(url)

    assert Jobs(again).get(job.id) == job
    again.close()


def test_two_that_start_at_once_make_the_tables_once(url: str) -> None:
    opened: list[Database] = []
    threads = [threading.Thread(target=lambda: opened.append(Database(url))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert len(opened) == 4
    for database in opened:
        database.close()


def test_tables_of_a_newer_version_are_left_alone(embedded: Database) -> None:
    with embedded.writing() as connection:
        connection.execute(META.update().where(META.c.name == "version").values(value="99"))

    with pytest.raises(FormatError, match="tables of version 99; this version of stoker knows 4"):
        Database(str(embedded))


def test_a_database_of_version_1_is_brought_up_to_date_and_its_jobs_go_on(tmp_path: Path) -> None:
    """It was written by that version, which was killed while it had jobs; see `data/version-1.db`."""
    shutil.copy(Path(__file__).parent / "data" / "version-1.db", tmp_path / "stoker.db")
    for _ in range(2):  # and again, as any later start does
        database = Database(f"sqlite:///{tmp_path}/stoker.db")
        with database.reading() as connection:
            columns = {one["name"] for one in sa.inspect(connection).get_columns("jobs")}
            meta = dict(connection.execute(sa.select(META.c.name, META.c.value)).all())  # type: ignore[arg-type]
        assert columns == set(JOBS.c.keys())
        assert meta == {"version": "4"}
        database.close()
    database = Database(f"sqlite:///{tmp_path}/stoker.db")
    jobs = {job.name: job for job in Jobs(database).list()}
    assert {name: job.state for name, job in jobs.items()} == {
        name: State.COMPLETED if name == "done" else State(name)
        for name in ("done", "running", "pausing", "cancelling", "pending", "queued")
    }
    assert {job.epoch for name, job in jobs.items() if name != "queued"} == {1}
    done, held = jobs["done"], [jobs[name] for name in ("running", "pausing", "cancelling")]
    assert done.ended is not None
    assert done.started is not None
    assert (done.worked_s, done.taken) == (done.ended - done.started, None)
    assert all(job.taken is not None and job.taken == job.started for job in held)

    state = StateFolder(tmp_path / "state")
    supervisor = WorkerSupervisor(database, state, WorkerPlan(workers=0))
    supervisor.step()  # the workers of the service before have ended: nobody has their locks

    after = {name: Jobs(database).get(job.id) for name, job in jobs.items()}
    assert {name: job.state for name, job in after.items()} == {
        "done": State.COMPLETED, "running": State.PENDING, "pausing": State.PAUSED,
        "cancelling": State.CANCELLED, "pending": State.PENDING, "queued": State.QUEUED,
    }  # fmt: skip
    assert after["running"].message == "its worker is gone"
    more = [Jobs(database).extend(jobs["done"].id, 2, key="k") for _ in range(2)]
    assert {(job.state, job.epochs) for job in more} == {(State.QUEUED, 3)}
    Jobs(database).pause(jobs["done"].id)
    attempt = JobQueue(database).take("w")
    assert attempt is not None
    assert (attempt.job.name, attempt.number, attempt.position) == ("pending", 2, 50), "its wait is over"
    supervisor.stop()
    database.close()


def test_jobs_of_version_2_get_tags(url: str) -> None:
    database = Database(url)
    kept, _ = Jobs(database).create({"a": 1}, name="n", epochs=1, key="k")
    with database.writing() as connection:  # as that version left it
        connection.execute(sa.text("DROP INDEX jobs_by_tags"))
        for column in ("tags", "worked_s", "taken"):
            connection.execute(sa.text(f"ALTER TABLE jobs DROP COLUMN {column}"))
        connection.execute(META.update().where(META.c.name == "version").values(value="2"))
    database.close()

    for _ in range(2):
        database = Database(url)
        jobs = Jobs(database)
        assert jobs.get(kept.id) == kept
        assert jobs.create({"a": 1}, name="n", epochs=1, key="k") == (kept, False), "its key is still known"
        with database.reading() as connection:
            indexes = {one["name"] for one in sa.inspect(connection).get_indexes("jobs")}
        assert indexes >= {one.name for one in JOBS.indexes}
        database.close()
    database = Database(url)
    assert Jobs(database).change(kept.id, add_tags=["t"]).tags == ["t"]
    database.close()


@pytest.mark.parametrize(
    "url", ["mysql://h/d", "sqlite://", "sqlite:///:memory:", "nonsense", "postgres://u:p@"]
)
def test_an_address_of_something_else_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="Expected sqlite:///PATH"):
        Database(url)


def test_a_server_that_is_not_there_is_named_without_its_password(tmp_path: Path) -> None:
    with pytest.raises(DegradedError, match="the database does not do it") as caught:
        Database(f"postgresql://user:secret-word@/none?host={tmp_path}", statement_s=2.0)

    assert "secret-word" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_a_writer_that_does_not_let_go_is_waited_for_within_the_bound(tmp_path: Path) -> None:
    path = tmp_path / "stoker.db"
    database = Database(f"sqlite:///{path}", statement_s=0.3)
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")

    with pytest.raises(DegradedError, match="database is locked"):
        Jobs(database).create({}, name="n", epochs=1)
    assert Jobs(database).list() == []  # reading goes on
    other.execute("ROLLBACK")

    assert Jobs(database).create({}, name="n", epochs=1)[1]
    other.close()
    database.close()


ENDLESS = {
    "sqlite": "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT count(*) FROM n",
    "postgresql": "SELECT pg_sleep(3600)",
}


def test_a_statement_that_never_ends_is_ended(url: str) -> None:
    database = Database(url, statement_s=0.5)

    with (
        pytest.raises(DegradedError, match=r"interrupted|statement timeout"),
        database.reading() as connection,
    ):
        connection.execute(sa.text(ENDLESS[url.partition(":")[0]]))

    assert Jobs(database).list() == []
    database.close()


def test_a_server_that_restarts_is_used_again(server: Server, request: pytest.FixtureRequest) -> None:
    database: Database = request.getfixturevalue("shared_postgresql")
    jobs = Jobs(database)
    before, _ = jobs.create({}, name="before", epochs=1)

    server.stop()
    try:
        with pytest.raises(DegradedError, match="the database does not do it"):
            jobs.get(before.id)
        with pytest.raises(DegradedError):
            jobs.create({}, name="while it was away", epochs=1)
    finally:
        server.start()

    assert jobs.get(before.id) == before
    server.stop()
    server.start()
    assert jobs.create({}, name="nobody noticed", epochs=1)[1]


def test_a_connection_cut_mid_transaction_changes_nothing(request: pytest.FixtureRequest) -> None:
    """And the key tells a client that asks again what became of it."""
    database: Database = request.getfixturevalue("shared_postgresql")
    server: Server = request.getfixturevalue("server")
    jobs = Jobs(database)
    count = jobs.count()

    with pytest.raises(DegradedError), database.writing() as connection:  # noqa: PT012 -- the end of it fails too
        connection.execute(sa.text("DELETE FROM jobs"))
        pid = connection.execute(sa.select(sa.func.pg_backend_pid())).scalar_one()
        with server.connect() as admin:
            admin.execute("SELECT pg_terminate_backend(%s, 5000)", [pid])
        connection.execute(sa.text("SELECT 1"))

    assert jobs.count() == count
    assert jobs.create({}, name="n", epochs=1, key="cut")[1]


FULL = """
import json, sys
from pathlib import Path
from stoker.errors import DegradedError
from stoker.service.database import Database
from stoker.service.jobs import Jobs

folder = Path(sys.argv[1])
ballast = folder / "ballast"
ballast.write_bytes(b"x" * 500_000)
database = Database(f"sqlite:///{folder}/stoker.db", statement_s=5.0)
jobs, kept, said = Jobs(database), [], None
for _ in range(300):
    try:
        kept.append(jobs.create({"pad": "x" * 9000}, name="n", epochs=1)[0].id)
    except DegradedError as error:
        said = error
        break
readable = sorted(job.id for job in jobs.list(limit=500)) == sorted(kept)
ballast.unlink()
again = jobs.create({}, name="again", epochs=1)[1]
print(json.dumps({"said": str(said), "full": said.full, "readable": readable, "again": again}))
"""


def test_a_disk_that_is_full_leaves_the_jobs_readable_and_is_got_over(tmp_path: Path) -> None:
    own_mounts = ["unshare", "-r", "-m"]
    probe = [*own_mounts, "mount", "-t", "tmpfs", "tmpfs", str(tmp_path)]
    if shutil.which("unshare") is None or subprocess.run(probe, capture_output=True, timeout=30).returncode:
        pytest.skip("a mount of one's own is not allowed here")
    script = 'mount -t tmpfs -o size=2m tmpfs "$1" && exec "$2" -c "$3" "$1"'
    command = [*own_mounts, "sh", "-c", script, "-", str(tmp_path), sys.executable, FULL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr

    found = json.loads(done.stdout)
    assert found.pop("said").endswith("Free space on its disk; existing data can still be read")
    assert found == {"full": True, "readable": True, "again": True}


FULL_SERVER = """
import json, sys
from pathlib import Path
from stoker.errors import DegradedError
from stoker.service.database import Database
from stoker.service.jobs import Jobs
from tests.sources.sql.server import Server

folder = Path(sys.argv[1])
server = Server()
assert folder in server.folder.parents
database = Database(server.url(), statement_s=5.0)
jobs, kept, said, read = Jobs(database), [], "", "all"
ballast = (folder / "ballast").open("wb", buffering=0)
try:
    while True:
        ballast.write(b"x" * 65536)
except OSError:
    pass
for _ in range(3000):
    try:
        kept.append(jobs.create({"pad": "x" * 50_000}, name="n", epochs=1)[0].id)
    except DegradedError as error:
        said = str(error)
        break
try:
    assert jobs.count() == len(kept)
except DegradedError:
    read = "degraded"
ballast.truncate(0)
try:
    server.start()
except Exception:
    pass  # it has not even ended
again = jobs.create({}, name="again", epochs=1)[1]
there = {job.id for job in jobs.list(limit=5000)}
print(json.dumps({"said": said, "read": read, "again": again, "lost": len(set(kept) - there)}))
database.close()
server.close()
"""


@pytest.mark.slow
@pytest.mark.chaos
def test_a_server_whose_disk_is_full_loses_no_job_and_is_used_again() -> None:
    if os.geteuid() or shutil.which("unshare") is None:
        pytest.skip("a mount of one's own, and a server in it, need root")
    folder = Path(tempfile.mkdtemp(prefix="full-"))
    script = 'mount -t tmpfs -o size=150m,mode=777 tmpfs "$1" && TMPDIR="$1" exec "$2" -c "$3" "$1"'
    command = ["unshare", "-m", "sh", "-c", script, "-", str(folder), sys.executable, FULL_SERVER]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, cwd=ROOT)
    folder.rmdir()
    assert done.returncode == 0, done.stderr

    found = json.loads(done.stdout)
    assert "the database does not do it" in found["said"]
    assert found["read"] in ("all", "degraded")
    assert (found["again"], found["lost"]) == (True, 0)
