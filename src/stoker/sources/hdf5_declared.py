"""Layouts of HDF5 files that the user declares: `fields={"latent": "n l d", "speed": "group/u: n t x"}`.

A key names the field; its text gives the axes, after an optional dataset path and a colon. Without a path
the key is the dataset. A text without axes, as `{"Nu": ""}`, is a parameter of the file. When no field has a
sample axis `n`, the samples are the groups of the file that hold the datasets. If the datasets are at its
root, the complete file is one sample.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

import h5py  # pyright: ignore[reportMissingTypeStubs]
import numpy as np

from stoker.errors import ConfigError, SourceError
from stoker.sources.files import name_parameters, natural_key
from stoker.sources.hdf5_fields import (
    FieldLayout,
    FileLayout,
    Piece,
    make_piece,
    parse_axes,
)
from stoker.sources.hdf5_open import refuse_outside

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
            raise ConfigError(f"fields declare {name!r} twice", hint="Give each field its own name")
        found[name] = (dataset, parse_axes(axes, where=f"fields[{key!r}]") if axes.strip() else ())
    if not found:
        raise ConfigError(
            "fields is empty", hint="Name at least one dataset, for example {'tensor': 'n t x'}"
        )
    return found


def declared_layout(file: Any, fields: Mapping[str, str], name: str, *, where: str) -> FileLayout:
    """Return the layout of an open file as the user declared it.

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
        raise SourceError(f"{where}: fields names no dataset. {contents(file)}", hint="Declare one of these")
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
            f"{where}: no group holds {missing}. {contents(file)}",
            hint="Declare paths as they are in the file; a dataset with all samples needs an axis 'n'",
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
    """Return parameters of a file: its numeric attributes of one element, and what its name states.

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
                f"{where}: the name says {key} = {value:g}, the file's attribute says {values[match]:g}",
                hint="Rename the file, or correct the attribute",
            )
    return dict(sorted(values.items()))


def _attributes(file: Any) -> dict[str, float]:
    arrays = {str(key): np.asarray(value) for key, value in file.attrs.items()}
    return {key: float(a.item()) for key, a in arrays.items() if a.size == 1 and a.dtype.kind in "fiu"}


def _declared_parameters(
    file: Any, names: Mapping[str, str], stem: str, *, where: str
) -> tuple[dict[str, float], tuple[str, ...]]:
    """Return values of the parameters that are declared as fields, and names of those that are not.

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
                f"{where} has no dataset and no parameter {parameter!r}. {contents(file)}. Its parameters "
                f"(numeric attributes, and numbers in its name) are {', '.join(values) or 'none'}",
                hint=f"Declare one of these, or the axes of {name!r}",
            )
    return {name: values[parameter] for name, parameter in names.items()}, left_out


def open_piece(parent: Any, dataset: str, axes: tuple[str, ...], *, where: str) -> Piece:
    """`make_piece` for a dataset by path.

    Raises:
        SourceError: It is not there, or is not a dataset.
    """
    found = parent.get(dataset)
    if not is_dataset(parent, dataset):
        raise SourceError(
            f"{where} has no dataset {dataset!r}. {contents(parent)}", hint="Declare one of these"
        )
    return make_piece(found, dataset, axes, where=where)


def is_dataset(parent: Any, name: str) -> bool:
    """Return True if a path leads to a dataset (and not to a group, or nowhere).

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
    """Return a layout whose samples are rows; without any sample axis the file is one sample.

    Raises:
        SourceError: Datasets have different numbers of samples.
    """
    counts = {piece.dataset: piece.rows for one in fields for piece in one.pieces if piece.rows is not None}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{name} {count:,}" for name, count in counts.items())
        raise SourceError(
            f"{where}: datasets have different numbers of samples: {listed}", hint="Fix the file"
        )
    return FileLayout(fields=fields, rows=next(iter(counts.values()), 1))


def sample_groups(file: Any, datasets: list[str]) -> list[str]:
    """Return names of the groups at the file's root that hold all `datasets`, in natural order."""
    names = [name for name in file if all(is_dataset(file, f"{name}/{dataset}") for dataset in datasets)]
    return sorted(names, key=natural_key)


def say_left_out(groups: Sequence[str], datasets: Sequence[str], *, where: str) -> None:
    """Name the groups of a file that are not samples, in one warning, if there are any."""
    if groups:
        shown = ", ".join(map(repr, groups[:20])) + (", ..." if len(groups) > 20 else "")
        lacking = " and ".join(datasets) or "any array"
        _log.warning("%s: groups without %s are not samples (%d): %s", where, lacking, len(groups), shown)


def contents(parent: Any, limit: int = 8) -> str:
    """Return the entries of a group as a sentence without its full stop, for error messages."""
    shown: list[str] = []
    for name in list(parent)[:limit]:
        kind = parent.get(name, getclass=True)
        virtual = kind is h5py.Dataset and parent[name].is_virtual
        shape = None if kind is not h5py.Dataset or virtual else parent[name].shape
        shown.append(
            f"{name}/" if kind is h5py.Group else f"{name} {'' if shape is None else tuple(shape)}".strip()
        )
    more = f" and {len(parent) - limit} more" if len(parent) > limit else ""
    return f"It has {', '.join(shown)}{more}" if shown else "It is empty"
