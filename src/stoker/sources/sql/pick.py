"""Have a database pick the values of a JSON column that a rule uses, so that no others are sent or parsed.

Of a list of objects with hundreds of numbers a rule often wants a few. The database holds it in a form that
it walks much faster than JSON is parsed here: it sends the picked values of each entry as a list in their
order, marked so that they are told from the whole. A value that is no list of at most so many objects is
sent whole, so that what is wrong with it is found and said in one place.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from stoker.sources.sql.rows import JsonText, PickedText, Text

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
    """What of a column is wanted."""

    column: str
    most: int
    """Entries at most."""
    paths: tuple[tuple[str, ...], ...]
    """Names that lead to each value."""

    @property
    def can_be_asked(self) -> bool:
        """Whether SQL says the same as we would."""
        return all(_PLAIN_NAME.fullmatch(name) for path in self.paths for name in path)

    def in_sqlite(self, column: str) -> str | None:
        """An expression over a column of text; None where there are too many entries for one."""
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
        return extracted if len(self.paths) > 1 else f"json_array({extracted})"  # of one it is no list

    def in_postgres(self, column: str, kind: int) -> str | None:
        """An expression over a column of type `kind`; None where it is neither jsonb nor jsonb[]."""
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


def received(value: Any) -> Any:
    """What a database sent for a column that was picked from, told apart."""
    if isinstance(value, str):
        value = Text(value.encode("utf-8", "surrogateescape"))
    if not isinstance(value, Text):
        return value
    return PickedText(value[1:]) if value[:1] == _PICKED else JsonText(value[1:])
