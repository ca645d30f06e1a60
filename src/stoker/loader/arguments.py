"""Names that a PyTorch `DataLoader` takes: which mean something here, and what to do about the others."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from stoker.errors import ConfigError

IGNORED = {
    "num_workers": "batches are gathered in this process, without workers",
    "prefetch_factor": "how far to read ahead follows from the tier",
    "persistent_workers": "there are no workers",
    "worker_init_fn": "there are no workers",
    "multiprocessing_context": "there are no workers",
    "pin_memory_device": "device= says where batches go",
    "generator": "seed= decides the order",
    "in_order": "batches always come in order",
}
"""Accepted, without effect, and why."""

REFUSED = {
    "sampler": "Use order=, indices= or weights=",
    "batch_sampler": "Use batch_size=, order=, indices= or weights=",
    "collate_fn": "Records are stored ready to be batched; use transforms= to change a batch",
}
"""Would change which examples are served, so they cannot be taken in silence."""

_said: set[str] = set()


def take_dataloader_arguments(given: Mapping[str, Any], order: str | None) -> tuple[str, float | None, bool]:
    """Sort out arguments named as in `torch.utils.data.DataLoader`.

    Args:
        given: What the loader was called with beyond its own arguments.
        order: The loader's own setting.

    Returns:
        The order, a deadline for reads in seconds (`timeout`, None if not given), and `pin_memory`.

    Raises:
        TypeError: A name is neither ours nor DataLoader's.
        ConfigError: A name that cannot be honoured, or `shuffle` and `order` at once.
    """
    for name, value in given.items():
        if name in REFUSED:
            if value is not None:
                raise ConfigError(f"{name}= is DataLoader's and cannot be used here. {REFUSED[name]}")
        elif name in IGNORED:
            if value and name not in _said:
                _said.add(name)
                logging.getLogger("stoker").info("%s=%r has no effect: %s", name, value, IGNORED[name])
        elif name not in ("shuffle", "timeout", "pin_memory"):
            raise TypeError(f"Loader.__init__() got an unexpected keyword argument {name!r}")
    shuffle = given.get("shuffle")
    if shuffle is not None and order is not None:
        raise ConfigError(
            f"shuffle={shuffle} and order={order!r} say the same thing twice. Give order= alone"
        )
    if order is None:
        order = "full" if shuffle is None or shuffle else "sequential"
    timeout = given.get("timeout")
    return order, float(timeout) if timeout else None, bool(given.get("pin_memory"))
