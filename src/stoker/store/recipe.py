"""The recipe: everything that determines the bytes of a cache, and nothing else.

Its canonical JSON is the file `recipe.json`, whose sha256 names the folder. No absolute path, time stamp,
worker count or device is in it: moving data or running on another machine changes nothing.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import time
import zlib
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from stoker.encoders.protocol import EncodeBatchSize, Encoder
from stoker.errors import (
    ConfigError,
    CorruptError,
    EncoderError,
    FormatError,
    RecordError,
    ResourceError,
    SourceError,
    arg,
)
from stoker.runtime.files import RegularFile, write_file
from stoker.runtime.jsonio import Json, as_object, canonical_json, is_count, read_strict
from stoker.schema import (
    FLOATS,
    QUANTIZED_DTYPES,
    RESERVED_SUFFIXES,
    SHAPE_SUFFIX,
    Field,
    Schema,
    columns_of,
    digest_json,
    is_reserved_name,
    scale_field,
    schema_from_json,
    schema_to_json,
    size_field,
)
from stoker.sources.files import open_regular, stamp_of
from stoker.sources.protocol import FileRef, Part, Source, SourceIdentity
from stoker.splitmix import keys_of
from stoker.store.format import FORMATS, RECIPE_FILE, format_of
from stoker.units import GIB, MIB

# ----------------------------------------------------------------------------------------------------------
# Digest source files, remembering what was digested before.
#
# Content decides a fingerprint, not names or times; but a file whose relative name, size, times, device and
# inode are as before is taken as unchanged, so that a hit costs a stat and no read. Name, size and
# modification time alone would not do: copies that keep times (`cp -p`, `rsync -t`, `tar`) share them with
# other contents. A file that was moved, or whose permissions changed, is therefore digested once more.
#
# `identity="auto"` digests in full while the sizes of the files up to and including this one are at most 4
# GiB together, and samples the files from there on; a first file above 4 GiB is sampled too. So whether a
# file is sampled depends on the sizes before it, its digest on nothing else: files added at the end leave
# the digests of the others as they were, files added earlier may turn full digests into sampled ones.


MEMO = ".digests"
MEMO_LIMIT_BYTES = 256 * MIB
FULL_BYTES = 4 * GIB
"""Up to this running total of sizes, in the order of a source's files, `auto` digests in full."""
SAMPLE_BYTES = MIB
SAMPLE_BLOCKS = 256
"""Blocks read between head and tail of a sampled file, at most; one for each 64 MiB of the file."""
LARGE_BYTES = 128 * MIB
"""A file above this takes tenths of a second or more to digest."""
SETTLED_S = 2.0
"""Age below which a digest is not remembered: the file may change within one tick of its time stamp. Age is
counted from the change time, which unlike the modification time no program can set back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileDigest:
    """Digest of the content of one file."""

    name: str
    """Name relative to the source's root."""
    bytes: int
    digest: str
    """sha256, 64 hex digits: of all bytes, or of size, head, tail and seeded blocks when `sampled`."""
    sampled: bool
    stamp: tuple[int, ...] = field(default=(), compare=False)
    """Size, times, device and inode when it was digested; not part of what it is known by."""


class Digester(Protocol):
    """Something that knows what files hold; `Digests` reads them."""

    def files(self, refs: Sequence[FileRef]) -> list[FileDigest]:
        """Digest files, in their order.

        Raises:
            SourceError: A file is missing, unreadable, not regular, or changed while it was read.
        """
        ...


class Digests:
    """Digests files, with a memo in `<cache_dir>/.digests` when a folder is given.

    A damaged memo is ignored, and a folder that cannot be written is allowed: then nothing is remembered.

    Args:
        cache_dir, identity: Folder of the memo, and how large files are digested.
        on_large_file: Called each time that a file of more than `LARGE_BYTES` is about to be read.
    """

    def __init__(
        self,
        cache_dir: Path | None = None,
        identity: Literal["auto", "full"] = "auto",
        *,
        on_large_file: Callable[[], None] | None = None,
    ) -> None:
        if identity not in ("auto", "full"):
            raise ConfigError(f"identity is {identity!r}, expected 'auto' or 'full'")
        self._memo = None if cache_dir is None else Path(cache_dir) / MEMO
        self._identity = identity
        self._on_large_file = on_large_file

    def files(self, refs: Sequence[FileRef]) -> list[FileDigest]:
        """Digest files, in their order.

        Raises:
            SourceError: A file is missing, unreadable, not regular, or changed while it was read.
        """
        memo = self._load()
        found: list[FileDigest] = []
        fresh: dict[str, str] = {}
        before = 0
        for ref in refs:
            status = _stat(ref)
            before += status.st_size
            sampled = self._identity == "auto" and before > FULL_BYTES
            known_by = stamp_of(status)
            key = " ".join((*map(str, known_by), "sampled" if sampled else "full", ref.name))
            digest = memo.get(key) or fresh.get(key)
            if digest is None:
                if self._on_large_file is not None and status.st_size > LARGE_BYTES:
                    self._on_large_file()
                digest = _digest(ref, status, sampled=sampled)
                if time.time() - status.st_ctime > SETTLED_S:
                    fresh[key] = digest
            found.append(
                FileDigest(
                    name=ref.name, bytes=status.st_size, digest=digest, sampled=sampled, stamp=known_by
                )
            )
        if fresh:
            self._save(fresh)
        return found

    def _load(self) -> dict[str, str]:
        if self._memo is None:
            return {}
        try:
            with RegularFile(self._memo) as file:
                data = file.read_all() if file.size <= MEMO_LIMIT_BYTES else b""
            memo = read_strict(data, where=MEMO)
        except (OSError, FormatError):
            return {}
        files = as_object(memo.get("files"))
        return (
            files
            if memo.get("format") == 1 and files is not None and _digest_of(files) == memo.get("check")
            else {}
        )

    def _save(self, fresh: dict[str, str]) -> None:
        if self._memo is None:
            return
        files = self._load() | fresh  # read again: another process may have added to it meanwhile
        text = canonical_json({"format": 1, "files": files, "check": _digest_of(files)})
        with suppress(OSError, ResourceError):  # ReadOnlyError is an OSError
            self._memo.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_file(self._memo, text.encode())


def digest_file(ref: FileRef, *, sampled: bool) -> FileDigest:
    """Return one file as it is now, whatever is remembered.

    Raises:
        SourceError: As `Digests.files`.
    """
    status = _stat(ref)
    digest = _digest(ref, status, sampled=sampled)
    return FileDigest(
        name=ref.name, bytes=status.st_size, digest=digest, sampled=sampled, stamp=stamp_of(status)
    )


def _digest_of(files: dict[str, Any]) -> str:
    return hashlib.sha256(canonical_json(files).encode()).hexdigest()


def _stat(ref: FileRef) -> os.stat_result:
    try:
        return ref.path.stat()
    except OSError as error:
        raise SourceError(f"{ref.path} cannot be read: {error.strerror}", hint="Check the path") from error


def _times(status: os.stat_result) -> tuple[int, ...]:
    """Return what a write to a file changes."""
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _digest(ref: FileRef, before: os.stat_result, *, sampled: bool) -> str:
    try:
        with open_regular(ref.path) as file:
            fd = file.fileno()
            digest = (
                _sampled(fd, before.st_size) if sampled else hashlib.file_digest(file, "sha256").hexdigest()
            )
            after = os.fstat(fd)
    except OSError as error:
        raise SourceError(f"{ref.path} cannot be read: {error.strerror}") from error
    if _times(after) != _times(before):
        raise SourceError(f"{ref.path} changed while it was digested", hint="Run again once it is written")
    return digest


def sampled_offsets(size: int) -> list[int]:
    """Return the offsets at which a sampled file is read: head, seeded blocks, tail, `SAMPLE_BYTES` each."""
    last = max(0, size - SAMPLE_BYTES)
    blocks = min(SAMPLE_BLOCKS, size // (64 * MIB))
    # Seeded by the size alone, so the positions are the same on every machine.
    inner = keys_of(size, np.arange(blocks)) % np.uint64(last + 1)
    return [0, *sorted(inner.tolist()), last]


def _sampled(fd: int, size: int) -> str:
    total = hashlib.sha256(str(size).encode())
    for offset in sampled_offsets(size):
        total.update(os.pread(fd, SAMPLE_BYTES, offset))
    return total.hexdigest()


STORED_FLOATS = ("float32", "float16", "bfloat16", *QUANTIZED_DTYPES)
GROUP_BYTES = 4 * MIB
MAX_GROUP = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipePart:
    """One part of the source, as the recipe knows it."""

    name: str
    count: int
    """Samples of this part."""
    offset: int
    """Global number of its first sample."""
    key: str
    """32 hex digits that bind a shard to this part of this recipe, wherever the part stands among others."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Ingredients of a cache. Equal recipes have equal fingerprints, and name the same folder."""

    entries: Mapping[str, Any]
    """The recipe as JSON; not to be changed."""
    files: tuple[FileDigest, ...] = field(default=(), compare=False)
    """The files behind the parts' digests, if it was made from a source; empty when it was loaded."""
    refs: tuple[tuple[FileRef, ...], ...] = field(default=(), compare=False)
    """Per part the same files as its source names them; empty when it was loaded."""

    @cached_property
    def text(self) -> str:
        """Canonical JSON: the bytes of `recipe.json`."""
        return canonical_json(self.entries)

    @cached_property
    def fingerprint(self) -> str:
        """The first 16 hex digits of the sha256 of `text`."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]

    @cached_property
    def parts(self) -> tuple[RecipePart, ...]:
        """Parts in numbering order."""
        parts: list[RecipePart] = []
        rest = {**self.entries, "source": {k: v for k, v in self.entries["source"].items() if k != "parts"}}
        shared = digest_json(rest)
        offset = 0
        for entry in self.entries["source"]["parts"]:
            key = digest_json([shared, entry])[:32]
            parts.append(RecipePart(name=entry["name"], count=entry["count"], offset=offset, key=key))
            offset += entry["count"]
        return tuple(parts)

    @cached_property
    def part_by_key(self) -> Mapping[str, int]:
        """Index of each part by its key; of parts with one key, the first."""
        return {part.key: i for i, part in reversed(list(enumerate(self.parts)))}

    @cached_property
    def count(self) -> int:
        """Samples of the source."""
        return sum(part.count for part in self.parts)

    @cached_property
    def schema(self) -> Schema:
        """Fields of a record as stored, in the order of their names."""
        return schema_from_json(self.entries["schema"])

    @cached_property
    def columns(self) -> Schema:
        """The columns of a record in a shard: its fields, quantized ones followed by their scales."""
        return columns_of(self.schema)

    @cached_property
    def encoded(self) -> Schema:
        """Fields of a record as the encoder gives them."""
        return {name: _with_dtype(f, self.entries["encoded"][name]) for name, f in self.schema.items()}

    @property
    def variants(self) -> Mapping[str, int]:
        """Number of variants in a record of each field that has any: axis 0 of the field."""
        return self.entries.get("variants", {})

    @property
    def weights(self) -> str:
        """Digest of the encoder's weights; empty where it has none."""
        encoder = as_object(self.entries["encoder"]) or {}
        return str(encoder.get("weights") or "")

    @cached_property
    def encode_batch(self) -> EncodeBatchSize:
        """The size of the encode batches, the same for all of the cache."""
        group = self.entries["group"]
        return EncodeBatchSize(
            samples=group["samples"], steps=group["steps"], lengths=tuple(group.get("lengths", ()))
        )

    def place(self, part: int, local: int) -> int:
        """Return the place of a sample in its encode batch, of which a record's last bits may depend.

        With `lengths`, samples of one length come from any part, and each has its row by its number. Parts
        begin at different rows, since each may hold a single sample.
        """
        size = self.encode_batch
        first = zlib.crc32(self.parts[part].name.encode()) if size.lengths else 0
        return (first + local) % size.samples

    @cached_property
    def _offsets(self) -> list[int]:
        return [part.offset for part in self.parts]

    def part_of(self, number: int) -> tuple[int, int]:
        """Return part index and part-local number of a global sample number.

        Raises:
            RecordError: There is no such sample.
        """
        if not 0 <= number < self.count:
            raise RecordError(f"there is no sample {number}: the source has {self.count}, numbered from 0")
        # Empty parts share an offset with the next one; the last of them is the one that holds samples.
        index = bisect_right(self._offsets, number) - 1
        return index, number - self._offsets[index]


def make_recipe(
    source: Source,
    encoder: Encoder | None,
    *,
    dtype: str | Mapping[str, str] | None = None,
    encode_batch: int | None = None,
    digests: Digester | None = None,
    ask: Callable[[Callable[[], Any]], Any] = lambda work: work(),
) -> Recipe:
    """Return the recipe of `encoder` applied to `source`.

    Args:
        source: Asked for identity, schema and length; its files are digested, not its samples read.
        encoder: None stores samples as they are.
        dtype: Storage dtype of float fields, by name, or one for all that have an axis: scalars (parameters)
            keep theirs, since 1e-8 is zero in float16, and so do coordinates of points. `int8` and
            `float8_e4m3fn` come with a scale for each block of 128 on the last axis. Given for all, they
            leave vectors as they are where that takes more bytes than float16, and kept raw fields; other
            fields of that kind must be named with their dtype. None keeps all as encoded.
        encode_batch: Samples in one call of the encoder; None: the encoder's own fixed number.
        digests: Who digests files; by default everything is read, and nothing remembered.
        ask: Calls what it is given; it is given calls that may run the encoder on a sample of zeros.

    Raises:
        ConfigError: A dtype is unknown, named for a field that is missing or not of floats, or does not pay;
            or samples that differ in length are to be encoded several at a time.
        SourceError: The source contradicts itself, or a file cannot be read.
        EncoderError: The encoder does not fit the samples, or its identity is not JSON.
    """
    sample_schema = source.schema()
    encoded = sample_schema if encoder is None else ask(lambda: encoder.schema(sample_schema))
    _check_names(encoded)
    stored = stored_schema(encoded, dtype)
    group = (
        _default_group(sample_schema)
        if encoder is None
        else ask(lambda: encoder.encode_batch_size(sample_schema))
    )
    group = _asked_group(group, encode_batch, sample_schema)
    identity = source.identity()
    source_entries, files = _source_entries(identity, len(source), digests or Digests())
    entries: dict[str, Json] = {
        "format": format_of(stored),
        "source": source_entries,
        "encoder": None if encoder is None else encoder.identity(),
        "group": {
            "samples": group.samples,
            "steps": group.steps,
            **({"lengths": [*group.lengths]} if group.lengths else {}),
        },
        "dtype": {name: f.dtype for name, f in stored.items()},
        "encoded": {name: f.dtype for name, f in encoded.items()},
        "schema": schema_to_json(stored),
    }
    # How many variants a record has of a field, so that a loader sees it; recipes without any are as before.
    count = getattr(encoder, "variants", None)
    if count is not None and (variants := count(sample_schema)):
        entries["variants"] = variants
    try:
        canonical_json(entries["encoder"])
    except (TypeError, ValueError) as error:
        raise EncoderError(f"the encoder's identity() cannot be written as JSON: {error}") from error
    return Recipe(
        entries=read_strict(canonical_json(entries).encode(), where="the recipe"),
        files=tuple(files),
        refs=tuple(part.files for part in identity.parts),
    )


def parse_recipe(data: bytes, folder: Path) -> Recipe:
    """Return the recipe in the bytes of `recipe.json` of a fingerprint's folder.

    Raises:
        FormatError: It is of another format, or is not a recipe.
        CorruptError: Its digest is not the folder's name.
    """
    path = folder / RECIPE_FILE
    found = hashlib.sha256(data).hexdigest()[:16]
    if found != folder.resolve().name:
        raise CorruptError(f"{path} has digest {found}, expected {folder.resolve().name}, its folder's name")
    entries = read_strict(data, where=str(path))
    if entries.get("format") not in FORMATS:
        raise FormatError(
            f"{path} has format {entries.get('format')!r}, this version reads {FORMATS}",
            hint="Upgrade stoker",
        )
    recipe = Recipe(entries=entries)
    try:
        _check_recipe(recipe)
    except (KeyError, TypeError, AttributeError, RecordError, EncoderError) as error:
        raise FormatError(f"{path} is not a recipe: {error!r}") from error
    return recipe


def _check_recipe(recipe: Recipe) -> None:
    parts = recipe.entries["source"]["parts"]
    if not all(is_count(entry["count"]) and isinstance(entry["name"], str) for entry in parts):
        raise TypeError("a part lacks a name or a count")
    if not is_count(recipe.encode_batch.samples) or recipe.encoded.keys() != recipe.schema.keys():
        raise TypeError("group or schema")
    if recipe.entries["format"] != format_of(recipe.schema):
        raise TypeError("its format does not go with its schema")


def _with_dtype(f: Field, dtype: str, *, quantized: bool = False) -> Field:
    return replace(f, dtype=dtype, quantized=quantized)


def _check_names(schema: Schema) -> None:
    if not schema:
        raise EncoderError("a record has no fields, so there is nothing to store")
    for name in schema:
        if is_reserved_name(name):
            raise EncoderError(
                f"a field is called {name!r}; names that start with '__' or end with "
                f"{', '.join(RESERVED_SUFFIXES)} are the store's own",
                hint="Rename it",
            )
        if schema[name].folded and schema.get(name + SHAPE_SUFFIX) != size_field(schema[name]):
            raise EncoderError(
                f"field {name!r} has axes {' '.join(schema[name].axes)} in its rows, and no field "
                f"{name + SHAPE_SUFFIX!r} {size_field(schema[name]).shape} int64 with their sizes",
                hint="Hand on both",
            )


def stored_schema(encoded: Schema, dtype: str | Mapping[str, str] | None) -> Schema:
    """Return the schema of records as stored, by the rule of `make_recipe`'s `dtype`.

    Raises:
        ConfigError: As `make_recipe`.
    """
    wanted = _wanted_dtypes(encoded, dtype)
    # By name, so that a schema means the same however its fields were listed.
    return {
        name: _with_dtype(f, wanted.get(name, f.dtype), quantized=wanted.get(name) in QUANTIZED_DTYPES)
        for name, f in sorted(encoded.items())
    }


def _wanted_dtypes(encoded: Schema, dtype: str | Mapping[str, str] | None) -> dict[str, str]:
    floats = [name for name, f in encoded.items() if f.dtype in FLOATS]
    if isinstance(dtype, str):
        fits = _pays if dtype in QUANTIZED_DTYPES else _has_axis
        inexact = [name for name in floats if not encoded[name].exact]
        wanted = {name: dtype for name in inexact if fits(encoded[name])}
        rest = [name for name in inexact if name not in wanted and encoded[name].step_shape]
        large = [name for name in rest if len(encoded[name].shape) > 1 and not encoded[name].kept]
        if dtype in QUANTIZED_DTYPES and large:
            raise _does_not_pay(encoded, dtype, {*wanted, *large}, large[0])
        if rest:
            logging.getLogger("stoker").info(
                "fields that take no fewer bytes as %s are stored as they are: %s", dtype, ", ".join(rest)
            )
    else:
        wanted = dict(dtype or {})
    named = [("every float field", dtype)] if isinstance(dtype, str) else wanted.items()
    for name, wish in named:
        if wish not in STORED_FLOATS:
            raise ConfigError(
                f"storage dtype {wish!r} for {name} is unknown", hint=f"Use {', '.join(STORED_FLOATS)}"
            )
    for name in wanted:
        if name not in floats:
            raise ConfigError(
                f"storage dtype is set for {name!r}, which is not a float field",
                hint=f"Float fields: {floats}",
            )
        if wanted[name] in QUANTIZED_DTYPES and not encoded[name].step_shape:
            raise ConfigError(
                f"storage dtype {wanted[name]!r} for {name!r}: it has one number "
                f"{'a step' if encoded[name].shape else 'a sample'}, and none to share a scale with",
                hint="Use bfloat16 or float32",
            )
    return wanted


def _has_axis(f: Field) -> bool:
    """Return True if a dtype for all fields includes this one: not parameters or coordinates of points."""
    return bool(f.shape) and f.axes != ("p",)


def _pays(f: Field) -> bool:
    """Return True if a byte a number and the scales are smaller than float16."""
    if not f.step_shape:
        return False
    scales = scale_field(_with_dtype(f, "int8", quantized=True))
    return scales.shape[-1] * scales.itemsize < f.shape[-1]


def _does_not_pay(encoded: Schema, dtype: str, names: Collection[str], large: str) -> ConfigError:
    """Say how many bytes a field would take, and a dtype for each field instead."""
    last = encoded[large].shape[-1]
    scales = scale_field(_with_dtype(encoded[large], dtype, quantized=True)).shape[-1]
    instead = {name: dtype if _pays(encoded[name]) else "float16" for name in sorted(names)}
    return ConfigError(
        f"storage dtype {dtype!r} for all fields does not suit {large!r} {encoded[large].shape}: with its "
        f"scales, each {last} numbers of its last axis take {last + 4 * scales} bytes, and {2 * last} in "
        "float16",
        hint=f"Name the dtype of each field: {arg('dtype', instead)}",
    )


def _default_group(sample_schema: Schema) -> EncodeBatchSize:
    if any(f.ragged for f in sample_schema.values()):
        return EncodeBatchSize(samples=1)
    size = sum(f.size_bytes() for f in sample_schema.values())
    return EncodeBatchSize(samples=max(1, min(MAX_GROUP, GROUP_BYTES // max(1, size))))


def _asked_group(fixed: EncodeBatchSize, samples: int | None, sample_schema: Schema) -> EncodeBatchSize:
    """Return the group of so many samples; one sample alone may be cut over time, as in the fixed group."""
    if samples is None or samples == fixed.samples == 1:
        return fixed
    if samples < 1:
        raise ConfigError(f"encode_batch must be at least 1 sample, got {samples}")
    ragged = sorted(name for name, f in sample_schema.items() if f.ragged)
    if ragged and samples > 1 and not fixed.lengths:
        raise ConfigError(
            f"{arg('encode_batch', samples)}: samples differ in length ({ragged[0]}), so each is encoded "
            "alone",
            hint=f"Leave it out, or give {arg('encode_batch', 1)}; or give the encoder lengths to pad to",
        )
    return EncodeBatchSize(samples=samples, lengths=fixed.lengths)


def _source_entries(
    identity: SourceIdentity, count: int, digests: Digester
) -> tuple[dict[str, Json], list[FileDigest]]:
    total = sum(part.count for part in identity.parts)
    if total != count:
        raise SourceError(f"the source's parts hold {total} samples, len(source) is {count}")
    names = [part.name for part in identity.parts]
    if twice := sorted(
        {name for name in names if names.count(name) > 1} if len(set(names)) < len(names) else ()
    ):
        raise SourceError(
            f"parts of a source need names of their own, these come twice: {', '.join(twice[:5])}"
        )
    files = digests.files([ref for part in identity.parts for ref in part.files])
    parts: list[Json] = []
    at = 0
    for part in identity.parts:
        parts.append(_part_entry(part, files[at : at + len(part.files)]))
        at += len(part.files)
    entries: dict[str, Json] = {
        "kind": identity.kind,
        "settings": dict(identity.settings),
        "sampled": identity.sampled,
        "parts": parts,
    }
    try:
        canonical_json(entries)
    except (TypeError, ValueError) as error:
        raise SourceError(f"the source's identity() cannot be written as JSON: {error}") from error
    return entries, files


def _part_entry(part: Part, files: list[FileDigest]) -> Json:
    if part.digest is None and not files:
        raise SourceError(
            f"part {part.name!r} names neither files nor a digest, so nothing tells when it changes"
        )
    for name, value in part.values.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise SourceError(
                f"{part.name}: {name!r}, a number of the file (an attribute, or in its name), is {value}",
                hint="Give it a finite value in the file, or delete the attribute",
            )
    content: list[Json] = [[file.name, file.bytes, file.digest] for file in files]
    digest = part.digest if not files else digest_json([part.digest, *content])
    return {
        "name": part.name,
        "count": part.count,
        "bytes": sum(file.bytes for file in files),
        "digest": digest,
        "sampled": any(file.sampled for file in files),
        "values": dict(part.values),
        "selection": part.selection,
    }


# ----------------------------------------------------------------------------------------------------------
# Why two recipes have different fingerprints, entry by entry.


NOTES: Mapping[str, str] = {
    "format": "another format of the cache",
    "encoder": "another encoder",
    "encoder.class": "another encoder",
    "encoder.weights": "the encoder's weights differ",
    "encoder.version": "the encoder's code has another version",
    "encoder.config": "a setting of the encoder",
    "dtype": "stored with another dtype",
    "encoded": "the encoder's output has another dtype",
    "group": "samples are encoded in other groups",
    "variants": "records have another number of variants",
    "schema": "records have another shape",
    "source.kind": "another kind of source, or another version of its code",
    "source.settings": "a setting of the source",
    "source.sampled": "content was read in full on one side and sampled on the other",
}
PART_NOTES: Mapping[str, str] = {
    "digest": "the bytes of the data differ",
    "bytes": "the size of the data differs",
    "count": "the number of samples differs",
    "values": "a value parsed from the name or an attribute differs",
    "selection": "other samples were selected (split, limit)",
    "sampled": "digested in full on one side and sampled on the other",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One entry that differs."""

    entry: str
    """Where, e.g. `"encoder.weights"` or `"source.parts[1].digest"` (its index in the second recipe)."""
    a: Json
    """Value in the first recipe; None where it is absent."""
    b: Json
    """Value in the second."""
    note: str
    """What it means, in words."""


def diff_recipes(a: Recipe, b: Recipe) -> list[Difference]:
    """Return all entries in which two recipes differ; empty when their fingerprints are equal.

    Parts are compared by name, so that one added file is one difference.
    """
    found: list[Difference] = []
    left, right = dict(a.entries), dict(b.entries)
    left_source, right_source = dict(left.pop("source")), dict(right.pop("source"))
    found += _diff_parts(left_source.pop("parts"), right_source.pop("parts"))
    found += _noted(_diff("source", left_source, right_source))
    found += _noted(_diff("", left, right))
    # `dtype.<field>` has said it already.
    said = {f"schema.{d.entry.removeprefix('dtype.')}.dtype" for d in found if d.entry.startswith("dtype.")}
    return [d for d in found if d.entry not in said]


def _noted(pairs: Iterator[tuple[str, Json, Json]]) -> list[Difference]:
    return [Difference(entry=entry, a=a, b=b, note=_note(entry)) for entry, a, b in pairs]


def _note(entry: str) -> str:
    while entry not in NOTES and "." in entry:
        entry = entry.rpartition(".")[0]
    return NOTES.get(entry, "")


def _diff(path: str, a: Any, b: Any) -> Iterator[tuple[str, Json, Json]]:
    left, right = as_object(a), as_object(b)
    if left is not None and right is not None:
        for key in sorted(left.keys() | right.keys()):
            yield from _diff(f"{path}.{key}" if path else key, left.get(key), right.get(key))
    elif a != b or type(a) is not type(b):
        yield path, a, b


def _diff_parts(a: list[Any], b: list[Any]) -> list[Difference]:
    found: list[Difference] = []
    left = {part["name"]: part for part in a}
    right = {part["name"]: (i, part) for i, part in enumerate(b)}
    for i, part in enumerate(a):
        if part["name"] not in right:
            found.append(Difference(entry=f"source.parts[{i}]", a=part, b=None, note="only in the first"))
    for name, (i, part) in right.items():
        if name not in left:
            found.append(Difference(entry=f"source.parts[{i}]", a=None, b=part, note="only in the second"))
            continue
        for entry, x, y in _diff("", left[name], part):
            note = PART_NOTES.get(entry.partition(".")[0], "")
            found.append(Difference(entry=f"source.parts[{i}].{entry}", a=x, b=y, note=f"{name}: {note}"))
    orders = [name for name in left if name in right], [name for name in right if name in left]
    if orders[0] != orders[1]:
        found.append(
            Difference(entry="source.parts", a=orders[0], b=orders[1], note="the same parts in another order")
        )
    return found
