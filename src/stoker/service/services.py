"""The objects that routes and pages use, created once at the start."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import SplitResult, urlsplit

from fastapi import Depends
from starlette.requests import HTTPConnection

from stoker.errors import ConfigError, ResourceError
from stoker.service.background import Operations
from stoker.service.database import Database, Outbox
from stoker.service.datasets import Datasets
from stoker.service.figures import Figures, RequestTraffic
from stoker.service.folders import StateFolder, prepare_state_dir
from stoker.service.jobs import Jobs
from stoker.service.probes import probe
from stoker.service.security import LOOPBACK, Auth, DataAccess, RequestLimits, Roots, load_token
from stoker.service.stream import EventFeed
from stoker.service.supervisor import WorkerSupervisor

PROBES = 2
"""Data sets read at a time: each needs a process with some hundred megabytes."""
PROBE_S, WAIT_S = 20.0, 5.0
"""Timeout of such a process, and of waiting for a free place: together less than the limit of an answer."""


class FewProbes:
    """Reads data sets (`probes.probe`), a few at a time."""

    def __init__(self) -> None:
        self._free = threading.BoundedSemaphore(PROBES)

    def probe(self, what: str, kind: str, spec: Mapping[str, Any], **given: Any) -> Any:
        """Return what `probes.probe` returns.

        Raises:
            ResourceError: Too many are being read.
        """
        if not self._free.acquire(timeout=WAIT_S):
            raise ResourceError(
                f"{PROBES} data sets are being read, which is the limit. Try again in a while"
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
    supervisor: WorkerSupervisor | None = None
    """Supervises the workers; None: only requests are answered."""
    operations: Operations = field(default_factory=Operations)
    """Work that takes longer than a request may."""
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
    encoders: Sequence[str] = (),
    hosts: Collection[str] = (),
    public_url: str | None = None,
) -> Services:
    """Open a state folder, created at the first call; return the objects of its service.

    Args:
        database: `sqlite:///PATH` or `postgresql://...`; None: `stoker.db` in the folder.
        roots: Folders whose data jobs may read, in addition to `data` in the state folder.
        database_hosts: PostgreSQL servers that data sets may name; `local`: the default socket.
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
    access = DataAccess(roots=known.places, servers=tuple(database_hosts), encoders=tuple(encoders))
    jobs = Jobs(opened)
    return Services(
        folder=folder,
        database=opened,
        jobs=jobs,
        outbox=outbox,
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
