"""An encoder of the user's own, named in a configuration by its import path (`user_code.py`)."""

from __future__ import annotations

import random
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from stoker.config.kinds import OF_MODULE
from stoker.config.models import EncoderConfig
from stoker.config.section import as_names
from stoker.encoders.checkpoint import load_checkpoint
from stoker.encoders.describe import bound_module
from stoker.encoders.module import ModuleEncoder, Time
from stoker.encoders.protocol import Encoder
from stoker.errors import ConfigError, EncoderError
from stoker.pipeline.user_code import UserCode
from stoker.schema import Schema


def user_encoder(settings: EncoderConfig, schema: Schema) -> Encoder:
    """Return the encoder that `encoder.target` names, frozen, with the weights of `encoder.checkpoint`.

    Without a checkpoint its weights follow from `encoder.seed`. What the target makes may be an
    `nn.Module`, a function of tensors, or an `Encoder`, which is taken as it is.

    Args:
        settings: The section `encoder`.
        schema: Fields of the samples; they tell whether there is time to go through by steps.

    Raises:
        ConfigError: There is no such target, it cannot be called so, or settings contradict each other.
        EncoderError: The target fails (names file and line), the checkpoint does not fit, a weight has no
            value yet, or the code cannot be described.
    """
    made = _made(settings)
    if isinstance(made, Encoder) and not isinstance(made, nn.Module):
        own = {*OF_MODULE, "checkpoint"} - {"target", "arguments"}
        if given := sorted(settings.model_fields_set & own):
            raise ConfigError(
                f"encoder.target {settings.target} makes a {type(made).__qualname__}, an encoder with "
                f"settings of its own, so encoder.{given[0]} has no effect. Leave it out"
            )
        return made
    owner = bound_module(made)
    if settings.checkpoint is not None:
        if owner is None:
            raise ConfigError(
                f"encoder.checkpoint is given, but encoder.target {settings.target} makes a "
                f"{type(made).__qualname__} without weights. Leave the checkpoint out"
            )
        key, prefix = settings.checkpoint_key, settings.checkpoint_prefix
        load_checkpoint(owner, settings.checkpoint, key=key, prefix=prefix)
    elif given := [name for name in ("checkpoint_key", "checkpoint_prefix") if getattr(settings, name)]:
        raise ConfigError(f"encoder.{given[0]} is given without encoder.checkpoint. Give both, or neither")
    if owner is not None:  # ours alone, so freezing it is nothing to warn of
        owner.eval()
        for parameter in owner.parameters():
            parameter.requires_grad = False
    return ModuleEncoder(
        made,
        field=settings.field,
        output=settings.output,
        time=settings.time or _time(as_names(settings.field), schema),
        version=settings.version,
    )


def _made(settings: EncoderConfig) -> Any:
    """What the target makes of the arguments, of weights that follow from the seed."""
    code = UserCode(
        setting="encoder.target",
        spec=settings.target or "",
        of="an nn.Module class or of a function that makes a module",
        arguments="encoder.arguments",
        error=EncoderError,
    )
    if settings.target is None:
        example = "encoder.target=mypackage.models:Encoder"
        raise ConfigError(f"encoder.kind=module needs encoder.target, as {example}. {code.form}")
    arguments: Mapping[str, Any] = settings.arguments or {}
    with seeded(settings.seed):
        target = code.find()
    if isinstance(target, nn.Module):
        return _ready(target, settings)
    with seeded(settings.seed):  # the first import of its file may have drawn numbers
        made = code.call(target, arguments)
    if not callable(made) and not isinstance(made, Encoder):
        raise ConfigError(
            f"encoder.target {settings.target} gives a {type(made).__qualname__}, which encodes nothing. "
            f"{code.form}"
        )
    return made


def _ready(module: nn.Module, settings: EncoderConfig) -> nn.Module:
    """A module that its file makes itself: what its weights are, only a checkpoint can tell."""
    if settings.arguments:
        raise ConfigError(
            f"encoder.target {settings.target} is a module already, and takes no encoder.arguments. Leave "
            "them out, or name its class"
        )
    if settings.checkpoint is None and settings.version is None and [*module.parameters()]:
        raise ConfigError(
            f"encoder.target {settings.target} is a module already, so encoder.seed cannot decide its "
            "weights. Name its class or a function that makes it, or give encoder.checkpoint"
        )
    return module


def _time(fields: tuple[str, ...], schema: Schema) -> Time:
    known = [schema[name].time for name in fields if name in schema]
    return "steps" if known and all(known) else "none"


@contextmanager
def seeded(seed: int) -> Generator[None]:
    """Make weights on the CPU that follow from `seed`; the caller's random states are put back afterwards."""
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    numpy_state = np.random.get_state(legacy=False)
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
    try:
        with torch.device("cpu"):
            yield
    finally:
        torch.set_rng_state(torch_state)
        np.random.set_state(numpy_state)
        random.setstate(python_state)
