"""Features of images from a vision model of Hugging Face's `transformers`, in a folder or from the Hub.

Nothing is downloaded unless asked for, and nothing unpickled: configuration and weights come from JSON and
safetensors files. They alone make the identity, so that a cache that is ready is found without importing
`transformers`; the model is put together when the first image is encoded.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast, get_args

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from stoker.arguments import BATCH, FLAG, NAME, PATH, TEXT, check, or_none
from stoker.encoders.pretrained import ATTENTION, VOLATILE, quiet, read_json
from stoker.encoders.protocol import EncodeBatchSize, fixed_batch_size
from stoker.encoders.weights import WeightsDigest
from stoker.errors import EncoderError, arg
from stoker.schema import Field, Json, Schema

# The package is optional: it is imported where a model is put together.
# pyright: reportMissingImports=false

Pooling: TypeAlias = Literal["cls", "mean", "tokens", "pooled"]
"""`cls`: the class token. `mean`: the mean of the patches, without class and register tokens. `tokens`: all
tokens, these first. `pooled`: what the model itself makes of them."""
Processor: TypeAlias = Literal["device", "pil"]
"""`device`: images keep their size, and are scaled and normalized on the model's device. `pil`:
the model's own processor with Pillow, which resizes and crops on the CPU; slower."""

Scaling: TypeAlias = tuple[float, list[float], list[float]]
"""Factor of all channels, then mean and deviation of each, in the scaled values."""

VERSION = 1
"""Bumped by hand when the same folder would give other features."""
_log = logging.getLogger("stoker")
_WHOLE_SIZES = {"clip": (768, 32), "siglip": (768, 16)}
"""Width and patch size of the vision towers of complete models where `config.json` leaves them out."""
_NO_CLASS_TOKEN = ("siglip_vision_model",)


class FeatureEncoder:
    """Frozen vision model as an encoder; satisfies `Encoder`.

    The images are replaced by their features, float32 `(D,)` or, with `pooling="tokens"`, `(T, D)`; all other
    fields stay in the record. Keep the images as well with `precompute(..., keep=("image",))`.
    For DINO, DINOv2, DINOv3, ViT, and the vision towers of CLIP and SigLIP, alone or in a complete model.

    Args:
        folder: What `model.save_pretrained(folder)` and its processor wrote: `config.json`, `*.safetensors`,
            `preprocessor_config.json`. Or the name of a model on the Hugging Face Hub, as
            `"facebook/dinov2-base"`, which is looked for in the local Hub cache.
        pooling: `cls`: the class token. `mean`: the mean of the patches, without class and register tokens.
            `tokens`: all tokens, these first. `pooled`: what the model itself makes of them, as SigLIP does
            with an attention of its own.
        field: The field with images, uint8 `(3, H, W)`.
        output: Name of the field with the features.
        processor: `device`: images keep their size, and are scaled and normalized on the model's device.
            `pil`: the model's own processor resizes and crops with Pillow on the CPU, which is slower.
        encode_batch: Images in one call; None: about 8 MiB of images and features.
        revision: Of a model on the Hub: a commit, tag or branch; None: the default branch.
        download: Download a model of the Hub that the local cache lacks.

    Raises:
        EncoderError: The folder is not of this form, or the model is not in the local Hub cache.

    Examples:
        >>> source = stoker.ImageSource("photos", size=(224, 224))  # doctest: +SKIP
        >>> encoder = stoker.FeatureEncoder("facebook/dinov2-base")  # doctest: +SKIP
        >>> cache = stoker.precompute(source, encoder, "caches", name="photos")  # doctest: +SKIP
        >>> cache[0]["features"].shape  # doctest: +SKIP
        torch.Size([768])
    """

    def __init__(  # noqa: PLR0913 - the public face; every setting is named by the caller
        self,
        folder: str | Path,
        pooling: Pooling = "cls",
        *,
        field: str = "image",
        output: str = "features",
        processor: Processor = "device",
        encode_batch: int | None = None,
        revision: str | None = None,
        download: bool = False,
    ) -> None:
        for name, value, known in (("pooling", pooling, Pooling), ("processor", processor, Processor)):
            if value not in get_args(known):
                raise EncoderError(
                    f"{arg(name, value)} is unknown", hint=f"Expected {' or '.join(get_args(known))}"
                )
        check({"folder": (folder, PATH), "encode_batch": (encode_batch, BATCH)}, EncoderError)
        check({"field": (field, NAME), "output": (output, NAME)}, EncoderError)
        check({"revision": (revision, or_none(TEXT)), "download": (download, FLAG)}, EncoderError)
        self._folder = _resolve_folder(folder, revision, download=download)
        self._pooling: Pooling = pooling
        self._processor: Processor = processor
        self._field, self._output, self._encode_batch = field, output, encode_batch
        self._config = _vision_config(read_json(self._folder / "config.json"))
        self._preprocessor = read_json(self._folder / "preprocessor_config.json")
        self._device = torch.device("cpu")
        self._weights: dict[str, Tensor] | None = None
        self._digest = WeightsDigest()
        self._model: VisionModel | None = None
        for name in ("hidden_size", "patch_size"):
            if not isinstance(self._config.get(name), int):
                raise EncoderError(
                    f"{self._folder / 'config.json'} has no {name}, so this is not a vision transformer "
                    "with equal patches",
                    hint="Wrap the model in a ModuleEncoder",
                )
        if pooling == "cls" and not self._class_tokens:
            raise EncoderError(
                f"the model in {self._folder} has no class token", hint=f"Use {arg('pooling', 'pooled')}"
            )

    @property
    def independent_steps(self) -> bool:
        """False: images have no time."""
        return False

    def schema(self, sample_schema: Schema) -> Schema:
        """Return the features, then the fields that pass through.

        Raises:
            EncoderError: No such field, it does not hold images of a size that the model takes, or another
                field is called like the features.
        """
        image = sample_schema.get(self._field)
        if image is None:
            raise EncoderError(
                f"samples have no field {self._field!r}, only {sorted(sample_schema)}",
                hint="Set FeatureEncoder(field=...) to the one with images",
            )
        if image.ragged or image.dtype != "uint8" or len(image.shape) != 3 or image.shape[0] != 3:
            shape = (*image.axes, *image.shape[1:]) if image.folded else image.shape
            raise EncoderError(
                f"field {self._field!r} is {image.dtype} ({', '.join(map(str, shape))})",
                hint="Expected uint8 images (3, H, W) of one size, as "
                f"{arg('size', ..., call='ImageSource')} gives them",
            )
        passed = {name: field for name, field in sample_schema.items() if name != self._field}
        if self._output in passed:
            raise EncoderError(
                f"samples have a field {self._output!r} already",
                hint="Set FeatureEncoder(output=...) to another",
            )
        width, tokens = self._config["hidden_size"], self._tokens(image.shape[1:])
        shape = (tokens, width) if self._pooling == "tokens" else (width,)
        return {self._output: Field(shape=shape, dtype="float32"), **passed}

    def encode_batch_size(self, sample_schema: Schema) -> EncodeBatchSize:
        """Return the size given, else about 8 MiB of images and features a call."""
        if self._encode_batch is not None:
            return EncodeBatchSize(samples=self._encode_batch)
        return fixed_batch_size(sample_schema, self.schema(sample_schema), cut_time=False)

    def encode(self, batch: dict[str, Tensor], /) -> dict[str, Tensor]:
        """Return the features of one batch of images.

        Raises:
            EncoderError: `transformers` is not installed, or the weights are not those of the model.
        """
        model = self._assembled()
        with torch.inference_mode(), torch.autocast(self._device.type, enabled=False):
            tokens, pooled = model.outputs(batch[self._field])
            expected = self._tokens(tuple(batch[self._field].shape[2:]))
            if tuple(tokens.shape[1:]) != (expected, self._config["hidden_size"]):
                raise EncoderError(
                    f"{self._folder} gives tokens of shape {tuple(tokens.shape[1:])}, expected {expected} "
                    f"(a class token, registers, patches) of {self._config['hidden_size']} numbers",
                    hint="Wrap the model in a ModuleEncoder",
                )
            if self._pooling == "cls":
                tokens = tokens[:, 0].clone()
            elif self._pooling == "mean":
                tokens = tokens[:, self._class_tokens + self._registers :].mean(1)
            elif self._pooling == "pooled":
                if pooled is None or pooled.shape[1:] != tokens.shape[2:]:
                    raise EncoderError(
                        f"{self._folder} gives no pooled output", hint=f"Use {arg('pooling', 'mean')}"
                    )
                tokens = pooled
        rest = {name: value for name, value in batch.items() if name != self._field}
        return {self._output: tokens, **rest}

    def to(self, device: torch.device) -> None:
        """Set the device of the model, which is built there for the first image."""
        self._device = device
        if self._model is not None:
            self._model.to(device)

    def weights(self) -> Mapping[str, Tensor]:
        """Return what the safetensors files of the folder hold, by the names there."""
        if self._weights is None:
            weights = _read_weights(self._folder)
            towers = {name: value for name, value in weights.items() if name.startswith("vision_model.")}
            self._weights = towers or weights  # of a complete model, without the tower of text
        return self._weights

    def identity(self) -> dict[str, Json]:
        """Return model and processor as configured, pooling, and the weights by content."""
        model = {name: value for name, value in self._config.items() if name not in VOLATILE}
        config: dict[str, Json] = {
            "model": model,
            "processor": self._processing(),
            "pooling": self._pooling,
            "field": self._field,
            "output": self._output,
            "attention": ATTENTION,
        }
        return {
            "class": "stoker.FeatureEncoder",
            "config": config,
            "weights": self._digest.of(self.weights()),
            "version": VERSION,
        }

    def __getstate__(self) -> dict[str, Any]:
        """Settings and weights travel; the model is built again."""
        return {**self.__dict__, "_model": None}

    @property
    def _class_tokens(self) -> int:
        return 0 if self._config.get("model_type") in _NO_CLASS_TOKEN else 1

    @property
    def _registers(self) -> int:
        return int(self._config.get("num_register_tokens") or 0)

    def _tokens(self, size: Sequence[int]) -> int:
        """Tokens for images of (height, width): one for the class, registers, patches."""
        height, width = self._seen(size)
        patch = self._config["patch_size"]
        if height % patch or width % patch:
            near = tuple(max(patch, round(length / patch) * patch) for length in (height, width))
            raise EncoderError(
                f"images are {height} x {width}, the model takes patches of {patch} x {patch}, which do not "
                "divide them",
                hint=f"Give the source {arg('size', near)}",
            )
        return self._class_tokens + self._registers + (height // patch) * (width // patch)

    def _seen(self, size: Sequence[int]) -> tuple[int, int]:
        """(height, width) that the model sees."""
        if self._processor == "device":
            return size[0], size[1]
        crop = self._preprocessor.get("do_center_crop", True) and self._preprocessor.get("crop_size")
        seen: Any = crop or self._preprocessor.get("size")
        if not isinstance(seen, dict) or not {"height", "width"} <= cast("dict[str, Any]", seen).keys():
            raise EncoderError(
                f"{self._folder / 'preprocessor_config.json'} does not say to what size images are brought "
                "(crop_size or size with height and width)",
                hint=f"Use {arg('processor', 'device')}",
            )
        return int(seen["height"]), int(seen["width"])

    def _processing(self) -> dict[str, Json]:
        """Return what is done to an image before the model, and by which code."""
        if self._processor == "device":
            factor, mean, std = self._scaling()
            return {"backend": "device", "factor": factor, "mean": [*mean], "std": [*std]}
        settings = {key: value for key, value in self._preprocessor.items() if key != "_processor_class"}
        return {"backend": pil_backend(), "settings": settings}

    def _scaling(self) -> Scaling:
        """Factor of all channels, mean and deviation of each."""
        given = self._preprocessor
        factor = given.get("rescale_factor", 1 / 255) if given.get("do_rescale", True) else 1
        mean: Any = [0.0] * 3
        std: Any = [1.0] * 3
        if given.get("do_normalize", True):
            mean, std = given.get("image_mean"), given.get("image_std")
        for values in (mean, std, [factor] * 3):
            if not isinstance(values, list) or [type(v) in (int, float) for v in values] != [True] * 3:  # pyright: ignore[reportUnknownVariableType]
                raise EncoderError(
                    f"{self._folder / 'preprocessor_config.json'} lacks image_mean or image_std with a "
                    "number for each of three channels",
                    hint="Save the model's own processor there",
                )
        return float(factor), [float(value) for value in mean], [float(value) for value in std]

    def _assembled(self) -> VisionModel:
        if self._model is None:
            scaling = self._scaling() if self._processor == "device" else None
            try:
                self._model = VisionModel(
                    self._folder, self.weights(), scaling=scaling, needs_pooler=self._pooling == "pooled"
                )
            except ImportError as error:
                raise EncoderError(
                    f"the model in {self._folder} needs transformers 5.5 or later, which cannot be imported "
                    f"({error})",
                    hint="pip install 'stoker[features]'",
                ) from error
            self._model.to(self._device)
        return self._model


class VisionModel:
    """The model of a local folder, frozen, float32.

    Args:
        folder: With its configuration; weights are not read from there.
        weights: By the names of its safetensors files.
        scaling: What to do to uint8 images on the device; None: the model's own processor does all.
        needs_pooler: Refuse a model without weights for its pooled output.

    Raises:
        EncoderError: The configuration is of no known model, or weights are missing or of other shapes.
    """

    def __init__(
        self,
        folder: Path,
        weights: Mapping[str, Tensor],
        *,
        scaling: Scaling | None,
        needs_pooler: bool = False,
    ) -> None:
        self._model = _model(folder, weights, needs_pooler=needs_pooler)
        self._device = torch.device("cpu")
        self._processor: Any = None
        self._shift = torch.zeros(3, 1, 1, dtype=torch.float32, device="cpu")
        self._scale = torch.ones(3, 1, 1, dtype=torch.float32, device="cpu")
        if scaling is None:
            from transformers import AutoImageProcessor

            self._processor = AutoImageProcessor.from_pretrained(folder, local_files_only=True, backend="pil")
        else:
            factor, mean, std = (torch.tensor(value, dtype=torch.float32, device="cpu") for value in scaling)
            self._shift, self._scale = (mean / factor).view(3, 1, 1), (factor / std).view(3, 1, 1)

    def to(self, device: torch.device) -> None:
        """Move it to `device`."""
        self._device = device
        self._model.to(device)
        self._shift, self._scale = self._shift.to(device), self._scale.to(device)

    def outputs(self, images: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return tokens `(n, T, D)` and pooled output `(n, D)`, if any, of uint8 images `(n, 3, H, W)`."""
        if self._processor is None:
            pixels = (images.to(torch.float32) - self._shift) * self._scale
        else:
            arrays = [image.numpy() for image in images.cpu()]
            made = self._processor(images=arrays, return_tensors="pt", input_data_format="channels_first")
            pixels = made["pixel_values"].to(self._device, torch.float32)
        output = self._model(pixel_values=pixels)
        return output.last_hidden_state, getattr(output, "pooler_output", None)


def pil_backend() -> str:
    """Return what resizes images in the model's own processor; Pillow and torchvision give other pixels."""
    import transformers
    from PIL import __version__ as pillow

    return f"pil, transformers {transformers.__version__}, pillow {pillow}"


def _vision_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a configuration that is about images."""
    inner = config.get("vision_config")
    if not isinstance(inner, dict):
        return config
    width, patch = _WHOLE_SIZES.get(str(config.get("model_type")), (None, None))
    defaults = {
        "hidden_size": width,
        "patch_size": patch,
        "model_type": f"{config.get('model_type')}_vision_model",
    }
    return {**{name: value for name, value in defaults.items() if value}, **cast("dict[str, Any]", inner)}


def _model(folder: Path, weights: Mapping[str, Tensor], *, needs_pooler: bool) -> nn.Module:
    from transformers import MODEL_MAPPING, AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        config = getattr(config, "vision_config", config)
        kind: Any = MODEL_MAPPING[type(config)]
    except (ValueError, KeyError, OSError) as error:
        raise EncoderError(
            f"{folder / 'config.json'} describes no model that transformers knows: {error}"
        ) from error
    with quiet(), torch.device("cpu"):
        model, found = kind.from_pretrained(
            None,
            config=config,
            state_dict=dict(weights),
            dtype=torch.float32,
            attn_implementation=ATTENTION,
            output_loading_info=True,
        )
    # A pooler is made of random weights where a checkpoint has none; nothing here uses it.
    missing = sorted(name for name in found["missing_keys"] if needs_pooler or not name.startswith("pooler."))
    if missing or found["mismatched_keys"]:
        wrong = missing or sorted(map(str, found["mismatched_keys"]))
        raise EncoderError(
            f"{folder} lacks {len(wrong)} weights of its model or has them in another shape: {wrong[0]}, ... "
            "They would be random; copy or download the folder again"
        )
    return model.eval().requires_grad_(False)


_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ("config.json", "preprocessor_config.json", "*.safetensors")
_COMMIT = re.compile(r"[0-9a-f]{40}")


def _resolve_folder(folder: str | Path, revision: str | None, *, download: bool) -> Path:
    """Return the folder, or that of a model of the Hub in the local cache.

    Raises:
        EncoderError: The model is not in the cache, and was not to be downloaded or cannot be.
    """
    path = Path(folder).expanduser()
    name = str(folder)
    if path.exists() or not isinstance(folder, str) or not _HUB_NAME.fullmatch(name):
        if revision is not None or download:
            raise EncoderError(
                f"{name} is not the name of a model on the Hugging Face Hub, as facebook/dinov2-base",
                hint="Leave revision and download out for a local folder",
            )
        return path
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError as error:
        raise EncoderError(
            f"{name} is not a folder here, and to look for it in the Hub cache takes huggingface_hub",
            hint="pip install 'stoker[features]'",
        ) from error
    try:
        found = snapshot_download(
            name, revision=revision, allow_patterns=[*_HUB_FILES], local_files_only=not download
        )
    except LocalEntryNotFoundError as error:
        fact = f"{name} is neither a folder here nor in the local Hugging Face cache"
        at = "" if revision is None else f" at revision {revision}"
        if download:
            raise EncoderError(
                f"{fact}{at}, and the Hub was not reached: {error}", hint="Check the network"
            ) from error
        raise EncoderError(
            f"{fact}{at}",
            hint=f"Fetch it with `hf download {name}`, "
            f"or in Python with FeatureEncoder({name!r}, download=True)",
        ) from error
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise EncoderError(
            f"{name} cannot be fetched from the Hugging Face Hub: {error}",
            hint="Check its name and revision, and log in with `hf auth login` if it is not public",
        ) from error
    commit = Path(found).name
    if revision is None or not _COMMIT.fullmatch(revision):
        _log.info("%s is at commit %s; pin it with revision=%r", name, commit, commit)
    return Path(found)


def _read_weights(folder: Path) -> dict[str, Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        others = ", ".join(sorted(path.name for path in folder.glob("*.bin"))) or "none"
        raise EncoderError(
            f"{folder} holds no *.safetensors (other weights: {others}, which would have to be unpickled)",
            hint="Save the model with save_pretrained(folder, safe_serialization=True)",
        )
    weights: dict[str, Tensor] = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                weights.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118 - no dict
        except (OSError, SafetensorError) as error:
            raise EncoderError(f"{path} cannot be read as weights ({error})", hint="Copy it again") from error
    return weights
