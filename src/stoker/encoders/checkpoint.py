"""Read weights from a file, without running code of the file, and load them into a module."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor, nn

from stoker.errors import EncoderError, arg

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
        raise EncoderError(f"{place} is not a {', '.join(SUFFIXES)} file. Save the weights as one of these")
    if place.exists() and not place.is_file():  # a pipe would be waited for
        raise EncoderError(f"{place} is not a file. Give a {' or '.join(SUFFIXES)} file")
    weights = _entry(_content(place), key, place)
    found = {name: value for name, value in weights.items() if name.startswith(prefix)}
    if not found:
        what = f"no names that begin with {prefix!r}" if prefix else "no tensors"
        raise EncoderError(f"{place}: there are {what}. It has {_few(weights)}")
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
    if unexpected := [name for name in weights if name not in own]:
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
            f"{path} does not fit {type(module).__qualname__}: {', '.join(problems)}. "
            f"{_cure(missing, unexpected)}"
        )
    try:
        module.load_state_dict(weights)
    except RuntimeError as error:
        raise EncoderError(
            f"{path} does not fit {type(module).__qualname__}: {error}. Give its own"
        ) from error


def _content(place: Path) -> Mapping[str, Any]:
    try:
        if place.suffix.lower() == ".safetensors":
            return load(place.read_bytes())
        content: object = torch.load(place, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise EncoderError(
            f"{place} holds more than tensors and plain values, and reading it would run its code. Save "
            "`module.state_dict()` alone"
        ) from error
    except (OSError, SafetensorError, RuntimeError, EOFError, zipfile.BadZipFile, ValueError) as error:
        raise EncoderError(f"{place} cannot be read as weights: {error}. Give a file that can") from error
    if not isinstance(content, Mapping):
        raise EncoderError(f"{place} holds a {type(content).__name__}. Save `module.state_dict()` there")
    return cast("Mapping[str, Any]", content)


def _entry(content: Mapping[str, Any], key: str | None, place: Path) -> dict[str, Tensor]:
    """The tensors under `key`."""
    at, found = "", content
    for part in key.split(".") if key else ():
        inner: object = found.get(part)
        if not isinstance(inner, Mapping):
            where = f"its entry {at!r}" if at else "it"
            raise EncoderError(f"{place}: {where} has no entry {part!r} with weights. It has {_few(found)}")
        at, found = f"{at}.{part}".strip("."), cast("Mapping[str, Any]", inner)
    tensors = {name: value for name, value in found.items() if isinstance(value, Tensor)}
    if len(tensors) == len(found) and tensors:
        return tensors
    inside = [name for name, value in found.items() if isinstance(value, Mapping)]
    if inside:
        best = next((name for name in ("state_dict", "model", "encoder") if name in inside), inside[0])
        path = f"{at}.{best}".strip(".")
        named = arg("key", path, setting="encoder.checkpoint_key")
        raise EncoderError(f"{place}: the weights are in one of the entries {_few(inside)}. Give {named}")
    if tensors:  # plain values next to the weights, as an epoch
        return tensors
    raise EncoderError(f"{place}: there are no tensors. It has {_few(found)}")


def _cure(missing: list[str], unexpected: list[str]) -> str:
    """What to do: a prefix, if that is all that differs."""
    ends = [name for name in unexpected for end in missing[:1] if name.endswith(f".{end}")]
    if ends and missing:
        prefix = ends[0].removesuffix(missing[0])
        return f"Give {arg('prefix', prefix, setting='encoder.checkpoint_prefix')}"
    return "Give the arguments that the module was saved with, or other weights"


def _few(names: Mapping[str, Any] | list[str]) -> str:
    listed = [str(name) for name in names]
    more = f" and {len(listed) - SHOWN} more" if len(listed) > SHOWN else ""
    return (", ".join(listed[:SHOWN]) or "nothing") + more
