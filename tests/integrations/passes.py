"""What the tests of trainers have in common: a small cache, and the batches of a plain loop."""

from __future__ import annotations

from pathlib import Path

import torch

from stoker.loader import Loader
from stoker.store import Cache
from tests.loader.caches import trajectories, write_cache

EPOCHS = 3


def make_cache(folder: Path) -> Cache:
    """24 records: batches of 5 leave a short one."""
    return write_cache(folder, trajectories(), timed=("latent", "time"), shards=(5, 7))


def make_varied_cache(folder: Path) -> Cache:
    """24 records: 13, 8 and 3 of three kinds, with texts of 1 to 5 words; many batches are short."""
    kinds = torch.tensor([0, 1, 0, 0, 1, 2, 0, 1] * 3)
    generator = torch.Generator().manual_seed(7)
    fields = {
        "kind": kinds - (torch.arange(24) == 1).long(),
        "bc": torch.randn((24, 3), generator=generator),
        "words": [torch.arange(1 + number % 5) for number in range(24)],
    }
    return write_cache(folder, fields, shards=(5, 7))


def sequence(loader: Loader) -> list[list[int]]:
    """The sample numbers of every batch of all epochs."""
    found: list[list[int]] = []
    for epoch in range(EPOCHS):
        loader.set_epoch(epoch)
        found += [batch["index"].tolist() for batch in loader]
    return found
