"""How much sooner is an epoch of a table there by one bulk read than by one query a row?

    python benchmarks/sql_bulk.py [--save] [--quick] [--postgres URL] [--rows 4030] [--rounds 5]

Two tables: seven numbers a row, and radio rows with 10 kB of nested JSON. Two questions to each.

Read: from no connection to all rows at hand. The bulk read includes connection, order, digest, check of keys
and the file that workers map; of JSON it brings the values that rules use. `entire JSON` is the same where
the column comes complete. The rival has one open connection
and asks for one row after another by its key with a prepared statement, in binary; JSON is parsed as the driver does it
(of SQLite, by `json.loads`), since nothing can be done with it before.

Tensors: from the database to an epoch of batches of 128 as float32 tensors. Bulk: a new source, its rows,
and its samples, made by the rules, many at a time. `entire JSON` parses what the column holds. The rival has a
`Dataset` without workers that asks for its row, and a rule written by hand for these columns, then torch's own
collating. For radio rows it leaves out what takes a pass over all rows, standardising; ours includes it.
`SQLAlchemy`: the same with a textual statement in a session from a pool, as services are usually written.
`by hand` is the limit: one columnar read written for this table alone, that checks nothing (no digest, keys,
types, entries that are too many) and standardizes nothing. PostgreSQL: arrays of floats from the server by
binary COPY, read by numpy; the same through ADBC, where it is installed. SQLite: msgspec, where it is
installed. Then the rule in numpy, for all rows at once. `first` is the whole way through a cache
on disk, `later` a further epoch from it. Best of rounds in turns, once warm.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import math
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
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


PATHS = [
    ("snr_db", "mean"),
    ("psd_dbm_per_hz", "mean"),
    ("frequency_offset_hz", "mean"),
    ("rx_lat",),
    ("rx_lon",),
    ("signal_present",),
]


def radio_fields(numbers: Any, counts: Any, others: Any) -> int:
    """`radio_rule` for all rows: of each receiver the numbers at `PATHS`, receivers of each row, and its columns."""
    there = np.arange(7) < counts[:, None]
    raw = np.zeros((len(counts), 7, 6))
    raw[there] = numbers
    present = raw[..., 5] > 0
    latitude, longitude, gdop, detected = others
    north = (raw[..., 3] * present).sum(1) / present.sum(1)
    east = (raw[..., 4] * present).sum(1) / present.sum(1)
    scale = 111_195.08 * np.cos(np.radians(north))
    values = (raw - [-20, -180, -50, 0, 0, 0]) / [80, 80, 100, 1, 1, 1] * there[..., None]
    values[..., 3] = (raw[..., 3] - north[:, None]) * 111_195.08 * present
    values[..., 4] = (raw[..., 4] - east[:, None]) * scale[:, None] * present
    fields = {
        "receivers": values.astype(np.float32),
        "signal_mask": ~present,
        "target": np.stack(
            [(latitude - north) * 111_195.08, (longitude - east) * scale], 1, dtype=np.float32
        ),
        "gdop": np.nan_to_num(gdop, nan=50.0).astype(np.float32),
        "num_receivers": detected.astype(np.int64),
        "centroid": np.stack([north, east], 1, dtype=np.float32),
    }
    epoch = {name: torch.from_numpy(array).split(BATCH) for name, array in fields.items()}
    return sum(map(len, epoch["receivers"]))


def picked_sql(flat: bool) -> str:
    """Arrays of floats made by PostgreSQL: one for each row, or one for each path."""
    steps = ["->".join(["entry", *(f"'{name}'" for name in path)]) for path in PATHS]
    casts = [
        f"({step})::{'float8' if number < 5 else 'boolean::int::float8'}" for number, step in enumerate(steps)
    ]
    picked = (
        f"array_agg(ARRAY[{', '.join(casts)}])"
        if flat
        else ", ".join(f"array_agg({cast}) AS path{number}" for number, cast in enumerate(casts))
    )
    others = ", ".join(RADIO[1:])
    return (
        f"SELECT recording_session_id, picked.*, {others} FROM {TABLE}, LATERAL (SELECT {picked} "
        f"FROM unnest(receiver_features) AS entry) AS picked ORDER BY recording_session_id"
    )


def copied_by_hand(url: str) -> int:
    """Binary COPY. Rows of as many receivers have one layout: 2 bytes, then 4 before each field."""
    import psycopg

    with (
        psycopg.connect(url) as connection,
        connection.cursor().copy(f"COPY ({picked_sql(flat=True)}) TO STDOUT (FORMAT BINARY)") as copy,
    ):
        rows = [bytes(row) for row in copy][:-1]
    rows[0] = rows[0][19:]
    by_length: dict[int, list[int]] = {}
    for place, row in enumerate(rows):
        by_length.setdefault(len(row), []).append(place)
    counts = np.zeros(len(rows), np.int64)
    numbers: list[Any] = [None] * len(rows)
    others = np.empty((4, len(rows)))
    for places in by_length.values():
        first = rows[places[0]]
        count = int.from_bytes(first[38:42], "big")
        known = len(first) == 22 + 4 + 28 + 72 * count + 36 + 8
        parts = [("head", "V54"), ("numbers", [("length", ">i4"), ("value", ">f8")], (count, 6))]
        for name, kind in (
            ("latitude", ">f8"),
            ("longitude", ">f8"),
            ("gdop", ">f8" if known else "V0"),
            ("detected", ">i4"),
        ):
            parts += [(f"{name}_length", ">i4"), (name, kind)]
        table = np.frombuffer(b"".join([rows[place] for place in places]), np.dtype(parts))
        counts[places] = count
        for place, values in zip(places, table["numbers"]["value"].astype("f8"), strict=True):
            numbers[place] = values
        others[:, places] = [
            table["latitude"],
            table["longitude"],
            table["gdop"] if known else np.full(len(places), np.nan),
            table["detected"],
        ]
    return radio_fields(np.concatenate(numbers), counts, others)


def adbc_by_hand(url: str) -> int:
    """Arrow arrays of floats, through ADBC."""
    import adbc_driver_postgresql.dbapi as driver

    with driver.connect(url) as connection, connection.cursor() as cursor:
        cursor.execute(picked_sql(flat=False))
        table = cursor.fetch_arrow_table().combine_chunks()
    lists = [table.column(f"path{number}").chunk(0) for number in range(6)]
    numbers = np.stack([np.asarray(one.flatten().to_numpy(zero_copy_only=False)) for one in lists], 1)
    others = [table.column(name).to_numpy().astype("f8") for name in RADIO[1:]]
    return radio_fields(numbers, np.diff(np.asarray(lists[0].offsets)), others)


def parsed_by_hand(path: str) -> int:
    """JSON text of SQLite, of which msgspec makes objects with six numbers."""
    import msgspec

    number = float | bool | None
    mean = msgspec.defstruct("Mean", [("mean", number, None)], gc=False)
    entry = msgspec.defstruct(
        "Entry", [(name, mean if len(rest) else number, None) for name, *rest in PATHS], gc=False
    )
    decode = msgspec.json.Decoder(list[entry]).decode
    flat: list[Any] = []
    counts: list[int] = []
    columns: list[Any] = []
    with contextlib.closing(sqlite3.connect(path)) as connection:
        for text, *rest in connection.execute(
            f"SELECT {', '.join(RADIO)} FROM {TABLE} ORDER BY recording_session_id"
        ):
            entries = decode(text)
            counts.append(len(entries))
            columns.append(rest)
            for one in entries:
                flat += (one.snr_db.mean, one.psd_dbm_per_hz.mean, one.frequency_offset_hz.mean, one.rx_lat,
                         one.rx_lon, one.signal_present)  # fmt: skip
    return radio_fields(np.array(flat, "f8").reshape(-1, 6), np.array(counts), np.array(columns, "f8").T)


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

    def source(self, *, entire: bool = False) -> stoker.SQLSource:
        """All rows; `entire`: with columns of JSON complete."""
        source = stoker.SQLSource(self.url, table=self.name, key=self.key, columns=self.columns)
        if entire:
            source._shared.request = replace(source._shared.request, picks={})
        return source

    def sql(self, mark: str) -> str:
        return f"SELECT {self.wanted} FROM {self.name} WHERE {self.key} = {mark}"

    def read(self, *, entire: bool = False) -> int:
        return len(self.source(entire=entire)._shared.table.rows)

    def by_hand(self) -> dict[str, Callable[[], int]]:
        """The limit for radio rows, through what is installed."""
        if self.name != TABLE:
            return {}
        if not self.url.startswith("postgres"):
            known = importlib.util.find_spec("msgspec") is not None
            return {"tensors, msgspec by hand": partial(parsed_by_hand, self.url)} if known else {}
        ways: dict[str, Callable[[], int]] = {"tensors, COPY by hand": partial(copied_by_hand, self.url)}
        if importlib.util.find_spec("adbc_driver_postgresql") is not None:
            ways["tensors, ADBC by hand"] = partial(adbc_by_hand, self.url)
        return ways

    def query_a_row(self) -> int:
        with opened(self.url) as (connection, mark):
            for found in self.asked:
                row = connection.execute(self.sql(mark), (found,)).fetchone()
                if isinstance(row[0], str):
                    json.loads(row[0])
        return len(self.asked)

    def tensors(self, *, entire: bool = False) -> int:
        source = self.source(entire=entire)
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
    by_hand = table.by_hand()
    contenders: Mapping[str, Callable[[], int]] = {
        "read": table.read,
        "read, entire JSON": partial(table.read, entire=True),
        "read, query a row": table.query_a_row,
        "tensors": table.tensors,
        "tensors, entire JSON": partial(table.tensors, entire=True),
        **by_hand,
        "tensors, query a row": table.tensors_of_queries,
        "tensors, SQLAlchemy": table.tensors_of_sessions,
        "first epoch, no workers": partial(table.first_epoch, 0),
        "first epoch": partial(table.first_epoch, None),
        "later epoch": table.later_epoch,
    }
    if table.name != TABLE:
        contenders = {name: work for name, work in contenders.items() if "JSON" not in name}
    rates = {name: 1 / s for name, s in interleaved(dict(contenders), rounds=rounds).items()}
    query, sessions = rates["tensors, query a row"], rates["tensors, SQLAlchemy"]
    return {
        "rows": table.count,
        "rows_s": {name: round(rate) for name, rate in rates.items()},
        "read_over_query": round(rates["read"] / rates["read, query a row"], 1),
        **(
            {"tensors_over_entire_json": round(rates["tensors"] / rates["tensors, entire JSON"], 2)}
            if "tensors, entire JSON" in rates
            else {}
        ),
        **(
            {"tensors_over_best_by_hand": round(rates["tensors"] / max(rates[name] for name in by_hand), 2)}
            if by_hand
            else {}
        ),
        "tensors_over_query": round(rates["tensors"] / query, 1),
        "tensors_over_sqlalchemy": round(rates["tensors"] / sessions, 1),
        "first_epoch_over_query": round(rates["first epoch"] / query, 2),
        "later_epoch_over_query": round(rates["later epoch"] / query),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--quick", action="store_true", help="see that it works; the figures say nothing")
    parser.add_argument("--postgres", help="URL of a database in which tables may be made")
    parser.add_argument("--rows", type=int, default=4_030)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rows, arguments.rounds = 400, 1
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
    publish("sql_bulk", rows, save=arguments.save and not arguments.quick)


if __name__ == "__main__":
    main()
