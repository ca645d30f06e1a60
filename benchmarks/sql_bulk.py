"""How much sooner is an epoch of a table there by one bulk read than by one query a row?

    python benchmarks/sql_bulk.py [--save] [--postgres URL] [--rows 4030] [--rounds 5]

Two tables: seven numbers a row, and radio rows with 8 kB of nested JSON. Two questions to each.

Read: from no connection to all rows at hand. The bulk read includes connection, order, digest, check of keys
and the file that workers map; of JSON it brings the values that rules use. The rival has one open connection
and asks for one row after another by its key with a prepared statement, in binary; JSON is parsed as the driver does it
(of SQLite, by `json.loads`), since nothing can be done with it before.

Tensors: from the database to an epoch of batches of 128 as float32 tensors. Bulk: a new source, its rows,
and its samples, made by the rules, many at a time. The rival has a `Dataset` without workers that asks for
its row, and a rule written by hand for these columns, then torch's own collating. For radio rows it leaves
out what takes a pass over all rows, standardising; ours includes it. `SQLAlchemy`: the same with a textual
statement in a session from a pool, as services are usually written. `first` is the whole way through a cache
on disk, `later` a further epoch from it. Best of rounds in turns, once warm.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

import stoker
from measure import interleaved, publish
from stoker.extras.radio.demo import TABLE, RadioSpec, radio_columns, write_radio

COLUMNS = [f"x{n}" for n in range(7)]
RADIO = ["receiver_features", "tx_latitude", "tx_longitude", "gdop", "num_receivers_detected"]
BATCH = 128
SOME = 1_000
"""Rows that the slow contenders are timed on."""


def numbers_into(connection: Any, rows: int, mark: str, real: str) -> None:
    values = np.random.default_rng(0).normal(size=(rows, 7)).tolist()
    connection.execute("DROP TABLE IF EXISTS numbers")
    columns = ", ".join(f"{name} {real}" for name in COLUMNS)
    connection.execute(f"CREATE TABLE numbers (id bigint PRIMARY KEY, {columns})")
    insert = f"INSERT INTO numbers VALUES ({', '.join([mark] * 8)})"
    connection.executemany(insert, [(number, *row) for number, row in enumerate(values)])


@contextlib.contextmanager
def opened(url: str) -> Iterator[tuple[Any, str]]:
    """A connection or cursor that executes, and how its placeholders are written."""
    if url.startswith("postgres"):
        import psycopg

        with psycopg.connect(url, autocommit=True, prepare_threshold=1) as connection:
            yield connection.cursor(binary=True), "%s"
    else:
        with contextlib.closing(sqlite3.connect(url)) as connection:
            yield connection, "?"


def numbers_rule(row: tuple[Any, ...]) -> dict[str, Any]:
    return {name: torch.tensor(value, dtype=torch.float32) for name, value in zip(COLUMNS, row, strict=True)}


def radio_rule(row: tuple[Any, ...]) -> dict[str, Any]:
    """Six numbers a receiver, a mask, and the target, in metres from the receivers that hear the signal."""
    heard, latitude, longitude, gdop, detected = row
    heard = json.loads(heard) if isinstance(heard, str) else heard
    present = [one for one in heard if one["signal_present"]]
    north = sum(one["rx_lat"] for one in present) / len(present)
    east = sum(one["rx_lon"] for one in present) / len(present)
    scale = 111_195.08 * math.cos(math.radians(north))
    values, mask = torch.zeros(7, 6), torch.ones(7, dtype=torch.bool)
    rows = [
        [
            (one["snr_db"]["mean"] + 20) / 80,
            (one["psd_dbm_per_hz"]["mean"] + 180) / 80,
            (one["frequency_offset_hz"]["mean"] + 50) / 100,
            (one["rx_lat"] - north) * 111_195.08 if one["signal_present"] else 0.0,
            (one["rx_lon"] - east) * scale if one["signal_present"] else 0.0,
            float(one["signal_present"]),
        ]
        for one in heard
    ]
    values[: len(rows)] = torch.tensor(rows)
    mask[: len(rows)] = torch.tensor([not one["signal_present"] for one in heard])
    return {
        "receivers": values,
        "signal_mask": mask,
        "target": torch.tensor([(latitude - north) * 111_195.08, (longitude - east) * scale]),
        "gdop": torch.tensor(50.0 if gdop is None else gdop),
        "num_receivers": torch.tensor(detected),
        "centroid": torch.tensor([north, east]),
    }


class OneByOne(Dataset[Any]):
    """A query for each item."""

    def __init__(self, ask: Callable[[Any], Any], keys: list[Any], rule: Callable[[Any], Any]) -> None:
        self.ask, self.keys, self.rule = ask, keys, rule

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, number: int) -> Any:
        return self.rule(self.ask(self.keys[number]))


def batches_of(ask: Callable[[Any], Any], keys: list[Any], rule: Callable[[Any], Any]) -> int:
    return sum(len(next(iter(batch.values()))) for batch in DataLoader(OneByOne(ask, keys, rule), BATCH))


class Table:
    """What one table is asked."""

    def __init__(self, url: str, name: str, folder: Path) -> None:
        self.url, self.name, self.folder = url, name, folder
        numbers = name == "numbers"
        self.key = "id" if numbers else "recording_session_id"
        self.columns: Any = COLUMNS if numbers else radio_columns()
        self.wanted = ", ".join(COLUMNS if numbers else RADIO)
        self.rule = numbers_rule if numbers else radio_rule
        keys = self.source().keys()
        self.count = len(keys)
        some = keys[:: max(1, self.count // SOME)]
        self.asked: list[Any] = [int(found) for found in some] if numbers else list(some)

    def source(self) -> stoker.SQLSource:
        return stoker.SQLSource(self.url, table=self.name, key=self.key, columns=self.columns)

    def sql(self, mark: str) -> str:
        return f"SELECT {self.wanted} FROM {self.name} WHERE {self.key} = {mark}"

    def read(self) -> int:
        return len(self.source()._bulk.table.rows)

    def query_a_row(self) -> int:
        with opened(self.url) as (connection, mark):
            for found in self.asked:
                row = connection.execute(self.sql(mark), (found,)).fetchone()
                if isinstance(row[0], str):
                    json.loads(row[0])
        return len(self.asked)

    def tensors(self) -> int:
        source = self.source()
        count = len(source)
        for first in range(0, count, BATCH):
            samples = source.read_many(range(first, min(first + BATCH, count)))
            batch = {name: torch.from_numpy(array) for name, array in samples.items()}
            assert len(batch) == len(samples)
        return count

    def tensors_of_queries(self) -> int:
        with opened(self.url) as (connection, mark):
            sql = self.sql(mark)
            return batches_of(lambda key: connection.execute(sql, (key,)).fetchone(), self.asked, self.rule)

    def tensors_of_sessions(self) -> int:
        from sqlalchemy import create_engine, text
        from sqlalchemy.orm import Session

        at = self.url.replace("postgresql://", "postgresql+psycopg://")
        engine = create_engine(at if self.url.startswith("postgres") else f"sqlite:///{self.url}")
        sql = text(self.sql(":key"))

        def ask(key: Any) -> Any:
            with Session(engine) as session:
                return tuple(session.execute(sql, {"key": key}).one())

        try:
            return batches_of(ask, self.asked, self.rule)
        finally:
            engine.dispose()

    def first_epoch(self, workers: int | None) -> int:
        shutil.rmtree(self.folder / "cache", ignore_errors=True)
        stoker.precompute(
            self.source(), None, self.folder / "cache", name="c", workers=workers, progress=False
        )
        return self.later_epoch()

    def later_epoch(self) -> int:
        loader = stoker.Loader(stoker.open_cache(self.folder / "cache" / "c"), BATCH, shuffle=True)
        return sum(len(next(iter(batch.values()))) for batch in loader)


def question(table: Table, rounds: int) -> dict[str, Any]:
    """All contenders of one table in turns, in rows a second, and what is times what."""
    contenders: Mapping[str, Callable[[], int]] = {
        "read": table.read,
        "read, query a row": table.query_a_row,
        "tensors": table.tensors,
        "tensors, query a row": table.tensors_of_queries,
        "tensors, SQLAlchemy": table.tensors_of_sessions,
        "first epoch, no workers": partial(table.first_epoch, 0),
        "first epoch": partial(table.first_epoch, None),
        "later epoch": table.later_epoch,
    }
    rates = {name: 1 / s for name, s in interleaved(dict(contenders), rounds=rounds).items()}
    query, sessions = rates["tensors, query a row"], rates["tensors, SQLAlchemy"]
    return {
        "rows": table.count,
        "rows_s": {name: round(rate) for name, rate in rates.items()},
        "read_over_query": round(rates["read"] / rates["read, query a row"], 1),
        "tensors_over_query": round(rates["tensors"] / query, 1),
        "tensors_over_sqlalchemy": round(rates["tensors"] / sessions, 1),
        "first_epoch_over_query": round(rates["first epoch"] / query, 2),
        "later_epoch_over_query": round(rates["later epoch"] / query),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--postgres", help="URL of a database in which tables may be made")
    parser.add_argument("--rows", type=int, default=4_030)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        urls = {"sqlite": str(folder / "rows.db")}
        if arguments.postgres:
            urls["postgresql"] = arguments.postgres
        for database, url in urls.items():
            with opened(url) as (connection, mark):
                if database == "sqlite":
                    connection.execute("PRAGMA synchronous=OFF")
                numbers_into(connection, arguments.rows, mark, "double precision")
                connection.execute("COMMIT")
            write_radio(url, RadioSpec(rows=arguments.rows))
            for table in ("numbers", TABLE):
                found = question(Table(url, table, folder), arguments.rounds)
                rows.append({"database": database, "table": table, **found})
    publish("sql_bulk", rows, save=arguments.save)


if __name__ == "__main__":
    main()
