"""A database server that says nothing: who waits for it is let go, and others need not find out by waiting.

PostgreSQL's own limits end a statement while the server lives to do it. One that is stopped (SIGSTOP, a
frozen virtual machine, a network that drops what it is given) keeps its connections open and says nothing,
and a driver waits for it for ever. Here such a connection is shut down from outside, which the driver sees as
one that was lost.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import suppress
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event, exc

from stoker.errors import Degraded

PING_S = 3.0
"""How long an idle connection may take to show that it lives, before a new one is made."""
LOOK_S = 0.25
"""Between two looks at who waits, about."""
AGAIN_S = 1.0
"""After a wait in vain: how long the next one is spared it."""
_OURS = "stoker_wait"


class Wait:
    """A connection, and until when it may be silent."""

    def __init__(self, descriptor: int) -> None:
        # A descriptor of our own: the driver's may be another connection's by the time it is used.
        self._socket = socket.socket(fileno=os.dup(descriptor))
        self.until = float("inf")
        self.who = 0
        self.fresh = True

    def begin(self, limit_s: float) -> None:
        """The calling thread asks something."""
        self.who = threading.get_ident()
        self.until = time.monotonic() + limit_s

    def end(self) -> None:
        """Nobody waits."""
        self.until = float("inf")

    def cut(self) -> None:
        """Let go who waits."""
        self.end()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Let go of the descriptor."""
        self._socket.close()


class Silence:
    """Bounds every wait on the connections of an engine, also where the server does not.

    Args:
        engine: Of PostgreSQL, without a ping of its own.
        answer_s: How long an answer may take: longer than the server's own limits.
    """

    def __init__(self, engine: sa.Engine, answer_s: float) -> None:
        self._dialect = engine.dialect
        self._answer_s = answer_s
        self._waits: set[Wait] = set()
        self._cut: set[int] = set()
        self._over = threading.Event()
        event.listen(engine, "connect", self._on_connect, insert=True)
        event.listen(engine, "checkout", self._on_checkout)
        event.listen(engine, "checkin", self._on_checkin)
        event.listen(engine, "close", self._on_close)
        for name in ("before_cursor_execute", "commit", "rollback"):
            event.listen(engine, name, self._on_statement)
        threading.Thread(target=self._watch, name="stoker-silence", daemon=True).start()

    def was_cut(self) -> bool:
        """Whether the calling thread was let go since it asked this last."""
        who = threading.get_ident()
        found = who in self._cut
        self._cut.discard(who)
        return found

    def close(self) -> None:
        """Watch no longer."""
        self._over.set()

    def _watch(self) -> None:
        while not self._over.wait(LOOK_S):
            now = time.monotonic()
            for wait in self._waits.copy():
                if now > wait.until:
                    self._cut.add(wait.who)
                    wait.cut()

    def _on_connect(self, connection: Any, record: Any) -> None:
        record.info[_OURS] = wait = Wait(connection.fileno())
        self._waits.add(wait)
        wait.begin(self._answer_s)  # whatever is asked once of a new connection

    def _on_checkout(self, connection: Any, record: Any, _fairy: object) -> None:
        wait: Wait = record.info[_OURS]
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
        if not connection.invalidated:  # else the server has forgotten it already
            connection.info[_OURS].begin(self._answer_s)


class Gate:
    """After somebody waited in vain, one at a time looks again, and all others are told at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._why = ""
        self._shut_until = 0.0

    def enter(self, patience_s: float) -> None:
        """Go through, or be spared a wait.

        Args:
            patience_s: How long this one may take to find out.
        Raises:
            Degraded: The database did not answer a moment ago, or another is finding out whether it does.
        """
        with self._lock:
            now = time.monotonic()
            if not self._why:
                return
            if now < self._shut_until:
                raise Degraded(self._why)
            self._shut_until = now + patience_s

    def shut(self, why: str) -> None:
        """Who went through waited in vain."""
        with self._lock:
            self._why, self._shut_until = why, time.monotonic() + AGAIN_S

    def open(self) -> None:
        """It answered."""
        self._why = ""
