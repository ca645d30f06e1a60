"""The web application behind one guard, its server with limits, and the start and end of a service."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import socket
import stat
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import h11
import uvicorn
from fastapi import FastAPI, Security
from fastapi.security import HTTPBearer
from pydantic import SecretStr
from uvicorn.protocols.http.h11_impl import H11Protocol

import stoker
from stoker.errors import ConfigError
from stoker.plan.resources import disk_space
from stoker.plugins import load_extension
from stoker.runtime.files import replace_atomically
from stoker.runtime.threads import call_within
from stoker.schema import Json
from stoker.service import api, models, pages
from stoker.service.api_page import api_page_router
from stoker.service.executor import JobLimits, RayTarget
from stoker.service.security import Guard, read_secret
from stoker.service.services import Services, count_gpus, open_services
from stoker.service.supervisor import WorkerPlan, WorkerSupervisor
from stoker.service.webhooks import Webhooks, check_webhook
from stoker.service.worker import WorkerSettings

API = "/api/v1/training"
DESCRIPTION = """Jobs that train on cached data: make, follow, pause, resume and cancel them.

Every request needs `Authorization: Bearer TOKEN`; the token is in the file `token` of the state folder. A
request that fails is answered with `{"error", "fact", "hint", "fields": [{"path", "problem"}]}`: `fact` says
what is wrong, `hint` what to do, `error` both. Events come as Server-Sent Events (`/events`,
`/jobs/{job_id}/events`), each with a number: connect with the last one seen (`Last-Event-ID`, or `?after=`),
and none is missed.
"""
HEADERS = (
    ("Content-Security-Policy", pages.policy()),
    ("X-Content-Type-Options", "nosniff"),
    ("X-Frame-Options", "DENY"),
    ("Referrer-Policy", "same-origin"),  # with no-referrer a browser hides the Origin of our own forms
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Cache-Control", "no-store"),
)
"""Headers of every answer."""


class ServiceApp(FastAPI):
    """An application whose OpenAPI has our examples; FastAPI's own examples would lose their nulls."""

    def openapi(self) -> dict[str, Any]:
        """Return the OpenAPI description."""
        found = super().openapi()
        for name, shown in models.read_examples().items():
            found["components"]["schemas"][name]["examples"] = shown
        return found


def create_app(services: Services) -> FastAPI:
    """Return the application of one service behind its guard."""

    @asynccontextmanager
    async def running(_app: FastAPI) -> AsyncGenerator[None]:
        reading = asyncio.create_task(services.feed.run())
        yield
        services.feed.close()
        reading.cancel()
        with suppress(asyncio.CancelledError):
            await reading

    app = ServiceApp(
        title="Stoker training service",
        version=stoker.__version__,
        description=DESCRIPTION,
        openapi_url=f"{API}/openapi.json",
        docs_url=None,  # its scripts come from another server; `api_page` makes a page
        redoc_url=None,
        generate_unique_id_function=lambda route: (
            route.name
        ),  # programs that are made from it call these names
        lifespan=running,
    )
    app.state.services = services
    # Always, since clients of the earlier service need no setting. First: `/jobs/synthetic` is not a job.
    load_extension("service.earlier")(app)
    token = [Security(HTTPBearer(auto_error=False, description="The token of the state folder."))]
    for router in (
        api.jobs_router, api.live_router, api.datasets_router, api.caches_router, api.machine_router,
    ):  # fmt: skip
        app.include_router(router, prefix=API, dependencies=token)
    app.include_router(api.health_router)
    app.include_router(api.metrics_router, dependencies=token)
    app.include_router(pages.login_router)
    app.include_router(pages.router)
    app.include_router(api_page_router)
    app.mount("/static", pages.static_files(), name="static")
    models.install(app, page=pages.problem)
    app.add_middleware(  # the last one added is asked first
        Guard,
        auth=services.auth,
        hosts=services.hosts,
        limits=services.limits,
        headers=HEADERS,
        refusal_page=pages.refused,
        traffic=services.traffic,
        audit=services.audit,
    )
    return app


# ----------------------------------------------------------------------------------------------------------
# The server: uvicorn with limits.


CONNECTIONS = 200
"""Connections at a time; more are answered with 503. From three quarters on, each new one closes the oldest
that has not sent a complete request."""
LOOK_S = 10.0
"""Seconds between two checks of a connection; one without progress in between is closed."""
END_S = 5
"""How long running requests may take when the service ends."""


class BoundedConnection(H11Protocol):
    """A connection that is closed when the client sends no complete request, or does not read its answers.

    Otherwise a client that sends one byte a minute, or reads nothing, would hold connections and their
    buffers forever. No setting of uvicorn prevents this: `timeout_keep_alive` counts between requests, and
    `limit_concurrency` refuses the newest connection, not the slow one.
    """

    def connection_made(self, transport: Any) -> None:
        """Start the checks."""
        super().connection_made(transport)
        self._seen: tuple[object, ...] = ()
        self._since = self.loop.time()
        if len(self.connections) > CONNECTIONS * 3 // 4:
            self._make_room()
        self.loop.call_later(LOOK_S, self._look)

    @property
    def waits(self) -> bool:
        """True if the client has not sent a complete request."""
        return self.conn.their_state in (h11.IDLE, h11.SEND_BODY) and not self.transport.is_closing()

    def _make_room(self) -> None:
        """Close the connection that has waited longest, so that slow clients block no others."""
        others: list[BoundedConnection] = [
            one
            for one in self.connections
            if isinstance(one, BoundedConnection) and one is not self and one.waits
        ]
        if others:
            min(others, key=lambda one: one._since).transport.abort()

    def _look(self) -> None:
        unsent = self.transport.get_write_buffer_size()
        if self.transport.is_closing() and not unsent:
            return
        answering = not getattr(self.cycle, "response_complete", True)
        stuck = ("unsent", unsent) if unsent else () if answering else ("waiting", id(self.cycle))
        if stuck and stuck == self._seen:
            self.transport.abort()
            return
        self._seen = stuck
        self.loop.call_later(LOOK_S, self._look)


class ServiceServer(uvicorn.Server):
    """A server that ends its streams when it stops, so that it does not wait for them."""

    def __init__(self, config: uvicorn.Config, services: Services, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._services = services
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, then call `ready`."""
        await super().startup(sockets)
        self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the streams, then the rest."""
        self._services.feed.close()
        await super().shutdown(sockets)


def open_socket(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 takes a free one.

    Raises:
        ConfigError: The address cannot be used.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server((host, port), family=found[0], backlog=128)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"{host} port {port} cannot be opened: {error}", hint="Choose another --port or --host"
        ) from None


def address_of(listening: socket.socket) -> str:
    """Return the URL of a socket, as a browser on this machine would write it."""
    host, port = listening.getsockname()[:2]
    if ip_address(host).is_unspecified:
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def write_address(path: Path, address: str) -> None:
    """Write the URL of the service to its folder."""
    with replace_atomically(path) as temporary:
        temporary.write_text(address + "\n")
        temporary.chmod(stat.S_IRUSR | stat.S_IWUSR)


def make_server(services: Services, ready: Callable[[], None]) -> ServiceServer:
    """Return the server of a service's application."""
    config = uvicorn.Config(
        create_app(services),
        http=BoundedConnection,
        ws="none",
        loop="asyncio",
        lifespan="on",
        log_config=None,
        access_log=False,  # addresses hold login codes
        log_level="error",
        proxy_headers=False,  # a header must not say where a request comes from
        server_header=False,
        limit_concurrency=CONNECTIONS,
        h11_max_incomplete_event_size=services.limits.header_bytes,
        timeout_keep_alive=5,
        timeout_graceful_shutdown=END_S,
    )
    return ServiceServer(config, services, ready)


def run_server(server: ServiceServer, listening: socket.socket) -> None:
    """Serve until SIGINT or SIGTERM, and shut down; the signal is not raised again."""
    try:
        asyncio.run(server.serve(sockets=[listening]))
    except KeyboardInterrupt:
        pass  # uvicorn raises the signal again after its shutdown
    finally:
        listening.close()


# ----------------------------------------------------------------------------------------------------------
# A complete service: web server and workers, and their shutdown.


log = logging.getLogger("stoker")
STOP_S = 60.0
"""How long workers may take to stop their jobs with a checkpoint when the service ends."""
CLOSE_S = 30.0
"""How long killing workers and closing the database may take after that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """The settings of a service."""

    state_dir: Path
    host: str = "127.0.0.1"
    port: int = 8765
    """0: any free port."""
    database: str | None = None
    """Its URL; None: SQLite in the state folder."""
    workers: int | None = None
    """Jobs at a time; None: one per GPU, or one."""
    roots: tuple[Path, ...] = ()
    """Folders whose data jobs may read."""
    database_hosts: tuple[str, ...] = ()
    """PostgreSQL servers that data sets may name."""
    connections: tuple[str, ...] = ()
    """Databases that data sets may name, as `NAME=FILE`."""
    encoders: tuple[str, ...] = ()
    """Encoders that jobs may name, as `package.module:Class`."""
    hosts: tuple[str, ...] = ()
    """Additional host names of the service."""
    public_url: str | None = None
    """URL for browsers, behind a proxy; its name is one of `hosts`. None: its own address."""
    webhooks: tuple[str, ...] = ()
    """URLs that are told each change of a job's state."""
    webhook_secret_file: Path | None = None
    """Its secret signs what they are sent; None: it is not signed."""
    ray: RayTarget | None = None
    """The Ray cluster that runs jobs; None: this machine."""
    job_memory_bytes: int | None = None
    """Memory limit of a job's processes; None: no limit."""
    job_s: float | None = None
    """Time limit of an attempt at a job; None: no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceInfo:
    """A running service."""

    address: str
    login: str
    """URL that logs one browser in, once."""
    state_dir: str
    token_file: str
    database: str
    """Without its password."""
    workers: int
    local: bool
    """It listens only on this machine."""

    def to_json(self) -> dict[str, Json]:
        """Return the keys that scripts rely on."""
        return {name: value for name, value in asdict(self).items() if name != "local"}


def serve(
    settings: ServeSettings, environment: Mapping[str, str], tell: Callable[[ServiceInfo], None]
) -> None:
    """Serve until SIGINT or SIGTERM; running jobs stop at a checkpoint and continue at the next start.

    Args:
        settings: Of the service.
        environment: Names the usable GPUs. Workers and jobs inherit the environment of this process.
        tell: Called when it answers.
    Raises:
        StokerError: It cannot be started.
        StalledError: The storage of a folder does not answer.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core file would hold the token
    os.umask(0o077)
    plan = _plan(settings, environment)
    secret = _webhook_secret(settings)
    for folder in (settings.state_dir, *settings.roots):
        disk_space(folder)
    services = open_services(
        settings.state_dir,
        database=settings.database,
        roots=settings.roots,
        database_hosts=settings.database_hosts,
        connections=settings.connections,
        encoders=settings.encoders,
        hosts=settings.hosts,
        public_url=settings.public_url,
    )
    listening = open_socket(settings.host, settings.port)
    plan = replace(plan, settings=replace(plan.settings, access=services.access))
    supervisor = WorkerSupervisor(services.database, services.folder, plan)
    webhooks = Webhooks(services.database, settings.webhooks, secret) if settings.webhooks else None
    without_gpu = settings.ray is None and set(plan.devices) == {None}
    services = replace(services, supervisor=supervisor, webhooks=webhooks, without_gpu=without_gpu)
    address = address_of(listening)
    started = ServiceInfo(
        address=address,
        login=f"{(settings.public_url or address).rstrip('/')}/login?code={services.auth.new_code()}",
        state_dir=str(services.folder.path),
        token_file=str(services.folder.token),
        database=str(services.database),
        workers=plan.workers,
        local=listening.getsockname()[0] in services.hosts,
    )

    def ready() -> None:
        write_address(services.folder.path / "address", address)
        tell(started)

    supervisor.start()
    if webhooks is not None:
        webhooks.start()
    try:
        run_server(make_server(services, ready), listening)
    finally:
        # In a thread that may be left behind: workers are ended first, and then storage may not answer.
        limit_s = STOP_S + CLOSE_S
        call_within(limit_s, lambda: _end(supervisor, services), f"the state folder {services.folder.path}")


def _end(supervisor: WorkerSupervisor, services: Services) -> None:
    if not supervisor.stop(limit_s=STOP_S):
        log.warning("a worker did not end within %g s and was killed; its job resumes", STOP_S)
    if services.webhooks is not None:
        services.webhooks.stop()
    services.database.close()


def _webhook_secret(settings: ServeSettings) -> SecretStr | None:
    """Return the secret for the webhooks of a service, whose URLs are valid.

    Raises:
        ConfigError: A URL or the file cannot be used.
    """
    for url in settings.webhooks:
        check_webhook(url)
    path = settings.webhook_secret_file
    if path is not None and not settings.webhooks:
        raise ConfigError(f"--webhook-secret-file {path} is given without --webhook", hint="Give both")
    return (
        None if path is None else read_secret(path, f"Make one: (umask 077; openssl rand -hex 32 > {path})")
    )


def _plan(settings: ServeSettings, environment: Mapping[str, str]) -> WorkerPlan:
    """Return the plan of the workers: one per usable GPU, unless set otherwise.

    Raises:
        ConfigError: No job could start with a limit, or the limit would not be enforced.
    """
    if 0 in (settings.job_memory_bytes, settings.job_s):
        raise ConfigError("a limit of a job is 0", hint="Give --job-memory and --job-time above 0")
    named = environment.get("CUDA_VISIBLE_DEVICES")
    devices = [str(i) for i in range(count_gpus())] if named is None else [d for d in named.split(",") if d]
    wanted = settings.workers if settings.workers is not None else max(1, len(devices))
    limits = JobLimits(memory_bytes=settings.job_memory_bytes, wall_s=settings.job_s)
    told = WorkerSettings(limits=limits, ray=settings.ray)
    if settings.ray is not None:
        if settings.job_memory_bytes is not None:
            raise ConfigError(
                "--job-memory has no effect on nodes of a Ray cluster",
                hint="Leave it out, and set the limit there",
            )
        # A worker only watches a job of the cluster, which assigns GPUs itself.
        return WorkerPlan(workers=settings.workers or 1, settings=told)
    return WorkerPlan(workers=wanted, devices=tuple(devices) or (None,), settings=told)
