"""Where a database is, and how to speak of it without its password."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from stoker.errors import ConfigError

POSTGRES = ("postgresql", "postgres")
_SECRET = ("password", "sslpassword", "passfile")


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """One database."""

    kind: Literal["sqlite", "postgresql"]
    target: str = field(repr=False)
    """A file's path, or all that libpq needs, which may hold a password."""
    shown: str
    """The same for messages: neither user nor password nor options."""
    secrets: tuple[str, ...] = field(default=(), repr=False)
    """Texts that must not appear in a message."""

    def hide(self, text: str) -> str:
        """`text` without what is secret."""
        for secret in self.secrets:
            text = text.replace(secret, "***")
        return text


def parse_address(url: str | Path) -> Address:
    """The database that is meant.

    >>> parse_address("sqlite:///rows.db").target, parse_address("rows.db").shown
    ('rows.db', 'rows.db')
    >>> parse_address("postgresql://me:secret@db.example:5433/lab?sslmode=require").shown
    'postgresql://db.example:5433/lab'

    Args:
        url: A file (SQLite), `sqlite:///file`, or `postgresql://[user[:password]@]host[:port]/database`.

    Raises:
        ConfigError: It is neither; the message does not repeat it, since it may hold a password.
    """
    if not isinstance(cast("object", url), str | Path):
        raise ConfigError(
            f"the database is {url!r}. Expected a SQLite file, sqlite:///FILE or postgresql://HOST/DATABASE"
        )
    text = str(url)
    if "://" not in text:
        return _sqlite(text)
    scheme, _, rest = text.partition("://")
    scheme = scheme.partition("+")[0].lower()
    if scheme == "sqlite":
        return _sqlite(unquote(rest.partition("?")[0])[1:])
    if scheme not in POSTGRES:
        raise ConfigError(
            f"a database of kind {scheme!r} cannot be read. Give a SQLite file, sqlite:///FILE or "
            "postgresql://HOST/DATABASE"
        )
    try:
        parts = urlsplit(f"postgresql://{rest}")
        secrets = tuple(_secrets(parts.password, parts.query))
    except ValueError:
        raise ConfigError(
            "the database's URL is malformed. Expected postgresql://HOST:PORT/DATABASE"
        ) from None
    host = parts.netloc.rpartition("@")[2]
    return Address(
        kind="postgresql",
        target=f"postgresql://{rest}",
        shown=f"postgresql://{host}{parts.path}",
        secrets=secrets,
    )


def sqlite_url(path: str | Path) -> str:
    """Return the address of a SQLite file, from which `parse_address` reads the very same path.

    >>> parse_address(sqlite_url("/data/100%25 of?it.db")).target
    '/data/100%25 of?it.db'
    """
    return f"sqlite:///{quote(str(path))}"


def has_password(url: str) -> bool:
    """Whether a URL holds a secret, which a settings file should not.

    >>> has_password("postgresql://me:secret@host/db"), has_password("postgresql://me@host/db")
    (True, False)
    """
    return bool(parse_address(url).secrets)


def _sqlite(path: str) -> Address:
    if not path:
        raise ConfigError("the database's file has no name. Expected sqlite:///FILE, or the file's path")
    return Address(kind="sqlite", target=path, shown=path)


def _secrets(password: str | None, query: str) -> Iterator[str]:
    """Passwords, as written and as meant; longest first, so that no part of one is left over."""
    found = [password] if password else []
    found += [value for name, value in parse_qsl(query) if name in _SECRET and value]
    yield from sorted({*found, *map(unquote, found)}, key=len, reverse=True)
