"""Files that hold named arrays: HDF5, Zarr folders, `.npy`; found, opened, and read by name.

Each opens lazily, in the process that reads. h5py is always there; zarr is an extra and is imported when the
first Zarr folder is opened.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any, Literal, Protocol, TypeAlias

import h5py  # pyright: ignore[reportMissingTypeStubs]
import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError, SourceError
from stoker.sources.files import (
    SUFFIXES,
    Paths,
    entries_of_pattern,
    is_pattern,
    leave_out,
    list_folder,
    natural_key,
    source_errors,
    usable_files,
    why_unreadable,
)
from stoker.sources.hdf5_open import open_checked, readable_dataset, unwritten_rows
from stoker.sources.protocol import FileRef

Kind: TypeAlias = Literal["hdf5", "zarr", "npy"]
ZARR_MARKS = (".zgroup", ".zarray", "zarr.json")
"""One of these is in every Zarr folder, of format 2 and 3."""
ZIPPED = ".zarr.zip"
"""Ends the name of a Zarr folder that was put into one file."""
_COPY = "Copy or write it again"
_HOLES = 1000
"""Arrays of an HDF5 file of which is remembered what was not written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Container:
    """One file, or one Zarr folder, with named arrays; a zipped folder is one file."""

    name: str
    """Relative to the root of the source, with `/`."""
    path: Path
    kind: Kind
    key: str
    """Its name in keys of samples: relative to the folder or pattern that it was found by."""

    def files(self) -> tuple[FileRef, ...]:
        """Return all files whose bytes decide what it holds, in the order of their names."""
        if self.path.is_file():
            return (FileRef(name=self.name, path=self.path),)
        found = sorted(path for path in self.path.rglob("*") if path.is_file())
        return tuple(
            FileRef(name=f"{self.name}/{path.relative_to(self.path).as_posix()}", path=path) for path in found
        )


class ContainerReader(Protocol):
    """An open container. Names are paths with `/`; the root is the empty name."""

    def groups(self) -> Sequence[str]:
        """Groups at the root, in natural order."""
        ...

    def arrays(self, group: str) -> Mapping[str, Any]:
        """Return arrays below a group at any depth, by their name in it."""
        ...

    def array(self, name: str) -> Any:
        """Return one array, with `shape`, `dtype`, `chunks` (None: contiguous) and `[...]`."""
        ...

    def attributes(self, group: str) -> Mapping[str, Any]:
        """Attributes of a group."""
        ...

    def absent(self, name: str, low: int, high: int) -> str | None:
        """Return the first chunk that is not stored, of rows `low:high` along axis 0; None: all are there."""
        ...

    def close(self) -> None:
        """Close it."""
        ...


def find_containers(path: Paths) -> list[Container]:
    """Return the containers that `path` names: a container, a folder of them, a pattern, or a list of these.

    Raises:
        SourceError: Nothing is there, or one is named twice.
    """
    given = [path] if isinstance(path, str | os.PathLike) else [*path]
    found: list[tuple[Path, Kind, str]] = []
    for item in given:
        own, inside = _expand(Path(os.path.abspath(Path(item).expanduser())))  # noqa: PTH100 - links stay
        for one, kind in inside:
            found.append((one, kind, one.relative_to(own).as_posix()))
    paths = [one for one, _, _ in found]
    if not paths:
        raise SourceError("the list of files is empty", hint="Give at least one HDF5, Zarr or .npy path")
    if len(set(paths)) < len(paths):
        raise SourceError(
            f"{next(p for p in paths if paths.count(p) > 1)} is named twice", hint="Give it once"
        )
    root = Path(os.path.commonpath([one.parent for one in paths]))
    return [
        Container(name=one.relative_to(root).as_posix(), path=one, kind=kind, key=key)
        for one, kind, key in found
    ]


def _expand(path: Path) -> tuple[Path, list[tuple[Path, Kind]]]:
    """Return the folder that names in keys are relative to, and the containers."""
    if (kind := kind_of(path)) is not None:
        return path.parent, [(path, kind)]
    if path.is_dir():
        root, inside = path, list_folder(path)
        # What is not data does not belong to the source, but data one level down may have been meant.
        known = [one for one in inside if _is_named(one)]
        others = [one for one in inside if one.is_dir() and not _is_named(one)]
        left = {one: "a folder: give a pattern to read it" for one in others if _has_data(one)}
    elif is_pattern(path):
        root, inside = entries_of_pattern(path)
        known = [one for one in inside if _is_named(one)]
        left = {one: "no data by its name" for one in inside if not _is_named(one)}
    else:
        why = f"is {why_unreadable(path) or 'no HDF5 file, Zarr folder or .npy file'}"
        what = why if os.path.lexists(path) else "does not exist"
        raise SourceError(f"{path} {what}", hint="Check the path, or give a folder or pattern")
    if not known:
        raise SourceError(f"{path}: no HDF5 file, Zarr folder or .npy file is there", hint="Check the path")
    for one in known:
        if one.is_dir() and kind_of(one) is None:
            list_folder(one)  # says it if that is why
            raise SourceError(
                f"{one} has none of {', '.join(ZARR_MARKS)}, so it is not a Zarr folder",
                hint="Copy it again, or remove it",
            )
    leave_out(str(path), left)
    files = [one for one in known if not one.is_dir()]
    kept = set(usable_files(files, str(path))) if files else set[Path]()
    return root, [(one, kind) for one in known if one in kept or one.is_dir() if (kind := kind_of(one))]


def _has_data(folder: Path) -> bool:
    """Return True if a folder holds data; False for one that cannot be listed, such as `lost+found`."""
    try:
        return any(map(kind_of, list_folder(folder)))
    except SourceError:
        return False


def _is_named(path: Path) -> bool:
    """Return True if an entry is data by its name, or is a Zarr folder."""
    if path.is_dir():
        return path.suffix.lower() == ".zarr" or kind_of(path) is not None
    return path.name.lower().endswith((*SUFFIXES, ".npy", ZIPPED))


def kind_of(path: Path) -> Kind | None:
    """Return the kind of a path by its suffix, of a Zarr folder by its entries; None: unknown."""
    if path.is_dir():
        return "zarr" if any(_is_file(path / mark) for mark in ZARR_MARKS) else None
    if not _is_file(path):
        return None
    if path.name.lower().endswith(ZIPPED):
        return "zarr"
    suffix = path.suffix.lower()
    return "hdf5" if suffix in SUFFIXES else "npy" if suffix == ".npy" else None


def _is_file(path: Path) -> bool:
    """As `Path.is_file`, which raises an error where the folder may not be entered."""
    return os.path.isfile(path)  # noqa: PTH113


def open_container(container: Container) -> ContainerReader:
    """Open it for reading.

    Raises:
        SourceError: It is missing, damaged, or nothing that its name says.
        ConfigError: It is Zarr, and zarr is not installed.
    """
    if container.kind == "hdf5":
        return _HDF5Reader(container.path)
    return _ZarrReader(container.path) if container.kind == "zarr" else _NpyReader(container.path)


class _HDF5Reader:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = open_checked(path)
        self._holes: dict[str, NDArray[np.bool_] | None] = {}

    def groups(self) -> Sequence[str]:
        names = [name for name in self._file if self._file.get(name, getclass=True) is h5py.Group]
        return sorted(names, key=natural_key)

    def arrays(self, group: str) -> Mapping[str, Any]:
        with source_errors(f"{self._path}: group {group!r} cannot be read", _COPY):
            found = dict(_datasets_below(self._file[group or "/"]))
        for name, dataset in found.items():  # the shape of a virtual one would be looked up in other files
            if dataset.chunks is None and dataset.is_virtual:
                readable_dataset(self._file, f"{group}/{name}" if group else name, self._path)
        return found

    def array(self, name: str) -> Any:
        with source_errors(f"{self._path}: dataset {name!r} cannot be opened", _COPY):
            return readable_dataset(self._file, name, self._path)

    def attributes(self, group: str) -> Mapping[str, Any]:
        return dict((self._file[group] if group else self._file).attrs)

    def absent(self, name: str, low: int, high: int) -> str | None:
        """By what was written: HDF5 gives other rows as zeros or the fill value."""
        if name not in self._holes:
            dataset = readable_dataset(self._file, name, self._path)
            self._holes = {} if len(self._holes) > _HOLES else self._holes  # one for each group
            self._holes[name] = unwritten_rows(dataset, 0 if dataset.ndim else None)
        holes = self._holes[name]
        if holes is None or not (bad := np.flatnonzero(holes[low:high])).size:
            return None
        return f"of row {low + int(bad[0])}"

    def close(self) -> None:
        self._file.close()


def _datasets_below(group: Any) -> Iterator[tuple[str, Any]]:
    """Datasets of a group at any depth, each once, in the order of their names.

    As `visititems` gives them, which looks up each by its path from the top: 5,000 groups in one another took
    it minutes.
    """

    def members(prefix: str, inside: Any) -> Iterator[tuple[str, Any]]:
        for name in sorted(inside, key=os.fsencode):
            if isinstance(inside.get(name, getlink=True), h5py.HardLink):
                yield f"{prefix}{name}", inside[name]

    def place(item: Any) -> tuple[int, int]:
        info = h5py.h5o.get_info(item.id)  # pyright: ignore[reportAttributeAccessIssue]
        return info.fileno, info.addr

    seen = {place(group)}
    stack = [members("", group)]
    while stack:
        if (one := next(stack[-1], None)) is None:
            stack.pop()
            continue
        name, item = one
        if place(item) in seen:
            continue
        seen.add(place(item))
        if isinstance(item, h5py.Dataset):
            yield name, item
        elif isinstance(item, h5py.Group):
            stack.append(members(f"{name}/", item))


class _ZarrReader:
    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._zarr: Any = import_module("zarr")
        except ImportError as error:
            raise ConfigError(
                f"{path} is a Zarr folder, and zarr is not installed", hint="Run pip install 'stoker[zarr]'"
            ) from error
        self._names = zipped_names(path) if path.is_file() else None
        self._store: Any = None
        with source_errors(f"{path} is not a readable Zarr folder", _COPY):
            if self._names is not None:
                self._store = self._zarr.storage.ZipStore(path, mode="r")
            self._root: Any = self._zarr.open(self._store or str(path), mode="r")

    def _group(self, name: str) -> Any:
        return self._root[name] if name else self._root

    def _members(self, name: str) -> Iterator[tuple[str, Any]]:
        group = self._group(name)
        if isinstance(group, self._zarr.Array):
            yield Path(self._path.name.removesuffix(".zip")).stem, group
            return
        with source_errors(f"{self._path}: group {name!r} cannot be read", _COPY):
            members = list(group.members())
        yield from members

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
        with source_errors(f"{self._path}: array {name!r} cannot be opened", _COPY):
            return self._root[name]

    def attributes(self, group: str) -> Mapping[str, Any]:
        return dict(self._group(group).attrs)

    def absent(self, name: str, low: int, high: int) -> str | None:
        """By the files of the chunks: zarr itself reads one that is not there as the fill value."""
        array = self.array(name)
        sizes: Sequence[int] = getattr(array, "shards", None) or array.chunks
        counts = [-(-length // size) for length, size in zip(array.shape, sizes, strict=True)]
        ranges = [range(count) for count in counts]
        ranges[:1] = [range(low // size, -(-high // size)) for size in sizes[:1]]
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
    """Return the names in a zipped Zarr folder.

    Raises:
        SourceError: It is damaged, holds a name twice, or no Zarr folder at its root.
    """
    size = path.stat().st_size if path.exists() else 0
    with (
        source_errors(f"{path} is not a readable zip file, {size:,} bytes", "Copy it again"),
        zipfile.ZipFile(path) as archive,
    ):
        names = archive.namelist()
    found = frozenset(names)
    if len(found) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise SourceError(f"{path} holds {twice!r} twice", hint="Write it again from the folder")
    if not found & {*ZARR_MARKS}:
        raise SourceError(
            f"{path} has no {', '.join(ZARR_MARKS)} at its root",
            hint=f"Zip what is in the folder, not the folder: cd {path.name.removesuffix('.zip')} && zip -0 "
            f"-r ../{path.name} .",
        )
    return found


class _NpyReader:
    def __init__(self, path: Path) -> None:
        self._path = path
        with source_errors(f"{path} is not a readable .npy file", "Write it again"):
            self._array: Any = np.load(path, mmap_mode="r", allow_pickle=False)

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
