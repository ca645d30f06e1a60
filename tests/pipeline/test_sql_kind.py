"""`data.kind: sql`: rows of a database from a settings file."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from stoker.config import load_config
from stoker.errors import ConfigError
from stoker.pipeline.build import build_jobs
from stoker.pipeline.precompute import precompute_config
from stoker.sources.sql import table


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    with closing(sqlite3.connect(tmp_path / "rows.db")) as connection, connection:
        connection.execute("CREATE TABLE lab (id INTEGER PRIMARY KEY, power REAL)")
        connection.executemany("INSERT INTO lab VALUES (?, ?)", [(n, n / 2) for n in range(50)])
    path = tmp_path / "rows.yaml"
    path.write_text(
        f"""
data:
  kind: sql
  task: lab
  splits: {{train: 0.8, val: 0.2}}
  sql:
    url: sqlite:///{tmp_path}/rows.db
    table: lab
    key: id
    columns: {{power: {{dtype: float32, standardize: true}}}}
    where: id < 40
training:
  latent_cache_dir: {tmp_path}/cache
"""
    )
    return path


def test_a_table_becomes_caches_by_split(settings: Path) -> None:
    report = precompute_config(load_config(settings), splits=["train", "val"])

    assert [(one.name, len(one.cache)) for one in report.caches] == [("lab_train", 32), ("lab_val", 8)]
    again = precompute_config(load_config(settings), splits=["train", "val"])
    assert [one.encoded for one in again.caches] == [0, 0]


def test_the_splits_are_of_one_reading(settings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a row that is written between two readings could be in two splits."""
    read: list[object] = []
    whole = table.read_table
    monkeypatch.setattr(
        "stoker.sources.sql.bulk.read_table", lambda request: read.append(1) or whole(request)
    )

    jobs = build_jobs(load_config(settings), "lab", ["train", "val"])

    assert [len(job.source) for job in jobs] == [32, 8]
    assert not {*jobs[0].source.keys()} & {*jobs[1].source.keys()}
    assert len(read) == 1


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("data.sql.url=postgresql://me:hush@host/db", "data.sql.url holds a password"),
        ("data.sql.key=null", "needs data.sql.url"),
        ("data.sql.columns={power: flot32}", "did you mean float32"),
        ("data.preset=well", "data.preset is given, but data.kind=sql"),
        ("data.sql.tabel=x", "data.sql.table"),
    ],
)
def test_what_makes_no_sense_is_refused(settings: Path, override: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as raised:
        build_jobs(load_config(settings, [override]), "lab", ["train"])
    assert "hush" not in str(raised.value)
