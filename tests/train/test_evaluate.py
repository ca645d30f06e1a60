from __future__ import annotations

from typing import Any

import pytest
import torch

from stoker.train.evaluate import Evaluation, evaluate
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

    assert (found.nrmse, found.rollout) == (0.0, 0.0)
    # one step: sum of 1 over sum of 1..5 squared; from the first state: all of it is missed
    assert found.persistence == pytest.approx((5 / 55) ** 0.5)
    assert found.rollout_persistence == 1.0
    assert (found.windows, found.rollout_steps) == (15, 5)


def test_a_rollout_is_fed_with_its_own_predictions() -> None:
    found = judge(FakeLoader(ramp(slope=2.0), shuffle=False))

    # truth 2 4 6 8 10, one step always misses by 1, rolled out 1 2 3 4 5
    assert found.nrmse == pytest.approx((5 / 220) ** 0.5)
    assert found.rollout == pytest.approx((55 / 220) ** 0.5)


def test_rollouts_do_not_depend_on_the_order_of_windows() -> None:
    in_order = judge(FakeLoader(ramp(slope=2.0), shuffle=False))
    shuffled = judge(FakeLoader(ramp(slope=2.0), shuffle=True, batch_size=5))

    assert shuffled.rollout == in_order.rollout
    assert shuffled.rollout_steps == 5


def test_a_stride_chains_every_second_state() -> None:
    found = judge(FakeLoader(ramp(steps=7), shuffle=False, stride=2), stride=2)

    assert found.rollout_steps == 3
    assert found.rollout == pytest.approx((1 + 4 + 9) ** 0.5 / (4 + 16 + 36) ** 0.5)


def test_windows_with_a_future_are_rolled_out_over_it() -> None:
    found = judge(FakeLoader(ramp(slope=2.0), shuffle=False, horizon=3))

    assert found.rollout_steps == 3
    assert found.windows == 9
    assert found.rollout is not None
    assert found.rollout > found.nrmse


def test_trajectories_of_other_lengths_are_rolled_out_too() -> None:
    loader = FakeLoader(ramp(), shuffle=False)
    loader.ids = loader.ids[:12]  # the last trajectory lost its last three windows

    assert judge(loader).rollout == 0.0


def test_a_chain_with_a_gap_is_no_rollout() -> None:
    loader = FakeLoader(ramp(samples=1), shuffle=False)
    loader.ids = loader.ids[::2]  # starts 0, 2, 4: the windows between them are missing

    found = judge(loader)

    assert (found.rollout, found.rollout_persistence, found.rollout_steps) == (None, None, 0)


def test_no_rollout_is_none() -> None:
    found = judge(FakeLoader(ramp(), shuffle=False), samples=0)

    assert (found.rollout, found.rollout_persistence, found.rollout_steps) == (None, None, 0)


def test_the_untrained_operator_equals_persistence() -> None:
    latent = waves()
    model = LatentOperator(OperatorShape(tokens=4, dim=4, cond=0, width=8, depth=1, heads=1))

    found = evaluate(model, FakeLoader(latent, shuffle=False), {}, stride=1, samples=2)

    assert found.nrmse == found.persistence
    assert found.rollout == found.rollout_persistence


def test_with_a_decoder_the_same_errors_are_told_of_fields() -> None:
    """Decoding that only scales changes no relative error; one that shifts makes the fields larger."""
    plain = judge(FakeLoader(ramp(slope=2.0), shuffle=False))
    scaled = judge(FakeLoader(ramp(slope=2.0), shuffle=False), decode=lambda z: 3 * z)
    shifted = judge(FakeLoader(ramp(slope=2.0), shuffle=False), decode=lambda z: z + 10)

    assert plain.physical is None
    assert scaled.nrmse == plain.nrmse
    assert scaled.physical is not None
    for name in ("nrmse", "persistence", "rollout", "rollout_persistence"):
        assert getattr(scaled.physical, name) == pytest.approx(getattr(plain, name))
    assert shifted.physical is not None
    # truth 12 14 16 18 20 in three trajectories, one step always misses by 1
    assert shifted.physical.nrmse == pytest.approx((5 / 1320) ** 0.5)
