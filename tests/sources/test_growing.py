"""Data that grows: no sample changes its split, and only new samples are encoded."""

from __future__ import annotations

import io
import sqlite3
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from PIL import Image

import stoker
from stoker.precompute import PrecomputeReport, PrecomputeSettings, run_precompute
from stoker.sources.arrays import ArraySource
from stoker.sources.splits import SplitOf
from stoker.sources.tables import ParquetSource
from stoker.sources.tar import TarSource

SPLITS = {"train": 0.6, "val": 0.4}
QUIET = PrecomputeSettings(workers=0, progress=None)
GROUP = 4


def values(rows: list[int]) -> np.ndarray:
    """A sample `(4,)` for each number, never the same twice."""
    return np.array([[r, r / 7, -r, 1] for r in rows], np.float32).reshape(-1, 4)


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __init__(self, rows: list[int]) -> None:
        self.data = torch.from_numpy(values(rows))

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"u": self.data[i]}


Files = Mapping[str, list[int]]
"""Sample numbers by the name of the file (folder, table) they are in."""


def hdf5(root: Path, files: Files) -> Any:
    for name, rows in files.items():
        (root / f"{name}.h5").unlink(missing_ok=True)  # a source may have it open
        with h5py.File(root / f"{name}.h5", "w") as file:
            file["u"] = values(rows)
    return lambda split: stoker.HDF5Source(root, fields={"u": "n c"}, split=split, splits=SPLITS)


def groups(root: Path, files: Files) -> Any:
    for name, rows in files.items():
        (root / f"{name}.h5").unlink(missing_ok=True)
        with h5py.File(root / f"{name}.h5", "w") as file:
            for row in rows:
                file[f"{row:04d}/data"] = np.full((3, 4, 4, 1), row, np.float32)
    fields = {"u": "data: t x y c"}
    return lambda split: stoker.HDF5Source(root, fields=fields, split=split, splits=SPLITS)


def arrays(root: Path, files: Files) -> Any:
    for name, rows in files.items():
        np.save(root / f"{name}.npy", values(rows))
    return lambda split: SplitOf(ArraySource(root, fields={"data": "n c"}), split, splits=SPLITS)


def images(root: Path, files: Files) -> Any:
    for name, rows in files.items():
        (root / name).mkdir(exist_ok=True)
        for row in rows:
            Image.new("RGB", (8, 8), (row % 256, row // 256, 7)).save(root / name / f"{row:04d}.png")
    return lambda split: stoker.ImageSource(root, size=(8, 8), split=split, splits=SPLITS)


def tar(root: Path, files: Files) -> Any:
    for name, rows in files.items():
        with tarfile.open(root / f"{name}.tar", "w") as archive:
            for row in rows:
                buffer = io.BytesIO()
                Image.new("RGB", (8, 8), (row % 256, row // 256, 7)).save(buffer, "PNG")
                info = tarfile.TarInfo(f"{row:04d}.png")
                info.size = buffer.tell()
                buffer.seek(0)
                archive.addfile(info, buffer)
    return lambda split: SplitOf(TarSource(root), split, splits=SPLITS)


def parquet(root: Path, files: Files) -> Any:
    for name, rows in files.items():
        table = pa.table({"u": pa.array(values(rows)[:, 1]), "v": pa.array(rows, pa.int64())})
        pq.write_table(table, root / f"{name}.parquet")
    return lambda split: SplitOf(ParquetSource(root), split, splits=SPLITS)


def sql(root: Path, files: Files) -> Any:
    with sqlite3.connect(root / "one.db") as db:
        db.execute("CREATE TABLE IF NOT EXISTS t (id INTEGER PRIMARY KEY, u REAL)")
        for rows in files.values():
            db.executemany("INSERT OR IGNORE INTO t VALUES (?, ?)", [(r, r / 8) for r in rows])
    return lambda split: stoker.SQLSource(
        f"sqlite:///{root / 'one.db'}", table="t", key="id", columns=["u"], split=split, splits=SPLITS
    )


def dataset(root: Path, files: Files) -> Any:
    rows = [row for own in files.values() for row in own]
    return lambda split: SplitOf(stoker.TorchSource(Rows(rows)), split, splits=SPLITS)


Write = Callable[[Path, Files], Any]
KINDS: dict[str, tuple[Write, str]] = {
    "hdf5": (hdf5, "u"),
    "groups": (groups, "u"),
    "npy": (arrays, "data"),
    "images": (images, "image"),
    "tar": (tar, "png"),
    "parquet": (parquet, "u"),
    "sql": (sql, "u"),
    "dataset": (dataset, "u"),
}
APPENDED = ("sql", "dataset")
"""One table or list: what comes later is behind what was there."""


def encode(source: Any, field: str, cache: Path, split: str) -> PrecomputeReport:
    def flat(x: torch.Tensor) -> torch.Tensor:
        return x.float().reshape(len(x), -1).sum(1, keepdim=True) * 2 + 1

    group = 1 if any(f.ragged for f in source.schema().values()) else GROUP
    encoder = stoker.ModuleEncoder(flat, field=field, output="latent", version="1", encode_batch=group)
    return run_precompute(source, encoder, cache, name=split, settings=QUIET)


def check(write: Write, field: str, tmp_path: Path, sequence: list[Files]) -> None:
    """Grow a set step by step; each step encodes what is new in it and moves nothing."""
    root = tmp_path / "data"
    root.mkdir()
    before: dict[str, str] = {}
    for files in sequence:
        make = write(root, files)
        now: dict[str, str] = {}
        for split in SPLITS:
            source = make(split)
            now |= dict.fromkeys(source.keys(), split)
            report = encode(source, field, tmp_path / "cache", split)
            old = sum(found == split for found in before.values())
            assert (report.encoded, report.records) == (len(source) - old, len(source))
            for number in range(0, len(source), 5):
                raw = torch.as_tensor(np.asarray(source.read(number)[field]))
                expected = raw.float().reshape(1, -1).sum(1) * 2 + 1
                assert torch.equal(report.cache[number]["latent"], expected)
        assert before.items() <= now.items()
        before = now


@pytest.mark.parametrize("kind", KINDS)
def test_only_what_was_added_is_encoded(tmp_path: Path, kind: str) -> None:
    one = [*range(1, 30)]
    steps: list[Files] = [
        {"m": one},
        {"m": [*one, *range(100, 106)]},  # inside a file
        {"m": [*one, *range(100, 106)], "z": [*range(200, 210)]},
    ]
    if kind not in APPENDED:
        steps.append({**steps[-1], "a": [*range(300, 309)]})  # before the others
    check(*KINDS[kind], tmp_path, steps)


@given(data=st.data())
@settings(
    max_examples=4,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_any_order_of_additions(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    kind = data.draw(st.sampled_from(sorted({*KINDS} - {"groups"})))
    files: dict[str, list[int]] = {"m": [*range(1, 25)]}
    sequence: list[Files] = [dict(files)]
    fresh = 100
    for _ in range(data.draw(st.integers(1, 2))):
        name = "m" if kind in APPENDED else data.draw(st.sampled_from("abmz"))
        count = data.draw(st.integers(1, 7))
        files[name] = [*files.get(name, []), *range(fresh, fresh + count)]
        fresh += count
        sequence.append({name: [*rows] for name, rows in files.items()})
    check(*KINDS[kind], tmp_path_factory.mktemp("grow"), sequence)


def test_a_file_that_is_replaced_removed_or_renamed(tmp_path: Path) -> None:
    root, cache = tmp_path / "data", tmp_path / "cache"
    root.mkdir()

    def fill(files: Files) -> PrecomputeReport:
        for path in root.glob("*.h5"):
            path.unlink()
        hdf5(root, files)
        return encode(stoker.HDF5Source(root, fields={"u": "n c"}), "u", cache, "all")

    first = fill({"a": [*range(10)], "b": [*range(10, 20)]})
    replaced = fill({"a": [*range(30, 40)], "b": [*range(10, 20)]})
    removed = fill({"b": [*range(10, 20)]})
    renamed = fill({"c": [*range(10, 20)]})
    back = fill({"a": [*range(10)], "b": [*range(10, 20)]})

    counts = [(r.encoded, r.adopted, r.reused) for r in (first, replaced, removed, renamed, back)]
    assert counts == [(20, 0, 0), (10, 10, 0), (0, 10, 0), (0, 10, 0), (0, 0, 20)]


def test_a_record_that_is_damaged_is_encoded_and_not_taken_over(tmp_path: Path) -> None:
    hdf5(tmp_path, {"a": [*range(1, 20)]})
    path = tmp_path / "cache"
    first = encode(stoker.HDF5Source(tmp_path, fields={"u": "n c"}), "u", path, "all").cache
    shard = first.path / first.index.shards[0].file
    column = first.shard(0).columns["latent"]
    data = bytearray(shard.read_bytes())
    data[column.offset + 5 * column.row_bytes] ^= 1
    shard.write_bytes(data)

    hdf5(tmp_path, {"a": [*range(1, 25)]})
    report = encode(stoker.HDF5Source(tmp_path, fields={"u": "n c"}), "u", path, "all")

    assert (report.encoded, report.adopted) == (6, 18)
    assert report.cache.verify().bad == []


def test_another_place_in_the_group_is_marked(tmp_path: Path) -> None:
    rows = [*range(1, 20)]
    hdf5(tmp_path, {"a": rows})
    encode(stoker.HDF5Source(tmp_path, fields={"u": "n c"}), "u", tmp_path / "cache", "all")
    hdf5(tmp_path, {"a": [90, *rows]})
    cache = encode(stoker.HDF5Source(tmp_path, fields={"u": "n c"}), "u", tmp_path / "cache", "all").cache

    marked = [n for i in range(len(cache.index.shards)) for n in cache.shard(i).marked.tolist()]
    assert sorted(marked) == [*range(1, 20)]


def test_a_file_of_another_folder_moves_no_sample(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        hdf5(tmp_path / name, {name: [*range(30)]})
    first, second = tmp_path / "one/one.h5", tmp_path / "two/two.h5"

    def assigned(path: list[Path]) -> dict[str, str]:
        sources = {s: stoker.HDF5Source(path, fields={"u": "n c"}, split=s, splits=SPLITS) for s in SPLITS}
        return {key: split for split, source in sources.items() for key in source.keys()}  # noqa: SIM118 - a source is no mapping

    assert assigned([first]).items() <= assigned([first, second]).items()
