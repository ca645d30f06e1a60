"""Orders, batches and states of loaders as released: other values change runs that are under way."""

from __future__ import annotations

import pytest

from tests.pins import golden
from tests.pins.batches import CASES_BY_TIER
from tests.pins.orders import CASES as ORDERS
from tests.pins.states import MAKERS, interrupted, rest

GOLDEN = {kind: golden.load(kind) for kind in ("orders", "batches", "states")}


@pytest.mark.parametrize("case", ORDERS)
def test_examples_come_in_the_same_order(case: str) -> None:
    assert golden.plain(ORDERS[case]()) == GOLDEN["orders"][case]


@pytest.mark.parametrize(
    ("case", "tier"), [(case, tier) for case, (_, tiers) in CASES_BY_TIER.items() for tier in tiers]
)
def test_batches_have_the_same_bytes_from_every_tier(case: str, tier: str) -> None:
    served, _ = CASES_BY_TIER[case]

    assert golden.plain(served(tier)) == GOLDEN["batches"][case]


@pytest.mark.parametrize("case", MAKERS)
def test_a_loader_has_the_same_state_and_continues_with_the_same_batches(case: str) -> None:
    assert golden.plain(interrupted(MAKERS[case])) == GOLDEN["states"][case]


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("case", MAKERS)
def test_a_state_of_an_earlier_version_continues_at_the_next_batch(case: str, tier: str) -> None:
    loader = MAKERS[case](tier=tier)
    loader.load_state_dict(GOLDEN["states"][case]["state"])

    assert rest(loader) == GOLDEN["states"][case]["after"]


def test_every_golden_value_is_compared() -> None:
    assert {kind: set(values) for kind, values in GOLDEN.items()} == {
        "orders": set(ORDERS),
        "batches": set(CASES_BY_TIER),
        "states": set(MAKERS),
    }
