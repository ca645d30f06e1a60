"""Find the axes of a dataset: known layouts, compared with what the file states.

A layout is a text such as `n t S c`; `S` stands for the space axes. Every layout with as many axes as the
dataset gives a reading. Readings that contradict a coordinate dataset are dropped. If one is left, it is
taken. If several are left, the documented layout is taken, unless its sizes are odd or another reading is
as likely; then the user is asked. A wrong guess serves wrong data without an error, a question costs a line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any, TypeAlias

import h5py  # pyright: ignore[reportMissingTypeStubs]

from stoker.sources.hdf5_declared import is_dataset
from stoker.sources.hdf5_fields import (
    SPACE,
)

Axes: TypeAlias = "tuple[str, ...]"
"""One word per stored axis."""
Coordinates: TypeAlias = "Mapping[str, tuple[int, ...]]"
"""Axis word to the shape of its coordinate dataset."""

FEW_CHANNELS = 8
"""So many numbers per point are likely in any layout."""
MANY_CHANNELS = 16
"""More numbers per point than this are unlikely."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutChoices:
    """Layouts that a dataset may have."""

    documented: tuple[str, ...]
    """Taken where nothing speaks against them, best first."""
    others: tuple[str, ...]
    """Taken where the coordinates leave no other."""
    steady: bool = False
    """None has time, even if the file has a time coordinate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AxesReading:
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


def read_axes(
    shape: Sequence[int], layouts: LayoutChoices, coordinates: Coordinates, rank: int | None
) -> AxesReading:
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
        return AxesReading(axes=known[0][1])
    if not known:
        everything = [
            [_axes(layout, SPACE[:count], shape) for layout in some for count in (1, 2, 3)]
            for some in (layouts.documented, layouts.others)
        ]
        anything = next((some for some in everything if any(some)), [])
        return AxesReading(options=tuple(axes for axes in anything if axes), fits=False)
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
        return AxesReading(axes=default)
    return AxesReading(options=(*usual, *(axes for axes in options if axes not in usual)))


def _readings(
    shape: Sequence[int], layouts: LayoutChoices, names: Sequence[Sequence[str]], coordinates: Coordinates
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
    """Return True if no coordinate contradicts the axes; it may have one entry more (cell edges)."""
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
    """Return True if edges of cells along a space axis are the points of an axis without a coordinate."""
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
    """Return True if there are fewer channels than points along each axis, and a grid that is one."""
    if _channels(axes, shape) >= min(_grid_sizes(axes, shape)):
        return False
    return all(shape[at] > 2 or axes[at] in coordinates for at in _grid(axes))


def _is_as_likely(
    axes: Axes, default: Axes, shape: Sequence[int], coordinates: Coordinates, ratio: int
) -> bool:
    """Return True if sizes speak as much for a reading as for the documented one."""
    grid = _grid_sizes(axes, shape)
    if min(grid) <= 2:
        return False
    if "c" not in axes or axes.index("c") == (default.index("c") if "c" in default else None):
        # Time and space are exchanged: a square grid speaks for itself.
        return len(set(grid)) == 1 < len(grid) and len(set(_grid_sizes(default, shape))) > 1
    # A file that states space and not time may have no time: then a small grid is possible.
    only_space = "t" not in coordinates and all(axes[at] in coordinates for at in _grid(axes))
    most = FEW_CHANNELS if only_space else min(FEW_CHANNELS, min(grid) // ratio)
    return _channels(axes, shape) <= most
