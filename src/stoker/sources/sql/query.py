"""Requests to a database, as SQL that SQLite and PostgreSQL share."""

from __future__ import annotations

import itertools
import json
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Any, Literal, cast
from urllib.parse import quote, unquote, urlsplit

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError, arg
from stoker.sources.sql.rows import JsonText, PickedNumbers, PickedText, Text

# ----------------------------------------------------------------------------------------------------------
# Where a database is, and how to speak of it without its password.


POSTGRES = ("postgresql", "postgres")
_SECRET = ("password", "sslpassword", "passfile")


@dataclass(frozen=True, slots=True, kw_only=True)
class DatabaseURL:
    """One database."""

    kind: Literal["sqlite", "postgresql"]
    target: str = field(repr=False)
    """A file's path, or `options` as text for libpq (`host='db' port='5433'`), which may hold a password."""
    shown: str
    """The same for messages: neither user nor password nor options."""
    secrets: tuple[str, ...] = field(default=(), repr=False)
    """Texts that must not appear in a message."""
    options: Mapping[str, str] = field(default_factory=dict[str, str], repr=False, hash=False)
    """Options of libpq by name: host, port, user, password, dbname, and those after `?`."""

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
        ConfigError: It is neither, or two programs could read it in two ways; the message does not repeat it,
            since it may hold a password.
    """
    if not isinstance(cast("object", url), str | Path):
        raise ConfigError(
            f"the database is {url!r}",
            hint="Expected a SQLite file, sqlite:///FILE or postgresql://HOST/DATABASE",
        )
    text = str(url)
    if "://" not in text:
        return _sqlite(text)
    scheme, _, rest = text.partition("://")
    scheme = scheme.partition("+")[0].lower()
    if scheme == "sqlite":
        if not rest.startswith("/"):
            raise ConfigError(
                f"{text} names a host, and a SQLite database is a file", hint=f"Write sqlite:///{rest}"
            )
        return _sqlite(unquote(rest.partition("?")[0])[1:])
    if scheme not in POSTGRES:
        raise ConfigError(
            f"a database of kind {scheme!r} cannot be read",
            hint="Give a SQLite file, sqlite:///FILE or postgresql://HOST/DATABASE",
        )
    return _postgres(rest)


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
        raise ConfigError(
            "the database's file has no name", hint="Expected sqlite:///FILE, or the file's path"
        )
    return DatabaseURL(kind="sqlite", target=path, shown=path)


# Programs disagree on a URL with an unescaped `@`, `/`, `?` or `#` in it: one connects to a host that another
# did not see. So such a URL is refused, and the driver gets what was read here, never the URL.


_HOST = re.compile(r"(?:\[([0-9A-Za-z:.%]+)\]|([^:\[\]]*))(?::([0-9]*))?")
_MALFORMED = re.compile(r"%(?![0-9A-Fa-f]{2})|%00|[\x00-\x1f\x7f]")
"""What no part of a URL may hold."""
_OPTION = re.compile(r"[A-Za-z_]+")


def _postgres(rest: str) -> DatabaseURL:
    try:
        parts = urlsplit(f"postgresql://{rest}")
        if "#" in rest or "@" in parts.path + parts.query or _MALFORMED.search(rest):
            raise ValueError
        user, _, host = parts.netloc.rpartition("@")
        raw = [*_of_netloc(user, host), ("dbname", parts.path.removeprefix("/")), *_of_query(parts.query)]
        options = {name: unquote(value, errors="strict") for name, value in raw}
    except ValueError:
        raise ConfigError(
            "the database's URL is malformed",
            hint="Expected postgresql://HOST:PORT/DATABASE; within a name or a password write "
            "% as %25, / as %2F, # as %23, ? as %3F, @ as %40 and : as %3A",
        ) from None
    if options.pop("ssl", "") == "true":  # as libpq reads it
        options["sslmode"] = "require"
    options = {name: value for name, value in options.items() if value}
    secrets = {text for name, value in raw if name in _SECRET and value for text in (value, unquote(value))}
    quoted = {name: re.sub(r"([\\'])", r"\\\1", value) for name, value in options.items()}
    return DatabaseURL(
        kind="postgresql",
        target=" ".join(f"{name}='{value}'" for name, value in quoted.items()),
        shown=f"postgresql://{host}{parts.path}",
        secrets=tuple(sorted(secrets, key=len, reverse=True)),  # so that no part of one is left over
        options=options,
    )


def _of_netloc(user: str, hosts: str) -> Iterator[tuple[str, str]]:
    """Yield options, still escaped. libpq takes lists of hosts and of ports, separated by commas."""
    name, _, password = user.partition(":")
    yield from (("user", name), ("password", password))
    found = [_HOST.fullmatch(one) for one in hosts.split(",")]
    if not all(one and (not one[3] or 0 < int(one[3]) < 65536) for one in found):
        raise ValueError
    named = [(one[1] or one[2], one[3] or "") for one in found if one]
    yield "host", ",".join(host for host, _ in named)
    if any(port for _, port in named):
        yield "port", ",".join(port for _, port in named)


def _of_query(query: str) -> Iterator[tuple[str, str]]:
    """Yield options, still escaped; of several with one name the last counts."""
    for piece in query.split("&") if query else ():
        name, equals, value = piece.partition("=")
        if not equals or not _OPTION.fullmatch(name := unquote(name)):
            raise ValueError
        yield name, value


# ----------------------------------------------------------------------------------------------------------
# Of a JSON list of objects only the numbers that a rule uses, so that no others are sent, kept or parsed.
#
# Of a list of objects with hundreds of numbers a rule often wants a few. Wherever they are picked, by the
# database or here, the same values are kept: float64 of each entry in turn. A list in which one of them is
# something else is kept as JSON of what was picked. What is not a list of at most so many objects is kept
# completely. So every error is found and reported in one place.


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
    truth: tuple[str, ...] | None = None
    """The path among them that leads to true or false."""

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

    def in_postgres(self, column: str, kind: int, *, as_numbers: bool) -> str:
        """Return an expression over a value of type jsonb or jsonb[], as `unpacked_in_postgres` gives it.

        Args:
            column: Name of that value.
            kind: Its type.
            as_numbers: Ask for `float8[]`, with NaN for what is not there. The statement fails unless every
                list of the table is regular and all values are numbers, the truth true or false. Else ask
                for text, which fails for nothing.
        """
        if kind == JSONB_LIST:
            # An empty array has no dimensions: NULL.
            regular = f"(cardinality({column}) = 0 OR array_ndims({column}) = 1)"
            entries = f"unnest({column})"
        else:
            regular = f"jsonb_typeof({column}) = 'array'"
            entries = f"jsonb_array_elements(CASE WHEN {regular} THEN {column} END)"
        steps = ["->".join(["stoker_entry", *(f"'{name}'" for name in path)]) for path in self.paths]
        # Of an empty list, each aggregate but count is NULL.
        objects = "coalesce(bool_and(coalesce(jsonb_typeof(stoker_entry) = 'object', false)), true)"
        chosen = f"{regular} AND {objects} AND count(*) <= {self.most}"
        if as_numbers:
            casts = ["boolean::int::float8" if path == self.truth else "float8" for path in self.paths]
            numbers = [f"coalesce(({s})::{c}, 'NaN')" for s, c in zip(steps, casts, strict=True)]
            picked = f"coalesce(array_agg(ARRAY[{', '.join(numbers)}]), '{{}}')"
            # '?' is not a number: the cast fails, once there is such a row.
            otherwise = f"WHEN {column} IS NOT NULL THEN ARRAY[chr(63 + 0 * count(*)::int)::float8]"
        else:
            listed = f"json_agg(json_build_array({', '.join(steps)}))"
            picked = f"chr(1) || coalesce({listed}::text, '[]')"
            otherwise = f"ELSE chr(2) || to_jsonb({column})::text"
        return f"(SELECT CASE WHEN {chosen} THEN {picked} {otherwise} END FROM {entries} AS stoker_entry)"  # noqa: S608


def unpacked_in_postgres(column: str, kind: int) -> str:
    """Return an expression for the same value, unpacked: else each use of it would unpack it again."""
    if kind == JSONB_LIST:
        return f"CASE WHEN {column} IS NOT NULL THEN {column} || '{{}}'::jsonb[] END"
    return f"{column} #> '{{}}'"


def decode_picked(values: Sequence[Any], pick: Pick) -> list[Any]:
    """Return what is kept of values that a database picked as text; others stay as they are."""
    kept = [Text(v.encode("utf-8", "surrogateescape")) if isinstance(v, str) else v for v in values]
    places = [n for n, value in enumerate(kept) if isinstance(value, Text) and value[:1] == _PICKED]
    texts = [kept[place][1:] for place in places]
    packed = _packed_together(texts, len(pick.paths))
    for place, value in zip(places, packed or [_decoded(text, pick) for text in texts], strict=True):
        kept[place] = value
    return [JsonText(value[1:]) if isinstance(value, Text) else value for value in kept]


def _packed_together(texts: Sequence[bytes], width: int) -> list[bytes] | None:
    together = b"[" + b",".join(texts) + b"]"
    if b'"' in together or b"{" in together:
        return None  # text or an object in the place of a number
    try:
        return pack_numbers([picked_entries(entries) for entries in json.loads(together)], width)
    except (ValueError, RecursionError):  # an integer of thousands of digits, or lists in lists in lists
        return None


def _decoded(text: bytes, pick: Pick) -> bytes:
    try:
        return keep_picked(picked_entries(json.loads(text.decode("utf-8", "surrogateescape"))), pick)
    except (ValueError, RecursionError):
        return PickedText(text)


def picked_entries(found: Any) -> list[list[Any]]:
    """Return the entries of a list that a database picked: SQLite fills it up and says how many there are."""
    return found[1 : 1 + found[0]] if found and isinstance(found[0], int) else found


def keep_picked(entries: list[list[Any]], pick: Pick) -> bytes:
    """Return what is kept of one list: numbers, or JSON where some value is not a number."""
    kinds = {type(value) for entry in entries for value in entry}
    if kinds <= {float, int, bool, type(None)} and (packed := pack_numbers([entries], len(pick.paths))):
        return packed[0]
    return PickedText(json.dumps(entries, separators=(",", ":")).encode())


def pack_numbers(lists: Sequence[Sequence[Sequence[Any]]], width: int) -> list[bytes] | None:
    """Return lists of entries of `width` numbers, or None, as bytes; None where some value has no float64."""
    flat = [entry for entries in lists for entry in entries]
    try:
        numbers = np.array(flat, np.float64) if flat else np.empty((0, width))
    except (ValueError, TypeError, OverflowError):
        return None
    if numbers.shape != (len(flat), width) or np.isinf(numbers).any():
        return None
    return slice_numbers(numbers, [*map(len, lists)])


def slice_numbers(numbers: NDArray[np.float64], counts: Sequence[int]) -> list[bytes]:
    """Return the rows of `numbers` as the bytes of lists that have so many of them."""
    data, ends = numbers.astype("<f8").tobytes(), np.cumsum([0, *counts]) * 8 * numbers.shape[1]
    return [PickedNumbers(data[low:high]) for low, high in itertools.pairwise(ends.tolist())]


def value_at(entry: Any, path: tuple[str, ...]) -> Any:
    """Return the value at a path; None where the path leads nowhere."""
    for name in path:
        if not isinstance(entry, dict):
            return None
        entry = cast("dict[str, Any]", entry).get(name)
    return entry


class ListReader:
    """Picks from JSON text here. msgspec skips what it is not asked for much faster than SQLite does."""

    def __init__(self, pick: Pick, msgspec: Any) -> None:
        self._pick = pick
        kind, names = _struct(msgspec, pick.paths)
        self._decode = msgspec.json.Decoder(list[kind]).decode
        self._refused = (msgspec.DecodeError, ValueError, RecursionError)
        values = operator.attrgetter(*(names[path] for path in pick.paths))
        # Of one name, `attrgetter` gives no tuple.
        self._values: Callable[[Any], Any] = values if len(names) > 1 else partial(_one_value, values)

    def keep(self, values: Sequence[Any]) -> list[Any]:
        """Return what is kept of values that are text; others stay as they are."""
        kept, places, counts, flat = [*values], list[int](), list[int](), list[Any]()
        for place, text in enumerate(values):
            if not isinstance(text, Text):
                continue
            try:
                entries = self._decode(text)
            except self._refused:
                entries = None
            if entries is None or len(entries) > self._pick.most:
                kept[place] = self._looked_at(text)
                continue
            flat.extend(chain.from_iterable(map(self._values, entries)))
            places.append(place)
            counts.append(len(entries))
        # Of a flat list numpy makes an array in half the time of one of tuples.
        numbers = np.array(flat, np.float64).reshape(-1, len(self._pick.paths))
        for place, packed in zip(places, slice_numbers(numbers, counts), strict=True):
            kept[place] = packed
        return kept

    def _looked_at(self, text: Text) -> bytes:
        """Return the same of a list whose values are not all numbers, or of what is not such a list."""
        try:
            found = json.loads(text.decode("utf-8", "surrogatepass"), parse_constant=refuse_constant)
        except (ValueError, RecursionError):
            return JsonText(text)
        entries = cast("list[Any]", found) if isinstance(found, list) else None
        if entries is None or len(entries) > self._pick.most or not all(isinstance(e, dict) for e in entries):
            return JsonText(text)
        return keep_picked([[value_at(e, path) for path in self._pick.paths] for e in entries], self._pick)


def _one_value(value_of: Callable[[Any], Any], entry: Any) -> tuple[Any]:
    return (value_of(entry),)


def refuse_constant(name: str) -> None:
    """Refuse what Python takes for a number in JSON: NaN and infinities."""
    raise ValueError(f"{name} is not a JSON number")


def list_reader(pick: Pick) -> ListReader | None:
    """Return a reader of JSON lists, or None: msgspec is not installed, or a path leads on from another."""
    paths = pick.paths
    if any(long[: len(short)] == short for short in paths for long in paths if len(long) > len(short)):
        return None
    try:
        return ListReader(pick, import_module("msgspec"))
    except ImportError:
        return None


def _struct(msgspec: Any, paths: Iterable[tuple[str, ...]]) -> tuple[Any, dict[tuple[str, ...], str]]:
    """Return a type that has the values at some paths, and by path the attribute that holds it."""
    inner: dict[str, list[tuple[str, ...]]] = {}
    for first, *rest in paths:
        inner.setdefault(first, []).append(tuple(rest))
    fields: list[tuple[str, Any, Any]] = []
    attributes: dict[tuple[str, ...], str] = {}
    for number, (name, rests) in enumerate(inner.items()):
        own = f"field{number}"
        if rests == [()]:
            fields.append((own, float | bool | None, None))
            attributes[(name,)] = own
            continue
        kind, names = _struct(msgspec, rests)
        fields.append((own, kind, kind()))
        attributes |= {(name, *rest): f"{own}.{attribute}" for rest, attribute in names.items()}
    renamed = {f"field{number}": name for number, name in enumerate(inner)}
    return msgspec.defstruct("Entry", fields, rename=renamed, frozen=True, gc=False), attributes


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryTimeouts:
    """Timeouts of a database in seconds, and the number of attempts."""

    connect_s: float = 10.0
    """Until it is connected."""
    statement_s: float = 300.0
    """For one statement; the ordered read of the entire table is one."""
    lock_s: float = 30.0
    """For others that hold a lock; in SQLite for a writer."""
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

    def select_sql(
        self, order: tuple[str, ...], picked: Mapping[str, str], unpacked: Mapping[str, str] | None = None
    ) -> str:
        """Return the query of all rows.

        Args:
            order: Terms of `ORDER BY`.
            picked: Expressions in place of columns.
            unpacked: By name that `picked` uses, expressions that are computed once for each row.
        """
        names = ", ".join(picked.get(name, quoted(name)) for name in self.selected)
        rows = self.relation
        if unpacked:
            given = ", ".join(f"{expression} AS {name}" for name, expression in unpacked.items())
            # Without OFFSET each name would be replaced by its expression, wherever it is used. Rows pass by
            # this sub-query one by one: an index on the key still gives their order, and none is sorted.
            rows += f" CROSS JOIN LATERAL (SELECT {given} OFFSET 0) AS stoker_unpacked"
        return f"SELECT {names} FROM {rows}{self._condition()} ORDER BY {', '.join(order)}"  # noqa: S608

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
            "rows come from a table or a query",
            hint=f"Give {arg('table', 'NAME', setting='data.sql.table')} or {arg('query', 'SELECT ...')}, "
            "one of them",
        )
    if table is not None:
        return ".".join(map(quoted, table.split("."))), table
    return f"({(query or '').strip().rstrip(';')}\n) AS q", "query"


def quoted(name: str) -> str:
    """Return a name as SQL takes it whatever is in it."""
    return '"' + name.replace('"', '""') + '"'
