"""Import the earlier caches, one `sample_00000.pt` per sample, into shards.

The files are a source like any other: their digests are in the recipe, so importing a folder again finds the
cache that is there, and an import that was cut short goes on. The first file that can be read says which
fields a record has. Files that are missing, broken or different are quarantined by number, in stage `import`.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from stoker.errors import ConfigError, RecordError, SourceError, StalledError, arg
from stoker.pipeline.inspect import list_quarantined
from stoker.pipeline.pt_reader import PtContent, PtReader, Refused
from stoker.runtime.locks import lock_holder
from stoker.runtime.retry import RetryPolicy, retry
from stoker.schema import Field, Json, Sample, Schema
from stoker.sources.protocol import FileRef, Part, SourceIdentity
from stoker.store import Cache, Digests, Failure, Folder, make_recipe, open_folder
from stoker.store.recipe import RECIPE_FILE
from stoker.units import GIB, format_count

log = logging.getLogger("stoker")
STAGE = "import"
KIND = "import-pt/1"
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
    """What to do with a sample that holds NaN or infinities."""
    file_bytes: int = MAX_FILE_BYTES
    """The largest file that is read."""
    deadline_s: float = 60.0
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
        """The keys that scripts rely on."""
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

    def read(self, number: int, start: int | None = None, stop: int | None = None) -> Sample:
        """Not how these files are read: `import_pt` does it, in a limited process."""
        raise SourceError(f"sample {number} of {self._path} is read by import-pt alone")

    def runs(self) -> Sequence[range]:
        """All of them."""
        return [range(self._count)]

    def keys(self) -> Sequence[str]:
        """File names."""
        return [f"sample_{number:05d}.pt" for number in range(self._count)]

    def schema(self) -> Schema:
        """Fields of the first file that could be read."""
        return self._schema

    def identity(self) -> SourceIdentity:
        """Names and contents of the files; which numbers have one follows from the names."""
        files = tuple(FileRef(name=path.name, path=path) for _, path in sorted(self._files.items()))
        return SourceIdentity(kind=KIND, parts=(Part(name="samples", count=self._count, files=files),))


@dataclass(slots=True, kw_only=True)
class _Found:
    """What a folder holds."""

    files: dict[int, Path] = field(default_factory=dict[int, Path])
    refused: dict[int, str] = field(default_factory=dict[int, str])
    """Numbers whose file is a link, pipe, device, folder or too large."""
    ignored: int = 0
    largest: int = 0
    """Bytes of the largest file."""

    def count(self, wanted: int | None, path: Path) -> int:
        """Samples in all.

        Raises:
            SourceError: There are no files, or far too few for their numbers.
            ConfigError: A number is beyond what was asked for.
        """
        if not self.files:
            raise SourceError(f"{path} holds no sample_00000.pt or the like. Name the folder of one task")
        highest = max([*self.files, *self.refused])
        if wanted is not None and highest >= wanted:
            raise ConfigError(f"count is {wanted}, but there is a sample {highest}. Give more")
        count = highest + 1 if wanted is None else wanted
        if count > 10 * len(self.files) + 1000:
            raise SourceError(
                f"{path} holds {format_count(len(self.files))} samples for {format_count(count)} numbers. "
                "Is a file named wrongly?"
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
    with PtReader(found.largest, deadline_s=settings.deadline_s) as reader:
        source = PtFolder(path, _first_schema(reader, found, path), found.files, count)
        recipe = make_recipe(source, None, dtype=settings.dtype, digests=Digests(cache_dir, "full"))
        folder = open_folder(cache_dir, name, recipe)
        importing = _Import(folder, found, reader, settings)
        cache = folder.complete()
        _say_others(folder)
        if cache is None or len(folder.missing()):
            with folder.claim() as got:
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
            "`stoker gc %s --keep 1` removes the older ones once they are unused for a day",
            folder.path.parent,
            ", ".join(others),
            folder.path.name,
            folder.path.parent.parent,
        )


def _scan(path: Path, settings: ImportSettings) -> _Found:
    found = _Found()
    try:
        entries = sorted(path.iterdir())
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror}. Name the folder of one task") from error
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


def _first_schema(reader: PtReader, found: _Found, path: Path) -> Schema:
    first = ""
    for file in dict(sorted(found.files.items())).values():
        try:
            return schema_of(reader.read(file).tensors)
        except (Refused, RecordError) as error:
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


class _Import:
    """One run over the samples that are not stored yet."""

    def __init__(self, folder: Folder, found: _Found, reader: PtReader, settings: ImportSettings) -> None:
        self.imported = 0
        self.left_out: dict[str, int] = {}
        self._folder, self._found, self._reader, self._settings = folder, found, reader, settings
        # `make_recipe` digested every file in full, in the order of numbers.
        files = folder.recipe.files
        self._digests = dict(zip(sorted(found.files), (file.digest for file in files), strict=True))

    def run(self) -> Cache:
        """Import what is missing, and write the index; sealed also when interrupted."""
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
                except (Refused, RecordError) as error:
                    failures.append(self._failure(number, error))
                if time.monotonic() - said > SAID_EVERY_S:
                    said = time.monotonic()
                    log.info("%s of %s files", format_count(place + 1), format_count(len(wanted)))
        finally:
            writer.seal()
            self._folder.quarantine_many(failures)
        return self._folder.finish()

    def _record(self, number: int) -> dict[str, Tensor]:
        path = self._found.files.get(number)
        if path is None:
            why = self._found.refused.get(number, f"sample_{number:05d}.pt is missing")
            raise Refused(why)
        content = self._read(path)
        if content.digest != self._digests[number]:
            raise SourceError(f"{path} changed since it was digested. Run again once it is written")
        for name in content.left_out:
            self.left_out[name] = self.left_out.get(name, 0) + 1
        _check(content.tensors, self._folder.recipe.encoded, path, self._settings.nan)
        return content.tensors

    def _read(self, path: Path) -> PtContent:
        try:
            return retry(
                lambda: self._reader.read(path),
                lambda error: isinstance(error, Refused) and error.transient,
                RetryPolicy(first_s=0.0, attempts=TRIES),
            )
        except Refused as refused:
            raise Refused(f"{path}: {refused}", transient=refused.transient) from None

    def _failure(self, number: int, error: Exception) -> Failure:
        transient = isinstance(error, Refused) and error.transient
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
                f"{path}: field {name!r} holds NaN or infinities. "
                f"{arg('nan', 'allow', setting='--nan')} takes them"
            )
