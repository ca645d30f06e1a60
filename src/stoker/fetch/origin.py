"""What a place to fetch from has to offer: the bytes of a file from an offset on, and of which version."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from stoker.errors import ConfigError
from stoker.fetch.wanted import Algorithm
from stoker.units import MIB

PIECE_BYTES = MIB
_REMOTE = re.compile(r"^[A-Za-z0-9_][A-Za-z0-9_ +@.-]*:(?!//)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """Which content a place has now."""

    bytes: int | None
    """Its size; None: not said."""
    tag: str
    """Changes with the content; empty: the place says nothing of the kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """A file as a place lists it."""

    name: str
    """Below the folder that was listed."""
    bytes: int | None = None
    algorithm: Algorithm | None = None
    digest: str = ""


class Stream(Protocol):
    """The bytes of one file. `read` is called in one thread; `stop` may be called in another."""

    offset: int
    """Where it begins: what was asked for, or 0 where the content is another than before."""
    version: Version

    def read(self) -> bytes:
        """The next piece, as soon as there is one; empty at the end.

        Raises:
            TransferError: It broke off.
        """
        ...

    def close(self) -> None:
        """Let go of it; called once, in the thread that reads."""
        ...

    def stop(self) -> None:
        """End it early, where that is possible, so that a `read` that waits returns; harmless afterwards."""
        ...


class Origin(Protocol):
    """Where a file comes from."""

    def open(self, offset: int, tag: str, *, stall_s: float) -> Stream:
        """The file from `offset` on, if it is still the content of `tag`; else from its begin.

        Args:
            tag: Empty: whatever there is, since a digest decides in the end.
            stall_s: Seconds without an answer after which it gives up, as far as it can.

        Raises:
            TransferError: It is not there, is refused, or does not answer.
        """
        ...


def is_remote(source: str) -> bool:
    """Whether an address is one of rclone: `remote:path`."""
    return _REMOTE.match(source) is not None


def origin_of(source: str, base: Path) -> Origin:
    """The place that an address means.

    Args:
        base: Folder that paths are relative to.

    Raises:
        ConfigError: It is none, or it carries a secret.
    """
    from stoker.fetch.folder import FolderOrigin
    from stoker.fetch.http import HttpOrigin
    from stoker.fetch.rclone import RcloneOrigin

    scheme = source.partition("://")[0].lower() if "://" in source else ""
    if scheme in ("http", "https"):
        parts = urlsplit(source)
        if not parts.hostname or "@" in parts.netloc:
            raise ConfigError(
                f"{shown_source(source)} names no host, or carries a user name. Secrets belong into an "
                "rclone remote, or into the query of an address that ends soon"
            )
        return HttpOrigin(source)
    if scheme == "file":
        return FolderOrigin(Path(urlsplit(source).path))
    if scheme:
        raise ConfigError(
            f"{shown_source(source)} is of a kind that cannot be fetched. Expected http://, https://, "
            "remote:path (rclone) or a path"
        )
    if source.startswith(":"):
        raise ConfigError(
            "an rclone remote written out in full (:s3,...:) would show its settings to everybody. Give it a "
            "name: `rclone config`, or RCLONE_CONFIG_<NAME>_TYPE and so on in the environment"
        )
    if is_remote(source):
        return RcloneOrigin(source)
    return FolderOrigin(base / Path(source).expanduser())


def shown_source(source: str) -> str:
    """An address as messages may show it: without user name, password and query.

    >>> shown_source("https://me:secret@host/a.h5?token=1"), shown_source("b2:bucket/a.h5")
    ('https://host/a.h5?...', 'b2:bucket/a.h5')
    """
    if "://" not in source:
        return source if not source.startswith(":") else source.partition(",")[0] + ",...:"
    scheme, _, rest = source.partition("://")
    host, slash, path = rest.partition("/")
    path, query, _ = path.partition("?")
    return f"{scheme}://{host.rpartition('@')[2].partition('?')[0]}{slash}{path}{'?...' if query else ''}"
