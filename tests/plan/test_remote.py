"""What an epoch fetches through a small local cache: arithmetic, against a cache played through."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from stoker.plan import Demand, Rates, RemoteDemand, Resources, plan_tiers
from stoker.units import GIB, KIB, MIB


def remote(**more: Any) -> RemoteDemand:
    one: dict[str, Any] = {
        "url": "s3://bucket/caches",
        "bytes": 400 * MIB,
        "room_bytes": 200 * MIB,
        "block_bytes": MIB,
        "examples": 4000,
        "example_bytes": 102.4 * KIB,
        "step_examples": 64,
    } | more
    return RemoteDemand(**one)


def played(uses: list[list[int]], room: int) -> list[int]:
    """Misses of each epoch, by looking for the farthest next use at each of them."""
    flat = [block for epoch in uses for block in epoch]
    here: set[int] = set()
    misses: list[int] = []
    at = 0
    for epoch in uses:
        misses.append(0)
        for block in epoch:
            if block not in here:
                misses[-1] += 1
                if len(here) >= room:
                    rest = flat[at + 1 :]
                    here.remove(max(here, key=lambda b: rest.index(b) if b in rest else len(rest)))
                here.add(block)
            at += 1
    return misses


def test_with_one_use_of_each_block_an_epoch_fetches_what_does_not_fit() -> None:
    random = np.random.default_rng(3)
    misses = played([random.permutation(40).tolist() for _ in range(6)], room=24)

    assert misses[2:5] == [16] * 3
    one = remote(order="block(1000,1000)", bytes=40 * MIB, room_bytes=24 * MIB)
    assert one.fetched() == pytest.approx(1 - 24 * 0.95 / 40, abs=0.05)
    # Blocks of a window that the local cache does not hold are fetched over and over.
    assert replace(one, order="block(1000,4000)").fetched() > 2 * one.fetched()


def test_blocks_that_are_used_often_are_fetched_as_often_as_when_played_through() -> None:
    random = np.random.default_rng(4)
    uses, blocks, room = 5, 100, 50
    epochs = [random.permutation(np.repeat(np.arange(blocks), uses)).tolist() for _ in range(5)]
    played_through = sum(played(epochs, room)[1:4]) / 3 / blocks

    one = remote(
        bytes=blocks * MIB,
        room_bytes=int(room * MIB / 0.95),
        examples=(uses - 1) * blocks,
        example_bytes=MIB / (uses - 1),
        step_examples=1,
    )
    assert one.fetched() == pytest.approx(played_through, rel=0.15)


def test_a_plan_names_the_order_that_fetches_less_and_what_both_fetch() -> None:
    host = Resources(host_bytes=GIB // 64, host_total_bytes=GIB, host_limit="machine memory", cpus=2.0)
    sizes: dict[str, Any] = {"records": 4000, "record_bytes": 104_858.0, "example_bytes": 104_858.0}
    plan = plan_tiers(Demand(**sizes, batch_examples=64, remote=remote()), host)

    assert "from s3://bucket/caches through a local cache of 200 MiB of 400 MiB" in plan.reason
    better = remote().better()
    assert better.startswith("block(")
    assert f"shuffle={better}" in plan.reason
    assert remote().fetched() > 1.0 > remote().fetched(better) > 0.5
    assert "3 nodes or more partition=static" in plan.reason
    assert plan.tier == "disk"

    whole = plan_tiers(Demand(**sizes, batch_examples=64, remote=remote(room_bytes=None)), host)
    assert "through a local cache of all 400 MiB" in whole.reason
    far, near = (next(row.load_s for row in one.rows if row.tier == "disk") for one in (plan, whole))
    assert far is not None
    assert near is not None
    fetched = remote().fetched() * 400 * MIB / (4000 / 64)
    assert far - near == pytest.approx(fetched / Rates().network_bytes_s, rel=0.05)


def test_nothing_is_recommended_where_it_gains_nothing() -> None:
    assert remote(examples=100, example_bytes=4 * MIB, step_examples=4).better() == ""
    assert remote(room_bytes=400 * MIB).better() == ""
    assert remote(room_bytes=400 * MIB).fetched() == 0.0
