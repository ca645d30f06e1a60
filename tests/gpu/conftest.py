"""What holds for every test on a GPU: kernels ran, and the next test finds the memory that this one took."""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Iterator

import pytest
import torch

from stoker.loader import gather


@pytest.fixture(autouse=True)
def kernels_ran(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail where a kernel was replaced by plain torch, which gives the same values."""
    replaced: list[str] = []
    monkeypatch.setattr(gather, "_say", replaced.append)
    yield
    if replaced and importlib.util.find_spec("triton") is not None:
        pytest.fail(f"plain torch in place of a kernel: {replaced[0]}")


@pytest.fixture(autouse=True)
def memory_given_back() -> Iterator[None]:
    """Torch keeps what tests have freed, and the driver counts it as taken."""
    yield
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
