from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from stoker.loader.kernels import choose
from stoker.loader.kernels.choose import OrTwin

ROOT = Path(__file__).parents[3]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_the_kernel_gives_the_values_of_its_twin() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.loader.kernels.interpreted"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=150,
    )

    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["normalised_and_cast", "windows", "crops_and_mirrors", "static"]


def test_a_kernel_that_fails_is_replaced_by_its_twin_and_said_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose._say.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a GPU of tomorrow")

    def failing(_: Tensor) -> Tensor:
        raise RuntimeError("no code for sm_999")

    with caplog.at_level(logging.WARNING, "stoker"):
        for _ in range(2):
            gather = OrTwin(failing, lambda index: index + 1)
            assert [gather(torch.tensor([n])).item() for n in (1, 5)] == [2, 6]

    (said,) = caplog.messages
    assert "a GPU of tomorrow failed: no code for sm_999" in said


def test_a_kernel_that_failed_once_it_ran_is_an_error() -> None:
    """What fails later is no lack of a compiler, and must not be hidden behind slower batches."""
    ran: list[Tensor] = []

    def once(index: Tensor) -> Tensor:
        ran.append(index)
        if len(ran) > 1:
            raise RuntimeError("device-side assert")
        return index

    gather = OrTwin(once, lambda index: index)
    gather(torch.tensor([0]))

    with pytest.raises(RuntimeError, match="device-side"):
        gather(torch.tensor([1]))
