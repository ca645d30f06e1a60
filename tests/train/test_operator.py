from __future__ import annotations

import torch

from stoker.train.objective import StageLoss
from stoker.train.operator import LatentOperator, OperatorShape, Scales

SHAPE = OperatorShape(tokens=4, dim=3, cond=2, width=16, depth=2, heads=2)


def test_an_untrained_operator_is_the_persistence_guess() -> None:
    z0 = torch.randn(5, 4, 3)

    assert torch.equal(LatentOperator(SHAPE)(z0, torch.randn(5, 2)), z0)


def test_the_seed_decides_the_weights_and_the_global_random_state_is_left_alone() -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)

    first, again, other = (LatentOperator(SHAPE, seed=seed).state_dict() for seed in (5, 5, 6))

    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["enter.weight"], other["enter.weight"])


def trained_a_little(shape: OperatorShape) -> LatentOperator:
    model = LatentOperator(shape)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    return model


def test_the_condition_changes_the_step() -> None:
    model, z0 = trained_a_little(SHAPE), torch.randn(1, 4, 3)

    assert not torch.allclose(model(z0, torch.zeros(1, 2)), model(z0, torch.ones(1, 2)), atol=1e-4)


def test_works_without_a_condition() -> None:
    shape = OperatorShape(tokens=4, dim=3, cond=0, width=16, depth=1, heads=2)

    assert LatentOperator(shape)(torch.randn(2, 4, 3), torch.empty(2, 0)).shape == (2, 4, 3)


def test_every_weight_gets_a_gradient_after_the_first_steps() -> None:
    model = trained_a_little(SHAPE)

    StageLoss(model)(torch.randn(4, 4, 3), torch.randn(4, 2, 4, 3), torch.randn(4, 2)).mean().backward()

    assert all(p.grad is not None and bool(p.grad.any()) for p in model.parameters())


def test_errors_are_in_usual_steps_and_unroll_over_all_states() -> None:
    model = LatentOperator(SHAPE)
    scales = Scales(
        z_mean=torch.zeros(3), z_std=torch.ones(3), step_std=torch.full((3,), 0.5),
        cond_mean=torch.zeros(2), cond_std=torch.ones(2),
    )  # fmt: skip
    model.set_scales(scales)
    z0 = torch.zeros(1, 4, 3)
    states = torch.stack([torch.full((1, 4, 3), 1.0), torch.full((1, 4, 3), 2.0)], dim=1)

    errors = StageLoss(model)(z0, states, torch.zeros(1, 2))

    assert errors.tolist() == [(2.0**2 + 4.0**2) / 2]  # the untrained operator stays at 0: 2 and 4 steps off
    assert torch.equal(model.state_dict()["step_std"], torch.full((3,), 0.5))
