"""The recipe: everything that determines the bytes of a cache, and nothing else.

Its canonical JSON is the file `recipe.json`, whose sha256 names the folder. No absolute path, time stamp,
reader count or device is in it: moving data or running elsewhere changes nothing.
"""

from __future__ import annotations

import hashlib
import logging
import math
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from stoker.encoders.protocol import Encoder, Group
from stoker.errors import ConfigError, CorruptError, EncoderError, FormatError, RecordError, SourceError, arg
from stoker.schema import (
    FLOATS,
    PACKED_DTYPES,
    SCALE_SUFFIX,
    SHAPE_SUFFIX,
    Field,
    Json,
    Schema,
    canonical_json,
    columns_of,
    digest_json,
    scale_field,
    schema_from_json,
    schema_to_json,
    size_field,
)
from stoker.sources.protocol import FileRef, Part, Source, SourceIdentity
from stoker.store.digests import Digester, Digests, FileDigest
from stoker.store.layout import FORMATS, format_of
from stoker.store.local import LocalStorage
from stoker.store.strict_json import is_count, read_strict
from stoker.units import MIB

RECIPE_FILE = "recipe.json"
MAX_RECIPE_BYTES = 256 * MIB
STORED_FLOATS = ("float32", "float16", "bfloat16", *PACKED_DTYPES)
GROUP_BYTES = 4 * MIB
MAX_GROUP = 256
RESERVED_SUFFIXES = (".offsets", ".sums", SCALE_SUFFIX)


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
    """What a cache is made of. Equal recipes have equal fingerprints, and name the same folder."""

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
        """What a shard holds of a record: its fields, packed ones followed by their scales."""
        return columns_of(self.schema)

    @cached_property
    def encoded(self) -> Schema:
        """Fields of a record as the encoder gives them."""
        return {name: _with_dtype(f, self.entries["encoded"][name]) for name, f in self.schema.items()}

    @cached_property
    def group(self) -> Group:
        """The fixed group in which samples are encoded."""
        return Group(samples=self.entries["group"]["samples"], steps=self.entries["group"]["steps"])

    @cached_property
    def _offsets(self) -> list[int]:
        return [part.offset for part in self.parts]

    def part_of(self, number: int) -> tuple[int, int]:
        """Part index and part-local number of a global sample number.

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
    """The recipe of `encoder` applied to `source`.

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
    group = _default_group(sample_schema) if encoder is None else ask(lambda: encoder.group(sample_schema))
    group = _asked_group(group, encode_batch, sample_schema)
    identity = source.identity()
    source_entries, files = _source_entries(identity, len(source), digests or Digests())
    entries: dict[str, Json] = {
        "format": format_of(stored),
        "source": source_entries,
        "encoder": None if encoder is None else encoder.identity(),
        "group": {"samples": group.samples, "steps": group.steps},
        "dtype": {name: f.dtype for name, f in stored.items()},
        "encoded": {name: f.dtype for name, f in encoded.items()},
        "schema": schema_to_json(stored),
    }
    try:
        canonical_json(entries["encoder"])
    except (TypeError, ValueError) as error:
        raise EncoderError(f"the encoder's identity() cannot be written as JSON: {error}") from error
    return Recipe(
        entries=read_strict(canonical_json(entries).encode(), where="the recipe"),
        files=tuple(files),
        refs=tuple(part.files for part in identity.parts),
    )


def load_recipe(folder: Path) -> Recipe:
    """Read `recipe.json` of a fingerprint's folder.

    Raises:
        FormatError: There is none, it is of another format, or it is not a recipe.
        CorruptError: Its digest is not the folder's name.
    """
    path = folder / RECIPE_FILE
    try:
        data = LocalStorage(folder).read(RECIPE_FILE, limit_bytes=MAX_RECIPE_BYTES)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FormatError(f"{folder} holds no {RECIPE_FILE}, so it is not a cache of Stoker") from error
    found = hashlib.sha256(data).hexdigest()[:16]
    if found != folder.resolve().name:
        raise CorruptError(f"{path} has digest {found}, expected {folder.resolve().name}, its folder's name")
    entries = read_strict(data, where=str(path))
    if entries.get("format") not in FORMATS:
        raise FormatError(
            f"{path} has format {entries.get('format')!r}, this version reads {FORMATS}. Upgrade stoker"
        )
    recipe = Recipe(entries=entries)
    try:
        _check_recipe(recipe)
    except (KeyError, TypeError, AttributeError, RecordError) as error:
        raise FormatError(f"{path} is not a recipe: {error!r}") from error
    return recipe


def _check_recipe(recipe: Recipe) -> None:
    parts = recipe.entries["source"]["parts"]
    if not all(is_count(entry["count"]) and isinstance(entry["name"], str) for entry in parts):
        raise TypeError("a part lacks a name or a count")
    if not is_count(recipe.group.samples) or recipe.encoded.keys() != recipe.schema.keys():
        raise TypeError("group or schema")
    if recipe.entries["format"] != format_of(recipe.schema):
        raise TypeError("its format does not go with its schema")


def _with_dtype(f: Field, dtype: str, *, packed: bool = False) -> Field:
    return replace(f, dtype=dtype, packed=packed)


def _check_names(schema: Schema) -> None:
    if not schema:
        raise EncoderError("a record has no fields, so there is nothing to store")
    for name in schema:
        if not name or name.startswith("__") or name.endswith(RESERVED_SUFFIXES):
            raise EncoderError(
                f"a field is called {name!r}; names that start with '__' or end with "
                f"{', '.join(RESERVED_SUFFIXES)} are the store's own. Rename it"
            )
        if schema[name].folded and schema.get(name + SHAPE_SUFFIX) != size_field(schema[name]):
            raise EncoderError(
                f"field {name!r} has axes {' '.join(schema[name].axes)} in its rows, and no field "
                f"{name + SHAPE_SUFFIX!r} {size_field(schema[name]).shape} int64 with their sizes. Hand on "
                "both"
            )


def stored_schema(encoded: Schema, dtype: str | Mapping[str, str] | None) -> Schema:
    """The schema of records as stored, by the rule of `make_recipe`'s `dtype`.

    Raises:
        ConfigError: As `make_recipe`.
    """
    wanted = _wanted_dtypes(encoded, dtype)
    # By name, so that a schema means the same however its fields were listed.
    return {
        name: _with_dtype(f, wanted.get(name, f.dtype), packed=wanted.get(name) in PACKED_DTYPES)
        for name, f in sorted(encoded.items())
    }


def _wanted_dtypes(encoded: Schema, dtype: str | Mapping[str, str] | None) -> dict[str, str]:
    floats = [name for name, f in encoded.items() if f.dtype in FLOATS]
    if isinstance(dtype, str):
        fits = _pays if dtype in PACKED_DTYPES else _has_axis
        inexact = [name for name in floats if not encoded[name].exact]
        wanted = {name: dtype for name in inexact if fits(encoded[name])}
        rest = [name for name in inexact if name not in wanted and encoded[name].step_shape]
        large = [name for name in rest if len(encoded[name].shape) > 1 and not encoded[name].kept]
        if dtype in PACKED_DTYPES and large:
            raise ConfigError(_does_not_pay(encoded, dtype, {*wanted, *large}, large[0]))
        if rest:
            logging.getLogger("stoker").info(
                "fields that take no fewer bytes as %s are stored as they are: %s", dtype, ", ".join(rest)
            )
    else:
        wanted = dict(dtype or {})
    named = [("every float field", dtype)] if isinstance(dtype, str) else wanted.items()
    for name, wish in named:
        if wish not in STORED_FLOATS:
            raise ConfigError(f"storage dtype {wish!r} for {name} is unknown. Use {', '.join(STORED_FLOATS)}")
    for name in wanted:
        if name not in floats:
            raise ConfigError(
                f"storage dtype is set for {name!r}, which is not a float field. Float fields: {floats}"
            )
        if wanted[name] in PACKED_DTYPES and not encoded[name].step_shape:
            raise ConfigError(
                f"storage dtype {wanted[name]!r} for {name!r}: it has one number "
                f"{'a step' if encoded[name].shape else 'a sample'}, and none to share a scale with. "
                "Use bfloat16 or float32"
            )
    return wanted


def _has_axis(f: Field) -> bool:
    """Whether a dtype for all fields is meant for this one: not for parameters and coordinates of points."""
    return bool(f.shape) and f.axes != ("p",)


def _pays(f: Field) -> bool:
    """Whether a byte a number and the scales are smaller than float16."""
    if not f.step_shape:
        return False
    scales = scale_field(_with_dtype(f, "int8", packed=True))
    return scales.shape[-1] * scales.itemsize < f.shape[-1]


def _does_not_pay(encoded: Schema, dtype: str, names: Collection[str], large: str) -> str:
    """Say how many bytes a field would take, and a dtype for each field instead."""
    last = encoded[large].shape[-1]
    scales = scale_field(_with_dtype(encoded[large], dtype, packed=True)).shape[-1]
    instead = {name: dtype if _pays(encoded[name]) else "float16" for name in sorted(names)}
    return (
        f"storage dtype {dtype!r} for all fields does not suit {large!r} {encoded[large].shape}: with its "
        f"scales, each {last} numbers of its last axis take {last + 4 * scales} bytes, and {2 * last} in "
        f"float16. Name the dtype of each field: {arg('dtype', instead)}"
    )


def _default_group(sample_schema: Schema) -> Group:
    if any(f.ragged for f in sample_schema.values()):
        return Group(samples=1)
    size = sum(f.size_bytes() for f in sample_schema.values())
    return Group(samples=max(1, min(MAX_GROUP, GROUP_BYTES // max(1, size))))


def _asked_group(fixed: Group, samples: int | None, sample_schema: Schema) -> Group:
    """The group of so many samples; one sample alone may be cut over time, as in the fixed group."""
    if samples is None or (samples == 1 and fixed.samples == 1):
        return fixed
    if samples < 1:
        raise ConfigError(f"encode_batch must be at least 1 sample, got {samples}")
    ragged = sorted(name for name, f in sample_schema.items() if f.ragged)
    if ragged and samples > 1:
        raise ConfigError(
            f"{arg('encode_batch', samples)}: samples differ in length ({ragged[0]}), so each is encoded by "
            f"itself. Leave it out, or give {arg('encode_batch', 1)}"
        )
    return Group(samples=samples)


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
                f"{part.name}: {name!r}, a number of the file (an attribute, or in its name), is {value}. "
                f"Give it a finite value in the file, or delete the attribute"
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
