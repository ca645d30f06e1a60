"""A small network that finds a transmitter from what receivers measured, and says how sure it is."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from stoker.runtime.files import make_folder, replacing
from stoker.sources.sql.nested import METRES

Batch: TypeAlias = "Mapping[str, Tensor]"

EARTH_M = METRES * 180 / math.pi
"""Radius of the sphere on which places become metres."""
WIDEST = 8.0
"""Bound of a predicted log variance to either side: a wild guess in the first steps must not end the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TriangulationShape:
    """All that decides the shapes of the weights."""

    features: int = 6
    """Numbers of a receiver."""
    hidden: int = 64
    """Width of the layer that looks at one receiver."""
    width: int = 32
    """Numbers a receiver has among the others; a multiple of `heads`."""
    heads: int = 4
    """Attention heads."""
    head: int = 64
    """Width of the layer before the answer."""


class TriangulationModel(nn.Module):
    """Receivers in, a place and a log variance out; neither the receivers' number nor their order matters.

    Its target is metres north and east of a centroid, standardised: `mean` and `deviation` of the training
    rows, `(2,)`, are kept among the weights, since without them a prediction is no place.
    """

    mean: Tensor
    deviation: Tensor

    def __init__(self, shape: TriangulationShape | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        self.shape = shape = shape or TriangulationShape()
        self._dropout = dropout
        self.each = nn.Sequential(
            nn.Linear(shape.features, shape.hidden), nn.GELU(), nn.Dropout(dropout),
            nn.Linear(shape.hidden, shape.width), nn.GELU(),
        )  # fmt: skip
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.mix = nn.Linear(shape.width, shape.width)
        self.weigh = nn.Linear(shape.width, shape.heads)
        self.head = nn.Sequential(
            nn.Linear((shape.heads + 1) * shape.width, shape.head), nn.GELU(), nn.Dropout(dropout)
        )
        self.position = nn.Linear(shape.head, 2)
        self.log_variance = nn.Linear(shape.head, 1)
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("deviation", torch.ones(2))

    def set_statistics(self, statistics: Mapping[str, Any]) -> None:
        """Take over mean and deviation of the targets, as `SQLSource.statistics` gives them."""
        for name in ("mean", "deviation"):
            self.get_buffer(name).copy_(torch.tensor(statistics["target"][name]))

    def forward(self, receivers: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """`(B, R, F)` and `(B, R)`, True where there is nothing, to places `(B, 2)` and `(B, 1)`."""
        x: Tensor = self.each(receivers)
        x = x + self._attended(x, mask)
        weights = self.weigh(x).masked_fill(mask.unsqueeze(-1), -torch.inf).softmax(1)
        weighed = (weights.transpose(1, 2) @ x).flatten(1)
        counted = (~mask).unsqueeze(-1)
        mean = (x * counted).sum(1) / counted.sum(1)
        found = self.head(torch.cat([weighed, mean], -1))
        return self.position(found), self.log_variance(found).clamp(-WIDEST, WIDEST)

    def _attended(self, x: Tensor, mask: Tensor) -> Tensor:
        rows, receivers, width = x.shape
        q, k, v = self.qkv(x).view(rows, receivers, 3, self.shape.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=~mask[:, None, None, :])
        return self.mix(mixed.transpose(1, 2).reshape(rows, receivers, width))

    def place(self, standardised: Tensor, centroid: Tensor) -> Tensor:
        """Latitude and longitude in degrees, `(B, 2)` float64, of standardised metres from centroids."""
        north, east = (standardised.double() * self.deviation + self.mean).unbind(-1)
        latitude, longitude = centroid.double().unbind(-1)
        along = METRES * torch.cos(torch.deg2rad(latitude))
        return torch.stack([latitude + north / METRES, longitude + east / along], -1)


def position_losses(model: nn.Module, batch: Batch) -> Tensor:
    """Negative log likelihood of each row's true place, `(B,)`, without its constant."""
    position, log_variance = model(batch["receivers"], batch["signal_mask"])
    square = (position - batch["target"]).square().sum(-1)
    spread = log_variance.squeeze(-1)
    return 0.5 * square * torch.exp(-spread) + spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """How far predicted places lie from true ones, on a sphere."""

    mean_m: float
    rmse_m: float
    p50_m: float
    p68_m: float
    p95_m: float
    expected_m: float
    """Root mean square distance that the model itself expects."""
    loss: float
    """Mean negative log likelihood."""


@torch.no_grad()
def position_errors(model: TriangulationModel, batches: Iterable[Batch]) -> Errors:
    """Errors over all rows of `batches`; the model is left in the mode that it was in."""
    before = model.training
    model.eval()
    far: list[Tensor] = []
    expected: list[Tensor] = []
    losses: list[Tensor] = []
    for batch in batches:
        position, log_variance = model(batch["receivers"], batch["signal_mask"])
        found, true = (model.place(one, batch["centroid"]) for one in (position, batch["target"]))
        far.append(haversine_m(found, true))
        expected.append(log_variance.double().exp().squeeze(-1) * model.deviation.double().square().sum())
        losses.append(position_losses(model, batch).double())
    model.train(before)
    distances = torch.cat(far)
    p50, p68, p95 = distances.quantile(distances.new_tensor([0.5, 0.68, 0.95])).tolist()
    return Errors(
        mean_m=float(distances.mean()),
        rmse_m=float(distances.square().mean().sqrt()),
        p50_m=p50,
        p68_m=p68,
        p95_m=p95,
        expected_m=float(torch.cat(expected).mean().sqrt()),
        loss=float(torch.cat(losses).mean()),
    )


@dataclass(frozen=True, slots=True)
class Triangulation:
    """What is learnt of radio rows, for `stoker.pipeline.fitting`."""

    model: TriangulationModel

    def losses(self, batch: Batch) -> Tensor:
        """Of each row, `(B,)`."""
        return position_losses(self.model, batch)

    def judge(self, batches: Iterable[Batch]) -> dict[str, float]:
        """Errors over all rows."""
        found = asdict(position_errors(self.model, batches))
        return {"val_loss": found.pop("loss"), **found}


def haversine_m(one: Tensor, other: Tensor) -> Tensor:
    """Metres along the sphere between places in degrees, `(..., 2)`.

    >>> round(float(haversine_m(torch.tensor([45.0, 8.0]), torch.tensor([46.0, 8.0]))))
    111195
    """
    latitude, longitude = torch.deg2rad(one.double()).unbind(-1)
    other_latitude, other_longitude = torch.deg2rad(other.double()).unbind(-1)
    share = (
        torch.sin((other_latitude - latitude) / 2).square()
        + torch.cos(latitude) * torch.cos(other_latitude)
        * torch.sin((other_longitude - longitude) / 2).square()
    )  # fmt: skip
    return 2 * EARTH_M * torch.asin(share.clamp(0, 1).sqrt())


def save_regressor(path: Path, model: nn.Module, facts: Mapping[str, Any]) -> None:
    """Weights, and what is to be known of them as JSON by name, in one file."""
    make_folder(path.parent)
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    with replacing(path) as temporary:
        save_file(weights, temporary, metadata={name: json.dumps(value) for name, value in facts.items()})
