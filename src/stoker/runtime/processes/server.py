"""The preloaded process: `python -m stoker.runtime.processes.server serve SOCKET OWNER MODULE,...`.

It imports the modules, and then forks a child for each request. It runs no code of the user, has one thread
and no CUDA context, so a fork inherits nothing half done. It ends when its owner does, with its children:
they have asked the kernel for a signal at its death, and it waits for the owner by a pidfd.

A request is descriptors alone: a status socket that stays here, and what `entry.py` expects. The answer
names the child and carries its pidfd. How the child ended goes over the status socket. Its process id is
given back only when the owner has closed that: until then it may signal the child's process group without
reaching that of another process.

`server run FD...` is a child without a preloaded process, see `entry.py`.
"""

from __future__ import annotations

import errno
import gc
import json
import os
import select
import signal
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from stoker.runtime.processes import entry

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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
