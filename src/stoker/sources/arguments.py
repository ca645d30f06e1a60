"""Checks of arguments, before anything is read.

Later, a wrong argument would be an error of Python's own, which names neither the argument nor what was
expected.
"""

from __future__ import annotations

import os
import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from stoker.arguments import check, whole
from stoker.errors import ConfigError, arg
from stoker.sources.files import SUFFIXES

_ADAPTERS = {
    ".zarr": "arrays.ArraySource",
    ".npy": "arrays.ArraySource",
    ".tar": "tar.TarSource",
    ".parquet": "tables.ParquetSource",
}
"""Sources of files that are not in `stoker` itself, by suffix, below `stoker.sources`."""


def check_dataset(dataset: object) -> None:
    """Refuse what has a length and items, but as text or a dict: its letters or keys are not samples.

    Raises:
        ConfigError: With a call that reads it, where there is one.
    """
    if isinstance(dataset, str | bytes | bytearray | os.PathLike):
        raise ConfigError(
            f"the dataset is {format_value(dataset)}", hint=f"Expected a Dataset or a source. {_way(dataset)}"
        )
    if isinstance(dataset, Mapping) and 0 not in dataset:
        raise ConfigError(
            f"the dataset is {format_value(dataset)}",
            hint="Expected items by number, from 0. For a dict of arrays of one length give "
            "torch.utils.data.StackDataset(**dataset)",
        )


def format_value(value: object) -> str:
    """Return a value as messages show it: paths and text in full, others shortened."""
    return repr(value) if isinstance(value, str | os.PathLike) else reprlib.repr(value)


def _way(given: object) -> str:
    """Return what reads a path, as a sentence."""
    path = Path(given) if isinstance(given, str | os.PathLike) else Path()
    name, suffix = repr(str(given)), path.suffix.lower()
    if suffix in SUFFIXES:
        return f"For an HDF5 file give stoker.HDF5Source({name})"
    if suffix in _ADAPTERS:
        module, _, adapter = _ADAPTERS[suffix].partition(".")
        return f"Give {adapter}({name}), after: from stoker.sources.{module} import {adapter}"
    if given and path.is_dir():
        return f"Give stoker.ImageSource({name}) for images, stoker.HDF5Source({name}) for HDF5 files"
    return "Give a source that reads it, as stoker.HDF5Source(path), or a Dataset with its items"


def parse_names(what: str, value: object, of: str, *, least: int = 1) -> tuple[str, ...]:
    """Return one name or several, as a tuple.

    Args:
        what: The argument.
        value: As it was given.
        of: What it names, for the message.
        least: The fewest.

    Raises:
        ConfigError: It is neither text nor a list of texts.
    """
    found = (value,) if isinstance(value, str) else listed(value)
    if found is None or len(found) < least or not all(isinstance(name, str) and name for name in found):
        raise ConfigError(f"{what} is {value!r}", hint=f"Expected {of}, or a list of names")
    return cast("tuple[str, ...]", found)


def parse_list(what: str, value: object, of: str) -> tuple[object, ...]:
    """Return the entries of a list.

    Raises:
        ConfigError: It is not one; `of` says what was expected.
    """
    found = listed(value)
    if found is None:
        raise ConfigError(f"{what} is {value!r}", hint=f"Expected {of}")
    return found


def listed(value: object, count: int | None = None) -> tuple[object, ...] | None:
    """Return the entries of a list, of `count` entries if that is given; None where it is not such a list.

    >>> listed([1, 2]), listed("ab"), listed((1,), 2)
    ((1, 2), None, None)
    """
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        return None
    found = tuple(cast("Sequence[object]", value))
    return found if count is None or len(found) == count else None


def check_texts(**given: object) -> None:
    """Refuse what is neither text nor None.

    Raises:
        ConfigError: Names the argument.
    """
    for what, value in given.items():
        if value is not None and not isinstance(value, str):
            raise ConfigError(f"{what} is {value!r}", hint=f"Expected text, as {arg(what, '...')}, or None")


def check_path(what: str, value: object) -> None:
    """Refuse what is not a path.

    Raises:
        ConfigError: Names the argument.
    """
    if not isinstance(value, str | os.PathLike) or not str(value):
        raise ConfigError(f"{what} is {value!r}", hint=f"Expected a path, as {str(Path('data') / what)!r}")


def check_splits(split: object, splits: object, seed: object) -> None:
    """Refuse what is not the name of a split, fractions by name, or a seed.

    Raises:
        ConfigError: Names the argument.
    """
    check_texts(split=split)
    check({"seed": (seed, whole())})
    if splits is None:
        return
    shares = cast("Mapping[object, object]", splits) if isinstance(splits, Mapping) else {None: None}
    for name, share in shares.items():
        if not isinstance(name, str) or isinstance(share, bool) or not isinstance(share, int | float):
            raise ConfigError(
                f"splits is {splits!r}",
                hint=f"Expected fractions by name, as {arg('splits', {'train': 0.8, 'val': 0.2})}",
            )
