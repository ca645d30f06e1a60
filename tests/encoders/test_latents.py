"""Latents of a tiny random autoencoder, made on the spot."""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import stoker
from stoker.errors import EncoderError
from stoker.schema import Field
from stoker.testing import check_encoder
from tests.cli.commands import run_json
from tests.encoders.tiny_models import make_vae

pytestmark = pytest.mark.skipif(
    find_spec("diffusers") is None, reason="diffusers is not installed: pip install 'stoker[diffusion]'"
)

IMAGE = {"image": Field(shape=(3, 32, 48), dtype="uint8")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vae(tmp_path_factory.mktemp("pipeline"), scaling_factor=0.36, shift_factor=0.11)


def images(count: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, 256, (count, 3, 32, 48), dtype=torch.uint8, generator=generator)


def model(folder: Path) -> Any:
    from diffusers import AutoencoderKL

    return AutoencoderKL.from_pretrained(folder, subfolder="vae").eval()


def test_mean_and_std_are_the_moments_of_the_model(folder: Path) -> None:
    found = stoker.VAEEncoder(folder).encode({"image": images(), "label": torch.arange(3)})

    with torch.inference_mode():
        wanted = model(folder).encode(images().float() / 127.5 - 1).latent_dist
    assert found["mean"].shape == (3, 4, 4, 6)
    assert torch.allclose(found["mean"], wanted.mean, atol=1e-5)
    assert torch.allclose(found["std"], wanted.std, rtol=1e-5)
    assert found["label"].tolist() == [0, 1, 2]
    assert found.keys() == {"mean", "std", "label"}


def test_it_keeps_the_promises_of_an_encoder(folder: Path) -> None:
    check_encoder(stoker.VAEEncoder(folder, encode_batch=3), IMAGE)


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-1.0, 1.0)])
def test_float_images_of_a_range_give_what_bytes_give(folder: Path, low: float, high: float) -> None:
    floats = images().float() / 255 * (high - low) + low

    found = stoker.VAEEncoder(folder, value_range=(low, high)).encode({"image": floats})

    wanted = stoker.VAEEncoder(folder).encode({"image": images()})
    assert torch.allclose(found["mean"], wanted["mean"], atol=1e-4)


def test_a_float_image_of_another_range_is_refused_with_its_values(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"255.*0 to 1"):
        stoker.VAEEncoder(folder).encode({"image": images().float()})


def test_the_factors_are_those_of_the_configuration(folder: Path, tmp_path: Path) -> None:
    encoder = stoker.VAEEncoder(folder)

    assert (encoder.scaling_factor, encoder.shift_factor) == (0.36, 0.11)
    place = make_vae(tmp_path)
    for lacking in (set[str](), {"scaling_factor", "shift_factor"}):  # as the files of Stable Diffusion 1
        file = place / "vae" / "config.json"
        config = json.loads(file.read_text())
        file.write_text(json.dumps({name: value for name, value in config.items() if name not in lacking}))
        without = stoker.VAEEncoder(place)
        assert (without.scaling_factor, without.shift_factor) == (0.18215, 0.0)


def test_decode_is_that_of_the_model_in_the_range_of_images(folder: Path) -> None:
    latents = torch.randn(2, 4, 4, 6, generator=torch.Generator().manual_seed(1))

    found = stoker.VAEEncoder(folder).decode(latents)

    with torch.inference_mode():
        wanted = model(folder).decode(latents).sample
    assert found.shape == (2, 3, 32, 48)
    assert torch.allclose(found, wanted / 2 + 0.5, atol=1e-5)


def test_a_cache_has_the_moments_of_each_image_whatever_its_neighbors(folder: Path, tmp_path: Path) -> None:
    data = [{"image": image, "label": number} for number, image in enumerate(images(5))]
    encoder = stoker.VAEEncoder(folder, encode_batch=2)

    cache = stoker.precompute(data, encoder, tmp_path, name="photos", device="cpu")

    alone = [stoker.VAEEncoder(folder).encode({"image": image[None]}) for image in images(5)]
    assert all(torch.allclose(cache[n]["mean"], alone[n]["mean"][0], atol=1e-5) for n in range(5))
    assert [int(cache[n]["label"]) for n in range(5)] == list(range(5))
    # A second run finds the cache and does not load the model.
    again = stoker.precompute(data, stoker.VAEEncoder(folder, encode_batch=2), tmp_path, name="photos")
    assert again.fingerprint == cache.fingerprint
    assert not list((tmp_path).glob("**/*folder:*")), "the weights stay in the folder of the model"


SIZES = [(32, 48), (48, 32), (40, 40)]


def pictures(sizes: list[tuple[int, int]], count: int = 9) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, *sizes[n % len(sizes)]) for n in range(count)]
    return [
        {"image": torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator), "label": n}
        for n, shape in enumerate(shapes)
    ]


@pytest.mark.parametrize("sizes", [SIZES, [(32, 48), (32, 64)], [(32, 48), (64, 48)]])
def test_pictures_of_several_sizes_have_the_latents_that_each_has_alone(
    folder: Path, tmp_path: Path, sizes: list[tuple[int, int]]
) -> None:
    data = pictures(sizes)

    cache = stoker.precompute(
        data, stoker.VAEEncoder(folder, encode_batch=4), tmp_path, name="p", device="cpu", workers=0
    )

    alone = [stoker.VAEEncoder(folder).encode({"image": sample["image"][None]}) for sample in data]
    for n, one in enumerate(alone):
        assert torch.equal(cache[n]["mean"], one["mean"][0])
        assert torch.equal(cache[n]["std"], one["std"][0])
    seen: list[int] = []
    for batch in stoker.Loader(cache, 2, shuffle=True, batch_by="shape", device="cpu"):
        assert batch["mean"].shape == batch["std"].shape
        assert all(
            torch.equal(m, alone[n]["mean"][0]) for n, m in zip(batch["label"], batch["mean"], strict=True)
        )
        seen += batch["label"].tolist()
    assert sorted(seen) == list(range(9))


def test_it_keeps_the_promises_of_an_encoder_for_pictures_of_several_sizes(folder: Path) -> None:
    source = stoker.TorchSource(pictures(SIZES))

    check_encoder(stoker.VAEEncoder(folder), source.schema(), steps=32)


def test_a_picture_whose_size_does_not_fit_is_set_aside_with_its_size(folder: Path, tmp_path: Path) -> None:
    data = pictures([*SIZES, (32, 44)], 8)

    cache = stoker.precompute(
        data, stoker.VAEEncoder(folder), tmp_path, name="p", device="cpu", workers=0, max_quarantined=0.25
    )

    assert sorted(cache.quarantined) == [3, 7]
    assert "32 x 44" in cache.quarantined[3].error


def test_the_identity_names_weights_and_settings_but_no_place(folder: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(folder, tmp_path / "moved")
    first = stoker.VAEEncoder(folder).identity()

    assert stoker.VAEEncoder(moved).identity() == first
    assert stoker.VAEEncoder(moved / "vae").identity() == first
    others = [
        stoker.VAEEncoder(folder, dtype="bfloat16").identity(),
        stoker.VAEEncoder(folder, value_range=(-1, 1)).identity(),
        stoker.VAEEncoder(
            make_vae(tmp_path / "other", seed=1, scaling_factor=0.36, shift_factor=0.11)
        ).identity(),
    ]
    assert all(other != first for other in others)


def test_identity_and_schema_need_no_diffusers(folder: Path) -> None:
    program = (
        "import sys, stoker; from stoker.schema import Field\n"
        f"e = stoker.VAEEncoder({str(folder)!r}); e.identity()\n"
        "e.schema({'image': Field(shape=(3, 32, 32), dtype='uint8')})\n"
        "assert not {'diffusers', 'transformers'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)

    assert done.returncode == 0, done.stderr


def test_weights_that_change_after_the_identity_was_taken_are_refused(folder: Path, tmp_path: Path) -> None:
    """In this process, and in an encoder process that is sent the encoder and not its weights."""
    place = shutil.copytree(folder, tmp_path / "own")
    encoder = stoker.VAEEncoder(place)
    encoder.identity()
    sent = pickle.dumps(encoder)
    assert len(sent) < 20_000
    make_vae(place, seed=1, scaling_factor=0.36, shift_factor=0.11)

    for one in (encoder, pickle.loads(sent)):
        for _ in range(2):
            with pytest.raises(EncoderError, match="changed"):
                one.encode({"image": images()})


def test_a_loaded_model_keeps_its_identity_when_the_folder_changes(folder: Path, tmp_path: Path) -> None:
    place = shutil.copytree(folder, tmp_path / "own")
    encoder = stoker.VAEEncoder(place)
    encoder.encode({"image": images()})
    first = encoder.identity()
    make_vae(place, seed=1, scaling_factor=0.36, shift_factor=0.11)

    assert encoder.identity() == first


@pytest.mark.parametrize(
    ("field", "says"),
    [
        (Field(shape=(3, 30, 48), dtype="uint8"), r"30 x 48.*by 8.*size=\(32, 48\)"),
        (Field(shape=(32, 48, 3), dtype="uint8"), r"\(3, H, W\)"),
        (Field(shape=(3, 32, 48), dtype="int64"), "int64"),
    ],
)
def test_images_that_do_not_fit_are_refused_with_what_would(folder: Path, field: Field, says: str) -> None:
    with pytest.raises(EncoderError, match=says):
        stoker.VAEEncoder(folder).schema({"image": field})


def test_a_folder_without_weights_or_of_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    empty = shutil.copytree(folder, tmp_path / "empty") / "vae"
    (empty / "diffusion_pytorch_model.safetensors").rename(empty / "diffusion_pytorch_model.fp16.safetensors")
    with pytest.raises(EncoderError, match=r"fp16\.safetensors"):
        stoker.VAEEncoder(empty)
    other = shutil.copytree(folder, tmp_path / "other") / "vae"
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "_class_name": "AutoencoderTiny"}))
    with pytest.raises(EncoderError, match="AutoencoderTiny"):
        stoker.VAEEncoder(other)
    with pytest.raises(EncoderError, match="force_upcast"):
        stoker.VAEEncoder(folder, dtype="float16")


def test_weights_that_are_missing_are_refused_not_random(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    place = shutil.copytree(folder, tmp_path / "cut") / "vae" / "diffusion_pytorch_model.safetensors"
    weights = load_file(place)
    del weights["encoder.conv_in.weight"]
    save_file(weights, place)

    with pytest.raises(EncoderError, match=r"encoder\.conv_in\.weight"):
        stoker.VAEEncoder(place.parent).encode({"image": images()})


def test_a_settings_file_names_it(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = pytest.importorskip("PIL.Image")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    for number, pixels in enumerate(images()):
        image.fromarray(pixels.permute(1, 2, 0).numpy()).save(tmp_path / "photos" / f"{number}.png")
    (tmp_path / "c.yaml").write_text(
        "data: {kind: images, root: photos, splits: {train: 1.0}, images: {size: [32, 48]}}\n"
        f"encoder: {{target: 'stoker:VAEEncoder', arguments: {{folder: '{folder}', encode_batch: 3}}}}\n"
        "precompute: {workers: 0}\ntraining: {device: cpu}\n"
    )

    (found,) = run_json("precompute", "c.yaml", "--splits", "train")["caches"]
    cache = stoker.open_cache(found["path"])
    wanted = stoker.VAEEncoder(folder).encode({"image": images()})
    assert torch.allclose(cache[1]["mean"], wanted["mean"][1], atol=1e-5)
    assert torch.allclose(cache[1]["std"], wanted["std"][1], rtol=1e-4)


@pytest.mark.parametrize("value", ["01", 1, None, (0,), (0, 1, 2), (1, 0), ("0", "1")])
def test_a_range_that_is_not_two_rising_numbers_is_refused(folder: Path, value: Any) -> None:
    with pytest.raises(EncoderError, match="value_range is "):
        stoker.VAEEncoder(folder, value_range=value)
