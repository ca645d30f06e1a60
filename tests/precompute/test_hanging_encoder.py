"""An encoder past its deadline ends the run, with the stacks of all threads; what was encoded is kept."""

from __future__ import annotations

import os
import signal
import threading
import time

import numpy as np
import pytest
import torch

import stoker
from stoker.errors import Interrupted, StalledError
from stoker.precompute import PrecomputeSettings, Timeouts, in_process, run_precompute
from stoker.precompute import run as run_module
from stoker.precompute.background import recipe_of
from stoker.precompute.encode import BatchEncoder
from stoker.runtime import signals
from stoker.runtime.processes.heartbeat import HeartbeatPage
from tests.precompute.fake_encoders import FakeEncoder
from tests.precompute.fake_sources import FakeSource


class Hanging(FakeEncoder):
    """Hangs in one of its calls until it is let go; with every later one it is quick."""

    def __init__(self, at=0, **settings):
        super().__init__(**settings)
        self.at, self.go, self.stuck, self.moved = at, threading.Event(), threading.Event(), []

    def encode(self, batch):
        if len(self.calls) == self.at:
            self.calls.append(())
            self.stuck.set()
            self.go.wait(60.0)
        return super().encode(batch)

    def to(self, device):
        self.moved.append(device)
        super().to(device)


@pytest.fixture
def hanging():
    encoder = Hanging(at=3)  # the first group is encoded twice
    yield encoder
    encoder.go.set()


def signal_when(event, number):
    def send():
        event.wait(60.0)
        time.sleep(0.3)  # a signal that comes just before the call that blocks would not end it
        os.kill(os.getpid(), number)

    threading.Thread(target=send, daemon=True).start()


def settings(workers=0, encode=0.3, **changes):
    return PrecomputeSettings(workers=workers, progress=None, timeouts=Timeouts(encode=encode), **changes)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_hanging_encoder_ends_the_run_and_a_second_run_resumes(tmp_path, hanging, workers):
    source = FakeSource((16,))
    with pytest.raises(StalledError, match="samples 8-11") as raised:
        run_precompute(source, hanging, tmp_path, name="c", settings=settings(workers))

    (stack,) = (tmp_path / ".workers").glob("encoder-*.txt")
    assert str(stack) in str(raised.value)
    assert "test_hanging_encoder.py" in stack.read_text()
    report = run_precompute(source, hanging, tmp_path, name="c", settings=settings(workers, encode=60.0))
    assert (report.reused, report.encoded) == (8, 8)
    fresh = run_precompute(source, FakeEncoder(), tmp_path / "b", name="c", settings=settings(encode=60.0))
    assert all(torch.equal(report.cache[n]["latent"], fresh.cache[n]["latent"]) for n in range(16))


def test_an_encoder_that_is_stuck_is_not_moved(tmp_path, hanging, monkeypatch):
    """It would be changed under the call that is still at it, or hang the caller as well."""
    monkeypatch.setattr(
        run_module, "resolve_device", lambda _: "meta"
    )  # as if it was a GPU, with nothing on it
    monkeypatch.setattr(BatchEncoder, "_output", lambda self, batch: self._encoder.encode(batch))
    monkeypatch.setattr(FakeEncoder, "to", lambda *_: None)
    monkeypatch.setattr(in_process, "GRACE_S", 0.2)
    signal_when(hanging.stuck, signal.SIGTERM)
    with pytest.raises(Interrupted):
        run_precompute(FakeSource((16,)), hanging, tmp_path, name="c", settings=settings(encode=60.0))
    assert len(hanging.moved) == 1

    hanging.go.set()
    run_precompute(FakeSource((16,)), hanging, tmp_path, name="c", settings=settings(encode=60.0))
    assert len(hanging.moved) == 3


def test_a_call_that_was_given_up_writes_nothing_when_it_comes_back(tmp_path, hanging):
    hanging.raises = 8
    with pytest.raises(StalledError):
        run_precompute(FakeSource((16,)), hanging, tmp_path, name="c", settings=settings())
    hanging.go.set()
    calls = len(hanging.calls)
    time.sleep(0.2)

    assert len(hanging.calls) <= calls + 1  # the samples of the group are not tried one by one
    assert not list(tmp_path.glob("c/*/failures-*"))


class SlowToArrive(FakeEncoder):
    """Takes its time on the way to the device."""

    def to(self, device):
        time.sleep(1.5)


def test_an_encoder_that_hangs_on_its_way_to_the_device_ends_the_run_too(tmp_path):
    with pytest.raises(StalledError, match="cpu"):
        run_precompute(FakeSource((4,)), SlowToArrive(), tmp_path, name="c", settings=settings())


class SlowToSay(FakeEncoder):
    """Runs its network to learn the shape of its output, as `ModuleEncoder` does."""

    def schema(self, sample_schema):
        time.sleep(1.5)
        return super().schema(sample_schema)


def test_an_encoder_that_hangs_at_a_sample_of_zeros_ends_the_run_too(tmp_path):
    with pytest.raises(StalledError):
        run_precompute(FakeSource((4,)), SlowToSay(), tmp_path, name="c", settings=settings())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("workers", [0, 1])
def test_one_signal_ends_a_run_whose_encoder_hangs(tmp_path, hanging, number, workers, monkeypatch):
    monkeypatch.setattr(in_process, "GRACE_S", 0.2)
    signal_when(hanging.stuck, number)
    with pytest.raises(Interrupted, match="8 of 16"):
        run_precompute(FakeSource((16,)), hanging, tmp_path, name="c", settings=settings(workers, 60.0))

    hanging.go.set()
    report = run_precompute(FakeSource((16,)), hanging, tmp_path, name="c", settings=settings(workers, 60.0))
    assert (report.reused, report.encoded) == (8, 8)


def test_a_call_that_ends_soon_after_a_signal_is_kept(tmp_path):
    class Slow(FakeEncoder):
        def encode(self, batch):
            if len(self.calls) == 3:  # the first group is encoded twice
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.5)
            return super().encode(batch)

    with pytest.raises(Interrupted, match="12 of 16"):
        run_precompute(FakeSource((16,)), Slow(), tmp_path, name="c", settings=settings(encode=60.0))


def test_the_encoder_computes_as_in_the_thread_of_its_caller(tmp_path):
    """Torch and numpy keep some settings for each thread, and the bits of a record may depend on them."""

    def look():
        tiny = torch.tensor([1e-40], device="cpu") * 1.0
        return (
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.get_default_device(),
            torch.get_num_threads(),
            np.geterr()["over"],
            tiny.item(),
            torch.get_default_dtype(),
        )

    def both():
        return look(), in_process.ask_encoder(look, timeout_s=60.0, logs=tmp_path)

    plain, found = both()
    assert found == plain
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        torch.set_default_dtype(torch.float64)
        flushes = torch.set_flush_denormal(True)
        with torch.autocast("cpu", torch.float16), torch.device("meta"), np.errstate(over="raise"):
            here, found = both()
    finally:
        torch.set_flush_denormal(False)
        torch.set_default_dtype(torch.float32)
        torch.set_num_threads(threads)

    assert found == here
    differ = [one for one, (a, b) in enumerate(zip(plain, here, strict=True)) if a != b]
    assert differ == [0, 1, 2, 3, 4, 5, 6] if flushes else differ


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_one_signal_ends_a_run_that_reads_in_this_process(tmp_path, number):
    class Hangs(FakeSource):
        def read(self, number, start=None, stop=None):
            if number == 9:
                reached.set()
                time.sleep(60.0)
            return super().read(number, start, stop)

    reached = threading.Event()
    signal_when(reached, number)
    begun = time.monotonic()
    with pytest.raises(Interrupted, match="8 of 16"):
        run_precompute(Hangs((16,)), FakeEncoder(), tmp_path, name="c", settings=settings(encode=60.0))
    assert time.monotonic() - begun < 50.0
    assert not list(tmp_path.glob("c/*/failures-*"))


class HangsElsewhere(torch.utils.data.Dataset):
    """Gives its samples to the process that made it."""

    def __init__(self):
        self.process = os.getpid()

    def __len__(self):
        return 8

    def __getitem__(self, index):
        while self.process != os.getpid():
            time.sleep(0.1)
        return {"data": torch.full((3,), float(index))}


def test_one_signal_ends_a_run_that_tries_the_dataset_in_a_second_process(tmp_path):
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
    begun = time.monotonic()
    source = stoker.TorchSource(HangsElsewhere())
    with pytest.raises(Interrupted):
        run_precompute(source, None, tmp_path, name="c", settings=settings(1, encode=60.0))
    assert time.monotonic() - begun < 50.0


def test_a_guardian_is_told_the_deadline_of_an_encoder_that_is_tried_for_the_recipe(tmp_path, monkeypatch):
    page, limits = HeartbeatPage.create(), []

    class Noting(FakeEncoder):
        def schema(self, sample_schema):
            limits.append(page.look().limit_s)
            return super().schema(sample_schema)

    monkeypatch.setattr(signals, "_page", page)

    recipe_of(FakeSource(), Noting(), tmp_path, settings(encode=7.0))

    assert limits == [7.0]
    assert page.look().limit_s == 0.0
    page.close()
