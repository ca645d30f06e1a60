"""Who has changed what: a row for each request that changes something, kept as long as events are.

A row is written in the background after the answer has begun, so a slow database delays no request. While it
cannot be written, as on a full disk, rows wait in memory. Those beyond `MOST_WAITING` are counted and logged.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy.exc import SQLAlchemyError

from stoker.errors import ResourceError, StokerError
from stoker.runtime.threads import Pool
from stoker.service.database import AUDIT

if TYPE_CHECKING:
    from stoker.service.database import Database

MOST_WAITING = 10_000
"""Rows that wait for the database, at most."""
LENGTHS = {column.name: column.type.length for column in AUDIT.c if isinstance(column.type, sa.String)}
"""Characters of each text that are kept."""
log = logging.getLogger("stoker")


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRow:
    """One change, or the attempt at one."""

    number: int
    """Its place in the order; the first is 1."""
    at: float
    """Unix seconds by the service's clock."""
    who: str
    """`token`, `session` and the beginning of its id, or empty: neither, as at a login."""
    client: str
    """The address that asked."""
    method: str
    path: str
    status: int
    """Of the answer; from 400 on nothing was changed."""


class AuditLog:
    """Writes and reads the rows of a database."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._waiting: deque[dict[str, Any]] = deque()
        self._lock = threading.Lock()
        self._lost = 0
        self._pool = Pool(1, "stoker-audit")
        self._is_writing = False

    def note(self, *, who: str, client: str, method: str, path: str, status: int) -> None:
        """Have a row written; returns at once."""
        texts = {"who": who, "client": client, "method": method, "path": path}
        # PostgreSQL refuses longer ones, and a client may send a method of any length.
        row = {name: text[: LENGTHS[name]] for name, text in texts.items()}
        with self._lock:
            if len(self._waiting) >= MOST_WAITING:
                self._lost += 1
                return
            self._waiting.append({**row, "at": time.time(), "status": status})
            begins, self._is_writing = not self._is_writing, True
        if begins:
            try:
                self._pool.submit(self._write, "writing the audit log")
            except ResourceError as error:  # no thread can be started; the next row tries again
                log.warning("the audit log waits: %s", error)
                with self._lock:
                    self._is_writing = False

    def read(self, *, limit: int = 100, before: int | None = None) -> list[AuditRow]:
        """Return rows, the newest first.

        Args:
            limit: At most so many.
            before: Only rows before this number.
        """
        query = sa.select(AUDIT).order_by(AUDIT.c.number.desc()).limit(limit)
        if before is not None:
            query = query.where(AUDIT.c.number < before)
        with self._database.reading() as connection:
            return [AuditRow(**row) for row in connection.execute(query).mappings()]

    def prune(self, *, max_age_s: float, max_count: int) -> int:
        """Remove rows older than `max_age_s` and all but the newest `max_count`; return how many."""
        newest = sa.select(sa.func.coalesce(sa.func.max(AUDIT.c.number), 0)).scalar_subquery()
        old = sa.or_(AUDIT.c.at < time.time() - max_age_s, AUDIT.c.number <= newest - max_count)
        with self._database.writing() as connection:
            return connection.execute(AUDIT.delete().where(old)).rowcount

    def _write(self) -> None:
        """Write what waits; what cannot be written stays, and the next row tries again."""
        while True:
            with self._lock:
                rows, lost = list(self._waiting), self._lost
                if not rows:
                    self._is_writing = False
                    return
            try:
                with self._database.writing() as connection:
                    connection.execute(AUDIT.insert(), rows)
            except (StokerError, SQLAlchemyError) as error:
                log.warning("the audit log cannot be written now: %s", error)
                with self._lock:
                    self._is_writing = False
                return
            with self._lock:
                for _ in rows:
                    self._waiting.popleft()
                self._lost -= lost
            if lost:
                log.warning("%d rows of the audit log were lost while it could not be written", lost)
