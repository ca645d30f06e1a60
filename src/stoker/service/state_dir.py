"""The folder where a service keeps everything: nobody but its user may look inside."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from stoker.errors import ConfigError
from stoker.runtime.disk import explained
from stoker.service.folders import StateFolder


def prepare_state_dir(path: Path) -> StateFolder:
    """Make the folder and those inside it, or check that it may be used.

    Raises:
        ConfigError: It belongs to somebody else, others may read it, or anybody may replace it.
        ReadOnlyError: It cannot be made.
    """
    path = path.absolute()
    with explained(path):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.stat()
    if found.st_uid != os.geteuid():
        raise ConfigError(
            f"{path} belongs to user {found.st_uid}, this is {os.geteuid()}. Choose another --state-dir"
        )
    if found.st_mode & 0o077:
        raise ConfigError(
            f"{path} has mode {stat.S_IMODE(found.st_mode):o}: others may look inside. It holds the token: "
            f"chmod 700 {path}"
        )
    above = path.parent.stat()
    if above.st_mode & stat.S_IWOTH and not above.st_mode & stat.S_ISVTX:
        raise ConfigError(
            f"anybody may replace {path}: {path.parent} is writable by all. Choose another --state-dir"
        )
    folder = StateFolder(path)
    with explained(path):
        folder.make()
    return folder
