"""Everything that routes and pages work with, made once at the start."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from fastapi import Depends
from starlette.requests import HTTPConnection

from stoker.service.auth import Auth, load_token
from stoker.service.database import Database
from stoker.service.folders import StateFolder
from stoker.service.guard import LOOPBACK, RequestLimits
from stoker.service.jobs import Jobs
from stoker.service.operations import Operations
from stoker.service.outbox import Outbox
from stoker.service.paths import Roots
from stoker.service.state_dir import prepare_state_dir
from stoker.service.stream import Feed
from stoker.service.traffic import Traffic


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """One service. Its parts may be used from any thread, but `feed`, which belongs to the event loop."""

    folder: StateFolder
    database: Database
    jobs: Jobs
    outbox: Outbox
    auth: Auth
    roots: Roots
    """Folders below which requests may name data."""
    hosts: frozenset[str]
    """Names by which the service may be called."""
    feed: Feed
    limits: RequestLimits = field(default_factory=RequestLimits)
    operations: Operations = field(default_factory=Operations)
    """What takes longer than an answer may."""
    traffic: Traffic = field(default_factory=Traffic)


def open_services(
    state_dir: Path,
    *,
    database: str | None = None,
    roots: Sequence[Path] = (),
    hosts: Collection[str] = (),
) -> Services:
    """Open a state folder, made at the first call.

    Args:
        database: `sqlite:///PATH` or `postgresql://...`; None: `stoker.db` in the folder.
        roots: Folders whose data jobs may read, beside `data` in the state folder.
        hosts: Names by which the service may be called, beside those of the loopback.
    Raises:
        StokerError: Folder, token, roots or database cannot be used.
    """
    folder = prepare_state_dir(state_dir)
    token = load_token(folder.token)
    opened = Database(database or f"sqlite:///{folder.database}")
    outbox = Outbox(opened)
    return Services(
        folder=folder,
        database=opened,
        jobs=Jobs(opened),
        outbox=outbox,
        auth=Auth(token),
        roots=Roots([folder.data, *roots]),
        hosts=LOOPBACK | {host.lower() for host in hosts},
        feed=Feed(outbox),
    )


def services_of(connection: HTTPConnection) -> Services:
    """The services of the app that a request came to."""
    return connection.app.state.services


Here = Annotated[Services, Depends(services_of)]
