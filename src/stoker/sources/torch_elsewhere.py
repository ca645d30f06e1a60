"""The probed items of a Dataset, read once more in a process of their own.

A difference there would be one in every worker. Items may be drawn from the state of a process: its number, a
seed of its own, the order of a set. A value may be set in this process alone, or only this process finds a
module. Each item has a timeout, after which the child is killed.
"""

from __future__ import annotations

import json
import select
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import IO, TYPE_CHECKING, Any

import cloudpickle  # pyright: ignore[reportMissingTypeStubs]

from stoker.errors import SourceError, StalledError, arg
from stoker.runtime.processes.child import LIGHT, TORCH, Child
from stoker.runtime.processes.entry import Connection, use_one_thread
from stoker.sources.pickling import pickle_for_process

if TYPE_CHECKING:
    from stoker.sources.torch_dataset import TorchSource


START_S = 120.0
"""Seconds for the child to start and to import what the Dataset needs."""
_END_S = 5.0
_TAIL = 600


def read_elsewhere(source: object, name: str, *, timeout_s: float) -> dict[int, dict[str, str] | str]:
    """Return digests by field of each probed sample as another process reads it; text where it failed there.

    Raises:
        SourceError: The source cannot go there, or ended the process.
        StalledError: Starting, or one item, took too long.
    """
    with tempfile.TemporaryFile() as output:
        child = Child(
            "stoker.sources.torch_elsewhere:answer",
            what="a second process to read in",
            payload=pickle_for_process(source),
            output=output.fileno(),
            modules=TORCH if "torch" in sys.modules else LIGHT,
        )
        try:
            return _collect(child, output, name, timeout_s)
        finally:
            child.stop(0.0, _END_S)  # one that waits for storage ends when that answers: nothing waits for it
            child.close()


def _collect(child: Child, output: IO[bytes], name: str, timeout_s: float) -> dict[int, dict[str, str] | str]:
    found: dict[int, dict[str, str] | str] = {}
    text, number, until = b"", -1, time.monotonic() + START_S
    while True:
        left = until - time.monotonic()
        if left <= 0 or not select.select([child.socket], [], [], left)[0]:
            where = "starting it" if number < 0 else f"item {number}"
            raise StalledError(
                f"{name}: read in a second process, {where} took more than "
                f"{START_S if number < 0 else timeout_s:g} s",
                hint="Fix what it waits for, give it more time (source.probe_timeout_s = 300), or read in "
                f"this process with {arg('workers', 0)}",
            )
        data = child.socket.recv(1 << 16)
        if not data:
            break
        *lines, text = (text + data).split(b"\n")
        for line in lines:
            message: dict[str, Any] = json.loads(line)
            if message["kind"] == "done":
                return found
            if message["kind"] == "refused":
                raise SourceError(
                    f"{name} cannot be loaded in a second process, as workers are:\n{message['error']}",
                    hint=f"Fix that, or read in this process with {arg('workers', 0)}",
                )
            number, until = int(message["number"]), time.monotonic() + timeout_s
            if message["kind"] == "item":
                found[number] = message["found"]
    child.wait(10)
    output.seek(0)
    tail = output.read().decode(errors="replace").strip()[-_TAIL:]
    raise SourceError(
        f"{name}: a second process that read item {number} {child.exit}"
        + (f". It said: {tail}" if tail else ""),
        hint=f"Workers would do the same: fix the Dataset, or read in this process with {arg('workers', 0)}",
    )


def check_alike(
    here: Mapping[int, Mapping[str, str]], there: Mapping[int, Mapping[str, str] | str], name: str
) -> None:
    """Refuse what is not the same in both processes.

    Raises:
        SourceError: Names sample and field.
    """
    for number, fields in here.items():
        other = there.get(number, "it was not read")
        if isinstance(other, str):
            raise SourceError(
                f"{name}: sample {number} can be read in this process and not in a second one: {other}",
                hint="What it needs exists in this process alone: pass it to the Dataset in __init__, or "
                f"read in this process with {arg('workers', 0)}",
            )
        for field, digest in fields.items():
            if other.get(field) != digest:
                raise SourceError(
                    f"{name}: sample {number}, field {field!r} is another in a second process, so each "
                    "reader would give its own",
                    hint="Fix what depends on the process (its number, hash() of text, the order of a set, "
                    "a value set after import): hand it to the Dataset in __init__. If it is drawn at "
                    f"random, seed it by the sample number, or store one draw with {arg('random', 'freeze')}",
                )


def answer(connection: Connection) -> int:
    """Read, in the child, what was probed of the source in the payload; say digests, a line of JSON each."""
    use_one_thread()  # as in a reader
    try:
        source: TorchSource = cloudpickle.loads(connection.payload)
    except Exception:  # noqa: BLE001 - a process edge: the parent raises this with the traceback
        _say(connection.socket, {"kind": "refused", "error": traceback.format_exc().rstrip()})
        return 1

    def begin(number: int) -> None:
        _say(connection.socket, {"kind": "begin", "number": number})

    for number, found in read_probes(source, begin):
        _say(connection.socket, {"kind": "item", "number": number, "found": found})
    _say(connection.socket, {"kind": "done"})
    return 0


def read_probes(
    source: TorchSource, begin: Callable[[int], None]
) -> Iterator[tuple[int, dict[str, str] | str]]:
    """Yield digests by field of each probed sample as this process reads it; text where it fails here."""
    for number in source.probed_indices():
        begin(number)
        try:
            found: dict[str, str] | str = source.probe_again(number)
        except Exception as error:  # noqa: BLE001 - a Dataset may raise anything
            found = f"{type(error).__name__}: {error}"
        yield number, found


def _say(sock: socket.socket, message: dict[str, Any]) -> None:
    sock.sendall(json.dumps(message).encode() + b"\n")
