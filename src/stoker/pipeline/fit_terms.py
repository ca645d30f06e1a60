"""What is learnt, how, and what came of it: the words of `fitting.py`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from torch import Tensor, nn

from stoker.schema import Json
from stoker.train.config import TrainConfig
from stoker.train.step import learning_rate


class Lesson(Protocol):
    """What is learnt: a module, its loss, and how it is judged."""

    @property
    def model(self) -> nn.Module:
        """On the device where batches are."""
        ...

    def losses(self, batch: Mapping[str, Tensor], /) -> Tensor:
        """Loss of each example, `(B,)`."""
        ...

    def judge(self, batches: Iterable[Mapping[str, Tensor]], /) -> Mapping[str, float]:
        """Figures over a validation set; `val_loss` is among them. The module stays in training mode."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FitSettings:
    """How to train."""

    epochs: int
    lr: float
    """Peak learning rate of AdamW."""
    weight_decay: float = 1e-4
    """Of AdamW, on matrices only."""
    warmup: float = 0.05
    """Part of all steps over which the rate rises, 0..1."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """What the rate does after that: fall to a hundredth, or stay."""
    grad_clip: float | None = 1.0
    """Largest norm of the gradient; None: as it comes."""
    patience: int = 0
    """Epochs without a better validation loss after which training ends; 0: all epochs."""
    delta: float = 0.0
    """How much lower a validation loss has to be to count as better."""
    save_every_s: float = 1.0
    """Seconds between two checkpoints, at least: where epochs take a tenth of that, saving each would cost
    more than training. The last epoch, and where training is stopped, are always saved."""

    @property
    def loop(self) -> TrainConfig:
        """The same in the terms of `stoker.train`, which checks the numbers."""
        return TrainConfig(
            epochs=self.epochs,
            lr=self.lr,
            weight_decay=self.weight_decay,
            warmup=self.warmup,
            grad_clip=self.grad_clip,
        )

    def rate(self, step: int, total: int) -> float:
        """Learning rate of a step, counted from 0."""
        if self.schedule == "constant" and step >= round(self.warmup * total):
            return self.lr
        return learning_rate(step, total, peak=self.lr, warmup=self.warmup)


@dataclass(slots=True, kw_only=True)
class FitProgress:
    """How far a run is; all of it goes into a checkpoint as JSON."""

    step: int = 0
    """Optimizer steps done."""
    epoch: int = 0
    """Passes finished and judged."""
    batch: int = 0
    """Batches done of the pass after those."""
    examples: int = 0
    """Examples of that pass so far."""
    sums: list[float] = field(default_factory=lambda: [0.0, 0.0])
    """Of that pass: losses of examples, gradient norms of batches."""
    best: float | None = None
    """Lowest validation loss."""
    best_epoch: int = 0
    """Passes finished when it was measured."""
    epochs: int = 0
    """Passes that were asked for."""
    extended: int = 0
    """Passes finished when more were asked for than before: patience begins anew there."""
    row: dict[str, Json] = field(default_factory=dict[str, Json])
    """Figures of the last finished epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FitReport:
    """What a finished run came to."""

    epochs: int
    steps: int
    best: float | None
    """Lowest validation loss."""
    best_epoch: int
    """Epoch that it is of; 0 without validation."""
    row: Mapping[str, Json]
    """Figures of the last epoch, as the `epoch` event had them."""
