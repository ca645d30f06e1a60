import os
import re
import shutil
import threading
import time
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from stoker import HDF5Source, Loader, Windows, index_in_place, open_cache, precompute
from stoker.errors import ConfigError, CorruptError, ReadOnlyError, SourceError, StalledError
from stoker.runtime.locks import lock_folder
from stoker.sources.arrays import ArraySource
from stoker.sources.splits import SplitOf
from stoker.store import in_place
from stoker.store.storage import open_storage

TIERS = ["disk", "host"]
COUNT, STEPS, POINTS = 30, 7, 16


def values(seed: int = 0, dtype: str = "f4") -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((COUNT, STEPS, POINTS)).astype(dtype)


def write(path: Path, array: np.ndarray, **options: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        file["t-coordinate"], file["x-coordinate"] = np.arange(STEPS + 1.0), np.arange(float(POINTS))
        file.create_dataset("tensor", data=array, **options)
    return path


def disk_bytes(folder: Path) -> int:
    return sum(file.stat().st_blocks * 512 for file in folder.rglob("*") if file.is_file())


def test_files_are_served_from_where_they_lie_as_the_source_reads_them(tmp_path: Path) -> None:
    write(tmp_path / "a_Nu0.1.hdf5", values())
    write(tmp_path / "a_Nu0.2.hdf5", values(1))
    source = HDF5Source(tmp_path)
    cache = index_in_place(source, tmp_path / "c", name="a")
    plain = precompute(source, None, tmp_path / "p", name="a", workers=0)

    assert len(cache) == 2 * COUNT
    assert cache.complete
    assert cache.verify().ok
    for tier in TIERS:
        for settings in ({}, {"windows": Windows(stride=2, horizon=2)}):
            pairs = zip(
                Loader(cache, 7, tier=tier, seed=1, **{"shuffle": True, **settings}),
                Loader(plain, 7, tier="host", seed=1, **{"shuffle": True, **settings}),
                strict=True,
            )
            for one, other in pairs:
                if settings:
                    assert torch.equal(one.z0, other.z0)
                    assert torch.equal(one.future, other.future)
                    assert torch.equal(one.cond["Nu"], other.cond["Nu"])
                else:
                    assert all(torch.equal(one[name], other[name]) for name in other)


def test_nothing_is_copied_and_a_second_run_reads_nothing(tmp_path: Path) -> None:
    big = np.random.default_rng(0).standard_normal((COUNT, STEPS, 4096)).astype("f4")
    np.save(tmp_path / "u.npy", big)
    cache = index_in_place(ArraySource(tmp_path / "u.npy"), tmp_path / "c", name="u")
    before = {file: file.stat().st_mtime_ns for file in cache.path.iterdir()}

    assert disk_bytes(cache.path) < big.nbytes / 20
    again = index_in_place(ArraySource(tmp_path / "u.npy"), tmp_path / "c", name="u")
    shards = [file for file in before if file.name.startswith(("shard-", "places-"))]
    assert again.path == cache.path
    assert all(file.stat().st_mtime_ns == before[file] for file in shards)


def test_float64_keeps_its_bits_and_is_served_as_float32_when_asked(tmp_path: Path) -> None:
    cache = index_in_place(HDF5Source(write(tmp_path / "a.h5", values(dtype="f8"))), tmp_path / "c", name="a")
    batch = next(iter(Loader(cache, 4, shuffle=False)))
    narrow = next(iter(Loader(cache, 4, shuffle=False, dtype="float32")))

    np.testing.assert_array_equal(batch["data"][:, :, 0, :, 0].numpy(), values(dtype="f8")[:4])
    assert narrow["data"].dtype == torch.float32


@pytest.mark.parametrize("tier", TIERS)
def test_trajectories_of_varying_length_in_both_layouts(tmp_path: Path, tier: str) -> None:
    lengths = [4, 1, 6, 3]
    many = [np.full((n, 3), n, "f4") + np.arange(n, dtype="f4")[:, None] for n in lengths]
    with h5py.File(tmp_path / "groups.h5", "w") as file:
        for i, one in enumerate(many):
            file[f"t{i}/u"] = one
    with h5py.File(tmp_path / "flat.h5", "w") as file:
        file["u"], file["offsets"] = np.concatenate(many), np.cumsum([0, *lengths])
    for name in ("groups", "flat"):
        source = ArraySource(tmp_path / f"{name}.h5")
        cache = index_in_place(source, tmp_path / "c", name=name)
        batch = next(iter(Loader(cache, 4, shuffle=False, tier=tier)))
        assert all(np.array_equal(got, wanted) for got, wanted in zip(batch["u"], many, strict=True))


def test_a_split_serves_its_rows_alone(tmp_path: Path) -> None:
    for part in range(2):
        np.save(tmp_path / f"u_{part}.npy", values(part)[: COUNT // 2])
    source = SplitOf(ArraySource(tmp_path), "val", splits={"train": 0.5, "val": 0.5})
    cache = index_in_place(source, tmp_path / "c", name="u")

    assert len(cache) == len(source) < COUNT
    for number in range(len(source)):
        np.testing.assert_array_equal(cache[number]["data"].numpy(), source.read(number)["data"])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"chunks": (1, STEPS, POINTS)}, r"stored in chunks of \(1, 7, 16\).*stoker\.precompute"),
        ({"compression": "gzip"}, "compressed with gzip"),
    ],
)
def test_chunked_and_compressed_data_is_refused_with_the_cure(tmp_path: Path, options, said: str) -> None:
    source = HDF5Source(write(tmp_path / "a.h5", values(), **options))
    with pytest.raises(SourceError, match=said):
        index_in_place(source, tmp_path / "c", name="a")


def test_other_orders_and_byte_orders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="which has to be converted"):
        index_in_place(HDF5Source(write(tmp_path / "a.h5", values(dtype=">f4"))), tmp_path / "c", name="a")
    with h5py.File(tmp_path / "b.h5", "w") as file:
        file["u"] = values()
    with pytest.raises(SourceError, match="has axes x t, served are t x"):
        index_in_place(HDF5Source(tmp_path / "b.h5", fields={"u": "n x t"}), tmp_path / "c", name="b")
    with pytest.raises(ConfigError, match="does not say where its samples lie"):
        index_in_place(object(), tmp_path / "c", name="o")  # type: ignore[arg-type]


def test_a_changed_file_is_noticed_by_name(tmp_path: Path) -> None:
    path = write(tmp_path / "d" / "a.h5", values())
    cache = index_in_place(HDF5Source(path), tmp_path / "c", name="a")
    status = path.stat()
    with h5py.File(path, "a") as file:
        file["tensor"][11, 3, 5] += 1
    with pytest.raises(CorruptError, match=r"a\.h5.*was changed since it was indexed"):
        list(Loader(open_cache(cache.path), 5, shuffle=True))
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    for tier in TIERS:
        with pytest.raises(CorruptError, match=r"sample 11|damaged samples: 11"):
            list(Loader(open_cache(cache.path), 5, tier=tier, shuffle=True))
    other = index_in_place(HDF5Source(path), tmp_path / "c", name="a")
    assert other.fingerprint != cache.fingerprint
    assert other.verify().ok


def test_files_that_were_moved_or_touched_are_found_again(tmp_path: Path) -> None:
    path = write(tmp_path / "d" / "a.h5", values())
    cache = index_in_place(HDF5Source(path), tmp_path / "c", name="a")
    shutil.move(tmp_path / "d", tmp_path / "e")
    with pytest.raises(CorruptError, match="is not there any more"):
        list(Loader(open_cache(cache.path), 5, shuffle=True))
    (tmp_path / "e" / "a.h5").touch()
    again = index_in_place(HDF5Source(tmp_path / "e" / "a.h5"), tmp_path / "c", name="a")

    assert again.fingerprint == cache.fingerprint
    assert [one.file for one in again.index.shards] == [one.file for one in cache.index.shards]
    assert len(list(Loader(again, 5, shuffle=True))) == 6


def test_an_index_that_was_cut_short_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.save(tmp_path / "u.npy", values())
    monkeypatch.setattr("stoker.store.format.SHARD_BYTES", 8 * STEPS * POINTS * 4)
    source = ArraySource(tmp_path / "u.npy")
    cache = index_in_place(source, tmp_path / "c", name="u")
    assert len(cache.index.shards) > 3
    gone = cache.index.shards[1].file
    for file in (gone, "index.json"):
        (cache.path / file).unlink()
    again = index_in_place(source, tmp_path / "c", name="u")

    assert again.complete
    assert again.verify().ok
    assert gone not in [shard.file for shard in again.index.shards]


def test_damaged_places_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "u.npy", values())
    cache = index_in_place(ArraySource(tmp_path / "u.npy"), tmp_path / "c", name="u")
    name = next(name for name in open_storage(cache.path).list() if name.startswith("places-"))
    data = (cache.path / name).read_bytes()
    (cache.path / name).write_bytes(data.replace(b"u.npy", b"v.npy"))
    with pytest.raises(CorruptError, match=r"places-.*does not match its digest"):
        list(Loader(open_cache(cache.path), 5, shuffle=True))


def test_files_of_equal_names_keep_their_places_when_indexed_again(tmp_path: Path) -> None:
    files = []
    for n in range(2):
        (tmp_path / f"run_{n}").mkdir()
        files.append(tmp_path / f"run_{n}" / "x.npy")
        np.save(files[-1], np.full((4, 3), n, dtype="f4"))
    for _ in range(2):
        cache = index_in_place(ArraySource(files), tmp_path / "c", name="x")

        assert [float(next(iter(cache[n].values()))[0]) for n in range(8)] == [0.0] * 4 + [1.0] * 4
        assert cache.verify().ok


def test_files_of_equal_names_are_found_where_they_were_moved_to(tmp_path: Path) -> None:
    for n in range(2):
        (tmp_path / "old" / f"run_{n}").mkdir(parents=True)
        np.save(tmp_path / "old" / f"run_{n}" / "x.npy", np.full((4, 3), n, dtype="f4"))
    index_in_place(ArraySource(sorted((tmp_path / "old").rglob("x.npy"))), tmp_path / "c", name="x")
    (tmp_path / "old").rename(tmp_path / "new")

    files = sorted((tmp_path / "new").rglob("x.npy"))
    cache = index_in_place(ArraySource(files), tmp_path / "c", name="x")

    assert [float(next(iter(cache[n].values()))[0]) for n in range(8)] == [0.0] * 4 + [1.0] * 4


def test_a_process_waits_for_one_that_indexes_the_same_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = HDF5Source(write(tmp_path / "d" / "a.h5", values()))
    folder = index_in_place(source, tmp_path / "c", name="a").path
    for shard in folder.glob("shard-*"):
        shard.unlink()
    monkeypatch.setattr(in_place, "READ_DEADLINE_S", 0.5)
    found: list[int] = []
    waiting = threading.Thread(
        target=lambda: found.append(len(index_in_place(source, tmp_path / "c", name="a")))
    )
    with lock_folder(folder, "encode") as got:
        assert got
        with pytest.raises(StalledError, match=re.escape(str(folder))):
            index_in_place(source, tmp_path / "c", name="a")

        waiting.start()
        for _ in range(20):  # four times as long as a holder may be idle
            os.utime(folder)
            time.sleep(0.1)
        assert waiting.is_alive()
    waiting.join(60)
    assert found == [COUNT]


def test_those_who_wait_are_told_of_each_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_place, "BATCH_BYTES", 1)
    touched: list[Path] = []
    monkeypatch.setattr(os, "utime", touched.append)
    source = HDF5Source(write(tmp_path / "d" / "a.h5", values()))

    folder = index_in_place(source, tmp_path / "c", name="a").path

    assert touched.count(folder) == COUNT


def test_a_complete_index_is_used_where_nothing_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = HDF5Source(write(tmp_path / "d" / "a.h5", values()))
    index_in_place(source, tmp_path / "c", name="a")

    def refuse(folder: Path, *_: object, **__: object) -> None:
        raise ReadOnlyError(f"{folder} cannot be written")

    monkeypatch.setattr(in_place, "lock_folder", refuse)

    assert len(index_in_place(source, tmp_path / "c", name="a")) == COUNT
    with pytest.raises(ReadOnlyError):
        index_in_place(source, tmp_path / "c", name="b")
