"""Read `.pt` files through a limited child: whatever a file does, the caller goes on in bounded time.

A request is a path; the answer is what the file holds, as safetensors, or why it is refused. Whatever a file
makes torch do, the child takes no more memory, processor time or disk than its limits allow, and nothing of
it but plain tensors reaches the caller.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import re
import resource
import signal
import socket
import stat
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from types import TracebackType
from typing import Any, cast

import torch
from torch import Tensor

from stoker.runtime.processes.child import Child
from stoker.runtime.processes.entry import Connection, limit_memory
from stoker.units import MIB, format_bytes

START_S = 60.0
END_S = 5.0
LENGTH_BYTES = 8
MAX_ENTRIES = 10_000
MAX_PICKLE_BYTES = 16 * MIB
MAX_FIELDS = 1_000
ROOM_BYTES = 512 * MIB
"""Addresses beyond the largest file's that loading it may take."""
PREFIXES = {"params": "param_", "bc": "bc_"}
"""What the names of the earlier conditions begin with, by the entry that holds them."""


class Refused(Exception):  # noqa: N818 -- an answer about one file, turned into a failure of its sample
    """A file was not read; `transient` if another try may help."""

    def __init__(self, why: str, *, transient: bool = False) -> None:
        super().__init__(why)
        self.transient = transient


@dataclass(frozen=True, slots=True, kw_only=True)
class PtContent:
    """What one file holds."""

    tensors: dict[str, Tensor]
    digest: str
    """sha256 of the bytes that were read."""
    left_out: tuple[str, ...]
    """Entries that no field can hold: text, lists, nothing."""


class PtReader:
    """One child, replaced when it dies or takes too long. Not for several threads.

    Args:
        limit_bytes: The largest file it may read.
        deadline_s: Wall time for one file, and, in whole seconds, processor time.
    """

    def __init__(self, limit_bytes: int, *, deadline_s: float = 60.0) -> None:
        self._limit_bytes, self._deadline_s, self._cpu_s = limit_bytes, deadline_s, math.ceil(deadline_s)
        self._child: Child | None = None
        self._fresh = True

    def __enter__(self) -> PtReader:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close()

    def read(self, path: Path) -> PtContent:
        """The tensors of a file.

        Raises:
            Refused: It is not what an earlier cache holds, or the child did not survive it.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load

        sock = self._connected().socket
        # The first file waits for the child to import torch.
        deadline_s = self._deadline_s + (START_S if self._fresh else 0.0)
        began, self._fresh = time.monotonic(), False
        sock.settimeout(deadline_s)
        try:
            send(sock, {"path": str(path), "limit_bytes": self._limit_bytes})
            head, payload = receive(sock, self._limit_bytes + MIB, began + deadline_s)
        except TimeoutError:
            self.close()
            spent_s = time.monotonic() - began
            raise Refused(f"reading it took longer than {spent_s:.0f} s", transient=True) from None
        except (EOFError, OSError, ValueError) as error:
            raise self._death(error) from None
        if "error" in head:
            raise Refused(str(head["error"]), transient=head.get("transient") is True)
        try:
            tensors = load(bytes(payload))
        except SafetensorError as error:
            raise self._death(error) from None
        left_out = tuple(str(name) for name in head.get("left_out", ()))
        return PtContent(tensors=tensors, digest=str(head.get("digest")), left_out=left_out)

    def close(self) -> None:
        """End the child; one that is stuck in the kernel is left behind."""
        if self._child is not None:
            self._child.stop(0.0, END_S)
            self._child.close()
        self._child = None

    def _connected(self) -> Child:
        if self._child is None:
            limits = {"memory_bytes": 4 * self._limit_bytes, "cpu_s": self._cpu_s}
            # Modules come from where ours do, not from a folder of foreign files that we were run in.
            self._child = Child(
                "stoker.pipeline.pt_reader:serve", what="a process to read", arguments=limits, own_path=False
            )
            self._fresh = True
        return self._child

    def _death(self, error: Exception) -> Refused:
        """What to say of a file that the child did not survive."""
        child = self._child
        code = child.exit.code if child is not None and child.wait(END_S) and child.exit else None
        self.close()
        if code == -signal.SIGXCPU:
            return Refused(f"reading it took more than {self._cpu_s} s of processor time")
        how = f"ended by {signal.Signals(-code).name}" if code is not None and code < 0 else f"ended: {error}"
        return Refused(
            f"the process that read it {how} (it may use {format_bytes(4 * self._limit_bytes)})",
            transient=code == -signal.SIGKILL,
        )


class Refusal(Exception):  # noqa: N818 -- it is an answer, and never leaves this process
    """The file is not what an earlier cache holds."""


def send(sock: socket.socket, head: dict[str, Any], payload: bytes = b"") -> None:
    """One message: length, JSON, payload."""
    text = json.dumps({**head, "bytes": len(payload)}).encode()
    sock.sendall(len(text).to_bytes(LENGTH_BYTES, "little") + text)
    sock.sendall(payload)


def receive(
    sock: socket.socket, limit_bytes: int, until: float | None = None
) -> tuple[dict[str, Any], bytearray]:
    """The counterpart of `send`.

    Args:
        sock: The connection.
        limit_bytes: Bytes of payload to accept.
        until: When to give up, on the clock of `time.monotonic`.
    Raises:
        EOFError: The other side is gone.
        TimeoutError: `until` passed.
        ValueError: The message is larger than `limit_bytes`, or is none.
    """
    size = int.from_bytes(_exactly(sock, LENGTH_BYTES, until), "little")
    if size > MIB:
        raise ValueError(f"a message head of {size} bytes")
    head: dict[str, Any] = json.loads(bytes(_exactly(sock, size, until)))
    count = head["bytes"]
    if type(count) is not int or not 0 <= count <= limit_bytes:
        raise ValueError(f"a message of {count} bytes, expected {limit_bytes} at most")
    return head, _exactly(sock, count, until)


def _exactly(sock: socket.socket, count: int, until: float | None) -> bytearray:
    data = bytearray(count)
    view, at = memoryview(data), 0
    while at < count:
        sock.settimeout(None if until is None else max(0.001, until - time.monotonic()))
        got = sock.recv_into(view[at:])
        if not got:
            raise EOFError("the connection ended")
        at += got
    return data


def serve(connection: Connection) -> None:
    """Answer requests, in the child, until the caller goes away."""
    sock, arguments = connection.socket, connection.arguments
    torch.set_num_threads(1)
    _limit(arguments["memory_bytes"])
    while True:
        try:
            request, _ = receive(sock, 0)
        except EOFError:
            return
        _limit_cpu(arguments["cpu_s"])
        try:
            head, payload = load(request["path"], request["limit_bytes"])
        except Refusal as refusal:
            head, payload = {"error": str(refusal)}, b""
        except UnpicklingError as error:
            head, payload = {"error": _unpicklable(str(error))}, b""
        except OSError as error:
            head, payload = {"error": f"{type(error).__name__}: {error.strerror}", "transient": True}, b""
        except Exception as error:  # noqa: BLE001 (the process edge: torch raises what it likes at a bad file)
            first_line = str(error).partition("\n")[0][:500]
            head, payload = {"error": f"{type(error).__name__}: {first_line}"}, b""
        send(sock, head, payload)


def _unpicklable(message: str) -> str:
    """Why a pickle was refused. What torch says of it begins with how to run its code nevertheless."""
    named = re.search(r"GLOBAL ([\w.]+)|class ([\w.]+)", message)
    what = f"it asks for {named[1] or named[2]}" if named else "its pickle is damaged or holds objects"
    return f"{what}; only tensors, numbers, text and containers of them are read"


def _limit(memory_bytes: int) -> None:
    limit_memory(memory_bytes + ROOM_BYTES)
    for kind, most in ((resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_NOFILE, 32)):
        _, hard = resource.getrlimit(kind)
        limit = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (limit, limit))


def _limit_cpu(cpu_s: int) -> None:
    """So many seconds more than were used so far; then SIGXCPU."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(used.ru_utime + used.ru_stime) + cpu_s, hard))


def load(path: str, limit_bytes: int) -> tuple[dict[str, Any], bytes]:
    """What a file holds: its sha256, what was left out of it, and its tensors as safetensors.

    Raises:
        Refusal: It is no file of an earlier cache.
    """
    from safetensors.torch import save

    data = _read(path, limit_bytes)
    _check_zip(data)
    file = io.BytesIO(data)
    value = torch.load(file, weights_only=True, map_location="cpu")
    tensors, left_out = flatten(value)
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    if total > len(data):
        raise Refusal(f"its tensors have {total} bytes, the file {len(data)}: they are views of less")
    payload = save({name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()})
    return {"digest": hashlib.sha256(data).hexdigest(), "left_out": left_out}, payload


def _read(path: str, limit_bytes: int) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise Refusal("it is a pipe, folder or device, not a file")
        if status.st_size > limit_bytes:
            raise Refusal(f"it has {status.st_size} bytes, {limit_bytes} are allowed")
        return file.read(limit_bytes)


def _check_zip(data: bytes) -> None:
    """Look at the entries before anything is unpacked: all stored, none larger than the file."""
    if not data.startswith(b"PK\x03\x04"):
        raise Refusal("it is not a zip archive as torch.save writes: another file, or a bare pickle")
    try:
        entries = zipfile.ZipFile(io.BytesIO(data)).infolist()
    except (zipfile.BadZipFile, ValueError, OSError) as error:
        raise Refusal(f"its zip archive is broken: {error}") from error
    if len(entries) > MAX_ENTRIES:
        raise Refusal(f"its archive has {len(entries)} entries, {MAX_ENTRIES} are allowed")
    for entry in entries:
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
            raise Refusal(f"entry {entry.filename!r} is compressed, which torch.save never does")
        if entry.filename.endswith("data.pkl") and entry.file_size > MAX_PICKLE_BYTES:
            raise Refusal(f"entry {entry.filename!r} has {entry.file_size} bytes")
    if (total := sum(entry.file_size for entry in entries)) > len(data):
        raise Refusal(f"its entries claim {total} bytes, the file has {len(data)}")


def flatten(value: object) -> tuple[dict[str, Any], list[str]]:
    """Tensors by field name, and the names of entries that no field can hold (text, lists, nothing).

    Raises:
        Refusal: There is no latent `(T, L, D)`, or an entry is no plain tensor.
    """
    if not isinstance(value, dict):
        raise Refusal(f"it holds a {type(value).__name__}, expected a dict with 'latent'")
    found: dict[str, Any] = {}
    left_out: list[str] = []
    for key, entry in _entries(cast("dict[object, object]", value)):
        tensor = _tensor(key, entry)
        if tensor is None:
            left_out.append(key[:200])
        elif found.setdefault(key, tensor) is not tensor:
            raise Refusal(f"entry {key[:200]!r} comes twice")
        if len(found) + len(left_out) > MAX_FIELDS:
            raise Refusal(f"it has more than {MAX_FIELDS} entries")
    latent = found.get("latent")
    if latent is None or latent.dim() != 3:
        shape = None if latent is None else tuple(latent.shape)
        raise Refusal(f"its 'latent' is {shape}, expected a tensor (T, L, D)")
    return found, left_out


def _entries(value: dict[object, object]) -> list[tuple[str, object]]:
    entries: list[tuple[str, object]] = []
    for key, entry in value.items():
        if isinstance(entry, dict):
            prefix = PREFIXES.get(str(key), f"{key}_")
            inner = cast("dict[object, object]", entry)
            entries += [(f"{prefix}{name}", part) for name, part in inner.items()]
        else:
            entries.append((str(key), entry))
    return entries


def _tensor(key: str, value: object) -> Any:
    """A plain tensor, from a number too; None for what no field can hold."""
    if isinstance(value, bool | int | float):
        dtype = {bool: torch.bool, int: torch.int64, float: torch.float64}[type(value)]
        return torch.tensor(value, dtype=dtype, device="cpu")
    if not isinstance(value, torch.Tensor):
        return None
    if value.layout != torch.strided or value.device.type != "cpu" or value.is_quantized:
        raise Refusal(f"{key!r} is a {value.layout} tensor on {value.device}, expected a plain one")
    if value.numel() * value.element_size() > value.untyped_storage().nbytes():
        raise Refusal(f"{key!r} claims {value.numel()} elements, its storage holds fewer")
    return value
