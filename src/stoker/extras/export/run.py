"""Export a cache: check first, write everything to a temporary folder, and rename it at the end."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError, IncompleteError, StalledError, arg
from stoker.extras.export.records import (
    ExportSettings,
    ExportTensor,
    Records,
    check_ragged,
    chosen_fields,
    cut,
    tensors_of,
    value_dtype,
)
from stoker.plugins import find_plugin
from stoker.runtime.disk import explain_disk_errors, free_space
from stoker.runtime.files import make_folder, publish
from stoker.runtime.locks import lock_folder, lock_holder
from stoker.schema import DTYPE_BYTES, Json, JsonResult, Schema
from stoker.store import Cache, open_cache
from stoker.store.format import FINGERPRINT, RECIPE_FILE, TENSOR_DTYPES
from stoker.store.remote import local_path
from stoker.units import MIB

# ----------------------------------------------------------------------------------------------------------
# Files of an export while they are made: counted and hashed as they are written.


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedFile(JsonResult):
    """One file of an export."""

    file: str
    """Name in the folder."""
    bytes: int
    sha256: str
    """Of all of it, 64 hex digits."""
    records: int
    first: int
    """Sample number of the first record in it."""
    last: int
    """Sample number of the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportWriter:
    """Writes the files of an export; a plugin's `write` gets one."""

    folder: Path
    """The temporary folder, which gets its name at the end."""
    records: Records
    on_write: Callable[[int], None]
    """Called with the number of bytes of each write."""

    def file(self, name: str, between: tuple[int, int], pieces: Iterator[Any]) -> ExportedFile:
        """Write one file from pieces of bytes; `between`: the places of its first record and after its last.

        Raises:
            ResourceError: No space left.
        """
        digest, size = hashlib.sha256(), 0
        with explain_disk_errors(self.folder), (self.folder / name).open("xb", buffering=0) as file:
            for piece in pieces:
                data = memoryview(piece).cast("B")
                at = 0
                while at < len(data):
                    at += file.write(data[at:])
                digest.update(data)
                size += len(data)
                self.on_write(len(data))
        numbers = self.records.numbers(*between)
        return ExportedFile(
            file=name,
            bytes=size,
            sha256=digest.hexdigest(),
            records=between[1] - between[0],
            first=int(numbers[0]),
            last=int(numbers[-1]),
        )

    def values(
        self, tensor: ExportTensor, between: tuple[int, int], lengths: NDArray[np.int64] | None
    ) -> Iterator[Any]:
        """Yield the bytes of a tensor over the records at places `between`; `lengths` if it is ragged."""
        if tensor.part == "index":
            yield self.records.numbers(*between).astype("<i8").data
        elif tensor.part == "values":
            to = tensor.shape[1] if tensor.padded else None
            yield from self.records.pieces(tensor.field, tensor.dtype, *between, padded_to=to)
        elif lengths is not None:
            both = {"lengths": lengths, "offsets": np.concatenate([[0], np.cumsum(lengths)])}
            yield both[tensor.part].astype("<i8").data


Lengths: TypeAlias = Mapping[str, NDArray[np.int64]]
"""Steps of each record, for each ragged field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exporter:
    """A layout of files, as a plugin of the group `stoker.exporters` names it."""

    tensors: Callable[[Schema, ExportSettings, int, Lengths], list[ExportTensor]]
    """The tensors of so many records, for the disk space that they need.

    Raises:
        ConfigError: The layout cannot hold a field.
    """
    write: Callable[[ExportWriter, Schema, ExportSettings, Lengths], list[ExportedFile]]
    """Write all files with `ExportWriter.file`; the manifest is added.

    Raises:
        StokerError: As `Records.pieces`; or the disk has no room.
    """


MANIFEST = "manifest.json"
SPARE_BYTES = 16 * MIB
"""Room for headers, manifest and what the file system keeps of files."""

Progress = Callable[[int, int], None]
"""Called with the bytes written so far, and in all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportReport:
    """What was exported."""

    path: str
    to: str
    cache: str
    """Folder of the cache."""
    fingerprint: str
    generation: int
    records: int
    bytes: int
    fields: Mapping[str, Mapping[str, Json]]
    """By field: dtype and shape of a record as stored, dtype as exported, and `ragged` as written."""
    files: tuple[ExportedFile, ...]
    quarantined: tuple[Mapping[str, Json], ...]
    """Samples in the range that are not in it: number, stage and error."""
    seconds: float

    def to_json(self) -> dict[str, Json]:
        """Return the keys that scripts rely on."""
        return {
            **self.manifest(),
            "path": self.path,
            "cache": self.cache,
            "seconds": self.seconds,
        }

    def manifest(self) -> dict[str, Json]:
        """Return the content of the manifest, which names no place of this machine."""
        return {
            "to": self.to,
            "fingerprint": self.fingerprint,
            "generation": self.generation,
            "records": self.records,
            "bytes": self.bytes,
            "fields": {name: dict(entry) for name, entry in self.fields.items()},
            "files": [file.to_json() for file in self.files],
            "quarantined": [dict(entry) for entry in self.quarantined],
        }


def export_cache(
    cache: Cache | str | Path,
    out: str | Path,
    settings: ExportSettings,
    *,
    progress: Progress | None = None,
) -> ExportReport:
    """Write the records of a cache as files of another library, in order of their sample numbers.

    Every byte is verified as it is read. `out` appears complete or not at all. After a stop at any moment,
    the same call starts again and removes what was left.

    Args:
        cache: A complete one, or the path of one.
        out: A folder that does not exist yet, or is empty.
        settings: What to export, and as what.
        progress: Called with the bytes written so far, and in all.
    Raises:
        ConfigError: `settings` do not fit the cache; or `out` is a URL, a file, not empty, or inside a cache.
        ReadOnlyError: `out` cannot be made.
        IncompleteError: Records are missing, or the range has none.
        CorruptError: A record is damaged; names it.
        RecordError: A packed value is beyond what its new dtype holds.
        ResourceError: The disk has no room.
        StalledError: Another process exports to the same folder, or storage does not answer.
    """
    begun, out = time.monotonic(), local_path(out, "export: the folder to write to")
    _check_place(out)
    if not isinstance(cache, Cache):
        cache = open_cache(cache)
    if not cache.complete:
        raise IncompleteError(
            f"{cache.path} holds {len(cache)} of {cache.index.count} records. Run precompute first"
        )
    if cache.joined is not None:
        raise ConfigError("export: joined columns are not exported. Export the cache as it was opened first")
    fields = chosen_fields(cache.schema, settings)
    records = Records(cache, settings.records)
    lengths = {name: records.lengths(name) for name, f in fields.items() if f.ragged}
    check_ragged(fields, settings, lengths)
    exporter: Exporter = find_plugin("stoker.exporters", settings.to, "export: to").load()
    total = sum(tensor.nbytes for tensor in exporter.tensors(fields, settings, records.count, lengths))
    with _new_folder(out, total) as folder:
        writer = ExportWriter(folder=folder, records=records, on_write=_counter(progress, total))
        files = exporter.write(writer, fields, settings, lengths)
        report = ExportReport(
            path=str(out),
            to=settings.to,
            cache=str(cache.path),
            fingerprint=cache.fingerprint,
            generation=cache.index.generation,
            records=records.count,
            bytes=sum(file.bytes for file in files),
            fields=_describe(fields, settings),
            files=tuple(files),
            quarantined=tuple(_quarantined(cache, settings.records)),
            seconds=round(time.monotonic() - begun, 3),
        )
        (folder / MANIFEST).write_text(json.dumps(report.manifest(), indent=2) + "\n")
    return report


def _describe(fields: Schema, settings: ExportSettings) -> dict[str, dict[str, Json]]:
    return {
        name: {
            "stored": f.dtype,
            "dtype": value_dtype(f, settings),
            "shape": list(f.shape),
            "ragged": settings.ragged if f.ragged else None,
        }
        for name, f in fields.items()
    }


def _quarantined(cache: Cache, between: tuple[int, int] | None) -> list[dict[str, Json]]:
    low, high = between or (0, cache.recipe.count)
    return [
        {"number": number, "stage": failure.stage, "error": failure.error}
        for number, failure in sorted(cache.quarantined.items())
        if low <= number < high
    ]


def _counter(progress: Progress | None, total: int) -> Callable[[int], None]:
    done = 0

    def wrote(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, max(total, done))

    return wrote


def _check_place(out: Path) -> None:
    """Check that the folder does not exist or is empty, and is outside of every cache.

    Raises:
        ConfigError: It is not so.
    """
    if os.path.lexists(out) and not out.is_dir():
        raise ConfigError(f"export: {out} is a file. Choose a folder that does not exist, or is empty")
    own = out.resolve()
    for folder in (own, *own.parents):
        recipes = (folder / RECIPE_FILE, *folder.glob(f"{'[0-9a-f]' * 16}/{RECIPE_FILE}"))
        if any(FINGERPRINT.fullmatch(recipe.parent.name) and recipe.exists() for recipe in recipes):
            raise ConfigError(
                f"export: {out} is in {folder}, which is a cache: its files are Stoker's own. Choose a "
                "folder outside of it"
            )
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"export: {out} exists and is not empty. Choose another folder, or remove it")


@contextmanager
def _new_folder(out: Path, size_bytes: int) -> Generator[Path]:
    """Yield a temporary folder, which becomes `out` when the block ends without an error."""
    make_folder(out.parent)
    _check_room(out, size_bytes)
    temporary = make_folder(out.with_name(f".{out.name}.export"))
    with lock_folder(temporary, "export") as got:
        if not got:
            raise StalledError(
                f"export: {lock_holder(temporary, 'export')} is exporting to {out}. Wait for it, or choose "
                "another folder"
            )
        try:
            for left in temporary.iterdir():  # by an export that was killed
                if not left.name.startswith(".claim-"):
                    left.unlink()
            with explain_disk_errors(out):
                yield temporary
                publish(temporary, out)
        except BaseException:
            with suppress(OSError):
                shutil.rmtree(temporary)
            raise
        with suppress(
            OSError
        ):  # only now: without it the folder could be taken for one left by a killed export
            (out / ".claim-export").unlink()


def _check_room(out: Path, size_bytes: int) -> None:
    free_space(out.parent).require(
        out.parent,
        size_bytes,
        "the export needs",
        reserve_bytes=SPARE_BYTES,
        advice="choose another folder, or export a part (records, fields)",
    )


# ----------------------------------------------------------------------------------------------------------
# Plain safetensors files: each field one tensor over all records, or over those in a file of several.
#
# One file is `records.safetensors`. Several have the form in which large models are published: files
# `records-00001-of-00003.safetensors`, tensors named apart by the file's number (`latent.00001`), and
# `records.safetensors.index.json`, which says in which file each tensor is.


NAME = "records"
ALIGN = 8
"""Tensors of the widest items come first, after a header of a multiple of this: so all are aligned."""


def tensors_by_file(
    fields: Schema, settings: ExportSettings, count: int, lengths: Lengths
) -> list[list[ExportTensor]]:
    """Return the tensors of each file; `lengths`: of all records, per ragged field."""
    longest = {name: int(own.max(initial=0)) for name, own in lengths.items()}
    return [
        tensors_of(fields, settings, end - begin, _between(lengths, begin, end), longest)
        for begin, end in file_bounds(fields, settings, count, lengths)
    ]


def file_bounds(
    fields: Schema, settings: ExportSettings, count: int, lengths: Lengths
) -> list[tuple[int, int]]:
    """Return the places of the records in each file."""
    longest = {name: int(own.max(initial=0)) for name, own in lengths.items()}
    nothing = {name: np.zeros(1, np.int64) for name in lengths}
    one = sum(tensor.nbytes for tensor in tensors_of(fields, settings, 1, nothing, longest))
    if settings.ragged == "pad" or not lengths:
        return cut(one, count, settings.file_bytes)
    sizes = np.full(count, one, np.int64)
    for tensor in tensors_of(fields, settings, 1, {name: np.ones(1, np.int64) for name in lengths}, longest):
        if tensor.field in lengths and tensor.part == "values":
            sizes += lengths[tensor.field] * tensor.nbytes
    return cut(sizes, count, settings.file_bytes)


def write_safetensors(
    writer: ExportWriter, fields: Schema, settings: ExportSettings, lengths: Lengths
) -> list[ExportedFile]:
    """Write all files; returns what they are, the index apart.

    Raises:
        StokerError: As `Records.pieces`; or the disk has no room.
    """
    cuts = file_bounds(fields, settings, writer.records.count, lengths)
    of_each = tensors_by_file(fields, settings, writer.records.count, lengths)
    found: list[ExportedFile] = []
    weight_map: dict[str, str] = {}
    for i, (between, tensors) in enumerate(zip(cuts, of_each, strict=True), 1):
        name = f"{NAME}-{i:05d}-of-{len(cuts):05d}.safetensors" if len(cuts) > 1 else f"{NAME}.safetensors"
        suffix = f".{i:05d}" if len(cuts) > 1 else ""
        own = _between(lengths, *between)
        found.append(writer.file(name, between, _pieces(writer, tensors, between, own, suffix)))
        weight_map |= {tensor.name + suffix: name for tensor in tensors}
    if len(cuts) > 1:
        total = sum(tensor.nbytes for tensors in of_each for tensor in tensors)
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)
        (writer.folder / f"{NAME}.safetensors.index.json").write_text(text + "\n")
    return found


def _between(lengths: Lengths, begin: int, end: int) -> dict[str, NDArray[np.int64]]:
    return {name: own[begin:end] for name, own in lengths.items()}


def _pieces(
    writer: ExportWriter,
    tensors: list[ExportTensor],
    between: tuple[int, int],
    lengths: Lengths,
    suffix: str,
) -> Iterator[Any]:
    """Yield the bytes of one file."""
    ordered = sorted(tensors, key=lambda tensor: (-DTYPE_BYTES[tensor.dtype], tensor.name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in ordered:
        header[tensor.name + suffix] = {
            "dtype": TENSOR_DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // ALIGN) * ALIGN)
    yield len(text).to_bytes(8, "little") + text
    for tensor in ordered:
        yield from writer.values(tensor, between, lengths.get(tensor.field))


def _tensors_of_all_files(
    fields: Schema, settings: ExportSettings, count: int, lengths: Lengths
) -> list[ExportTensor]:
    files = tensors_by_file(fields, settings, count, lengths)
    return [tensor for tensors in files for tensor in tensors]


SAFETENSORS = Exporter(tensors=_tensors_of_all_files, write=write_safetensors)

# ----------------------------------------------------------------------------------------------------------
# The memory-mapped layout of tensordict: `TensorDict.load_memmap(folder)` reads it back.
#
# A file of raw values per tensor, `<name>.memmap`, and `meta.json`, which has shape and dtype of each and
# the batch size. Written by its documented form, so that tensordict need not be installed here.


META = "meta.json"
TAKEN = ("shape", "device")
"""Keys of `meta.json` in addition to the names of tensors. Its other own keys begin with `_`."""


def tensors(fields: Schema, settings: ExportSettings, count: int, lengths: Lengths) -> list[ExportTensor]:
    """Return the tensors; `lengths`: of all records, per ragged field.

    Raises:
        ConfigError: A name cannot be one of a file, or means something else in `meta.json`.
    """
    longest = {name: int(own.max(initial=0)) for name, own in lengths.items()}
    found = tensors_of(fields, settings, count, lengths, longest)
    for tensor in found:
        if tensor.name in TAKEN or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", tensor.name):
            raise ConfigError(
                f"export: a field is called {tensor.name!r}, which the layout of tensordict has no file name "
                f"for. Leave it out with {arg('fields', setting='--fields')}, or export to safetensors"
            )
    return found


def write_tensordict(
    writer: ExportWriter, fields: Schema, settings: ExportSettings, lengths: Lengths
) -> list[ExportedFile]:
    """Write a file for each tensor, then `meta.json`.

    Raises:
        StokerError: As `Records.pieces`; or the disk has no room.
    """
    count = writer.records.count
    meta: dict[str, Any] = {}
    found: list[ExportedFile] = []
    for tensor in tensors(fields, settings, count, lengths):
        meta[tensor.name] = {
            "device": "cpu",
            "shape": list(tensor.shape),
            "dtype": f"torch.{tensor.dtype}",
            "is_nested": False,
        }
        if tensor.nbytes:  # a file of no bytes cannot be mapped: the shape says it all
            pieces = writer.values(tensor, (0, count), lengths.get(tensor.field))
            found.append(writer.file(f"{tensor.name}.memmap", (0, count), pieces))
    # Steps of nested records are not as many as records: then the set has no batch dimension.
    nested = bool(lengths) and settings.ragged == "nested"
    meta |= {
        "shape": [] if nested else [count],
        "device": "cpu",
        "_type": "<class 'tensordict._td.TensorDict'>",
    }
    (writer.folder / META).write_text(json.dumps(meta) + "\n")
    return found


TENSORDICT = Exporter(tensors=tensors, write=write_tensordict)
