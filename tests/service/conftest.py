"""The service without a server, and its database on both of the systems it runs on."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event
from sqlalchemy.pool import Pool

from stoker.service.database import COUNTERS, EVENTS, JOBS, METRICS, Database
from stoker.service.server import create_app
from stoker.service.services import Services, open_services
from tests.sources.sql.server import Server


@pytest.fixture(autouse=True, scope="module")
def no_wait_for_sqlite() -> Iterator[None]:
    """A commit of SQLite does not wait for the disk: no test cuts the power of this machine."""

    def relax(connection: Any, *_: Any) -> None:
        if isinstance(connection, sqlite3.Connection):
            connection.execute("PRAGMA synchronous=OFF")

    event.listen(Pool, "checkout", relax)
    yield
    event.remove(Pool, "checkout", relax)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    """A service with an empty state folder."""
    services = open_services(tmp_path_factory.mktemp("service") / "state")
    yield services
    services.database.close()


@pytest.fixture(scope="module")
def app(here: Services) -> Any:
    """Its ASGI application."""
    return create_app(here)


@pytest.fixture(scope="module")
def token(here: Services) -> dict[str, str]:
    """The header that lets a request in."""
    return {"authorization": "Bearer " + here.folder.token.read_text().strip()}


@pytest.fixture(scope="session")
def shared_postgresql(server: Server) -> Iterator[Database]:
    """One database on PostgreSQL; each test finds it empty."""
    opened = Database(made_on(server), statement_s=5.0)
    yield opened
    opened.close()


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest) -> Database:
    """An empty database with the service's tables, on both systems."""
    if request.param == "sqlite":
        return request.getfixturevalue("embedded")
    return emptied(request.getfixturevalue("shared_postgresql"))


def emptied(shared: Database) -> Database:
    """The same without jobs and events."""
    with shared.writing() as connection:
        for table in (JOBS, METRICS, EVENTS):
            connection.execute(table.delete())
        connection.execute(COUNTERS.update().values(value=0))
    return shared


@pytest.fixture
def embedded(tmp_path: Path) -> Iterator[Database]:
    """An empty database on SQLite."""
    opened = Database(f"sqlite:///{tmp_path}/stoker.db", statement_s=5.0)
    yield opened
    opened.close()


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of a database of the test's own."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/stoker.db"
    return made_on(request.getfixturevalue("server"))


def made_on(server: Server) -> str:
    """The address of a new database."""
    with server.connect() as connection:
        taken = connection.execute("SELECT count(*) FROM pg_database").fetchone()[0]
        connection.execute(f"CREATE DATABASE service_{taken}")
    return server.url(f"service_{taken}")
