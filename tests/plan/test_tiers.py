from __future__ import annotations

from typing import Any

import pytest

from stoker.errors import ConfigError, ResourceError
from stoker.plan import TIERS, BatchLoad, Demand, Interval, Plan, Rates, Resources, plan_tiers, stall_of
from stoker.plan.trials import MachineUse

RECORD = 1_000  # bytes; round, so that expected counts can be read off the budgets
RATES = Rates(copy_bytes_s=1e9, disk_bytes_s=1e8, h2d_bytes_s=1e10, device_bytes_s=1e12, measured=True)


def machine(*, host: int = 0, device: int = 0, cpus: float = 4.0, **more: Any) -> Resources:
    """Room for that many records, before any reserve."""
    return Resources(
        host_bytes=host * RECORD,
        host_total_bytes=2 * host * RECORD,
        host_limit="cgroup v1 memory.limit_in_bytes of /job",
        device="cuda" if device else "cpu",
        device_bytes=device * RECORD,
        device_total_bytes=device * RECORD,
        device_name="Made-up GPU" if device else "cpu",
        cpus=cpus,
        **more,
    )


def demand(records: int, *, device: str = "cpu", **more: Any) -> Demand:
    sizes = {"record_bytes": RECORD, "batch_examples": 10, "example_bytes": 100, **more}
    return Demand(records=records, device=device, **sizes)


def counts(plan: Plan) -> tuple[int, ...]:
    return tuple(plan.records_by_tier().values())


@pytest.mark.parametrize(
    ("records", "missing", "expected"),
    [
        pytest.param(0, 0, (0, 0, 0, 0), id="nothing"),
        pytest.param(10, 0, (10, 0, 0, 0), id="fits-the-device"),
        pytest.param(25, 0, (10, 15, 0, 0), id="spills-to-host"),
        pytest.param(100, 0, (10, 20, 70, 0), id="spills-to-disk"),
        pytest.param(100, 95, (5, 0, 0, 95), id="mostly-missing"),
        pytest.param(100, 60, (10, 20, 10, 60), id="a-batch-from-everywhere"),
        pytest.param(5, 5, (0, 0, 0, 5), id="all-missing"),
    ],
)
def test_fastest_tier_fills_first(records: int, missing: int, expected: tuple[int, ...]) -> None:
    plan = plan_tiers(
        demand(records, device="cuda", missing_records=missing),
        machine(device=10, host=25),  # a fifth of the host is reserved
        reserve_bytes=0,
    )

    assert counts(plan) == expected


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        pytest.param(20, (0, 20, 0, 0), id="fits-the-host"),
        pytest.param(21, (0, 20, 1, 0), id="one-too-many"),
        pytest.param(100, (0, 20, 80, 0), id="spills-to-disk"),
    ],
)
def test_on_a_cpu_the_device_tier_is_the_host_tier(records: int, expected: tuple[int, ...]) -> None:
    plan = plan_tiers(demand(records), machine(host=25), rates=RATES)

    assert counts(plan) == expected
    assert "with device cpu the device tier is the host tier" in plan.reason


@pytest.mark.parametrize(
    ("tier", "device", "expected"),
    [
        pytest.param("device", "cuda", (8, 0, 0, 0), id="device"),
        pytest.param("host", "cuda", (0, 8, 0, 0), id="host"),
        pytest.param("disk", "cuda", (0, 0, 8, 0), id="disk"),
        pytest.param("encode", "cuda", (0, 0, 8, 0), id="encode-has-nothing-missing"),
        pytest.param("device", "cpu", (0, 8, 0, 0), id="device-on-a-cpu"),
        pytest.param("host", "cpu", (0, 8, 0, 0), id="host-on-a-cpu"),
        pytest.param("disk", "cpu", (0, 0, 8, 0), id="disk-on-a-cpu"),
    ],
)
def test_an_explicit_tier_takes_everything(tier: str, device: str, expected: tuple[int, ...]) -> None:
    plan = plan_tiers(
        demand(8, device=device), machine(host=25, device=10 if device == "cuda" else 0), tier=tier
    )

    assert counts(plan) == expected
    assert f"as tier={tier} asks" in plan.reason


@pytest.mark.parametrize("more", [0, 7])
def test_a_plan_goes_on_for_another_number_of_records(more: int) -> None:
    plan = plan_tiers(demand(100, device="cuda"), machine(host=20, device=10), rates=RATES)

    device, host, disk, missing = counts(plan)

    grown = plan.holding(100 + more)

    assert plan.tier == "disk"
    assert counts(grown) == (device, host, disk + more, missing)
    assert sum(row.bytes for row in grown.rows) == sum(row.bytes for row in plan.rows) + more * RECORD
    assert (grown.tier, grown.reason) == (plan.tier, plan.reason)


def test_printed_a_plan_is_a_short_table() -> None:
    plan = plan_tiers(demand(100, device="cuda"), machine(device=20, host=25), rates=RATES)

    assert str(plan).splitlines() == [
        "tier        records       bytes   load/batch",
        "device           10     9.8 KiB        10 us",
        "host             20    19.5 KiB       6.1 us",
        "disk             70    68.4 KiB       116 us",
        "no stall (below 1 %) at steps of 99 us or longer",
    ]
    assert repr(plan) == "Plan(device 10 records, host 20 records, disk 70 records, 97.7 KiB)"


@pytest.mark.parametrize(
    ("tier", "resources", "figures"),
    [
        pytest.param(
            "host", machine(host=25), ("21 records", "20.5 KiB", "19.5 KiB of host memory"), id="host"
        ),
        pytest.param(
            "device", machine(host=25), ("21 records", "19.5 KiB of host memory"), id="device-on-a-cpu"
        ),
        pytest.param(
            "device",
            machine(host=500, device=20),
            ("20.5 KiB", "19.1 KiB of device memory", "Made-up GPU", "400 B"),
            id="device",
        ),
    ],
)
def test_an_explicit_tier_that_does_not_fit_is_refused_with_figures(
    tier: str, resources: Resources, figures: tuple[str, ...]
) -> None:
    with pytest.raises(ResourceError) as caught:
        plan_tiers(demand(21, device=resources.device), resources, tier=tier)

    for figure in figures:
        assert figure in str(caught.value)
    assert "tier='auto'" in str(caught.value)
    assert caught.value.exit_code == 6


@pytest.mark.parametrize(
    ("changes", "on_device"),
    [
        pytest.param({}, 50, id="model-not-seen-yet"),
        pytest.param({"step_s": 0.01}, 98, id="model-seen"),
        pytest.param({"tier": "device"}, 98, id="device-asked-for"),
        pytest.param({"reserve_bytes": 30 * RECORD}, 70, id="told"),
        pytest.param({"reserve_bytes": 200 * RECORD}, 0, id="more-than-there-is"),
    ],
)
def test_device_memory_is_left_to_the_model(changes: dict[str, Any], on_device: int) -> None:
    records = min(on_device, 98) if "tier" in changes else 1000

    plan = plan_tiers(demand(records, device="cuda"), machine(device=100, host=25), **changes)

    assert plan.records_by_tier()["device"] == on_device


def test_on_a_cpu_the_reserve_is_of_host_memory() -> None:
    plan = plan_tiers(demand(100), machine(host=25), reserve_bytes=5 * RECORD + 1)

    assert counts(plan) == (0, 19, 81, 0)


def test_records_of_no_size_fit_anywhere() -> None:
    assert counts(plan_tiers(demand(5, record_bytes=0), machine(host=0))) == (0, 5, 0, 0)


def test_the_tier_is_the_one_that_holds_most() -> None:
    tiers = [plan_tiers(demand(n), machine(host=25)).tier for n in (0, 20, 40, 41)]

    assert tiers == ["host", "host", "host", "disk"]
    assert plan_tiers(demand(3, missing_records=3), machine(host=25)).tier == "encode"


@pytest.mark.parametrize(
    ("load_s", "step_s", "prefetch", "expected"),
    [
        pytest.param(0.5, 1.0, True, 0.0, id="hidden"),
        pytest.param(1.0, 1.0, True, 0.0, id="just-hidden"),
        pytest.param(4.0, 1.0, True, 0.75, id="prefetch-too-slow"),
        pytest.param(1.0, 3.0, False, 0.25, id="waited-for"),
        pytest.param(0.0, 1.0, False, 0.0, id="nothing-to-load"),
        pytest.param(1.0, 0.0, True, 1.0, id="no-step"),
        pytest.param(0.0, 0.0, False, 0.0, id="nothing-at-all"),
    ],
)
def test_stall_is_waiting_over_wall_time(
    load_s: float, step_s: float, prefetch: bool, expected: float
) -> None:
    assert stall_of(load_s, step_s, prefetch=prefetch) == pytest.approx(expected)


def test_loads_follow_from_bytes_and_rates() -> None:
    """A batch of 1e7 bytes: 10 us on the GPU, 10 ms from the host and 1 ms across, 100 ms from disk."""
    plan = plan_tiers(
        demand(1, device="cuda", example_bytes=1e6), machine(device=10, host=10), rates=RATES, step_s=0.1
    )
    device, host, disk, encode = plan.rows

    assert device.load_s == pytest.approx(20e-6)
    assert host.load_s == pytest.approx(0.011, rel=0.01)
    assert disk.load_s == pytest.approx(0.111, rel=0.01)
    assert encode.load_s is None
    assert (device.overlapped_s, host.direct_s, disk.direct_s) == (0, 0, 0)
    assert (host.stall, encode.stall) == (0, None)
    assert disk.stall == pytest.approx((0.1111 - 0.1) / 0.1111, abs=0.001)


def test_on_a_cpu_only_the_disk_works_beside_the_step() -> None:
    host, disk = plan_tiers(demand(1, example_bytes=1e6), machine(host=10), rates=RATES).rows[1:3]

    assert (host.overlapped_s, disk.direct_s) == (0, host.direct_s)
    assert disk.overlapped_s == pytest.approx(0.1, rel=0.01)


def test_without_a_second_core_every_load_is_waited_for() -> None:
    plan = plan_tiers(
        demand(1, device="cuda", example_bytes=1e6), machine(device=10, host=10, cpus=1.0), rates=RATES
    )

    assert [row.overlapped_s for row in plan.rows] == [0, 0, 0, 0]


def test_a_mixed_batch_loads_in_proportion() -> None:
    """Half of each batch from the host, half from disk: half of either's time."""
    plan = plan_tiers(demand(40, example_bytes=1e6), machine(host=25), rates=RATES)
    host, disk = plan.rows[1:3]
    assert host.direct_s is not None
    direct_s = host.direct_s
    overlapped_s = disk.overlapped_s / 2

    assert plan.stall_at(1.0) == pytest.approx(direct_s / (direct_s + 1.0))
    waits = direct_s + overlapped_s - 0.01
    assert plan.stall_at(0.01) == pytest.approx(waits / (waits + 0.01))


def test_until_a_step_is_timed_the_plan_says_which_steps_do_not_stall() -> None:
    plan = plan_tiers(demand(10, example_bytes=1e6), machine(host=25), rates=RATES)

    assert plan.no_stall_step_s is not None
    assert "no stall (below 1 %) at steps of 990 ms or longer" in plan.reason
    assert plan.stall_at(plan.no_stall_step_s) == pytest.approx(0.01)
    assert plan.to_json()["predicted_stall"] is None


def test_a_slower_tier_that_would_not_stall_is_named() -> None:
    resources = machine(device=100, host=25)

    slow = plan_tiers(demand(10, device="cuda"), resources, rates=RATES, step_s=1e-6)
    fast = plan_tiers(demand(10, device="cuda"), resources, rates=RATES, step_s=1.0)

    assert "would stall" not in slow.reason
    assert "host tier would stall 0 %" in fast.reason
    assert "disk tier would stall 0 %" in fast.reason


def test_the_reason_gives_the_figures_that_decided() -> None:
    reason = plan_tiers(demand(100), machine(host=25), rates=RATES).reason

    for part in (
        "100 records (97.7 KiB): 20 on the host tier, 80 on the disk tier",
        "19.5 KiB that may be filled",
        "24.4 KiB usable",
        "cgroup v1 memory.limit_in_bytes of /job",
        "reserve 4.9 KiB",
    ):
        assert part in reason
    assert "not measured" not in reason
    assert "typical ones, not measured here" in plan_tiers(demand(1), machine(host=25)).reason


def test_missing_records_make_the_stall_unknown() -> None:
    plan = plan_tiers(demand(10, missing_records=1), machine(host=25, disk_bytes=10**6), step_s=1.0)

    assert plan.stall_at(1.0) is None
    assert "1 of them not stored yet" in plan.reason
    assert plan.rows[3].note == "not stored yet; storing them takes 1000 B of disk, 977 KiB free"


def test_json_has_the_keys_that_scripts_read() -> None:
    plan = plan_tiers(demand(30), machine(host=25), step_s=0.01).to_json()

    assert plan["tiers"] == {"device": 0, "host": 20, "disk": 10, "encode": 0}
    assert plan["bytes"] == 30 * RECORD
    assert isinstance(plan["reason"], str)
    assert isinstance(plan["predicted_stall"], float)
    assert [row["tier"] for row in plan["rows"]] == list(TIERS)  # type: ignore[index, union-attr]


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: plan_tiers(demand(1), machine(host=9), tier="gpu"), id="no-such-tier"),
        pytest.param(lambda: plan_tiers(demand(1), machine(host=9), step_s=0.0), id="no-step"),
        pytest.param(lambda: plan_tiers(demand(1), machine(host=9), step_s=float("nan")), id="nan-step"),
        pytest.param(lambda: demand(-1), id="negative-records"),
        pytest.param(lambda: demand(1, missing_records=2), id="more-missing-than-there-are"),
        pytest.param(lambda: demand(1, batch_examples=0), id="empty-batch"),
    ],
)
def test_nonsense_is_refused(make: Any) -> None:
    with pytest.raises(ConfigError):
        make()


def test_a_step_that_was_tried_says_what_batches_cost_beside_it() -> None:
    """Loading beside a step slows it, and part of a long load is hidden: no sum of parts gives that."""
    load = BatchLoad(alone_s=4e-3, direct_s=1e-4, overlapped_s=3.9e-3, at_step=(2e-3, 1e-3))
    plan = plan_tiers(
        demand(10), machine(host=25), step_s=2e-3, rates=Rates(served={"host": load}, measured=True)
    )
    host = plan.rows[1]

    assert plan.stall_at(2e-3) == pytest.approx(1 / 3)
    assert host.stall == pytest.approx(1 / 3)
    # A longer step hides no less, a shorter one comes nearer to no step at all.
    assert plan.stall_at(8e-3) == pytest.approx(1 / 9)
    assert plan.stall_at(1e-3) == pytest.approx(2.5 / 3.5)


def test_what_was_tried_of_one_tier_counts_by_its_share() -> None:
    load = BatchLoad(alone_s=4e-3, direct_s=0.0, overlapped_s=4e-3, at_step=(2e-3, 3e-3))
    other = BatchLoad(alone_s=0.0, direct_s=0.0, overlapped_s=0.0)
    plan = plan_tiers(
        demand(40), machine(host=25), rates=Rates(served={"disk": load, "host": other}, measured=True)
    )
    assert plan.rows[1].records == plan.rows[2].records

    # Half of 4 ms is hidden by the step; beside it half of 1 ms more was lost than that says.
    assert plan.stall_at(2e-3) == pytest.approx(0.5 / 2.5)


@pytest.mark.parametrize(
    ("step_cpus", "direct_s", "overlapped_s"),
    [pytest.param(1.0, 1e-3, 9e-3, id="a-core-is-free"), pytest.param(4.0, 10e-3, 0.0, id="none-is")],
)
def test_loads_that_were_served_win_over_rates(
    step_cpus: float, direct_s: float, overlapped_s: float
) -> None:
    served = {"host": BatchLoad(alone_s=10e-3, direct_s=1e-3, overlapped_s=9e-3)}
    plan = plan_tiers(
        demand(10, step_cpus=step_cpus), machine(host=25), rates=Rates(served=served, measured=True)
    )
    host, disk = plan.rows[1:3]

    assert (host.direct_s, host.overlapped_s) == (direct_s, overlapped_s)
    assert disk.load_s != host.load_s  # nothing was served from there: by rates, as ever


def test_tables_on_the_device_are_planned_for() -> None:
    """A GPU that holds the records and not their order runs out of memory amid training."""
    asked = demand(100, device="cuda", table_bytes=20 * RECORD)

    with pytest.raises(ResourceError):
        plan_tiers(asked, machine(device=119, host=500), tier="device", reserve_bytes=0)
    for one, room in ((asked, 120), (demand(100, device="cuda"), 100)):
        plan = plan_tiers(one, machine(device=room, host=500), tier="device", reserve_bytes=0)
        assert counts(plan) == (100, 0, 0, 0)


def tried(stall_s: tuple[float, float, float], *, others_cpus: float = 0.0) -> BatchLoad:
    """A load of which a step of 20 ms was found to lose the middle one of these seconds."""
    low, found, high = stall_s
    return BatchLoad(
        alone_s=4e-3,
        direct_s=1e-4,
        overlapped_s=3.9e-3,
        at_step=(20e-3, found),
        lost_range=Interval(low, high),
        trials=4,
        use=MachineUse(cpus=2.0, others_cpus=others_cpus, pressure=0.6),
    )


def planned(**served: BatchLoad) -> Plan:
    return plan_tiers(demand(10), machine(host=25), step_s=20e-3, rates=Rates(served=served, measured=True))


def test_a_plan_says_in_which_range_the_stall_of_a_run_will_lie() -> None:
    plan = planned(host=tried((4e-4, 8e-4, 20e-4)))
    said = plan.to_json()

    assert plan.predicted_stall == said["predicted_stall"] == pytest.approx(0.8 / 20.8)
    assert plan.predicted_stall_low == said["predicted_stall_low"] == pytest.approx(0.4 / 20.4)
    assert plan.predicted_stall_high == said["predicted_stall_high"] == pytest.approx(2 / 22)
    assert plan.stall_range_at(20e-3) == (plan.predicted_stall_low, plan.predicted_stall_high)
    assert "waits 3.8 % of its time" in plan.reason
    assert "between 2 and 9 %" in plan.reason
    assert "wide" not in plan.reason


def test_without_trials_a_stall_has_no_range() -> None:
    plan = plan_tiers(demand(10), machine(host=25), step_s=20e-3)

    assert plan.predicted_stall is not None
    assert plan.predicted_stall_low is None
    assert plan.predicted_stall_high is None
    assert "likely" not in plan.reason


def test_a_wide_range_is_explained_by_who_uses_the_machine() -> None:
    busy = planned(host=tried((0.0, 3e-3, 6e-3), others_cpus=1.4)).reason
    quiet = planned(host=tried((0.0, 3e-3, 6e-3))).reason

    assert "1.4 of 2 cores" in busy
    assert "60 %" in busy
    assert "taskset" in busy
    assert "wide range" in quiet
    assert "taskset" not in quiet


@pytest.mark.parametrize("disk", [(0.0, 2e-4, 10e-4), (0.0, 1e-5, 2e-5), (2e-3, 3e-3, 4e-3)])
def test_no_trial_moves_records(disk: tuple[float, float, float]) -> None:
    """Placement follows from sizes, so that a second plan of a busy machine is the first one."""
    plan = planned(host=tried((4e-4, 8e-4, 20e-4)), disk=tried(disk))

    assert plan.records_by_tier() == {"device": 0, "host": 10, "disk": 0, "encode": 0}
    assert plan.tier == "host"


def test_a_slower_tier_that_waits_less_is_named_and_whether_that_is_certain() -> None:
    host = tried((8e-4, 12e-4, 20e-4))
    overlapping = planned(host=host, disk=tried((0.0, 6e-4, 10e-4))).reason
    apart = planned(host=host, disk=tried((0.0, 4e-4, 6e-4))).reason

    assert "ranges overlap" in overlapping
    assert "tier=disk" not in overlapping
    assert "disk" in apart
    assert "overlap" not in apart
