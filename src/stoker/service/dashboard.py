"""The pages: jobs, one job, a new job, data sets, one of them, caches, one cache, the machine.

A page is made whole on the server. Its script listens to the service's events and asks for those parts of it
again that have changed (`/parts/...`); without a script a page is right, and stays as it was.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.responses import Response

from stoker.errors import NotFound, ResourceError, SourceError, StalledError, StokerError
from stoker.service import pages, stream
from stoker.service.answers import status_of
from stoker.service.database import State
from stoker.service.figures import look_at_machine
from stoker.service.pages import page
from stoker.service.routes_caches import Name, Print, inspect_cache, list_caches, why
from stoker.service.routes_datasets import Id as DatasetId
from stoker.service.routes_jobs import Id
from stoker.service.services import Here, Services

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
    first, more = pages.form_fields()
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
    drawn = {"charts": pages.charts(rows), "rows": rows}
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
        figures=pages.figures(dataset.facts), spec=_flat(dataset.spec),
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
    lines = {job.id: pages.spark(_recent(here, job.id, job.epoch)) for job in found}
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
    except NotFound:
        return []  # it was deleted since it was listed


def _job(here: Services, id: str) -> dict[str, Any]:
    job = here.jobs.get(id)
    events = here.outbox.read(0, job=job.id, kinds=pages.MILESTONES)
    started = next((event for event in reversed(events) if event.kind == "started"), None)
    first = here.outbox.read(started.number, job=job.id, limit=1) if started else []
    told = started.data if started else {}
    return {
        "job": job, "actions": pages.actions(job), "live": pages.is_live(job), "now": time.time(),
        "phases": pages.phases(events, first[0] if first else None),
        "tiers": pages.where_records_are(started), "told": told, "newest": _newest(here, job.id, job.epoch),
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
