"""The first groups are read and encoded where `precompute` is called; children follow where they pay."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stoker
from stoker.errors import DeviceError, SourceError
from stoker.precompute import queue, run
from stoker.precompute.encoder_processes import EncoderProcesses
from stoker.precompute.workers import Supervisor
from tests.precompute.fake_encoders import FakeEncoder
from tests.precompute.fake_sources import FakeSource


def refuse_children(patch: pytest.MonkeyPatch) -> None:
    def start(*_: Any, **__: Any) -> None:
        raise AssertionError("a child was started")

    patch.setattr(Supervisor, "start", start)
    patch.setattr(EncoderProcesses, "__init__", start)


def note_children(patch: pytest.MonkeyPatch) -> list[str]:
    """Return a list in which each start of workers and of encoders will be noted."""
    started: list[str] = []

    def noted(kind: type, method: str, what: str) -> None:
        start = getattr(kind, method)

        def run_noted(self: Any, *given: Any, **named: Any) -> None:
            started.append(what)
            start(self, *given, **named)

        patch.setattr(kind, method, run_noted)

    noted(Supervisor, "start", "workers")
    noted(EncoderProcesses, "__init__", "encoder")
    return started


@pytest.fixture
def no_children(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_children(monkeypatch)


def same(one: stoker.Cache, two: stoker.Cache) -> None:
    assert one.fingerprint == two.fingerprint
    assert one.indices.tolist() == two.indices.tolist() != []
    for number in one.indices.tolist():
        for name, value in one[number].items():
            assert torch.equal(value, two[number][name]), (number, name)


@pytest.mark.parametrize("encoder", [None, FakeEncoder(by_shape=True)], ids=["none", "encoder"])
def test_a_small_set_starts_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoder: Any) -> None:
    with monkeypatch.context() as patch:
        refuse_children(patch)
        cache = stoker.precompute(FakeSource((100, 30)), encoder, tmp_path, name="a")

    assert len(cache) == 130
    same(cache, stoker.precompute(FakeSource((100, 30)), encoder, tmp_path / "b", name="a", workers=0))


@pytest.mark.parametrize("encoder", [None, FakeEncoder(by_shape=True)], ids=["none", "encoder"])
def test_a_small_set_starts_no_process_without_waiting_either(tmp_path: Path, encoder: Any) -> None:
    """Not even the one that children are forked from: its imports would keep a core from the encoder."""
    code = """
    import sys, stoker
    from stoker.precompute import background
    from stoker.runtime.processes.child import TORCH
    from stoker.runtime.processes.preloaded import preloaded
    background._HERE_S = 60.0  # on a busy machine the set is not small: half a second is not enough for it
    from tests.precompute.fake_encoders import FakeEncoder
    from tests.precompute.fake_sources import FakeSource
    encoder = FakeEncoder(by_shape=True) if sys.argv[2] == "True" else None
    cache = stoker.precompute(FakeSource((100, 30)), encoder, sys.argv[1], name="a", wait=False)
    print(len(cache), preloaded(TORCH).pid)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path), str(encoder is not None)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.split() == ["130", "None"], done.stderr


@pytest.mark.usefixtures("no_children")
def test_a_sample_that_fails_here_is_quarantined(tmp_path: Path) -> None:
    source = FakeSource((60,), faults={7: "raise", 20: "nan"})

    cache = stoker.precompute(source, None, tmp_path, name="a", max_quarantined=0.1)

    assert len(cache) == 58
    assert [*cache.quarantined] == [7, 20]


@pytest.mark.parametrize("encoder", [None, FakeEncoder(by_shape=True)], ids=["none", "encoder"])
@pytest.mark.parametrize("start_s", [0.0, 0.5])
def test_workers_take_over_and_no_record_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoder: Any, start_s: float
) -> None:
    monkeypatch.setattr(queue, "FIRST_START_S", start_s)
    monkeypatch.setattr(run.StageBuilder, "is_ready", lambda _: True)  # the fork waits for imports
    started = note_children(monkeypatch)

    cache = stoker.precompute(FakeSource((300, 300), delay_s=0.004, run=13), encoder, tmp_path, name="a")

    assert started
    same(
        cache, stoker.precompute(FakeSource((300, 300), run=13), encoder, tmp_path / "b", name="a", workers=0)
    )


@pytest.mark.parametrize("preloaded", [False, True])
def test_children_that_can_be_forked_at_once_take_over_sooner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preloaded: bool
) -> None:
    """Reading takes 1.2 s: less than the imports of a child, far longer than a fork."""
    monkeypatch.setattr(run, "is_preloaded", lambda _modules: preloaded)
    started = note_children(monkeypatch)

    cache = stoker.precompute(FakeSource((300,), delay_s=0.004, run=13), None, tmp_path, name="a")

    assert len(cache) == 300
    assert bool(started) == preloaded


@pytest.mark.parametrize(("sleep_s", "children"), [(0.0, 0), (0.04, 1)])
def test_a_quick_encoder_stays_here_when_workers_take_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sleep_s: float, children: int
) -> None:
    """A child would have to import torch, which takes longer than all that it could do."""
    monkeypatch.setattr(queue, "FIRST_START_S", 0.05 if children else 0.5)
    monkeypatch.setattr(run.StageBuilder, "is_ready", lambda _: True)
    started = note_children(monkeypatch)

    encoder = FakeEncoder(by_shape=True, sleep_s=sleep_s)
    cache = stoker.precompute(FakeSource((300,), delay_s=0.004, run=13), encoder, tmp_path, name="a")

    assert len(cache) == 300
    assert "workers" in started
    assert started.count("encoder") == children


def test_an_encoder_that_was_not_called_yet_gets_its_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the first batch is read, it is not known how long it takes to encode."""
    monkeypatch.setattr(queue, "FIRST_START_S", 0.5)
    monkeypatch.setattr(run.StageBuilder, "is_ready", lambda _: True)
    started = note_children(monkeypatch)

    stoker.precompute(FakeSource((80,), delay_s=0.1, run=13), FakeEncoder(), tmp_path, name="a")

    assert started.count("encoder") == 1


def test_a_read_that_hangs_here_is_given_to_workers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = FakeSource((60,), faults={17: "hang"})

    with caplog.at_level(logging.WARNING, "stoker"):
        cache = stoker.precompute(
            source, None, tmp_path, name="a", max_quarantined=0.1, timeouts={"open": 2.0, "read": 2.0}
        )

    assert [*cache.quarantined] == [17]
    assert len(cache) == 59
    assert "sample 17 made no progress for 2 s" in caplog.text


class Locked(FakeSource):
    """Cannot be sent to another process."""

    def __init__(self, **given: Any) -> None:
        super().__init__((300,), run=13, delay_s=0.002, **given)
        self.lock = threading.Lock()

    def read(self, *where: Any) -> Any:
        raise AssertionError("a sample was read")


@pytest.mark.parametrize("workers", [None, 1])
def test_what_cannot_be_sent_to_workers_is_refused_before_it_is_read(tmp_path: Path, workers: Any) -> None:
    with pytest.raises(SourceError, match="workers=0"):
        stoker.precompute(Locked(), None, tmp_path, name="a", workers=workers)


def test_without_signals_to_interrupt_a_read_workers_read_from_the_beginning(tmp_path: Path) -> None:
    read_in: set[int] = set()

    class Noting(FakeSource):
        def read(self, *where: Any) -> Any:
            read_in.add(os.getpid())
            return super().read(*where)

    thread = threading.Thread(
        target=lambda: stoker.precompute(Noting((40,)), None, tmp_path, name="a"), daemon=True
    )
    thread.start()
    thread.join(60)

    assert len(stoker.open_cache(tmp_path / "a")) == 40
    assert not read_in


def test_a_slow_group_is_left_to_workers_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "FIRST_START_S", 0.0)
    readers = tmp_path / "readers"
    readers.mkdir()
    stoker.precompute(
        FakeSource((1,)), None, tmp_path, name="warm", workers=1
    )  # the next fork needs no import

    cache = stoker.precompute(Noting((64,), delay_s=0.05, marker=readers), None, tmp_path, name="a")

    assert len(cache) == 64
    here = [path for path in readers.iterdir() if path.name.startswith(f"{os.getpid()}-")]
    assert 0 < len(here) < 64
    assert {path.name.partition("-")[2] for path in readers.iterdir()} == {str(n) for n in range(64)}


class Noting(FakeSource):
    """Notes which process reads which sample."""

    def read(self, number: int, start: Any = None, stop: Any = None) -> Any:
        (Path(self.marker) / f"{os.getpid()}-{number}").touch()
        return super().read(number, start, stop)


def test_a_program_that_a_sample_ended_begins_with_workers_the_next_time(tmp_path: Path) -> None:
    source = FakeSource((60,), faults={17: "exit0"})
    if (program := os.fork()) == 0:
        try:
            stoker.precompute(source, None, tmp_path, name="a", max_quarantined=0.1)
        finally:
            os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(program, 0)[1]) == 0

    cache = stoker.precompute(source, None, tmp_path, name="a", max_quarantined=0.1)

    assert [*cache.quarantined] == [17]
    assert len(cache) == 59
    assert not [*tmp_path.rglob("begun-here-*")]


@pytest.mark.usefixtures("no_children")
def test_a_signal_ends_a_read_that_hangs_here(tmp_path: Path) -> None:
    source = FakeSource((60,), faults={17: "hang"})
    timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()

    with pytest.raises((KeyboardInterrupt, stoker.errors.Interrupted)):
        stoker.precompute(source, None, tmp_path, name="a")

    timer.join()
    again = stoker.precompute(FakeSource((60,)), None, tmp_path, name="a")
    assert len(again) == 60


def test_a_sample_that_takes_long_and_moves_on_is_not_interrupted(tmp_path: Path) -> None:
    source = FakeSource((6,), delay_s=0.7)

    cache = stoker.precompute(source, None, tmp_path, name="a", timeouts={"open": 2.0, "read": 1.5})

    assert len(cache) == 6
    assert not cache.quarantined


class Drawing(FakeEncoder):
    """Seeds torch in each call, as an encoder that needs no random numbers of the caller may."""

    def encode(self, batch: Any) -> Any:
        torch.manual_seed(0)
        return super().encode(batch)


def test_the_random_state_of_the_caller_stays(tmp_path: Path) -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    stoker.precompute(FakeSource((300,)), Drawing(), tmp_path, name="a")

    assert torch.equal(torch.rand(3), expected)


class Opening(FakeSource):
    """Keeps what it opens when it first reads."""

    def read(self, *where: Any) -> Any:
        self.lock = threading.Lock()
        return super().read(*where)


def test_what_a_source_opens_here_does_not_keep_it_from_workers_later(tmp_path: Path) -> None:
    source = Opening((100,))
    stoker.precompute(source, None, tmp_path, name="a")

    assert len(stoker.precompute(source, None, tmp_path, name="b", workers=1)) == 100


class Computing(torch.utils.data.Dataset[Any]):
    """Samples that torch computes while they are read."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        row = torch.arange(64, dtype=torch.float32).reshape(8, 8) / (number + 3)
        torch.from_numpy(np.ones(1) / np.zeros(1))  # a warning, unless the caller raises
        filled = torch.tensor(1.0 / (number + 3)).expand(8, 8)  # of the default dtype
        return {"data": row @ row, "filled": filled.float()}


@contextlib.contextmanager
def another_state() -> Iterator[None]:
    """Everything that a caller may set, other than in a worker."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.autocast("cpu", torch.bfloat16), np.errstate(all="raise"), warnings.catch_warnings():
            warnings.simplefilter("error")
            yield
            assert torch.get_default_dtype() == torch.float64
            assert torch.is_deterministic_algorithms_warn_only_enabled()
            assert np.geterr()["divide"] == "raise"
    finally:
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)


def test_what_is_computed_in_a_read_does_not_depend_on_the_state_of_the_caller(tmp_path: Path) -> None:
    source = stoker.TorchSource(Computing(), version="1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        source.schema()
    with another_state():
        here = stoker.precompute(source, None, tmp_path, name="a")
    same(here, stoker.precompute(source, None, tmp_path / "b", name="a", workers=1))


def test_a_mark_that_cannot_be_removed_does_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unlink = Path.unlink

    def refused(path: Path, missing_ok: bool = False) -> None:
        if path.name.startswith("begun-here"):
            raise PermissionError(13, "Permission denied")
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", refused)
    assert len(stoker.precompute(FakeSource((20,)), None, tmp_path, name="a")) == 20
    assert list(tmp_path.rglob("begun-here-*"))
    started = note_children(monkeypatch)
    cache = stoker.precompute(FakeSource((20,)), None, tmp_path, name="a", overwrite=True)
    assert len(cache) == 20
    assert started, "the next run begins with workers"


def test_a_quick_encoder_that_stays_leaves_the_random_state_of_the_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "FIRST_START_S", 0.1)
    monkeypatch.setattr(run.StageBuilder, "is_ready", lambda _: True)
    kept: list[object] = []
    keep = run.StageBuilder.keep_encoder
    monkeypatch.setattr(run.StageBuilder, "keep_encoder", lambda self: (kept.append(self), keep(self))[1])

    class Seeded(FakeEncoder):
        def encode(self, batch: Any) -> Any:
            torch.manual_seed(0)
            return super().encode(batch)

    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    stoker.precompute(FakeSource((300,), delay_s=0.004, run=13), Seeded(), tmp_path, name="a")

    assert torch.equal(torch.rand(3), expected)
    assert kept


def test_after_a_lost_device_the_next_run_begins_with_children(tmp_path: Path) -> None:
    class Lost(FakeEncoder):
        def encode(self, batch: Any) -> Any:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(DeviceError):
        stoker.precompute(FakeSource((20,)), Lost(), tmp_path, name="a")

    assert list(tmp_path.rglob("begun-here-*"))
