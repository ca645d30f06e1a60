"""The promises of `Encoder` that types cannot express, on every encoder here."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stoker.encoders.grid import GridEncoder
from stoker.encoders.module import ModuleEncoder
from stoker.encoders.protocol import Encoder
from stoker.encoders.wrappers import FieldStatistics, NormalizedEncoder
from stoker.schema import Field, Schema
from stoker.testing import check_encoder

PLANE = Field(shape=(7, 12, 16, 2), dtype="float32", time=True)
NU = Field(shape=(), dtype="float32")


def convolution() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv1d(6, 4, 3), nn.ReLU(), nn.BatchNorm1d(4), nn.Flatten())


def grid(tokens: int = 12) -> GridEncoder:
    return GridEncoder(channels=2, grid=(12, 16), patch=(2, 2), tokens=tokens, dim=8)


@pytest.mark.parametrize(
    ("encoder", "schema"),
    [
        pytest.param(grid(), {"data": PLANE, "nu": NU}, id="grid"),
        pytest.param(grid(tokens=20), {"data": PLANE}, id="grid-overlapping"),
        pytest.param(
            GridEncoder(channels=1, grid=(1, 32), patch=(1, 4), tokens=4, dim=8),
            {"data": Field(shape=(-1, 1, 32, 1), dtype="float32", time=True, ragged=True)},
            id="grid-ragged",
        ),
        pytest.param(
            ModuleEncoder(convolution()),
            {"data": Field(shape=(6, 9), dtype="float32"), "nu": NU},
            id="module",
        ),
        pytest.param(
            ModuleEncoder(nn.Linear(2, 3), time="steps"),
            {"data": Field(shape=(5, 2), dtype="float32", time=True)},
            id="module-steps",
        ),
        pytest.param(
            NormalizedEncoder(
                grid(),
                FieldStatistics(
                    field="data", method="standard", shift=(0.1, 2.0), scale=(3.0, 0.5), digest="d"
                ),
            ),
            {"data": PLANE, "nu": NU},
            id="normalized",
        ),
    ],
)
def test_keeps_the_promises(encoder: Encoder, schema: Schema) -> None:
    check_encoder(encoder, schema)


class Noisy(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x, 0.5, training=True)


def test_random_output_is_found() -> None:
    with pytest.raises(AssertionError, match="differs from call to call"):
        check_encoder(ModuleEncoder(Noisy()), {"data": Field(shape=(8,), dtype="float32")})
