"""One database under the service: SQLite in a file, or PostgreSQL.

Every transaction is bounded: SQLite by its busy timeout and a check while a statement runs, PostgreSQL by its
own timeouts, by keepalives, and by `silence.py` where the server says nothing at all. What goes wrong with
the database itself comes out as `Degraded`, and is noted (`trouble`) until it works again; errors of a
statement (a broken rule of a table) come out as they are.

Two clocks, both the database's, never a process's own. `wall` is for showing. `lease_clock` is for comparing:
on PostgreSQL the server's clock; on SQLite, where all processes are on one machine, the time since it was
booted, which no one sets and which is the same in every process.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event, exc
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import URL, make_url

from stoker.errors import ConfigError, Degraded, StokerError
from stoker.plan.resources import storage_of
from stoker.service import upgrade
from stoker.service.schema import META
from stoker.service.silence import Gate, Silence
from stoker.service.trouble import Trouble

STATEMENT_S = 10.0
"""How long a statement may take, waiting for locks included."""
_STEPS = 20_000
"""SQLite virtual machine steps between two looks at the deadline: about a millisecond."""
_SLACK_S = 2.0
"""How much later than the server itself we end a statement."""
_VAIN_S = 1.0
"""A failure that took longer was a wait, which others are spared."""
_FULL = ("database or disk is full", "No space left", "could not extend file", "disk quota")


class Database:
    """Connections to the service's database; safe to share between threads.

    Args:
        url: `sqlite:///PATH` or `postgresql://...`.
        statement_s: Bound of a statement, seconds.
        pool: Connections kept at most.

    Raises:
        ConfigError: Neither SQLite nor PostgreSQL, or a password that cannot be parsed.
        FormatError: The tables are of a newer version.
        Degraded: It does not answer.
    """

    def __init__(self, url: str, *, statement_s: float = STATEMENT_S, pool: int = 8) -> None:
        self.url = _parsed(url)
        self.is_sqlite = self.url.get_backend_name() == "sqlite"
        self._statement_s = statement_s
        self.trouble = Trouble()
        """What does not work now; of the database, and of whatever else of the service is noted there."""
        self._gate = Gate()
        self._engine = sa.create_engine(
            self.url,
            connect_args=self._sqlite_arguments() if self.is_sqlite else self._postgres_arguments(),
            pool_pre_ping=self.is_sqlite,
            pool_size=pool,
            max_overflow=pool,
            pool_timeout=statement_s,
            hide_parameters=True,  # values of users do not belong into logs
        )
        if self.is_sqlite:
            event.listen(self._engine, "connect", self._on_connect)
            event.listen(self._engine, "begin", _on_begin)
        self._silence = None if self.is_sqlite else Silence(self._engine, statement_s + _SLACK_S)
        try:
            with self.writing() as connection:
                upgrade.bring_up_to_date(connection, self.boot())
        except StokerError:
            self.close()
            raise

    @property
    def wall(self) -> sa.ColumnElement[float]:
        """Unix seconds now, for showing."""
        if self.is_sqlite:
            return (sa.func.julianday("now", type_=sa.Double) - 2440587.5) * 86400.0
        return sa.cast(sa.extract("epoch", sa.func.clock_timestamp()), sa.Double)

    @property
    def lease_clock(self) -> sa.ColumnElement[float]:
        """Seconds now, for comparing with other readings of it."""
        if self.is_sqlite:
            return sa.func.since_boot(type_=sa.Double)
        return sa.cast(sa.extract("epoch", sa.func.clock_timestamp()), sa.Double)

    def boot(self) -> str:
        """What `lease_clock` belongs to: a clock that starts anew has another name."""
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() if self.is_sqlite else "server"

    @contextmanager
    def reading(self) -> Generator[sa.Connection]:
        """A transaction that changes nothing; it sees one moment on SQLite, committed rows on PostgreSQL."""
        with self._explained("reading"), self._engine.connect() as connection, connection.begin():
            yield connection
        self.trouble.note("reading", None)

    @contextmanager
    def writing(self) -> Generator[sa.Connection]:
        """A transaction that is committed when the block ends well and undone when it does not.

        Raises:
            Degraded: It was not committed, or, after a connection was cut, nobody knows.
        """
        with self._explained("writing"), self._engine.connect() as connection:
            writer = connection.execution_options(stoker_writes=True)
            with writer.begin():
                yield writer
        self.trouble.note("reading", None)
        self.trouble.note("writing", None)

    def check(self, *, writes: bool) -> None:
        """See whether it answers, and with `writes` whether it takes something.

        Raises:
            Degraded: It does not.
        """
        version = META.c.name == "version"
        with self.writing() if writes else self.reading() as connection:
            change = META.update().where(version).values(value=META.c.value)
            connection.execute(change if writes else sa.select(META.c.value).where(version))

    def insert(self, table: sa.Table) -> sqlite.Insert | postgresql.Insert:
        """An INSERT that knows `on_conflict_do_nothing` and `on_conflict_do_update`."""
        return sqlite.insert(table) if self.is_sqlite else postgresql.insert(table)

    def address(self) -> str:
        """The URL with its password: for handing on, not for showing."""
        return self.url.render_as_string(hide_password=False)

    def close(self) -> None:
        """Close every connection."""
        self._engine.dispose()
        if self._silence is not None:
            self._silence.close()

    def __str__(self) -> str:
        return self.url.render_as_string(hide_password=True)

    @contextmanager
    def _explained(self, what: str) -> Generator[None]:
        self._gate.enter(2 * self._statement_s + _SLACK_S)
        began = time.monotonic()
        if self._silence is not None:
            self._silence.was_cut()  # of an earlier wait, which was got over
        try:
            yield
        except (exc.IntegrityError, exc.ProgrammingError, exc.DataError):
            self._gate.open()
            raise
        except (exc.DBAPIError, exc.TimeoutError) as error:
            waited_s = time.monotonic() - began
            explained = self._explain(error, waited_s)
            if waited_s > _VAIN_S and _is_lost(error) and not self.is_sqlite:
                self._gate.shut(str(explained))
            else:
                self._gate.open()
            self.trouble.note(what, str(explained))
            raise explained from error
        except BaseException:
            self._gate.open()  # of whoever asked: it had an answer
            raise
        self._gate.open()

    def _explain(self, error: exc.SQLAlchemyError, waited_s: float) -> Degraded:
        cause = str(getattr(error, "orig", None) or error).strip().splitlines()[0]
        if self._silence is not None and self._silence.was_cut():
            cause = f"it said nothing for {waited_s:.0f} s"
        if full := any(text in cause for text in _FULL):
            advice = "Make room on its disk; what is there can still be read"
        elif self.is_sqlite:
            advice = "Look at its disk, and at who else has the file open; it is asked again automatically"
        else:
            advice = "Look whether it runs and can be reached; it is asked again automatically"
        return Degraded(f"{self}: the database does not do it: {cause}. {advice}", full=full)

    def _sqlite_arguments(self) -> dict[str, Any]:
        path = Path(self.url.database or "")
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))  # its -wal and -shm follow it
        mount = storage_of(path)
        # The shared memory of WAL needs a local disk. On another, the kernel also keeps a process that exits
        # until that memory was written back, so for as long as storage does not answer.
        self._journal = "TRUNCATE" if mount is not None and mount.network else "WAL"
        return {"timeout": self._statement_s, "isolation_level": None}

    def _postgres_arguments(self) -> dict[str, Any]:
        limit_ms = int(self._statement_s * 1000)
        return {
            "connect_timeout": max(2, int(self._statement_s / 2)),
            "keepalives_idle": 5,
            "keepalives_interval": 2,
            "keepalives_count": 3,
            "tcp_user_timeout": limit_ms,
            "options": f"-c statement_timeout={limit_ms} -c lock_timeout={limit_ms}"
            f" -c idle_in_transaction_session_timeout={limit_ms}",
        }

    def _on_connect(self, connection: Any, _record: object) -> None:
        raw: sqlite3.Connection = connection
        for pragma in (f"journal_mode={self._journal}", "synchronous=FULL", "foreign_keys=ON"):
            raw.execute(f"PRAGMA {pragma}")
        raw.create_function("since_boot", 0, lambda: time.clock_gettime(time.CLOCK_BOOTTIME))
        started = time.monotonic()

        def watch(statement: str) -> None:
            nonlocal started
            started = time.monotonic()

        raw.set_trace_callback(watch)
        raw.set_progress_handler(lambda: time.monotonic() - started > self._statement_s, _STEPS)


def _on_begin(connection: sa.Connection) -> None:
    """SQLite: take the writer's lock at once; a reader that turns into a writer half-way would fail."""
    writes = connection.get_execution_options().get("stoker_writes")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _is_lost(error: exc.SQLAlchemyError) -> bool:
    """Whether there was no connection, rather than an answer of the server that says no."""
    return getattr(getattr(error, "orig", None), "sqlstate", None) is None


def _parsed(text: str) -> URL:
    try:
        url = make_url(text)
        backend = url.get_backend_name()
    except exc.ArgumentError as error:
        raise ConfigError(
            "the address of the database cannot be read. Expected sqlite:///PATH or postgresql://USER@HOST/NAME"
        ) from error
    if backend == "postgresql":
        return url.set(drivername="postgresql+psycopg")
    if backend == "sqlite" and url.database and url.database != ":memory:":
        return url
    raise ConfigError(
        f"{url.render_as_string(hide_password=True)} is no database that the service can use. "
        "Expected sqlite:///PATH (a file) or postgresql://USER@HOST/NAME"
    )
