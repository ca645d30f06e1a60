"""A loader that evaluates under `torch.inference_mode` and trains outside of it, in turns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

import stoker
from tests.loader.caches import trajectories, write_cache

WIDTH = 4_000


class Wide(Dataset[Tensor]):
    """Item i is full of i: 16 kB, so that batches differ in how their memory is made."""

    def __len__(self) -> int:
        return 800

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((WIDTH,), float(index))


CONVERSIONS = [
    pytest.param({}, id="plain"),
    pytest.param({"dtype": "bfloat16"}, id="cast"),
    pytest.param({"normalize": {"data": stoker.loader.Normalization(mean=0.0, std=1.0)}}, id="normalized"),
]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> stoker.Cache:
    return stoker.precompute(
        stoker.TorchSource(Wide()), None, tmp_path_factory.mktemp("cache"), name="wide", workers=0
    )


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("batch_size", [2, 80, 400, 300], ids=["fresh", "reused", "threads", "short_last"])
@pytest.mark.parametrize("settings", CONVERSIONS)
def test_modes_may_take_turns_on_one_loader(
    cache: stoker.Cache, tier: str, batch_size: int, settings: dict[str, Any]
) -> None:
    loader = stoker.Loader(cache, batch_size, tier=tier, **{"shuffle": True, **settings})
    weight = torch.ones(WIDTH, requires_grad=True)

    for _ in range(2):
        with torch.inference_mode():
            assert sum(int(batch["data"][:, 0].float().sum()) for batch in loader) == pytest.approx(
                799 * 400, rel=1e-3
            )
        for batch in loader:
            (batch["data"].float() @ weight).sum().backward()

    assert weight.grad is not None
    assert float(weight.grad[0]) == pytest.approx(2 * 799 * 400, rel=1e-3)


@pytest.mark.parametrize(
    ("stored", "settings"),
    [
        pytest.param(None, {}, id="copied"),
        pytest.param(None, {"dtype": "float64"}, id="cast"),
        pytest.param(
            None, {"normalize": {"data": stoker.loader.Normalization(mean=0.0, std=1.0)}}, id="normalized"
        ),
        pytest.param("int8", {}, id="packed"),
    ],
)
def test_modes_may_take_turns_on_fixed_addresses(
    tmp_path: Path, stored: Any, settings: dict[str, Any]
) -> None:
    source = stoker.TorchSource(Wide())
    cache = stoker.precompute(source, None, tmp_path, name="wide", workers=0, dtype=stored)
    loader = stoker.Loader(cache, 80, tier="device", static=True, **{"shuffle": True, **settings})
    weight = torch.ones(WIDTH, requires_grad=True, dtype=getattr(torch, settings.get("dtype", "float32")))

    for _ in range(2):
        with torch.inference_mode():
            assert sum(float(batch["data"][:, 0].sum()) for batch in loader) == pytest.approx(799 * 400)
        numbers = 0
        for batch in loader:
            (batch["data"] @ weight).sum().backward()
            numbers += int(batch["index"].sum())
        assert numbers == 799 * 400

    assert weight.grad is not None
    assert float(weight.grad[0]) == pytest.approx(2 * 799 * 400)


@pytest.mark.parametrize("windows", [None, stoker.Windows(field="latent")])
def test_masks_and_tasks_of_a_mixture_may_be_used_in_training(
    tmp_path: Path, windows: stoker.Windows | None
) -> None:
    """They are kept from the first batch of a size on, and handed out again."""
    fields = trajectories()
    one = write_cache(tmp_path, fields, timed=("latent", "time"), name="one")
    del fields["bc"]
    other = write_cache(tmp_path, fields, timed=("latent", "time"), name="other")
    mixture = stoker.Mixture([one, other], 8, windows=windows, mix="batch")
    embedding = torch.nn.Embedding(2, 3)

    def parts(batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        return (batch["tasks"], batch["mask"]) if windows is None else (batch.tasks, batch.mask)

    with torch.inference_mode():
        for name in ("one", "other"):
            assert list(mixture.only(name))
    for batch in mixture:
        tasks, mask = parts(batch)
        weight = torch.ones(3, requires_grad=True)
        (embedding(tasks).sum() + (weight * mask["bc"]).sum()).backward()
