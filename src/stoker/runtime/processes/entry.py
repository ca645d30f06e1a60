"""The child's side: what every child does before its target runs, and after.

A child has the descriptors that were passed to it and no others. Its environment, working folder, limits,
processors and import paths are those of its owner at the start of the child, as after a fork and exec. They
are set explicitly, because a preloaded process may be older than a change of these.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import os
import resource
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn, cast

from stoker.runtime.libc import tie_to_parent
from stoker.runtime.processes.heartbeat import HeartbeatPage
from stoker.runtime.processes.wire import Frame, Parser

STACK_SIGNAL = signal.SIGUSR1
"""At this signal a child writes the stacks of its threads, without the interpreter's help."""
_NO_RESET = {signal.SIGKILL, signal.SIGSTOP, signal.SIGPIPE, signal.SIGXFSZ}
"""Cannot be set; or ignored by every Python, so that writing raises instead."""

Target = Callable[["Connection"], "int | None"]
"""What a child runs. It returns the exit code; None is 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """Connection of a child to its owner."""

    socket: socket.socket
    """Ends when the owner does or lets go of the child."""
    heartbeat: HeartbeatPage
    stack_fd: int
    """Where stacks go: on a crash and at `STACK_SIGNAL`."""
    shared: tuple[int, ...]
    """Descriptors that the owner passed, in its order."""
    arguments: dict[str, Any]
    """Plain values that the owner passed."""
    payload: bytes
    """Bytes that the owner passed."""
    owner: int
    """Process id of the owner, which need not be the parent process."""


def run(fds: list[int], *, parent: int) -> int:
    """Set this process up as the plan says, and run its target.

    Args:
        fds: Descriptors as `child.py` passes them: plan, socket, heartbeat page, stacks, standard output,
            working folder, then the shared ones.
        parent: Process id of our parent, to notice that it has ended already.

    Returns:
        The exit code.
    """
    plan_fd, socket_fd, beat_fd, stack_fd, output_fd, folder_fd, *shared = fds
    for fd in fds:
        os.set_inheritable(fd, False)
    with os.fdopen(plan_fd, "rb") as file:
        file.seek(0)
        (plan,) = Parser().feed(file.read())
    _tie(parent, plan["death_signal"])
    for fd in (1, 2):
        os.dup2(output_fd, fd)
    os.close(output_fd)
    _reset_signals(stack_fd)
    _take_over(plan, folder_fd)
    _name_process(plan)
    target, payload = _target(plan)
    connection = Connection(
        socket=socket.socket(fileno=socket_fd),
        heartbeat=HeartbeatPage(beat_fd),
        stack_fd=stack_fd,
        shared=tuple(shared),
        arguments=plan["arguments"],
        payload=payload,
        owner=plan["owner"],
    )
    return target(connection) or 0


def run_and_exit(fds: list[int], *, parent: int) -> NoReturn:
    """Do as `run` in a fork, and end as the interpreter would: errors printed, exit functions called."""
    code = 1
    try:
        os.setsid()
        code = run(fds, parent=parent)
    except SystemExit as error:
        code = _exit_code(error)
    except BaseException:  # noqa: BLE001  the edge of the process
        traceback.print_exc()
    finally:
        with suppress(BaseException):
            _finish()
        os._exit(code)


def use_one_thread() -> None:
    """Have torch, loaded by now or later, and what is started from here compute with one thread."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.putenv(name, "1")
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)


def limit_memory(size_bytes: int) -> None:
    """Let this process map so many bytes more than it does now; an allocation beyond fails."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + size_bytes
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _tie(parent: int, number: int) -> None:
    if number and sys.platform == "linux":
        tie_to_parent(signal.Signals(number), parent)


def _reset_signals(stack_fd: int) -> None:
    """As in a Python just started: nothing is caught, ignored or blocked; crashes write their stacks."""
    for number in signal.valid_signals() - _NO_RESET:
        with suppress(OSError, ValueError):
            if signal.getsignal(number) not in (signal.SIG_DFL, None):
                signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.enable(file=stack_fd)  # not standard error, whose pipe may be full
    faulthandler.register(STACK_SIGNAL, file=stack_fd, all_threads=True, chain=False)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _take_over(plan: Frame, folder_fd: int) -> None:
    """Take over what a child has of its owner, and draw fresh random numbers."""
    os.environ.clear()
    os.environ.update(plan["environment"])
    if plan["sys_path"] is not None:
        sys.path[:] = plan["sys_path"]
    with suppress(OSError):  # a folder that was deleted can be gone to, one without permission cannot
        os.fchdir(folder_fd)
    os.close(folder_fd)
    os.umask(plan["umask"])
    if sys.platform == "linux":
        with suppress(OSError):
            os.sched_setaffinity(0, plan["processors"])
    for kind, limits in plan["limits"]:
        with suppress(OSError, ValueError):
            resource.setrlimit(kind, tuple(limits))
    generators = cast("Any", sys.modules.get("numpy.random"))
    if generators is not None:  # the global one was seeded when it was imported, alike for all forks
        generators.seed()
    if plan["main"]:
        from multiprocessing import spawn

        spawn.prepare(plan["main"])


def _name_process(plan: Frame) -> None:
    """Show in `ps`, /proc and `sys.argv` what this process runs and for whom, not what it was forked from."""
    words = [plan["target"].partition(":")[0] or "child", str(plan["owner"])]
    sys.argv[:] = words
    sys.orig_argv[:] = [sys.executable, "-m", *words]
    with suppress(OSError, ValueError):  # the kernel shows the memory that the words were handed over in
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = int(fields[45]), int(fields[46])
        title = "\0".join(sys.orig_argv).encode()[: max(0, end - start - 1)]
        ctypes.memmove(start, title.ljust(end - start, b"\0"), end - start)


def _target(plan: Frame) -> tuple[Target, bytes]:
    """Return the target, by name or pickled in front of the payload, and the rest of the payload."""
    payload: bytes = plan.get("payload", b"")
    if plan["target"]:
        module, name = plan["target"].split(":")
        return getattr(import_module(module), name), payload
    import cloudpickle  # pyright: ignore[reportMissingTypeStubs]

    size = plan["pickled_bytes"]
    return cloudpickle.loads(payload[:size]), payload[size:]


def _exit_code(error: SystemExit) -> int:
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    print(error.code, file=sys.stderr)  # noqa: T201  as the interpreter does
    return 1


def _finish() -> None:
    """Wait for threads and call exit functions as the end of the interpreter does; flush what was printed."""
    cast("Any", threading)._shutdown()  # waits for threads that are not daemons
    cast("Any", atexit)._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
