"""The web application: routes, pages and files behind one guard."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from typing import Any

from fastapi import FastAPI, Security
from fastapi.security import HTTPBearer

import stoker
from stoker.service import (
    answers,
    dashboard,
    pages,
    routes_caches,
    routes_datasets,
    routes_jobs,
    routes_live,
    routes_machine,
)
from stoker.service.earlier import Earlier, add_earlier
from stoker.service.examples import BY_MODEL
from stoker.service.guard import Guard, Rules
from stoker.service.services import Services

API = "/api/v1/training"
DESCRIPTION = """Jobs that train on cached data: make, follow, pause, resume and cancel them.

Every request needs `Authorization: Bearer TOKEN`; the token is in the file `token` of the state folder. A
request that fails is answered with `{"error": ..., "fields": [{"path", "problem"}]}`. Events come as
Server-Sent Events (`/events`, `/jobs/{job_id}/events`), each with a number: connect with the last one seen
(`Last-Event-ID`, or `?after=`), and none is missed.
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
"""What every answer carries."""


class Described(FastAPI):
    """An application whose description has examples; the framework's own would lose their nulls."""

    def openapi(self) -> dict[str, Any]:
        """The OpenAPI."""
        found = super().openapi()
        for name, shown in BY_MODEL.items():
            found["components"]["schemas"][name]["examples"] = list(shown)
        return found


def create_app(services: Services) -> FastAPI:
    """The application of one service, guarded."""

    @asynccontextmanager
    async def running(_app: FastAPI) -> AsyncGenerator[None]:
        reading = asyncio.create_task(services.feed.run())
        yield
        services.feed.close()
        reading.cancel()
        with suppress(asyncio.CancelledError):
            await reading

    app = Described(
        title="Stoker training service",
        version=stoker.__version__,
        description=DESCRIPTION,
        openapi_url=f"{API}/openapi.json",
        docs_url=None,  # its scripts come from elsewhere
        redoc_url=None,
        lifespan=running,
    )
    app.state.services = services
    add_earlier(app)
    token = [Security(HTTPBearer(auto_error=False, description="The token of the state folder."))]
    for module in (routes_jobs, routes_live, routes_datasets, routes_caches, routes_machine):
        app.include_router(module.router, prefix=API, dependencies=token)
    app.include_router(routes_machine.health)
    app.include_router(routes_machine.figures, dependencies=token)
    app.include_router(pages.router)
    app.include_router(dashboard.router)
    app.mount("/static", pages.static_files(), name="static")
    answers.install(app)
    rules = Rules(
        auth=services.auth,
        hosts=services.hosts,
        limits=services.limits,
        headers=HEADERS,
        stranger=pages.log_in_first,
        traffic=services.traffic,
    )
    app.add_middleware(Earlier)
    app.add_middleware(Guard, rules)  # the last one added is asked first
    return app
