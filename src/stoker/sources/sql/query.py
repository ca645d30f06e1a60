"""Requests to a database, as SQL that SQLite and PostgreSQL share."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from stoker.errors import ConfigError, arg
from stoker.sources.sql.rows import JsonText, PickedText, Text

# ----------------------------------------------------------------------------------------------------------
# Where a database is, and how to speak of it without its password.


POSTGRES = ("postgresql", "postgres")
_SECRET = ("password", "sslpassword", "passfile")


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseURL:
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


def parse_database_url(url: str | Path) -> DatabaseURL:
    """Return the database that is meant.

    >>> parse_database_url("sqlite:///rows.db").target, parse_database_url("rows.db").shown
    ('rows.db', 'rows.db')
    >>> parse_database_url("postgresql://me:secret@db.example:5433/lab?sslmode=require").shown
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
    return DatabaseURL(
        kind="postgresql",
        target=f"postgresql://{rest}",
        shown=f"postgresql://{host}{parts.path}",
        secrets=secrets,
    )


def sqlite_url(path: str | Path) -> str:
    """Return the address of a SQLite file, from which `parse_database_url` reads the very same path.

    >>> parse_database_url(sqlite_url("/data/100%25 of?it.db")).target
    '/data/100%25 of?it.db'
    """
    return f"sqlite:///{quote(str(path))}"


def has_password(url: str) -> bool:
    """Return True if a URL holds a secret, which a settings file should not.

    >>> has_password("postgresql://me:secret@host/db"), has_password("postgresql://me@host/db")
    (True, False)
    """
    return bool(parse_database_url(url).secrets)


def _sqlite(path: str) -> DatabaseURL:
    if not path:
        raise ConfigError("the database's file has no name. Expected sqlite:///FILE, or the file's path")
    return DatabaseURL(kind="sqlite", target=path, shown=path)


def _secrets(password: str | None, query: str) -> Iterator[str]:
    """Passwords, as written and as meant; longest first, so that no part of one is left over."""
    found = [password] if password else []
    found += [value for name, value in parse_qsl(query) if name in _SECRET and value]
    yield from sorted({*found, *map(unquote, found)}, key=len, reverse=True)


# ----------------------------------------------------------------------------------------------------------
# Have a database pick the values of a JSON column that a rule uses, so that no others are sent or parsed.
#
# Of a list of objects with hundreds of numbers a rule often wants a few. The database holds it in a form
# that it walks much faster than JSON is parsed here: it sends the picked values of each entry as a list in
# their order, marked so that they are told from a complete value. A value that is not a list of at most so
# many objects is sent completely, so that its error is found and reported in one place.


_PLAIN_NAME = re.compile(r"[A-Za-z0-9_ -]+")
"""Names that JSON writes in one way only: with escapes, `a` could stand there as `\\u0061`."""
_MOST_ARGUMENTS = 90
"""Of a function in SQLite, less than the limit of 100 that some builds have."""
_PICKED = b"\x01"
"""Goes before what was picked; before what comes whole goes a 2. Neither begins JSON."""
JSONB, JSONB_LIST = 3802, 3807
"""Types' numbers in PostgreSQL: jsonb, jsonb[]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pick:
    """The parts of a column that rules use."""

    column: str
    most: int
    """Entries at most."""
    paths: tuple[tuple[str, ...], ...]
    """Names that lead to each value."""

    @property
    def can_be_asked(self) -> bool:
        """True where SQL picks the same values as Python would."""
        return all(_PLAIN_NAME.fullmatch(name) for path in self.paths for name in path)

    def in_sqlite(self, column: str) -> str | None:
        """Return an expression over a column of text; None where there are too many entries for one."""
        if self.most >= _MOST_ARGUMENTS or len(self.paths) >= _MOST_ARGUMENTS:
            return None
        entries = [self._entry(column, f"$[{place}]") for place in range(self.most)]
        objects = [
            f"coalesce(json_type({column}, '$[{place}]'), 'object') = 'object'" for place in range(self.most)
        ]
        regular = " AND ".join(
            [
                f"json_valid({column})",
                f"json_type({column}) = 'array'",
                f"json_array_length({column}) <= {self.most}",
                *objects,
            ]
        )
        count = f"json_array_length({column})"
        picked = f"char(1) || json_array({count}, {', '.join(entries)})"
        return (
            f"CASE WHEN typeof({column}) <> 'text' THEN {column} WHEN {regular} THEN {picked} "
            f"ELSE char(2) || {column} END"
        )

    def _entry(self, column: str, place: str) -> str:
        paths = [".".join([place, *(f'"{name}"' for name in path)]) for path in self.paths]
        listed = ", ".join(f"'{path}'" for path in paths)
        extracted = f"json_extract({column}, {listed})"
        # Of one path, `json_extract` gives no list.
        return extracted if len(self.paths) > 1 else f"json_array({extracted})"

    def in_postgres(self, column: str, kind: int) -> str | None:
        """Return an expression over a column of type `kind`; None where it is neither jsonb nor jsonb[]."""
        if kind not in (JSONB, JSONB_LIST):
            return None
        if kind == JSONB_LIST:
            entries, regular = f"unnest({column})", f"array_ndims({column}) = 1"
        else:
            regular = f"jsonb_typeof({column}) = 'array'"
            entries = f"jsonb_array_elements(CASE WHEN {regular} THEN {column} END)"
        steps = ["->".join(["stoker_entry", *(f"'{name}'" for name in path)]) for path in self.paths]
        objects = "bool_and(coalesce(jsonb_typeof(stoker_entry) = 'object', false))"
        picked = f"chr(1) || json_agg(json_build_array({', '.join(steps)}))::text"
        chosen = f"{regular} AND {objects} AND count(*) <= {self.most}"
        whole = f"chr(2) || to_jsonb({column})::text"
        return f"(SELECT CASE WHEN {chosen} THEN {picked} ELSE {whole} END FROM {entries} AS stoker_entry)"  # noqa: S608


def decode_picked(value: Any) -> Any:
    """Return a value of a column that was picked from, as `PickedText` or `JsonText`."""
    if isinstance(value, str):
        value = Text(value.encode("utf-8", "surrogateescape"))
    if not isinstance(value, Text):
        return value
    return PickedText(value[1:]) if value[:1] == _PICKED else JsonText(value[1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryTimeouts:
    """Timeouts of a database in seconds, and the number of attempts."""

    connect_s: float = 10.0
    """To be connected."""
    statement_s: float = 300.0
    """For one statement; the ordered read of the whole table is one."""
    lock_s: float = 30.0
    """For others who hold a lock; in SQLite for a writer."""
    attempts: int = 4
    """Tries in all, when there is no connection or it is lost; each begins with a new snapshot."""
    backoff_s: float = 0.5
    """Before the second try; twice as long before each further one."""

    def __post_init__(self) -> None:
        """Refuse what would wait for ever, or not try at all."""
        if min(self.connect_s, self.statement_s, self.lock_s) <= 0 or self.attempts < 1 or self.backoff_s < 0:
            raise ConfigError(f"{self} must have seconds above 0 and at least 1 attempt")

    @property
    def silence_s(self) -> float:
        """The longest that nothing may come: beyond it the database, or the disk below it, hangs."""
        return self.connect_s + self.statement_s + self.lock_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Rows of a table or query, in the order of their key."""

    address: DatabaseURL
    relation: str
    """`"table"` or `(query) AS q`."""
    name: str
    """The table's name, or `query`; part of the recipe."""
    key: tuple[str, ...]
    """Columns that tell rows apart."""
    columns: tuple[str, ...]
    """Further columns that are read."""
    where: str | None = None
    """Condition on the rows."""
    version_query: str | None = None
    """Gives one row that changes whenever the rows do."""
    picks: Mapping[str, Pick] = field(default_factory=dict[str, Pick])
    """Columns of which a part is enough."""
    unique: bool = True
    """A key that comes twice is an error."""
    timeouts: QueryTimeouts = QueryTimeouts()
    spill_dir: str | None = None
    """Folder of the file that rows are kept in; None: the system's for temporary files."""

    @property
    def where_it_is(self) -> str:
        """The database and the table, for messages."""
        return f"{self.address.shown}, {self.name}"

    @property
    def selected(self) -> tuple[str, ...]:
        """Key, then columns, each once."""
        return (*self.key, *(name for name in self.columns if name not in self.key))

    def probe_sql(self) -> str:
        """Asks for the names and types of all columns, and no row."""
        return f"SELECT * FROM {self.relation} LIMIT 0"  # noqa: S608 - names are quoted, the query is the user's

    def count_sql(self, *, filtered: bool) -> str:
        """Counts rows."""
        condition = self._condition() if filtered else ""
        return f"SELECT count(*) FROM {self.relation}{condition}"  # noqa: S608

    def select_sql(self, order: tuple[str, ...], picked: Mapping[str, str]) -> str:
        """Return the query of all rows; `order`: terms of `ORDER BY`, `picked`: in place of a column."""
        names = ", ".join(picked.get(name, quoted(name)) for name in self.selected)
        return f"SELECT {names} FROM {self.relation}{self._condition()} ORDER BY {', '.join(order)}"  # noqa: S608

    def _condition(self) -> str:
        return "" if self.where is None else f" WHERE ({self.where}\n)"


def relation_of(table: str | None, query: str | None) -> tuple[str, str]:
    """Return what follows `FROM`, and its name.

    >>> relation_of("lab.rows", None), relation_of(None, "SELECT 1 AS id;")
    (('"lab"."rows"', 'lab.rows'), ('(SELECT 1 AS id\\n) AS q', 'query'))

    Raises:
        ConfigError: Neither or both were given, or one is empty.
    """
    if (table is None) == (query is None) or not (table or query or "").strip():
        raise ConfigError(
            f"rows come from a table or a query. Give "
            f"{arg('table', 'NAME', setting='data.sql.table')} or {arg('query', 'SELECT ...')}, one of them"
        )
    if table is not None:
        return ".".join(map(quoted, table.split("."))), table
    return f"({(query or '').strip().rstrip(';')}\n) AS q", "query"


def quoted(name: str) -> str:
    """Return a name as SQL takes it whatever is in it."""
    return '"' + name.replace('"', '""') + '"'
