"""Checkpoints: tensors as safetensors, the rest as JSON, whole or not there at all.

    checkpoints/last-000000500/   model.safetensors  optimizer.safetensors  state.json
    checkpoints/best-000000400/   the same

A checkpoint is written under a temporary name, made durable, then renamed. `state.json` holds the digests of
the other two, so damage is found before anything is loaded. Nothing is pickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from stoker.errors import CorruptError
from stoker.schema import Json, canonical_json

Kind: TypeAlias = Literal["last", "best"]

FORMAT = 1
KEPT: Mapping[Kind, int] = {"last": 2, "best": 1}
"""Checkpoints kept of a kind: two of `last`, so that one can be damaged."""
NAME = re.compile(r"(last|best)-(\d{9,})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What a checkpoint holds."""

    step: int
    """Optimizer steps done."""
    model: Mapping[str, Tensor]
    """Weights and buffers by name."""
    optimizer: Mapping[str, Tensor]
    """Optimizer and random state by name."""
    state: Mapping[str, Any]
    """Everything else, as JSON."""


def save_checkpoint(root: Path, kind: Kind, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint below `root`, then remove older ones of its kind.

    Returns:
        Its folder.
    Raises:
        OSError: It could not be made durable; older checkpoints are untouched.
    """
    root.mkdir(parents=True, exist_ok=True)
    folder = root / f"{kind}-{checkpoint.step:09d}"
    temporary = root / f".{folder.name}.{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        digests: dict[str, Json] = {}
        for name, tensors in (("model", checkpoint.model), ("optimizer", checkpoint.optimizer)):
            data = save({key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()})
            digests[name] = hashlib.sha256(data).hexdigest()
            _write(temporary / f"{name}.safetensors", data)
        body: dict[str, Json] = {
            "format": FORMAT,
            "step": checkpoint.step,
            "files": digests,
            "state": dict(checkpoint.state),
        }
        digest = hashlib.sha256(canonical_json(body).encode()).hexdigest()
        _write(temporary / "state.json", canonical_json({**body, "digest": digest}).encode())
        _sync_folder(temporary)
        if folder.exists():  # the same step again, after a resume
            shutil.rmtree(folder)
        temporary.rename(folder)
        _sync_folder(root)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    for old in _folders(root, kind)[KEPT[kind] :]:
        shutil.rmtree(old, ignore_errors=True)
    return folder


def load_checkpoint(folder: Path) -> Checkpoint:
    """Read and verify one checkpoint.

    Raises:
        CorruptError: A file is missing, damaged, or of another format.
    """
    try:
        body = json.loads((folder / "state.json").read_bytes())
        digest = body.pop("digest")
        if body["format"] != FORMAT:
            raise CorruptError(f"{folder}: format {body['format']}, this version reads format {FORMAT}")
        if digest != hashlib.sha256(canonical_json(body).encode()).hexdigest():
            raise CorruptError(f"{folder}/state.json does not match its digest")
        tensors = {name: _read(folder / f"{name}.safetensors", body["files"][name]) for name in _FILES}
        return Checkpoint(step=int(body["step"]), state=body["state"], **tensors)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        if isinstance(error, CorruptError):
            raise
        raise CorruptError(f"{folder} is not a whole checkpoint: {type(error).__name__}: {error}") from error


def newest_checkpoint(root: Path, on_damaged: Callable[[str], None]) -> Checkpoint | None:
    """The valid checkpoint with most steps; damaged ones are told of and passed over."""
    for folder in _folders(root):
        try:
            return load_checkpoint(folder)
        except CorruptError as error:
            on_damaged(str(error))
    return None


_FILES = ("model", "optimizer")


def _folders(root: Path, kind: Kind | None = None) -> list[Path]:
    """Checkpoints below `root`, most steps first; `last` before `best` of equal step."""
    found = [
        (int(match[2]), match[1], entry)
        for entry in (root.iterdir() if root.is_dir() else ())
        if (match := NAME.fullmatch(entry.name)) and kind in (None, match[1])
    ]
    return [entry for _, _, entry in sorted(found, reverse=True)]


def _read(path: Path, digest: str) -> dict[str, Tensor]:
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != digest:
        raise CorruptError(f"{path} does not match its digest")
    return load(data)


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
