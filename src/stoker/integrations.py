"""Adapt loaders to frameworks that ask for more than an iterable with state (docs/how-to/trainers.md).

`as_dataloader` puts a loader behind the type `torch.utils.data.DataLoader`. `to_numpy` and `to_jax` hand the
tensors of a batch to other libraries without copying them.

Batches go by their number in the epoch: a DataLoader without workers has a sampler that counts, and a dataset
whose item `n` is batch `n`. So what frameworks do to skip batches on a resume (a sampler that leaves out the
first ones, as `accelerate.skip_first_batches`) is a change of position here, and reads nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from importlib import import_module
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from stoker.errors import ConfigError
from stoker.loader import Loader
from stoker.loader.batch import map_tensors
from stoker.loader.loader import place_of

__all__ = ["as_dataloader", "to_jax", "to_numpy"]


def to_numpy(batch: Any) -> Any:
    """Return a batch with NumPy arrays in place of tensors, over the same memory, on the CPU.

    A `Loader` calls it for each batch if it is the last of `transforms`.

    Args:
        batch: What a loader hands out.

    Returns:
        A batch of the same kind. bfloat16, which NumPy lacks, comes as float32, a copy.

    Raises:
        ConfigError: A tensor is on another device.

    Examples:
        >>> import stoker, torch
        >>> from stoker.integrations import to_numpy
        >>> loader = stoker.cached([{"x": torch.ones(2)}] * 6, batch_size=4, transforms=[to_numpy])
        >>> type(next(iter(loader))["x"]).__name__
        'ndarray'
    """
    return map_tensors(batch, _numpy)


def _numpy(tensor: Tensor) -> Any:
    if tensor.device.type != "cpu":
        raise ConfigError(
            f"a batch is on {tensor.device}, and NumPy has the CPU alone",
            hint="Make the loader with device='cpu'",
        )
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


def to_jax(batch: Any) -> Any:
    """Return a batch with JAX arrays in place of tensors, over the same memory where JAX can (DLPack).

    A `Loader` calls it for each batch if it is the last of `transforms`. Unless `jax_enable_x64` is set, JAX
    keeps 32 bits of int64 and float64, which are copied then.

    Args:
        batch: What a loader hands out, on the CPU or a GPU.

    Returns:
        A batch of the same kind.

    Raises:
        ConfigError: JAX is not installed.
    """
    try:
        dlpack = import_module("jax.dlpack")
        numpy = import_module("jax.numpy")
    except ImportError as error:
        raise ConfigError(f"JAX cannot be imported: {error}", hint="pip install jax") from error
    return map_tensors(batch, partial(_jax, dlpack, numpy))


def _jax(dlpack: Any, numpy: Any, tensor: Tensor) -> Any:
    wide = tensor.dtype in (torch.int64, torch.float64) and numpy.zeros(1, int).itemsize == 4
    if wide or tensor.dtype == torch.bool or not tensor.numel():
        return numpy.asarray(tensor.cpu().numpy())
    return dlpack.from_dlpack(tensor.detach().contiguous())


def as_dataloader(loader: Loader) -> DataLoader[Any]:
    """Return `loader` as a DataLoader; only one of the two may be iterated at a time.

    Its batches are those of `loader`, of `loader`'s rank alone: frameworks must not share it out again.

    Args:
        loader: A `stoker.Loader`.

    Returns:
        A DataLoader without workers, which also has `set_epoch`.

    Raises:
        ConfigError: It is not a Loader; batches of a Mixture have no number that skips could be counted in.

    Examples:
        >>> import stoker, torch
        >>> from stoker.integrations import as_dataloader
        >>> loader = as_dataloader(stoker.cached([{"x": torch.ones(2)}] * 6, batch_size=4))
        >>> isinstance(loader, torch.utils.data.DataLoader), [len(batch["x"]) for batch in loader]
        (True, [4, 2])
    """
    if not isinstance(cast("object", loader), Loader):
        raise ConfigError(f"as_dataloader got a {type(loader).__name__}", hint="Expected a stoker.Loader")
    return _LoaderAdapter(loader)


class _LoaderAdapter(DataLoader[Any]):
    """The DataLoader, with `set_epoch`, which some frameworks look for here and some at the sampler."""

    def __init__(self, loader: Loader) -> None:
        numbers = _BatchSampler(loader)
        super().__init__(_BatchDataset(loader), batch_sampler=numbers, collate_fn=_take_only)
        self.set_epoch = numbers.set_epoch


class _BatchSampler(Sampler[list[int]]):
    """Counts the batches of an epoch."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    @property
    def batch_sampler(self) -> _BatchSampler:
        """Itself: where frameworks look for `set_epoch` once they have put a sampler around this one."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """As `Loader.set_epoch`."""
        self._loader.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[list[int]]:
        for number in range(len(self._loader)):
            yield [number]


class _BatchDataset(Dataset[Any]):
    """Batches of the loader's epoch by number; the next one costs nothing, another one a new pass.

    Without a length: it would be taken for a number of examples.
    """

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._pass: Iterator[Any] = iter(())
        self._next = (-1, -1)
        """Epoch and number of the batch that the pass gives next."""

    def __getitem__(self, number: int) -> Any:
        loader, epoch = self._loader, self._loader.epoch
        if number == 0 or self._next != (epoch, number):
            if self._next[0] == epoch and 0 < self._next[1] < number:
                raise ConfigError(
                    f"batch {number} was asked for instead of the next one, so something shares the batches "
                    "out among ranks",
                    hint="A loader gives the batches of its own rank: make it with rank= and world_size=, "
                    "and leave it out of `prepare`",
                )
            loader.load_state_dict(loader.state_dict(place_of(loader, epoch, number)))
            self._pass = iter(loader)
        batch = next(self._pass)
        self._next = (epoch, number + 1)
        return batch


def _take_only(batches: list[Any]) -> Any:
    """Return the one batch that was asked for."""
    return batches[0]
