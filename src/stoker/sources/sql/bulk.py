"""The rows of a source: read once, shared by its splits and by readers, and what follows from them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.errors import SourceError
from stoker.schema import Json, Schema
from stoker.sources.sql.parse import Undecided, fields_of
from stoker.sources.sql.request import Request
from stoker.sources.sql.rows import (
    BOOL,
    FLOAT,
    INT,
    NAMES,
    NULL,
    TEXT,
    Values,
    shown_key,
    unpack_columns,
    unpack_row,
)
from stoker.sources.sql.spill import GoneError, Spill
from stoker.sources.sql.table import Facts, Table, look_at, read_table
from stoker.sources.sql.values import Number, Rule, Words, text_of


class Bulk:
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
        self._table: Table | None = None
        self._facts: Facts | None = None
        self._elsewhere: dict[str, Any] | None = None
        self._keys: list[str] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """The rows stay where they are; a reference to them travels."""
        state = {**self.__dict__, "_table": None, "_keys": None}
        if self._table is not None:
            table = self._table
            state["_elsewhere"] = {
                "rows": table.rows.reference(),
                "tags": table.tags,
                "digest": table.digest,
                "version": table.version,
                "dropped": table.dropped,
                "single": table.single,
            }
        return state

    @property
    def is_read(self) -> bool:
        """Whether rows are at hand."""
        return self._table is not None

    @property
    def table(self) -> Table:
        """The rows."""
        if self._table is None:
            self._table = self._mapped() or self._read_again()
        return self._table

    @property
    def count(self) -> int:
        """Number of rows; where a version names them they are counted, not read."""
        known = self._elsewhere
        if self._table is None and known is not None:
            return int(known["rows"]["rows"])
        if self._table is not None or self.request.version_query is None:
            return len(self.table.rows)
        return self._look().count

    @property
    def version(self) -> str | None:
        """What `version_query` gave."""
        return self._look().version if self._table is None else self._table.version

    @property
    def rules(self) -> tuple[Rule, ...]:
        """Rules with what follows from the rows filled in."""
        if self._rules is None:
            self._rules = tuple(self._decided(r) if isinstance(r, Undecided) else r for r in self.written)
        return self._rules

    @property
    def schema(self) -> Schema:
        """Fields that the rules make."""
        if self._schema is None:
            self._schema = fields_of(self.rules)
        return self._schema

    @property
    def found(self) -> Json:
        """What followed from the rows, for the recipe."""
        pairs = zip(self.written, self.rules, strict=True) if self._has_undecided() else ()
        return {rule.field: rule.to_json() for given, rule in pairs if given is not rule}

    def values(self, rows: NDArray[np.int64]) -> dict[str, Values]:
        """Values of some rows by column."""
        return unpack_columns(self.table.rows.some(rows), self._selected)

    def key(self, row: int) -> str:
        """The key of one row as text."""
        return shown_key(unpack_row(self.table.rows.row(row), len(self.request.key)))

    def keys(self) -> list[str]:
        """The keys of all rows as text, in order; where a version names the rows, only these are read."""
        if self._table is not None or self._elsewhere is not None or self.request.version_query is None:
            return [self.key(row) for row in range(len(self.table.rows))]
        if self._keys is None:
            only = read_table(replace(self.request, columns=(), picks={}))
            self._check_unchanged(only)
            self._facts = Facts(len(only.rows), only.version)
            width = len(self.request.key)
            self._keys = [shown_key(unpack_row(only.rows.row(n), width)) for n in range(len(only.rows))]
            only.rows.close()
        return self._keys

    def close(self) -> None:
        """Give the rows back."""
        if self._table is not None:
            self._table.rows.close()
        self._table = self._facts = self._elsewhere = self._rules = self._schema = self._keys = None

    def _look(self) -> Facts:
        if self._facts is None:
            self._facts = look_at(self.request)
        return self._facts

    def _mapped(self) -> Table | None:
        if self._elsewhere is None:
            return None
        known = dict(self._elsewhere)
        try:
            known["rows"] = Spill.of(known["rows"])
        except GoneError:
            return None
        return Table(**known)

    def _read_again(self) -> Table:
        """Rows from the database.

        Raises:
            SourceError: They are not those that this source has spoken of before.
        """
        table, known = read_table(self.request), self._elsewhere
        self._check_unchanged(table, changed=known is not None and known["digest"] != table.digest)
        return table

    def _check_unchanged(self, table: Table, *, changed: bool = False) -> None:
        looked = self._facts is not None and self._facts != Facts(len(table.rows), table.version)
        if changed or looked:
            table.rows.close()
            raise SourceError(
                f"{self.request.where_it_is}: rows changed while they were in use. Start again, so that all "
                "samples are of one version"
            )

    def _has_undecided(self) -> bool:
        return any(isinstance(rule, Undecided) for rule in self.written)

    def _decided(self, rule: Undecided) -> Rule:
        """The rule that follows from what a column holds.

        Raises:
            SourceError: It holds no numbers, or no text where words are asked for.
        """
        tags = Counter(self.table.tags[self.request.selected.index(rule.column)])
        where = f"{self.request.where_it_is}, column {rule.column}"
        tags.pop(NULL, None)
        if not tags:
            raise SourceError(f"{where} is NULL in every row. Leave it out")
        if rule.words:
            if TEXT not in tags:
                raise SourceError(f"{where} holds no text. Give it a dtype")
            return Words(field=rule.field, column=rule.column, words=self._words(rule.column), null=rule.null)
        floats = "float32" if rule.column in self.table.single else "float64"
        number = {INT: "int64", FLOAT: floats, BOOL: "bool"}
        most = tags.most_common(1)[0][0]
        if most not in number:
            raise SourceError(f"{where} holds {NAMES[most]}. {_RULES.get(most, _ANY_RULE)} (docs/sql.md)")
        mixed = FLOAT in tags and INT in tags
        return Number(field=rule.field, column=rule.column, dtype=floats if mixed else number[most])

    def _words(self, column: str) -> tuple[str, ...]:
        place = self.request.selected.index(column)
        rows = self.table.rows
        found = (unpack_row(rows.row(row), place + 1)[place] for row in range(len(rows)))
        return tuple(sorted({text_of(value.value, column) for value in found if value.tag == TEXT}))


_ANY_RULE = "Give it a rule: a time is {'timestamp': 'us'}, bytes are {'bytes': DTYPE, 'shape': [...]}"
_RULES = {
    TEXT: "A store holds numbers: give {'text': [WORDS]} or {'text': 'intern'} for classes, or a JSON rule"
}
