"""Pages, as the server makes them."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

import stoker
from stoker.errors import ConfigError, ConflictError, DegradedError
from stoker.run.demo import BurgersSpec, write_burgers
from stoker.service import pages, views
from stoker.service.client import Client
from stoker.service.database import WAITING_STATES, Event, State
from stoker.service.datasets import Datasets
from stoker.service.jobs import JobAttempt, JobQueue, Outcome
from stoker.service.journal import Line
from stoker.service.models import OperationOut
from stoker.service.stream import CLIENTS, FULL
from stoker.store.gc import GcPolicy, collect
from stoker.units import format_bytes
from tests.service.running import CONFIG, Running, cached_rows, note, note_radio, serving

HOSTILE = "<img src=x onerror=alert(1)>"
STARTED = {
    "tier": "device",
    "tiers": {"device": 300, "disk": 100},
    "reason": "300 of 400 records fit",
    "caches": [{"name": "radio_train", "fingerprint": "0123456789abcdef"}],
}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(tmp_path_factory.mktemp("pages") / "state") as found:
        yield found


@pytest.fixture(scope="module")
def browser(running: Running) -> Iterator[httpx.Client]:
    """Logged in, as a browser is: a cookie and no token."""
    with httpx.Client(
        base_url=running.address, trust_env=False, timeout=60, headers={"accept": "text/html"}
    ) as client:
        code = running.client.post(running.api("/login-codes")).json()["path"]
        assert client.get(code).status_code == 303
        yield client


def made(running: Running, name: str) -> str:
    """A job that waits."""
    return running.services.jobs.create(CONFIG, name=name, epochs=3, dataset_ids=CONFIG["dataset_ids"])[0].id


def taken(running: Running, id: str) -> tuple[JobQueue, JobAttempt]:
    """A worker has the job; those before it have workers too."""
    queue = JobQueue(running.services.database)
    while (attempt := queue.take("worker")) is not None:
        if attempt.job.id == id:
            return queue, attempt
    pytest.fail(f"job {id} does not wait")


def test_pages_without_anything_say_what_to_type(browser: httpx.Client) -> None:
    assert "stoker job submit" in browser.get("/").text
    assert "stoker precompute" in browser.get("/caches").text
    assert "No data set is registered yet" in browser.get("/jobs/new").text
    assert "No data set is registered yet" in browser.get("/datasets").text
    assert "No GPU" in browser.get("/machine").text
    assert "--workers" in browser.get("/machine").text


def test_every_page_is_for_those_who_have_logged_in(running: Running) -> None:
    for path in (
        "/",
        "/jobs/new",
        "/jobs/x",
        "/datasets",
        "/caches",
        "/machine",
        "/parts/jobs",
        "/static/stoker.js",
    ):
        answer = httpx.get(running.address + path, headers={"accept": "text/html"}, trust_env=False)

        assert answer.status_code == 401
        assert "Code or token" in answer.text


def test_a_jobs_page_shows_its_figures_its_start_up_and_where_its_records_are(
    running: Running, browser: httpx.Client
) -> None:
    id = made(running, "night run")
    queue = JobQueue(running.services.database)
    attempt = queue.take("worker")
    assert attempt is not None
    lines = [
        Line(kind="started", data=STARTED),
        *(Line(kind="metrics", data={"epoch": n, "val_loss": 1 / n, "stall": 0.25}) for n in (1, 2)),
    ]
    queue.report(attempt, lines, 1)

    text = browser.get(f"/jobs/{id}").text

    assert "epoch 2 of 3" in text
    assert "25 %" in text
    assert "Records by tier: device 300 records, disk 100 records" in text
    assert "300 of 400 records fit" in text
    assert "started and opened its data" in text
    assert 'href="/caches/radio_train/0123456789abcdef"' in text
    table = browser.get("/parts/jobs").text
    assert re.search(r"<polyline points=\"0.0,2.0 96.0,22.0\"", table)


def test_a_jobs_page_names_its_data_and_shows_the_settings_that_have_an_effect(
    running: Running, browser: httpx.Client
) -> None:
    id = "00000000-0000-4000-8000-00000000abcd"
    note(running.services, id, f"cells {HOSTILE}", "images", {"path": "/nowhere"})
    config = {"dataset_ids": [id], "max_gdop": None, "n_mels": 128, "dropout_rate": 0.25}
    job = running.services.jobs.create(config, name="on cells", epochs=3, dataset_ids=[id])[0].id

    text = browser.get(f"/jobs/{job}").text

    escaped = html.escape(f"cells {HOSTILE}")
    assert f'Data: <a href="/datasets/{id}">{escaped}</a>' in text
    assert f'<th scope="row">dataset_ids</th><td>{escaped}</td>' in text
    assert '<th scope="row">dropout_rate</th><td>0.25</td>' in text
    assert "max_gdop" not in text
    assert "n_mels" not in text


def test_buttons_are_those_that_the_state_allows(running: Running, browser: httpx.Client) -> None:
    id = made(running, "waits")

    def buttons() -> set[str]:
        return set(re.findall(r'id="do-([a-z]+)"', browser.get(f"/parts/jobs/{id}").text))

    assert buttons() == {"pause", "cancel", "clone"}
    running.services.jobs.pause(id)
    assert buttons() == {"resume", "cancel", "clone", "delete"}
    running.services.jobs.cancel(id)
    assert buttons() == {"resume", "clone", "delete"}


def test_names_are_text_and_nothing_else(running: Running, browser: httpx.Client) -> None:
    id = made(running, HOSTILE)

    for path in ("/", f"/jobs/{id}", f"/parts/jobs/{id}"):
        text = browser.get(path).text
        assert "<img src=x" not in text
        assert "&lt;img src=x" in text
    rows = 'drawn">' + browser.get(f"/jobs/{id}").text.split('id="drawn">')[1].split("</script>")[0]
    assert "<" not in rows


def test_the_log_is_text_too(running: Running, browser: httpx.Client) -> None:
    id = made(running, "with a log")
    log = running.services.folder.job(id).log
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text(f"first line\n{HOSTILE}\n")

    text = browser.get(f"/parts/jobs/{id}/log").text

    assert "first line\n&lt;img" in text


def test_no_page_needs_anything_that_the_policy_forbids(running: Running, browser: httpx.Client) -> None:
    note_radio(running.services, CONFIG["dataset_ids"][0])
    id = made(running, "any")

    data = f"/datasets/{CONFIG['dataset_ids'][0]}"
    for path in ("/", "/jobs/new", f"/jobs/{id}", "/datasets", data, "/caches", "/machine", "/jobs/none"):
        text = browser.get(path).text
        tags = re.sub(r'"[^"]*"', '""', text)
        assert not re.search(r"<[^>]*\s(style|on[a-z]+)=", tags)
        assert not re.search(r"<script(?![^>]*(src=|application/json))", text)
        assert "http://" not in text
        assert "https://" not in text


def test_no_page_shows_values_as_python_writes_them(running: Running, browser: httpx.Client) -> None:
    spec: dict[str, Any] = {"min_snr_db": None, "preload_to_gpu": True, "settings": {}}
    id = running.services.jobs.create({"dataset_ids": ["radio"], **spec}, name="plain", epochs=3)[0].id
    queue, attempt = taken(running, id)
    row = {"epoch": 12345, "val_loss": None, "stopped": True, "train_loss": 0.25}
    queue.report(attempt, [Line(kind="metrics", data=row)], 1)
    mark = cached_rows(running.services.folder.caches, "plain")
    other = cached_rows(running.services.folder.caches, "plain", 2)

    for path in (f"/jobs/{id}", f"/caches/plain/{mark}?other={other}", "/machine"):
        text = browser.get(path).text.split('id="drawn">')[-1]
        assert not re.search(r">\s*(None|True|False|\{\}|\[\])\s*<|\[&#39;|&#39;\]", text), path
    page = browser.get(f"/jobs/{id}").text
    assert '<th scope="row">dataset_ids</th><td>radio</td>' in page
    assert '<th scope="row">preload_to_gpu</th><td>yes</td>' in page
    assert '<td class="num">12345</td>' in page, "not 1.234e+04"


def test_what_is_not_there_is_a_page_that_says_so(browser: httpx.Client) -> None:
    for path in (
        "/jobs/none",
        "/datasets/none",
        "/caches/none/0123456789abcdef",
        "/caches/../x",
        "/jobs/" + "x" * 99,
    ):
        answer = browser.get(path)

        assert answer.status_code == 404
        assert answer.headers["content-type"].startswith("text/html") or path.startswith("/caches/..")


def test_an_unknown_address_is_a_page_for_a_browser_and_json_for_a_program(
    running: Running, browser: httpx.Client
) -> None:
    origin = {"origin": running.address}
    for method, path, status in (
        ("GET", "/nothing", 404),
        ("GET", "/jobs/x/y", 404),
        ("HEAD", "/nothing", 404),
        ("POST", "/jobs/new", 405),
        ("GET", "/api/v1/training/nothing", 404),
        ("GET", "/api/v1/training/jobs/00000000-0000-4000-8000-000000000000/files/log.txt", 404),
        ("GET", "/api/v1/training/jobs?limit=0", 422),
    ):
        answer = browser.request(method, path, headers=origin)
        told = running.client.request(method, running.address + path)

        assert (answer.status_code, told.status_code) == (status, status)
        assert answer.headers["content-type"].startswith("text/html")
        assert method == "HEAD" or 'href="/"' in answer.text
        assert told.headers["content-type"] == "application/json"
        assert answer.headers.get("allow") == told.headers.get("allow")


def test_a_database_that_does_not_answer_is_a_page_that_looks_again(
    running: Running, browser: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def degraded(*_: object, **__: object) -> None:
        raise DegradedError("the database does not answer within 5 s. Start it again")

    monkeypatch.setattr("stoker.service.jobs.Jobs.list", degraded)

    answer = browser.get("/")

    assert (answer.status_code, answer.headers["retry-after"]) == (503, "5")
    assert "does not answer within 5 s" in answer.text
    assert 'http-equiv="refresh"' in answer.text


def test_fact_and_hint_are_apart_on_a_page_in_json_and_at_a_client(
    running: Running, browser: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    fact, hint = "/data/Exp. Big/<x>.h5 is away", "Mount it. Then ask again"

    def away(*_: object, **__: object) -> None:
        raise ConflictError(fact, hint=hint)

    monkeypatch.setattr("stoker.service.jobs.Jobs.list", away)

    page, answer = browser.get("/"), running.client.get(running.api("/jobs"))
    assert '<p class="problem">/data/Exp. Big/&lt;x&gt;.h5 is away</p>' in page.text
    assert f'<p class="hint">{hint}</p>' in page.text
    assert (page.status_code, answer.status_code) == (409, 409)
    assert answer.json() == {"error": f"{fact}. {hint}", "fact": fact, "hint": hint, "fields": []}
    with pytest.raises(ConflictError) as refused:
        Client(running.address, running.token).jobs()
    assert (refused.value.fact, refused.value.hint) == (fact, hint)


def test_what_the_guard_refuses_has_a_hint(running: Running) -> None:
    answer = httpx.get(running.api("/jobs"), trust_env=False).json()

    assert answer["error"] == f"{answer['fact']}. {answer['hint']}"
    assert "Authorization" in answer["hint"]


def test_every_page_says_that_the_service_is_degraded(running: Running, browser: httpx.Client) -> None:
    hidden = 'id="degraded" class="problem" role="status" hidden'
    assert hidden in browser.get("/").text
    assert running.client.get(running.address + "/health").json() == {"status": "ok"}

    running.services.database.trouble.note("disk", "the disk of <here> is full. Make room")
    try:
        for path in ("/", "/jobs/new", "/datasets", "/caches", "/machine", f"/jobs/{made(running, 'n')}"):
            answer = browser.get(path)
            assert answer.status_code == 200, "it can be read"
            assert "The service is degraded: <span>the disk of &lt;here&gt; is full. Make room" in answer.text
            assert hidden not in answer.text
        assert httpx.get(running.address + "/health", trust_env=False).json() == {"status": "degraded"}
        ready = running.client.get(running.api("/ready"))
        assert (ready.status_code, ready.json()["error"]) == (503, "the disk of <here> is full. Make room")
        assert ready.json()["jobs"] == running.services.jobs.count()
    finally:
        running.services.database.trouble.note("disk", None)


def test_a_data_sets_page_shows_what_was_found_there_and_who_uses_it(
    running: Running, browser: httpx.Client
) -> None:
    write_burgers(
        running.services.folder.data / "sims.hdf5", BurgersSpec(trajectories=25, steps=11, points=32)
    )
    asked = {"kind": "hdf5", "name": f"sims {HOSTILE}", "path": "sims.hdf5"}
    id = running.client.post(running.api("/datasets"), json=asked).json()["id"]
    job = running.services.jobs.create(CONFIG, name="uses it", epochs=3, dataset_ids=[id])[0]

    assert "not checked" in browser.get("/parts/datasets").text
    running.client.post(running.api(f"/datasets/{id}/validate")).raise_for_status()
    text = browser.get(f"/datasets/{id}").text

    assert "<img src=x" not in text
    assert "11 × 1 × 32 × 1, float32" in text
    assert "the samples that were read are complete and finite" in text
    assert f'href="/jobs/{job.id}"' in text
    assert "sims:20" not in browser.get(f"/parts/datasets/{id}/samples").text
    assert "sims:19" in browser.get(f"/parts/datasets/{id}/samples").text
    assert f'value="{id}" selected' in browser.get(f"/jobs/new?dataset={id}").text


def test_samples_that_cannot_be_read_leave_the_page_and_say_why(
    running: Running, browser: httpx.Client
) -> None:
    lost = "00000000-0000-4000-8000-00000000dead"
    note_radio(running.services, lost, name="lost")

    assert browser.get(f"/datasets/{lost}").status_code == 200
    answer = browser.get(f"/parts/datasets/{lost}/samples")
    assert answer.status_code == 200  # htmx shows no others
    assert "radio.db" in answer.text


def test_the_form_has_every_setting_that_has_an_effect(running: Running, browser: httpx.Client) -> None:
    text = browser.get("/jobs/new").text

    assert 'name="config.early_stop_patience"' in text
    assert 'name="config.batch_size" type="number" data-kind="integer" step="1" min="1" max="1024"' in text
    assert "n_mels" not in text
    assert 'data-path="config.max_gdop" data-kinds="radio"' in text
    assert 'data-path="config.epochs">' in text
    assert 'data-path="config.settings.data.limit" data-kinds="hdf5 images"' in text
    assert "encoder.target" not in text, "no encoder is allowed"


def test_the_form_of_a_clone_has_the_settings_of_its_job(running: Running, browser: httpx.Client) -> None:
    jobs = running.services.jobs
    config = {**CONFIG, "batch_size": 77, "lr_scheduler": "constant", "preload_to_gpu": False}
    config["settings"] = {"data.images.size": [32, 48], "data.images.fit": "letterbox"}
    made_of = {"name": HOSTILE, "epochs": 9, "tags": ["b", "a"]}
    job = jobs.create(config, dataset_ids=["00000000-0000-4000-8000-0000000000aa"], **made_of)[0]

    text = browser.get(f"/jobs/new?clone={job.id}").text

    assert HOSTILE not in text
    for name, value in (("batch_size", "77"), ("epochs", "9")):
        assert re.search(rf'name="config.{name}"[^>]* value="{value}"', text), name
    assert "<option selected>constant</option>" in text
    assert re.search(r'name="config.preload_to_gpu"(?![^>]* checked)', text)
    assert 'data-setting="data.images.size" value="[32, 48]"' in text
    assert 'data-setting="data.images.fit" value="letterbox"' in text
    assert 'value="a, b"' in text
    assert "was removed from the list" in text
    making = jobs.create({}, name="make", epochs=1, kind="generation")[0].id
    assert browser.get(f"/jobs/new?clone={making}").status_code == 422
    assert browser.get("/jobs/new?clone=none").status_code == 404


def test_a_clone_of_a_job_with_an_old_data_set_offers_it(
    running: Running, browser: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    id = "00000000-0000-4000-8000-0000000000ad"
    note_radio(running.services, id, "old")
    job = running.services.jobs.create(CONFIG, name="a", epochs=1, dataset_ids=[id])[0]
    listed = Datasets.list
    monkeypatch.setattr(Datasets, "list", lambda *a, **k: listed(*a, **k, offset=500))

    for query in (f"clone={job.id}", f"dataset={id}"):
        text = browser.get(f"/jobs/new?{query}").text
        assert "was removed from the list" not in text
        assert f'<option value="{id}" selected' in text
    assert browser.get("/jobs/new?dataset=nothing").status_code == 200
    assert browser.get("/jobs/new").status_code == 200


def test_vendored_scripts_come_with_their_licences() -> None:
    vendor = Path(__file__).parents[2] / "src/stoker/service/static/vendor"
    for name in {file.name.split("-")[0] for file in vendor.glob("*.js")}:
        assert (vendor / f"{name}-LICENSE").stat().st_size > 200


def test_the_page_of_a_job_with_very_many_epochs_shows_the_newest_and_says_so(
    running: Running, browser: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stoker.service.pages.EPOCHS_SHOWN", 10)
    id = made(running, "long")
    queue, attempt = taken(running, id)
    lines = [Line(kind="metrics", data={"epoch": n, "accuracy": n / 100}) for n in range(1, 31)]
    queue.report(attempt, lines, position=1)

    page = browser.get(f"/jobs/{id}").text
    drawn = json.loads(re.search(r'id="drawn">(.*?)</script>', page, re.DOTALL)[1])

    assert [row["epoch"] for row in drawn["runs"][0]["rows"]] == [*range(21, 31)]
    assert "Epochs 21 to 30" in page
    assert "accuracy" in {line["name"] for chart in drawn["charts"] for line in chart["series"]}


def test_the_table_of_epochs_says_which_it_has(running: Running, browser: httpx.Client) -> None:
    id = made(running, "table")
    queue, attempt = taken(running, id)

    def table(path: str) -> tuple[list[int], str]:
        text = browser.get(path).text.split('id="epochs"')[-1].split("</table>")[0]
        return [int(n) for n in re.findall(r'<tr><td class="num">(\d+)</td>', text)], text

    queue.report(attempt, [Line(kind="metrics", data={"epoch": n, "val_loss": 1.0}) for n in (1, 2)], 1)
    for path in (f"/jobs/{id}", f"/parts/jobs/{id}/epochs"):
        assert table(path)[0] == [1, 2]
        assert "The last" not in table(path)[1]
    lines = [Line(kind="metrics", data={"epoch": n, "val_loss": 1.0}) for n in range(3, 131)]
    queue.report(attempt, lines, 2)
    for path in (f"/jobs/{id}", f"/parts/jobs/{id}/epochs"):
        assert table(path)[0] == [*range(31, 131)]
        assert "The last 100 epochs, 31 to 130" in table(path)[1]


def test_jobs_are_compared_by_results_and_by_the_settings_that_differ(
    running: Running, browser: httpx.Client
) -> None:
    jobs = running.services.jobs
    same = {**CONFIG, "seed": 7, "settings": {"model.width": 64}}
    good = jobs.create({**same, "learning_rate": 0.001}, name="good run", epochs=5)[0].id
    other = {"learning_rate": 0.01, "settings": {"model.width": 64, "model.depth": 2}}
    bad = jobs.create({**same, **other}, name=HOSTILE, epochs=5)[0].id
    queue, attempt = taken(running, good)
    for n in (1, 2, 3):
        row = {"epoch": n, "val_loss": abs(n - 2) + 0.5, "p50_m": 10 * n}
        queue.report(attempt, [Line(kind="metrics", data=row)], n)
    queue, attempt = taken(running, bad)
    queue.finish(attempt, Outcome(state=State.FAILED, error="the loss is <nan>"), lines=[], position=0)

    text = browser.get(f"/jobs/compare?ids={good},{bad}").text

    def row_of(name: str) -> list[str]:
        found = re.search(rf'<th scope="row">{re.escape(name)}</th>(.*?)</tr>', text)
        assert found, name
        return re.findall(r"<td>(.*?)</td>", found[1])

    assert row_of("Reason") == ["–", "the loss is &lt;nan&gt;"]
    assert row_of("Best validation loss") == ["0.5 in epoch 2", "–"]
    assert row_of("Validation error, median (m)") == ["20", "–"], "of the best epoch"
    assert row_of("Epochs") == ["3 of 5", "0 of 5"]
    assert row_of("learning_rate") == ["0.001", "0.01"]
    assert row_of("settings.model.depth") == ["default", "2"]
    assert '<th scope="row">seed</th>' not in text
    assert '<th scope="row">settings.model.width</th>' not in text
    assert HOSTILE not in text
    assert text == browser.get(f"/jobs/compare?ids={good}&ids={bad}").text
    table = browser.get("/parts/jobs").text
    assert '<p title="the loss is &lt;nan&gt;">the loss is &lt;nan&gt;</p>' in table


def finished_epochs(running: Running, name: str, rows: list[dict[str, Any]], **started: Any) -> str:
    """A job with epochs."""
    id = made(running, name)
    queue, attempt = taken(running, id)
    lines = [Line(kind="started", data=started), *(Line(kind="metrics", data=row) for row in rows)]
    queue.report(attempt, lines, 1)
    return id


def best_of(text: str) -> dict[str, list[str]]:
    """The marked figures on a page that compares jobs, by row."""
    rows = re.findall(r'<th scope="row">([^<]*)</th>(.*?)</tr>', text)
    return {name: re.findall(r"<b>(.*?)</b>", cells) for name, cells in rows if "<b>" in cells}


def test_the_best_figure_is_marked_unless_all_are_equal(running: Running, browser: httpx.Client) -> None:
    def row(loss: float, right: float, rate: float) -> dict[str, Any]:
        return {"epoch": 1, "train_loss": 0.5, "val_loss": loss, "accuracy": right, "learning_rate": rate}

    ids = [
        finished_epochs(running, "low", [row(0.25, 0.5, 0.1)]),
        finished_epochs(running, "right", [row(0.75, 0.9, 0.2)]),
        made(running, "waits"),
    ]

    text = browser.get("/jobs/compare?ids=" + ",".join(ids)).text

    assert best_of(text) == {
        "Best validation loss": ["0.25 in epoch 1"],
        "Loss, validation": ["0.25"],
        "Validation accuracy (%)": ["90"],
    }


def test_losses_on_other_caches_are_said_not_to_be_comparable(
    running: Running, browser: httpx.Client
) -> None:
    def job(*prints: str, loss: float) -> str:
        caches = [{"name": "cells", "fingerprint": one * 16} for one in prints]
        row = {"epoch": 1, "val_loss": loss, "p50_m": 10 * loss}
        return finished_epochs(running, "on caches", [row], caches=caches)

    one, same, other = job("a", "b", loss=0.5), job("a", "b", loss=0.25), job("a", "c", loss=0.125)

    together = browser.get(f"/jobs/compare?ids={one},{same}").text
    apart = browser.get(f"/jobs/compare?ids={one},{other}").text

    assert 'id="other-caches"' not in together
    assert "Best validation loss" in best_of(together)
    assert 'id="other-caches"' in apart
    assert best_of(apart) == {"Validation error, median (m)": ["1.25"]}


def test_jobs_that_generate_data_are_left_out_of_a_comparison(
    running: Running, browser: httpx.Client
) -> None:
    jobs = running.services.jobs
    made_data = jobs.create({"rows": 3}, name="makes rows", epochs=1, kind="generation", dataset_ids=["x"])
    one, other = made(running, "one"), made(running, "other")

    text = browser.get(f"/jobs/compare?ids={one},{made_data[0].id},{other}").text
    answer = browser.get(f"/jobs/compare?ids={one},{made_data[0].id}")

    assert "makes rows" in text
    assert f'href="/jobs/{made_data[0].id}"' not in text
    assert '<th scope="row">rows</th>' not in text
    assert answer.status_code == 422


def test_curves_of_long_jobs_are_compared_with_fewer_points(
    running: Running, browser: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stoker.service.pages.POINTS_COMPARED", 10)
    long, short = made(running, "long one"), made(running, "short one")
    queue, attempt = taken(running, long)
    rows = [{"epoch": n, "val_loss": abs(n - 24) + 0.5} for n in range(1, 31)]
    queue.report(attempt, [Line(kind="metrics", data=row) for row in rows], 1)

    text = browser.get(f"/jobs/compare?ids={long},{short}").text
    drawn = json.loads(re.search(r'id="drawn">(.*?)</script>', text, re.DOTALL)[1])

    assert [row["epoch"] for row in drawn["runs"][0]["rows"]] == sorted({*range(1, 31, 3), 24, 30})
    assert "curves of long one;" in text


def test_only_two_to_eight_jobs_that_exist_are_compared(running: Running, browser: httpx.Client) -> None:
    ids = [made(running, "many") for _ in range(9)]

    for some in ([], ids[:1], [ids[0], ids[0]], ids):
        answer = browser.get("/jobs/compare?ids=" + ",".join(some))
        assert answer.status_code == 422
        assert "Tick 2 to 8" in answer.text
    assert browser.get(f"/jobs/compare?ids={ids[0]},none").status_code == 404
    assert browser.get("/jobs/compare?ids=" + ",".join(ids[:8])).status_code == 200


def seen_after_its_stream_was_refused(answer: object) -> Any:
    """What a page shows when its stream is refused, and the service answers `answer` to the next request.

    With a `result` of an operation in the answer: how that is told.
    """
    script = Path(pages.__file__).parent / "static" / "stoker.js"
    command = ["node", str(Path(__file__).with_name("page_script.js")), str(script), json.dumps(answer)]
    return json.loads(subprocess.run(command, capture_output=True, check=True, timeout=60).stdout)


needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="no node on PATH")


@needs_node
def test_a_page_of_a_session_that_has_ended_leads_to_the_login() -> None:
    seen = seen_after_its_stream_was_refused({"status": 401, "body": {"error": "no valid token"}})

    assert seen == {"reloads": 1, "streams": 1, "shown": {}}, "the login is what a reload is answered with"


@needs_node
def test_a_page_that_finds_no_free_stream_says_so_and_tries_again() -> None:
    seen = seen_after_its_stream_was_refused({"status": 503, "body": {"error": FULL, "fields": []}})

    assert str(CLIENTS) in seen["shown"]["live"]
    assert "degraded" not in seen["shown"]
    assert seen["streams"] > 1


@needs_node
def test_a_page_whose_service_does_not_answer_says_so() -> None:
    seen = seen_after_its_stream_was_refused(None)

    assert [*seen["shown"]] == ["degraded"]
    assert seen["reloads"] == 0


@needs_node
def test_a_long_digest_in_a_clean_up_is_shortened() -> None:
    digest = "0123456789abcdef" * 4
    weights = {"path": f"/caches/encoders/{digest}.safetensors", "bytes": 2048, "reason": "no cache needs it"}
    result = {"dry_run": True, "removed": [weights], "caches": [], "bytes_removed": 2048, "bytes_left": 0}

    text, _, question = seen_after_its_stream_was_refused({"result": result})

    assert "encoders/0123456789ab….safetensors, 2.0 KiB: no cache needs it" in text
    assert digest not in text
    assert "1 leftover file" in question


@needs_node
def test_a_preview_of_a_clean_up_says_in_words_what_would_go(tmp_path: Path) -> None:
    for name in ("radio_train", "cells"):
        cached_rows(tmp_path, name)
    opened = stoker.open_cache(tmp_path / "cells")
    plan = collect(tmp_path, GcPolicy(keep=0, unprotected=True), dry_run=True)
    (gone,) = plan.removed

    text, rows, question = seen_after_its_stream_was_refused({"result": plan.to_json()})

    assert format_bytes(plan.bytes_removed) in text
    assert not {*'{}[]"_'} & {*text}, "no JSON, and no names of its members"
    cache = f"radio_train/{Path(gone.path).name}"
    assert rows[0] == [cache, "would go", gone.reason, format_bytes(gone.bytes), "within the last hour"]
    assert question == f"Delete 1 cache, {format_bytes(plan.bytes_removed)}, permanently?"
    assert rows[1][:3] == [f"cells/{opened.fingerprint}", "stays", "in use: a process has it open"]


def test_a_cache_has_a_button_that_deletes_it(running: Running, browser: httpx.Client) -> None:
    folder = running.services.folder.caches
    mark = cached_rows(folder, "rows")

    assert f'hx-delete="/api/v1/training/caches/rows/{mark}"' in browser.get(f"/caches/rows/{mark}").text


def test_the_last_use_of_a_cache_is_told_as_finely_as_it_is_noted(
    running: Running, browser: httpx.Client
) -> None:
    mark = cached_rows(running.services.folder.caches, "old_rows")
    folder = running.services.folder.caches / "old_rows" / mark
    for path in (folder, *folder.iterdir()):
        os.utime(path, (time.time() - 7300,) * 2)

    def told() -> str:
        row = re.search(rf'<a href="/caches/old_rows/{mark}".*?</tr>', browser.get("/caches").text, re.DOTALL)
        return re.search(r'data-label="Last used" class="num">(.*?)<', row[0])[1]

    assert told() == "2 h ago"
    opened = stoker.open_cache(folder)
    assert told() != "2 h ago"
    assert "s ago" not in told()
    del opened


PLANNED = {
    "tier": "host", "tiers": {"host": 300, "disk": 100}, "records": 400, "missing": 7, "bytes": 2048,
    "reason": "300 of 400 records fit", "advice": "", "predicted_stall": 0.25, "predicted_stall_low": 0.2,
    "predicted_stall_high": 0.3,
}  # fmt: skip


def test_a_new_job_is_planned_before_it_is_submitted(
    running: Running, browser: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[Any] = [
        OperationOut(
            id="a",
            what="plan",
            state="completed",
            seconds=1.0,
            result=PLANNED,
            error=None,
            done=None,
            total=None,
        ),
        ConfigError("model.width is 'abc'", hint="Expected a number"),
        OperationOut(
            id="a", what="plan", state="running", seconds=20.0, result=None, error=None, done=None, total=None
        ),
    ]

    def plan(*_: Any) -> Any:
        answer = said.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(pages, "begin_plan", plan)
    for waiting in running.services.jobs.list(limit=1000):
        running.services.jobs.cancel(waiting.id) if waiting.state in WAITING_STATES else None
    known = "11111111-0000-4000-8000-000000000000"
    note_radio(running.services, known, "known rows")
    running.services.jobs.create(dict(CONFIG), name="before", epochs=3, dataset_ids=[known])
    queue = JobQueue(running.services.database)
    attempt = queue.take("w")
    assert attempt is not None
    row = {"epoch": 1, "seconds": 4.0, "eval_seconds": 1.0}
    queue.report(attempt, [Line(kind="metrics", data=row)], position=1)

    body = {"config": {"dataset_ids": ["known rows"], "epochs": 12}}
    answers = [browser.post("/parts/plan", json=body, headers={"origin": running.address}) for _ in range(3)]
    planned, refused, slow = (answer.text for answer in answers)

    assert {answer.status_code for answer in answers} == {200}
    for shown in (
        "Records by tier: host 300 records, disk 100 records",
        "25 %",
        "20 %",
        "30 %",
        format_bytes(2048),
    ):
        assert shown in planned
    assert "about 60 s" in planned  # 12 epochs of 5 s
    assert f'href="/jobs/{attempt.job.id}"' in planned
    assert "model.width is &#39;abc&#39;. Expected a number" in refused
    assert "longer than 20 s" in slow


def test_the_time_left_is_that_of_the_epochs_since_the_last_start(running: Running) -> None:
    job = running.services.jobs.create(dict(CONFIG), name="paced", epochs=40)[0]
    job = replace(job, state=State.RUNNING, attempt=2, epoch=22, progress=0.55)
    started = Event(number=1, job=job.id, kind="started", at=90_000.0, data={})
    rows = [{"epoch": 19, "at": 90.0}, {"epoch": 20, "at": 95.0}]  # a day before it was continued
    rows += [{"epoch": 21, "at": 90_010.0}, {"epoch": 22, "at": 90_015.0}]

    left = views.left_s(job, rows, started, now=90_016.0)

    assert left == pytest.approx(5 * 18)
    assert views.left_s(job, rows[:2], started, now=90_016.0) is None


def test_the_plan_of_a_form_that_is_not_complete_is_refused(running: Running, browser: httpx.Client) -> None:
    answer = browser.post("/parts/plan", json={"config": {}}, headers={"origin": running.address})

    assert answer.status_code == 404


def test_a_list_keeps_its_filter_in_every_link(
    running: Running, browser: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "PER_PAGE", 2)
    for n in range(5):
        running.services.jobs.create(CONFIG, name=f"linked {n}", epochs=3, tags=["a & b"])

    text = browser.get("/?q=linked&status=queued&status=failed&tag=a+%26+b&sort=name&number=2").text

    assert re.findall(r'<a id="job-[^>]*>(.*?)</a>', text) == ["linked 2", "linked 3"]
    links = {
        name: html.unescape(href)
        for name, href in re.findall(r'<a id="([a-z0-9-]+)" href="(/\?[^"]*)"', text)
    }
    kept = "q=linked&status=queued&status=failed&tag=a+%26+b&sort=name"
    assert links["newer"] == f"/?{kept}"
    assert links["older"] == f"/?{kept}&number=3"
    assert links["only-queued"] == "/?q=linked&status=failed&tag=a+%26+b&sort=name"
    assert (
        links["only-paused"] == "/?q=linked&status=queued&status=paused&status=failed&tag=a+%26+b&sort=name"
    )
    assert links["sort-1"] == "/?q=linked&status=queued&status=failed&tag=a+%26+b&sort=-name"
    assert 'aria-sort="ascending"' in text
    assert f'hx-get="/parts/jobs?{html.escape(kept)}&amp;number=2"' in text
    assert browser.get("/?q=&status=&tag=&kind=&dataset=&sort=").status_code == 200, (
        "empty fields of the form"
    )
    for wrong in ("status=gone", "kind=gone", "sort=gone"):
        assert browser.get(f"/?{wrong}").status_code == 404


def test_the_page_of_a_failed_job_says_so_once_and_promises_nothing(
    running: Running, browser: httpx.Client
) -> None:
    id = made(running, "fails at once")
    waiting = browser.get(f"/jobs/{id}").text
    queue, attempt = taken(running, id)
    outcome = Outcome(state=State.FAILED, error="no GPU is here", exit_code=2)
    queue.finish(attempt, outcome, lines=[], position=0)

    part = browser.get(f"/parts/jobs/{id}").text

    assert re.sub("<[^>]*>", " ", part).lower().count("failed") == 1
    assert "no GPU is here" in part
    assert "the first finished epoch" in waiting
    assert "the first finished epoch" not in browser.get(f"/jobs/{id}").text


def test_states_are_counted_within_the_rest_of_the_filter(running: Running, browser: httpx.Client) -> None:
    jobs = running.services.jobs
    ids = [jobs.create(CONFIG, name=f"counted {n}", epochs=3)[0].id for n in range(3)]
    jobs.pause(ids[0])

    def counts(query: str) -> dict[str, str]:
        text = browser.get(f"/parts/jobs?{query}").text
        found = re.findall(r'id="only-([a-z]+)".*?<span class="count">(.*?)</span>', text)
        return {state: count for state, count in found if count != "0"}

    assert counts("q=counted&status=paused") == {"queued": "2", "paused": "1"}
    assert counts("q=zzz") == {}
    assert "No jobs match" in browser.get("/parts/jobs?q=zzz").text


def test_a_job_that_waits_for_data_names_the_data_set_and_the_job_that_generates_it(
    running: Running, browser: httpx.Client
) -> None:
    body = {"kind": "radio", "name": f"slow {HOSTILE}", "rows": 20}
    made = running.client.post(running.api("/datasets/generate"), json=body).json()
    job = running.services.jobs.create(CONFIG, name="waits", epochs=3, dataset_ids=[made["dataset"]["id"]])[
        0
    ].id

    for path in ("/parts/jobs?q=waits", f"/parts/jobs/{job}", f"/jobs/{job}"):
        text = browser.get(path).text
        for link in (f"/datasets/{made['dataset']['id']}", f"/jobs/{made['job']['id']}"):
            assert f'href="{link}"' in text, path
        assert HOSTILE not in text
    running.services.jobs.cancel(made["job"]["id"])
    assert made["job"]["id"] not in browser.get(f"/parts/jobs/{job}").text
