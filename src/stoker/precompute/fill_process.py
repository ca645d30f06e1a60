"""The process behind `background.py`: takes one job, fills the cache, says how that ended."""

from __future__ import annotations

import faulthandler
import logging
import os
import select
import signal
import socket
import sys
import threading
import traceback
from typing import Any

import cloudpickle  # pyright: ignore[reportMissingTypeStubs]

from stoker.errors import Interrupted, StokerError
from stoker.runtime.libc import keep_freed_memory
from stoker.runtime.processes.wire import Parser, pack
from stoker.sources.files import confine_sources

_LOOK_S = 1.0


def main(arguments: list[str]) -> int:
    """Run one job; arguments are the socket, the job's descriptor and the caller's process id."""
    keep_freed_memory()  # before there are threads
    socket_fd, work_fd, parent = (int(text) for text in arguments)
    for fd in (socket_fd, work_fd):
        os.set_inheritable(fd, False)  # workers must not hold them
    faulthandler.enable()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    caller = socket.socket(fileno=socket_fd)
    threading.Thread(target=_follow, args=(caller, parent), name="stoker-caller", daemon=True).start()
    try:
        end = _fill(work_fd)
    except StokerError as error:
        end = {"kind": "failed", "error": type(error).__name__, "message": error.marked}
    except Interrupted as error:
        end = {"kind": "failed", "error": Interrupted.__name__, "message": str(error)}
    except Exception as error:  # noqa: BLE001  a process edge: the caller raises it
        traceback.print_exc()
        message = f"{type(error).__name__}: {error}"
        end = {"kind": "failed", "error": "StokerError", "message": message}
    try:
        caller.sendall(pack(end))
    except OSError:
        return 1  # nobody is there to be told
    return 0


def _fill(work_fd: int) -> dict[str, Any]:
    size = os.fstat(work_fd).st_size
    with open(work_fd, "rb") as file:
        file.seek(0)
        (frame,) = Parser().feed(file.read(size))
    sys.path[:] = frame["sys_path"]
    confine_sources(frame["confined"])
    import torch

    from stoker.precompute.engine import run_precompute

    torch.set_num_threads(frame["threads"])  # what the caller would have encoded with
    job = cloudpickle.loads(frame.pop("payload"))
    report = run_precompute(job.source, job.encoder, job.cache_dir, name=job.name, settings=job.settings)
    return {"kind": "done", "encoded": report.encoded}


def _follow(caller: socket.socket, parent: int) -> None:
    """When the caller has gone, end as if interrupted: what is encoded is sealed."""
    while os.getppid() == parent:
        ready, _, _ = select.select([caller], [], [], _LOOK_S)
        if ready and not caller.recv(1, socket.MSG_PEEK):
            break
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
