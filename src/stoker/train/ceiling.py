"""How long a step takes that never waits: timed on a twin, so that training itself is not touched.

The twin is a copy of the operator with an optimizer of its own, and takes whole steps on one batch that is at
hand. Its weights, its random draws and its optimizer state go with it. The figure is a mean, as is the
run's own time of a step, so that the two compare; it is taken once, when the first batch is there. Each rank
times its own, without the exchange of gradients.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from stoker.errors import DivergedError
from stoker.scale.ranks import ALONE
from stoker.train.batches import PairLoader
from stoker.train.config import TrainConfig
from stoker.train.run import Run, begin, make_optimizer

WARM_STEPS = 2
"""Steps before the clock starts: the first ones allocate, and choose kernels."""
MOST_STEPS = 10
"""Steps that are timed at most."""
BUDGET_S = 3.0
"""Seconds for them, where a step is long; one is timed whatever it takes."""
LEAST_LR = 1e-12
"""Weights stay where they are: made-up batches must not make them diverge."""
PART_OF_RUN = 0.1
"""Nothing is measured where it would be more than this part of the steps to do."""


def worth_measuring(steps_left: int) -> bool:
    """Whether the run is long enough to spend steps on it.

    >>> worth_measuring(100), worth_measuring(300)
    (False, True)
    """
    return PART_OF_RUN * steps_left >= WARM_STEPS + MOST_STEPS


def twin_of(run: Run) -> Run:
    """The same run with a copy of everything that a step changes."""
    twin = replace(
        run,
        model=copy.deepcopy(run.model),
        decoder=copy.deepcopy(run.decoder),
        progress=copy.deepcopy(run.progress),
        loss_sum=run.loss_sum.clone(),
    )
    twin.optimizer = make_optimizer(twin.trained, run.config)
    twin.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
    return twin


def steps_of(loader: PairLoader, config: TrainConfig, folder: Path) -> Callable[[Any], object]:
    """Return a function that takes one whole training step on a batch of `loader`, and keeps nothing.

    Args:
        loader: Of which the operator's shape and scales are learnt.
        config: As for `train`; its stages and inverse losses are left out.
        folder: An empty one; nothing is left in it.

    Raises:
        StokerError: As `train`.
    """
    config = replace(config, resume=False, stages=(), lambda_inv_enc=0.0, lambda_inv_dec=0.0)
    stepper = begin(folder, config, loader, lambda: None, ALONE).stepper()
    return partial(stepper.step, rate=LEAST_LR, epoch=1, number=1)


def time_steps(step: Callable[[], object], device: torch.device) -> float | None:
    """Mean seconds of `step`; None where it fails for want of memory, or because it diverges on one batch."""
    cuda = device.type == "cuda"

    def timed(count: int) -> float:
        if cuda:
            torch.cuda.synchronize(device)
        begin = time.perf_counter()
        for _ in range(count):
            step()
        if cuda:
            torch.cuda.synchronize(device)
        return (time.perf_counter() - begin) / count

    try:
        with torch.random.fork_rng([device] if cuda else []):
            timed(WARM_STEPS - 1)
            warm_s = timed(1)
            return timed(max(1, min(MOST_STEPS, int(BUDGET_S / max(warm_s, 1e-9)))))
    except DivergedError:
        return None
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return None
