"""Datasets and loaders of the latent cache, as the earlier systems named them.

Their batches counted trajectories, and pairs of a trajectory began a stride apart; both hold here. Readers
read, and this process encodes: never a DataLoader's worker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from stoker.compat.caches import (
    CacheIncompleteError,
    bytes_in_memory,
    check_sufficient_ram,
    config_of,
    open_or_none,
    opened,
)
from stoker.encoders.grid import GridEncoder
from stoker.encoders.module import ModuleEncoder
from stoker.encoders.protocol import Encoder
from stoker.errors import ConfigError, ResourceError
from stoker.loader import Loader, Mixture, Windows
from stoker.loader.windows import time_field
from stoker.pipeline.build import device_of, tasks_of
from stoker.pipeline.locate import batch_size_of, trajectory_steps, windows_of
from stoker.pipeline.precompute import fill_caches
from stoker.precompute import precompute
from stoker.sources.files import canonical_split
from stoker.sources.protocol import Source
from stoker.sources.torch_dataset import TorchSource
from stoker.store import Cache
from stoker.units import MIB, format_bytes


@dataclass(frozen=True, slots=True)
class LatentPair:
    """All pairs of one trajectory: states and what comes a stride later."""

    z0: Tensor
    """`(base, L, D)`."""
    z1: Tensor
    """`(base, L, D)`."""
    cond: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    """`(base, C)` by name."""
    future: Tensor | None = None
    """`(base, horizon - 1, L, D)`; None at horizon 1."""
    task_name: str | None = None
    """The cache's name."""


class PreloadedCacheDataset(torch.utils.data.Dataset[LatentPair]):
    """A whole cache in memory, by trajectory.

    Every process that makes one has a copy. `loader()` gives the same pairs in batches, with one copy for all
    processes of the machine, and without a DataLoader.

    Args:
        cache_dir: The cache, or one recipe's folder.
        num_samples: How many records it must have.
        time_stride, rollout_horizon: How pairs are cut.

    Raises:
        CacheIncompleteError: (also a ValueError) Records are missing.
        ResourceError: It does not fit into memory.
    """

    def __init__(
        self, cache_dir: str | Path, num_samples: int, time_stride: int = 1, rollout_horizon: int = 1
    ) -> None:
        self.cache = opened(cache_dir)
        if len(self.cache) < num_samples:
            raise CacheIncompleteError(
                f"Cache incomplete: {len(self.cache)}/{num_samples} records in {self.cache.path}. "
                "`stoker precompute` encodes the missing ones"
            )
        needed = bytes_in_memory(self.cache)
        if not check_sufficient_ram(needed / MIB):
            raise ResourceError(
                f"Insufficient RAM for PreloadedCacheDataset ({format_bytes(needed)} required, and a fifth "
                "to spare). Use stoker.Loader(cache), which serves from disk what does not fit"
            )
        self.windows = Windows(stride=time_stride, horizon=rollout_horizon, start_every=time_stride)
        self._time = time_field(self.cache.schema, None)
        self._records = _in_memory(self.cache)

    def __len__(self) -> int:
        """Trajectories."""
        return len(self.cache)

    def __getitem__(self, index: int) -> LatentPair:
        """The pairs of one trajectory.

        Raises:
            IndexError: No such trajectory.
            ValueError: It is too short for the horizon.
        """
        if not -len(self) <= index < len(self):
            raise IndexError(f"trajectory {index} does not exist: this cache has {len(self)}")
        record = {name: values[index] for name, values in self._records.items()}
        rows, horizon = record[self._time][:: self.windows.stride], self.windows.horizon
        base = len(rows) - horizon
        if base < 1:
            raise ConfigError(
                f"trajectory {index} has {len(rows)} states of stride {self.windows.stride}, too few for a "
                f"horizon of {horizon}"
            )
        steps = [rows[k : k + base] for k in range(2, horizon + 1)]
        return LatentPair(
            z0=rows[:base],
            z1=rows[1 : 1 + base],
            cond={n: self._condition(n, value, base) for n, value in record.items() if n != self._time},
            future=torch.stack(steps, 1) if steps else None,
            task_name=self.cache.name,
        )

    def _condition(self, name: str, value: Tensor, base: int) -> Tensor:
        if self.cache.schema[name].time:
            return value[:: self.windows.stride][:base].reshape(base, -1)
        return value.reshape(1, -1).expand(base, -1)

    def loader(self, batch_size: int, **loader: Any) -> Loader:
        """The pairs in batches of so many trajectories."""
        pairs = max(1, self.windows.count(trajectory_steps(self.cache.schema)))
        return Loader(self.cache, batch_size=batch_size * pairs, windows=self.windows, **loader)


def _in_memory(cache: Cache) -> dict[str, Any]:
    """Every field of all records, stacked; of varying length: a list."""
    found: dict[str, list[Any]] = {name: [] for name in cache.schema}
    for batch in Loader(cache, batch_size=256, order="sequential", tier="disk"):
        for name, values in found.items():
            values.extend(batch[name]) if cache.schema[name].ragged else values.append(batch[name])
    return {
        name: values if cache.schema[name].ragged else torch.cat(values) for name, values in found.items()
    }


class RawFieldDataset(torch.utils.data.Dataset[dict[str, Any]]):
    """Raw samples, with their latents where a cache has them.

    Args:
        dataset: A `Source`, or any map-style Dataset.
        cache_dir: The cache that may have some of them.
        field_name: The field that the encoder takes.
    """

    def __init__(
        self, dataset: Any, cache_dir: str | Path | None = None, *, field_name: str = "data"
    ) -> None:
        self.source = _as_source(dataset, field_name)
        self.field_name = field_name
        self._cache = None if cache_dir is None else open_or_none(cache_dir)

    def __len__(self) -> int:
        """Samples."""
        return len(self.source)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """`idx`, `cached`, `latent` or `fields`, `params`, `bc` and `cache_path`."""
        cache = self._cache
        cached = cache is not None and index in cache
        item: dict[str, Any] = {"idx": index, "cached": cached}
        if cached and cache is not None:
            record = cache[index]
            item["latent"] = record.pop("latent", None)
        else:
            record = {
                name: torch.as_tensor(value, device="cpu") for name, value in self.source.read(index).items()
            }
            item["fields"] = record.pop(self.field_name)
        item["params"] = {n: value for n, value in record.items() if not n.startswith("bc")} or None
        item["bc"] = {n: value for n, value in record.items() if n.startswith("bc")} or None
        item["cache_path"] = None if cache is None else str(cache.path)
        return item


def build_parallel_latent_loader(  # noqa: PLR0913, PLR0917 - the earlier system's signature
    dataset: Any,
    encoder: Encoder | nn.Module,
    coords: Any = None,
    grid_shape: Sequence[int] | None = None,
    field_name: str = "data",
    device: str | torch.device = "cpu",
    batch_size: int = 16,
    num_workers: int = 4,
    cache_dir: str | Path | None = None,
    cache_dtype: str | torch.dtype | None = "float16",
    time_stride: int = 1,
    rollout_horizon: int = 1,
    pin_memory: bool = True,
    prefetch_factor: int | None = 2,
    timeout: float | None = None,
    *,
    name: str = "latents",
    **loader: Any,
) -> Loader:
    """Latent pairs of `dataset`, encoded once: readers read, this process encodes, the cache is served.

    Args:
        dataset: A `Source`, a `RawFieldDataset`, or any map-style Dataset whose `field_name` has time first.
        encoder: An `Encoder`, or a frozen module that takes time steps of the field.
        coords: Has no effect: an encoder that needs coordinates makes them of its own grid.
        grid_shape: Compared with the grid of a `GridEncoder`.
        batch_size: Trajectories in a batch.
        num_workers: Readers; 0 reads in this process.
        cache_dir: None: `.stoker`.
        timeout: Seconds that reading one sample may take.
        pin_memory, prefetch_factor: Have no effect; a `Loader` decides for itself.
        name: Of the cache, in `cache_dir`.
        **loader: Further arguments of `Loader`: `rank`, `world`, `shuffle`, `seed`, ...

    Raises:
        ConfigError: `grid_shape` is not the encoder's.
        StokerError: As `precompute` and `Loader`.
    """
    source = _as_source(dataset, field_name)
    if isinstance(encoder, GridEncoder) and grid_shape is not None and tuple(grid_shape) != encoder.grid:
        raise ConfigError(f"grid_shape is {tuple(grid_shape)}, and the encoder's grid {encoder.grid}")
    if isinstance(encoder, nn.Module) and not isinstance(encoder, Encoder):
        encoder = ModuleEncoder(encoder, field=field_name, time="steps")
    cache = precompute(
        source,
        cast("Encoder", encoder),
        ".stoker" if cache_dir is None else cache_dir,
        name=name,
        dtype=str(cache_dtype).removeprefix("torch.") if cache_dtype is not None else None,
        readers=num_workers,
        device=str(device),
        deadlines=None if timeout is None else {"read": timeout},
    )
    windows = Windows(stride=time_stride, horizon=rollout_horizon, start_every=time_stride)
    pairs = max(1, windows.count(trajectory_steps(cache.schema)))
    own: dict[str, Any] = {"pin_memory": pin_memory, **loader}
    return Loader(cache, batch_size=batch_size * pairs, windows=windows, device=str(device), **own)


def build_latent_pair_loader(cfg: Any, split: str | None = None, **loader: Any) -> Loader | Mixture:
    """The loader that a configuration describes, its cache filled first; of several tasks, a `Mixture`.

    Args:
        cfg: A mapping, an OmegaConf object, a YAML file, or a `Config`. In the first three
            `training.batch_size` counts trajectories, as it did.
        split: None: the first of `data.split`.
        **loader: Further arguments of `Loader`.

    Raises:
        ConfigError: A setting is unknown; names the nearest.
        StokerError: As `fill_caches` and `Loader`.
    """
    config = config_of(_in_trajectories(cfg))
    split = canonical_split(split or config.data.wanted_splits[0])
    loaders: dict[str, Loader] = {}
    for task in tasks_of(config):
        own = config.for_task(task)
        cache = fill_caches(own, [split], training="windows")[0].cache
        settings: dict[str, Any] = {
            "tier": own.training.tier,
            "seed": own.training.seed,
            "device": device_of(own),
            "order": own.training.order if split == "train" else "sequential",
            **loader,
        }
        size = batch_size_of(own, trajectory_steps(cache.schema))
        loaders[task] = Loader(cache, batch_size=size, windows=windows_of(own), **settings)
    if len(loaders) == 1:
        return next(iter(loaders.values()))
    return Mixture([*loaders.values()], names=[*loaders], mode="concat")


def _in_trajectories(cfg: Any) -> Any:
    """Earlier settings with `batch_size` under the name that it has here."""
    training = cfg.get("training") if isinstance(cfg, Mapping) else None
    if not isinstance(training, Mapping) or "batch_size" not in training:
        return cfg
    training = {("batch_trajectories" if n == "batch_size" else n): v for n, v in training.items()}
    return {**cfg, "training": training}


def latent_pair_collate(pairs: Sequence[LatentPair]) -> dict[str, Any]:
    """Pairs of several trajectories as one batch, one after another.

    Raises:
        ConfigError: They differ in conditions or horizon, so nothing could be told apart.
    """
    names = {tuple(pair.cond) for pair in pairs}
    if len(names) > 1 or len({pair.future is None for pair in pairs}) > 1:
        raise ConfigError(
            f"trajectories of one batch have different conditions or horizons ({sorted(names)}). Use "
            "stoker.Mixture, which aligns them by name and says which are there"
        )
    futures = [pair.future for pair in pairs if pair.future is not None]
    return {
        "z0": torch.cat([pair.z0 for pair in pairs]),
        "z1": torch.cat([pair.z1 for pair in pairs]),
        "cond": {name: torch.cat([pair.cond[name] for pair in pairs]) for name in pairs[0].cond},
        "future": torch.cat(futures) if futures else None,
        "task_names": [pair.task_name for pair in pairs for _ in range(len(pair.z0))],
    }


def _as_source(dataset: Any, field_name: str) -> Source:
    if isinstance(dataset, RawFieldDataset):
        return dataset.source
    return dataset if isinstance(dataset, Source) else TorchSource(dataset, time=(field_name,))
