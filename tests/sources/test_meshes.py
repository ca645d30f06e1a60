"""Particles, meshes and grids, in the earlier layouts and declared; what does not fit is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr

import stoker
from stoker.errors import ConfigError, SourceError
from stoker.schema import unfolded
from stoker.sources.meshes import MeshSource
from stoker.testing import check_source

SIZES = [(5, 4), (7, 6), (5, 9)]


def particles(path: Path, **more: Any) -> dict[str, np.ndarray]:
    """Write particle sets of three sizes; returns the arrays of the middle one."""
    rng = np.random.default_rng(0)
    middle: dict[str, np.ndarray] = {}
    with h5py.File(path, "w") as file:
        for number, (steps, points) in enumerate(SIZES):
            arrays = {
                "positions": rng.normal(size=(steps, points, 3)),
                "velocities": rng.normal(size=(steps, points, 3)).astype(np.float32),
                "neighbors/edges": rng.integers(0, points, (2 * points, 2)),
                "time": 0.1 * np.arange(steps),
            } | (more if number == 1 else {})
            for name, values in arrays.items():
                if values is not None:
                    file[f"s{number}/{name}"] = values
            file.require_group(f"s{number}/neighbors").attrs["radius"] = 0.3
            middle = arrays if number == 1 else middle
    return middle


def mesh(path: Path, sizes: list[tuple[int, int]] = SIZES) -> None:
    rng = np.random.default_rng(1)
    root = zarr.open(str(path), mode="w")
    for number, (steps, points) in enumerate(sizes):
        group = root.create_group(f"m{number}")
        group.create_array("coords", data=rng.random((points, 2)))
        group.create_array("edges", data=rng.integers(0, points, (points + 1, 2)))
        group.create_array("cells", data=rng.integers(0, points, (points, 3)))
        group.create_array("laplacian/data", data=np.ones(3))
        group.create_array("fields/u", data=rng.normal(size=(steps, points, 1)).astype(np.float32))


def test_particle_sets_of_all_sizes_are_read_with_their_neighbors(tmp_path: Path) -> None:
    wanted = particles(tmp_path / "p.h5")
    source = MeshSource(tmp_path / "p.h5", layout="particles", attributes=["neighbors/radius"])

    check_source(source)
    sample = unfolded(source.read(1), source.schema())

    for name, own in (("positions", "positions"), ("velocities", "velocities"), ("edges", "neighbors/edges")):
        np.testing.assert_allclose(sample[name], wanted[own], rtol=1e-6)
    assert sample["neighbors.radius"] == np.float32(0.3)
    assert "s1" in source.locate(1)


def test_mesh_sets_in_zarr_say_what_is_not_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mesh(tmp_path / "m.zarr")
    source = MeshSource(tmp_path / "m.zarr")

    check_source(source)

    assert set(source.schema()) == {"coords", "edges", "cells", "u", "u.shape"}
    assert unfolded(source.read(2), source.schema())["u"].shape == (5, 9, 1)
    assert "laplacian/data" in caplog.text


def test_a_grid_joins_its_fields_to_channels(tmp_path: Path) -> None:
    root = zarr.open(str(tmp_path / "g.zarr"), mode="w")
    u, v = (np.random.default_rng(k).normal(size=(5, 3, 4, 1 + k)).astype(np.float32) for k in (0, 1))
    for name, values in {"coords": np.zeros((12, 2)), "time": np.arange(5.0)}.items():
        root.create_array(name, data=values)
    root.create_array("fields/u", data=u)
    root.create_array("fields/v", data=v)
    root.attrs.update(dt=0.1, H=3, W=4, kind="x")
    source = MeshSource(tmp_path / "g.zarr", layout="grid")

    check_source(source)

    np.testing.assert_array_equal(source.read(0)["data"], np.concatenate([u, v], -1))
    assert source.read(0)["dt"] == np.float32(0.1)
    root.attrs.update(H=4, W=3)
    with pytest.raises(SourceError, match="H"):
        MeshSource(tmp_path / "g.zarr", layout="grid").schema()


def test_neighbor_lists_become_edges_where_there_are_none(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "p.h5", "w") as file:
        file["positions"] = np.random.default_rng(0).normal(size=(4, 3, 2))
        file["neighbors/indices"] = np.array([1, 2, 0])
        file["neighbors/indptr"] = np.array([0, 2, 2, 3])

    sample = MeshSource(tmp_path / "p.h5", layout="particles").read(0)

    assert sample["edges"].tolist() == [[0, 1], [0, 2], [2, 0]]


def test_declared_fields_are_turned_to_time_points_channels(tmp_path: Path) -> None:
    values = np.random.default_rng(0).normal(size=(6, 3, 5, 2)).astype(np.float32)
    with h5py.File(tmp_path / "p.h5", "w") as file:
        for number, own in enumerate((values, values[:4, :, :3])):
            file[f"r{number}/state/x"] = own.transpose(1, 2, 0, 3)
            file[f"r{number}/pairs"] = np.array([[0, 1], [1, 2]])
    fields = {"x": "state/x: d t p c", "edges": "pairs: i e"}
    source = MeshSource(tmp_path / "p.h5", fields=fields)

    check_source(source)
    sample = unfolded(source.read(1), source.schema())

    np.testing.assert_array_equal(sample["x"], values[:4, :, :3].transpose(2, 0, 1, 3))
    assert sample["edges"].tolist() == [[0, 1], [1, 2]]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"velocities": np.zeros((7, 5, 3), np.float32)}, r"6 points.*velocities.*5"),
        ({"velocities": np.zeros((6, 6, 3), np.float32)}, r"7 steps.*velocities.*6"),
        ({"neighbors/edges": np.array([[0, 1], [2, 6]])}, r"row 1 .*\[2, 6\].*6"),
        ({"neighbors/edges": np.array([[0, -1]])}, r"\[0, -1\]"),
        ({"neighbors/edges": np.array([[0, 1, 2], [1, 2, 3]])}, r"\(2, 3\)"),
        ({"positions": np.zeros((7, 3, 6))}, r"\(7, 3, 6\)"),
        ({"positions": np.zeros((7, 0, 3)), "velocities": np.zeros((7, 0, 3), np.float32)}, "no points"),
        ({"velocities": np.zeros((7, 6), np.float32)}, r"'velocities' has shape \(7, 6\).*t p d with \(3,\)"),
        ({"velocities": None}, "velocities"),
    ],
)
def test_a_sample_that_does_not_fit_is_refused_and_the_others_are_kept(
    tmp_path: Path, more: dict[str, Any], says: str
) -> None:
    particles(tmp_path / "p.h5", **more)
    source = MeshSource(tmp_path / "p.h5", layout="particles")

    with pytest.raises(SourceError, match=says) as caught:
        source.read(1)
    assert "s1" in str(caught.value)
    source.read(2)


def test_a_set_of_another_layout_is_refused(tmp_path: Path) -> None:
    particles(tmp_path / "p.h5")

    with pytest.raises(SourceError, match="coords"):
        len(MeshSource(tmp_path / "p.h5", layout="mesh"))
    with pytest.raises(ConfigError, match="x y"):
        MeshSource(tmp_path / "p.h5", fields={"u": "x y"})


def test_an_array_that_was_never_written_is_not_allocated(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "p.h5", "w") as file:
        file.create_dataset("positions", shape=(10**6, 10**6, 3), chunks=(1, 10, 3), dtype="f4")

    with pytest.raises(SourceError, match="positions"):
        MeshSource(tmp_path / "p.h5", layout="particles").read(0)


def test_records_keep_their_axes_and_a_bad_sample_is_quarantined(tmp_path: Path) -> None:
    wanted = particles(tmp_path / "p.h5")
    with h5py.File(tmp_path / "p.h5", "a") as file:
        file["s2/neighbors/edges"][0] = [0, 99]
    source = MeshSource(tmp_path / "p.h5", layout="particles")

    cache = stoker.precompute(source, None, tmp_path / "c", name="p", workers=0, max_quarantined=0.5)

    assert cache[1]["positions"].shape == (7, 6, 3)
    np.testing.assert_allclose(cache[1]["positions"], wanted["positions"], rtol=1e-6)
    assert "99" in cache.quarantined[2].error
    assert not cache.verify().bad
    assert cache.recipe.entries["format"] == 2
    again = stoker.precompute(source, None, tmp_path / "c", name="p", workers=0, max_quarantined=0.5)
    assert again.fingerprint == cache.fingerprint
