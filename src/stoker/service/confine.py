"""Run a command that ends with its parent: a script of its own, since nothing may run between fork and exec.

    python -I -S confine.py PARENT LOCK COMMAND...

LOCK is the number of an open file; what is written there tells others which process holds it.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(parent: str, lock: str, *command: str) -> None:
    """Tie this process to its parent, sign the lock, and become `command`."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):  # it died before the line above
        os._exit(1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # secrets and gigabytes do not belong into core files
    os.ftruncate(int(lock), 0)
    os.pwrite(int(lock), f"group {identity(os.getpid())}\n".encode(), 0)
    os.execv(command[0], list(command))  # noqa: S606 -- a list, as everywhere


def identity(pid: int) -> str:
    """A process, such that neither another of its number nor one of another boot or container passes for it.

    Raises:
        OSError: There is no such process.
    """
    with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123 -- without site-packages, and fast
        started = file.read().rpartition(b")")[2].split()[19].decode()
    with open("/proc/sys/kernel/random/boot_id") as file:  # noqa: PTH123
        boot = file.read().strip()
    return f"{pid} {started} {boot} {os.stat('/proc/self/ns/pid').st_ino}"  # noqa: PTH116


if __name__ == "__main__":
    main(*sys.argv[1:])
