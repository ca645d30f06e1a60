"""Which axis of a dataset is which: known layouts, tried against what the file states.

A layout is a text such as `n t S c`; `S` stands for the space axes. Every layout with as many axes as the
dataset gives a reading. Readings that contradict a coordinate dataset are dropped. If one is left, it is
taken. If several are left, the documented layout is taken, unless its sizes are odd or another reading is
as likely; then the user is asked. A wrong guess serves wrong data without an error, a question costs a line.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations
from pathlib import PurePosixPath
from typing import Any, TypeAlias

import h5py  # pyright: ignore[reportMissingTypeStubs]
import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError, SourceError, arg
from stoker.sources.files import name_parameters, natural_key
from stoker.sources.hdf5_layout import (
    SPACE,
    FieldLayout,
    FieldRole,
    FileLayout,
    Piece,
    as_text,
    make_piece,
    parse_axes,
)
from stoker.sources.hdf5_open import refuse_outside
from stoker.sources.protocol import read_as

# ----------------------------------------------------------------------------------------------------------
# Layouts that the user declares: `fields={"latent": "n l d", "speed": "group/u: n t x"}`.
#
# A key names the field; its text gives the axes, after an optional dataset path and a colon. Without a path
# the key is the dataset. A text without axes, as `{"Nu": ""}`, is a parameter of the file. When no field
# has a sample axis `n`, the samples are the groups of the file that hold the datasets (or the whole file,
# when the datasets lie at its root).


_log = logging.getLogger("stoker")


def declared_fields(fields: Mapping[str, str]) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Field name to dataset path and axes.

    >>> declared_fields({"grid/u": "n x", "v": "a/b: n t x", "Nu": ""})
    {'grid.u': ('grid/u', ('n', 'x')), 'v': ('a/b', ('n', 't', 'x')), 'Nu': ('Nu', ())}

    Raises:
        ConfigError: Nothing declared, or two fields of one name.
    """
    found: dict[str, tuple[str, tuple[str, ...]]] = {}
    for key, text in fields.items():
        path, colon, axes = text.rpartition(":")
        dataset = (path if colon else key).strip().strip("/")
        name = key.strip("/").replace("/", ".")
        if name in found:
            raise ConfigError(f"fields declare {name!r} twice. Give each field its own name")
        found[name] = (dataset, parse_axes(axes, where=f"fields[{key!r}]") if axes.strip() else ())
    if not found:
        raise ConfigError("fields is empty. Name at least one dataset, for example {'tensor': 'n t x'}")
    return found


def declared_layout(file: Any, fields: Mapping[str, str], name: str, *, where: str) -> FileLayout:
    """The layout of an open file as the user declared it.

    Args:
        file: Open `h5py.File`.
        fields: See `declared_fields`.
        name: The file's relative name, which may state parameters.
        where: Names the file in errors.

    Raises:
        SourceError: A dataset or parameter is missing, axes are others in number, or sample counts differ.
    """
    every = declared_fields(fields)
    numbers = {
        key: dataset for key, (dataset, axes) in every.items() if not axes and not is_dataset(file, dataset)
    }
    values, left_out = _declared_parameters(file, numbers, PurePosixPath(name).stem, where=where)
    wanted = {key: one for key, one in every.items() if key not in numbers}
    if not wanted:
        raise SourceError(f"{where}: fields names no dataset. {contents(file)} Declare one of these")
    found = _datasets(file, wanted, where)
    return replace(found, values=values, left_out=left_out)


def _datasets(file: Any, wanted: Mapping[str, tuple[str, tuple[str, ...]]], where: str) -> FileLayout:
    by_row = any("n" in axes for _, axes in wanted.values())
    at_root = all(is_dataset(file, dataset) for dataset, _ in wanted.values())
    if by_row or at_root:
        return rows_layout(
            tuple(
                FieldLayout(name=name, pieces=(open_piece(file, dataset, axes, where=where),))
                for name, (dataset, axes) in wanted.items()
            ),
            where=where,
        )
    groups = sample_groups(file, [dataset for dataset, _ in wanted.values()])
    if not groups:
        missing = ", ".join(repr(dataset) for dataset, _ in wanted.values())
        raise SourceError(
            f"{where}: no group holds {missing}. {contents(file)} Declare paths as they are in the file; a "
            "dataset with all samples needs an axis 'n'"
        )
    others = [name for name in sorted(set(file) - set(groups)) if not is_dataset(file, name)]
    say_left_out(others, [dataset for dataset, _ in wanted.values()], where=where)
    first = file[groups[0]]
    layouts = tuple(
        FieldLayout(
            name=name, pieces=(open_piece(first, dataset, axes, where=f"{where}: group {groups[0]!r}"),)
        )
        for name, (dataset, axes) in wanted.items()
    )
    return FileLayout(fields=layouts, rows=len(groups), groups=tuple(groups))


def file_parameters(file: Any, stem: str, *, where: str) -> dict[str, float]:
    """Parameters of a file: its numeric attributes of one element, and what its name states.

    Raises:
        SourceError: Attribute and name contradict each other.
    """
    values = _attributes(file)
    for key, value in name_parameters(stem).items():
        match = next((other for other in values if other.lower() == key.lower()), None)
        if match is None:
            values[key] = value
        elif not np.isclose(values[match], value, rtol=1e-6, atol=0):
            raise SourceError(
                f"{where}: the name says {key} = {value:g}, the file's attribute says {values[match]:g}. "
                "Rename the file, or correct the attribute"
            )
    return dict(sorted(values.items()))


def _attributes(file: Any) -> dict[str, float]:
    arrays = {str(key): np.asarray(value) for key, value in file.attrs.items()}
    return {key: float(a.item()) for key, a in arrays.items() if a.size == 1 and a.dtype.kind in "fiu"}


def _declared_parameters(
    file: Any, names: Mapping[str, str], stem: str, *, where: str
) -> tuple[dict[str, float], tuple[str, ...]]:
    """Values of the parameters that are declared as fields, and names of those that are not.

    Args:
        names: Field name to the parameter's name.

    Raises:
        SourceError: The file has no such parameter, or states it twice, differently.
    """
    known = {key.lower(): key for key in (*name_parameters(stem), *_attributes(file))}
    left_out = tuple(
        sorted(key for low, key in known.items() if low not in {n.lower() for n in names.values()})
    )
    if not names:
        return {}, left_out
    values = file_parameters(file, stem, where=where)
    for name, parameter in names.items():
        if parameter not in values:
            raise SourceError(
                f"{where} has no dataset and no parameter {parameter!r}. {contents(file)} Its parameters "
                f"(numeric attributes, and numbers in its name) are {', '.join(values) or 'none'}. Declare "
                f"one of these, or the axes of {name!r}"
            )
    return {name: values[parameter] for name, parameter in names.items()}, left_out


def open_piece(parent: Any, dataset: str, axes: tuple[str, ...], *, where: str) -> Piece:
    """`make_piece` for a dataset by path.

    Raises:
        SourceError: It is not there, or is no dataset.
    """
    found = parent.get(dataset)
    if not is_dataset(parent, dataset):
        raise SourceError(f"{where} has no dataset {dataset!r}. {contents(parent)} Declare one of these")
    return make_piece(found, dataset, axes, where=where)


def is_dataset(parent: Any, name: str) -> bool:
    """Whether a path leads to a dataset (and not to a group, or nowhere).

    Raises:
        SourceError: It does, and its bytes are not in the file.
    """
    found = parent.get(name)
    if not isinstance(found, h5py.Dataset):
        return False
    # Before its shape is asked for, which HDF5 may look up in other files.
    filename = h5py.h5f.get_name(parent.id).decode(errors="surrogateescape")
    refuse_outside(found, filename, f"{parent.name}/{name}".strip("/"), where=filename)
    return True


def rows_layout(fields: tuple[FieldLayout, ...], *, where: str) -> FileLayout:
    """A layout whose samples are rows; without any sample axis the file is one sample.

    Raises:
        SourceError: Datasets have different numbers of samples.
    """
    counts = {piece.dataset: piece.rows for one in fields for piece in one.pieces if piece.rows is not None}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{name} {count:,}" for name, count in counts.items())
        raise SourceError(f"{where}: datasets have different numbers of samples: {listed}. Fix the file")
    return FileLayout(fields=fields, rows=next(iter(counts.values()), 1))


def sample_groups(file: Any, datasets: list[str]) -> list[str]:
    """Names of the groups at the file's root that hold all `datasets`, in natural order."""
    names = [name for name in file if all(is_dataset(file, f"{name}/{dataset}") for dataset in datasets)]
    return sorted(names, key=natural_key)


def say_left_out(groups: Sequence[str], datasets: Sequence[str], *, where: str) -> None:
    """Name the groups of a file that are not samples, in one warning; nothing where there are none."""
    if groups:
        shown = ", ".join(map(repr, groups[:20])) + (", ..." if len(groups) > 20 else "")
        lacking = " and ".join(datasets) or "any array"
        _log.warning("%s: groups without %s are not samples (%d): %s", where, lacking, len(groups), shown)


def contents(parent: Any, limit: int = 8) -> str:
    """What a group holds, for error messages."""
    shown: list[str] = []
    for name in list(parent)[:limit]:
        kind = parent.get(name, getclass=True)
        virtual = kind is h5py.Dataset and parent[name].is_virtual
        shape = None if kind is not h5py.Dataset or virtual else parent[name].shape
        shown.append(
            f"{name}/" if kind is h5py.Group else f"{name} {'' if shape is None else tuple(shape)}".strip()
        )
    more = f" and {len(parent) - limit} more" if len(parent) > limit else ""
    return f"It has {', '.join(shown)}{more}." if shown else "It is empty."


Axes: TypeAlias = "tuple[str, ...]"
"""One word per stored axis."""
Coordinates: TypeAlias = "Mapping[str, tuple[int, ...]]"
"""Axis word to the shape of its coordinate dataset."""

FEW_CHANNELS = 8
"""So many numbers per point are likely in any layout."""
MANY_CHANNELS = 16
"""More numbers per point than this are unlikely."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layouts:
    """Layouts that a dataset may have."""

    documented: tuple[str, ...]
    """Taken where nothing speaks against them, best first."""
    others: tuple[str, ...]
    """Taken where the coordinates leave no other."""
    steady: bool = False
    """None has time, even if the file has a time coordinate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The axes of a dataset, or the options that are left when they are not clear."""

    axes: Axes | None = None
    """None: the user must choose."""
    options: tuple[Axes, ...] = ()
    """Likely ones first."""
    fits: bool = True
    """False: every option contradicts a coordinate or the number of space axes."""


def find_coordinates(*groups: Any) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the coordinate datasets (`name_coordinates`) in open groups; later groups win."""
    return {
        word: tuple(int(size) for size in group[path].shape or ())
        for group in groups
        for word, path in name_coordinates(group).items()
    }


def name_coordinates(group: Any) -> dict[str, str]:
    """Return the paths of the coordinate datasets in an open group and in its group `grid`, by axis word.

    Names are `x`, `x-coordinate` or `x_coordinate`, also with `y`, `z`, `t` and `time`; `grid` wins.
    """
    found: dict[str, str] = {}
    for name in group:
        base = name.lower().replace("_", "-").removesuffix("-coordinate")
        word = "t" if base == "time" else base
        # A dataset called `T` is a temperature; times of more than two axes are data.
        if word not in (*SPACE, "t") or name == "T" or not is_dataset(group, name):
            continue
        if word in SPACE or len(group[name].shape or ()) in (1, 2):
            found[word] = name
    if group.get("grid", getclass=True) is h5py.Group:
        found |= {word: f"grid/{path}" for word, path in name_coordinates(group["grid"]).items()}
    return found


def read_axes(shape: Sequence[int], layouts: Layouts, coordinates: Coordinates, rank: int | None) -> Reading:
    """Return the one reading of a dataset, or those between which the user must choose.

    Args:
        shape: Of the dataset.
        layouts: All that it may have.
        coordinates: See `find_coordinates`.
        rank: Number of space axes, where no coordinate states it; None: unknown.
    """
    if layouts.steady:
        coordinates = {word: stated for word, stated in coordinates.items() if word != "t"}
    space = [word for word in SPACE if word in coordinates]
    names = [space] if space else [SPACE[:count] for count in ([rank] if rank else (1, 2, 3))]
    known = _readings(shape, layouts, names, coordinates)
    guessed = bool(space) and all(_channels(axes, shape) > MANY_CHANNELS for _, axes in known)
    if guessed:
        # So many channels may be a space axis without a coordinate.
        further = [[*space, word] for word in SPACE if word not in space]
        more = _readings(shape, layouts, further[:1], coordinates)
        guessed = bool(more)
        known += more
    # An axis of one number is a space axis only if nothing else is possible.
    known = [pair for pair in known if min(_grid_sizes(pair[1], shape)) > 1] or known
    if len(known) == 1 and not guessed:
        return Reading(axes=known[0][1])
    if not known:
        everything = [
            [_axes(layout, SPACE[:count], shape) for layout in some for count in (1, 2, 3)]
            for some in (layouts.documented, layouts.others)
        ]
        anything = next((some for some in everything if any(some)), [])
        return Reading(options=tuple(axes for axes in anything if axes), fits=False)
    # Where the number of space axes is unknown, one of them without channels is documented.
    simple = len(names) > 1
    ratio = 8 if simple else 4
    taken = [axes for layout, axes in known if layout in layouts.documented]
    default = next(
        (axes for axes in taken if not simple or ("c" not in axes and len(_grid(axes)) == 1)), None
    )
    options = tuple(axes for _, axes in known)
    usual = [axes for axes in options if _is_usual(axes, shape, coordinates)]
    if (
        not guessed
        and default is not None
        and default in usual
        and not any(
            _is_as_likely(axes, default, shape, coordinates, ratio) for axes in options if axes != default
        )
    ):
        return Reading(axes=default)
    return Reading(options=(*usual, *(axes for axes in options if axes not in usual)))


def _readings(
    shape: Sequence[int], layouts: Layouts, names: Sequence[Sequence[str]], coordinates: Coordinates
) -> list[tuple[str, Axes]]:
    """Return each layout that fits with its axes, for each set of space axes."""
    return [
        (layout, axes)
        for layout in (*layouts.documented, *layouts.others)
        for words in names
        if (axes := _first_that_fits(layout, words, shape, coordinates))
    ]


def describe_axes(axes: Axes, shape: Sequence[int]) -> str:
    """Say what a reading means in numbers.

    >>> describe_axes(("n", "t", "c", "x", "y"), (4, 11, 2, 64, 64))
    '4 samples, 11 steps, 2 channels, 64 x 64 points'
    """
    names = {"n": "samples", "t": "steps", "c": "channels"}
    said = [f"{size} {names[axis]}" for axis, size in zip(axes, shape, strict=True) if axis in names]
    return ", ".join([*said, " x ".join(map(str, _grid_sizes(axes, shape))) + " points"])


def _axes(layout: str, space: Sequence[str], shape: Sequence[int]) -> Axes | None:
    """Return the words of a layout if there is one for each axis of the dataset.

    Converters append an axis of one number even to data with channels: it is another feature, `d`.
    """
    axes = tuple(word for part in layout.split() for word in (space if part == "S" else (part,)))
    if "c" in axes and len(axes) + 1 == len(shape) and shape[-1] == 1:
        axes = (*axes, "d")
    return axes if len(axes) == len(shape) else None


def _first_that_fits(
    layout: str, space: Sequence[str], shape: Sequence[int], coordinates: Coordinates
) -> Axes | None:
    """Return a layout's axes with the space axes in an order that the coordinates allow."""
    orders = (_axes(layout, order, shape) for order in permutations(space))
    return next((axes for axes in orders if axes and _fits(axes, shape, coordinates)), None)


def _fits(axes: Axes, shape: Sequence[int], coordinates: Coordinates) -> bool:
    """Return whether no coordinate contradicts the axes; it may have one entry more (cell edges)."""
    sizes = dict(zip(axes, shape, strict=True))
    for word, stated in coordinates.items():
        if word not in sizes or _is_of_another(word, stated, axes, shape, coordinates):
            return False
        # One coordinate for all samples, or one for each sample; of space also as a mesh.
        meant = [[sizes[word]], [sizes.get("n", -1), sizes[word]]]
        if word in SPACE:
            meant.append(_grid_sizes(axes, shape))
        claims = [claim for claim in meant if len(claim) == len(stated)]
        if claims and not any(
            all(given in (size, size + 1) for given, size in zip(stated, claim, strict=True))
            for claim in claims
        ):
            return False
    return True


def _is_of_another(
    word: str, stated: tuple[int, ...], axes: Axes, shape: Sequence[int], coordinates: Coordinates
) -> bool:
    """Return whether edges of cells along a space axis are the points of an axis without a coordinate."""
    sizes = dict(zip(axes, shape, strict=True))
    if word not in SPACE or len(stated) != 1 or stated[0] != sizes[word] + 1:
        return False
    return any(size == stated[0] for axis, size in sizes.items() if axis not in coordinates)


def _grid(axes: Axes) -> list[int]:
    return [at for at, axis in enumerate(axes) if axis in SPACE]


def _grid_sizes(axes: Axes, shape: Sequence[int]) -> list[int]:
    return [shape[at] for at in _grid(axes)]


def _channels(axes: Axes, shape: Sequence[int]) -> int:
    return shape[axes.index("c")] if "c" in axes else 0


def _is_usual(axes: Axes, shape: Sequence[int], coordinates: Coordinates) -> bool:
    """Return whether there are fewer channels than points along each axis, and a grid that is one."""
    if _channels(axes, shape) >= min(_grid_sizes(axes, shape)):
        return False
    return all(shape[at] > 2 or axes[at] in coordinates for at in _grid(axes))


def _is_as_likely(
    axes: Axes, default: Axes, shape: Sequence[int], coordinates: Coordinates, ratio: int
) -> bool:
    """Return whether sizes speak as much for a reading as for the documented one."""
    grid = _grid_sizes(axes, shape)
    if min(grid) <= 2:
        return False
    if "c" not in axes or axes.index("c") == (default.index("c") if "c" in default else None):
        # Time and space are exchanged: a square grid speaks for itself.
        return len(set(grid)) == 1 < len(grid) and len(set(_grid_sizes(default, shape))) > 1
    # A file that states space and not time may well have no time: then a small grid is no objection.
    only_space = "t" not in coordinates and all(axes[at] in coordinates for at in _grid(axes))
    most = FEW_CHANNELS if only_space else min(FEW_CHANNELS, min(grid) // ratio)
    return _channels(axes, shape) <= most


# ----------------------------------------------------------------------------------------------------------
# Times, coordinates and boundaries that a file of simulations states next to its fields, served on request.
#
#     time         `time` (T,) float32: the times of the stored steps, a field with time
#     dt           `dt` float32: the time between two steps of the sample, which must be constant
#     coordinates  `x`, `y`, `z`, each (points,) float32: cell centers along each axis of the grid
#     boundary     The Well: `boundary_NAME` float32, a number of `BOUNDARIES`; `boundary_NAME_mask` and
#                  `boundary_NAME_values` with the axes that they have in the file
#
# A coordinate of one entry more than points holds cell edges, and their midpoints are served; of times the
# first T are. All are stored with each sample: 4 bytes a number, and a mask takes 1 byte a point.


INCLUDABLE = ("time", "dt", "coordinates", "boundary")
"""Names that `include` takes."""
BOUNDARIES = ("WALL", "OPEN", "PERIODIC")
"""Types of boundaries; the place of a type is its number, as in The Well's own reader."""


@dataclass(slots=True, kw_only=True)
class _Found:
    """Fields and numbers to add to the layout."""

    fields: list[FieldLayout] = field(default_factory=list[FieldLayout])
    values: dict[str, float] = field(default_factory=dict[str, float])


def with_included(file: Any, layout: FileLayout, include: Sequence[str], *, where: str) -> FileLayout:
    """Return the layout of an open file with the fields that `include` asks for.

    Raises:
        SourceError: The file does not state one of them, or its length does not fit the data.
    """
    if not include:
        return layout
    found = _Found()
    group = layout.groups[0] if layout.groups else ""
    main = next((p for one in layout.fields for p in one.pieces if _is_main(p)), None)
    if main is None:
        raise SourceError(f"{where}: no dataset has time or space, so {arg('include', [*include])} is empty")
    parent = file[group] if group else file
    named = name_coordinates(parent)
    if "dimensions" in parent:  # The Well
        named |= {word: f"dimensions/{path}" for word, path in name_coordinates(parent["dimensions"]).items()}
    sizes = dict(zip(main.axes, main.shape, strict=True))
    wanted = {"t"} if {"time", "dt"} & {*include} else set[str]()
    if "coordinates" in include:
        wanted |= {word for word in SPACE if word in sizes}
    pieces = {
        word: _axis_piece(parent, named, word, sizes, layout.rows, where=where) for word in sorted(wanted)
    }
    for name, role in (("time", FieldRole.TIME), ("dt", FieldRole.DT)):
        if name in include:
            found.fields.append(FieldLayout(name=name, pieces=(pieces["t"],), role=role, points=sizes["t"]))
    if "dt" in include and "n" not in pieces["t"].axes:
        time_step(np.asarray(parent[pieces["t"].dataset][: sizes["t"]]), where=where)
    for word in SPACE if "coordinates" in include else ():
        if word in pieces:
            found.fields.append(
                FieldLayout(name=word, pieces=(pieces[word],), role=FieldRole.COORDINATE, points=sizes[word])
            )
    if "boundary" in include:
        _add_boundaries(file, found, where)
    return FileLayout(
        fields=(*layout.fields, *found.fields),
        rows=layout.rows,
        groups=layout.groups,
        values={**layout.values, **found.values},
        notes=layout.notes,
        left_out=layout.left_out,
    )


def finish(layout: FieldLayout, raw: NDArray[Any], strides: Mapping[str, int], *, where: str) -> NDArray[Any]:
    """Return what is served of one sample of an included dataset.

    Args:
        layout: Its field.
        raw: As stored, without the sample axis; of `time` the wanted steps alone.
        strides: Subsampling by axis word.
        where: Names the sample in errors.

    Raises:
        SourceError: Times are not equally spaced, or too close together for float32.
        DecodeError: A number is beyond float32.
    """
    if layout.role is FieldRole.TIME:
        return _rounded_times(raw, where=where)
    if layout.role is FieldRole.DT:
        step = time_step(raw[: layout.points], where=where)
        return read_as(step * strides.get("t", 1), np.dtype(np.float32), where=where)
    if layout.role is FieldRole.COORDINATE:
        exact = raw.astype(np.float64)
        centers = exact if len(raw) == layout.points else (exact[1:] + exact[:-1]) / 2
        return read_as(centers[:: strides.get(layout.name, 1)], np.dtype(np.float32), where=where)
    axes = [axis for axis in layout.pieces[0].axes if axis != "n"]
    # Time was thinned while reading.
    return raw[tuple(slice(None, None, 1 if axis == "t" else strides.get(axis, 1)) for axis in axes)]


def time_step(times: NDArray[Any], *, where: str) -> float:
    """Return the one difference between times.

    Raises:
        SourceError: There are fewer than two times, they are not equally spaced, or there is no step.
    """
    steps = np.diff(times.astype(np.float64))
    if not len(steps):
        raise SourceError(f"{where} has one time, so there is no time step. Leave 'dt' out of include")
    mean = float(steps.mean())
    if mean == 0 or not np.isfinite(steps).all():
        raise SourceError(
            f"{where}: times are {times[0]:.4g} to {times[-1]:.4g}, and the mean step is {mean:.4g}. Correct "
            "them, or leave 'dt' out of include"
        )
    # Times are often float32, whose rounding is of the size of the last time, not of the step.
    rounding = 4 * float(np.finfo(np.float32).eps) * float(np.abs(times).max())
    if float(np.abs(steps - mean).max()) > 1e-3 * abs(mean) + min(rounding, 0.1 * abs(mean)):
        raise SourceError(
            f"{where}: times are not equally spaced, their steps are {steps.min():.4g} to {steps.max():.4g}. "
            "Include 'time' in place of 'dt'"
        )
    return mean


def _rounded_times(times: NDArray[Any], *, where: str) -> NDArray[np.float32]:
    """Return times as float32, whose steps are those of the file within a tenth.

    Raises:
        SourceError: Rounding changes a step more, as it does far from zero.
    """
    rounded = read_as(times, np.dtype(np.float32), where=where)
    steps, kept = np.diff(times.astype(np.float64)), np.diff(rounded.astype(np.float64))
    if lost := [*map(int, np.flatnonzero(np.abs(kept - steps) > 0.1 * np.abs(steps)))]:
        first, second = times[lost[0]], times[lost[0] + 1]
        raise SourceError(
            f"{where}: times {first:.12g} and {second:.12g} are {kept[lost[0]]:.4g} apart as float32. Store "
            "times that begin near 0, or include 'dt' in place of 'time'"
        )
    return rounded


def _is_main(piece: Piece) -> bool:
    return "t" in piece.axes or any(axis in SPACE for axis in piece.axes)


def _axis_piece(
    parent: Any, named: Mapping[str, str], word: str, sizes: Mapping[str, int], rows: int, *, where: str
) -> Piece:
    """Describe the coordinate dataset of an axis; it may have one entry more than the data."""
    what = {"t": "times"}.get(word, f"coordinates along {word}")
    hint = f"Leave {'time and dt' if word == 't' else 'coordinates'} out of include"
    if word not in sizes:
        raise SourceError(f"{where}: the data has no time axis, so there are no {what}. {hint}")
    if word not in named:
        raise SourceError(f"{where} states no {what}. {contents(parent)} {hint}")
    path, points = named[word], sizes[word]
    shape = tuple(int(size) for size in parent[path].shape)
    for axes, claim in (((word,), ()), (("n", word), (rows,))):
        if len(shape) == len(axes) and shape[:-1] == claim and shape[-1] in (points, points + 1):
            if parent[path].dtype.kind == "c":
                raise SourceError(f"{where}: dataset {path!r} is complex, and no {what}. {hint}")
            piece = open_piece(parent, path, axes, where=where)
            # Steps and cell edges are differences, which are taken before numbers are rounded.
            return replace(piece, dtype="float64", narrowed=False) if piece.narrowed else piece
    raise SourceError(
        f"{where}: dataset {path!r} has shape {shape}, expected {points} {what}, or one more, for all or for "
        f"each of {rows} samples. {hint}"
    )


def _add_boundaries(file: Any, found: _Found, where: str) -> None:
    group = file.get("boundary_conditions")
    if group is None or not len(group):
        raise SourceError(
            f"{where} states no boundary conditions (The Well has a group boundary_conditions). "
            f"{contents(file)} Leave 'boundary' out of include"
        )
    for name in sorted(group):
        own = group[name]
        label = f"{where}: boundary_conditions/{name}"
        kind = as_text(own.attrs.get("bc_type", "")).upper()
        if kind not in BOUNDARIES:
            raise SourceError(
                f"{label} is of type {kind or 'unknown'!r}, which has no number. Types are "
                f"{', '.join(BOUNDARIES)}. Correct the attribute bc_type, or leave 'boundary' out of include"
            )
        found.values[f"boundary_{name}"] = float(BOUNDARIES.index(kind))
        for part in ("mask", "values"):
            if is_dataset(own, part):
                piece = _boundary_piece(own, part, f"boundary_conditions/{name}/{part}", label)
                found.fields.append(
                    FieldLayout(name=f"boundary_{name}_{part}", pieces=(piece,), role=FieldRole.BOUNDARY)
                )


def _boundary_piece(group: Any, part: str, path: str, label: str) -> Piece:
    """Describe the mask of a boundary, or its values, which are those of the points in the mask."""
    dataset = group[part]
    flags = (("n", "sample_varying"), ("t", "time_varying"))
    lead = tuple(axis for axis, flag in flags if bool(group.attrs.get(flag, False)))
    dims = tuple(as_text(item) for item in np.ravel(group.attrs.get("associated_dims", ())))
    for axes in ((*lead, *dims), (*lead, "p"), (*lead, "p", "c")):
        if len(axes) == len(dataset.shape):
            return make_piece(dataset, path, axes, where=label)
    raise SourceError(
        f"{label}/{part} has shape {tuple(dataset.shape)}, its attributes give the axes "
        f"{' '.join((*lead, *dims))!r}. Correct sample_varying, time_varying and associated_dims"
    )
