"""The owner's end of a preloaded process: started once, asked to fork, started again when it is gone."""

from __future__ import annotations

import atexit
import errno
import fcntl
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from stoker.runtime.processes.heartbeat import anonymous_file
from stoker.runtime.processes.server import MAX_FDS, REQUEST_BYTES

log = logging.getLogger("stoker")

START_S = 120.0
"""Seconds that the imports may take; past them the process is ended and children start one by one."""
ANSWER_S = 30.0
"""Seconds that a fork may take."""
_END_S = 0.5
_TRIES = 2
_SAID_BYTES = 1 << 16


class NotPreloadedError(Exception):
    """No child can be forked; start it as a Python of its own."""


class Preloaded:
    """One preloaded process of this process, for one tuple of modules. Safe for several threads.

    Args:
        modules: What it imports.
    """

    def __init__(self, modules: tuple[str, ...]) -> None:
        self._modules = modules
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._ready = False
        self._requests = 0
        self._refused = ""
        self._error_fd = -1

    @property
    def pid(self) -> int | None:
        """Its process id, if it was started."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start it unless it runs, without waiting for its imports.

        Raises:
            OSError: The system starts no more processes.
        """
        with self._lock:
            self._start()

    def fork(self, fds: Sequence[int]) -> tuple[int, int]:
        """Fork a child that has copies of these descriptors; see `server.py`.

        Returns:
            Its process id and its pidfd, which is the caller's.

        Raises:
            NotPreloadedError: The process does not start, or cannot be forked safely.
            OSError: The system starts no more processes.
        """
        with self._lock:
            for _ in range(_TRIES):
                if self._refused:
                    raise NotPreloadedError(self._refused)
                self._start()
                try:
                    return self._ask(fds)
                except (EOFError, ConnectionError):
                    self._discard()  # it was killed, or had nothing to do for long
                except TimeoutError:
                    self._refuse("it does not answer")
            self._refuse(f"it ends at once{self._said()}")
            raise NotPreloadedError(self._refused)

    def _refuse(self, why: str) -> None:
        """Do without it from now on."""
        if not self._refused:
            self._refused = why
            log.warning(
                "no preloaded process (%s): child processes start one by one, which takes longer", why
            )
        self._discard()

    def _said(self) -> str:
        """Return the last line that it wrote, after a colon."""
        if self._error_fd < 0:
            return ""
        text = os.pread(self._error_fd, _SAID_BYTES, 0).decode(errors="replace").strip()
        return f": {text.splitlines()[-1]}" if text else ""

    def close(self) -> None:
        """Want no more; it ends with its last child. Safe to call twice."""
        with self._lock:
            if self._control is not None:
                self._control.close()
                self._control = None
            if self._process is not None:
                if not self._ready:  # at its imports, without a child
                    self._process.kill()
                try:
                    self._process.wait(_END_S)
                except subprocess.TimeoutExpired:
                    self._process.returncode = 0  # it has children yet, and is not waited for any more

    def forget(self) -> None:
        """In a fork of ours: it belongs to the process that we were forked from."""
        self._lock = threading.Lock()
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            self._process.returncode = 0  # not ours to wait for
        self._process = None

    def _start(self) -> None:
        if self._process is not None:
            if self._process.poll() is None:
                return
            self._discard()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            # Standard descriptors may be closed here; this one must not take the number of one of them.
            fd = fcntl.fcntl(theirs, fcntl.F_DUPFD_CLOEXEC, 3)
        try:
            if self._error_fd < 0:
                self._error_fd = anonymous_file("preloaded-log")
            os.ftruncate(self._error_fd, 0)
            words = [
                "stoker.runtime.processes.server",
                "serve",
                str(fd),
                str(os.getpid()),
                ",".join(self._modules),
            ]
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._error_fd,
                pass_fds=(fd,),
                start_new_session=True,  # Ctrl-C is for the owner
            )
        except BaseException:
            ours.close()
            raise
        finally:
            os.close(fd)
        self._control, self._ready = ours, False

    def _ask(self, fds: Sequence[int]) -> tuple[int, int]:
        assert self._control is not None
        assert len(fds) <= MAX_FDS, "more descriptors than a message takes"
        if not self._ready:
            threads, _ = self._answer(0, START_S)
            if threads["threads"]:
                self._refuse(f"it has {threads['threads']} threads besides its first")
                raise EOFError
            self._ready = True
        self._requests += 1
        self._control.settimeout(ANSWER_S)
        socket.send_fds(self._control, [json.dumps({"id": self._requests, "fds": len(fds)}).encode()], fds)
        answer, pidfd = self._answer(self._requests, ANSWER_S)
        if answer.get("errno"):
            raise OSError(answer["errno"], os.strerror(answer["errno"]))
        if pidfd < 0:  # the message came, and its descriptor did not: we have none left
            os.kill(answer["pid"], signal.SIGKILL)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return answer["pid"], pidfd

    def _answer(self, request: int, timeout_s: float) -> tuple[dict[str, int], int]:
        """Wait for the answer to a request. One that an interrupt left unread is undone."""
        assert self._control is not None
        until = time.monotonic() + timeout_s
        while True:
            self._control.settimeout(max(0.001, until - time.monotonic()))
            data, fds, _, _ = socket.recv_fds(self._control, REQUEST_BYTES, 1)
            if not data:
                raise EOFError
            answer: dict[str, int] = json.loads(data)
            if answer["id"] == request:
                return answer, fds[0] if fds else -1
            for fd in fds:
                with suppress(ProcessLookupError):
                    signal.pidfd_send_signal(fd, signal.SIGKILL)
                os.close(fd)

    def _discard(self) -> None:
        """End it, and its children with it."""
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_S)
        self._process = self._control = None


_registry: dict[tuple[str, ...], Preloaded] = {}
_registry_lock = threading.Lock()


def preloaded(modules: tuple[str, ...]) -> Preloaded:
    """Return the preloaded process of this process for these modules; it need not be started yet."""
    with _registry_lock:
        return _registry.setdefault(modules, Preloaded(modules))


@atexit.register
def _close_all() -> None:
    for one in list(_registry.values()):
        one.close()


def _forget_all() -> None:
    global _registry_lock  # noqa: PLW0603  another thread may have held it at the fork
    _registry_lock = threading.Lock()
    for one in _registry.values():
        one.forget()


os.register_at_fork(after_in_child=_forget_all)
