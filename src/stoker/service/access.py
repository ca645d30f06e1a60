"""Which data the service may read since this start: below its roots, and on the servers that were named; and
which encoders its jobs may name.

A data set stays registered when the service is started with other roots or servers. So it is asked for again
before each use, by the service and by the worker of a job, from the names alone: nothing is opened.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, cast
from urllib.parse import parse_qsl, urlsplit

from stoker.errors import ConfigError, PathRefusedError, StokerError
from stoker.sources.sql.address import parse_address

URL_OPTIONS = frozenset({"host", "sslmode", "connect_timeout"})
"""Options of a PostgreSQL URL that a request may give. The others of libpq name files that it reads or
appends to, or change what a session may do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataAccess:
    """What the operator allowed at the start."""

    roots: tuple[str, ...] = ()
    """Folders, absolute, as they were written and as they really are."""
    servers: tuple[str, ...] = ()
    """PostgreSQL servers: host names, folders of sockets, or `local` for the default socket."""
    encoders: tuple[str, ...] = ()
    """Encoders that jobs may name, as `package.module:Class`: naming one runs its code."""

    def check(self, spec: Mapping[str, Any]) -> None:
        """Refuse a data set that may not be read.

        Args:
            spec: Of a data set that was registered, see `Dataset.spec`; what the service made may be read.
        Raises:
            PathRefusedError: It is outside the roots.
            ConfigError: It is on a server that was not named.
        """
        if "make" in spec:
            return
        path = str(spec.get("path", ""))
        if "url" in spec:
            address = parse_address(str(spec["url"]))
            if address.kind != "sqlite":
                self.check_server(str(spec["url"]))
                return
            path = address.target
        place = PurePosixPath(path)
        if ".." in place.parts or not any(place.is_relative_to(root) for root in self.roots):
            raise PathRefusedError(
                f"{path} is outside the folders that this service may read ({', '.join(self.roots)}). "
                f"Start it also with --root {place.parent}, or delete the data set"
            )

    def check_settings(self, settings: Mapping[str, Any]) -> None:
        """Refuse settings of a job that name code which the operator did not allow.

        Args:
            settings: `TrainingConfig.settings`.
        Raises:
            ConfigError: The encoder is not allowed, or an argument of it could be a path.
        """
        target = settings.get("encoder.target")
        if target is None:
            if settings.get("encoder.kind") == "module":
                raise ConfigError(
                    "settings: encoder.kind is 'module' without encoder.target. Name one of "
                    f"{', '.join(self.encoders) or 'none: the service was started without --allow-encoder'}"
                )
            return
        if target not in self.encoders:
            allowed = ", ".join(self.encoders) or "none"
            raise ConfigError(
                f"settings: encoder.target {target!r} is not an encoder that this service runs ({allowed}). "
                f"Start it with --allow-encoder {target}"
            )
        for text in texts_in(settings.get("encoder.arguments")):
            if "/" in text or "\\" in text or text.startswith("."):
                raise ConfigError(
                    f"settings: encoder.arguments holds {text!r}, which could be a path. A job gives numbers "
                    "and choices; a function that is allowed may open files by itself"
                )

    def why_not(self, spec: Mapping[str, Any]) -> str | None:
        """Return why a data set may not be read; None where it may."""
        try:
            self.check(spec)
        except StokerError as error:
            return str(error)
        return None

    def check_server(self, url: str) -> None:
        """Refuse a server that the operator did not name, and options that reach files or change sessions.

        Raises:
            ConfigError: It is one.
        """
        parts = urlsplit(url)
        options = parse_qsl(parts.query, keep_blank_values=True)
        if refused := sorted({name for name, _ in options} - URL_OPTIONS):
            raise ConfigError(
                f"the database's URL has the option {', '.join(refused)}. Expected none but "
                f"{', '.join(sorted(URL_OPTIONS))}"
            )
        named = {"" if server == "local" else server for server in self.servers}
        servers = {value for name, value in options if name == "host"} or {parts.hostname or ""}
        for server in servers - named:
            name = server or "local"
            raise ConfigError(
                f"this service does not read from the database server {name!r}. Start it with "
                f"--database-host {name}"
            )


def texts_in(value: Any) -> Iterator[str]:
    """Yield every text in a JSON value, names of members included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, inner in cast("Mapping[str, Any]", value).items():
            yield name
            yield from texts_in(inner)
    elif isinstance(value, list | tuple):
        for inner in cast("list[Any]", value):
            yield from texts_in(inner)
