"""From `training.transforms`, `training.subset` and the files beside it to arguments of a `Loader`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from stoker.config import Config
from stoker.config.transforms import CropStep, NormalizeStep, Step
from stoker.errors import ConfigError
from stoker.loader import subset
from stoker.loader.transform import Transform
from stoker.loader.windows import time_field
from stoker.scale.ranks import Ranks
from stoker.schema import Schema
from stoker.store import Cache
from stoker.transforms import Crop, Flip, Noise, Normalize, Roll

if TYPE_CHECKING:
    from collections.abc import Callable

RANDOM: dict[str, Callable[..., Transform]] = {"flip": Flip, "roll": Roll, "crop": Crop, "noise": Noise}
"""The transforms that draw, by their kind in a configuration."""


def transforms_of(config: Config, cache: Cache, *, training: bool) -> list[Transform]:
    """The transforms of a configuration.

    Args:
        cache: The training cache, whose statistics `normalize` takes where it is given none.
        training: All of them; else those that draw nothing, which validation needs too.

    Raises:
        ConfigError: One does not fit the cache, or needs a complete one.
    """
    found: list[Transform] = []
    for step in config.training.transforms:
        if isinstance(step, NormalizeStep):
            found += _normalize(step, cache)
        elif training:
            if isinstance(step, CropStep):
                _check_crop(step, cache)
            found.append(_drawing(step))
    return found


def _check_crop(step: CropStep, cache: Cache) -> None:
    """Refuse a crop after which states are not of the size that validation and roll-outs have."""
    state = cache.schema[time_field(cache.schema, None)].shape[1:]
    sizes = [step.size] * len(step.axes) if isinstance(step.size, int) else step.size
    fits = [-axis <= len(state) and state[axis] == size for axis, size in zip(step.axes, sizes, strict=False)]
    if not all(fits):
        raise ConfigError(
            f"training.transforms: crop of size {step.size} along axes {list(step.axes)}, but a state is of "
            f"shape {list(state)}, which validation and roll-outs have too. Give the size that the axes "
            "have, with padding= to move states about, or roll them; smaller pieces need a loop of your own"
        )


def normalized(config: Config) -> bool:
    """Whether batches are not the encoder's records any more, so that it cannot decode them."""
    return any(isinstance(step, NormalizeStep) for step in config.training.transforms)


def _drawing(step: Step) -> Transform:
    settings = step.model_dump(exclude={"kind"})
    return RANDOM[step.kind](**settings)


def _normalize(step: NormalizeStep, cache: Cache) -> list[Transform]:
    if (step.mean is None) != (step.std is None):
        raise ConfigError(
            "training.transforms: normalize has a mean without a std, or a std without a mean. Give both, or "
            "neither for the statistics of the training cache"
        )
    if step.mean is not None and step.std is not None:
        return [Normalize(mean=step.mean, std=step.std, axis=step.axis, fields=step.fields)]
    cure = "give normalize a mean and a std"
    _check_complete(cache, "training.transforms: normalize takes the statistics", cure)
    return [Normalize.of(cache, name) for name in (step.fields or (None,))]


def _check_complete(cache: Cache, what: str, cure: str) -> None:
    """Refuse to take for the whole what is stored of a cache by now: each run would find another part."""
    if not cache.complete:
        raise ConfigError(
            f"{what} of the whole training cache, of which {len(cache)} of {cache.recipe.count} records are "
            f"stored by now in {cache.path}. Leave --no-wait (precompute.wait=false) out, or {cure}"
        )


def check_beside(config: Config, schema: Schema, ranks: Ranks) -> None:
    """Refuse what cannot be served beside the filling of a cache, before that begins.

    Args:
        config: The settings of a task that is to be trained on while it is encoded.
        schema: Fields of its records.
        ranks: The processes that train together.

    Raises:
        ConfigError: One of the settings needs a complete cache.
    """
    training = config.training
    wants = {
        f"training with {ranks.world} ranks": (
            ranks.world > 1,
            "ranks would have to agree on what is quarantined before each batch",
        ),
        f"training.order={training.order}": (
            training.order.startswith("static"),
            "its parts are of all examples",
        ),
        "cutting windows from trajectories of varying length": (
            any(field.time and field.ragged for field in schema.values()),
            "the learning rate follows the number of steps, which is known once all are encoded",
        ),
    }
    for what, (wanted, why) in wants.items():
        if wanted:
            raise ConfigError(
                f"{what} needs a complete cache: {why}; and precompute.wait=false begins before there is "
                "one. Leave --no-wait (precompute.wait=false) out, so that it is filled first"
            )


def chosen_of(config: Config, cache: Cache) -> dict[str, Any]:
    """Which records of the training cache are served, and how often: `indices` and `weights` of a Loader.

    Raises:
        ConfigError: A file cannot be read as numbers, two settings choose at once, or there is nothing to
            choose among yet.
    """
    training = config.training
    if training.subset is not None and training.indices_file is not None:
        raise ConfigError("training.subset and training.indices_file both choose samples. Give one of them")
    chosen: dict[str, Any] = {}
    if training.subset is not None:
        cure = "list samples in training.indices_file"
        _check_complete(cache, f"training.subset={training.subset:g} chooses among the records", cure)
        chosen["indices"] = subset(cache, training.subset, seed=config.data.seed)
    if training.indices_file is not None:
        chosen["indices"] = read_numbers(training.indices_file, "training.indices_file", np.int64)
    if training.weights_file is not None:
        chosen["weights"] = read_numbers(training.weights_file, "training.weights_file", np.float64)
    return chosen


def read_numbers(path: str, setting: str, dtype: type[np.generic]) -> NDArray[Any]:
    """The numbers of a `.npy` file, or of a text file with one a line.

    Raises:
        ConfigError: No such file, or it holds something else.
    """
    expected = "Expected a .npy file of one axis, or text with a number per line"
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"{setting}: {path} is not a file. {expected}")
    try:
        found: NDArray[Any] = (
            np.load(file, allow_pickle=False)
            if file.suffix == ".npy"
            else np.array(file.read_text().split(), dtype=dtype)
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"{setting}: {path} cannot be read as numbers: {error}. {expected}") from error
    kind = np.integer if dtype is np.int64 else np.number
    if found.ndim != 1 or not np.issubdtype(found.dtype, kind):
        raise ConfigError(f"{setting}: {path} holds {found.dtype} {found.shape}. {expected}")
    return found.astype(dtype)
