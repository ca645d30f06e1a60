"""Weights of encoders: make from a seed, digest by content, save, load."""

from __future__ import annotations

import hashlib
import pickle
import zipfile
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from stoker.errors import EncoderError, arg
from stoker.units import format_few

if TYPE_CHECKING:
    from stoker.encoders.protocol import Encoder


def digest_weights(weights: Mapping[str, Tensor]) -> str:
    """Return the sha256 of names, dtypes, shapes and bytes, 64 hex digits; the device does not matter.

    >>> digest_weights({}) == hashlib.sha256().hexdigest()
    True
    """
    digest = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name].detach().cpu().contiguous()
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


class WeightsDigest:
    """Keeps the digest of weights until one of them is written to: large models take a second to digest."""

    def __init__(self) -> None:
        self._known: tuple[object, str] | None = None

    def of(self, weights: Mapping[str, Tensor]) -> str:
        """Return `digest_weights(weights)`."""
        state = [(name, tensor.data_ptr(), tensor._version) for name, tensor in weights.items()]
        if self._known is None or self._known[0] != state:
            self._known = (state, digest_weights(weights))
        return self._known[1]

    def __getstate__(self) -> dict[str, object]:
        """Return nothing: addresses are those of one process."""
        return {"_known": None}


def named_parts(module: nn.Module) -> dict[str, nn.Module]:
    """Return the module (name `""`) and all modules below it, shared ones once."""
    return dict(cast("Iterable[tuple[str, nn.Module]]", module.named_modules()))


def module_weights(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by name, the buffers that `state_dict` leaves out included.

    Raises:
        EncoderError: A weight has no value yet (lazy, or on the `meta` device).
    """
    weights = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name, tensor in weights.items():
        if nn.parameter.is_lazy(tensor) or tensor.is_meta:
            raise EncoderError(
                f"weight {name!r} of {type(module).__qualname__} has no value yet: every process would make "
                "its own",
                hint="Run the module once on a sample (`module(sample)`) or load a checkpoint with "
                "`module.load_state_dict(...)`, then build the encoder; in settings, name a function that "
                "does so, or give encoder.checkpoint",
            )
    return {name: tensor.detach() for name, tensor in weights.items()}


def weights_device(encoder: Encoder) -> torch.device:
    """Return the device that an encoder's weights are on; the CPU for one without any."""
    return next((tensor.device for tensor in encoder.weights().values()), torch.device("cpu"))


@contextmanager
def on_device(encoder: Encoder, device: torch.device) -> Generator[None]:
    """Have an encoder's weights on `device`, then put them back where they were: they may be the caller's."""
    home = weights_device(encoder)
    try:
        encoder.to(device)  # which may fail half-way, for a lack of memory
        yield
    finally:
        encoder.to(home)


def weights_to_bytes(weights: Mapping[str, Tensor]) -> bytes:
    """Return the weights as one safetensors file, tied weights written twice."""
    return save({name: tensor.detach().cpu().contiguous().clone() for name, tensor in weights.items()})


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file.

    Raises:
        EncoderError: It is missing, or not such a file.
    """
    if path.exists() and not path.is_file():  # a pipe would be waited for
        raise EncoderError(f"{path} is not a file", hint="Give a .safetensors file")
    if not path.exists():
        checkpoint = arg("checkpoint")
        raise EncoderError(f"{path} does not exist", hint=f"Check {checkpoint}: give a .safetensors file")
    try:
        return load(path.read_bytes())  # not mapped: a file that changes later must not change weights
    except (OSError, SafetensorError) as error:
        raise EncoderError(
            f"{path} cannot be read as weights ({error})", hint="Give a .safetensors file, or copy it again"
        ) from error


def load_weights(path: str | Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Read float32 weights from a safetensors file, in exactly these names and shapes.

    Raises:
        EncoderError: The file is missing or is no safetensors file, or its weights are others.
    """
    loaded = read_safetensors(Path(path))
    found = {name: (str(tensor.dtype), tuple(tensor.shape)) for name, tensor in loaded.items()}
    wanted = {name: ("torch.float32", tuple(shape)) for name, shape in shapes.items()}
    if found != wanted:
        raise EncoderError(
            f"{path}: weights are {found}, this encoder needs {wanted}",
            hint="Give the settings that the weights were saved with, or other weights",
        )
    return loaded


def uniform(bits: np.random.PCG64, rows: int, cols: int) -> NDArray[np.float64]:
    """Return the next uniform numbers in [-1, 1), `(rows, cols)`, the same with every version of numpy.

    >>> uniform(np.random.PCG64(0), 1, 2).round(3).tolist()
    [[0.274, -0.46]]
    """
    raw = np.asarray(bits.random_raw(rows * cols), dtype=np.uint64)
    return ((raw >> np.uint64(11)).astype(np.float64) * 2.0**-52 - 1).reshape(rows, cols)


def orthonormal(bits: np.random.PCG64, rows: int, cols: int) -> NDArray[np.float64]:
    """Return a random `(rows, min(rows, cols))` matrix with orthonormal columns."""
    turn, triangle = np.linalg.qr(uniform(bits, rows, cols))
    return turn * np.sign(np.diagonal(triangle))  # which signs a QR returns is left to the library


def rounded(values: NDArray[np.float64]) -> Tensor:
    """Return float32 in steps of 2^-20: far above what another processor's last bits change.

    Otherwise one seed would have one fingerprint on this machine and another on the next.
    """
    return torch.as_tensor(np.round(values * 2.0**20) * 2.0**-20, dtype=torch.float32, device="cpu")


# ----------------------------------------------------------------------------------------------------------
# Read weights from a file, without running code of the file, and load them into a module.


SUFFIXES = (".safetensors", ".pt", ".pth")
SHOWN = 4
"""Names that a message lists of each kind."""


def read_checkpoint(path: str | Path, *, key: str | None = None, prefix: str = "") -> dict[str, Tensor]:
    """Return the tensors of a checkpoint by name, on the CPU.

    Args:
        path: A `.safetensors` file, or a `.pt` or `.pth` file that holds tensors and plain values. It is
            read with `weights_only=True`: a file that needs code to be read is refused.
        key: The entry of a `.pt` file that holds the weights, as `state_dict`; `a.b` is an entry of an entry.
        prefix: Only names that begin with this, which is cut off.

    Raises:
        EncoderError: The file cannot be read, or holds no such weights.

    >>> read_checkpoint("run/last.pt", key="state_dict", prefix="encoder.")  # doctest: +SKIP
    {'proj.weight': tensor(...), ...}
    """
    place = Path(path)
    if place.suffix.lower() not in SUFFIXES:
        raise EncoderError(
            f"{place} is not a {', '.join(SUFFIXES)} file", hint="Save the weights as one of these"
        )
    if place.exists() and not place.is_file():  # a pipe would be waited for
        raise EncoderError(f"{place} is not a file", hint=f"Give a {' or '.join(SUFFIXES)} file")
    weights = _entry(_content(place), key, place)
    found = {name: value for name, value in weights.items() if name.startswith(prefix)}
    if not found:
        what = f"no names that begin with {prefix!r}" if prefix else "no tensors"
        raise EncoderError(f"{place}: there are {what}", hint=f"It has {_few(weights)}")
    return {name.removeprefix(prefix): value for name, value in found.items()}


def load_checkpoint(module: nn.Module, path: str | Path, *, key: str | None = None, prefix: str = "") -> None:
    """Load the weights of a checkpoint into a module, which must have exactly these names and shapes.

    Args:
        module: Changed in place.
        path, key, prefix: As for `read_checkpoint`.

    Raises:
        EncoderError: Names or shapes differ; lists some of them.
    """
    weights, own = read_checkpoint(path, key=key, prefix=prefix), module.state_dict(keep_vars=True)
    problems: list[str] = []
    if missing := [name for name in own if name not in weights]:
        problems.append(f"{len(missing)} missing ({_few(missing)})")
    if unexpected := sorted(name for name in weights if name not in own):
        problems.append(f"{len(unexpected)} unexpected ({_few(unexpected)})")
    shapes = [
        f"{name} is {tuple(weights[name].shape)}, the module has {tuple(tensor.shape)}"
        for name, tensor in own.items()
        if name in weights and not nn.parameter.is_lazy(tensor) and weights[name].shape != tensor.shape
    ]
    if shapes:
        problems.append("; ".join(shapes[:SHOWN]))
    if problems:
        raise EncoderError(
            f"{path} does not fit {type(module).__qualname__}: {', '.join(problems)}",
            hint=f"{_cure(missing, unexpected)}",
        )
    try:
        module.load_state_dict(weights)
    except RuntimeError as error:
        raise EncoderError(
            f"{path} does not fit {type(module).__qualname__}: {error}", hint="Give its own"
        ) from error


def _content(place: Path) -> Mapping[str, Any]:
    if place.suffix.lower() == ".safetensors":
        return read_safetensors(place)
    try:
        content: object = torch.load(place, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise EncoderError(
            f"{place} holds more than tensors and plain values, and reading it would run its code",
            hint="Save `module.state_dict()` alone",
        ) from error
    except (OSError, RuntimeError, EOFError, zipfile.BadZipFile, ValueError) as error:
        raise EncoderError(
            f"{place} cannot be read as weights: {error}", hint="Give a file that can"
        ) from error
    if not isinstance(content, Mapping):
        raise EncoderError(
            f"{place} holds a {type(content).__name__}", hint="Save `module.state_dict()` there"
        )
    return cast("Mapping[str, Any]", content)


def _entry(content: Mapping[str, Any], key: str | None, place: Path) -> dict[str, Tensor]:
    """Return the tensors under `key`."""
    at, found = "", content
    for part in key.split(".") if key else ():
        inner: object = found.get(part)
        if not isinstance(inner, Mapping):
            where = f"its entry {at!r}" if at else "it"
            raise EncoderError(
                f"{place}: {where} has no entry {part!r} with weights", hint=f"It has {_few(found)}"
            )
        at, found = f"{at}.{part}".strip("."), cast("Mapping[str, Any]", inner)
    tensors = {name: value for name, value in found.items() if isinstance(value, Tensor)}
    if len(tensors) == len(found) and tensors:
        return tensors
    inside = [name for name, value in found.items() if isinstance(value, Mapping)]
    if inside:
        best = next((name for name in ("state_dict", "model", "encoder") if name in inside), inside[0])
        path = f"{at}.{best}".strip(".")
        named = arg("key", path, setting="encoder.checkpoint_key")
        raise EncoderError(
            f"{place}: the weights are in one of the entries {_few(inside)}", hint=f"Give {named}"
        )
    if tensors:  # plain values next to the weights, as an epoch
        return tensors
    raise EncoderError(f"{place}: there are no tensors", hint=f"It has {_few(found)}")


def _cure(missing: list[str], unexpected: list[str]) -> str:
    """Return what to do: a prefix, if that is all that differs."""
    ends = [name for name in unexpected for end in missing[:1] if name.endswith(f".{end}")]
    if ends and missing:
        prefix = ends[0].removesuffix(missing[0])
        return f"Give {arg('prefix', prefix, setting='encoder.checkpoint_prefix')}"
    return "Give the arguments that the module was saved with, or other weights"


def _few(names: Mapping[str, Any] | list[str]) -> str:
    return format_few(names, SHOWN) or "nothing"
