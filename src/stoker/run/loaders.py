"""The loaders of a run: which records the training loop is given, from where, and in which order."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from stoker.config import Config
from stoker.config.models import CropStep, NormalizeStep
from stoker.distributed.ranks import Ranks
from stoker.encoders.wrappers import is_steady
from stoker.errors import ConfigError
from stoker.loader import Loader, subset
from stoker.loader.batch import time_field
from stoker.loader.transform import Transform
from stoker.monitor import StallMeter
from stoker.run.build import build_source
from stoker.run.context import Run, batch_examples, horizon_of, unfinished
from stoker.schema import Schema
from stoker.store import Cache
from stoker.train.config import TrainStage

if TYPE_CHECKING:
    import torch

    from stoker.run.tasks import TaskLoader, TaskMixture

# ----------------------------------------------------------------------------------------------------------
# From `training.transforms`, `training.subset` and the files it names to arguments of a `Loader`.


def transforms_of(config: Config, cache: Cache, *, training: bool) -> list[Transform]:
    """Return the transforms of a configuration.

    Args:
        cache: The training cache, whose statistics `normalize` takes where it is given none.
        training: All of them; else those that draw nothing, which validation needs too.

    Raises:
        ConfigError: One does not fit the cache, or needs a complete one.
    """
    if not config.training.transforms:
        return []
    from stoker.transforms import Crop, Flip, Noise, Roll  # most configurations have none

    random: dict[str, Callable[..., Transform]] = {"flip": Flip, "roll": Roll, "crop": Crop, "noise": Noise}
    found: list[Transform] = []
    for step in config.training.transforms:
        if isinstance(step, NormalizeStep):
            found += _normalize(step, cache)
        elif training:
            if isinstance(step, CropStep) and any(one.time for one in cache.schema.values()):
                _check_crop(step, cache)
            found.append(random[step.kind](**step.model_dump(exclude={"kind"})))
    return found


def _check_crop(step: CropStep, cache: Cache) -> None:
    """Refuse a crop after which states are not of the size that validation and roll-outs have."""
    state = cache.schema[time_field(cache.schema, None)].shape[1:]
    sizes = [step.size] * len(step.axes) if isinstance(step.size, int) else step.size
    fits = [-axis <= len(state) and state[axis] == size for axis, size in zip(step.axes, sizes, strict=False)]
    if not all(fits):
        raise ConfigError(
            f"training.transforms: crop of size {step.size} along axes {list(step.axes)}, but a state is of "
            f"shape {list(state)}, which validation and roll-outs have too",
            hint="Give the size that the axes have, with padding= to move states about, or roll them; "
            "smaller pieces need a loop of your own",
        )


def normalized(config: Config) -> bool:
    """Return True if batches are no longer the encoder's records, so that it cannot decode them."""
    return any(isinstance(step, NormalizeStep) for step in config.training.transforms)


def _normalize(step: NormalizeStep, cache: Cache) -> list[Transform]:
    from stoker.transforms import Normalize

    if (step.mean is None) != (step.std is None):
        raise ConfigError(
            "training.transforms: normalize has a mean without a std, or a std without a mean",
            hint="Give both, or neither for the statistics of the training cache",
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
            f"stored by now in {cache.path}",
            hint=f"Leave --no-wait (precompute.wait=false) out, or {cure}",
        )


def check_beside(run: Run, schema: Schema) -> None:
    """Refuse what cannot be served while a cache is being filled, before that begins.

    Args:
        run: Of a task that is to be trained on while it is encoded.
        schema: Fields of its records.

    Raises:
        ConfigError: One of the settings needs a complete cache.
    """
    training = run.config.training
    wants = {
        f"training.partition={training.partition}": (
            training.partition != "global",
            "its parts are of all examples",
        ),
        "data.join": (
            run.config.data.join.table is not None,
            "a table is joined to the records that are there",
        ),
        "training on records without time": (
            run.windows_for(schema) is None and not is_steady(schema),
            "the scales of their fields are learned from all of them",
        ),
        "cutting windows from trajectories of varying length": (
            any(field.time and field.ragged for field in schema.values()),
            "the learning rate follows the number of steps, which is known once all are encoded",
        ),
    }
    for what, (wanted, why) in wants.items():
        if wanted:
            raise ConfigError(
                f"{what} needs a complete cache: {why}; and precompute.wait=false begins before there is one",
                hint="Leave --no-wait (precompute.wait=false) out, so that it is filled first",
            )


def chosen_of(config: Config, cache: Cache) -> dict[str, Any]:
    """Return which records of the training cache are served, and how often: `indices` and `weights`.

    Raises:
        ConfigError: A file cannot be read as numbers, two settings choose at once, or there is nothing to
            choose among yet.
    """
    training = config.training
    if training.subset is not None and training.indices_file is not None:
        raise ConfigError(
            "training.subset and training.indices_file both choose samples", hint="Give one of them"
        )
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
    """Return the numbers of a `.npy` file, or of a text file with one a line.

    Raises:
        ConfigError: No such file, or it holds something else.
    """
    expected = "Expected a .npy file of one axis, or text with a number per line"
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"{setting}: {path} is not a file", hint=expected)
    try:
        found: NDArray[Any] = (
            np.load(file, allow_pickle=False)
            if file.suffix == ".npy"
            else np.array(file.read_text().split(), dtype=dtype)
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"{setting}: {path} cannot be read as numbers: {error}", hint=expected) from error
    kind = np.integer if dtype is np.int64 else np.number
    if found.ndim != 1 or not np.issubdtype(found.dtype, kind):
        raise ConfigError(f"{setting}: {path} holds {found.dtype} {found.shape}", hint=expected)
    return found.astype(dtype)


# ----------------------------------------------------------------------------------------------------------
# How the ranks of a run share its steps and its validation set.
#
# A run keeps the global batch that it was begun with: `training.batch_size` times the ranks at its
# beginning. So the same command resumes with another number of ranks, over the same global batches.


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShare:
    """Which part of a run's steps is this rank's."""

    resume: bool
    """An interrupted run of these settings is resumed."""
    begun: int
    """Ranks that the run was begun with."""
    batch_size: int
    """Examples of one rank in one step."""

    drop_last: bool
    """A last step too short for every rank to have its part is left out, also when one rank resumes alone."""
    partition: str
    """As of the loader; a static one has the parts that the run was begun with."""


def share_steps(run: Run, digest: str, cache: Cache) -> StepShare:
    """Decide on rank 0, by its run folder, and check that the global batch can be shared.

    Raises:
        ConfigError: It cannot.
    """
    ranks = run.ranks
    begun = unfinished(run, digest) if ranks.is_rank_zero else None
    begun = json.loads(ranks.all_gather(json.dumps(begun), "the start of training")[0])
    size = batch_examples(run, cache.schema) * (begun or ranks.world_size)
    if size % ranks.world_size:
        raise ConfigError(
            f"{run.run_dir} holds a run of {size} examples a step, begun with {begun} ranks, which "
            f"{ranks.world_size} cannot share evenly",
            hint=f"Resume with a number of ranks that divides {size}, or begin again in another "
            "training.run_dir",
        )
    world_size, partition = begun or ranks.world_size, run.config.training.partition
    return StepShare(
        resume=begun is not None,
        begun=world_size,
        batch_size=size // ranks.world_size,
        drop_last=max(world_size, ranks.world_size) > 1,
        partition=f"static({world_size})" if partition == "static" else partition,
    )


def own_trajectories(cache: Cache, ranks: Ranks) -> Sequence[int] | None:
    """Return the records that this rank validates on, each complete on one rank; None: all."""
    if ranks.world_size == 1:
        return None
    # What is stored of a cache that is being filled says nothing about what it will hold.
    numbers = cache.indices if cache.filling is None else np.arange(cache.recipe.count)
    count = len(numbers)
    return numbers[
        count * ranks.rank // ranks.world_size : count * (ranks.rank + 1) // ranks.world_size
    ].tolist()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLoaders:
    """The loaders that the loop trains and validates on."""

    train: Loader | TaskMixture
    val: Loader | dict[str, TaskLoader | None] | None
    loaders: tuple[Loader, ...]
    """All that records come from, those of training first."""
    shared: StepShare
    """This rank's part of the run; of several tasks, of the first."""
    reason: str
    """Why records are served from where they are."""


def serve(
    run: Run,
    caches: Sequence[Cache],
    *,
    digest: str = "",
    meter: StallMeter | None = None,
    horizon: int | None = None,
) -> RunLoaders:
    """Return loaders over ready caches; several tasks are mixed for training and apart for validation.

    Args:
        run: The settings, and the processes that train together.
        caches: For training and for validation, of each task in turn.
        digest: Of the run's settings: one that was interrupted keeps its global batch.
        meter: Told how long batches were waited for.
        horizon: Of training windows; None: `training.rollout_horizon`.
    Raises:
        ConfigError: The settings of the mixture do not fit the tasks, or the ranks the batch.
    """
    parts = run.parts()
    firsts = [joined(part, cache, run.split) for part, cache in zip(parts, caches[::2], strict=True)]
    seconds = [joined(part, cache, "val") for part, cache in zip(parts, caches[1::2], strict=True)]
    shares = [share_steps(part, digest, cache) for part, cache in zip(parts, firsts, strict=True)]
    train_loaders = {
        part.task: make_loader(
            part if horizon is None else part.with_training(rollout_horizon=horizon),
            cache,
            meter=meter,
            shared=shared,
        )
        for part, cache, shared in zip(parts, firsts, shares, strict=True)
    }
    val_loaders = {
        part.task: make_val_loader(part, cache, train_cache=first)
        for part, first, cache in zip(parts, firsts, seconds, strict=True)
    }
    known = (loader for loader in val_loaders.values() if loader is not None)
    loaders = (*train_loaders.values(), *known)
    if len(parts) == 1:
        (val,), one = val_loaders.values(), loaders[0]
        return RunLoaders(train=one, val=val, loaders=loaders, shared=shares[0], reason=one.plan.reason)
    from stoker.run.tasks import apart, mix  # most runs have one task

    # A rank without a trajectory of a task still has to know which conditions that task has.
    whole = {
        part.task: val_loaders[part.task] or make_val_loader(part, cache, train_cache=first, shared=False)
        for part, first, cache in zip(parts, firsts, seconds, strict=True)
    }
    alone = apart({task: loader for task, loader in whole.items() if loader is not None})
    return RunLoaders(
        train=mix(run.config, train_loaders, meter=meter),
        val={task: None if val_loaders[task] is None else one for task, one in alone.items()},
        loaders=loaders,
        shared=shares[0],
        reason="; ".join(f"{task}: {loader.plan.reason}" for task, loader in train_loaders.items()),
    )


@dataclass(slots=True)
class StageLoaders:
    """The loaders of the stage that a run is in: made again where a stage cuts other windows.

    The loop holds those that it began with, so others are planned into the memory that these leave.
    """

    config: Config
    make: Callable[[int | None], RunLoaders]
    """Makes loaders; the number is the horizon of training windows, None: that of the settings."""
    _served: list[RunLoaders] = field(default_factory=list[RunLoaders])
    _horizon: int | None = None

    @property
    def served(self) -> RunLoaders:
        """Those in use."""
        if not self._served:
            self._served.append(self.make(self._horizon))
        return self._served[0]

    def loader_of(self, stage: TrainStage) -> Loader | TaskMixture:
        """Return the training loader of a stage."""
        horizon = horizon_of(self.config, stage)
        if horizon != self._horizon:
            self._served.clear()
            self._horizon = horizon
        return self.served.train


def joined(run: Run, cache: Cache, split: str) -> Cache:
    """Return the cache with the columns of `data.join` added to its records.

    Raises:
        ConfigError: The settings lack columns, or do not fit the cache.
        SourceError: The table cannot be read, or does not fit the records.
    """
    join = run.config.data.join
    if join.table is None:
        return cache
    from stoker.store.joins import join_table  # few runs have a table

    if join.columns is None:
        raise ConfigError(f"data.join.table is {join.table}, and data.join.columns names none of its columns")
    rules = {name: getattr(join, name) for name in ("key", "columns", "name", "missing", "repeated")}
    on = build_source(run, split).keys() if join.on == "keys" else join.on
    return join_table(cache, join.table, on=on, **rules)


def make_loader(
    run: Run, cache: Cache, *, meter: StallMeter | None = None, shared: StepShare | None = None
) -> Loader:
    """Return the loader of the training cache in the settings; `shared`: this rank's part of it."""
    training, schema = run.config.training, cache.schema
    return Loader(
        cache,
        windows=run.windows_for(schema),
        shuffle=training.shuffle,
        partition=training.partition if shared is None else shared.partition,
        batch_size=batch_examples(run, schema) if shared is None else shared.batch_size,
        drop_last=None if shared is None else shared.drop_last,
        rank=run.ranks.rank,
        world_size=run.ranks.world_size,
        meter=meter,
        transforms=transforms_of(run.config, cache, training=True),
        **chosen_of(run.config, cache),
        **loader_arguments(run.config, run.device),
    )


def make_val_loader(
    run: Run, cache: Cache, *, train_cache: Cache | None = None, shared: bool = True
) -> Loader | None:
    """Return the loader of the validation cache, in order, in the memory that other loaders leave.

    It is normalized as training is, by the statistics of `train_cache`.

    At horizon 1 windows begin `time_stride` apart whatever `start_every` says: one begins where the last
    ended, so that they chain to the whole trajectories that are rolled out. Of a range of strides it is the
    smallest, of a range of horizons the largest. Ranks have whole trajectories, each its own, unless
    `shared` is False; None: this rank has no trajectory.
    """
    windows = run.windows_for(cache.schema)
    if windows is not None and windows.draws:  # at the smallest stride, whose windows chain
        least, most = windows.strides[0], windows.horizons[1]
        stride = (least, least) if isinstance(windows.stride, tuple) else least
        windows = replace(windows, stride=stride, horizon=most)  # with the conditions of training
    if windows is not None and windows.horizons[1] == 1:
        windows = replace(windows, start_every=windows.strides[0])
    own = own_trajectories(cache, run.ranks) if shared else None
    if own is not None and not len(own):
        return None
    return Loader(
        cache,
        windows=windows,
        batch_size=batch_examples(run, cache.schema),
        indices=own,
        transforms=transforms_of(run.config, train_cache or cache, training=False),
        **loader_arguments(run.config, run.device),
    )


def loader_arguments(config: Config, device: str | torch.device) -> dict[str, Any]:
    """Return the arguments that every loader of a configuration is given, whatever it serves."""
    training = config.training
    return {
        "tier": training.tier,
        "device": device,
        "seed": training.seed,
        "reserve_bytes": training.reserve_bytes,
        "verify": config.verify.on_read,
    }
