"""Files that a run keeps on disk: checkpoints, optimizer and random state, numerics, and lines of metrics."""

from __future__ import annotations

import hashlib
import json
import math
import re
import secrets
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from stoker.errors import CorruptError
from stoker.runtime.disk import explain_disk_errors
from stoker.runtime.files import rename, replace_atomically
from stoker.schema import Json, canonical_json
from stoker.train.config import TrainConfig

# ----------------------------------------------------------------------------------------------------------
# Checkpoints: tensors as safetensors, the rest as JSON, whole or not there at all.
#
#     checkpoints/last-000000500/       model.safetensors  optimizer.safetensors  state.json
#     checkpoints/best-000000400/       the same
#     checkpoints/last-000000500-old/   while the same step is saved again: the one before
#
# A checkpoint is written under a temporary name, made durable, then renamed; only then older ones go. So at
# every moment the newest one is whole. `state.json` holds the digests of the other two, so damage is found
# before anything is loaded. Nothing is pickled.


Kind: TypeAlias = Literal["last", "best"]

FORMAT = 1
KEPT: Mapping[Kind, int] = {"last": 2, "best": 1}
"""Checkpoints kept of a kind: two of `last`, so that one can be damaged."""
NAME = re.compile(r"(last|best)-(\d{9,})(-old)?")
OLD = "-old"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """Content of a checkpoint."""

    step: int
    """Optimizer steps done."""
    model: Mapping[str, Tensor]
    """Weights and buffers by name."""
    optimizer: Mapping[str, Tensor]
    """Optimizer and random state by name."""
    state: Mapping[str, Any]
    """Everything else, as JSON."""
    folder: Path | None = None
    """Where it was read from; None: it was not read from disk."""


def save_checkpoint(root: Path, kind: Kind, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint below `root`, then remove older ones of its kind.

    Returns:
        Its folder.
    Raises:
        ResourceError: No space is left; older checkpoints are still there.
        ReadOnlyError: `root` cannot be written.
    """
    root.mkdir(parents=True, exist_ok=True)
    folder = root / f"{kind}-{checkpoint.step:09d}"
    with replace_atomically(folder) as temporary:
        temporary.mkdir()
        digests: dict[str, Json] = {}
        for name in _FILES:
            tensors: Mapping[str, Tensor] = getattr(checkpoint, name)
            data = save({key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()})
            digests[name] = hashlib.sha256(data).hexdigest()
            (temporary / f"{name}.safetensors").write_bytes(data)
        body: dict[str, Json] = {
            "format": FORMAT,
            "step": checkpoint.step,
            "files": digests,
            "state": dict(checkpoint.state),
        }
        digest = hashlib.sha256(canonical_json(body).encode()).hexdigest()
        (temporary / "state.json").write_bytes(canonical_json({**body, "digest": digest}).encode())
        if folder.exists():  # this step again: the one before counts until the new one has its name
            _remove(root / (folder.name + OLD))
            rename(folder, root / (folder.name + OLD), durable=False)
    for old in _superseded(folder, kind):
        _remove(old)
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
        return Checkpoint(step=int(body["step"]), state=body["state"], folder=folder, **tensors)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        if isinstance(error, CorruptError):
            raise
        raise CorruptError(
            f"{folder} is not a complete checkpoint: {type(error).__name__}: {error}"
        ) from error


def newest_checkpoint(
    root: Path, on_damaged: Callable[[str], None], kind: Kind | None = None
) -> Checkpoint | None:
    """Return the valid checkpoint with most steps, of a kind or any; `on_damaged` gets errors of others."""
    for folder in _folders(root, kind):
        try:
            return load_checkpoint(folder)
        except CorruptError as error:
            on_damaged(str(error))
    return None


def checkpoint_to_resume(
    root: Path, on_damaged: Callable[[str], None], *, expected: bool = False
) -> Checkpoint | None:
    """Return the checkpoint that a run continues from; None where it has not made one yet.

    Args:
        root, on_damaged: As for `newest_checkpoint`.
        expected: There was one, as another record of the run says.
    Raises:
        CorruptError: There are, or were, checkpoints, and none is complete. Starting again would
            discard the training without a message.
    """
    found = newest_checkpoint(root, on_damaged)
    there = len(_folders(root))
    if found is None and (there or expected):
        raise CorruptError(
            f"{root}: none of {there} checkpoints is complete, and the run had made some",
            hint="Bring one back from a copy, or start again as another run",
        )
    return found


_FILES = ("model", "optimizer")


def _folders(root: Path, kind: Kind | None = None) -> list[Path]:
    """Checkpoints below `root`, most steps first; of equal step `last` before `best` before old ones."""
    found = [
        (int(match[2]), match[3] is None, match[1], entry)
        for entry in (root.iterdir() if root.is_dir() else ())
        if (match := NAME.fullmatch(entry.name)) and kind in (None, match[1])
    ]
    return [entry for *_, entry in sorted(found, reverse=True)]


def _superseded(folder: Path, kind: Kind) -> list[Path]:
    """Return checkpoints of a kind that are not needed after the one just written.

    Those of later steps are among them: they were damaged, or the run would have gone on from there.
    """
    folders = _folders(folder.parent, kind)
    before = [entry for entry in folders[folders.index(folder) :] if not entry.name.endswith(OLD)]
    return [entry for entry in folders if entry not in before[: KEPT[kind]]]


def _remove(folder: Path) -> None:
    """Remove a folder that may be absent; a kill on the way leaves a temporary, not half a checkpoint."""
    if folder.exists():
        doomed = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.part")
        rename(folder, doomed, durable=False)
        shutil.rmtree(doomed, ignore_errors=True)


def _read(path: Path, digest: str) -> dict[str, Tensor]:
    data = path.read_bytes()
    if hashlib.sha256(data).hexdigest() != digest:
        raise CorruptError(f"{path} does not match its digest")
    return load(data)


# ----------------------------------------------------------------------------------------------------------
# The optimizer, and its state and the random state as tensors by name, for a checkpoint.


def make_optimizer(model: nn.Module, config: TrainConfig) -> Any:
    """Return AdamW over the weights of `model`; only matrices decay."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ],
        lr=config.lr,
        fused=True,
    )


def dump_optimizer(optimizer: Any, device: torch.device) -> dict[str, Tensor]:
    """Return the moments of every weight, and the random state of the CPU and of `device`."""
    tensors = {
        f"adamw.{number}.{name}": value
        for number, state in optimizer.state_dict()["state"].items()
        for name, value in state.items()
    }
    tensors["rng.cpu"] = torch.get_rng_state()
    if device.type == "cuda":
        tensors["rng.cuda"] = torch.cuda.get_rng_state(device)
    return tensors


def restore_optimizer(optimizer: Any, device: torch.device, tensors: Mapping[str, Tensor]) -> None:
    """Put both back as they were when `tensors` were dumped."""
    states: dict[int, dict[str, Tensor]] = {}
    for name, value in tensors.items():
        kind, _, rest = name.partition(".")
        if kind == "adamw":
            number, _, key = rest.partition(".")
            states.setdefault(int(number), {})[key] = value
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": states, "param_groups": groups})
    torch.set_rng_state(tensors["rng.cpu"])
    if device.type == "cuda" and "rng.cuda" in tensors:
        torch.cuda.set_rng_state(tensors["rng.cuda"], device)


# ----------------------------------------------------------------------------------------------------------
# What decides the last bits of a step in addition to the settings: kept with a run, compared on resume.


def numerics_of(device: torch.device, amp: bool) -> dict[str, Json]:
    """Return how this process computes on `device`; `dtype` is that of products and attention."""
    return {
        "torch": str(torch.__version__),
        "processor": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "dtype": "bfloat16" if amp else "float32",
        "float32_matmul": _float32_matmul(device),
    }


def _float32_matmul(device: torch.device) -> str:
    """Return how products of float32 are computed: `ieee`, or `tf32` or `bf16` for less exact ones."""
    backend: Any = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    # Absent before torch 2.9. The older question raises where a program has set the newer answer.
    precision = getattr(getattr(backend, "matmul", None), "fp32_precision", None)
    if precision is None:
        precision = {"highest": "ieee", "high": "tf32"}.get(torch.get_float32_matmul_precision(), "bf16")
    return "ieee" if precision == "none" else str(precision)


# ----------------------------------------------------------------------------------------------------------
# Metrics of a run: one JSON object per line, readable while it grows.


class MetricsLog:
    """`metrics.jsonl` of a run: lines of kind `start`, `step` and `epoch`. `writes`: true on rank 0 alone."""

    def __init__(self, path: Path, *, writes: bool = True) -> None:
        self.path = path
        self._writes = writes

    def append(self, row: Mapping[str, Json]) -> None:
        """Add a line; numbers that JSON cannot hold become null.

        Raises:
            ResourceError: No space is left.
            ReadOnlyError: The file cannot be written.
        """
        if not self._writes:
            return
        line = json.dumps({name: _finite(value) for name, value in row.items()}, allow_nan=False)
        with explain_disk_errors(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def rows(self) -> list[dict[str, Any]]:
        """Return all lines; one that a kill left half-written is passed over."""
        if not self.path.exists():
            return []
        rows: list[dict[str, Any]] = []
        for line in self.path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict):
                rows.append(row)  # pyright: ignore[reportUnknownArgumentType] -- JSON
        return rows

    def keep(self, wanted: Callable[[dict[str, Any]], bool]) -> None:
        """Drop the other lines: those that a resumed run is about to write again."""
        if not self._writes:
            return
        text = "".join(json.dumps(row, allow_nan=False) + "\n" for row in self.rows() if wanted(row))
        with replace_atomically(self.path) as temporary:
            temporary.write_text(text, encoding="utf-8")


def _finite(value: Json) -> Json:
    return None if isinstance(value, float) and not math.isfinite(value) else value
