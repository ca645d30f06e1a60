"""Products of float32 in float32 while samples are read and encoded, whatever the program has set.

TensorFloat-32 and bfloat16 products change the third or fourth digit of a record. They are switches of the
whole process (`torch.set_float32_matmul_precision`, `allow_tf32`, since torch 2.9 also `fp32_precision` by
backend and operation), so without this a cache would depend on what a program set before it was filled.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

PRECISION = "highest"
"""What an encoder is called with, as `torch.set_float32_matmul_precision` spells it."""

_SWITCHES = (
    ("cuda", "matmul"), ("cudnn", "conv"), ("cudnn", "rnn"),
    ("mkldnn", "matmul"), ("mkldnn", "conv"), ("mkldnn", "rnn"),
)  # fmt: skip

T = TypeVar("T")


@contextmanager
def full_precision() -> Generator[None]:
    """No TF32 and no bfloat16 within products of float32 while entered, and algorithms of cuDNN that are the
    same in each call; then everything is as before.

    An encoder that wants less sets its own switches in `encode`.
    """
    found = [getattr(getattr(torch.backends, backend), operation, None) for backend, operation in _SWITCHES]
    switches: list[Any] = [switch for switch in found if hasattr(switch, "fp32_precision")]
    before = [switch.fp32_precision for switch in switches]
    with _without_advice():
        older = _legible(torch.get_float32_matmul_precision), _legible(_cudnn_tf32)
    cudnn = torch.backends.cudnn
    choice = cudnn.benchmark, cudnn.deterministic
    _turn(switches, ["ieee"] * len(switches), (PRECISION, False))
    # Algorithms that are timed, or that sum in no fixed order, give other last bits from call to call.
    cudnn.benchmark, cudnn.deterministic = False, True
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.deterministic = choice
        _turn(switches, before, older)


def _turn(switches: list[Any], values: list[Any], older: tuple[str | None, bool | None]) -> None:
    """Set the older switches, then the newer: torch refuses to tell the older where the two disagree."""
    matmul, cudnn = older
    with _without_advice():
        if matmul is not None:
            torch.set_float32_matmul_precision(matmul)
        if cudnn is not None:
            torch.backends.cudnn.allow_tf32 = cudnn
    for switch, value in zip(switches, values, strict=True):
        switch.fp32_precision = value


@contextmanager
def _without_advice() -> Generator[None]:
    """Some versions of torch warn of the older switches, which a user of Stoker cannot help."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def _cudnn_tf32() -> bool:
    return torch.backends.cudnn.allow_tf32


def _legible(ask: Callable[[], T]) -> T | None:
    """The answer, or None where the program has set the newer switch and torch refuses the older question."""
    try:
        return ask()
    except RuntimeError:
        return None
