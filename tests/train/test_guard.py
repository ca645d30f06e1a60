from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stoker.errors import DivergedError
from stoker.train.loop import FiniteGuard, StepFacts


def facts(errors: list[float], norm: float = 1.0) -> StepFacts:
    index = torch.tensor([[10, 0], [11, 4], [12, 7]])
    return StepFacts(epoch=3, step=412, errors=torch.tensor(errors), norm=torch.tensor(norm), index=index)


def test_finite_steps_pass() -> None:
    guard = FiniteGuard(torch.device("cpu"))

    guard.submit(facts([1.0, 2.0, 3.0]))
    guard.check()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_loss_names_epoch_step_and_sample(bad: float) -> None:
    guard = FiniteGuard(torch.device("cpu"))

    with pytest.raises(
        DivergedError, match=r"loss .*epoch 3, step 412, first at sample 11, time step 4 \(2 of 3"
    ):
        guard.submit(facts([1.0, bad, bad]))


def test_a_bad_gradient_names_the_largest_loss() -> None:
    guard = FiniteGuard(torch.device("cpu"))

    with pytest.raises(DivergedError, match=r"gradient .*largest loss at sample 12"):
        guard.submit(facts([1.0, 2.0, 3.0], norm=float("inf")))


def test_a_bad_loss_of_a_mixture_names_the_task_too() -> None:
    guard = FiniteGuard(torch.device("cpu"))

    with pytest.raises(DivergedError, match="first at sample 11 of well2d, time step 4"):
        guard.submit(replace(facts([1.0, float("nan"), 2.0]), task="well2d"))


def test_the_event_of_a_step_is_of_the_stream_of_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle stream of another GPU says that the flag is there before it is."""
    recorded: list[object] = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    guard: Any = FiniteGuard(torch.device("cpu"))
    guard._device, guard._event = torch.device("cuda:1"), SimpleNamespace(record=recorded.append)

    guard.submit(facts([1.0, 2.0, 3.0]))

    assert recorded == ["stream of cuda:1"]
