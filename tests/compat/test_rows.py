"""Rows of measurements under their earlier name: one ordered read, splits by key, filters that are heard."""

from __future__ import annotations

import sqlite3
import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stoker.errors import ConfigError, SourceError
from stoker.extras.compat.rows import GPUCachedRows

ONE, OTHER = (str(uuid.UUID(int=number)) for number in (1, 2))


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Fifty rows of one data set, and ten of another."""
    path = tmp_path / "rows.db"
    with sqlite3.connect(path) as made:
        made.execute(
            "create table measurement_features (recording_session_id text primary key, dataset_id text, "
            "mean_snr_db real, gdop real, tx_latitude real)"
        )
        rows = [(f"{i:03d}", OTHER if i >= 50 else ONE, i / 2, i % 10, 45 + i / 100) for i in range(60)]
        made.executemany("insert into measurement_features values (?, ?, ?, ?, ?)", rows)
    made.close()
    return path


def rows(table: Path, split: str = "train", ids: Any = (ONE,), session: Any = None, **more: Any) -> Any:
    columns = {"latitude": {"column": "tx_latitude", "dtype": "float32"}, "gdop": "float32"}
    settings: dict[str, Any] = {
        "device": "cpu", "columns": columns, "cache_path": table.parent / "cache",
        "precompute": {"workers": 0}, **more,
    }  # fmt: skip
    return GPUCachedRows(ids, split, session or f"sqlite:///{table}", **settings)


def test_four_fifths_train_and_the_rest_validates(table: Path) -> None:
    train, val = rows(table), rows(table, "val")

    assert (len(train), len(val)) == (45, 5)
    seen = [
        round(float(dataset[i]["latitude"]) * 100) for dataset in (train, val) for i in range(len(dataset))
    ]
    assert sorted(seen) == [4500 + i for i in range(50)]
    batches = list(train.loader(16))
    assert [len(batch["gdop"]) for batch in batches] == [16, 16, 13]
    assert batches[0]["latitude"].dtype == torch.float32
    assert len(rows(table, ids=[ONE, OTHER], splits={"train": 1.0})) == 60
    assert rows(table, preload_to_gpu=False).loader(4).plan.tier == "host"
    with pytest.raises(IndexError):
        train[45]


def test_filters_are_asked_for_and_none_left_is_an_error(table: Path) -> None:
    whole = {"splits": {"train": 1.0}}

    assert len(rows(table, min_snr_db=10, **whole)) == 30
    assert len(rows(table, max_gdop=4, **whole)) == 25
    with pytest.raises(SourceError):
        rows(table, min_snr_db=1000, **whole)


def test_the_address_is_taken_from_a_session(table: Path) -> None:
    url = SimpleNamespace(render_as_string=lambda hide_password: f"sqlite+pysqlite:///{table}")
    session = SimpleNamespace(get_bind=lambda: SimpleNamespace(url=url))

    assert len(rows(table, session=session)) == 45
    with pytest.raises(ConfigError, match="db_session is a list without an address"):
        rows(table, session=[1])


@pytest.mark.parametrize("ids", [["1; drop table x"], [], ONE])
def test_what_are_no_ids_is_refused(table: Path, ids: Any) -> None:
    with pytest.raises(ConfigError, match=r"dataset_ids .*Expected"):
        rows(table, ids=ids)


def test_without_columns_rows_are_those_of_the_demo(table: Path) -> None:
    pytest.importorskip("stoker.extras.radio.demo", reason="the rules of the demo are not there")

    with pytest.raises(SourceError, match="receiver_features"):
        rows(table, columns=None)
