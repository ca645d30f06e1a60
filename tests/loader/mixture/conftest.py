"""Three caches: two with the same fields, one with others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stoker.store import Cache
from tests.loader.caches import trajectories, write_cache
from tests.loader.mixture.three import TIMED, narrow


@pytest.fixture(scope="module")
def fields() -> dict[str, dict[str, torch.Tensor]]:
    a = trajectories(13, 9)
    return {"a": a, "b": narrow(), "c": {name: values[:7] + 1 for name, values in a.items()}}


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory, fields: dict[str, Any]) -> dict[str, Cache]:
    shards = {"a": (5, 7, 1), "b": (), "c": (2, 5)}
    return {
        name: write_cache(tmp_path_factory.mktemp(name), fields[name], timed=TIMED, shards=own, name=name)
        for name, own in shards.items()
    }


@pytest.fixture
def abc(caches: dict[str, Cache]) -> list[Cache]:
    return [caches[name] for name in "abc"]


@pytest.fixture
def alike(caches: dict[str, Cache]) -> list[Cache]:
    return [caches["a"], caches["c"]]
