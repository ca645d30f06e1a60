"""`data.kind: sql`: rows of a database from a settings file."""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from stoker.config import Config, load_config
from stoker.config.names import in_settings
from stoker.errors import ConfigError, ResourceError
from stoker.run.build import build_jobs
from stoker.run.context import Run
from stoker.run.loaders import joined, serve
from stoker.run.precompute import precompute_config
from stoker.run.train import prepare
from stoker.sources.sql import tables


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
    report = precompute_config(Run(load_config(settings)), splits=["train", "val"])

    assert [(one.name, len(one.cache)) for one in report.caches] == [("lab_train", 32), ("lab_val", 8)]
    again = precompute_config(Run(load_config(settings)), splits=["train", "val"])
    assert [one.encoded for one in again.caches] == [0, 0]


def test_the_splits_are_of_one_reading(settings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a row that is written between two readings could be in two splits."""
    read: list[object] = []
    whole = tables.read_table
    monkeypatch.setattr(
        "stoker.sources.sql.source.read_table", lambda request: read.append(1) or whole(request)
    )

    jobs = build_jobs(Run(load_config(settings)).for_task("lab"), ["train", "val"])

    assert [len(job.source) for job in jobs] == [32, 8]
    assert not {*jobs[0].source.keys()} & {*jobs[1].source.keys()}
    assert len(read) == 1


def test_a_folder_for_rows_without_room_is_replaced_by_what_the_hint_names(
    settings: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused() -> None:
        with pytest.raises(ResourceError) as raised:
            len(build_jobs(Run(load_config(settings)), ["train"])[0].source)
        assert "TMPDIR" in in_settings(raised.value)

    with monkeypatch.context() as patched:
        patched.setattr(tempfile, "tempdir", str(tmp_path / "none"))
        refused()
        patched.setattr(tempfile, "tempdir", None)
        for buffering in (0, 1 << 20):  # the first write finds the disk full, or the last
            full = partial(open, "/dev/full", "wb", buffering=buffering)
            patched.setattr(tempfile, "TemporaryFile", lambda full=full, **_: full())
            refused()

    (tmp_path / "roomy").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "roomy"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    assert len(build_jobs(Run(load_config(settings)), ["train"])[0].source) == 32


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("data.sql.url=postgresql://me:hush@host/db", "data.sql.url holds a password"),
        ("data.sql.key=null", r"data\.sql\.key"),
        ("data.sql.columns={power: flot32}", "Did you mean float32"),
        ("data.preset=well", "data.preset is given, but data.kind=sql"),
        ("data.sql.tabel=x", "data.sql.table"),
    ],
)
def test_what_makes_no_sense_is_refused(settings: Path, override: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as raised:
        build_jobs(Run(load_config(settings, [override])).for_task("lab"), ["train"])
    assert "hush" not in str(raised.value)


def test_columns_are_joined_to_both_caches_of_a_run(configure: Callable[..., Config], tmp_path: Path) -> None:
    """As a condition `(B, 1)` beside the others, on the training and on the validation cache."""
    (tmp_path / "rates.csv").write_text("n,rate\n" + "".join(f"{n},{n / 10}\n" for n in range(12)))
    config = configure(
        "data.task=burgers1d",
        "data.join.table=rates.csv",
        "data.join.key=n",
        "data.join.columns={rate: float32}",
    )
    served = serve(Run(config), [result.cache for result in prepare(Run(config)).caches])

    assert len(served.loaders) == 2
    for loader in served.loaders:
        batch = next(iter(loader))
        assert batch.cond["rate"].shape == (len(batch.index), 1)
        assert batch.cond["rate"][:, 0].tolist() == (batch.index[:, 0] / 10).tolist()
    with pytest.raises(ConfigError, match=r"data.join.columns names none"):
        joined(
            Run(configure("data.join.table=rates.csv")).for_task("burgers1d"),
            served.loaders[0].dataset,
            "train",
        )


def test_columns_are_joined_by_the_keys_of_the_source(settings: Path, tmp_path: Path) -> None:
    """Rows keep their keys whatever split they are in; numbers count within a split."""
    (tmp_path / "rates.csv").write_text("id,rate\n" + "".join(f"{n},{n}\n" for n in range(40)))
    join = f"  join: {{table: {tmp_path}/rates.csv, key: id, on: keys, columns: [rate]}}\n"
    settings.write_text(settings.read_text().replace("training:", f"{join}training:"))
    config = load_config(settings, ["data.sql.columns={power: float32}"])
    jobs = build_jobs(Run(config).for_task("lab"), ["train", "val"])
    caches = precompute_config(Run(config), splits=["train", "val"]).caches

    for job, one in zip(jobs, caches, strict=True):
        cache = joined(Run(config).for_task("lab"), one.cache, job.split)
        keys = [*map(float, job.source.keys())]
        assert [float(cache[n]["rate"]) for n in range(len(cache))] == keys
        assert [float(cache[n]["power"]) * 2 for n in range(len(cache))] == keys
