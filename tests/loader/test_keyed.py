from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.errors import ConfigError
from stoker.loader.order import bits, child_keys, example_keys, integers, normal, uniform
from stoker.splitmix import GAMMA, MASK, MIX_B, mix, stream
from tests.kit.amount import example_count

int64s = st.integers(-(1 << 63), (1 << 63) - 1)


def signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def keys_for(count: int) -> torch.Tensor:
    return example_keys(7, 3, torch.arange(count))


@settings(deadline=None, max_examples=example_count(50))
@given(key=int64s, count=st.integers(1, 9))
def test_bits_are_splitmix64_with_a_step_of_its_own_per_key(key: int, count: int) -> None:
    """Against plain Python integers: the definition that every device has to meet."""
    step = mix(key ^ MIX_B) | 1

    expected = [signed(mix((key + place * step) & MASK)) for place in range(1, count + 1)]

    assert bits(torch.tensor([key]), count)[0].tolist() == expected


@settings(deadline=None, max_examples=example_count(50))
@given(seed=st.integers(0, 1 << 40), epoch=st.integers(0, 1 << 20), example=st.integers(0, 1 << 40))
def test_keys_are_those_of_seed_epoch_and_example(seed: int, epoch: int, example: int) -> None:
    expected = signed(mix((stream(seed, epoch, 2) + (example + 1) * GAMMA) & MASK))

    assert example_keys(seed, epoch, torch.tensor([example])).tolist() == [expected]


def test_these_numbers_never_change() -> None:
    """Golden: a saved run goes on with the augmentation that it began with."""
    key = torch.tensor([42])

    assert bits(key, 2).tolist() == [[2502589980613610257, -5555801408379223233]]
    assert child_keys(key, 1).tolist() == [-3225165253964833290]
    assert integers(key, 4, 10).tolist() == [[1, 6, 1, 6]]
    assert uniform(key, 2).mul(2**24).tolist() == [[2276092, 11724244]]


@pytest.mark.parametrize("draw", [bits, uniform, normal, lambda keys, n: integers(keys, n, 1000)])
def test_a_row_depends_on_its_key_alone(draw) -> None:
    keys = keys_for(67)
    whole = draw(keys, 45)

    assert torch.equal(whole[5:9], draw(keys[5:9], 45))
    assert torch.equal(whole[30:31, :7], draw(keys[30:31], 7))
    assert torch.equal(whole[::3], draw(keys[::3], 45))


def test_uniform_and_integers_are_spread_evenly() -> None:
    u, n = uniform(keys_for(400), 500), integers(keys_for(400), 500, 7)

    assert 0 <= u.min() < 1e-4
    assert 1 - 1e-4 < u.max() < 1
    assert u.mean().item() == pytest.approx(0.5, abs=3e-3)
    assert u.double().var().item() == pytest.approx(1 / 12, abs=1e-3)
    counts = torch.bincount(n.flatten(), minlength=7)
    assert len(counts) == 7
    assert (counts - 200_000 / 7).abs().max() < 6 * math.sqrt(200_000 / 7)


def test_normal_has_the_moments_and_tails_of_a_normal() -> None:
    x = normal(keys_for(1000), 1000).double()

    assert x.mean().item() == pytest.approx(0, abs=5e-3)
    assert x.var().item() == pytest.approx(1, abs=1e-2)
    assert (x**4).mean().item() == pytest.approx(3, abs=5e-2)
    assert (x.abs() > 3).double().mean().item() == pytest.approx(0.0027, abs=3e-4)
    assert x.abs().max() > 4.5
    assert x.isfinite().all()


def test_streams_are_not_correlated() -> None:
    """Neighboring examples, columns, epochs and children: each pair as if drawn apart."""
    keys = keys_for(20_000)
    other_epoch = example_keys(7, 4, torch.arange(20_000))
    first = uniform(keys, 2).double() - 0.5

    pairs = {
        "examples": (first[:-1, 0], first[1:, 0]),
        "columns": (first[:, 0], first[:, 1]),
        "epochs": (first[:, 0], uniform(other_epoch, 1)[:, 0].double() - 0.5),
        "child": (first[:, 0], uniform(child_keys(keys, 0), 1)[:, 0].double() - 0.5),
        "children": (uniform(child_keys(keys, k), 1)[:, 0].double() - 0.5 for k in (0, 1)),
    }

    for name, (a, b) in pairs.items():
        assert abs((a * b).mean().item() * 12) < 4 / math.sqrt(20_000), name


@pytest.mark.parametrize("below", [0, (1 << 31) + 1])
def test_integers_have_a_range(below: int) -> None:
    with pytest.raises(ConfigError, match="Expected 1 to"):
        integers(keys_for(1), 1, below)
