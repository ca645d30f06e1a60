"""Orders made by a device equal those of the host. Here the device is the CPU, through torch's int64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.loader import order as orders
from stoker.loader.order import Draws, Order, OrderKind, bijection, epoch_on, parse_order
from tests.kit.amount import example_count

CPU = torch.device("cpu")
KINDS = ["full", "sequential", "block(3,12)", "block(7,7)", "block(16,32)", "static(4)", "static(1)"]


def make(kind: str, count: int, seed: int) -> Order:
    parsed = parse_order(kind, world_size=1, example_bytes=1024)
    return Order(kind=parsed, count=count, seed=seed, global_batch=8)


@settings(max_examples=example_count(150), deadline=None)
@given(
    count=st.integers(8, 1000),
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 2**63),
    epoch=st.integers(0, 9),
    cuts=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
def test_a_device_makes_the_order_of_the_host(
    count: int, kind: str, seed: int, epoch: int, cuts: tuple[float, float]
) -> None:
    wanted = make(kind, count, seed)
    start, stop = sorted(int(cut * wanted.positions) for cut in cuts)

    got = epoch_on(wanted, epoch, CPU)(start, stop)

    assert got.dtype == torch.int64
    assert got.tolist() == wanted.epoch(epoch)(start, stop).tolist()


@settings(max_examples=example_count(60), deadline=None)
@given(
    weights=st.lists(st.floats(0, 5), min_size=1, max_size=30),
    windows=st.integers(1, 100),
    seed=st.integers(0, 99),
    repeats=st.booleans(),
)
def test_examples_are_drawn_by_weight_alike(
    weights: list[float], windows: int, seed: int, repeats: bool
) -> None:
    counts = np.arange(len(weights)) % windows + 1
    first = np.concatenate([[0], np.cumsum(counts)])
    values = np.array(weights) + 0.1
    draws = Draws(
        cumulative=np.cumsum(values * counts),
        first=first,
        weights=None if repeats else values,
        samples=len(counts),
    )
    wanted = Order(kind=OrderKind(kind="full"), count=int(first[-1]), seed=seed, global_batch=8, draws=draws)

    got = epoch_on(wanted, 3, CPU)(0, wanted.positions)

    assert got.tolist() == wanted.epoch(3)(0, wanted.positions).tolist()


@pytest.mark.parametrize("count", [3, 1000, 2**27 + 1, 10**9])
def test_positions_are_computed_alike(count: int) -> None:
    positions = np.arange(0, count, max(1, count // 5000), dtype=np.int64)

    got = bijection(torch.from_numpy(positions), count, 12345)

    assert got.tolist() == bijection(positions, count, 12345).tolist()


def test_a_full_order_of_many_examples_is_computed_by_position(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orders, "SORTED_LIMIT", 100)
    wanted = make("full", 1000, 7)

    got = epoch_on(wanted, 2, CPU)(100, 900)

    assert got.tolist() == wanted.epoch(2)(100, 900).tolist()


@pytest.mark.parametrize("kind", ["full", "static(4)"])
def test_an_order_that_the_device_has_no_memory_to_sort_comes_from_the_host(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would end the training that the loader feeds."""
    wanted = make(kind, 1000, 3)

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(orders, "permutation_on", full)

    got = epoch_on(wanted, 2, CPU)(100, 900)

    assert got.tolist() == list(wanted.epoch(2)(100, 900))
