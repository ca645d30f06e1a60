"""What the tests of trainers have in common: a small cache, and the batches of a plain loop."""

from __future__ import annotations

from pathlib import Path

from stoker.loader import Loader
from stoker.store import Cache
from tests.loader.caches import trajectories, write_cache

EPOCHS = 3


def make_cache(folder: Path) -> Cache:
    """24 records: batches of 5 leave a short one."""
    return write_cache(folder, trajectories(), timed=("latent", "time"), shards=(5, 7))


def sequence(loader: Loader) -> list[list[int]]:
    """The sample numbers of every batch of all epochs."""
    found: list[list[int]] = []
    for epoch in range(EPOCHS):
        loader.set_epoch(epoch)
        found += [batch["index"].tolist() for batch in loader]
    return found
