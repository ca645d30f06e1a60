"""Samples from the rows of a database."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError, SourceError, SplitError, arg, docs_url
from stoker.schema import Json, Sample, Schema, digest_json
from stoker.sources.arguments import check_splits, check_texts, parse_names
from stoker.sources.files import canonical_split
from stoker.sources.protocol import Part, SourceIdentity, check_index, even_runs
from stoker.sources.splits import DEFAULT_SPLITS, RULE, split_numbers
from stoker.sources.sql.query import QueryTimeouts, Request, parse_database_url, relation_of
from stoker.sources.sql.rows import (
    BOOL,
    FLOAT,
    INT,
    NAMES,
    NULL,
    TEXT,
    Spill,
    SpillLostError,
    Values,
    shown_key,
    unpack_row,
)
from stoker.sources.sql.rules import (
    Columns,
    InferredRule,
    Standardization,
    fields_of,
    fitted,
    parse_columns,
    picks_of,
    plain,
    standards_of,
    to_json,
)
from stoker.sources.sql.tables import TableSnapshot, TableSummary, look_at, read_table
from stoker.sources.sql.values import MalformedError, NumberRule, RowBatch, Rule, WordsRule, text_of
from stoker.units import MIB

# ----------------------------------------------------------------------------------------------------------
# The rows of a source: read once, shared by its splits and by workers, and what follows from them.


class SharedRows:
    """One read of a table, done when it is first needed.

    A copy in another process maps the rows of the first one. Where that has ended, or the copy is on another
    machine, it reads them again, and refuses others than those.
    """

    def __init__(self, request: Request, rules: Sequence[Rule]) -> None:
        self.request = request
        self._selected = request.selected
        self.written = tuple(rules)
        """Rules as they were given."""
        self._rules: tuple[Rule, ...] | None = None
        self._schema: Schema | None = None
        self._table: TableSnapshot | None = None
        self._facts: TableSummary | None = None
        self._remote: TableSnapshot | None = None
        """The table as another process has it: its `rows` are what `Spill.open_reference` takes."""
        self._keys: list[str] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """The rows stay where they are; a reference to them travels."""
        remote = self._remote
        if self._table is not None:
            remote = replace(self._table, rows=cast("Any", self._table.rows.reference()))
        return {**self.__dict__, "_table": None, "_keys": None, "_remote": remote}

    @property
    def is_read(self) -> bool:
        """True once rows are in this process."""
        return self._table is not None

    @property
    def table(self) -> TableSnapshot:
        """The rows."""
        if self._table is None:
            self._table = self._mapped() or self._read_again()
        return self._table

    @property
    def count(self) -> int:
        """Number of rows; where a version names them they are counted, not read."""
        if self._table is None and self._remote is not None:
            return int(cast("Any", self._remote.rows)["rows"])
        if self._table is not None or self.request.version_query is None:
            return len(self.table.rows)
        return self._look().count

    @property
    def version(self) -> str | None:
        """The answer to `version_query`."""
        return self._look().version if self._table is None else self._table.version

    @property
    def rules(self) -> tuple[Rule, ...]:
        """Rules with what follows from the rows filled in."""
        if self._rules is None:
            self._rules = tuple(self._decided(r) if isinstance(r, InferredRule) else r for r in self.written)
        return self._rules

    @property
    def schema(self) -> Schema:
        """Fields that the rules make."""
        if self._schema is None:
            self._schema = fields_of(self.rules)
        return self._schema

    @property
    def ragged(self) -> bool:
        """True if a field is of varying length."""
        return any(field.ragged for field in self.schema.values())

    @property
    def found(self) -> Json:
        """The rules that followed from the rows, for the recipe."""
        pairs = zip(self.written, self.rules, strict=True) if self._has_undecided() else ()
        return {rule.field: rule.to_json() for given, rule in pairs if given is not rule}

    def values(self, rows: NDArray[np.int64]) -> dict[str, Values]:
        """Return values of some rows by column."""
        used = {column for rule in self.rules for column in rule.columns}
        return self.table.rows.columns(rows, {name: name in used for name in self._selected})

    def key(self, row: int) -> str:
        """Return the key of one row as text."""
        return shown_key(unpack_row(self.table.rows.row(row), len(self.request.key)))

    def keys(self) -> list[str]:
        """Return the keys of all rows as text, in order; if a version names the rows, only these are read."""
        if self._table is not None or self._remote is not None or self.request.version_query is None:
            return [self.key(row) for row in range(len(self.table.rows))]
        if self._keys is None:
            only = read_table(replace(self.request, columns=(), picks={}))
            self._check_unchanged(only)
            self._facts = TableSummary(len(only.rows), only.version)
            width = len(self.request.key)
            self._keys = [shown_key(unpack_row(only.rows.row(n), width)) for n in range(len(only.rows))]
            only.rows.close()
        return self._keys

    def close(self) -> None:
        """Give the rows back."""
        if self._table is not None:
            self._table.rows.close()
        self._table = self._facts = self._remote = self._rules = self._schema = self._keys = None

    def _look(self) -> TableSummary:
        if self._facts is None:
            self._facts = look_at(self.request)
        return self._facts

    def _mapped(self) -> TableSnapshot | None:
        if self._remote is None:
            return None
        try:
            return replace(self._remote, rows=Spill.open_reference(cast("Any", self._remote.rows)))
        except SpillLostError:
            return None

    def _read_again(self) -> TableSnapshot:
        """Return rows from the database.

        Raises:
            SourceError: They are not those that this source has spoken of before.
        """
        table, known = read_table(self.request), self._remote
        self._check_unchanged(table, changed=known is not None and known.digest != table.digest)
        return table

    def _check_unchanged(self, table: TableSnapshot, *, changed: bool = False) -> None:
        looked = self._facts is not None and self._facts != TableSummary(len(table.rows), table.version)
        if changed or looked:
            table.rows.close()
            raise SourceError(
                f"{self.request.where_it_is}: rows changed while they were in use",
                hint="Start again, so that all samples are of one version",
            )

    def _has_undecided(self) -> bool:
        return any(isinstance(rule, InferredRule) for rule in self.written)

    def _decided(self, rule: InferredRule) -> Rule:
        """Return the rule that follows from what a column holds.

        Raises:
            SourceError: It holds no numbers, or no text where words are asked for.
        """
        tags = Counter(self.table.tags[self.request.selected.index(rule.column)])
        where = f"{self.request.where_it_is}, column {rule.column}"
        tags.pop(NULL, None)
        if not tags:
            raise SourceError(f"{where} is NULL in every row", hint="Leave it out")
        if rule.words:
            if TEXT not in tags:
                raise SourceError(f"{where} holds no text", hint="Give it a dtype")
            words = self._words(rule.column)
            return WordsRule(field=rule.field, column=rule.column, words=words, null=rule.null)
        floats = "float32" if rule.column in self.table.single else "float64"
        number = {INT: "int64", FLOAT: floats, BOOL: "bool"}
        most = tags.most_common(1)[0][0]
        if most not in number:
            raise SourceError(
                f"{where} holds {NAMES[most]}",
                hint=f"{_RULES.get(most, _ANY_RULE)} ({docs_url('how-to/sql')})",
            )
        mixed = FLOAT in tags and INT in tags
        return NumberRule(field=rule.field, column=rule.column, dtype=floats if mixed else number[most])

    def _words(self, column: str) -> tuple[str, ...]:
        place = self.request.selected.index(column)
        rows = self.table.rows
        found = (unpack_row(rows.row(row), place + 1)[place] for row in range(len(rows)))
        return tuple(sorted({text_of(value.value, column) for value in found if value.tag == TEXT}))


_ANY_RULE = "Give it a rule: a time is {'timestamp': 'us'}, bytes are {'bytes': DTYPE, 'shape': [...]}"
_RULES = {
    TEXT: "A store holds numbers: give {'text': [WORDS]} or {'text': 'intern'} for classes, or a JSON rule"
}


VERSION = 3
"""Bumped by hand when the same rows would give other samples."""
_RUN_ROWS = 256
_RUN_BYTES = 8 * MIB
_CHUNK = 1024
"""Rows made at a time for statistics."""
_KEPT_BYTES = 64 * MIB
"""Training samples that were made for statistics are kept for reading up to this size."""


class SQLSource:
    """Rows of a table or query, as one numbered list of samples in the order of their key.

    Rows are read once, with one query in one snapshot, when they are first needed; workers share that read.

    Args:
        url: A SQLite file, `sqlite:///FILE` or `postgresql://[user[:password]@]host[:port]/database`.
        table: Table to read, as `measurements` or `schema.table`. Give it or `query`.
        query: Query to read, in SQL.
        key: Column that tells rows apart, or several; it orders the samples and decides the splits.
        columns: Fields and their rules (docs/how-to/sql.md), or names of columns that hold numbers.
        where: Condition on the rows, in SQL.
        split: `"train"`, `"val"`, `"test"` or another name; None: all rows.
        splits: Fractions; absent: 0.8/0.1/0.1. Cut by a hash of the key: the order of rows decides nothing.
        seed: Seed of the cut.
        version_query: Gives one row that changes whenever the rows do; then it names the content, and an
            unchanged table is not read again.
        timeouts: Seconds that the database is waited for; None: the defaults of `QueryTimeouts`.
        spill_dir: Folder for the rows while they are in use; None: the system's for temporary files.

    Raises:
        ConfigError: A setting or rule is malformed, or PostgreSQL's driver is not installed.
        SourceError: Later, on first use: no such table or column, a key that is NULL or comes twice, no rows.
        StalledError: Later, on first use: the database does not answer in time, is locked, or is lost.

    Examples:
        >>> import sqlite3, stoker
        >>> with sqlite3.connect("lab.db") as database:
        ...     _ = database.execute("CREATE TABLE runs (id INTEGER PRIMARY KEY, x REAL, y REAL)")
        ...     rows = [(i, i / 2, 1) for i in range(9)]
        ...     _ = database.executemany("INSERT INTO runs VALUES (?, ?, ?)", rows)
        >>> database.close()
        >>> source = stoker.SQLSource("lab.db", table="runs", key="id", columns=["x", "y"], where="x > 1")
        >>> len(source), source.read(0)["x"].item(), source.dropped
        (6, 1.5, 3)
    """

    def __init__(  # noqa: PLR0913 - a public face; every setting is named by the caller
        self,
        url: str | Path,
        *,
        key: str | Sequence[str],
        columns: Columns,
        table: str | None = None,
        query: str | None = None,
        where: str | None = None,
        split: str | None = None,
        splits: Mapping[str, float] | None = None,
        seed: int = 0,
        version_query: str | None = None,
        timeouts: QueryTimeouts | None = None,
        spill_dir: str | Path | None = None,
    ) -> None:
        keys = parse_names("key", key, "the name of the column that tells rows apart")
        check_texts(table=table, query=query, where=where, version_query=version_query)
        check_splits(split, splits, seed)
        if timeouts is not None and not isinstance(cast("object", timeouts), QueryTimeouts):
            raise ConfigError(
                f"timeouts is {timeouts!r}", hint="Expected QueryTimeouts(connect_s=10.0, ...), or None"
            )
        relation, name = relation_of(table, query)
        rules = parse_columns(columns)
        request = Request(
            address=parse_database_url(url),
            relation=relation,
            name=name,
            key=keys,
            columns=tuple(dict.fromkeys(column for rule in rules for column in rule.columns)),
            where=where,
            version_query=version_query,
            timeouts=timeouts or QueryTimeouts(),
            picks={name: pick for name, pick in picks_of(rules).items() if name not in keys},
            spill_dir=None if spill_dir is None else str(spill_dir),
        )
        self._shared = SharedRows(request, rules)
        self._digests: dict[str, str] = {}
        self._seed = seed
        self._splits = dict(splits) if splits is not None else None
        if split is None and splits is not None:
            raise SplitError(
                "splits were given, but no split was asked for", hint=f"Add {arg('split', 'train')}"
            )
        self._set_split(split)

    def __repr__(self) -> str:
        """Database and table without user or password."""
        of = f", split={self._split!r}" if self._split else ""
        return f"SQLSource({self._shared.request.address.shown!r}, {self._shared.request.name!r}{of})"

    def __getstate__(self) -> dict[str, Any]:
        """Derive what depends on all training rows here, once, not in every worker."""
        self._standards()
        return {**self.__dict__, "_kept": None}

    def __len__(self) -> int:
        """Return the number of rows of the split."""
        return self._shared.count if self._split is None else len(self._rows())

    @property
    def dropped(self) -> int:
        """Rows that `where` leaves out, of all splits."""
        return self._shared.table.dropped

    @property
    def where_it_is(self) -> str:
        """The database and the table, without user or password."""
        return self._shared.request.where_it_is

    @property
    def statistics(self) -> Mapping[str, Any]:
        """Mean and deviation by standardized field: to be kept with a model that predicts one."""
        return to_json(self._standards())

    def for_split(self, split: str | None) -> SQLSource:
        """Return another split of the rows already read: a second read may see a changed table.

        Args:
            split: Name of the split; None: all rows.
        """
        other = SQLSource.__new__(SQLSource)
        other.__dict__.update(self.__dict__)
        other._set_split(split)
        if None not in (split, self._split):
            other._fitted = self._fitted
        return other

    def schema(self) -> Schema:
        """Return the fields of every sample."""
        return dict(self._shared.schema)

    def read(self, index: int, start: int | None = None, stop: int | None = None) -> Sample:
        """Return the sample of one row; rows have no time, so `start` and `stop` change nothing.

        Raises:
            SourceError: The row is malformed; names key and column.
            IndexError: There is no such sample.
        """
        check_index(index, len(self))
        samples = self._read(range(index, index + 1))
        return {name: array[0, ...] for name, array in samples.items()}

    def read_many(self, indices: range) -> Sample | None:
        """Return consecutive samples at once, each field `(n, *shape)`: the same values as one by one.

        None where text of varying length is among the fields.

        Raises:
            SourceError: A row is malformed; names the first.
            IndexError: There are no such samples.
        """
        if not 0 <= indices.start < indices.stop <= len(self):
            raise IndexError(f"samples {indices} do not exist: this source has {len(self)}")
        return None if self._shared.ragged else self._read(indices)

    def _read(self, indices: range) -> Sample:
        standards = self._standards()
        rows = self._rows()[indices.start : indices.stop]
        samples = self._kept_of(rows)
        if samples is None:
            samples = self._made(rows)
            for standard in standards:
                standard.apply(samples)
        return plain(samples, self._shared.schema)

    def locate(self, index: int) -> str:
        """Return database, table and key of the row; its number if the rows were not read here."""
        if not self._shared.is_read:  # asking for a name must not read a table
            return f"{self.where_it_is}, sample {index}"
        return self._located(int(self._rows()[index]))

    def _located(self, row: int) -> str:
        return f"{self.where_it_is}, key {self._shared.key(row)}"

    def runs(self) -> Sequence[range]:
        """Return ranges of at most 256 rows or about 8 MiB."""
        count, length = len(self), _RUN_ROWS
        if self._shared.is_read:
            mean = self._shared.table.rows.size_bytes // self._shared.count
            length = max(1, min(_RUN_ROWS, _RUN_BYTES // max(1, mean)))
        return even_runs(count, length)

    def keys(self) -> Sequence[str]:
        """Return the keys of the rows as text; of several columns a JSON list."""
        return [self._shared.key(int(row)) for row in self._rows()]

    @property
    def keys_follow_identity(self) -> bool:
        """True: they are columns of the rows that the identity, or `version_query`, stands for."""
        return True

    def identity(self) -> SourceIdentity:
        """Return the rows in order, or what `version_query` gave, and the rules; neither URL nor place."""
        request = self._shared.request
        settings: dict[str, Json] = {
            "key": list(request.key),
            "columns": {rule.field: rule.to_json() for rule in self._shared.written},
        }
        if request.version_query is not None:
            version = [self._shared.version, request.relation, request.where]
            digest = digest_json([*version, self._split_json()])
            settings["version_query"] = request.version_query
        else:
            digest = self._content()
            settings["found"] = self._shared.found
        if self._split is not None:
            settings["split"] = self._split_json()
        if standards := standards_of(self._shared.rules):
            settings["standardize"] = {
                "fields": [standard.field for standard in standards],
                "fitted_on": "train" if request.version_query else self._training()._content(),
            }
        part = Part(name=request.name, count=len(self), digest=digest)
        return SourceIdentity(kind=f"sql/{VERSION}", parts=(part,), settings=settings)

    def close(self) -> None:
        """Release the rows; they are read again when they are needed."""
        self._shared.close()
        self._numbers = self._kept = None
        self._digests.clear()

    def _set_split(self, split: str | None) -> None:
        self._split = None if split is None else canonical_split(split)
        self._shares = dict(DEFAULT_SPLITS if self._splits is None else self._splits)
        self._numbers: NDArray[np.int64] | None = None
        self._fitted: tuple[Standardization, ...] | None = None
        self._kept: tuple[NDArray[np.int64], Sample] | None = None
        if self._split is not None and self._split not in {canonical_split(name) for name in self._shares}:
            raise SplitError(
                f"split {split!r} is not among the fractions {', '.join(self._shares)}",
                hint="Add it to splits, or ask for one of them",
            )

    def _split_json(self) -> Json:
        if self._split is None:
            return None
        shares: dict[str, Json] = {canonical_split(name): share for name, share in self._shares.items()}
        return {"split": self._split, "fractions": shares, "seed": self._seed, "rule": RULE}

    def _rows(self) -> NDArray[np.int64]:
        """Places of this split's rows among all, ascending."""
        if self._numbers is None:
            if self._split is None:
                self._numbers = np.arange(self._shared.count, dtype=np.int64)
            else:
                self._numbers = split_numbers(
                    self._shared.keys(), self._shares, self._split, self._seed, where=self.where_it_is
                )
        return self._numbers

    def _training(self) -> SQLSource:
        """Return the rows that statistics are made of: the train split, or all where there are no splits."""
        return self if self._split in (None, "train") else self.for_split("train")

    def _content(self) -> str:
        """Return the sha256 of this split's rows, in order."""
        if self._split is None:
            return self._shared.table.digest
        if self._split not in self._digests:
            self._digests[self._split] = self._digest(self._rows())
        return self._digests[self._split]

    def _digest(self, rows: NDArray[np.int64]) -> str:
        digest, data = hashlib.sha256(), self._shared.table.rows
        for row in rows.tolist():
            digest.update(data.row(row))
        return digest.hexdigest()

    def _made(self, rows: NDArray[np.int64]) -> Sample:
        """Return fields of rows before they are standardized."""
        values, samples = RowBatch(columns=self._shared.values(rows), count=len(rows)), {}
        for rule in self._shared.rules:
            try:
                samples.update(rule.make(values))
            except MalformedError as error:
                for place in range(len(rows) if len(rows) > 1 else 0):
                    self._made(rows[place : place + 1])  # raises at the row that is meant
                raise SourceError(
                    f"{self._located(int(rows[0]))}, column {error.column} {error}",
                    hint=f"Fix the row, or leave it out with {arg('where')}",
                ) from error
        return samples

    def _standards(self) -> tuple[Standardization, ...]:
        if self._fitted is None:
            wanted = standards_of(self._shared.rules)
            self._fitted = fitted(wanted, self._sound_training_samples()) if wanted else ()
            if self._kept:
                for standard in self._fitted:
                    standard.apply(self._kept[1])
        return self._fitted

    def _sound_training_samples(self) -> Iterator[Sample]:
        """Yield samples for statistics, without malformed rows; reading those quarantines them."""
        training = self._training()
        rows = training._rows()
        fields = self._shared.schema.values()
        small = (
            not self._shared.ragged and len(rows) * sum(field.size_bytes() for field in fields) <= _KEPT_BYTES
        )
        kept: list[Sample] | None = [] if training is self and small else None
        for first in range(0, len(rows), _CHUNK):
            chunk = rows[first : first + _CHUNK]
            try:
                batches = [self._made(chunk)]
            except SourceError:
                batches, kept = list(self._sound(chunk)), None
            yield from batches
            if kept is not None:
                kept += batches
        if kept:
            self._kept = rows, {name: np.concatenate([own[name] for own in kept]) for name in kept[0]}

    def _sound(self, rows: NDArray[np.int64]) -> Iterator[Sample]:
        for place in range(len(rows)):
            with suppress(SourceError):
                yield self._made(rows[place : place + 1])

    def _kept_of(self, rows: NDArray[np.int64]) -> Sample | None:
        """Return fields of rows that were all made before, standardized."""
        if self._kept is None:
            return None
        known, samples = self._kept
        first = int(np.searchsorted(known, rows[0]))
        if not np.array_equal(known[first : first + len(rows)], rows):
            return None
        return {name: array[first : first + len(rows)] for name, array in samples.items()}
