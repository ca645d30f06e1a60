"""Columns of a table beside the records: labels that are corrected without encoding anything."""

from __future__ import annotations

import logging
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import stoker
from stoker.errors import ConfigError, SourceError
from stoker.store import Cache
from stoker.store.join import join_table

COLUMNS: dict[str, Any] = {"label": {"text": ["cat", "dog"]}, "weight": "float32"}


class Items:
    """Twelve samples with an id of their own."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": np.full(3, index, np.float32), "id": 100 + index}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    source = stoker.TorchSource(Items(), identity="items")
    return stoker.precompute(source, None, tmp_path_factory.mktemp("joined"), name="items", readers=0)


def table(path: Path, rows: list[tuple[Any, ...]]) -> Path:
    path.write_text("id,label,weight\n" + "".join(f"{','.join(map(str, row))}\n" for row in rows))
    return path


ROWS = [(100 + n, ("cat", "dog")[n % 2], n / 4) for n in range(12)]


def test_batches_carry_the_columns_of_their_records(cache: Cache, tmp_path: Path) -> None:
    joined = join_table(cache, table(tmp_path / "labels.csv", ROWS[::-1]), key="id", columns=COLUMNS, on="id")

    for tier in ("host", "disk"):
        for batch in stoker.Loader(joined, 5, tier=tier, seed=1):
            assert batch["label"].dtype == torch.int64
            assert batch["label"].tolist() == [int(n) % 2 for n in batch["index"]]
            assert batch["weight"].tolist() == [int(n) / 4 for n in batch["index"]]
            assert torch.equal(batch["x"][:, 0], batch["index"].float())
    assert joined[7]["weight"] == 7 / 4
    assert "label" not in cache[7]
    assert "label" not in next(iter(stoker.Loader(cache, 5)))


def test_a_corrected_table_encodes_nothing(cache: Cache, tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in cache.path.iterdir() if path.suffix == ".safetensors"}
    wrong = table(tmp_path / "labels.csv", ROWS)
    first = join_table(cache, wrong, key="id", columns=COLUMNS, on="id")
    right = table(tmp_path / "labels.csv", [(100, "dog", 9.0), *ROWS[1:]])
    second = join_table(stoker.open_cache(cache.path), right, key="id", columns=COLUMNS, on="id")

    assert first.fingerprint == second.fingerprint == cache.fingerprint
    assert (first[0]["label"], second[0]["label"]) == (0, 1)
    assert {p: p.stat().st_mtime_ns for p in before} == before


def test_transforms_see_the_columns_and_a_run_goes_on_where_it_was(cache: Cache, tmp_path: Path) -> None:
    joined = join_table(cache, table(tmp_path / "labels.csv", ROWS), key="id", columns=COLUMNS, on="id")

    def double(batch: dict[str, Tensor], keys: Tensor) -> dict[str, Tensor]:
        return {**batch, "twice": batch["weight"] * 2}

    def made() -> stoker.Loader:
        return stoker.Loader(joined, 4, transforms=[double], seed=3)

    loader = made()
    batches = iter(loader)
    first = next(batches)
    state, rest = loader.state_dict(), [batch["twice"] for batch in batches]
    again = made()
    again.load_state_dict(state)
    assert torch.equal(first["twice"], first["index"] / 2)
    assert [b["twice"].tolist() for b in again] == [b.tolist() for b in rest]


def test_records_without_a_row_are_refused_masked_or_left_out(
    cache: Cache, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    labels = table(tmp_path / "labels.csv", [*ROWS[:9], (7777, "cat", 1.0)])
    rules: dict[str, Any] = {"key": "id", "columns": COLUMNS, "on": "id"}

    with pytest.raises(SourceError, match=r"3 of 12 records have no row by id: 109, 110, 111\."):
        join_table(cache, labels, **rules)
    with caplog.at_level(logging.INFO, "stoker"):
        masked = join_table(cache, labels, missing="mask", **rules)
    assert "9 of 12 records have a row, 3 missing, 1 unused" in caplog.text
    (batch,) = stoker.Loader(masked, 12, order="sequential")
    assert batch["label_known"].tolist() == batch["weight_known"].tolist() == [True] * 9 + [False] * 3
    assert batch["weight"][9:].tolist() == [0, 0, 0]
    dropped = join_table(cache, labels, missing="drop", **rules)
    assert sorted(int(n) for b in stoker.Loader(dropped, 4) for n in b["index"]) == list(range(9))
    (some,) = stoker.Loader(dropped, 12, indices=[11, 3], order="sequential")
    assert some["index"].tolist() == [3]


def test_keys_with_several_rows_are_refused_or_treated_as_missing(cache: Cache, tmp_path: Path) -> None:
    labels = table(tmp_path / "labels.csv", [*ROWS, (104, "dog", 1.0)])
    rules: dict[str, Any] = {"key": "id", "columns": COLUMNS, "on": "id"}

    with pytest.raises(SourceError, match="1 of 12 records have several rows by id: 104"):
        join_table(cache, labels, **rules)
    masked = join_table(cache, labels, repeated="mask", **rules)
    assert masked.joined is not None
    assert masked.joined.report.repeated == 1
    assert not masked[4]["label_known"]


def test_a_malformed_row_is_named(cache: Cache, tmp_path: Path) -> None:
    labels = table(tmp_path / "labels.csv", [(100, "cow", 0.0), *ROWS[1:]])

    with pytest.raises(SourceError, match=r"malformed row by id: 100 \(column label is 'cow'"):
        join_table(cache, labels, key="id", columns=COLUMNS, on="id")
    assert join_table(cache, labels, key="id", columns={"weight": "float32"}, on="id")[0]["weight"] == 0


def test_the_key_may_be_the_sample_number_or_the_sources_key(cache: Cache, tmp_path: Path) -> None:
    by_number = table(tmp_path / "numbers.csv", [(n, "cat", n) for n in range(12)])
    assert join_table(cache, by_number, key="id", columns=["weight"])[5]["weight"] == 5
    by_key = table(tmp_path / "keys.csv", [(f"item-{n}", "cat", n) for n in range(12)])
    names = [f"item-{n}" for n in range(12)]
    assert join_table(cache, by_key, key="id", columns=["weight"], on=names)[5]["weight"] == 5


def test_tables_of_a_database_and_of_parquet_give_the_same(cache: Cache, tmp_path: Path) -> None:
    database = tmp_path / "labels.db"
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("CREATE TABLE labels (id INTEGER, label TEXT, weight REAL)")
        connection.executemany("INSERT INTO labels VALUES (?, ?, ?)", ROWS)
    rules: dict[str, Any] = {"key": "id", "columns": COLUMNS, "on": "id"}
    wanted = join_table(cache, table(tmp_path / "labels.csv", ROWS), **rules)
    found = [join_table(cache, database, name="labels", **rules)]
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        with pytest.raises(ConfigError, match="pip install"):
            join_table(cache, tmp_path / "labels.parquet", **rules)
    else:
        columns = dict(zip(("id", "label", "weight"), zip(*ROWS, strict=True), strict=True))
        pq.write_table(pa.table({k: list(v) for k, v in columns.items()}), tmp_path / "labels.parquet")
        found.append(join_table(cache, tmp_path / "labels.parquet", **rules))
    for other in found:
        assert all(torch.equal(other[n]["label"], wanted[n]["label"]) for n in range(12))
        assert all(torch.equal(other[n]["weight"], wanted[n]["weight"]) for n in range(12))


@pytest.mark.parametrize(
    ("rules", "error", "says"),
    [
        (
            {"columns": {"x": {"column": "weight", "dtype": "float32"}}},
            ConfigError,
            "has a field 'x' already",
        ),
        ({"on": "x"}, ConfigError, r"on='x' is no field.*Expected number, id"),
        ({"on": ["a"]}, ConfigError, "on has 1 keys for 12 samples"),
        ({"missing": "ignore"}, ConfigError, "missing is 'ignore'. Expected refuse, mask, drop"),
        ({"columns": ["label"]}, SourceError, "column label holds no numbers alone"),
        ({"key": "name"}, SourceError, "has no column name. It has id, label, weight"),
        ({"colums": 1}, ConfigError, r"got key, columns, on, colums\. It needs"),
        ({"on": "number"}, SourceError, "12 of 12 records have no row"),
    ],
)
def test_what_does_not_fit_is_refused(
    cache: Cache, tmp_path: Path, rules: dict[str, Any], error: type[Exception], says: str
) -> None:
    labels = table(tmp_path / "labels.csv", ROWS)
    given: dict[str, Any] = {"key": "id", "columns": COLUMNS, "on": "id"} | rules

    with pytest.raises(error, match=says):
        join_table(cache, labels, **given)


def test_mixtures_and_fixed_addresses_do_not_take_them(cache: Cache, tmp_path: Path) -> None:
    joined = join_table(cache, table(tmp_path / "labels.csv", ROWS), key="id", columns=COLUMNS, on="id")

    with pytest.raises(ConfigError, match="static=True serves what is stored alone"):
        stoker.Loader(joined, 4, tier="device", static=True)
    with pytest.raises(ConfigError, match="does not take joined columns"):
        stoker.Mixture([stoker.Loader(joined, 4), stoker.Loader(cache, 4)])
