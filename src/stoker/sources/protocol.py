"""The protocol of a source, its optional parts, its identity in a recipe, and the base for several files.

A source only says *which* files it reads; their content is digested by `stoker.store.recipe`, which
remembers digests between runs. So constructing a source and asking for its identity costs stats, not reads.
"""

from __future__ import annotations

import bisect
import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from stoker.errors import DecodeError, SourceError
from stoker.schema import Json, Sample, Schema


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRef:
    """One file behind a part."""

    name: str
    """Name relative to the source's root, with `/`; part of the recipe."""
    path: Path
    """Where it is now; never part of the recipe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A run of consecutive samples that comes from one place (a file, a table)."""

    name: str
    """Relative name; together with the others' order it is part of the recipe."""
    count: int
    """Samples of this part after selection. Parts follow one another."""
    values: Mapping[str, Json] = field(default_factory=dict[str, Json])
    """Values parsed from the name or from attributes that end up in samples (`{"Nu": 0.01}`)."""
    selection: str = "all"
    """Which rows of the part are samples: `"all"`, or a digest of the selected rows."""
    files: tuple[FileRef, ...] = ()
    """The files whose bytes decide the samples' bytes."""
    digest: str | None = None
    """Content digest, for parts that are not made of files; else None and the store derives it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceIdentity:
    """The facts that change when the data does.

    No absolute path and no time stamp: moving data changes nothing.
    """

    kind: str
    """Class and code version, e.g. `"hdf5/1"`; the version is bumped by hand when samples change."""
    parts: tuple[Part, ...]
    """In the order of the samples; `sum(part.count) == len(source)`."""
    settings: Mapping[str, Json] = field(default_factory=dict[str, Json])
    """Everything else that decides sample bytes: layout, axes, split rule, subsampling."""
    sampled: bool = False
    """True when content was probed rather than read in full (a `Dataset` without files)."""


@runtime_checkable
class SplittableSource(Protocol):
    """A source that can return its other splits from what it has read already."""

    def for_split(self, split: str | None) -> Source:
        """Return the same data, another split.

        Args:
            split: Name of the split; None: all samples.
        """
        ...


@runtime_checkable
class Source(Protocol):
    """Random access to raw samples. Satisfied by shape; there is no base class to inherit.

    Copies travel to worker processes by cloudpickle: open files and connections on first use, not in
    `__init__`. Calls on one copy come from one thread at a time.
    """

    def __len__(self) -> int:
        """Return the number of samples; their indices are `0 .. len - 1`."""
        ...

    def read(self, index: int, start: int | None = None, stop: int | None = None) -> Sample:
        """Read sample `index`: the same index gives the same values, always.

        Args:
            index: Sample index, from 0 to `len - 1`.
            start: First step of the fields that have time, along axis 0; None: their first. Other fields are
                complete.
            stop: One past the last step; None: to the end.

        Returns:
            A NumPy array for each field of `schema`, which the caller may write to.

        Raises:
            IndexError: There is no such sample.
            SourceError: It is missing or damaged; precompute quarantines it.
        """
        ...

    def runs(self) -> Sequence[range]:
        """Return ranges of indices that are cheap to read together, in order, covering all samples once.

        Aligned to how they are stored (a chunk is decompressed once) and never across parts.
        """
        ...

    def keys(self) -> Sequence[str]:
        """Return one stable text per sample, for splits: equal keys are never put in different splits."""
        ...

    def identity(self) -> SourceIdentity:
        """Return what changes when the data does; it goes into the recipe."""
        ...

    def schema(self) -> Schema:
        """Return the fields of every sample as `read` returns them."""
        ...


@runtime_checkable
class BatchSource(Protocol):
    """A source that reads consecutive samples much faster together than one by one."""

    def read_many(self, indices: range) -> Sample | None:
        """Read samples `indices`, each field `(n, *shape)`: the very values that `read` gives for each.

        Where it raises, samples are read one by one, so that the error names the sample.

        Args:
            indices: Consecutive sample indices.

        Returns:
            The samples; None where there is no quicker way for these, which are then read one by one.
        """
        ...


@runtime_checkable
class RowSource(Protocol):
    """A source that can put a sample where it is wanted, which saves a copy."""

    def read_into(self, index: int, rows: Sample) -> Sample | None:
        """Read sample `index` into `rows`.

        Args:
            index: Sample index, from 0.
            rows: For each field an array of its shape and dtype in the schema, to be written to.

        Returns:
            None, or the sample as `read` gives it where it could not be put there; it is checked then.

        Raises:
            SourceError: As `read`.
        """
        ...


@runtime_checkable
class LocatableSource(Protocol):
    """A source that can tell where a user finds a sample. Most can: an index alone is of little use."""

    def locate(self, index: int) -> str:
        """Return the place of sample `index` for messages: its file, and the row, group or member in it.

        Args:
            index: Sample index, from 0.
        """
        ...


def locate(source: Source, index: int) -> str:
    """Return the place of a sample of any source: as the source says, or its index and the source."""
    if isinstance(source, LocatableSource):
        return source.locate(index)
    return f"sample {index} of {source!r}"


@runtime_checkable
class IdentityKeysSource(Protocol):
    """A source that can say that its keys follow from its identity.

    For other sources, each run compares the keys with those kept next to the cache, and keeps the new ones. A
    source needs this only if listing its keys takes long, as reading all rows of a table does.
    """

    @property
    def keys_follow_identity(self) -> bool:
        """True if two sources of one identity have the same keys in the same order."""
        ...


def keys_follow_identity(source: Source) -> bool:
    """Return True if a source says that its keys follow from its identity."""
    return isinstance(source, IdentityKeysSource) and source.keys_follow_identity


@runtime_checkable
class SelfCheckingSource(Protocol):
    """A source that is tried in a child process before workers read it; most need no such check."""

    def check_in_child(self) -> None:
        """Raise what would fail, or differ, in a worker: once, before the first worker starts."""
        ...


# ----------------------------------------------------------------------------------------------------------
# The dtypes that the numbers in files and Datasets are read as.


def read_dtype(stored: np.dtype[Any], *, where: str) -> np.dtype[Any]:
    """Return the dtype that stored numbers are read as.

    Raises:
        SourceError: Not numbers, or numbers that no store holds.
    """
    kind, size = stored.kind, stored.itemsize
    if kind == "f" and size >= 2:
        return np.dtype("float16" if size == 2 else "float32")
    if kind == "c":
        return np.dtype("complex64")
    if kind == "b" or (kind == "i" and size <= 8) or (kind == "u" and size == 1):
        return stored.newbyteorder("=")
    if kind == "u" and size in {2, 4}:
        return np.dtype("int32" if size == 2 else "int64")
    raise SourceError(
        f"{where} has dtype {stored}, which cannot be stored",
        hint="Readable are bool, int8 to int64, uint8 to uint32, float16 to float64 and complex numbers; "
        "leave it out of `fields` or convert it",
    )


def read_as(values: ArrayLike, dtype: np.dtype[Any], *, where: str) -> NDArray[Any]:
    """Return a fresh array of `dtype`, in C order.

    Raises:
        DecodeError: A finite number is beyond what `dtype` holds, and would become infinite.
    """
    try:
        with np.errstate(over="raise"):
            return np.array(values, dtype=dtype, order="C")
    except FloatingPointError:
        exact = np.asarray(values)
        with np.errstate(over="ignore"):
            lost = np.isfinite(exact) & ~np.isfinite(exact.astype(dtype))
        place = [*map(int, np.argwhere(lost)[0])]
        value, most = exact[lost].flat[0], np.finfo(dtype).max
        raise DecodeError(
            f"{where} holds {value:.4g} at {place}, is read as {dtype}, and that ends at {most:.4g}",
            hint="Scale the values, or leave the sample or the field out",
        ) from None


# ----------------------------------------------------------------------------------------------------------
# Base of sources of several files: find a sample's file, and runs that stay within a file.


class CountedPart(Protocol):
    """One described file."""

    @property
    def count(self) -> int:
        """Samples of this file."""
        ...


PartT = TypeVar("PartT", bound=CountedPart)


def check_index(index: int, count: int) -> None:
    """Refuse an index that no sample has.

    Raises:
        IndexError: It is below 0, or `count` and more.
    """
    if not 0 <= index < count:
        raise IndexError(f"sample {index} does not exist: this source has {count}")


def even_runs(count: int, length: int) -> list[range]:
    """Return all indices in runs of `length`.

    >>> even_runs(5, 2)
    [range(0, 2), range(2, 4), range(4, 5)]
    """
    return [range(first, min(first + length, count)) for first in range(0, count, length)]


class PartedSource(ABC, Generic[PartT]):
    """Samples of several files, one file after another. A subclass describes the files and reads a row."""

    @abstractmethod
    def _parts(self) -> Sequence[PartT]:
        """Return the described files, in order; they are opened on the first call."""

    @abstractmethod
    def _edges(self, part: PartT) -> Sequence[int]:
        """Return where runs of a file begin, and its number of rows."""

    def __len__(self) -> int:
        """Return the number of samples of all files."""
        return self._firsts()[-1]

    def runs(self) -> Sequence[range]:
        """Return rows that are stored together, never of two files."""
        found: list[range] = []
        for part, first in zip(self._parts(), self._firsts(), strict=False):
            pairs = itertools.pairwise(self._edges(part))
            found += [range(first + low, first + high) for low, high in pairs if high > low]
        return found

    def _find(self, index: int) -> tuple[PartT, int]:
        """Return the file of a sample, and its row there.

        Raises:
            IndexError: There is no such sample.
        """
        firsts = self._firsts()
        check_index(index, firsts[-1])
        place = bisect.bisect_right(firsts, index) - 1
        return self._parts()[place], index - firsts[place]

    def _firsts(self) -> list[int]:
        """Return the first index of each file, and the number of samples."""
        return list(itertools.accumulate((part.count for part in self._parts()), initial=0))
