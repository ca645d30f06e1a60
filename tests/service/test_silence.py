"""A PostgreSQL server that keeps its connections open and says nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import sqlalchemy as sa

from stoker.errors import DegradedError
from stoker.service.database import Database
from stoker.service.jobs import Jobs
from tests.service.conftest import made_on
from tests.service.proxy import Proxy
from tests.sources.sql.server import Server


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    made = Proxy(server)
    yield made
    made.close()


@pytest.fixture
def database(server: Server, proxy: Proxy) -> Iterator[Database]:
    name = made_on(server).partition("@/")[2].partition("?")[0]
    opened = Database(proxy.url(name), statement_s=0.5)
    yield opened
    opened.close()


def test_who_waits_in_vain_is_let_go_and_the_others_are_told_at_once(
    database: Database, proxy: Proxy
) -> None:
    jobs, said = Jobs(database), []
    proxy.swallow(True)

    def ask() -> None:
        with pytest.raises(DegradedError) as caught:
            jobs.count()
        said.append(str(caught.value))

    ask()
    asking = [threading.Thread(target=ask) for _ in range(50)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join(60)

    assert "it did not answer for" in said[0]
    assert len(said) == 51
    assert not [text for text in said if "QueuePool" in text], "fifty wait for sixteen connections"
    assert database.trouble.why in said


def test_a_statement_that_is_swallowed_is_named_and_the_server_used_again(
    database: Database, proxy: Proxy
) -> None:
    jobs = Jobs(database)
    with pytest.raises(DegradedError, match="it did not answer for"), database.writing() as connection:  # noqa: PT012
        connection.execute(sa.text("DELETE FROM jobs"))
        proxy.swallow(True)
        connection.execute(sa.text("SELECT 1"))
    assert database.trouble.why is not None
    proxy.swallow(False)

    deadline = time.monotonic() + 60
    while database.trouble.why is not None:
        assert time.monotonic() < deadline
        try:
            jobs.create({}, name="n", epochs=1, key="again")
        except DegradedError:
            time.sleep(0.1)
    assert jobs.count() == 1


def test_an_idle_connection_that_was_lost_is_replaced_without_a_word(
    database: Database, proxy: Proxy
) -> None:
    assert proxy.cut() >= 1

    assert Jobs(database).count() == 0
    assert database.trouble.why is None
