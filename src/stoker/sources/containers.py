"""Files that hold named arrays: HDF5, Zarr folders, `.npy`; found, opened, and read by name.

Each opens lazily, in the process that reads. h5py is always there; zarr is an extra and is imported when the
first Zarr folder is opened.
"""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any, Literal, Protocol, TypeAlias

import h5py  # pyright: ignore[reportMissingTypeStubs]
import numpy as np

from stoker.errors import ConfigError, SourceError
from stoker.sources.files import SUFFIXES, Paths, natural_key
from stoker.sources.hdf5_open import FOREIGN_ERRORS, cause_of, open_file, require_inside
from stoker.sources.protocol import FileRef

Kind: TypeAlias = Literal["hdf5", "zarr", "npy"]
ZARR_MARKS = (".zgroup", ".zarray", "zarr.json")
"""One of these lies in every Zarr folder, of format 2 and 3."""
ZIPPED = ".zarr.zip"
"""Ends the name of a Zarr folder that was put into one file."""
_MAGIC = re.compile(r"[*?\[]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """One file, or one Zarr folder, with named arrays; a zipped folder is one file."""

    name: str
    """Relative to the root of the source, with `/`."""
    path: Path
    kind: Kind

    def files(self) -> tuple[FileRef, ...]:
        """All files whose bytes decide what it holds, in the order of their names."""
        if self.path.is_file():
            return (FileRef(name=self.name, path=self.path),)
        found = sorted(path for path in self.path.rglob("*") if path.is_file())
        return tuple(
            FileRef(name=f"{self.name}/{path.relative_to(self.path).as_posix()}", path=path) for path in found
        )


class Opened(Protocol):
    """An open container. Names are paths with `/`; the root is the empty name."""

    def groups(self) -> Sequence[str]:
        """Groups at the root, in natural order."""
        ...

    def arrays(self, group: str) -> Mapping[str, Any]:
        """Arrays below a group at any depth, by their name in it."""
        ...

    def array(self, name: str) -> Any:
        """One array, with `shape`, `dtype`, `chunks` (None: contiguous) and `[...]`."""
        ...

    def attributes(self, group: str) -> Mapping[str, Any]:
        """Attributes of a group."""
        ...

    def absent(self, name: str, low: int, high: int) -> str | None:
        """The first chunk that is not stored, of rows `low:high` along axis 0; None: all are there."""
        ...

    def close(self) -> None:
        """Close it."""
        ...


def find_containers(path: Paths) -> list[Container]:
    """What is behind `path`: a container, a folder of them, a pattern, or a list of these.

    Raises:
        SourceError: Nothing is there, or one is named twice.
    """
    given = [path] if isinstance(path, str | os.PathLike) else [*path]
    found: list[tuple[Path, Kind]] = []
    for item in given:
        found += _expand(Path(os.path.abspath(Path(item).expanduser())))  # noqa: PTH100 - links stay
    paths = [one for one, _ in found]
    if not paths:
        raise SourceError("the list of files is empty. Give at least one HDF5, Zarr or .npy path")
    if len(set(paths)) < len(paths):
        raise SourceError(f"{next(p for p in paths if paths.count(p) > 1)} is named twice. Give it once")
    root = Path(os.path.commonpath([one.parent for one in paths]))
    return [Container(name=one.relative_to(root).as_posix(), path=one, kind=kind) for one, kind in found]


def _expand(path: Path) -> list[tuple[Path, Kind]]:
    if (kind := kind_of(path)) is not None:
        return [(path, kind)]
    if path.is_dir():
        inside = sorted(path.iterdir(), key=lambda one: natural_key(one.name))
    elif _MAGIC.search(str(path)):
        plain = next(i for i, part in enumerate(path.parts) if _MAGIC.search(part))
        root = Path(*path.parts[:plain])
        inside = sorted(root.glob("/".join(path.parts[plain:])), key=lambda one: natural_key(str(one)))
    else:
        what = "is no HDF5 file, Zarr folder or .npy file" if path.exists() else "does not exist"
        raise SourceError(f"{path} {what}. Check the path, or give a folder or pattern")
    found: list[tuple[Path, Kind]] = []
    for one in inside:
        if (own := kind_of(one)) is not None:
            found.append((one, own))
    if not found:
        raise SourceError(f"{path}: no HDF5 file, Zarr folder or .npy file is there. Check the path")
    return found


def kind_of(path: Path) -> Kind | None:
    """What a path holds, by its suffix, or a Zarr folder by what lies in it; None: nothing known."""
    if path.is_dir():
        return "zarr" if any((path / mark).is_file() for mark in ZARR_MARKS) else None
    if not path.is_file():
        return None
    if path.name.lower().endswith(ZIPPED):
        return "zarr"
    suffix = path.suffix.lower()
    return "hdf5" if suffix in SUFFIXES else "npy" if suffix == ".npy" else None


def open_container(container: Container) -> Opened:
    """Open it for reading.

    Raises:
        SourceError: It is missing, damaged, or nothing that its name says.
        ConfigError: It is Zarr, and zarr is not installed.
    """
    if container.kind == "hdf5":
        return _HDF5(container.path)
    return _Zarr(container.path) if container.kind == "zarr" else _Npy(container.path)


class _HDF5:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = open_file(path)

    def groups(self) -> Sequence[str]:
        names = [name for name in self._file if self._file.get(name, getclass=True) is h5py.Group]
        return sorted(names, key=natural_key)

    def arrays(self, group: str) -> Mapping[str, Any]:
        found: dict[str, Any] = {}

        def note(name: str, item: Any) -> None:
            if isinstance(item, h5py.Dataset):
                found[name] = item

        try:
            (self._file[group] if group else self._file).visititems(note)
        except FOREIGN_ERRORS as error:
            raise SourceError(f"{self._path}: group {group!r} cannot be read ({error})") from cause_of(error)
        return found

    def array(self, name: str) -> Any:
        try:
            require_inside(self._file, name, where=str(self._path))
            return self._file[name]
        except FOREIGN_ERRORS as error:
            if isinstance(error, SourceError):
                raise
            raise SourceError(f"{self._path}: dataset {name!r} cannot be opened ({error})") from cause_of(
                error
            )

    def attributes(self, group: str) -> Mapping[str, Any]:
        return dict((self._file[group] if group else self._file).attrs)

    def absent(self, name: str, low: int, high: int) -> str | None:
        return None  # HDF5 knows its chunks itself

    def close(self) -> None:
        self._file.close()


class _Zarr:
    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._zarr: Any = import_module("zarr")
        except ImportError as error:
            raise ConfigError(
                f"{path} is a Zarr folder, and zarr is not installed. Run pip install 'stoker[zarr]'"
            ) from error
        self._names = zipped_names(path) if path.is_file() else None
        self._store: Any = None
        try:
            if self._names is not None:
                self._store = self._zarr.storage.ZipStore(path, mode="r")
            self._root: Any = self._zarr.open(self._store or str(path), mode="r")
        except FOREIGN_ERRORS as error:
            raise SourceError(f"{path} is no readable Zarr folder ({_said(error)})") from error

    def _group(self, name: str) -> Any:
        return self._root[name] if name else self._root

    def _members(self, name: str) -> Iterator[tuple[str, Any]]:
        group = self._group(name)
        if isinstance(group, self._zarr.Array):
            yield Path(self._path.name.removesuffix(".zip")).stem, group
            return
        try:
            yield from group.members()
        except FOREIGN_ERRORS as error:
            raise SourceError(f"{self._path}: group {name!r} cannot be read ({_said(error)})") from error

    def groups(self) -> Sequence[str]:
        names = [name for name, item in self._members("") if not isinstance(item, self._zarr.Array)]
        return sorted(names, key=natural_key)

    def arrays(self, group: str) -> Mapping[str, Any]:
        found: dict[str, Any] = {}
        for name, item in self._members(group):
            if isinstance(item, self._zarr.Array):
                found[name] = item
            else:
                inner = self.arrays(f"{group}/{name}" if group else name)
                found.update({f"{name}/{key}": value for key, value in inner.items()})
        return dict(sorted(found.items(), key=lambda item: natural_key(item[0])))

    def array(self, name: str) -> Any:
        if isinstance(self._root, self._zarr.Array):
            return self._root
        try:
            return self._root[name]
        except FOREIGN_ERRORS as error:
            raise SourceError(f"{self._path}: array {name!r} cannot be opened ({_said(error)})") from error

    def attributes(self, group: str) -> Mapping[str, Any]:
        return dict(self._group(group).attrs)

    def absent(self, name: str, low: int, high: int) -> str | None:
        """By the files of the chunks: zarr itself reads one that is not there as the fill value."""
        array = self.array(name)
        sizes: Sequence[int] = getattr(array, "shards", None) or array.chunks
        counts = [-(-length // size) for length, size in zip(array.shape, sizes, strict=True)]
        ranges = [range(low // sizes[0], -(-high // sizes[0])), *(range(count) for count in counts[1:])]
        for place in np.ndindex(*(len(one) for one in ranges)):
            key = array.metadata.encode_chunk_key(tuple(r[i] for r, i in zip(ranges, place, strict=True)))
            name = PurePosixPath(array.path, key).as_posix()
            there = name in self._names if self._names is not None else (self._path / name).is_file()
            if not there:
                return name
        return None

    def close(self) -> None:
        if self._store is not None:
            self._store.close()


def zipped_names(path: Path) -> frozenset[str]:
    """What lies in a zipped Zarr folder.

    Raises:
        SourceError: It is damaged, holds a name twice, or no Zarr folder at its root.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        size = path.stat().st_size if path.exists() else 0
        raise SourceError(
            f"{path} is no readable zip file, {size:,} bytes ({error}). Copy it again"
        ) from error
    found = frozenset(names)
    if len(found) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise SourceError(f"{path} holds {twice!r} twice. Write it again from the folder")
    if not found & {*ZARR_MARKS}:
        raise SourceError(
            f"{path} has no {', '.join(ZARR_MARKS)} at its root. Zip what is in the folder, not the folder: "
            f"cd {path.name.removesuffix('.zip')} && zip -0 -r ../{path.name} ."
        )
    return found


class _Npy:
    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._array: Any = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, OSError, EOFError) as error:
            raise SourceError(f"{path} is no readable .npy file ({error}). Write it again") from error

    def groups(self) -> Sequence[str]:
        return []

    def arrays(self, group: str) -> Mapping[str, Any]:
        return {"data": self._array}

    def array(self, name: str) -> Any:
        return self._array

    def attributes(self, group: str) -> Mapping[str, Any]:
        return {}

    def absent(self, name: str, low: int, high: int) -> str | None:
        return None

    def close(self) -> None:
        """The map goes with the array."""


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
