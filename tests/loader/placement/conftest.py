"""One cache in even shards, and time that passes when told to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from stoker.loader import Loader, placement
from stoker.store import Cache
from tests.loader.caches import trajectories, write_cache
from tests.loader.placement.machine import ROWS, SHARDS, STEP


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    fields = trajectories(SHARDS * ROWS, step=STEP)
    return write_cache(
        tmp_path_factory.mktemp("even"), fields, timed=("latent", "time"), shards=(ROWS,) * SHARDS
    )


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Time that passes only when told to."""
    now = [1000.0]
    monkeypatch.setattr(placement.time, "monotonic", lambda: now[0])

    def forward(seconds: float) -> None:
        now[0] += seconds

    return forward


@pytest.fixture
def expected(cache: Cache) -> list[Any]:
    return list(Loader(cache, tier="disk", batch_size=5, seed=2, shuffle=True))
