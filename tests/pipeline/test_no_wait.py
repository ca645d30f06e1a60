"""Training that begins before its caches are complete."""

from __future__ import annotations

from stoker.pipeline.precompute import fill_caches
from stoker.pipeline.train import train_config
from tests.pipeline.conftest import Configure


def test_a_run_trains_at_once_and_leaves_complete_caches(configure: Configure) -> None:
    result = train_config(configure("precompute.wait=false", "training.epochs=2", "precompute.readers=1"))

    assert result.report.epochs == 2
    assert [cache.cache.complete for cache in result.caches] == [True, True]
    assert all(cache.encoded == len(cache.cache) for cache in result.caches)
    assert result.reason.endswith("from the fastest tier") or "host" in result.reason
    assert not any(cache.encoded for cache in fill_caches(configure(), ["train", "val"]))
