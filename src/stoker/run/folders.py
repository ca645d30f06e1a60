"""Folders that settings name: what stands in the way is said before hours of work, not after."""

from __future__ import annotations

import os
from pathlib import Path

from stoker.errors import ConfigError
from stoker.plan.resources import DISK_DEADLINE_S
from stoker.runtime.threads import call_within


def obstacle(folder: Path) -> str | None:
    """Why nothing can be written in `folder`, which need not exist yet; None where it can. Nothing is made.

    Raises:
        StalledError: The file system does not answer.
    """
    return call_within(DISK_DEADLINE_S, lambda: _obstacle(folder), f"the file system of {folder}")


def require_folder(folder: Path, setting: str) -> Path:
    """`folder`, which `setting` named, if it is a folder or may become one; it need not be writable.

    Raises:
        ConfigError: It, or something above it, is not a folder.
        StalledError: Its file system does not answer.
    """
    why = call_within(DISK_DEADLINE_S, lambda: _not_a_folder(folder), f"the file system of {folder}")
    if why is not None:
        raise ConfigError(f"{setting} is {folder}, but {why}. Choose a folder")
    return folder


def _nearest(folder: Path) -> Path:
    """What there is of a path: itself or the first above it."""
    place = folder.absolute()
    while not os.path.lexists(place):
        place = place.parent
    return place


def _not_a_folder(folder: Path) -> str | None:
    place = _nearest(folder)
    if place.is_dir():
        return None
    return f"{place} is {'a link to nothing' if place.is_symlink() else 'not a folder'}"


def _obstacle(folder: Path) -> str | None:
    place = _nearest(folder)
    if why := _not_a_folder(place):
        return why
    if not os.access(place, os.W_OK | os.X_OK):
        return f"{place} may not be written to"
    return None


def is_open(folder: Path) -> bool:
    """Whether `folder` is there and may be looked into."""
    return os.path.isdir(folder) and os.access(folder, os.R_OK | os.X_OK)  # noqa: PTH112  Path.is_dir raises


def require_writable(folder: Path, setting: str) -> Path:
    """`folder`, which `setting` named, if it can be written or made.

    Raises:
        ConfigError: It cannot.
        StalledError: Its file system does not answer.
    """
    why = obstacle(folder)
    if why is not None:
        raise ConfigError(f"{setting} is {folder}, but {why}. Choose another folder, or fix that one")
    return folder
