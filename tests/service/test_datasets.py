"""The registry of data sets, and looking at them."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict
from pydantic import TypeAdapter

from stoker.errors import ConfigError, ConflictError, NotFoundError, SourceError, StalledError
from stoker.service.database import JOBS, Database, State
from stoker.service.datasets import Datasets, Generation, Registration, describe, unmade
from stoker.service.folders import JobFile
from stoker.service.jobs import JobQueue, Jobs, Outcome
from stoker.service.journal import Journal
from stoker.service.kinds import kind_of
from stoker.service.probes import PROBES, probe
from stoker.service.runs import generate
from stoker.service.security import DataAccess, Roots
from stoker.service.worker import WorkerSettings, worker_of
from stoker.sources.sql.query import parse_database_url, sqlite_url
from tests.service.job_folders import SMALL, burgers_dataset, images_dataset, is_sound, radio_dataset


def registration(**given: Any) -> Any:
    return TypeAdapter(Registration).validate_python(given)


def allowed(*servers: str) -> DataAccess:
    """All files and some servers."""
    return DataAccess(roots=("/",), servers=servers)


def generation(**given: Any) -> Any:
    return TypeAdapter(Generation).validate_python(given)


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    opened = Database(f"sqlite:///{tmp_path}/stoker.db")
    yield opened
    opened.close()


@pytest.fixture
def datasets(database: Database, tmp_path: Path) -> Datasets:
    """Looks in this process; what is outside of the test's folder is refused."""

    def check(path: str) -> Path:
        if not Path(path).is_relative_to(tmp_path):
            raise ConfigError(f"{path} is outside")
        return Path(path)

    return Datasets(
        database,
        tmp_path / "data",
        check,
        probe=lambda what, *given, **named: PROBES[what](*given, **named),
        access=DataAccess(roots=("/",)),
    )


def test_radio_rows_are_registered_under_their_own_id(datasets: Datasets, tmp_path: Path) -> None:
    there = radio_dataset(tmp_path)
    request = registration(kind="radio", name="lab", url=there["spec"]["url"], set=SMALL.dataset_id)

    made = datasets.register(request)

    assert made.id == str(SMALL.dataset_id)
    assert (made.facts["samples"], made.facts["without_place"], made.health) == (300, 0, "unknown")
    assert datasets.register(request) == made, "twice the same is once"
    assert datasets.get("lab") == datasets.get(made.id) == made
    assert describe(datasets._database, [made.id]) == [{**there, "health": "unknown"}]
    checked = datasets.validate("lab")
    assert checked.health == "good"
    assert {row["check"] for row in checked.report} >= {"rows", "without_place", "gdop", "receivers"}
    rows = datasets.samples("lab", limit=3, offset=1)
    assert len(rows) == 3
    assert 43 < rows[0]["tx_latitude"] < 47  # type: ignore[operator]
    datasets.delete("lab")
    assert datasets.count() == 0
    assert (tmp_path / "radio.db").exists()


def test_a_name_is_one_data_sets(datasets: Datasets, tmp_path: Path) -> None:
    there = radio_dataset(tmp_path)
    own = {"kind": "radio", "url": there["spec"]["url"], "set": SMALL.dataset_id}
    datasets.register(registration(name="lab", **own))
    path = burgers_dataset(tmp_path)["spec"]["path"]

    with pytest.raises(ConflictError, match="exists under another name: 'lab'"):
        datasets.register(registration(name="other", **own))
    with pytest.raises(ConflictError, match="is the name of another data set"):
        datasets.register(registration(kind="hdf5", name="lab", path=path))
    with pytest.raises(NotFoundError, match="registered as gone, lost"):
        datasets.resolve(["gone", "lab", "lost"])


def test_files_and_images_are_looked_at(datasets: Datasets, tmp_path: Path) -> None:
    simulations = datasets.register(
        registration(kind="hdf5", name="b", path=burgers_dataset(tmp_path)["spec"]["path"])
    )
    images = datasets.register(
        registration(kind="images", name="i", path=images_dataset(tmp_path)["spec"]["path"])
    )

    assert simulations.facts["samples"] == 12
    assert images.facts["classes"] == ["dark", "light"]
    assert (datasets.validate("b").health, datasets.validate("i").health) == ("good", "good")
    (tmp_path / "images" / "dark" / "0.png").write_bytes(b"no image")
    assert datasets.validate("i").health == "bad"
    assert datasets.samples("i", limit=1)[0]["key"] == "dark/0"


def test_data_that_says_what_is_for_validation_is_known_to(datasets: Datasets, tmp_path: Path) -> None:
    images_dataset(tmp_path)
    (tmp_path / "images").rename(tmp_path / "train")
    images_dataset(tmp_path / "more")
    (tmp_path / "both").mkdir()
    (tmp_path / "train").rename(tmp_path / "both" / "train")
    (tmp_path / "more" / "images").rename(tmp_path / "both" / "val")

    made = datasets.register(registration(kind="images", name="i", path=str(tmp_path / "both")))

    assert made.spec["named_splits"] is True


def test_what_is_not_there_or_not_allowed_is_refused(datasets: Datasets, tmp_path: Path) -> None:
    there = radio_dataset(tmp_path)["spec"]
    (tmp_path / "text.h5").write_text("nothing")
    (tmp_path / "images" / "a").mkdir(parents=True)
    (tmp_path / "images" / "a" / "x.png").symlink_to("/etc/hostname")
    other = uuid.uuid4()
    for given, kind, why in (
        ({"kind": "radio", "url": there["url"], "set": other}, SourceError, f"no rows of data set {other}"),
        ({"kind": "radio", "url": there["url"], "set": other, "table": "x"}, SourceError, "no table x"),
        ({"kind": "radio", "url": f"sqlite:///{tmp_path}/no.db", "set": other}, SourceError, "no such file"),
        (
            {"kind": "radio", "url": "postgresql://me:pass@db/x", "set": other},
            ConfigError,
            "has a password",
        ),
        ({"kind": "radio", "url": "sqlite:////etc/x.db", "set": other}, ConfigError, "outside"),
        ({"kind": "hdf5", "path": "/etc/passwd"}, ConfigError, "outside"),
        ({"kind": "hdf5", "path": str(tmp_path / "text.h5")}, SourceError, "text.h5"),
        ({"kind": "images", "path": str(tmp_path / "images")}, SourceError, "leads out of"),
    ):
        with pytest.raises(kind, match=why) as refused:
            datasets.register(registration(name="n", **given))
        assert "pass@" not in str(refused.value)
    assert datasets.count() == 0


@pytest.mark.parametrize(
    "made", [{"kind": "radio", "rows": 40}, {"kind": "hdf5", "trajectories": 3, "steps": 5, "points": 32}]
)
def test_a_generated_data_set_is_there_once_its_job_made_it(
    datasets: Datasets, tmp_path: Path, made: dict[str, Any]
) -> None:
    noted = datasets.generate(generation(name="new", **made))
    assert noted.health == "making"
    with pytest.raises(SourceError):
        datasets.inspect("new")
    job = JobFile(
        id="g", name="g", kind="generation", attempt=1, epochs=1, epoch=0, checkpoint=None, config={},
        datasets=describe(datasets._database, [noted.id]), dataset_ids=[noted.id], caches="", data="",
        limits={},
    )  # fmt: skip

    for first in (True, False):
        assert generate(job, Journal(tmp_path / "events.jsonl"))["made"] is first

    found = datasets.inspect("new")
    assert (found.health, found.facts["samples"]) == ("unknown", noted.facts["samples"])
    assert datasets.validate("new").health == "good"
    datasets.delete("new")
    with pytest.raises(SourceError):
        PROBES["facts"](found.kind, found.spec)


def test_one_path_is_one_data_set_however_it_is_written(database: Database, tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.mkdir()
    burgers_dataset(real)
    (tmp_path / "link").symlink_to(real)
    datasets = Datasets(
        database,
        tmp_path / "data",
        Roots([tmp_path / "link"]).check,
        probe=lambda *_, **__: {"samples": 1},
        access=allowed(),
    )
    one = datasets.register(registration(kind="hdf5", name="one", path="burgers.hdf5"))

    for path in (real / "burgers.hdf5", tmp_path / "link" / "burgers.hdf5", f"{real}/./burgers.hdf5"):
        with pytest.raises(ConflictError, match="'one'"):
            datasets.register(registration(kind="hdf5", name="two", path=str(path)))
        again = datasets.register(registration(kind="hdf5", name="one", path=str(path)))
        assert again.id == one.id
    datasets.delete("one")
    assert datasets.register(registration(kind="hdf5", name="two", path="burgers.hdf5")).id == one.id


def making_job(datasets: Datasets, database: Database) -> tuple[str, str]:
    """A data set that is noted, and the job that makes it."""
    noted = datasets.generate(generation(kind="hdf5", name="new", trajectories=2, points=16, steps=3))
    job, _ = Jobs(database).create(
        {}, name="make new", kind="generation", epochs=1, dataset_ids=[noted.id],
        key=f"make {noted.id} {noted.created}",
    )  # fmt: skip
    return noted.id, job.id


def test_a_data_set_whose_making_was_cancelled_is_not_being_made_for_ever(
    datasets: Datasets, database: Database
) -> None:
    id, job = making_job(datasets, database)
    assert datasets.get(id).health == "making"

    Jobs(database).cancel(job)

    found = datasets.get(id)
    assert found.health == "bad"
    assert job in str(unmade(found))
    assert [one.health for one in datasets.list()] == ["bad"]
    Jobs(database).resume(job)
    assert datasets.get(id).health == "making"


def test_a_job_whose_data_is_never_made_fails_and_names_the_job_that_was_to_make_it(
    datasets: Datasets, database: Database, tmp_path: Path
) -> None:
    id, maker = making_job(datasets, database)
    jobs, queue = Jobs(database), JobQueue(database)
    job, _ = jobs.create({}, name="train", epochs=1, dataset_ids=[id])
    worker = worker_of(WorkerSettings(name="w", state=str(tmp_path / "state"), access=allowed()), database)
    jobs.pause(maker)
    attempt = queue.take("w")
    assert attempt is not None
    worker.work(attempt)
    waiting = jobs.get(job.id)
    assert waiting.state is State.PENDING, "the maker may continue, so the job waits"
    assert (waiting.attempt, waiting.started) == (0, None), "nothing was done"
    (wait,) = datasets.generated_for(jobs.list())[job.id]
    assert (wait.id, wait.job, wait.job_state) == (id, maker, State.PAUSED)

    jobs.cancel(maker)
    with database.writing() as connection:
        connection.execute(JOBS.update().values(not_before=0.0))
    attempt = queue.take("w")
    assert attempt is not None
    worker.work(attempt)

    failed = jobs.get(job.id)
    assert datasets.generated_for(jobs.list()) == {}
    assert failed.state is State.FAILED
    assert maker in str(failed.error)


def test_a_data_set_is_made_once_its_job_is_completed(datasets: Datasets, database: Database) -> None:
    id, job = making_job(datasets, database)
    queue = JobQueue(database)
    attempt = queue.take("w")
    assert attempt is not None
    queue.finish(attempt, Outcome(state=State.COMPLETED), lines=[], position=0)
    Jobs(database).delete(job)

    assert datasets.get(id).health == "unknown"
    assert unmade(datasets.get(id)) is None


def test_a_data_set_is_not_made_by_the_end_of_another_job(datasets: Datasets, database: Database) -> None:
    id, _ = making_job(datasets, database)
    Jobs(database).create({}, name="train", epochs=1, dataset_ids=[id])
    queue = JobQueue(database)
    _, trains = queue.take("maker"), queue.take("w")
    assert trains is not None

    queue.finish(trains, Outcome(state=State.COMPLETED), lines=[], position=0)

    assert datasets.get(id).health == "making"


def test_what_a_job_needs_is_not_deleted(datasets: Datasets, database: Database, tmp_path: Path) -> None:
    datasets.register(registration(kind="hdf5", name="b", path=burgers_dataset(tmp_path)["spec"]["path"]))
    id, jobs = datasets.get("b").id, Jobs(database)
    job, _ = jobs.create({}, name="j", epochs=1, dataset_ids=[id])

    with pytest.raises(ConflictError, match=f"needed by job {job.id}"):
        datasets.delete("b")
    jobs.cancel(job.id)
    datasets.delete("b")
    with pytest.raises(NotFoundError):
        describe(database, [id])
    assert is_sound(tmp_path / "burgers.hdf5")


def test_looking_is_done_elsewhere_and_not_for_ever(tmp_path: Path) -> None:
    spec = radio_dataset(tmp_path)["spec"]

    assert probe("facts", "radio", spec)["samples"] == 300
    with pytest.raises(SourceError, match="no rows of data set"):
        probe("facts", "radio", {**spec, "set": str(uuid.uuid4())})
    with pytest.raises(StalledError, match=r"radio\.db took more than 0\.001 s"):
        probe("facts", "radio", spec, timeout_s=0.001)
    with pytest.raises(SourceError, match="crashed its process"):
        probe("nothing", "radio", spec)


def test_a_plan_that_ends_its_process_does_not_end_the_service(tmp_path: Path) -> None:
    """Planning opens the user's files, so it is done where a damaged one harms nobody."""
    spec = {"path": str(tmp_path / "nowhere.hdf5")}
    dataset = {"id": "d", "name": "d", "kind": "hdf5", "spec": spec, "health": "unknown"}

    with pytest.raises(SourceError, match=r"nowhere\.hdf5"):
        probe("plan", "hdf5", spec, config={"dataset_ids": ["d"]}, datasets=[dataset], caches=str(tmp_path),
             run_dir=str(tmp_path))  # fmt: skip


@pytest.mark.parametrize(
    "query",
    [
        "sslmode=require&sslkeylogfile={file}",
        "options=-c%20search_path%3Dx",
        "sslrootcert={file}",
        "passfile={file}",
        "service=lab",
        "hostaddr=10.0.0.1",
    ],
)
def test_options_of_a_databases_url_that_reach_files_are_refused(
    datasets: Datasets, tmp_path: Path, query: str
) -> None:
    file = tmp_path / "token"
    url = "postgresql://lab.example/x?" + query.format(file=file)
    trusting = Datasets(
        datasets._database,
        tmp_path,
        Path,
        probe=nothing,
        access=allowed("lab.example"),
    )

    option = query.replace("sslmode=require&", "").partition("=")[0]
    with pytest.raises(ConfigError, match=f"{option}|--connection"):
        trusting.register(registration(kind="radio", name="lab", url=url, set=SMALL.dataset_id))
    assert not file.exists()


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://lab.example/x",
        "postgresql:///x",
        "postgresql://other.example/x?host=lab.example",
        "postgresql://other.example/x?host=/tmp",
        "postgresql+psycopg://lab.example:5432/x",
        "postgresql://other.example/x?host=other.example&host=lab.example",
        "postgresql://other.example/x?hos%74=%6cab.example",
        "postgresql://lab.example/x?host=",
    ],
)
def test_a_database_server_that_the_operator_did_not_name_is_never_asked(
    datasets: Datasets, tmp_path: Path, url: str
) -> None:
    named = Datasets(
        datasets._database,
        tmp_path,
        Path,
        probe=nothing,
        access=allowed("other.example"),
    )

    request = registration(kind="radio", name="lab", url=url, set=SMALL.dataset_id)
    with pytest.raises(ConfigError, match="--database-host") as refused:
        named.register(request)

    hinted = str(refused.value).split()[-1]
    followed = Datasets(
        datasets._database,
        tmp_path,
        Path,
        probe=lambda *_, **__: {"samples": 1},
        access=allowed(hinted),
    )
    assert followed.register(request).spec["url"] == url, "the hint works when it is followed"


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://lab.example:5432/x@EVIL/lab",
        "postgresql://:5432/x@EVIL/lab",
        "postgresql://lab.example/x#x@EVIL/lab",
        "postgresql://lab.example#x@EVIL/lab",
        "postgresql://lab.example?sslmode=x@EVIL/lab",
        "postgresql://lab.example/x?sslmode=x@EVIL",
        "postgresql://lab.example/x?host=lab.example,EVIL",
        "postgresql://lab.example%2CEVIL/x",
    ],
)
def test_a_url_that_two_programs_read_in_two_ways_is_refused(
    datasets: Datasets, tmp_path: Path, url: str
) -> None:
    named = Datasets(
        datasets._database, tmp_path, Path, probe=nothing, access=allowed("lab.example", "local")
    )

    with pytest.raises(ConfigError, match="HOST"):
        named.register(registration(kind="radio", name="lab", url=url, set=SMALL.dataset_id))


@pytest.mark.parametrize(
    ("netloc", "query", "user"),
    [("127.0.0.1", "", None), ("a,b@127.0.0.1", "", "a,b"), ("a@EVIL@127.0.0.1", "", "a@EVIL"),
     ("EVIL", "?host=127.0.0.1", None), ("a%40EVIL@127.0.0.1", "", "a@EVIL")],
)  # fmt: skip
def test_the_driver_connects_to_the_server_that_was_checked(
    monkeypatch: pytest.MonkeyPatch, netloc: str, query: str, user: str | None
) -> None:
    asked: list[Any] = []

    def refuse(text: str, **_: Any) -> Any:
        asked.append(conninfo_to_dict(text))  # as libpq reads it
        raise psycopg.OperationalError

    monkeypatch.setattr(psycopg, "connect", refuse)
    url = f"postgresql://{netloc}:5433/postgresql:%2F%2FEVIL%2Fx{query}"
    allowed("127.0.0.1").check_server(url)
    with pytest.raises(SourceError):
        kind_of("radio").facts({"url": url, "table": "t", "set": str(SMALL.dataset_id)})

    (found,) = asked
    assert (found["host"], found["port"], found.get("user")) == ("127.0.0.1", "5433", user)
    assert found["dbname"] == "postgresql://EVIL/x"


@pytest.mark.parametrize(
    "server", ["lab.example:5432,b:5432", "lab.example,b", "lab.example:db", "lab.example:0"]
)
def test_a_url_names_one_database_server(datasets: Datasets, tmp_path: Path, server: str) -> None:
    """libpq asks each server of a list."""
    named = Datasets(
        datasets._database,
        tmp_path,
        Path,
        probe=nothing,
        access=allowed("lab.example"),
    )

    url = f"postgresql://{server}/x"
    with pytest.raises(ConfigError, match="HOST"):
        named.register(registration(kind="radio", name="lab", url=url, set=SMALL.dataset_id))


def test_a_database_server_that_the_operator_named_is_asked(datasets: Datasets, tmp_path: Path) -> None:
    asked: list[Any] = []

    def look(_what: str, _kind: str, spec: Any) -> dict[str, Any]:
        asked.append(spec["url"])
        return {"samples": 3}

    named = Datasets(
        datasets._database,
        tmp_path,
        Path,
        probe=look,
        access=DataAccess(
            roots=("/",),
            servers=(
                "lab.example",
                "local",
            ),
        ),
    )
    for name, url in (("a", "postgresql://lab.example:5433/x?sslmode=require"), ("b", "postgresql:///x")):
        named.register(registration(kind="radio", name=name, url=url, set=str(uuid.uuid4())))

    assert asked == ["postgresql://lab.example:5433/x?sslmode=require", "postgresql:///x"]


@pytest.mark.parametrize("name", ["100% of it.db", "a%2Fb.db", "what?.db", "x%2F..%2F..%2Fsecret.db"])
def test_a_database_file_is_opened_by_the_path_that_was_checked(
    datasets: Datasets, tmp_path: Path, name: str
) -> None:
    there = radio_dataset(tmp_path)
    path = tmp_path / name
    (tmp_path / "radio.db").rename(path)

    made = datasets.register(registration(kind="radio", name="lab", url=sqlite_url(path), set=there["id"]))

    assert made.facts["samples"] == 300
    assert parse_database_url(made.spec["url"]).target == str(path)


def nothing(*_: object, **__: object) -> Any:
    """Look at data that must not be looked at."""
    pytest.fail("the database was asked")


def test_a_get_of_a_report_changes_nothing(datasets: Datasets, tmp_path: Path) -> None:
    datasets.register(registration(kind="hdf5", name="b", path=burgers_dataset(tmp_path)["spec"]["path"]))
    before = datasets.get("b")

    assert datasets.checked("b").health == "good"
    assert datasets.get("b") == before
