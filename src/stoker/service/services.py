"""The objects that routes and pages use, created once at the start, and figures of the service.

Figures are read so that a hang costs only the figure that hangs.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar
from urllib.parse import SplitResult, urlsplit

import psutil
import pynvml
from fastapi import Depends
from starlette.requests import HTTPConnection

from stoker.errors import ConfigError, NotFoundError, Problem, ResourceError
from stoker.monitor.meter import MissingGpu, open_gpu
from stoker.plan.resources import probe as probe_machine
from stoker.runtime.threads import Pool
from stoker.service.audit import AuditLog
from stoker.service.background import CachedValue, Operations
from stoker.service.connections import parse_connections, with_urls
from stoker.service.database import Database, Outbox
from stoker.service.datasets import Datasets, describe
from stoker.service.folders import DiskRoom, StateFolder, prepare_state_dir
from stoker.service.job_config import JobConfig, JobFieldError, settings_of
from stoker.service.jobs import Job, Jobs
from stoker.service.probes import probe
from stoker.service.security import LOOPBACK, Auth, DataAccess, RequestLimits, Roots, load_token
from stoker.service.stream import EventFeed
from stoker.service.supervisor import WorkerSupervisor
from stoker.service.webhooks import Webhooks

if TYPE_CHECKING:
    from stoker.service.database import State


BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds of the buckets of answer times."""


class RequestTraffic:
    """Counts of one process; changed only by its event loop."""

    def __init__(self) -> None:
        self.answers = Counter[int]()
        """Answers by status, refusals included."""
        self._buckets = [0] * (len(BOUNDS_S) + 1)
        self._seconds = 0.0

    def note(self, status: int, seconds: float) -> None:
        """Count one answer that began after `seconds`."""
        self.answers[status] += 1
        self._buckets[bisect_left(BOUNDS_S, seconds)] += 1
        self._seconds += seconds

    def lines(self) -> Iterator[str]:
        """Yield the counts in Prometheus' text format."""
        yield from counts("stoker_answers_total", "counter", "status", self.answers)
        yield "# TYPE stoker_answer_seconds histogram"
        total = 0
        for bound, count in zip((*BOUNDS_S, "+Inf"), self._buckets, strict=True):
            total += count
            yield f'stoker_answer_seconds_bucket{{le="{bound}"}} {total}'
        yield f"stoker_answer_seconds_sum {self._seconds:.6f}"
        yield f"stoker_answer_seconds_count {total}"


def counts(
    name: str, kind: str, label: str, found: Mapping[int, float] | Mapping[str, float]
) -> Iterator[str]:
    """Yield the lines of one metric with a label; no line without values.

    >>> list(counts("jobs", "gauge", "state", {"queued": 2}))
    ['# TYPE jobs gauge', 'jobs{state="queued"} 2']
    """
    if found:
        yield f"# TYPE {name} {kind}"
    for value, count in found.items():
        yield f'{name}{{{label}="{_label(str(value))}"}} {count}'


# ----------------------------------------------------------------------------------------------------------
# The figures of the service and its machine.


T = TypeVar("T")


def look_at_machine(services: Services) -> dict[str, Any]:
    """Return memory by the tightest limit, CPUs, disk of the state folder and GPUs; None where unknown."""
    found = probe_machine()
    disk, driver = services.figures.disk.get(), services.figures.gpus.get()
    hooks = [] if services.webhooks is None else services.webhooks.troubles()
    return {
        "host_bytes": found.host_bytes,
        "host_total_bytes": found.host_total_bytes,
        "host_limit": found.host_limit,
        "cpus": found.cpus,
        "cpu_limit": found.cpu_limit,
        "disk_bytes": None if disk.value is None else disk.value.bytes,
        "disk_inodes": None if disk.value is None else disk.value.inodes,
        "gpus": driver.value or [],
        "stale": [text for text in (disk.stale, driver.stale, *hooks) if text],
        "workers": []
        if services.supervisor is None
        else [asdict(one) for one in services.supervisor.workers()],
    }


def count_gpus() -> int:
    """Return the number of GPUs of the driver; 0 without a driver."""
    return len(_gpu_names())


def _gpu_names() -> list[str]:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        return [str(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles]
    except pynvml.NVMLError:
        return []
    finally:
        pynvml.nvmlShutdown()


def gpus() -> list[dict[str, Any]]:
    """Return the utilization of each GPU now."""
    rows: list[dict[str, Any]] = []
    for name in _gpu_names():
        gpu = open_gpu(name)
        if isinstance(gpu, MissingGpu):
            continue
        try:
            rows.append(gpu.sample().to_json())
        finally:
            gpu.close()
    return rows


def as_prometheus(services: Services) -> str:
    """Return jobs, answers, streams, memory, disk and this process in Prometheus' text format.

    A figure that cannot be read now has its last known value and age, or is left out if it was never read.
    """
    jobs, disk, driver = services.figures.jobs.get(), services.figures.disk.get(), services.figures.gpus.get()
    host, process = probe_machine(), psutil.Process()
    gauges = {
        "stoker_up": 1,
        "stoker_database_up": int(jobs.error is None),
        "stoker_degraded": int(services.degraded is not None),
        "stoker_streams": services.feed.clients,
        "stoker_host_free_bytes": host.host_bytes,
        "stoker_host_limit_bytes": host.host_total_bytes,
        "stoker_disk_free_bytes": None if disk.value is None else disk.value.bytes,
        "process_resident_memory_bytes": process.memory_info().rss,
        "process_open_fds": process.num_fds(),
        "process_threads": process.num_threads(),
        "process_start_time_seconds": process.create_time(),
    }
    lines: list[str] = []
    for name, value in gauges.items():
        lines += [] if value is None else [f"# TYPE {name} gauge", f"{name} {value}"]
    spent = process.cpu_times()
    lines += ["# TYPE process_cpu_seconds_total counter"]
    lines += [f"process_cpu_seconds_total {spent.user + spent.system:.2f}"]
    asked = {"jobs": jobs, "disk": disk, "gpus": driver}
    ages = {name: round(one.age_s, 3) for name, one in asked.items() if one.value is not None}
    busy = {str(i): gpu["utilization"] for i, gpu in enumerate(driver.value or ()) if gpu.get("utilization")}
    lines += counts("stoker_figure_age_seconds", "gauge", "figure", ages)
    lines += counts("stoker_jobs", "gauge", "state", {str(one): n for one, n in (jobs.value or {}).items()})
    lines += counts("stoker_gpu_utilisation", "gauge", "gpu", busy)
    lines += _job_lines(services)
    if services.webhooks is not None:
        for name, kind, values in services.webhooks.figures():
            lines += counts(name, kind, "webhook", values)
    lines += services.traffic.lines()
    return "\n".join(lines) + "\n"


def _job_lines(services: Services) -> list[str]:
    """Return the queue, the workers, and the figures of each job that runs."""
    workers = [] if services.supervisor is None else services.supervisor.workers()
    alive = {"alive": sum(one.alive for one in workers), "wanted": len(workers)}
    lines = [*counts("stoker_workers", "gauge", "state", alive)]
    found = services.figures.queue.get().value
    if found is None:
        return lines
    lines += ["# TYPE stoker_queue_oldest_seconds gauge"]
    lines += [f"stoker_queue_oldest_seconds {found.longest_wait_s:.3f}"]
    figures: dict[str, dict[str, float | None]] = {
        "stoker_job_stall_ratio": {job.id: job.stall for job in found.jobs},
        "stoker_job_progress_ratio": {job.id: job.progress for job in found.jobs},
        "stoker_job_train_loss": {job.id: job.train_loss for job in found.jobs},
        "stoker_job_val_loss": {job.id: job.val_loss for job in found.jobs},
        "stoker_job_samples_per_second": {job.id: found.rates.get(job.id) for job in found.jobs},
    }
    names = {job.id: job.name for job in found.jobs}
    for figure, values in figures.items():
        known = {id: value for id, value in values.items() if value is not None}
        lines += [f"# TYPE {figure} gauge"] if known else []
        lines += [
            f'{figure}{{job_id="{id}",name="{_label(names[id])}"}} {value}' for id, value in known.items()
        ]
    return lines


def _label(text: str) -> str:
    r"""Return text as the value of a label.

    >>> print(_label('a "b"'))
    a \"b\"
    """
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


FIGURE_S = 2.0
"""Timeout of a figure: with three that hang a scrape still takes less than ten seconds."""
SCAN_S = 20.0
"""Timeout of listing the caches: less than that of an answer."""
FOLDERS, FOLDER_S = 8, 10.0
"""How many folders are read at once, and the timeout of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueFigures:
    """The queue and the jobs that run."""

    longest_wait_s: float
    jobs: list[Job]
    """Those that a worker has."""
    rates: dict[str, float]
    """Samples a second of their last epochs, by id."""

    @classmethod
    def of(cls, jobs: Jobs) -> QueueFigures:
        """Read them."""
        running = jobs.running()
        rates: dict[str, float] = {}
        for job in running:
            with suppress(NotFoundError):  # deleted since
                rows = jobs.metrics(job.id, limit=1, after=max(0, job.epoch - 1))
                rate = rows[-1].get("samples_per_s") if rows else None
                rates |= {job.id: float(rate)} if isinstance(rate, int | float) else {}
        return cls(longest_wait_s=jobs.longest_wait_s(), jobs=running, rates=rates)


class Figures:
    """Reads the database, the disk, the GPU driver and the folder of caches."""

    def __init__(self, folder: StateFolder, jobs: Jobs) -> None:
        self.jobs: CachedValue[dict[State, int]] = CachedValue(
            jobs.counts, "the count of jobs", wait_s=FIGURE_S
        )
        """Jobs by state."""
        self.queue: CachedValue[QueueFigures] = CachedValue(
            lambda: QueueFigures.of(jobs), "the queue of jobs", wait_s=FIGURE_S
        )
        """What waits, and what runs."""
        self.disk = DiskRoom(folder)
        self.gpus: CachedValue[list[dict[str, Any]]] = CachedValue(
            gpus, "the driver of the GPUs", wait_s=FIGURE_S
        )
        """One row per GPU."""
        self.caches: CachedValue[list[dict[str, Any]]] = CachedValue(
            lambda: find_caches(folder), f"the folder of caches {folder.caches}", wait_s=SCAN_S
        )
        """One row per cache."""
        self._folders = Pool(FOLDERS, "stoker-look")

    def look_into(self, what: str, work: Callable[[], T]) -> T:
        """Return what `work` finds in a folder, of `what`; errors as `Pool.call_within`."""
        return self._folders.call_within(FOLDER_S, work, what)


def find_caches(folder: StateFolder) -> list[dict[str, Any]]:
    """Return one row for each cache below a state folder."""
    from stoker.store.gc import scan

    return [
        {
            "name": found.name,
            "fingerprint": found.path.name,
            "bytes": found.bytes,
            "complete": found.complete,
            "unused_s": max(0.0, found.unused_s),
            "claims": found.live_claims(),
            "broken": found.broken,
        }
        for found in scan(folder.caches)
    ]


# ----------------------------------------------------------------------------------------------------------
# The objects of a service.


PROBES = 2
"""Data sets read at a time: each needs a process with some hundred megabytes."""
PROBE_S, WAIT_S = 20.0, 5.0
"""Timeout of such a process, and of waiting for a free place: together less than the limit of an answer."""


class FewProbes:
    """Reads data sets (`probes.probe`), a few at a time."""

    def __init__(self) -> None:
        self._free = threading.BoundedSemaphore(PROBES)

    def probe(self, what: str, kind: str, spec: Mapping[str, Any], **given: Any) -> Any:
        """Return what `probes.probe` returns. One that reports its progress is an operation, limited as such.

        Raises:
            ResourceError: Too many are being read.
        """
        if "on_progress" in given:
            return probe(what, kind, spec, **given)
        if not self._free.acquire(timeout=WAIT_S):
            raise ResourceError(
                f"{PROBES} data sets are being read, which is the limit", hint="Try again in a while"
            )
        try:
            return probe(what, kind, spec, timeout_s=PROBE_S, **given)
        finally:
            self._free.release()


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """One service. Its parts may be used from any thread, except `feed`, which belongs to the event loop."""

    folder: StateFolder
    database: Database
    jobs: Jobs
    outbox: Outbox
    datasets: Datasets
    audit: AuditLog
    auth: Auth
    roots: Roots
    """Folders below which requests may name data."""
    access: DataAccess
    """Registered data that may be read since this start."""
    hosts: frozenset[str]
    """Host names of the service."""
    feed: EventFeed
    secure: bool
    """Browsers reach it only through TLS."""
    figures: Figures
    """Figures that take long to read, or may hang."""
    limits: RequestLimits = field(default_factory=RequestLimits)
    webhooks: Webhooks | None = None
    """Tell other programs what becomes of jobs; None: no URL is named."""
    without_gpu: bool = False
    """Jobs run on this machine, which has no GPU for them."""
    supervisor: WorkerSupervisor | None = None
    """Supervises the workers; None: only requests are answered."""
    operations: Operations = field(default_factory=Operations)
    """Work that takes longer than a request may."""
    plans: Operations = field(default_factory=Operations)
    """Plans of the page of a new job, with a limit of their own, so that they delay no verify."""
    checks: Operations = field(default_factory=Operations)
    """Checks of all samples, which take hours, with a limit of their own: they delay nothing else."""
    removals: Operations = field(default_factory=Operations)
    """Removals of caches, with a separate limit: a long verify does not delay freeing space."""
    traffic: RequestTraffic = field(default_factory=RequestTraffic)

    @property
    def degraded(self) -> str | None:
        """The parts that do not work now; None: everything works."""
        return self.database.trouble.why


def open_services(  # noqa: PLR0913 - settings of an operator, each by name
    state_dir: Path,
    *,
    database: str | None = None,
    roots: Sequence[Path] = (),
    database_hosts: Sequence[str] = (),
    connections: Sequence[str] = (),
    encoders: Sequence[str] = (),
    hosts: Collection[str] = (),
    public_url: str | None = None,
) -> Services:
    """Open a state folder, created at the first call; return the objects of its service.

    Args:
        database: `sqlite:///PATH` or `postgresql://...`; None: `stoker.db` in the folder.
        roots: Folders whose data jobs may read, in addition to `data` in the state folder.
        database_hosts: PostgreSQL servers that data sets may name; `local`: the default socket.
        connections: Databases that data sets may name, as `NAME=FILE`; see `connections.py`.
        encoders: Encoders that jobs may name, as `package.module:Class`.
        hosts: Host names of the service, in addition to those of the loopback.
        public_url: URL for browsers, as `https://NAME`, of a proxy with TLS.
    Raises:
        StokerError: Folder, token, roots or database cannot be used.
    """
    public = _public(public_url)
    folder = prepare_state_dir(state_dir)
    token = load_token(folder.token)
    opened = Database(database or f"sqlite:///{folder.database}")
    outbox = Outbox(opened)
    known = Roots([folder.data, *roots])
    access = DataAccess(
        roots=known.places,
        servers=tuple(database_hosts),
        connections=parse_connections(connections),
        encoders=tuple(encoders),
    )
    jobs = Jobs(opened)
    return Services(
        folder=folder,
        database=opened,
        jobs=jobs,
        outbox=outbox,
        audit=AuditLog(opened),
        auth=Auth(token, ended=folder.path / "ended-sessions.json"),
        roots=known,
        datasets=Datasets(opened, folder.data, known.check, probe=FewProbes().probe, access=access),
        access=access,
        hosts=LOOPBACK | {host.lower() for host in (*hosts, public.hostname or "") if host},
        secure=public.scheme == "https",
        feed=EventFeed(outbox, lambda: opened.trouble.why),
        figures=Figures(folder, jobs),
    )


def _public(url: str | None) -> SplitResult:
    """Return the parts of a public address, empty without one.

    Raises:
        ConfigError: It is not an address, or has more than scheme, name and port.
    """
    parts = urlsplit(url or "")
    if url is None:
        return parts
    try:
        sound = parts.scheme in ("http", "https") and parts.hostname and (parts.port or 1) > 0
    except ValueError:  # a port that is not a number
        sound = False
    if not sound or parts.username is not None or parts.path.strip("/") or parts.query or parts.fragment:
        raise ConfigError(f"--public-url {url}: expected https://NAME or https://NAME:PORT, and no path")
    return parts


def services_of(connection: HTTPConnection) -> Services:
    """Return the services of the application that received a request."""
    return connection.app.state.services


async def _injected(connection: HTTPConnection) -> Services:
    """Return the services for a route; a function that is not async would run in a thread."""
    return services_of(connection)


ServicesDep = Annotated[Services, Depends(_injected)]


def require_fit(services: Services, config: JobConfig) -> tuple[list[dict[str, Any]], str | None]:
    """Return the data sets that a configuration names, and the password of their database, if all fit.

    Raises:
        ConfigError: A data set is not registered, or is on a server that the service may not read; the
            configuration does not fit, or a value in its `settings` is invalid; its encoder is not
            allowed; or it wants a GPU, and jobs run on a machine without one.
        ConflictError: A data set was to be generated, and was not.
        PathRefusedError: A data set is outside the current roots.
    """
    if config.accelerator == "gpu" and services.without_gpu:
        missing = Problem(
            "config.accelerator is 'gpu', and jobs run on this machine, which has no GPU for them",
            "Give accelerator='auto', which takes one where there is one, or 'cpu'",
        )
        raise JobFieldError.of_fields([("accelerator", missing)])
    try:
        found = describe(services.database, config.dataset_ids)
    except NotFoundError as error:
        hint = f"{error.problem.hint}; `stoker job register` or POST to the same address registers one, as "
        hint += '{"kind": "radio", "name": NAME, "url": DATABASE, "set": UUID}'
        unknown = Problem(f"config.dataset_ids: {error.problem.fact}", hint)
        raise JobFieldError.of_fields([("dataset_ids", unknown)]) from None
    try:
        services.access.check_settings(config.settings)
    except ConfigError as error:
        raise JobFieldError.of_fields([("settings.encoder.target", error.problem)]) from None
    for one in services.datasets.resolve(config.dataset_ids):
        services.datasets.check_access(one)
    opened, password = with_urls(found, services.access.connections)
    folder = services.folder
    settings_of(
        config, opened, caches=str(folder.caches), run_dir=str(folder.path / "plan"), epochs=config.epochs
    )
    return opened, password
