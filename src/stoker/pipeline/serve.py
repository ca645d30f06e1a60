"""The loaders of a run: which records the training loop is given, from where, and in which order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from stoker.config import Config
from stoker.errors import ConfigError
from stoker.loader import Loader
from stoker.monitor import StallMeter
from stoker.pipeline.augment import chosen_of, transforms_of
from stoker.pipeline.build import build_source, device_of, tasks_of
from stoker.pipeline.diary import run_dir_of
from stoker.pipeline.locate import batch_size_of, trajectory_steps, windows_for
from stoker.pipeline.mixed import OneTask, TaskPairs, apart, mix
from stoker.pipeline.stages import horizon_of
from stoker.pipeline.together import Shared, own_trajectories, share_steps
from stoker.scale.ranks import ALONE, Ranks
from stoker.sources.files import canonical_split
from stoker.store import Cache
from stoker.store.join import join_table
from stoker.train.config import Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What the loop trains and validates on."""

    train: Loader | TaskPairs
    val: Loader | dict[str, OneTask | None] | None
    loaders: tuple[Loader, ...]
    """All that records come from, those of training first."""
    shared: Shared
    """This rank's part of the run; of several tasks, of the first."""
    reason: str
    """Why records are served from where they are."""


def serve(
    config: Config,
    caches: Sequence[Cache],
    *,
    digest: str = "",
    meter: StallMeter | None = None,
    ranks: Ranks = ALONE,
    horizon: int | None = None,
) -> Served:
    """Loaders over ready caches; of several tasks, mixed for training and apart for validation.

    Args:
        caches: For training and for validation, of each task in turn.
        digest: Of the run's settings: one that was interrupted keeps its global batch.
        meter, ranks: Told how long batches were waited for; the processes that train together.
        horizon: Of training windows; None: `training.rollout_horizon`.
    Raises:
        ConfigError: The settings of the mixture do not fit the tasks, or the ranks the batch.
    """
    splits = (canonical_split(config.data.wanted_splits[0]), "val") * len(tasks_of(config))
    caches = [
        joined(config.for_task(task), cache, task, split)
        for task, split, cache in zip(each_twice(config), splits, caches, strict=True)
    ]
    owns = {task: _in_run_of(config, config.for_task(task)) for task in tasks_of(config)}
    parts = [share_steps(o, digest, c, ranks) for o, c in zip(owns.values(), caches[::2], strict=True)]
    train_loaders = {
        task: make_loader(_reaching(own, horizon), cache, meter=meter, ranks=ranks, shared=part)
        for (task, own), cache, part in zip(owns.items(), caches[::2], parts, strict=True)
    }
    val_loaders = {
        task: make_val_loader(own, cache, train_cache=beside, ranks=ranks)
        for (task, own), beside, cache in zip(owns.items(), caches[::2], caches[1::2], strict=True)
    }
    known = (loader for loader in val_loaders.values() if loader is not None)
    loaders = (*train_loaders.values(), *known)
    if len(owns) == 1:
        (val,), one = val_loaders.values(), loaders[0]
        return Served(train=one, val=val, loaders=loaders, shared=parts[0], reason=one.plan.reason)
    # A rank without a trajectory of a task still has to know which conditions that task has.
    whole = {
        task: val_loaders[task] or make_val_loader(own, cache, train_cache=beside)
        for (task, own), beside, cache in zip(owns.items(), caches[::2], caches[1::2], strict=True)
    }
    alone = apart({task: loader for task, loader in whole.items() if loader is not None})
    return Served(
        train=mix(config, train_loaders, meter=meter),
        val={task: None if val_loaders[task] is None else one for task, one in alone.items()},
        loaders=loaders,
        shared=parts[0],
        reason="; ".join(f"{task}: {loader.plan.reason}" for task, loader in train_loaders.items()),
    )


@dataclass(slots=True)
class StageLoaders:
    """The loaders of the stage that a run is in: made again where a stage cuts other windows.

    The loop holds those that it began with, so others are planned into the memory that these leave.
    """

    config: Config
    make: Callable[[Config, int | None], Served]
    """Makes loaders; the number is the horizon of training windows, None: that of the settings."""
    _served: list[Served] = field(default_factory=list[Served])
    _horizon: int | None = None

    @property
    def served(self) -> Served:
        """Those in use."""
        if not self._served:
            self._served.append(self.make(self.config, self._horizon))
        return self._served[0]

    def loader_of(self, stage: Stage) -> Loader | TaskPairs:
        """The training loader of a stage."""
        horizon = horizon_of(self.config, stage)
        if horizon != self._horizon:
            self._served.clear()
            self._horizon = horizon
        return self.served.train


def each_twice(config: Config) -> list[str]:
    """Each task for its training cache, and again for its validation cache."""
    return [task for task in tasks_of(config) for _ in range(2)]


def joined(config: Config, cache: Cache, task: str, split: str) -> Cache:
    """The cache with the columns of `data.join` beside its records.

    Raises:
        ConfigError: The settings lack columns, or do not fit the cache.
        SourceError: The table cannot be read, or does not fit the records.
    """
    join = config.data.join
    if join.table is None:
        return cache
    if join.columns is None:
        raise ConfigError(f"data.join.table is {join.table}, and data.join.columns names none of its columns")
    rules = {name: getattr(join, name) for name in ("key", "columns", "name", "missing", "repeated")}
    on = build_source(config, task, split).keys() if join.on == "keys" else join.on
    return join_table(cache, join.table, on=on, **rules)


def _in_run_of(config: Config, own: Config) -> Config:
    """The settings of a task, in the folder of the whole run."""
    training = own.training.model_copy(update={"run_dir": str(run_dir_of(config))})
    return own if own is config else own.model_copy(update={"training": training})


def _reaching(config: Config, horizon: int | None) -> Config:
    """The settings with another horizon of windows."""
    if horizon is None:
        return config
    training = config.training.model_copy(update={"rollout_horizon": horizon})
    return config.model_copy(update={"training": training})


def make_loader(
    config: Config,
    cache: Cache,
    *,
    meter: StallMeter | None = None,
    ranks: Ranks = ALONE,
    shared: Shared | None = None,
) -> Loader:
    """The loader of the training cache that the settings describe; `shared`: this rank's part of it."""
    return Loader(
        cache,
        windows=windows_for(config, cache.schema),
        order=config.training.order if shared is None else shared.order,
        batch_size=_batch_size(config, cache) if shared is None else shared.batch_size,
        drop_last=None if shared is None else shared.drop_last,
        rank=ranks.rank,
        world=ranks.world,
        meter=meter,
        transforms=transforms_of(config, cache, training=True),
        **chosen_of(config, cache),
        **_common(config),
    )


def make_val_loader(
    config: Config, cache: Cache, *, train_cache: Cache | None = None, ranks: Ranks = ALONE
) -> Loader | None:
    """The loader of the validation cache, in order, in the memory that other loaders leave.

    It is normalized as training is, by the statistics of `train_cache`.

    At horizon 1 windows begin `time_stride` apart whatever `start_every` says: one begins where the last
    ended, so that they chain to the whole trajectories that are rolled out. Of a range of strides it is the
    smallest, of a range of horizons the largest. Ranks have whole trajectories,
    each its own; None: there is none for this one.
    """
    windows = windows_for(config, cache.schema)
    if windows is not None and windows.draws:  # at the smallest stride, whose windows chain
        least, most = windows.strides[0], windows.horizons[1]
        stride = (least, least) if isinstance(windows.stride, tuple) else least
        windows = replace(windows, stride=stride, horizon=most)  # with the conditions of training
    if windows is not None and windows.horizons[1] == 1:
        windows = replace(windows, start_every=windows.strides[0])
    own = own_trajectories(cache, ranks)
    if own is not None and not len(own):
        return None
    return Loader(
        cache,
        windows=windows,
        order="sequential",
        batch_size=_batch_size(config, cache),
        indices=own,
        transforms=transforms_of(config, train_cache or cache, training=False),
        **_common(config),
    )


def _batch_size(config: Config, cache: Cache) -> int:
    return batch_size_of(config, trajectory_steps(cache.schema))


def _common(config: Config) -> dict[str, Any]:
    """What both loaders are told."""
    training = config.training
    return {
        "tier": training.tier,
        "device": device_of(config),
        "seed": training.seed,
        "reserve_bytes": training.reserve_bytes,
        "verify": config.verify.on_read,
    }
