from __future__ import annotations

import pytest
import torch

from stoker.errors import RecordError
from stoker.train.operator import cond_widths, measure_scales, to_pairs
from tests.train.fakes import FakeBatch, FakeLoader

CPU = torch.device("cpu")


def batch(shape: tuple[int, ...] = (4, 5, 3), **cond: torch.Tensor) -> FakeBatch:
    return FakeBatch(torch.zeros(shape), torch.ones(shape), None, cond, torch.zeros(shape[0], 2))


def test_conditions_stand_side_by_side_by_name() -> None:
    given = batch(nu=torch.full((4, 1), 2.0), a=torch.full((4, 2), 7.0))

    pairs = to_pairs(given, cond_widths(given), CPU)

    assert cond_widths(given) == {"a": 2, "nu": 1}
    assert pairs.cond[0].tolist() == [7.0, 7.0, 2.0]


@pytest.mark.parametrize(
    ("shape", "tokens"),
    [
        pytest.param((4,), 1, id="numbers"),
        pytest.param((4, 3), 1, id="vectors"),
        pytest.param((4, 5, 3), 5, id="tokens"),
        pytest.param((4, 2, 6, 3), 12, id="grid"),
    ],
)
def test_any_state_becomes_tokens(shape: tuple[int, ...], tokens: int) -> None:
    pairs = to_pairs(batch(shape), {}, CPU)

    width = shape[-1] if len(shape) > 1 else 1
    assert pairs.z0.shape == (4, tokens, width)
    assert pairs.states.shape == (4, 1, tokens, width)
    assert pairs.cond.shape == (4, 0)


def test_half_precision_latents_are_trained_in_float32() -> None:
    given = batch()
    given.z0, given.z1 = given.z0.half(), given.z1.bfloat16()

    pairs = to_pairs(given, {}, CPU)

    assert (pairs.z0.dtype, pairs.states.dtype) == (torch.float32, torch.float32)


def test_states_are_z1_and_then_the_future() -> None:
    loader = FakeLoader(torch.arange(6.0).view(1, 6, 1, 1), batch_size=1, shuffle=False, horizon=3)

    pairs = to_pairs(next(iter(loader)), {}, CPU)

    assert pairs.z0.flatten().tolist() == [0.0]
    assert pairs.states.flatten().tolist() == [1.0, 2.0, 3.0]


def test_other_conditions_than_training_began_with_are_refused() -> None:
    with pytest.raises(RecordError, match="'nu': 1"):
        to_pairs(batch(mu=torch.ones(4, 1)), {"nu": 1}, CPU)


def test_scales_are_those_of_the_data_and_never_zero() -> None:
    z0 = torch.tensor([[[1.0, 5.0]], [[3.0, 5.0]]])
    given = FakeBatch(
        z0, z0 + torch.tensor([0.5, 0.0]), None, {"nu": torch.full((2, 1), 0.01)}, torch.zeros(2, 2)
    )

    scales = measure_scales(iter([to_pairs(given, {"nu": 1}, CPU)]))

    assert scales.z_mean.tolist() == [2.0, 5.0]
    assert scales.z_std.tolist() == [1.0, 1.0]  # the second is constant
    assert scales.step_std[0] == 0.5
    assert scales.step_std[1] == pytest.approx(5e-4)
    assert scales.cond_std.tolist() == [1.0]


def test_data_that_never_moves_has_a_usable_scale() -> None:
    z0 = torch.ones(2, 1, 2)

    scales = measure_scales(iter([to_pairs(FakeBatch(z0, z0, None, {}, torch.zeros(2, 2)), {}, CPU)]))

    assert scales.step_std.tolist() == [1.0, 1.0]
