from __future__ import annotations

import gc

import pytest

from stoker.plan import MemoryLedger, Resources


def machine(host: int = 100, device: int = 0) -> Resources:
    return Resources(
        host_bytes=host,
        host_total_bytes=200,
        host_limit="machine memory",
        device="cuda:0" if device else "cpu",
        device_bytes=device,
        device_name="Made-up GPU",
    )


def test_a_loader_is_told_what_others_mean_to_hold() -> None:
    ledger = MemoryLedger()
    first, second = ledger.claim(), ledger.claim()

    first.parts["host"] = {"a": 30, "b": 10}

    assert first.usable(machine()).host_bytes == 100
    assert second.usable(machine()).host_bytes == 60
    assert second.usable(machine()).host_limit == "machine memory, less 40 B for other loaders"


@pytest.mark.parametrize(
    ("taken", "free", "expected"),
    [
        pytest.param(0, 80, 50, id="nothing-filled-yet"),
        pytest.param(30, 50, 50, id="all-of-it-is-gone-from-what-is-free"),
        pytest.param(10, 70, 50, id="half-way"),
    ],
)
def test_what_is_taken_already_is_not_subtracted_twice(taken: int, free: int, expected: int) -> None:
    ledger = MemoryLedger()
    first, second = ledger.claim(), ledger.claim()
    first.parts["cuda:0"], first.taken["cuda:0"] = {"a": 30}, taken

    assert second.usable(machine(device=free)).device_bytes == expected
    assert first.usable(machine(device=free)).device_bytes == free + taken


def test_what_two_loaders_share_is_counted_once() -> None:
    ledger = MemoryLedger()
    claims = [ledger.claim() for _ in range(3)]
    claims[0].parts["host"] = {"a": 30, "b": 10}
    claims[1].parts["host"] = {"b": 10, "c": 20}

    assert claims[2].usable(machine()).host_bytes == 40
    assert claims[2].usable(machine(), {"a", "b"}).host_bytes == 80


def test_a_claim_ends_with_its_owner() -> None:
    ledger = MemoryLedger()
    first, second = ledger.claim(), ledger.claim()
    first.parts["host"] = {"a": 1000}
    assert second.usable(machine()).host_bytes == 0

    del first
    gc.collect()

    assert second.usable(machine()).host_bytes == 100
