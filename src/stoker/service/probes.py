"""Read facts, checks and samples of data sets in a separate process (`probe`).

A damaged file can crash the library that reads it, and storage can stop answering. Neither must affect the
service, so it waits for the process up to a timeout and then kills it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

from stoker import errors
from stoker.errors import SourceError, StalledError, StokerError
from stoker.runtime.processes.child import TORCH, Child
from stoker.runtime.processes.entry import Connection, limit_memory
from stoker.runtime.processes.heartbeat import anonymous_file
from stoker.schema import Json
from stoker.service.connections import use_password
from stoker.service.kinds import MOST_SHOWN, Reading, Row, Spec, kind_of
from stoker.service.security import data_paths
from stoker.sources.files import confine_sources
from stoker.sources.sql.query import parse_database_url
from stoker.units import GIB, format_bytes

TIMEOUT_S = 60.0
TOTAL_S = 6 * 3600.0
"""How long a process reads that reports its progress."""
MEMORY_BYTES = 4 * GIB
"""Memory that a process may take to read samples, whatever a file says of their size. A plan has no such
limit: drivers of GPUs reserve much address space."""
MODULES = (*TORCH, "stoker.service.probes")
"""Modules that are imported before the process starts."""
REPORT_S = 1.0
"""Seconds between two reports of progress."""
_PIECE_BYTES = 1 << 20
_TAIL_BYTES = 4096


def probe(
    what: str,
    kind: str,
    spec: Mapping[str, Any],
    *,
    timeout_s: float = TIMEOUT_S,
    on_progress: Callable[[int, int], None] | None = None,
    **given: Any,
) -> Any:
    """Return the result of a function of `PROBES` from another process.

    Args:
        what: Name of the function.
        kind, spec: Of the data set.
        timeout_s: How long it may take, with `on_progress` from one report to the next and `TOTAL_S` in all.
        on_progress: Called with the samples that were read and the number of all, about each second. An error
            of it ends the process and is raised.
        given: Further arguments of the function; and `password`, of the connection of the spec's URL.

    Raises:
        SourceError: The data is invalid, or reading it crashed the process.
        StalledError: It took too long.
    """
    told: dict[str, int] = {} if on_progress is None else {"tell": True}
    told |= {} if what == "plan" else {"memory_bytes": MEMORY_BYTES}
    request = json.dumps({"what": what, "kind": kind, "spec": dict(spec), **told, **given})
    output = anonymous_file("stoker-probe")
    try:
        child = Child(
            "stoker.service.probes:serve", what="a process to read data", payload=request.encode(),
            output=output, modules=MODULES,
        )  # fmt: skip
        try:
            said = _answer_of(child, timeout_s, on_progress)
        finally:
            child.stop(0.0)
            child.close()
        last = os.pread(output, _TAIL_BYTES, max(0, os.fstat(output).st_size - _TAIL_BYTES))
    finally:
        os.close(output)
    if said is None:
        limit = (
            f"{timeout_s:g} s" if on_progress is None else f"{TOTAL_S:g} s, or {timeout_s:g} s for a sample,"
        )
        raise StalledError(
            f"reading {_shown(spec)} took more than {limit} and was ended. The storage or the "
            "database does not answer, or the data set is very large"
        )
    try:
        answer = cast("dict[str, Any]", json.loads(said))
    except ValueError:
        line = last.decode(errors="replace").strip().rpartition("\n")[2][-300:]
        raise SourceError(
            f"reading {_shown(spec)} crashed its process: it {child.exit}: {line}. The data may be damaged"
        ) from None
    if "error" in answer:
        of_class: type[StokerError] = getattr(errors, str(answer.get("class")), SourceError)
        raise of_class(str(answer["error"]), hint=str(answer["hint"]))
    return answer["found"]


def _answer_of(
    child: Child, timeout_s: float, on_progress: Callable[[int, int], None] | None
) -> bytes | None:
    """Return the answer of a process, the last line of its output; None if it does not end in time."""
    said, until, last = bytearray(), time.monotonic() + timeout_s, time.monotonic() + TOTAL_S
    try:
        while True:
            child.socket.settimeout(max(0.001, until - time.monotonic()))
            piece = child.socket.recv(_PIECE_BYTES)
            if not piece:
                break
            said += piece
            while on_progress is not None and b"\n" in said:
                line, _, said = said.partition(b"\n")
                on_progress(*json.loads(line))
                until = min(last, time.monotonic() + timeout_s)
    except TimeoutError:
        return None
    except ConnectionError:
        pass  # it was killed
    return bytes(said) if child.wait(max(0.0, until - time.monotonic())) else None


def _shown(spec: Mapping[str, Any]) -> str:
    return parse_database_url(str(spec["url"])).shown if "url" in spec else str(spec.get("path", ""))


def serve(connection: Connection) -> None:
    """Answer the request of `probe` in the process that it started."""
    request: dict[str, Any] = json.loads(connection.payload)
    use_password(request.pop("password", None))
    confine_sources(data_paths([request["spec"], *(one["spec"] for one in request.get("datasets", ()))]))
    answer: dict[str, Json]
    memory_bytes = request.pop("memory_bytes", None)
    if memory_bytes is not None:
        limit_memory(memory_bytes)
    if request.pop("tell", False):
        request["tell"] = _Reports(connection).tell
    try:
        answer = {"found": PROBES[request.pop("what")](request.pop("kind"), request.pop("spec"), **request)}
    except StokerError as error:
        answer = {"error": error.fact, "hint": error.hint, "class": type(error).__name__}
    except MemoryError:
        most = "there is" if memory_bytes is None else format_bytes(memory_bytes)
        answer = {
            "error": f"reading a sample takes more memory than {most}",
            "hint": "",
            "class": "SourceError",
        }
    connection.socket.sendall(json.dumps(answer).encode())


class _Reports:
    """Sends the progress of reading, a line each."""

    def __init__(self, connection: Connection) -> None:
        self._socket = connection.socket
        self._due = 0.0

    def tell(self, read: int, count: int) -> None:
        """Send it if a report is due."""
        if (now := time.monotonic()) >= self._due:
            self._due = now + REPORT_S
            self._socket.sendall(f"{json.dumps([read, count])}\n".encode())


def _facts(kind: str, spec: Spec) -> Row:
    return kind_of(kind).facts(spec)


def _check(
    kind: str, spec: Spec, *, everything: bool = False, tell: Callable[[int, int], None] | None = None
) -> list[Row]:
    return kind_of(kind).check(spec, Reading(everything) if tell is None else Reading(everything, tell))


def _samples(kind: str, spec: Spec, limit: int = 20, offset: int = 0, *, pictures: bool = False) -> list[Row]:
    return kind_of(kind).samples(spec, min(limit, MOST_SHOWN), offset, pictures=pictures)


def _remove(kind: str, spec: Spec) -> None:
    kind_of(kind).remove(spec)


def plan(
    _kind: str,
    _spec: Spec,
    *,
    config: Mapping[str, Any],
    datasets: Sequence[Mapping[str, Any]],
    caches: str,
    run_dir: str,
) -> dict[str, Json]:
    """Return where the records of a job would be served from, without encoding anything.

    Raises:
        StokerError: The data cannot be read, or no plan fits.
    """
    from stoker.run.context import Run
    from stoker.run.plan import plan_config
    from stoker.service.job_config import JobConfig, settings_of

    wanted = JobConfig.model_validate(dict(config))
    settings = settings_of(wanted, datasets, caches=caches, run_dir=run_dir, epochs=wanted.epochs)
    return plan_config(Run(settings)).to_json()


PROBES: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {"facts": _facts, "check": _check, "samples": _samples, "remove": _remove, "plan": plan}
)
