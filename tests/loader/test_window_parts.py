"""Drawn strides and horizons, several state fields, and time steps, against slices of the stored arrays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from stoker.errors import ConfigError
from stoker.loader import Loader, Windows
from stoker.loader.mixture import Mixture
from stoker.store import Cache
from stoker.transforms import Noise
from tests.loader.caches import write_cache
from tests.loader.layouts import same

COUNT, STEPS = 6, 12
TIMED = ("latent", "speed", "time")


@pytest.fixture(scope="module")
def fields() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    times = torch.rand(COUNT, STEPS, generator=generator, dtype=torch.float64).cumsum(1)
    return {
        "latent": torch.rand(COUNT, STEPS, 2, 3, generator=generator),
        "speed": torch.rand(COUNT, STEPS, 2, 1, generator=generator),
        "time": times,
        "nu": torch.rand(COUNT, generator=generator),
    }


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory, fields: dict[str, torch.Tensor]) -> Cache:
    return write_cache(tmp_path_factory.mktemp("parts"), fields, timed=TIMED, shards=(4, 2))


def test_each_example_has_the_states_of_its_own_stride_and_horizon(
    cache: Cache, fields: dict[str, torch.Tensor]
) -> None:
    windows = Windows(field="latent", stride=(2, 4), horizon=(1, 2))
    seen: set[tuple[int, int]] = set()
    for batch in Loader(cache, 5, windows=windows, tier="host", shuffle=True):
        for row, (number, start) in enumerate(batch.index.tolist()):
            stride = int(batch.cond["stride"][row])
            horizon = 1 + int(batch.cond["future_mask"][row].sum())
            seen.add((stride, horizon))
            latent, time = fields["latent"][number], fields["time"][number]
            assert torch.equal(batch.z0[row], latent[start])
            assert torch.equal(batch.z1[row], latent[start + stride])
            expected = latent[start + 2 * stride] * (horizon == 2)
            assert torch.equal(batch.future[row, 0], expected)
            assert batch.cond["time"][row] == time[start]
            assert batch.cond["dt"][row] == time[start + stride] - time[start]
    assert seen == {(stride, horizon) for stride in (2, 3, 4) for horizon in (1, 2)}


def test_strides_change_with_epoch_and_seed_and_with_nothing_else(cache: Cache) -> None:
    windows = Windows(field="latent", stride=(1, 4))

    def batches(epoch: int, tier: str = "host", **more: Any) -> list[Any]:
        loader = Loader(cache, 5, windows=windows, tier=tier, shuffle=False, **more)
        loader.set_epoch(epoch)
        return [batch._replace(position=(0, 0)) for batch in loader]

    def strides(found: list[Any]) -> list[int]:
        return torch.cat([batch.cond["stride"] for batch in found]).flatten().tolist()

    first = batches(0)
    for other in (batches(0, "disk"), batches(0, "device")):
        assert all(same(a, b) for a, b in zip(first, other, strict=True))
    assert strides(first) != strides(batches(1)) != strides(batches(0, seed=1)) != strides(first)


def test_fixed_addresses_hold_drawn_windows_too(cache: Cache) -> None:
    windows = Windows(field="latent", stride=(1, 4), horizon=(1, 2))
    loader = Loader(cache, 5, windows=windows, tier="device", static=True, shuffle=True)
    expected = [b.z1.clone() for b in Loader(cache, 5, windows=windows, drop_last=True, shuffle=True)]

    addresses = set[tuple[int, ...]]()
    for batch, z1 in zip(loader, expected, strict=True):
        assert torch.equal(batch.z1, z1)
        tensors = [batch.z1, batch.future, *batch.cond.values()]
        addresses.add(tuple(tensor.data_ptr() for tensor in tensors))
    assert len(addresses) == 1


def test_several_state_fields_are_dicts_in_the_same_order(
    cache: Cache, fields: dict[str, torch.Tensor]
) -> None:
    windows = Windows(field=("speed", "latent"), stride=2, horizon=2)
    alone = Loader(cache, 5, windows=Windows(field="latent", stride=2, horizon=2), shuffle=True)

    for batch, one in zip(Loader(cache, 5, windows=windows, shuffle=True), alone, strict=True):
        assert torch.equal(batch.index, one.index)
        assert list(batch.z0) == ["speed", "latent"]
        assert set(batch.cond) == {"time", "dt", "nu"}
        for name in ("z0", "z1", "future"):
            assert torch.equal(getattr(batch, name)["latent"], getattr(one, name))
        number, start = batch.index[0].tolist()
        assert torch.equal(batch.z1["speed"][0], fields["speed"][number, start + 2])


@pytest.mark.parametrize(("stride", "times"), [(1, 1.0), (3, 3.0), ((3, 3), 3.0)])
def test_a_stored_time_step_is_multiplied_by_the_stride(tmp_path: Path, stride: Any, times: float) -> None:
    steps = torch.tensor([0.5, 0.25])
    cache = write_cache(tmp_path, {"latent": torch.rand(2, 5, 4), "dt": steps}, timed=("latent",))

    for batch in Loader(cache, 2, windows=Windows(stride=stride), shuffle=True):
        expected = [float(steps[number]) * times for number in batch.index[:, 0].tolist()]
        assert batch.cond["dt"].shape == (len(expected), 1)
        assert batch.cond["dt"].flatten().tolist() == expected


@pytest.mark.parametrize(
    "wrong", [{"stride": (4, 1)}, {"stride": (0, 2)}, {"horizon": (1, 2, 3)}, {"field": ("a", "a")}]
)
def test_ranges_and_names_that_mean_nothing_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Windows(**wrong)


def test_what_takes_one_state_refuses_several_with_their_names(cache: Cache) -> None:
    windows = Windows(field=("speed", "latent"))

    with pytest.raises(ConfigError, match="speed, latent"):
        next(iter(Loader(cache, 5, windows=windows, transforms=[Noise(0.1)], shuffle=True)))
    with pytest.raises(ConfigError, match="speed, latent"):
        Mixture([cache, cache], 5, names=["a", "b"], windows=windows)
    with pytest.raises(ConfigError, match="'density'"):
        Loader(cache, 5, windows=Windows(field=("speed", "density")), shuffle=True)


def test_a_mask_of_horizons_is_no_condition_of_a_mixture(cache: Cache) -> None:
    windows = Windows(field="latent", horizon=(1, 3))
    mixture = Mixture([cache, cache], 4, names=["a", "b"], mix="batch", windows=windows)

    batch = next(iter(mixture))

    assert batch.cond["future_mask"].shape == (4, 2, 1)
    assert "future_mask" not in batch.mask
