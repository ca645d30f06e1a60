"""The stages of a configuration: their losses, their windows, and the raw fields that some need."""

from __future__ import annotations

from stoker.config import Config
from stoker.config.models import StageConfig, stage_name
from stoker.errors import ConfigError
from stoker.train.config import StageName, TrainStage

INVERSE_ENCODING, INVERSE_DECODING = 1.0, 0.1
"""Weights of the inverse losses where `training.use_inverse_losses` stands alone. The first does not reach
the operator, the second does."""
CONSISTENCY_HORIZON = 4
"""Strides that windows of a consistency stage reach ahead, at least."""
CONSISTENCY_LR = 0.1
"""Part of `training.lr` with which the operator is fine-tuned for consistency."""
RAW = "data"
"""The field of samples that encoders of a grid take, and that decoders give back."""


def stages_of(config: Config) -> tuple[TrainStage, ...]:
    """Return the stages for the training loop; one of `operator` where none are given.

    Raises:
        ConfigError: The first is not `operator`, a name comes twice, or the problem has no such stage.
    """
    given = config.stages or (StageConfig(name="operator"),)
    names = [stage.name for stage in given]
    if names[0] != "operator" or len({*names}) < len(names):
        raise ConfigError(
            f"stages are {', '.join(names)}. Expected operator first, then decoder, consistency or both, "
            "each once"
        )
    training = config.training
    enc, dec = _inverse(config)
    found: list[TrainStage] = []
    for own in given:
        patience = (
            training.early_stop_patience if own.early_stop_patience is None else own.early_stop_patience
        )
        part = CONSISTENCY_LR if own.name == "consistency" else 1.0
        inverse = own.name == "operator"
        found.append(
            TrainStage(
                name=own.name,
                epochs=own.epochs or training.epochs,
                lr=own.lr or training.lr * part,
                patience=patience or None,
                freeze_operator=own.freeze_operator,
                lambda_inv_enc=_first(own.lambda_inv_enc, enc if inverse else 0.0),
                lambda_inv_dec=_first(own.lambda_inv_dec, dec if inverse else 0.0),
                lambda_consistency=own.lambda_consistency,
            )
        )
    if config.data.input is not None and (len(found) > 1 or found[0].trains_decoder):
        raise ConfigError(
            f"data.input is {config.data.input!r}, and a steady problem trains the operator alone: stages "
            f"are {', '.join(names)}, training.lambda_inv_enc is {found[0].lambda_inv_enc:g} and "
            f"training.lambda_inv_dec {found[0].lambda_inv_dec:g}. Set stages=[operator] and "
            "training.use_inverse_losses=false"
        )
    if config.encoder.kind == "mesh" and any(stage.trains_decoder for stage in found):
        raise ConfigError(
            f"encoder.kind is mesh, and a decoder is trained on the field {RAW!r} of a grid. Leave the stage "
            "decoder out, and set training.use_inverse_losses=false"
        )
    return tuple(found)


def only_stage(config: Config, wanted: str | None) -> StageName | None:
    """Return the stage of `--stage NAME`; None for all.

    Raises:
        ConfigError: The settings have no such stage.
    """
    if wanted is None or wanted == "all":
        return None
    name, names = stage_name(wanted), [stage.name for stage in stages_of(config)]
    if name not in names:
        raise ConfigError(
            f"--stage is {wanted}, and the settings have {', '.join(names)}. Add it to the settings: "
            f"stages=[{','.join([*names, name])}]"
        )
    return name


def with_epochs(config: Config, wanted: str | None, epochs: int | None) -> Config:
    """Return the settings with `epochs` in the stage `wanted`; None: `training.epochs` says it already."""
    if epochs is None or only_stage(config, wanted) is None or not config.stages:
        return config
    name = stage_name(str(wanted))
    stages = [s.model_copy(update={"epochs": epochs}) if s.name == name else s for s in config.stages]
    return config.model_copy(update={"stages": tuple(stages)})


def _inverse(config: Config) -> tuple[float, float]:
    """Return weights of the inverse losses; `use_inverse_losses: false` turns them off whatever they are."""
    training = config.training
    on, enc, dec = training.use_inverse_losses, training.lambda_inv_enc, training.lambda_inv_dec
    if on is False:
        return 0.0, 0.0
    if on:
        return _first(enc, INVERSE_ENCODING), _first(dec, INVERSE_DECODING)
    return enc or 0.0, dec or 0.0


def _first(value: float | None, default: float) -> float:
    return default if value is None else value


def horizon_of(config: Config, stage: TrainStage) -> int | None:
    """Return the horizon of a stage's training windows; None: that of the settings."""
    if stage.name != "consistency":
        return None
    asked = next(own.horizon for own in config.stages if own.name == stage.name)
    own = config.training.rollout_horizon
    return asked or max(CONSISTENCY_HORIZON, own[1] if isinstance(own, tuple) else own)
