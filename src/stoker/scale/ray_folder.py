"""The cache folder as the driver tells tasks of it, and as a node finds it: one place, which is proven.

A path is the same on all nodes. An address is seen from everywhere, and each node keeps a mirror of it on its
own disk, where the driver has its one. In both the driver leaves a mark that no other place can hold.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from stoker.atomic import explained
from stoker.errors import ConfigError, FormatError, StokerError
from stoker.store import Folder
from stoker.store.mirror.attach import attach
from stoker.store.mirror.root import MirrorRoot, root_of

SIGHT_S = 5.0
"""How long a file that the driver has just written may take to be seen on another node."""
_MARK_BYTES = 16


@contextmanager
def marked(folder: Folder, driver: str) -> Generator[dict[str, Any]]:
    """Leave a mark in the cache folder while entered; yields in plain values where that is.

    Raises:
        ReadOnlyError: It cannot be written to.
    """
    mark, text = f".ray-{secrets.token_hex(6)}", secrets.token_hex(_MARK_BYTES)
    told: dict[str, Any] = {
        "cache_dir": str(folder.path.parent.parent.resolve()),
        "name": folder.name,
        "fingerprint": folder.recipe.fingerprint,
        "mark": mark,
        "text": text,
        "driver": driver,
        "url": None,
    }
    found = root_of(folder.path)
    if found is None:
        path = folder.path / mark
        with explained(path):
            path.write_text(text)
        try:
            yield told
        finally:
            with suppress(OSError):
                path.unlink()
        return
    root, name = found
    told |= {"url": root.url, "mirrors": str(root.path.parent), "limit_bytes": root.space.limit_bytes}
    key = f"{name}/{mark}"
    _ask(root, "put", key, lambda: root.remote.put(key, text.encode()))
    try:
        yield told
    finally:
        with suppress(StokerError, OSError):
            _ask(root, "delete", key, lambda: root.remote.remove(key))


def find(told: dict[str, Any], node: str) -> Path:
    """The folder of caches as this node has it.

    Raises:
        ConfigError: The node sees another place than the driver.
        StokerError: As `attach`.
    """
    until = time.monotonic() + SIGHT_S
    while _text(told) != told["text"]:
        if time.monotonic() > until:
            raise ConfigError(_unseen(told, node))
        time.sleep(0.1)
    return Path(told["cache_dir"]) if told["url"] is None else _attached(told)[0].path


def _text(told: dict[str, Any]) -> str | None:
    """What the mark says, as seen from here."""
    if told["url"] is None:
        with suppress(OSError):
            return Path(told["cache_dir"], told["name"], told["fingerprint"], told["mark"]).read_text()
        return None
    try:
        root, name = _attached(told)
        key = f"{name}/{told['mark']}"
        answer = _ask(root, "get", key, lambda: root.remote.get(key))
    except (FormatError, FileNotFoundError):  # nothing is there, or no mark
        return None
    return None if answer is None else answer[0].decode(errors="replace")


def _attached(told: dict[str, Any]) -> tuple[MirrorRoot, str]:
    """This node's mirror, and the cache's name there.

    Raises:
        FormatError: There is no such cache at the address.
        StokerError: As `attach`.
    """
    mirrors = Path(told["mirrors"])
    with explained(mirrors):
        folder = attach(
            f"{told['url']}/{told['name']}/{told['fingerprint']}",
            mirrors,
            told["limit_bytes"],
            must_exist=True,
        )
    found = root_of(folder)
    assert found is not None, folder
    return found


def _ask(root: MirrorRoot, operation: str, key: str, attempt: Callable[[], Any]) -> Any:
    return root.retries.run(attempt, f"{operation} {root.url}/{key}")


def _unseen(told: dict[str, Any], node: str) -> str:
    name = f"{told['name']}/{told['fingerprint']}"
    if told["url"] is None:
        return (
            f"node {node} does not see {told['cache_dir']}/{name}, where {told['driver']} has just written "
            f"{told['mark']}. Expected the cache folder on storage that all nodes see at the same path: a "
            "file server, or a bucket that is mounted. Set training.latent_cache_dir (--cache-dir) to such a "
            "place, or to an address (s3://, gs://, file://)"
        )
    return (
        f"node {node} does not find {told['mark']} at {told['url']}/{name}, where {told['driver']} has just "
        "put it. Expected one store behind that address from all nodes: the same variables "
        "(AWS_ENDPOINT_URL, credentials) in the environment of Ray there, and for file:// storage that all "
        "nodes share"
    )
