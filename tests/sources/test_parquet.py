from pathlib import Path

import numpy as np
import pytest

from stoker import cached, precompute
from stoker.errors import ConfigError, SourceError
from stoker.schema import Field
from stoker.sources.splits import SplitOf
from stoker.sources.tables import DatasetsSource, ParquetSource
from stoker.testing import check_source

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

ROWS = 10


def table(**more: object) -> object:
    rng = np.random.default_rng(0)
    columns = {
        "x": pa.array(rng.standard_normal(ROWS)),
        "flag": pa.array([n % 2 == 0 for n in range(ROWS)]),
        "pos": pa.array([[float(n), 1.0, 2.0] for n in range(ROWS)], pa.list_(pa.float32(), 3)),
        "path": pa.array([[*range(n)] for n in range(ROWS)], pa.list_(pa.int32())),
        "image": pa.array([{"bytes": bytes([n] * (n + 1)), "path": None} for n in range(ROWS)]),
        "edges": pa.array([[[n, 1]] * n for n in range(ROWS)], pa.list_(pa.list_(pa.int64(), 2))),
        "own": pa.array([{"a": n, "b": float(n)} for n in range(ROWS)]),
    }
    return pa.table({**columns, **more})


def check_rows(source) -> None:
    assert source.schema() == {
        "x": Field(shape=(), dtype="float64"),
        "flag": Field(shape=(), dtype="bool"),
        "pos": Field(shape=(3,), dtype="float32"),
        "path": Field(shape=(-1,), dtype="int32", ragged=True),
        "image": Field(shape=(-1,), dtype="uint8", ragged=True),
        "edges": Field(shape=(-1, 2), dtype="int64", ragged=True),
        "own.a": Field(shape=(), dtype="int64"),
        "own.b": Field(shape=(), dtype="float64"),
    }
    for n in (7, 0, 3, 9):
        found = source.read(n)
        assert (bool(found["flag"]), int(found["own.a"]), float(found["pos"][0])) == (n % 2 == 0, n, n)
        assert found["path"].tolist() == [*range(n)]
        assert found["image"].tobytes() == bytes([n] * (n + 1))
        assert found["edges"].tolist() == [[n, 1]] * n
    check_source(source)


def test_columns_are_fields(tmp_path: Path) -> None:
    pq.write_table(table(), tmp_path / "a.parquet", row_group_size=4)
    source = ParquetSource(tmp_path)
    check_rows(source)
    assert [*source.runs()] == [range(4), range(4, 8), range(8, 10)]


def test_numbers_keep_every_digit_and_lists_of_float64_are_narrowed_with_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    times = [1_763_884_800.25 + n for n in range(ROWS)]  # one value, as float32
    wide = pa.array([[0.1, 0.2]] * ROWS, pa.list_(pa.float64(), 2))
    pq.write_table(table(at=pa.array(times), wide=wide), tmp_path / "a.parquet")
    source = ParquetSource(tmp_path)

    assert [float(source.read(n)["at"]) for n in range(ROWS)] == times
    assert [record.message.rpartition(": ")[2] for record in caplog.records] == ["wide"]


def test_splits_go_by_the_key_column_whatever_the_order_of_rows(tmp_path: Path) -> None:
    key = pa.array([f"k{n}" for n in range(ROWS)])
    pq.write_table(table(key=key), tmp_path / "a.parquet")
    pq.write_table(table(key=key).take(list(reversed(range(ROWS)))), tmp_path / "b.parquet")
    both = [
        SplitOf(
            ParquetSource(tmp_path / f, columns=["own"], key="key"), "val", splits={"train": 0.5, "val": 0.5}
        )
        for f in ("a.parquet", "b.parquet")
    ]
    own = [{val.read(n)["own.a"].item() for n in range(len(val))} for val in both]
    assert own[0] == own[1]


def test_what_is_no_number_is_said_with_the_columns_that_are(tmp_path: Path) -> None:
    pq.write_table(table(name=pa.array(["a"] * ROWS)), tmp_path / "a.parquet")
    with pytest.raises(SourceError, match=r"name is string.*columns=\['x', 'flag'"):
        len(ParquetSource(tmp_path))
    assert len(ParquetSource(tmp_path, columns=["x"])) == ROWS
    with pytest.raises(SourceError, match="has no column y"):
        len(ParquetSource(tmp_path, columns=["y"]))
    pq.write_table(pa.table({"name": ["a"]}), tmp_path / "a.parquet")
    with pytest.raises(SourceError, match=r"name is string, .*Convert them when it is written"):
        len(ParquetSource(tmp_path))


def test_columns_are_a_list_of_names_and_no_field_hides_another(tmp_path: Path) -> None:
    twice = {"a": pa.array([{"b": 1}]), "a.b": pa.array([2])}
    pq.write_table(pa.table(twice), tmp_path / "a.parquet")
    with pytest.raises(SourceError, match=r"a\.b occurs twice"):
        len(ParquetSource(tmp_path))
    assert ParquetSource(tmp_path, columns=["a.b"]).read(0)["a.b"] == 2
    members = pa.StructArray.from_arrays([pa.array([1]), pa.array([2])], names=["b", "b"])
    pq.write_table(pa.table({"a": members}), tmp_path / "a.parquet")
    with pytest.raises(SourceError, match=r"a\.b occurs twice"):
        len(ParquetSource(tmp_path))
    columns = pa.table([pa.array([1]), pa.array([2]), pa.array([3])], names=["a", "a", "b"])
    pq.write_table(columns, tmp_path / "a.parquet")
    with pytest.raises(SourceError, match="has several columns named a"):
        len(ParquetSource(tmp_path))
    assert ParquetSource(tmp_path, columns=["b"]).read(0)["b"] == 3
    for wrong in ("a", [], 3, [3]):
        with pytest.raises(ConfigError, match="Expected a list of names"):
            ParquetSource(tmp_path, columns=wrong)


def test_a_null_is_an_error_of_its_row(tmp_path: Path) -> None:
    values = pa.array([None if n == 4 else float(n) for n in range(ROWS)])
    inner = pa.array([[1.0, None] if n == 6 else [1.0] for n in range(ROWS)])
    pq.write_table(pa.table({"x": values, "y": inner}), tmp_path / "a.parquet")
    cache = precompute(
        ParquetSource(tmp_path), None, tmp_path / "c", name="a", workers=0, max_quarantined=0.5
    )
    assert sorted(cache.quarantined) == [4, 6]
    assert "row 4, column 'x' is null" in cache.quarantined[4].error
    assert "row 6, column 'y' holds a null" in cache.quarantined[6].error


def test_damaged_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(table(), path, row_group_size=5)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(SourceError, match=r"a\.parquet is not a readable Parquet file"):
        len(ParquetSource(path))
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    path.write_bytes(data[:footer] + b"\xff" * 40 + data[footer + 40 :])
    with pytest.raises(SourceError, match=r"a\.parquet is not a readable Parquet file"):
        len(ParquetSource(path))
    path.write_bytes(data[:4] + b"\xff" * 60 + data[64:])
    source = ParquetSource(path)
    with pytest.raises(SourceError, match=r"row 2, in row group 0, cannot be read"):
        source.read(2)
    assert source.read(7)["own.a"] == 7


def test_a_hugging_face_dataset_by_its_fingerprint(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    made = datasets.Dataset(table())
    check_rows(DatasetsSource(made))
    again, other = datasets.Dataset(table()), made.select(range(5))

    assert DatasetsSource(made).identity() == DatasetsSource(again).identity()
    assert DatasetsSource(other).identity() != DatasetsSource(made).identity()
    assert DatasetsSource(other.shuffle(seed=1)).read(0)["own.a"] in range(5)
    loader = cached(DatasetsSource(made), cache_dir=tmp_path, batch_size=5, device="cpu", shuffle=True)
    assert sum(len(batch["index"]) for batch in loader) == ROWS
    with pytest.raises(ConfigError, match="Name a split"):
        DatasetsSource(datasets.DatasetDict({"train": made}))
