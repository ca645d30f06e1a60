"""Settings of rows: those of a database that are samples, and those of a table that are joined to records."""

from __future__ import annotations

from typing import Literal

from pydantic import JsonValue

from stoker.config.section import Names, PositiveFloat, PositiveInt, SettingsSection


class JoinConfig(SettingsSection):
    """Columns of a table to add to the records, by a key, when a run begins; nothing is encoded for them."""

    table: str | None = None
    """A .csv, .tsv or .parquet file, or a database's URL; null: nothing is joined."""
    key: Names = "number"
    """Column of the table that names the record, or columns that do together."""
    columns: dict[str, JsonValue] | tuple[str, ...] | None = None
    """Fields and their rules, as of `data.sql.columns`."""
    name: str | None = None
    """The table's name, in a database."""
    on: str = "number"
    """What the key names: `number`, the sample's; `keys`, the source's; or a field with a whole number."""
    missing: Literal["refuse", "mask", "drop"] = "refuse"
    """Records without a row: an error, zeros with `<field>_known` false, or left out."""
    repeated: Literal["refuse", "mask", "drop"] = "refuse"
    """The same for keys that have several rows."""


class SqlConfig(SettingsSection):
    """Rows of a database as samples (docs/sql.md)."""

    url: str | None = None
    """`sqlite:///FILE`, or `postgresql://[USER@]HOST/DATABASE`; a password belongs in `~/.pgpass`."""
    table: str | None = None
    """The table, `NAME` or `SCHEMA.NAME`."""
    query: str | None = None
    """A SELECT in place of a table."""
    key: Names | None = None
    """Column, or columns, that tell rows apart; they order the samples and decide the splits."""
    columns: dict[str, JsonValue] | tuple[str, ...] | None = None
    """Fields and their rules, as `{power: float32}`, or names of columns that hold numbers."""
    where: str | None = None
    """Condition on the rows, in SQL."""
    version_query: str | None = None
    """Gives one row that changes whenever the rows do; an unchanged table is then not read again."""
    connect_s: PositiveFloat = 10.0
    """Seconds to be connected."""
    statement_s: PositiveFloat = 300.0
    """Seconds for one statement; the ordered read of all rows is one."""
    lock_s: PositiveFloat = 30.0
    """Seconds to wait for others who hold a lock."""
    attempts: PositiveInt = 4
    """Tries when there is no connection, or it is lost."""
