"""A vision model of `transformers` with given weights; the only module here that imports that package."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import transformers  # pyright: ignore[reportMissingImports]
from torch import Tensor, nn
from transformers import MODEL_MAPPING, AutoConfig, AutoImageProcessor  # pyright: ignore[reportMissingImports]
from transformers.utils import logging as progress  # pyright: ignore[reportMissingImports]

from stoker.encoders.features import ATTENTION, Scaling
from stoker.errors import EncoderError


class VisionModel:
    """The model of a local folder, frozen, float32.

    Args:
        folder: With its configuration; weights are not read from there.
        weights: By the names of its safetensors files.
        scaling: What to do to uint8 images on the device; None: the model's own processor does all.

    Raises:
        EncoderError: The configuration is of no known model, or weights are missing or of other shapes.
    """

    def __init__(self, folder: Path, weights: Mapping[str, Tensor], *, scaling: Scaling | None) -> None:
        self._model = _model(folder, weights)
        self._device = torch.device("cpu")
        self._processor: Any = None
        self._shift = torch.zeros(3, 1, 1, dtype=torch.float32, device="cpu")
        self._scale = torch.ones(3, 1, 1, dtype=torch.float32, device="cpu")
        if scaling is None:
            self._processor = AutoImageProcessor.from_pretrained(folder, local_files_only=True, backend="pil")
        else:
            factor, mean, std = (torch.tensor(value, dtype=torch.float32, device="cpu") for value in scaling)
            self._shift, self._scale = (mean / factor).view(3, 1, 1), (factor / std).view(3, 1, 1)

    def to(self, device: torch.device) -> None:
        """Move it to `device`."""
        self._device = device
        self._model.to(device)
        self._shift, self._scale = self._shift.to(device), self._scale.to(device)

    def tokens(self, images: Tensor) -> Tensor:
        """Tokens `(n, T, D)` of uint8 images `(n, 3, H, W)`."""
        if self._processor is None:
            pixels = (images.to(torch.float32) - self._shift) * self._scale
        else:
            arrays = [image.numpy() for image in images.cpu()]
            made = self._processor(images=arrays, return_tensors="pt", input_data_format="channels_first")
            pixels = made["pixel_values"].to(self._device, torch.float32)
        return cast("Tensor", self._model(pixel_values=pixels).last_hidden_state)


def pil_backend() -> str:
    """What resizes images in the model's own processor; Pillow and torchvision give other pixels."""
    from PIL import __version__ as pillow

    return f"pil, transformers {transformers.__version__}, pillow {pillow}"


def _model(folder: Path, weights: Mapping[str, Tensor]) -> nn.Module:
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        kind: Any = MODEL_MAPPING[type(config)]
    except (ValueError, KeyError, OSError) as error:
        raise EncoderError(
            f"{folder / 'config.json'} describes no model that transformers knows: {error}"
        ) from error
    with _quiet(), torch.device("cpu"):
        model, found = kind.from_pretrained(
            None,
            config=config,
            state_dict=dict(weights),
            dtype=torch.float32,
            attn_implementation=ATTENTION,
            output_loading_info=True,
        )
    # A pooler is made of random weights where a checkpoint has none; nothing here uses it.
    missing = sorted(name for name in found["missing_keys"] if not name.startswith("pooler."))
    if missing or found["mismatched_keys"]:
        wrong = missing or sorted(map(str, found["mismatched_keys"]))
        raise EncoderError(
            f"{folder} lacks {len(wrong)} weights of its model or has them in another shape: {wrong[0]}, ... "
            "They would be random; copy or download the folder again"
        )
    return model.eval().requires_grad_(False)


@contextmanager
def _quiet() -> Generator[None]:
    """Without a progress bar and a report of its own on standard error."""
    bar, level = progress.is_progress_bar_enabled(), progress.get_verbosity()
    progress.disable_progress_bar()
    progress.set_verbosity_error()
    try:
        yield
    finally:
        progress.set_verbosity(level)
        if bar:
            progress.enable_progress_bar()
