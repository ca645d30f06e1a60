from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stoker.errors import ConfigError
from stoker.loader import Loader, Normalization, Windows
from stoker.loader.outputs import find_conversion
from stoker.schema import Field
from stoker.store import Cache
from tests.loader.caches import trajectories, write_cache

COUNT, STEPS = 20, 9
LATENT = Normalization(mean=[0.1, -0.2, 0.3, 0.0, 1.0, 0.5], std=[1.0, 2.0, 0.5, 1.5, 3.0, 0.7], axis=-1)
IMAGE = Normalization(mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.25), divisor=255)


@pytest.fixture(scope="module")
def fields() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    image = torch.randint(0, 256, (COUNT, 3, 10, 12), generator=generator, dtype=torch.uint8)
    return {**trajectories(COUNT, STEPS), "image": image}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory, fields: dict[str, Any]) -> Cache:
    return write_cache(tmp_path_factory.mktemp("fused"), fields, timed=("latent", "time"), shards=(5, 8))


def normalized(values: torch.Tensor, how: Normalization, dtype: torch.dtype) -> torch.Tensor:
    what = find_conversion(
        Field(shape=tuple(values.shape[1:]), dtype=str(values.dtype)[6:]), how, str(dtype)[6:]
    )
    assert what is not None
    shape = (-1, 1, 1) if how.axis == -3 else (-1,)
    scale, shift = (torch.tensor(v).view(shape) for v in (what.scale, what.shift))
    return (values.float() * scale + shift).to(dtype)


@pytest.mark.parametrize("tier", ["host", "disk", "auto", "device"])
def test_records_are_normalised_on_every_tier_alike(cache: Cache, fields: dict[str, Any], tier: str) -> None:
    how = {"image": IMAGE, "latent": LATENT, "nu": Normalization(mean=0.5, std=2.0, axis=-1)}

    for batch in Loader(cache, 7, tier=tier, normalize=how, dtype="bfloat16", seed=4, shuffle=True):
        own = batch["index"]
        assert torch.equal(batch["image"], normalized(fields["image"][own], IMAGE, torch.bfloat16))
        assert torch.equal(batch["latent"], normalized(fields["latent"][own], LATENT, torch.bfloat16))
        assert torch.equal(batch["nu"], normalized(fields["nu"][own], how["nu"], torch.bfloat16))
        assert torch.equal(batch["bc"], fields["bc"][own].bfloat16())


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_windows_are_normalised_in_every_step(cache: Cache, fields: dict[str, Any], tier: str) -> None:
    windows = Windows(stride=2, horizon=3, field="latent")
    expected = normalized(fields["latent"], LATENT, torch.float16)

    for batch in Loader(
        cache, 16, tier=tier, windows=windows, normalize={"latent": LATENT}, seed=4, shuffle=True
    ):
        numbers, starts = batch.index.unbind(1)
        assert torch.equal(batch.z0, expected[numbers, starts])
        assert torch.equal(batch.z1, expected[numbers, starts + 2])
        assert torch.equal(batch.future, torch.stack([expected[numbers, starts + k] for k in (4, 6)], dim=1))


def test_conditions_are_normalised_before_they_are_flattened(cache: Cache, fields: dict[str, Any]) -> None:
    expected = normalized(fields["image"], IMAGE, torch.float32).flatten(1)

    for batch in Loader(cache, 16, windows=Windows(field="latent"), normalize={"image": IMAGE}, shuffle=True):
        assert torch.equal(batch.cond["image"], expected[batch.index[:, 0]])


@pytest.mark.parametrize("tier", ["host", "disk", "auto"])
def test_records_of_varying_length_are_normalised_once(tmp_path: Path, tier: str) -> None:
    generator = torch.Generator().manual_seed(2)
    ragged = [torch.randn((n, 4, 6), generator=generator).half() for n in (3, 9, 1, 5, 2, 7)]
    cache = write_cache(tmp_path, {"latent": ragged}, timed=("latent",), shards=(2,))

    for _ in range(3):
        for batch in Loader(cache, 4, tier=tier, normalize={"latent": LATENT}, shuffle=True):
            for number, values in zip(batch["index"].tolist(), batch["latent"], strict=True):
                assert torch.equal(values, normalized(ragged[number], LATENT, torch.float16))


def test_whole_numbers_become_float32_and_floats_keep_their_dtype(cache: Cache) -> None:
    batch = next(iter(Loader(cache, 4, normalize={"image": IMAGE, "latent": LATENT}, shuffle=True)))

    assert batch["image"].dtype == torch.float32
    assert batch["latent"].dtype == torch.float16
    assert batch["bc"].dtype == torch.float32


def test_the_meter_counts_what_is_handed_out(cache: Cache) -> None:
    from stoker.monitor.meter import StallMeter

    meter = StallMeter()
    batches = list(Loader(cache, 10, normalize={"image": IMAGE}, meter=meter, shuffle=True))

    handed = sum(v.nbytes for batch in batches for name, v in batch.items() if name != "index")
    assert meter.epoch().bytes == handed


@pytest.mark.parametrize(
    ("how", "said"),
    [
        pytest.param({"picture": IMAGE}, "normalize names ['picture']", id="unknown-field"),
        pytest.param({"image": (0.5, 0.2)}, "Expected fields and how to", id="not-a-normalize"),
        pytest.param(IMAGE, "Expected fields and how to", id="no-field"),
        pytest.param({"latent": IMAGE}, "3 means for axis -3", id="no-such-axis"),
        pytest.param({"image": LATENT}, "6 means for axis -1", id="other-number-of-channels"),
    ],
)
def test_what_does_not_fit_the_cache_is_refused(cache: Cache, how: Any, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        Loader(cache, 4, normalize=how, shuffle=True)

    assert said in str(error.value)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"mean": 0.0, "std": 0.0}, "none may be 0"),
        ({"mean": (0.1, 0.2), "std": (1.0, 2.0, 3.0)}, "2 means and 3 deviations"),
        ({"mean": 0.0, "std": 1.0, "axis": 0}, "counts from the front"),
        ({"mean": "much", "std": 1.0}, "Expected a number"),
        ({"mean": float("nan"), "std": 1.0}, "Expected a number"),
        ({"mean": 0.0, "std": 1.0, "divisor": 0}, "none may be 0"),
    ],
)
def test_numbers_that_normalise_nothing_are_refused(how: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Normalization(**how)


def test_statistics_may_be_arrays_and_tensors() -> None:
    plain = Normalization(mean=[0.5, 0.25], std=[2.0, 4.0])

    assert Normalization(mean=np.array([0.5, 0.25]), std=torch.tensor([2.0, 4.0])) == plain  # type: ignore[arg-type]
    assert Normalization(mean=np.float32(0.5), std=torch.tensor(2.0)) == Normalization(mean=0.5, std=2.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packed_fields_are_normalised_after_they_are_unpacked(
    tmp_path: Path, fields: dict[str, Any], dtype: str, tier: str
) -> None:
    cache = write_cache(tmp_path, {"latent": fields["latent"]}, timed=("latent",), dtype="int8")
    unpacked = torch.stack([cache[number]["latent"] for number in range(COUNT)])
    expected = normalized(unpacked, LATENT, getattr(torch, dtype))

    for batch in Loader(cache, 7, tier=tier, normalize={"latent": LATENT}, dtype=dtype, shuffle=True):
        assert torch.equal(batch["latent"], expected[batch["index"]])
    for batch in Loader(
        cache, 7, tier=tier, windows=Windows(), normalize={"latent": LATENT}, dtype=dtype, shuffle=True
    ):
        assert torch.equal(batch.z1, expected[batch.index[:, 0], batch.index[:, 1] + 1])
