import logging
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import cloudpickle
import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stoker.errors import ConfigError, SourceError, SplitError
from stoker.schema import Field
from stoker.sources import hdf5_open
from stoker.sources.arrays import ArraySource
from stoker.sources.hdf5 import HDF5Source
from stoker.sources.hdf5_fields import arrange, parse_axes
from stoker.testing import check_source
from tests.kit.amount import example_count


def test_importing_and_reading_does_not_import_torch(write, ramp) -> None:
    """Workers start in a tenth of a second; torch alone takes two."""
    path = write("a.h5", {"tensor": ramp(2, 3, 4)})
    code = (
        "import sys\nfrom stoker.sources.hdf5 import HDF5Source\n"
        f"HDF5Source({str(path)!r}).read(0)\nassert 'torch' not in sys.modules"
    )

    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_declared_datasets_and_axes(write, ramp) -> None:
    arrays = {"latent": ramp(4, 6, 2), "param": ramp(4, 3), "run/u": ramp(5, 4, 3)}
    fields = {"latent": "n l d", "param": "n c", "speed": "run/u: x n t"}
    source = HDF5Source(write("a.h5", arrays), fields=fields)

    assert source.schema() == {
        "latent": Field(shape=(6, 2), dtype="float32"),
        "param": Field(shape=(3,), dtype="float32"),
        "speed": Field(shape=(3, 1, 5, 1), dtype="float32", time=True),
    }
    sample = source.read(2)
    np.testing.assert_array_equal(sample["latent"], arrays["latent"][2])
    np.testing.assert_array_equal(sample["speed"][:, 0, :, 0], arrays["run/u"][:, 2].T)
    check_source(source)


def test_a_dataset_per_sample(write, ramp) -> None:
    arrays = {f"s{i}/u": ramp(3, 4) + i for i in range(12)}
    source = HDF5Source(write("a.h5", arrays), fields={"u": "t x"})

    assert len(source) == 12
    np.testing.assert_array_equal(source.read(11)["u"][:, 0, :, 0], arrays["s11/u"])
    check_source(source)


@pytest.mark.parametrize("read", [lambda path: HDF5Source(path, fields={"u": "t x"}), ArraySource])
def test_groups_that_are_no_samples_are_named(write, ramp, caplog, read) -> None:
    path = write("a.h5", {f"s{i}/u": ramp(3, 4) for i in range(3)})
    with h5py.File(path, "a") as file:
        file.create_group("s3")

    with caplog.at_level(logging.WARNING, logger="stoker"):
        assert len(read(path)) == 3

    assert [r for r in caplog.records if "'s3'" in r.message]


def test_real_openpmd_file_is_one_float64_sample(openpmd: Path, caplog) -> None:
    source = HDF5Source(openpmd, fields={axis: f"data/1/meshes/B/{axis}: x y z" for axis in "xyz"})
    with caplog.at_level(logging.WARNING, logger="stoker"):
        schema = source.schema()

    assert schema["x"] == Field(shape=(47, 47, 47, 1), dtype="float32")
    with h5py.File(openpmd) as file:
        np.testing.assert_array_equal(source.read(0)["y"][..., 0], file["data/1/meshes/B/y"][()].astype("f4"))
    assert sum("float64 is read as float32" in message for message in caplog.messages) == 1
    check_source(source)


def test_a_parameter_is_a_field_where_it_is_declared(write, ramp, caplog) -> None:
    for nu in ("0.01", "0.1"):
        folder = write(f"1D_Nu{nu}.h5", {"u": ramp(2, 3, 4)}, Re=1000).parent
    source = HDF5Source(folder, fields={"u": "n t x", "Nu": "", "reynolds": "Re:"})

    assert [float(source.read(number)["Nu"]) for number in (0, 3)] == [np.float32(0.01), np.float32(0.1)]
    assert source.read(0)["reynolds"] == 1000
    assert source.schema()["Nu"] == Field(shape=(), dtype="float32")
    assert [dict(part.values)["Nu"] for part in source.identity().parts] == [0.01, 0.1]
    assert "leaves out" not in caplog.text
    check_source(source)


def test_parameters_that_fields_do_not_name_are_said_once(write, ramp, caplog) -> None:
    for nu in ("0.01", "0.1"):
        folder = write(f"1D_Nu{nu}.h5", {"u": ramp(2, 3, 4)}, Re=1000).parent
    source = HDF5Source(folder, fields={"u": "n t x"})
    with caplog.at_level(logging.WARNING, logger="stoker"):
        assert list(source.schema()) == ["u"]

    (message,) = caplog.messages
    assert "Nu" in message
    assert "Re" in message
    assert not source.identity().parts[0].values


def test_the_value_of_a_parameter_changes_the_identity(write, ramp) -> None:
    path = write("a.h5", {"u": ramp(2, 3, 4)}, Nu=0.1)
    one = HDF5Source(path, fields={"u": "n t x", "Nu": ""}).identity()
    path = write("a.h5", {"u": ramp(2, 3, 4)}, Nu=0.2)

    assert HDF5Source(path, fields={"u": "n t x", "Nu": ""}).identity() != one


@pytest.mark.parametrize(
    ("stored", "served"),
    [
        (">f4", "float32"), ("<f8", "float32"), (">f8", "float32"), ("f2", "float16"), ("bool", "bool"),
        (">i8", "int64"), ("i2", "int16"), ("u1", "uint8"), ("u2", "int32"), ("u4", "int64"),
    ],
)  # fmt: skip
def test_dtypes(write, stored: str, served: str) -> None:
    values = (np.arange(24).reshape(3, 4, 2) % 7).astype(stored)
    source = HDF5Source(write("a.h5", {"v": values}, gzip=True), fields={"v": "n l d"})

    assert source.schema()["v"].dtype == served
    found = source.read(1)["v"]
    assert found.dtype == np.dtype(served)
    assert found.dtype.isnative
    np.testing.assert_array_equal(found, values[1].astype(served))


def test_complex_values(write) -> None:
    values = (np.arange(24) + 1j * np.arange(24)[::-1]).reshape(2, 3, 4).astype("c16")
    path = write("a.h5", {"v": values})

    features = HDF5Source(path, fields={"v": "n l d"})
    assert features.schema()["v"] == Field(shape=(3, 4, 2), dtype="float32")
    np.testing.assert_array_equal(features.read(1)["v"][..., 1], values[1].imag)
    on_grid = HDF5Source(path, fields={"v": "n t x"})
    assert on_grid.schema()["v"] == Field(shape=(3, 1, 4, 2), dtype="float32", time=True)
    np.testing.assert_array_equal(on_grid.read(1)["v"][:, 0, :, 0], values[1].real)
    check_source(on_grid)


@pytest.mark.parametrize(
    "values", [np.zeros((2, 3), dtype="u8"), np.array([b"a", b"b"])], ids=["uint64", "text"]
)
def test_dtypes_that_no_store_holds(write, values) -> None:
    axes = " ".join("nld"[: values.ndim])
    with pytest.raises(SourceError, match=r"dataset 'v' has dtype .* which cannot be stored"):
        HDF5Source(write("a.h5", {"v": values}), fields={"v": axes}).schema()


@settings(
    max_examples=example_count(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_range_of_any_layout_is_a_slice_of_the_array(tmp_path_factory, data) -> None:
    """Against numpy: axes in any order, chunks of any shape, subsampling, ranges along time."""
    axes = data.draw(st.permutations(["n", "t", "x", "c"]))
    shape = {axis: data.draw(st.integers(1, 9)) for axis in axes}
    stored = tuple(shape[axis] for axis in axes)
    values = np.arange(np.prod(stored), dtype="f4").reshape(stored)
    chunks = data.draw(st.none() | st.tuples(*(st.integers(1, size) for size in stored)))
    strides = {axis: data.draw(st.integers(1, 3)) for axis in "tx"}
    path = tmp_path_factory.mktemp("any") / "a.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("v", data=values, chunks=chunks)
    source = HDF5Source(path, fields={"v": " ".join(axes)}, subsample=strides)
    expected = values.transpose([axes.index(axis) for axis in "ntxc"])[
        :, :: strides["t"], None, :: strides["x"]
    ]

    for number in data.draw(st.lists(st.integers(0, shape["n"] - 1), min_size=1, max_size=4)):
        start, stop = (data.draw(st.none() | st.integers(-3, 12)) for _ in "ab")
        found = source.read(number, start, stop)["v"]
        np.testing.assert_array_equal(found, expected[number][start:stop])


def test_identity_does_not_move_with_the_data(write, ramp, tmp_path: Path) -> None:
    write("raw/a_train.h5", {"tensor": ramp(9, 3, 4)})
    folder = write("raw/b_train.h5", {"tensor": ramp(4, 3, 4)}).parent
    moved = tmp_path / "elsewhere"
    shutil.copytree(folder, moved)

    one, other = HDF5Source(folder, split="train").identity(), HDF5Source(moved, split="train").identity()
    assert [(p.name, p.count, p.values, p.selection) for p in one.parts] == [
        (p.name, p.count, p.values, p.selection) for p in other.parts
    ]
    assert (one.kind, one.settings) == (other.kind, other.settings)
    assert [file.name for part in one.parts for file in part.files] == ["a_train.h5", "b_train.h5"]


def test_every_setting_that_changes_samples_changes_the_identity(write, ramp) -> None:
    path = write("a1d.h5", {"tensor": ramp(30, 6, 8)})
    settings_of = [
        {}, {"split": "train"}, {"split": "val"}, {"split": "train", "seed": 1}, {"subsample": {"t": 2}},
        {"split": "train", "splits": {"train": 0.5, "val": 0.5}},
        {"preset": "pdebench", "fields": {"tensor": "n t y"}},
        {"fields": {"tensor": "n t x"}},
    ]  # fmt: skip
    seen = [
        repr((s.identity().settings, s.identity().parts))
        for s in (HDF5Source(path, **k) for k in settings_of)
    ]

    assert len(set(seen)) == len(settings_of)


def test_an_added_file_leaves_the_other_parts_as_they_are(write, ramp) -> None:
    """So that their shards are adopted and not encoded again."""
    folder = write("1D_Nu0.1.h5", {"tensor": ramp(30, 3, 4)}).parent
    before = HDF5Source(folder, split="train").identity()
    write("1D_Nu0.01.h5", {"tensor": ramp(20, 3, 4)})
    after = HDF5Source(folder, split="train").identity()

    assert before.parts[0] in after.parts
    assert (before.kind, before.settings) == (after.kind, after.settings)


def test_copies_open_their_own_files(write, ramp) -> None:
    source = HDF5Source(write("a.h5", {"tensor": ramp(5, 3, 4)}, gzip=True))
    expected = source.read(3)["data"]
    packed = cloudpickle.dumps(source)

    assert len(packed) < 5000
    code = (
        "import sys, cloudpickle\nsource = cloudpickle.load(sys.stdin.buffer)\n"
        "sys.stdout.buffer.write(source.read(3)['data'].tobytes())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input=packed, capture_output=True, check=True, timeout=60
    )
    assert done.stdout == expected.tobytes()


def test_a_forked_child_opens_its_own_file(write, ramp) -> None:
    path = write("a.h5", {"tensor": ramp(8, 3, 4)})
    pool = hdf5_open.FilePool()
    held = pool.dataset(path, "tensor", keep=True)
    pid = os.fork()
    if pid == 0:
        own = pool.dataset(path, "tensor", keep=True)
        os._exit(0 if own is not held and own[5, 0, 0] == 60 else 1)

    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert pool.dataset(path, "tensor", keep=True) is held


def test_many_files_under_a_low_limit_of_descriptors(write, ramp) -> None:
    for i in range(80):
        write(f"f/s_{i}.h5", {"tensor": ramp(2, 3, 4) + i})
    folder = write("x.tmp", {}).parent / "f"
    source = HDF5Source(folder)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(used + 40, soft), hard))
    try:
        for number in [*range(160), *range(0, 160, 7)]:
            assert source.read(number)["data"].flat[0] == number // 2 + 12 * (number % 2)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("keep", [0.999, 0.5, 0.01])
def test_truncated_files_are_named(write, ramp, keep: float) -> None:
    path = write("cut.h5", {"tensor": ramp(50, 30, 20)})
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * keep)])

    with pytest.raises(
        SourceError, match=r"cut\.h5 is (truncated at|not a readable HDF5 file)[^.]*bytes.*again"
    ):
        len(HDF5Source(path))


def test_a_damaged_header_is_a_source_error_or_reads_right(write, ramp) -> None:
    """Each byte of the first 8 KiB in turn, in steps: no other exception type, whatever HDF5 raises."""
    values = ramp(4, 3, 5)
    path = write("h.h5", {"tensor": values}, Nu=0.5)
    whole = path.read_bytes()
    refused = 0
    for position in range(0, min(8192, len(whole)), 13):
        damaged = bytearray(whole)
        damaged[position] ^= 0xFF
        path.write_bytes(damaged)
        source = HDF5Source(path)
        try:
            for number in range(min(len(source), 4)):
                source.read(number)
        except (SourceError, IndexError):
            refused += 1
        source.close()
    assert refused > 10


def test_a_file_that_changed_since_it_was_described(write, ramp) -> None:
    path = write("a.h5", {"tensor": ramp(4, 3, 5)})
    source = HDF5Source(path)
    len(source)
    write("a.h5", {"tensor": ramp(6, 3, 5)})

    with pytest.raises(SourceError, match=r"has shape \(6, 3, 5\), expected \(4, 3, 5\)"):
        source.read(0)


@pytest.mark.parametrize("datasets", [{}, {"tensor": np.zeros((0, 3, 4))}], ids=["nothing", "no-rows"])
def test_no_samples_is_an_error(write, datasets: dict) -> None:
    with pytest.raises(SourceError, match=r"a\.h5.*(empty|no datasets)"):
        len(HDF5Source(write("a.h5", datasets)))


def test_files_of_different_shape_are_both_named(write, ramp) -> None:
    write("a.h5", {"tensor": ramp(2, 3, 4)})
    folder = write("b.h5", {"tensor": ramp(2, 3, 5)}).parent

    with pytest.raises(
        SourceError, match=r"'data' is float32 \(3, 1, 4, 1\) in .*a\.h5 and .*\(3, 1, 5, 1\) in .*b\.h5"
    ):
        HDF5Source(folder).schema()


def test_different_numbers_of_samples_in_one_file(write, ramp) -> None:
    path = write("a.h5", {"u": ramp(4, 3), "v": ramp(5, 3)})

    with pytest.raises(SourceError, match="different numbers of samples: u 4, v 5"):
        HDF5Source(path, fields={"u": "n c", "v": "n c"}).schema()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"fields": {"gone": "n c"}}, SourceError, r"no dataset 'gone'. It has tensor \(4, 3, 5\)"),
        ({"fields": {"tensor": "n c"}}, SourceError, "has 3 axes .* declared were 2: 'n c'"),
        ({"fields": {"tensor": "n t t"}}, SourceError, "are not distinct words"),
        ({"fields": {"q": "t x"}}, SourceError, "no group holds 'q'"),
        ({"fields": {"tensor": "n t x", "Nu": ""}}, SourceError, "no parameter 'Nu'"),
        ({"fields": {"tensor": ""}}, SourceError, "has 3 axes"),
        ({"fields": {}}, ConfigError, "fields is empty"),
        ({"preset": "well", "fields": {"a": "n c"}}, ConfigError, "preset 'well'"),
        ({"preset": "other"}, ConfigError, "preset 'other' is unknown"),
        ({"preset": "pdebench", "fields": {"gone": "n t x"}}, SourceError, r"fields declares \['gone'\]"),
        ({"subsample": {"c": 2}}, ConfigError, "subsample"),
        (
            {"subsample": {"t": 2, "z": 2}},
            ConfigError,
            "subsample names z, and the axes of the data are t, x",
        ),
        ({"split": "ood"}, SplitError, '"ood" is not among'),
    ],
)
def test_settings_that_do_not_fit(write, ramp, options: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        HDF5Source(write("a.h5", {"tensor": ramp(4, 3, 5)}), **options).schema()


def test_memory_does_not_grow_with_the_number_of_samples(write, ramp) -> None:
    small = HDF5Source(write("s.h5", {"tensor": ramp(20, 64, 64)}, chunks={"tensor": (4, 16, 64)}))
    large = HDF5Source(write("l.h5", {"tensor": ramp(2000, 64, 64)}, chunks={"tensor": (4, 16, 64)}))

    assert large.buffer_bytes <= 8 * 2**20
    assert small.buffer_bytes <= large.buffer_bytes


def test_arrange_needs_no_copy_in_stored_order(ramp) -> None:
    raw = ramp(3, 4, 5, 2)

    assert np.shares_memory(arrange(raw, ("t", "x", "y", "c")), raw)
    assert arrange(raw[..., 0], ("t", "x", "y")).shape == (3, 4, 5, 1)


def test_long_axis_names() -> None:
    assert parse_axes("sample Time y x channel", where="a") == ("n", "t", "y", "x", "c")
    assert parse_axes("b t x v", where="a") == ("n", "t", "x", "c")
