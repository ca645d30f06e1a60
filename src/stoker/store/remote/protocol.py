"""What a mirror asks of the place that its caches lie in, and the addresses of such places.

Implemented for object stores by `objects.py` and for folders on shared storage by `folder.py`. Both make one
attempt a call: `retries.py` repeats what may pass.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, TypeAlias
from urllib.parse import urlsplit

from stoker.errors import ConfigError
from stoker.store.protocols import Buffer

SCHEMES = ("s3", "gs", "az", "file")
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(/{1,3}|$)")
_MEANT = re.compile(rf"({'|'.join(SCHEMES)}):(/|$)|[A-Za-z][A-Za-z0-9+.-]*://")
"""How a text begins that is no local path; of an address that went through a `Path`, one slash is left."""
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{2,254}")
_PART = re.compile(r"[\w.+=@ -]{1,255}")

Expected: TypeAlias = "str | Literal['anything'] | None"
"""What a put replaces: the version with this etag, nothing (None), or whatever is there."""


class PassingError(Exception):
    """One attempt failed in a way that may pass: a cut, a time-out, a busy server. Never leaves `retries`."""


class ChangedError(Exception):
    """An object is not the version that was expected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Object:
    """One object, by its name below the address of its `Remote`."""

    name: str
    bytes: int
    etag: str
    """Changes when the content does; empty where the place has none."""


class Remote(Protocol):
    """A folder of objects. Methods make one attempt, and are safe to call from several threads.

    Raises:
        PassingError: Trying again may help.
        ChangedError: The object is another version than asked for.
        FileNotFoundError: There is no such object.
        ReadOnlyError: It may not be written.
        ServiceError: The place refuses, and will refuse again; says what to do. `AccessError`: it is not
            there, or credentials are missing or wrong.
    """

    @property
    def url(self) -> str:
        """Its address; holds no secrets."""
        ...

    def list(self, folder: str = "") -> tuple[list[str], list[Object]]:
        """Folders and objects right below `folder`, by name there; nothing where there is no such folder."""
        ...

    def read(self, name: str, begin: int, end: int, *, etag: str, sink: Callable[[Buffer], None]) -> None:
        """Hand bytes `begin:end` of an object to `sink`, piece by piece, in order.

        Raises:
            PassingError: It ended early; the pieces that came are right.
        """
        ...

    def get(self, name: str, *, known: str = "") -> tuple[bytes, str] | None:
        """A whole small object and its etag; None where that is `known`."""
        ...

    def head(self, name: str) -> Object:
        """Size and etag of an object."""
        ...

    def put(self, name: str, data: bytes | Path, *, expected: Expected = "anything") -> str:
        """Put an object, whole or not at all; returns its etag."""
        ...

    def rename(self, name: str, new: str) -> None:
        """Give an object another name."""
        ...

    def remove(self, name: str) -> None:
        """Remove an object; no error where there is none."""
        ...


def is_url(place: str | Path) -> bool:
    """Whether a place is meant as an address, also one that `parse_url` refuses, and not as a local path.

    >>> is_url("s3://bucket/caches"), is_url("http://host/caches"), is_url("data/latent_cache")
    (True, True, False)
    """
    return _MEANT.match(str(place)) is not None


def local_path(place: str | Path, what: str) -> Path:
    """A place that can only be a folder of this machine.

    Args:
        place: What was given.
        what: What it is for; begins the message.
    Raises:
        ConfigError: It is an address.
    """
    if is_url(place):
        raise ConfigError(
            f"{what} is {masked(str(place))}, an address. Expected a folder of this machine; only caches lie "
            "at addresses (stoker push)"
        )
    return Path(place)


def parse_url(place: str | Path) -> str:
    """The one way to write an address: no slash at the end, no empty parts.

    >>> parse_url("s3://bucket/caches//burgers/")
    's3://bucket/caches/burgers'

    Raises:
        ConfigError: It is none, or holds what belongs into the environment. It is not repeated then.
    """
    text = str(place)
    found = _URL.match(text)
    if found is None or found[1].lower() not in SCHEMES:
        raise ConfigError(
            f"{masked(text)} is no address of caches. Expected s3://BUCKET/FOLDER, gs://BUCKET/FOLDER, "
            "az://CONTAINER/FOLDER or file:///FOLDER; a path on this machine has no ://"
        )
    scheme, rest = found[1].lower(), text[found.end() :]
    if "?" in rest or "#" in rest or (scheme != "file" and "@" in rest.partition("/")[0]):
        raise ConfigError(
            f"an address in {scheme}:// holds a user, a query or a fragment (not repeated here: it may be "
            "secret). Give the plain address; credentials come from the environment, see docs/objects.md"
        )
    parts = [part for part in rest.split("/") if part]
    if scheme == "file" and found[2] == "//":
        raise ConfigError(
            f"{masked(text)} names a host, not a path. Expected three slashes, as file:///{'/'.join(parts)}"
        )
    if scheme != "file" and not parts:
        raise ConfigError(f"{masked(text)} names no bucket. Expected {scheme}://BUCKET/FOLDER")
    if scheme != "file" and not _BUCKET.fullmatch(parts[0]):
        raise ConfigError(
            f"{masked(text)}: {parts[0]!r} is no name of a bucket. Expected three characters or more: "
            "letters, digits, '.', '_' and '-', the first a letter or a digit"
        )
    if any(part in (".", "..") or not _PART.fullmatch(part) for part in parts):
        raise ConfigError(
            f"{masked(text)} has a part with other characters than letters, digits and '_.+=@ -'. Rename it"
        )
    return f"{scheme}://{'/' if scheme == 'file' else ''}{'/'.join(parts)}"


def masked(text: str) -> str:
    """An address without what may be secret in it, for messages."""
    try:
        split = urlsplit(text)
    except ValueError:
        return "the address given"
    where = split.netloc.rpartition("@")[2]
    return f"{split.scheme}://{where}{split.path}" if split.scheme else text.partition("?")[0]
