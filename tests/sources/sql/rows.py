"""Some rows with a bit of everything, the same in SQLite and in PostgreSQL."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

COLUMNS: dict[str, Any] = {
    "power": {"dtype": "float32", "standardize": True},
    "count": "int64",
    "known": "bool",
    "site": {"text": ["hill", "town"]},
    "at": {"timestamp": "ms"},
    "trace": {"bytes": "float32", "shape": [2]},
    "gdop": {"dtype": "float32", "null": 50},
    "snr": {"dtype": "float32", "null": "mask", "standardize": True},
    "receivers": {
        "column": "heard",
        "list": 4,
        "features": [
            {"path": "snr.mean", "missing": 0, "range": [-20, 60]},
            "@north",
            "@east",
            "on",
        ],
        "place": ["lat", "lon"],
        "present": "on",
        "mask": "absent",
        "standardize": ["@north", "@east"],
    },
    "target": {"columns": ["tx_lat", "tx_lon"], "metres_from": "receivers", "standardize": True},
    "center": {"centroid_of": "receivers"},
}
NAMES = ("id", "power", "count", "known", "site", "at", "trace", "gdop", "snr", "heard", "tx_lat", "tx_lon")
SQLITE = (
    "CREATE TABLE samples (id INTEGER, power REAL, count INTEGER, known BOOLEAN, site TEXT, at TEXT, "
    "trace BLOB, gdop REAL, snr REAL, heard TEXT, tx_lat REAL, tx_lon REAL)"
)
POSTGRES = (
    "CREATE TABLE samples (id bigint, power float8, count int, known boolean, site text, at timestamptz, "
    "trace bytea, gdop float8, snr real, heard jsonb[], tx_lat float8, tx_lon float8)"
)


def made(count: int = 40, seed: int = 0) -> list[list[Any]]:
    """Rows by the order of `NAMES`; `heard` is a list of dictionaries."""
    rng = np.random.default_rng(seed)
    rows: list[list[Any]] = []
    for number in range(count):
        heard: list[dict[str, Any]] = [
            {"lat": 44.5 + rng.random(), "lon": 7.5 + rng.random(), "on": bool(rng.random() < 0.7),
             "snr": {"mean": float(rng.normal(10, 5))}} for _ in range(rng.integers(1, 5))
        ]  # fmt: skip
        heard[0]["on"] = True
        if number % 7 == 0:
            heard[0]["snr"] = {}
        snr = None if number % 5 == 0 else float(np.float32(rng.normal()))
        rows.append([
            10 * number, float(rng.normal(30, 3)), int(rng.integers(-5, 5)), bool(rng.integers(2)),
            ("hill", "town")[number % 2], f"2026-03-01T12:{number % 60:02d}:00.250000+01:00",
            rng.random(2, np.float32).tobytes(), None if number % 3 == 0 else float(rng.random()), snr,
            heard, 45.0 + rng.random() / 2, 8.0 + rng.random() / 2,
        ])  # fmt: skip
    return rows


def write_sqlite(path: Path, rows: Sequence[Sequence[Any]]) -> Path:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(SQLITE)
        plain = [[json.dumps(v) if isinstance(v, list) else v for v in row] for row in rows]
        connection.executemany(f"INSERT INTO samples VALUES ({', '.join('?' * len(NAMES))})", plain)
    return path


def write_postgres(connection: Any, rows: Sequence[Sequence[Any]]) -> None:
    from psycopg.types.json import Jsonb

    connection.execute("DROP TABLE IF EXISTS samples")
    connection.execute(POSTGRES)
    plain = [[[Jsonb(e) for e in v] if isinstance(v, list) else v for v in row] for row in rows]
    with connection.cursor() as cursor:
        cursor.executemany(f"INSERT INTO samples VALUES ({', '.join(['%s'] * len(NAMES))})", plain)


def change(path: Path, sql: str, *values: Any) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(sql, values)
