"""Datasets and loaders of the latent cache, as the earlier systems named them.

Batches are dicts that count trajectories, and pairs of a trajectory begin a stride apart, as then. Workers
read, and this process encodes: never a DataLoader's worker.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.data import Sampler

from stoker.encoders.grid import GridEncoder
from stoker.encoders.module import ModuleEncoder
from stoker.encoders.protocol import Encoder
from stoker.errors import ConfigError, ResourceError, SourceError
from stoker.extras.compat.caches import (
    CacheIncompleteError,
    EarlierReader,
    bytes_in_memory,
    check_sufficient_ram,
    stored_in,
)
from stoker.extras.compat.encoder import EarlierCall, EarlierGridEncoder, grid_coords
from stoker.extras.compat.settings import available_device, config_of
from stoker.loader import Loader, Mixture, Windows
from stoker.loader.batch import time_field
from stoker.precompute import precompute
from stoker.run.context import Run, batch_examples, trajectory_steps
from stoker.run.precompute import fill_caches
from stoker.schema import Field, Schema
from stoker.sources.files import canonical_split
from stoker.sources.protocol import Source
from stoker.sources.torch_dataset import TorchSource
from stoker.store import Cache
from stoker.units import MIB, format_bytes

SPLITS = ("train", "val", "valid", "test")


@dataclass(frozen=True, slots=True, kw_only=True)
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
    input_fields: dict[str, Tensor] | None = None
    """Raw fields at z0, `(base, N, C)` by name, where the cache keeps them; else None."""
    coords: Tensor | None = None
    """Places of their N points, `(base, N, 2)`, x and y from 0 to 1."""
    meta: dict[str, Any] | None = None
    """`grid_shape` of the fields."""
    task_name: str | None = None
    """The task: the cache's name without its split."""


class PreloadedCacheDataset(torch.utils.data.Dataset[LatentPair]):
    """A complete cache in memory, by trajectory.

    Every process that makes one has a copy. `loader()` gives the same pairs in batches, with one copy for all
    processes of the machine, and without a DataLoader.

    Args:
        cache_dir: A cache, one fingerprint's folder, or a folder of `sample_00000.pt` files, which are read
            in a limited child process.
        num_samples: How many records it must have.
        time_stride, rollout_horizon: How pairs are cut.

    Raises:
        CacheIncompleteError: (also a ValueError) Records are missing.
        SourceError: A file is not one of the earlier cache.
        ResourceError: It does not fit into memory.
    """

    cache: Cache | None
    """None for a folder of `.pt` files."""

    def __init__(
        self, cache_dir: str | Path, num_samples: int, time_stride: int = 1, rollout_horizon: int = 1
    ) -> None:
        stored = stored_in(cache_dir)
        if stored is None:
            raise CacheIncompleteError(f"Cache incomplete: 0/{num_samples} records in {cache_dir}")
        self.cache = stored if isinstance(stored, Cache) else None
        missing = [] if isinstance(stored, Cache) else [n for n in range(num_samples) if n not in stored]
        if len(stored) < num_samples or missing:
            there = len(stored) if isinstance(stored, Cache) else num_samples - len(missing)
            raise CacheIncompleteError(
                f"Cache incomplete: {there}/{num_samples} records in {cache_dir}",
                hint="`stoker precompute` encodes the missing ones",
            )
        needed = _bytes_needed(stored)
        if not check_sufficient_ram(needed / MIB):
            raise ResourceError(
                f"Insufficient RAM for PreloadedCacheDataset ({format_bytes(needed)} required, and a fifth "
                "to spare)",
                hint="Use stoker.Loader(cache), which serves from disk what does not fit",
            )
        self.windows = Windows(stride=time_stride, horizon=rollout_horizon, start_every=time_stride)
        if isinstance(stored, Cache):
            self.schema, self._records, self._count = stored.schema, _in_memory(stored), len(stored)
        else:
            paths = list(stored.values())
            self.schema, self._records = _of_files(paths)
            self._count = len(paths)
        self._time = time_field(self.schema, "latent" if self.cache is None else None)
        name = Path(cache_dir).name if self.cache is None else self.cache.name
        self.task_name = task_of_name(name)

    def __len__(self) -> int:
        """Return the number of trajectories."""
        return self._count

    def __getitem__(self, index: int) -> LatentPair:
        """Return the pairs of one trajectory.

        Raises:
            IndexError: No such trajectory.
            ValueError: It is too short for the horizon.
        """
        if not -len(self) <= index < len(self):
            raise IndexError(f"trajectory {index} does not exist: this cache has {len(self)}")
        record = {name: values[index] for name, values in self._records.items()}
        stride, horizon = self.windows.strides[0], self.windows.horizons[0]
        rows = record[self._time][::stride]
        base = len(rows) - horizon
        if base < 1:
            raise ConfigError(
                f"trajectory {index} has {len(rows)} states of stride {stride}, too few for a "
                f"horizon of {horizon}"
            )
        steps = [rows[k : k + base] for k in range(2, horizon + 1)]
        kept = {name for name in record if self.schema[name].kept}
        raw = {name: record[name][:: self.windows.stride][:base] for name in kept}
        return LatentPair(
            z0=rows[:base],
            z1=rows[1 : 1 + base],
            cond={n: self._condition(n, v, base) for n, v in record.items() if n not in {self._time, *kept}},
            future=torch.stack(steps, 1) if steps else None,
            task_name=self.task_name,
            **_of_points(raw),
        )

    def _condition(self, name: str, value: Tensor, base: int) -> Tensor:
        if self.schema[name].time:
            return value[:: self.windows.strides[0]][:base].reshape(base, -1)
        return value.reshape(1, -1).expand(base, -1)

    def loader(self, batch_size: int, **loader: Any) -> LatentPairLoader:
        """Return the pairs in batches of so many trajectories.

        Raises:
            ConfigError: This is a folder of `.pt` files, which have to be imported for that.
        """
        if self.cache is None:
            raise ConfigError(
                "a loader reads caches, and this folder holds sample_*.pt files",
                hint="Import them with `stoker cache adopt FOLDER --out CACHE_DIR --name NAME`, or use "
                "a torch DataLoader with collate_fn=latent_pair_collate",
            )
        pairs = max(1, self.windows.count(trajectory_steps(self.cache.schema)))
        own: dict[str, Any] = {"shuffle": True, **loader}
        made = Loader(self.cache, batch_size=batch_size * pairs, windows=self.windows, **own)
        return LatentPairLoader(made, {self.task_name: self.cache})


def task_of_name(name: str) -> str:
    """Return the task of a cache's name.

    >>> task_of_name("burgers1d_train"), task_of_name("latents")
    ('burgers1d', 'latents')
    """
    task, _, split = name.rpartition("_")
    return task if task and split in SPLITS else name


def _bytes_needed(stored: Cache | Mapping[int, Path]) -> int:
    """Bytes in memory; of earlier files those on disk, which are a little more: nothing in them is packed."""
    if isinstance(stored, Cache):
        return bytes_in_memory(stored)
    return sum(path.stat().st_size for path in stored.values())


def _in_memory(cache: Cache) -> dict[str, Any]:
    """Return every field of all records, stacked; of varying length: a list."""
    found: dict[str, list[Any]] = {name: [] for name in cache.schema}
    for batch in Loader(cache, batch_size=256, shuffle=False, tier="disk"):
        for name, values in found.items():
            values.extend(batch[name]) if cache.schema[name].ragged else values.append(batch[name])
    return {
        name: values if cache.schema[name].ragged else torch.cat(values) for name, values in found.items()
    }


def _of_files(paths: Sequence[Path]) -> tuple[Schema, dict[str, Any]]:
    """Return fields and values of earlier files, by field a list with an entry for each."""
    samples = EarlierReader().read(paths)
    names = samples[0].keys()
    for path, sample in zip(paths, samples, strict=True):
        if sample.keys() != names:
            raise SourceError(f"{path} has the fields {sorted(sample)}, {paths[0].name} {sorted(names)}")
    return _schema_of(samples[0]), {name: [sample[name] for sample in samples] for name in names}


def _of_points(raw: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return `input_fields`, `coords` and `meta` of raw fields `(B, H, W, C)`; empty without raw fields."""
    if not raw:
        return {}
    first = next(iter(raw.values()))
    grid = tuple(first.shape[1:-1])
    found: dict[str, Any] = {
        "input_fields": {name: value.reshape(len(value), -1, value.shape[-1]) for name, value in raw.items()},
        "meta": {"grid_shape": grid},
    }
    if len(grid) == 2:
        coords = grid_coords(grid).to(first.device)
        found["coords"] = coords.expand(len(first), *coords.shape[1:])
    return found


class LatentPairLoader:
    """Batches of a `Loader` or a `Mixture` as dicts of the earlier names.

    `z0`, `z1` `(B, L, D)`; `future` `(B, horizon - 1, L, D)` or None; `cond` `{name: (B, C)}`; `task_names`,
    a list of B; `index` `(B, 2)`. Where the cache keeps raw fields: `input_fields` `{name: (B, N, C)}` at
    z0, `coords` `(B, N, 2)`, `meta` with `grid_shape`; else None. B counts pairs.

    Everything else, as `set_epoch`, `state_dict`, `plan` and `dataset`, is that of `loader`.
    """

    def __init__(self, loader: Loader | Mixture, caches: Mapping[str, Cache]) -> None:
        self.loader = loader
        self._names = [*caches]
        self._kept = {n for cache in caches.values() for n, field in cache.schema.items() if field.kept}

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        return len(self.loader)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the batches of the next epoch."""
        for batch in self.loader:
            yield self._earlier(batch)

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # while it is unpickled
            raise AttributeError(name)
        return getattr(self.loader, name)

    def _earlier(self, batch: Any) -> dict[str, Any]:
        drawn = {f"{name}{at}" for name in self._kept for at in (0, 1)}
        raw = {name: batch.cond[f"{name}0"] for name in sorted(self._kept) if f"{name}0" in batch.cond}
        whose = getattr(batch, "tasks", None)
        names = self._names * len(batch.z0) if whose is None else [self._names[i] for i in whose.tolist()]
        return {
            "z0": batch.z0,
            "z1": batch.z1,
            "cond": {name: value for name, value in batch.cond.items() if name not in drawn},
            "future": batch.future,
            **dict.fromkeys(("input_fields", "coords", "meta")),
            **_of_points(raw),
            "task_names": names,
            "index": batch.index,
        }


class RawFieldDataset(torch.utils.data.Dataset[dict[str, Any]]):
    """Raw samples, with their latents where a cache has them.

    Args:
        dataset: A `Source`, or any map-style Dataset.
        cache_dir: The cache, or the folder of `sample_00000.pt` files, that may have some of them.
        field_name: The field that the encoder takes.
    """

    def __init__(
        self, dataset: Any, cache_dir: str | Path | None = None, *, field_name: str = "data"
    ) -> None:
        self.source = _as_source(dataset, field_name)
        self.field_name = field_name
        self._stored = None if cache_dir is None else stored_in(cache_dir)
        self._samples = EarlierReader()

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.source)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return `idx`, `cached`, `latent` or `fields`, `params`, `bc` and `cache_path`.

        Raises:
            SourceError: The sample's file is not one of the earlier cache. It stays where it is.
        """
        stored = self._stored
        item: dict[str, Any] = {"idx": index, "cached": stored is not None and index in stored}
        if item["cached"] and stored is not None:
            record = stored[index] if isinstance(stored, Cache) else self._samples.read([stored[index]])[0]
            item["latent"] = record.pop("latent", None)
        else:
            record = {
                name: torch.as_tensor(value, device="cpu") for name, value in self.source.read(index).items()
            }
            item["fields"] = record.pop(self.field_name)
        item["params"] = {n: value for n, value in record.items() if not n.startswith("bc")} or None
        item["bc"] = {n: value for n, value in record.items() if n.startswith("bc")} or None
        path = stored.path if isinstance(stored, Cache) else None if stored is None else stored.get(index)
        item["cache_path"] = None if path is None else str(path)
        return item


def build_parallel_latent_loader(  # noqa: PLR0913, PLR0917 - the earlier system's signature
    dataset: Any,
    encoder: Encoder | nn.Module,
    coords: Tensor | None = None,
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
) -> LatentPairLoader:
    """Latent pairs of `dataset`, encoded once: workers read, this process encodes, the cache is served.

    Args:
        dataset: A `Source`, a `RawFieldDataset`, or any map-style Dataset whose `field_name` has time first.
        encoder: An `Encoder`, a frozen module that takes time steps of the field, or one of the earlier form:
            `encoder({field_name: (B, N, C)}, coords, meta={"grid_shape": grid_shape})`.
        coords: `(1, N, 2)` for an encoder of the earlier form; None: x and y from 0 to 1.
        grid_shape: `(H, W)` for an encoder of the earlier form; compared with the grid of a `GridEncoder`.
        batch_size: Trajectories in a batch.
        num_workers: Processes that read; 0 reads in this process.
        cache_dir: None: `.stoker`.
        timeout: Seconds that reading one sample may take.
        pin_memory, prefetch_factor: Have no effect; a `Loader` decides for itself.
        name: Of the cache, in `cache_dir`.
        **loader: Further arguments of `Loader`: `rank`, `world_size`, `shuffle`, `seed`, ...

    Raises:
        ConfigError: `grid_shape` is missing, or not the encoder's.
        StokerError: As `precompute` and `Loader`.
    """
    source, device = _as_source(dataset, field_name), available_device(device)
    cache = precompute(
        source,
        _as_encoder(encoder, coords, grid_shape, field_name),
        ".stoker" if cache_dir is None else cache_dir,
        name=name,
        dtype=str(cache_dtype).removeprefix("torch.") if cache_dtype is not None else None,
        workers=num_workers,
        device=device,
        timeouts=None if timeout is None else {"read": timeout},
    )
    windows = Windows(stride=time_stride, horizon=rollout_horizon, start_every=time_stride)
    pairs = max(1, windows.count(trajectory_steps(cache.schema)))
    own: dict[str, Any] = {"pin_memory": pin_memory, "shuffle": True, **loader}
    made = Loader(cache, batch_size=batch_size * pairs, windows=windows, device=device, **own)
    return LatentPairLoader(made, {task_of_name(name): cache})


def _as_encoder(
    encoder: Encoder | nn.Module, coords: Tensor | None, grid: Sequence[int] | None, field_name: str
) -> Encoder:
    """Return the encoder of today: of the earlier `GridEncoder`, of an earlier module, or as it is."""
    if isinstance(encoder, GridEncoder) and grid is not None and tuple(grid) != encoder.grid:
        raise ConfigError(f"grid_shape is {tuple(grid)}, and the encoder's grid {encoder.grid}")
    if not isinstance(encoder, nn.Module) or isinstance(encoder, Encoder):
        return cast("Encoder", encoder)
    if "coords" in inspect.signature(encoder.forward).parameters:
        if grid is None:
            raise ConfigError("grid_shape is None, and the encoder takes coordinates", hint="Give (H, W)")
        if isinstance(encoder, EarlierGridEncoder):
            return encoder.for_grid(grid, field_name)
        encoder = EarlierCall(encoder, coords, grid, field_name)
    return ModuleEncoder(encoder, field=field_name, time="steps")


def build_latent_pair_loader(cfg: Any, split: str | None = None, **loader: Any) -> LatentPairLoader:
    """Return the loader of a configuration, its cache filled first; of several tasks, a mixture.

    Args:
        cfg: A mapping, an OmegaConf object, a YAML file, or a `Config`. The first three are read as they were
            meant: `training.batch_size` counts trajectories, `training.num_workers` processes that read.
            With `training.use_inverse_losses` batches have `input_fields`, `coords` and `meta`.
        split: None: the first of `data.split`.
        **loader: Further arguments of `Loader`.

    Raises:
        ConfigError: A setting is nearly one that is known, or has a wrong value.
        StokerError: As `fill_caches` and `Loader`.
    """
    config = config_of(cfg, keep_fields=True)
    split = canonical_split(split or config.data.wanted_splits[0])
    loaders: dict[str, Loader] = {}
    for part in Run(config).parts():
        own = part.config
        cache = fill_caches(part, [split], training="windows")[0].cache
        settings: dict[str, Any] = {
            "tier": own.training.tier,
            "seed": own.training.seed,
            "device": part.device,
            **loader,
        }
        if "shuffle" not in loader:
            settings.setdefault("shuffle", own.training.shuffle if split == "train" else False)
        size = batch_examples(part, cache.schema)
        loaders[part.task] = Loader(cache, batch_size=size, windows=part.windows, **settings)
    caches = {task: one.dataset for task, one in loaders.items()}
    if len(loaders) == 1:
        return LatentPairLoader(next(iter(loaders.values())), caches)
    return LatentPairLoader(Mixture([*loaders.values()], names=[*loaders], mode="concat"), caches)


def latent_pair_collate(pairs: Sequence[LatentPair]) -> dict[str, Any]:
    """Return pairs of several trajectories as one batch, one after another.

    Raises:
        ConfigError: They differ in conditions, horizon, raw fields or grid, so nothing could be told apart.
    """
    kinds = {
        (tuple(pair.cond), pair.future is None, tuple(pair.input_fields or ()), str(pair.meta))
        for pair in pairs
    }
    if len(kinds) > 1:
        raise ConfigError(
            f"trajectories of one batch have different conditions, horizons or grids ({sorted(kinds)})",
            hint="Use stoker.Mixture, which aligns them by name and says which are there",
        )
    first = pairs[0]
    futures = [pair.future for pair in pairs if pair.future is not None]
    coords = [pair.coords for pair in pairs if pair.coords is not None]
    raw = first.input_fields
    return {
        "z0": torch.cat([pair.z0 for pair in pairs]),
        "z1": torch.cat([pair.z1 for pair in pairs]),
        "cond": {name: torch.cat([pair.cond[name] for pair in pairs]) for name in first.cond},
        "future": torch.cat(futures) if futures else None,
        "input_fields": raw and {n: torch.cat([(p.input_fields or {})[n] for p in pairs]) for n in raw},
        "coords": torch.cat(coords) if coords else None,
        "meta": first.meta,
        "task_names": [pair.task_name for pair in pairs for _ in range(len(pair.z0))],
    }


def _as_source(dataset: Any, field_name: str) -> Source:
    if isinstance(dataset, RawFieldDataset):
        return dataset.source
    return dataset if isinstance(dataset, Source) else TorchSource(dataset, time=(field_name,))


class MultiTaskDistributedSampler(Sampler[int]):
    """Indices into a `ConcatDataset` of several tasks for one rank; every rank has equally many of each task.

    `stoker.Mixture(caches, rank=..., world_size=...)` needs no sampler, and never repeats a sample.

    Args:
        task_sizes: Samples of each dataset, in their order.
        num_replicas, rank: Ranks in all, and this one; None: as `torch.distributed` says, or 1 and 0.
        shuffle: Other orders in each epoch, see `set_epoch`.
        seed: Decides them, and must be the same on all ranks.
        drop_last: Leave out what does not divide among the ranks; else the first samples come twice.

    Raises:
        ConfigError: The rank does not exist, or `drop_last` would leave nothing of a task.
    """

    def __init__(
        self,
        task_sizes: Sequence[int],
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        ready = torch.distributed.is_available() and torch.distributed.is_initialized()
        self.num_replicas = num_replicas or (torch.distributed.get_world_size() if ready else 1)
        self.rank = (torch.distributed.get_rank() if ready else 0) if rank is None else rank
        self.task_sizes, self.shuffle, self.seed, self.epoch = tuple(task_sizes), shuffle, seed, 0
        if not 0 <= self.rank < self.num_replicas:
            raise ConfigError(f"rank is {self.rank}, expected 0 to {self.num_replicas - 1}")
        if min(self.task_sizes, default=0) < 1:
            raise ConfigError(f"task_sizes is {list(task_sizes)}", hint="Give each task at least one sample")
        of = math.floor if drop_last else math.ceil
        self._counts = [of(size / self.num_replicas) for size in self.task_sizes]
        if not all(self._counts):
            raise ConfigError(
                f"task_sizes is {list(task_sizes)}, and drop_last leaves nothing of a task of fewer samples "
                f"than {self.num_replicas} ranks",
                hint="Leave drop_last out",
            )

    def set_epoch(self, epoch: int) -> None:
        """Take the order of this epoch from now on; give all ranks the same."""
        self.epoch = epoch

    def __len__(self) -> int:
        """Return the number of indices of this rank, as many as every other's."""
        return sum(self._counts)

    def __iter__(self) -> Iterator[int]:
        """Yield indices of this rank."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        found: list[Tensor] = []
        first = 0
        for size, count in zip(self.task_sizes, self._counts, strict=True):
            order = torch.randperm(size, generator=generator) if self.shuffle else torch.arange(size)
            places = torch.arange(count) * self.num_replicas + self.rank
            found.append(order[places % size] + first)
            first += size
        own = torch.cat(found)
        return iter((own[torch.randperm(len(own), generator=generator)] if self.shuffle else own).tolist())


def _schema_of(tensors: Mapping[str, Tensor]) -> Schema:
    """Return the fields of a sample: whatever is as long as `latent` along axis 0 has time with it."""
    steps = len(tensors["latent"])
    return {
        name: Field(
            shape=tuple(tensor.shape),
            dtype=str(tensor.dtype).removeprefix("torch."),
            time=tensor.dim() > 0 and len(tensor) == steps,
        )
        for name, tensor in sorted(tensors.items())
    }
