"""`stoker job` against a running service."""

from __future__ import annotations

import csv
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from stoker.errors import ConfigError, ConflictError, DegradedError, NotFoundError, ServiceError
from stoker.service.client import Client, find_job
from stoker.service.database import State
from stoker.service.jobs import Job, JobQueue, Jobs, Outcome
from stoker.service.journal import Line
from tests.cli.commands import run, run_json
from tests.conftest import write_burgers
from tests.service.running import CONFIG, Running, note, note_radio, serving

SETTING = f"dataset_ids=[{CONFIG['dataset_ids'][0]}]"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(tmp_path_factory.mktemp("command") / "state") as found:
        (found.services.folder.path / "address").write_text(found.address + "\n")
        note_radio(found.services, CONFIG["dataset_ids"][0])
        yield found


@pytest.fixture
def at(running: Running) -> list[str]:
    return ["--state-dir", str(running.services.folder.path)]


def job(*words: str, exit_code: int = 0) -> dict[str, Any]:
    return run_json("job", *words, exit_code=exit_code)


def test_a_job_is_submitted_looked_at_paused_and_cancelled(running: Running, at: list[str]) -> None:
    made = job("submit", SETTING, "epochs=3", "--name", "night", *at)
    assert (made["job_name"], made["total_epochs"], made["status"]) == ("night", 3, "queued")

    assert made["id"] in {one["id"] for one in job("list", *at)["jobs"]}
    assert job("pause", made["id"], *at)["status"] == "paused"
    assert job("list", "--status", "paused", *at)["jobs"][0]["id"] == made["id"]
    assert job("resume", made["id"], *at)["status"] == "queued"
    assert job("cancel", made["id"], *at)["status"] == "cancelled"
    assert job("show", made["id"], *at)["job"]["status"] == "cancelled"
    assert job("logs", made["id"], *at)["lines"] == []
    assert job("delete", made["id"], "--yes", *at) == {"deleted": made["id"]}
    shown, _ = run(
        "job", "list", "--server", running.address, "--token-file", str(running.services.folder.token)
    )
    assert made["id"] not in shown


def test_jobs_are_tagged_and_found_again(at: list[str]) -> None:
    made = job("submit", SETTING, "--name", "tagged run", *at)
    assert job("tag", made["id"], "night", "house", "--remove", "none", *at)["tags"] == ["house", "night"]
    assert job("tag", "--state-dir", at[1], made["id"], "--remove", "house")["tags"] == ["night"]

    def found(*words: str) -> list[str]:
        return [one["id"] for one in job("list", *words, *at)["jobs"]]

    job("cancel", made["id"], *at)
    cancelled = ("--status", "cancelled", "--status", "failed", "--tag", "night")
    assert found(*cancelled, "--search", "tagged", "--dataset", "radio", "--kind", "training") == [made["id"]]
    assert made["id"] not in found("--tag", "night", "--status", "queued")
    assert found("--sort", "created")[::-1] == found()
    assert "status" in job("list", "--status", "nonsense", *at, exit_code=3)["error"]


def test_a_clone_has_the_settings_and_tags_of_its_job(running: Running, at: list[str]) -> None:
    made = job("submit", SETTING, "batch_size=64", "epochs=3", "--name", "first", *at)
    job("tag", made["id"], "night", *at)

    clone = job("clone", made["id"], "learning_rate=0.01", "--epochs", "20", *at)

    assert clone["id"] != made["id"]
    assert (clone["job_name"], clone["tags"], clone["total_epochs"]) == ("first", ["night"], 20)
    assert clone["config"] == {**made["config"], "learning_rate": 0.01, "epochs": 20}
    assert job("clone", made["id"], "--name", "second", *at)["job_name"] == "second"
    making = running.services.jobs.create({}, name="make", epochs=1, kind="generation")[0].id
    assert "job generate" in job("clone", making, *at, exit_code=3)["error"]


@pytest.mark.parametrize("name", ["whole.json", "settings.yaml"])
def test_settings_come_from_a_file_and_words_win(at: list[str], tmp_path: Path, name: str) -> None:
    config = {**CONFIG, "batch_size": 64}
    (tmp_path / "whole.json").write_text(json.dumps({"job_name": "from file", "config": config}))
    (tmp_path / "settings.yaml").write_text(json.dumps(config))

    made = job("submit", str(tmp_path / name), "batch_size=32", *at)

    assert made["config"]["batch_size"] == 32
    assert made["job_name"] == ("from file" if name == "whole.json" else "training")


def test_settings_are_given_by_their_names_in_submit_and_clone(running: Running, at: list[str]) -> None:
    path = running.services.folder.data / "waves.h5"
    path.write_bytes(b"")
    note(running.services, "w" * 36, "dotted", "hdf5", {"path": str(path)})
    words = ["dataset_ids=dotted", "settings.model.width=32", "model.depth=3"]
    made = job("submit", *words, 'settings={"model.heads": 2, "model.depth": 1}', *at)

    assert made["config"]["settings"] == {"model.heads": 2, "model.width": 32, "model.depth": 3}
    clone = job("clone", made["id"], "model.width=64", "settings.model.heads=4", *at)
    assert clone["config"]["settings"] == {"model.heads": 4, "model.width": 64, "model.depth": 3}
    assert "model.depth?" in job("clone", made["id"], "model.dept=1", *at, exit_code=3)["error"]
    assert "settings is" in job("submit", *words, "settings=3", *at, exit_code=3)["error"]


def test_an_unknown_data_set_is_answered_with_the_command_that_lists_them(at: list[str]) -> None:
    for words in (("submit", "dataset_ids=nothing"), ("check", "nothing")):
        assert "`stoker job datasets`" in job(*words, *at, exit_code=3)["error"]


def test_the_same_key_is_the_same_job(at: list[str]) -> None:
    first, second = (job("submit", SETTING, "--key", "k", *at) for _ in range(2))

    assert first["id"] == second["id"]
    assert "another body" in job("submit", SETTING, "epochs=9", "--key", "k", *at, exit_code=3)["error"]


def test_files_of_a_job_are_listed_and_downloaded(running: Running, at: list[str], tmp_path: Path) -> None:
    made = job("submit", SETTING, *at)["id"]
    folder = running.services.folder.job(made)
    (folder.checkpoints / "best-000000013").mkdir(parents=True)
    (folder.checkpoints / "best-000000013" / "state.json").write_text("{}")
    (folder.path / "model.safetensors").write_bytes(b"w" * 3_000_000)
    (folder.path / "report.html").symlink_to(running.services.folder.token)
    (folder.checkpoints / "best-000000013" / "token").symlink_to(running.services.folder.token)
    (folder.checkpoints / "last-000000014").symlink_to(running.services.folder.path)
    (folder.path / "job.json").write_text("{}")

    names = {one["name"]: one["bytes"] for one in job("files", made, *at)["files"]}
    assert names == {"model.safetensors": 3_000_000, "checkpoints/best-000000013/state.json": 2}
    found = job("download", made, "--to", str(tmp_path), *at)
    assert found == {"path": str(tmp_path / "model.safetensors"), "bytes": 3_000_000}
    assert (tmp_path / "model.safetensors").read_bytes() == b"w" * 3_000_000
    job("download", made, "checkpoints/best-000000013/state.json", "--to", str(tmp_path / "s.json"), *at)
    assert (tmp_path / "s.json").read_text() == "{}"
    for other in (
        "checkpoints/best-000000013/token",
        "checkpoints/last-000000014/token",
        "report.html",
        "job.json",
        "../../token",
        "checkpoints/../job.json",
        "/etc/passwd",
        "lock",
    ):
        refused = job("download", made, other, "--to", str(tmp_path / "other"), *at, exit_code=3)
        assert "no file" in refused["error"] or "does not exist" in refused["error"]
    assert not (tmp_path / "other").exists()


def test_data_sets_are_registered_generated_listed_and_forgotten(
    running: Running, at: list[str], tmp_path: Path
) -> None:
    file = write_burgers(running.services.folder.data / "raw.hdf5")
    made = job("register", "kind=hdf5", "name=2026", f"path={file}", *at)
    assert (made["name"], made["kind"], made["facts"]["samples"] > 0) == ("2026", "hdf5", True)
    generated = job("generate", "kind=radio", "name=lab", "rows=5", *at)
    assert generated["job"]["job_type"] == "generation"
    listed = {one["name"]: one["id"] for one in job("datasets", *at)["datasets"]}
    assert {"2026": made["id"], "lab": generated["dataset"]["id"]}.items() <= listed.items()
    assert str(file) in run("job", "datasets", *at)[0]
    assert job("check", "2026", *at)["health"] == "good"
    assert job("check", "2026", "--all", *at)["report"][-1]["status"] == "pass"
    assert job("forget", "2026", "--yes", *at) == {"forgotten": made["id"]}
    assert "2026" not in {one["name"] for one in job("datasets", *at)["datasets"]}
    assert file.exists()
    assert "KEY=VALUE" in job("register", "waves.h5", *at, exit_code=3)["error"]
    assert "kind" in job("register", "kind=movie", "name=x", *at, exit_code=3)["error"]


def test_a_client_plans_and_says_who_has_changed_what(running: Running) -> None:
    client = Client(running.address, running.token)
    client.submit({"config": dict(CONFIG)})
    until = time.monotonic() + 20
    while not (rows := client.audit(limit=1)) and time.monotonic() < until:
        time.sleep(0.01)

    assert rows[0]["method"] == "POST"
    with pytest.raises(ConfigError, match="epochs"):
        client.plan({"config": {**CONFIG, "epochs": 0}})


def test_metrics_are_downloaded_as_csv(running: Running, at: list[str], tmp_path: Path) -> None:
    made = job("submit", SETTING, "epochs=1500", *at)["id"]
    queue = JobQueue(running.services.database)
    while (attempt := queue.take("w")) is not None and attempt.job.id != made:
        pass
    assert attempt is not None
    rows = [
        {"epoch": n, "val_loss": 1 / n, **({"accuracy": 0.5} if n > 1200 else {})} for n in range(1, 1501)
    ]
    for first in range(0, 1500, 500):
        lines = [Line(kind="metrics", data=row) for row in rows[first : first + 500]]
        queue.report(attempt, lines, position=first)

    job("download", made, "metrics.csv", "--to", str(tmp_path / "m.csv"), *at)

    with (tmp_path / "m.csv").open(newline="") as file:
        read = [*csv.DictReader(file)]
    assert [int(row["epoch"]) for row in read] == [*range(1, 1501)]
    assert [float(row["val_loss"]) for row in read] == [row["val_loss"] for row in rows]
    assert (read[0]["accuracy"], read[-1]["accuracy"]) == ("", "0.5")


def test_a_job_is_named_by_the_start_of_its_id_or_by_its_name(running: Running, at: list[str]) -> None:
    first, second = (job("submit", SETTING, "--name", f"called {n}", *at)["id"] for n in "ab")
    length = next(n for n in range(1, 37) if first[:n] != second[:n])
    ids = [one["id"] for one in job("list", "--limit", "500", *at)["jobs"]]
    unique = next(first[:n] for n in range(length, 37) if sum(one.startswith(first[:n]) for one in ids) == 1)

    assert job("show", unique, *at)["job"]["id"] == first
    assert job("pause", "called b", *at)["id"] == second
    assert job("resume", "called b", *at)["id"] == second
    job("submit", SETTING, "--name", "called a", *at)
    error = job("cancel", "called a", *at, exit_code=3)["error"]
    assert "2 jobs" in error
    assert first in error
    assert job("show", first, *at)["job"]["status"] == "queued", "none was cancelled"
    assert "'called' does not exist" in job("show", "called", *at, exit_code=3)["error"]
    assert job("cancel", unique, *at)["id"] == first
    assert job("delete", unique, "--yes", *at) == {"deleted": first}


def test_a_job_is_found_behind_the_first_page(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.service.client.PAGE_JOBS", 1)
    client = Client(running.address, running.token)
    made = client.submit({"job_name": "the oldest of three", "config": CONFIG})["id"]
    for _ in range(2):
        client.submit({"job_name": "younger than the oldest of three", "config": CONFIG})

    assert find_job(client, "the oldest of three") == made


def test_jobs_that_cannot_be_meant_are_not_downloaded(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Client(running.address, running.token)
    made = client.submit({"job_name": "sought", "config": CONFIG})["id"]
    client.submit({"config": CONFIG})
    asked, sent = client.jobs, list[str]()

    def jobs(**chosen: Any) -> Any:
        page = asked(**chosen)
        sent.extend(one["id"] for one in page["jobs"])
        return page

    monkeypatch.setattr(client, "jobs", jobs)

    assert find_job(client, "sought") == made
    assert sent == [made]
    with pytest.raises(NotFoundError):
        find_job(client, "x" * 300)


@pytest.mark.parametrize("given", ["2026-01-01", "[2026-01-01]", "2026-01-01,5e3", "[2026-01-01, 5e3]"])
def test_data_sets_are_named_with_and_without_brackets(running: Running, at: list[str], given: str) -> None:
    known = {
        "2026-01-01": "00000000-0000-4000-8000-0000000000aa",
        "5e3": "00000000-0000-4000-8000-0000000000ab",
    }
    for name, id in known.items():
        if name not in {one.name for one in running.services.datasets.list(limit=500)}:
            note_radio(running.services, id, name)
    names = given.strip("[]").replace(" ", "").split(",")

    made = job("submit", f"dataset_ids={given}", *at)

    assert made["dataset_ids"] == [known[name] for name in names]
    again = job("clone", made["id"], f"dataset_ids={given}", "epochs=4", *at)
    assert (again["dataset_ids"], again["total_epochs"]) == (made["dataset_ids"], 4)


def test_a_folder_that_does_not_exist_is_named_before_anything_is_sent(at: list[str], tmp_path: Path) -> None:
    error = job("download", "x", "--to", str(tmp_path / "nodir" / "m"), *at, exit_code=3)["error"]

    assert f"{tmp_path / 'nodir'} is not a folder" in error
    assert not (tmp_path / "nodir").exists()


def test_the_environment_names_service_token_and_folder(
    running: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = running.services.folder
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STOKER_STATE_DIR", str(folder.path))
    assert "jobs" in job("list")
    monkeypatch.setenv("STOKER_STATE_DIR", str(tmp_path / "nothing"))
    monkeypatch.setenv("STOKER_SERVER", running.address)
    assert "token" in job("list", exit_code=3)["error"]
    monkeypatch.setenv("STOKER_TOKEN_FILE", str(folder.token))
    assert "jobs" in job("list")
    (tmp_path / "wrong").write_text("x" * 40)
    assert (
        "does not take the token"
        in job("list", "--token-file", str(tmp_path / "wrong"), exit_code=1)["error"]
    )


def test_a_number_with_an_exponent_is_a_number(at: list[str]) -> None:
    made = job("submit", SETTING, "learning_rate=1e-4", *at)
    assert made["config"]["learning_rate"] == 1e-4


def test_a_folder_on_the_command_line_goes_before_the_environment(
    running: Running, at: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STOKER_SERVER", "http://127.0.0.1:9")
    monkeypatch.setenv("STOKER_TOKEN", "wrong" * 10)
    assert running.address
    assert "jobs" in job("list", *at)


def test_following_a_log_ends_with_the_job(running: Running, at: list[str]) -> None:
    made = job("submit", SETTING, *at)["id"]
    folder = running.services.folder.job(made)
    folder.make()
    folder.log.write_text("first\nsecond\n")
    running.services.jobs.cancel(made)

    _, notes = run("job", "logs", made, "--follow", *at)

    assert notes.splitlines() == ["first", "second"]


def test_epochs_are_added_once_where_the_first_answer_is_lost(
    running: Running, at: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = job("submit", SETTING, *at)
    queue = JobQueue(running.services.database)
    for other in running.services.jobs.list(State.QUEUED, limit=500):
        running.services.jobs.pause(other.id) if other.id != made["id"] else None
    attempt = queue.take("w")
    assert attempt is not None
    epochs = Line(kind="metrics", data={"epoch": 3})
    queue.finish(attempt, Outcome(state=State.COMPLETED), lines=[epochs], position=1)
    extend, keys = Jobs.extend, []

    def lose_the_answer(self: Jobs, id: str, epochs: int, *, key: str | None = None) -> Job:
        keys.append(key)
        found = extend(self, id, epochs, key=key)
        if len(keys) == 1:
            raise DegradedError("the database does not answer")
        return found

    monkeypatch.setattr(Jobs, "extend", lose_the_answer)

    more = job("continue", made["id"], "--epochs", "5", *at)

    assert (more["status"], more["total_epochs"]) == ("queued", 8)
    assert len(keys) == 2
    assert len({*keys} - {None}) == 1


@pytest.mark.parametrize(
    "words", [["dance"], ["show"], ["continue", "x"], ["list", "surplus"], ["login", "a", "b"]]
)
def test_what_is_typed_wrong_is_a_usage_error(at: list[str], words: list[str]) -> None:
    run("job", *words, *at[: 0 if words == ["dance"] else None], exit_code=2)


def test_a_job_is_deleted_after_a_yes_alone(at: list[str]) -> None:
    made = job("submit", SETTING, *at)
    job("cancel", made["id"], *at)

    assert "--yes" in job("delete", made["id"], *at, exit_code=3)["hint"]
    assert job("show", made["id"], *at)["job"]["status"] == "cancelled"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["show", "00000000-0000-4000-8000-000000000000"], "000000000000' does not exist"),
        (["submit", SETTING, "batch_size=9999"], "config.batch_size"),
        (["submit", "dataset_ids=[nothing]"], "no data set is registered as nothing"),
        (["submit", "a.yaml", "b.yaml"], "expected one file"),
        (["submit", "nowhere.yaml"], "nowhere.yaml cannot be read"),
        (["submit", "dataset_ids=["], "a setting cannot be read: while parsing"),
        (["submit", "odd.json"], "odd.json: config is 3. Expected an object with dataset_ids"),
        (["pause", "a/../b"], "job 'a/../b' does not exist"),
        (["list", "--status", "gone"], 'query.status.0: "gone"'),
    ],
)
def test_what_is_wrong_is_one_line(
    at: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], said: str
) -> None:
    (tmp_path / "odd.json").write_text('{"config": 3}')
    monkeypatch.chdir(tmp_path)

    error = job(*words, *at, exit_code=3)["error"]

    assert said in error
    assert "\n" not in error


def test_a_browser_is_let_in_once_by_what_login_prints(running: Running, at: list[str]) -> None:
    """The log-in page says that this command prints a way in."""
    assert "stoker job login" in httpx.get(f"{running.address}/login", trust_env=False).text
    shown, _ = run("job", "login", *at)
    address = shown.strip().removeprefix("login: ")
    assert job("login", *at)["login"] != address

    with httpx.Client(trust_env=False) as browser:
        assert browser.get(address).status_code == 303
        assert browser.get(f"{running.address}/api/v1/training/jobs").status_code == 200
    assert httpx.get(address, trust_env=False).status_code == 401


def test_a_wrong_token_is_told_with_where_the_right_one_is(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STOKER_TOKEN", "wrong" * 10)

    error = job("list", "--server", running.address, exit_code=1)["error"]

    assert error.startswith(f"{running.address} does not take the token (")
    assert "--token-file or $STOKER_TOKEN" in error


def test_a_service_that_is_not_there_is_told_with_what_to_do(tmp_path: Path) -> None:
    assert "stoker serve" in job("list", "--state-dir", str(tmp_path / "nothing"), exit_code=3)["error"]
    (tmp_path / "token").write_text("x" * 40)
    lost = ["--server", "http://127.0.0.1:9", "--token-file", str(tmp_path / "token")]
    assert "does not answer" in job("list", *lost, exit_code=1)["error"]


def test_the_token_is_not_sent_to_a_proxy_and_not_in_messages(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    client = Client(running.address, running.token)

    assert client.jobs(limit=1)["limit"] == 1
    with pytest.raises(NotFoundError):
        client.job("x")
    with pytest.raises(ServiceError) as refused:
        Client(running.address, "wrong" * 10).jobs()
    assert refused.value.status in (401, 429)
    assert "wrong" * 10 not in str(refused.value)
    with pytest.raises(ConflictError):
        client.delete(client.submit({"config": CONFIG})["id"])
    for bad in ("ftp://x", "http://u:p@x", "x"):
        with pytest.raises(ConfigError):
            Client(bad, running.token)
