"""Columns of a table beside the records: labels that are corrected without encoding anything."""

from __future__ import annotations

import logging
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from torch import Tensor

import stoker
from stoker.encoders.wrappers import keep_fields
from stoker.errors import ConfigError, SourceError, StaleStateError
from stoker.store import Cache
from stoker.store.joins import join_table
from tests.kit.orders import in_order
from tests.loader.caches import trajectories, write_cache
from tests.loader.test_filling import Steps

COLUMNS: dict[str, Any] = {"label": {"text": ["cat", "dog"]}, "weight": "float32"}


class Items:
    """Twelve samples with an id of their own."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": np.full(3, index, np.float32), "id": 100 + index}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    source = stoker.TorchSource(Items(), version="items")
    return stoker.precompute(source, None, tmp_path_factory.mktemp("joined"), name="items", workers=0)


def table(path: Path, rows: list[tuple[Any, ...]]) -> Path:
    path.write_text("id,label,weight\n" + "".join(f"{','.join(map(str, row))}\n" for row in rows))
    return path


ROWS = [(100 + n, ("cat", "dog")[n % 2], n / 4) for n in range(12)]


def test_batches_carry_the_columns_of_their_records(cache: Cache, tmp_path: Path) -> None:
    joined = join_table(cache, table(tmp_path / "labels.csv", ROWS[::-1]), key="id", columns=COLUMNS, on="id")

    for tier in ("host", "disk"):
        for batch in stoker.Loader(joined, 5, tier=tier, seed=1, shuffle=True):
            assert batch["label"].dtype == torch.int64
            assert batch["label"].tolist() == [int(n) % 2 for n in batch["index"]]
            assert batch["weight"].tolist() == [int(n) / 4 for n in batch["index"]]
            assert torch.equal(batch["x"][:, 0], batch["index"].float())
    assert joined[7]["weight"] == 7 / 4
    assert "label" not in cache[7]
    assert "label" not in next(iter(stoker.Loader(cache, 5, shuffle=True)))


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
        return stoker.Loader(joined, 4, transforms=[double], seed=3, shuffle=True)

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
    (batch,) = stoker.Loader(masked, 12, shuffle=False)
    assert batch["label_known"].tolist() == batch["weight_known"].tolist() == [True] * 9 + [False] * 3
    assert batch["weight"][9:].tolist() == [0, 0, 0]
    dropped = join_table(cache, labels, missing="drop", **rules)
    assert sorted(int(n) for b in stoker.Loader(dropped, 4, shuffle=True) for n in b["index"]) == list(
        range(9)
    )
    (some,) = stoker.Loader(dropped, 12, indices=[11, 3], shuffle=False)
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


def test_a_cache_that_lacks_records_is_not_joined(tmp_path: Path) -> None:
    """Those that come later would have zeros, in silence."""
    steps = Steps(tmp_path, trajectories(12))
    steps.fill(range(6), 0)

    with pytest.raises(ConfigError, match=r"holds 6 of 12 records.*to its end first, without wait=False"):
        join_table(steps.cache(), table(tmp_path / "labels.csv", ROWS), key="id", columns=COLUMNS)


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


def test_the_keys_that_the_hint_names_join_a_cache_that_has_no_source(tmp_path: Path) -> None:
    (tmp_path / "f").mkdir()
    for number in range(3):
        np.save(tmp_path / f"f/{'abc'[number]}.npy", np.full(4, number + 1, np.float32))
    cache = stoker.adopt(tmp_path / "f", tmp_path / "c", name="x", workers=0, progress=False)
    rows = table(tmp_path / "labels.csv", [("c", "cat", 3), ("a", "dog", 1), ("b", "cat", 2)])

    with pytest.raises(ConfigError) as error:
        join_table(cache, rows, key="id", columns=["weight"], on="file")
    keys = eval(error.value.hint.rpartition("on=")[2], {"cache": cache})
    joined = join_table(cache, rows, key="id", columns=["weight"], on=keys)

    assert [joined[number]["weight"].item() for number in range(3)] == [1, 2, 3]


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
        ({"on": "x"}, ConfigError, r"on='x' is not a field.*Expected index, id"),
        ({"on": ["a"]}, ConfigError, "on has 1 keys for 12 samples"),
        ({"missing": "ignore"}, ConfigError, "missing is 'ignore'. Expected refuse, mask, drop"),
        ({"columns": ["label"]}, SourceError, "column label holds no numbers alone"),
        ({"key": "name"}, SourceError, "has no column name. It has id, label, weight"),
        ({"colums": 1}, ConfigError, r"got key, columns, on, colums\. It needs"),
        ({"on": "index"}, SourceError, "12 of 12 records have no row"),
    ],
)
def test_what_does_not_fit_is_refused(
    cache: Cache, tmp_path: Path, rules: dict[str, Any], error: type[Exception], says: str
) -> None:
    labels = table(tmp_path / "labels.csv", ROWS)
    given: dict[str, Any] = {"key": "id", "columns": COLUMNS, "on": "id"} | rules

    with pytest.raises(error, match=says):
        join_table(cache, labels, **given)


def test_batches_at_fixed_addresses_carry_the_columns_there(cache: Cache, tmp_path: Path) -> None:
    joined = join_table(cache, table(tmp_path / "labels.csv", ROWS), key="id", columns=COLUMNS, on="id")
    loader = stoker.Loader(joined, 4, tier="device", static=True, seed=2, shuffle=True)
    addresses, seen = set(), []

    for _ in range(2):
        for batch in loader:
            addresses.add((batch["label"].data_ptr(), batch["weight"].data_ptr()))
            seen += batch["index"].tolist()
            assert batch["weight"].tolist() == (batch["index"] / 4).tolist()
            assert batch["label"].tolist() == (batch["index"] % 2).tolist()

    assert len(addresses) == 1
    assert len(seen) == 24


@pytest.mark.parametrize("order", ["static", "block", "sequential"])
def test_every_order_carries_the_columns_over_ranks(cache: Cache, tmp_path: Path, order: str) -> None:
    joined = join_table(cache, table(tmp_path / "labels.csv", ROWS), key="id", columns=COLUMNS, on="id")
    seen = []

    for rank in range(2):
        for batch in stoker.Loader(joined, 3, **in_order(order), rank=rank, world_size=2):
            assert batch["weight"].tolist() == (batch["index"] / 4).tolist()
            seen += batch["index"].tolist()

    assert sorted(seen) == list(range(12))


class Others(Items):
    """Five more of the same kind."""

    def __len__(self) -> int:
        return 5


@pytest.fixture(scope="module")
def five(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    source = stoker.TorchSource(Others(), version="five")
    return stoker.precompute(source, None, tmp_path_factory.mktemp("joined"), name="five", workers=0)


@pytest.mark.parametrize("mix", ["example", "batch"])
def test_a_mixture_carries_the_columns_of_each_cache(
    cache: Cache, five: Cache, tmp_path: Path, mix: Any
) -> None:
    """Each by its own table, and without the records that have no row in it."""
    ours = table(tmp_path / "ours.csv", ROWS[2:])
    theirs = table(tmp_path / "theirs.csv", [(100 + n, "dog", 50 + n) for n in range(5)])
    rules: dict[str, Any] = {"key": "id", "columns": COLUMNS, "on": "id", "missing": "drop"}
    members = [join_table(cache, ours, **rules), join_table(five, theirs, **rules)]
    mixture = stoker.Mixture(members, 4, mix=mix, seed=1)
    seen = []

    for batch in mixture:
        for task, number, weight, label in zip(
            batch["tasks"], batch["index"], batch["weight"], batch["label"], strict=True
        ):
            seen.append((int(task), int(number)))
            assert weight == (50 + number if task else number / 4)
            assert label == (1 if task else number % 2)
        assert batch["mask"]["weight"].all()

    assert sorted(seen) == [(0, n) for n in range(2, 12)] + [(1, n) for n in range(5)]


def test_a_column_of_one_cache_alone_is_masked_in_the_others(
    cache: Cache, five: Cache, tmp_path: Path
) -> None:
    joined = join_table(cache, table(tmp_path / "labels.csv", ROWS), key="id", columns=COLUMNS, on="id")
    mixture = stoker.Mixture([joined, five], 4)

    for batch in mixture:
        ours = batch["task"] == "items"
        assert batch["mask"]["label"].tolist() == [ours] * len(batch["index"])
        numbers = batch["index"].tolist()
        assert batch["weight"].tolist() == [n / 4 if ours else 0 for n in numbers]
    with pytest.raises(
        ConfigError, match=r"'label': \(\(\), 'int64'\).*One batch can hold records of both only"
    ):
        stoker.Mixture([joined, five], 4, mix="example")


def test_windows_of_a_mixture_carry_the_columns_as_conditions(tmp_path: Path) -> None:
    caches = [
        write_cache(tmp_path / name, trajectories(count, 5), timed=("latent", "time"), name=name)
        for name, count in (("a", 4), ("b", 3))
    ]
    for name, count in (("a", 4), ("b", 3)):
        (tmp_path / f"{name}.csv").write_text(
            "n,rate\n" + "".join(f"{n},{n + ord(name)}\n" for n in range(count))
        )
    joined = [
        join_table(one, tmp_path / f"{one.name}.csv", key="n", columns={"rate": "float32"}) for one in caches
    ]
    whole = stoker.Mixture(joined, 3, windows=stoker.Windows(field="latent"))
    state, batches = None, []

    for place, batch in enumerate(whole):
        batches.append(batch)
        state = whole.state_dict() if place == 1 else state
        assert batch.cond["rate"].shape == (len(batch.index), 1)
        numbers = batch.index[:, 0].tolist()
        named = [ord("ab"[task]) + n for task, n in zip(batch.tasks.tolist(), numbers, strict=True)]
        assert batch.cond["rate"][:, 0].tolist() == named
        assert batch.mask["rate"].all()
    assert state is not None
    whole.load_state_dict(state)
    again = [batch.cond["rate"].tolist() for batch in whole]
    assert again == [batch.cond["rate"].tolist() for batch in batches[2:]]


def test_several_columns_may_name_a_record_together(cache: Cache, tmp_path: Path) -> None:
    rows = [(f"site{n // 6}", n % 6, n / 4) for n in range(12)]
    (tmp_path / "labels.csv").write_text("site,n,weight\n" + "".join(f"{a},{b},{c}\n" for a, b, c in rows))
    with closing(sqlite3.connect(tmp_path / "labels.db")) as connection, connection:
        connection.execute("CREATE TABLE labels (site TEXT, n INTEGER, weight REAL)")
        connection.executemany("INSERT INTO labels VALUES (?, ?, ?)", rows)
    keys = stoker.SQLSource(
        str(tmp_path / "labels.db"), table="labels", key=["site", "n"], columns=["weight"]
    ).keys()

    for place, name in ((tmp_path / "labels.csv", None), (tmp_path / "labels.db", "labels")):
        joined = join_table(cache, place, name=name, key=["site", "n"], columns=["weight"], on=keys)
        assert [float(joined[n]["weight"]) for n in range(12)] == [n / 4 for n in range(12)]
    with pytest.raises(SourceError, match=r"12 of 12 records have no row by n, site"):
        join_table(cache, tmp_path / "labels.csv", key=["n", "site"], columns=["weight"], on=keys)


def test_a_column_never_replaces_a_tensor_of_the_batch(tmp_path: Path) -> None:
    rows = table(tmp_path / "labels.csv", [(n, "cat", n / 4) for n in range(12)])
    lengths = {"u": [torch.arange(n + 1.0) for n in range(12)]}
    ragged = write_cache(tmp_path / "ragged", lengths)
    for name in ("u.mask", "u.lengths", "u.offsets"):
        columns = {name: {"column": "weight", "dtype": "float32"}}
        with pytest.raises(ConfigError, match=repr(name)):
            stoker.Loader(join_table(ragged, rows, key="id", columns=columns), 4, ragged="pad", shuffle=True)
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file["data"] = np.zeros((12, 4, 3), np.float32)
    source = stoker.HDF5Source(tmp_path / "data.h5", fields={"data": "n t c"})
    encoder = keep_fields(stoker.ModuleEncoder(torch.nn.Linear(3, 2), time="steps"), "data")
    cache = stoker.precompute(source, encoder, tmp_path / "kept", name="kept", workers=0)
    columns = {"data0": {"column": "weight", "dtype": "float32"}}
    with pytest.raises(ConfigError, match="'data0'"):
        stoker.Loader(
            join_table(cache, rows, key="id", columns=columns), 4, windows=stoker.Windows(), shuffle=True
        )


def test_a_column_called_known_has_a_mask_like_any_other(cache: Cache, tmp_path: Path) -> None:
    rows = table(tmp_path / "labels.csv", [(100 + n, "cat", n / 4) for n in range(1, 12)])
    columns = {"well_known": {"column": "weight", "dtype": "float32"}}

    joined = join_table(cache, rows, key="id", columns=columns, on="id", missing="mask")

    assert [bool(joined[n]["well_known_known"]) for n in range(12)] == [False] + [True] * 11
    both = {**columns, "well": {"column": "weight", "dtype": "float32"}}
    with pytest.raises(ConfigError, match="'well_known'"):
        join_table(cache, rows, key="id", columns=both, on="id", missing="mask")
    assert join_table(cache, rows, key="id", columns={"well": both["well"]}, on="id", missing="mask").joined


def test_batches_may_go_by_a_joined_column_and_unknown_is_not_class_zero(tmp_path: Path) -> None:
    made = write_cache(tmp_path, {"x": [torch.ones(1 + n % 4) * n for n in range(12)]})
    rows = "".join(f"{n},{n % 2}\n" for n in range(9))
    (tmp_path / "labels.csv").write_text(f"n,kind\n{rows}")
    joined = join_table(made, tmp_path / "labels.csv", key="n", columns={"kind": "int64"}, missing="mask")

    loader = stoker.Loader(joined, 3, batch_by="kind", shuffle=True)
    batches = list(loader)

    assert sorted(n for batch in batches for n in batch["index"].tolist()) == [*range(12)]
    assert all(isinstance(batch["x"], list) for batch in batches)
    for batch in batches:
        assert len({(n % 2 if n < 9 else None) for n in batch["index"].tolist()}) == 1
    again = stoker.Loader(joined, 3, batch_by="kind", shuffle=True)
    again.load_state_dict(loader.state_dict(batches[0].position))
    assert [b["index"].tolist() for b in again] == [b["index"].tolist() for b in batches[1:]]

    (tmp_path / "labels.csv").write_text(f"n,kind\n{rows.replace('4,0', '4,1')}")
    other = join_table(made, tmp_path / "labels.csv", key="n", columns={"kind": "int64"}, missing="mask")
    with pytest.raises(StaleStateError, match="by kind"):
        stoker.Loader(other, 3, batch_by="kind", shuffle=True).load_state_dict(
            loader.state_dict(batches[0].position)
        )


def test_batches_do_not_go_by_a_joined_column_of_fractions(cache: Cache, tmp_path: Path) -> None:
    joined = join_table(cache, table(tmp_path / "labels.csv", ROWS), key="id", columns=COLUMNS, on="id")
    assert len(list(stoker.Loader(joined, 4, batch_by="label"))) == 4
    with pytest.raises(ConfigError, match="weight"):
        stoker.Loader(joined, 4, batch_by="weight")
