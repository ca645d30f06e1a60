"""What a person sees while training goes on."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from stoker.cli.output import TrainDisplay, TrainScreen, draw, line, watching

INTERVAL: dict[str, Any] = {
    "step": 120, "epoch": 2, "total": 1000, "stall": 0.25, "wait_s": 0.5, "step_s": 1.5, "examples": 6400,
    "batches": 100, "tiers": {"host": 4800, "disk": 1600}, "parts": {"read": 0.4, "gather": 0.1},
    "lost": 0.31,
}  # fmt: skip
EVENTS: list[tuple[str, dict[str, Any]]] = [
    ("serve", {"name": "burgers1d_train", "tiers": {"device": 0, "host": 900, "disk": 100, "encode": 0},
               "reason": "900 on the host tier: 3.1 GiB of 4 GiB"}),
    ("start", {"step": 20, "total": 1000}),
    ("stall", {**INTERVAL, "step": 20}),
    ("step", {"step": 110, "epoch": 2, "loss": 0.0123}),
    ("stall", INTERVAL),
    ("epoch", {"val_nrmse": 0.045}),
]  # fmt: skip


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def played(clock: Clock, watcher: TrainDisplay, step_s: float = 50.0) -> None:
    for kind, facts in EVENTS:
        clock.now_s += step_s
        watcher.listen(kind, facts)


def text_of(screen: TrainScreen, width: int = 120) -> str:
    out = Console(file=io.StringIO(), width=width)
    out.print(draw(screen))
    return out.file.getvalue()


def test_one_screen_has_everything_a_person_asks_for() -> None:
    clock, shown = Clock(), list[str]()

    played(clock, TrainDisplay(pytest.fail, lambda screen: shown.append(text_of(screen)), clock=clock))

    last = shown[-1]
    for what in (
        "burgers1d_train", "step 120 of 1,000", "epoch 2",
        "43 samples/s", "loss 0.0123", "NRMSE 0.045", "31 % below its compute-only ceiling",
        "25 %", "read 20 % · gather 5.0 %",
        "host", "75 % of batches", "900 records", "disk", "100 records",
        "22 min 0 s left",  # 100 steps of 64 examples took 150 s with the validation, 880 are to go
    ):  # fmt: skip
        assert what in last, what
    assert "device" not in last  # a tier that holds and serves nothing
    assert len(last.splitlines()) <= 8


def test_a_screen_can_be_drawn_before_anything_is_known() -> None:
    assert "measured in a moment" in text_of(TrainScreen())
    assert line(TrainScreen()).startswith("step 0 of 0")


def test_rate_and_time_left_agree_and_include_validation() -> None:
    """A slow start counts in neither; of a changing pace, the last epochs count in both."""
    screen, now_s, step = TrainScreen(), 0.0, 0
    screen.take("start", {"step": 0, "total": 400}, now_s)
    now_s += 500.0  # compiling
    for epoch, step_s in enumerate((9.0, 9.0, 1.0, 1.0)):
        for _ in range(10):
            now_s, step = now_s + 5 * step_s, step + 5
            screen.take("stall", {**INTERVAL, "step": step, "examples": 40}, now_s)
            if screen.rate is None:
                assert screen.left_s is None
            else:
                assert screen.left_s == pytest.approx((400 - step) * 8 / screen.rate)  # 8 a step
        now_s += 50.0  # validation
        screen.take("epoch", {"epoch": epoch}, now_s)
        if epoch == 0:
            assert screen.rate == pytest.approx(8 * 45 / (45 * 9 + 50))

    # 50 steps of a second and then 50 s of validation, twice.
    assert (screen.rate, screen.left_s) == (pytest.approx(4.0), pytest.approx(400.0))


def test_without_a_terminal_there_is_a_line_now_and_then() -> None:
    clock, said = Clock(), list[str]()
    watcher = TrainDisplay(said.append, None, clock=clock)
    played(clock, watcher)
    for _ in range(25):
        clock.now_s += 1.0
        watcher.listen("stall", INTERVAL)

    assert said[0] == (
        "step 20 of 1,000 · stall 25 % (read 20 %, gather 5.0 %) · host tier"  # the pace is not known yet
    )
    assert said[1] == (
        "step 120 of 1,000 · 64 samples/s · loss 0.0123 · stall 25 % (read 20 %, gather 5.0 %) · "
        "host tier · 14 min 40 s left"
    )
    assert len(said) == 5  # 25 more seconds, a line for every ten of them, and the epoch's 50 s


def test_the_screen_begins_with_training_and_goes_away() -> None:
    """What encodes beforehand draws a screen of its own."""
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=100)

    with watching(console, pytest.fail, live=True) as listen:
        assert stream.getvalue() == ""
        listen(*EVENTS[0])
        assert "burgers1d_train" in stream.getvalue()
