"""The network of radio rows: what it may look at, and that its metres are metres."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from stoker.extras.radio.demo import (
    TriangulationModel,
    TriangulationShape,
    haversine_m,
    position_errors,
    position_losses,
)
from stoker.run.fitting import save_model
from stoker.sources.sql.values import metres_from

STATISTICS = {"target": {"mean": [1_000.0, -500.0], "deviation": [30_000.0, 20_000.0]}}


@pytest.fixture
def model() -> TriangulationModel:
    torch.manual_seed(0)
    made = TriangulationModel(dropout=0.2)
    made.set_statistics(STATISTICS)
    return made.eval()


def rows(count: int = 5) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    mask = torch.rand(count, 7, generator=draw) > 0.6
    mask[:, 0] = False
    return {
        "receivers": torch.randn(count, 7, 6, generator=draw),
        "signal_mask": mask,
        "target": torch.randn(count, 2, generator=draw),
        "centroid": torch.tensor([45.0, 8.0]).double().expand(count, 2),
    }


def test_what_hears_nothing_and_the_order_of_receivers_change_nothing(model: TriangulationModel) -> None:
    batch = rows()
    found, spread = model(batch["receivers"], batch["signal_mask"])
    noisy = torch.where(batch["signal_mask"][..., None], 1e3, batch["receivers"])
    order = torch.randperm(7, generator=torch.Generator().manual_seed(2))

    assert torch.allclose(model(noisy, batch["signal_mask"])[0], found, atol=1e-6)
    turned = model(batch["receivers"][:, order], batch["signal_mask"][:, order])
    assert torch.allclose(turned[0], found, atol=1e-5)
    assert torch.allclose(turned[1], spread, atol=1e-5)


def test_a_place_and_its_metres_are_those_of_the_source(model: TriangulationModel) -> None:
    north, east = metres_from(np.array([[45.0, 8.0]]), np.array([[45.3]]), np.array([[7.6]]))
    mean, deviation = (torch.tensor(STATISTICS["target"][name]) for name in ("mean", "deviation"))
    standard = (torch.tensor([[north.item(), east.item()]]) - mean) / deviation

    place = model.place(standard, torch.tensor([[45.0, 8.0]]))

    assert place[0].tolist() == pytest.approx([45.3, 7.6], abs=1e-5)
    assert float(haversine_m(torch.tensor([45.0, 179.9]), torch.tensor([45.0, -179.9]))) == pytest.approx(
        0.2 * 111_195 * math.cos(math.radians(45)), rel=1e-4
    )


def test_errors_are_over_all_rows_not_a_mean_of_batches(model: TriangulationModel) -> None:
    batch = rows(9)
    parts = [{name: value[a:b] for name, value in batch.items()} for a, b in ((0, 7), (7, 9))]
    with torch.no_grad():
        expected, _ = model(batch["receivers"], batch["signal_mask"])
    far = haversine_m(
        model.place(expected, batch["centroid"]), model.place(batch["target"], batch["centroid"])
    )

    found = position_errors(model, parts)

    assert found.rmse_m == pytest.approx(float(far.square().mean().sqrt()))
    assert found.p50_m == pytest.approx(float(far.median()))
    assert found.mean_m <= found.rmse_m
    assert found.loss == pytest.approx(float(position_losses(model, batch).detach().mean()), rel=1e-5)


def test_the_loss_is_least_where_the_spread_is_that_of_the_errors() -> None:
    """Of 2-D errors with mean square 2 s, the log variance log(s) is best: no other may be cheaper."""

    class Told(torch.nn.Module):
        def __init__(self, spread: float) -> None:
            super().__init__()
            self.spread = spread

        def forward(self, receivers: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.zeros(len(receivers), 2), torch.full((len(receivers), 1), math.log(self.spread))

    batch = rows(4000)
    losses = {spread: float(position_losses(Told(spread), batch).mean()) for spread in (0.5, 1.0, 2.0)}

    assert min(losses, key=losses.__getitem__) == 1.0


def test_weights_and_what_to_know_of_them_are_one_file(model: TriangulationModel, tmp_path: Path) -> None:
    save_model(tmp_path / "new" / "model.safetensors", model.state_dict(), {"statistics": STATISTICS})

    with safe_open(tmp_path / "new" / "model.safetensors", "pt") as file:
        assert json.loads(file.metadata()["statistics"]) == STATISTICS
        assert file.get_tensor("deviation").tolist() == [30_000.0, 20_000.0]
    assert sum(p.numel() for p in TriangulationModel(TriangulationShape()).parameters()) > 10_000


def test_equal_weights_and_facts_are_equal_bytes(model: TriangulationModel, tmp_path: Path) -> None:
    facts = {"statistics": STATISTICS, "config": {"epochs": 3}, "caches": {"train": "é"}, "kind": "radio"}
    files = [tmp_path / f"{number}.safetensors" for number in range(8)]
    for path in files:
        save_model(path, model.state_dict(), facts)

    assert len({path.read_bytes() for path in files}) == 1
    with safe_open(files[0], "pt") as file:
        assert {name: json.loads(text) for name, text in file.metadata().items()} == facts
        saved = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    assert saved.keys() == model.state_dict().keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in model.state_dict().items())
