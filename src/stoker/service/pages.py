"""The pages: values for templates, login and logout, and the routes of all pages.

Templates escape all values. Scripts and styles come from `static/`, since the policy of each answer allows no
others.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict, cast
from urllib.parse import parse_qs

from fastapi import APIRouter, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.staticfiles import StaticFiles

import stoker
from stoker.errors import ConfigError, NotFoundError, ResourceError, SourceError, StalledError, StokerError
from stoker.service import stream
from stoker.service.api import (
    DatasetId,
    Id,
    Name,
    Print,
    begin_plan,
    get_files,
    inspect_cache,
    list_caches,
    why,
)
from stoker.service.database import ENDED_STATES, HELD_STATES, WAITING_STATES, Event, State
from stoker.service.job_config import UNUSED_FIELDS, WITHOUT_EFFECT, JobConfig
from stoker.service.jobs import Job
from stoker.service.models import FileOut, JobRequest, status_of, utc
from stoker.service.security import SESSION_S
from stoker.service.services import Services, ServicesDep, look_at_machine, services_of
from stoker.service.timeline import PHASES, draw_timeline, timeline_of
from stoker.units import format_bytes, format_count, format_percent, format_seconds

# ----------------------------------------------------------------------------------------------------------
# Values for templates: what pages show of jobs, caches and the machine.


WIDTH, HEIGHT = 96, 24
"""Size of a spark line in its own units."""
ACTIONS: tuple[tuple[str, str, frozenset[State]], ...] = (
    ("pause", "Pause", WAITING_STATES | {State.RUNNING}),
    ("resume", "Resume", frozenset({State.PAUSED, State.CANCELLED, State.FAILED})),
    ("cancel", "Cancel", WAITING_STATES | {State.RUNNING, State.PAUSING, State.PAUSED}),
)
CHARTS: tuple[tuple[str, str, tuple[tuple[str, str, float], ...]], ...] = (
    ("Loss", "", (("train_loss", "training", 1), ("val_loss", "validation", 1))),
    ("Validation error", "m", (("p50_m", "median", 1), ("p95_m", "95 %", 1), ("rmse_m", "rmse", 1))),
    ("Validation error", "", (("val_nrmse", "NRMSE", 1), ("persistence_nrmse", "persistence", 1))),
    ("Validation accuracy", "%", (("accuracy", "right", 100),)),
    ("Learning rate", "", (("learning_rate", "rate", 1), ("lr", "rate", 1))),
    ("Stall and GPU", "%", (("stall", "stall", 100), ("gpu_utilization_pct", "GPU busy", 1))),
)
"""Title, unit, and lines: name in a row of metrics, label and factor."""
TIERS = ("device", "host", "disk", "encode")
FIRST_FIELDS = ("dataset_ids", "epochs", "batch_size", "learning_rate", "preload_to_gpu")
"""Fields of the form that are visible at first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BarPart:
    """One part of a bar; position and width are in thousandths of the bar."""

    label: str
    text: str
    kind: str
    """Selects the color."""
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
    kinds: tuple[str, ...] = ()
    """Kinds of data sets that it applies to; empty: all."""


def actions(job: Job) -> list[tuple[str, str]]:
    """Return the actions that a job allows now: the end of the address and the label of the button."""
    return [(name, words) for name, words, states in ACTIONS if job.state in states]


def tone(state: State) -> str:
    """Return the color of a state: `busy`, `wait`, `good`, `bad` or `off`."""
    if state in HELD_STATES:
        return "busy"
    tones = {State.COMPLETED: "good", State.FAILED: "bad", State.CANCELLED: "off"}
    return tones.get(state, "wait")


def is_live(job: Job) -> bool:
    """Return True if a job may change without a request."""
    return job.state not in ENDED_STATES and job.state is not State.PAUSED


def bar(values: Sequence[tuple[str, float, str, str]]) -> list[BarPart]:
    """Return the parts of a bar for values, each a label, an amount, its text and a kind.

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


def tier_bar(started: Event | None) -> list[BarPart]:
    """Return records by tier, from the `started` event of a job."""
    return tier_parts(started.data.get("tiers") if started else None)


def tier_parts(tiers: object) -> list[BarPart]:
    """Return records by tier as parts of a bar; empty unless `tiers` is a mapping."""
    if not isinstance(tiers, Mapping):
        return []
    held = [(tier, float(str(tiers.get(tier) or 0))) for tier in TIERS]
    return bar([(tier, count, format_count(count, "record"), tier) for tier, count in held if count])


def expected_stall(plan: Mapping[str, Any]) -> str:
    """Return the stall of a plan as text, or the shortest step that does not wait.

    >>> expected_stall({"predicted_stall": None, "no_stall_step_s": 0.002})
    'none at steps of 2 ms or longer'
    """
    if (stall := plan.get("predicted_stall")) is not None:
        low, high = plan.get("predicted_stall_low"), plan.get("predicted_stall_high")
        likely = "" if low is None or high is None else f" ({format_percent(low)} to {format_percent(high)})"
        return f"{format_percent(stall)}{likely}"
    if (step_s := plan.get("no_stall_step_s")) is not None:
        return f"none at steps of {format_seconds(step_s)} or longer"
    return "not known until all records are encoded"


@dataclass(frozen=True, slots=True, kw_only=True)
class SimilarJob:
    """A job on the same data."""

    id: str
    name: str
    batch_size: int | None


def similar_job(services: Services, config: JobConfig) -> tuple[SimilarJob | None, float | None]:
    """Return a job on the same data that has finished epochs, and the seconds that one takes.

    The newest with the same batch size, else the newest.
    """
    found: tuple[SimilarJob, float] | None = None
    wanted = services.datasets.resolve(config.dataset_ids)
    words = {word for one in wanted for word in (one.id, one.name)}
    for job in services.jobs.list(limit=USERS):
        is_same = len(job.dataset_ids) == len(wanted) and words.issuperset(job.dataset_ids)
        if job.epoch < 1 or job.kind != "training" or not is_same:
            continue
        after = max(0, job.epoch - PACE_EPOCHS)
        rows = cast(
            "Sequence[Mapping[str, Any]]", services.jobs.metrics(job.id, limit=PACE_EPOCHS, after=after)
        )
        took = [row["seconds"] + (row.get("eval_seconds") or 0.0) for row in rows if row.get("seconds")]
        if took:
            size = cast("Any", job.config.get("batch_size"))
            one = SimilarJob(id=job.id, name=job.name, batch_size=size), sum(took) / len(took)
            if size == config.batch_size:
                return one
            found = found or one
    return found or (None, None)


def spark(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the points of a line through the losses of a job's epochs, newest last; empty below two losses.

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


def charts() -> list[dict[str, Any]]:
    """Return what the script of a page may draw; it leaves out lines without a number in any row."""
    return [
        {
            "title": title,
            "unit": unit,
            "series": [{"name": name, "label": label, "factor": factor} for name, label, factor in lines],
        }
        for title, unit, lines in CHARTS
    ]


def run_of(job: Job, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what the script of a page draws of a job: its rows of metrics, its start and its best epoch."""
    began = job.created if job.started is None else job.started
    return {"name": job.name, "rows": rows, "began": began, "best": job.best_epoch, "loss": job.best_val_loss}


def charts_by_quantity() -> list[dict[str, Any]]:
    """Return the charts of `charts` with one quantity each, for a line per job."""
    found: list[dict[str, Any]] = []
    for chart in charts():
        labels = [*dict.fromkeys(line["label"] for line in chart["series"])]
        for label in labels:
            title = chart["title"] if len(labels) == 1 else f"{chart['title']}, {label}"
            series = [line for line in chart["series"] if line["label"] == label]
            found.append({"title": title, "unit": chart["unit"], "series": series})
    return found


def differences(configs: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """Return the settings that are not the same in all configurations: name, and the text in each.

    >>> differences([{"seed": 0, "settings": {"a": 1}}, {"seed": 0, "settings": {}}])
    [('settings.a', ['1', '–'])]
    """
    flat = [dict(_flat(config)) for config in configs]
    names = dict.fromkeys(name for one in flat for name in one)
    rows = [(name, [one.get(name, "–") for one in flat]) for name in names]
    return [(name, texts) for name, texts in rows if len(set(texts)) > 1]


def outcomes(jobs: Sequence[Job], rows: Sequence[Sequence[Mapping[str, Any]]]) -> list[tuple[str, list[str]]]:
    """Return what came of jobs: name of a figure, and its text for each job; the best loss comes first.

    Figures of `CHARTS` are those of the best epoch, or of the last without validation.
    """
    best = [
        f"{number(job.best_val_loss)} in epoch {job.best_epoch}" if job.best_epoch else "–" for job in jobs
    ]
    kept = [
        next((row for row in of_job if row["epoch"] == job.best_epoch), of_job[-1] if of_job else {})
        for job, of_job in zip(jobs, rows, strict=True)
    ]
    found = [("Best validation loss", best)]
    for chart in charts_by_quantity():
        values = [
            next((row[one["name"]] * one["factor"] for one in chart["series"] if _is_number(row, one)), None)
            for row in kept
        ]
        if any(value is not None for value in values):
            unit = f" ({chart['unit']})" if chart["unit"] else ""
            found.append((chart["title"] + unit, [number(value) for value in values]))
    took = [
        "–" if job.started is None or job.ended is None else format_seconds(job.ended - job.started)
        for job in jobs
    ]
    epochs = [f"{job.epoch} of {job.epochs}" for job in jobs]
    return [
        *found,
        ("Epochs", epochs),
        ("From start to end", took),
        ("Tier", [job.tier or "–" for job in jobs]),
    ]


def _is_number(row: Mapping[str, Any], line: Mapping[str, Any]) -> bool:
    return isinstance(row.get(line["name"]), int | float)


def thinned(rows: Sequence[Mapping[str, Any]], best: int | None, most: int) -> list[Mapping[str, Any]]:
    """Return about `most` of the rows, evenly, with the first, the last and that of the epoch `best`.

    >>> [row["epoch"] for row in thinned([{"epoch": n} for n in range(1, 10)], 6, 4)]
    [1, 4, 6, 7, 9]
    """
    step = max(1, -(-len(rows) // most))
    last = len(rows) - 1
    return [row for i, row in enumerate(rows) if i % step == 0 or i == last or row["epoch"] == best]


def figures(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the facts of a data set as names and texts; fields with shape and dtype.

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
        return text_of(value)
    return format_count(value) if isinstance(value, int) else number(value)


def form_fields() -> tuple[list[FormField], list[FormField]]:
    """Return the settings of a new job that have an effect: the visible ones, and the others."""
    schema = JobConfig.model_json_schema()
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
        kinds=kinds_of(name),
    )


def kinds_of(field: str) -> tuple[str, ...]:
    """Return the kinds of data sets that a field of `JobConfig` applies to; empty if it applies to all.

    >>> kinds_of("max_gdop"), kinds_of("epochs")
    (('radio',), ())
    """
    kinds = tuple(kind for kind, unused in UNUSED_FIELDS.items() if field not in unused)
    return () if len(kinds) == len(UNUSED_FIELDS) else kinds


def number(value: float | None) -> str:
    """Return a figure with four significant digits, large ones to the unit, or an en dash for None.

    >>> number(0.123456), number(None), number(1234567.0), number(2e12)
    ('0.1235', '–', '1,234,567', '2e+12')
    """
    if value is None:
        return "–"
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.4g}"


def text_of(value: Any) -> str:
    """Return a value of a setting, a recipe or a sample as text; an en dash where it is empty.

    >>> [text_of(one) for one in (True, None, {}, ["a", 1], {"a": None}, 0.001)]
    ['yes', '–', '–', 'a, 1', '{"a": null}', '0.001']
    """
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None or (isinstance(value, dict | list | tuple) and not value):
        return "–"
    if isinstance(value, list | tuple) and not any(isinstance(one, dict | list | tuple) for one in value):
        return ", ".join(map(text_of, value))
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)


def ago(seconds: float) -> str:
    """Return a time span as text.

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
    "utc": utc,
    "bytes": format_bytes,
    "count": format_count,
    "number": number,
    "percent": format_percent,
    "seconds": format_seconds,
    "tone": tone,
    "value": text_of,
}
"""Filters of the templates."""


FOLDER = Path(__file__).parent
login_router = APIRouter(include_in_schema=False)
_TEMPLATES = Environment(
    loader=FileSystemLoader(FOLDER / "templates"), autoescape=True, undefined=StrictUndefined
)
_TEMPLATES.filters |= FILTERS
_OURS = re.compile(r"/(?![/\\])[^\s\\]*")
"""Matches a path of this service, but nothing that a browser would take for another site."""


class _Flags(TypedDict):
    path: str
    httponly: bool
    samesite: Literal["strict"]
    secure: bool


class CachedFiles(StaticFiles):
    """Files that a browser keeps: those of `vendor`, whose names have versions, without asking again."""

    def file_response(self, full_path: Any, *given: Any, **named: Any) -> Response:
        """Return a file with the lifetime of the browser's copy, or 304 if that is current."""
        response = super().file_response(full_path, *given, **named)
        is_vendor = Path(full_path).parent.name == "vendor"
        lifetime = "private, max-age=31536000, immutable" if is_vendor else "private, no-cache"
        response.headers["Cache-Control"] = lifetime
        return response


def static_files() -> StaticFiles:
    """Return the application for files under `/static`."""
    return CachedFiles(directory=FOLDER / "static")


def page(request: Request, name: str, status: int = 200, **context: Any) -> HTMLResponse:
    """Return the page of a template."""
    text = _TEMPLATES.get_template(name).render(
        version=stoker.__version__,
        path=request.url.path,
        degraded=services_of(request).degraded,
        **context,
    )
    return HTMLResponse(text, status)


def policy() -> str:
    """Return the Content-Security-Policy of every answer; it allows the inline style of the login page.

    That page is the only one without a session, and files need a session.
    """
    style = re.search(r"<style>(.*?)</style>", (FOLDER / "templates/login.html").read_text(), re.DOTALL)
    text = "" if style is None else style[1]
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return (
        f"default-src 'self'; style-src 'self' 'sha256-{digest}'; img-src 'self' data:; object-src 'none'; "
        "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    )


def log_in_first(path: str) -> Response:
    """Return the login form for a browser without a session; it leads on to the requested page."""
    return _form(path, status=401)


@login_router.get("/login")
def get_login(request: Request, services: ServicesDep, code: str = "", next: str = "/") -> Response:
    """Return the form; with a code in the address, open a session and redirect to an address without it."""
    if not code:
        return _form(next)
    return _log_in(request, services, code, next)


@login_router.post("/login")
async def post_login(request: Request, services: ServicesDep) -> Response:
    """Open a session for a code or the token; return a redirect."""
    try:
        fields = parse_qs((await request.body()).decode("utf-8", "replace"), max_num_fields=10)
    except ValueError:  # more fields than the form has, so it has no valid secret
        fields = {}
    secret, wanted = (fields.get(name, [""])[0] for name in ("secret", "next"))
    return _log_in(request, services, secret.strip(), wanted)


@login_router.post("/logout")
def post_logout(request: Request, services: ServicesDep) -> Response:
    """End the session; return a redirect to the login page."""
    if request.state.session is not None:
        services.auth.end(request.state.session)
    response = RedirectResponse("/login", 303)
    response.delete_cookie(services.auth.cookie, **_flags(request, services))
    return response


def _log_in(request: Request, services: Services, secret: str, wanted: str) -> Response:
    cookie = services.auth.log_in(secret)
    if cookie is None:
        return _form(wanted, "That is no code of this service, or not any more.", status=401)
    response = RedirectResponse(wanted if _OURS.fullmatch(wanted) else "/", 303)
    response.set_cookie(services.auth.cookie, cookie, max_age=int(SESSION_S), **_flags(request, services))
    return response


def _flags(request: Request, services: Services) -> _Flags:
    """Return the flags of the session's cookie: hidden from scripts and other sites, over TLS if used."""
    secure = services.secure or request.url.scheme == "https"
    return {"path": "/", "httponly": True, "samesite": "strict", "secure": secure}


def _form(wanted: str, problem: str = "", status: int = 200) -> HTMLResponse:
    text = _TEMPLATES.get_template("login.html").render(wanted=wanted, problem=problem)
    return HTMLResponse(text, status)


# ----------------------------------------------------------------------------------------------------------
# The pages: jobs, one job, a new job, data sets, one of them, caches, one cache, the machine.
#
# The server renders complete pages. The script of a page listens to events and reloads the parts that changed
# (`/parts/...`); without a script a page is correct, but does not update.


PER_PAGE = 25
LOG_LINES = 200
EPOCHS_SHOWN = 5000
"""Newest rows of metrics that a page draws; a continued job may have more."""
TABLE_EPOCHS = 100
"""Newest epochs in the table below the curves."""
MOST_COMPARED = 8
"""Jobs on one page."""
POINTS_COMPARED = 1000
"""Epochs that a page draws of each job that it compares."""
SPARK_EPOCHS = 40
SAMPLES_SHOWN = 20
PACE_EPOCHS = 6
"""Last epochs that tell how long the others take."""
LEAST_PROGRESS = 0.02
"""Part of the job that must be done before the time left is told, while there are no two epochs."""
PLAN_WAIT_S = 20.0
"""Timeout of the plan on the page of a new job."""
ACTIVITY_SHOWN = 100
USERS = 100
"""Newest jobs that are searched for users of a cache or data set."""


class PageRoute(APIRoute):
    """A route that answers errors with pages."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """See the class."""
        answer = super().get_route_handler()

        async def handler(request: Request) -> Response:
            try:
                return await answer(request)
            except StokerError as error:
                return problem(request, status_of(error), error.fact, error.hint)
            except RequestValidationError:
                return problem(request, 404, "nothing is at this address", "See the list of jobs")

        return handler


router = APIRouter(include_in_schema=False, route_class=PageRoute)
Status = Annotated[State | None, Query()]
PageNumber = Annotated[int, Query(ge=1, le=10**6)]


def problem(request: Request, status: int, fact: str, hint: str = "") -> Response:
    """Return the page of an error; it reloads automatically where waiting may help."""
    again = status in (503, 504)
    return page(request, "problem.html", status, title="Problem", fact=fact, hint=hint, again=again)


@router.get("/")
def show_jobs(
    request: Request, services: ServicesDep, status: Status = None, number: PageNumber = 1
) -> Response:
    """Return all jobs, the newest first."""
    events = services.outbox.newest()
    return page(request, "jobs.html", title="Jobs", events=events, **_jobs(services, status, number))


@router.get("/parts/jobs")
def part_jobs(
    request: Request, services: ServicesDep, status: Status = None, number: PageNumber = 1
) -> Response:
    """Return the table of `show_jobs`."""
    return page(request, "parts/jobs.html", **_jobs(services, status, number))


@router.get("/jobs/new")
def show_form(request: Request, services: ServicesDep, dataset: str | None = None) -> Response:
    """Return the form to submit a job."""
    first, more = form_fields()
    known = services.datasets.list(limit=500)
    chosen = dataset or (known[0].id if known else None)
    return page(
        request, "new.html", title="New job", first=first, more=more, datasets=known, chosen=chosen
    )  # fmt: skip


@router.get("/jobs/compare")
def compare_jobs(
    request: Request, services: ServicesDep, ids: Annotated[Sequence[str], Query()] = ()
) -> Response:
    """Return the curves, figures and settings of several jobs, `?ids=A,B` or `?ids=A&ids=B`."""
    wanted = [*dict.fromkeys(id for part in ids for id in part.split(",") if id)]
    if not 2 <= len(wanted) <= MOST_COMPARED:
        raise ConfigError(
            f"{len(wanted)} jobs are to be compared", hint=f"Tick 2 to {MOST_COMPARED} in the list of jobs"
        )
    jobs = [services.jobs.get(id) for id in wanted]
    names = [job.name for job in jobs]
    labels = [job.name if names.count(job.name) == 1 else f"{job.name} {job.id[:8]}" for job in jobs]
    rows = [
        services.jobs.metrics(job.id, limit=EPOCHS_SHOWN, after=max(0, job.epoch - EPOCHS_SHOWN))
        for job in jobs
    ]
    runs = [
        {**run_of(job, thinned(of_job, job.best_epoch, POINTS_COMPARED)), "name": label}
        for job, of_job, label in zip(jobs, rows, labels, strict=True)
    ]
    datasets = {one.id: one.name for one in services.datasets.list(limit=500)}
    configs = [
        {**job.config, "epochs": job.epochs, "dataset_ids": [datasets.get(id, id) for id in job.dataset_ids]}
        for job in jobs
    ]
    return page(
        request, "compare.html", title="Compare jobs", jobs=jobs, labels=labels,
        drawn={"charts": charts_by_quantity(), "runs": runs}, rows=any(rows),
        left_out=[label for label, of_job in zip(labels, rows, strict=True) if len(of_job) > POINTS_COMPARED],
        outcomes=outcomes(jobs, rows), differences=differences(configs),
    )  # fmt: skip


@router.post("/parts/plan")
def part_plan(request: Request, services: ServicesDep, body: JobRequest) -> Response:
    """Return what a job would do, or why that cannot be said."""
    try:
        found = begin_plan(services, body, services.plans, PLAN_WAIT_S)
    except StokerError as error:
        return page(request, "parts/plan.html", fact=error.fact, hint=error.hint, plan=None)
    if found.result is None:
        fact = found.error or f"The plan takes longer than {format_seconds(PLAN_WAIT_S)}"
        return page(request, "parts/plan.html", fact=fact, hint="", plan=None)
    plan = dict[str, Any](found.result)
    if any(one.kind != "hdf5" for one in services.datasets.resolve(body.config.dataset_ids)):
        plan["advice"] = ""  # of settings, which jobs on other data do not take
    similar, epoch_s = similar_job(services, body.config)
    return page(
        request, "parts/plan.html", fact="", plan=plan, parts=tier_parts(plan.get("tiers")),
        stall=expected_stall(plan), similar=similar, epochs=body.config.epochs,
        batch_size=body.config.batch_size,
        took=None if epoch_s is None else f"about {format_seconds(epoch_s * body.config.epochs)}",
    )  # fmt: skip


@router.get("/jobs/{job_id}")
def show_job(request: Request, services: ServicesDep, job_id: Id) -> Response:
    """Return one job."""
    events = services.outbox.newest()  # first, so that what is read next may be newer, but never older
    context = _job(services, job_id)
    rows = services.jobs.metrics(
        job_id, limit=EPOCHS_SHOWN, after=max(0, context["job"].epoch - EPOCHS_SHOWN)
    )
    drawn = {"charts": charts(), "runs": [run_of(context["job"], rows)]}
    return page(
        request, "job.html", title=context["job"].name, events=events, drawn=drawn, rows=rows,
        shown=TABLE_EPOCHS, log=_log(services, job_id), **_timeline(services, context["job"]), **context,
    )  # fmt: skip


@router.get("/parts/jobs/{job_id}")
def part_job(request: Request, services: ServicesDep, job_id: Id) -> Response:
    """Return state, buttons and figures of `show_job`."""
    return page(request, "parts/job.html", **_job(services, job_id))


@router.get("/parts/jobs/{job_id}/timeline")
def part_timeline(request: Request, services: ServicesDep, job_id: Id) -> Response:
    """Return where the time of a job went."""
    return page(request, "parts/timeline.html", **_timeline(services, services.jobs.get(job_id)))


@router.get("/parts/jobs/{job_id}/files")
def part_files(request: Request, services: ServicesDep, job_id: Id) -> Response:
    """Return links to the results of a job, or why they cannot be listed."""
    job, files, fact, hint = _files(services, job_id)
    results = [one for one in files if "/" not in one.name]
    return page(request, "parts/files.html", job=job, files=results, fact=fact, hint=hint)


@router.get("/parts/jobs/{job_id}/checkpoints")
def part_checkpoints(request: Request, services: ServicesDep, job_id: Id) -> Response:
    """Return links to the files of each checkpoint of a job."""
    job, files, fact, hint = _files(services, job_id)
    own = groupby((one for one in files if "/" in one.name), key=lambda one: one.name.split("/")[1])
    kept = [(name, [*some]) for name, some in own]
    return page(request, "parts/checkpoints.html", job=job, checkpoints=kept, fact=fact, hint=hint)


def _files(services: Services, id: str) -> tuple[Job, list[FileOut], str, str]:
    """Return a job and its files, or a fact and a hint why they cannot be listed."""
    job = services.jobs.get(id)
    try:
        return job, get_files(id, services).files, "", ""
    except StokerError as error:
        return job, [], error.fact, error.hint


@router.get("/parts/jobs/{job_id}/epochs")
def part_epochs(request: Request, services: ServicesDep, job_id: Id) -> Response:
    """Return the newest epochs of a job as a table."""
    job = services.jobs.get(job_id)
    rows = services.jobs.metrics(job_id, limit=EPOCHS_SHOWN, after=max(0, job.epoch - TABLE_EPOCHS - 1))
    return page(request, "parts/epochs.html", job=job, rows=rows, shown=TABLE_EPOCHS)


@router.get("/parts/jobs/{job_id}/log")
def part_log(request: Request, services: ServicesDep, job_id: Id) -> Response:
    """Return the end of a job's log."""
    return page(request, "parts/log.html", log=_log(services, services.jobs.get(job_id).id))


@router.get("/datasets")
def show_datasets(request: Request, services: ServicesDep, number: PageNumber = 1) -> Response:
    """Return data sets that jobs may name, and how to add more."""
    events = services.outbox.newest()
    return page(
        request, "datasets.html", title="Data sets", events=events, roots=str(services.roots),
        **_datasets(services, number),
    )  # fmt: skip


@router.get("/parts/datasets")
def part_datasets(request: Request, services: ServicesDep, number: PageNumber = 1) -> Response:
    """Return the table of `show_datasets`."""
    return page(request, "parts/datasets.html", **_datasets(services, number))


@router.get("/datasets/{dataset_id}")
def show_dataset(request: Request, services: ServicesDep, dataset_id: DatasetId) -> Response:
    """Return one data set: figures, health, and which jobs use it."""
    dataset = services.datasets.get(dataset_id)
    users = [
        job for job in services.jobs.list(limit=USERS) if {dataset.id, dataset.name} & {*job.dataset_ids}
    ]
    return page(
        request, "dataset.html", title=dataset.name, dataset=dataset, users=users, now=time.time(),
        figures=figures(dataset.facts), spec=_flat(dataset.spec),
    )  # fmt: skip


@router.get("/parts/datasets/{dataset_id}/samples")
def part_samples(request: Request, services: ServicesDep, dataset_id: DatasetId) -> Response:
    """Return some samples of a data set, or why they cannot be read."""
    try:
        found, fact, hint = services.datasets.samples(dataset_id, limit=SAMPLES_SHOWN), "", ""
    except (SourceError, StalledError, ResourceError) as error:
        found, fact, hint = [], error.fact, error.hint
    return page(request, "parts/samples.html", samples=found, fact=fact, hint=hint)


@router.get("/caches")
def show_caches(request: Request, services: ServicesDep) -> Response:
    """Return all caches."""
    found = list_caches(services)
    return page(
        request, "caches.html", title="Caches", caches=found.caches, total=found.bytes, stale=found.stale
    )


@router.get("/caches/{name}/{fingerprint}")
def show_cache(
    request: Request, services: ServicesDep, name: Name, fingerprint: Print, other: str | None = None
) -> Response:
    """Return one cache: its contents, its recipe, and the differences to another recipe."""
    from stoker.store import open_cache

    detail = inspect_cache(name, fingerprint, services).model_dump()
    folder = services.folder.caches / name / fingerprint
    recipe = services.figures.look_into(
        f"cache {name}/{fingerprint}", lambda: open_cache(folder, require_complete=False).recipe.entries
    )
    others = [
        one for one in list_caches(services).caches if one.name == name and one.fingerprint != fingerprint
    ]
    differences = why(name, fingerprint, services, other) if other or others else None
    return page(
        request, "cache.html", title=f"{name} {fingerprint}", own=name, fingerprint=fingerprint,
        detail=detail, recipe=_flat(recipe), others=others, differences=differences, other=other,
        users=_users(services, fingerprint),
    )  # fmt: skip


@router.get("/activity")
def show_activity(
    request: Request, services: ServicesDep, before: Annotated[int | None, Query(ge=1, lt=2**63)] = None
) -> Response:
    """Return who has changed what."""
    rows = services.audit.read(limit=ACTIVITY_SHOWN, before=before)
    return page(
        request, "activity.html", title="Activity", rows=rows, shown=ACTIVITY_SHOWN, now=time.time()
    )  # fmt: skip


@router.get("/machine")
def show_machine(request: Request, services: ServicesDep) -> Response:
    """Return the resources of the machine."""
    return page(request, "machine.html", title="Machine", machine=_machine(services))


@router.get("/parts/machine")
def part_machine(request: Request, services: ServicesDep) -> Response:
    """Return the figures of `show_machine`."""
    return page(request, "parts/machine.html", machine=_machine(services))


def _jobs(services: Services, status: State | None, number: int) -> dict[str, Any]:
    found = services.jobs.list(status, limit=PER_PAGE, offset=PER_PAGE * (number - 1))
    lines = {job.id: spark(_recent(services, job.id, job.epoch)) for job in found}
    total = services.jobs.count(status)
    return {
        "jobs": found, "lines": lines, "only": status, "states": list(State), "number": number,
        "total": total, "last": max(1, -(-total // PER_PAGE)), "now": time.time(),
    }  # fmt: skip


def _datasets(services: Services, number: int) -> dict[str, Any]:
    total = services.datasets.count()
    found = services.datasets.list(limit=PER_PAGE, offset=PER_PAGE * (number - 1))
    last = max(1, -(-total // PER_PAGE))
    return {"datasets": found, "total": total, "number": number, "last": last, "now": time.time()}


def _recent(services: Services, id: str, epoch: int) -> list[dict[str, Any]]:
    try:
        return services.jobs.metrics(id, limit=SPARK_EPOCHS, after=max(0, epoch - SPARK_EPOCHS))
    except NotFoundError:
        return []  # it was deleted since it was listed


def _job(services: Services, id: str) -> dict[str, Any]:
    job = services.jobs.get(id)
    started = services.outbox.newest_of("started", [job.id]).get(job.id)
    told = started.data if started else {}
    now = time.time()
    rows = services.jobs.metrics(job.id, limit=PACE_EPOCHS, after=max(0, job.epoch - PACE_EPOCHS))
    ahead = services.jobs.waiting_before(job.id) if job.state in WAITING_STATES else 0
    return {
        "times": times(job, ahead, left_s(job, rows, started, now), now),
        "job": job, "actions": actions(job), "live": is_live(job), "now": now,
        "tiers": tier_bar(started), "told": told, "newest": rows[-1] if rows else {},
    }  # fmt: skip


def left_s(job: Job, rows: Sequence[Mapping[str, Any]], started: Event | None, now: float) -> float | None:
    """Return the seconds that a job still takes, at the pace of its last epochs; None: not known.

    Args:
        job: The job.
        rows: Its last epochs.
        started: When its training began; epochs before that were of an earlier attempt.
        now: Unix seconds.
    """
    if job.state not in HELD_STATES or job.progress >= 1.0:
        return None
    rows = [row for row in rows if started is not None and row["at"] >= started.at]
    if len(rows) > 1:
        pace_s = (rows[-1]["at"] - rows[0]["at"]) / (rows[-1]["epoch"] - rows[0]["epoch"])
        return max(0.0, pace_s * job.epochs * (1.0 - job.progress))
    if started is None or job.attempt > 1 or job.progress < LEAST_PROGRESS:
        return None
    return (now - started.at) * (1.0 - job.progress) / job.progress


def times(job: Job, ahead: int, left: float | None, now: float) -> list[tuple[str, str]]:
    """Return the elapsed and the remaining time of a job, or its place in the queue, as names and texts."""
    if job.state in WAITING_STATES:
        return [
            ("Waits for a worker", "it is next" if ahead == 0 else f"{format_count(ahead, 'job')} before it")
        ]
    if job.started is None:
        return []
    ended = now if job.ended is None else job.ended
    return [
        ("Elapsed", format_seconds(max(0.0, ended - job.started))),
        *([] if left is None else [("Time left", f"about {format_seconds(left)}")]),
    ]


def _timeline(services: Services, job: Job) -> dict[str, Any]:
    drawn = draw_timeline(timeline_of(job, services.outbox))
    return {"timeline": drawn, "phases_said": [*PHASES.items()]}


def _log(services: Services, id: str) -> dict[str, Any]:
    lines, _, cut = stream.tail(services.folder.job(id).log, LOG_LINES)
    return {"lines": lines, "cut": cut}


def _users(services: Services, fingerprint: str) -> list[Any]:
    """Return the newest jobs that train on a cache."""
    found = services.jobs.list(limit=USERS)
    started = services.outbox.newest_of("started", [job.id for job in found])

    def used(id: str) -> bool:
        caches: Any = (started[id].data.get("caches") if id in started else None) or ()
        return any(cache["fingerprint"] == fingerprint for cache in caches)

    return [job for job in found if used(job.id)]


def _machine(services: Services) -> dict[str, Any]:
    return {**look_at_machine(services), "state_dir": str(services.folder.path)}


def _flat(entries: Any, before: str = "") -> list[tuple[str, str]]:
    """Return a nested recipe as rows."""
    rows: list[tuple[str, str]] = []
    for name, value in entries.items():
        if isinstance(value, dict) and value:
            rows += _flat(value, f"{before}{name}.")
        else:
            rows.append((f"{before}{name}", text_of(value)))
    return rows
