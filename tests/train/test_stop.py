from __future__ import annotations

import os
import signal
import threading

import pytest

from stoker.train.stop import StopFlag


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_sets_the_flag_and_gives_the_handlers_back(number: signal.Signals) -> None:
    before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}

    with StopFlag() as stop:
        assert stop.signal_name is None
        os.kill(os.getpid(), number)
        assert stop.signal_name == number.name
        assert {n: signal.getsignal(n) for n in before} == before  # so a second one is not swallowed


def test_handlers_are_given_back_without_a_signal() -> None:
    before = signal.getsignal(signal.SIGTERM)

    with StopFlag():
        assert signal.getsignal(signal.SIGTERM) != before

    assert signal.getsignal(signal.SIGTERM) == before


def test_outside_the_main_thread_it_does_nothing() -> None:
    failures: list[BaseException] = []

    def enter() -> None:
        try:
            with StopFlag() as stop:
                assert stop.signal_name is None
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join(timeout=10)

    assert not failures
