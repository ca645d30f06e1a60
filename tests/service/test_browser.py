"""The pages in a real browser: live, by mouse and by keyboard, light and dark, on a phone."""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stoker.run.demo import BurgersSpec, write_burgers
from stoker.service.database import State
from stoker.service.jobs import JobAttempt, JobQueue, Outcome
from stoker.service.journal import Line
from tests.service.running import CONFIG, Running, cached_rows, note, note_radio, serving

sync_api = pytest.importorskip("playwright.sync_api", reason="pip install 'stoker[browser]'")
CHROMIUM = os.environ.get("STOKER_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update")
WAIT_MS = 60_000
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH (apt install chromium)"),
]
STARTED = {"tier": "device", "tiers": {"device": 300, "disk": 100}, "reason": "300 of 400 records fit"}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with serving(tmp_path_factory.mktemp("browser") / "state") as found:
        note_radio(found.services, CONFIG["dataset_ids"][0])
        yield found


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with sync_api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def page(running: Running, chromium: Any) -> Iterator[Any]:
    """Logged in, and any error of a script fails the test."""
    context = chromium.new_context(base_url=running.address)
    context.set_default_timeout(WAIT_MS)
    found, errors = context.new_page(), list[str]()
    found.on("pageerror", lambda error: errors.append(str(error)))
    found.on("console", lambda said: errors.append(said.text) if "Content Security" in said.text else None)
    found.goto(running.client.post(running.api("/login-codes")).json()["path"])
    yield found
    context.close()
    assert errors == []


def claimed(running: Running, name: str) -> tuple[str, JobAttempt, JobQueue]:
    """A job that a worker holds."""
    jobs = running.services.jobs
    for job in jobs.list(State.QUEUED):
        jobs.cancel(job.id)
    id = jobs.create(CONFIG, name=name, epochs=3, dataset_ids=CONFIG["dataset_ids"])[0].id
    queue = JobQueue(running.services.database)
    attempt = queue.take("worker")
    assert attempt is not None
    assert attempt.job.id == id
    return id, attempt, queue


def metrics(epoch: int) -> Line:
    data = {
        "epoch": epoch,
        "train_loss": 2 / epoch,
        "val_loss": 1 / epoch,
        "stall": 0.01,
        "p50_m": 10 / epoch,
    }
    return Line(kind="metrics", data={**data, "progress": epoch / 3, "message": f"epoch {epoch} of 3"})


def two_caches(running: Running) -> tuple[str, str]:
    """Two caches of one name that differ in a number of their recipe."""
    folder = running.services.folder.caches
    return cached_rows(folder, "rows", 1), cached_rows(folder, "rows", 2)


def test_a_job_is_submitted_and_a_wrong_field_is_named_below_it(running: Running, page: Any) -> None:
    page.goto("/")
    page.get_by_role("link", name="New job").click()
    page.get_by_label("Name", exact=True).fill("from the form")
    page.get_by_label("Tags", exact=True).fill("one, two")
    page.get_by_text("More settings", exact=True).click()
    page.get_by_label("Validation split").fill("0")
    page.get_by_text("More settings", exact=True).click()
    page.get_by_role("button", name="Submit").click()
    fault = page.locator("[data-path='config.early_stop_patience'] .fault")
    fault.get_by_text("validation_split").wait_for()
    patience = page.get_by_label("Early stopping patience")
    assert patience.is_visible(), "its part of the form was folded"
    assert page.evaluate("document.activeElement.id") == "early_stop_patience"
    assert patience.get_attribute("aria-invalid") == "true"
    assert fault.get_attribute("id") in patience.get_attribute("aria-describedby").split()
    assert not page.locator("#toast").is_visible()

    patience.fill("0")
    assert not fault.is_visible()
    assert patience.get_attribute("aria-invalid") is None
    page.get_by_label("Epochs", exact=True).fill("7")
    page.get_by_role("button", name="Submit").click()
    page.get_by_role("heading", name="from the form").wait_for()

    job = running.services.jobs.list()[0]
    assert (job.name, job.epochs, job.config["dataset_ids"]) == ("from the form", 7, CONFIG["dataset_ids"])
    assert job.tags == ["one", "two"]
    page.get_by_role("link", name="Clone").click()
    assert page.get_by_label("Early stopping patience").input_value() == "0"
    page.get_by_label("Epochs", exact=True).fill("9")
    page.get_by_role("button", name="Submit").click()
    page.get_by_text("epoch 0 of 9").wait_for()
    clone = running.services.jobs.list()[0]
    assert clone.config == {**job.config, "epochs": 9}
    assert (clone.name, clone.tags) == (job.name, job.tags)


def test_a_form_that_was_filled_in_outlives_the_session(running: Running, page: Any) -> None:
    """The login opens in another tab, and the form is sent from where it was."""
    page.goto("/jobs/new")
    page.get_by_label("Name", exact=True).fill("kept over the login")
    page.get_by_label("Epochs", exact=True).fill("9")
    end_sessions(running, page)
    page.get_by_role("button", name="Submit").click()
    with page.context.expect_page() as opened:
        page.locator("#toast").get_by_role("link", name="Log in").click()
    opened.value.get_by_label("Code or token").fill(running.token)
    opened.value.get_by_role("button", name="Log in").click()
    opened.value.get_by_role("heading", name="Jobs").wait_for()
    assert page.get_by_label("Epochs", exact=True).input_value() == "9"
    page.get_by_role("button", name="Submit").click()
    page.get_by_role("heading", name="kept over the login").wait_for()

    assert running.services.jobs.list()[0].epochs == 9


def test_a_page_with_a_form_and_live_events_keeps_the_form_when_the_session_ends(
    running: Running, page: Any
) -> None:
    page.goto("/datasets")
    with page.expect_response(lambda answer: "/events?" in answer.url):
        page.reload()
    field = page.locator("#file-name")
    field.fill("kept")
    end_sessions(running, page)
    page.locator("#toast").get_by_role("link", name="Log in").wait_for()

    assert field.input_value() == "kept"


def test_a_page_without_a_filled_form_becomes_the_login_and_leads_back(running: Running, page: Any) -> None:
    page.goto("/datasets?number=1")
    with page.expect_response(lambda answer: "/events?" in answer.url):
        page.reload()
    end_sessions(running, page)
    page.get_by_label("Code or token").fill(running.token)
    page.get_by_role("button", name="Log in").click()
    page.get_by_role("heading", name="Data sets").wait_for()

    assert page.url.endswith("/datasets?number=1")


def end_sessions(running: Running, page: Any) -> None:
    """Log the browser out behind its back."""
    for cookie in page.context.cookies():
        if (session := running.services.auth.session(cookie["value"])) is not None:
            running.services.auth.end(session)


def test_the_form_shows_the_fields_of_the_chosen_kind_of_data(running: Running, page: Any) -> None:
    flow, cells = (f"00000000-0000-4000-8000-00000000000{digit}" for digit in "fe")
    note(running.services, flow, "flow", "hdf5", {"path": "flow.hdf5"})
    note(running.services, cells, "cells", "images", {"path": str(running.services.folder.data / "cells")})
    page.goto("/jobs/new")
    page.get_by_text("More settings", exact=True).click()
    sets = page.get_by_label("Data set", exact=True)
    sets.select_option(CONFIG["dataset_ids"][0])
    page.get_by_label("Maximum GDOP").fill("4")
    more = page.get_by_text("Settings of the data and the network")
    assert not more.is_visible()

    sets.select_option(label="flow (simulations, 4,030 samples)")
    more.click()
    assert page.get_by_label("model.width").is_visible()
    assert not page.get_by_label("Dropout").is_visible()
    assert not page.get_by_label("Maximum GDOP").is_visible()
    assert not page.get_by_label("data.images.size").is_visible()
    page.get_by_label("model.width").fill("32")
    page.get_by_label("latent.dim").fill("8")
    body = page.evaluate("bodyOf(document.querySelector('.new'), null).config")
    assert "max_gdop" not in body
    assert body["settings"] == {"model.width": 32, "latent.dim": 8}

    sets.select_option(cells)
    assert not page.get_by_label("model.width").is_visible()
    page.get_by_label("data.images.size").fill("512")
    page.get_by_role("button", name="Submit").click()
    page.locator("[data-path='config.settings.data.images.size'] .fault", has_text="1024").wait_for()
    assert page.evaluate("document.activeElement.id") == "settings-data-images-size"

    sets.select_option(CONFIG["dataset_ids"][0])
    body = page.evaluate("bodyOf(document.querySelector('.new'), null).config")
    assert body["max_gdop"] == 4
    assert "settings" not in body


@pytest.mark.parametrize("width", [1280, 390])
def test_a_long_name_does_not_widen_a_list(running: Running, page: Any, width: int) -> None:
    name = "n" * 200
    claimed(running, name)
    page.set_viewport_size({"width": width, "height": 800})
    page.goto("/")
    link = page.get_by_role("link", name=name).first
    link.wait_for()

    assert link.get_attribute("title") == name
    assert page.evaluate(
        "(({scrollWidth, clientWidth}) => scrollWidth <= clientWidth)(document.querySelector('.scroll'))"
    )
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_the_reason_of_a_failure_has_the_width_of_the_list_and_two_lines(running: Running, page: Any) -> None:
    _, attempt, queue = claimed(running, "fails")
    words = "the encoder raised ValueError: expected 3 channels, got 4 in sample 17 of simulations/a.h5 " * 5
    queue.finish(attempt, Outcome(state=State.FAILED, error=words), lines=[], position=0)
    page.set_viewport_size({"width": 1280, "height": 800})
    page.goto("/")

    reason = page.locator(".why p", has_text="expected 3 channels").first.bounding_box()
    row = page.locator(".list tbody tr").first.bounding_box()
    assert reason["width"] > 0.9 * row["width"]
    assert 30 < reason["height"] < 50, "two lines of 20"


@pytest.mark.parametrize("path", ["/", "/datasets", "/caches"])
def test_each_value_of_a_list_has_a_label_on_a_phone(running: Running, page: Any, path: str) -> None:
    claimed(running, "on a phone")
    two_caches(running)
    page.set_viewport_size({"width": 390, "height": 800})
    page.goto(path)
    labels = page.evaluate(
        "[...document.querySelectorAll('.list tbody tr:not(:has(> .why))')]"
        ".map((row) => [...row.cells].slice(1)"
        ".filter((cell) => cell.checkVisibility()).map((cell) => getComputedStyle(cell, '::before').content))"
    )
    assert labels
    assert all(len(row) >= 4 and all(len(label) > len('""') for label in row) for row in labels), labels


def test_progress_and_curves_come_by_themselves(running: Running, page: Any) -> None:
    id, attempt, queue = claimed(running, "live")
    page.goto(f"/jobs/{id}")
    page.locator("#no-curves").wait_for()
    assert not page.locator("#scales").is_visible(), "there is no axis yet"

    queue.report(attempt, [Line(kind="started", data=STARTED), metrics(1)], 1)
    page.get_by_text("epoch 1 of 3").first.wait_for()
    queue.report(attempt, [metrics(2)], 2)
    page.get_by_text("epoch 2 of 3").first.wait_for()

    page.get_by_role("img", name="Loss by epoch; last: training 1, validation 0.5").wait_for()
    titles = page.locator(".chart h3").all_text_contents()
    assert titles == ["Loss", "Validation error (m)", "Stall and GPU (%)"], "those that rows have numbers for"
    page.get_by_role("img", name="Records by tier: device 300 records, disk 100 records").wait_for()
    queue.finish(attempt, Outcome(state=State.COMPLETED, exit_code=0), lines=[metrics(3)], position=3)
    page.locator("#job .state", has_text="completed").wait_for()
    page.get_by_role("button", name="Continue").wait_for()
    page.get_by_text("As a table").click()
    page.get_by_role("region", name="Epochs").get_by_role("row").nth(3).wait_for()


ZOOM = "() => plots.map((plot) => [plot.scales.x.min, plot.scales.x.max])"
SHOWN = "() => plots[0].series.map((line) => line.show)"


def test_a_new_epoch_and_a_resize_leave_zoom_and_hidden_lines(running: Running, page: Any) -> None:
    id, attempt, queue = claimed(running, "zoomed")
    queue.report(attempt, [metrics(n) for n in range(1, 31)], 1)
    page.goto(f"/jobs/{id}")
    page.get_by_role("img", name="Loss by epoch").wait_for()
    page.evaluate("plots[0].setScale('x', {min: 10, max: 15}); plots[0].setSeries(1, {show: false})")

    def as_chosen() -> None:
        zoom = page.evaluate(ZOOM)
        assert zoom[0] == [10, 15]
        assert zoom[1][1] == page.evaluate("runs[0].rows.at(-1).epoch"), "one that was not zoomed shows all"
        assert page.evaluate(SHOWN) == [True, False, True]

    queue.report(attempt, [metrics(31)], 2)
    page.get_by_role("img", name=f"Loss by epoch; last: training {2 / 31:.4g}").wait_for()
    as_chosen()
    before = page.evaluate("plots[0].width")
    page.set_viewport_size({"width": 600, "height": 800})
    page.wait_for_function("plots[0].width !== " + str(before))
    as_chosen()


def test_axes_are_chosen_and_stay_while_epochs_come(running: Running, page: Any) -> None:
    id, attempt, queue = claimed(running, "axes")
    rows = [Line(kind="metrics", data={**metrics(n).data, "step": 50 * n}) for n in range(1, 12)]
    queue.report(attempt, rows[:10], 1)
    page.goto(f"/jobs/{id}")
    page.get_by_role("img", name="Loss by epoch").wait_for()
    page.get_by_label("by", exact=True).select_option("step")
    page.get_by_label("logarithmic").check()

    queue.report(attempt, rows[10:], 2)
    page.get_by_role("img", name=f"Loss by step; last: training {2 / 11:.4g}").wait_for()
    assert page.evaluate("plots[0].data[0]") == [50 * n for n in range(1, 12)]
    scales = page.evaluate("plots.map((plot) => plot.scales.y.distr)")
    assert scales == [3, 3, 1], "a share may be 0"
    page.get_by_label("by", exact=True).select_option("time")
    assert page.evaluate("plots[0].data[0].every((x) => x >= 0 && x < 3600)")


def test_charts_show_their_values_at_one_epoch_and_mark_the_best(running: Running, page: Any) -> None:
    id, attempt, queue = claimed(running, "hover")
    row = lambda n, loss: Line(kind="metrics", data={**metrics(n).data, "val_loss": loss})  # noqa: E731
    queue.report(attempt, [row(n, abs(n - 4) + 0.5) for n in range(1, 9)], 1)
    page.goto(f"/jobs/{id}")
    loss = page.locator(".chart", has_text="Loss")
    page.get_by_role("img", name="Loss by epoch").wait_for()
    page.locator("#best", has_text="4").wait_for()

    def legend(chart: int) -> list[str]:
        return page.locator(".chart").nth(chart).locator(".u-value").all_text_contents()

    assert legend(0) == ["8", "0.25", "4.5"], "without a cursor, the last"
    loss.scroll_into_view_if_needed()
    over = loss.locator(".u-over").bounding_box()
    page.mouse.move(over["x"] + over["width"] * 3 / 7, over["y"] + 20)
    assert legend(0) == ["4", "0.5", "0.5"]
    assert legend(1) == ["4", "2.5"], "the other charts follow"
    queue.report(attempt, [row(9, 0.25)], 2)
    page.locator("#best", has_text="9").wait_for()


def test_ticked_jobs_are_compared_with_a_line_each(running: Running, page: Any) -> None:
    found = dict[str, tuple[JobAttempt, JobQueue]]()
    for name, epochs in (("first of two", 4), ("second of two", 2)):
        _, attempt, queue = claimed(running, name)
        queue.report(attempt, [metrics(n) for n in range(1, epochs + 1)], 1)
        found[name] = attempt, queue
    page.goto("/")
    page.get_by_label("Select first of two").check()
    attempt, queue = found["second of two"]
    queue.report(attempt, [metrics(3)], 2)
    page.get_by_role("row", name="second of two").get_by_text("3 of 3").wait_for()
    page.get_by_label("Select second of two").check()
    assert page.get_by_label("Select first of two").is_checked(), "news of a job keep what is ticked"
    page.get_by_role("button", name="Compare").click()

    name = f"Loss, validation by epoch; last: second of two {1 / 3:.4g}, first of two 0.25"
    page.get_by_role("img", name=name).wait_for()
    titles = page.locator(".chart h3").all_text_contents()
    quantities = ["Loss, training", "Loss, validation", "Validation error, median (m)"]
    assert titles == [*quantities, "Stall and GPU, stall (%)"]
    for chart in range(4):
        labels = page.locator(".chart").nth(chart).locator(".u-label").all_text_contents()
        assert labels == ["epoch", "second of two", "first of two"]
    assert page.evaluate("plots[1].data") == [[1, 2, 3, 4], [1, 1 / 2, 1 / 3, None], [1, 1 / 2, 1 / 3, 1 / 4]]


def test_a_log_that_is_read_stays_where_it_is(running: Running, page: Any) -> None:
    id, attempt, queue = claimed(running, "read")
    log = running.services.folder.job(id).log
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text("".join(f"line {n}\n" for n in range(1, 199)))
    page.goto(f"/jobs/{id}")

    def first_seen() -> str:
        """The line at the upper edge of the log."""
        edge = "(lines.scrollTop / parseFloat(getComputedStyle(lines).lineHeight))"
        return page.evaluate(f"lines.textContent.split('\\n')[Math.round({edge})]")

    def epoch(n: int) -> None:
        with log.open("a") as file:
            file.write(f"written in epoch {n}\n")
        queue.report(attempt, [metrics(n)], n)
        page.locator("#job", has_text=f"epoch {n} of 3").wait_for()
        page.locator("#lines", has_text=f"written in epoch {n}").wait_for()
        page.wait_for_timeout(300)  # the other part of the page comes at its own time

    assert page.evaluate("lines.scrollTop + lines.clientHeight >= lines.scrollHeight - 8")
    page.evaluate("lines.scrollTop = 40 * parseFloat(getComputedStyle(lines).lineHeight)")
    for n in (1, 2, 3, 4):  # from the third on lines at the top leave the page
        epoch(n)
        assert first_seen() == "line 41"
    page.evaluate("lines.scrollTop = lines.scrollHeight")
    epoch(5)
    assert page.evaluate("lines.scrollTop + lines.clientHeight >= lines.scrollHeight - 8")


def test_pause_resume_and_cancel(running: Running, page: Any) -> None:
    id, attempt, queue = claimed(running, "stopped and gone on")
    page.on("dialog", lambda dialog: dialog.accept())
    page.goto(f"/jobs/{id}")

    page.get_by_role("button", name="Pause").click()
    page.locator("#job .state", has_text="pausing").wait_for()
    queue.finish(attempt, Outcome(state=State.PAUSED, exit_code=75), lines=[], position=0)
    page.locator("#job .state", has_text="paused").wait_for()
    page.get_by_role("button", name="Resume").click()
    page.locator("#job .state", has_text="queued").wait_for()
    page.get_by_role("button", name="Cancel").click()
    page.locator("#job .state", has_text="cancelled").wait_for()

    assert running.services.jobs.get(id).state is State.CANCELLED


def test_a_refusal_is_said_in_words(running: Running, page: Any) -> None:
    id, _, _ = claimed(running, "gone meanwhile")
    page.goto(f"/jobs/{id}")
    page.route("**/events?**", lambda route: route.abort())
    page.reload()
    page.get_by_role("button", name="Pause").wait_for()
    running.services.jobs.cancel(id)

    page.get_by_role("button", name="Pause").click()

    page.get_by_role("alert").get_by_text("cannot be paused").wait_for()


def test_caches_are_verified_and_their_difference_is_shown(running: Running, page: Any) -> None:
    first, second = two_caches(running)
    page.goto("/caches")
    row = page.get_by_role("row", name=first)
    row.get_by_role("link", name="rows").click()

    page.get_by_role("button", name="Read every record").click()
    page.get_by_text("All 8 records match their checksums.").wait_for()
    page.get_by_label("compared with").select_option(second)
    page.get_by_role("button", name="Compare", exact=True).click()
    page.get_by_role("region", name="Differences").get_by_text("rows 2").wait_for()

    shard = next((running.services.folder.caches / "rows" / first).rglob("*.safetensors"))
    last = struct.pack("<f", 7.0) * 4
    shard.write_bytes(shard.read_bytes().replace(last, last[::-1]))
    page.get_by_role("button", name="Read every record").click()
    page.get_by_text("1 of 8 records are damaged").wait_for()


def test_a_clean_up_asks_with_what_it_deletes_and_a_no_keeps_it(running: Running, page: Any) -> None:
    two_caches(running)
    asked = list[str]()
    answers = iter((False, True))
    page.on(
        "dialog", lambda one: (asked.append(one.message), one.accept() if next(answers) else one.dismiss())
    )
    page.goto("/caches")
    page.get_by_label("Newest caches to keep").fill("0")
    page.get_by_label("unused for days").fill("0")
    kept = [*running.services.folder.caches.glob("*/*/recipe.json")]
    assert kept

    page.locator("#do-gc").click()
    page.locator("form[aria-busy]").wait_for(state="detached")
    assert [*running.services.folder.caches.glob("*/*/recipe.json")] == kept
    page.locator("#do-gc").click()
    page.locator("#freed .lines", has_text="Removed").wait_for()

    assert not [*running.services.folder.caches.glob("*/*/recipe.json")]
    assert all(f"Delete {len(kept)} caches" in text and "KiB" in text for text in asked), asked
    assert len(asked) == 2


@pytest.mark.parametrize("name", ["burgers_of_a_rather_long_experiment_train", "short_val"])
def test_names_of_caches_that_have_room_are_not_cut(running: Running, page: Any, name: str) -> None:
    cached_rows(running.services.folder.caches, name)
    page.set_viewport_size({"width": 1280, "height": 800})
    page.goto("/caches")

    cut = "(link) => link.scrollWidth > link.clientWidth"
    assert not page.get_by_role("link", name=name).first.evaluate(cut)


def test_data_is_taken_up_checked_and_trained_on(running: Running, page: Any) -> None:
    write_burgers(
        running.services.folder.data / "sims.hdf5", BurgersSpec(trajectories=8, steps=11, points=32)
    )
    page.goto("/datasets")
    rows = page.locator("form", has_text="Radio rows in a database")
    rows.get_by_label("name").fill("rows")
    rows.get_by_label("database", exact=True).fill("postgresql:///lab")
    rows.get_by_label("dataset_id").fill("no")
    rows.get_by_role("button", name="Register").click()
    rows.locator("[data-path=set] .fault", has_text="UUID").wait_for()

    form = page.locator("form", has_text="Files")
    form.get_by_label("name").fill("sims")
    form.get_by_label("file or folder").fill("../sims.hdf5")
    form.get_by_role("button", name="Register").click()
    page.locator("#toast", has_text="..").wait_for()

    form.get_by_label("file or folder").fill("sims.hdf5")
    form.get_by_role("button", name="Register").click()
    page.get_by_role("heading", name="sims").wait_for()
    page.get_by_role("region", name="Samples").get_by_text("sims:7").wait_for()
    page.get_by_role("button", name="Check", exact=True).click()
    page.get_by_text("the samples that were read are complete and finite").wait_for()
    page.get_by_role("link", name="Train", exact=True).click()
    page.get_by_role("button", name="Submit").click()
    page.get_by_role("heading", name="training").wait_for()

    job = running.services.jobs.list()[0]
    assert running.services.datasets.get(job.dataset_ids[0]).name == "sims"


def test_a_form_that_is_sent_before_its_script_is_there_waits_for_it(running: Running, page: Any) -> None:
    held = list[Any]()
    page.route("**/static/stoker.js", lambda route: held.append(route))  # noqa: PLW0108  a builtin is refused
    page.goto("/datasets", wait_until="commit")
    form = page.locator("form", has_text="Files")
    form.get_by_label("name").fill("early")
    form.get_by_label("file or folder").fill("../early.hdf5")
    form.get_by_role("button", name="Register").click()
    assert page.url.endswith("/datasets")
    held[0].continue_()

    page.locator("#toast", has_text="..").wait_for()
    assert page.url.endswith("/datasets")
    assert form.get_by_label("name").input_value() == "early"


def test_everything_is_reached_by_keyboard(running: Running, page: Any) -> None:
    id, _, _ = claimed(running, "by keyboard")
    page.goto(f"/jobs/{id}")
    reached = list[str]()
    for _ in range(12):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.textContent.trim()"))

    assert reached[0] == "Skip to content"
    assert {"Caches", "Machine", "Pause", "Cancel"} <= set(reached)
    page.get_by_role("button", name="Pause").focus()
    page.keyboard.press("Enter")
    page.locator("#job .state", has_text="pausing").wait_for()


def test_a_connection_that_was_cut_misses_nothing(running: Running, page: Any) -> None:
    id, attempt, queue = claimed(running, "cut off")
    queue.report(attempt, [metrics(1)], 1)
    page.goto(f"/jobs/{id}")
    page.get_by_role("img", name="Loss by epoch").wait_for()
    page.context.set_offline(True)
    queue.report(attempt, [metrics(2)], 2)
    page.context.set_offline(False)
    queue.report(attempt, [metrics(3)], 3)

    page.get_by_role("img", name="last: training 0.6667, validation 0.3333").wait_for()


def test_a_page_that_is_looked_at_says_that_the_service_is_degraded(running: Running, page: Any) -> None:
    id, attempt, queue = claimed(running, "while the disk is full")
    page.goto(f"/jobs/{id}")
    trouble, banner = running.services.database.trouble, page.locator("#degraded")
    banner.wait_for(state="hidden")

    trouble.note("disk", "the disk of /srv/stoker is full. Make room")
    banner.get_by_text("the disk of /srv/stoker is full").wait_for()
    queue.report(attempt, [metrics(1)], 1)
    page.get_by_role("img", name="Loss by epoch").wait_for()
    assert banner.is_visible(), "the page goes on, and says it still"
    trouble.note("disk", None)

    banner.wait_for(state="hidden")


@pytest.mark.parametrize(
    ("scheme", "width"), [("light", 1280), ("dark", 1280), ("light", 390), ("dark", 390)]
)
def test_pages_are_accessible_and_as_wide_as_the_screen(
    running: Running, chromium: Any, scheme: str, width: int
) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="pip install 'stoker[browser]'")
    other = claimed(running, "compared")[0]
    id, attempt, queue = claimed(running, "looked at")
    queue.report(attempt, [Line(kind="started", data=STARTED), *map(metrics, (1, 2, 3))], 1)
    first, _ = two_caches(running)
    context = chromium.new_context(
        base_url=running.address, color_scheme=scheme, viewport={"width": width, "height": 800}
    )
    page = context.new_page()
    folder = Path(os.environ.get("STOKER_SCREENSHOTS", ""))
    names = {
        "login": "/login", "jobs": "/", "job": f"/jobs/{id}", "new": "/jobs/new", "datasets": "/datasets",
        "dataset": f"/datasets/{CONFIG['dataset_ids'][0]}", "caches": "/caches",
        "cache": f"/caches/rows/{first}", "compare": f"/jobs/compare?ids={id},{other}", "machine": "/machine",
        "api": "/docs", "missing": "/jobs/none",
    }  # fmt: skip
    try:
        for name, path in names.items():
            if name == "jobs":
                page.goto(running.client.post(running.api("/login-codes")).json()["path"])
            page.goto(path)
            page.wait_for_load_state("domcontentloaded")
            if name in ("job", "compare"):
                page.get_by_role("img", name="Loss").first.wait_for()
            if name == "jobs":
                page.locator("[name=ids]").first.check()
            if name in ("new", "api"):
                page.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
            found = axe.Axe().run(page)
            assert found.violations_count == 0, found.generate_report()
            assert page.evaluate("document.documentElement.scrollWidth") <= width, name
            if folder.name:
                page.screenshot(path=folder / f"{name}-{scheme}-{width}.png", full_page=True)
    finally:
        context.close()


def test_the_list_is_searched_and_its_address_keeps_that(running: Running, page: Any) -> None:
    jobs = running.services.jobs
    tagged = jobs.create(CONFIG, name="searched one", epochs=3, tags=["hunt"])[0].id
    jobs.create(CONFIG, name="searched two", epochs=3)
    jobs.pause(tagged)
    page.goto("/")
    page.get_by_label("Search", exact=True).fill("searched")
    page.wait_for_url("**/?q=searched")
    page.get_by_text("2 jobs", exact=True).wait_for()
    assert page.evaluate("document.activeElement.name") == "q", "typing goes on"
    page.get_by_label("Tag", exact=True).select_option("hunt")
    page.get_by_text("1 job", exact=True).wait_for()
    page.get_by_role("link", name="paused").click()
    page.get_by_role("link", name="failed").click()
    page.reload()

    assert page.get_by_label("Search", exact=True).input_value() == "searched"
    assert page.get_by_label("Tag", exact=True).input_value() == "hunt"
    names = page.locator(".named a")
    assert names.all_text_contents() == ["searched one"]
    jobs.change(tagged, name="searched no. 1")
    page.get_by_role("link", name="searched no. 1").wait_for()
    page.get_by_role("link", name="paused").click()
    page.get_by_text("No jobs match").wait_for()
    page.get_by_role("link", name="Clear filters").click()
    page.wait_for_url("**/")


def test_what_is_done_with_selected_jobs_is_told_with_its_refusals(running: Running, page: Any) -> None:
    jobs = running.services.jobs
    for job in jobs.list(State.QUEUED, limit=500):
        jobs.cancel(job.id)
    waits, ended, _ = (
        jobs.create(CONFIG, name=name, epochs=3)[0].id for name in ("waits here", "ended here", "another")
    )
    jobs.cancel(ended)
    page.on("dialog", lambda dialog: dialog.accept())
    page.goto("/?q=here")
    page.get_by_label("Select waits here").check()
    page.get_by_label("Select ended here").check()
    page.get_by_text("2 jobs selected").wait_for()
    said = page.locator("#bulk-result")

    page.get_by_role("button", name="Pause").click()
    said.get_by_text("Paused 1 of 2 jobs.").wait_for()
    assert "ended here: " in said.text_content()
    assert "cannot be paused" in said.text_content()
    assert jobs.get(waits).state is State.PAUSED
    page.get_by_label("Tags to add").fill("both, best")
    page.get_by_role("button", name="Tag", exact=True).click()
    said.get_by_text("Tagged 2 of 2 jobs.").wait_for()
    page.locator("#jobs .tag", has_text="best").nth(1).wait_for()
    page.get_by_label("Tags to add").fill("-best")
    page.get_by_label("Tags to add").press("Enter")
    page.locator("#jobs .tag", has_text="best").first.wait_for(state="detached")
    assert [jobs.get(id).tags for id in (waits, ended)] == [["both"], ["both"]]
    assert page.get_by_label("Select waits here").is_checked()
    page.get_by_role("button", name="Delete").click()
    page.get_by_text("No jobs match").wait_for()
    assert page.evaluate("document.activeElement.id") == "bulk-result"
    done = [row.path for row in running.services.audit.read(limit=20) if row.method == "DELETE"]
    assert {path.rpartition("/")[2] for path in done} >= {waits, ended}


def test_a_renewed_list_keeps_its_elements_its_focus_and_its_ticks(running: Running, page: Any) -> None:
    id, attempt, queue = claimed(running, "kept")
    page.goto("/")
    page.get_by_label("Select all jobs").check()
    link = page.get_by_role("link", name="kept", exact=True)
    link.focus()
    row = page.locator(f"#row-{id}").element_handle()
    page.evaluate("getSelection().selectAllChildren(document.querySelector('.named a'))")

    queue.report(attempt, [metrics(1)], 1)
    other = running.services.jobs.create(CONFIG, name="came meanwhile", epochs=3)[0].id
    page.get_by_role("link", name="came meanwhile").wait_for()
    page.locator(f"#row-{id}", has_text="1 of 3").wait_for()

    assert row.evaluate("(row) => row.isConnected")
    assert page.evaluate("document.activeElement.id") == f"job-{id}"
    assert page.evaluate("getSelection().toString()") != ""
    assert page.locator(f"#pick-{id}").is_checked()
    assert not page.locator(f"#pick-{other}").is_checked()
    order = page.locator(".named a").all_text_contents()
    assert order[:2] == ["came meanwhile", "kept"]
    running.services.jobs.change(other, name="a later name")
    page.get_by_role("link", name="a later name").wait_for()
    running.services.jobs.cancel(other)
    running.services.jobs.delete(other)
    page.get_by_role("link", name="a later name").wait_for(state="detached")
    assert row.evaluate("(row) => row.isConnected")
    assert page.evaluate("document.activeElement.id") == f"job-{id}"


def test_a_command_line_of_the_api_is_copied(running: Running, page: Any) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.goto("/docs")
    page.locator("#list_jobs summary").click()
    page.locator("#list_jobs [data-copy]").click()
    page.get_by_role("button", name="Copied").wait_for()

    copied = page.evaluate("navigator.clipboard.readText()")
    assert copied == page.get_by_label("Command line of list_jobs").text_content()
    assert copied.startswith("curl ")


def test_the_actions_of_ticked_jobs_come_after_the_list_and_cover_no_focus(
    running: Running, page: Any
) -> None:
    for n in range(12):
        running.services.jobs.create(CONFIG, name=f"row {n}", epochs=3)
    page.set_viewport_size({"width": 1280, "height": 420})
    page.goto("/?q=row")
    page.locator("[name=ids]").first.focus()
    page.keyboard.press("Space")
    page.get_by_text("1 job selected").wait_for()

    active, passed = "document.activeElement", list[str]()
    while page.evaluate(f"{active}.closest('#jobs') !== null"):
        passed.append(page.evaluate(f"{active}.id"))
        page.keyboard.press("Tab")
        page.wait_for_timeout(50)
        covered = page.evaluate(
            f"(({{bottom}}, bar) => !bar.contains({active}) && bottom > bar.getBoundingClientRect().top)"
            f"({active}.getBoundingClientRect(), document.getElementById('bulk'))"
        )
        assert not covered, passed
    assert page.evaluate(f"{active}.closest('#bulk') !== null"), passed


def test_the_focus_stays_at_the_actions_of_a_job(running: Running, page: Any) -> None:
    id, attempt, queue = claimed(running, "by keyboard")
    page.on("dialog", lambda dialog: dialog.accept())
    page.goto(f"/jobs/{id}")

    def press(name: str, state: str) -> None:
        page.get_by_role("button", name=name).focus()
        page.keyboard.press("Enter")
        page.locator("#job .state", has_text=state).wait_for()
        page.wait_for_timeout(200)
        assert page.evaluate("document.activeElement.closest('#actions') !== null")

    press("Pause", "pausing")
    queue.finish(attempt, Outcome(state=State.PAUSED, exit_code=75), lines=[], position=0)
    page.locator("#job .state", has_text="paused").wait_for()
    press("Resume", "queued")
    press("Cancel", "cancelled")


def test_name_and_tags_of_a_job_are_edited_on_its_page(running: Running, page: Any) -> None:
    id, _, _ = claimed(running, "before")
    page.goto(f"/jobs/{id}")
    page.get_by_text("Edit", exact=True).click()
    page.get_by_label("Name", exact=True).fill("after")
    page.get_by_label("Tags", exact=True).fill("one, two,")
    page.get_by_role("button", name="Save").click()
    page.get_by_role("heading", name="after", exact=True).wait_for()

    assert running.services.jobs.get(id).tags == ["one", "two"]
    page.get_by_text("Edit", exact=True).click()
    page.get_by_label("Tags", exact=True).fill("")
    page.get_by_role("button", name="Save").click()
    page.get_by_text("No tags").wait_for()
    assert running.services.jobs.get(id).tags == []
