"""What a simulation says, held to the planner's formulas and to arithmetic by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stoker.errors import ConfigError
from stoker.extras.simulation.queues import RunTraffic, Visit, simulate_queues
from stoker.extras.simulation.result import HEAD, cells, encoding_with, remarks
from stoker.extras.simulation.run import hit_share, simulate
from stoker.extras.simulation.scenario import KEYS, Scenario, parse_scenario, rate
from stoker.plan import BatchLoad, Demand, Interval, Rates, Resources, plan_tiers, stall_of

SMALL = Scenario(records=10_000, record_bytes=1e6, batch=10, step_s=0.02, host_memory_bytes=100_000_000_000)
CLUSTER = replace(  # read as a mounted folder is, byte by byte
    SMALL, nodes=4, gpus=2, gpu_memory_bytes=16_000_000_000, store="s3", network_bytes_s=1e9,
    store_bytes_s=2e9, read_s=0.004, encode_s=0.002, raw_bytes=4e6, cores=8, fetch_bytes=1,
)  # fmt: skip


COMPLETE = "records=1e6 record_bytes=1MB batch=32 step=20ms host_memory=64GB"
RATES = [key for key, (_, read, _) in KEYS.items() if read is rate]


def queue(load_s: float, step_s: float, *, inline_s: float = 0.0, **more: object) -> float:
    """Seconds of a step with its wait, of one rank and one place unless `more` says otherwise."""
    given = {"nodes": 1, "ranks": 1, "depth": 4, **more}
    traffic = RunTraffic(
        visits=[Visit(place="link", seconds=load_s)], inline_s=inline_s, step_s=step_s, **given
    )  # type: ignore[arg-type]
    return simulate_queues(traffic, 200).period_s


@pytest.mark.parametrize(("load_s", "step_s"), [(0.07, 0.031), (0.01, 0.03), (0.02, 0.02)])
def test_one_rank_waits_as_the_planner_says(load_s: float, step_s: float) -> None:
    beside, inline = queue(load_s, step_s), queue(0.0, step_s, inline_s=load_s)

    assert 1 - step_s / beside == pytest.approx(stall_of(load_s, step_s, prefetch=True), abs=1e-9)
    assert 1 - step_s / inline == pytest.approx(stall_of(load_s, step_s, prefetch=False), abs=1e-9)


def test_ranks_of_a_node_share_its_link_and_nodes_the_store() -> None:
    by_link = [queue(0.01, 0.015, ranks=ranks) for ranks in (1, 2, 4)]
    store = RunTraffic(
        nodes=4, ranks=1, visits=[Visit(place="store", seconds=0.01)], inline_s=0, step_s=0.015
    )

    assert by_link == pytest.approx([0.015, 0.02, 0.04], rel=0.01)
    assert simulate_queues(store, 200).period_s == pytest.approx(0.04, rel=0.05)
    assert queue(0.01, 0.015, nodes=4) == pytest.approx(0.015, rel=0.01)


def test_steps_that_vary_hold_up_all_ranks_and_the_same_seed_gives_the_same() -> None:
    even, uneven, again = (queue(0.0, 0.02, ranks=8, spread=spread, seed=1) for spread in (0.0, 0.1, 0.1))

    assert even == pytest.approx(0.02)
    # The largest of eight normal values lies 1.42 deviations above their mean.
    assert uneven == pytest.approx(0.02 * 1.142, rel=0.02)
    assert uneven == again != queue(0.0, 0.02, ranks=8, spread=0.1, seed=2)


def test_gradients_are_summed_after_each_step_and_all_wait_for_it() -> None:
    assert queue(0.0, 0.02, ranks=2, sync_s=0.005) == pytest.approx(0.025)


def test_more_ahead_evens_out_steps_that_vary() -> None:
    shallow, deep = (queue(0.018, 0.02, spread=0.5, depth=depth, seed=3) for depth in (1, 8))

    assert shallow > 1.05 * deep >= 1.05 * 0.0195


def test_steps_take_turns_at_too_few_cores() -> None:
    assert queue(0.0, 0.01, ranks=4, step_cores=1.0, cores=2) == pytest.approx(0.02)
    assert queue(0.0, 0.01, ranks=4, step_cores=0.0, cores=2) == pytest.approx(0.01)


def test_the_host_way_stalls_as_the_plan_of_the_same_demand_says() -> None:
    """One arithmetic: what a plan says of a machine a simulation of one node says too."""
    for load in (None, BatchLoad(alone_s=0.03, direct_s=0.004, overlapped_s=0.026)):
        served = {} if load is None else {"host": load}
        scenario = replace(SMALL, cores=2, served=served)
        demand = Demand(records=10_000, record_bytes=1e6, batch_examples=10, example_bytes=1e6)
        machine = Resources(
            host_bytes=100_000_000_000, host_total_bytes=100_000_000_000, host_limit="made up", cpus=2.0
        )
        plan = plan_tiers(demand, machine, tier="host", step_s=0.02, rates=Rates(served=served))

        assert simulate(scenario).way("host").stall == pytest.approx(plan.stall_at(0.02), abs=1e-6)


def test_the_slowest_stage_of_precompute_sets_the_pace_and_more_of_it_passes_it_on() -> None:
    one = replace(
        SMALL, read_s=0.008, encode_s=0.002, write_s=0.0005, raw_bytes=1e4, record_bytes=1e4, cores=16,
        start_s=3, gpus=4, gpu_memory_bytes=16_000_000_000,
    )  # fmt: skip

    found = [encoding_with(replace(one, workers=workers), 1) for workers in (1, 2, 3, 8)]

    assert [each.bottleneck for each in found] == ["workers", "workers", "workers", "encoder"]
    assert [each.seconds for each in found] == pytest.approx([83, 43, 29.7, 23], rel=0.01)
    on_two_cores = encoding_with(replace(one, workers=8, cores=2), 1)
    assert (on_two_cores.bottleneck, round(on_two_cores.seconds)) == ("cores", 46)
    by_disk = encoding_with(replace(one, workers=8, disk_bytes_s=2e6), 1)
    assert (by_disk.bottleneck, round(by_disk.seconds)) == ("disk", 103)
    assert encoding_with(replace(one, workers=8), 4).node_read_bytes == 1e8


def test_bytes_are_those_that_each_way_moves() -> None:
    found = simulate(replace(CLUSTER, network_bytes_s=1e11, store_bytes_s=1e11))
    every, set_bytes = {way.name: way for way in found.ways}, 1e10

    assert every["store"].epoch_bytes == every["store"].first_bytes == set_bytes
    assert every["store"].epoch_node_bytes == set_bytes / 4
    assert every["encode"].epoch_bytes == 4 * set_bytes
    assert every["host"].epoch_bytes == 0
    # A node takes all records for its copy, and for its batches what of its quarter was not there yet.
    assert set_bytes < every["host"].read_bytes / 4 < 1.25 * set_bytes
    assert every["static"].device_bytes == set_bytes / 8
    assert every["static-host"].host_bytes == set_bytes / 4
    assert set_bytes < every["static-host"].read_bytes < 1.25 * set_bytes


def test_stores_that_are_too_slow_set_the_pace_and_the_cure_names_the_rate_needed() -> None:
    way = simulate(CLUSTER).way("store")

    # 8 ranks ask for 10 MB each 20 ms.
    assert way.epoch_s == pytest.approx(5.0, rel=0.05)
    assert way.bottleneck == "the store, 2 GB/s"
    assert way.cure.startswith("store_rate=4 GB/s")
    assert simulate(replace(CLUSTER, store_bytes_s=4.5e9, network_bytes_s=9e9)).way("store").stall < 0.02


def test_a_copy_with_a_size_limit_saves_what_it_has() -> None:
    half = simulate(replace(CLUSTER, disk_bytes=5_000_000_000)).way("mirror")
    whole = simulate(replace(CLUSTER, disk_bytes=10_000_000_000))
    static = simulate(replace(CLUSTER, disk_bytes=2_500_000_000, partition="static")).way("mirror")

    assert half.epoch_bytes == pytest.approx(1e10 * (1 - hit_share(0.5, 4)), rel=1e-6)
    assert half.first_bytes == 1e10
    # In blocks of 4 MB each read of 1 MB moves 5 MB, unless neighbors are asked for together.
    blocks, in_order = (
        simulate(replace(CLUSTER, disk_bytes=5_000_000_000, fetch_bytes=4_000_001, shuffle=shuffle)).way(
            "mirror"
        )
        for shuffle in (True, "block")
    )
    assert blocks.first_bytes == 5e10
    assert in_order.epoch_bytes == half.epoch_bytes < blocks.epoch_bytes / 4
    assert "mirror" not in {way.name for way in whole.ways}
    assert whole.way("disk").epoch_bytes == static.epoch_bytes == 0


def test_filling_that_takes_epochs_is_said_and_only_later_ones_read_nothing() -> None:
    """10 GB onto each of 4 nodes through 0.5 GB/s take 20 s, beside epochs that take 5 s later."""
    slow = replace(CLUSTER, disk_bytes=10_000_000_000, epochs=20)
    way, short = simulate(slow).way("disk"), simulate(replace(slow, epochs=3)).way("disk")

    assert way.filled_s is not None
    assert way.filled_s > 20
    assert way.filling_epochs > 1
    assert way.total_s > way.encoding_s + 20 * way.epoch_s + 5
    assert f"in epoch {way.filling_epochs}" in " ".join(remarks(simulate(slow)))
    assert cells(way)[HEAD.index("filled")] == f"epoch {way.filling_epochs}"
    assert (short.filled_s, short.filling_epochs) == (None, 3)
    assert cells(short)[HEAD.index("filled")] == "not in time"


@pytest.mark.parametrize(
    ("room", "lacking", "said"),
    [
        pytest.param(0, 1.0, "in the store, with no local disk to copy them to: 20 % of all", id="none"),
        pytest.param(1_000, 1 - hit_share(0.5, 4), "in the store, with room for 1,000 on each", id="half"),
        pytest.param(2_000, 0.0, "on the nodes' disks", id="all"),
    ],
)
def test_what_memory_lacks_lies_on_local_disks_as_far_as_they_have_room(
    room: int, lacking: float, said: str
) -> None:
    quick = replace(CLUSTER, network_bytes_s=1e11, store_bytes_s=1e11, gpu_memory_bytes=0)
    way = simulate(replace(quick, host_memory_bytes=10**10, disk_bytes=room * 10**6)).way("tiers")

    assert f"of 10,000 records 8,000 in host memory, 2,000 {said}" in way.remark
    assert way.disk_bytes == room * 1e6
    assert way.epoch_bytes == pytest.approx(0.2 * 1e10 * lacking)
    copied = 4 * (8e9 + (2e9 if not lacking else 0))  # a copy with a limit fills with what batches read
    in_first = copied + (0.2 * 1e10 if lacking else 0)
    assert in_first < way.first_bytes < in_first + 0.25e10


def test_rates_of_a_network_that_no_store_is_behind_are_said_to_go_unused() -> None:
    assert any("store=local" in line for line in simulate(replace(SMALL, network_bytes_s=1e9)).taken)
    assert not any("store=local" in line for line in simulate(CLUSTER).taken + simulate(SMALL).taken)


def test_windows_that_overlap_are_encoded_more_than_once() -> None:
    windows = replace(SMALL, encode_s=0.001, examples=40_000, example_bytes=5e5)
    found = simulate(windows)

    assert found.way("encode").encoded_samples == 20_000
    assert "20,000 samples are encoded in each epoch, each 2.00 times" in found.way("encode").remark
    assert "times on average" not in simulate(replace(SMALL, encode_s=0.001)).way("encode").remark
    assert found.way("host").encoded_samples == 0


def test_what_does_not_fit_is_said_with_figures_and_the_rest_goes_on() -> None:
    found = simulate(replace(CLUSTER, host_memory_bytes=8_000_000_000))
    host = found.way("host")

    assert not host.fits
    assert "9.3 GiB" in host.why_not
    assert "6.0 GiB of host memory may be filled" in host.why_not
    assert "Use tier" not in host.why_not
    assert found.way("static").fits
    assert "what does not fit: disk, host" in found.reason


def test_nothing_that_fits_is_an_answer_too() -> None:
    found = simulate(replace(SMALL, host_memory_bytes=10**9, disk_bytes=10**9))

    assert (found.fastest, found.cheapest) == ("tiers", "") or found.reason.startswith("nothing fits")


def test_no_cost_is_said_without_a_price() -> None:
    found = simulate(CLUSTER)

    assert found.cheapest == ""
    assert {way.cost for way in found.ways} == {None}
    assert "no price given" in found.reason


def test_costs_are_hours_bytes_and_a_month() -> None:
    scenario = parse_scenario(
        ["nodes=2", "network=1GB/s", "store=s3", "records=10_000", "record_bytes=1MB", "raw_bytes=2MB",
         "batch=10", "step=20ms", "host_memory=100GB", "epochs=3", "price_node_hour=36",
         "price_gb_month=0.5", "price_gb_read=0.1", "fetch=1B"]
    )  # fmt: skip
    found = simulate(scenario)
    way, encoding = found.way("store"), found.encoding

    hours = 2 * 36 * (way.total_s - encoding.seconds) / 3600 + encoding.nodes * 36 * encoding.seconds / 3600
    assert way.cost == pytest.approx(hours + 0.5 * 10 + 0.1 * (3 * 10 + 20))
    assert found.cheapest in {one.name for one in found.ways}


def test_reads_of_a_store_are_those_of_a_mirror() -> None:
    from stoker.store.mirror import AT_ONCE
    from stoker.store.mirror_blocks import BLOCK_BYTES

    assert (SMALL.fetch_bytes, SMALL.requests) == (BLOCK_BYTES, AT_ONCE)


def test_cores_that_share_what_they_compute_with_are_worth_what_they_were_measured_at() -> None:
    steps = {
        ranks: simulate(replace(SMALL, gpus=ranks, cores=1.25, step_cpus=1.0, copy_bytes_s=1e15)).way("host")
        for ranks in (1, 2, 4)
    }

    assert steps[1].epoch_s / 1000 == pytest.approx(0.02, rel=0.01)
    assert steps[2].epoch_s / 500 == pytest.approx(0.02 * 2 / 1.25, rel=0.01)
    assert steps[4].epoch_s / 250 == pytest.approx(0.02 * 4 / 1.25, rel=0.01)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        pytest.param("nods=8", "nods is not a key of a simulation (did you mean nodes?)", id="key"),
        pytest.param("step=20", "step: '20' has no unit of time. Expected 20ms", id="time"),
        pytest.param("record_bytes=100", "record_bytes: '100' has no unit of size", id="size"),
        pytest.param(
            "network=25GB", "network: '25GB' has no unit of rate. Expected 25Gb/s (bits)", id="rate"
        ),
        pytest.param("nodes=2.5", "nodes: '2.5' is not a whole number", id="count"),
        pytest.param("nodes=2 nodes=3", "nodes is given twice", id="twice"),
        pytest.param("nodes", "'nodes' is not of the form key=value", id="word"),
        pytest.param("nodes=8", "needs records=, record_bytes=, batch=, step=, host_memory=", id="lacking"),
        pytest.param("nodes=-1", "nodes: '-1' is below 0", id="negative"),
        pytest.param("price_node_hour=-3", "price_node_hour: '-3' is below 0", id="price"),
        pytest.param("record_bytes=103kb", "b is a bit, B a byte. Expected 103KB", id="bits"),
        pytest.param("store=foo network=1Gb/s", "store: 'foo' is unknown. Expected local, each", id="store"),
        pytest.param("shuffle=foo", "shuffle: 'foo' is unknown. Expected true", id="shuffle"),
        pytest.param("partition=foo", "partition: 'foo' is unknown. Expected global", id="partition"),
        pytest.param(f"{COMPLETE} epochs=1e30", "epochs is 1e+30. Expected 1e+06 at most", id="huge"),
        pytest.param(f"{COMPLETE} nodes=1e9", "1,000,000,000 ranks. Expected 16,384", id="ranks"),
        *(pytest.param(f"{COMPLETE} {key}=0B/s", f"{key} is 0. Expected more", id=key) for key in RATES),
    ],
)
def test_what_is_typed_wrong_is_named(words: str, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_scenario(words.split())

    assert said in str(raised.value)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        pytest.param({"nodes": 0}, "nodes is 0", id="none"),
        pytest.param({"step_s": float("nan")}, "step_s is nan", id="nan"),
        pytest.param({"batch": 20_000}, "but an epoch has 10000", id="batch"),
        pytest.param({"encoders": 9}, "encoders=9 on 8 ranks", id="encoders"),
        pytest.param({"network_bytes_s": None}, "whose rate is not known", id="network"),
        pytest.param({"shuffle": "wild"}, "shuffle 'wild' is unknown", id="shuffle"),
        pytest.param({"partition": "wild"}, "partition 'wild' is unknown", id="partition"),
    ],
)
def test_what_cannot_be_is_refused_in_words(changes: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        replace(CLUSTER, **changes)


def test_times_with_ranges_give_ranges() -> None:
    load = BatchLoad(
        alone_s=0.004, direct_s=0.004, overlapped_s=0.0, alone_range=Interval(0.002, 0.008), trials=4
    )
    exact = replace(SMALL, served={"host": replace(load, alone_range=None)}, encode_s=0.01)
    found = simulate(replace(exact, served={"host": load}, ranges={"encode_s": Interval(0.008, 0.02)}))
    way = found.way("host")

    assert simulate(exact).way("host").epoch_range_s is None
    assert way.epoch_s == simulate(exact).way("host").epoch_s
    assert way.epoch_range_s == pytest.approx((1000 * 0.022, 1000 * 0.028), rel=0.01)
    assert way.stall_range == pytest.approx((2 / 22, 8 / 28), rel=0.01)
    assert way.encoding_range_s is not None
    assert way.encoding_range_s.low < way.encoding_s < way.encoding_range_s.high
    assert way.total_range_s is not None
    assert found.first_epoch_while_encoding_range_s is not None
    assert (
        found.first_epoch_while_encoding_range_s.low
        < found.first_epoch_while_encoding_s
        < found.first_epoch_while_encoding_range_s.high
    )
    said = found.to_json()
    assert said["first_epoch_while_encoding_range_s"] == list(found.first_epoch_while_encoding_range_s)
    assert "likely" in found.reason


def test_a_range_of_what_is_no_time_is_refused() -> None:
    with pytest.raises(ConfigError, match="records"):
        replace(SMALL, ranges={"records": Interval(1, 2)})
    with pytest.raises(ConfigError, match="step_s"):
        replace(SMALL, ranges={"step_s": Interval(-1, 2)})


def test_training_at_once_waits_for_the_start_of_its_own_processes() -> None:
    given = replace(SMALL, start_s=1.0, fill_start_s=2.5, encode_s=0.001)

    assert simulate(given).first_epoch_while_encoding_s - simulate(
        replace(given, fill_start_s=None)
    ).first_epoch_while_encoding_s == pytest.approx(1.5)
    assert simulate(given).encoding.seconds == simulate(replace(given, fill_start_s=None)).encoding.seconds
