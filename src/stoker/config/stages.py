"""`stages`: the parts of a training run, in order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, TypeAlias, cast

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from stoker.config.section import CountInt, Flag, NonNegativeFloat, PositiveFloat, PositiveInt
from stoker.errors import ConfigError
from stoker.train.config import STAGES, StageName

OTHER_NAMES: Mapping[str, str] = {"decoder_finetune": "decoder", "decoder_fine_tune": "decoder"}
"""Names of earlier systems to today's of equal meaning."""

_REFUSED: Mapping[str, str] = {
    "diffusion": "a diffusion model of what the operator misses",
    "diff_residual": "a diffusion model of what the operator misses",
    "distill": "a diffusion model in few steps",
    "consistency_distill": "a diffusion model in few steps",
}
"""Names of earlier systems to what they trained, which this version does not."""


def stage_name(name: str) -> StageName:
    """Return the stage that `name` means.

    >>> stage_name("decoder_finetune")
    'decoder'

    Raises:
        ConfigError: No stage has this name. For one of the earlier systems it says what to use instead.
    """
    name = OTHER_NAMES.get(name, name)
    if name in _REFUSED:
        raise ConfigError(
            f"stage {name!r} trained {_REFUSED[name]}, which this version does not have. For consistent "
            "roll-outs use the stage consistency; for a diffusion model of your own train on stoker.Loader"
        )
    if name not in STAGES:
        raise ConfigError(f"stage {name!r} is unknown. Known: {', '.join(STAGES)}")
    return name


class StageConfig(BaseModel):
    """One stage. What is left out is as in `training`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: StageName
    epochs: PositiveInt | None = None
    lr: PositiveFloat | None = None
    early_stop_patience: CountInt | None = None
    freeze_operator: Flag = True
    lambda_inv_enc: NonNegativeFloat | None = None
    lambda_inv_dec: NonNegativeFloat | None = None
    lambda_consistency: NonNegativeFloat = 1.0
    horizon: Annotated[int, Field(ge=2, strict=True)] | None = None


ONLY_IN: Mapping[str, str] = {
    "freeze_operator": "decoder",
    "lambda_consistency": "consistency",
    "horizon": "consistency",
}
"""Keys to the stage that alone has a use for them."""


def _named(name: str, own: object) -> object:
    """An entry of a mapping as one of a list; what is not a mapping is left to be refused."""
    if own is None:
        return {"name": name}
    return {"name": name, **cast("Mapping[str, object]", own)} if isinstance(own, Mapping) else own


def _listed(value: object) -> object:
    """`{operator: {epochs: 20}, decoder: {}}` as a list; names of earlier systems as today's."""
    if isinstance(value, Mapping):
        mapping = cast("Mapping[str, object]", value)
        value = [_named(name, own) for name, own in mapping.items()]
    if not isinstance(value, list | tuple):
        return value
    found: list[object] = []
    for entry in cast("list[object]", value):
        own = {"name": entry} if isinstance(entry, str) else entry
        if isinstance(own, Mapping) and isinstance(own.get("name"), str):  # pyright: ignore[reportUnknownMemberType]
            known = cast("Mapping[str, object]", own)
            own = {**known, "name": stage_name(str(known["name"]))}
        found.append(own)
    return tuple(found)


Stages: TypeAlias = Annotated[tuple[StageConfig, ...], BeforeValidator(_listed)]
