"""Checks of arguments, before anything is read.

Later, a wrong argument would be an error of Python's own, which names neither the argument nor what was
expected.
"""

from __future__ import annotations

import math
import os
import reprlib
from collections.abc import Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import SupportsIndex, cast

import numpy as np

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


def check_int(what: str, value: object, *, least: int | None = None) -> None:
    """Refuse what is not a whole number, or is too small.

    Raises:
        ConfigError: Names the argument.
    """
    whole = isinstance(value, SupportsIndex) and not isinstance(value, bool)
    if not whole or (least is not None and cast("SupportsIndex", value).__index__() < least):
        raise ConfigError(
            f"{what} is {value!r}",
            hint=f"Expected a whole number{'' if least is None else f' of at least {least}'}",
        )


def check_bool(what: str, value: object) -> None:
    """Refuse what is not True or False.

    Raises:
        ConfigError: Names the argument.
    """
    if not isinstance(value, bool | np.bool_):
        raise ConfigError(f"{what} is {value!r}", hint="Expected True or False")


def check_number(
    what: str,
    value: object,
    *,
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
    finite: bool = True,
) -> None:
    """Refuse what is not a number, or is out of range; a bool is not a number.

    Raises:
        ConfigError: Names the argument.
    """
    fits = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    if fits:
        number = cast("float", value)
        fits = not finite or -math.inf < number < math.inf
        fits = fits and (least is None or number >= least) and (most is None or number <= most)
        fits = fits and (above is None or number > above)
    if not fits:
        limits = "" if least is None else f" of at least {least}"
        limits += "" if above is None else f" above {above}"
        limits += "" if most is None else f" and at most {most}"
        limits = f" from {least} to {most}" if least is not None and most is not None else limits
        raise ConfigError(
            f"{what} is {value!r}", hint=f"Expected a {'finite ' if finite else ''}number{limits}"
        )


def check_numbers(
    what: str, value: object, *, least: float | None = None, above: float | None = None
) -> None:
    """Refuse what is neither a finite number nor a list of at least one.

    Raises:
        ConfigError: Names the argument.
    """
    several = listed(value)
    for number in (None,) if several == () else (value,) if several is None else several:
        try:
            check_number(what, number, least=least, above=above)
        except ConfigError as error:
            raise ConfigError(
                f"{what} is {value!r}", hint=f"{error.hint}, or a list of such numbers"
            ) from None


def check_axes(axes: Sequence[int]) -> None:
    """Refuse axes that are not counted from the last, or come twice.

    Raises:
        ConfigError: As said.
    """
    if isinstance(axes, int):
        raise ConfigError(f"axes are {axes}", hint=f"Expected a list, as ({axes},)")
    whole = all(not isinstance(axis, bool) and isinstance(axis, Integral) for axis in listed(axes) or ())
    if not listed(axes) or not whole or any(axis >= 0 for axis in axes) or len(set(axes)) != len(axes):
        raise ConfigError(
            f"axes are {axes!r}",
            hint="Expected different negative numbers, counted from the last: -3 and -2 are height and "
            "width of (H, W, C)",
        )


def check_size(what: str, size: object) -> None:
    """Refuse what is not a height and a width.

    Raises:
        ConfigError: Names the argument.
    """
    sides = listed(size, 2)
    if sides is None:
        raise ConfigError(
            f"{what}: size is {size!r}", hint="Expected (height, width) in pixels, as (224, 224)"
        )
    for side in sides:
        check_int(f"{what}: size", side, least=1)


def check_fields(transform: object, fields: object) -> None:
    """Refuse what is not a list of names, or None; one name alone becomes a list.

    Raises:
        ConfigError: As said.
    """
    if fields is not None:
        names = parse_names(f"{type(transform).__name__}: fields", fields, "the name of a field")
        object.__setattr__(transform, "fields", names)


def check_splits(split: object, splits: object, seed: object) -> None:
    """Refuse what is not the name of a split, fractions by name, or a seed.

    Raises:
        ConfigError: Names the argument.
    """
    check_texts(split=split)
    check_int("seed", seed)
    if splits is None:
        return
    shares = cast("Mapping[object, object]", splits) if isinstance(splits, Mapping) else {None: None}
    for name, share in shares.items():
        if not isinstance(name, str) or isinstance(share, bool) or not isinstance(share, int | float):
            raise ConfigError(
                f"splits is {splits!r}",
                hint=f"Expected fractions by name, as {arg('splits', {'train': 0.8, 'val': 0.2})}",
            )
