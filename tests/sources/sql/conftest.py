"""Databases with the same rows in them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.sources.sql.server import NoServerError, Server


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """A PostgreSQL server, or a skip that says why there is none."""
    try:
        started = Server()
    except NoServerError as error:
        pytest.skip(str(error))
    yield started
    started.close()
