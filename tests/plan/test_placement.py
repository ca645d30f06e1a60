from __future__ import annotations

import pytest

from stoker.plan import Plan, plan_tiers
from stoker.plan.placement import (
    BACKOFF_S,
    MOST_BACKOFF_S,
    ShortageBackoff,
    move_to_disk,
    plan_gain,
    short_memories,
)
from stoker.plan.tiers import reserves_of
from tests.plan.test_tiers import RECORD, counts, demand, machine


def planned(device: int, host: int, records: int = 100) -> Plan:
    """Exactly that many records in memory."""
    return plan_tiers(
        demand(records, device="cuda"), machine(device=device, host=-(-host * 5 // 4)), reserve_bytes=0
    )


@pytest.mark.parametrize(
    ("device_left", "host_left", "expected"),
    [
        pytest.param(50, 50, set(), id="room-enough"),
        pytest.param(20, 35, set(), id="just-enough"),
        pytest.param(19, 35, {"device"}, id="device"),
        pytest.param(20, 34, {"host"}, id="host"),
        pytest.param(0, 0, {"device", "host"}, id="both"),
    ],
)
def test_memory_is_short_when_what_is_held_and_half_the_reserve_do_not_fit(
    device_left: int, host_left: int, expected: set[str]
) -> None:
    plan = planned(device=10, host=30)
    usable = {"device": device_left * RECORD, "host": host_left * RECORD}

    assert short_memories(plan, usable, {"device": 20 * RECORD, "host": 10 * RECORD}) == expected


def test_what_is_not_held_cannot_be_short() -> None:
    assert not short_memories(planned(0, 0), {"device": 0, "host": 0}, {"device": 9, "host": 9})


def test_a_plan_just_made_is_not_short() -> None:
    """Else memory would move to and fro."""
    for host in range(1, 200, 7):
        resources = machine(device=10, host=host)
        plan = plan_tiers(demand(100, device="cuda"), resources)
        reserves = reserves_of(demand(100, device="cuda"), resources, "auto", None)

        assert not short_memories(
            plan, {"device": resources.device_bytes, "host": resources.host_bytes}, reserves
        )


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        pytest.param((0, 30), (0, 40), 0.1, id="more-in-host"),
        pytest.param((0, 100), (50, 50), 0.5, id="from-host-to-device"),
        pytest.param((10, 10), (10, 10), 0.0, id="the-same"),
        pytest.param((10, 40), (0, 20), -0.1, id="less"),
    ],
)
def test_a_gain_is_the_part_of_the_records_that_gets_faster(
    before: tuple[int, int], after: tuple[int, int], expected: float
) -> None:
    assert plan_gain(planned(*before), planned(*after)) == pytest.approx(expected)


def test_each_shortage_doubles_the_patience_up_to_a_limit() -> None:
    calm = ShortageBackoff(since_s=0.0)
    assert not calm.over(BACKOFF_S - 1)
    assert calm.over(BACKOFF_S)

    for now in range(100):
        calm = calm.after_shortage(float(now))

    assert calm.backoff_s == MOST_BACKOFF_S
    assert not calm.over(99.0 + MOST_BACKOFF_S - 1)


def test_records_that_leave_a_memory_are_read_from_disk() -> None:
    plan = move_to_disk(planned(device=10, host=80), "host", 75)

    assert counts(plan) == (10, 5, 85, 0)
    assert sum(row.bytes for row in plan.rows) == 100 * RECORD
    assert plan.tier == "disk"
