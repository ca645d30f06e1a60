"""A thin client of the service, for the command line and for scripts."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict, cast
from urllib.parse import quote, urlencode, urlsplit

from stoker.errors import (
    ConfigError,
    ConflictError,
    DegradedError,
    NotFoundError,
    ServiceError,
    StalledError,
    StokerError,
)
from stoker.runtime.files import replace_atomically
from stoker.runtime.http import ERROR_BYTES, FailureKind, HttpClient, HttpFailure, HttpStream, json_object
from stoker.units import format_few

API = "/api/v1/training"
TIMEOUT_S = 35.0
"""A little more than the longest time to the start of an answer."""
POLL_S = 0.5
"""Seconds between two looks at an operation."""
SILENCE_S = 60.0
"""A stream without data for this long is dead: the service sends a heartbeat every 15 s."""
PIECE_BYTES = 1 << 20
_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
PAGE_JOBS = 500
MAX_SEARCH = 200
METRICS_CSV = "metrics.csv"
"""What was measured, as a file."""
IS_IT = ". Is it a Stoker service?"
Act = Literal["cancel", "pause", "resume"]


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """One event of a stream."""

    number: int
    kind: str
    data: dict[str, Any]


class JobRow(TypedDict):
    """One job, as the service answers it; docs/reference/http-api.md has all fields."""

    id: str
    job_name: str
    job_type: Literal["training", "generation"]
    status: str
    """`pending`, `queued`, `running`, `paused`, `completed`, `failed` and others."""
    config: dict[str, Any]
    dataset_ids: list[str]
    tags: list[str]
    current_epoch: int
    total_epochs: int
    progress_percent: float
    progress_message: str
    train_loss: float | None
    val_loss: float | None
    best_val_loss: float | None
    best_epoch: int | None
    stall: float | None
    tier: str | None
    error_message: str | None
    exit_code: int | None


class JobPage(TypedDict):
    """A page of jobs, the newest first."""

    jobs: list[JobRow]
    total: int
    limit: int
    offset: int


class JobDetail(TypedDict):
    """A job with its last epochs."""

    job: JobRow
    recent_metrics: list[dict[str, Any]]
    events_after: int
    """Follow events from this number on, and none is missed."""


class DatasetRow(TypedDict):
    """One data set that jobs may name."""

    id: str
    name: str
    kind: Literal["radio", "hdf5", "images"]
    origin: Literal["registered", "generated"]
    spec: dict[str, Any]
    facts: dict[str, Any]
    health: str
    report: list[dict[str, Any]]


class DatasetPage(TypedDict):
    """A page of data sets."""

    datasets: list[DatasetRow]
    total: int
    limit: int
    offset: int


class Client:
    """Speaks to one running service; needs nothing but Python.

    Args:
        address: `http://HOST:PORT`, as `stoker serve` prints it.
        token: The text of the file `token` in its state folder.
        timeout_s: Seconds to wait for an answer.

    Raises:
        ConfigError: The address is not valid, or the token has characters that no header takes.

    Examples:
        >>> client = Client("http://127.0.0.1:8765", "secret")
        >>> client.address
        'http://127.0.0.1:8765'

        With a service that runs there:

        ```python
        job = client.submit({"job_name": "night", "config": {"dataset_ids": ["radio"], "epochs": 50}})
        for event in client.follow(f"/jobs/{job['id']}/events", 0):
            print(event.kind, event.data)
        ```
    """

    def __init__(self, address: str, token: str, *, timeout_s: float = TIMEOUT_S) -> None:
        parts = urlsplit(address)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username:
            raise ConfigError(f"{address} is not the address of a service", hint="Expected http://HOST:PORT")
        if not token or not token.isascii() or not token.isprintable():
            raise ConfigError(
                "the token is empty or has odd characters", hint="Take it from the file DIR/token"
            )
        self.address = f"{parts.scheme}://{parts.netloc}"
        self._token = token
        self._timeout_s = timeout_s
        self._http = HttpClient(timeout_s=timeout_s, uses_proxies=False)  # one would be sent the token

    def submit(self, body: Mapping[str, Any], *, key: str | None = None) -> JobRow:
        """Create a job; with a key it may be sent again without creating two."""
        headers = {"Idempotency-Key": key} if key else {}
        return cast("JobRow", self._ask("POST", "/jobs", body=body, headers=headers))

    def jobs(  # noqa: PLR0913 - the parts of a search, by name
        self,
        *,
        search: str = "",
        status: str | Sequence[str] | None = None,
        kind: str | None = None,
        dataset: str | None = None,
        tag: str | Sequence[str] = (),
        sort: str | None = None,
        limit: int = 50,
        offset: int = 0,
    ) -> JobPage:
        """Return a page of jobs, the newest first.

        Args:
            search: Text in the name, a tag, a data set or the reason of a failure, or the start of the id.
            status: Only jobs of this state, or of one of these.
            kind: Only `training` or only `generation`.
            dataset: Only jobs with this data set, by id or name.
            tag: Only jobs with this tag, or with all of these.
            sort: `created`, `name`, `state`, `loss` or `duration`; with `-` before it the largest first.
            limit: At most so many.
            offset: How many to skip.
        """
        parts = {"q": search, "status": status, "kind": kind, "dataset": dataset, "tag": tag, "sort": sort}
        query = {name: value for name, value in parts.items() if value} | {"limit": limit, "offset": offset}
        return cast("JobPage", self._ask("GET", f"/jobs?{urlencode(query, doseq=True)}"))

    def job(self, id: str) -> JobDetail:
        """Return one job."""
        return cast("JobDetail", self._ask("GET", _job(id)))

    def act(self, id: str, what: Act) -> JobRow:
        """Cancel, pause or resume a job; return its new state."""
        return cast("JobRow", self._ask("POST", f"{_job(id)}/{what}"))

    def change(
        self,
        id: str,
        *,
        name: str | None = None,
        tags: Sequence[str] | None = None,
        add_tags: Sequence[str] = (),
        remove_tags: Sequence[str] = (),
    ) -> JobRow:
        """Change the name of a job or its tags; None: as they are."""
        body = {"job_name": name, "tags": tags, "add_tags": add_tags, "remove_tags": remove_tags}
        return cast("JobRow", self._ask("PATCH", _job(id), body=body))

    def more(self, id: str, epochs: int, *, key: str | None = None) -> JobRow:
        """Let a completed job train for more epochs; with a key it may be sent again and adds nothing."""
        headers = {"Idempotency-Key": key} if key else {}
        body = {"additional_epochs": epochs}
        return cast("JobRow", self._ask("POST", f"{_job(id)}/continue", body=body, headers=headers))

    def delete(self, id: str) -> None:
        """Delete a job that has ended."""
        self._ask("DELETE", _job(id))

    def metrics(self, id: str, *, limit: int = 100, after: int = 0) -> list[dict[str, Any]]:
        """Return what was measured, one row per epoch."""
        found = self._ask("GET", f"{_job(id)}/metrics?limit={limit}&after={after}")
        return found["metrics"]

    def log(self, id: str, *, tail: int = 200) -> dict[str, Any]:
        """Return the end of a job's log: `lines`, `offset`."""
        return self._ask("GET", f"{_job(id)}/logs?tail={tail}")

    def timeline(self, id: str | None = None) -> dict[str, Any]:
        """Return where a job's time went: `phases`, `intervals`, `stall`, `summary`.

        Without a job, where the last hour of all workers went: `jobs`, `columns`, `stall`, `summary`.
        """
        return self._ask("GET", "/machine/timeline" if id is None else f"{_job(id)}/timeline")

    def files(self, id: str) -> list[dict[str, Any]]:
        """Return the files that a job has left: `name`, `bytes`, `changed_at`."""
        return self._ask("GET", f"{_job(id)}/files")["files"]

    def download(self, id: str, name: str, path: Path) -> int:
        """Write a file of a job to `path`, which appears complete or not at all; return its bytes.

        Args:
            id: The job.
            name: As `files` names it; `metrics.csv`: what was measured, a line for each epoch.
            path: Where to write it; replaced if it exists.

        Raises:
            NotFoundError: The job has no such file.
            StalledError: The transfer broke off.
            ResourceError: The disk is full.
        """
        address = f"{_job(id)}/metrics.csv" if name == METRICS_CSV else f"{_job(id)}/files/{quote(name)}"
        size = 0
        with self._stream(address, {"Accept": "*/*"}) as stream, replace_atomically(path) as temporary:
            try:
                with temporary.open("wb") as file:
                    while piece := stream.read(PIECE_BYTES):
                        size += file.write(piece)
            except HttpFailure as error:
                raise StalledError(
                    f"{name} broke off after {size} bytes: {error}", hint="Try again"
                ) from None
            if stream.missing_bytes:
                raise StalledError(f"{name} ended {stream.missing_bytes} bytes early", hint="Try again")
        return size

    def plan(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a job would do, without encoding: an operation, whose `result` is the plan.

        Args:
            body: As for `submit`.
        """
        return self._ask("POST", "/plan", body=body)

    def datasets(self, *, limit: int = 50, offset: int = 0) -> DatasetPage:
        """Return a page of the data sets that jobs may name."""
        query = urlencode({"limit": limit, "offset": offset})
        return cast("DatasetPage", self._ask("GET", f"/datasets?{query}"))

    def dataset(self, id: str, *, check: Literal["some", "all"] | None = None) -> DatasetRow:
        """Return one data set.

        Args:
            id: Its id or name.
            check: Check it first, by samples spread over it or by every one, which may take long.
        Raises:
            ServiceError: The check of all samples failed.
        """
        path = f"/datasets/{quote(id, safe='')}"
        if check is None:
            return cast("DatasetRow", self._ask("GET", path))
        found = self._ask("POST", f"{path}/validate{'?all=true' * (check == 'all')}")
        while found.get("state") == "running":
            time.sleep(POLL_S)
            found = self._ask("GET", f"/operations/{found['id']}")
        if found.get("state") == "failed":
            raise ServiceError(f"the check of {id} failed: {found['error']}")
        return cast("DatasetRow", found.get("result") or found)

    def register(self, body: Mapping[str, Any]) -> DatasetRow:
        """Register data that exists, as `{"kind": "hdf5", "name": "waves", "path": "waves.h5"}`."""
        return cast("DatasetRow", self._ask("POST", "/datasets", body=body))

    def forget(self, id: str) -> None:
        """Remove a data set from the list; its files and caches stay."""
        self._ask("DELETE", f"/datasets/{quote(id, safe='')}")

    def audit(self, *, limit: int = 100) -> list[dict[str, Any]]:
        """Return who has changed what, the newest first."""
        return self._ask("GET", f"/audit?limit={limit}")["rows"]

    def generate(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Generate a data set; return `dataset` and the `job` that makes it."""
        return self._ask("POST", "/datasets/generate", body=body)

    def login_path(self) -> str:
        """Return the path of a page that opens a session in one browser, once."""
        return self._ask("POST", "/login-codes")["path"]

    def follow(self, path: str, after: int) -> Iterator[StreamEvent]:
        """Yield the events of a stream (`/events`, `/jobs/ID/events`, `/jobs/ID/logs/stream`) until it ends.

        Raises:
            StalledError: The service sends nothing; follow again from the last number.
        """
        headers = {"Accept": "text/event-stream", "Last-Event-ID": str(after)}
        with self._stream(path, headers) as stream:
            fields, number = dict[str, str](), after
            try:
                for raw in stream.lines():
                    line = raw.decode().rstrip("\r\n")
                    if line:
                        name, _, value = line.partition(":")
                        fields[name] = value.removeprefix(" ")
                    elif "data" in fields:
                        data = json.loads(fields["data"])
                        number = int(fields.get("id", number))
                        yield StreamEvent(number, fields.get("event", ""), data)
                        fields = {}
            except HttpFailure as error:
                raise StalledError(
                    f"{self.address}{API}{path} broke off: {error}", hint="Follow it again"
                ) from None

    @contextmanager
    def _stream(self, path: str, headers: Mapping[str, str]) -> Generator[HttpStream]:
        try:
            stream = self._http.open(
                "GET", self.address + API + path, headers=self._headers(headers), timeout_s=SILENCE_S
            )
        except HttpFailure as error:
            raise self._unanswered(error, SILENCE_S) from None
        try:
            if not 200 <= stream.status < 300:
                said = b""
                with suppress(HttpFailure):  # the status says enough
                    said = stream.read(ERROR_BYTES)
                raise self._refused(stream.status, said, f"GET {path}")
            yield stream
        finally:
            stream.close()

    def _ask(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        try:
            answer = self._http.ask(
                method, self.address + API + path, headers=self._headers(headers or {}), body=body
            )
        except HttpFailure as error:
            raise self._unanswered(error, self._timeout_s) from None
        if not answer.is_success:
            raise self._refused(answer.status, answer.body, f"{method} {path.partition('?')[0]}")
        return json_object(answer.body, f"{method} {path}", IS_IT) if answer.body else {}

    def _headers(self, headers: Mapping[str, str]) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._token}", "Accept": "application/json", **headers}

    def _unanswered(self, failure: HttpFailure, timeout_s: float) -> StokerError:
        if failure.kind is FailureKind.TIMEOUT:
            return StalledError(f"{self.address} did not answer within {timeout_s:g} s", hint="Try again")
        if failure.kind is FailureKind.CUT:
            return StalledError(f"the answer of {self.address} broke off: {failure}", hint="Ask again")
        return ServiceError(
            f"{self.address} does not answer: {failure.reason}",
            hint="Start it with `stoker serve`, or give --server",
        )

    def _refused(self, status: int, text: bytes, what: str) -> StokerError:
        try:
            answer = json_object(text, what)
            said, hint = str(answer.get("error") or "no reason given"), str(answer.get("hint") or "")
            fact = said.removesuffix(f". {hint}") if hint else said
        except ServiceError:
            said, hint = text[:200].decode("utf-8", "replace"), ""
            fact = said
        token = ServiceError(
            f"{self.address} does not take the token ({said})",
            hint="Give that of its state folder: --state-dir, --token-file or $STOKER_TOKEN",
            status=status,
        )
        known: dict[int, StokerError] = {
            401: token,
            404: NotFoundError(fact, hint=hint),
            409: ConflictError(fact, hint=hint),
            422: ConfigError(fact, hint=hint),
            503: DegradedError(fact, hint=hint),
            504: StalledError(fact, hint=hint),
        }
        return known.get(status) or ServiceError(f"{what}: {status}: {fact}", hint=hint, status=status)


def find_job(client: Client, text: str) -> str:
    """Return the id of the one job whose id begins with `text`, or whose name it is.

    Raises:
        NotFoundError: No job has it.
        ConfigError: Several jobs have it.
    """
    if _ID.fullmatch(text):
        return text
    found: list[JobRow] = []
    offset, total = 0, 1
    while text and offset < total:
        page = client.jobs(search=text[:MAX_SEARCH], limit=PAGE_JOBS, offset=offset)
        found += [one for one in page["jobs"] if one["id"].startswith(text) or one["job_name"] == text]
        offset, total = offset + PAGE_JOBS, page["total"]
    rows = {one["id"]: one for one in found}  # jobs made meanwhile move others to the next page
    if not rows:
        raise NotFoundError(f"job {text!r} does not exist", hint="`stoker job list` shows all jobs")
    if len(rows) > 1:
        shown = (f"{one['id']} ({one['job_name']}, {one['status']})" for one in rows.values())
        raise ConfigError(
            f"{text!r} is the start or the name of {len(rows)} jobs: {format_few(shown, 5)}",
            hint="Give more characters of the id",
        )
    return next(iter(rows))


def _job(id: str) -> str:
    """Return the path of a job.

    Raises:
        NotFoundError: No job can have that id.
    """
    if not id or not id.isascii() or not id.isprintable() or "/" in id:
        raise NotFoundError(f"job {id!r} does not exist", hint="`stoker job list` shows all jobs")
    return f"/jobs/{quote(id, safe='')}"


def read_address(state_dir: Path) -> str:
    """Return the address of the service of a state folder.

    Raises:
        ConfigError: No service was started there.
    """
    if not (state_dir / "address").exists():
        raise ConfigError(
            f"no service runs here: {state_dir} holds no address of one",
            hint="Start it with `stoker serve`, or give --server and --token-file",
        )
    return _first_line(
        state_dir / "address", "Start it with `stoker serve`, or give --server and --token-file"
    )


def read_token(path: Path) -> str:
    """Return the token in a file.

    Raises:
        ConfigError: It cannot be read.
    """
    return _first_line(path, "It is in the state folder of the service; give --state-dir or --token-file")


def _first_line(path: Path, hint: str) -> str:
    try:
        return path.read_text().strip().splitlines()[0]
    except (OSError, ValueError, IndexError) as error:
        why = getattr(error, "strerror", None) or "it holds no text"
        raise ConfigError(f"{path} cannot be read: {why}", hint=hint) from None
