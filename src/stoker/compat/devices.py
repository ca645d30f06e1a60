"""Choose the device as the earlier systems did: a GPU, or the CPU with one line in the log."""

from __future__ import annotations

import logging

import torch

from stoker.plan.devices import device_name, resolve_device

log = logging.getLogger("stoker")
_said: set[str] = set()
"""Lines that this process has logged: it makes a set for each split, and one line is enough."""
NO_GPU = "CUDA requested but not available; falling back to CPU"


def device_or_cpu(wanted: object, what: str) -> torch.device:
    """Return the device to serve from; the CPU, with one line in a process, where torch sees no GPU at all.

    If torch sees other GPUs, a GPU that is not there is an error, as is a wrong name.

    Args:
        wanted: `auto`, `gpu`, `cpu`, `cuda`, `cuda:1` or a `torch.device`.
        what: What is served, for the line.

    Raises:
        ConfigError: It is neither the CPU nor a CUDA device.
        ResourceError: There are GPUs, but not this one.
    """
    name = "cuda" if str(wanted) == "gpu" else device_name(wanted)
    if name == "cpu" or torch.cuda.device_count():
        return resolve_device(name)
    line = (
        f"no GPU: torch {torch.__version__} sees no CUDA device, so {what} are served from this machine's "
        "memory (device cpu)"
    )
    if line not in _said:
        _said.add(line)
        log.warning("%s", line)
    return torch.device("cpu")


def available_device(wanted: object) -> str:
    """Return the name of a device; the CPU, with the earlier system's line, for a GPU where torch sees none.

    >>> available_device("cpu")
    'cpu'
    """
    name = str(wanted)
    if name.startswith("cuda") and not torch.cuda.device_count():
        log.warning(NO_GPU)
        return "cpu"
    return name
