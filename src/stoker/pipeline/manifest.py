"""The JSON report of a precompute run."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.config import Config
from stoker.schema import canonical_json
from stoker.store.local import LocalStorage

if TYPE_CHECKING:
    from stoker.pipeline.precompute import CacheResult


def write_manifest(path: Path, config: Config, caches: Sequence[CacheResult]) -> None:
    """Write the report of the earlier precompute script, with every cache's own figures beside it.

    Raises:
        ReadOnlyError: The file cannot be written.
    """
    summary: Mapping[str, Any] = {
        cache.name: {
            "num_samples": len(cache.cache),
            "total_mb": cache.bytes / 1e6,
            "elapsed_min": cache.seconds / 60,
            "skipped": None if cache.encoded else "nothing to encode",
        }
        for cache in caches
    }
    text = canonical_json(
        {
            "generated_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "cache_dir": config.training.latent_cache_dir,
            "summary": summary,
            "caches": [cache.to_json() for cache in caches],
        }
    )
    LocalStorage(path.parent).put(path.name, text.encode())
