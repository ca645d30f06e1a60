"""Text-to-image training on caches: the losses of encoding in the loop, and nothing encoded twice."""

from __future__ import annotations

import importlib.util
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import stoker
from stoker.precompute import engine
from stoker.transforms import DrawLatent, DropCondition
from tests.encoders import tiny_models

pytest.importorskip("diffusers")
pytest.importorskip("transformers")
EXAMPLE = Path(__file__).parent.parent / "examples" / "text_to_image.py"
SIZE, COUNT = 32, 14


@pytest.fixture(scope="module")
def example() -> Any:
    spec = importlib.util.spec_from_file_location("text_to_image", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny models with random weights, in the folders of a pipeline."""
    from diffusers import DDPMScheduler, UNet2DConditionModel

    folder = tmp_path_factory.mktemp("pipeline")
    tiny_models.make_vae(folder, sample_size=SIZE)
    tiny_models.make_clip(folder / "text_encoder")
    tiny_models.make_t5(folder / "text_encoder_2")
    tiny_models.make_tokenizer(folder / "tokenizer")
    tiny_models.make_tokenizer(folder / "tokenizer_2", words=tiny_models.WORDS[::-1])
    torch.manual_seed(0)
    UNet2DConditionModel(
        sample_size=4,
        layers_per_block=1,
        block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=16,
        attention_head_dim=4,
        norm_num_groups=4,
    ).save_pretrained(folder / "unet")
    DDPMScheduler().save_pretrained(folder / "scheduler")
    return folder


@pytest.fixture
def images(tmp_path: Path) -> Path:
    folder = tmp_path / "images"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for i in range(COUNT):
        pixels = rng.integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{i:02}.png")
        (folder / f"{i:02}.txt").write_text(" ".join(rng.choice(tiny_models.WORDS, 1 + i % 5)))
    return folder


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Samples that the last call of `precompute` encoded, by cache."""
    found: dict[str, int] = {}
    report = engine._report

    def noted(*arguments: Any) -> Any:
        made = report(*arguments)
        found[made.name] = made.encoded
        return made

    monkeypatch.setattr(engine, "_report", noted)
    return found


def encode_in_the_loop(pipeline: Path) -> Any:
    """What a training loop without caches does to each batch."""
    from diffusers import AutoencoderKL
    from transformers import CLIPTextModel, T5EncoderModel

    vae = AutoencoderKL.from_pretrained(pipeline / "vae")
    texts = {
        "one": CLIPTextModel.from_pretrained(pipeline / "text_encoder"),
        "two": T5EncoderModel.from_pretrained(pipeline / "text_encoder_2"),
    }

    @torch.no_grad()
    def encode(batch: Any) -> Any:
        moments = vae.encode(batch["picture.image"].float() / 127.5 - 1).latent_dist
        made = {"latents.mean": moments.mean, "latents.std": moments.std, "index": batch["index"]}
        for name, model in texts.items():
            ids = batch[f"{name}.input_ids"].long()
            made[name] = model(ids, torch.ones_like(ids))[0]
        return made

    return encode


def test_losses_are_those_of_encoding_in_the_loop(
    example: Any, pipeline: Path, images: Path, tmp_path: Path
) -> None:
    scale = stoker.VAEEncoder(pipeline).scaling_factor
    caches = example.make_caches(pipeline, images, tmp_path / "caches", SIZE)
    null = {name: caches[name].get("")["hidden"] for name in example.TEXTS}
    steps = [
        DrawLatent(mean="latents.mean", std="latents.std", scale=scale),
        DropCondition([*example.TEXTS], p=0.1, null=null),
    ]
    pictures = stoker.precompute(
        stoker.ImageSource(images, size=(SIZE, SIZE)), None, tmp_path / "caches", name="raw", progress=None
    )
    files = sorted(images.glob("*.txt"))
    text = stoker.TorchSource(
        [{"caption": file.read_text()} for file in files],
        text={"caption": "bytes"},
        keys=[file.stem for file in files],
        version="1",
    )
    ids = {
        name: stoker.precompute(
            stoker.Tokenize(text, pipeline / folder, max_length=8),
            None,
            tmp_path / "caches",
            name=f"ids_{name}",
        )
        for name, folder in (("one", "tokenizer"), ("two", "tokenizer_2"))
    }
    raw = stoker.zip(picture=pictures, **ids)
    options: dict[str, Any] = {"batch_size": 4, "shuffle": True, "seed": 0}

    def same(batch: Any) -> Any:
        return batch

    cached = stoker.Loader(stoker.zip(**caches), **options, transforms=[same, *steps])
    encoded = stoker.Loader(raw, **options, transforms=[encode_in_the_loop(pipeline), *steps])

    one = example.train(cached, pipeline, tmp_path / "one.pt")
    other = example.train(encoded, pipeline, tmp_path / "other.pt")

    assert len(one) == 2 * -(-COUNT // 4)
    assert one == pytest.approx(other, rel=1e-4)


def test_what_changed_is_encoded_and_nothing_else(
    example: Any,
    pipeline: Path,
    images: Path,
    tmp_path: Path,
    encoded: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caches = example.make_caches(pipeline, images, tmp_path / "caches", SIZE)
    assert encoded == {"latents": COUNT, "text_one": COUNT + 1, "text_two": COUNT + 1}

    # Another learning rate is no part of a cache.
    example.make_caches(pipeline, images, tmp_path / "caches", SIZE)
    example.train(example.make_loader(caches, 1.0), pipeline, tmp_path / "state.pt", epochs=1, lr=5e-4)
    assert encoded == {"latents": 0, "text_one": 0, "text_two": 0}

    # An edited caption is one text, for each of two text encoders.
    (images / "05.txt").write_text("two long red cat")
    edited = example.make_caches(pipeline, images, tmp_path / "caches", SIZE)
    assert encoded == {"latents": 0, "text_one": 1, "text_two": 1}
    assert torch.equal(edited["one"].get("04")["hidden"], caches["one"].get("04")["hidden"])
    assert not torch.equal(edited["one"].get("05")["hidden"], caches["one"].get("05")["hidden"])

    # Another text encoder encodes all texts, for itself.
    other = tiny_models.make_clip(tmp_path / "other", seed=5)
    monkeypatch.setitem(example.TEXTS, "one", str(other))
    example.make_caches(pipeline, images, tmp_path / "caches", SIZE)
    assert encoded == {"latents": 0, "text_one": COUNT + 1, "text_two": 0}


@pytest.mark.slow
def test_killed_at_ten_random_moments_it_continues_with_the_same_losses(
    pipeline: Path, images: Path, tmp_path: Path
) -> None:
    def start(out: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(EXAMPLE), str(pipeline), str(images), str(tmp_path / out), "6"]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)

    begin = time.monotonic()
    whole, _ = start("whole").communicate(timeout=300)
    lasts_s = time.monotonic() - begin
    moments = random.Random(0)
    for _ in range(10):
        run = start("killed")
        try:
            run.wait(moments.uniform(0.3, 1.0) * lasts_s)
        except subprocess.TimeoutExpired:
            os.kill(run.pid, signal.SIGKILL)
        run.communicate()
    killed, _ = start("killed").communicate(timeout=300)

    assert whole.startswith("losses")
    assert killed == whole
