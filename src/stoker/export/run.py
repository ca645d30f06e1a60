"""Export a cache: check first, make everything in a temporary folder, and give it its name at the end."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError, IncompleteError, StalledError
from stoker.export import safetensors_files, tensordict_files
from stoker.export.columns import ExportSettings, Tensor, check_ragged, chosen_fields, value_dtype
from stoker.export.files import ExportedFile, Making
from stoker.export.read import Records
from stoker.runtime.disk import explained, free_space
from stoker.runtime.files import make_folder, publish
from stoker.runtime.locks import lock_folder, lock_holder
from stoker.schema import Json, Schema
from stoker.store import Cache, open_cache
from stoker.store.adopt import FINGERPRINT
from stoker.store.recipe import RECIPE_FILE
from stoker.store.remote import local_path
from stoker.units import MIB

MANIFEST = "manifest.json"
SPARE_BYTES = 16 * MIB
"""Room for headers, manifest and what the file system keeps of files."""

Progress = Callable[[int, int], None]
"""Told of bytes written so far, and in all."""


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
        """The keys that scripts rely on."""
        return {
            **self.manifest(),
            "path": self.path,
            "cache": self.cache,
            "seconds": self.seconds,
        }

    def manifest(self) -> dict[str, Json]:
        """What the folder says of itself, the same wherever it and its cache lie."""
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

    Every byte is verified as it is read. `out` appears whole or not at all; stopped at any moment, the same
    call begins anew and clears away what was left.

    Args:
        cache: A complete one, or the path of one.
        out: A folder that does not exist yet, or is empty.
        settings: What to export, and as what.
        progress: Told how far it is.
    Raises:
        ConfigError: `settings` do not fit the cache; or `out` is an address, a file, holds something or lies
            in a cache.
        ReadOnlyError: `out` cannot be made.
        IncompleteError: Records are missing, or there is none in the range.
        CorruptError: A record is damaged; names it.
        RecordError: A packed value is beyond what its new dtype holds.
        ResourceError: There is no room for it.
        StalledError: Somebody else is exporting there, or storage does not answer.
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
    total = sum(tensor.nbytes for tensor in _tensors(fields, settings, records.count, lengths))
    with _made(out, total) as folder:
        making = Making(folder=folder, records=records, wrote=_teller(progress, total))
        write = {"safetensors": safetensors_files.write, "tensordict": tensordict_files.write}[settings.to]
        files = write(making, fields, settings, lengths)
        report = ExportReport(
            path=str(out),
            to=settings.to,
            cache=str(cache.path),
            fingerprint=cache.fingerprint,
            generation=cache.index.generation,
            records=records.count,
            bytes=sum(file.bytes for file in files),
            fields=_described(fields, settings),
            files=tuple(files),
            quarantined=tuple(_quarantined(cache, settings.records)),
            seconds=round(time.monotonic() - begun, 3),
        )
        (folder / MANIFEST).write_text(json.dumps(report.manifest(), indent=2) + "\n")
    return report


def _tensors(
    fields: Schema, settings: ExportSettings, count: int, lengths: Mapping[str, NDArray[np.int64]]
) -> list[Tensor]:
    if settings.to == "tensordict":
        return tensordict_files.tensors(fields, settings, count, lengths)
    files = safetensors_files.stretches(fields, settings, count, lengths)
    return [tensor for tensors in files for tensor in tensors]


def _described(fields: Schema, settings: ExportSettings) -> dict[str, dict[str, Json]]:
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


def _teller(progress: Progress | None, total: int) -> Callable[[int], None]:
    done = 0

    def wrote(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, max(total, done))

    return wrote


def _check_place(out: Path) -> None:
    """Refuse a folder that cannot become the export, or in which it would lie among a cache's own files.

    Raises:
        ConfigError: It is one.
    """
    if os.path.lexists(out) and not out.is_dir():
        raise ConfigError(f"export: {out} is a file. Choose a folder that does not exist, or is empty")
    own = out.resolve()
    for folder in (own, *own.parents):
        recipes = (folder / RECIPE_FILE, *folder.glob(f"{'[0-9a-f]' * 16}/{RECIPE_FILE}"))
        if any(FINGERPRINT.fullmatch(recipe.parent.name) and recipe.exists() for recipe in recipes):
            raise ConfigError(
                f"export: {out} lies in {folder}, which is a cache: its files are Stoker's own. Choose a "
                "folder outside of it"
            )
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"export: {out} exists and is not empty. Choose another folder, or remove it")


@contextmanager
def _made(out: Path, size_bytes: int) -> Generator[Path]:
    """A folder to make the export in, which becomes `out` when the block ends well."""
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
            with explained(out):
                yield temporary
                publish(temporary, out)
        except BaseException:
            with suppress(OSError):
                shutil.rmtree(temporary)
            raise
        with suppress(OSError):  # once it has its name, so that nobody takes the folder for one left behind
            (out / ".claim-export").unlink()


def _check_room(out: Path, size_bytes: int) -> None:
    free_space(out.parent).require(
        out.parent,
        size_bytes,
        "the export needs",
        reserve_bytes=SPARE_BYTES,
        advice="choose another folder, or export a part (records, fields)",
    )
