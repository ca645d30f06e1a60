"""A Dataset whose items take long: what was read is stored soon, whatever the size of an encode batch."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

import stoker
from stoker.errors import Interrupted
from stoker.precompute import PrecomputeSettings, run
from stoker.precompute.engine import run_precompute


class SlowItems(Dataset[Any]):
    """Sixty items: fewer than fit into one encode batch."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.seconds)
        return torch.full((4,), float(index)), index


class StopAtFirst:
    """A sink of progress that interrupts the run as soon as something is done."""

    interval_s = 0.01

    def __init__(self) -> None:
        self.done: list[int] = []

    def update(self, snapshot: Any) -> None:
        if snapshot.done and not self.done:
            os.kill(os.getpid(), signal.SIGINT)
        if snapshot.done:
            self.done.append(snapshot.done)

    def note(self, text: str) -> None: ...

    def close(self) -> None: ...


@pytest.mark.parametrize("workers", [None, 2])
def test_an_interrupt_keeps_what_was_read_of_slow_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int | None
) -> None:
    monkeypatch.setattr(run, "_LONGEST_READ_S", 0.2)
    source = stoker.TorchSource(SlowItems(0.02), version="1")
    sink = StopAtFirst()
    settings = PrecomputeSettings(progress=sink, workers=workers)

    with pytest.raises(Interrupted):
        run_precompute(source, None, tmp_path, name="x", settings=settings)

    assert 0 < sink.done[0] < 60, "progress is seen before the encode batch is full"
    rest = run_precompute(source, None, tmp_path, name="x", settings=PrecomputeSettings(progress=None))
    assert 0 < rest.encoded < 60
    assert [int(record["1"]) for record in rest.cache] == list(range(60))
    assert [float(record["0"][0]) for record in rest.cache] == list(range(60))
