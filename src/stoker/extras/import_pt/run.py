"""Import the earlier caches, one `sample_00000.pt` per sample, into shards.

The files are a source like any other, and their digests are in the recipe. So importing a folder again finds
the existing cache, and an interrupted import is resumed. The first file that can be read says which
fields a record has. Files that are missing, broken or different are quarantined by number, in stage `import`.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import math
import os
import re
import resource
import signal
import socket
import stat
import time
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from types import TracebackType
from typing import Any, Literal, cast

import torch
from torch import Tensor

from stoker.errors import ConfigError, RecordError, SourceError, StalledError, arg
from stoker.run.caches import IMPORTED, list_quarantined
from stoker.runtime.locks import lock_holder
from stoker.runtime.processes.child import Child
from stoker.runtime.processes.entry import Connection, limit_memory
from stoker.runtime.threads import RetryPolicy, retry
from stoker.schema import Field, Json, Sample, Schema
from stoker.sources.protocol import FileRef, Part, SourceIdentity
from stoker.store import Cache, Digests, Failure, Folder, make_recipe, open_folder
from stoker.store.format import RECIPE_FILE
from stoker.units import GIB, MIB, format_bytes, format_count

# ----------------------------------------------------------------------------------------------------------
# Read `.pt` files through a limited child: whatever a file does, the caller continues in bounded time.
#
# A request is a path; the answer is what the file holds, as safetensors, or why it is refused. Whatever a
# file makes torch do, the child takes no more memory, processor time or disk than its limits allow, and
# nothing of it but plain tensors reaches the caller.


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


class RefusedFileError(Exception):
    """A file was not read; `transient` if another try may help."""

    def __init__(self, why: str, *, transient: bool = False) -> None:
        super().__init__(why)
        self.transient = transient


@dataclass(frozen=True, slots=True, kw_only=True)
class PtContent:
    """Contents of one file."""

    tensors: dict[str, Tensor]
    digest: str
    """sha256 of the bytes that were read."""
    left_out: tuple[str, ...]
    """Entries that no field can hold: text, lists, nothing."""


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

    def read(self, path: Path) -> PtContent:
        """Read the tensors of a file.

        Raises:
            RefusedFileError: It is not what an earlier cache holds, or the child did not survive it.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load

        sock = self._connected().socket
        # The first file waits for the child to import torch.
        timeout_s = self._timeout_s + (START_S if self._fresh else 0.0)
        began, self._fresh = time.monotonic(), False
        sock.settimeout(timeout_s)
        try:
            send(sock, {"path": str(path), "limit_bytes": self._limit_bytes})
            head, payload = receive(sock, self._limit_bytes + MIB, began + timeout_s)
        except TimeoutError:
            self.close()
            spent_s = time.monotonic() - began
            raise RefusedFileError(f"reading it took longer than {spent_s:.0f} s", transient=True) from None
        except (EOFError, OSError, ValueError) as error:
            raise self._death(error) from None
        if "error" in head:
            raise RefusedFileError(str(head["error"]), transient=head.get("transient") is True)
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
                "stoker.extras.import_pt.run:serve",
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
    """The file is not what an earlier cache holds."""


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


def load(path: str, limit_bytes: int) -> tuple[dict[str, Any], bytes]:
    """Return the sha256 of a file, the names of what was left out of it, and its tensors as safetensors.

    Raises:
        ForeignFileError: It is not a file of an earlier cache.
    """
    from safetensors.torch import save

    data = _read(path, limit_bytes)
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
    return {"digest": hashlib.sha256(data).hexdigest(), "left_out": left_out}, payload


def _read(path: str, limit_bytes: int) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(fd, "rb") as file:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise ForeignFileError("it is a pipe, folder or device, not a file")
        if status.st_size > limit_bytes:
            raise ForeignFileError(f"it has {status.st_size} bytes, {limit_bytes} are allowed")
        return file.read(limit_bytes)


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
    """Return tensors by field name, and the names of entries that no field can hold (text, lists, nothing).

    Raises:
        ForeignFileError: No latent `(T, L, D)` was found, or an entry is not a plain tensor.
    """
    if not isinstance(value, dict):
        raise ForeignFileError(f"it holds a {type(value).__name__}, expected a dict with 'latent'")
    found: dict[str, Any] = {}
    left_out: list[str] = []
    for key, entry in _entries(cast("dict[object, object]", value)):
        tensor = _tensor(key, entry)
        if tensor is None:
            left_out.append(key[:200])
        elif found.setdefault(key, tensor) is not tensor:
            raise ForeignFileError(f"entry {key[:200]!r} comes twice")
        if len(found) + len(left_out) > MAX_FIELDS:
            raise ForeignFileError(f"it has more than {MAX_FIELDS} entries")
    latent = found.get("latent")
    if latent is None or latent.dim() != 3:
        shape = None if latent is None else tuple(latent.shape)
        raise ForeignFileError(f"its 'latent' is {shape}, expected a tensor (T, L, D)")
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
    """Return a plain tensor, from a number too; None for what no field can hold."""
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


log = logging.getLogger("stoker")
STAGE = "import"
SAMPLE_FILE = re.compile(r"sample_(\d{5,9})\.pt")
MAX_FILE_BYTES = 4 * GIB
TRIES = 2
"""Tries of a file whose failure may pass (a hang, an input/output error, lack of memory)."""
SAID_EVERY_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportSettings:
    """How files become records."""

    dtype: str | Mapping[str, str] | None = None
    """Storage dtype of float fields; None: as in the files (float64 becomes float32)."""
    count: int | None = None
    """Samples there should be; None: up to the highest number found."""
    nan: Literal["reject", "allow"] = "reject"
    """How to treat a sample that holds NaN or infinities."""
    file_bytes: int = MAX_FILE_BYTES
    """The largest file that is read."""
    timeout_s: float = 60.0
    """Wall time for one file, and its processor time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportResult:
    """A cache made of an earlier one."""

    cache: Cache
    imported: int
    """Records that this run stored."""
    reused: int
    """Records that were there before."""
    missing: tuple[int, ...]
    """Numbers without a file."""
    ignored: int
    """Other files in the folder."""
    left_out: Mapping[str, int]
    """Entries that no field can hold, and in how many of this run's files they were."""
    seconds: float

    @property
    def failures(self) -> list[dict[str, Json]]:
        """Every sample that is not in the cache, with why; the missing ones included."""
        return list_quarantined(self.cache)

    def to_json(self) -> dict[str, Json]:
        """Return the keys that scripts rely on."""
        missing = {*self.missing}
        return {
            "name": self.cache.name,
            "path": str(self.cache.path),
            "fingerprint": self.cache.fingerprint,
            "records": len(self.cache),
            "count": self.cache.recipe.count,
            "imported": self.imported,
            "reused": self.reused,
            "missing": [*self.missing],
            "broken": [failure for failure in self.failures if failure["number"] not in missing],
            "ignored": self.ignored,
            "left_out": dict(self.left_out),
            "seconds": self.seconds,
        }


class PtFolder:
    """A folder of `.pt` files as a `Source` that only names itself: records come through `PtReader`."""

    def __init__(self, path: Path, schema: Schema, files: Mapping[int, Path], count: int) -> None:
        self._path, self._schema, self._files, self._count = path, schema, files, count

    def __len__(self) -> int:
        return self._count

    def read(self, index: int, start: int | None = None, stop: int | None = None) -> Sample:
        """Refuse: `import_pt` reads these files, in a limited process."""
        raise SourceError(f"sample {index} of {self._path} is read by import-pt alone")

    def runs(self) -> Sequence[range]:
        """Return all of them."""
        return [range(self._count)]

    def keys(self) -> Sequence[str]:
        """Return file names."""
        return [f"sample_{number:05d}.pt" for number in range(self._count)]

    def schema(self) -> Schema:
        """Return fields of the first file that could be read."""
        return self._schema

    def identity(self) -> SourceIdentity:
        """Return names and contents of the files; which numbers have one follows from the names."""
        files = tuple(FileRef(name=path.name, path=path) for _, path in sorted(self._files.items()))
        return SourceIdentity(
            kind=f"{IMPORTED}1", parts=(Part(name="samples", count=self._count, files=files),)
        )


@dataclass(slots=True, kw_only=True)
class _FolderContents:
    """Contents of a folder."""

    files: dict[int, Path] = field(default_factory=dict[int, Path])
    refused: dict[int, str] = field(default_factory=dict[int, str])
    """Numbers whose file is a link, pipe, device, folder or too large."""
    ignored: int = 0
    largest: int = 0
    """Bytes of the largest file."""

    def count(self, wanted: int | None, path: Path) -> int:
        """Return the number of samples.

        Raises:
            SourceError: There are no files, or far too few for their numbers.
            ConfigError: A number is beyond what was asked for.
        """
        if not self.files:
            raise SourceError(
                f"{path} holds no sample_00000.pt or the like", hint="Name the folder of one task"
            )
        highest = max([*self.files, *self.refused])
        if wanted is not None and highest >= wanted:
            raise ConfigError(f"count is {wanted}, but there is a sample {highest}", hint="Give more")
        count = highest + 1 if wanted is None else wanted
        if count > 10 * len(self.files) + 1000:
            raise SourceError(
                f"{path} holds {format_count(len(self.files))} samples for {format_count(count)} numbers",
                hint="Is a file named wrongly?",
            )
        return count


def import_pt(
    path: str | Path, cache_dir: str | Path, *, name: str, settings: ImportSettings | None = None
) -> ImportResult:
    """Store the samples of an earlier cache as records.

    Args:
        path: The folder with `sample_00000.pt` and so on.
        cache_dir, name: The cache goes to `<cache_dir>/<name>/<fingerprint>/`.
        settings: See `ImportSettings`.
    Raises:
        SourceError: No file can be read, or a file changed meanwhile.
        StalledError: Another process imports it.
        ResourceError: No space left; what is stored stays, the same call resumes.
    """
    began = time.monotonic()
    path, cache_dir, settings = Path(path), Path(cache_dir), settings or ImportSettings()
    found = _scan(path, settings)
    count = found.count(settings.count, path)
    with PtReader(found.largest, timeout_s=settings.timeout_s) as reader:
        source = PtFolder(path, _first_schema(reader, found, path), found.files, count)
        recipe = make_recipe(source, None, dtype=settings.dtype, digests=Digests(cache_dir, "full"))
        folder = open_folder(cache_dir, name, recipe)
        importing = _ImportRun(folder, found, reader, settings)
        cache = folder.complete()
        _say_others(folder)
        if cache is None or len(folder.missing()):
            with folder.lock() as got:
                if not got:
                    raise StalledError(
                        f"{folder.path} is being imported by {lock_holder(folder.path, 'encode')}"
                    )
                cache = importing.run()
                if len(folder.missing(retry_transient=False)):  # damage that making the index met
                    cache = importing.run()
    return ImportResult(
        cache=cache,
        imported=importing.imported,
        reused=len(cache) - importing.imported,
        missing=tuple(n for n in range(count) if n not in found.files and n not in found.refused),
        ignored=found.ignored,
        left_out=importing.left_out,
        seconds=time.monotonic() - began,
    )


def _say_others(folder: Folder) -> None:
    """Say why all is imported although the name has a cache: with one file more it is another."""
    others = [path.parent.name for path in sorted(folder.path.parent.glob(f"[!.]*/{RECIPE_FILE}"))]
    others = [name for name in others if name != folder.path.name]
    if others and not folder.stored_count():
        log.info(
            "files or options are not those of %s (%s), so all is imported into another cache, %s. "
            "`stoker cache gc %s --keep 1` removes the older ones once they are unused for a day",
            folder.path.parent,
            ", ".join(others),
            folder.path.name,
            folder.path.parent.parent,
        )


def _scan(path: Path, settings: ImportSettings) -> _FolderContents:
    found = _FolderContents()
    try:
        entries = sorted(path.iterdir())
    except OSError as error:
        raise SourceError(
            f"{path} cannot be read: {error.strerror}", hint="Name the folder of one task"
        ) from error
    for entry in entries:
        match = SAMPLE_FILE.fullmatch(entry.name)
        number = int(match[1]) if match else -1
        if entry.name != f"sample_{number:05d}.pt":
            found.ignored += 1
            continue
        status = entry.lstat()
        if entry.is_symlink() or not entry.is_file():
            found.refused[number] = f"{entry} is a link, pipe, folder or device, not a file"
        elif status.st_size > settings.file_bytes:
            found.refused[number] = f"{entry} has {status.st_size} bytes, {settings.file_bytes} are allowed"
        else:
            found.files[number] = entry
            found.largest = max(found.largest, status.st_size)
    return found


def _first_schema(reader: PtReader, found: _FolderContents, path: Path) -> Schema:
    first = ""
    for file in dict(sorted(found.files.items())).values():
        try:
            return schema_of(reader.read(file).tensors)
        except (RefusedFileError, RecordError) as error:
            first = first or f"{file.name}: {error}"
    raise SourceError(f"none of the {len(found.files)} samples in {path} can be read. {first}")


def schema_of(tensors: Mapping[str, Tensor]) -> Schema:
    """Fields of a sample: whatever has as many entries on axis 0 as `latent` runs along time with it."""
    steps = len(tensors["latent"])
    return {
        name: Field(
            shape=tuple(tensor.shape),
            dtype=str(tensor.dtype).removeprefix("torch."),
            time=tensor.dim() > 0 and len(tensor) == steps,
        )
        for name, tensor in sorted(tensors.items())
    }


class _ImportRun:
    """One run over the samples that are not stored yet."""

    def __init__(
        self, folder: Folder, found: _FolderContents, reader: PtReader, settings: ImportSettings
    ) -> None:
        self.imported = 0
        self.left_out: dict[str, int] = {}
        self._folder, self._found, self._reader, self._settings = folder, found, reader, settings
        # `make_recipe` digested every file in full, in the order of numbers.
        files = folder.recipe.files
        self._digests = dict(zip(sorted(found.files), (file.digest for file in files), strict=True))

    def run(self) -> Cache:
        """Import what is missing, and write the index; committed also when interrupted."""
        wanted = self._folder.missing().tolist()
        writer = self._folder.writer()
        said = time.monotonic()
        failures: list[Failure] = []
        try:
            for place, number in enumerate(wanted):
                try:
                    record = self._record(number)
                    writer.append([number], {name: value[None] for name, value in record.items()})
                    self.imported += 1
                except (RefusedFileError, RecordError) as error:
                    failures.append(self._failure(number, error))
                if time.monotonic() - said > SAID_EVERY_S:
                    said = time.monotonic()
                    log.info("%s of %s files", format_count(place + 1), format_count(len(wanted)))
        finally:
            writer.commit()
            self._folder.quarantine_many(failures)
        return self._folder.finish()

    def _record(self, number: int) -> dict[str, Tensor]:
        path = self._found.files.get(number)
        if path is None:
            why = self._found.refused.get(number, f"sample_{number:05d}.pt is missing")
            raise RefusedFileError(why)
        content = self._read(path)
        if content.digest != self._digests[number]:
            raise SourceError(f"{path} changed since it was digested", hint="Run again once it is written")
        for name in content.left_out:
            self.left_out[name] = self.left_out.get(name, 0) + 1
        _check(content.tensors, self._folder.recipe.encoded, path, self._settings.nan)
        return content.tensors

    def _read(self, path: Path) -> PtContent:
        try:
            return retry(
                lambda: self._reader.read(path),
                lambda error: isinstance(error, RefusedFileError) and error.transient,
                RetryPolicy(first_s=0.0, attempts=TRIES),
            )
        except RefusedFileError as refused:
            raise RefusedFileError(f"{path}: {refused}", transient=refused.transient) from None

    def _failure(self, number: int, error: Exception) -> Failure:
        transient = isinstance(error, RefusedFileError) and error.transient
        return Failure(
            number=number,
            stage=STAGE,
            error=str(error),
            attempts=TRIES if transient else 1,
            kind="transient" if transient else "sample",
        )


def _check(tensors: Mapping[str, Tensor], schema: Schema, path: Path, nan: str) -> None:
    """Compare a sample with the first one.

    Raises:
        RecordError: It has other fields, shapes or dtypes, or holds NaN.
    """
    if tensors.keys() != schema.keys():
        raise RecordError(f"{path}: its fields are {sorted(tensors)}, those of the first {sorted(schema)}")
    for name, expected in schema.items():
        tensor = tensors[name]
        found = (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        if found != (expected.shape, expected.dtype):
            raise RecordError(
                f"{path}: field {name!r} is {found[1]} {found[0]}, that of the first is "
                f"{expected.dtype} {expected.shape}"
            )
        if nan == "reject" and tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise RecordError(
                f"{path}: field {name!r} holds NaN or infinities",
                hint=f"{arg('nan', 'allow', setting='--nan')} takes them",
            )
