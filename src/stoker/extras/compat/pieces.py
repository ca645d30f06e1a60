"""Parts that training scripts of the earlier latent cache used: encoder, sampler, worker count, storage."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Sampler

from stoker.encoders.grid import GridEncoder
from stoker.errors import ConfigError, EncoderError
from stoker.plan.resources import probe, storage_of
from stoker.units import GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class GridEncoderConfig:
    """Settings of `GridEncoder`, by their earlier names."""

    latent_len: int
    """Tokens of one time step."""
    latent_dim: int
    """Numbers in one token."""
    field_channels: Mapping[str, int]
    """Channels of each field, which are encoded together in this order."""
    patch_size: int = 4
    """Points of a patch along each axis; along x alone where the grid has one row."""
    stem_width: int | None = None
    """Has no effect: the encoder is a projection."""
    use_fourier_features: bool = True
    """Add the place of a patch to its token."""
    fourier_frequencies: tuple[int, ...] = (1, 2)
    """Waves across the domain."""
    seed: int = 0
    """Decides the weights; in the earlier system each process drew its own."""


class EarlierGridEncoder(nn.Module):
    """Frozen encoder of grids with the earlier call; `stoker.GridEncoder` does the work.

    Its weights follow from the settings and the seed, so that every process encodes alike. Weights that an
    earlier version trained or drew are others.

    Example:
        >>> config = GridEncoderConfig(latent_len=4, latent_dim=8, field_channels={"u": 1})
        >>> encoder = EarlierGridEncoder(config)
        >>> encoder({"u": torch.zeros(2, 32, 1)}, meta={"grid_shape": (1, 32)}).shape
        torch.Size([2, 4, 8])
    """

    def __init__(self, config: GridEncoderConfig) -> None:
        super().__init__()
        self.config = config
        self._made: dict[tuple[int, int], GridEncoder] = {}

    def for_grid(self, grid_shape: Sequence[int], field: str = "data") -> GridEncoder:
        """Return the encoder of today for a grid `(H, W)` and a field `(T, H, W, C)`."""
        own, (height, width) = self.config, grid_shape
        patch = (1 if height == 1 else own.patch_size, own.patch_size)
        return GridEncoder(
            channels=sum(own.field_channels.values()),
            grid=(height, width),
            patch=patch,
            tokens=own.latent_len,
            dim=own.latent_dim,
            fourier=tuple(own.fourier_frequencies) if own.use_fourier_features else (),
            seed=own.seed,
            field=field,
        )

    def forward(
        self,
        fields: Mapping[str, Tensor],
        coords: Tensor | None = None,
        *,
        params: object = None,
        bc: object = None,
        geom: object = None,
        meta: Mapping[str, Any] | None = None,
    ) -> Tensor:
        """Return latents `(B, L, D)` float32 of fields `(B, H * W, C)` on the grid `meta["grid_shape"]`.

        `coords`, `params`, `bc` and `geom` have no effect, as before: positions follow from the grid.

        Raises:
            EncoderError: A field or the grid is missing, or they do not fit together.
        """
        names = [*self.config.field_channels]
        if missing := [name for name in names if name not in fields]:
            raise EncoderError(f"fields has {sorted(fields)}, and lacks {', '.join(missing)}")
        if meta is None or "grid_shape" not in meta:
            raise EncoderError('meta lacks grid_shape. Give meta={"grid_shape": (H, W)}')
        height, width = (int(size) for size in meta["grid_shape"])
        values = torch.cat([fields[name] for name in names], -1)
        if values.dim() != 3 or values.shape[1] != height * width:
            raise EncoderError(f"fields are {tuple(values.shape)}, expected (B, {height * width}, C)")
        made = self._made.get((height, width))
        if made is None:
            made = self._made[height, width] = self.for_grid((height, width))
        grid = values.reshape(1, len(values), height, width, -1)
        return made.encode({"data": grid.to(torch.float32)})["latent"][0]


class EarlierCall(nn.Module):
    """A module of the earlier form, `encoder(fields, coords, meta=...)`, called with steps of a field."""

    def __init__(self, encoder: nn.Module, coords: Tensor | None, grid: Sequence[int], field: str) -> None:
        super().__init__()
        self.encoder = encoder
        self.grid, self.field = tuple(grid), field
        self.register_buffer("coords", grid_coords(grid) if coords is None else coords.reshape(1, -1, 2))

    def forward(self, steps: Tensor) -> Tensor:
        """Return latents `(n, L, D)` of `(n, *step)`."""
        points = math.prod(self.grid)
        coords = self.get_buffer("coords").expand(len(steps), points, 2)
        fields = {self.field: steps.reshape(len(steps), points, -1)}
        return self.encoder(fields, coords, meta={"grid_shape": self.grid})


def grid_coords(grid: Sequence[int]) -> Tensor:
    """Return the places of all points of a grid `(H, W)` as `(1, H * W, 2)` float32: x and y from 0 to 1."""
    height, width = grid
    y, x = (torch.linspace(0, 1, n, device="cpu") for n in (height, width))
    return torch.stack([x.expand(height, width), y[:, None].expand(height, width)], -1).reshape(1, -1, 2)


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
            raise ConfigError(f"task_sizes is {list(task_sizes)}. Give each task at least one sample")
        of = math.floor if drop_last else math.ceil
        self._counts = [of(size / self.num_replicas) for size in self.task_sizes]
        if not all(self._counts):
            raise ConfigError(
                f"task_sizes is {list(task_sizes)}, and drop_last leaves nothing of a task of fewer samples "
                f"than {self.num_replicas} ranks. Leave drop_last out"
            )

    def set_epoch(self, epoch: int) -> None:
        """Take the order of this epoch from now on; give all ranks the same."""
        self.epoch = epoch

    def __len__(self) -> int:
        """Indices of this rank, as many as every other's."""
        return sum(self._counts)

    def __iter__(self) -> Iterator[int]:
        """Indices of this rank."""
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


def get_optimal_workers(
    requested: int | None = None, encoder_size_mb: float = 200, batch_size: int = 1
) -> int:
    """Return how many workers memory and processors allow, at most 8 and at most `requested`.

    Counts what this process may use: its control group's limits and its processors, not the machine's. 0 asks
    for none. `precompute.workers: null` finds a number by measuring.
    """
    if requested == 0:
        return 0
    found = probe()
    each = (encoder_size_mb / 1000 + 0.1 * batch_size) * GIB
    most = max(1, min(int(found.host_bytes / each), int(found.cpus), 8))
    return most if requested is None else min(requested, most)


def is_network_storage(path: str | Path) -> bool:
    """Return whether a path is on a file system whose data is on another machine; `data.stage` copies it."""
    where = storage_of(Path(path))
    return where is not None and where.network
