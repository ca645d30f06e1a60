"""What is asked of a database, as SQL that SQLite and PostgreSQL share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from stoker.errors import ConfigError, arg
from stoker.sources.sql.address import Address
from stoker.sources.sql.pick import Pick


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """How long a database is waited for, in seconds, and how often it is tried again."""

    connect_s: float = 10.0
    """To be connected."""
    statement_s: float = 300.0
    """For one statement; the ordered read of the whole table is one."""
    lock_s: float = 30.0
    """For others who hold a lock; in SQLite for a writer."""
    attempts: int = 4
    """Tries in all, when there is no connection or it is lost; each begins anew with a new snapshot."""
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

    address: Address
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
    """Whether a key that comes twice is an error."""
    timeouts: Timeouts = Timeouts()
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
        """All rows; `order` are the terms of `ORDER BY`, `picked` what is asked for in place of a column."""
        names = ", ".join(picked.get(name, quoted(name)) for name in self.selected)
        return f"SELECT {names} FROM {self.relation}{self._condition()} ORDER BY {', '.join(order)}"  # noqa: S608

    def _condition(self) -> str:
        return "" if self.where is None else f" WHERE ({self.where}\n)"


def relation_of(table: str | None, query: str | None) -> tuple[str, str]:
    """What stands after `FROM`, and its name.

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
    """A name as SQL takes it whatever is in it."""
    return '"' + name.replace('"', '""') + '"'
