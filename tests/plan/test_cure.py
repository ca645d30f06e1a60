from __future__ import annotations

from typing import Any

import pytest

from stoker.plan import Demand, Plan, Rates, Resources, plan_tiers
from stoker.plan.tiers import MeasuredStall, cure, over_budget

MIB = 2**20


def plan(*, host_mib: int = 1000, device: str = "cpu", device_mib: int = 0) -> Plan:
    """For 100 records of 1 MiB, 8 a batch, and a step of 10 ms."""
    machine = Resources(
        host_bytes=host_mib * MIB,
        host_total_bytes=host_mib * MIB,
        host_limit="machine memory",
        device=device,
        device_bytes=device_mib * MIB,
        device_total_bytes=device_mib * MIB,
        device_name="Made-up GPU",
        cpus=2.0,
    )
    demand = Demand(records=100, record_bytes=MIB, batch_examples=8, example_bytes=MIB, device=device)
    return plan_tiers(demand, machine, step_s=0.01, rates=Rates(copy_bytes_s=8e9, measured=True))


def waiting(**changes: Any) -> MeasuredStall:
    facts: dict[str, Any] = {
        "stall": 0.2, "step_s": 0.01, "wait_s": 61.0, "parts": {"read": 55.0, "gather": 6.0}, "tier": "disk",
    }  # fmt: skip
    return MeasuredStall(**{**facts, **changes})


def test_within_the_budget_there_is_no_verdict() -> None:
    assert over_budget(waiting(stall=0.02), 0.02, plan()) is None


def test_the_verdict_has_figures_what_was_asked_for_and_a_cure() -> None:
    verdict = over_budget(waiting(), 0.02, plan())

    assert verdict is not None
    assert verdict.startswith(
        "stall 20 %: steps waited 61 s for data, 55 s of it reading from disk, 6 s putting"
    )
    assert "The limit is 2.0 %." in verdict
    assert "Use training.tier=auto: the host tier has room for the records, and would stall" in verdict


@pytest.mark.parametrize(
    ("changes", "room", "cured"),
    [
        pytest.param({}, {"host_mib": 50}, "100 MiB, more than the host tier has room", id="read"),
        pytest.param(
            {"parts": {"copy": 1.0}, "tier": "host"},
            {"device": "cuda", "device_mib": 50},
            "The device tier copies nothing, but has no room",
            id="copy",
        ),
        pytest.param({"parts": {"transform": 1.0}, "tier": "host"}, {}, "transforms cheaper", id="transform"),
        pytest.param(
            {"parts": {"wait": 1.0}, "tier": "host"}, {}, "a core that no other process uses", id="wait"
        ),
        pytest.param({"parts": {"gather": 1.0}, "tier": "host"}, {}, "A step of 10 ms is short", id="gather"),
    ],
)
def test_the_cure_fits_what_was_waited_for(changes: dict[str, Any], room: dict[str, Any], cured: str) -> None:
    assert cured in cure(waiting(**changes), plan(**room))
