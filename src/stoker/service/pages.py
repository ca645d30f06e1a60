"""The pages: logging in and out, and the templates that every page is made of.

A template knows `version`. What it shows is escaped; scripts and styles come from `static/`, since the policy
sent with each answer allows no others.
"""

from __future__ import annotations

import base64
import hashlib
import re
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict
from urllib.parse import parse_qs

from fastapi import APIRouter, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.staticfiles import StaticFiles

import stoker
from stoker.errors import NotFoundError, ResourceError, SourceError, StalledError, StokerError
from stoker.service import stream
from stoker.service.api import DatasetId, Id, Name, Print, inspect_cache, list_caches, why
from stoker.service.database import ENDED, HELD, WAITING, Event, State
from stoker.service.figures import look_at_machine
from stoker.service.jobs import Job
from stoker.service.models import status_of
from stoker.service.security import SESSION_S, Scope
from stoker.service.services import Here, Services, services_of
from stoker.service.training_config import WITHOUT_EFFECT, TrainingConfig
from stoker.units import format_bytes, format_count, format_percent, format_seconds

# ----------------------------------------------------------------------------------------------------------
# What the pages show of jobs, caches and the machine, as plain values for templates.


MILESTONES = ("queued", "resumed", "claimed", "started")
"""Kinds of events that the phases of a start-up lie between."""
WIDTH, HEIGHT = 96, 24
"""Of a spark line, in its own units."""
ACTIONS: tuple[tuple[str, str, frozenset[State]], ...] = (
    ("pause", "Pause", WAITING | {State.RUNNING}),
    ("resume", "Resume", frozenset({State.PAUSED, State.CANCELLED, State.FAILED})),
    ("cancel", "Cancel", WAITING | {State.RUNNING, State.PAUSING, State.PAUSED}),
)
CHARTS: tuple[tuple[str, str, tuple[tuple[str, str, float], ...]], ...] = (
    ("Loss", "", (("train_loss", "training", 1), ("val_loss", "validation", 1))),
    ("Validation error", "m", (("p50_m", "median", 1), ("p95_m", "95 %", 1), ("rmse_m", "rmse", 1))),
    ("Validation error", "", (("val_nrmse", "NRMSE", 1), ("persistence_nrmse", "persistence", 1))),
    ("Validation accuracy", "%", (("accuracy", "right", 100),)),
    ("Learning rate", "", (("learning_rate", "rate", 1), ("lr", "rate", 1))),
    ("Stall and GPU", "%", (("stall", "stall", 100), ("gpu_utilization_pct", "GPU busy", 1))),
)
"""Title, unit, and of each line: its name in a row of metrics, its label, and a factor."""
TIERS = ("device", "host", "disk", "encode")
FIRST_FIELDS = ("dataset_ids", "epochs", "batch_size", "learning_rate", "preload_to_gpu")
"""What the form shows before one asks for more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BarPart:
    """One part of a bar that is cut into parts; places and widths are in thousandths of the bar."""

    label: str
    text: str
    kind: str
    """What it is coloured by."""
    x: float
    width: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FormField:
    """One setting of a new job."""

    name: str
    about: str
    kind: str
    """`number`, `integer`, `boolean`, `choice`, `text`, `list` or `object`."""
    value: Any
    choices: tuple[str, ...] = ()
    lowest: float | None = None
    highest: float | None = None
    needed: bool = False


def actions(job: Job) -> list[tuple[str, str]]:
    """What may be asked of it now: the end of the address and the words on the button."""
    return [(name, words) for name, words, states in ACTIONS if job.state in states]


def tone(state: State) -> str:
    """How a state is coloured: `busy`, `wait`, `good`, `bad` or `off`."""
    if state in HELD:
        return "busy"
    tones = {State.COMPLETED: "good", State.FAILED: "bad", State.CANCELLED: "off"}
    return tones.get(state, "wait")


def is_live(job: Job) -> bool:
    """Whether it may change without anybody asking."""
    return job.state not in ENDED and job.state is not State.PAUSED


def bar(values: Sequence[tuple[str, float, str, str]]) -> list[BarPart]:
    """A bar of values, each a label, how much, the same in words, and a kind.

    >>> [(part.label, part.x, part.width) for part in bar([("a", 1, "1 s", "k"), ("b", 3, "3 s", "k")])]
    [('a', 0.0, 250.0), ('b', 250.0, 750.0)]
    """
    total = sum(value for _, value, _, _ in values)
    parts: list[BarPart] = []
    x = 0.0
    for label, value, text, kind in values:
        width = 1000 * value / total if total else 0.0
        parts.append(BarPart(label=label, text=text, kind=kind, x=round(x, 2), width=round(width, 2)))
        x += width
    return parts


def phases(events: Sequence[Event], first: Event | None) -> list[BarPart]:
    """The start-up of the last attempt: from milestones of a job, and the event after its last `started`."""
    at = {event.kind: event.at for event in events}
    asked = max(at.get("queued", 0.0), at.get("resumed", 0.0))
    marks = [("waited for a worker", asked), ("opened data and caches", at.get("claimed", 0.0))]
    marks += [("first batch", at.get("started", 0.0)), ("", first.at if first else 0.0)]
    found: list[tuple[str, float, str, str]] = []
    for i, ((label, begin), (_, end)) in enumerate(pairwise(marks)):
        if 0 < begin <= end:
            found.append((label, end - begin, format_seconds(end - begin), f"phase{i}"))
    return bar(found)


def where_records_are(started: Event | None) -> list[BarPart]:
    """Records by tier, as a job told when it began to train."""
    tiers = started.data.get("tiers") if started else None
    if not isinstance(tiers, Mapping):
        return []
    held = [(tier, float(str(tiers.get(tier) or 0))) for tier in TIERS]
    return bar([(tier, count, format_count(count, "record"), tier) for tier, count in held if count])


def spark(rows: Sequence[Mapping[str, Any]]) -> str:
    """Points of a line through the losses of a job's epochs, newest last; empty for less than two.

    >>> spark([{"train_loss": 2.0}, {"train_loss": 1.0}])
    '0.0,2.0 96.0,22.0'
    """
    values = [row.get("val_loss", row.get("train_loss")) for row in rows]
    known = [float(value) for value in values if isinstance(value, int | float)]
    if len(known) < 2:
        return ""
    low, high = min(known), max(known)
    span, step = (high - low) or 1.0, WIDTH / (len(known) - 1)
    room = HEIGHT - 4
    return " ".join(f"{i * step:.1f},{2 + room * (high - one) / span:.1f}" for i, one in enumerate(known))


def charts(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What the script of the page draws: charts that have at least one of their lines in `rows`."""
    there = {name for row in rows for name in row}
    drawn: list[dict[str, Any]] = []
    for title, unit, lines in CHARTS:
        fitting = [line for line in lines if line[0] in there]
        if fitting:
            series = [{"name": name, "label": label, "factor": factor} for name, label, factor in fitting]
            drawn.append({"title": title, "unit": unit, "series": series})
    return drawn


def figures(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What was found in a data set, in words and numbers; of fields, each with its shape and dtype.

    >>> figures({"samples": 4030, "fields": {"u": {"shape": [101, 256], "dtype": "float32"}}})
    [('samples', '4,030'), ('field u', '101 × 256, float32')]
    """
    rest = {name: value for name, value in facts.items() if name != "fields"}
    shapes = {
        f"field {name}": f"{' × '.join(map(str, field['shape'])) or 'a number'}, {field['dtype']}"
        for name, field in facts.get("fields", {}).items()
    }
    return [(name.replace("_", " "), _figure(value)) for name, value in rest.items()] + [*shapes.items()]


def _figure(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return format_count(value) if isinstance(value, int) else number(value)


def form_fields() -> tuple[list[FormField], list[FormField]]:
    """The settings of a new job that have an effect: those shown at once, and the others."""
    schema = TrainingConfig.model_json_schema()
    found = {
        name: _form_field(name, spec, name in schema.get("required", ()))
        for name, spec in schema["properties"].items()
        if name not in WITHOUT_EFFECT
    }
    first = [found.pop(name) for name in FIRST_FIELDS]
    return first, list(found.values())


def _form_field(name: str, spec: Mapping[str, Any], needed: bool) -> FormField:
    kinds = [one for one in spec.get("anyOf", [spec]) if one.get("type") != "null"]
    chosen = kinds[0]
    kind = str(chosen.get("type", "text"))
    choices = tuple(str(one) for one in chosen.get("enum", ()))
    return FormField(
        name=name,
        about=str(spec.get("description", "")),
        kind="choice" if choices else {"array": "list", "string": "text"}.get(kind, kind),
        value=spec.get("default"),
        choices=choices,
        lowest=chosen.get("minimum", chosen.get("exclusiveMinimum")),
        highest=chosen.get("maximum"),
        needed=needed,
    )


def number(value: float | None) -> str:
    """A measured figure with four significant digits, an en dash where there is none.

    >>> number(0.123456), number(None), number(1234567.0)
    ('0.1235', '–', '1.235e+06')
    """
    return "–" if value is None else f"{value:.4g}"


def ago(seconds: float) -> str:
    """How long ago something was.

    >>> ago(0.2), ago(75), ago(7300), ago(200_000)
    ('now', '75 s ago', '2 h 1 min ago', '2 days ago')
    """
    if seconds < 1:
        return "now"
    if seconds >= 2 * 86400:
        return f"{seconds / 86400:.0f} days ago"
    return f"{format_seconds(round(seconds))} ago"


FILTERS = {
    "ago": ago,
    "bytes": format_bytes,
    "count": format_count,
    "number": number,
    "percent": format_percent,
    "seconds": format_seconds,
    "tone": tone,
}
"""What templates format with."""


FOLDER = Path(__file__).parent
login_router = APIRouter(include_in_schema=False)
_TEMPLATES = Environment(
    loader=FileSystemLoader(FOLDER / "templates"), autoescape=True, undefined=StrictUndefined
)
_TEMPLATES.filters |= FILTERS
_OURS = re.compile(r"/(?![/\\])[^\s\\]*")
"""A path of this service: what a browser would read as another site does not match."""


class _Flags(TypedDict):
    path: str
    httponly: bool
    samesite: Literal["strict"]
    secure: bool


def static_files() -> StaticFiles:
    """What templates refer to under `/static`."""
    return StaticFiles(directory=FOLDER / "static")


def page(request: Request, name: str, status: int = 200, **context: Any) -> HTMLResponse:
    """A page made of a template."""
    text = _TEMPLATES.get_template(name).render(
        version=stoker.__version__,
        path=request.url.path,
        degraded=services_of(request).degraded,
        **context,
    )
    return HTMLResponse(text, status)


def policy() -> str:
    """The Content-Security-Policy of every answer; the log-in page has the one style that is not a file.

    It is the only page that is shown without a session, and files need one.
    """
    style = re.search(r"<style>(.*?)</style>", (FOLDER / "templates/login.html").read_text(), re.DOTALL)
    text = "" if style is None else style[1]
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return (
        f"default-src 'self'; style-src 'self' 'sha256-{digest}'; img-src 'self' data:; object-src 'none'; "
        "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    )


def log_in_first(_scope: Scope, path: str) -> Response:
    """What a browser without a session gets for any page: the form, and from there the page it wanted."""
    return _form(path, status=401)


@login_router.get("/login")
def get_login(request: Request, here: Here, code: str = "", next: str = "/") -> Response:
    """The form; with a code in the address, the session at once and an address without it."""
    if not code:
        return _form(next)
    return _log_in(request, here, code, next)


@login_router.post("/login")
async def post_login(request: Request, here: Here) -> Response:
    """Trade a code, or the token, for a session."""
    try:
        fields = parse_qs((await request.body()).decode("utf-8", "replace"), max_num_fields=10)
    except ValueError:  # more fields than the form has: not sent by the form, so it holds no secret
        fields = {}
    secret, wanted = (fields.get(name, [""])[0] for name in ("secret", "next"))
    return _log_in(request, here, secret.strip(), wanted)


@login_router.post("/logout")
def post_logout(request: Request, here: Here) -> Response:
    """End the session."""
    if request.state.session is not None:
        here.auth.end(request.state.session)
    response = RedirectResponse("/login", 303)
    response.delete_cookie(here.auth.cookie, **_flags(request, here))
    return response


def _log_in(request: Request, here: Services, secret: str, wanted: str) -> Response:
    cookie = here.auth.log_in(secret)
    if cookie is None:
        return _form(wanted, "That is no code of this service, or not any more.", status=401)
    response = RedirectResponse(wanted if _OURS.fullmatch(wanted) else "/", 303)
    response.set_cookie(here.auth.cookie, cookie, max_age=int(SESSION_S), **_flags(request, here))
    return response


def _flags(request: Request, here: Services) -> _Flags:
    """Of the session's cookie: not for scripts nor other sites and, where there is TLS, for that alone."""
    secure = here.secure or request.url.scheme == "https"
    return {"path": "/", "httponly": True, "samesite": "strict", "secure": secure}


def _form(wanted: str, problem: str = "", status: int = 200) -> HTMLResponse:
    text = _TEMPLATES.get_template("login.html").render(wanted=wanted, problem=problem)
    return HTMLResponse(text, status)


# ----------------------------------------------------------------------------------------------------------
# The pages: jobs, one job, a new job, data sets, one of them, caches, one cache, the machine.
#
# A page is made whole on the server. Its script listens to the service's events and asks for those parts of
# it again that have changed (`/parts/...`); without a script a page is right, and stays as it was.


PER_PAGE = 25
LOG_LINES = 200
EPOCHS_SHOWN = 5000
"""Rows of metrics that a page draws: the newest. A job that was continued may have more."""
SPARK_EPOCHS = 40
SAMPLES_SHOWN = 20
USERS = 100
"""Newest jobs that are looked through for those that use a cache or a data set."""


class PageRoute(APIRoute):
    """A route whose errors are pages too."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """See the class."""
        answer = super().get_route_handler()

        async def handler(request: Request) -> Response:
            try:
                return await answer(request)
            except StokerError as error:
                return problem(request, status_of(error), str(error))
            except RequestValidationError:
                return problem(request, 404, "there is nothing at this address. Look at the jobs")

        return handler


router = APIRouter(include_in_schema=False, route_class=PageRoute)
Status = Annotated[State | None, Query()]
PageNumber = Annotated[int, Query(ge=1, le=10**6)]


def problem(request: Request, status: int, text: str) -> Response:
    """What went wrong, as a page; it is loaded again automatically where waiting may help."""
    return page(request, "problem.html", status, title="Problem", text=text, again=status in (503, 504))


@router.get("/")
def show_jobs(request: Request, here: Here, status: Status = None, number: PageNumber = 1) -> Response:
    """All jobs, the newest first."""
    events = here.outbox.newest()
    return page(request, "jobs.html", title="Jobs", events=events, **_jobs(here, status, number))


@router.get("/parts/jobs")
def part_jobs(request: Request, here: Here, status: Status = None, number: PageNumber = 1) -> Response:
    """The table of `show_jobs`."""
    return page(request, "parts/jobs.html", **_jobs(here, status, number))


@router.get("/jobs/new")
def show_form(request: Request, here: Here, dataset: str | None = None) -> Response:
    """The form to submit a job."""
    first, more = form_fields()
    known = here.datasets.list(limit=500)
    chosen = dataset or (known[0].id if known else None)
    return page(
        request, "new.html", title="New job", first=first, more=more, datasets=known, chosen=chosen
    )  # fmt: skip


@router.get("/jobs/{job_id}")
def show_job(request: Request, here: Here, job_id: Id) -> Response:
    """One job."""
    events = here.outbox.newest()  # first: what is read after it may be newer, never older
    context = _job(here, job_id)
    rows = here.jobs.metrics(job_id, limit=EPOCHS_SHOWN, after=max(0, context["job"].epoch - EPOCHS_SHOWN))
    drawn = {"charts": charts(rows), "rows": rows}
    return page(
        request, "job.html", title=context["job"].name, events=events, drawn=drawn, rows=rows,
        log=_log(here, job_id), **context,
    )  # fmt: skip


@router.get("/parts/jobs/{job_id}")
def part_job(request: Request, here: Here, job_id: Id) -> Response:
    """State, buttons and figures of `show_job`."""
    return page(request, "parts/job.html", **_job(here, job_id))


@router.get("/parts/jobs/{job_id}/log")
def part_log(request: Request, here: Here, job_id: Id) -> Response:
    """The end of a job's log."""
    return page(request, "parts/log.html", log=_log(here, here.jobs.get(job_id).id))


@router.get("/datasets")
def show_datasets(request: Request, here: Here, number: PageNumber = 1) -> Response:
    """Data sets that jobs may name, and how to have more."""
    events = here.outbox.newest()
    return page(
        request, "datasets.html", title="Data sets", events=events, roots=str(here.roots),
        **_datasets(here, number),
    )  # fmt: skip


@router.get("/parts/datasets")
def part_datasets(request: Request, here: Here, number: PageNumber = 1) -> Response:
    """The table of `show_datasets`."""
    return page(request, "parts/datasets.html", **_datasets(here, number))


@router.get("/datasets/{dataset_id}")
def show_dataset(request: Request, here: Here, dataset_id: DatasetId) -> Response:
    """One data set: figures, health, and which jobs use it."""
    dataset = here.datasets.get(dataset_id)
    users = [job for job in here.jobs.list(limit=USERS) if {dataset.id, dataset.name} & {*job.dataset_ids}]
    return page(
        request, "dataset.html", title=dataset.name, dataset=dataset, users=users, now=time.time(),
        figures=figures(dataset.facts), spec=_flat(dataset.spec),
    )  # fmt: skip


@router.get("/parts/datasets/{dataset_id}/samples")
def part_samples(request: Request, here: Here, dataset_id: DatasetId) -> Response:
    """Some samples of a data set, or why they cannot be read."""
    try:
        found, problem = here.datasets.samples(dataset_id, limit=SAMPLES_SHOWN), ""
    except (SourceError, StalledError, ResourceError) as error:
        found, problem = [], str(error)
    return page(request, "parts/samples.html", samples=found, problem=problem)


@router.get("/caches")
def show_caches(request: Request, here: Here) -> Response:
    """All caches."""
    found = list_caches(here)
    return page(
        request, "caches.html", title="Caches", caches=found.caches, total=found.bytes, stale=found.stale
    )


@router.get("/caches/{name}/{fingerprint}")
def show_cache(
    request: Request, here: Here, name: Name, fingerprint: Print, other: str | None = None
) -> Response:
    """One cache: what is in it, what it was made of, and how that differs from another."""
    from stoker.store import open_cache

    detail = inspect_cache(name, fingerprint, here).model_dump()
    folder = here.folder.caches / name / fingerprint
    recipe = here.figures.folders.ask(
        f"cache {name}/{fingerprint}", lambda: open_cache(folder, require_complete=False).recipe.entries
    )
    others = [one for one in list_caches(here).caches if one.name == name and one.fingerprint != fingerprint]
    beside = why(name, fingerprint, here, other) if other or others else None
    return page(
        request, "cache.html", title=f"{name} {fingerprint}", own=name, fingerprint=fingerprint,
        detail=detail, recipe=_flat(recipe), others=others, beside=beside, other=other,
        users=_users(here, fingerprint),
    )  # fmt: skip


@router.get("/machine")
def show_machine(request: Request, here: Here) -> Response:
    """What there is to compute with."""
    return page(request, "machine.html", title="Machine", machine=_machine(here))


@router.get("/parts/machine")
def part_machine(request: Request, here: Here) -> Response:
    """The figures of `show_machine`."""
    return page(request, "parts/machine.html", machine=_machine(here))


def _jobs(here: Services, status: State | None, number: int) -> dict[str, Any]:
    found = here.jobs.list(status, limit=PER_PAGE, offset=PER_PAGE * (number - 1))
    lines = {job.id: spark(_recent(here, job.id, job.epoch)) for job in found}
    total = here.jobs.count(status)
    return {
        "jobs": found, "lines": lines, "only": status, "states": list(State), "number": number,
        "total": total, "last": max(1, -(-total // PER_PAGE)), "now": time.time(),
    }  # fmt: skip


def _datasets(here: Services, number: int) -> dict[str, Any]:
    total = here.datasets.count()
    found = here.datasets.list(limit=PER_PAGE, offset=PER_PAGE * (number - 1))
    last = max(1, -(-total // PER_PAGE))
    return {"datasets": found, "total": total, "number": number, "last": last, "now": time.time()}


def _recent(here: Services, id: str, epoch: int) -> list[dict[str, Any]]:
    try:
        return here.jobs.metrics(id, limit=SPARK_EPOCHS, after=max(0, epoch - SPARK_EPOCHS))
    except NotFoundError:
        return []  # it was deleted since it was listed


def _job(here: Services, id: str) -> dict[str, Any]:
    job = here.jobs.get(id)
    events = here.outbox.read(0, job=job.id, kinds=MILESTONES)
    started = next((event for event in reversed(events) if event.kind == "started"), None)
    first = here.outbox.read(started.number, job=job.id, limit=1) if started else []
    told = started.data if started else {}
    return {
        "job": job, "actions": actions(job), "live": is_live(job), "now": time.time(),
        "phases": phases(events, first[0] if first else None),
        "tiers": where_records_are(started), "told": told, "newest": _newest(here, job.id, job.epoch),
    }  # fmt: skip


def _newest(here: Services, id: str, epoch: int) -> dict[str, Any]:
    rows = here.jobs.metrics(id, limit=1, after=max(0, epoch - 1))
    return rows[-1] if rows else {}


def _log(here: Services, id: str) -> dict[str, Any]:
    lines, _, cut = stream.tail(here.folder.job(id).log, LOG_LINES)
    return {"lines": lines, "cut": cut}


def _users(here: Services, fingerprint: str) -> list[Any]:
    """Jobs that said they train on a cache, of the newest."""
    found = here.jobs.list(limit=USERS)
    started = here.outbox.newest_of("started", [job.id for job in found])

    def used(id: str) -> bool:
        caches: Any = (started[id].data.get("caches") if id in started else None) or ()
        return any(cache["fingerprint"] == fingerprint for cache in caches)

    return [job for job in found if used(job.id)]


def _machine(here: Services) -> dict[str, Any]:
    return {**look_at_machine(here), "state_dir": str(here.folder.path)}


def _flat(entries: Any, before: str = "") -> list[tuple[str, str]]:
    """A nested recipe as rows."""
    rows: list[tuple[str, str]] = []
    for name, value in entries.items():
        if isinstance(value, dict) and value:
            rows += _flat(value, f"{before}{name}.")
        else:
            rows.append((f"{before}{name}", str(value)))
    return rows
