"""Rows of a real PostgreSQL, beside the same rows in SQLite."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest

from stoker.errors import ConfigError, SourceError, StalledError
from stoker.run.look import look
from stoker.runtime import threads
from stoker.sources.sql import databases, tables
from stoker.sources.sql.databases import MalformedCopyError, copied_columns
from stoker.sources.sql.query import QueryTimeouts
from stoker.sources.sql.rows import NUMBERS, PICKED, as_list, unpack_row
from stoker.sources.sql.source import SQLSource
from stoker.testing import check_source
from tests.sources.sql.rows import COLUMNS, made, write_postgres, write_sqlite
from tests.sources.sql.server import Server

QUICK = QueryTimeouts(connect_s=5.0, statement_s=10.0, lock_s=0.3, attempts=3, backoff_s=0.05)


@pytest.fixture
def connection(server: Server) -> Iterator[Any]:
    with server.connect() as opened:
        write_postgres(opened, made())
        yield opened


def source(url: Any, **settings: Any) -> SQLSource:
    settings = {"table": "samples", "key": "id", "columns": COLUMNS, "timeouts": QUICK} | settings
    return SQLSource(url, **settings)


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and np.array_equal(one[name], other[name]) for name in one
    )


def test_it_keeps_the_promises_of_a_source(server: Server, connection: Any) -> None:
    check_source(source(server.url()))
    check_source(source(server.url(), columns=["power", "count"], split="train"))


def test_samples_and_splits_are_those_of_sqlite(server: Server, connection: Any, tmp_path: Path) -> None:
    rows = made()
    order = np.random.default_rng(2).permutation(len(rows))
    database = write_sqlite(tmp_path / "rows.db", [rows[i] for i in order])

    for split in ("train", "val", "test"):
        here, there = source(database, split=split), source(server.url(), split=split)
        assert here.keys() == there.keys()
        assert here.schema() == there.schema()
        assert here.statistics == there.statistics
        assert all(same(here.read(n), there.read(n)) for n in range(len(here)))


def test_a_table_of_numbers_has_one_identity_in_both(server: Server, connection: Any, tmp_path: Path) -> None:
    database = write_sqlite(tmp_path / "rows.db", made())
    columns = {"power": "float32", "tx_lat": "float32"}

    assert source(database, columns=columns).identity() == source(server.url(), columns=columns).identity()


def test_rows_come_by_copy_or_in_batches_and_are_the_same(
    server: Server, connection: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With NULLs, text, bytes and JSON too; a type that the parser of COPY does not know is fetched."""
    connection.execute("INSERT INTO samples (id, power) VALUES (9999, 1)")
    connection.execute("CREATE TABLE IF NOT EXISTS odd AS SELECT id::numeric AS n, * FROM samples")
    copied = source(server.url())
    for columns in (["power"], {"count": "int16", "known": "bool", "at": {"timestamp": "us"}}, COLUMNS):
        rows = source(server.url(), columns=columns)._shared.table
        with monkeypatch.context() as patched:
            patched.setattr(databases, "COPIED", frozenset())
            assert source(server.url(), columns=columns)._shared.table.digest == rows.digest
    with pytest.raises(SourceError, match="key 9999, column count is NULL"):
        copied.read(40)

    assert source(server.url(), table="odd", columns={"n": "float64"}).read(3)["n"] == made()[3][0]


def test_columns_without_rules_are_as_wide_as_the_database_holds_them(
    server: Server, connection: Any
) -> None:
    connection.execute("UPDATE samples SET snr = 0")
    found = source(server.url(), columns=["power", "snr"])

    assert {name: field.dtype for name, field in found.schema().items()} == {
        "power": "float64",
        "snr": "float32",
    }
    assert float(found.read(3)["power"]) == made()[3][1]
    there = cloudpickle.loads(cloudpickle.dumps(found))
    assert there.schema() == found.schema()


def test_keys_of_text_and_uuid_come_in_the_order_of_their_bytes(server: Server, connection: Any) -> None:
    connection.execute("DROP TABLE IF EXISTS named")
    connection.execute('CREATE TABLE named (name text COLLATE "en-x-icu", code uuid, x float8)')
    connection.execute(
        "INSERT INTO named SELECT n, md5(n)::uuid, 1 FROM unnest(ARRAY['b', 'a', 'B', 'A', '_', 'é']) AS n"
    )

    by_name = source(server.url(), table="named", key="name", columns=["x"])
    assert by_name.keys() == ["A", "B", "_", "a", "b", "é"]
    by_code = source(server.url(), table="named", key="code", columns=["x"])
    assert by_code.keys() == sorted(by_code.keys())
    assert len(by_code.keys()[0]) == 36


def test_keys_of_one_byte_come_in_its_order(server: Server, connection: Any) -> None:
    connection.execute("DROP TABLE IF EXISTS letters")
    connection.execute('CREATE TABLE letters (letter "char", x float8)')
    connection.execute("INSERT INTO letters SELECT n, 1 FROM unnest(ARRAY['b', 'a', 'B', 'A', '_']) AS n")

    assert source(server.url(), table="letters", key="letter", columns=["x"]).keys() == [
        "A",
        "B",
        "_",
        "a",
        "b",
    ]


def test_infinite_and_distant_times_are_values_of_their_own(server: Server, connection: Any) -> None:
    connection.execute("UPDATE samples SET at = '12000-01-01T00:00Z' WHERE id = 10")
    connection.execute("UPDATE samples SET at = 'infinity' WHERE id = 20")
    for columns in ({"at": {"timestamp": "s"}}, {"at": {"timestamp": "s"}, "site": "text"}):
        found = source(server.url(), columns=columns)
        assert found.read(1)["at"] == np.datetime64("12000-01-01", "s").astype(np.int64)
        with pytest.raises(SourceError, match="key 20, column at is an infinite time"):
            found.read(2)


@pytest.mark.parametrize(
    ("sql", "says"),
    [
        ("UPDATE samples SET id = 20 WHERE id IN (30, 40)", "key id is repeated in 2 rows: 20"),
        ("UPDATE samples SET id = NULL WHERE id > 370", "key id is NULL in 2 rows"),
    ],
)
def test_keys_that_do_not_tell_rows_apart_are_named(
    server: Server, connection: Any, sql: str, says: str
) -> None:
    connection.execute(sql)
    for columns in (["power"], COLUMNS):
        with pytest.raises(SourceError, match=says):
            len(source(server.url(), columns=columns))


def killing(server: Server, monkeypatch: pytest.MonkeyPatch, times: int) -> list[int]:
    """Cut the connection in the middle of the first `times` reads."""
    cut: list[int] = []
    batches = databases.PostgresSession.batches

    monkeypatch.setattr(databases, "COPY_BYTES", 1000)
    monkeypatch.setattr(databases, "next_size", lambda *_: 4)

    def cutting(self: Any) -> Iterator[Any]:
        for number, batch in enumerate(batches(self)):
            yield batch
            if number == 0 and len(cut) < times:
                with server.connect() as other:
                    (pid,) = other.execute(
                        "SELECT pid FROM pg_stat_activity WHERE application_name = 'stoker'"
                    ).fetchone()
                    cut.append(pid)
                    other.execute("SELECT pg_terminate_backend(%s)", (pid,))

    monkeypatch.setattr(databases.PostgresSession, "batches", cutting)
    return cut


def test_a_connection_that_is_cut_is_made_again(
    server: Server, connection: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_postgres(connection, made(200))
    wanted = source(server.url()).identity()
    monkeypatch.setattr(databases, "COPIED", frozenset())
    cut = killing(server, monkeypatch, times=2)

    found = source(server.url())
    assert found.identity() == wanted
    assert len(cut) == 2
    assert "next try in 0.05 s" in caplog.text
    assert "next try in 0.1 s" in caplog.text


def test_a_connection_that_is_cut_each_time_is_given_up(
    server: Server, connection: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = killing(server, monkeypatch, times=9)
    more = "SELECT *, repeat('x', 200000) AS long FROM samples"  # than sockets hold

    with pytest.raises(StalledError, match="no connection, or none that lasted, in 3 attempts"):
        len(source(server.url(), table=None, query=more, columns={"long": {"text": ["x"]}}))
    assert len(cut) == 3


def test_a_server_that_starts_again_is_waited_for(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with server.connect() as opened:
        write_postgres(opened, made())
    server.stop()
    pauses: list[float] = []
    monkeypatch.setattr(threads, "pause", lambda seconds: pauses.append(seconds) or server.start())

    assert len(source(server.url())) == 40
    assert pauses == [0.05]


def test_a_statement_that_takes_too_long_is_ended(server: Server, connection: Any) -> None:
    slow = "SELECT id, power, pg_sleep(5) IS NULL AS late FROM samples"

    with pytest.raises(StalledError, match=r"a statement took more than 0.2 s and was ended"):
        len(
            source(
                server.url(),
                table=None,
                query=slow,
                columns=["power", "late"],
                timeouts=QueryTimeouts(statement_s=0.2),
            )
        )


def test_a_lock_is_waited_for_and_then_named(server: Server, connection: Any) -> None:
    with server.connect() as other:
        other.autocommit = False
        other.execute("LOCK TABLE samples IN ACCESS EXCLUSIVE MODE")
        with pytest.raises(StalledError, match=r"locked for more than 0.3 s"):
            len(source(server.url()))
        other.rollback()


def test_one_snapshot_serves_all_statements(
    server: Server, connection: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = tables._take

    def interrupted(*arguments: Any) -> Any:
        connection.execute("DELETE FROM samples WHERE id > 100")
        return take(*arguments)

    monkeypatch.setattr(tables, "_take", interrupted)
    found = source(server.url(), where="count > -99", version_query="SELECT count(*) FROM samples")
    rows = found._shared.table.rows

    assert len(rows) == 40
    assert found.dropped == 0


def test_a_transaction_cannot_write(server: Server, connection: Any) -> None:
    with pytest.raises(SourceError, match="read-only transaction"):
        source(server.url(), version_query="CREATE TABLE x AS SELECT 1 AS y").identity()


def test_nothing_shows_a_password(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    secret = "s3cr%2Ft%20word"
    found = source(f"postgresql://me:{secret}@127.0.0.1:9/db?sslpassword=0ther&connect_timeout=2")

    with pytest.raises(StalledError) as raised:
        len(found)
    texts = f"{found!r} {raised.value} {caplog.text} {found._shared.request!r}"
    assert "127.0.0.1:9/db" in texts
    for part in ("s3cr", "0ther", "me:"):
        assert part not in texts


def test_identity_does_not_tell_where_the_database_is(server: Server, connection: Any) -> None:
    text = repr(source(server.url()).identity())

    assert str(server.folder) not in text
    assert "postgres:" not in text
    assert "stoker@" not in text


def test_a_wrong_database_is_not_tried_again(server: Server) -> None:
    with pytest.raises(SourceError, match='database "nowhere" does not exist'):
        len(source(server.url("nowhere")))


def test_without_the_driver_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise ImportError(name)

    monkeypatch.setattr(databases, "import_module", absent)

    with pytest.raises(ConfigError, match=r"pip install 'stoker\[sql\]'"):
        len(source("postgresql://host/db"))


@pytest.mark.parametrize("size", [1, 3, 19, 50, 1000])
def test_a_buffer_of_copy_is_cut_anywhere(size: int) -> None:
    """The parser holds what is not a whole row; a NULL, which is shorter, is never taken for a value."""
    head = b"PGCOPY\n\xff\r\n\x00" + bytes(8)
    row = b"\x00\x02" + b"\x00\x00\x00\x08" + (7).to_bytes(8, "big") + b"\x00\x00\x00\x01\x01"
    null = b"\x00\x02" + b"\x00\x00\x00\x08" + (7).to_bytes(8, "big") + b"\xff\xff\xff\xff"

    def parsed(rows: bytes) -> list[Any]:
        whole = head + rows + b"\xff\xff"
        chunks = [whole[i : i + size] for i in range(0, len(whole), size)]
        blocks = copied_columns(chunks, [20, 16], 40)
        return [
            pair for numbers, flags in blocks for pair in zip(as_list(numbers), as_list(flags), strict=True)
        ]

    assert parsed(row * 5) == [(7, True)] * 5
    assert parsed(row * 3 + null + row) == [(7, True)] * 3 + [(7, None), (7, True)]
    assert parsed(null * 19) == [(7, None)] * 19
    for torn in (head, head + row * 5, head + row * 5 + b"\xff", head[:-1] + b"\x01" + row + b"\xff\xff"):
        with pytest.raises(MalformedCopyError):
            list(copied_columns([torn], [20, 16], 1 << 20))


def test_values_are_picked_by_the_database_as_they_would_be_here(
    server: Server, connection: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    odd = [
        '[{"lat": 1, "lon": 2, "on": true, "snr": {"mean": 1e-7}}, {"on": false, "lat": null}]',
        '[{"lat": 123456789012345678901234567890, "lon": -0.0, "on": 1, "snr": {"mean": true}}]',
        '[{"lat": 1, "lon": 2, "on": true, "snr": 3}]',
        '[{"lat": 1, "lon": 2, "on": true, "snr": ["mean"]}]',
        '[{"lat": 1, "lon": 2, "on": true, "snr": {"mean": "1.5"}}]',
        '[{"lat": 1, "lon": 2, "on": true, "snr": {"mean": [1]}}]',
        '[{"lat": 1, "lon": 2, "on": null}]',
        '[{"lat": 1, "lon": 2, "on": 2}]',
        '[{"lon": 2, "on": true}]',
        '[{"lat": 1, "lon": 2, "on": true}, 7]',
        '[{"lat": 1, "lon": 2, "on": true}, null]',
        '[{"lat": 1e39, "lon": 2, "on": true}]',
        f'[{{"lat": {"[" * 1500}{"]" * 1500}, "lon": 2, "on": true}}]',
        f'[{{"lat": {"9" * 5000}, "lon": 2, "on": true}}]',
        "[" + ", ".join(['{"lat": 1, "lon": 2, "on": true}'] * 5) + "]",
        "[]",
        "[[1, 2, 3, 4]]",
        '{"lat": 1}',
        "null",
        "7",
    ]
    columns = {name: COLUMNS[name] for name in ("receivers", "center")}
    columns["receivers"] = {k: v for k, v in columns["receivers"].items() if k != "standardize"}
    connection.execute("DROP TABLE IF EXISTS nested")
    connection.execute("CREATE TABLE nested (id int, heard jsonb)")
    database = tmp_path / "nested.db"
    with closing(sqlite3.connect(database)) as lite, lite:
        lite.execute("CREATE TABLE nested (id INTEGER, heard TEXT)")
        lite.executemany("INSERT INTO nested VALUES (?, ?)", enumerate(odd))
        connection.cursor().executemany("INSERT INTO nested VALUES (%s, %s)", list(enumerate(odd)))

    def found_in(url: Any) -> list[Any]:
        picked = source(url, table="nested", columns=columns)
        whole = source(url, table="nested", columns=columns)
        whole._shared.request = replace(whole._shared.request, picks={})
        found = [outcome(picked, number) for number in range(len(odd))]
        assert found == [outcome(whole, number) for number in range(len(odd))]
        assert sum(isinstance(one, str) for one in found) == 16
        tags = [unpack_row(row)[1].tag for row in picked._shared.table.rows.some(np.arange(len(odd)))]
        assert sum(tag in (PICKED, NUMBERS) for tag in tags) >= 10
        return [sample for sample in found if not isinstance(sample, str)]

    here = found_in(database)
    assert found_in(server.url()) == here
    monkeypatch.setattr(databases, "list_reader", lambda _: None)  # without msgspec
    assert found_in(database) == here


@pytest.mark.parametrize(
    ("odd", "says"),
    [
        ("NULL", "column heard is NULL"),
        ("ARRAY[NULL]::jsonb[]", "column heard is not a JSON list of objects"),
        ("ARRAY['7']::jsonb[]", "column heard is not a JSON list of objects"),
        ("array_fill(heard[1], ARRAY[5])", "has 5 entries, expected 4 at most"),
        ("ARRAY[heard[1] - 'lat']", "has an entry without lon|has an entry without lat"),
        ('ARRAY[heard[1] || \'{"lat": "45"}\']', "has lat = '45', expected a number"),
        ("ARRAY[heard[1] || '{\"on\": 0.5}']", "has on = 0.5, expected true or false"),
        ("ARRAY[heard[1] || '{\"lat\": 1e400}']", "lat is too large for a float"),
        ("ARRAY[heard[1] || '{\"lat\": 1e39}']", "lat is 1e.39, expected a finite"),
        ('ARRAY[heard[1] || \'{"snr": {"mean": null}}\']', None),
        ("ARRAY[heard[1] || '{\"snr\": null}']", None),
        ("ARRAY[heard[1] || '{\"on\": 1}']", None),
    ],
)
def test_one_odd_list_in_a_table_leaves_the_other_rows_as_they_were(
    server: Server, connection: Any, odd: str, says: str | None
) -> None:
    """No entry is ever cut off. Where a list is not of numbers alone, all are asked for in another way."""
    columns = {name: COLUMNS[name] for name in ("receivers", "center")}
    columns["receivers"] = {k: v for k, v in columns["receivers"].items() if k != "standardize"}
    regular = source(server.url(), columns=columns)
    before = [outcome(regular, number) for number in range(40)]
    tags = {unpack_row(row)[1].tag for row in regular._shared.table.rows.some(np.arange(40))}
    assert tags == {NUMBERS}

    connection.execute(f"UPDATE samples SET heard = {odd} WHERE id = 110")
    picked = source(server.url(), columns=columns)
    after = [outcome(picked, number) for number in range(40)]

    assert after[:11] + after[12:] == before[:11] + before[12:]
    if says is None:
        assert isinstance(after[11], dict)
    else:
        with pytest.raises(SourceError, match=says) as raised:
            picked.read(11)
        assert "key 110, column heard" in str(raised.value)
    whole = source(server.url(), columns=columns)
    whole._shared.request = replace(whole._shared.request, picks={})
    assert after[11] == outcome(whole, 11)


@pytest.mark.parametrize(("kind", "empty"), [("jsonb", "'[]'::jsonb"), ("jsonb[]", "'{}'::jsonb[]")])
def test_a_table_with_empty_lists_is_read_once_and_as_sqlite_reads_it(
    server: Server, connection: Any, kind: str, empty: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = made()
    database = write_sqlite(tmp_path / "rows.db", [[*row[:9], row[9] if n % 5 else [], *row[10:]]
                                                   for n, row in enumerate(rows)])  # fmt: skip
    if kind == "jsonb":
        connection.execute("ALTER TABLE samples ALTER heard TYPE jsonb USING to_jsonb(heard)")
    connection.execute(f"UPDATE samples SET heard = {empty} WHERE id % 50 = 0")
    heard = {key: value for key, value in COLUMNS["receivers"].items() if key != "standardize"}
    columns = {"receivers": heard}
    reads: list[object] = []
    batches = databases.PostgresSession.batches
    monkeypatch.setattr(
        databases.PostgresSession, "batches", lambda self: reads.append(self) or batches(self)
    )

    found, here = source(server.url(), columns=columns), source(database, columns=columns)
    with pytest.raises(SourceError, match="key 50, column heard has 0 entries"):
        found.read(5)
    assert len(reads) == 1
    assert found._shared.table.digest == here._shared.table.digest
    monkeypatch.setattr(databases, "COPIED", frozenset())  # fetched, and picked as text
    assert source(server.url(), columns=columns)._shared.table.digest == found._shared.table.digest


@pytest.mark.parametrize(
    ("key", "index", "where"),
    [("id", "id", None), ("id", "id", "id BETWEEN 500 AND 900"), ("name", 'name COLLATE "C"', None)],
)
def test_a_large_table_with_an_index_on_the_key_is_not_sorted(
    server: Server, connection: Any, key: str, index: str, where: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection.execute("DROP TABLE IF EXISTS big")
    connection.execute(
        "CREATE TABLE big AS SELECT n AS id, 'n' || lpad(n::text, 9, '0') AS name, "
        "jsonb_build_array(jsonb_build_object('lat', n, 'note', repeat(md5(n::text), 5))) AS heard, "
        "ARRAY['{\"lat\": 2}'::jsonb] AS list FROM generate_series(1, 30000) AS n"
    )
    connection.execute(f"CREATE INDEX big_key ON big ({index})")
    connection.execute("VACUUM ANALYZE big")
    asked: list[str] = []
    copied = databases.PostgresSession._copied
    monkeypatch.setattr(
        databases.PostgresSession,
        "_copied",
        lambda self, sql, *rest: asked.append(sql) or copied(self, sql, *rest),
    )
    columns = {
        name: {"column": name, "list": 4, "features": ["lat"], "mask": f"no_{name}"}
        for name in ("heard", "list")
    }

    found = source(server.url(), table="big", key=key, columns=columns, where=where)
    assert len(found) == (401 if where else 30000)
    plan = [line for (line,) in connection.execute(f"EXPLAIN {asked[0]}")]
    assert any("Index Scan using big_key" in line for line in plan), plan
    assert not any("Sort" in line for line in plan), plan
    assert found.read(7)["heard"].tolist()[0] == [507 if where else 8]
    connection.execute("DROP TABLE big")


def test_rows_of_copy_are_the_same_one_by_one_and_by_layout(server: Server, connection: Any) -> None:
    """Pieces that are rows are read many at a time, others row by row."""
    types = [20, 25, 2950, 1184, 701, 3802]
    sql = (
        "SELECT n::bigint, repeat('x', n % 3), md5(n::text)::uuid, "
        "CASE WHEN n % 5 > 0 THEN to_timestamp(n) END, CASE WHEN n % 2 > 0 THEN n / 3.0::float8 END, "
        "CASE WHEN n % 7 > 0 THEN '[1]'::jsonb END FROM generate_series(1, 1000) AS n"
    )
    with connection.cursor().copy(f"COPY ({sql}) TO STDOUT (FORMAT BINARY)") as copy:
        pieces = [bytes(piece) for piece in copy]

    def rows(pieces: list[bytes], block_bytes: int) -> list[Any]:
        blocks = copied_columns(pieces, types, block_bytes)
        return [row for columns in blocks for row in zip(*map(as_list, columns), strict=True)]

    data = b"".join(pieces)
    cut = [data[at : at + 100] for at in range(0, len(data), 100)]
    found = rows(pieces, 1 << 20)
    assert len(found) == 1000
    assert found[10][:3] == (11, b"xx", b"6512bd43-d9ca-a6e0-2c99-0b0a82652dca")
    assert found == rows(pieces, 5000) == rows(cut, 1 << 20) == rows(cut, 5000)
    assert [*map(type, found[10])] == [*map(type, rows(cut, 5000)[10])]


def outcome(rows: SQLSource, number: int) -> Any:
    """Bytes of a sample, or why there is none."""
    try:
        return {name: array.tobytes() for name, array in rows.read(number).items()}
    except SourceError as error:
        return str(error)


def test_radio_rows_are_the_same_in_both(server: Server, tmp_path: Path) -> None:
    from stoker.extras.radio.demo import TABLE, RadioSpec, radio_columns, write_radio

    spec = RadioSpec(rows=200, seed=1)
    urls = (f"sqlite:///{tmp_path}/radio.db", server.url())
    assert [write_radio(url, spec) for url in urls] == [True, True]
    assert [write_radio(url, spec) for url in urls] == [False, False]
    here, there = (
        source(url, table=TABLE, key="recording_session_id", columns=radio_columns(), split="val",
               where=f"dataset_id = '{spec.dataset_id}'") for url in urls
    )  # fmt: skip

    assert here.keys() == there.keys()
    assert here.statistics == there.statistics
    assert all(same(here.read(n), there.read(n)) for n in range(len(here)))


def test_init_finds_table_key_and_numbers(server: Server, connection: Any) -> None:
    connection.execute("CREATE DATABASE looked_at")
    try:
        with server.connect("looked_at") as opened:
            write_postgres(opened, made())
        found = look(server.url("looked_at"))
    finally:
        connection.execute("DROP DATABASE looked_at WITH (FORCE)")

    assert found.settings["data.sql.key"] == "id"
    assert {"power", "count"} <= {*found.settings["data.sql.columns"]}
    assert found.samples > 0
    assert any("no primary key" in question for question in found.questions)
