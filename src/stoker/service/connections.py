"""Databases that the operator named: a name for requests, and a file with the URL and its password.

Requests, answers, pages and `job.json` have only the name (and `job.json` the path of the file). A process
that reads rows takes the URL without its password, and gives the password to PostgreSQL's own library in its
environment (`PGPASSWORD`). So no setting, message or file of a job holds it. The file is read for each use:
a new password needs no restart.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast
from urllib.parse import unquote, urlsplit

from stoker.errors import ConfigError
from stoker.service.security import check_name
from stoker.sources.sql.query import has_password, parse_database_url

_MOST_BYTES = 4096


def parse_connections(given: Sequence[str]) -> dict[str, str]:
    """Return the absolute paths of the files of connections by name; each file is read once to check it.

    Args:
        given: `NAME=FILE` each.
    Raises:
        ConfigError: One is not of that form, a name is given twice, or a file does not fit.
    """
    found: dict[str, str] = {}
    for one in given:
        name, equals, file = one.partition("=")
        if not equals or not name or not file:
            raise ConfigError(f"--connection {one!r} names no file", hint="Expected NAME=FILE")
        if name in found:
            raise ConfigError(f"--connection {name} is given twice", hint="Give each a name of its own")
        path = str(Path(file).absolute())
        read_connection(check_name(name), path)
        found[name] = path
    return found


def read_connection(name: str, path: str) -> tuple[str, str | None]:
    """Return the URL of a connection without its password, and the password; None: it has none.

    Raises:
        ConfigError: The file cannot be read, others may read it, or it has no URL of PostgreSQL. No message
            repeats what is in it.
    """
    where = f"connection {name}: {path}"
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(_MOST_BYTES) if stat.S_ISREG(mode) else b""
    except OSError as error:
        raise ConfigError(
            f"{where}: {error.strerror}", hint="Expected a file that the service's user may read"
        ) from None
    if mode & 0o077:
        raise ConfigError(
            f"{where} may be read by others (mode {mode & 0o777:o})", hint=f"Run: chmod 600 {path}"
        )
    try:
        return _split(text.decode().strip())
    except (ConfigError, ValueError):
        raise ConfigError(
            f"{where} has no URL of a PostgreSQL database, or one with sslpassword, passfile or an unknown "
            "option",
            hint="Expected one line: postgresql://USER:PASSWORD@HOST/DATABASE; in the password write "
            "% as %25, / as %2F, # as %23, ? as %3F, @ as %40, : as %3A and & as %26",
        ) from None


def _split(url: str) -> tuple[str, str | None]:
    """Return a URL without its password, and the password; all else stays as it is written."""
    address = parse_database_url(url)
    if address.kind != "postgresql" or len(url.split()) != 1:
        raise ConfigError("the URL is of another kind")
    parts = urlsplit(url)
    user, at, host = parts.netloc.rpartition("@")
    bare = f"postgresql://{user.partition(':')[0]}{at}{host}{parts.path}"
    options = [one for one in parts.query.split("&") if unquote(one.partition("=")[0]) != "password"]
    bare += f"?{'&'.join(options)}" if any(options) else ""
    from psycopg.pq import Conninfo

    # libpq would repeat an unknown one, and it may be a part of the password.
    unknown = {*address.options} - {one.keyword.decode() for one in Conninfo.get_defaults()}
    if unknown or has_password(bare):
        raise ConfigError("the URL has an unknown option or a further secret")
    return bare, address.options.get("password")


def with_url(spec: Mapping[str, Any], connections: Mapping[str, str]) -> tuple[dict[str, Any], str | None]:
    """Return the spec of a data set with the URL of its connection, and the password.

    Args:
        spec: See `Dataset.spec`; one without a connection is returned as it is.
        connections: Files by name (`DataAccess.connections`), which was checked for its name.
    Raises:
        ConfigError: The connection was not given, or its file does not fit.
    """
    name = spec.get("connection")
    if name is None:
        return dict(spec), None
    url, password = read_connection(str(name), connections[str(name)])
    return {**spec, "url": url}, password


def with_urls(
    datasets: Sequence[Mapping[str, Any]], connections: Mapping[str, str]
) -> tuple[list[dict[str, Any]], str | None]:
    """Return data sets (`datasets.describe`) with the URLs of their connections, and the password.

    All data sets of a job are in one database, so there is one password.
    """
    found: list[dict[str, Any]] = []
    password: str | None = None
    for one in datasets:
        spec, secret = with_url(cast("Mapping[str, Any]", one["spec"]), connections)
        found.append({**one, "spec": spec})
        password = password or secret
    return found, password


def use_password(password: str | None) -> None:
    """Let this process and those that it starts use a password for PostgreSQL."""
    if password is not None:
        os.environ["PGPASSWORD"] = password
