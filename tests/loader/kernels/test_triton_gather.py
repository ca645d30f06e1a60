from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

import stoker.loader
from stoker.loader import gather as gather_module
from stoker.loader.gather import FallbackGather

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
    assert len(done.stdout.split()) == 5


def test_a_kernel_that_fails_is_replaced_by_its_twin_and_said_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    gather_module._say.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a GPU of tomorrow")

    def failing(_: Tensor) -> Tensor:
        raise RuntimeError("no code for sm_999")

    with caplog.at_level(logging.WARNING, "stoker"):
        for _ in range(2):
            gather = FallbackGather(failing, lambda index: index + 1)
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

    gather = FallbackGather(once, lambda index: index)
    gather(torch.tensor([0]))

    with pytest.raises(RuntimeError, match="device-side"):
        gather(torch.tensor([1]))


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), UserWarning("a warning that raises")])
def test_what_says_nothing_about_the_kernel_does_not_replace_it(error: Exception) -> None:
    """There may be memory for the next batch, and the twin is slower for good."""
    errors = [error]

    def kernel(index: Tensor) -> Tensor:
        if errors:
            raise errors.pop()
        return index + 1

    gather = FallbackGather(kernel, lambda index: index)

    with pytest.raises(type(error)):
        gather(torch.tensor([1]))
    assert gather(torch.tensor([1])).item() == 2


@pytest.mark.parametrize("error", [TypeError("jit() got an unexpected keyword"), RuntimeError("no driver")])
def test_a_triton_that_cannot_be_used_leaves_the_twin_and_is_named(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As an older one, or one for another torch: a loader must not end for it."""
    said: list[str] = []

    def refusing(**_: object) -> None:
        raise error

    triton, language = ModuleType("triton"), ModuleType("triton.language")
    triton.jit, triton.language = refusing, language  # type: ignore[attr-defined]
    language.constexpr = None  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triton", triton)
    monkeypatch.setitem(sys.modules, "triton.language", language)
    monkeypatch.delitem(sys.modules, "stoker.loader.triton_gather", raising=False)
    monkeypatch.delattr(stoker.loader, "triton_gather", raising=False)
    monkeypatch.setattr(gather_module, "_say", said.append)
    gather_module._triton.cache_clear()
    try:
        assert gather_module._triton() is None
    finally:
        gather_module._triton.cache_clear()

    (text,) = said
    assert str(error) in text
