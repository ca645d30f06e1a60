"""Where caches lie that are not on this machine: object stores and folders on shared storage.

protocol.py    what a mirror asks of such a place; addresses
objects.py     S3, Google, Azure (the extra `objects`); folder.py shared storage
retries.py     repeats what may pass, until a deadline
"""

from __future__ import annotations

from importlib import import_module

from stoker.errors import ConfigError
from stoker.store.remote.folder import FolderRemote
from stoker.store.remote.protocol import ChangedError, Expected, Object, Remote, is_url, local_path, parse_url

__all__ = ["ChangedError", "Expected", "Object", "Remote", "is_url", "local_path", "open_remote", "parse_url"]


def open_remote(url: str) -> Remote:
    """The place at an address; asks it nothing yet.

    Raises:
        ConfigError: The address is none, or the extra that it needs is not installed.
    """
    url = parse_url(url)
    if url.startswith("file://"):
        return FolderRemote(url)
    try:
        objects = import_module("stoker.store.remote.objects")
    except ModuleNotFoundError as error:
        if error.name != "obstore":
            raise
        raise ConfigError(
            f"{url} needs a package that is not installed. pip install 'stoker[objects]'"
        ) from error
    return objects.ObjectRemote(url)
