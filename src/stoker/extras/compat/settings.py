"""Settings of the earlier latent cache: from a mapping, an OmegaConf object or a file."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from stoker.config import Config
from stoker.config.load import make_config, read_settings
from stoker.extras.compat.images import available_device

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
