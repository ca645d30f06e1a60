"""Read `.pt` files through a limited child: whatever a file does, the caller continues in bounded time.

A request is a path, or a stretch of a tar file; the answer is what it holds, as safetensors, or why it is
refused. Whatever a file makes torch do, the child takes no more memory, processor time or disk than its
limits allow, and nothing of it but plain tensors reaches the caller. The caller does not import torch.
"""

from __future__ import annotations

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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

from stoker.runtime.processes.child import Child
from stoker.runtime.processes.entry import Connection, limit_memory
from stoker.units import GIB, MIB, format_bytes

if TYPE_CHECKING:
    from torch import Tensor

START_S = 60.0
END_S = 5.0
LENGTH_BYTES = 8
MAX_ENTRIES = 10_000
MAX_PICKLE_BYTES = 16 * MIB
MAX_FIELDS = 1_000
MAX_DEPTH = 8
"""Dicts and lists within one another."""
MAX_FILE_BYTES = 4 * GIB
ROOM_BYTES = 512 * MIB
"""Addresses beyond the largest file's that loading it may take."""
PREFIXES = {"params": "param_", "bc": "bc_"}
"""What the names of the earlier conditions begin with, by the entry that holds them."""


class RefusedFileError(Exception):
    """A file was not read; `transient` if another try may help."""

    def __init__(self, why: str, *, transient: bool = False) -> None:
        super().__init__(why)
        self.transient = transient


@dataclass(frozen=True, slots=True, kw_only=True)
class PtContent:
    """Contents of one file."""

    payload: bytes
    """Its tensors, as safetensors; a tensor alone is `data`."""
    left_out: tuple[str, ...] = ()
    """Entries that no field can hold: text, empty lists, nothing."""

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors by name; this imports torch."""
        from safetensors.torch import load

        return load(self.payload)


class PtReader:
    """One child, replaced when it dies or takes too long. Not for several threads.

    Args:
        limit_bytes: The largest file it may read.
        timeout_s: Wall time for one file, and, in whole seconds, processor time.
    """

    def __init__(self, limit_bytes: int, *, timeout_s: float = 60.0) -> None:
        self._limit_bytes, self._timeout_s, self._cpu_s = limit_bytes, timeout_s, math.ceil(timeout_s)
        self._child: Child | None = None
        self._fresh = True

    def __enter__(self) -> PtReader:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        self.close()

    def read(self, path: Path, *, offset: int = 0, size: int | None = None) -> PtContent:
        """Read the tensors of a file.

        Args:
            path: The file.
            offset, size: Where in it the bytes of `torch.save` are; None: they end with the file.

        Raises:
            RefusedFileError: It holds no plain tensors, or the child did not survive it.
        """
        sock = self._connected().socket
        # The first file waits for the child to import torch.
        timeout_s = self._timeout_s + (START_S if self._fresh else 0.0)
        began, self._fresh = time.monotonic(), False
        sock.settimeout(timeout_s)
        request = {"path": str(path), "offset": offset, "size": size, "limit_bytes": self._limit_bytes}
        try:
            send(sock, request)
            head, payload = receive(sock, self._limit_bytes + MIB, began + timeout_s)
        except TimeoutError:
            self.close()
            spent_s = time.monotonic() - began
            raise RefusedFileError(f"reading it took longer than {spent_s:.0f} s", transient=True) from None
        except (EOFError, OSError, ValueError) as error:
            raise self._death(error) from None
        if "error" in head:
            raise RefusedFileError(str(head["error"]), transient=head.get("transient") is True)
        left_out = tuple(str(name) for name in head.get("left_out", ()))
        return PtContent(payload=bytes(payload), left_out=left_out)

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
                "stoker.extras.adopt.pt:serve",
                what="a process to read",
                arguments=limits,
                own_path=False,
            )
            self._fresh = True
        return self._child

    def _death(self, error: Exception) -> RefusedFileError:
        """Return the refusal of a file that the child did not survive."""
        child = self._child
        code = child.exit.code if child is not None and child.wait(END_S) and child.exit else None
        self.close()
        if code == -signal.SIGXCPU:
            return RefusedFileError(f"reading it took more than {self._cpu_s} s of processor time")
        how = f"ended by {signal.Signals(-code).name}" if code is not None and code < 0 else f"ended: {error}"
        return RefusedFileError(
            f"the process that read it {how} (it may use {format_bytes(4 * self._limit_bytes)})",
            transient=code == -signal.SIGKILL,
        )


class ForeignFileError(Exception):
    """The file does not hold plain tensors."""


def send(sock: socket.socket, head: dict[str, Any], payload: bytes = b"") -> None:
    """Send one message: length, JSON, payload."""
    text = json.dumps({**head, "bytes": len(payload)}).encode()
    sock.sendall(len(text).to_bytes(LENGTH_BYTES, "little") + text)
    sock.sendall(payload)


def receive(
    sock: socket.socket, limit_bytes: int, until: float | None = None
) -> tuple[dict[str, Any], bytearray]:
    """Receive one message that `send` sent, as head and payload.

    Args:
        sock: The connection.
        limit_bytes: Bytes of payload to accept.
        until: When to give up, on the clock of `time.monotonic`.
    Raises:
        EOFError: The other side is gone.
        TimeoutError: `until` passed.
        ValueError: The message is larger than `limit_bytes`, or malformed.
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
    import torch

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
            head, payload = load(request)
        except ForeignFileError as refusal:
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
    """Return why a pickle was refused. The message of torch begins with how to run its code nevertheless."""
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
    """Limit the processor time to so many seconds more than were used so far; then SIGXCPU."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(used.ru_utime + used.ru_stime) + cpu_s, hard))


def load(request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
    """Return the names of what was left out of a file, and its tensors as safetensors.

    Raises:
        ForeignFileError: It does not hold plain tensors.
    """
    import torch
    from safetensors.torch import save

    data = _read(request["path"], request["offset"], request["size"], request["limit_bytes"])
    _check_zip(data)
    file = io.BytesIO(data)
    value = torch.load(file, weights_only=True, map_location="cpu")
    tensors, left_out = flatten(value)
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    if total > len(data):
        raise ForeignFileError(
            f"its tensors have {total} bytes, the file {len(data)}: they are views of less"
        )
    payload = save({name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()})
    return {"left_out": left_out}, payload


def _read(path: str, offset: int, size: int | None, limit_bytes: int) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise ForeignFileError("it is a pipe, folder or device, not a file")
        count = status.st_size - offset if size is None else size
        if count > limit_bytes:
            raise ForeignFileError(f"it has {count} bytes, {limit_bytes} are allowed")
        file.seek(offset)
        data = file.read(count)
        if len(data) != count:
            raise ForeignFileError(f"it ends after {len(data)} of {count} bytes: cut short")
        return data


def _check_zip(data: bytes) -> None:
    """Look at the entries before anything is unpacked: all stored, none larger than the file."""
    if not data.startswith(b"PK\x03\x04"):
        raise ForeignFileError("it is not a zip archive as torch.save writes: another file, or a bare pickle")
    try:
        entries = zipfile.ZipFile(io.BytesIO(data)).infolist()
    except (zipfile.BadZipFile, ValueError, OSError) as error:
        raise ForeignFileError(f"its zip archive is broken: {error}") from error
    if len(entries) > MAX_ENTRIES:
        raise ForeignFileError(f"its archive has {len(entries)} entries, {MAX_ENTRIES} are allowed")
    for entry in entries:
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
            raise ForeignFileError(f"entry {entry.filename!r} is compressed, which torch.save never does")
        if entry.filename.endswith("data.pkl") and entry.file_size > MAX_PICKLE_BYTES:
            raise ForeignFileError(f"entry {entry.filename!r} has {entry.file_size} bytes")
    if (total := sum(entry.file_size for entry in entries)) > len(data):
        raise ForeignFileError(f"its entries claim {total} bytes, the file has {len(data)}")


def flatten(value: object) -> tuple[dict[str, Any], list[str]]:
    """Return tensors by field name, and the names of entries that no field can hold (text, nothing).

    Raises:
        ForeignFileError: There is no tensor, or an entry is not a plain one.
    """
    found: dict[str, Any] = {}
    left_out: list[str] = []
    for key, entry in _entries(value, "", {}):
        tensor = _tensor(key, entry)
        if tensor is None:
            left_out.append(key[:200])
        elif found.setdefault(key, tensor) is not tensor:
            raise ForeignFileError(f"entry {key[:200]!r} comes twice")
        if len(found) + len(left_out) > MAX_FIELDS:
            raise ForeignFileError(f"it has more than {MAX_FIELDS} entries")
    if not found:
        raise ForeignFileError(f"it holds a {type(value).__name__} without tensors")
    return found, left_out


def _entries(value: object, name: str, seen: dict[int, object]) -> Iterator[tuple[str, object]]:
    """Yield the entries of nested dicts and lists, their names joined by `_`."""
    if not isinstance(value, dict | list | tuple):
        yield name or "data", value
        return
    if id(value) in seen or len(seen) > MAX_DEPTH:
        raise ForeignFileError(f"entry {name[:200]!r} is nested too deep")
    seen = {**seen, id(value): value}
    pairs: Iterable[tuple[object, object]] = (
        cast("dict[object, object]", value).items()
        if isinstance(value, dict)
        else enumerate(cast("list[object]", value))
    )
    prefix = PREFIXES.get(name, f"{name}_" if name else "")
    for key, entry in pairs:
        yield from _entries(entry, f"{prefix}{key}", seen)


def _tensor(key: str, value: object) -> Any:
    """Return a plain tensor, from a number too; None for what no field can hold."""
    import torch

    if isinstance(value, bool | int | float):
        dtype = {bool: torch.bool, int: torch.int64, float: torch.float64}[type(value)]
        return torch.tensor(value, dtype=dtype, device="cpu")
    if not isinstance(value, torch.Tensor):
        return None
    if value.layout != torch.strided or value.device.type != "cpu" or value.is_quantized:
        raise ForeignFileError(f"{key!r} is a {value.layout} tensor on {value.device}, expected a plain one")
    if value.numel() * value.element_size() > value.untyped_storage().nbytes():
        raise ForeignFileError(f"{key!r} claims {value.numel()} elements, its storage holds fewer")
    return value
