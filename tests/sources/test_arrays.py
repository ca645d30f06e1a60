import random
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import h5py
import numpy as np
import pytest
import torch

from stoker import Loader, Windows, precompute
from stoker.errors import ConfigError, SourceError, SplitError, StokerError
from stoker.schema import Field
from stoker.sources.arrays import ArraySource
from stoker.sources.splits import SplitOf
from stoker.testing import check_source

LENGTHS = [5, 3, 9, 4, 7, 1]


def trajectories() -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [
        {
            "u": rng.standard_normal((n, 4)).astype("f4"),
            "v": rng.standard_normal((n, 2)),
            "mesh": np.arange(6).reshape(3, 2),
        }
        for n in LENGTHS
    ]


def write_hdf5(path: Path, arrays: dict[str, np.ndarray], attributes: dict[str, dict[str, float]]) -> Path:
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            chunks = (min(2, len(array)), *array.shape[1:]) if array.ndim > 1 else None
            file.create_dataset(name, data=array, chunks=chunks)
        for group, values in attributes.items():
            file[group].attrs.update(values)
    return path


def write_zarr(version: int) -> Callable[..., Path]:
    def write(path: Path, arrays: dict[str, np.ndarray], attributes: dict[str, dict[str, float]]) -> Path:
        zarr = pytest.importorskip("zarr")
        path = path.with_suffix(".zarr")
        root = zarr.open_group(str(path), mode="w", zarr_format=version)
        for name, array in arrays.items():
            chunks = (2, *array.shape[1:]) if array.ndim > 1 else array.shape
            made = root.create_array(name, shape=array.shape, chunks=chunks, dtype=array.dtype)
            made[...] = array
        for group, values in attributes.items():
            root[group].attrs.update(values)
        return path

    return write


@pytest.fixture(params=["hdf5", "zarr2", "zarr3"])
def write(request: pytest.FixtureRequest) -> Callable[..., Path]:
    return write_hdf5 if request.param == "hdf5" else write_zarr(int(request.param[-1]))


def grouped(write: Callable[..., Path], folder: Path, name: str = "a.h5") -> Path:
    arrays = {f"t{i}/{key}": value for i, one in enumerate(trajectories()) for key, value in one.items()}
    return write(folder / name, arrays, {f"t{i}": {"nu": i / 4} for i in range(len(LENGTHS))})


def flat(write: Callable[..., Path], folder: Path) -> Path:
    many = trajectories()
    arrays = {key: np.concatenate([one[key] for one in many]) for key in ("u", "v")}
    arrays["offsets"] = np.cumsum([0, *LENGTHS])
    arrays["nu"] = np.arange(len(LENGTHS), dtype="f4")
    return write(folder / "flat.h5", arrays, {})


def test_a_group_for_each_trajectory(write, tmp_path: Path) -> None:
    source = ArraySource(grouped(write, tmp_path), attributes=["nu"])

    assert source.schema() == {
        "mesh": Field(shape=(3, 2), dtype="int64"),
        "u": Field(shape=(-1, 4), dtype="float32", time=True, ragged=True),
        "v": Field(shape=(-1, 2), dtype="float32", time=True, ragged=True),
        "nu": Field(shape=(), dtype="float32"),
    }
    for number, wanted in enumerate(trajectories()):
        found = source.read(number)
        assert found["nu"] == number / 4
        for name, array in wanted.items():
            np.testing.assert_array_equal(found[name], array.astype(found[name].dtype))
    check_source(source)


def test_flat_arrays_and_offsets(write, tmp_path: Path) -> None:
    source = ArraySource(flat(write, tmp_path))

    assert source.schema()["u"] == Field(shape=(-1, 4), dtype="float32", time=True, ragged=True)
    for number, wanted in enumerate(trajectories()):
        found = source.read(number)
        np.testing.assert_array_equal(found["u"], wanted["u"])
        assert found["nu"] == number
    check_source(source)


def test_both_layouts_give_the_same_samples_and_loaders(tmp_path: Path) -> None:
    a = ArraySource(grouped(write_hdf5, tmp_path), fields={"u": "u"})
    b = ArraySource(flat(write_hdf5, tmp_path), fields={"u": "u"})
    caches = [precompute(s, None, tmp_path / n, name="u", workers=0) for n, s in (("a", a), ("b", b))]
    pairs = zip(
        *(Loader(c, 4, windows=Windows(horizon=2), seed=3, shuffle=True) for c in caches), strict=True
    )

    assert a.schema() == b.schema()
    assert all(torch.equal(one.z0, two.z0) and torch.equal(one.index, two.index) for one, two in pairs)
    padded = next(iter(Loader(caches[0], 6, shuffle=False, ragged="pad")))
    assert padded["u.lengths"].tolist() == LENGTHS


@pytest.mark.parametrize("version", [2, 3])
def test_zarr_grids_come_as_hdf5_grids_do(tmp_path: Path, version: int) -> None:
    grid = np.random.default_rng(0).standard_normal((6, 5, 8, 4)).astype("f4")  # n t x c
    path = write_zarr(version)(tmp_path / "grid", {"u": grid, "nu": np.arange(6.0)}, {})
    source = ArraySource(path, fields={"data": "u: n t x c", "nu": "nu"})

    assert source.schema()["data"] == Field(shape=(5, 1, 8, 4), dtype="float32", time=True)
    np.testing.assert_array_equal(source.read(4)["data"], grid[4][:, None])
    np.testing.assert_array_equal(source.read(4, 1, 3)["data"], grid[4][1:3, None])
    check_source(source)


def test_npy_files_are_rows(tmp_path: Path) -> None:
    np.save(tmp_path / "x_0.npy", np.arange(12.0).reshape(2, 6))
    np.save(tmp_path / "x_1.npy", np.arange(12.0, 24.0).reshape(2, 6))
    source = ArraySource(tmp_path, fields={"x": "data: n t"})
    assert source.schema() == {"x": Field(shape=(6,), dtype="float32", time=True)}
    np.testing.assert_array_equal(source.read(2)["x"], np.arange(12.0, 18.0))
    check_source(source)


def test_several_containers_are_numbered_in_order_and_split_by_name(tmp_path: Path) -> None:
    for split in ("train", "test"):
        grouped(write_hdf5, tmp_path, f"flow_{split}.h5")
    source = ArraySource(tmp_path, fields={"u": "u"})
    test = SplitOf(source, "test")

    assert len(source) == 12
    assert [key.split(":")[0] for key in test.keys()] == ["flow_test.h5"] * 6  # noqa: SIM118
    with pytest.raises(SplitError, match="Splits found: test"):
        len(SplitOf(ArraySource(tmp_path / "flow_test.h5"), "train"))
    check_source(test)


def test_fractions_cut_a_source_the_same_whatever_lies_beside_a_sample(tmp_path: Path) -> None:
    source = ArraySource(grouped(write_hdf5, tmp_path), fields={"u": "u"})
    parts = {name: SplitOf(source, name, splits={"train": 0.5, "val": 0.5}) for name in ("train", "val")}
    keys = [key for part in parts.values() for key in part.keys()]  # noqa: SIM118

    assert sorted(keys) == sorted(source.keys())
    assert parts["train"].identity() != parts["val"].identity()
    np.testing.assert_array_equal(
        parts["val"].read(0)["u"], source.read(list(source.keys()).index(parts["val"].keys()[0]))["u"]
    )
    check_source(parts["train"])


def test_a_missing_zarr_chunk_is_named_and_not_read_as_zeros(tmp_path: Path) -> None:
    path = grouped(write_zarr(3), tmp_path)
    (path / "t2" / "u" / "c" / "1" / "0").unlink()
    source = ArraySource(path, fields={"u": "u"})

    with pytest.raises(SourceError, match=r"group 't2': .*chunk t2/u/c/1/0 is not there.*fill_missing"):
        source.read(2)
    assert source.read(1)["u"].shape == (3, 4)
    assert not ArraySource(path, fields={"u": "u"}, fill_missing=True).read(2)["u"][2:4].any()
    cache = precompute(source, None, tmp_path / "c", name="u", workers=0, max_quarantined=0.5)
    assert list(cache.quarantined) == [2]
    assert "chunk t2/u/c/1/0" in cache.quarantined[2].error


def zipped(folder: Path, **how: Any) -> Path:
    """A Zarr folder as one file."""
    path = folder.with_name(f"{folder.name}.zip")
    with zipfile.ZipFile(path, "w", **how) as archive:
        for one in sorted(folder.rglob("*")):
            if one.is_file():
                archive.write(one, one.relative_to(folder))
    return path


@pytest.mark.parametrize("version", [2, 3])
def test_a_zipped_zarr_folder_is_what_the_folder_is(tmp_path: Path, version: int) -> None:
    folder = grouped(write_zarr(version), tmp_path)
    plain = ArraySource(folder, attributes=["nu"])
    source = ArraySource(zipped(folder), attributes=["nu"])

    assert source.schema() == plain.schema()
    for number in range(len(LENGTHS)):
        found, wanted = source.read(number), plain.read(number)
        assert all(np.array_equal(found[name], wanted[name]) for name in wanted)
    assert [file.name for part in source.identity().parts for file in part.files] == ["a.zarr.zip"]
    copy = cloudpickle.loads(cloudpickle.dumps(source))
    assert np.array_equal(copy.read(5)["u"], trajectories()[5]["u"])


def test_what_is_wrong_with_a_zipped_zarr_folder_is_named(tmp_path: Path) -> None:
    folder = grouped(write_zarr(3), tmp_path)
    chunk = folder / "t2" / "u" / "c" / "1" / "0"
    whole = zipped(folder, compression=zipfile.ZIP_DEFLATED)
    at = whole.read_bytes().index(b"t2/u/c/1/0") + 12
    data = bytearray(whole.read_bytes())
    data[at : at + 8] = bytes(8)
    whole.write_bytes(data)
    with pytest.raises(SourceError, match="group 't2': array 'u' cannot be read"):
        ArraySource(whole, fields={"u": "u"}).read(2)
    chunk.unlink()
    source = ArraySource(zipped(folder), fields={"u": "u"})
    with pytest.raises(SourceError, match=r"group 't2': .*chunk t2/u/c/1/0 is not there"):
        source.read(2)
    whole.write_bytes(whole.read_bytes()[:-30])
    with pytest.raises(SourceError, match=r"a\.zarr\.zip is not a readable zip file"):
        len(ArraySource(whole))
    with zipfile.ZipFile(whole, "w") as archive:
        archive.write(folder / "zarr.json", "a.zarr/zarr.json")
    with pytest.raises(SourceError, match="Zip what is in the folder, not the folder"):
        len(ArraySource(whole))


def test_damaged_chunks_are_errors_that_name_the_sample(tmp_path: Path) -> None:
    path = grouped(write_zarr(2), tmp_path)
    (path / "t2" / "u" / "1.0").write_bytes(b"no chunk")
    with pytest.raises(SourceError, match="group 't2': array 'u' cannot be read"):
        ArraySource(path, fields={"u": "u"}).read(2)


def test_a_trajectory_that_lacks_a_field_is_an_error_of_its_own(write, tmp_path: Path) -> None:
    path = grouped(write, tmp_path)
    if path.is_dir():
        shutil.rmtree(path / "t3" / "v")
    else:
        with h5py.File(path, "a") as file:
            del file["t3/v"]
    source = ArraySource(path)
    assert len(source) == 6
    with pytest.raises(SourceError, match="t3/v"):
        source.read(3)


@pytest.mark.parametrize(
    ("offsets", "said"),
    [
        ([0, 5, 8, 17, 21, 28, 30], "Is the file complete"),
        ([0, 5, 3, 17, 21, 28, 29], "falls at sample 1"),
        ([5, 8, 17, 21, 28, 29], "from 0 on"),
        ([0.0, 5, 8, 17, 21, 28, 29], "whole numbers"),
    ],
)
def test_offsets_that_do_not_fit_are_refused(tmp_path: Path, offsets: list[Any], said: str) -> None:
    path = flat(write_hdf5, tmp_path)
    with h5py.File(path, "a") as file:
        del file["offsets"]
        file["offsets"] = offsets
    with pytest.raises(SourceError, match=said):
        len(ArraySource(path))


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="does not exist"):
        ArraySource(tmp_path / "none.zarr")
    (tmp_path / "a.npy").write_bytes(b"\x93NUMPY")
    with pytest.raises(SourceError, match=r"not a readable \.npy"):
        len(ArraySource(tmp_path / "a.npy"))
    path = grouped(write_hdf5, tmp_path)
    with pytest.raises(SourceError, match="has no array 'w'"):
        len(ArraySource(path, fields={"w": "w"}))
    with pytest.raises(ConfigError, match="layout 'row' is unknown"):
        ArraySource(path, layout="row")


def some_hdf5(path: Path) -> None:
    with h5py.File(path, "w") as file:
        values = np.arange(60, dtype="f4").reshape(4, 3, 5)
        file.create_dataset("u", data=values, chunks=(2, 3, 5), compression="gzip", shuffle=True)
        file["nu"] = np.arange(4.0, dtype="f4")


def some_groups(path: Path) -> None:
    with h5py.File(path, "w", libver="latest") as file:
        for number in range(3):
            file[f"s{number}/u"] = np.ones((3 + number, 5), "f4")
            file[f"s{number}"].attrs["nu"] = number / 2


def some_array(path: Path) -> None:
    np.save(path, np.arange(12.0, dtype="f4").reshape(4, 3))


@pytest.mark.parametrize(
    ("name", "make", "rounds"),
    [("a.h5", some_hdf5, 70), ("g.h5", some_groups, 70), ("a.npy", some_array, 200)],
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numbers that a flipped bit made
def test_a_damaged_file_gives_data_or_an_error_that_names_it(
    tmp_path: Path, name: str, make, rounds: int
) -> None:
    path = tmp_path / name
    make(path)
    good = path.read_bytes()
    draw = random.Random(7)
    refused: list[str] = []
    for _ in range(rounds):
        damaged = bytearray(good)
        for _ in range(draw.choice([1, 1, 2, 8])):
            damaged[draw.randrange(len(good))] = draw.choice([0, 1, 0x80, 0xFF, draw.randrange(256)])
        path.write_bytes(damaged[: draw.randrange(1, len(good))] if draw.random() < 0.2 else damaged)
        source = ArraySource(path, attributes=["nu"] if make is some_groups else [])
        try:
            source.identity()
            source.runs()
            for number in range(min(len(source), 4)):
                source.read(number)
        except StokerError as error:
            refused.append(str(error))
        source.close()
    assert len(refused) > 10
    assert all(name in said for said in refused)


@pytest.mark.parametrize("values", [np.zeros((2, 3), "u8"), np.zeros((0, 3))], ids=["dtype", "no-samples"])
def test_a_file_that_gives_no_samples_is_named(tmp_path: Path, values: np.ndarray) -> None:
    np.save(tmp_path / "a.npy", np.zeros((2, 3)))
    np.save(tmp_path / "b.npy", values)

    with pytest.raises(SourceError, match=r"b\.npy"):
        len(ArraySource(tmp_path))
