import ast
import logging
import re
from pathlib import Path

import h5py
import numpy as np
import pytest

import stoker
from stoker.config import load_config
from stoker.config.names import in_settings
from stoker.errors import SourceError
from stoker.schema import Field
from stoker.sources.hdf5 import HDF5Source
from stoker.testing import check_source


def grid(*shape: int, dtype: str = "float32") -> Field:
    return Field(shape=shape, dtype=dtype, time=True)


SCALAR = Field(shape=(), dtype="float32")


def test_raw_1d_tensor_with_a_longer_time_coordinate(write, ramp) -> None:
    tensor = ramp(3, 5, 8)
    path = write("a.h5", {"tensor": tensor, "x-coordinate": ramp(8), "t-coordinate": ramp(6)})
    source = HDF5Source(path, preset="pdebench")

    assert source.schema() == {"data": grid(5, 1, 8, 1)}
    np.testing.assert_array_equal(source.read(2)["data"][:, 0, :, 0], tensor[2])
    check_source(source)


def test_raw_1d_tensor_with_channels(write, ramp) -> None:
    tensor = ramp(3, 5, 8, 2)
    source = HDF5Source(write("a.h5", {"tensor": tensor, "x-coordinate": ramp(8)}))

    assert source.schema() == {"data": grid(5, 1, 8, 2)}
    assert source.channels == {"data": ("tensor_0", "tensor_1")}
    np.testing.assert_array_equal(source.read(1)["data"][:, 0], tensor[1])


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("burgers1d_train.h5", (2, 5, 8), (5, 1, 8, 1)),
        ("burgers1d_train.h5", (2, 5, 8, 3), (5, 1, 8, 3)),
        ("cfd2d_rand_train.h5", (2, 5, 8, 6), (5, 8, 6, 1)),
        ("cfd2d_rand_train.h5", (2, 5, 8, 6, 4), (5, 8, 6, 4)),
        ("cfd2d_rand_train.h5", (2, 21, 64, 64), (21, 64, 64, 1)),
        ("cfd2d_rand_train.h5", (2, 21, 64, 64, 4), (21, 64, 64, 4)),
        ("burgers1d_train.h5", (2, 41, 64, 2), (41, 1, 64, 2)),
        ("cfd3d_train.h5", (2, 5, 8, 6, 4, 3), (5, 8, 6, 4, 3)),
    ],
)
def test_converted_data_takes_its_rank_from_the_name(write, ramp, name, shape, expected) -> None:
    source = HDF5Source(write(name, {"data": ramp(*shape)}), split="train")

    assert source.schema() == {"data": grid(*expected)}


def literals(error: pytest.ExceptionInfo[SourceError]) -> list[dict[str, str]]:
    """Every `fields=` that an error proposes."""
    return [ast.literal_eval(text) for text in re.findall(r"fields=(\{[^{}]*\})", str(error.value))]


def refused(path: Path) -> list[dict[str, str]]:
    """What the error of a file with unclear axes proposes; each proposal must be accepted."""
    with pytest.raises(SourceError) as error:
        HDF5Source(path).schema()
    found = literals(error)
    assert found
    for fields in found:
        HDF5Source(path, preset="pdebench", fields=fields).schema()
    return found


def test_axes_are_never_guessed_from_sizes(write, ramp) -> None:
    """(N, T, 64, 2) may be 64 points of 2 channels, or a grid of 64 x 2."""
    path = write("a.h5", {"data": ramp(2, 3, 64, 2)})

    assert {"data": "n t x c"} in refused(path)
    assert {"data": "n t x y"} in refused(path)
    assert HDF5Source(path, preset="pdebench", fields={"data": "n t x y"}).schema() == {
        "data": grid(3, 64, 2, 1)
    }
    assert HDF5Source(path, preset="pdebench", fields={"data": "n t c x"}).schema() == {
        "data": grid(3, 1, 2, 64)
    }


STILL = Field(shape=(64, 64, 1), dtype="float32")


@pytest.mark.parametrize(
    ("name", "shape", "coordinates", "axes", "expected"),
    [
        ("a", (2, 3, 2, 64, 64), {"x": 64, "y": 64}, "n t c x y", grid(3, 64, 64, 2)),
        ("a", (2, 3, 2, 64, 64), {"x": 65, "y": 65, "t": 4}, "n t c x y", grid(3, 64, 64, 2)),
        ("a", (2, 11, 3, 64), {"x": 64}, "n t c x", grid(11, 1, 64, 3)),
        ("a", (2, 11, 64, 3), {"x": 64}, "n t x c", grid(11, 1, 64, 3)),
        ("a", (2, 3, 2, 8, 8, 8), {"x": 8, "y": 8, "z": 8}, "n t c x y z", grid(3, 8, 8, 8, 2)),
        ("a", (2, 11, 16, 64), {"x": 64, "y": 16, "t": 12}, "n t y x", grid(11, 16, 64, 1)),
        ("2D_DarcyFlow", (2, 1, 64, 64), {"x": 64, "y": 64}, "n c x y", STILL),
        ("2D_DarcyFlow", (2, 1, 64, 64), {}, "n c x y", STILL),
        ("2D_DarcyFlow", (2, 64, 64, 1), {}, "n x y c", STILL),
        # As an earlier converter wrote them: one more axis of one number.
        ("darcy", (2, 1, 64, 64, 1), {"x": 64, "y": 64}, "n c x y d", STILL),
        ("a", (2, 11, 64, 3, 1), {"x": 64, "t": 11}, "n t x c d", grid(11, 1, 64, 3)),
        # Time last, as in the files of neural operators.
        ("a", (2, 64, 64, 10), {"x": 64, "y": 64, "t": 10}, "n x y t", grid(10, 64, 64, 1)),
        ("a", (2, 64, 64, 10, 2), {"x": 64, "y": 64, "t": 11}, "n x y t c", grid(10, 64, 64, 2)),
        # One trajectory per file.
        ("a", (11, 2, 64, 64), {"x": 64, "y": 64, "t": 12}, "t c x y", grid(11, 64, 64, 2)),
        ("a", (11, 2, 64, 64), {"x": 64, "y": 64, "t": 3}, "n t x y", grid(2, 64, 64, 1)),
    ],
)
def test_axes_follow_the_lengths_of_coordinates(
    write, ramp, name, shape, coordinates, axes, expected
) -> None:
    data = ramp(*shape)
    lengths = {f"{axis}-coordinate": ramp(size) for axis, size in coordinates.items()}
    path = write(f"{name}.h5", {"data": data, **lengths})
    source = HDF5Source(path)
    declared = HDF5Source(path, preset="pdebench", fields={"data": axes})

    assert source.schema() == {"data": expected}
    np.testing.assert_array_equal(source.read(0)["data"], declared.read(0)["data"])
    assert source.identity().settings == declared.identity().settings


@pytest.mark.parametrize(
    ("name", "shape", "coordinates", "options"),
    [
        # Channels or points: the file's name alone does not tell.
        ("cfd2d", (2, 3, 2, 64, 64), {}, {"n t c x y", "n t x y c"}),
        ("burgers1d", (2, 3, 3, 64), {}, {"n t c x", "n t x c"}),
        ("a", (2, 3, 64, 64), {"x": 64}, {"n t c x", "n t x c", "n t x y"}),
        ("a", (2, 3, 64, 48), {"x": 64}, {"n t x c", "n t x y"}),
        ("2D_Darcy", (2, 3, 64, 64), {}, {"n c x y", "n x y c"}),
        # (T,C,H,W), (N,C,H,W) or (N,T,X,Y): no time coordinate tells.
        ("a", (11, 2, 64, 64), {"x": 64, "y": 64}, {"n t x y", "t c x y", "n c x y"}),
        ("cfd2d", (11, 2, 64, 64), {}, {"n t x y", "t c x y", "n c x y"}),
        ("a", (11, 3, 64), {"x": 64}, {"n t x", "t c x", "n c x"}),
        ("a", (4, 1, 64, 64, 1), {"x": 64, "y": 64}, {"n t x y c", "n c x y d"}),
        ("2D_NS_64", (4, 64, 64, 10, 1), {"x": 64, "y": 64}, {"n x y t c", "n x y c d"}),
        ("cfd2d", (4, 64, 64, 20), {}, {"n t x y", "n x y t"}),
        # Steps and points, or points and channels.
        ("a", (100, 64, 2), {}, {"n t x", "n x c", "t x c"}),
    ],
)
def test_what_no_coordinate_decides_is_asked(write, ramp, name, shape, coordinates, options) -> None:
    lengths = {f"{axis}-coordinate": ramp(size) for axis, size in coordinates.items()}
    path = write(f"{name}.h5", {"data": ramp(*shape), **lengths})

    assert options <= {fields["data"] for fields in refused(path)}


def test_coordinates_that_fit_no_axis_are_named(write, ramp) -> None:
    path = write("a.h5", {"data": ramp(2, 3, 8), "x-coordinate": ramp(12)})

    with pytest.raises(SourceError, match=r"\(2, 3, 8\).*x 12"):
        HDF5Source(path).schema()
    assert {"data": "n t x"} in refused(path)


def test_the_proposal_is_accepted_by_python_and_on_the_command_line(write, ramp) -> None:
    path = write("cfd2d.h5", {"data": ramp(2, 3, 2, 64, 64)})
    with pytest.raises(SourceError) as error:
        HDF5Source(path).schema()

    said = in_settings(error.value)
    (override, *_) = re.findall(r"'(data\.fields=[^']*)'", said)
    config = load_config(None, [*re.findall(r"data\.preset=\w+", said)[:1], override])
    (fields, *_) = re.findall(r"fields=(\{[^}]*\})", str(error.value))

    assert (config.data.preset, config.data.fields) == ("pdebench", {"data": "n t c x y"})
    assert (
        HDF5Source(path, preset="pdebench", fields=ast.literal_eval(fields)).schema()["data"].shape[-1] == 2
    )


def test_axes_from_dimension_labels_and_attributes(write, ramp) -> None:
    one = write("one.h5", {"data": ramp(2, 3, 4, 5)})
    other = write("other.h5", {"data": ramp(2, 3, 4, 5)})
    with h5py.File(one, "a") as file:
        for dimension, label in zip(file["data"].dims, ("batch", "time", "channel", "x"), strict=True):
            dimension.label = label
    with h5py.File(other, "a") as file:
        file["data"].attrs["axes"] = "n t y x"

    assert HDF5Source(one).schema() == {"data": grid(3, 1, 5, 4)}
    assert HDF5Source(other).schema() == {"data": grid(3, 4, 5, 1)}


@pytest.mark.parametrize("shape", [(2, 5), (2, 3, 4)])
def test_a_rank_that_does_not_fit_is_refused(write, ramp, shape) -> None:
    refused(write("cfd2d.h5", {"data": ramp(*shape)}))


def test_cfd_fields_become_channels(write, ramp) -> None:
    arrays = {name: ramp(2, 3, 4, 5) + i for i, name in enumerate(("Vx", "pressure", "density", "Vy"))}
    source = HDF5Source(write("2D_CFD.h5", {**arrays, "t-coordinate": ramp(4)}, gzip=True))

    assert source.channels == {"data": ("density", "pressure", "Vx", "Vy")}
    expected = np.stack([arrays[name][1] for name in source.channels["data"]], axis=-1)
    np.testing.assert_array_equal(source.read(1)["data"], expected)
    check_source(source)


def test_cfd_1d(write, ramp) -> None:
    source = HDF5Source(write("a.h5", {name: ramp(2, 3, 4) for name in ("density", "pressure", "Vx")}))

    assert source.schema() == {"data": grid(3, 1, 4, 3)}


def test_navier_stokes_keeps_force_apart(write, ramp) -> None:
    arrays = {
        "velocity": ramp(2, 3, 4, 5, 2),
        "particles": ramp(2, 3, 4, 5, 1),
        "force": ramp(2, 4, 5, 2),
        "t": ramp(2, 3),
    }
    source = HDF5Source(write("ns.h5", arrays, chunks={"velocity": (1, 1, 4, 5, 2)}))

    assert source.schema() == {"data": grid(3, 4, 5, 3), "force": Field(shape=(4, 5, 2), dtype="float32")}
    assert source.channels["data"] == ("velocity_0", "velocity_1", "particles")
    np.testing.assert_array_equal(source.read(1)["data"][..., :2], arrays["velocity"][1])
    check_source(source)


def test_darcy_is_steady(write, ramp) -> None:
    arrays = {"tensor": ramp(3, 1, 4, 5), "nu": ramp(3, 4, 5) + 1}
    source = HDF5Source(write("2D_DarcyFlow_beta0.01_Train.hdf5", arrays))

    still = Field(shape=(4, 5, 1), dtype="float32")
    assert source.schema() == {"data": still, "nu": still, "beta": SCALAR}
    np.testing.assert_array_equal(source.read(2)["nu"][..., 0], arrays["nu"][2])
    check_source(source)


def test_darcy_with_channels_last(write, ramp) -> None:
    arrays = {"tensor": ramp(3, 64, 48, 1), "nu": ramp(3, 64, 48) + 1}
    source = HDF5Source(write("2D_DarcyFlow.hdf5", arrays))

    still = Field(shape=(64, 48, 1), dtype="float32")
    assert source.schema() == {"data": still, "nu": still}


def test_flow_with_channels_before_space(write, ramp) -> None:
    arrays = {"velocity": ramp(2, 11, 2, 64, 48), "particles": ramp(2, 11, 1, 64, 48)}
    coordinates = {"x": ramp(64), "y": ramp(48), "t": ramp(2, 11)}
    source = HDF5Source(write("ns.h5", {**arrays, **coordinates}))

    assert source.schema() == {"data": grid(11, 64, 48, 3)}
    np.testing.assert_array_equal(source.read(1)["data"][..., 1], arrays["velocity"][1, :, 1])


def test_a_proposal_for_stacked_datasets_names_them_all(write, ramp) -> None:
    arrays = {name: ramp(2, 3, 4, 5) for name in ("density", "pressure", "Vx", "Vy")}
    path = write("2D_CFD.h5", {**arrays, "x-coordinate": ramp(9), "y-coordinate": ramp(5)})

    assert dict.fromkeys(arrays, "n t x y") in refused(path)


def test_group_per_sample(write, ramp) -> None:
    arrays = {f"{i:04d}/data": ramp(3, 4, 5, 2) + i for i in (0, 1, 10, 2)}
    lengths = {"t": 4, "x": 4, "y": 5}
    arrays |= {f"{i:04d}/grid/{axis}": ramp(lengths[axis]) for i in (0, 1, 10, 2) for axis in "txy"}
    source = HDF5Source(write("g.h5", arrays))

    assert source.schema() == {"data": grid(3, 4, 5, 2)}
    assert list(source.keys()) == ["g:0000", "g:0001", "g:0002", "g:0010"]
    np.testing.assert_array_equal(source.read(3)["data"], arrays["0010/data"])
    check_source(source)


def test_a_group_of_another_shape_names_the_sample(write, ramp) -> None:
    arrays = {f"{i}/data": ramp(3, 4, 5) for i in range(3)} | {"3/data": ramp(3, 4, 6)}
    lengths = {"t": 4, "x": 4, "y": 5}
    arrays |= {f"{i}/grid/{axis}": ramp(lengths[axis]) for i in range(4) for axis in "txy"}
    source = HDF5Source(write("g.h5", arrays))

    source.read(2)
    with pytest.raises(SourceError, match=r"group '3'.*\(3, 4, 6\).*\(3, 4, 5\)"):
        source.read(3)


def test_groups_without_data_are_said(write, ramp, caplog) -> None:
    source = HDF5Source(write("g.h5", {"0/data": ramp(3, 4), "1/other": ramp(3)}))
    with caplog.at_level(logging.WARNING, logger="stoker"):
        assert len(source) == 1

    assert "1 entries without 'data' are not samples: ['1']" in caplog.text


def test_files_of_a_parameter_study_are_one_source(write, ramp) -> None:
    for value, rows in (("0.01", 6), ("0.1", 4)):
        write(f"1D_Burgers_Sols_Nu{value}.hdf5", {"tensor": ramp(rows, 3, 4)}, Nu=float(value))
    folder = write("x.tmp", {}).parent
    source = HDF5Source(folder)

    assert source.schema()["Nu"] == SCALAR
    assert [float(source.read(n)["Nu"]) for n in (0, 6)] == [pytest.approx(0.01), pytest.approx(0.1)]
    assert [dict(part.values) for part in source.identity().parts] == [{"Nu": 0.01}, {"Nu": 0.1}]
    check_source(source)


def test_one_initial_state_is_never_in_two_splits(write, ramp) -> None:
    for value, rows in (("0.01", 30), ("0.1", 20), ("1.0", 30)):
        write(f"1D_Nu{value}.hdf5", {"tensor": ramp(rows, 3, 4)})
    folder = write("x.tmp", {}).parent
    keys = {split: set(HDF5Source(folder, split=split, seed=1).keys()) for split in ("train", "val", "test")}

    assert sum(len(found) for found in keys.values()) == 30
    assert not (keys["train"] & keys["val"] | keys["train"] & keys["test"] | keys["val"] & keys["test"])


def test_a_parameter_from_the_name_alone(write, ramp) -> None:
    source = HDF5Source(write("1D_Advection_Sols_beta0.4.hdf5", {"tensor": ramp(2, 3, 4)}))

    assert source.read(0)["beta"] == np.float32(0.4)


def test_name_and_attribute_that_disagree_are_refused(write, ramp) -> None:
    path = write("1D_Nu0.1.h5", {"tensor": ramp(2, 3, 4)}, nu=0.2)

    with pytest.raises(SourceError, match=r"name says Nu = 0\.1, the file's attribute says 0\.2"):
        HDF5Source(path).schema()


def test_a_parameter_that_one_file_lacks_is_named(write, ramp) -> None:
    write("a.h5", {"tensor": ramp(2, 3, 4)}, Nu=0.1)
    folder = write("b.h5", {"tensor": ramp(2, 3, 4)}).parent

    with pytest.raises(SourceError, match=r"only one of .*a\.h5 and .*b\.h5 has Nu"):
        HDF5Source(folder).schema()


def test_real_burgers_files(exponax: Path) -> None:
    source = HDF5Source(str(exponax / "1D_Burgers_Sols_Nu*.hdf5"), preset="pdebench")

    assert len(source) == 56
    assert source.schema() == {"data": grid(101, 1, 256, 1), "Nu": SCALAR}
    with h5py.File(exponax / "1D_Burgers_Sols_Nu0.1.hdf5") as file:
        np.testing.assert_array_equal(source.read(40)["data"][:, 0, :, 0], file["tensor"][8])
    check_source(source)


def test_real_group_per_sample_file(exponax: Path) -> None:
    source = HDF5Source(exponax / "2D_diff-react_layout.h5", preset="pdebench", split="train")

    assert (len(source), source.schema()) == (7, {"data": grid(51, 48, 48, 2)})
    check_source(source)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_attribute_without_a_finite_value_is_named_with_its_file(tmp_path: Path, value: float) -> None:
    with h5py.File(tmp_path / "burgers.hdf5", "w") as file:
        file["tensor"] = np.zeros((4, 3, 8), dtype=np.float32)
        file["x-coordinate"] = np.arange(8, dtype=np.float32)
        file["t-coordinate"] = np.arange(4, dtype=np.float32)
        file.attrs["viscosity"] = value

    with pytest.raises(SourceError, match=r"burgers\.hdf5.*'viscosity'"):
        stoker.precompute(HDF5Source(tmp_path), None, tmp_path / "cache", name="burgers", workers=0)
