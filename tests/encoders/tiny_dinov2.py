"""A tiny random DINOv2 with its processor in a folder, as `save_pretrained` writes them."""

from __future__ import annotations

import json
from pathlib import Path

import torch

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
PROCESSOR = {
    "image_processor_type": "BitImageProcessor",
    "do_resize": True, "size": {"shortest_edge": 32}, "resample": 3,
    "do_center_crop": True, "crop_size": {"height": 28, "width": 28},
    "do_rescale": True, "rescale_factor": 1 / 255,
    "do_normalize": True, "image_mean": MEAN, "image_std": STD, "do_convert_rgb": True,
}  # fmt: skip


def make_model(folder: Path, registers: int = 0) -> Path:
    from transformers import (
        Dinov2Config,
        Dinov2Model,
        Dinov2WithRegistersConfig,
        Dinov2WithRegistersModel,
    )

    torch.manual_seed(0)
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28}
    if registers:
        config = Dinov2WithRegistersConfig(**small, patch_size=14, num_register_tokens=registers)
        model = Dinov2WithRegistersModel(config)
    else:
        model = Dinov2Model(Dinov2Config(**small, patch_size=14))
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return folder
