"""Samples from tar files in the WebDataset layout: members of one name and several extensions are a sample.

Members are listed once and then read by position, in any order. What a tar file says is not trusted: names
that leave the archive, links, devices and members that come twice are refused, and nothing is unpacked.
"""

from __future__ import annotations

import io
import logging
import os
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from stoker.errors import SourceError, arg
from stoker.runtime.jsonio import parse_json
from stoker.schema import Field, Json, Sample, Schema
from stoker.sources.arguments import parse_names
from stoker.sources.files import OpenFiles, Paths, find_keyed_files, open_regular
from stoker.sources.protocol import FileRef, Part, PartedSource, SourceIdentity, read_as, read_dtype
from stoker.sources.torch_items import flatten_item
from stoker.units import format_count

VERSION = 1
"""Bumped by hand when the same files would give other samples."""
MEMBERS = "data.tar.members"
"""The setting that `fields` is on the command line."""
BYTES = (
    "jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm", "pgm",
    "wav", "flac", "mp3", "mp4", "bin",
)  # fmt: skip
"""Extensions whose members are kept as they are: uint8, of varying length."""
NUMBERS = ("cls", "cls2", "id", "index", "inx")
"""Extensions of one whole number as text."""
PROBED = 8
"""Samples looked at to learn shapes, spread over all."""
OPEN_FILES = 16
_log = logging.getLogger("stoker")
RUN = 64


@dataclass(frozen=True, slots=True)
class TarMember:
    """Offset and size of one member."""

    offset: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Archive:
    """One tar file, listed."""

    name: str
    path: Path
    keys: tuple[str, ...]
    """Names without extension, in the order of the file."""
    members: tuple[dict[str, TarMember], ...]
    """By extension, for each key."""
    size: int

    @property
    def count(self) -> int:
        """Samples in it."""
        return len(self.keys)


class TarSource(PartedSource[Archive]):
    """Samples in tar files, `0001.jpg`, `0001.cls`, `0001.npy` and so on.

    Args:
        path: A tar file, a folder, a pattern, or a list of these; compressed ones cannot be read at random.
        fields: Extensions to read; None: all of the first sample.

    `npy` gives an array, `cls` a whole number, `json` its numbers as `json.<name>`; images and other binary
    members their bytes, uint8 of varying length.

    Raises:
        SourceError: On first use: a file is damaged, cut short or compressed, or not to be trusted.

    Examples:
        >>> import io, tarfile, numpy, stoker
        >>> def add(archive, name, data):
        ...     member = tarfile.TarInfo(name)
        ...     member.size = len(data)
        ...     archive.addfile(member, io.BytesIO(data))
        >>> with tarfile.open("train-0.tar", "w") as archive:
        ...     for number in range(3):
        ...         numpy.save(array := io.BytesIO(), numpy.zeros(8, "float32"))
        ...         add(archive, f"{number:04d}.npy", array.getvalue())
        ...         add(archive, f"{number:04d}.cls", str(number).encode())
        >>> source = stoker.TarSource("train-0.tar")
        >>> len(source), source.read(2)["npy"].shape, source.read(2)["cls"].item()
        (3, (8,), 2)
    """

    def __init__(self, path: Paths, *, fields: Sequence[str] | None = None) -> None:
        root, paths, keys = find_keyed_files(path, suffixes=(".tar",), what="tar")
        self._paths = [(file.relative_to(root).as_posix(), file) for file in paths]
        self._keyed = dict(zip(paths, keys, strict=True))
        named = None if fields is None else parse_names("fields", fields, "an extension, as 'npy'")
        self._fields = None if named is None else tuple(name.lower().lstrip(".") for name in named)
        self._archives: tuple[Archive, ...] | None = None
        self._schema: Schema | None = None
        self._narrowed = set[str]()
        self._files = _open_archives()

    def __repr__(self) -> str:
        """Return the first file, and how many there are."""
        return f"TarSource({str(self._paths[0][1])!r}, {format_count(len(self._paths), 'file')})"

    def __getstate__(self) -> dict[str, Any]:
        """The list of members travels; open files stay."""
        return {name: value for name, value in self.__dict__.items() if name != "_files"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._files = _open_archives()

    def __del__(self) -> None:
        # At the end of the program, parts of the interpreter may be gone, `suppress` among them.
        try:  # noqa: SIM105
            self._files.close()
        except Exception:  # noqa: BLE001, S110
            pass

    def close(self) -> None:
        """Close files; the next read opens them again."""
        self._files.close()

    def schema(self) -> Schema:
        """Return the fields of every sample, from a few of them."""
        if self._schema is None:
            self._schema = self._probe()
        return dict(self._schema)

    def read(self, index: int, start: int | None = None, stop: int | None = None) -> Sample:
        """Read one sample; no field has time.

        Raises:
            SourceError: A member is missing or damaged; names file and member.
            IndexError: There is no such sample.
        """
        found = {name: array for name, (array, _) in self._decoded(index).items()}
        return {name: found[name] for name in self.schema() if name in found}

    def locate(self, index: int) -> str:
        """Return the tar file, and the name that members of the sample share."""
        archive, row = self._find(index)
        return f"{archive.path}: key {archive.keys[row]!r}"

    def _edges(self, part: Archive) -> Sequence[int]:
        """Neighbors in a file are read together."""
        return [*range(0, part.count, RUN), part.count]

    def keys(self) -> Sequence[str]:
        """Return file and name without extension."""
        return [f"{self._keyed[archive.path]}:{key}" for archive in self._parts() for key in archive.keys]

    def identity(self) -> SourceIdentity:
        """Return the files, and which extensions are read."""
        parts = tuple(
            Part(name=a.name, count=a.count, files=(FileRef(name=a.name, path=a.path),))
            for a in self._parts()
        )
        settings: dict[str, Json] = {"fields": [*self._wanted()]}
        return SourceIdentity(kind=f"tar/{VERSION}", parts=parts, settings=settings)

    def _parts(self) -> tuple[Archive, ...]:
        if self._archives is None:
            self._archives = tuple(list_members(name, path) for name, path in self._paths)
        return self._archives

    def _wanted(self) -> tuple[str, ...]:
        if self._fields is not None:
            return self._fields
        first = self._parts()[0]
        names = tuple(sorted(first.members[0]))
        known = {*BYTES, *NUMBERS, "npy", "json"}
        if unknown := [name for name in names if name not in known]:
            readable = [name for name in names if name in known] or unknown
            members = arg("fields", readable, call="TarSource", setting=MEMBERS)
            raise SourceError(
                f"{first.path}: members .{', .'.join(unknown)} of {first.keys[0]!r} have no known kind",
                hint=f"Say which to read, as {members}; those of no known kind are read as bytes",
            )
        return names

    def _decoded(self, index: int) -> dict[str, tuple[NDArray[Any], str]]:
        archive, row = self._find(index)
        place = self.locate(index)
        found: dict[str, tuple[NDArray[Any], str]] = {}
        for name in self._wanted():
            where = f"{place}: member .{name}"
            member = archive.members[row].get(name)
            if member is None:
                held = [*archive.members[row]]
                members = arg("fields", held, setting=MEMBERS)
                raise SourceError(f"{where} is not there", hint=f"Add it, or read what is there: {members}")
            found.update(_decode(name, self._bytes(archive, member, where), where, self._narrowed))
        return found

    def _bytes(self, archive: Archive, member: TarMember, where: str) -> bytes:
        try:
            fd = self._files.get(archive.path).fileno()
            if os.fstat(fd).st_size != archive.size:
                raise SourceError(
                    f"{archive.path} has another size than when it was listed", hint="Start again"
                )
            data = os.pread(fd, member.size, member.offset)
        except OSError as error:
            raise SourceError(f"{where} cannot be read: {error.strerror}") from error
        if len(data) != member.size:
            raise SourceError(f"{where} has {member.size} bytes and {len(data)} are there: cut short")
        return data

    def _probe(self) -> Schema:
        count = len(self)
        probed = sorted({count * k // PROBED for k in range(PROBED)})
        seen: dict[str, tuple[str, set[tuple[int, ...]]]] = {}
        first: dict[str, tuple[int, str, tuple[int, ...]]] = {}
        failed: SourceError | None = None
        for index in probed:
            try:
                decoded = self._decoded(index)
            except SourceError as error:  # one bad sample is quarantined when it is its turn
                failed = error
                continue
            for name, (array, dtype) in decoded.items():
                known = first.setdefault(name, (index, dtype, array.shape))
                if (dtype, len(array.shape), array.shape[1:]) != (known[1], len(known[2]), known[2][1:]):
                    raise self._unlike(name, known, (index, dtype, array.shape))
                seen.setdefault(name, (dtype, set()))[1].add(array.shape)
        if not seen:
            raise failed or SourceError(f"{self!r} holds no sample")
        if self._narrowed:
            _log.warning("%r: float64 is read as float32: %s", self, ", ".join(sorted(self._narrowed)))
        schema: Schema = {}
        for name, (dtype, shapes) in seen.items():
            shape = max(shapes)
            binary = name in self._wanted() and name not in (*NUMBERS, "npy", "json")
            ragged = binary or (len(shapes) > 1 and bool(shape))
            schema[name] = Field(shape=(-1, *shape[1:]) if ragged else shape, dtype=dtype, ragged=ragged)
        return schema

    def _unlike(self, name: str, *found: tuple[int, str, tuple[int, ...]]) -> SourceError:
        said: list[str] = []
        for index, dtype, shape in found:
            archive, row = self._find(index)
            said.append(f"{dtype} {shape} in {archive.keys[row]!r} of {archive.path} (sample {index})")
        return SourceError(
            f"field {name!r} is {' and '.join(said)}",
            hint=f"Only axis 0 may vary: write the members alike, or leave .{name.partition('.')[0]} out "
            f"with {arg('fields', setting=MEMBERS)}",
        )


def _open_archives() -> OpenFiles[Path, io.FileIO]:
    return OpenFiles(open_regular, _close, OPEN_FILES)


def _close(file: io.FileIO) -> None:
    try:  # noqa: SIM105 - also at the end of the program, when `suppress` may be gone
        file.close()
    except OSError:  # closed by others
        pass


def list_members(name: str, path: Path) -> Archive:
    """Return where the members of a tar file are, by key and extension.

    Raises:
        SourceError: Damaged, cut short, compressed, or with members that are not to be trusted.
    """
    found: dict[str, dict[str, TarMember]] = {}
    size = path.stat().st_size
    try:
        with open_regular(path) as file, tarfile.open(fileobj=io.BufferedReader(file), mode="r:") as archive:
            for info in archive:
                _check_member(info, path, size)
                if info.isfile() and not PurePosixPath(info.name).name.startswith("__"):
                    key, ending = _key_of(info.name, path)
                    if ending in found.setdefault(key, {}):
                        raise SourceError(
                            f"{path} holds {info.name!r} twice", hint="Write it again with one of them"
                        )
                    found[key][ending] = TarMember(info.offset_data, info.size)
            _check_end(file, path, archive.offset, size)
    except (tarfile.TarError, OSError, EOFError, ValueError) as error:
        if isinstance(error, SourceError):
            raise
        raise SourceError(
            f"{path} is not a readable tar file, {size:,} bytes ({error})",
            hint="Copy it again; a compressed one has to be unpacked to .tar first, since its members "
            "cannot be read one by one",
        ) from error
    if not found:
        raise SourceError(f"{path} holds no members", hint="Leave it out")
    return Archive(name=name, path=path, keys=tuple(found), members=tuple(found.values()), size=size)


def _check_member(info: tarfile.TarInfo, path: Path, size: int) -> None:
    plain = PurePosixPath(info.name)
    why = (
        "its name is absolute" if plain.is_absolute()
        else "its name leads out of the archive" if ".." in plain.parts or "\\" in info.name
        else "its name has control characters" if not info.name.isprintable()
        else "it is a link" if info.issym() or info.islnk()
        else "it is a device or pipe" if info.ischr() or info.isblk() or info.isfifo()
        else "it is sparse" if info.issparse()
        else ""
    )  # fmt: skip
    if why:
        raise SourceError(
            f"{path}: member {info.name!r} is refused, {why}", hint="Write the archive with plain files only"
        )
    if info.isfile() and info.offset_data + info.size > size:
        raise SourceError(
            f"{path} ends at byte {size:,} within {info.name!r}, which goes to "
            f"{info.offset_data + info.size:,}: cut short",
            hint="Copy it again",
        )


def _check_end(file: io.FileIO, path: Path, end: int, size: int) -> None:
    """Refuse a file without the mark of its end: listing stops at the first block that is not a header."""
    mark = os.pread(file.fileno(), tarfile.BLOCKSIZE, end)
    if mark != bytes(tarfile.BLOCKSIZE):
        raise SourceError(
            f"{path} has no mark of its end at byte {end:,} of {size:,}: cut short or damaged there",
            hint="Copy it again",
        )


def _key_of(name: str, path: Path) -> tuple[str, str]:
    plain = PurePosixPath(name)
    stem, dot, ending = plain.name.partition(".")
    if not dot or not stem or not ending:
        raise SourceError(
            f"{path}: member {name!r} has no name with an extension, so it belongs to no sample",
            hint="Write members as <name>.<extension>",
        )
    return (plain.parent / stem).as_posix(), ending.lower()


def _decode(name: str, data: bytes, where: str, narrowed: set[str]) -> dict[str, tuple[NDArray[Any], str]]:
    """Return the fields of one member; one whose float64 become float32 is added to `narrowed`."""
    try:
        if name == "npy":
            array = cast("NDArray[Any]", np.load(io.BytesIO(data), allow_pickle=False))
            scalar = array.dtype.kind == "f" and array.dtype.itemsize == 8 and not array.ndim
            dtype = np.dtype(np.float64) if scalar else read_dtype(array.dtype, where=where)
            if array.dtype.kind in "fc" and dtype.itemsize < array.dtype.itemsize:
                narrowed.add(name)
            return {name: (read_as(array, dtype, where=where), dtype.name)}
        if name in NUMBERS:
            return {name: (np.asarray(int(data.decode().strip()), dtype=np.int64), "int64")}
        if name == "json":
            return flatten_item({"json": parse_json(data)}, where=where)
    except (ValueError, EOFError, OSError, OverflowError, RecursionError) as error:
        if isinstance(error, SourceError):
            raise
        raise SourceError(
            f"{where} cannot be decoded ({error})", hint="Write it again, or leave it out"
        ) from error
    return {name: (np.frombuffer(data, dtype=np.uint8).copy(), "uint8")}
