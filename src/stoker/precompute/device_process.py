"""One encoder on one device, in a process of its own: takes groups, gives records. See `crew.py`.

It gets encoder and recipe pickled over a private socket, and says on its page where it stands, as a process
under a guardian does: whoever started it kills it when it hangs, and goes on without it.
"""

from __future__ import annotations

import os
import time
import traceback
from dataclasses import asdict, dataclass

import cloudpickle  # pyright: ignore[reportMissingTypeStubs]
import numpy as np
import torch
from torch import Tensor

from stoker.encoders.protocol import Encoder
from stoker.errors import DeviceError, ResourceError, StokerError
from stoker.plan.resources import use_device
from stoker.precompute.arena import Exchange
from stoker.precompute.encode import GroupEncoder, full_precision
from stoker.precompute.heartbeat import Lifeline, attach
from stoker.precompute.queue import GroupWork, Parcel
from stoker.precompute.reading import SampleFault
from stoker.runtime.libc import keep_freed_memory
from stoker.runtime.processes.entry import Connection
from stoker.runtime.processes.wire import Frame, ReaderChannel
from stoker.schema import Schema
from stoker.store import Recipe
from stoker.store.values import view_bytes

DESKS = 2
"""Groups that a process has in hand at most: one that it encodes, and the next."""
OWN_FAULTS = (DeviceError, ResourceError)
"""What is wrong with one device, and no reason to give up the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What a process encodes with; pickled once for all of them."""

    encoder: Encoder
    recipe: Recipe
    schema: Schema
    """Fields of a raw sample."""
    nan: str


def serve(connection: Connection) -> int:
    """Encode until the caller closes its end."""
    keep_freed_memory()  # before there are threads
    notes_fd = os.memfd_create("stoker-notes", os.MFD_CLOEXEC)
    attach(
        Lifeline(
            page_fd=connection.heartbeat.fd,
            stack_fd=connection.stack_fd,
            notes_fd=notes_fd,
            parent=os.getppid(),
            started_ns=time.monotonic_ns(),
        )
    )
    channel = ReaderChannel(connection.socket)
    try:
        start = channel.next()
        if start is not None:
            _work(channel, start, [Exchange(fd) for fd in connection.shared])
    except (BrokenPipeError, ConnectionResetError):
        return 0  # the caller is gone
    except StokerError as error:
        kind = next((kind for kind in OWN_FAULTS if isinstance(error, kind)), type(error))
        channel.send({"kind": "failed", "error": kind.__name__, "message": error.marked})
        return 1
    except Exception as error:  # noqa: BLE001  a process edge: the caller decides what becomes of it
        traceback.print_exc()
        message = f"{type(error).__name__}: {error}"
        channel.send({"kind": "failed", "error": "StokerError", "message": message})
        return 1
    return 0


def _work(channel: ReaderChannel, start: Frame, shared: list[Exchange]) -> None:
    torch.set_num_threads(start["threads"])  # what one process would encode with: the bits may depend on it
    task: Task = cloudpickle.loads(start["payload"])
    device = torch.device(start["device"])
    encoder = GroupEncoder(task.encoder, task.recipe, task.schema, device=str(device), nan=task.nan)
    encoder.compare_first = True
    with full_precision():
        with encoder.clock.starting(start["limit_s"]):
            try:
                use_device(device)
                task.encoder.to(device)
            except Exception as error:
                raise DeviceError(f"{type(error).__name__}: {error}") from error
        encoder.clock.limit_s = start["limit_s"]
        channel.send({"kind": "ready"})
        while (frame := channel.next()) is not None:
            if frame["kind"] == "forget":
                encoder.forget(frame["key"])
                continue
            channel.send(_encoded(encoder, task, frame, shared))


def _encoded(encoder: GroupEncoder, task: Task, frame: Frame, shared: list[Exchange]) -> Frame:
    """Encode the group on one desk and lay the records beside it; what to tell."""
    faults: list[SampleFault] = []

    def fault(reason: SampleFault) -> bool:
        faults.append(reason)
        return False

    desk, before = frame["desk"], encoder.clock.seconds
    numbers = range(frame["first"], frame["first"] + frame["count"])
    parcel = Parcel(
        work=GroupWork(key=frame["key"], part=frame["part"], numbers=numbers),
        arrays=shared[desk].arrays(task.schema, frame["shapes"]),
        start=frame["start"],
        last=frame["last"],
    )
    encoded = encoder.encode(parcel, frame["wanted"], fault)
    encoder.clock.alive(bounded=False)  # it may wait for the next group as long as it takes
    answer: Frame = {"numbers": [], "marked": [], "shapes": {}}
    if encoded is not None:
        shapes = put_records(shared[DESKS + desk], task.recipe.encoded, encoded.records)
        answer = {"numbers": encoded.numbers, "marked": encoded.marked, "shapes": shapes}
    return {
        "kind": "encoded",
        "desk": desk,
        "faults": [asdict(one) for one in faults],
        "seconds": encoder.clock.seconds - before,
        **answer,
    }


def put_records(
    exchange: Exchange, schema: Schema, records: dict[str, Tensor | list[Tensor]]
) -> dict[str, list[int]]:
    """Copy records, `(n, *shape)` or a list of them by field, into shared memory; their shapes."""
    whole = {
        name: torch.stack(value) if isinstance(value, list) else value for name, value in records.items()
    }
    arrays = exchange.arrays(schema, {name: tuple(value.shape) for name, value in whole.items()})
    for name, value in whole.items():
        if value.numel():
            np.copyto(arrays[name].reshape(-1).view(np.uint8), np.asarray(view_bytes(value.reshape(-1))))
    return {name: list(value.shape) for name, value in whole.items()}
