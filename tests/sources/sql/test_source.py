"""Rows of SQLite as samples."""

from __future__ import annotations

import logging
import sqlite3
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest

import stoker
from stoker.errors import ConfigError, SourceError, SplitError, StalledError
from stoker.sources.sql import databases
from stoker.sources.sql.query import QueryTimeouts, has_password, parse_database_url
from stoker.sources.sql.source import SQLSource
from stoker.testing import check_source
from tests.sources.sql.rows import COLUMNS, change, made, write_sqlite

QUICK = QueryTimeouts(lock_s=0.2, statement_s=5.0, attempts=2, backoff_s=0.01)


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return write_sqlite(tmp_path / "rows.db", made())


def source(url: Any, **settings: Any) -> SQLSource:
    settings = {"table": "samples", "key": "id", "columns": COLUMNS, "timeouts": QUICK} | settings
    return SQLSource(url, **settings)


def test_it_keeps_the_promises_of_a_source(database: Path) -> None:
    check_source(source(database))
    check_source(source(database, split="val"))
    check_source(source(f"sqlite:///{database}", table=None, query="SELECT * FROM samples;"))


def test_values_are_what_the_rules_say(database: Path) -> None:
    plain = {**COLUMNS, "power": "float32", "target": {**COLUMNS["target"], "standardize": False}}
    plain["receivers"] = {k: v for k, v in COLUMNS["receivers"].items() if k != "standardize"}
    row, sample = made()[3], source(database, columns=plain).read(3)
    heard = row[9]

    assert all(isinstance(value, np.ndarray) for value in sample.values())
    assert sample["power"] == np.float32(row[1])
    assert sample["count"] == row[2]
    assert sample["known"].dtype == np.bool_
    assert sample["known"] == row[3]
    assert sample["site"] == 1
    assert sample["at"] == np.datetime64("2026-03-01T11:03:00.250").astype(np.int64)
    assert sample["trace"].tobytes() == row[6]
    assert sample["gdop"] == 50.0
    assert sample["receivers"].shape == (4, 4)
    counted = [entry for entry in heard if entry["on"]]
    center = np.mean([[entry["lat"], entry["lon"]] for entry in counted], axis=0)
    assert sample["center"] == pytest.approx(center, abs=1e-5)
    for place, entry in enumerate(heard):
        assert sample["receivers"][place, 0] == pytest.approx((entry["snr"]["mean"] + 20) / 80, abs=1e-6)
        assert sample["absent"][place] == (not entry["on"])
        north = (entry["lat"] - center[0]) * 111_195 if entry["on"] else 0
        assert sample["receivers"][place, 1] == pytest.approx(north, rel=1e-4, abs=0.1)
    assert sample["absent"][len(heard) :].all()
    assert not sample["receivers"][len(heard) :].any()
    east = (row[11] - center[1]) * 111_195 * np.cos(np.radians(center[0]))
    assert sample["target"] == pytest.approx([(row[10] - center[0]) * 111_195, east], rel=1e-3)


def test_what_is_standardised_has_mean_0_and_deviation_1_over_the_train_split(database: Path) -> None:
    train = source(database, split="train")
    val = train.for_split("val")
    samples = [train.read(n) for n in range(len(train))]
    places = np.concatenate([s["receivers"][~s["absent"], 1:3] for s in samples])
    known = np.array([s["snr"] for s in samples if s["snr_known"]])

    for values in (
        np.array([s["power"] for s in samples]),
        np.stack([s["target"] for s in samples]),
        places,
        known,
    ):
        assert values.mean(0) == pytest.approx(0, abs=1e-4)
        assert values.std(0) == pytest.approx(1, abs=1e-4)
    assert not any(s["receivers"][s["absent"], 1:3].any() for s in samples)
    assert val.statistics == train.statistics
    raw = [row[1] for row in made() if str(row[0]) in set(train.keys())]
    assert train.statistics["power"]["mean"] == [pytest.approx(np.mean(raw), rel=1e-6)]


def test_columns_without_rules_are_numbers_as_they_are_found(database: Path) -> None:
    found = source(database, columns=["power", "count"])

    assert {name: field.dtype for name, field in found.schema().items()} == {
        "power": "float64",
        "count": "int64",
    }
    assert float(found.read(3)["power"]) == made()[3][1]
    with pytest.raises(SourceError, match=r"column site holds text.*'intern'"):
        source(database, columns=["site"]).schema()
    with pytest.raises(SourceError, match="column trace holds bytes"):
        source(database, columns=["trace"]).schema()


def test_text_is_interned_in_the_order_of_the_alphabet(database: Path) -> None:
    change(database, "UPDATE samples SET site = 'coast' WHERE id = 20")
    found = source(database, columns={"site": "text"})

    assert [int(found.read(n)["site"]) for n in range(4)] == [1, 2, 0, 2]
    assert found.identity().settings["found"] == {
        "site": {"column": "site", "text": ["coast", "hill", "town"], "null": None}
    }


def test_the_split_and_the_samples_do_not_depend_on_the_order_of_rows(database: Path, tmp_path: Path) -> None:
    rows = made()
    order = np.random.default_rng(1).permutation(len(rows))
    other = write_sqlite(tmp_path / "permuted.db", [rows[i] for i in order])

    for split in ("train", "val", "test"):
        one, two = source(database, split=split), source(other, split=split)
        assert one.keys() == two.keys()
        assert one.identity() == two.identity()
    assert len(source(database, split="train", splits={"train": 0.8, "val": 0.2})) == 32


def test_splits_share_no_key_and_leave_none_out(database: Path) -> None:
    train = source(database, split="train")
    keys = [set(train.for_split(split).keys()) for split in ("train", "val", "test")]

    assert sum(len(own) for own in keys) == 40
    assert len(set.union(*keys)) == 40


def test_unrelated_writes_change_nothing_and_relevant_ones_do(database: Path) -> None:
    before = source(database, columns=["power"]).identity()
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("CREATE TABLE other (id INTEGER)")
        connection.execute("INSERT INTO other VALUES (1)")
        connection.execute("UPDATE samples SET count = 99")
    assert source(database, columns=["power"]).identity() == before

    change(database, "UPDATE samples SET power = power + 1e-9 WHERE id = 70")
    assert source(database, columns=["power"]).identity() != before


def test_a_change_in_a_train_row_changes_what_val_is_standardised_by(database: Path) -> None:
    train, val = source(database, split="train"), source(database, split="val")
    before = val.identity()
    change(database, "UPDATE samples SET power = 99 WHERE id = ?", int(train.keys()[0]))

    assert source(database, split="val").identity() != before


def test_the_users_version_names_the_content(database: Path) -> None:
    settings: dict[str, Any] = {"columns": COLUMNS, "version_query": "PRAGMA user_version"}
    one = source(database, **settings)
    before = one.identity()
    assert not one._shared.is_read, "an unchanged table is not read"
    assert len(one) == 40

    change(database, "UPDATE samples SET power = 0")
    assert source(database, **settings).identity() == before
    change(database, "PRAGMA user_version = 7")
    assert source(database, **settings).identity() != before
    with pytest.raises(SourceError, match="rows changed while they were in use"):
        one.read(0)


def test_a_complete_cache_is_found_without_reading_the_table(database: Path, tmp_path: Path) -> None:
    typed: dict[str, Any] = {"columns": {"power": "float32"}, "version_query": "PRAGMA user_version"}
    first = source(database, **typed)
    stoker.precompute(first, None, tmp_path / "caches", name="rows", workers=0, progress=None)

    again = source(database, **typed)
    cache = stoker.precompute(again, None, tmp_path / "caches", name="rows", workers=0, progress=None)

    assert not again._shared.is_read
    assert list(cache.keys()) == list(first.keys())


def test_where_says_how_many_rows_it_drops(database: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "stoker"):
        kept = source(database, where="count >= 0 -- a comment", columns=["power"])
        wanted = sum(row[2] >= 0 for row in made())
        assert len(kept) == wanted

    assert kept.dropped == 40 - wanted
    assert f"{wanted} rows" in caplog.text
    assert f"where drops {40 - wanted}" in caplog.text
    with pytest.raises(SourceError, match=r"where \(count > 99\) drops all 40 rows"):
        len(source(database, where="count > 99"))


def test_a_table_without_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="samples has no rows"):
        len(source(write_sqlite(tmp_path / "empty.db", [])))


@pytest.mark.parametrize(
    ("sql", "says"),
    [
        ("UPDATE samples SET id = 20 WHERE id IN (30, 40)", "key id is repeated in 2 rows: 20"),
        ("UPDATE samples SET id = NULL WHERE id > 370", "key id is NULL in 2 rows"),
        ("UPDATE samples SET id = 'x' WHERE id = 30", "values of type integer, text"),
        ("UPDATE samples SET id = id + 0.5", "values of type float"),
    ],
)
def test_keys_that_do_not_tell_rows_apart_are_named(database: Path, sql: str, says: str) -> None:
    change(database, sql)

    with pytest.raises(SourceError, match=says):
        len(source(database))


def test_several_columns_may_be_the_key(database: Path) -> None:
    found = source(database, key=("site", "id"), columns=["power"])

    assert found.keys()[0] == '["hill",0]'
    with pytest.raises(SourceError, match="key site is repeated in 38 rows: hill, town"):
        len(source(database, key="site", columns=["power"]))


@pytest.mark.parametrize(
    ("column", "value", "says"),
    [
        ("power", None, "column power is NULL"),
        ("power", "12 W", "column power is text '12 W', expected a number"),
        ("power", float("inf"), "column power is inf, expected a finite float32"),
        ("count", 0.5, "column count is 0.5, expected a whole number"),
        ("known", 2, r"column known is 2, expected 0 to 1 \(bool\)"),
        ("site", "lake", "column site is 'lake', expected one of hill, town"),
        ("at", "yesterday", "column at is 'yesterday', expected a time"),
        ("trace", b"123", "column trace has 3 bytes, expected 8"),
        ("heard", "[{", "column heard is not JSON"),
        ("heard", "{}", "column heard is not a JSON list of objects"),
        ("heard", '[{"lat": 1, "lon": 1, "on": false}]', "column heard has 1 entries and none that counts"),
        ("heard", "[" + ",".join(['{"on": true}'] * 5) + "]", "has 5 entries, expected 4 at most"),
        ("heard", '[{"lat": 1, "lon": null, "on": true}]', "has an entry without lon, or it is null"),
        ("heard", '[{"lat": 1, "lon": NaN, "on": true}]', "NaN is not a JSON number"),
        ("heard", '[{"lat": 1, "lon": 1, "on": true, "snr": {"mean": "10"}}]', "has snr.mean = '10'"),
        ("tx_lat", 91.0, "column tx_lat is 91.0, expected degrees"),
    ],
)
def test_a_malformed_row_is_named_by_key_and_column(
    database: Path, column: str, value: Any, says: str
) -> None:
    change(database, f"UPDATE samples SET {column} = ? WHERE id = 70", value)
    found = source(database)

    with pytest.raises(SourceError, match=says) as raised:
        found.read(7)
    assert str(raised.value).startswith(f"{database}, samples, key 70, column {column}")
    found.read(8)


def test_lists_have_the_same_bits_with_and_without_msgspec(
    database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("msgspec")
    odd = {
        70: """'[{"on": true, "lat": 1, "lon": "\u00e9"}]'""",
        80: """'[{"on": true, "lat": 45, "lon": 8, "snr": 3}]'""",
        90: """'[{"on": true, "lat": 1e400, "lon": 8}]'""",
        100: """'[{"other": "\U0001f600", ' || substr(heard, 3)""",
        110: "'[]'",
        120: """CAST('[{"other": "' || x'ff' || '", ' || substr(heard, 3) AS TEXT)""",
    }
    for key, value in odd.items():
        change(database, f"UPDATE samples SET heard = {value} WHERE id = {key}")
    fast = source(database)
    values = [outcome(fast, number) for number in range(40)]
    monkeypatch.setattr(databases, "list_reader", lambda _: None)
    plain = source(database)

    assert [outcome(plain, number) for number in range(40)] == values
    assert sum(isinstance(value, str) for value in values) == 3
    assert plain.identity() == fast.identity()


def test_long_lists_are_fetched_few_at_a_time(database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change(
        database,
        "UPDATE samples SET heard = '[{\"a\": \"' || hex(zeroblob(500000)) || '\", ' || substr(heard, 3)",
    )
    fetched: list[int] = []
    fetch = databases.SqliteSession._fetch

    def counted(self: Any, cursor: Any, size: int) -> list[Any]:
        rows = fetch(self, cursor, size)
        fetched.append(sum(len(value) for row in rows for value in row if isinstance(value, bytes)))
        return rows

    monkeypatch.setattr(databases.SqliteSession, "_fetch", counted)
    rows = source(database)

    assert len(rows) == 40
    assert rows.read(3)["receivers"].shape == (4, 4)
    assert max(fetched) < 16_000_000


def outcome(rows: SQLSource, number: int) -> Any:
    """Bytes of a sample, or why there is none."""
    try:
        return {name: array.tobytes() for name, array in rows.read(number).items()}
    except SourceError as error:
        return str(error)


def test_malformed_rows_are_quarantined_and_the_others_stored(database: Path, tmp_path: Path) -> None:
    change(database, "UPDATE samples SET heard = 'nothing' WHERE id = 70")
    change(database, "UPDATE samples SET power = NULL WHERE id = 90")
    cache = stoker.precompute(
        source(database), None, tmp_path / "cache", name="rows", workers=2, max_quarantined=0.1
    )

    assert sorted(cache.quarantined) == [7, 9]
    assert cache.quarantined[7].stage == "read"
    assert "key 70, column heard is not JSON" in cache.quarantined[7].error
    assert len(cache) == 38
    wanted = source(database).read(11)
    assert all(np.array_equal(cache[11][name].numpy(), value) for name, value in wanted.items())


def test_workers_map_what_was_read_once(database: Path, tmp_path: Path) -> None:
    """The table is gone by then; only the rows that were read at first can serve."""
    found = source(database)
    len(found)
    database.unlink()

    cache = stoker.precompute(found, None, tmp_path / "cache", name="rows", workers=2)

    assert len(cache) == 40


def test_a_copy_whose_rows_are_gone_reads_again_and_refuses_others(database: Path) -> None:
    found = source(database)
    found.read(0)
    copied = cloudpickle.loads(payload := cloudpickle.dumps(found))
    late = cloudpickle.loads(payload)
    found.close()
    del found

    assert copied.read(3)["count"] == made()[3][2]
    change(database, "UPDATE samples SET power = 0 WHERE id = 0")
    with pytest.raises(SourceError, match="rows changed while they were in use"):
        late.read(3)


def test_a_database_locked_by_a_writer_is_waited_for_and_then_named(database: Path) -> None:
    with closing(sqlite3.connect(database, isolation_level=None)) as writer:
        writer.execute("BEGIN EXCLUSIVE")
        with pytest.raises(StalledError, match=r"rows.db, samples: locked by a writer for more than 0.2 s"):
            len(source(database))
        patient = source(database, timeouts=QueryTimeouts(lock_s=30.0))
        release = threading.Timer(0.3, lambda: None)
        release.start()
        release.join()
        writer.execute("COMMIT")

        assert len(patient) == 40


def test_a_statement_that_takes_too_long_is_ended(database: Path) -> None:
    endless = (
        "WITH RECURSIVE n(id) AS (SELECT 1 UNION ALL SELECT id + 1 FROM n) SELECT id, id AS power FROM n"
    )

    with pytest.raises(StalledError, match=r"a statement took more than 0.3 s"):
        len(
            source(
                database,
                table=None,
                query=endless,
                columns=["power"],
                timeouts=QueryTimeouts(statement_s=0.3),
            )
        )


def test_a_writer_in_the_middle_of_the_read_is_not_seen(
    database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stoker.sources.sql import tables

    change(database, "PRAGMA journal_mode=WAL")
    take = tables._take

    def interrupted(*arguments: Any) -> Any:
        change(database, "UPDATE samples SET power = 0")
        return take(*arguments)

    wanted = [float(np.float32(row[1])) for row in made()]
    monkeypatch.setattr(tables, "_take", interrupted)
    found = source(database, columns={"power": "float32"}, version_query="SELECT sum(power) FROM samples")
    found._shared.table  # noqa: B018

    assert [float(found.read(n)["power"]) for n in range(40)] == wanted


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        ({"query": "SELECT 1"}, ConfigError, "from a table or a query"),
        ({"table": None}, ConfigError, "from a table or a query"),
        ({"columns": {}}, ConfigError, "columns is {}"),
        ({"columns": {"power": "flot32"}}, ConfigError, r"columns\['power'\].*Did you mean float32"),
        ({"columns": {"power": {"dtype": "float32", "nul": 1}}}, ConfigError, "Did you mean null"),
        ({"columns": {"t": {"columns": ["tx_lat", "tx_lon"], "metres_from": "r"}}}, ConfigError, "no place"),
        ({"key": None}, ConfigError, "key is None. Expected the name of the column"),
        ({"key": ["id", 3]}, ConfigError, r"key is \['id', 3\]. Expected"),
        ({"table": 3}, ConfigError, "table is 3. Expected text"),
        ({"columns": 3}, ConfigError, "columns is 3. Expected names"),
        ({"columns": {"x": "int"}}, ConfigError, r"'int'. Did you mean int64\?.*float32.*or a mapping"),
        ({"columns": {"x": "Float"}}, ConfigError, r"'Float'. Did you mean float32\?"),
        ({"columns": {"x": "str"}}, ConfigError, r"'str'. Did you mean text\?"),
        ({"columns": {"x": {"dtype": "int"}}}, ConfigError, r"'int' is not known. Did you mean int64\?"),
        (
            {"columns": {"x": {"bytes": "string", "shape": [2]}}},
            ConfigError,
            "'string' is not known. Expected",
        ),
        ({"columns": {"heard": {"json": "float32", "shape": 2.5}}}, ConfigError, "shape is 2.5. Expected"),
        ({"columns": {"site": {"text": 3}}}, ConfigError, "text is 3. Expected a list"),
        ({"columns": {"heard": {"list": 2, "features": 3}}}, ConfigError, r"expected list: N"),
        ({"columns": {"heard": {"list": 2, "features": ["a"], "place": 3}}}, ConfigError, "place is 3"),
        (
            {"columns": {"heard": {"list": 2, "features": ["a"], "standardize": 3}}},
            ConfigError,
            "standardize is 3. Expected some of",
        ),
        (
            {"columns": {"heard": {"list": 2, "features": [{"path": "a", "range": 3}]}}},
            ConfigError,
            r"range 3 of a. Expected \[low, high\]",
        ),
        ({"split": 3}, ConfigError, "split is 3. Expected text"),
        ({"split": "train", "splits": 3}, ConfigError, "splits is 3. Expected fractions by name"),
        ({"split": "train", "splits": {"train": "x"}}, ConfigError, "Expected fractions by name"),
        ({"seed": 1.5}, ConfigError, "seed is 1.5. Expected a whole number"),
        ({"timeouts": 3}, ConfigError, "timeouts is 3. Expected QueryTimeouts"),
        ({"split": "holdout"}, SplitError, "'holdout' is not among the fractions"),
        ({"splits": {"train": 1.0}}, SplitError, "no split was asked for"),
    ],
)
def test_settings_that_make_no_sense_are_refused_at_once(
    database: Path, settings: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        source(database, **settings)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"table": "sample"}, "no such table: sample"),
        ({"columns": ["powr"]}, "samples has no column powr. It has id, power"),
        ({"where": "nowhere = 1"}, "no such column: nowhere"),
        ({"version_query": "SELECT NULL"}, "version_query gives NULL"),
    ],
)
def test_what_the_database_does_not_have_is_named(
    database: Path, settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(SourceError, match=says):
        source(database, **settings).identity()


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no such file"):
        len(source(tmp_path / "none.db"))
    (tmp_path / "text.db").write_text("not a database at all" * 100)
    with pytest.raises(SourceError, match="file is not a database"):
        len(source(tmp_path / "text.db"))


def test_a_reader_that_starts_does_not_import_torch(database: Path) -> None:
    import subprocess
    import sys

    code = (
        "import sys, stoker.sources.sql.source as s\n"
        f"x = s.SQLSource({str(database)!r}, table='samples', key='id', columns=['power']); x.read(0)\n"
        "assert 'torch' not in sys.modules and 'psycopg' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_places_on_both_sides_of_the_180th_meridian_are_near_each_other(tmp_path: Path) -> None:
    """The same receivers and transmitter, a world away and then across the meridian."""
    rows, shifted = made(4), made(4)
    for row in shifted:
        for entry in row[9]:
            entry["lon"] = (entry["lon"] + 172.0 + 180) % 360 - 180
        row[11] = (row[11] + 172.0 + 180) % 360 - 180
    away = source(write_sqlite(tmp_path / "away.db", rows))
    across = source(write_sqlite(tmp_path / "across.db", shifted))

    assert any(len({entry["lon"] > 0 for entry in row[9] if entry["on"]}) == 2 for row in shifted)
    for number in range(4):
        for name in ("receivers", "target"):
            np.testing.assert_allclose(across.read(number)[name], away.read(number)[name], atol=1e-4)
        assert abs(across.read(number)["center"][1]) > 179


def test_float64_is_served_with_every_digit(database: Path, tmp_path: Path) -> None:
    times = [1_763_884_800.0 + 0.001 * number for number in range(40)]  # one value, as float32
    for number, value in enumerate(times):
        pair = np.array([value, -value]).tobytes()
        change(database, "UPDATE samples SET gdop = ?, trace = ? WHERE id = ?", value, pair, 10 * number)
    columns = {
        "found": None,
        "given": {"column": "gdop", "dtype": "float64"},
        "pair": {"column": "trace", "bytes": "float64", "shape": [2]},
    }
    rows = source(database, query="SELECT *, gdop AS found FROM samples", table=None, columns=columns)

    (batch,) = stoker.cached(
        rows, cache_dir=tmp_path, batch_size=40, shuffle=False, precompute={"workers": 0}
    )

    assert batch["found"].tolist() == times
    assert batch["given"].tolist() == times
    assert batch["pair"].tolist() == [[value, -value] for value in times]


def test_an_infinite_value_is_no_finite_float64(database: Path) -> None:
    change(database, "UPDATE samples SET gdop = 9e999 WHERE id = 30")
    rows = source(database, columns={"gdop": {"dtype": "float64", "null": 0}})

    with pytest.raises(SourceError, match=r"key 30, column gdop is inf"):
        rows.read(3)


def test_an_address_hides_what_is_secret_and_nothing_else() -> None:
    address = parse_database_url("postgresql://me:p%40ss@db/lab?sslpassword=other&passfile=&sslmode=require")

    hidden = address.hide("p@ss, p%40ss and other for me at db with require")

    assert hidden == "***, *** and *** for me at db with require"
    assert not has_password("postgresql://me@db/lab?password=")
    assert parse_database_url("postgresql://db/lab?password=").hide("as it is") == "as it is"


@pytest.mark.parametrize("url", ["", "sqlite:///", "sqlite:///?mode=rw"])
def test_an_address_without_a_file_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="no name"):
        parse_database_url(url)
