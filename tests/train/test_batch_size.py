"""The largest batch is found by real steps, and nothing of the caller's is another afterwards."""

from __future__ import annotations

import copy
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import stoker
from stoker.errors import ConfigError, ResourceError
from stoker.plan.resources import is_out_of_memory
from stoker.train import batch_size


class Memory:
    """Stands for a device: a step with more bytes than there are raises as torch does."""

    def __init__(self, most: int, state: int = 0, error: type[Exception] = torch.OutOfMemoryError) -> None:
        self.most, self.state, self.error, self.tried = most, state, error, []

    def use(self, examples: int, optimizer: torch.optim.Optimizer) -> None:
        self.tried.append(examples)
        if examples + (self.state if optimizer.state else 0) > self.most:
            raise self.error("out of memory" if self.error is not RuntimeError else self.words)

    words = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 7 bytes"


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))


def stepper(memory: Memory, optimizer: torch.optim.Optimizer):
    def step(model: nn.Module, batch: torch.Tensor) -> None:
        memory.use(len(batch), optimizer)
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    return step


def batch_of(count: int) -> torch.Tensor:
    return torch.rand(count, 3) + np.random.random() + random.random()


@pytest.mark.parametrize("most", [2, 8, 777, 9000])
def test_the_largest_that_runs_is_found(model: nn.Module, most: int) -> None:
    optimizer = torch.optim.Adam(model.parameters())
    memory = Memory(most)

    found = stoker.find_batch_size(
        model, batch_of, stepper(memory, optimizer), optimizer=optimizer, precision=0, initial=8
    )

    assert found == min(most, 4096)
    assert len(set(memory.tried)) <= 24


def test_bisection_ends_when_it_is_near_enough(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters())
    memory = Memory(1000)

    found = stoker.find_batch_size(model, batch_of, stepper(memory, optimizer), precision=0.1)

    assert 900 <= found <= 1000
    assert found in memory.tried


def test_the_state_that_an_optimizer_makes_in_its_first_step_counts(model: nn.Module) -> None:
    optimizer = torch.optim.Adam(model.parameters())

    found = stoker.find_batch_size(
        model, batch_of, stepper(Memory(100, state=40), optimizer), optimizer=optimizer, precision=0
    )

    assert found == 60


@pytest.mark.parametrize("begun", [False, True], ids=["fresh", "trained"])
@pytest.mark.parametrize("fails", [False, True], ids=["ends", "raises"])
def test_all_is_as_it_was_to_the_last_bit(model: nn.Module, begun: bool, fails: bool) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    if begun:
        stepper(Memory(10**9), optimizer)(model, batch_of(8))
    model.eval()
    references = [*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None)]
    addresses = [tensor.data_ptr() for tensor in references]
    held = {name: value.clone() for name, value in model.state_dict().items()}
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    before = copy.deepcopy(optimizer.state_dict())
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    expected = torch.rand(1).item(), np.random.random(), random.random()
    torch.manual_seed(1), np.random.seed(1), random.seed(1)

    def step(model: nn.Module, batch: torch.Tensor) -> None:
        model.train()
        stepper(Memory(50), optimizer)(model, batch)
        schedule.step()
        if fails and len(batch) > 20:
            raise ZeroDivisionError("a fault of the step")

    if fails:
        with pytest.raises(ZeroDivisionError):
            stoker.find_batch_size(model, batch_of, step, optimizer=[optimizer, schedule])
    else:
        assert stoker.find_batch_size(model, batch_of, step, optimizer=[optimizer, schedule]) <= 50

    assert not model.training
    for name, value in model.state_dict().items():
        assert torch.equal(value, held[name]), name
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert (parameter.grad is None) == (gradient is None)
        assert gradient is None or torch.equal(parameter.grad, gradient)
    assert [tensor.data_ptr() for tensor in references] == addresses
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert after["state"].keys() == before["state"].keys()
    for number, state in before["state"].items():
        assert all(torch.equal(after["state"][number][name], value) for name, value in state.items())
    assert schedule.last_epoch == 0
    assert (torch.rand(1).item(), np.random.random(), random.random()) == expected


def test_other_errors_are_raised_at_once(model: nn.Module) -> None:
    tried = []

    def step(model: nn.Module, batch: torch.Tensor) -> None:
        tried.append(len(batch))
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied; out of memory is not the matter")

    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        stoker.find_batch_size(model, batch_of, step)
    assert tried == [8]


@pytest.mark.parametrize(
    "error",
    [pytest.param(MemoryError, marks=pytest.mark.slow), RuntimeError, torch.OutOfMemoryError],
)
def test_each_way_of_saying_that_memory_is_short(model: nn.Module, error: type[Exception]) -> None:
    optimizer = torch.optim.SGD(model.parameters())
    step = stepper(Memory(40, error=error), optimizer)

    assert stoker.find_batch_size(model, batch_of, step, precision=0) == 40
    assert not is_out_of_memory(RuntimeError("no"))


def test_a_real_refusal_of_memory(model: nn.Module) -> None:
    """A petabyte is refused by the allocator at once, without a byte of it being touched."""

    def step(model: nn.Module, batch: torch.Tensor) -> None:
        torch.empty(len(batch) * (10**15 if len(batch) > 30 else 1), dtype=torch.uint8)

    assert stoker.find_batch_size(model, batch_of, step, precision=0) == 30


def test_not_even_one(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters())

    with pytest.raises(ResourceError, match="not even a batch of one example"):
        stoker.find_batch_size(model, batch_of, stepper(Memory(0), optimizer))
    with pytest.raises(ConfigError, match="Expected 1 <= initial <= maximum"):
        stoker.find_batch_size(model, batch_of, stepper(Memory(0), optimizer), initial=9, maximum=8)


def test_batches_of_a_loader_are_repeated_and_its_place_kept(model: nn.Module, tmp_path) -> None:
    dataset = [{"x": torch.ones(3) * i, "boxes": torch.ones(1 + i % 3, 4), "y": i} for i in range(40)]
    loader = stoker.cached(
        dataset,
        name="rows",
        cache_dir=tmp_path,
        device="cpu",
        batch_size=6,
        precompute={"workers": 0},
        shuffle=True,
    )
    next(iter(loader))
    state, shapes = loader.state_dict(), {}

    def step(model: nn.Module, batch) -> None:
        shapes[len(batch["x"])] = (len(batch["boxes"]), len(batch["y"]), batch["boxes"][-1].shape[-1])
        if len(batch["x"]) > 21:
            raise MemoryError

    assert stoker.find_batch_size(model, loader, step, precision=0) == 21
    assert shapes[21] == (21, 21, 4)
    assert loader.state_dict() == state
    with pytest.raises(ConfigError, match="without a tensor of examples"):
        stoker.find_batch_size(model, [["a"]], step)


def test_compiling_is_off_in_a_block_or_for_good() -> None:
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    function = torch.compile(lambda x: x * 2, backend=backend)
    with stoker.compat.disable_torch_compile():
        assert function(torch.ones(2)).tolist() == [2, 2]
        assert compiled == []
    function(torch.ones(2))
    assert len(compiled) == 1

    off = stoker.compat.disable_torch_compile()
    torch.compile(lambda x: x * 3, backend=backend)(torch.ones(2))
    assert len(compiled) == 1
    off.restore()
    torch.compile(lambda x: x * 4, backend=backend)(torch.ones(2))
    assert len(compiled) == 2


def test_an_error_of_a_gpu_is_waited_for_on_the_gpu_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not on the current one: it would be taken for one of the next size."""
    waited: list[torch.device | None] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    other = SimpleNamespace(device=torch.device("cuda:1"))
    placed: Any = SimpleNamespace(parameters=lambda: iter([other]))

    assert batch_size._try(placed, lambda count: None, lambda model, batch: None, 3, steps=1)

    assert waited == [torch.device("cuda:1")]
