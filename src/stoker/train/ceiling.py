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

import torch

from stoker.errors import DivergedError
from stoker.train.run import Run, make_optimizer

WARM_STEPS = 2
"""Steps before the clock starts: the first ones allocate, and choose kernels."""
MOST_STEPS = 10
"""Steps that are timed at most."""
BUDGET_S = 3.0
"""Seconds for them, where a step is long; one is timed whatever it takes."""
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
