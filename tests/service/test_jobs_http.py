"""Jobs over HTTP, as a script would use them."""

from __future__ import annotations

import re
import sqlite3
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote

import h5py
import httpx
import pytest

import stoker
from stoker.errors import ConflictError, DegradedError
from stoker.service.database import State
from stoker.service.jobs import JobQueue
from stoker.service.journal import Line
from tests.conftest import write_burgers
from tests.service.job_folders import OPERATOR
from tests.service.running import CONFIG, Running, cached_rows, note, note_radio, serving

GUIDE = {
    "job_name": "rx-night-run",
    "config": {
        "dataset_ids": ["00000000-0000-4000-8000-000000000000"],
        "batch_size": 256,
        "epochs": 100,
        "learning_rate": 0.001,
        "preload_to_gpu": True,
        "accelerator": "auto",
    },
}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(tmp_path_factory.mktemp("jobs") / "state") as found:
        note_radio(found.services, CONFIG["dataset_ids"][0])
        yield found


@pytest.fixture
def job(running: Running) -> str:
    return running.client.post(running.api("/jobs"), json={"config": CONFIG}).json()["id"]


def test_the_body_of_the_guide_makes_a_job_at_both_addresses(running: Running) -> None:
    for path in ("/api/training/jobs", "/api/v1/training/jobs"):
        answer = running.client.post(running.address + path, json=GUIDE)

        assert answer.status_code == 201
        made = answer.json()
        assert (made["job_name"], made["status"], made["total_epochs"]) == ("rx-night-run", "queued", 100)
        assert GUIDE["config"].items() <= made["config"].items()
        found = running.client.get(running.address + answer.headers["location"]).json()
        assert found["job"] == made


def test_a_hundred_requests_at_once_with_one_key_are_one_job(url: str, tmp_path: Path) -> None:
    with serving(tmp_path / "state", database=url) as running:
        note_radio(running.services, CONFIG["dataset_ids"][0])

        def submit(_n: int) -> tuple[int, str]:
            headers = {"Idempotency-Key": "one"}
            answer = running.client.post(running.api("/jobs"), json=GUIDE, headers=headers)
            return answer.status_code, answer.json()["id"]

        with ThreadPoolExecutor(100) as pool:
            answers = list(pool.map(submit, range(100)))
        other = running.client.post(
            running.api("/jobs"), json={"config": CONFIG}, headers={"Idempotency-Key": "one"}
        )

        assert sorted(status for status, _ in answers) == [200] * 99 + [201]
        assert len({job for _, job in answers}) == 1
        assert running.services.jobs.count() == 1
        assert other.status_code == 409


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"batch_size": 5000}, "config.batch_size"),
        ({"epochs": 0}, "config.epochs"),
        ({"epochs": "many"}, "config.epochs"),
        ({"dataset_ids": []}, "config.dataset_ids"),
        ({"no_such_setting": 1}, "config.no_such_setting"),
        ({"learning_rate": -1}, "config.learning_rate"),
    ],
)
def test_a_wrong_setting_is_named(running: Running, change: dict[str, object], path: str) -> None:
    before = running.services.jobs.count()

    answer = running.client.post(running.api("/jobs"), json={"config": {**CONFIG, **change}})

    assert answer.status_code == 422
    assert [field["path"] for field in answer.json()["fields"]] == [path]
    assert path in answer.json()["error"]
    assert running.services.jobs.count() == before


def test_what_does_not_fit_the_data_names_its_fields(tmp_path: Path) -> None:
    with serving(tmp_path / "state") as running:
        for kind in ("radio", "hdf5", "images"):
            id = str(uuid.uuid5(uuid.NAMESPACE_URL, kind))
            path = str(running.services.folder.data / kind)
            note(
                running.services,
                id,
                kind,
                kind,
                {"path": path, "url": f"sqlite:///{path}", "set": id, "table": "t"},
            )

        def fields(*names: str, **config: object) -> list[str]:
            answer = running.client.post(
                running.api("/jobs"), json={"config": {"dataset_ids": names, **config}}
            )
            assert (answer.status_code, bool(answer.json()["fields"])) == (422, True), answer.text
            assert all(one["problem"] in answer.json()["error"] for one in answer.json()["fields"])
            return [one["path"].removeprefix("config.") for one in answer.json()["fields"]]

        assert fields("none") == fields("radio", "hdf5") == ["dataset_ids"]
        assert fields("radio", validation_split=0) == ["early_stop_patience"]
        assert fields("hdf5", min_snr_db=3.0, dropout_rate=0.1) == ["dropout_rate", "min_snr_db"]
        assert fields("images", model_architecture="operator") == ["model_architecture"]
        assert fields("hdf5", settings={"model.widht": 3}) == ["settings.model.widht"]
        assert fields("hdf5", settings={"model.width": "x", "model.depth": 2}) == ["settings.model.width"]
        assert fields("hdf5", settings={"encoder.target": "os:system"}) == ["settings.encoder.target"]
        for size in (512, [512], [0, 64], [64, 1025], [64.0, 64], "64", [True, 64]):
            assert fields("images", settings={"data.images.size": size}) == ["settings.data.images.size"]
        assert fields("images", settings={"data.images.fit": "short"}) == ["settings.data.images.fit"]
        largest = {"dataset_ids": ["images"], "settings": {"data.images.size": [1, 1024]}}
        assert running.client.post(running.api("/jobs"), json={"config": largest}).status_code == 201


def test_a_setting_that_training_would_refuse_is_refused_at_once(tmp_path: Path) -> None:
    wrong = [
        ("model.width", "abc"),
        ("model.width", -5),
        ("model.heads", 7),
        ("training.shuffle", "nonsense"),
        ("data.preset", "nope"),
        ("data.preset", "${HOME}"),
    ]
    with serving(tmp_path / "state") as running:
        running.client.post(running.api("/datasets/generate"), json={"kind": "hdf5", "name": "simulations"})
        before = running.services.jobs.count()

        for name, value in wrong:
            for path in ("/jobs", "/plan"):
                config = {"dataset_ids": ["simulations"], "settings": {name: value}}
                answer = running.client.post(running.api(path), json={"config": config})

                assert answer.status_code == 422, (path, name, value)
                assert name in answer.json()["error"]
                assert str(value) in answer.json()["error"]
        assert running.services.jobs.count() == before


def test_jobs_are_listed_by_status_and_page(running: Running, job: str) -> None:
    before = running.services.jobs.count()
    later = running.client.post(running.api("/jobs"), json=GUIDE).json()["id"]
    newest = running.client.get(running.api("/jobs"), params={"limit": 1}).json()
    assert [one["id"] for one in newest["jobs"]] == [later]
    assert newest["total"] == before + 1
    everything = running.client.get(running.api("/jobs"), params={"limit": 500}).json()
    assert {job, later} <= {one["id"] for one in everything["jobs"]}

    running.client.post(running.api(f"/jobs/{job}/cancel"))
    cancelled = running.client.get(running.api("/jobs"), params={"status": "cancelled"}).json()
    assert job in {one["id"] for one in cancelled["jobs"]}
    assert {one["status"] for one in cancelled["jobs"]} == {"cancelled"}
    for bad in ({"limit": 0}, {"limit": 501}, {"offset": -1}, {"status": "gone"}):
        assert running.client.get(running.api("/jobs"), params=bad).status_code == 422


def test_a_job_is_paused_resumed_cancelled_and_forgotten(running: Running, job: str) -> None:
    def act(what: str) -> tuple[int, str]:
        answer = running.client.post(running.api(f"/jobs/{job}/{what}"))
        return answer.status_code, answer.json().get("status") or answer.json()["error"]

    assert act("pause") == (200, "paused")
    assert act("resume") == (200, "queued")
    assert running.client.delete(running.api(f"/jobs/{job}")).status_code == 409
    assert act("cancel") == (200, "cancelled")
    assert act("cancel") == (200, "cancelled")
    status, said = act("pause")
    assert status == 409
    assert "cancelled" in said
    more = running.client.post(running.api(f"/jobs/{job}/continue"), json={"additional_epochs": 5})
    assert more.status_code == 409
    assert running.client.delete(running.api(f"/jobs/{job}")).status_code == 204
    assert running.client.get(running.api(f"/jobs/{job}")).status_code == 404


@pytest.mark.parametrize("id", ["x", "00000000-0000-4000-8000-000000000000", "%2e%2e", "a%2fb", "'; DROP--"])
def test_a_job_that_is_not_there_is_not_found(running: Running, id: str) -> None:
    for path in (f"/jobs/{id}/metrics", f"/jobs/{id}/logs", f"/jobs/{id}/events", f"/jobs/{id}/logs/stream"):
        assert running.client.get(running.api(path)).status_code == 404, path
    assert running.client.post(running.api(f"/jobs/{id}/cancel")).status_code == 404


def test_metrics_come_an_epoch_a_row_from_where_one_is(running: Running) -> None:
    jobs, queue = running.services.jobs, JobQueue(running.services.database)
    job, _ = jobs.create(dict(CONFIG), name="m", epochs=30)
    while (attempt := queue.take("worker")) is not None and attempt.job.id != job.id:
        pass
    assert attempt is not None
    rows = [Line(kind="metrics", data={"epoch": n, "val_loss": n / 2}) for n in range(1, 16)]
    queue.report(attempt, rows, 1)

    def metrics(**query: int) -> list[tuple[int, float]]:
        found = running.client.get(running.api(f"/jobs/{job.id}/metrics"), params=query).json()["metrics"]
        return [(row["epoch"], row["val_loss"]) for row in found]

    assert metrics(limit=2, after=3) == [(4, 2.0), (5, 2.5)]
    assert len(metrics()) == 15
    shown = running.client.get(running.api(f"/jobs/{job.id}")).json()
    assert [row["epoch"] for row in shown["recent_metrics"]] == list(range(6, 16))
    assert (shown["job"]["status"], shown["job"]["current_epoch"]) == ("running", 15)


def test_the_log_is_read_from_its_end(running: Running, job: str) -> None:
    assert running.client.get(running.api(f"/jobs/{job}/logs")).json()["lines"] == []
    folder = running.services.folder.job(job)
    folder.make()
    text = "".join(f"line {n}\n" for n in range(300)) + "<script>" + "x" * 9000 + "\xff\n"
    folder.log.write_bytes(text.encode("latin-1"))

    found = running.client.get(running.api(f"/jobs/{job}/logs"), params={"tail": 2}).json()

    assert found["lines"][0] == "line 299"
    assert len(found["lines"][1]) == 4096
    assert found["truncated"] is True
    assert found["offset"] == len(text)


def test_a_log_that_is_a_link_is_not_read(running: Running, job: str, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret\n")
    folder = running.services.folder.job(job)
    folder.make()
    folder.log.symlink_to(tmp_path / "secret")

    assert running.client.get(running.api(f"/jobs/{job}/logs")).json()["lines"] == []


def test_a_database_that_does_not_answer_is_told_from_a_fault(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def degraded(*_args: object, **_more: object) -> None:
        raise DegradedError("the database does not answer. Look whether it runs")

    monkeypatch.setattr(running.services.jobs, "count", degraded)

    ready = running.client.get(running.api("/ready"))
    assert (ready.status_code, ready.json()["status"]) == (503, "degraded")
    answer = running.client.post(running.api("/jobs"), json=GUIDE)
    assert answer.status_code == 503
    assert "retry-after" in answer.headers
    assert running.client.get(f"{running.address}/health").json() == {"status": "ok"}
    monkeypatch.undo()
    assert running.client.get(running.api("/ready")).json()["status"] == "ready"


@pytest.mark.slow  # it waits as long as a statement may take
def test_a_database_that_another_holds_is_read_and_refuses_in_time(running: Running) -> None:
    other = sqlite3.connect(running.services.folder.database, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    try:
        answer = running.client.post(running.api("/jobs"), json=GUIDE)
        listed = running.client.get(running.api("/jobs"))
    finally:
        other.execute("ROLLBACK")
        other.close()

    assert (answer.status_code, listed.status_code) == (503, 200)
    assert "retry-after" in answer.headers
    assert "database is locked" in answer.json()["error"]
    assert running.client.post(running.api("/jobs"), json=GUIDE).status_code == 201


SQL = ["'", "'; DROP TABLE jobs; --", '" UNION SELECT value FROM meta --']


@pytest.mark.parametrize("text", SQL)
def test_no_text_is_taken_for_sql(running: Running, job: str, text: str) -> None:
    known, said = running.services.jobs.count(), []
    named = running.client.post(
        running.api("/jobs"),
        json={"job_name": text, "config": CONFIG},
        headers={"Idempotency-Key": text},
    )
    said.append(running.client.post(running.api("/jobs"), json={"config": {**CONFIG, "dataset_ids": [text]}}))
    for path in ("/jobs/{}", "/jobs/{}/metrics", "/jobs/{}/logs", "/datasets/{}", "/operations/{}"):
        said.append(running.client.get(running.api(path.format(quote(text, safe="")))))
    for name in ("status", "limit", "offset"):
        said.append(running.client.get(running.api("/jobs"), params={name: text}))
    for asked in (
        {"kind": "radio", "name": text, "url": text, "set": text},
        {"kind": "hdf5", "name": text, "path": text},
    ):
        said.append(running.client.post(running.api("/datasets"), json=asked))

    assert (named.status_code, named.json()["job_name"]) == (201, text)
    assert {answer.status_code for answer in said} <= {403, 404, 422}
    assert running.services.jobs.count() == known + 1
    assert running.services.jobs.get(job).id == job


def test_figures_for_prometheus_name_every_state(running: Running) -> None:
    text = running.client.get(f"{running.address}/metrics").text

    assert 'stoker_jobs{state="queued"}' in text
    assert "stoker_answer_seconds_count" in text
    assert "stoker_disk_free_bytes" in text


def test_a_job_whose_data_was_forgotten_is_not_queued_again(running: Running) -> None:
    gone = "22222222-0000-4000-8000-000000000000"
    job = running.services.jobs.create(dict(CONFIG), name="ended", epochs=3, dataset_ids=[gone])[0]
    running.services.jobs.cancel(job.id)

    answer = running.client.post(running.api(f"/jobs/{job.id}/resume"))

    assert (answer.status_code, gone in answer.json()["error"]) == (409, True)
    assert running.services.jobs.get(job.id).state is State.CANCELLED


def test_dashboard_and_alerts_ask_for_figures_that_there_are(running: Running) -> None:
    job = running.services.jobs.create(dict(CONFIG), name='night "run"', epochs=3)[0]
    queue = JobQueue(running.services.database)
    while (attempt := queue.take("w")) is not None and attempt.job.id != job.id:
        pass
    assert attempt is not None
    row = {"epoch": 1, "train_loss": 0.5, "val_loss": 0.25, "stall": 0.125, "samples_per_s": 900.0}
    queue.report(attempt, [Line(kind="metrics", data=row)], position=1)

    text = running.client.get(f"{running.address}/metrics").text
    folder = Path(__file__).parents[2] / "docs" / "how-to" / "monitoring"
    asked = {name for file in folder.iterdir() for name in re.findall(r"\bstoker_\w+", file.read_text())}
    there = {*re.findall(r"^(stoker_\w+)", text, re.MULTILINE)}

    assert f'stoker_job_stall_ratio{{job_id="{job.id}",name="night \\"run\\""}} 0.125' in text
    assert f'stoker_job_samples_per_second{{job_id="{job.id}"' in text
    assert len(asked) > 10
    assert asked - there <= {"stoker_gpu_utilisation", "stoker_workers", "stoker_webhook_oldest_seconds"}, (
        "of a machine without GPU, workers and webhooks"
    )


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "../stoker.db", "/proc/self/environ", "x/../../token", "//etc"]
)
def test_a_path_outside_the_roots_is_refused(running: Running, path: str) -> None:
    bodies = (
        {"kind": "hdf5", "name": "n", "path": path},
        {"kind": "images", "name": "n", "path": path},
        {"kind": "radio", "name": "n", "url": f"sqlite:///{path}", "set": CONFIG["dataset_ids"][0]},
    )
    for body in bodies:
        answer = running.client.post(running.api("/datasets"), json=body)
        assert answer.status_code in (403, 422), body
    assert answer.status_code == 403 or "sqlite" in answer.json()["error"]
    assert running.client.get(running.api("/datasets")).json()["total"] == 1


def test_caches_are_named_by_what_is_there(running: Running) -> None:
    mark = "0123456789abcdef"
    for name in (f"x/{mark}", f"..%2f..%2fstate/{mark}", "a/%2e%2e", f"a%00b/{mark}"):
        for path in (f"/caches/{name}", f"/caches/{name}/why"):
            assert running.client.get(running.api(path)).status_code in (400, 404, 422), path
    answer = running.client.post(running.api("/caches/gc"), json={"keep": 0})
    until_ended(running, answer.json()["id"])
    operation = running.client.get(running.api(f"/operations/{answer.json()['id']}")).json()
    assert operation["state"] == "completed"
    assert operation["result"]["dry_run"] is True, "nothing goes unless it is said"


def cache_names(running: Running) -> set[str]:
    return {one["name"] for one in running.client.get(running.api("/caches")).json()["caches"]}


@pytest.mark.parametrize("limits", [{"keep": 0}, {"max_bytes": 0}, {"older_than_s": 0.0},
                                    {"keep": 0, "max_bytes": 0, "older_than_s": 0.0}])  # fmt: skip
def test_a_clean_up_frees_what_its_limits_let_go_but_not_what_is_in_use(
    running: Running, limits: dict[str, Any]
) -> None:
    """Also the newest of its name, just made, of a data set that is not registered."""
    mark, _ = (
        cached_rows(running.services.folder.caches, "opened", 2),
        cached_rows(running.services.folder.caches, "gone"),
    )

    opened = stoker.open_cache(running.services.folder.caches / "opened" / mark)
    answer = running.client.post(running.api("/caches/gc"), json={**limits, "dry_run": False})
    assert len(opened) == 8

    result = answer.json()["result"]
    assert "gone" in [item["path"].split("/")[-2] for item in result["removed"]]
    assert result["bytes_removed"] > 0
    assert [item["path"].split("/")[-2] for item in result["kept"]] == ["opened"]
    assert cache_names(running) == {"opened"}


def test_one_cache_is_deleted_unless_it_is_in_use(running: Running) -> None:
    first, second = (
        cached_rows(running.services.folder.caches, "two", 3),
        cached_rows(running.services.folder.caches, "two", 4),
    )
    address = running.api(f"/caches/two/{first}")

    opened = stoker.open_cache(running.services.folder.caches / "two" / first)
    assert running.client.delete(address).status_code == 409
    assert running.client.get(address).status_code == 200
    assert len(opened) == 8
    del opened
    assert running.client.delete(address).status_code == 204

    assert running.client.get(address).status_code == 404
    assert running.client.delete(address).status_code == 404
    assert running.client.get(running.api(f"/caches/two/{second}")).status_code == 200


def test_a_cache_that_cannot_be_read_is_deleted(running: Running) -> None:
    mark = cached_rows(running.services.folder.caches, "broken")
    (running.services.folder.caches / "broken" / mark / "recipe.json").write_text("{")

    assert running.client.delete(running.api(f"/caches/broken/{mark}")).status_code == 204
    assert not (running.services.folder.caches / "broken" / mark).exists()


@pytest.mark.slow
def test_a_plan_opens_no_data_in_the_server(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server runs in this process; what it opens is noted."""
    path = write_burgers(running.services.folder.data / "planned.hdf5")
    body = {"kind": "hdf5", "name": "planned", "path": str(path)}
    assert running.client.post(running.api("/datasets"), json=body).status_code == 201
    opened: list[object] = []
    monkeypatch.setattr(h5py, "File", lambda *given, **_: opened.append(given))

    config = {"dataset_ids": ["planned"], "accelerator": "cpu", "settings": OPERATOR}
    answer = running.client.post(running.api("/plan"), json={"config": config})

    assert answer.json()["state"] == "completed", answer.json()
    assert answer.json()["result"]["tiers"]
    assert opened == []


def test_caches_that_take_long_to_remove_hold_up_no_other_request(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, begun_on = threading.Event(), list[Path]()

    def remove(path: Path) -> None:
        begun_on.append(path)
        go_on.wait(60)
        path.rmdir()

    monkeypatch.setattr("stoker.store.gc.remove_cache", remove)
    caches = [running.services.folder.caches / "slow" / f"{number:016x}" for number in range(60)]
    for cache in caches:
        cache.mkdir(parents=True)

    def delete(cache: Path) -> httpx.Response:
        address = running.api(f"/caches/slow/{cache.name}")
        return running.client.delete(address, params={"wait_s": 0}, timeout=60)

    try:
        with ThreadPoolExecutor(60) as pool:
            asked = [pool.submit(delete, cache) for cache in caches]
            while len(begun_on) < 40 and not all(one.done() for one in asked):
                time.sleep(0.01)
            try:
                other = running.client.get(running.api("/jobs"), timeout=20)
            finally:
                go_on.set()
            answers = [one.result() for one in asked]
    finally:
        go_on.set()

    assert other.status_code == 200
    begun = [answer.json()["id"] for answer in answers if answer.status_code == 202]
    assert begun
    assert {answer.status_code for answer in answers} <= {202, 409}
    for id in begun:
        until_ended(running, id)
    assert len([cache for cache in caches if not cache.exists()]) == len(begun)


def test_a_cache_is_removed_while_others_are_verified(running: Running) -> None:
    go_on = threading.Event()
    cache = running.services.folder.caches / "x" / ("0" * 16)
    cache.mkdir(parents=True)
    (cache / "recipe.json").write_text("{}")
    try:
        busy = [
            running.services.operations.start(f"verify {n}", lambda: {"waited": go_on.wait(60)})
            for n in range(2)
        ]
        answer = running.client.delete(running.api(f"/caches/x/{cache.name}"), timeout=60)
    finally:
        go_on.set()

    assert answer.status_code != 409, answer.text
    for one in busy:
        until_ended(running, one.id)


def until_ended(running: Running, id: str) -> None:
    """Wait for the end of an operation."""
    deadline = time.monotonic() + 30
    while running.client.get(running.api(f"/operations/{id}")).json()["state"] == "running":
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_cache_that_may_not_be_removed_is_refused_with_its_reason(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise ConflictError(f"{path} is open")

    monkeypatch.setattr("stoker.store.gc.remove_cache", refuse)
    cache = running.services.folder.caches / "open" / f"{7:016x}"
    cache.mkdir(parents=True)

    answer = running.client.delete(running.api(f"/caches/open/{cache.name}"))

    assert (answer.status_code, str(cache) in answer.json()["error"]) == (409, True)
    cache.rmdir()


def test_a_job_names_only_encoders_that_were_allowed(tmp_path: Path) -> None:
    for allowed, status in (((), 422), (("nets:Net",), 201)):
        with serving(tmp_path / f"state{status}", encoders=allowed) as running:
            path = write_burgers(running.services.folder.data / "raw.hdf5")
            body = {"kind": "hdf5", "name": "raw", "path": str(path)}
            assert running.client.post(running.api("/datasets"), json=body).status_code == 201

            def submit(settings: dict[str, Any], running: Running = running) -> httpx.Response:
                config = {"dataset_ids": ["raw"], "settings": settings}
                return running.client.post(running.api("/jobs"), json={"config": config})

            answer = submit({"encoder.target": "nets:Net", "encoder.arguments": {"width": 8}})

            assert answer.status_code == status, answer.text
            assert status == 201 or "--allow-encoder nets:Net" in answer.json()["error"]
            for refused in (
                {"encoder.target": "os:system"},
                {"encoder.kind": "module"},
                {"encoder.target": "nets:Net", "encoder.arguments": {"a": [{"b": "/etc/passwd"}]}},
                {"encoder.target": "nets:Net", "encoder.checkpoint": "w.pt"},
            ):
                assert submit(refused).status_code == 422, refused
