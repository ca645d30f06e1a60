"""Preloaded processes of a session of tests are forked from processes that have imported the same before.

Each program that starts children has a preloaded process of its own (`stoker.runtime.processes`), which
imports torch in 2.5 s of processor time. Tests start hundreds of programs. While `installed` holds, and in
all forks of such processes, a preloaded process is a fork of a template: a process that imported just
these modules once for the session, itself forked from one of fewer modules where there is one. It has its
owner's environment and ends with its owner, whose child it is not. Where a fork could tell (limits,
namespaces, control groups, variables that libraries read when they are loaded), a Python is started. Tests of
the preloaded process itself do without, see `real`.

    python import_once.py SOCKET ADDRESS ...     the first process: makes templates until SOCKET is closed
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import resource
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

READ_AT_START = (
    *("CUDA_", "GLIBC_", "HDF5_", "KMP_", "LANG", "LC_", "LD_", "MALLOC_", "MKL_", "NUMEXPR_", "OMP_"),
    *("OPENBLAS_", "PYTHON", "STOKER_START_METHOD", "TORCH", "TZ"),
)
"""How variables begin that are read when a process or a library is loaded, and never again."""
SERVER = "stoker.runtime.processes.preloaded"
ANSWER_S = 120.0
MESSAGE_BYTES = 1 << 17
OF_TESTS = ("hypothesis.strategies", "pytest")
"""Imported too, since children import the modules of the tests that hold their code."""
ROOM = "." * 1000
"""For the command lines that forks show: they are written where the first process was handed its own."""
READ_LATER = {"PYTHONPATH", "PYTHONUNBUFFERED", "TORCHINDUCTOR_CACHE_DIR"}
"""Not read when a library is loaded. The last is set by `torch.compile` itself, for good."""
LINES = ("CapEff", "Groups", "NoNewPrivs", "Seccomp", "Uid", "Gid")


def read_at_start(environment: dict[str, str]) -> dict[str, str]:
    """Return those variables that a process that runs already would not notice."""
    read = {n: v for n, v in environment.items() if n.startswith(READ_AT_START)}
    return {name: value for name, value in read.items() if name not in READ_LATER}


def start_code(import_path: str) -> list[str]:
    """Return the folders of a PYTHONPATH with code that every Python runs when it starts."""
    folders = [Path(entry) for entry in import_path.split(os.pathsep) if entry]
    return [
        str(folder)
        for folder in folders
        if any((folder / f"{who}customize.py").exists() for who in ("site", "user"))
    ]


def surroundings() -> dict[str, Any]:
    """Return what a started Python has of its parent and a fork of another process has not."""
    status = Path("/proc/self/status").read_text().splitlines()
    return {
        "environment": read_at_start(dict(os.environ)),
        "start code": start_code(os.environ.get("PYTHONPATH", "")),
        "limits": [resource.getrlimit(getattr(resource, n)) for n in dir(resource) if n.startswith("RLIMIT")],
        "namespaces": [os.readlink(path) for path in sorted(Path("/proc/self/ns").iterdir())],
        "groups": Path("/proc/self/cgroup").read_text(),
        "root": os.readlink("/proc/self/root"),
        "processors": sorted(os.sched_getaffinity(0)),
        "nice": os.nice(0),
        "status": [line for line in status if line.startswith(LINES)],
    }


class Process:
    """What `Preloaded` uses of a `subprocess.Popen`, for a process that is not a child of ours."""

    def __init__(self, pid: int, pidfd: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._pidfd = pidfd

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            poller = select.poll()
            poller.register(self._pidfd, select.POLLIN)
            if not poller.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired("a preloaded process", timeout or 0)
            self.returncode = 0
        return self.returncode

    def kill(self) -> None:
        if self.returncode is None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def __del__(self) -> None:
        with suppress(OSError):
            os.close(self._pidfd)


class Templates:
    """The client's side: forks preloaded processes, or starts them where that is not the same."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._surroundings = surroundings()
        self._first: subprocess.Popen[bytes] | None = None
        self._lifeline: socket.socket | None = None
        self._session = os.getpid()

    def popen(self, words: list[str], *, pass_fds: tuple[int, ...], stderr: int, **named: Any) -> Any:
        """Do as `subprocess.Popen`."""
        if words[3:5] == [SERVER, "serve"] and surroundings() == self._surroundings:
            with suppress(OSError, EOFError):
                return self._fork(words, pass_fds[0], stderr)
        return subprocess.Popen(words, pass_fds=pass_fds, stderr=stderr, **named)

    def _fork(self, words: list[str], control: int, stderr: int) -> Process:
        from stoker.runtime.processes.child import TORCH

        if os.getpid() == self._session and self._first is None:
            self._start()
        modules = words[7].split(",")
        base = [*TORCH] if set(TORCH) <= set(modules) else []
        place, _ = ask(self.address, {"modules": modules, "base": base})
        given = {"environment": dict(os.environ), "owner": int(words[6]), "modules": words[7]}
        answer, pidfd = ask(place["address"], given, [control, stderr])
        if pidfd < 0:
            raise EOFError
        return Process(answer["pid"], pidfd)

    def _start(self) -> None:
        self._lifeline, theirs = socket.socketpair()
        with theirs:
            self._first = subprocess.Popen(
                [sys.executable, "-P", __file__, str(theirs.fileno()), self.address, ROOM],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self._lifeline.settimeout(ANSWER_S)
        if not self._lifeline.recv(1):
            raise EOFError

    def close(self) -> None:
        """End the first process, and the templates with it."""
        if self._first is not None and self._lifeline is not None:
            self._lifeline.close()
            self._first.wait()


def ask(address: str, question: dict[str, Any], fds: list[int] | None = None) -> tuple[dict[str, Any], int]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(ANSWER_S)
        connection.connect("\0" + address)
        socket.send_fds(connection, [json.dumps(question).encode()], fds or [])
        data, received, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, 1)
        if not data:
            raise EOFError
        return json.loads(data), received[0] if received else -1


def install(templates: Templates) -> None:
    from stoker.runtime.processes import preloaded

    preloaded.subprocess = SimpleNamespace(
        Popen=templates.popen, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired
    )


def do_not_wait_for_disks() -> None:
    """Have `os.fsync` return at once: 10 ms on a usual disk, some ten times for a cache.

    What it is for is tested where the power goes off in the middle (`tests/chaos`), without this.
    """
    os.fsync = lambda fd: os.fstat(fd if isinstance(fd, int) else fd.fileno()) and None


@contextmanager
def installed() -> Iterator[None]:
    """Fork the preloaded processes of this process and of its forks from templates meanwhile."""
    templates = Templates(f"stoker-tests-{os.getpid()}-{os.urandom(8).hex()}")
    install(templates)
    try:
        yield
    finally:
        templates.close()
        start_really()


@contextmanager
def real() -> Iterator[None]:
    """Start preloaded processes as a user's program does meanwhile."""
    from stoker.runtime.processes import preloaded

    before = preloaded.subprocess
    start_really()
    try:
        yield
    finally:
        preloaded.subprocess = before


def start_really() -> None:
    from stoker.runtime.processes import preloaded

    preloaded.subprocess = subprocess


def make_templates(lifeline: socket.socket, address: str) -> None:
    """Make a template for each tuple of modules that is asked for, until the session ends."""
    templates = Templates(address)
    made: dict[str, str] = {}
    listener = listening(address)
    lifeline.send(b"1")
    poller = select.poll()
    poller.register(listener, select.POLLIN)
    poller.register(lifeline, select.POLLIN)

    def address_of(modules: list[str], connection: socket.socket) -> str:
        key = ",".join(modules)
        if key not in made:
            smaller = [one for one in made if set(one.split(",")) < set(modules)]
            made[key] = f"{address}-{len(made)}"
            own, parent = listening(made[key]), os.getpid()
            if smaller:
                _, pidfd = ask(made[max(smaller, key=len)], {"template": modules}, [own.fileno()])
                if pidfd >= 0:  # templates that are forked later would inherit it
                    os.close(pidfd)
            elif os.fork() == 0:
                for other in (connection, listener, lifeline):
                    other.close()
                be_template(own, modules, parent, templates)
            own.close()
        return made[key]

    while True:
        if any(fd == lifeline.fileno() for fd, _ in poller.poll()):
            os._exit(0)
        connection, _ = listener.accept()
        with connection, suppress(OSError, ValueError):  # a client that was killed while it asked
            given = json.loads(connection.recv(MESSAGE_BYTES))
            if given["base"]:
                address_of(given["base"], connection)
            found = address_of(given["modules"], connection)
            connection.send(json.dumps({"address": found}).encode())


def listening(address: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind("\0" + address)
    listener.listen(64)
    return listener


def be_template(listener: socket.socket, modules: list[str], parent: int, templates: Templates) -> NoReturn:
    """Import the modules, and fork a preloaded process for each request."""
    from stoker.runtime.libc import tie_to_parent

    tie_to_parent(signal.SIGKILL, parent)
    for name in (*modules, *OF_TESTS):
        with suppress(ImportError):
            importlib.import_module(name)
    install(templates)
    do_not_wait_for_disks()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # they are nobody's to wait for
    gc.collect()
    gc.freeze()
    while True:
        connection, _ = listener.accept()
        with connection, suppress(OSError, ValueError):
            data, fds, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, 2)
            given, own = json.loads(data), os.getpid()
            pid = os.fork()
            if pid == 0:
                listener.close()
                connection.close()
                if "template" in given:
                    be_template(socket.socket(fileno=fds[0]), given["template"], own, templates)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                be_preloaded(given, *fds)
            for fd in fds:
                os.close(fd)
            pidfd = os.pidfd_open(pid)
            socket.send_fds(connection, [json.dumps({"pid": pid}).encode()], [pidfd])
            os.close(pidfd)


def show(words: list[str]) -> None:
    """Write the command line that others see."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    shown = "\0".join(words).encode()[: end - start - 1]
    ctypes.memmove(start, shown.ljust(end - start, b"\0"), end - start)


def be_preloaded(given: dict[str, Any], control: int, stderr: int) -> NoReturn:
    """Be what `python -P -m stoker.runtime.processes.preloaded serve ...` is for its owner."""
    code = 1
    try:
        os.setsid()
        os.dup2(stderr, 2)
        os.close(stderr)
        os.environ.clear()
        os.environ.update(given["environment"])
        sys.argv[:] = [SERVER, "serve", str(control), str(given["owner"]), given["modules"]]
        show([sys.executable, "-P", "-m", *sys.argv])
        parent_id = os.getppid

        def owner() -> int:
            os.getppid = parent_id
            return given["owner"]

        os.getppid = owner  # it asks once whether its owner is there yet
        sys.modules["__main__"] = ModuleType("__main__")
        runpy._run_module_as_main(SERVER)  # type: ignore[attr-defined]
    except SystemExit:
        code = 0
    finally:
        os._exit(code)


if __name__ == "__main__":
    make_templates(socket.socket(fileno=int(sys.argv[1])), sys.argv[2])
