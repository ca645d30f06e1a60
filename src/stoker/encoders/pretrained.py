"""Pretrained models in local folders, as `save_pretrained` writes them: configuration, digest and loading.

Nothing is downloaded and nothing unpickled: configuration and weights come from JSON and safetensors files.
They alone make the identity, so that a cache that is ready is found without importing `transformers` or
`diffusers`. The model is loaded for the first sample.

The weights of these models take gigabytes. So they are neither kept in memory next to the model, nor sent to
encoder processes, nor stored next to the cache. Each process loads them from the folder. It makes sure that
they are the ones that the identity names.
"""

from __future__ import annotations

import abc
import hashlib
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast, get_args

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from stoker.arguments import BATCH, PATH, check
from stoker.encoders.protocol import EncodeBatchSize, fixed_batch_size
from stoker.errors import EncoderError, arg
from stoker.runtime.jsonio import read_object
from stoker.schema import Field, Json, Schema

# The packages are optional: they are imported where a model is loaded.
# pyright: reportMissingImports=false

ATTENTION = "sdpa"
"""Which of the equal ways to compute attention is taken: they differ in the last bits."""
VOLATILE = (
    "transformers_version",
    "_diffusers_version",
    "_name_or_path",
    "architectures",
    "dtype",
    "torch_dtype",
)
"""Entries of `config.json` that say where a model came from, not what it computes."""
TOKEN_DTYPES = ("int16", "int32", "int64")
"""What tokens are stored as."""
ComputeDtype: TypeAlias = Literal["float32", "bfloat16", "float16"]
"""Dtype of weights and activations."""


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file of a model.

    Raises:
        EncoderError: It is missing, or not such a file.
    """
    if path.exists() and not path.is_file():  # a pipe would be waited for
        raise EncoderError(f"{path} is not a file", hint="Copy or download it again")
    try:
        return read_object(path)
    except OSError as error:
        raise EncoderError(
            f"{path} cannot be read: {error.strerror}",
            hint="Give a folder that save_pretrained() of the model and of its processor wrote, or to "
            "FeatureEncoder the name of a model on the Hub, as facebook/dinov2-base",
        ) from error
    except ValueError as error:
        raise EncoderError(f"{path} is not JSON: {error}", hint="Copy or download it again") from error


class ModelFolder:
    """Configuration and weights of one model.

    Args:
        path: The folder.
        stem: Name of the file with weights, without its suffix: `model`, or `diffusion_pytorch_model`.

    Raises:
        EncoderError: There is no configuration, or no safetensors file of that name.
    """

    def __init__(self, path: str | Path, stem: str) -> None:
        check({"folder": (path, PATH)}, EncoderError)
        self.path = Path(path).expanduser()
        self.config = read_json(self.path / "config.json")
        self._stem = stem
        self._files = self._weight_files()
        self._known: tuple[object, str] | None = None
        """Stamps of the files, and the digest of the weights that they had then."""
        self._loaded = False

    @property
    def identity(self) -> dict[str, Json]:
        """The configuration, without what says only where the model came from."""
        return {name: value for name, value in self.config.items() if name not in VOLATILE}

    def names(self) -> list[str]:
        """Return the names of all weights, from the headers of the files."""
        return sorted(self._places())

    def digest(self) -> str:
        """Return the sha256 of all weights by content, remembered until a file changes.

        How they are divided among files does not matter. Once the model is loaded, it is that of the model.
        """
        if not (self._loaded and self._known):
            stamps = self._stamps()
            if self._known is None or self._known[0] != stamps:
                self._known = (stamps, self._digest())
        return self._known[1]

    def begin_loading(self) -> None:
        """Refuse weights that changed after they were digested, in this process or in the one before.

        Raises:
            EncoderError: The content of a file is another.
        """
        before = self._known
        if before is not None and before[1] != self.digest():
            self._known = before
            raise EncoderError(
                f"the weights in {self.path} changed after the run began",
                hint="Run it again: other weights make another cache",
            )
        self._loaded = True

    def __getstate__(self) -> dict[str, Any]:
        """Return the state with the digest, so that another process can check what it loads."""
        self.digest()
        return {**self.__dict__, "_loaded": False}

    def _weight_files(self) -> list[Path]:
        index = self.path / f"{self._stem}.safetensors.index.json"
        single = self.path / f"{self._stem}.safetensors"
        if index.exists() and not single.exists():
            shards = read_json(index).get("weight_map")
            if isinstance(shards, dict):
                return [self.path / name for name in sorted({*cast("dict[str, str]", shards).values()})]
        if not single.is_file():
            others = ", ".join(sorted(path.name for path in self.path.glob("*.*") if path.suffix != ".json"))
            raise EncoderError(
                f"{self.path} holds no {single.name} (other files: {others or 'none'})",
                hint="Save the model with save_pretrained(folder, safe_serialization=True)",
            )
        return [single]

    def _stamps(self) -> list[tuple[object, ...]]:
        try:
            found = [(path, path.stat()) for path in self._files]
        except OSError as error:
            raise EncoderError(f"{error.filename} cannot be read: {error.strerror}") from error
        return [(p.name, s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_dev, s.st_ino) for p, s in found]

    def _places(self) -> dict[str, Path]:
        """Return the file of each weight."""
        found: dict[str, Path] = {}
        for path in self._files:
            with _opened(path) as file:
                found.update(dict.fromkeys(file.keys(), path))
        return found

    def _digest(self) -> str:
        digest = hashlib.sha256()
        places = self._places()
        opened = {path: _opened(path) for path in self._files}
        for name in sorted(places):
            try:
                tensor: Tensor = opened[places[name]].get_tensor(name)
            except (OSError, SafetensorError) as error:
                raise EncoderError(f"{places[name]} cannot be read as weights ({error})") from error
            digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise EncoderError(f"{path} cannot be read as weights ({error})", hint="Copy it again") from error


class FolderEncoder(abc.ABC):
    """Base of encoders around one model in a folder. A subclass loads the model, and encodes with it."""

    NAME = ""
    """The class in the identity."""
    VERSION = 1
    """Bumped by hand when the same folder would give other values."""

    def __init__(self, folder: ModelFolder, dtype: str, encode_batch: int | None) -> None:
        if dtype not in get_args(ComputeDtype):
            raise EncoderError(
                f"{arg('dtype', dtype)} is unknown", hint=f"Expected {', '.join(get_args(ComputeDtype))}"
            )
        check({"encode_batch": (encode_batch, BATCH)}, EncoderError)
        self._folder = folder
        self._dtype, self._encode_batch = dtype, encode_batch
        self._device = torch.device("cpu")
        self._model: Any = None

    @property
    def independent_steps(self) -> bool:
        """False: no output step depends on one input step alone."""
        return False

    @abc.abstractmethod
    def schema(self, sample_schema: Schema) -> Schema:
        """Return the fields of a record."""

    def encode_batch_size(self, sample_schema: Schema) -> EncodeBatchSize:
        """Return the size given, else about 8 MiB of samples and records a call."""
        if self._encode_batch is not None:
            return EncodeBatchSize(samples=self._encode_batch)
        return fixed_batch_size(sample_schema, self.schema(sample_schema), cut_time=False)

    def to(self, device: torch.device) -> None:
        """Set the device of the model, which is loaded there for the first sample."""
        self._device = device
        if self._model is not None:
            self._model.to(device)

    def weights(self) -> Mapping[str, Tensor]:
        """Return nothing: the weights stay in the folder of the model. Their digest is in the identity."""
        return {}

    def identity(self) -> dict[str, Json]:
        """Return the configuration of the model, the settings, and the weights by content."""
        model = {"model": self._folder.identity, "dtype": self._dtype, "attention": ATTENTION}
        return {
            "class": self.NAME,
            "config": {**cast("dict[str, Json]", model), **self._settings()},
            # The prefix says that no file of these weights is stored next to the cache.
            "weights": f"folder:{self._folder.digest()}",
            "version": self.VERSION,
        }

    def __getstate__(self) -> dict[str, Any]:
        """Return settings alone: each process loads the model from its folder."""
        return {**self.__dict__, "_model": None}

    @abc.abstractmethod
    def _settings(self) -> dict[str, Json]:
        """Return what changes the output besides the model."""

    @abc.abstractmethod
    def _load(self) -> nn.Module:
        """Return the model on the CPU."""

    def _loaded(self) -> Any:
        """Return the model on the device of the encoder; loads it on the first call.

        Raises:
            EncoderError: The package is not installed, or the weights are not those of the model.
        """
        if self._model is None:
            self._folder.begin_loading()
            with quiet(), torch.device("cpu"):
                model = self._load()
            self._model = model.eval().requires_grad_(False).to(self._device)
        return self._model

    @contextmanager
    def _exact(self) -> Generator[None]:
        """Compute in the dtype of the model, whatever the caller has switched on."""
        with torch.inference_mode(), torch.autocast(self._device.type, enabled=False):
            yield


def passed_fields(sample_schema: Schema, taken: set[str], made: Schema, call: str) -> Schema:
    """Return the fields made, then those that pass through.

    Raises:
        EncoderError: Two have one name.
    """
    passed = {name: field for name, field in sample_schema.items() if name not in taken}
    if clash := sorted(passed.keys() & made.keys()):
        raise EncoderError(
            f"samples have a field {clash[0]!r} already, and {call} makes one of that name",
            hint="Rename it in the source, or name the output otherwise",
        )
    return {**made, **passed}


def required_field(sample_schema: Schema, name: str, call: str) -> Field:
    """Return a field of the samples.

    Raises:
        EncoderError: They have no such field.
    """
    if name not in sample_schema:
        raise EncoderError(
            f"samples have no field {name!r}, only {sorted(sample_schema)}",
            hint=f"Set {arg('field', ..., call=call)} to one of them",
        )
    return sample_schema[name]


def required_tokens(sample_schema: Schema, name: str, call: str) -> Field:
    """Return the field of tokens, or of text as its bytes.

    Raises:
        EncoderError: The samples have no such field.
    """
    if name not in sample_schema and not any(_may_be_tokens(field) for field in sample_schema.values()):
        raise EncoderError(
            f"samples have no field {name!r} with tokens, only {sorted(sample_schema)}",
            hint="Make tokens of text: give stoker.Tokenize(dataset, folder, field=...) in place of the "
            "dataset, with the folder of the tokenizer and the field of text",
        )
    return required_field(sample_schema, name, call)


def _may_be_tokens(field: Field) -> bool:
    return field.dtype in TOKEN_DTYPES and len(field.shape) == 1


def check_mask(sample_schema: Schema, tokens: str, mask: str, call: str) -> None:
    """Refuse a mask of tokens of a fixed length that has another shape than these.

    Raises:
        EncoderError: Names both with their shapes.
    """
    field = sample_schema.get(mask)
    if field is not None and field.shape != sample_schema[tokens].shape:
        raise EncoderError(
            f"field {mask!r} is {field.dtype} {field.shape}, and the tokens in {tokens!r} are "
            f"{sample_schema[tokens].shape}: it is not their mask",
            hint=f"Name their mask with {arg('attention_mask', ..., call=call)}, or a field that samples do "
            "not have where they have no mask",
        )


def refuse_left_padding(real: Tensor | None) -> None:
    """Refuse a mask that hides tokens before others.

    Args:
        real: `(n, L)` bool, True for tokens that are not padding; None: there is no padding.

    Raises:
        ValueError: It does.
    """
    if real is not None and bool((real[:, 1:] & ~real[:, :-1]).any()):
        raise ValueError("the mask hides tokens before others; pad at the end")


def refuse_missing(folder: Path, found: Mapping[str, Any]) -> None:
    """Refuse a model some of whose weights would be random, by what its loader reports.

    Raises:
        EncoderError: Names the first of them.
    """
    missing = sorted(name for name in found["missing_keys"] if "pooler." not in name)
    wrong = missing or sorted(map(str, found["mismatched_keys"]))
    if wrong:
        raise EncoderError(
            f"{folder} lacks {len(wrong)} weights of its model or has them in another shape: {wrong[0]}, ... "
            "They would be random; copy or download the folder again"
        )


def missing_package(folder: Path, package: str, extra: str, error: ImportError) -> EncoderError:
    """Return the error for a package that is not installed."""
    return EncoderError(
        f"the model in {folder} needs {package}, which cannot be imported ({error})",
        hint=f"pip install 'stoker[{extra}]'",
    )


@contextmanager
def quiet() -> Generator[None]:
    """Without progress bars and reports of the libraries on standard error."""
    try:
        from transformers.utils import logging as progress
    except ImportError:
        yield
        return
    bar, level = progress.is_progress_bar_enabled(), progress.get_verbosity()
    progress.disable_progress_bar()
    progress.set_verbosity_error()
    try:
        yield
    finally:
        progress.set_verbosity(level)
        if bar:
            progress.enable_progress_bar()
