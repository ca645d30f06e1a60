"""The pages: login and logout, and the routes of all pages.

Templates escape all values. Scripts and styles come from `static/`, since the policy of each answer allows no
others.
"""

from __future__ import annotations

import base64
import hashlib
import re
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict, cast
from urllib.parse import parse_qs

from fastapi import APIRouter, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from starlette.staticfiles import StaticFiles

import stoker
from stoker.errors import (
    ConfigError,
    DegradedError,
    NotFoundError,
    ResourceError,
    SourceError,
    StalledError,
    StokerError,
)
from stoker.service import stream
from stoker.service.api import (
    CacheRow,
    DatasetId,
    Id,
    Name,
    Print,
    begin_plan,
    checks_all,
    get_files,
    inspect_cache,
    list_caches,
    why,
)
from stoker.service.database import WAITING_STATES
from stoker.service.datasets import Dataset
from stoker.service.jobs import Job
from stoker.service.listing import SORT_LABELS, JobFilter
from stoker.service.models import FileOut, JobRequest, error_body, status_of
from stoker.service.security import SESSION_S, wants_page
from stoker.service.services import Services, ServicesDep, look_at_machine, services_of
from stoker.service.timeline import PHASES, draw_machine, draw_timeline, machine_timeline, timeline_of
from stoker.service.views import (
    FILTERS,
    PACE_EPOCHS,
    USERS,
    actions,
    charts,
    charts_by_quantity,
    column_heads,
    dataset_label,
    differences,
    expected_stall,
    figures,
    filter_of,
    flat,
    form_fields,
    has_effect,
    histograms,
    is_live,
    left_s,
    list_link,
    outcomes,
    query_of,
    read_by_check,
    run_of,
    settings_fields,
    similar_job,
    spark,
    state_chips,
    thinned,
    tier_bar,
    tier_parts,
    times,
)
from stoker.units import format_seconds

FOLDER = Path(__file__).parent
login_router = APIRouter(include_in_schema=False)
_TEMPLATES = Environment(
    loader=FileSystemLoader(FOLDER / "templates"), autoescape=True, undefined=StrictUndefined
)
_TEMPLATES.filters.update(FILTERS)
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
    """Return the Content-Security-Policy of every answer; it allows the inline style of `plain.html`.

    The login and refusals are shown without a session, and files need a session.
    """
    style = re.search(r"<style>(.*?)</style>", (FOLDER / "templates/plain.html").read_text(), re.DOTALL)
    text = "" if style is None else style[1]
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return (
        f"default-src 'self'; style-src 'self' 'sha256-{digest}'; img-src 'self' data:; object-src 'none'; "
        "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    )


def refused(status: int, fact: str, hint: str, wanted: str) -> Response:
    """Return the page of a refusal by the guard.

    Args:
        status: Of the answer. 401 is the login form, which leads on to `wanted`.
        fact: What is refused.
        hint: What to do.
        wanted: The requested address.
    """
    if status == 401:
        return _form(wanted, status=status)
    text = _TEMPLATES.get_template("refusal.html").render(title="Refused", fact=fact, hint=hint)
    return HTMLResponse(text, status)


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
    """End the session; return a redirect to the login page.

    On a full disk the end cannot be stored. The browser forgets its cookie even so, and the answer says that
    a copy of it would open the session again after a restart.
    """
    response: Response = RedirectResponse("/login", 303)
    try:
        if request.state.session is not None:
            services.auth.end(request.state.session)
    except StokerError as error:
        fact = f"You are logged out, but a copy of the cookie works again after a restart: {error.fact}"
        as_page = wants_page(request)
        status = status_of(error)
        response = _form("/", fact, status) if as_page else JSONResponse(error_body(fact, error.hint), status)
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
    text = _TEMPLATES.get_template("login.html").render(title="Log in", wanted=wanted, problem=problem)
    return HTMLResponse(text, status)


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
ROWS_DRAWN = 100
"""Rows of a database in the histograms of the page."""
PLAN_WAIT_S = 20.0
"""Timeout of the plan on the page of a new job."""
ACTIVITY_SHOWN = 100


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
PageNumber = Annotated[int, Query(ge=1, le=10**6)]


def problem(request: Request, status: int, fact: str, hint: str = "") -> Response:
    """Return the page of an error; it reloads automatically where waiting may help."""
    again = status in (503, 504)
    found = page(request, "problem.html", status, title="Problem", fact=fact, hint=hint, again=again)
    found.headers.update({"Retry-After": "5"} if again else {})
    return found


@router.get("/")
def show_jobs(request: Request, services: ServicesDep, number: PageNumber = 1) -> Response:
    """Return the jobs of a filter (`views.filter_of`), the newest first."""
    events = services.outbox.newest()
    return page(
        request, "jobs.html", title="Jobs", events=events, sorts=SORT_LABELS.items(),
        all_tags=services.jobs.tags(), datasets=services.datasets.list(limit=500),
        **_jobs(request, services, number),
    )  # fmt: skip


@router.get("/parts/jobs")
def part_jobs(request: Request, services: ServicesDep, number: PageNumber = 1) -> Response:
    """Return the table of `show_jobs`."""
    return page(request, "parts/jobs.html", **_jobs(request, services, number))


@router.get("/jobs/new")
def show_form(
    request: Request, services: ServicesDep, dataset: str | None = None, clone: str | None = None
) -> Response:
    """Return the form to submit a job; with `clone` it has the settings of that job."""
    origin = None if clone is None else services.jobs.get(clone)
    if origin is not None and origin.kind != "training":
        raise ConfigError(
            f"{origin.name} generates a data set and cannot be cloned", hint="Generate another data set"
        )
    values = dict[str, Any](origin.config if origin else {})
    known = services.datasets.list(limit=500)
    chosen = origin.dataset_ids if origin else [dataset or (known[0].id if known else "")]
    try:
        used, is_gone = services.datasets.resolve(chosen), False
    except NotFoundError:
        used, is_gone = [], origin is not None
    listed = {one.id for one in known}
    known += [one for one in used if one.id not in listed]
    first, more = form_fields({**values, "epochs": origin.epochs} if origin else {})
    settings = settings_fields(values.get("settings") or {}, encoders=bool(services.access.encoders))
    return page(
        request, "new.html", title="New job", first=first, more=more, settings=settings, origin=origin,
        datasets=[(one, dataset_label(one)) for one in known], chosen=[*chosen],
        is_gone=is_gone,
    )  # fmt: skip


@router.get("/jobs/compare")
def compare_jobs(
    request: Request, services: ServicesDep, ids: Annotated[Sequence[str], Query()] = ()
) -> Response:
    """Return the curves, figures and settings of several jobs, `?ids=A,B` or `?ids=A&ids=B`.

    Jobs that generate a data set are left out.
    """
    wanted = [*dict.fromkeys(id for part in ids for id in part.split(",") if id)]
    if not 2 <= len(wanted) <= MOST_COMPARED:
        raise ConfigError(
            f"{len(wanted)} jobs are to be compared", hint=f"Tick 2 to {MOST_COMPARED} in the list of jobs"
        )
    found = [services.jobs.get(id) for id in wanted]
    jobs = [job for job in found if job.kind == "training"]
    if len(jobs) < 2:
        raise ConfigError(
            f"{len(jobs)} of these {len(found)} jobs trains; the others generate data sets",
            hint=f"Tick 2 to {MOST_COMPARED} training jobs in the list of jobs",
        )
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
    datasets = {one.id: one for one in services.datasets.list(limit=500)}
    configs = [
        {**job.config, "epochs": job.epochs, "dataset_ids": _names(datasets, job.dataset_ids)} for job in jobs
    ]
    kinds = [_kind(datasets, job) for job in jobs]
    inputs = [{print for _, print in caches} for caches in _caches_by_job(services, jobs).values() if caches]
    same_caches = all(one == inputs[0] for one in inputs)
    return page(
        request, "compare.html", title="Compare jobs", jobs=jobs, labels=labels,
        drawn={"charts": charts_by_quantity(), "runs": runs}, rows=any(rows),
        left_out=[label for label, of_job in zip(labels, rows, strict=True) if len(of_job) > POINTS_COMPARED],
        generating=[job.name for job in found if job not in jobs], same_caches=same_caches,
        outcomes=outcomes(jobs, rows, same_caches=same_caches), differences=differences(configs, kinds),
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
        shown=TABLE_EPOCHS, log=_log(services, job_id), **_data_of(services, context["job"]),
        **_timeline(services, context["job"]), **context,
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
        connections=[*services.access.connections], **_datasets(services, number),
    )  # fmt: skip


@router.get("/parts/datasets")
def part_datasets(request: Request, services: ServicesDep, number: PageNumber = 1) -> Response:
    """Return the table of `show_datasets`."""
    return page(request, "parts/datasets.html", **_datasets(services, number))


@router.get("/datasets/{dataset_id}")
def show_dataset(request: Request, services: ServicesDep, dataset_id: DatasetId) -> Response:
    """Return one data set: figures, health, and which jobs use it."""
    dataset = services.datasets.get(dataset_id)
    events = services.outbox.newest()
    return page(
        request, "dataset.html", title=dataset.name, dataset=dataset, users=_jobs_on(services, dataset),
        events=events, maker=_maker(services, dataset), caches=_caches_of(services, dataset), now=time.time(),
        figures=figures(dataset.facts),
        checking=services.checks.find(checks_all(dataset)), read=read_by_check(dataset.report),
        spec=flat(dataset.spec),
    )  # fmt: skip


@router.get("/parts/datasets/{dataset_id}/making")
def part_making(request: Request, services: ServicesDep, dataset_id: DatasetId) -> Response:
    """Return how far the job is that generates a data set. The page reloads once that has ended."""
    dataset = services.datasets.get(dataset_id)
    response = page(request, "parts/making.html", maker=_maker(services, dataset), dataset=dataset)
    if dataset.health != "making":
        response.headers["HX-Refresh"] = "true"
    return response


@router.get("/parts/datasets/{dataset_id}/samples")
def part_samples(request: Request, services: ServicesDep, dataset_id: DatasetId) -> Response:
    """Return some samples of a data set, or why they cannot be read."""
    dataset = services.datasets.get(dataset_id)
    is_table = dataset.kind == "radio"
    limit = ROWS_DRAWN if is_table else SAMPLES_SHOWN
    try:
        found, fact, hint = services.datasets.samples(dataset.id, limit=limit, pictures=True), "", ""
    except (SourceError, StalledError, ResourceError) as error:
        found, fact, hint = [], error.fact, error.hint
    return page(
        request, "parts/samples.html", samples=found[:SAMPLES_SHOWN], fact=fact, hint=hint,
        drawn=len(found), histograms=histograms(found) if is_table else [], is_table=is_table,
        total=dataset.facts.get("samples"),
    )  # fmt: skip


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
    users = _users(services, fingerprint)
    return page(
        request, "cache.html", title=f"{name} {fingerprint}", own=name, fingerprint=fingerprint,
        detail=detail, recipe=flat(recipe), others=others, differences=differences, other=other,
        users=users, datasets=_datasets_of(services, users),
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


SPANS = {"15 min": 900, "1 h": 3600, "6 h": 21_600, "1 day": 86_400, "7 days": 604_800}
"""Times that the timeline of the machine can cover, in seconds."""
Span = Annotated[int, Query(ge=min(SPANS.values()), le=max(SPANS.values()))]


@router.get("/machine")
def show_machine(request: Request, services: ServicesDep, seconds: Span = SPANS["1 h"]) -> Response:
    """Return the resources of the machine, and where the time of its workers went."""
    return page(
        request, "machine.html", title="Machine", machine=_machine(services), spans=SPANS,
        **_machine_timeline(services, seconds),
    )  # fmt: skip


@router.get("/parts/machine")
def part_machine(request: Request, services: ServicesDep) -> Response:
    """Return the figures of `show_machine`."""
    return page(request, "parts/machine.html", machine=_machine(services))


@router.get("/parts/machine/timeline")
def part_machine_timeline(request: Request, services: ServicesDep, seconds: Span = SPANS["1 h"]) -> Response:
    """Return the timeline of `show_machine`."""
    return page(request, "parts/machine_timeline.html", **_machine_timeline(services, seconds))


def _machine_timeline(services: Services, seconds: int) -> dict[str, Any]:
    said = {"phases_said": [*PHASES.items()], "seconds": seconds}
    try:
        found = machine_timeline(services.jobs, services.outbox, seconds)
    except DegradedError as error:  # the rest of the page asks no database
        return {**said, "timeline": None, "summary": [str(error)]}
    workers = 0 if services.supervisor is None else len(services.supervisor.workers())
    return {**said, "timeline": draw_machine(found, workers), "summary": found.summary}


def _jobs(request: Request, services: Services, number: int) -> dict[str, Any]:
    which = filter_of(request.query_params.multi_items())
    found = services.jobs.list(which, limit=PER_PAGE, offset=PER_PAGE * (number - 1))
    lines = {job.id: spark(_recent(services, job.id, job.epoch)) for job in found}
    total, counts = services.jobs.count(which), services.jobs.counts(replace(which, states=frozenset()))
    tags = {tag: list_link(which, tags=(*which.tags, tag)) for job in found for tag in job.tags}
    return {
        "jobs": found, "waits": services.datasets.generated_for(found), "lines": lines, "which": which,
        "chips": state_chips(which, counts),
        "heads": column_heads(which), "tag_links": tags, "every_state": list_link(which, states=frozenset()),
        "newer": list_link(which, number - 1), "older": list_link(which, number + 1),
        "query": query_of(which, number), "number": number, "total": total,
        "any_job": bool(sum(counts.values()) or services.jobs.count()),
        "last": max(1, -(-total // PER_PAGE)), "now": time.time(),
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
    waits = services.datasets.generated_for([job]).get(job.id, [])
    return {
        "times": [] if waits else times(job, ahead, left_s(job, rows, started, now), now), "waits": waits,
        "job": job, "actions": actions(job), "live": is_live(job), "now": now,
        "tiers": tier_bar(started), "told": told, "newest": rows[-1] if rows else {},
    }  # fmt: skip


def _names(datasets: Mapping[str, Dataset], ids: Iterable[str]) -> list[str]:
    """Return data sets by name, or by id if they are gone."""
    return [datasets[id].name if id in datasets else id for id in ids]


def _data_of(services: Services, job: Job) -> dict[str, Any]:
    """Return the data sets of a job, and its settings that have an effect on their kind."""
    datasets = {one.id: one for one in _datasets_of(services, [job])}
    kind = _kind(datasets, job)
    settings = {
        name: _names(datasets, cast("list[str]", value)) if name == "dataset_ids" else value
        for name, value in job.config.items()
        if has_effect(name, kind)
    }
    return {"datasets": [datasets[id] for id in job.dataset_ids if id in datasets], "settings": settings}


def _kind(datasets: Mapping[str, Dataset], job: Job) -> str | None:
    return next((datasets[id].kind for id in job.dataset_ids if id in datasets), None)


def _timeline(services: Services, job: Job) -> dict[str, Any]:
    drawn = draw_timeline(timeline_of(job, services.outbox))
    return {"timeline": drawn, "phases_said": [*PHASES.items()]}


def _log(services: Services, id: str) -> dict[str, Any]:
    lines, _, cut = stream.tail(services.folder.job(id).log, LOG_LINES)
    return {"lines": lines, "cut": cut}


def _jobs_on(services: Services, dataset: Dataset) -> list[Job]:
    """Return the newest jobs on a data set."""
    return services.jobs.list(JobFilter(dataset=dataset.id), limit=USERS)


def _maker(services: Services, dataset: Dataset) -> Job | None:
    """Return the job that generates a data set; None if it is not being generated, or the job is gone."""
    id = services.datasets.maker(dataset)
    with suppress(NotFoundError):
        return None if id is None else services.jobs.get(id)
    return None


def _users(services: Services, fingerprint: str) -> list[Job]:
    """Return the newest jobs that train on a cache."""
    found = services.jobs.list(limit=USERS)
    caches = _caches_by_job(services, found)
    return [job for job in found if any(print == fingerprint for _, print in caches[job.id])]


def _caches_by_job(services: Services, jobs: Sequence[Job]) -> dict[str, list[tuple[str, str]]]:
    """Return names and fingerprints of the caches that each job trains on; empty before it has begun to."""
    started = services.outbox.newest_of("started", [job.id for job in jobs])
    told: dict[str, Any] = {id: event.data.get("caches") or () for id, event in started.items()}
    return {job.id: [(one["name"], one["fingerprint"]) for one in told.get(job.id, ())] for job in jobs}


def _caches_of(services: Services, dataset: Dataset) -> list[CacheRow]:
    """Return the caches that jobs on a data set train on, if they still exist."""
    by_job = _caches_by_job(services, _jobs_on(services, dataset))
    used = {one for caches in by_job.values() for one in caches}
    return (
        [row for row in list_caches(services).caches if (row.name, row.fingerprint) in used] if used else []
    )


def _datasets_of(services: Services, jobs: Sequence[Job]) -> list[Dataset]:
    """Return the registered data sets that jobs name."""
    named = {id for job in jobs for id in job.dataset_ids}
    return [one for one in services.datasets.list(limit=500) if one.id in named] if named else []


def _machine(services: Services) -> dict[str, Any]:
    return {**look_at_machine(services), "state_dir": str(services.folder.path)}
