"""Caches that several modules serve from; most have their own of the same names."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from stoker import native
from stoker.runtime import threads
from stoker.store import Cache
from tests.loader.caches import trajectories, write_cache
from tests.loader.layouts import COMPRESSION, COUNT, LAYOUTS, STEPS, TIMED


@pytest.fixture(autouse=True, scope="module")
def short_idle() -> Iterator[None]:
    """Threads of loaders that nobody uses any more end within a second: else thousands wait at a time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threads, "IDLE_S", 0.5)
        yield


@pytest.fixture
def twins_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No compiled code: for tests that look at single reads and calls."""
    monkeypatch.setattr(native, "library", lambda: None)


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
