from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.errors import ConfigError
from stoker.loader import order as orders
from stoker.loader.order import (
    Draws,
    Order,
    OrderKind,
    bijection,
    parse_order,
    permutation_on,
    permutations,
    stream,
)
from tests.kit.amount import example_count

GOLDEN = {
    "full": [6, 1, 7, 5, 0, 2, 4, 9, 8, 3],
    "full, seed 5, epoch 3": [7, 9, 4, 6, 0, 8, 1, 2, 5, 3],
    "block": [3, 9, 4, 8, 2, 1, 10, 0, 5, 6, 7],
    "static": [4, 1, 8, 7, 2, 3, 6, 5],
    "bijection": [0, 9, 1, 7, 8, 6, 2, 5, 4, 3],
    "stream": "0x65860fae457a28af",
}

KINDS = ["full", "sequential", "block(3,12)", "block(7,7)", "static(4)"]


def make(kind: str, count: int, *, seed: int = 0, batch: int = 8) -> Order:
    return Order(
        kind=parse_order(kind, world_size=1, example_bytes=1024), count=count, seed=seed, global_batch=batch
    )


def test_splitmix64_gives_its_published_outputs() -> None:
    """Reference outputs of splitmix64.c seeded with 0."""
    keys = orders.keys_of(0, np.arange(3))

    assert [hex(key) for key in keys.tolist()] == [
        "0xe220a8397b1dcdaf",
        "0x6e789e6aa1b965f4",
        "0x6c45d188009454f",
    ]


def test_golden_orders_never_change() -> None:
    """A saved state means the same example in every later version."""
    assert make("full", 10).epoch(0)(0, 10).tolist() == GOLDEN["full"]
    assert make("full", 10, seed=5).epoch(3)(0, 10).tolist() == GOLDEN["full, seed 5, epoch 3"]
    assert make("block(2,4)", 11).epoch(1)(0, 11).tolist() == GOLDEN["block"]
    assert make("static(2)", 11, batch=4).epoch(0)(0, 8).tolist() == GOLDEN["static"]
    assert bijection(np.arange(10), 10, stream(0, 0)).tolist() == GOLDEN["bijection"]
    assert hex(stream(2**70 + 1, 2)) == GOLDEN["stream"]


@settings(max_examples=example_count(60), deadline=None)
@given(count=st.integers(1, 3000), seed=st.integers(0, 2**63), epoch=st.integers(0, 10**6))
def test_torch_makes_the_same_order_as_numpy(count: int, seed: int, epoch: int) -> None:
    base = stream(seed, epoch)

    assert (
        permutation_on(torch.device("cpu"), count, base).tolist() == permutations(count, [base])[0].tolist()
    )


@settings(max_examples=example_count(60), deadline=None)
@given(
    count=st.integers(4, 2000), kind=st.sampled_from(KINDS), seed=st.integers(0, 99), epoch=st.integers(0, 9)
)
def test_an_order_is_a_permutation_by_any_pieces(count: int, kind: str, seed: int, epoch: int) -> None:
    order = make(kind, count, seed=seed)
    ids = order.epoch(epoch)
    whole = ids(0, order.positions)

    assert len(set(whole.tolist())) == len(whole) == order.positions
    assert whole.min(initial=0) >= 0
    assert whole.max(initial=0) < count
    if kind != "static(4)":
        assert order.positions == count
    cut = order.positions // 3
    assert np.concatenate([ids(0, cut), ids(cut, order.positions)]).tolist() == whole.tolist()


@settings(max_examples=example_count(40), deadline=None)
@given(count=st.integers(1, 5000), seed=st.integers(0, 2**64))
def test_the_order_of_huge_sets_is_a_permutation_too(count: int, seed: int) -> None:
    assert sorted(bijection(np.arange(count), count, seed).tolist()) == list(range(count))


def test_above_the_limit_an_order_is_computed_by_position(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orders, "SORTED_LIMIT", 100)

    ids = make("full", 1000).epoch(0)

    assert sorted(ids(0, 1000).tolist()) == list(range(1000))
    assert ids(500, 510).tolist() == ids(0, 1000)[500:510].tolist()
    assert make("full", 2**40).epoch(0)(2**39, 2**39 + 5).tolist() != list(range(2**39, 2**39 + 5))


@pytest.mark.parametrize("kind", ["full", "block(4,16)", "static(2)"])
def test_epochs_and_seeds_differ_and_repeat(kind: str) -> None:
    def of(seed: int, epoch: int) -> list[int]:
        return make(kind, 200, seed=seed).epoch(epoch)(0, 200).tolist()

    assert of(0, 0) == of(0, 0)
    assert of(0, 1) != of(0, 0)
    assert of(1, 0) != of(0, 0)


def test_a_window_reads_only_whole_blocks() -> None:
    """Otherwise disk reads would be random, which is what windows exist to avoid."""
    ids = make("block(4,16)", 64).epoch(0)(0, 64)

    for window in ids.reshape(4, 16):
        assert len(set((window // 4).tolist())) == 4


def test_the_short_block_is_not_always_the_same() -> None:
    """It is served last, so with drop_last the same examples would never be seen."""
    order = make("block(10,20)", 47)

    assert len({tuple(sorted(order.epoch(e)(40, 47).tolist())) for e in range(20)}) > 2


def test_each_static_part_keeps_its_examples() -> None:
    order = make("static(4)", 41, batch=8)
    steps = np.concatenate([order.epoch(e)(0, order.positions) for e in range(3)]).reshape(-1, 4, 2)

    for part in range(4):
        own = steps[:, part].ravel()
        assert own.min() >= 41 * part // 4
        assert own.max() < 41 * (part + 1) // 4


def test_weights_draw_in_proportion_and_by_position() -> None:
    draws = Draws(cumulative=np.cumsum([1.0 * 10, 0.0, 3.0 * 10]), first=np.array([0, 10, 20, 30]))
    order = Order(kind=OrderKind(kind="full"), count=40_000, seed=1, global_batch=8, draws=draws)
    ids = order.epoch(0)

    drawn = ids(0, 40_000)
    shares = np.bincount(drawn // 10, minlength=3) / 40_000
    assert shares[1] == 0
    assert abs(shares[0] - 0.25) < 0.02
    assert set(drawn.tolist()) == set(range(10)) | set(range(20, 30))
    assert ids(777, 790).tolist() == drawn[777:790].tolist()


@pytest.mark.parametrize("text", ["random", "block(3)", "block(4,10)", "block(0,0)", "static(x)"])
def test_what_is_no_order_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(text)):
        parse_order(text, world_size=2, example_bytes=10)


def test_kinds_read_back_what_they_print() -> None:
    for text in ["full", "sequential", "block(64,4096)", "static(8)"]:
        assert str(parse_order(text, world_size=3, example_bytes=10)) == text
    assert str(parse_order("static", world_size=3, example_bytes=10)) == "static(3)"
    assert str(parse_order("block", world_size=1, example_bytes=1024)) == "block(128,32768)"


def test_static_parts_must_divide_the_batch() -> None:
    with pytest.raises(ConfigError, match="multiple"):
        make("static(3)", 100, batch=8)


@given(count=st.integers(1, 70_000), epochs=st.lists(st.integers(0, 9), min_size=1, max_size=4, unique=True))
@settings(max_examples=example_count(20), deadline=None)
def test_orders_made_together_are_those_made_alone(count: int, epochs: list[int]) -> None:
    order = Order(kind=OrderKind(kind="full"), count=count, seed=3, global_batch=1)

    together = order.epochs(epochs)

    for epoch, ids in zip(epochs, together, strict=True):
        assert ids(0, count).tolist() == order.epoch(epoch)(0, count).tolist()
