"""Features of a folder of images, computed once: `python examples/images_dinov2.py --out FOLDER`.

`--model` is the local folder of a DINOv2 (`model.save_pretrained`, with its processor); without one a tiny
one of random weights is made. `--images` has a folder for each class; without it, dark and light skies are
drawn. A linear layer is then trained on the features from memory. Everything is written below `--out`.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

import stoker


def draw_images(folder: Path, count: int = 60) -> Path:
    random = np.random.default_rng(0)
    for name, sky in (("day", 150), ("night", 40)):
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            pixels = sky + random.uniform(-30, 30) + random.normal(0, 20, (64, 64))
            pixels[random.random((64, 64)) < 0.02] = 250
            image = Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))
            image.save(folder / name / f"{number:03d}.jpg")
    return folder


def make_model(folder: Path) -> Path:
    from transformers import Dinov2Config, Dinov2Model

    torch.manual_seed(0)
    config = Dinov2Config(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=56, patch_size=14
    )
    Dinov2Model(config).save_pretrained(folder)
    processor = {"rescale_factor": 1 / 255, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.25, 0.25, 0.25]}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


def main(folder: Path, model: Path | None, images: Path | None) -> None:
    encoder = stoker.FeatureEncoder(model or make_model(folder / "model"), "mean")
    parts = {}
    for split in ("train", "test"):
        source = stoker.ImageSource(
            images or draw_images(folder / "images"), "folder", size=(56, 56), split=split
        )
        parts[split] = stoker.precompute(source, encoder, folder / "cache", name=f"features_{split}")
    train = stoker.Loader(parts["train"], 32, seed=0, shuffle=True)
    test = stoker.Loader(parts["test"], 32, shuffle=True)
    width = parts["train"].schema["features"].shape[0]
    probe = torch.nn.Sequential(torch.nn.LayerNorm(width), torch.nn.Linear(width, len(source.classes)))
    optimizer = torch.optim.AdamW(probe.parameters(), lr=1e-2)
    for _ in range(30):
        for batch in train:
            optimizer.zero_grad()
            F.cross_entropy(probe(batch["features"]), batch["label"]).backward()
            optimizer.step()
    with torch.no_grad():
        right = [(probe(b["features"]).argmax(1) == b["label"]).float() for b in test]
    print(f"{', '.join(source.classes)}: {100 * torch.cat(right).mean():.0f} % of the test images are right")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a linear layer on cached features of images.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the cache, and for what is made")
    parser.add_argument("--model", type=Path, help="folder of a DINOv2; default: a tiny one, made in --out")
    parser.add_argument("--images", type=Path, help="a folder for each class; default: drawn in --out")
    arguments = parser.parse_args()
    main(arguments.out, arguments.model, arguments.images)
