"""Every layout of PDEBench and The Well: each file is made small, and read to the values written."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from stoker.errors import SourceError
from stoker.sources.hdf5 import HDF5Source
from tests.kit.amount import example_count

SIZES = {"n": 2, "t": 9, "x": 16, "y": 12, "z": 10, "c": 3}
"""Sizes that differ, so that no axis can be taken for another."""
CFD = ("density", "pressure", "Vx", "Vy", "Vz")


def values(axes: str, seed: int = 0) -> np.ndarray:
    """Return numbers for axes such as `n t x c`; `1` is an axis of one number."""
    shape = [1 if axis == "1" else SIZES[axis] for axis in axes.split()]
    return np.random.default_rng(seed).random(shape, dtype=np.float32)


def served(sample: np.ndarray, axes: str) -> np.ndarray:
    """Return one sample, without `n`, as `(T, H, W, C)` by the plainest means: one axis at a time."""
    words = axes.split()
    keep = [at for at, axis in enumerate(words) if axis != "1"]
    sample = sample.reshape([sample.shape[at] for at in keep])
    words = [words[at] for at in keep]
    for axis in ("c", "z", "y", "x", "t"):
        if axis in words:
            sample = np.moveaxis(sample, words.index(axis), 0)
            words.insert(0, words.pop(words.index(axis)))
    if "y" not in words:
        sample = np.expand_dims(sample, words.index("x"))
    return sample if "c" in words else sample[..., None]


def coordinates(axes: str, *, edges: bool = True) -> dict[str, np.ndarray]:
    """Return the coordinate datasets of PDEBench; times have one entry more."""
    found = {f"{axis}-coordinate": np.linspace(0, 1, SIZES[axis]) for axis in axes.split() if axis in "xyz"}
    if "t" in axes.split():
        found["t-coordinate"] = np.linspace(0, 1, SIZES["t"] + edges)
    return {name: array.astype("f4") for name, array in found.items()}


RAW = {
    # name of the file: dataset, its axes
    "1D_Advection_Sols_beta0.4.hdf5": ("tensor", "n t x"),
    "1D_Burgers_Sols_Nu0.01.hdf5": ("tensor", "n t x"),
    "ReacDiff_Nu0.5_Rho1.0.hdf5": ("tensor", "n t x"),
    "1D_diff-sorp_NA_NA.h5": ("tensor", "n t x c"),
}
CONVERTED = {
    # all tasks on grids, with coordinates or with the rank in their name
    "advection1d": "n t x 1",
    "burgers1d": "n t x 1",
    "diffusion_sorption1d": "n t x 1",
    "reaction_diffusion1d": "n t x c 1",
    "cfd1d_shocktube": "n t x c",
    "compressible_ns1d": "n t x c",
    "darcy2d": "n 1 x y 1",
    "navier_stokes2d": "n t x y c",
    "cfd2d_rand": "n t x y c",
    "cfd2d_turb": "n t c x y",
    "allen_cahn2d": "n t x y 1",
    "cahn_hilliard2d": "n t x y",
    "reaction_diffusion2d": "n t x y c",
    "shallow_water2d": "n t x y 1",
    "compressible_ns3d": "n t x y z c",
    "cfd3d": "n t c x y z",
}


@pytest.mark.parametrize("name", RAW)
def test_one_dimension_raw(write: Callable[..., Path], name: str) -> None:
    dataset, axes = RAW[name]
    array = values(axes)
    source = HDF5Source(write(name, {dataset: array, **coordinates(axes)}))

    np.testing.assert_array_equal(source.read(1)["data"], served(array[1], axes[2:]))


@pytest.mark.parametrize("task", CONVERTED)
def test_converted_tasks(write: Callable[..., Path], task: str) -> None:
    axes = CONVERTED[task]
    array = values(axes)
    source = HDF5Source(write(f"{task}_train.h5", {"data": array, **coordinates(axes)}), split="train")

    np.testing.assert_array_equal(source.read(1)["data"], served(array[1], axes[2:]))
    assert source.schema()["data"].time == ("t" in axes)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_compressible_flow(write: Callable[..., Path], rank: int) -> None:
    axes = " ".join(("n", "t", *"xyz"[:rank]))
    arrays = {name: values(axes, seed) for seed, name in enumerate(CFD[: 2 + rank])}
    path = write(f"{rank}D_CFD_Rand_periodic_Train.hdf5", {**arrays, **coordinates(axes)}, eta=0.01)
    source = HDF5Source(path)

    assert source.channels["data"] == tuple(arrays)
    for at, array in enumerate(arrays.values()):
        expected = served(array[1], axes[2:])[..., 0]
        np.testing.assert_array_equal(source.read(1)["data"][..., at], expected)
    assert source.read(0)["eta"] == np.float32(0.01)


@pytest.mark.parametrize("channels", ["", " c"], ids=["shallow-water", "reaction"])
def test_a_group_per_sample(write: Callable[..., Path], channels: str) -> None:
    axes = f"t x y{channels or ' 1'}"
    arrays = {f"{number:04d}/data": values(axes, number) for number in range(3)}
    grids = {
        f"{number:04d}/grid/{axis}": np.linspace(0, 1, SIZES[axis], dtype="f4")
        for number in range(3)
        for axis in "txy"
    }
    source = HDF5Source(write("2D_rdb_NA_NA.h5", {**arrays, **grids}))

    for number, array in enumerate(arrays.values()):
        np.testing.assert_array_equal(source.read(number)["data"], served(array, axes))


@pytest.mark.parametrize("force", ["n x y c", "n t x y c"])
def test_incompressible_flow(write: Callable[..., Path], force: str) -> None:
    arrays = {"velocity": values("n t x y c"), "particles": values("n t x y 1", 1), "force": values(force, 2)}
    source = HDF5Source(write("ns_incom_inhom_2d_512-0.h5", {**arrays, "t": values("n t", 3)}))
    sample = source.read(1)

    np.testing.assert_array_equal(sample["data"][..., :3], served(arrays["velocity"][1], "t x y c"))
    np.testing.assert_array_equal(sample["data"][..., 3:], served(arrays["particles"][1], "t x y 1"))
    np.testing.assert_array_equal(sample["force"], served(arrays["force"][1], force[2:]))


def test_darcy(write: Callable[..., Path]) -> None:
    arrays = {"tensor": values("n 1 x y"), "nu": values("n x y", 1)}
    source = HDF5Source(write("2D_DarcyFlow_beta1.0_Train.hdf5", {**arrays, **coordinates("n x y")}))

    np.testing.assert_array_equal(source.read(1)["data"], served(arrays["tensor"][1], "1 x y"))
    np.testing.assert_array_equal(source.read(1)["nu"], served(arrays["nu"][1], "x y"))
    assert not source.schema()["data"].time


AXES = st.sampled_from(["n t x", "n t x c", "n t x y", "n t x y c", "n t x y z", "n t x y z c"]).flatmap(
    lambda axes: st.permutations(axes.split())
)
LENGTHS = st.lists(st.sampled_from([1, 2, 3, 4, 5, 8, 11, 16, 17, 32]), min_size=6, max_size=6)


@settings(
    max_examples=example_count(60),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(axes=AXES, lengths=LENGTHS, grid_only=st.booleans())
# The samples are one fewer than the points, as the cells between 17 edges would be.
@example(axes=["x", "t", "n"], lengths=[16, 5, 17, 1, 1, 1], grid_only=False)
def test_a_file_with_coordinates_is_read_right_or_refused(
    tmp_path: Path, axes: list[str], lengths: list[int], grid_only: bool
) -> None:
    """Whatever the order of the axes: space and time have the right lengths, and values are in their place.

    Times may have one entry more than steps, as PDEBench's have: then another axis of that length is not told
    from them, and such sizes are left out here.
    """
    sizes = dict(zip(("n", "t", "x", "y", "z", "c"), lengths, strict=True))
    shape = [sizes[axis] for axis in axes]
    assume(prod(shape) <= 20_000 and sizes["t"] - 1 not in shape)
    array = np.arange(prod(shape), dtype=np.float32).reshape(shape)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["data"] = array
        for axis in axes:
            if axis in "xyz" or (axis == "t" and not grid_only):
                file[f"{axis}-coordinate"] = np.arange(sizes[axis], dtype=np.float32)
    source = HDF5Source(tmp_path / "a.h5")
    try:
        schema = source.schema()
    except SourceError:
        return
    field = schema["data"]
    stated = [sizes[axis] for axis in axes if axis in "xyz"]
    grid = list(field.shape[1 if field.time else 0 : -1])
    if len(stated) == 1:
        assert grid[0] == 1
        grid = grid[1:]
    assert sorted(grid) == sorted(stated)
    if not grid_only and field.time:
        assert field.shape[0] == sizes["t"]
    distinct = len({size for axis, size in sizes.items() if axis in axes}) == len(axes)
    if distinct and not grid_only and "n" in axes and len(source) == sizes["n"]:
        words = [axis for axis in axes if axis != "n"]
        expected = np.take(array, 0, axes.index("n"))
        order = [words.index(axis) for axis in ("t", *[a for a in words if a in "xyz"], "c") if axis in words]
        expected = expected.transpose(order).reshape(field.shape)
        np.testing.assert_array_equal(source.read(0)["data"], expected)


def well(path: Path, space: str, fields: dict[str, tuple[np.ndarray, dict[str, Any]]]) -> Path:
    """Write a file of The Well: fields with their attributes; those of a boundary belong to its group."""
    with h5py.File(path, "w") as file:
        dims = file.create_group("dimensions")
        dims.attrs["spatial_dims"] = space.split()
        dims["time"] = np.arange(SIZES["t"], dtype="f4") / 4
        for axis, name in zip("xyz", space.split(), strict=False):
            dims[name] = np.linspace(0, 1, SIZES[axis], dtype="f4")
        for name, (array, attributes) in fields.items():
            file[name] = array
            where = file[name].parent if name.startswith("boundary") else file[name]
            where.attrs.update(attributes)
    return path


def flags(sample: bool, time: bool, *dims: bool) -> dict[str, Any]:
    return {"sample_varying": sample, "time_varying": time, "dim_varying": list(dims)}


@pytest.mark.parametrize("flat", [False, True], ids=["matrix", "elements-in-a-row"])
@pytest.mark.parametrize("space", ["x y", "x y z"])
def test_well_fields_of_all_ranks(tmp_path: Path, space: str, flat: bool) -> None:
    axes, rank = f"n t {space}", len(space.split())
    vector = np.stack([values(axes, seed) for seed in range(rank)], -1)
    matrix = np.stack([vector + at for at in range(rank)], -1)
    always = flags(True, True, *[True] * rank)
    source = HDF5Source(
        well(
            tmp_path / "w.hdf5",
            space,
            {
                "t0_fields/density": (values(axes, 9), always),
                "t1_fields/velocity": (vector, always),
                "t2_fields/strain": (matrix.reshape(*matrix.shape[:-2], -1) if flat else matrix, always),
            },
        )
    )
    sample, words = source.read(1), space.split()
    parts = [values(axes, 9)[1][..., None], vector[1], matrix[1].reshape(*matrix.shape[1:-2], rank**2)]

    np.testing.assert_array_equal(sample["data"], np.concatenate(parts, -1))
    assert source.channels["data"] == (
        "density",
        *(f"velocity_{a}" for a in words),
        *(f"strain_{a}{b}" for a in words for b in words),
    )


def test_well_fields_that_vary_by_less(tmp_path: Path) -> None:
    """Constant fields, profiles along one axis, and scalars of all four kinds."""
    given = {
        "t0_fields/u": (values("n t x y"), flags(True, True, True, True)),
        "t0_fields/speed": (values("n x y", 1), flags(True, False, True, True)),
        "t0_fields/solid": (values("x y", 2), flags(False, False, True, True)),
        "t0_fields/profile": (values("n t y", 3), flags(True, True, False, True)),
        "t1_fields/wind": (values("t x y c", 4)[..., :2], flags(False, True, True, True)),
        "scalars/one": (np.float32(3), flags(False, False)),
        "scalars/by_sample": (values("n", 5), flags(True, False)),
        "scalars/by_time": (values("t", 6), flags(False, True)),
        "scalars/by_both": (values("n t", 7), flags(True, True)),
    }
    sample = HDF5Source(well(tmp_path / "w.hdf5", "x y", given)).read(1)
    expected = {
        "data": values("n t x y")[1][..., None],
        "speed": values("n x y", 1)[1][..., None],
        "solid": values("x y", 2)[..., None],
        "profile": values("n t y", 3)[1][:, None, :, None],
        "wind": values("t x y c", 4)[..., :2],
        "one": np.float32(3),
        "by_sample": values("n", 5)[1],
        "by_time": values("t", 6),
        "by_both": values("n t", 7)[1],
    }

    assert sample.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(sample[name], array)


def test_well_on_another_geometry_is_refused_with_a_declaration_that_works(tmp_path: Path) -> None:
    given = {
        "t0_fields/height": (values("n t x y"), flags(True, True, True, True)),
        "t1_fields/velocity": (values("n t x y c")[..., :2], flags(True, True, True, True)),
    }
    path = well(tmp_path / "w.hdf5", "theta phi", given)

    with pytest.raises(SourceError, match=r"theta.*phi") as error:
        HDF5Source(path).schema()
    (literal,) = re.findall(r"fields=(\{[^{}]*\})", str(error.value))
    sample = HDF5Source(path, fields=ast.literal_eval(literal)).read(1)
    np.testing.assert_array_equal(sample["height"], values("n t x y")[1][..., None])
    np.testing.assert_array_equal(sample["velocity"], values("n t x y c")[1][..., :2])


def test_include_serves_times_coordinates_and_boundaries(tmp_path: Path) -> None:
    side = {"associated_dims": ["y"], "bc_type": "WALL", "sample_varying": False, "time_varying": False}
    edge = np.zeros(SIZES["y"], bool)
    edge[[0, -1]] = True
    given = {
        "t0_fields/u": (values("n t x y"), flags(True, True, True, True)),
        "boundary_conditions/y_wall/mask": (edge, side),
        "boundary_conditions/y_wall/values": (np.array([1, 2], "f4"), side),
        "boundary_conditions/x_open/mask": (
            np.ones(SIZES["x"], bool),
            {**side, "associated_dims": ["x"], "bc_type": "open"},
        ),
    }
    path = well(tmp_path / "w.hdf5", "x y", given)
    source = HDF5Source(path, include=("time", "dt", "coordinates", "boundary"))
    sample, schema = source.read(1), source.schema()

    np.testing.assert_array_equal(sample["time"], np.arange(SIZES["t"], dtype="f4") / 4)
    assert (schema["time"].time, float(sample["dt"])) == (True, 0.25)
    np.testing.assert_array_equal(sample["y"], np.linspace(0, 1, SIZES["y"], dtype="f4"))
    assert (float(sample["boundary_y_wall"]), float(sample["boundary_x_open"])) == (0.0, 1.0)
    np.testing.assert_array_equal(sample["boundary_y_wall_mask"], edge)
    np.testing.assert_array_equal(sample["boundary_y_wall_values"], [1, 2])
    for name, field in schema.items():
        assert (sample[name].shape, str(sample[name].dtype)) == (field.shape, field.dtype)
    plain = HDF5Source(path)
    assert plain.schema().keys() == {"data"}
    assert "include" not in plain.identity().settings
    piece = HDF5Source(path, include="time", subsample={"t": 2}).read(0, 1, 3)
    np.testing.assert_array_equal(piece["time"], np.float32([0.5, 1.0]))


def test_include_reads_edges_groups_and_times_of_each_sample(write: Callable[..., Path]) -> None:
    edges = np.linspace(0, 2, SIZES["x"] + 1, dtype="f4")
    flat = write("a.h5", {"tensor": values("n t x"), "x-coordinate": edges, "t-coordinate": np.arange(10.0)})
    sample = HDF5Source(flat, include=["coordinates", "time"]).read(0)

    np.testing.assert_allclose(sample["x"], (edges[1:] + edges[:-1]) / 2, rtol=1e-6)
    np.testing.assert_array_equal(sample["time"], np.arange(9.0))
    per_sample = np.arange(SIZES["t"]) * np.array([[0.5], [0.25]])
    both = write("b.h5", {"velocity": values("n t x y c"), "t": per_sample.astype("f4")})
    assert [float(HDF5Source(both, include="dt").read(n)["dt"]) for n in (0, 1)] == [0.5, 0.25]


def test_a_time_step_far_from_zero_is_that_of_the_file(write: Callable[..., Path]) -> None:
    late = 1e8 + np.arange(SIZES["t"]) * 0.01
    path = write("a.h5", {"tensor": values("n t x"), "t-coordinate": late})

    assert float(HDF5Source(path, include="dt").read(0)["dt"]) == pytest.approx(0.01, rel=1e-4)
    with pytest.raises(SourceError, match=r"a\.h5.*100000000.01 .*'dt'"):
        HDF5Source(path, include="time").read(0)


@pytest.mark.parametrize(
    ("include", "datasets", "match"),
    [
        ("dt", {"tensor": values("n t x"), "t-coordinate": np.zeros(9)}, "step is 0"),
        ("dt", {"tensor": values("n t x"), "t-coordinate": np.full(9, np.nan)}, "nan"),
        ("time", {"tensor": values("n t x"), "t-coordinate": np.arange(9) * 1j}, "complex"),
        ("time", {"tensor": values("n t x"), "x-coordinate": values("x")}, "no times"),
        ("dt", {"tensor": values("n t x"), "t-coordinate": np.arange(9.0) ** 2}, r"1 to 15"),
        ("boundary", {"tensor": values("n t x"), "t-coordinate": np.arange(9.0)}, "no boundary"),
        ("time", {"tensor": values("n 1 x y"), "nu": values("n x y")}, "no time axis"),
    ],
)
def test_what_a_file_does_not_state_cannot_be_included(
    write: Callable[..., Path], include: str, datasets: dict[str, np.ndarray], match: str
) -> None:
    with pytest.raises(SourceError, match=f"a.h5.*{match}"):
        HDF5Source(write("a.h5", datasets), include=include).schema()


def test_a_boundary_type_without_a_number_is_named(tmp_path: Path) -> None:
    side = {"associated_dims": ["y"], "bc_type": "ROBIN"}
    given = {
        "t0_fields/u": (values("n t x y"), flags(True, True, True, True)),
        "boundary_conditions/y/mask": (np.ones(SIZES["y"], bool), side),
    }
    with pytest.raises(SourceError, match=r"ROBIN.*WALL, OPEN, PERIODIC"):
        HDF5Source(well(tmp_path / "w.hdf5", "x y", given), include="boundary").schema()
