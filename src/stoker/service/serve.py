"""A whole service: web server, workers, and their end in order."""

from __future__ import annotations

import logging
import os
import resource
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from stoker.errors import ConfigError
from stoker.plan.resources import disk_space
from stoker.runtime.threads import call_within
from stoker.schema import Json
from stoker.service.executor import Limits
from stoker.service.machine import count_gpus
from stoker.service.ray_client import RayTarget
from stoker.service.server import address_of, make_server, open_socket, run_server, write_address
from stoker.service.services import Services, open_services
from stoker.service.supervise import Staff, Supervisor

log = logging.getLogger("stoker")
STOP_S = 60.0
"""How long workers get to stop their jobs at a checkpoint when the service ends."""
CLOSE_S = 30.0
"""How long what comes after that may take: workers that are killed, and the database."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """How a service is started."""

    state_dir: Path
    host: str = "127.0.0.1"
    port: int = 8765
    """0: any free one."""
    database: str | None = None
    """Its address; None: SQLite in the state folder."""
    workers: int | None = None
    """Jobs at a time; None: one for each GPU, or one."""
    roots: tuple[Path, ...] = ()
    """Folders whose data jobs may read."""
    database_hosts: tuple[str, ...] = ()
    """PostgreSQL servers that data sets may name."""
    encoders: tuple[str, ...] = ()
    """Encoders that jobs may name, as `package.module:Class`."""
    hosts: tuple[str, ...] = ()
    """Further names by which it may be called."""
    public_url: str | None = None
    """Where browsers find it, behind a proxy; its name is one of `hosts`. None: at its own address."""
    ray: RayTarget | None = None
    """The Ray cluster that runs jobs; None: this machine."""
    job_memory_bytes: int | None = None
    """What a job's processes may hold; None: no limit."""
    job_s: float | None = None
    """How long an attempt at a job may take; None: no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A service that answers."""

    address: str
    login: str
    """Opens a session in one browser, once."""
    state_dir: str
    token_file: str
    database: str
    """Without its password."""
    workers: int
    local: bool
    """It listens on this machine alone."""

    def to_json(self) -> dict[str, Json]:
        """The keys that scripts rely on."""
        return {
            "address": self.address,
            "login": self.login,
            "state_dir": self.state_dir,
            "token_file": self.token_file,
            "database": self.database,
            "workers": self.workers,
        }


def serve(settings: ServeSettings, environment: Mapping[str, str], tell: Callable[[Started], None]) -> None:
    """Serve until SIGINT or SIGTERM; running jobs stop at a checkpoint and continue at the next start.

    Args:
        settings: How.
        environment: What workers and jobs see of it.
        tell: Called once it answers.
    Raises:
        StokerError: It cannot be started.
        StalledError: The storage of a folder does not answer at the start, or at the end.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core file would hold the token
    os.umask(0o077)
    staff = _staff(settings, environment)
    for folder in (settings.state_dir, *settings.roots):
        disk_space(folder)
    services = open_services(
        settings.state_dir,
        database=settings.database,
        roots=settings.roots,
        database_hosts=settings.database_hosts,
        encoders=settings.encoders,
        hosts=settings.hosts,
        public_url=settings.public_url,
    )
    listening = open_socket(settings.host, settings.port)
    staff = replace(staff, access=services.access)
    supervisor = Supervisor(services.database, services.folder, staff, environment)
    services = replace(services, supervisor=supervisor)
    address = address_of(listening)
    started = Started(
        address=address,
        login=f"{(settings.public_url or address).rstrip('/')}/login?code={services.auth.new_code()}",
        state_dir=str(services.folder.path),
        token_file=str(services.folder.token),
        database=str(services.database),
        workers=staff.workers,
        local=listening.getsockname()[0] in services.hosts,
    )

    def ready() -> None:
        write_address(services.folder.path / "address", address)
        tell(started)

    supervisor.start()
    try:
        run_server(make_server(services, ready), listening)
    finally:
        # In a thread that is left behind: workers are ended first, and then storage may not answer.
        limit_s = STOP_S + CLOSE_S
        call_within(limit_s, lambda: _end(supervisor, services), f"the state folder {services.folder.path}")


def _end(supervisor: Supervisor, services: Services) -> None:
    if not supervisor.stop(limit_s=STOP_S):
        log.warning("a worker did not end within %g s and was killed; its job resumes", STOP_S)
    services.database.close()


def _staff(settings: ServeSettings, environment: Mapping[str, str]) -> Staff:
    """One worker for each GPU that we may use, unless told otherwise.

    Raises:
        ConfigError: A limit with which no job could begin, or that nobody would hold.
    """
    if 0 in (settings.job_memory_bytes, settings.job_s):
        raise ConfigError("a job may use 0 of its memory or time. Give --job-memory and --job-time above 0")
    named = environment.get("CUDA_VISIBLE_DEVICES")
    devices = [str(i) for i in range(count_gpus())] if named is None else [d for d in named.split(",") if d]
    wanted = settings.workers if settings.workers is not None else max(1, len(devices))
    limits = Limits(memory_bytes=settings.job_memory_bytes, wall_s=settings.job_s)
    if settings.ray is not None:
        if settings.job_memory_bytes is not None:
            raise ConfigError(
                "--job-memory is not looked at on nodes of a Ray cluster. Leave it out, and limit it there"
            )
        # A worker only watches a job of the cluster, which hands out its GPUs itself.
        return Staff(workers=settings.workers or 1, limits=limits, ray=settings.ray)
    return Staff(workers=wanted, devices=tuple(devices) or (None,), limits=limits)
