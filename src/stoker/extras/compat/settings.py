"""Settings of the earlier latent cache: from a mapping, an OmegaConf object or a file."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from omegaconf import DictConfig, OmegaConf

from stoker.config import Config
from stoker.config.load import make_config, read_settings
from stoker.plan.resources import device_name, resolve_device

log = logging.getLogger("stoker")


def config_of(
    cfg: Mapping[str, Any] | str | Path | Config | DictConfig, *, keep_fields: bool = False
) -> Config:
    """Return settings with the meaning that they had: of a mapping, an OmegaConf object or a file.

    Args:
        cfg: The settings; a `Config` is returned as it is.
        keep_fields: With `training.use_inverse_losses`, keep raw fields for batches (`precompute.keep`); the
            loss itself is the training script's.

    Raises:
        ConfigError: A setting is nearly one that is known, or has a wrong value.
    """
    if isinstance(cfg, Config):
        return cfg
    where = str(cfg) if isinstance(cfg, str | Path) else "cfg"
    if isinstance(cfg, str | Path):
        plain = read_settings(Path(cfg))
    elif isinstance(cfg, DictConfig):
        plain = cast("dict[str, object]", OmegaConf.to_container(cfg, resolve=True))
    else:
        plain = cast("dict[str, object]", dict(cfg))
    config = make_config(_with_fields(plain) if keep_fields else plain, where=where, earlier=True)
    for note in config.notes:
        log.info("%s", note)
    return on_available_device(config)


def _with_fields(plain: dict[str, object]) -> dict[str, object]:
    training = plain.get("training")
    if not isinstance(training, Mapping) or not training.get("use_inverse_losses"):
        return plain
    losses = ("use_inverse_losses", "lambda_inv_enc", "lambda_inv_dec")
    kept: dict[str, object] = {name: value for name, value in training.items() if name not in losses}
    dtype = kept.get("latent_cache_dtype", "float16")
    if isinstance(dtype, str):  # fields were read from the raw files, which round nothing
        kept["latent_cache_dtype"] = {"latent": dtype, "data": "float32"}
    precompute = {"keep": "data", **cast("dict[str, object]", plain.get("precompute") or {})}
    return {**plain, "training": kept, "precompute": precompute}


def on_available_device(config: Config) -> Config:
    """Return the same settings on the CPU where a GPU is asked for and torch sees none; a line says so."""
    device = available_device(config.training.device)
    training = config.training.model_copy(update={"device": device})
    return config if device == config.training.device else config.model_copy(update={"training": training})


# ----------------------------------------------------------------------------------------------------------
# Choose the device as the earlier systems did: a GPU, or the CPU with one line in the log.


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
