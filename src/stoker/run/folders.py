"""Check the folders that settings name before hours of work, not after."""

from __future__ import annotations

import os
from pathlib import Path

from stoker.errors import ConfigError
from stoker.plan.resources import DISK_DEADLINE_S
from stoker.runtime.threads import call_within


def find_obstacle(folder: Path, *, writes: bool = True) -> str | None:
    """Return why `folder`, which need not exist yet, cannot be used; None where it can. Nothing is created.

    Args:
        writes: Something will be written there; else it only has to be a folder, or able to become one.

    Raises:
        StalledError: The file system does not answer.
    """

    def look() -> str | None:
        place = folder.absolute()
        while not os.path.lexists(place):
            place = place.parent
        if not place.is_dir():
            return f"{place} is {'a link to nothing' if place.is_symlink() else 'not a folder'}"
        if writes and not os.access(place, os.W_OK | os.X_OK):
            return f"{place} may not be written to"
        return None

    return call_within(DISK_DEADLINE_S, look, f"the file system of {folder}")


def require_folder(folder: Path, setting: str) -> Path:
    """Return `folder`, which `setting` named, if it is a folder or may become one; it need not be writable.

    Raises:
        ConfigError: It, or something above it, is not a folder.
        StalledError: Its file system does not answer.
    """
    if (why := find_obstacle(folder, writes=False)) is not None:
        raise ConfigError(f"{setting} is {folder}, but {why}. Choose a folder")
    return folder


def require_writable(folder: Path, setting: str) -> Path:
    """Return `folder`, which `setting` named, if it can be written or created.

    Raises:
        ConfigError: It cannot.
        StalledError: Its file system does not answer.
    """
    if (why := find_obstacle(folder)) is not None:
        raise ConfigError(f"{setting} is {folder}, but {why}. Choose another folder, or fix that one")
    return folder


def is_open(folder: Path) -> bool:
    """Return True if `folder` is there and may be listed."""
    return os.path.isdir(folder) and os.access(folder, os.R_OK | os.X_OK)  # noqa: PTH112  Path.is_dir raises
