"""The preloaded process, which forks children on request, and the end of it that its owner has."""

from __future__ import annotations

import atexit
import errno
import fcntl
import gc
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from stoker.runtime.processes import entry
from stoker.runtime.processes.heartbeat import anonymous_file

# ----------------------------------------------------------------------------------------------------------
# The preloaded process: `python -m stoker.runtime.processes.preloaded serve SOCKET OWNER MODULE,...`.
#
# It imports the modules, and then forks a child for each request. It runs no code of the user, has one
# thread and no CUDA context, so a fork inherits nothing half done. It ends when its owner does, with its
# children: they have asked the kernel for a signal at its death, and it waits for the owner by a pidfd.
#
# A request is descriptors alone: a status socket that stays here, and what `entry.py` expects. The answer
# names the child and carries its pidfd. How the child ended goes over the status socket. Its process id is
# given back only when the owner has closed that: until then it may signal the child's process group
# without reaching that of another process.
#
# `... preloaded run OWNER FD...` is a child without a preloaded process, see `entry.py`.


IDLE_S = 600.0
"""Without children and requests for so long it ends; the next need starts another."""
MAX_FDS = 64
REQUEST_BYTES = 1024


@dataclass(slots=True)
class _ServedChild:
    """A child: its pidfd until it has ended, then its status socket until the owner has taken note."""

    pid: int
    pidfd: int
    status: socket.socket
    ended: bool = False


class Server:
    """Forks children until the owner ends."""

    def __init__(self, control: socket.socket, owner: int) -> None:
        self._control = control
        self._open = True
        self._pid = os.getpid()
        self._owner = os.pidfd_open(owner)
        self._children: dict[int, _ServedChild] = {}
        """By the descriptor that is polled for it."""
        self._poller = select.poll()
        self._poller.register(control, select.POLLIN)
        self._poller.register(self._owner, select.POLLIN)

    def serve(self) -> None:
        """Return when the owner has ended, when it wants no more and no child is left, or after `IDLE_S`."""
        while self._open or self._children:
            ready = self._poller.poll(None if self._children else IDLE_S * 1000)
            if not ready:
                return
            for fd, _ in ready:
                if fd == self._owner:
                    return
                if fd == self._control.fileno():
                    self._answer()
                else:
                    self._attend(self._children.pop(fd), fd)

    def _answer(self) -> None:
        data, fds, _, _ = socket.recv_fds(self._control, REQUEST_BYTES, MAX_FDS)
        if not data:
            self._poller.unregister(self._control)
            self._open = False
            return
        request = json.loads(data)
        try:
            self._fork(request, fds)
        except OSError as error:  # of processes, memory or descriptors
            self._say({"id": request["id"], "errno": error.errno})
        finally:
            for fd in fds:
                os.close(fd)

    def _fork(self, request: dict[str, int], fds: list[int]) -> None:
        if len(fds) < request["fds"]:  # the kernel keeps back those that we have no room for
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        status = socket.socket(fileno=os.dup(fds[0]))
        pid = -1
        try:
            pid = os.fork()
            if pid == 0:
                os.close(fds[0])
                self._become_child(status, fds[1:])
            pidfd = os.pidfd_open(pid)  # of our child, not yet waited for: the number is its own
        except OSError:
            status.close()
            if pid > 0:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            raise
        self._children[pidfd] = _ServedChild(pid, pidfd, status)
        self._poller.register(pidfd, select.POLLIN)
        self._say({"id": request["id"], "pid": pid}, (pidfd,))

    def _become_child(self, status: socket.socket, fds: list[int]) -> NoReturn:
        """Let go of everything of ours, and be the child; does not return."""
        for child in self._children.values():
            if not child.ended:
                os.close(child.pidfd)
            child.status.close()
        os.close(self._owner)
        self._control.close()
        status.close()
        entry.run_and_exit(fds, parent=self._pid)

    def _attend(self, child: _ServedChild, fd: int) -> None:
        """Tell how a child ended, or, once the owner has taken note of that, give its number back."""
        self._poller.unregister(fd)
        if child.ended:
            os.waitpid(child.pid, 0)
            child.status.close()
            return
        how = os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert how is not None
        code = how.si_status if how.si_code == os.CLD_EXITED else -how.si_status
        os.close(child.pidfd)
        child.ended = True
        with suppress(OSError):  # the owner has no interest; the end of the socket is seen next
            child.status.send(json.dumps(code).encode(), socket.MSG_NOSIGNAL)
        self._children[child.status.fileno()] = child
        self._poller.register(child.status, select.POLLIN)

    def _say(self, answer: dict[str, int | None], fds: tuple[int, ...] = ()) -> None:
        with suppress(OSError):  # the owner is gone; its pidfd says so
            socket.send_fds(self._control, [json.dumps(answer).encode()], fds)


def count_threads() -> int:
    """Return the threads that a fork would leave behind.

    Pools that stop at a fork and start again when they are needed (OpenBLAS) are stopped by one fork first.
    """
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    return sum(1 for _ in Path("/proc/self/task").iterdir()) - 1


def serve(control_fd: int, owner: int, modules: list[str]) -> None:
    """Import modules and serve; what cannot be imported is left to the children."""
    signal.pthread_sigmask(signal.SIG_SETMASK, {entry.STACK_SIGNAL})  # a child lets it in once it can answer
    if os.getppid() != owner:
        return
    control = socket.socket(fileno=control_fd)
    control.set_inheritable(False)
    server = Server(control, owner)
    os.chdir(
        os.sep
    )  # torch (MKL) cannot be imported in a folder that was deleted; a child goes to its owner's
    for name in modules:
        with suppress(ImportError):
            import_module(name)
    control.send(json.dumps({"id": 0, "threads": count_threads()}).encode())
    gc.collect()
    gc.freeze()  # else the collector of each child would touch, and so copy, every page with objects
    server.serve()


def main(words: list[str]) -> int:
    """Serve, or run one child."""
    if words[0] == "run":
        return entry.run([int(word) for word in words[2:]], parent=int(words[1]))
    serve(int(words[1]), int(words[2]), words[3].split(","))
    return 0


# ----------------------------------------------------------------------------------------------------------
# The owner's end: the process is started once, asked to fork, started again when it is gone.


log = logging.getLogger("stoker")

START_S = 120.0
"""Seconds that the imports may take; past them the process is ended and children start one by one."""
ANSWER_S = 30.0
"""Seconds that a fork may take."""
_TRIES = 2
FORK_S = _TRIES * (START_S + ANSWER_S)
"""Seconds after which `Preloaded.fork` has returned or raised."""
_END_S = 0.5
_CLOSE_POLL_S = 0.05
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
        self._begun = 0.0
        self._requests = 0
        self._refused = ""
        self._error_fd = -1

    @property
    def pid(self) -> int | None:
        """Its process id, if it was started."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start it unless it runs or was given up, without waiting for its imports.

        Raises:
            OSError: The system starts no more processes.
        """
        if not self._lock.acquire(blocking=False):
            return  # another thread has started it, and may wait for its imports
        try:
            if not (self._refused or _ending.is_set()):
                self._start()
        finally:
            self._lock.release()

    def is_ready(self) -> bool:
        """Return True if `fork` would not wait for imports: they are done, or failed, or take too long.

        False before the first start.
        """
        if not self._lock.acquire(blocking=False):
            return False  # by a fork that waits
        try:
            if self._ready or self._refused or self._control is None:
                return bool(self._begun or self._refused)
            poller = select.poll()
            poller.register(self._control, select.POLLIN)
            return bool(poller.poll(0)) or time.monotonic() - self._begun > START_S
        finally:
            self._lock.release()

    def fork(self, fds: Sequence[int]) -> tuple[int, int]:
        """Fork a child that has copies of these descriptors; see `Server`.

        Returns:
            Its process id and its pidfd, which is the caller's.

        Raises:
            NotPreloadedError: The process does not start, or cannot be forked safely.
            OSError: The system starts no more processes.
        """
        with self._lock:
            for _ in range(_TRIES):
                if _ending.is_set():
                    raise OSError(errno.ESHUTDOWN, "this program ends")
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
        while not self._lock.acquire(timeout=_CLOSE_POLL_S):
            if not self._ready and (process := self._process) is not None:
                process.kill()  # another thread waits for its imports
        try:
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
        finally:
            self._lock.release()

    def forget(self) -> None:
        """In a fork of ours: it belongs to the process that we were forked from."""
        self._lock = threading.Lock()
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            self._process.returncode = 0  # not ours to wait for
        self._process, self._ready, self._begun = None, False, 0.0

    def _start(self) -> None:
        if self._process is not None:
            if self._process.poll() is None:
                return
            self._discard()
        self._begun = time.monotonic()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            # Standard descriptors may be closed here; this one must not take the number of one of them.
            fd = fcntl.fcntl(theirs, fcntl.F_DUPFD_CLOEXEC, 3)
        try:
            if self._error_fd < 0:
                self._error_fd = anonymous_file("preloaded-log")
            os.ftruncate(self._error_fd, 0)
            words = [
                "stoker.runtime.processes.preloaded",
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
        self._control, self._ready, self._begun = ours, False, time.monotonic()

    def _ask(self, fds: Sequence[int]) -> tuple[int, int]:
        assert self._control is not None
        assert len(fds) <= MAX_FDS, "more descriptors than a message takes"
        if not self._ready:
            threads, _ = self._answer(0, self._begun + START_S - time.monotonic())
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


_ending = threading.Event()
"""This program ends: nothing is started any more."""
_registry: dict[tuple[str, ...], Preloaded] = {}
_registry_lock = threading.Lock()


def preloaded(modules: tuple[str, ...]) -> Preloaded:
    """Return the preloaded process of this process for these modules; it need not be started yet."""
    with _registry_lock:
        return _registry.setdefault(modules, Preloaded(modules))


@atexit.register
def _close_all() -> None:
    _ending.set()
    for one in list(_registry.values()):
        one.close()


def _forget_all() -> None:
    global _registry_lock  # noqa: PLW0603  another thread may have held it at the fork
    _registry_lock = threading.Lock()
    for one in _registry.values():
        one.forget()


os.register_at_fork(after_in_child=_forget_all)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
