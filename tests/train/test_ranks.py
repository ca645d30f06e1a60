"""Several ranks as threads of one process: what they agree on while they train."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from stoker.distributed.ranks import SINGLE_PROCESS, Ranks
from stoker.errors import DivergedError, StaleStateError
from stoker.train.config import TrainConfig
from stoker.train.loop import FiniteGuard, StepFacts
from stoker.train.objective import ERRORS, evaluate
from stoker.train.operator import LatentOperator, OperatorShape, measure_scales, to_pairs
from stoker.train.run import check_same, train
from stoker.train.state import Checkpoint
from tests.train.fakes import FakeLoader, waves


class Threads(Ranks):
    """One rank of several; they meet at a barrier and read what the others wrote."""

    def __init__(self, rank: int, world_size: int, meeting: threading.Barrier, board: list[Any]) -> None:
        self.rank, self.world_size, self._meeting, self._board = rank, world_size, meeting, board

    def all_gather(self, text: str, what: str) -> list[str]:
        self._board[self.rank] = text
        self._meeting.wait(20)
        told = list(self._board)
        self._meeting.wait(20)
        return told

    def all_sum(self, values: Sequence[float], what: str) -> list[float]:
        told = [json.loads(text) for text in self.all_gather(json.dumps(list(values)), what)]
        return [sum(column) for column in zip(*told, strict=True)]

    def all_mean(self, values: Tensor, what: str) -> Tensor:
        flat = self.all_sum(values.flatten().tolist(), what)
        return (torch.tensor(flat, dtype=values.dtype) / self.world_size).reshape(values.shape)


def together(world_size: int, work: Callable[[Ranks], Any]) -> list[Any]:
    """What `work` returns or raises on each rank."""
    meeting, board = threading.Barrier(world_size), [None] * world_size

    def one(rank: int) -> Any:
        try:
            return work(Threads(rank, world_size, meeting, board))
        except Exception as error:
            return error

    with ThreadPoolExecutor() as pool:
        return list(pool.map(one, range(world_size)))


@pytest.mark.parametrize(("world_size", "samples"), [(2, 5), (3, 2), (4, 9)])
def test_ranks_evaluate_the_whole_set_each_example_once(world_size: int, samples: int) -> None:
    latent = waves(samples=7)
    model = LatentOperator(OperatorShape(tokens=4, dim=4, cond=0, width=8, depth=1, heads=2), seed=0)
    torch.nn.init.normal_(model.leave.weight, std=0.1)

    def judge(own: Tensor, ranks: Ranks) -> Any:
        batches = FakeLoader(own, batch_size=5, shuffle=False) if len(own) else ()
        return evaluate(model, batches, {}, stride=1, samples=samples, ranks=ranks)

    whole = judge(latent, SINGLE_PROCESS)
    found = together(
        world_size, lambda r: judge(latent[7 * r.rank // world_size : 7 * (r.rank + 1) // world_size], r)
    )

    assert found[1:] == found[:-1], "a decision that depends on it is the same everywhere"
    assert (found[0].windows, found[0].rollout_steps) == (whole.windows, whole.rollout_steps) == (56, 8)
    assert found[0].errors.keys() == whole.errors.keys() == {*ERRORS[:4]}
    for name, error in whole.errors.items():
        assert found[0].errors[name] == pytest.approx(error, rel=1e-6), name


@pytest.mark.parametrize("spoilt", ["loss", "gradient", "both"])
def test_what_diverges_on_one_rank_ends_all_with_its_words(spoilt: str) -> None:
    def step(ranks: Ranks) -> None:
        errors = torch.ones(3)
        norm = torch.tensor(1.0 if spoilt == "loss" else float("nan"))
        if ranks.rank == 1 and spoilt != "gradient":
            errors[2] = float("inf")
        index = torch.tensor([[10 * ranks.rank + row, 0] for row in range(3)])
        guard = FiniteGuard(torch.device("cpu"), ranks)
        guard.submit(StepFacts(epoch=1, step=7, errors=errors, norm=norm, index=index))

    ends = together(3, step)

    assert all(isinstance(end, DivergedError) for end in ends), ends
    assert len({str(end) for end in ends}) == 1
    if spoilt != "gradient":
        assert "the loss is not finite in epoch 1, step 7, first at sample 12" in str(ends[0])


def test_a_request_to_stop_reaches_every_rank_with_the_result_of_the_step() -> None:
    def step(ranks: Ranks) -> bool:
        guard = FiniteGuard(torch.device("cpu"), ranks, lambda: ranks.rank == 1)
        index = torch.zeros((3, 2), dtype=torch.int64)
        guard.submit(StepFacts(epoch=1, step=7, errors=torch.ones(3), norm=torch.tensor(1.0), index=index))
        return guard.stopping

    assert together(3, step) == [True, True, True]


def test_ranks_exchange_one_message_a_step(tmp_path: Any) -> None:
    class Counted(Ranks):
        asked: ClassVar[list[str]] = []

        def all_sum(self, values: Sequence[float], what: str) -> list[float]:
            self.asked.append(what)
            return list(values)

    config = TrainConfig(epochs=1, width=16, depth=1, heads=2, device="cpu")
    report = train(FakeLoader(waves(samples=4), batch_size=8), None, config, tmp_path, ranks=Counted())

    assert Counted.asked == ["the start of training", *(f"step {n + 1}" for n in range(report.steps))]


def test_scales_are_those_of_the_batches_of_all_ranks() -> None:
    latent = waves(samples=6)
    device = torch.device("cpu")

    def scales(own: Tensor, ranks: Ranks) -> Any:
        loader = FakeLoader(own, batch_size=len(own) * 8, shuffle=False)
        return measure_scales((to_pairs(batch, {}, device) for batch in loader), ranks)

    whole = scales(latent, SINGLE_PROCESS)

    for found in together(2, lambda ranks: scales(latent[3 * ranks.rank : 3 * ranks.rank + 3], ranks)):
        torch.testing.assert_close(found.z_mean, whole.z_mean)
        torch.testing.assert_close(found.z_std, whole.z_std)
        torch.testing.assert_close(found.step_std, whole.step_std)


def test_ranks_that_see_other_checkpoints_say_so(tmp_path: Any) -> None:
    def look(ranks: Ranks) -> None:
        found = Checkpoint(step=500, model={}, optimizer={}, state={}) if ranks.is_rank_zero else None
        check_same(found, tmp_path, ranks)

    for end in together(2, look):
        assert isinstance(end, StaleStateError)
        assert "step 500, none as the ranks see it" in str(end)
