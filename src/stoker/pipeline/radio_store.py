"""The table of radio measurements: made in SQLite or PostgreSQL, and how its rows become samples."""

from __future__ import annotations

import json
import sqlite3
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from stoker.errors import ConfigError, ReadOnlyError, SourceError
from stoker.pipeline.radio import RadioSpec, radio_rows
from stoker.runtime.files import make_folder
from stoker.schema import Json, canonical_json
from stoker.sources.sql.address import Address, parse_address
from stoker.sources.sql.postgres import driver

TABLE, SETS = "measurement_features", "synthetic_datasets"

COLUMNS: Mapping[str, tuple[str, str]] = {
    "recording_session_id": ("TEXT PRIMARY KEY", "uuid PRIMARY KEY"),
    "timestamp": ("TEXT NOT NULL", "timestamptz NOT NULL"),
    "receiver_features": ("TEXT NOT NULL", "jsonb[] NOT NULL"),
    "tx_latitude": ("REAL", "double precision"),
    "tx_longitude": ("REAL", "double precision"),
    "tx_altitude_m": ("REAL", "double precision"),
    "tx_power_dbm": ("REAL", "double precision"),
    "tx_known": ("BOOLEAN", "boolean"),
    "extraction_metadata": ("TEXT NOT NULL", "jsonb NOT NULL"),
    "overall_confidence": ("REAL NOT NULL", "double precision NOT NULL"),
    "mean_snr_db": ("REAL", "double precision"),
    "num_receivers_detected": ("INTEGER", "integer"),
    "num_receivers_in_sample": ("INTEGER", "integer"),
    "gdop": ("REAL", "double precision"),
    "dataset_id": ("TEXT NOT NULL", "uuid NOT NULL"),
}
"""Columns with their types in SQLite and in PostgreSQL."""
_SETS = {
    "id": ("TEXT PRIMARY KEY", "uuid PRIMARY KEY"),
    "name": ("TEXT UNIQUE NOT NULL", "varchar(100) UNIQUE NOT NULL"),
    "num_samples": ("INTEGER NOT NULL", "integer NOT NULL"),
    "config": ("TEXT NOT NULL", "jsonb NOT NULL"),
}


def radio_columns(receivers: int = 7) -> dict[str, Json]:
    """Rules by which a row becomes a sample.

    Six numbers for each of at most `receivers` receivers: signal to noise, power density and frequency
    offset scaled to 0..1 over the range they have here, metres north and east of the centroid of those that
    hear the signal, and whether it is one of them. The target is metres from the same centroid.
    """
    features: list[Json] = [
        {"path": "snr_db.mean", "missing": 0.0, "range": [-20.0, 60.0]},
        {"path": "psd_dbm_per_hz.mean", "missing": -180.0, "range": [-180.0, -100.0]},
        {"path": "frequency_offset_hz.mean", "missing": 0.0, "range": [-50.0, 50.0]},
        "@north",
        "@east",
        "signal_present",
    ]
    return {
        "receivers": {
            "column": "receiver_features",
            "list": receivers,
            "features": features,
            "place": ["rx_lat", "rx_lon"],
            "present": "signal_present",
            "mask": "signal_mask",
            "standardize": ["@north", "@east"],
        },
        "target": {
            "columns": ["tx_latitude", "tx_longitude"], "metres_from": "receivers", "standardize": True
        },
        "gdop": {"dtype": "float32", "null": 50.0},
        "num_receivers": {"column": "num_receivers_detected", "dtype": "int64"},
        "centroid": {"centroid_of": "receivers"},
    }  # fmt: skip


def radio_where(
    dataset_ids: Sequence[str], *, min_snr_db: float | None = None, max_gdop: float | None = None
) -> str:
    """What rows are asked for, in SQL; ids and numbers are checked, so nothing else gets in.

    Raises:
        ConfigError: An id is no UUID, or there is none.
    """
    try:
        ids = [str(uuid.UUID(str(one))) for one in dataset_ids]
    except ValueError as error:
        raise ConfigError(f"dataset_ids are {[*dataset_ids]}. Expected UUIDs: {error}") from error
    if not ids or isinstance(dataset_ids, str):
        raise ConfigError(f"dataset_ids is {dataset_ids!r}. Expected a list of at least one UUID")
    quoted = ", ".join(f"'{one}'" for one in ids)
    parts = [f"dataset_id IN ({quoted})"]
    if min_snr_db is not None:
        parts.append(f"mean_snr_db >= {float(min_snr_db)!r}")
    if max_gdop is not None:
        parts.append(f"gdop <= {float(max_gdop)!r}")
    return " AND ".join(parts)


def write_radio(url: str | Path, spec: RadioSpec) -> bool:
    """Make the rows of `spec` unless they are there; rows of other sets are left alone.

    Returns:
        Whether they had to be made.
    Raises:
        SourceError: The database cannot be written, or has such a table of another form.
        ReadOnlyError: SQLite's file, or its folder, cannot be written.
    """
    address = parse_address(url)
    return _write_sqlite(address, spec) if address.kind == "sqlite" else _write_postgres(address, spec)


def _write_sqlite(address: Address, spec: RadioSpec) -> bool:
    path = Path(address.target)
    try:
        make_folder(path.parent)
    except ReadOnlyError as error:
        raise ReadOnlyError(f"{error}, with --database") from error
    names = ", ".join(COLUMNS)
    try:
        with closing(sqlite3.connect(path, timeout=30.0)) as connection, connection:
            connection.execute("BEGIN IMMEDIATE")
            for statement in _statements(0):
                connection.execute(statement)
            if _there(connection, spec):
                return False
            connection.execute(f"DELETE FROM {TABLE} WHERE dataset_id = ?", (str(spec.dataset_id),))  # noqa: S608
            marks = ", ".join("?" * len(COLUMNS))
            connection.executemany(
                f"INSERT INTO {TABLE} ({names}) VALUES ({marks})",  # noqa: S608 - names of our own
                ([_sqlite_value(row[name]) for name in COLUMNS] for row in radio_rows(spec)),
            )
            connection.execute(
                f"INSERT INTO {SETS} VALUES (?, ?, ?, ?)",  # noqa: S608
                [_sqlite_value(value) for value in _set_row(spec)],
            )
    except sqlite3.Error as error:
        raise SourceError(f"{path}: {error}. Expected a SQLite database that can be written") from error
    return True


def _write_postgres(address: Address, spec: RadioSpec) -> bool:
    psycopg = driver()
    names = ", ".join(COLUMNS)
    try:
        with psycopg.connect(address.target, connect_timeout=10) as connection:
            connection.execute("SET LOCAL statement_timeout = '300s'")
            connection.execute("SET LOCAL lock_timeout = '30s'")
            for statement in _statements(1):
                connection.execute(statement)
            if _there(connection, spec):
                return False
            connection.execute(f"DELETE FROM {TABLE} WHERE dataset_id = %s", (spec.dataset_id,))  # noqa: S608
            with connection.cursor().copy(f"COPY {TABLE} ({names}) FROM STDIN") as copy:
                for row in radio_rows(spec):
                    copy.write_row([_postgres_value(row[name], psycopg) for name in COLUMNS])
            connection.execute(
                f"INSERT INTO {SETS} VALUES (%s, %s, %s, %s)",  # noqa: S608
                [_postgres_value(value, psycopg) for value in _set_row(spec)],
            )
    except psycopg.Error as error:
        text = address.hide(" ".join(str(error).split()))
        raise SourceError(f"{address.shown}: {text}. Expected a database that can be written") from None
    return True


def remove_radio(path: str, dataset_id: str) -> None:
    """Remove a set from a SQLite database, if it is there.

    Raises:
        SourceError: The database cannot be written.
    """
    target = Path(parse_address(path).target)
    if not target.is_file():
        return
    try:
        with closing(sqlite3.connect(target, timeout=30.0)) as connection, connection:
            connection.execute(f"DELETE FROM {TABLE} WHERE dataset_id = ?", (dataset_id,))  # noqa: S608
            connection.execute(f"DELETE FROM {SETS} WHERE id = ?", (dataset_id,))  # noqa: S608
    except sqlite3.OperationalError as error:
        if "no such table" not in str(error):
            raise SourceError(f"{target}: {error}. Expected a SQLite database that can be written") from error


def _statements(kind: int) -> Iterator[str]:
    for table, columns in ((TABLE, COLUMNS), (SETS, _SETS)):
        listed = ", ".join(f"{name} {types[kind]}" for name, types in columns.items())
        yield f"CREATE TABLE IF NOT EXISTS {table} ({listed})"
    yield f"CREATE INDEX IF NOT EXISTS {TABLE}_by_set ON {TABLE} (dataset_id, timestamp)"


def _there(connection: Any, spec: RadioSpec) -> bool:
    """Whether the set is complete: it is noted last, and its rows are counted."""
    own = f"'{spec.dataset_id}'"
    noted = connection.execute(f"SELECT num_samples FROM {SETS} WHERE id = {own}").fetchone()  # noqa: S608
    counted = connection.execute(f"SELECT count(*) FROM {TABLE} WHERE dataset_id = {own}")  # noqa: S608
    (count,) = counted.fetchone()
    if noted is not None and int(count) != spec.rows:
        raise ConfigError(
            f"{TABLE} has {count} rows of data set {spec.dataset_id}, of which {noted[0]} were made. Remove "
            f"them and its row in {SETS}, or give another database"
        )
    return noted is not None


def _set_row(spec: RadioSpec) -> Sequence[Any]:
    name = f"radio {spec.rows} rows, seed {spec.seed} ({str(spec.dataset_id)[:8]})"
    return spec.dataset_id, name, spec.rows, spec.to_json()


def _sqlite_value(value: Any) -> Any:
    if isinstance(value, list | dict):
        return canonical_json(value)
    return value if value is None or isinstance(value, bool | int | float) else str(value)


def _postgres_value(value: Any, psycopg: Any) -> Any:
    jsonb = psycopg.types.json.Jsonb
    if isinstance(value, list):
        return [jsonb(entry) for entry in value]  # pyright: ignore[reportUnknownVariableType]
    return jsonb(value) if isinstance(value, dict) else value


def sql_settings(url: str, spec: RadioSpec) -> dict[str, str]:
    """Settings of `data` for these rows, as they are given on a command line."""
    return {
        "data.kind": "sql",
        "data.sql.url": url,
        "data.sql.table": TABLE,
        "data.sql.key": "recording_session_id",
        "data.sql.columns": json.dumps(radio_columns()),
        "data.sql.where": f"dataset_id = '{spec.dataset_id}'",
    }
