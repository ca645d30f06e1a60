"""Optimizer and random state as tensors by name, for a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def dump_optimizer(optimizer: Any, device: torch.device) -> dict[str, Tensor]:
    """Moments of every weight, and the random state of the CPU and of `device`."""
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
