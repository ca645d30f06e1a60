"""What a Python program sees of SIGINT and SIGTERM during a call."""

import contextlib
import os
import signal

import pytest

from stoker import precompute
from stoker.errors import Interrupted, StokerError
from stoker.train.loop import StopFlag
from tests.precompute.fake_encoders import FakeEncoder
from tests.precompute.fake_sources import FakeSource

SIGNALS = [signal.SIGINT, signal.SIGTERM]


class Signalling(FakeEncoder):
    """Sends a signal to this process at its third call, which is at samples 8 to 11."""

    def __init__(self, number):
        super().__init__()
        self.number = number

    def encode(self, batch):
        if len(self.calls) == 2:
            os.kill(os.getpid(), self.number)
        return super().encode(batch)


@contextlib.contextmanager
def handler(number, action):
    before = signal.signal(number, action)
    try:
        yield
    finally:
        assert signal.getsignal(number) is action
        signal.signal(number, before)


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("workers", [0, 1])
def test_code_that_catches_every_exception_lets_an_interrupt_through(tmp_path, number, workers):
    catch_all = contextlib.suppress(Exception)
    with handler(number, signal.default_int_handler), pytest.raises(KeyboardInterrupt) as raised, catch_all:
        precompute(FakeSource((16,)), Signalling(number), tmp_path, name="c", workers=workers)

    assert isinstance(raised.value, Interrupted)
    assert not isinstance(raised.value, StokerError)
    assert number.name in str(raised.value)
    cache = precompute(FakeSource((16,)), FakeEncoder(), tmp_path, name="c", workers=workers)
    assert len(cache) == 16


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("workers", [0, 1])
def test_a_signal_that_the_program_ignores_stays_ignored(tmp_path, number, workers):
    """As a shell without job control starts what runs in its background."""
    with handler(number, signal.SIG_IGN):
        cache = precompute(FakeSource((16,)), Signalling(number), tmp_path, name="c", workers=workers)

    assert len(cache) == 16


@pytest.mark.parametrize("number", SIGNALS)
def test_training_leaves_an_ignored_signal_ignored(number):
    with handler(number, signal.SIG_IGN), StopFlag() as stop:
        os.kill(os.getpid(), number)

        assert stop.signal_name is None
