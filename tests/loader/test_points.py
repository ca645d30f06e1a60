"""Whole trajectories and windows of points: the same values from every tier, in each form."""

from __future__ import annotations

from typing import Any

import h5py
import numpy as np
import pytest
import torch
from torch import Tensor

import stoker
from stoker.errors import ConfigError
from stoker.loader import Loader, Mixture, Pad, PointBatch, Windows
from stoker.sources.meshes import MeshSource
from stoker.store import Cache

FORMS = ("list", "pad", "pack")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    """Five particle sets of differing steps and points, in two shards' worth of one file."""
    folder = tmp_path_factory.mktemp("points")
    rng = np.random.default_rng(0)
    with h5py.File(folder / "p.h5", "w") as file:
        for number, (steps, points) in enumerate([(5, 4), (7, 6), (5, 9), (9, 3), (4, 1)]):
            file[f"s{number}/positions"] = rng.normal(size=(steps, points, 2)).astype(np.float32)
            file[f"s{number}/velocities"] = rng.normal(size=(steps, points, 2)).astype(np.float32)
            file[f"s{number}/neighbors/edges"] = rng.integers(0, points, (points + 1, 2))
            file[f"s{number}/time"] = np.arange(steps, dtype=np.float32)
            file[f"s{number}"].attrs["kappa"] = float(number)
    source = MeshSource(folder / "p.h5", layout="particles", attributes=["kappa"])
    return stoker.precompute(source, None, folder / "c", name="p", workers=0)


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for name in sorted(value) for tensor in tensors(value[name])]
    return [t for item in value for t in tensors(item)] if isinstance(value, list | tuple) else []


@pytest.mark.parametrize("ragged", FORMS)
@pytest.mark.parametrize("windows", [None, Windows(stride=2, horizon=2, field="velocities")])
def test_every_tier_and_every_resumed_pass_gives_the_same_values(
    cache: Cache, ragged: str, windows: Windows | None
) -> None:
    def batches(tier: str) -> list[list[Tensor]]:
        return [
            tensors(b)
            for b in Loader(cache, 3, windows=windows, ragged=ragged, tier=tier, seed=3, shuffle=True)
        ]

    disk = batches("disk")
    loader = Loader(cache, 3, windows=windows, ragged=ragged, tier="host", seed=3, shuffle=True)
    next(iter(loader))
    resumed = Loader(cache, 3, windows=windows, ragged=ragged, tier="disk", seed=3, shuffle=True)
    resumed.load_state_dict(loader.state_dict())

    for other in (batches("host"), [disk[0], *(tensors(b) for b in resumed)]):
        assert len(other) == len(disk)
        for one, two in zip(disk, other, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_windows_are_those_of_the_records(cache: Cache) -> None:
    loader = Loader(cache, 2, windows=Windows(stride=2, horizon=2, field="positions"), shuffle=False)
    seen = 0
    for batch in loader:
        assert isinstance(batch, PointBatch)
        for place, (number, start) in enumerate(batch.index.tolist()):
            record = cache[number]
            for found, at in ((batch.z0, 0), (batch.z1, 2)):
                assert torch.equal(found[place], record["positions"][start + at])
            assert torch.equal(batch.future[place], record["positions"][start + 4][None])
            assert torch.equal(batch.nodes["velocities1"][place], record["velocities"][start + 2])
            assert torch.equal(batch.nodes["edges"][place], record["edges"])
            assert batch.cond["time"][place].item() == start
            assert batch.cond["kappa"][place].item() == number
            seen += 1
    assert seen == 1 + 3 + 1 + 5


def test_packed_windows_number_the_points_of_the_batch(cache: Cache) -> None:
    windows = Windows(horizon=2, field="positions")
    listed = next(iter(Loader(cache, 6, windows=windows, seed=1, shuffle=True)))
    batch = next(iter(Loader(cache, 6, windows=windows, ragged="pack", seed=1, shuffle=True)))
    offsets, edges = batch.nodes["points.offsets"], batch.nodes["edges.offsets"]

    assert torch.equal(batch.z0, torch.cat(listed.z0))
    assert torch.equal(batch.future, torch.cat(listed.future, 1))
    for place, own in enumerate(listed.nodes["edges"]):
        shifted = batch.nodes["edges"][edges[place] : edges[place + 1]]
        assert torch.equal(batch.z0[shifted], listed.z0[place][own])  # the same points, not just valid ones
        assert bool((batch.nodes["points.batch"][shifted] == place).all())
        assert torch.equal(batch.z0[offsets[place] : offsets[place + 1]], listed.z0[place])


def test_padded_windows_and_records_tell_what_is_real(cache: Cache) -> None:
    windows = Windows(horizon=3, field="positions")
    listed = next(iter(Loader(cache, 6, windows=windows, seed=1, shuffle=True)))
    batch = next(
        iter(Loader(cache, 6, windows=windows, ragged=Pad(multiple=4, value=-1.0), seed=1, shuffle=True))
    )
    whole = next(iter(Loader(cache, 5, ragged="pad", shuffle=False)))

    assert batch.z0.shape[1] % 4 == 0
    assert torch.equal(batch.z0[batch.nodes["points.mask"]], torch.cat(listed.z0))
    assert bool((batch.z0[~batch.nodes["points.mask"]] == -1).all())
    for place, own in enumerate(listed.future):
        assert torch.equal(batch.future[place, :, : own.shape[1]], own)
    assert whole["positions"].shape == (5, 9, 9, 2)
    assert whole["positions.shape"].tolist() == [[5, 4], [7, 6], [5, 9], [9, 3], [4, 1]]
    assert torch.equal(whole["positions"][1, :7, :6], cache[1]["positions"])
    assert whole["positions.mask"].sum((1, 2)).tolist() == [20, 42, 45, 27, 4]


def test_packed_records_keep_their_sizes_and_shift_their_edges(cache: Cache) -> None:
    batch = next(iter(Loader(cache, 5, ragged="pack", shuffle=False)))

    begin, end = batch["positions.offsets"][1:3].tolist()
    assert torch.equal(batch["positions"][begin:end].view(7, 6, 2), cache[1]["positions"])
    begin, end = batch["edges.offsets"][2:4].tolist()[0], batch["edges.offsets"][3].item()
    assert torch.equal(batch["edges"][begin:end] - (4 + 6), cache[2]["edges"])


def test_what_has_no_meaning_is_refused(cache: Cache) -> None:
    windows = Windows(field="positions")
    with pytest.raises(ConfigError, match="positions, time, velocities"):
        Loader(cache, 2, windows=Windows(), shuffle=True)
    with pytest.raises(ConfigError, match="Pad"):
        Loader(cache, 2, windows=windows, ragged=Pad(to=8), shuffle=True)
    with pytest.raises(ConfigError, match="static"):
        Loader(cache, 2, windows=windows, static=True, tier="device", shuffle=True)
    with pytest.raises(ConfigError, match="points"):
        Mixture(
            [
                Loader(cache, 2, windows=windows, shuffle=True),
                Loader(cache, 2, windows=windows, shuffle=True),
            ],
            names=["a", "b"],
        )
