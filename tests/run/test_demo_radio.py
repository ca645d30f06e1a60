"""The radio rows: made, read once, cached, trained on."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stoker.errors import ConfigError, SourceError
from stoker.extras.radio.demo import (
    FEATURES,
    RECEIVERS,
    TABLE,
    RadioResult,
    RadioSpec,
    radio_columns,
    radio_rows,
    run_radio,
    write_radio,
)
from stoker.sources.sql.source import SQLSource

SMALL = RadioSpec(rows=300, seed=3)


def source(url: str, spec: RadioSpec = SMALL, **settings: Any) -> SQLSource:
    settings = {"split": "train", "splits": {"train": 0.8, "val": 0.2}} | settings
    where = f"dataset_id = '{spec.dataset_id}'"
    return SQLSource(
        url, table=TABLE, key="recording_session_id", columns=radio_columns(), where=where, **settings
    )


def run(folder: Path, spec: RadioSpec, epochs: int) -> RadioResult:
    settings = {
        "training.epochs": epochs,
        "training.batch_size": 64,
        "training.latent_cache_dir": folder / "cache",
        "training.run_dir": folder / "run",
        "precompute.workers": 1,
    }
    overrides = [f"{name}={value}" for name, value in settings.items()]
    return run_radio(overrides, database=f"sqlite:///{folder}/radio.db", spec=spec)


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> RadioResult:
    return run(tmp_path_factory.mktemp("radio"), RadioSpec(rows=700), epochs=24)


@pytest.mark.slow
def test_there_are_4030_rows_and_their_size_is_said_truly(tmp_path: Path) -> None:
    result = run(tmp_path, RadioSpec(), epochs=1)

    assert (result.rows, result.made) == (4030, True)
    assert [(one.name, len(one.cache)) for one in result.caches] == [
        ("radio_train", 3227),
        ("radio_val", 803),
    ]
    check_size(result)


def test_the_size_is_said_truly(result: RadioResult) -> None:
    assert [len(one.cache) for one in result.caches] == [558, 142]
    check_size(result)


def check_size(result: RadioResult) -> None:
    assert result.record_bytes == 7 * 6 * 4 + 7 + 8 + 8 + 4 + 8
    shards = sum(path.stat().st_size for one in result.caches for path in one.cache.path.glob("shard-*"))
    assert sum(one.bytes for one in result.caches) == shards
    own = result.rows * result.record_bytes
    assert own < shards < own + 72 * result.rows + 40_000 * len(result.caches), "numbers, sums, page borders"


def test_it_finds_transmitters_better_than_before_it_was_trained(result: RadioResult) -> None:
    assert result.tier in ("host", "device")
    assert result.untrained.mean_m > 40_000
    assert result.trained.mean_m < 0.8 * result.untrained.mean_m


def test_the_database_and_the_cache_give_the_same_loss(result: RadioResult) -> None:
    cached, read = result.losses

    assert cached == read


def test_the_statistics_lie_beside_the_weights(result: RadioResult) -> None:
    from safetensors import safe_open

    with safe_open(Path(result.run_dir) / "regressor.safetensors", "pt") as file:
        statistics = json.loads(file.metadata()["statistics"])
    assert statistics["target"]["deviation"][0] > 10_000


def test_json_has_what_scripts_want(result: RadioResult) -> None:
    found = json.loads(json.dumps(result.to_json()))

    assert found["position_error_m"] < found["untrained_position_error_m"]
    assert [cache["records"] for cache in found["caches"]] == [558, 142]


def test_equal_settings_give_equal_rows(tmp_path: Path) -> None:
    one, two = list(radio_rows(SMALL)), list(radio_rows(SMALL))

    assert one == two
    assert len(one) == 300
    assert one[0] != next(radio_rows(RadioSpec(rows=300, seed=4)))
    assert one[:100] != list(radio_rows(RadioSpec(rows=100, seed=3))), (
        "another size is another set, by its id"
    )


def test_rows_are_plausible() -> None:
    rows = list(radio_rows(SMALL))

    for row in rows:
        heard = [entry for entry in row["receiver_features"] if entry["signal_present"]]
        assert len(heard) == row["num_receivers_detected"] >= 3
        assert 4 <= len(row["receiver_features"]) == row["num_receivers_in_sample"] <= len(RECEIVERS)
        assert row["gdop"] <= 150
        assert row["mean_snr_db"] >= 5
        assert {*FEATURES} < {*row["receiver_features"][0]}
        assert 43.8 < row["tx_latitude"] < 46.1
    assert len({row["recording_session_id"] for row in rows}) == 300
    assert len({row["timestamp"] for row in rows}) < 10, "ties, as one transaction makes them"


def test_a_set_is_made_once_and_others_are_left_alone(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/lab.db"
    assert write_radio(url, SMALL)
    assert not write_radio(url, SMALL)
    assert write_radio(url, RadioSpec(rows=20))

    assert len(source(url, split=None, splits=None)) == 300
    with closing(sqlite3.connect(tmp_path / "lab.db")) as connection, connection:
        connection.execute(f"DELETE FROM {TABLE} WHERE rowid < 10")
    with pytest.raises(ConfigError, match="has 291 rows of data set"):
        write_radio(url, SMALL)
    (tmp_path / "text.db").write_text("nothing" * 400)
    with pytest.raises(SourceError, match="not a database"):
        write_radio(str(tmp_path / "text.db"), SMALL)


def test_permuted_rows_give_the_same_split_and_samples(tmp_path: Path) -> None:
    one, two = tmp_path / "one.db", tmp_path / "two.db"
    write_radio(str(one), SMALL)
    write_radio(str(two), SMALL)
    with closing(sqlite3.connect(two)) as connection, connection:
        connection.execute(f"CREATE TABLE other AS SELECT * FROM {TABLE} ORDER BY gdop")
        connection.execute(f"DELETE FROM {TABLE}")
        connection.execute(f"INSERT INTO {TABLE} SELECT * FROM other")

    for split in ("train", "val"):
        here, there = source(str(one), split=split), source(str(two), split=split)
        assert here.keys() == there.keys()
        assert here.identity() == there.identity()
        assert np.array_equal(here.read(5)["receivers"], there.read(5)["receivers"])
