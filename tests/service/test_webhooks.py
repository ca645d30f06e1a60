"""Changes of jobs are posted to a real HTTP server, also one that fails, hangs or was told half of it."""

from __future__ import annotations

import hmac
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

import pytest
from pydantic import SecretStr

from stoker.errors import ConfigError
from stoker.runtime.threads import RetryPolicy
from stoker.service import webhooks
from stoker.service.client import Client
from stoker.service.database import COUNTERS, Database, State
from stoker.service.jobs import JobQueue, Jobs, Outcome
from stoker.service.journal import Line
from stoker.service.security import read_secret
from stoker.service.server import ServeSettings, serve
from stoker.service.services import counts
from stoker.service.webhooks import Webhooks, check_webhook
from tests.service.running import serving
from tests.service.test_server import service


class Receiver(ThreadingHTTPServer):
    """Keeps what it is sent; `answers` are the next statuses (0: none before the end), then 204."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}/a-secret-path"
        self.answers: list[int] = []
        self.got: list[tuple[dict[str, Any], dict[str, str], bytes]] = []
        self.over = threading.Event()

    @property
    def events(self) -> list[str]:
        return [body["event"] for body, _, _ in self.got]

    def ids(self) -> list[str]:
        return [headers["stoker-delivery"] for _, headers, _ in self.got]


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        receiver = cast("Receiver", self.server)
        raw = self.rfile.read(int(self.headers["Content-Length"]))
        headers = {name.lower(): value for name, value in self.headers.items()}
        receiver.got.append((json.loads(raw), headers, raw))
        status = receiver.answers.pop(0) if receiver.answers else 204
        if status == 0:
            receiver.over.wait(60)
            return
        self.send_response(status)
        if status == 302:
            self.send_header("Location", receiver.url + "/elsewhere")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    found = Receiver()
    threading.Thread(target=found.serve_forever, daemon=True).start()
    yield found
    found.over.set()
    found.shutdown()
    found.server_close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhooks, "POLL_S", 0.02)
    monkeypatch.setattr(webhooks, "PAUSES", RetryPolicy(first_s=0.02, longest_s=0.05))


@pytest.fixture
def start(database: Database) -> Iterator[Callable[..., Webhooks]]:
    """Start webhooks of the database; all end with the test."""
    begun: list[Webhooks] = []

    def run(*urls: str, secret: str | None = None) -> Webhooks:
        begun.append(Webhooks(database, urls, None if secret is None else SecretStr(secret)))
        begun[-1].start()
        return begun[-1]

    with database.writing() as connection:
        connection.execute(COUNTERS.delete().where(COUNTERS.c.name != "event"))
    yield run
    for one in begun:
        one.stop()


def wait_for(met: Callable[[], bool]) -> None:
    until = time.monotonic() + 30
    while not met():
        assert time.monotonic() < until
        time.sleep(0.01)


def figures(found: Webhooks) -> dict[str, float]:
    return {name: next(iter(values.values())) for name, _, values in found.figures()}


def train(database: Database, name: str) -> str:
    """A job from its creation to its end, with progress in between."""
    job = Jobs(database).create({}, name=name, epochs=2)[0].id
    queue = JobQueue(database)
    attempt = queue.take("w")
    assert attempt is not None
    queue.report(attempt, [Line(kind="progress", data={}), Line(kind="metrics", data={"epoch": 1})], 1)
    queue.finish(attempt, Outcome(state=State.FAILED, error="no rows"), lines=[], position=2)
    return job


def test_each_change_is_posted_once_in_order_with_a_signature(
    database: Database, receiver: Receiver, start: Callable[..., Webhooks]
) -> None:
    train(database, "before the first start")
    found = start(receiver.url, secret="s" * 32)
    jobs = [train(database, "a"), train(database, "b")]
    Jobs(database).delete(jobs[1])
    wait_for(lambda: figures(found)["stoker_webhook_sent_total"] == 7)

    assert receiver.events == ["queued", "claimed", "failed"] * 2 + ["deleted"]
    assert len({*receiver.ids()}) == 7
    body, headers, raw = receiver.got[2]
    assert {"id": jobs[0], "name": "a", "state": "failed", "epoch": 1, "error": "no rows"}.items() <= body[
        "job"
    ].items()
    assert receiver.got[1][0]["job"]["state"] == "running"
    assert body["at"].endswith("Z")
    assert headers["stoker-event"] == "failed"
    assert headers["stoker-signature"] == "sha256=" + hmac.digest(b"s" * 32, raw, "sha256").hex()
    assert receiver.got[-1][0]["job"]["id"] == jobs[1]


def test_a_receiver_that_fails_gets_the_same_delivery_until_it_takes_it(
    database: Database, receiver: Receiver, start: Callable[..., Webhooks]
) -> None:
    receiver.answers = [500, 302, 429, 503]
    found = start(receiver.url)
    train(database, "a")
    wait_for(lambda: figures(found)["stoker_webhook_sent_total"] == 3)

    assert receiver.events == ["queued"] * 5 + ["claimed", "failed"]
    assert len({*receiver.ids()}) == 3
    assert figures(found)["stoker_webhook_failures_total"] == 4
    assert found.troubles() == []


def test_a_delivery_that_is_refused_for_good_is_dropped_and_the_next_one_is_sent(
    database: Database, receiver: Receiver, start: Callable[..., Webhooks], caplog: pytest.LogCaptureFixture
) -> None:
    receiver.answers = [404] * webhooks.REFUSALS
    found = start(receiver.url, secret="the secret of the webhooks")
    train(database, "a")
    wait_for(lambda: figures(found)["stoker_webhook_sent_total"] == 2)

    assert receiver.events[webhooks.REFUSALS :] == ["claimed", "failed"]
    assert figures(found)["stoker_webhook_dropped_total"] == 1
    assert "queued" in caplog.text
    assert "a-secret-path" not in caplog.text
    assert "the secret of" not in caplog.text


def test_nothing_is_told_of_a_receiver_when_its_last_delivery_was_dropped(
    database: Database, receiver: Receiver, start: Callable[..., Webhooks]
) -> None:
    receiver.answers = [410] * webhooks.REFUSALS
    found = start(receiver.url)
    Jobs(database).create({}, name="a", epochs=1)
    wait_for(lambda: figures(found)["stoker_webhook_dropped_total"] == 1)
    wait_for(lambda: not found.troubles())

    assert len(receiver.got) == webhooks.REFUSALS


def test_an_unknown_error_is_logged_and_the_delivery_is_tried_again(
    database: Database,
    receiver: Receiver,
    start: Callable[..., Webhooks],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    ask, errors = webhooks.HttpClient.ask, [RuntimeError(receiver.url)] * 2

    def fail_first(*given: Any, **named: Any) -> Any:
        if errors:
            raise errors.pop()
        return ask(*given, **named)

    monkeypatch.setattr(webhooks.HttpClient, "ask", fail_first)
    start(receiver.url)
    Jobs(database).create({}, name="a", epochs=1)
    wait_for(lambda: receiver.events == ["queued"])

    assert "RuntimeError" in caplog.text
    assert "a-secret-path" not in caplog.text


def test_an_old_change_that_fails_is_dropped(
    database: Database, receiver: Receiver, start: Callable[..., Webhooks], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhooks, "KEEP_S", -10.0)
    receiver.answers = [500]
    found = start(receiver.url)
    train(database, "a")
    wait_for(lambda: figures(found)["stoker_webhook_sent_total"] == 2)

    assert receiver.events == ["queued", "claimed", "failed"]
    assert figures(found)["stoker_webhook_dropped_total"] == 1


def test_a_receiver_that_hangs_holds_up_neither_jobs_nor_other_receivers(
    database: Database, receiver: Receiver, start: Callable[..., Webhooks], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhooks, "ANSWER_S", 0.3)
    hanging = Receiver()
    hanging.answers = [0, 0, 0, 0]
    threading.Thread(target=hanging.serve_forever, daemon=True).start()
    try:
        found = start(hanging.url, receiver.url)
        train(database, "a")
        wait_for(lambda: len(receiver.got) == 3)
        wait_for(found.troubles)
        assert "webhook 1 127.0.0.1" in found.troubles()[0]
        assert "a-secret-path" not in found.troubles()[0]
        sent = {name: values for name, _, values in found.figures()}
        assert sent["stoker_webhook_oldest_seconds"]["1 127.0.0.1"] > 0
        wait_for(lambda: len({*hanging.ids()}) == 3)
        wait_for(lambda: not found.troubles())
    finally:
        hanging.over.set()
        hanging.shutdown()
        hanging.server_close()


def test_a_restart_sends_what_was_not_taken_and_nothing_else(
    database: Database, receiver: Receiver, start: Callable[..., Webhooks]
) -> None:
    first = start(receiver.url)
    train(database, "a")
    wait_for(lambda: figures(first)["stoker_webhook_sent_total"] == 3)
    receiver.answers = [500] * 1000
    train(database, "b")
    wait_for(lambda: len(receiver.got) > 4)
    first.stop()
    time.sleep(0.3)  # a delivery that has begun
    train(database, "c")
    receiver.answers, before = [], len(receiver.got)

    second = start(receiver.url)
    wait_for(lambda: figures(second)["stoker_webhook_sent_total"] == 6)

    assert receiver.events[before:] == ["queued", "claimed", "failed"] * 2
    assert receiver.ids()[before] == receiver.ids()[3]


def test_a_webhook_that_fails_is_seen_at_the_machine_and_in_the_metrics_and_degrades_nothing(
    tmp_path: Path, receiver: Receiver
) -> None:
    receiver.answers = [500] * 1000
    with serving(tmp_path / "state") as running:
        hooks = Webhooks(running.services.database, [receiver.url], None)
        object.__setattr__(running.services, "webhooks", hooks)
        hooks.start()
        running.services.jobs.create({}, name="a", epochs=1)
        said = lambda: running.client.get(running.api("/machine")).json()["stale"]  # noqa: E731
        wait_for(said)
        assert "webhook 1 127.0.0.1" in " ".join(said())
        assert running.client.get(running.api("/ready")).status_code == 200
        shown = running.client.get(f"{running.address}/metrics").text
        receiver.answers = []
        wait_for(lambda: not said())
        hooks.stop()

    assert 'stoker_webhook_sent_total{webhook="1 127.0.0.1"} 0' in shown
    assert "a-secret-path" not in shown


@pytest.mark.parametrize(
    "url",
    [
        "ftp://h/x",
        "https:///x",
        "h/x",
        "https://u:p@h/x",
        "https://h:0x/",
        "https://h/#a",
        "https://h/ x",
        "https://[::1/x",
        "https://h/ü",
        "https://hütte/x",
    ],
)
def test_a_url_that_cannot_be_posted_to_is_refused_without_showing_it(url: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_webhook(url)

    assert url not in str(refused.value)


def test_a_quote_in_the_name_of_a_host_ends_no_label_of_the_metrics(embedded: Database) -> None:
    found = Webhooks(embedded, ['https://a"b/x'], None)
    name, kind, values = next(found.figures())

    assert [*counts(name, kind, "webhook", values)][1] == name + r'{webhook="1 a\"b"} 0'


def test_a_secret_without_webhooks_or_that_others_may_read_is_refused(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("x" * 40)
    secret.chmod(0o600)
    assert read_secret(secret, "").get_secret_value() == "x" * 40
    settings = ServeSettings(state_dir=tmp_path / "state", webhook_secret_file=secret)
    with pytest.raises(ConfigError, match="without --webhook"):
        serve(settings, {}, print)
    secret.chmod(0o644)
    settings = ServeSettings(
        state_dir=tmp_path / "state", webhooks=("http://h/",), webhook_secret_file=secret
    )
    with pytest.raises(ConfigError, match="may be read by others"):
        serve(settings, {}, print)


def test_a_killed_service_posts_the_rest_after_its_next_start(tmp_path: Path, receiver: Receiver) -> None:
    """The kill comes while a delivery waits for its answer: it is sent again, with the same id."""
    words = ("--workers", "0", "--webhook", receiver.url)
    state = tmp_path / "state"

    def client(started: dict[str, Any]) -> Client:
        return Client(started["address"], (state / "token").read_text().strip())

    with service(state, *words) as (process, started):
        client(started).generate({"kind": "radio", "name": "one", "rows": 5})
        wait_for(lambda: len(receiver.got) == 1)
        receiver.answers = [0]
        job = client(started).generate({"kind": "radio", "name": "two", "rows": 6})["job"]["id"]
        client(started).act(job, "cancel")
        wait_for(lambda: len(receiver.got) == 2)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)
    with service(state, *words) as (_, _started):
        wait_for(lambda: len(receiver.got) == 4)

    assert receiver.events == ["queued", "queued", "queued", "cancelled"]
    assert receiver.ids()[1] == receiver.ids()[2]
    assert {body["job"]["id"] for body, _, _ in receiver.got[1:]} == {job}
