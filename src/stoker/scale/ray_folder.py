"""The cache folder as the driver tells tasks of it, and as a node finds it: one place, which is proven.

A path is the same on all nodes. An address is seen from everywhere, and each node keeps a mirror of it on its
own disk, where the driver has its one. In both the driver leaves a mark that no other place can hold.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from stoker.errors import ConfigError, FormatError, StokerError
from stoker.runtime.disk import explained
from stoker.store import Folder
from stoker.store.mirror.attach import attach
from stoker.store.mirror.root import root_of
from stoker.store.remote import Remote
from stoker.store.remote.folder import FolderRemote
from stoker.store.remote.retries import Retries

SIGHT_S = 5.0
"""How long a file that the driver has just written may take to be seen on another node."""
_MARK_BYTES = 16


@contextmanager
def marked(folder: Folder, driver: str) -> Generator[dict[str, Any]]:
    """Leave a mark in the cache folder while entered; yields in plain values where that is.

    Raises:
        ReadOnlyError: It cannot be written to.
    """
    cache_dir, text = folder.path.parent.parent.resolve(), secrets.token_hex(_MARK_BYTES)
    mark = f"{folder.name}/{folder.recipe.fingerprint}/.ray-{secrets.token_hex(6)}"
    told: dict[str, Any] = {
        "cache_dir": str(cache_dir),
        "name": folder.name,
        "fingerprint": folder.recipe.fingerprint,
        "mark": mark,
        "text": text,
        "driver": driver,
        "url": None,
    }
    remote: Remote = _folder(cache_dir)
    if (found := root_of(folder.path)) is not None:
        root, _ = found
        told |= {"url": root.url, "mirrors": str(root.path.parent), "limit_bytes": root.space.limit_bytes}
        remote = root.remote
    Retries().run(lambda: remote.put(mark, text.encode()), f"put {remote.url}/{mark}")
    try:
        yield told
    finally:
        with suppress(StokerError, OSError):
            Retries().run(lambda: remote.remove(mark), f"delete {remote.url}/{mark}")


def find(told: dict[str, Any], node: str) -> Path:
    """The folder of caches as this node has it.

    Raises:
        ConfigError: The node sees another place than the driver.
        StokerError: As `attach`.
    """
    until = time.monotonic() + SIGHT_S
    while (found := _found(told)) is None:
        if time.monotonic() > until:
            raise ConfigError(
                f"node {node} does not find {told['mark']} in {told['url'] or told['cache_dir']}, where "
                f"{told['driver']} has just put it. Expected one place that all nodes see: a folder on "
                "storage that they share, at the same path, or an address (s3://, gs://, file://) behind "
                "which all find the same store, with its variables (AWS_ENDPOINT_URL, credentials) in Ray's "
                "environment there. Set training.latent_cache_dir (--cache-dir) to such a place"
            )
        time.sleep(0.1)
    return found


def _found(told: dict[str, Any]) -> Path | None:
    """This node's folder of caches, if the driver's mark is there."""
    mark = told["mark"]
    with suppress(FormatError, FileNotFoundError):  # nothing is there, or no mark
        remote, cache_dir = _place(told)
        answer = Retries().run(lambda: remote.get(mark), f"get {remote.url}/{mark}")
        if answer is not None and answer[0] == told["text"].encode():
            return cache_dir
    return None


def _place(told: dict[str, Any]) -> tuple[Remote, Path]:
    """Where the mark is to be, and this node's folder of caches; of an address its mirror.

    Raises:
        FormatError: There is no such cache at the address.
        StokerError: As `attach`.
    """
    if told["url"] is None:
        return _folder(Path(told["cache_dir"])), Path(told["cache_dir"])
    mirrors = Path(told["mirrors"])
    url = f"{told['url']}/{told['name']}/{told['fingerprint']}"
    with explained(mirrors):
        folder = attach(url, mirrors, told["limit_bytes"], must_exist=True)
    found = root_of(folder)
    assert found is not None, folder
    return found[0].remote, found[0].path


def _folder(path: Path) -> FolderRemote:
    return FolderRemote(f"file://{path}")
