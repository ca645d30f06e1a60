"""How much sooner are all rows there by one bulk read than by one query a row?

    python benchmarks/sql_bulk.py [--save] [--postgres URL] [--rows N]

Two tables: seven numbers a row (by COPY from PostgreSQL), and radio rows with nested JSON. The rival asks for
one row after another by its key, on one open connection with a prepared statement, and keeps Python values
(of JSON its text). The bulk read includes its connection, the order, the digest, the check of keys and the
file that readers map. Both interleaved, once warm; a limit beside them: the bulk read again from that file.
"""

from __future__ import annotations

import argparse
import contextlib
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from measure import interleaved, publish
from stoker.pipeline.radio import RadioSpec
from stoker.pipeline.radio_store import TABLE, radio_columns, write_radio
from stoker.sources.sql.source import SQLSource

COLUMNS = [f"x{n}" for n in range(7)]


def numbers_into(connection: Any, rows: int, mark: str, real: str) -> None:
    values = np.random.default_rng(0).normal(size=(rows, 7)).tolist()
    connection.execute("DROP TABLE IF EXISTS numbers")
    columns = ", ".join(f"{name} {real}" for name in COLUMNS)
    connection.execute(f"CREATE TABLE numbers (id bigint PRIMARY KEY, {columns})")
    cursor = connection.cursor()
    insert = f"INSERT INTO numbers VALUES ({', '.join([mark] * 8)})"
    cursor.executemany(insert, [(number, *row) for number, row in enumerate(values)])


@contextlib.contextmanager
def opened(url: str) -> Iterator[tuple[Any, str]]:
    """A connection, and how its placeholders are written."""
    if url.startswith("postgres"):
        import psycopg

        with psycopg.connect(url, autocommit=True, prepare_threshold=1) as connection:
            yield connection, "%s"
    else:
        with contextlib.closing(sqlite3.connect(url)) as connection:
            yield connection, "?"


def contenders(url: str, table: str, key: str, columns: Any, some: int) -> dict[str, Callable[[], int]]:
    """Bulk read of all rows; a query a row for `some` of them; every function gives the rows it read."""
    source = SQLSource(url, table=table, key=key, columns=columns)
    names = ", ".join(source._bulk.request.selected)
    keys = source.keys()[:: max(1, len(source) // some)]
    asked: list[Any] = [int(found) for found in keys] if key == "id" else list(keys)

    def bulk() -> int:
        fresh = SQLSource(url, table=table, key=key, columns=columns)
        return len(fresh._bulk.table.rows)

    def each() -> int:
        with opened(url) as (connection, mark):
            sql = f"SELECT {names} FROM {table} WHERE {key} = {mark}"
            for found in asked:
                connection.execute(sql, (found,)).fetchone()
        return len(asked)

    def again() -> int:
        rows = source._bulk.table.rows
        return sum(1 for number in range(len(rows)) if rows.row(number))

    return {"bulk": bulk, "query a row": each, "from the file": again}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--postgres", help="URL of a database in which tables may be made")
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--radio", type=int, default=1_500)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        urls = {"sqlite": str(Path(folder) / "rows.db")}
        if arguments.postgres:
            urls["postgresql"] = arguments.postgres
        for database, url in urls.items():
            with opened(url) as (connection, mark):
                if database == "sqlite":
                    connection.execute("PRAGMA synchronous=OFF")
                numbers_into(connection, arguments.rows, mark, "double precision")
                connection.commit()
            write_radio(url, RadioSpec(rows=arguments.radio))
            tables = (("numbers", "id", COLUMNS), (TABLE, "recording_session_id", radio_columns()))
            for table, key, columns in tables:
                rates = interleaved(contenders(url, table, key, columns, 1_000), rounds=5)
                ratio = round(rates["query a row"] / rates["bulk"], 2)
                figures = {f"{name.replace(' ', '_')}_rows_s": round(1 / s) for name, s in rates.items()}
                rows.append({"database": database, "table": table, **figures, "bulk_over_query": ratio})
    publish("sql_bulk", rows, save=arguments.save)


if __name__ == "__main__":
    main()
