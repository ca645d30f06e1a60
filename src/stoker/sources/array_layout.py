"""How the arrays of a container are samples: rows of arrays, one group each, or flat arrays with offsets.

rows      every array has the samples along axis 0 (or the axis declared `n`)
groups    one group per sample; lengths along axis 0 may differ from group to group
offsets   samples one after another along axis 0, and an array that says where each begins
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError, SourceError, arg
from stoker.schema import Field
from stoker.sources.containers import Container, Opened
from stoker.sources.declared import declared_fields, say_left_out
from stoker.sources.dtypes import read_as, read_dtype
from stoker.sources.files import require_listable
from stoker.sources.hdf5_layout import Piece, arrange, piece_field

Layout: TypeAlias = Literal["rows", "groups", "offsets"]
OFFSET_NAMES = ("offsets", "ptr", "cu_seqlens", "row_splits")
"""Arrays that are taken for offsets where none is named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ArrayField:
    """One field of every sample."""

    name: str
    array: str
    """Path of its array, below a sample's group with `groups`."""
    axes: tuple[str, ...] | None
    """Words of the axes of one sample, as stored; None: as it is, axis 0 first."""
    per_step: bool
    """With `offsets`: it lies along the steps; else one row per sample. Elsewhere True."""
    field: Field
    """As served."""

    def arranged(self, raw: NDArray[Any], where: str) -> NDArray[Any]:
        """One sample as served.

        Raises:
            DecodeError: As `read_as`.
        """
        dtype = read_dtype(raw.dtype, where=self.array)
        values = raw if raw.dtype == dtype else read_as(raw, dtype, where=where)
        return np.array(values if self.axes is None else arrange(values, self.axes), order="C")


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """What one container holds."""

    container: Container
    layout: Layout
    count: int
    """Samples."""
    groups: tuple[str, ...] = ()
    starts: NDArray[np.int64] | None = None
    """With `offsets`: first step of each sample, and the total."""

    def place(self, row: int) -> str:
        """Where a sample is, for messages."""
        inside = f"group {self.groups[row]!r}" if self.groups else f"row {row}"
        return f"{self.container.path}: {inside}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What the user said about arrays."""

    layout: Layout | None
    fields: Mapping[str, str] | None
    offsets: str | None
    attributes: tuple[str, ...]


def describe(
    container: Container, opened: Opened, wanted: Wanted
) -> tuple[Described, tuple[ArrayField, ...]]:
    """Samples and fields of one container.

    Raises:
        SourceError: It holds no samples, or arrays that do not fit together.
    """
    where = str(container.path)
    groups = [name for name in opened.groups() if opened.arrays(name)]
    if wanted.layout == "groups" or (wanted.layout is None and groups):
        if not groups:
            raise SourceError(
                f"{where} has no groups with arrays, so no trajectories. Use {arg('layout', 'rows')}"
            )
        known = set(groups)
        say_left_out([name for name in opened.groups() if name not in known], (), where=where)
        return _groups(container, opened, groups, wanted)
    arrays = {name: array for name, array in opened.arrays("").items() if "/" not in name or not groups}
    offsets = wanted.offsets or next((name for name in OFFSET_NAMES if name in arrays), None)
    layout = wanted.layout or ("offsets" if offsets in arrays else "rows")
    if wanted.attributes:
        raise ConfigError(
            f"{arg('attributes')} are read from the groups of samples, and {where} is read by {layout}"
        )
    if layout == "offsets":
        if offsets not in arrays:
            raise SourceError(
                f"{where} has no array {offsets or ', '.join(OFFSET_NAMES)} that says where samples begin. "
                f"Name it with {arg('offsets')}; it has {', '.join(arrays) or 'no array'}"
            )
        length = arrays[offsets].shape[0] if arrays[offsets].ndim else 0
        require_listable(length, f"{where}: {offsets!r}")
        if absent := opened.absent(offsets, 0, length):
            raise SourceError(f"{where}: {offsets!r}: chunk {absent} is not there. Copy or write it again")
        return _offsets(container, {name: opened.array(name) for name in arrays}, offsets, wanted)
    return _rows(container, {name: opened.array(name) for name in arrays}, wanted)


def _wanted_fields(
    wanted: Wanted, arrays: Mapping[str, Any], where: str
) -> dict[str, tuple[str, tuple[str, ...] | None]]:
    """Field name to array and declared axes: those named, or every array of numbers."""
    if wanted.fields is None:
        return {
            name.replace("/", "."): (name, None)
            for name, array in arrays.items()
            if array.dtype.kind in "biuf"
        }
    found: dict[str, tuple[str, tuple[str, ...] | None]] = {}
    for key, text in wanted.fields.items():
        plain = key.strip("/").replace("/", ".")
        if ":" in text or " " in text.strip() or (text and text not in arrays):
            (array, axes) = declared_fields({key: text})[plain]
            found[plain] = (array, axes)
        else:
            found[plain] = (text or key, None)
    for array, _ in found.values():
        if array not in arrays:
            raise SourceError(f"{where} has no array {array!r}. It has {', '.join(arrays) or 'none'}")
    return found


def _make_field(
    where: str, array: Any, axes: tuple[str, ...] | None, shape: Sequence[int], *, ragged: bool, time: bool
) -> Field:
    """The field of one sample of stored `shape`; `where` names file and array."""
    dtype = read_dtype(array.dtype, where=where).name
    if axes is None:
        if dtype == "complex64":
            raise SourceError(f"{where} is complex. Declare its axes, as {arg('fields', {'u': 't x'})}")
        found = Field(shape=tuple(shape), dtype=dtype, time=time)
    else:
        found = piece_field(Piece(dataset="", axes=axes, shape=tuple(shape), dtype=dtype), {})
        if ragged and axes[0] not in ("t",) and any(axis in ("x", "y", "z") for axis in axes):
            raise SourceError(f"{where} varies along {axes[0]!r}; only time or nodes may vary")
    if ragged:
        return Field(shape=(-1, *found.shape[1:]), dtype=found.dtype, time=found.time, ragged=True)
    return found


def _rows(
    container: Container, arrays: Mapping[str, Any], wanted: Wanted
) -> tuple[Described, tuple[ArrayField, ...]]:
    where = str(container.path)
    fields: list[ArrayField] = []
    counts: dict[str, int] = {}
    for name, (path, axes) in _wanted_fields(wanted, arrays, where).items():
        array = arrays[path]
        if axes is not None and (axes[0] != "n" or len(axes) != array.ndim):
            raise SourceError(
                f"{where}: axes {' '.join(axes)!r} of {path!r} {tuple(array.shape)} must be one word an axis "
                "and begin with n, the samples"
            )
        if not array.ndim:
            continue
        counts[path] = int(array.shape[0])
        own = None if axes is None else axes[1:]
        named = f"{where}: array {path!r}"
        field = _make_field(named, array, own, array.shape[1:], ragged=False, time=False)
        fields.append(ArrayField(name=name, array=path, axes=own, per_step=True, field=field))
    if len(set(counts.values())) != 1:
        listed = ", ".join(f"{name} {count:,}" for name, count in counts.items()) or "no array of numbers"
        raise SourceError(
            f"{where}: arrays have different numbers of samples along axis 0: {listed}. "
            f"Name those that belong together with {arg('fields')}"
        )
    return Described(container=container, layout="rows", count=next(iter(counts.values()))), tuple(fields)


def _offsets(
    container: Container, arrays: Mapping[str, Any], offsets: str, wanted: Wanted
) -> tuple[Described, tuple[ArrayField, ...]]:
    where = str(container.path)
    rest = {name: array for name, array in arrays.items() if name != offsets and array.ndim}
    chosen = _wanted_fields(wanted, rest, where)
    starts = np.asarray(arrays[offsets][...])
    count = len(starts) - 1
    if starts.ndim != 1 or starts.dtype.kind not in "iu" or count < 1 or starts[0] != 0:
        raise SourceError(
            f"{where}: {offsets!r} must hold whole numbers from 0 on, one more than there are samples; it is "
            f"{starts.dtype} {starts.shape}"
        )
    starts = starts.astype(np.int64)
    if bool((np.diff(starts) < 0).any()):
        raise SourceError(f"{where}: {offsets!r} falls at sample {int(np.argmax(np.diff(starts) < 0))}")
    fields: list[ArrayField] = []
    for name, (path, axes) in chosen.items():
        array, total = rest[path], int(starts[-1])
        per_step = int(array.shape[0]) == total
        if not per_step and int(array.shape[0]) != count:
            raise SourceError(
                f"{where}: {path!r} has {array.shape[0]:,} rows; {offsets!r} ends at {total:,} and has "
                f"{count:,} samples. Is the file complete? If it is, name the arrays that belong to it with "
                f"{arg('fields')}"
            )
        shape = (1, *array.shape[1:]) if per_step else tuple(array.shape[1:])
        named = f"{where}: array {path!r}"
        field = _make_field(named, array, axes, shape, ragged=per_step, time=per_step)
        fields.append(ArrayField(name=name, array=path, axes=axes, per_step=per_step, field=field))
    found = Described(container=container, layout="offsets", count=count, starts=starts)
    return found, tuple(fields)


def _groups(
    container: Container, opened: Opened, groups: list[str], wanted: Wanted
) -> tuple[Described, tuple[ArrayField, ...]]:
    where = str(container.path)
    first = opened.arrays(groups[0])
    chosen = _wanted_fields(wanted, first, f"{where}: group {groups[0]!r}")
    shapes: dict[str, set[int]] = {name: set() for name in chosen}
    steps: list[tuple[int, ...]] = []
    for group in groups:
        arrays = opened.arrays(group)
        # What a group lacks is said when it is read, so that one bad trajectory is no end of all.
        sizes = {n: int(arrays[p].shape[0]) for n, (p, _) in chosen.items() if p in arrays and arrays[p].ndim}
        for name, size in sizes.items():
            shapes[name].add(size)
        steps.append(tuple(sizes[name] for name in chosen if name in sizes))
    varying = [name for name, sizes in shapes.items() if len(sizes) > 1]
    # Fields that vary, and all alike, have the steps of the trajectory along axis 0.
    own = [i for i, name in enumerate(chosen) if name in varying]
    whole = [sizes for sizes in steps if len(sizes) == len(chosen)]
    alike = all(len({sizes[i] for i in own}) == 1 for sizes in whole) if own else False
    fields: list[ArrayField] = []
    for name, (path, axes) in chosen.items():
        array, ragged = first[path], name in varying
        named = f"{where}: array {path!r}"
        field = _make_field(named, array, axes, array.shape, ragged=ragged, time=ragged and alike)
        fields.append(ArrayField(name=name, array=path, axes=axes, per_step=True, field=field))
    scalar = Field(shape=(), dtype="float32")
    for name in wanted.attributes:
        fields.append(ArrayField(name=name, array="", axes=None, per_step=True, field=scalar))
    found = Described(container=container, layout="groups", count=len(groups), groups=tuple(groups))
    return found, tuple(fields)
