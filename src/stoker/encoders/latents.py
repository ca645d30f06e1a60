"""Latents of images: the moments that the encoder of a `diffusers` AutoencoderKL gives."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stoker.arguments import NAME, PATH, check, number, several
from stoker.encoders.pretrained import (
    FolderEncoder,
    ModelFolder,
    missing_package,
    passed_fields,
    refuse_missing,
    required_field,
)
from stoker.encoders.protocol import EncodeBatchSize, in_own_axes
from stoker.errors import EncoderError, arg
from stoker.schema import FLOATS, SHAPE_SUFFIX, VARIES, Field, Json, Schema, size_field

# The package is optional: it is imported where a model is loaded.
# pyright: reportMissingImports=false

_RANGE = several(number("a number"), "two numbers, as (0, 1)")
_SLACK = 1e-3
"""How far a float image may be outside its range, as a fraction of it: resizing may round."""
_SCALING_FACTOR = 0.18215
"""That of an `AutoencoderKL` whose config.json names none, such as those of Stable Diffusion 1."""


class VAEEncoder(FolderEncoder):
    """Frozen image autoencoder (`AutoencoderKL`) as an encoder; satisfies `Encoder`.

    The image is replaced by two fields, float32 `(C, H/8, W/8)`: the mean and the standard deviation of its
    latent. They are the moments, not a draw, so that training draws again in each epoch:
    `stoker.transforms.DrawLatent`. The deviation is stored, and not the logarithm of the variance that the
    model gives: a draw is `mean + std * noise`, without an exponential for each batch.
    The other fields stay in the record.

    What is stored is not scaled. The model for diffusion is trained on
    `(latent - shift_factor) * scaling_factor`.

    Images become -1 to 1: uint8 as `value / 127.5 - 1`, floats from `value_range`. Tiling and slicing are
    off. GroupNorm and attention see one image, so that no latent depends on the others of its batch.

    Args:
        folder: What `AutoencoderKL.save_pretrained` wrote, or a pipeline with a subfolder `vae`. Nothing is
            downloaded.
        field: The field with images `(3, H, W)`, uint8 or float. H and W must be multiples of the factor by
            which the model reduces them (8). They may differ from image to image: then the latents do too.
        mean: Name of the field with the mean.
        std: Name of the field with the standard deviation.
        value_range: Least and largest value of float images: `(0, 1)`, or `(-1, 1)`. A sample with a value
            outside it is quarantined.
        dtype: Of weights and activations: `float32`, `bfloat16` or `float16`. The record is float32.
        encode_batch: Images in one call; None: about 8 MiB of images and latents. Images of several sizes are
            encoded one at a time.

    Raises:
        EncoderError: The folder holds no such model.

    Examples:
        >>> source = stoker.ImageSource("photos", size=(512, 512))  # doctest: +SKIP
        >>> vae = stoker.VAEEncoder("stable-diffusion-xl-base-1.0")  # doctest: +SKIP
        >>> cache = stoker.precompute(source, vae, "caches", name="photos")  # doctest: +SKIP
        >>> cache[0]["mean"].shape, vae.scaling_factor  # doctest: +SKIP
        (torch.Size([4, 64, 64]), 0.13025)
    """

    NAME = "stoker.VAEEncoder"

    def __init__(  # noqa: PLR0913 - the public face; every setting is named by the caller
        self,
        folder: str | Path,
        field: str = "image",
        *,
        mean: str = "mean",
        std: str = "std",
        value_range: tuple[float, float] = (0.0, 1.0),
        dtype: str = "float32",
        encode_batch: int | None = None,
    ) -> None:
        names = {"field": (field, NAME), "mean": (mean, NAME), "std": (std, NAME)}
        check({"folder": (folder, PATH), **names, "value_range": (value_range, _RANGE)}, EncoderError)
        place = Path(folder).expanduser()
        if not (place / "config.json").exists() and (place / "vae" / "config.json").exists():
            place /= "vae"
        super().__init__(ModelFolder(place, "diffusion_pytorch_model"), dtype, encode_batch)
        config = self._folder.config
        if config.get("_class_name") != "AutoencoderKL":
            raise EncoderError(
                f"{place / 'config.json'} describes a {config.get('_class_name')}, not an AutoencoderKL",
                hint="Wrap the model in a ModuleEncoder",
            )
        if dtype == "float16" and config.get("force_upcast", True):
            raise EncoderError(
                f"the model in {place} overflows in float16 (force_upcast in its config.json)",
                hint=f"Use {arg('dtype', 'bfloat16')} or float32",
            )
        if not (len(value_range) == 2 and value_range[1] > value_range[0]):
            raise EncoderError(f"value_range is {value_range}", hint="Expected two numbers, as (0, 1)")
        self._field, self._mean, self._std = field, mean, std
        self._range = float(value_range[0]), float(value_range[1])
        self._reduction = 2 ** (len(config.get("block_out_channels", (64,))) - 1)
        self._channels = int(config.get("latent_channels", 4))

    @property
    def scaling_factor(self) -> float:
        """The factor in `(latent - shift_factor) * scaling_factor`."""
        return float(self._folder.config.get("scaling_factor", _SCALING_FACTOR) or 1.0)

    @property
    def shift_factor(self) -> float:
        """The shift in `(latent - shift_factor) * scaling_factor`; 0 where the model has none."""
        return float(self._folder.config.get("shift_factor") or 0.0)

    def schema(self, sample_schema: Schema) -> Schema:
        """Return mean and deviation, then the fields that pass through.

        Raises:
            EncoderError: No such field, no images of a size that the model takes, or a name occurs twice.
        """
        image = required_field(sample_schema, self._field, "VAEEncoder")
        colors = int(self._folder.config.get("in_channels", 3))
        known = image.dtype == "uint8" or image.dtype in FLOATS
        words = [*image.axes, *map(str, image.shape[1 if image.folded else 0 :])]
        varies = image.ragged and not image.plain
        if varies or not known or len(words) != 3 or words[0] != str(colors):
            raise EncoderError(
                f"field {self._field!r} is {image.dtype} ({', '.join(words)})",
                hint=f"Expected images ({colors}, H, W), uint8 or float, as "
                f"{arg('size', ..., call='ImageSource')} gives them",
            )
        fixed = [int(word) for word in words[1:] if word != VARIES]
        if any(size % self._reduction for size in fixed):
            near = tuple(max(1, round(n / self._reduction)) * self._reduction for n in fixed)
            raise EncoderError(
                f"images are {self._refusal(words[1:])}", hint=f"Give the source {arg('size', near)}"
            )
        sizes = [word if word == VARIES else str(int(word) // self._reduction) for word in words[1:]]
        latent = self._latent([str(self._channels), *sizes], len(image.axes))
        made = {self._mean: latent, self._std: latent}
        taken = {self._field}
        if image.folded:
            taken.add(self._field + SHAPE_SUFFIX)
            made |= {name + SHAPE_SUFFIX: size_field(latent) for name in (self._mean, self._std)}
        return passed_fields(sample_schema, taken, made, "VAEEncoder")

    def encode_batch_size(self, sample_schema: Schema) -> EncodeBatchSize:
        """Return the size given, else about 8 MiB a call; images of several sizes come one at a time."""
        if required_field(sample_schema, self._field, "VAEEncoder").folded:
            return EncodeBatchSize(samples=1)
        return super().encode_batch_size(sample_schema)

    def encode(self, batch: dict[str, Tensor], /) -> dict[str, Tensor]:
        """Return mean and deviation of the latents of a batch of images.

        Raises:
            ValueError: A float image has values outside `value_range`, or the size of an image does not fit.
            EncoderError: `diffusers` is not installed, or the weights are not those of the model.
        """
        images, sizes = in_own_axes(batch, self._field), batch.get(self._field + SHAPE_SUFFIX)
        if any(size % self._reduction or not size for size in images.shape[2:]):
            raise ValueError(f"the image is {self._refusal(images.shape[2:])}")
        model = self._loaded()
        with self._exact():
            pixels = self._normalized(images).to(getattr(torch, self._dtype))
            moments: Any = model.encode(pixels).latent_dist
            # Not `moments.std`, which is of the dtype of the model.
            made = {self._mean: moments.mean.float(), self._std: (0.5 * moments.logvar.float()).exp()}
        taken = {self._field, self._field + SHAPE_SUFFIX}
        rest = {name: value for name, value in batch.items() if name not in taken}
        found = {name: value.contiguous() for name, value in made.items()}
        if sizes is not None:  # the axes that were folded are folded again
            lead = sizes.shape[1]
            for name, value in made.items():
                found[name + SHAPE_SUFFIX] = torch.tensor([value.shape[1 : 1 + lead]], device=sizes.device)
                found[name] = found[name].flatten(1, lead)
        return found | rest

    def decode(self, latents: Tensor) -> Tensor:
        """Return the images of latents, as they are stored or drawn: `latent / scaling_factor + shift_factor`
        of what a model for diffusion gives.

        Args:
            latents: `(n, C, h, w)`, on any device.

        Returns:
            Float32 `(n, 3, 8 h, 8 w)` on the device of the encoder, in `value_range` but for overshoot.
        """
        model = self._loaded()
        low, high = self._range
        with self._exact():
            images: Tensor = model.decode(latents.to(self._device, getattr(torch, self._dtype))).sample
            return (images.float() + 1) * ((high - low) / 2) + low

    def _latent(self, words: Sequence[str], folded: int) -> Field:
        """Return the field of a latent with these axes, of which the first `folded` are stored as one."""
        rest = tuple(map(int, words[folded:]))
        if not folded:
            return Field(shape=rest, dtype="float32")
        return Field(shape=(-1, *rest), dtype="float32", ragged=True, axes=tuple(words[:folded]))

    def _refusal(self, sizes: Sequence[object]) -> str:
        """Return the size of an image that the model cannot take, and why."""
        size = " x ".join(map(str, sizes))
        return f"{size}, and the model reduces both by {self._reduction}, which does not divide that"

    def _normalized(self, images: Tensor) -> Tensor:
        """Return float32 images in -1 to 1."""
        if images.dtype is torch.uint8:
            return images.to(torch.float32) / 127.5 - 1
        low, high = self._range
        values = images.to(torch.float32)
        least, largest = (float(x) for x in values.aminmax()) if values.numel() else (low, high)
        slack = _SLACK * (high - low)
        if least < low - slack or largest > high + slack:
            raise ValueError(
                f"the image has values from {least:g} to {largest:g}, and VAEEncoder(value_range=...) says "
                f"{low:g} to {high:g}"
            )
        return (values - low) * (2 / (high - low)) - 1

    def _settings(self) -> dict[str, Json]:
        return {
            "field": self._field,
            "mean": self._mean,
            "std": self._std,
            "range": [repr(value) for value in self._range],
        }

    def _load(self) -> nn.Module:
        place = self._folder.path
        try:
            kind: Any = import_module("diffusers").AutoencoderKL
        except ImportError as error:
            raise missing_package(place, "diffusers", "diffusion", error) from error
        try:
            model, found = kind.from_pretrained(
                place,
                torch_dtype=getattr(torch, self._dtype),
                use_safetensors=True,
                local_files_only=True,
                low_cpu_mem_usage=False,  # which needs accelerate
                output_loading_info=True,
            )
        except (OSError, ValueError, RuntimeError, TypeError) as error:
            raise EncoderError(
                f"{place} cannot be loaded as an AutoencoderKL: {error}", hint="Copy or download it again"
            ) from error
        refuse_missing(place, found)
        model.disable_tiling()
        model.disable_slicing()
        return model
