from __future__ import annotations

from typing import Any

import pytest
import torch

from stoker.train.objective import ERRORS, Evaluation, evaluate
from stoker.train.operator import LatentOperator, OperatorShape
from tests.train.fakes import FakeLoader, waves


class AddsOne(LatentOperator):
    """Predicts z0 + 1, and counts how it was called."""

    def __init__(self, cond: int = 0) -> None:
        super().__init__(OperatorShape(tokens=1, dim=1, cond=cond, width=4, depth=1, heads=1))

    def forward(self, z0: torch.Tensor, cond: torch.Tensor) -> torch.Tensor:
        return z0 + 1


def ramp(steps: int = 6, slope: float = 1.0, samples: int = 3) -> torch.Tensor:
    return (slope * torch.arange(steps).float()).view(1, steps, 1, 1).repeat(samples, 1, 1, 1)


def judge(loader: FakeLoader, **changes: Any) -> Evaluation:
    return evaluate(AddsOne(), loader, {}, **{"stride": 1, "samples": 8, **changes})


def test_a_right_operator_has_no_error_and_persistence_has() -> None:
    found = judge(FakeLoader(ramp(), shuffle=False))

    assert (found.errors["val_nrmse"], found.errors["rollout_nrmse"]) == (0.0, 0.0)
    # one step: sum of 1 over sum of 1..5 squared; from the first state: all of it is missed
    assert found.errors["persistence_nrmse"] == pytest.approx((5 / 55) ** 0.5)
    assert found.errors["rollout_persistence_nrmse"] == 1.0
    assert (found.windows, found.rollout_steps) == (15, 5)


def test_a_rollout_is_fed_with_its_own_predictions() -> None:
    found = judge(FakeLoader(ramp(slope=2.0), shuffle=False))

    # truth 2 4 6 8 10, one step always misses by 1, rolled out 1 2 3 4 5
    assert found.errors["val_nrmse"] == pytest.approx((5 / 220) ** 0.5)
    assert found.errors["rollout_nrmse"] == pytest.approx((55 / 220) ** 0.5)


def test_rollouts_do_not_depend_on_the_order_of_windows() -> None:
    in_order = judge(FakeLoader(ramp(slope=2.0), shuffle=False))
    shuffled = judge(FakeLoader(ramp(slope=2.0), shuffle=True, batch_size=5))

    assert shuffled.errors["rollout_nrmse"] == in_order.errors["rollout_nrmse"]
    assert shuffled.rollout_steps == 5


def test_a_stride_chains_every_second_state() -> None:
    found = judge(FakeLoader(ramp(steps=7), shuffle=False, stride=2), stride=2)

    assert found.rollout_steps == 3
    assert found.errors["rollout_nrmse"] == pytest.approx((1 + 4 + 9) ** 0.5 / (4 + 16 + 36) ** 0.5)


def test_windows_with_a_future_are_rolled_out_over_it() -> None:
    found = judge(FakeLoader(ramp(slope=2.0), shuffle=False, horizon=3))

    assert found.rollout_steps == 3
    assert found.windows == 9
    one, rolled_out = found.errors["val_nrmse"], found.errors["rollout_nrmse"]
    assert one is not None
    assert rolled_out is not None
    assert rolled_out > one


def test_trajectories_of_other_lengths_are_rolled_out_too() -> None:
    loader = FakeLoader(ramp(), shuffle=False)
    loader.ids = loader.ids[:12]  # the last trajectory lost its last three windows

    assert judge(loader).errors["rollout_nrmse"] == 0.0


def test_a_chain_with_a_gap_is_no_rollout() -> None:
    loader = FakeLoader(ramp(samples=1), shuffle=False)
    loader.ids = loader.ids[::2]  # starts 0, 2, 4: the windows between them are missing

    found = judge(loader)

    assert (
        found.errors["rollout_nrmse"],
        found.errors["rollout_persistence_nrmse"],
        found.rollout_steps,
    ) == (None, None, 0)


def test_no_rollout_is_none() -> None:
    found = judge(FakeLoader(ramp(), shuffle=False), samples=0)

    assert (
        found.errors["rollout_nrmse"],
        found.errors["rollout_persistence_nrmse"],
        found.rollout_steps,
    ) == (None, None, 0)


def test_the_untrained_operator_equals_persistence() -> None:
    latent = waves()
    model = LatentOperator(OperatorShape(tokens=4, dim=4, cond=0, width=8, depth=1, heads=1))

    found = evaluate(model, FakeLoader(latent, shuffle=False), {}, stride=1, samples=2)

    assert found.errors["val_nrmse"] == found.errors["persistence_nrmse"]
    assert found.errors["rollout_nrmse"] == found.errors["rollout_persistence_nrmse"]


def test_with_a_decoder_the_same_errors_are_told_of_fields() -> None:
    """Decoding that only scales changes no relative error; one that shifts makes the fields larger."""
    plain = judge(FakeLoader(ramp(slope=2.0), shuffle=False))
    scaled = judge(FakeLoader(ramp(slope=2.0), shuffle=False), decode=lambda z: 3 * z)
    shifted = judge(FakeLoader(ramp(slope=2.0), shuffle=False), decode=lambda z: z + 10)

    physical = ERRORS[4:]
    assert not plain.errors.keys() & {*physical}
    assert scaled.errors["val_nrmse"] == plain.errors["val_nrmse"]
    for of_fields, of_states in zip(physical, ERRORS, strict=False):
        assert scaled.errors[of_fields] == pytest.approx(plain.errors[of_states])
    # truth 12 14 16 18 20 in three trajectories, one step always misses by 1
    assert shifted.errors["physical_nrmse"] == pytest.approx((5 / 1320) ** 0.5)
