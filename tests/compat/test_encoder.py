"""Weights of the earlier grid encoder: converted exactly, or refused with the layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from stoker.encoders.grid import GridEncoder
from stoker.errors import EncoderError
from stoker.extras.compat.encoder import convert_encoder, original_forward
from tests.cli.commands import run, run_json


class Original(nn.Module):
    """As the earlier encoder was described; written for these tests."""

    def __init__(
        self, *, channels: int, dim: int, patch: int, tokens: int, fourier: bool, turned: bool = False
    ) -> None:
        super().__init__()
        self.patch, self.tokens, self.fourier, self.turned = patch, tokens, fourier, turned
        values = channels * patch**2
        self.stem = nn.Sequential(
            nn.Conv2d(values, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, values, 3, padding=1)
        )
        for parameter in self.stem[2].parameters():
            nn.init.zeros_(parameter)
        self.to_latent = nn.LazyLinear(dim)

    def forward(self, fields: dict[str, Tensor], coords: Tensor, *, meta: dict[str, Any]) -> Tensor:
        (data,) = fields.values()
        height, width = meta["grid_shape"]

        def unshuffled(x: Tensor) -> Tensor:
            return F.pixel_unshuffle(x.transpose(1, 2).unflatten(2, (height, width)), self.patch)

        x = unshuffled(data)
        x = x + self.stem(x)
        if self.fourier:
            places = unshuffled(coords).unflatten(1, (2, -1)).mean(2)
            waves = [(wave, k) for k in (1, 2) for wave in (torch.sin, torch.cos)]
            waves = waves[::-1] if self.turned else waves
            x = torch.cat([x, *(wave(2 * torch.pi * k * places) for wave, k in waves)], 1)
        z = self.to_latent(x.flatten(2).transpose(1, 2))
        if z.shape[1] == self.tokens:
            return z
        return F.adaptive_avg_pool1d(z.transpose(1, 2), self.tokens).transpose(1, 2)


def saved(tmp_path: Path, grid: tuple[int, int], **sizes: Any) -> tuple[Path, Any]:
    """The file of an original that ran once, and its forward pass."""
    torch.manual_seed(0)
    module = Original(**sizes)
    forward = original_forward(module, grid, "u")
    forward(torch.zeros(1, *grid, sizes["channels"]))
    path = tmp_path / "old.pt"
    torch.save({"epoch": 3, "state_dict": module.state_dict()}, path)
    return path, module


@pytest.mark.parametrize(
    ("grid", "patch", "tokens", "cell"),
    [
        pytest.param((1, 32), 1, 32, (1, 1), id="1D-not-pooled"),
        pytest.param((1, 32), 1, 8, (1, 4), id="1D-pooled"),
        pytest.param((16, 8), 4, 8, (4, 4), id="2D-not-pooled"),
        pytest.param((16, 16), 2, 32, (2, 4), id="2D-half-rows"),
        pytest.param((16, 8), 2, 4, (4, 8), id="2D-two-rows"),
    ],
)
@pytest.mark.parametrize("fourier", [True, False])
def test_latents_are_those_of_the_original(
    grid: tuple[int, int], patch: int, tokens: int, cell: tuple[int, int], fourier: bool, tmp_path: Path
) -> None:
    old, module = saved(tmp_path, grid, channels=3, dim=12, patch=patch, tokens=tokens, fourier=fourier)

    found = convert_encoder(
        old, tmp_path / "new.safetensors", grid=grid, patch=patch, tokens=tokens, channels=3, key="state_dict"
    )

    assert (found.patch, found.dim, found.checked_against) == (cell, 12, "formula")
    encoder = GridEncoder(channels=3, grid=grid, patch=cell, tokens=tokens, dim=12, checkpoint=found.out)
    data = torch.randn(2, *grid, 3)
    wanted = original_forward(module, grid, "u")(data)
    torch.testing.assert_close(
        encoder.encode({"data": data})["latent"].double(), wanted, atol=1e-5, rtol=1e-4
    )
    assert found.max_difference < 1e-5 < found.max_latent


def test_without_a_projection_it_is_the_identity(tmp_path: Path) -> None:
    torch.save(
        {"stem.0.weight": torch.ones(4, 4, 3, 3), "stem.2.weight": torch.zeros(4, 4, 3, 3)}, tmp_path / "o.pt"
    )

    found = convert_encoder(tmp_path / "o.pt", tmp_path / "n.safetensors", grid=(8, 8), patch=2, tokens=16)

    assert (found.dim, found.max_difference) == (4, 0.0)


def test_positions_come_from_the_original_where_it_is_at_hand(tmp_path: Path) -> None:
    old, module = saved(tmp_path, (8, 8), channels=1, dim=4, patch=2, tokens=16, fourier=True, turned=True)
    forward = original_forward(module, (8, 8), "u")
    sizes: dict[str, Any] = {"grid": (8, 8), "patch": 2, "tokens": 16, "key": "state_dict"}

    found = convert_encoder(old, tmp_path / "new.safetensors", **sizes, original=forward)

    encoder = GridEncoder(channels=1, grid=(8, 8), patch=(2, 2), tokens=16, dim=4, checkpoint=found.out)
    data = torch.randn(2, 8, 8, 1)
    torch.testing.assert_close(
        encoder.encode({"data": data})["latent"].double(), forward(data), atol=1e-5, rtol=1e-4
    )
    assert found.checked_against == "original"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        pytest.param({"stem.2.bias": torch.full((4,), 0.25)}, r"stem\.2\.bias.* 0\.25", id="trained-stem"),
        pytest.param(
            {"other.weight": torch.ones(2, 3)}, r"to_latent\.weight, other\.weight", id="two-projections"
        ),
    ],
)
def test_what_it_cannot_give_is_refused_with_the_layer(
    change: dict[str, Tensor], says: str, tmp_path: Path
) -> None:
    old, module = saved(tmp_path, (8, 8), channels=1, dim=4, patch=2, tokens=16, fourier=True)
    torch.save({**module.state_dict(), **change}, old)

    with pytest.raises(EncoderError, match=says):
        convert_encoder(old, tmp_path / "new.safetensors", grid=(8, 8), patch=2, tokens=16)

    assert not (tmp_path / "new.safetensors").exists()


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        pytest.param({"tokens": 3}, "3 tokens of 4 x 4 patches", id="no-rectangles"),
        pytest.param({"tokens": 32}, "32 tokens were made of 16 patches", id="copies"),
        pytest.param({"patch": 3}, r"patch 3 does not divide grid \(8, 8\)", id="patch"),
        pytest.param({"fourier": (1, 2, 3)}, r"8 columns .* \[1, 2, 3\] take 12 or 48", id="fourier"),
        pytest.param({"channels": 9}, "takes 12 numbers, a patch has 36", id="channels"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes: dict[str, Any], says: str, tmp_path: Path) -> None:
    old, _ = saved(tmp_path, (8, 8), channels=1, dim=4, patch=2, tokens=16, fourier=True)
    given: dict[str, Any] = {"patch": 2, "tokens": 16, "key": "state_dict", **sizes}

    with pytest.raises(EncoderError, match=says):
        convert_encoder(old, tmp_path / "new.safetensors", grid=(8, 8), **given)


def test_the_command_says_what_to_set(tmp_path: Path) -> None:
    old, _ = saved(tmp_path, (1, 32), channels=1, dim=4, patch=1, tokens=8, fourier=True)
    new = tmp_path / "new.safetensors"
    words = ["compat", "convert-encoder", str(old), "--out", str(new), "--grid", "1,32", "--patch", "1",
             "--tokens", "8"]  # fmt: skip

    _, errors = run(*words, exit_code=3)
    found = run_json(*words, "--key", "state_dict")

    assert "state_dict" in errors
    assert found["settings"][:2] == [f"encoder.checkpoint={new}", "encoder.patch_size=[1,4]"]
    assert found["max_difference"] < 1e-6
