"""A small network that tells the classes of images apart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTHS = (16, 32, 64)


class ImageClassifier(nn.Module):
    """Images `(B, C, H, W)` uint8 in, a score for each class out; the first layer learns their range."""

    def __init__(self, channels: int, classes: int, dropout: float = 0.0) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.BatchNorm2d(channels)]
        before = channels
        for width in WIDTHS:
            layers += [
                nn.Conv2d(before, width, 3, stride=2, padding=1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(),
            ]
            before = width
        self.features = nn.Sequential(*layers)
        self.score = nn.Sequential(nn.Dropout(dropout), nn.Linear(before, classes))

    def forward(self, images: Tensor) -> Tensor:
        """`(B, classes)`."""
        found: Tensor = self.features(images.float() / 255)
        return self.score(found.mean((2, 3)))


@dataclass(frozen=True, slots=True)
class Classification:
    """What is learnt of images with a class, for `stoker.pipeline.fitting`."""

    model: ImageClassifier

    def losses(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Cross entropy of each image, `(B,)`."""
        return F.cross_entropy(self.model(batch["image"]), batch["label"], reduction="none")

    @torch.no_grad()
    def judge(self, batches: Iterable[Mapping[str, Tensor]]) -> dict[str, float]:
        """Mean loss, and the part of images whose best score is that of their class."""
        before = self.model.training
        self.model.eval()
        losses: list[Tensor] = []
        right: list[Tensor] = []
        for batch in batches:
            scores = self.model(batch["image"])
            losses.append(F.cross_entropy(scores, batch["label"], reduction="none").double())
            right.append((scores.argmax(1) == batch["label"]).double())
        self.model.train(before)
        return {"val_loss": float(torch.cat(losses).mean()), "accuracy": float(torch.cat(right).mean())}
