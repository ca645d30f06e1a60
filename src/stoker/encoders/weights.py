"""Weights of encoders: make from a seed, digest by content, save, load, and refuse what is not there yet."""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from stoker.errors import EncoderError

if TYPE_CHECKING:
    from stoker.encoders.protocol import Encoder


def digest_weights(weights: Mapping[str, Tensor]) -> str:
    """The sha256 of names, dtypes, shapes and bytes, 64 hex digits; the device does not matter.

    >>> digest_weights({}) == hashlib.sha256().hexdigest()
    True
    """
    digest = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name].detach().cpu().contiguous()
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def named_parts(module: nn.Module) -> dict[str, nn.Module]:
    """The module (name `""`) and all modules below it, shared ones once."""
    return dict(cast("Iterable[tuple[str, nn.Module]]", module.named_modules()))


def module_weights(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, the buffers that `state_dict` leaves out included.

    Raises:
        EncoderError: A weight has no value yet (lazy, or on the `meta` device).
    """
    weights = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    for name, tensor in weights.items():
        if nn.parameter.is_lazy(tensor) or tensor.is_meta:
            raise EncoderError(
                f"weight {name!r} of {type(module).__qualname__} has no value yet: every process would "
                f"make its own. Run the module once on a sample (`module(sample)`) or load a checkpoint with "
                f"`module.load_state_dict(...)`, then build the encoder; in settings, name a function that "
                f"does so, or give encoder.checkpoint"
            )
    return {name: tensor.detach() for name, tensor in weights.items()}


def weights_device(encoder: Encoder) -> torch.device:
    """Return the device that an encoder's weights are on; the CPU for one without any."""
    return next((tensor.device for tensor in encoder.weights().values()), torch.device("cpu"))


@contextmanager
def moved(encoder: Encoder, device: torch.device) -> Generator[None]:
    """Have an encoder's weights on `device`, then put them back where they were: they may be the caller's."""
    home = weights_device(encoder)
    try:
        encoder.to(device)  # which may fail half-way, for a lack of memory
        yield
    finally:
        encoder.to(home)


def weights_to_bytes(weights: Mapping[str, Tensor]) -> bytes:
    """The weights as one safetensors file, tied weights written twice."""
    return save({name: tensor.detach().cpu().contiguous().clone() for name, tensor in weights.items()})


def load_weights(path: str | Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Read float32 weights from a safetensors file, in exactly these names and shapes.

    Raises:
        EncoderError: The file is missing or is no safetensors file, or its weights are others.
    """
    if Path(path).exists() and not Path(path).is_file():  # a pipe would be waited for
        raise EncoderError(f"{path} is not a file. Give a .safetensors file")
    try:
        loaded = load(Path(path).read_bytes())
    except (OSError, SafetensorError) as error:
        raise EncoderError(
            f"{path}: cannot be read as encoder weights ({error}). Give a .safetensors file"
        ) from error
    found = {name: (str(tensor.dtype), tuple(tensor.shape)) for name, tensor in loaded.items()}
    wanted = {name: ("torch.float32", tuple(shape)) for name, shape in shapes.items()}
    if found != wanted:
        raise EncoderError(
            f"{path}: weights are {found}, this encoder needs {wanted}. "
            f"Give the settings that the weights were saved with, or other weights"
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
