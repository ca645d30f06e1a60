from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from stoker.encoders.grid import GridEncoder, plan_cells
from stoker.encoders.protocol import EncodeBatchSize, Encoder
from stoker.errors import EncoderError
from stoker.schema import Field

BURGERS: dict[str, Any] = {"channels": 1, "grid": (1, 256), "patch": (1, 4), "tokens": 16, "dim": 32}
PLANE: dict[str, Any] = {"channels": 3, "grid": (8, 12), "patch": (2, 2), "tokens": 6, "dim": 48}
SOLID: dict[str, Any] = {"channels": 2, "grid": (4, 6, 8), "patch": (2, 2, 2), "tokens": 12, "dim": 32}


def encode(encoder: GridEncoder, data: torch.Tensor) -> torch.Tensor:
    return encoder.encode({"data": data})["latent"]


def data_of(settings: dict[str, Any], n: int = 2, steps: int = 3, seed: int = 0) -> torch.Tensor:
    shape = (n, steps, *settings["grid"], settings["channels"])
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("settings", [BURGERS, PLANE, SOLID], ids=["1d", "2d", "3d"])
def test_gives_tokens_per_time_step(settings: dict[str, Any]) -> None:
    encoder = GridEncoder(**settings)

    latent = encode(encoder, data_of(settings))

    assert isinstance(encoder, Encoder)
    assert latent.shape == (2, 3, settings["tokens"], settings["dim"])
    assert latent.dtype == torch.float32
    assert encoder.independent_steps


def test_other_fields_pass_through_as_they_are() -> None:
    nu = torch.tensor([0.1, 0.2])

    record = GridEncoder(**BURGERS).encode({"data": data_of(BURGERS), "Nu": nu})

    assert list(record) == ["latent", "Nu"]
    assert record["Nu"] is nu


def test_schema_says_what_encode_gives() -> None:
    scalar = Field(shape=(), dtype="float32")
    schema = GridEncoder(**BURGERS).schema(
        {"Nu": scalar, "data": Field(shape=(101, 1, 256, 1), dtype="float64", time=True)}
    )

    assert schema == {"latent": Field(shape=(101, 16, 32), dtype="float32", time=True), "Nu": scalar}


def test_a_field_without_time_has_a_latent_without_time() -> None:
    encoder = GridEncoder(**BURGERS)

    latent = encode(encoder, data_of(BURGERS)[:, 0])

    assert latent.shape == (2, 16, 32)
    assert torch.equal(latent, encode(encoder, data_of(BURGERS))[:, 0])
    assert encoder.schema({"data": Field(shape=(1, 256, 1), dtype="float32")})["latent"] == Field(
        shape=(16, 32), dtype="float32"
    )


@pytest.mark.parametrize("settings", [BURGERS, PLANE, SOLID], ids=["1d", "2d", "3d"])
def test_nothing_is_lost_when_dim_holds_a_cell(settings: dict[str, Any]) -> None:
    """Distances between latents are those between fields, so an error in one is an error in the other."""
    encoder = GridEncoder(**settings, fourier=())
    a, b = data_of(settings, seed=1), data_of(settings, seed=2)

    distance = (encode(encoder, a) - encode(encoder, b)).norm()

    torch.testing.assert_close(distance, (a - b).norm(), rtol=1e-5, atol=0)


def test_a_small_dim_keeps_smooth_fields() -> None:
    """16 x 16 x 1 values in 16 numbers a token: a low pass, not a random draw."""
    encoder = GridEncoder(channels=1, grid=(64, 64), patch=(4, 4), tokens=16, dim=16, fourier=())
    x = torch.linspace(0, 6.28, 64)
    smooth = (torch.sin(x)[:, None] * torch.cos(2 * x)[None])[None, None, :, :, None]

    kept = encode(encoder, smooth).norm() / smooth.norm()

    assert kept > 0.99


def test_fewer_tokens_than_patches_keep_what_lies_inside_a_cell() -> None:
    """A mean over patches would not see this field at all."""
    encoder = GridEncoder(**BURGERS, fourier=())
    ripple = torch.tensor([1.0, 1.0, -1.0, -1.0]).repeat(64)[None, None, None, :, None]

    torch.testing.assert_close(encode(encoder, ripple).norm(), ripple.norm(), rtol=1e-5, atol=0)


def test_a_token_sees_its_own_part_of_the_grid_alone() -> None:
    encoder = GridEncoder(**PLANE)  # 4 x 6 patches in 2 x 3 cells of 4 x 4 points
    data = data_of(PLANE)
    changed = data.clone()
    changed[:, :, 4:8, 8:12] += 1.0

    difference = (encode(encoder, data) != encode(encoder, changed)).any(-1)

    assert difference.tolist() == [[[False] * 5 + [True]] * 3] * 2


def test_cells_overlap_where_tokens_do_not_divide_patches() -> None:
    """48 x 48 with patch 4 is 12 x 12 patches: 32 tokens are 4 x 8 cells of 3 x 2 patches."""
    settings = {"channels": 2, "grid": (48, 48), "patch": (4, 4), "tokens": 32, "dim": 192}
    encoder, data = GridEncoder(**settings), data_of(settings, 1, 1)
    seen = torch.zeros(48, 48, dtype=torch.bool)

    for corner in range(0, 48, 4):
        changed = data.clone()
        changed[:, :, corner : corner + 4, 47 - corner] += 1
        seen[corner, 47 - corner] = not torch.equal(encode(encoder, changed), encode(encoder, data))

    assert int(seen.sum()) == 12
    assert encode(encoder, data).shape == (1, 1, 32, 192)


@pytest.mark.parametrize(
    ("patches", "tokens", "layout"),
    [
        pytest.param((1, 64), 16, (1, 16), id="one-dimension"),
        pytest.param((16, 16), 16, (4, 4), id="square"),
        pytest.param((8, 16), 32, (4, 8), id="cells-are-square"),
        pytest.param((12, 12), 144, (12, 12), id="as-many-as-patches"),
        pytest.param((12, 12), 1, (1, 1), id="one-token"),
        pytest.param((4, 4, 4), 8, (2, 2, 2), id="cubes"),
        pytest.param((4, 8, 8), 32, (2, 4, 4), id="cubes-in-a-box"),
    ],
)
def test_cells_are_as_square_as_can_be(
    patches: tuple[int, ...], tokens: int, layout: tuple[int, ...]
) -> None:
    assert plan_cells(tuple(2 * n for n in patches), (2,) * len(patches), tokens).layout == layout


def test_a_token_in_3d_is_one_block_of_the_grid() -> None:
    encoder = GridEncoder(**SOLID)  # 2 x 3 x 4 patches in 12 cells
    data = data_of(SOLID)
    changed = data.clone()
    changed[:, :, -1, -1, -1] += 1.0

    difference = (encode(encoder, data) != encode(encoder, changed)).any(-1)

    assert difference.tolist() == [[[False] * 11 + [True]] * 3] * 2
    with pytest.raises(EncoderError, match=r"patch \(2, 2\) .*grid \(4, 6, 8\).*patch=\(4, 2, 4\)"):
        GridEncoder(**{**SOLID, "patch": (2, 2)})


@pytest.mark.parametrize("tokens", [8, 16])
def test_tokens_carry_their_place(tokens: int) -> None:
    """Equal cells at different places give different tokens, but only with Fourier features."""
    data = torch.ones(1, 1, 1, 64, 1)
    settings: dict[str, Any] = {"channels": 1, "grid": (1, 64), "patch": (1, 4), "tokens": tokens, "dim": 8}

    placed, bare = (encode(GridEncoder(**settings, fourier=waves), data)[0, 0] for waves in ((1, 2), ()))

    assert len(torch.unique(placed, dim=0)) == tokens
    assert len(torch.unique(bare, dim=0)) == 1


def test_the_seed_alone_decides_the_weights() -> None:
    torch.manual_seed(7)
    np.random.seed(7)
    expected = torch.rand(2)
    torch.manual_seed(7)

    first = GridEncoder(**BURGERS, seed=3)

    assert torch.equal(torch.rand(2), expected)
    assert first.identity() == GridEncoder(**BURGERS, seed=3).identity()
    assert first.identity()["weights"] != GridEncoder(**BURGERS, seed=4).identity()["weights"]


def test_weights_are_the_same_on_every_machine() -> None:
    """A cache made elsewhere with this seed must be found. If these digests change, so must VERSION."""
    assert (
        GridEncoder(**BURGERS).identity()["weights"]
        == "bd6871a8b09e900d0b5d813bf8a006f7104b67c8ac02fbefeb77547a427fc728"
    )
    assert (
        GridEncoder(**PLANE, seed=1).identity()["weights"]
        == "eaf3d677f981b5317456de1517deef723dd41b74ac8323fe7aff9f0a59fcba86"
    )


@pytest.mark.parametrize(
    "change",
    [{"dim": 33}, {"tokens": 8}, {"patch": (1, 8)}, {"fourier": (1,)}, {"seed": 1}, {"field": "u"}],
    ids=lambda change: next(iter(change)),
)
def test_every_setting_that_changes_latents_changes_the_identity(change: dict[str, Any]) -> None:
    assert GridEncoder(**{**BURGERS, **change}).identity() != GridEncoder(**BURGERS).identity()


def test_a_checkpoint_of_the_weights_is_the_same_encoder(tmp_path: Path) -> None:
    seeded = GridEncoder(**BURGERS, seed=5)
    save_file(dict(seeded.weights()), tmp_path / "w.safetensors")

    loaded = GridEncoder(**BURGERS, checkpoint=tmp_path / "w.safetensors")

    assert loaded.identity() == seeded.identity()
    assert torch.equal(encode(loaded, data_of(BURGERS)), encode(seeded, data_of(BURGERS)))


def test_a_checkpoint_of_another_encoder_is_refused(tmp_path: Path) -> None:
    save_file(dict(GridEncoder(**{**BURGERS, "dim": 8}).weights()), tmp_path / "w.safetensors")

    with pytest.raises(EncoderError, match=r"\(16, 8\).*\(16, 32\)"):
        GridEncoder(**BURGERS, checkpoint=tmp_path / "w.safetensors")


@pytest.mark.parametrize("content", [None, b"no tensors"])
def test_a_checkpoint_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "w.safetensors"
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(EncoderError, match=r"w\.safetensors"):
        GridEncoder(**BURGERS, checkpoint=path)


@pytest.mark.parametrize(
    ("change", "cure"),
    [
        pytest.param({"patch": (4, 4)}, r"patch=\(1, 4\)", id="patch-4-on-1d"),
        pytest.param({"patch": (1, 96)}, r"patch=\(1, 64\)", id="patch-does-not-divide"),
        pytest.param({"tokens": 128}, "tokens=64", id="upsampling"),
        pytest.param({"grid": (34, 34), "patch": (2, 2), "tokens": 19}, "tokens=18", id="no-layout"),
        pytest.param({"dim": 0}, "dim is 0. Expected .* at least 1", id="dim-0"),
        pytest.param({"grid": (256,)}, r"\(H, W\)", id="grid-of-one"),
        pytest.param({"seed": -1}, "seed is -1. Expected .* at least 0", id="seed"),
        pytest.param({"channels": "1"}, "channels is '1'", id="channels-text"),
        pytest.param({"grid": 8}, "grid is 8", id="grid-number"),
        pytest.param({"patch": "44"}, "patch is '44'", id="patch-text"),
        pytest.param({"fourier": 5}, "fourier is 5", id="fourier-number"),
        pytest.param({"field": 5}, "field is 5", id="field-number"),
        pytest.param({"checkpoint": 5}, "checkpoint is 5", id="checkpoint-number"),
    ],
)
def test_settings_that_do_not_fit_are_refused_with_the_cure(change: dict[str, Any], cure: str) -> None:
    with pytest.raises(EncoderError, match=cure):
        GridEncoder(**{**BURGERS, **change})


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        pytest.param({"u": Field(shape=(5, 1, 256, 1), dtype="float32", time=True)}, "'u'", id="no-field"),
        pytest.param(
            {"data": Field(shape=(5, 1, 128, 1), dtype="float32", time=True)}, "256", id="other-grid"
        ),
        pytest.param({"data": Field(shape=(5, 256), dtype="float32", time=True)}, "256", id="other-axes"),
    ],
)
def test_samples_that_do_not_fit_are_refused(schema: dict[str, Field], said: str) -> None:
    with pytest.raises(EncoderError, match=said):
        GridEncoder(**BURGERS).schema(schema)


@pytest.mark.parametrize("shape", [(2, 3, 8, 12, 4), (2, 3, 8, 10, 3), (12, 3)])
def test_a_batch_that_does_not_fit_is_refused_with_both_shapes(shape: tuple[int, ...]) -> None:
    with pytest.raises(EncoderError, match=rf"{re.escape(str(shape))}.*3 channels on the grid \(8, 12\)"):
        encode(GridEncoder(**PLANE), torch.zeros(shape))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.uint8])
@pytest.mark.parametrize("settings", [BURGERS, PLANE, SOLID], ids=["1d", "2d", "3d"])
def test_any_real_dtype_is_taken(settings: dict[str, Any], dtype: torch.dtype) -> None:
    encoder = GridEncoder(**settings)
    data = (10 * data_of(settings).abs()).to(dtype)

    assert torch.equal(encode(encoder, data), encode(encoder, data.float()))


def test_latents_own_their_memory_and_the_input_is_left_alone() -> None:
    """The scratch is reused: a latent that shared it would change with the next call."""
    encoder = GridEncoder(**PLANE)
    data = data_of(PLANE)
    before = data.clone()
    first = encode(encoder, data)
    copy = first.clone()

    encode(encoder, data_of(PLANE, seed=9))
    first.add_(0)

    assert torch.equal(first, copy)
    assert torch.equal(data, before)


def test_strided_input_gives_the_same_latents() -> None:
    encoder = GridEncoder(**PLANE)
    wide = data_of(PLANE, n=4)

    assert torch.equal(encode(encoder, wide[::2]), encode(encoder, wide[::2].contiguous()))


def test_more_rows_than_a_chunk_are_all_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = GridEncoder(**PLANE)
    data = data_of(PLANE, n=5, steps=7)
    whole = encode(encoder, data)

    monkeypatch.setattr("stoker.encoders.grid.CHUNK_BYTES", 4 * 6 * (48 + 48) * 48)

    torch.testing.assert_close(encode(encoder, data), whole, rtol=1e-5, atol=1e-5)


def test_large_samples_are_cut_over_time() -> None:
    encoder = GridEncoder(**BURGERS)
    small = Field(shape=(101, 1, 256, 1), dtype="float32", time=True)
    large = Field(shape=(100_000, 1, 256, 1), dtype="float32", time=True)

    assert encoder.encode_batch_size({"data": small}) == EncodeBatchSize(samples=27)
    group = encoder.encode_batch_size({"data": large})
    assert group.samples == 1
    assert group.steps is not None
    assert 1000 < group.steps < 10_000


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_gives_the_latents_of_the_cpu() -> None:
    encoder, data = GridEncoder(**PLANE), data_of(PLANE)
    expected = encode(encoder, data)

    encoder.to(torch.device("cuda"))

    torch.testing.assert_close(encode(encoder, data.cuda()).cpu(), expected, rtol=1e-4, atol=1e-4)
