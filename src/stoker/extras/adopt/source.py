"""Features on disk as a source: each sample is read, compared with the first ones, and checked for damage."""

from __future__ import annotations

import errno
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from dataclasses import field as dataclass_field
from pathlib import Path, PurePosixPath
from typing import Any, Literal, TypeAlias, cast

import numpy as np

from stoker.errors import ConfigError, DecodeError, SourceError, arg
from stoker.extras.adopt.containers import Member, Rows, read_hdf5, read_zip_member, stated_shapes
from stoker.extras.adopt.formats import Array, Arrays, decode, decode_errors
from stoker.extras.adopt.layouts import MAY_BE_ZERO, FolderLook, Layout, choose_layout
from stoker.extras.adopt.listing import FilePart, ListedSample, Listing, walk
from stoker.extras.adopt.pt import MAX_FILE_BYTES, PtReader, RefusedFileError
from stoker.precompute.worker import ChangedError, all_finite
from stoker.runtime.threads import ItemClock, call_within
from stoker.schema import (
    FLOATS,
    SHAPE_SUFFIX,
    Field,
    Json,
    Sample,
    Schema,
    is_reserved_name,
    size_field,
    without_sizes,
)
from stoker.sources.files import OpenFiles, open_regular, why_unreadable
from stoker.sources.protocol import Part, SourceIdentity, check_index
from stoker.sources.torch_items import differing_axes, fits_field, fold, shape_text, varying_field

VERSION = 1
"""Bumped by hand when the same files would give other samples."""

Values: TypeAlias = Literal["reject", "allow"]
PT = ("pt", "pth", "ckpt")
LISTED = 2000
"""Files whose names are looked at to recognize a layout."""
PEEKED = 8
"""Files that are opened to see which arrays such a file holds."""
PROBED = 32
"""Samples that decide fields and shapes, spread over all."""
MORE_PROBED = 256
"""Samples that are tried where none of those can be read."""
ODD = 0.25
"""Fraction of these that may differ in shape and count as damaged; more of them, and the shapes vary."""
RARE = 1 / 16
"""Where shapes vary, fraction of these that may differ along an axis and count as damaged; always one."""
OPEN_CONTAINERS = 16
RUN = 64
PT_TIMEOUT_S = 30.0
READ_TIMEOUT_S = 120.0


class FileReader:
    """Reads the arrays of files; open containers and the process that reads `.pt` are kept.

    Args:
        root: The folder.
        limit_bytes: The largest `.pt` file.
    """

    def __init__(self, root: Path, limit_bytes: int = MAX_FILE_BYTES) -> None:
        self._root = root
        self._limit_bytes = min(limit_bytes, MAX_FILE_BYTES)
        self._pt: PtReader | None = None
        self._containers = OpenFiles[tuple[str, str], Rows](
            lambda key: Rows(key[0], root / key[1]), lambda rows: rows.close(), OPEN_CONTAINERS
        )
        self.left_out: Counter[str] = Counter()
        """Entries of `.pt` files that no field can hold."""
        self._pid = os.getpid()

    def __del__(self) -> None:
        # A copy of the source that read in this process is dropped without being closed. At the end of the
        # program, parts of the interpreter may be gone.
        try:
            if self._pid == os.getpid():  # a forked process has a copy of its parent's
                self.close()
        except Exception:  # noqa: BLE001, S110
            pass

    def arrays(self, part: FilePart, kind: str) -> Arrays:
        """Return the arrays of one file, or of one place in it.

        Raises:
            DecodeError: It is damaged; does not say which file.
            SourceError: The storage failed, which may pass.
            ChangedError: It is not the file that was listed.
        """
        path = self._root / part.file
        if part.size == 0 and why_unreadable(path) is None:
            raise DecodeError("empty, 0 bytes")
        if part.row >= 0:
            self._check(os.stat(path), part, path)  # noqa: PTH116
            return self._containers.get((kind, part.file)).read(part.row)
        name = part.role if kind == "tar" else part.member or part.file
        suffix = name.rpartition(".")[2].lower()
        if suffix in PT:
            return self._of_pt(path, part)
        if suffix in ("h5", "hdf5"):
            if (why := why_unreadable(path)) is not None:
                raise DecodeError(why)
            arrays = read_hdf5(path)
            self._check(os.stat(path), part, path)  # noqa: PTH116
            return arrays
        data = self._bytes(path, part, kind)
        if kind == "tar":
            return _of_member(part.role, data)
        return decode(suffix, data)

    def close(self) -> None:
        """Close all that is open."""
        self._containers.close()
        if self._pt is not None:
            self._pt.close()
            self._pt = None

    def _bytes(self, path: Path, part: FilePart, kind: str) -> bytes:
        if (why := why_unreadable(path)) is not None and not os.path.lexists(path):
            raise DecodeError("is missing")
        if why is not None:
            raise DecodeError(why)
        try:
            with open_regular(path) as file:
                status = os.fstat(file.fileno())
                self._check(status, part, path)
                if part.offset < 0:
                    if status.st_size > MAX_FILE_BYTES:
                        raise DecodeError(
                            f"has {status.st_size:,} bytes, a sample may have {MAX_FILE_BYTES:,}"
                        )
                    return file.readall()
                member = Member(part.member, part.offset, part.length)
                if kind == "zip" or part.file.lower().endswith(".zip"):
                    return read_zip_member(file.fileno(), member)
                data = os.pread(file.fileno(), part.length, part.offset)
        except PermissionError:
            raise DecodeError("may not be read") from None
        except OSError as error:
            raise SourceError(f"cannot be read: {error.strerror}") from error
        if len(data) != part.length:
            raise DecodeError(f"member {part.member!r} is cut short")
        return data

    def _of_pt(self, path: Path, part: FilePart) -> Arrays:
        if (why := why_unreadable(path)) is not None:
            raise DecodeError(why)
        self._check(os.stat(path), part, path)  # noqa: PTH116
        self._pt = self._pt or PtReader(self._limit_bytes, timeout_s=PT_TIMEOUT_S)
        place = {} if part.offset < 0 else {"offset": part.offset, "size": part.length}
        try:
            content = self._pt.read(path, **place)
        except RefusedFileError as refused:
            if not refused.transient:
                raise DecodeError(str(refused)) from None
            raise SourceError(str(refused)) from OSError(errno.ETIMEDOUT, str(refused))
        self.left_out.update(content.left_out)
        return decode("safetensors", content.payload)

    @staticmethod
    def _check(status: os.stat_result, part: FilePart, path: Path) -> None:
        if (status.st_size, status.st_mtime_ns) != (part.size, part.mtime_ns):
            raise ChangedError(
                f"{path} changed since it was listed", hint="Run again once nothing writes to the folder"
            )


def _of_member(ending: str, data: bytes) -> Arrays:
    """Return the arrays of a member of a tar file; one array is named by what precedes its suffix."""
    name, _, suffix = ending.rpartition(".")
    if suffix in ("txt", "caption"):
        return {}
    arrays = decode(suffix, data)
    if list(arrays) == ["data"]:
        return {name or "data": arrays["data"]}
    return {f"{name}.{own}" if name else own: array for own, array in arrays.items()}


class _FirstFiles(FolderLook):
    """The first files of a folder, and the arrays in them."""

    def __init__(self, root: Path, reader: FileReader, skipped: Path | None) -> None:
        self._reader = reader
        self._folder = root if root.is_dir() else root.parent
        faults: list[tuple[str, str]] = []
        entries = walk(self._folder, skipped, faults)
        found: list[tuple[str, os.stat_result]] = []
        for name, entry in entries:
            if root.is_dir() or name == root.name:
                try:
                    found.append((name, entry.stat()))
                except OSError:
                    continue
            if len(found) >= LISTED:
                break
        self._entries = dict(sorted(found))
        self.names = list(self._entries)
        self.unreadable = "" if found or not faults else ": ".join(faults[0])

    def arrays(self, pattern: str) -> tuple[str, Mapping[str, tuple[int, ...]]] | None:
        """Return name and shapes of the arrays of a file of such a name, one like most of the first."""
        named = [name for name in self.names if re.fullmatch(pattern, name, re.DOTALL)]
        found: dict[frozenset[str], list[tuple[str, Mapping[str, tuple[int, ...]]]]] = {}
        for name in named[:PEEKED]:
            status = self._entries[name]
            try:
                shapes = stated_shapes(self._folder / name)
                if shapes is None:
                    part = FilePart("", name, status.st_size, status.st_mtime_ns)
                    arrays = self._reader.arrays(part, "file")
                    shapes = {own: array.values.shape for own, array in arrays.items()}
            except (SourceError, OSError) as error:
                path = self._folder / name
                fact = error.fact if isinstance(error, SourceError) else str(error.strerror)
                why = fact.removeprefix(f"{path}: ").removeprefix(f"{path} ")
                self.unreadable = self.unreadable or f"{name}: {why}"
                continue
            alike = frozenset(re.sub(r"\d+", "0", own) for own in shapes)  # sizes may be in names
            found.setdefault(alike, []).append((name, shapes))
        return max(found.values(), key=len)[0] if found else None


def look_into(root: Path, wanted: str, skipped: Path | None) -> tuple[Layout, str]:
    """Return the layout of a folder, and why it is that one; errors as `choose_layout`."""
    reader = FileReader(root if root.is_dir() else root.parent)

    def look() -> tuple[Layout, str]:
        try:
            return choose_layout(wanted, _FirstFiles(root, reader, skipped), str(root))
        finally:
            reader.close()

    return call_within(READ_TIMEOUT_S, look, f"reading the first files of {root}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdoptRules:
    """What counts as damage, and which fields vary."""

    nan: Values = "reject"
    zeros: Values = "reject"
    ragged: Mapping[str, tuple[int, ...]] = dataclass_field(default_factory=dict[str, tuple[int, ...]])
    """By field the axes that vary, in addition to those that the first samples show."""


class AdoptSource:
    """Features in the files of a folder, as samples of one schema.

    Args:
        root: The folder, or one file.
        layout: How the folder is laid out.
        listing: Its samples.
        rules: What counts as damage.

    Raises:
        SourceError: None of the first samples can be read, or their fields differ in dtype or number of axes.
        ConfigError: A rule names a field or an axis that is not there.
    """

    def __init__(self, root: Path, layout: Layout, listing: Listing, rules: AdoptRules) -> None:
        self.folder = root if root.is_dir() else root.parent
        self._layout, self._rules = layout, rules
        self.listing = listing
        self._count = len(listing)
        self._classes = listing.classes
        self._limit_bytes = listing.largest(PT)
        self._kinds = {role.name: role.kind for role in layout.roles}
        self._parts: tuple[Part, ...] | None = None
        self._sampled = False
        self._reader: tuple[int, FileReader] | None = None
        self._schema: Schema = {}
        self._schema = self._probe()
        self.left_out = dict(self._files().left_out)
        """Entries of the first files that no field can hold."""

    def __repr__(self) -> str:
        """Return folder, layout and number of samples."""
        return f"AdoptSource({str(self.folder)!r}, {self._layout.name!r}, {self._count:,} samples)"

    def __len__(self) -> int:
        return self._count

    def __getstate__(self) -> dict[str, Any]:
        """Open files stay, and parts: workers need neither."""
        return {**self.__dict__, "_reader": None, "_parts": None}

    def schema(self) -> Schema:
        """Return the fields of every sample, from the first ones."""
        return dict(self._schema)

    def read(self, index: int, start: int | None = None, stop: int | None = None) -> Sample:
        """Read one sample.

        Raises:
            DecodeError: A file of it is damaged, lacks its partner or differs from others; names the file.
            SourceError: The storage failed.
            IndexError: There is no such sample.
        """
        check_index(index, self._count)
        listed = self.listing.sample(index)
        fields, files = self._fields(listed)
        self._compare(listed, fields, files)
        arrays = {name: fields[name].values for name in without_sizes(self._schema)}
        sample = fold(arrays, self._schema)
        if start is not None or stop is not None:
            steps = slice(start, stop)
            sample = {n: a[steps] if self._schema[n].time else a for n, a in sample.items()}
        return sample

    def locate(self, index: int) -> str:
        """Return the first file of a sample, or what is missing."""
        listed = self.listing.sample(index)
        files = [part.file for part in listed.parts] or [file for file, _ in listed.faults]
        return str(self.folder / files[0]) if files else f"key {listed.key!r}"

    def faults(self, index: int, error: str) -> list[tuple[str, str]]:
        """Return the files for which a sample was set aside, and why.

        Args:
            index: Sample index, from 0.
            error: What its reading said.
        """
        listed = self.listing.sample(index)
        if listed.faults:
            return list(listed.faults)
        # The file at fault is the last that is named: the place of the sample may have been put before it.
        begins = {part.file: f"{self.folder / part.file}: " for part in listed.parts}
        places = {file: error.rfind(begin) for file, begin in begins.items()}
        file = max(places, key=lambda file: places[file], default=listed.key)
        if places.get(file, -1) < 0:
            return [(file, error)]
        return [(file, error[places[file] + len(begins[file]) :])]

    def keys(self) -> Sequence[str]:
        """Return the key of each sample: its relative name without what the layout adds."""
        return self.listing.keys()

    def runs(self) -> Sequence[range]:
        """Return neighbors, never of two blocks."""
        blocks = ((block.first, block.first + block.count) for block in self.listing.blocks())
        return [range(low, min(low + RUN, stop)) for first, stop in blocks for low in range(first, stop, RUN)]

    def identity(self) -> SourceIdentity:
        """Return the content of all files, a part for each block of samples.

        Raises:
            SourceError: `set_parts` was not called before.
        """
        from stoker.run.caches import ADOPTED  # which imports torch: workers do without

        if self._parts is None:
            raise SourceError(f"{self!r} was not digested", hint="Call digest_blocks first")
        settings: dict[str, Json] = {
            "layout": self._layout.name,
            "classes": cast("Json", self._classes),
            "ragged": {name: [*axes] for name, axes in sorted(self._rules.ragged.items())},
            "nan": self._rules.nan,
            "zeros": self._rules.zeros,
        }
        return SourceIdentity(
            kind=f"{ADOPTED}{VERSION}", parts=self._parts, settings=settings, sampled=self._sampled
        )

    def set_parts(self, parts: tuple[Part, ...], *, sampled: bool) -> None:
        """Take the digests of all blocks, which `identity` states.

        Args:
            parts: A part for each block.
            sampled: True if a file was digested by a sample of its bytes.
        """
        self._parts, self._sampled = parts, sampled

    def close(self) -> None:
        """Close files, and end the process that reads `.pt`."""
        if self._reader is not None and self._reader[0] == os.getpid():
            self._reader[1].close()
        self._reader = None
        self.listing.close()

    def _files(self) -> FileReader:
        if self._reader is None or self._reader[0] != os.getpid():
            self._reader = (os.getpid(), FileReader(self.folder, self._limit_bytes or MAX_FILE_BYTES))
        return self._reader[1]

    def _fields(self, listed: ListedSample) -> tuple[Arrays, dict[str, str]]:
        """Return the fields of a sample as its files hold them, and the file of each field."""
        if listed.faults:
            file, why = listed.faults[0]
            raise DecodeError(f"{self.folder / file}: {why}")
        fields: Arrays = {}
        files: dict[str, str] = {}
        for part in listed.parts:
            kind = self._kinds.get(part.role, "tar" if part.offset >= 0 else "file")
            place = f"{self.folder / part.file}: " + (f"row {part.row} " if part.row >= 0 else "")
            place += f"{part.member} " if part.member else ""
            try:
                held = self._files().arrays(part, kind)
                with decode_errors(f"its arrays are not those of the layout {self._layout.name}"):
                    arrays = self._layout.fields(part.role, held)
                if reserved := [name for name in arrays if is_reserved_name(name)]:
                    named = f"named {reserved[0]!r}, which is reserved" if reserved[0] else "without a name"
                    raise DecodeError(f"holds an array {named}")
                if twice := sorted(fields.keys() & arrays.keys()):
                    raise DecodeError(f"field {twice[0]!r} is in {files[twice[0]]} as well")
            except ChangedError:
                raise
            except DecodeError as error:
                raise DecodeError(f"{place}{error.fact}") from None
            except SourceError as error:
                raise SourceError(f"{place}{error.fact}") from error.__cause__
            fields |= arrays
            files |= dict.fromkeys(arrays, part.file)
        first = listed.parts[0].file if listed.parts else listed.key
        for name, value in listed.values.items():
            if not -(2**63) <= int(value) < 2**63:
                raise DecodeError(f"{self.folder / first}: {name} {value} is beyond the range of int64")
            fields[name] = Array(np.asarray(value, np.int64), "int64")
            files[name] = first
        return fields, files

    def _compare(self, listed: ListedSample, fields: Arrays, files: Mapping[str, str]) -> None:
        """Refuse a sample that is unlike the others, or has values of no use.

        Raises:
            DecodeError: Names the file.
        """
        schema, first = without_sizes(self._schema), listed.parts[0].file if listed.parts else listed.key
        if fields.keys() != schema.keys():
            lacking, more = sorted(schema.keys() - fields.keys()), sorted(fields.keys() - schema.keys())
            said = f"lacks {', '.join(lacking)}" if lacking else f"has also {', '.join(more)}"
            file = first if lacking else files[more[0]]
            raise DecodeError(f"{self.folder / file}: unlike most samples, this one {said}")
        for name, spec in schema.items():
            array = fields[name]
            place = f"{self.folder / files[name]}: field {name!r}"
            if array.dtype != spec.dtype or not fits_field(array.values.shape, spec):
                raise DecodeError(
                    f"{place} is {array.dtype} {array.values.shape}, most are {spec.dtype} {shape_text(spec)}"
                    + _ragged_cure(name, array, spec)
                )
            if spec.dtype not in FLOATS or not array.values.size:
                continue
            if self._rules.nan == "reject" and not all_finite(array.values, spec.dtype):
                raise DecodeError(f"{place} holds NaN or infinity")
            if self._rules.zeros == "reject" and (why := self._zeros(name, array)):
                raise DecodeError(f"{place} {why}")

    def _zeros(self, name: str, array: Array) -> str:
        """Say what of a field is zeros that a job left which was killed; empty where nothing is."""
        values = array.values
        if name in MAY_BE_ZERO or values.size < 2:
            return ""
        bits = values & 0x7FFF if array.dtype == "bfloat16" else values
        if not bits.any():
            return "is all zeros"
        if name in self._layout.dense:
            empty = np.flatnonzero(~bits.reshape(len(bits), -1).any(axis=1))
            if len(empty):
                return f"is all zeros in {len(empty)} of {len(bits)} rows, the first is {empty[0]}"
        return ""

    def _probe(self) -> Schema:
        """Return the fields of most of some samples."""
        clock = ItemClock()

        def look() -> Schema:
            seen: list[tuple[ListedSample, Arrays]] = []
            failed = ""
            spread = sorted({self._count * at // PROBED for at in range(PROBED)})
            for at, number in enumerate([*spread, *range(min(self._count, MORE_PROBED))]):
                if at >= len(spread) and seen:
                    break
                clock.begin(at)
                listed = self.listing.sample(number)
                try:
                    seen.append((listed, self._fields(listed)[0]))
                except ChangedError:
                    raise
                except SourceError as error:
                    failed = failed or error.fact
            if not seen:
                raise SourceError(
                    f"{self.folder}: none of the first samples can be read. {failed}",
                    hint="Check the folder, or name another layout",
                )
            return self._schema_of(seen)

        return call_within(READ_TIMEOUT_S, look, f"reading the first samples of {self.folder}", clock=clock)

    def _schema_of(self, seen: Sequence[tuple[ListedSample, Arrays]]) -> Schema:
        names, _ = Counter(frozenset(fields) for _, fields in seen).most_common(1)[0]
        alike = [(listed, fields) for listed, fields in seen if fields.keys() == names]
        order = list(alike[0][1])
        schema = self._with_time({name: self._field_of(name, alike) for name in order})
        if not schema:
            raise SourceError(f"{self.folder}: its files hold no arrays", hint="Name another layout")
        if unknown := sorted(self._rules.ragged.keys() - schema.keys()):
            raise ConfigError(
                f"ragged names {', '.join(unknown)}; the fields are {', '.join(schema)}",
                hint="Name a field, or a field and its axes: {'latent': (1, 2)}, or --ragged latent:1:2",
            )
        sizes = {name + SHAPE_SUFFIX: size_field(field) for name, field in schema.items() if field.folded}
        if twice := sorted(sizes.keys() & schema.keys()):
            raise SourceError(
                f"{self.folder}: sizes of a field are stored as {twice[0]!r}, which the files hold as well",
                hint="Rename it in the files",
            )
        return schema | sizes

    def _with_time(self, schema: Schema) -> Schema:
        """Return the fields; axis 0 is time where it is as long as that of the layout's steps."""
        steps = schema.get(self._layout.steps)
        if steps is None or not steps.time:
            return schema
        return {
            name: replace(spec, time=True) if spec.shape[:1] == steps.shape[:1] else spec
            for name, spec in schema.items()
        }

    def _field_of(self, name: str, alike: Sequence[tuple[ListedSample, Arrays]]) -> Field:
        """Return what most samples have under a name, with the axes along which they differ.

        Raises:
            SourceError: More than a few differ in dtype or number of axes.
            ConfigError: A rule names an axis that is not there.
        """
        found = [(fields[name].values.shape, fields[name].dtype) for _, fields in alike]
        (shape, dtype), often = Counter(found).most_common(1)[0]
        shapes = [other for other, own in found if own == dtype and len(other) == len(shape)]
        if len(found) - len(shapes) > ODD * len(found):
            self._refuse(name, alike)
        declared = self._rules.ragged.get(name, (0,) if name in self._layout.ragged and shape else ())
        if declared and max(declared) >= len(shape):
            raise ConfigError(
                f"field {name!r} has {len(shape)} axes", hint=f"{max(declared)} in ragged is not one of them"
            )
        varying = {*declared}
        sized = name in self._layout.sized
        if sized or len(found) - often > ODD * len(found):
            rare = 1 if sized else max(1, RARE * len(shapes))
            varying |= {at for at, own in enumerate(zip(*shapes, strict=True)) if _odd(own) > rare}
        return varying_field(shape, dtype, varying, time=name in self._layout.time and not varying)

    def _refuse(self, name: str, alike: Sequence[tuple[ListedSample, Arrays]]) -> None:
        first: dict[str, str] = {}
        for listed, fields in alike:
            array = fields[name]
            first.setdefault(f"{array.dtype} {array.values.shape}", listed.parts[0].file)
        said = ", ".join(f"{shape} in {file}" for shape, file in list(first.items())[:4])
        suffix = PurePosixPath(alike[0][0].parts[0].file).suffix
        raise SourceError(
            f"{self.folder}: field {name!r} differs in dtype or number of axes: {said}",
            hint="Adopt the files of each kind into a cache of its own, with a pattern of their names, as "
            f"{arg('layout', '{key}_512' + suffix, setting='--layout')}",
        )


def _odd(sizes: Sequence[int]) -> int:
    """Return how many differ from the most frequent one."""
    return len(sizes) - Counter(sizes).most_common(1)[0][1]


def _ragged_cure(name: str, array: Array, spec: Field) -> str:
    axes = differing_axes(array.values.shape, array.dtype, spec)
    return f" (ragged {':'.join([name, *map(str, axes)])}, if sizes may vary)" if axes else ""
