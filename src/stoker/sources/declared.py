"""Layouts that the user declares: `fields={"latent": "n l d", "speed": "group/u: n t x"}`.

A key names the field; its text gives the axes, after an optional dataset path and a colon. Without a path
the key is the dataset. When no field has a sample axis `n`, the samples are the groups of the file that
hold the datasets (or the whole file, when the datasets lie at its root).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import h5py  # pyright: ignore[reportMissingTypeStubs]

from stoker.errors import ConfigError, SourceError
from stoker.sources.files import natural_key
from stoker.sources.hdf5_layout import FieldLayout, FileLayout, Piece, make_piece, parse_axes


def declared_fields(fields: Mapping[str, str]) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Field name to dataset path and axes.

    >>> declared_fields({"grid/u": "n x", "v": "a/b: n t x"})
    {'grid.u': ('grid/u', ('n', 'x')), 'v': ('a/b', ('n', 't', 'x'))}

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
        found[name] = (dataset, parse_axes(axes, where=f"fields[{key!r}]"))
    if not found:
        raise ConfigError("fields is empty. Name at least one dataset, for example {'tensor': 'n t x'}")
    return found


def declared_layout(file: Any, fields: Mapping[str, str], *, where: str) -> FileLayout:
    """The layout of an open file as the user declared it.

    Raises:
        SourceError: A dataset is missing, has another number of axes, or the sample counts differ.
    """
    wanted = declared_fields(fields)
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
    first = file[groups[0]]
    layouts = tuple(
        FieldLayout(
            name=name, pieces=(open_piece(first, dataset, axes, where=f"{where}: group {groups[0]!r}"),)
        )
        for name, (dataset, axes) in wanted.items()
    )
    return FileLayout(fields=layouts, rows=len(groups), groups=tuple(groups))


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
    """Whether a path leads to a dataset (and not to a group, or nowhere)."""
    return parent.get(name, getclass=True) is h5py.Dataset


def rows_layout(fields: tuple[FieldLayout, ...], *, where: str) -> FileLayout:
    """A layout whose samples are rows; without any sample axis the file is one sample.

    Raises:
        SourceError: Datasets have different numbers of samples.
    """
    counts = {piece.dataset: piece.rows for one in fields for piece in one.pieces if piece.rows is not None}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{name} {count:,}" for name, count in counts.items())
        raise SourceError(f"{where}: datasets have different numbers of samples: {listed}. Mend the file")
    return FileLayout(fields=fields, rows=next(iter(counts.values()), 1))


def sample_groups(file: Any, datasets: list[str]) -> list[str]:
    """Names of the groups at the file's root that hold all `datasets`, in natural order."""
    names = [name for name in file if all(is_dataset(file, f"{name}/{dataset}") for dataset in datasets)]
    return sorted(names, key=natural_key)


def contents(parent: Any, limit: int = 8) -> str:
    """What a group holds, for error messages."""
    shown = [
        f"{name} {tuple(item.shape)}" if getattr(item, "shape", None) is not None else f"{name}/"
        for name, item in ((name, parent[name]) for name in list(parent)[:limit])
    ]
    more = f" and {len(parent) - limit} more" if len(parent) > limit else ""
    return f"It has {', '.join(shown)}{more}." if shown else "It is empty."
