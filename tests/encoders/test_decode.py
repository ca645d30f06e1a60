"""Back from latents to fields: exact where nothing was lost, else the nearest that the latents allow."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from stoker.encoders import grid as decode_module
from stoker.encoders.grid import GridEncoder, decoder_of
from stoker.encoders.wrappers import FieldStatistics, NormalizedEncoder, keep_fields


def fields(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def there_and_back(encoder: GridEncoder, values: torch.Tensor) -> torch.Tensor:
    return encoder.decode(encoder.encode({"data": values})["latent"])


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"grid": (1, 32), "patch": (1, 4), "tokens": 8, "dim": 4}, id="1d"),
        pytest.param({"grid": (8, 12), "patch": (2, 3), "tokens": 16, "dim": 12, "channels": 2}, id="2d"),
        pytest.param({"grid": (8, 8), "patch": (2, 2), "tokens": 4, "dim": 40}, id="more-than-enough"),
        pytest.param({"grid": (1, 32), "patch": (1, 4), "tokens": 5, "dim": 8}, id="cells-overlap"),
        pytest.param({"grid": (12, 10), "patch": (2, 2), "tokens": 12, "dim": 32}, id="cells-overlap-2d"),
        pytest.param(
            {"grid": (4, 6, 8), "patch": (2, 3, 2), "tokens": 16, "dim": 24, "channels": 2}, id="3d"
        ),
        pytest.param({"grid": (6, 4, 4), "patch": (2, 2, 2), "tokens": 8, "dim": 40}, id="cells-overlap-3d"),
    ],
)
def test_nothing_is_lost_where_a_token_has_as_many_numbers_as_its_cell(settings: dict[str, Any]) -> None:
    encoder = GridEncoder(**{"channels": 1, **settings})
    values = fields(2, 3, *encoder.grid, encoder.channels)

    assert torch.allclose(there_and_back(encoder, values), values, atol=2e-5)


def test_with_fewer_numbers_no_other_field_of_the_same_latents_is_nearer() -> None:
    encoder = GridEncoder(channels=2, grid=(8, 8), patch=(2, 2), tokens=4, dim=7)
    values = fields(3, 2, 8, 8, 2)
    latents = encoder.encode({"data": values})["latent"]

    back = encoder.decode(latents)

    again = encoder.encode({"data": back})["latent"]
    assert torch.allclose(again, latents, atol=2e-5)
    # of all fields with these latents it is the shortest: what is missing is orthogonal to it
    missing = (values - back).flatten()
    assert abs(float(missing @ back.flatten())) < 1e-4 * float(back.norm()) * float(missing.norm())
    assert 0.5 < float((values - back).norm() / values.norm()) < 1.0


def test_smooth_fields_lose_little() -> None:
    encoder = GridEncoder(channels=1, grid=(1, 256), patch=(1, 4), tokens=16, dim=8)
    x = torch.arange(256) / 256
    smooth = torch.sin(2 * np.pi * x * 3)[None, None, None, :, None]

    lost = there_and_back(encoder, smooth) - smooth

    assert float(lost.norm() / smooth.norm()) < 1e-2


def test_any_leading_axes_and_chunks_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = GridEncoder(channels=1, grid=(4, 4), patch=(2, 2), tokens=4, dim=8)
    latents = fields(3, 5, 4, 8)
    whole = encoder.decode(latents)

    assert whole.shape == (3, 5, 4, 4, 1)
    assert torch.allclose(encoder.decode(latents[1, 2]), whole[1, 2], atol=1e-6)
    assert encoder.decode(latents[:0]).shape == (0, 5, 4, 4, 1)
    monkeypatch.setattr(decode_module, "DECODE_CHUNK_BYTES", 128)
    assert torch.allclose(encoder.decode(latents), whole, atol=1e-6)
    assert encoder.decode(latents.to(torch.float16)).dtype == torch.float32


def test_a_recipe_and_its_weights_give_the_same_decoder_in_units_of_the_data() -> None:
    grid = GridEncoder(channels=2, grid=(1, 16), patch=(1, 2), tokens=4, dim=8)
    rule = FieldStatistics(field="data", method="standard", shift=(5.0, -2.0), scale=(10.0, 0.5), digest="0")
    encoder = keep_fields(NormalizedEncoder(grid, rule), "data")
    assert encoder is not None
    values = fields(2, 3, 1, 16, 2) * torch.tensor(rule.scale) + torch.tensor(rule.shift)
    record = encoder.encode({"data": values})

    decode = decoder_of(encoder.identity(), encoder.weights())

    assert decode is not None
    assert torch.allclose(decode(record["latent"]), values, atol=2e-4)


def test_other_encoders_have_none() -> None:
    other = {"class": "some.Module", "config": {}}

    assert decoder_of(None, {}) is None
    assert decoder_of(other, {}) is None
    assert decoder_of({"class": "stoker.Normalized", "config": {"inner": other}}, {}) is None
