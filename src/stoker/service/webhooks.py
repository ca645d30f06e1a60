"""Webhooks: each change of a job's state is posted to the URLs that the operator named.

A URL has a thread and a position in the outbox, which moves once the receiver has answered with success. So a
restart loses no change, and one that was cut off between the two sends it again, with the same delivery id.
A receiver that is down or hangs delays only itself.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from traceback import format_exc
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from pydantic import SecretStr

from stoker.errors import ConfigError, DegradedError, NotFoundError, ResourceError
from stoker.runtime.http import HttpClient, HttpFailure, retry_after_s
from stoker.runtime.threads import Pool, RetryPolicy
from stoker.service.database import KINDS, Database, Event, Outbox, State
from stoker.service.jobs import Jobs
from stoker.service.models import utc

if TYPE_CHECKING:
    from stoker.schema import Json

STATES: Mapping[str, str] = {
    **{kind: kind for kind in KINDS & {*State, "deleted"}},
    "claimed": State.RUNNING,
    "resumed": State.QUEUED,
}
"""Kinds of events that change the state of a job, and the state after each."""
SHOWN = ("kind", "epoch", "epochs", "progress", "train_loss", "val_loss", "best_val_loss", "stall", "error")
"""Further fields of a job that are sent."""
POLL_S = 1.0
ANSWER_S = 10.0
"""Timeout of a delivery."""
ANSWER_BYTES = 64 << 10
PAUSES = RetryPolicy(first_s=1.0, longest_s=60.0, jitter=0.2)
"""Pauses after failures in a row."""
REFUSALS = 5
"""Answers of 4xx to one delivery after which it is dropped: the receiver will not take it later either."""
KEEP_S = 86_400.0
"""Age of a change from which on one that failed is dropped."""
TROUBLE_FAILURES = 3
"""Failures in a row from which on the page of the machine says so."""
_LATER = frozenset({408, 425, 429})
"""Statuses of 4xx that do not refuse the delivery for good."""
log = logging.getLogger("stoker")


def check_webhook(url: str) -> str:
    """Return a valid URL of a receiver.

    Raises:
        ConfigError: It is not an http or https URL of a host in ASCII, or has a user name or a fragment.
    """
    host = None
    try:
        parts = urlsplit(url)
        host = parts.hostname
        is_valid = bool(parts.scheme in ("http", "https") and host and (parts.port or 1) > 0)
        is_valid = is_valid and not parts.fragment and parts.username is None
    except ValueError:  # a port that is not a number, or half an IPv6 address
        is_valid = False
    if not is_valid or not url.isascii() or not url.isprintable() or " " in url:
        raise ConfigError(
            f"--webhook names {host or 'no host'} in a URL that cannot be used",
            hint="Expected https://HOST/PATH in ASCII without user name and fragment; "
            "--webhook-secret-file lets the receiver check the sender",
        )
    return url


class Webhook:
    """Sends the changes of all jobs to one URL, in their order.

    Args:
        url: Of the receiver; its path may be secret, and is neither logged nor shown.
        number: Place on the command line, from 1.
        database: With the jobs and events.
        secret: Signs each body; None: bodies are not signed.
    """

    def __init__(self, url: str, number: int, database: Database, secret: SecretStr | None) -> None:
        self._url, self._secret = url, secret
        self.name = f"{number} {urlsplit(url).hostname}"
        self._cursor = f"hook {hashlib.sha256(url.encode()).hexdigest()[:15]}"
        self._outbox, self._jobs = Outbox(database), Jobs(database)
        self._client = HttpClient(timeout_s=ANSWER_S, total_s=ANSWER_S, limit_bytes=ANSWER_BYTES)
        self.sent = self.failures = self.dropped = 0
        self.oldest: float | None = None
        """Unix time of the oldest change that was not delivered."""
        self.why: str | None = None
        """Why deliveries fail now."""
        self._place = self._outbox.begin_cursor(self._cursor)

    def run(self, stopping: threading.Event) -> None:
        """Send what happens until `stopping` is set."""
        while not stopping.wait(POLL_S):
            try:
                self.send_new(stopping)
            except (DegradedError, ResourceError) as error:
                log.warning("webhook %s waits: %s", self.name, str(error).replace(self._url, self.name))
            except Exception:  # noqa: BLE001 - the edge of the thread: without it nothing is sent
                log.error("webhook %s: %s", self.name, format_exc().replace(self._url, self.name))
                stopping.wait(PAUSES.longest_s)

    def send_new(self, stopping: threading.Event) -> None:
        """Send all changes that were not sent yet.

        Raises:
            DegradedError: The database does not answer.
            ResourceError: No thread can be started.
        """
        newest = self._outbox.newest()  # first: a change that comes later has a higher number
        while events := self._outbox.read(self._place, kinds=STATES, limit=100):
            for event in events:
                self.oldest = event.at
                if not self._deliver(event, stopping):
                    return
                self._place = event.number
                self._outbox.move_cursor(self._cursor, event.number)
        self.oldest = self.why = None  # nothing waits, also where the last one was dropped
        self._place = max(self._place, newest)  # other events need not be searched again

    def _deliver(self, event: Event, stopping: threading.Event) -> bool:
        """Return True once the receiver has the change or it is dropped; False: the service ends."""
        failures = refusals = 0
        while (found := self._attempt(event)) is not None:
            why, status, asked_s = found
            failures += 1
            self.failures += 1
            refusals += 400 <= status < 500 and status not in _LATER
            if failures >= TROUBLE_FAILURES:
                self.why = f"webhook {self.name} does not take deliveries: {why}"
            if refusals >= REFUSALS or time.time() - event.at > KEEP_S:
                self.dropped += 1
                log.error("webhook %s: %s of job %s is dropped: %s", self.name, event.kind, event.job, why)
                return True
            if failures == 1:
                log.warning("webhook %s: %s of job %s failed: %s", self.name, event.kind, event.job, why)
            if stopping.wait(max(asked_s, PAUSES.pause_s(failures))):
                return False
        self.sent += 1
        self.why = None
        return True

    def _attempt(self, event: Event) -> tuple[str, int, float] | None:
        """Return why a delivery failed, the status of the answer or 0, and the least pause; None: success."""
        body = json.dumps(self._message(event)).encode()
        # Not the number alone: a database that was restored from a backup gives numbers a second time.
        facts = f"{event.number} {event.job} {event.kind} {event.at!r}"
        headers = {
            "Content-Type": "application/json",
            "Stoker-Event": event.kind,
            "Stoker-Delivery": str(uuid.uuid5(uuid.NAMESPACE_OID, facts)),
        }
        if self._secret is not None:
            headers["Stoker-Signature"] = "sha256=" + sign(body, self._secret)
        try:
            answer = self._client.ask("POST", self._url, headers=headers, body=body)
        except HttpFailure as failure:
            return f"{failure.kind.value}: {failure.reason}".replace(self._url, self.name), 0, 0.0
        if answer.is_success:
            return None
        return f"it answered {answer.shown_status}", answer.status, retry_after_s(answer.headers)

    def _message(self, event: Event) -> dict[str, Json]:
        job: dict[str, Json] = {"id": event.job, "name": None, "state": STATES[event.kind]}
        try:
            found = self._jobs.get(event.job)
        except NotFoundError:  # deleted since
            job |= dict.fromkeys(SHOWN)
        else:
            job |= {"name": found.name, **{name: getattr(found, name) for name in SHOWN}}
        return {"event": event.kind, "job": job, "at": utc(event.at)}


def sign(body: bytes, secret: SecretStr) -> str:
    """Return the HMAC-SHA256 of a body in hexadecimal.

    >>> sign(b"{}", SecretStr("secret"))[:16]
    '77325902caca812d'
    """
    return hmac.digest(secret.get_secret_value().encode(), body, "sha256").hex()


class Webhooks:
    """The webhooks of a service.

    Args:
        database: With the jobs and events.
        urls: Of the receivers.
        secret: Signs each body.
    """

    def __init__(self, database: Database, urls: Sequence[str], secret: SecretStr | None) -> None:
        self._stopping = threading.Event()
        self._hooks = [
            Webhook(url, number, database, secret) for number, url in enumerate(dict.fromkeys(urls), 1)
        ]

    def start(self) -> None:
        """Start a thread for each."""
        for hook in self._hooks:
            Pool(1, "stoker-webhook").submit(lambda hook=hook: hook.run(self._stopping))

    def stop(self) -> None:
        """Let the threads end; a delivery that has begun is not waited for."""
        self._stopping.set()

    def troubles(self) -> list[str]:
        """Return why deliveries fail now, a sentence for each receiver that takes none."""
        return [hook.why for hook in self._hooks if hook.why is not None]

    def figures(self) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """Yield name, type and values by webhook of each metric."""
        now = time.time()
        for name in ("sent", "failures", "dropped"):
            values = {hook.name: getattr(hook, name) for hook in self._hooks}
            yield f"stoker_webhook_{name}_total", "counter", values
        waits = {hook.name: 0.0 if hook.oldest is None else now - hook.oldest for hook in self._hooks}
        yield "stoker_webhook_oldest_seconds", "gauge", {name: round(s, 3) for name, s in waits.items()}
