"""Steps of a training that keeps nothing, to measure how long they take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from stoker.scale.ranks import ALONE
from stoker.train.batches import PairLoader
from stoker.train.config import TrainConfig
from stoker.train.guard import FiniteGuard
from stoker.train.loop import Session
from stoker.train.run import begin
from stoker.train.stop import StopFlag

LEAST_LR = 1e-12
"""Weights stay where they are: made-up batches must not make them diverge."""


def steps_of(loader: PairLoader, config: TrainConfig, folder: Path) -> Callable[[Any], object]:
    """A function that takes one whole training step on a batch of `loader`.

    Args:
        loader: Of which the operator's shape and scales are learnt.
        config: As for `train`.
        folder: An empty one; nothing is left in it.

    Raises:
        StokerError: As `train`.
    """
    session = Session(
        train_loader=loader,
        val_loader=None,
        config=replace(config, resume=False, lr=LEAST_LR, stages=(), lambda_inv_enc=0.0, lambda_inv_dec=0.0),
        folder=folder,
        stop=StopFlag(),
        meter=None,
        sink=None,
        ranks=ALONE,
        physical={},
        about=tuple,
    )
    session.run = begin(folder, session.config, loader, lambda: None, ALONE)
    session.objective = session.run.objective()
    session.guard = FiniteGuard(session.run.device)
    session.total, session.rates = 1 << 31, session.config
    recent = torch.zeros_like(session.run.loss_sum)
    return lambda batch: session.step(batch, recent)
