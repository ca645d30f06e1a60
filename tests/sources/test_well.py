from pathlib import Path

import h5py
import numpy as np
import pytest

from stoker.errors import SourceError
from stoker.schema import Field
from stoker.sources.hdf5 import HDF5Source
from stoker.testing import check_source


@pytest.fixture
def well(tmp_path: Path, ramp) -> Path:
    """Two trajectories with every kind of field that the layout knows."""
    path = tmp_path / "train" / "w.hdf5"
    path.parent.mkdir()
    with h5py.File(path, "w") as file:
        file.create_group("dimensions").attrs["spatial_dims"] = ["x", "y"]
        file["dimensions/time"] = ramp(4)
        fields = {
            "t0_fields/pressure": (ramp(2, 4, 3, 5), True, True),
            "t0_fields/mask": (ramp(3, 5), False, False),
            "t1_fields/velocity": (ramp(2, 4, 3, 5, 2) + 1, True, True),
            "t2_fields/stress": (ramp(2, 4, 3, 5, 2, 2) + 2, True, True),
            "scalars/nu": (np.float32(0.5), False, False),
            "scalars/start": (ramp(2), True, False),
            "scalars/drive": (ramp(2, 4), True, True),
        }
        for name, (value, by_sample, by_time) in fields.items():
            file[name] = value
            file[name].attrs["sample_varying"] = by_sample
            file[name].attrs["time_varying"] = by_time
            file[name].attrs["dim_varying"] = [True, True]
        file.create_group("boundary_conditions/x_wall").attrs["bc_type"] = "WALL"
    return path


def test_fields_of_all_ranks_become_channels(well: Path) -> None:
    source = HDF5Source(well, preset="well")

    assert source.schema() == {
        "data": Field(shape=(4, 3, 5, 7), dtype="float32", time=True),
        "mask": Field(shape=(3, 5, 1), dtype="float32"),
        "drive": Field(shape=(4,), dtype="float32", time=True),
        "start": Field(shape=(), dtype="float32"),
        "nu": Field(shape=(), dtype="float32"),
    }
    stress = ("stress_xx", "stress_xy", "stress_yx", "stress_yy")
    assert source.channels["data"] == ("pressure", "velocity_x", "velocity_y", *stress)
    with h5py.File(well) as file:
        np.testing.assert_array_equal(source.read(1)["data"][..., 1:3], file["t1_fields/velocity"][1])
        np.testing.assert_array_equal(source.read(1)["data"][..., 4], file["t2_fields/stress"][1][..., 0, 1])
    check_source(source)


def test_boundary_conditions_are_part_of_the_identity(well: Path) -> None:
    (part,) = HDF5Source(well).identity().parts
    with h5py.File(well, "a") as file:
        file["boundary_conditions/x_wall"].attrs["bc_type"] = "OPEN"
    (other,) = HDF5Source(well).identity().parts

    assert part.values["boundary_conditions"] == ["x_wall: WALL"]
    assert other.values["boundary_conditions"] == ["x_wall: OPEN"]


def test_attributes_that_contradict_the_shape_are_refused(well: Path) -> None:
    with h5py.File(well, "a") as file:
        file["t0_fields/pressure"].attrs["time_varying"] = False

    with pytest.raises(SourceError, match=r"'t0_fields/pressure' has shape \(2, 4, 3, 5\).*'n x y'"):
        HDF5Source(well).schema()


def test_another_layout_is_refused(write, ramp) -> None:
    with pytest.raises(SourceError, match=r"not in The Well's layout.*It has tensor \(2, 3, 4\)"):
        HDF5Source(write("a.h5", {"tensor": ramp(2, 3, 4)}), preset="well").schema()


def test_a_folder_named_after_a_split_is_that_split(well: Path) -> None:
    assert len(HDF5Source(well.parent.parent, split="train")) == 2
    with pytest.raises(SourceError, match=r'split "val" has no file\. Splits found: train'):
        HDF5Source(well.parent.parent, split="val").schema()


def test_real_well_file(exponax: Path) -> None:
    source = HDF5Source(exponax / "well_layout_decaying_turbulence_2d.hdf5", preset="well")

    assert len(source) == 6
    assert source.schema()["data"] == Field(shape=(41, 64, 64, 3), dtype="float32", time=True)
    assert source.channels["data"] == ("vorticity", "velocity_x", "velocity_y")
    assert source.read(0)["nu"] == np.float32(0.002)
    check_source(source)


def test_a_scalar_in_another_file_is_refused(well: Path) -> None:
    with h5py.File(well, "r+") as file, h5py.File(well.with_name("inner.h5"), "w") as inner:
        inner["nu"] = 0.5
        del file["scalars/nu"]
        file["scalars/nu"] = h5py.ExternalLink("inner.h5", "nu")

    with pytest.raises(SourceError, match=r"'scalars/nu' is an external link into .*inner\.h5"):
        HDF5Source(well, preset="well").schema()
