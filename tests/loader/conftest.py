"""Caches that several modules serve from; most have their own of the same names."""

from __future__ import annotations

import pytest
import torch

from stoker.store import Cache
from tests.loader.caches import trajectories, write_cache
from tests.loader.layouts import COMPRESSION, COUNT, LAYOUTS, STEPS, TIMED


@pytest.fixture(scope="module")
def fields() -> dict[str, torch.Tensor]:
    return trajectories(COUNT, STEPS)


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory, fields: dict[str, torch.Tensor]) -> dict[str, Cache]:
    return {
        name: write_cache(
            tmp_path_factory.mktemp(name),
            fields,
            timed=TIMED,
            shards=shards,
            compression=COMPRESSION.get(name, ("none",)),
        )
        for name, shards in LAYOUTS.items()
    }


@pytest.fixture
def cache(caches: dict[str, Cache]) -> Cache:
    return caches["unequal"]
