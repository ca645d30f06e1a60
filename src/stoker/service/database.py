"""One database under the service: SQLite in a file, or PostgreSQL.

Every transaction has a time limit. On SQLite this is its busy timeout and a check while a statement runs. On
PostgreSQL it is timeouts, keepalives, and `ConnectionWatchdog` for a server that does not answer at all.
Errors of the database itself are raised as `DegradedError` and noted (`trouble`) until it works again. Errors
of a statement (a violated constraint) are raised unchanged.

Times are those of the database's clock (`wall`), never of a process's own.
"""

from __future__ import annotations

import os
import socket
import sqlite3
import threading
import time
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy import (
    JSON,
    BigInteger,
    CheckConstraint,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    TypeDecorator,
    event,
    exc,
)
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import URL, Dialect, make_url

from stoker.errors import ConfigError, DegradedError, FormatError, StokerError
from stoker.runtime.mounts import storage_of
from stoker.runtime.threads import start_thread
from stoker.service.background import Trouble

if TYPE_CHECKING:
    from stoker.schema import Json


# ----------------------------------------------------------------------------------------------------------
# A database server that does not answer: waiting threads are released, and others need not wait in turn.
#
# PostgreSQL's own limits end a statement only while the server runs. One that is stopped (SIGSTOP, a frozen
# virtual machine, a network that drops packets) keeps its connections open and sends nothing, and the driver
# waits for it forever. The watchdog shuts such a connection down, which the driver sees as a lost one.


PING_S = 3.0
"""How long an idle connection may take to answer a ping before it is replaced."""
LOOK_S = 0.25
"""Seconds between two checks of waiting connections."""
AGAIN_S = 1.0
"""How long callers are refused at once after a wait without an answer."""
_OURS = "stoker_wait"


class WatchedConnection:
    """A connection, and how long it may stay silent."""

    def __init__(self, descriptor: int) -> None:
        # A descriptor of our own: the driver's may be another connection's by the time it is used.
        self._socket = socket.socket(fileno=os.dup(descriptor))
        self.until = float("inf")
        self.who = 0
        self.fresh = True

    def begin(self, limit_s: float) -> None:
        """Note that the calling thread sends something."""
        self.who = threading.get_ident()
        self.until = time.monotonic() + limit_s

    def end(self) -> None:
        """Note that no thread waits."""
        self.until = float("inf")

    def cut(self) -> None:
        """Release the waiting thread by shutting the connection down."""
        self.end()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the descriptor."""
        self._socket.close()


class ConnectionWatchdog:
    """Bounds every wait on the connections of an engine, also where the server does not.

    Args:
        engine: Of PostgreSQL, without a ping of its own.
        answer_s: How long an answer may take: longer than the server's own limits.
    """

    def __init__(self, engine: sa.Engine, answer_s: float) -> None:
        self._dialect = engine.dialect
        self._answer_s = answer_s
        self._waits: set[WatchedConnection] = set()
        self._cut: set[int] = set()
        self._over = threading.Event()
        event.listen(engine, "connect", self._on_connect, insert=True)
        event.listen(engine, "checkout", self._on_checkout)
        event.listen(engine, "checkin", self._on_checkin)
        event.listen(engine, "close", self._on_close)
        for name in ("before_cursor_execute", "commit", "rollback"):
            event.listen(engine, name, self._on_statement)
        start_thread(self._watch, "stoker-silence")

    def was_cut(self) -> bool:
        """Return True if the calling thread was released since its last call of this method."""
        who = threading.get_ident()
        found = who in self._cut
        self._cut.discard(who)
        return found

    def close(self) -> None:
        """Stop watching."""
        self._over.set()

    def _watch(self) -> None:
        while not self._over.wait(LOOK_S):
            now = time.monotonic()
            for wait in self._waits.copy():
                if now > wait.until:
                    self._cut.add(wait.who)
                    wait.cut()

    def _on_connect(self, connection: Any, record: Any) -> None:
        record.info[_OURS] = wait = WatchedConnection(connection.fileno())
        self._waits.add(wait)
        wait.begin(self._answer_s)  # the driver queries a new connection once

    def _on_checkout(self, connection: Any, record: Any, _fairy: object) -> None:
        wait: WatchedConnection = record.info[_OURS]
        if not wait.fresh:
            wait.begin(min(PING_S, self._answer_s))
            try:
                self._dialect.do_ping(connection)
            except self._dialect.loaded_dbapi.Error as error:
                raise exc.InvalidatePoolError from error
        wait.fresh = False
        wait.begin(self._answer_s)

    def _on_checkin(self, _connection: object, record: Any) -> None:
        if (wait := record.info.get(_OURS)) is not None:
            wait.end()

    def _on_close(self, _connection: object, record: Any) -> None:
        if (wait := record.info.pop(_OURS, None)) is not None:
            self._waits.discard(wait)
            wait.close()

    def _on_statement(self, connection: sa.Connection, *_: object) -> None:
        if not connection.invalidated:  # else the connection is lost already
            connection.info[_OURS].begin(self._answer_s)


class RetryGate:
    """After a wait without an answer, lets one caller at a time try again and refuses all others at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._why: DegradedError | None = None
        self._shut_until = 0.0

    def enter(self, timeout_s: float) -> None:
        """Let the caller through, or refuse it at once.

        Args:
            timeout_s: How long this caller may take.
        Raises:
            DegradedError: The database did not answer a moment ago, or another caller is trying it now.
        """
        with self._lock:
            now = time.monotonic()
            if self._why is None:
                return
            if now < self._shut_until:
                raise copy(self._why)
            self._shut_until = now + timeout_s

    def shut(self, why: DegradedError) -> None:
        """Note that a caller waited without an answer."""
        with self._lock:
            self._why, self._shut_until = why, time.monotonic() + AGAIN_S

    def open(self) -> None:
        """Note that the database answered."""
        self._why = None


# ----------------------------------------------------------------------------------------------------------
# The states of a job and the moves between them.
#
#     pending ─┐          ┌─▶ pausing ──▶ paused
#     queued ──┴▶ running ┼─▶ completed
#        ▲          │     ├─▶ failed
#        └──────────┘     └─▶ cancelling ─▶ cancelled
#       (its worker was lost, or stopped in order)
#
# Every move is one UPDATE that names the states it may start from, so of two concurrent requests only one
# wins. A job without a worker is paused or cancelled at once. One that a worker holds goes through `pausing`
# or `cancelling` until its process has ended, which keeps a job from running twice.


class State(StrEnum):
    """The state of a job."""

    PENDING = "pending"
    """Accepted, but not to be started before a given time: its last worker was lost."""
    QUEUED = "queued"
    """Any free worker takes it."""
    RUNNING = "running"
    """A worker holds it."""
    PAUSING = "pausing"
    """A worker holds it and makes a checkpoint."""
    PAUSED = "paused"
    """Waits for `resume`."""
    CANCELLING = "cancelling"
    """A worker holds it and ends its process."""
    COMPLETED = "completed"
    """Trained to the end, or as long as it paid."""
    FAILED = "failed"
    """Ended with an error, which the job names."""
    CANCELLED = "cancelled"
    """Ended because someone asked for it."""


WAITING_STATES = frozenset({State.PENDING, State.QUEUED})
"""A worker may take the job."""
HELD_STATES = frozenset({State.RUNNING, State.PAUSING, State.CANCELLING})
"""A worker holds the job."""
ENDED_STATES = frozenset({State.COMPLETED, State.FAILED, State.CANCELLED})
"""The job stays as it is unless someone resumes or extends it."""

MOVES: Mapping[State, frozenset[State]] = MappingProxyType(
    {
        State.PENDING: frozenset({State.RUNNING, State.PAUSED, State.CANCELLED}),
        State.QUEUED: frozenset({State.RUNNING, State.PAUSED, State.CANCELLED}),
        State.RUNNING: frozenset(
            {State.PENDING, State.QUEUED, State.PAUSING, State.CANCELLING, State.COMPLETED, State.FAILED}
        ),
        State.PAUSING: frozenset({State.PAUSED, State.CANCELLING, State.COMPLETED, State.FAILED}),
        State.CANCELLING: frozenset({State.CANCELLED, State.COMPLETED}),
        State.PAUSED: frozenset({State.QUEUED, State.CANCELLED}),
        State.COMPLETED: frozenset({State.QUEUED}),
        State.FAILED: frozenset({State.QUEUED}),
        State.CANCELLED: frozenset({State.QUEUED}),
    }
)
"""All moves; the ways out of the last three are `resume` and `extend`."""


def before(state: State) -> frozenset[State]:
    """Return the states that a job may go to `state` from."""
    return frozenset(start for start, ends in MOVES.items() if state in ends)


# ----------------------------------------------------------------------------------------------------------
# The tables of the service, the same on SQLite and PostgreSQL. All times are unix seconds by the database's
# clock.


VERSION = 4
"""Version of these tables; `STEPS` migrates every earlier one."""
METADATA = MetaData()
"""Every table of the service; other modules add theirs here."""


class Real(TypeDecorator[float]):
    """A double that comes back as a float: SQLite answers 1 where 1.0 was stored."""

    impl = Double
    cache_ok = True

    def process_result_value(self, value: float | None, dialect: Dialect) -> float | None:
        """See the class."""
        return None if value is None else float(value)


class Tags(TypeDecorator[list[str]]):
    """Tags as one text, with a line for each and a line break at both ends, so that LIKE finds each."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Sequence[str] | None, dialect: Dialect) -> str:
        """See the class."""
        return "\n{}\n".format("\n".join(value)) if value else ""

    def process_result_value(self, value: str | None, dialect: Dialect) -> list[str]:
        """See the class."""
        return value.strip("\n").split("\n") if value else []


_COUNTER = BigInteger().with_variant(Integer, "sqlite")  # SQLite increments only INTEGER

JOBS = Table(
    "jobs",
    METADATA,
    Column("number", _COUNTER, primary_key=True, autoincrement=True),
    Column("id", String(36), nullable=False, unique=True),
    Column("key", String(200), unique=True),
    Column("digest", String(64), nullable=False),
    Column("name", String(200), nullable=False),
    Column("kind", String(20), nullable=False),
    Column("state", String(12), nullable=False),
    Column("config", JSON, nullable=False),
    Column("dataset_ids", JSON, nullable=False),
    Column("parent", String(36)),
    Column("created", Real, nullable=False),
    Column("started", Real),
    Column("ended", Real),
    Column("worker", String(100)),
    Column("attempt", Integer, nullable=False, default=0),
    Column("losses", Integer, nullable=False, default=0),
    Column("not_before", Real, nullable=False, default=0.0),
    Column("position", BigInteger, nullable=False, default=0),
    Column("epoch", Integer, nullable=False, default=0),
    Column("epochs", Integer, nullable=False),
    Column("progress", Real, nullable=False, default=0.0),
    Column("message", Text, nullable=False, default=""),
    Column("train_loss", Real),
    Column("val_loss", Real),
    Column("best_val_loss", Real),
    Column("best_epoch", Integer),
    Column("learning_rate", Real),
    Column("stall", Real),
    Column("tier", String(20)),
    Column("checkpoint", Text),
    Column("error", Text),
    Column("exit_code", Integer),
    Column("tags", Tags, nullable=False, server_default=""),
    Column("worked_s", Real, nullable=False, server_default=sa.text("0")),
    Column("taken", Real),
    CheckConstraint("state IN ({})".format(", ".join(f"'{state}'" for state in State)), name="known_state"),
    CheckConstraint("kind IN ('training', 'generation')", name="known_kind"),
    Index("jobs_by_state", "state", "number"),
    Index("jobs_by_tags", "tags"),
    sqlite_autoincrement=True,
)
"""One row per job. `attempt` counts how often a worker took it, and is part of every change by a worker.
`losses` counts attempts without a result since the last epoch. No worker takes the job before `not_before`.
`position` is how far the worker has read in the job's `events.jsonl`. `worked_s` is the sum of the
attempts that ended, and `taken` when the current one began; null: no worker has the job."""

METRICS = Table(
    "metrics",
    METADATA,
    Column("job", String(36), ForeignKey(JOBS.c.id, ondelete="CASCADE"), primary_key=True),
    Column("epoch", Integer, primary_key=True),
    Column("at", Real, nullable=False),
    Column("data", JSON, nullable=False),
)
"""One row per epoch; an epoch that is trained again after a crash replaces its row."""

EXTENSIONS = Table(
    "extensions",
    METADATA,
    Column("job", String(36), ForeignKey(JOBS.c.id, ondelete="CASCADE"), primary_key=True),
    Column("key", String(200), primary_key=True),
    Column("epochs", Integer, nullable=False),
)
"""One row per request with an idempotency key that gave a completed job more epochs."""

AUDIT = Table(
    "audit",
    METADATA,
    Column("number", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True),
    Column("at", Real, nullable=False),
    Column("who", String(60), nullable=False),
    Column("client", String(100), nullable=False),
    Column("method", String(10), nullable=False),
    Column("path", String(500), nullable=False),
    Column("status", Integer, nullable=False),
    sqlite_autoincrement=True,
)
"""One row per request that changes something; pruned as events are."""

EVENTS = Table(
    "events",
    METADATA,
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    Column("job", String(36), nullable=False),
    Column("kind", String(12), nullable=False),
    Column("at", Real, nullable=False),
    Column("data", JSON, nullable=False),
    Index("events_of_job", "job", "number"),
)
"""Events of jobs in the order of their commits; pruned by age and count."""

COUNTERS = Table(
    "counters",
    METADATA,
    Column("name", String(20), primary_key=True),
    Column("value", BigInteger, nullable=False),
)
"""`event`: the number of the newest event; others: how far a reader of events has come."""

META = Table(
    "meta",
    METADATA,
    Column("name", String(20), primary_key=True),
    Column("value", Text, nullable=False),
)
"""`version` of the tables; `folder`: the state folder that the database belongs to."""


STATEMENT_S = 10.0
"""How long a statement may take, waiting for locks included."""
_STEPS = 20_000
"""SQLite virtual machine steps between two looks at the deadline: about a millisecond."""
_SLACK_S = 2.0
"""How much later than the server the watchdog ends a statement."""
_VAIN_S = 1.0
"""A failure after more than this was a wait, and the next callers are refused at once."""
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
        DegradedError: It does not answer.
    """

    def __init__(self, url: str, *, statement_s: float = STATEMENT_S, pool: int = 8) -> None:
        self.url = _parsed(url)
        self.is_sqlite = self.url.get_backend_name() == "sqlite"
        self._statement_s = statement_s
        self.trouble = Trouble()
        """Failures now, in the database and in other parts of the service."""
        self._gate = RetryGate()
        self._engine = sa.create_engine(
            self.url,
            connect_args=self._sqlite_arguments() if self.is_sqlite else self._postgres_arguments(),
            pool_pre_ping=self.is_sqlite,
            pool_size=pool,
            max_overflow=pool,
            pool_timeout=statement_s,
            hide_parameters=True,  # values of users must not appear in logs
        )
        if self.is_sqlite:
            event.listen(self._engine, "connect", self._on_connect)
            event.listen(self._engine, "begin", _on_begin)
        self._silence = None if self.is_sqlite else ConnectionWatchdog(self._engine, statement_s + _SLACK_S)
        try:
            with self.writing() as connection:
                bring_up_to_date(connection)
        except StokerError:
            self.close()
            raise

    @property
    def wall(self) -> sa.ColumnElement[float]:
        """Unix seconds now."""
        if self.is_sqlite:
            return (sa.func.julianday("now", type_=sa.Double) - 2440587.5) * 86400.0
        return sa.cast(sa.extract("epoch", sa.func.clock_timestamp()), sa.Double)

    @contextmanager
    def reading(self) -> Generator[sa.Connection]:
        """Open a read-only transaction; it sees one moment on SQLite, committed rows on PostgreSQL."""
        with self._explained("reading"), self._engine.connect() as connection, connection.begin():
            yield connection
        self.trouble.note("reading", None)

    @contextmanager
    def writing(self) -> Generator[sa.Connection]:
        """Open a transaction that is committed when the block succeeds and rolled back when it fails.

        Raises:
            DegradedError: It was not committed, or that is unknown since the connection was cut.
        """
        with self._explained("writing"), self._engine.connect() as connection:
            writer = connection.execution_options(stoker_writes=True)
            with writer.begin():
                yield writer
        self.trouble.note("reading", None)
        self.trouble.note("writing", None)

    def check(self, *, writes: bool) -> None:
        """Check that the database can be read, and with `writes` that it can be written.

        Raises:
            DegradedError: It cannot.
        """
        version = META.c.name == "version"
        with self.writing() if writes else self.reading() as connection:
            change = META.update().where(version).values(value=META.c.value)
            connection.execute(change if writes else sa.select(META.c.value).where(version))

    def insert(self, table: sa.Table) -> sqlite.Insert | postgresql.Insert:
        """Return an INSERT with `on_conflict_do_nothing` and `on_conflict_do_update`."""
        return sqlite.insert(table) if self.is_sqlite else postgresql.insert(table)

    def address(self) -> str:
        """Return the URL with its password; must not be shown."""
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
            self._silence.was_cut()  # clears the note of an earlier wait
        try:
            yield
        except (exc.IntegrityError, exc.ProgrammingError, exc.DataError):
            self._gate.open()
            raise
        except (exc.DBAPIError, exc.TimeoutError) as error:
            waited_s = time.monotonic() - began
            explained = self._explain(error, waited_s)
            if waited_s > _VAIN_S and _is_lost(error) and not self.is_sqlite:
                self._gate.shut(explained)
            else:
                self._gate.open()
            self.trouble.note(what, str(explained))
            raise explained from error
        except BaseException:
            self._gate.open()  # an error of the caller: the database did answer
            raise
        self._gate.open()

    def _explain(self, error: exc.SQLAlchemyError, waited_s: float) -> DegradedError:
        cause = str(getattr(error, "orig", None) or error).strip().splitlines()[0]
        if self._silence is not None and self._silence.was_cut():
            cause = f"it did not answer for {waited_s:.0f} s"
        if full := any(text in cause for text in _FULL):
            hint = "Free space on its disk; existing data can still be read"
        elif self.is_sqlite:
            hint = "Check its disk, and which process has the file open; it is tried again automatically"
        else:
            hint = "Check that it runs and can be reached; it is tried again automatically"
        return DegradedError(f"{self}: the database does not do it: {cause}", hint=hint, full=full)

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
        journal = f"journal_mode={self._journal}"
        for pragma in (journal, "synchronous=FULL", "foreign_keys=ON", "case_sensitive_like=ON"):
            raw.execute(f"PRAGMA {pragma}")
        # SQLite's own changes only ASCII; with this and the last pragma, searches find what PostgreSQL's do.
        raw.create_function("lower", 1, _lower, deterministic=True)
        started = time.monotonic()

        def watch(statement: str) -> None:
            nonlocal started
            started = time.monotonic()

        raw.set_trace_callback(watch)
        raw.set_progress_handler(lambda: time.monotonic() - started > self._statement_s, _STEPS)


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


def _on_begin(connection: sa.Connection) -> None:
    """Begin on SQLite with the writer's lock: a reader that becomes a writer later would fail."""
    writes = connection.get_execution_options().get("stoker_writes")
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _is_lost(error: exc.SQLAlchemyError) -> bool:
    """Return True if the connection failed, rather than the server answering with an error."""
    return getattr(getattr(error, "orig", None), "sqlstate", None) is None


def _parsed(text: str) -> URL:
    try:
        url = make_url(text)
        backend = url.get_backend_name()
    except exc.ArgumentError as error:
        raise ConfigError(
            "the address of the database cannot be read",
            hint="Expected sqlite:///PATH or postgresql://USER@HOST/NAME",
        ) from error
    if backend == "postgresql":
        return url.set(drivername="postgresql+psycopg")
    if backend == "sqlite" and url.database and url.database != ":memory:":
        return url
    raise ConfigError(
        f"{url.render_as_string(hide_password=True)} is not a database that the service can use",
        hint="Expected sqlite:///PATH (a file) or postgresql://USER@HOST/NAME",
    )


# ----------------------------------------------------------------------------------------------------------
# The table of registered data sets.


DATASETS = Table(
    "datasets",
    METADATA,
    Column("id", String(36), primary_key=True),
    Column("name", String(100), nullable=False, unique=True),
    Column("kind", String(12), nullable=False),
    Column("origin", String(12), nullable=False),
    Column("spec", JSON, nullable=False),
    Column("facts", JSON, nullable=False),
    Column("health", String(12), nullable=False),
    Column("report", JSON, nullable=False),
    Column("created", Real, nullable=False),
    Column("checked", Real),
    CheckConstraint("kind IN ('radio', 'hdf5', 'images')", name="known_dataset_kind"),
    CheckConstraint("health IN ('unknown', 'making', 'good', 'doubtful', 'bad')", name="known_health"),
)
"""One row per data set. `spec` says where it is and how to open it, `facts` what was found there, `report`
the rows of the last check."""


# ----------------------------------------------------------------------------------------------------------
# Migrate the tables of a database to the version of this code, in one transaction.


_LOCK = 0x73746F6B
"""Any number: an advisory lock of PostgreSQL, so that two services migrate one after the other."""


STEPS: Mapping[int, tuple[str, ...]] = MappingProxyType(
    {
        1: (  # no lease; waits that counted from boot are over
            "ALTER TABLE jobs DROP COLUMN lease_until",
            "DELETE FROM meta WHERE name = 'boot'",
        ),
        2: (
            "ALTER TABLE jobs ADD COLUMN tags TEXT DEFAULT '' NOT NULL",
            "CREATE INDEX jobs_by_tags ON jobs (tags)",
        ),
        3: (  # attempts before were not timed: the best guess is that of then
            "ALTER TABLE jobs ADD COLUMN worked_s DOUBLE PRECISION DEFAULT 0 NOT NULL",
            "ALTER TABLE jobs ADD COLUMN taken DOUBLE PRECISION",
            "UPDATE jobs SET worked_s = ended - started WHERE ended >= started",
            "UPDATE jobs SET taken = started WHERE state IN ('running', 'pausing', 'cancelling')",
        ),
    }
)
"""Migration from a version to the next."""


def bring_up_to_date(connection: sa.Connection) -> None:
    """Create missing tables, and migrate those of an earlier version.

    Args:
        connection: In a transaction that writes.

    Raises:
        FormatError: The tables are of a newer version than this code knows.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCK)))
    METADATA.create_all(connection, tables=[META, COUNTERS])
    found = _value(connection, "version")
    if found is not None and int(found) > VERSION:
        raise FormatError(
            f"the service's database has tables of version {found}; this version of stoker knows {VERSION}",
            hint="Use the stoker that wrote it, or a newer one",
        )
    for version in range(int(found or VERSION), VERSION):
        for statement in STEPS[version]:
            connection.execute(sa.text(statement))
    METADATA.create_all(connection)
    if found is None:
        connection.execute(COUNTERS.insert().values(name="event", value=0))
    if found != str(VERSION):
        _set(connection, "version", str(VERSION))


def _value(connection: sa.Connection, name: str) -> str | None:
    return connection.execute(sa.select(META.c.value).where(META.c.name == name)).scalar()


def _set(connection: sa.Connection, name: str, value: str) -> None:
    changed = connection.execute(META.update().where(META.c.name == name).values(value=value))
    if not changed.rowcount:
        connection.execute(META.insert().values(name=name, value=value))


def bind_folder(connection: sa.Connection, folder: str) -> None:
    """Bind the database to the state folder with the id `folder`; later check that it is the same.

    Raises:
        ConfigError: It belongs to another folder.
    """
    found = _value(connection, "folder")
    if found is None:
        _set(connection, "folder", folder)
    elif found != folder:
        raise ConfigError(
            "the database belongs to a service with another state folder: its jobs have their checkpoints "
            "there",
            hint="Start the service with that folder, or with a database of its own",
        )


# ----------------------------------------------------------------------------------------------------------
# Events of jobs, in the order of their commits.
#
# An event is written in the transaction of the change that it reports, so neither exists without the other.
# Its number comes from a counter whose row the writer locks until it commits: numbers have no gaps and become
# visible in order, so a client that has read up to n and asks for later events misses nothing.


KINDS = frozenset({
    "queued", "claimed", "started", "progress", "batch", "metrics", "stall", "pausing", "paused", "resumed",
    "changed", "cancelling", "cancelled", "completed", "failed", "deleted",
})  # fmt: skip
"""`queued` is written at creation and when a lost job goes back, `claimed` by a worker. `started` is written
by the job's process once it trains, `stall` every few seconds from then on, `resumed` by `resume` and
`extend`, `changed` by a new name or other tags."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One event of a job."""

    number: int
    """Its place in the order; the first is 1."""
    job: str
    kind: str
    """One of `KINDS`."""
    at: float
    """Unix seconds by the database's clock."""
    data: dict[str, Json]
    size: int = 0
    """Characters of its data as JSON."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventPage:
    """The next events of a reader, and which numbers there are."""

    events: list[Event]
    oldest: int
    """The lowest number that was not pruned; without events, the next number."""
    newest: int
    """0 without any."""


class Outbox:
    """Reads the events of a database from any point that has not been pruned."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def read(
        self, after: int, *, job: str | None = None, kinds: Collection[str] = (), limit: int = 500
    ) -> list[Event]:
        """Return at most `limit` events after number `after`; of one job or some kinds, if given."""
        query = _WHOLE.where(_following(after, job)).limit(limit)
        if kinds:
            query = query.where(EVENTS.c.kind.in_(tuple(kinds)))
        with self._database.reading() as connection:
            return [Event(**row) for row in connection.execute(query).mappings()]

    def newest_of(self, kind: str, jobs: Collection[str]) -> dict[str, Event]:
        """Return the newest event of a kind for each of the jobs that have one, by job."""
        newest = (
            sa.select(sa.func.max(EVENTS.c.number))
            .where(EVENTS.c.kind == kind, EVENTS.c.job.in_(tuple(jobs)))
            .group_by(EVENTS.c.job)
        )
        with self._database.reading() as connection:
            rows = connection.execute(_WHOLE.where(EVENTS.c.number.in_(newest))).mappings()
            return {row["job"]: Event(**row) for row in rows}

    def read_page(self, after: int, *, job: str | None = None, limit: int, most: int) -> EventPage:
        """Return the next events with at most `most` characters together, but at least one.

        Sizes are read before the events, so that memory never holds more.
        """
        events: list[Event] = []
        with self._database.reading() as connection:
            newest = connection.execute(_COUNTED).scalar_one()  # first: all events up to it can be read
            last, total = after, 0
            following = _SIZES.where(_following(after, job)).limit(limit)
            for row in connection.execute(following) if after < newest else ():
                total += row.size
                if last > after and total > most:
                    break
                last = row.number
            if last > after:
                query = _WHOLE.where(_following(after, job), EVENTS.c.number <= last)
                events = [Event(**row) for row in connection.execute(query).mappings()]
            lowest = connection.execute(_LOWEST).scalar()  # last: events may be pruned meanwhile
        return EventPage(events=events, oldest=lowest or newest + 1, newest=newest)

    def newest(self) -> int:
        """Return the number of the newest event; 0 without any."""
        with self._database.reading() as connection:
            return connection.execute(_COUNTED).scalar_one()

    def begin_cursor(self, name: str) -> int:
        """Return the stored position of a reader; a new reader begins behind the newest event."""
        new = sa.select(sa.literal(name), _COUNTED.scalar_subquery())
        with self._database.writing() as connection:
            connection.execute(
                self._database.insert(COUNTERS).from_select(["name", "value"], new.where(sa.true()))
                .on_conflict_do_nothing(index_elements=["name"])
            )  # fmt: skip
            return connection.execute(sa.select(COUNTERS.c.value).where(COUNTERS.c.name == name)).scalar_one()

    def move_cursor(self, name: str, number: int) -> None:
        """Store the position of a reader: the number of the last event that it need not read again."""
        with self._database.writing() as connection:
            connection.execute(COUNTERS.update().where(COUNTERS.c.name == name).values(value=number))

    def last_of(
        self, jobs: Collection[str], kinds: Collection[str], *, limit: int, since: float = 0.0
    ) -> list[Event]:
        """Return the newest events of some jobs and kinds from a time on (Unix seconds), in their order."""
        found = sa.select(EVENTS).where(
            EVENTS.c.job.in_(tuple(jobs)), EVENTS.c.kind.in_(tuple(kinds)), EVENTS.c.at >= since
        )
        with self._database.reading() as connection:
            rows = connection.execute(found.order_by(EVENTS.c.number.desc()).limit(limit)).mappings()
            return [Event(**row) for row in rows][::-1]

    def prune(self, *, max_age_s: float, max_count: int) -> int:
        """Remove events older than `max_age_s` and all but the newest `max_count`; return how many.

        The newest stays whatever its age, so that the table is never empty and the order stays known.
        """
        newest = _COUNTED.scalar_subquery()
        too_old = EVENTS.c.at < self._database.wall - max_age_s
        too_many = EVENTS.c.number <= newest - max_count
        with self._database.writing() as connection:
            gone = connection.execute(
                EVENTS.delete().where(sa.or_(too_old, too_many), EVENTS.c.number < newest)
            )
            return gone.rowcount


_SIZE = sa.func.length(sa.cast(EVENTS.c.data, sa.Text)).label("size")
_WHOLE = sa.select(EVENTS, _SIZE).order_by(EVENTS.c.number)
_SIZES = sa.select(EVENTS.c.number, _SIZE).order_by(EVENTS.c.number)
_LOWEST = sa.select(sa.func.min(EVENTS.c.number))
_COUNTED = sa.select(COUNTERS.c.value).where(COUNTERS.c.name == "event")


def _following(after: int, job: str | None) -> sa.ColumnElement[bool]:
    """Return the condition for events after a number; of one job, if given."""
    later = EVENTS.c.number > after
    return later if job is None else sa.and_(later, EVENTS.c.job == job)


def append(
    connection: sa.Connection,
    wall: sa.ColumnElement[float],
    job: str,
    happened: Sequence[tuple[str, dict[str, Json]]],
) -> None:
    """Write events of one job in the caller's transaction, each `(kind, data)`.

    Call it last: other writers of events wait from here to the commit.

    Args:
        connection: In a transaction that writes.
        wall: `Database.wall`.
        job: Whose events.
        happened: In their order.
    """
    if not happened:
        return
    last = connection.execute(
        COUNTERS.update()
        .where(COUNTERS.c.name == "event")
        .values(value=COUNTERS.c.value + len(happened))
        .returning(COUNTERS.c.value)
    ).scalar_one()
    at = connection.execute(sa.select(wall)).scalar_one()
    first = last - len(happened) + 1
    rows = [
        {"number": number, "job": job, "kind": kind, "at": at, "data": data}
        for number, (kind, data) in enumerate(happened, first)
    ]
    connection.execute(EVENTS.insert(), rows)
