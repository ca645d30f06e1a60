"""One step: what moves, what is refused, and that all trainings take the same one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stoker.errors import DivergedError
from stoker.train.config import TrainConfig
from stoker.train.loop import Losses, Stepper
from stoker.train.state import make_optimizer

INDEX = torch.tensor([[7, 0], [9, 2]])


def linear(weight: float) -> nn.Linear:
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, weight)
    return model


def stepper(*models: nn.Linear, grad_clip: float | None = None) -> Stepper:
    """The loss of an example is the sum of what all models make of it."""

    def losses(batch: torch.Tensor) -> Losses:
        return Losses(torch.stack([model(batch) for model in models]).sum((0, 2)), INDEX)

    return Stepper(
        losses=losses,
        models=models,
        optimizer=make_optimizer(nn.ModuleList(models), TrainConfig()),
        grad_clip=grad_clip,
        device=torch.device("cpu"),
    )


def test_a_step_gives_losses_their_mean_and_the_norm_of_all_gradients_before_clipping() -> None:
    one, other = linear(2.0), linear(3.0)

    done = stepper(one, other, grad_clip=0.5).step(torch.tensor([[1.0], [3.0]]), rate=0.1, epoch=1, number=1)

    assert done.losses.tolist() == [5.0, 15.0]
    assert float(done.mean) == 10.0
    assert float(done.norm) == pytest.approx(8**0.5)  # 2 of each model
    assert not done.losses.requires_grad


def test_each_model_is_clipped_on_its_own() -> None:
    small, large = linear(1.0), linear(1.0)
    own = stepper(small, large, grad_clip=1.0)

    def losses(batch: torch.Tensor) -> Losses:
        return Losses((0.5 * small(batch) + 1000 * large(batch))[:, 0], INDEX)

    own.losses = losses
    own.step(torch.ones(2, 1), rate=0.1, epoch=1, number=1)

    assert small.weight.grad is not None
    assert large.weight.grad is not None
    assert float(small.weight.grad) == pytest.approx(0.5), "the other one's gradient must not shorten it"
    assert float(large.weight.grad) == pytest.approx(1.0)


def test_a_rate_holds_for_its_step_alone() -> None:
    model = linear(1.0)
    own = stepper(model)

    own.step(torch.ones(2, 1), rate=0.0, epoch=1, number=1)
    assert model.weight.item() == 1.0
    own.step(torch.ones(2, 1), rate=0.5, epoch=1, number=2)
    assert model.weight.item() == pytest.approx(0.5, abs=1e-3)


def test_a_loss_that_is_not_finite_moves_nothing_and_names_step_and_sample() -> None:
    model = linear(1.0)

    with pytest.raises(DivergedError, match=r"epoch 4, step 12, first at sample 9, time step 2"):
        stepper(model).step(torch.tensor([[1.0], [float("nan")]]), rate=0.5, epoch=4, number=12)

    assert model.weight.item() == 1.0
