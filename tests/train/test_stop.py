from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from stoker.runtime.signals import TOGETHER_S
from stoker.train.loop import StopFlag


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_sets_the_flag_and_a_later_one_acts_as_ever(number: signal.Signals) -> None:
    before = signal.signal(number, signal.default_int_handler)
    try:
        with StopFlag() as stop:
            assert stop.signal_name is None
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)  # a group's and a guardian's copy of the same request
            assert stop.signal_name == number.name
            time.sleep(TOGETHER_S + 0.1)
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), number)
        assert signal.getsignal(number) is signal.default_int_handler
    finally:
        signal.signal(number, before)


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
