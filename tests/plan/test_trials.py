"""When a trial is repeated, and how often its range holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from stoker.plan.trials import (
    LEAST_TRIALS,
    MOST_TRIALS,
    Interval,
    MachineUse,
    UseMeter,
    mean_interval,
    next_interval,
    repeat_trial,
    say_why_wide,
)

SEEDS = 400


class Clock:
    """Goes on by the seconds of each trial alone."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def repeated(draw: Callable[[], float], *, trial_s: float = 0.1, limit_s: float = 10.0) -> list[float]:
    clock = Clock()

    def trial(_number: int) -> float:
        clock.now_s += trial_s
        return draw()

    return repeat_trial(trial, limit_s, clock=clock)


def test_a_quiet_machine_needs_the_least_trials() -> None:
    random = np.random.default_rng(0)
    counts = [len(repeated(lambda: random.normal(1.0, 0.01))) for _ in range(SEEDS)]

    assert set(counts) == {LEAST_TRIALS}


def test_trials_that_differ_are_repeated_until_their_mean_is_known() -> None:
    random = np.random.default_rng(0)
    results = [repeated(lambda: random.normal(1.0, 0.08)) for _ in range(SEEDS)]

    assert np.mean([len(found) for found in results]) > LEAST_TRIALS + 1
    for found in results:
        likely = mean_interval(found)
        assert len(found) == MOST_TRIALS or likely.width / 2 <= 0.05 * np.mean(found)


def test_nothing_is_repeated_after_the_time_limit() -> None:
    random = np.random.default_rng(0)

    assert len(repeated(lambda: random.normal(1.0, 0.5), trial_s=0.1, limit_s=0.55)) == 6
    # Trials that take far longer than was thought: not even the least are done.
    assert len(repeated(lambda: 1.0, trial_s=2.0, limit_s=1.0)) == 2


def test_a_trial_without_a_result_does_not_count() -> None:
    found = iter([1.0, None, 1.0, 1.0, 1.0])

    assert repeat_trial(lambda _: next(found), 1.0, clock=Clock()) == [1.0] * 4
    assert repeat_trial(lambda _: None, 1.0, clock=Clock()) == []
    assert next_interval([1.0]) is None


@pytest.mark.parametrize(
    "noise",
    [
        pytest.param(lambda random: random.normal(1.0, 0.01), id="quiet"),
        pytest.param(lambda random: random.normal(1.0, 0.2), id="busy"),
        pytest.param(lambda random: random.lognormal(0.0, 0.3), id="skewed"),
        pytest.param(lambda random: random.choice([1.05, 1.27]) + random.normal(0, 0.005), id="either-or"),
        pytest.param(lambda random: 1.0 + random.exponential(0.1), id="waits-of-a-drive"),
    ],
)
def test_the_range_holds_the_mean_and_the_next_run(noise: Callable[[np.random.Generator], float]) -> None:
    truth = float(np.mean([noise(np.random.default_rng([9, seed])) for seed in range(20_000)]))
    has_mean = has_next = 0
    for seed in range(SEEDS):
        random = np.random.default_rng(seed)
        likely = next_interval(repeated(lambda random=random: noise(random)))
        assert likely is not None
        has_mean += likely.low <= truth <= likely.high
        has_next += likely.low <= noise(random) <= likely.high

    assert has_mean >= 0.85 * SEEDS
    assert has_next >= 0.8 * SEEDS


def machine(proc: Path, *busy_ticks: int, waited_us: int) -> None:
    """Write what a system says whose cores were at work for so many ticks."""
    (proc / "pressure").mkdir(parents=True, exist_ok=True)
    lines = [f"cpu{core} {ticks} 0 0 900 0 0 0 0 0 0\n" for core, ticks in enumerate(busy_ticks)]
    (proc / "stat").write_text(f"cpu  {sum(busy_ticks)} 0 0 900 0 0 0 0 0 0\n{''.join(lines)}intr 5 1\n")
    (proc / "pressure/cpu").write_text(f"some avg10=0.00 avg60=0.00 avg300=0.00 total={waited_us}\n")


def use_of(proc: Path, *busy_ticks: int, cores: set[int]) -> MachineUse | None:
    """Return what is counted in 100 s, of which processes waited for 40."""
    clock = Clock()
    machine(proc, *[0] * len(busy_ticks), waited_us=0)
    meter = UseMeter(proc, clock, cores)
    clock.now_s = 100.0
    machine(proc, *busy_ticks, waited_us=40_000_000)
    return meter.read()


def test_what_other_processes_used_is_told(tmp_path: Path) -> None:
    use = use_of(tmp_path, 10_000, 5_000, cores={0, 1})

    assert use is not None
    assert use.is_shared
    assert use.others_cpus == pytest.approx(1.5, abs=0.1)
    assert use.pressure == pytest.approx(0.4)

    said = say_why_wide(Interval(0.02, 0.3), [use])
    assert "1.5 of 2 cores" in said
    assert "40 %" in said
    assert say_why_wide(Interval(0.02, 0.09), [use]) == ""


def test_a_neighbor_on_cores_that_are_not_ours_is_not_blamed(tmp_path: Path) -> None:
    busy = (10_000, 0, 3_000, 10_000)
    use = use_of(tmp_path, *busy, cores={1})

    assert use is not None
    assert (use.cpus, use.others_cpus, use.pressure) == (1.0, pytest.approx(0, abs=0.1), None)
    assert not use.is_shared
    on_ours = use_of(tmp_path, *busy, cores={1, 2})
    assert on_ours is not None
    assert on_ours.is_shared
    assert on_ours.others_cpus == pytest.approx(0.3, abs=0.1)


def test_a_core_that_the_system_does_not_list_is_no_error(tmp_path: Path) -> None:
    assert use_of(tmp_path, 10_000, cores={0, 7}) is None


def test_a_system_that_does_not_tell_is_no_error(tmp_path: Path) -> None:
    assert UseMeter(tmp_path).read() is None
    quiet = MachineUse(cpus=2.0, others_cpus=0.0, pressure=0.9)  # waits for its own threads

    assert not quiet.is_shared
    assert "few of the cores" in say_why_wide(Interval(0.0, 0.3), [quiet])
    assert "not known" in say_why_wide(Interval(0.0, 0.3), [None])
