"""What the latent cache was asked before training: is it complete, does it fit, is it the right one."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from stoker.config import Config
from stoker.config.load import load_config, make_config
from stoker.errors import ConfigError, IncompleteError, StokerError
from stoker.pipeline.build import tasks_of
from stoker.pipeline.locate import recipe_of
from stoker.plan.resources import probe
from stoker.schema import columns_of
from stoker.sources.files import canonical_split
from stoker.store import Cache, open_cache
from stoker.store.layout import is_fixed, record_bytes
from stoker.units import MIB

log = logging.getLogger("stoker")


class CacheIncompleteError(IncompleteError, ValueError):
    """`Cache incomplete: x/N`; a ValueError, as it was."""


def check_cache_complete(cache_dir: str | Path, num_samples: int) -> tuple[bool, int]:
    """Whether so many records are stored, and how many are: counted in the index, not by file names."""
    cache = open_or_none(cache_dir)
    count = 0 if cache is None else len(cache)
    return cache is not None and cache.complete and count >= num_samples, count


def estimate_cache_size_mb(cache_dir: str | Path, num_samples: int = 10) -> float:
    """MiB that the whole cache takes in memory: from its schema, so `num_samples` no longer matters.

    Raises:
        StokerError: There is no cache.
    """
    cache = opened(cache_dir)
    return bytes_in_memory(cache) / MIB


def check_sufficient_ram(required_mb: float, safety_margin: float = 0.2) -> bool:
    """Whether this process may take so many MiB and the margin, within its control group's limit too."""
    return probe().host_bytes >= required_mb * MIB * (1 + safety_margin)


def compute_cache_hash(cfg: Mapping[str, Any] | str | Path | Config) -> str:
    """Twelve hexadecimal digits that change with anything that decides the bytes of the caches.

    Made of the fingerprints, so the data must be there. The order of tasks does not count; `why` says what
    differs between two.

    Raises:
        StokerError: A setting is wrong, or the data is not there.
    """
    config = config_of(cfg)
    split = canonical_split(config.data.wanted_splits[0])
    tasks = sorted(tasks_of(config))
    fingerprints = [recipe_of(config, task, split).fingerprint for task in tasks]
    return hashlib.sha256(" ".join(fingerprints).encode()).hexdigest()[:12]


def config_of(cfg: Mapping[str, Any] | str | Path | Config | DictConfig) -> Config:
    """Settings from whatever the earlier systems handed about: a mapping, an OmegaConf object or a file."""
    if isinstance(cfg, Config):
        return cfg
    if isinstance(cfg, str | Path):
        return load_config(cfg)
    plain = OmegaConf.to_container(cfg, resolve=True) if isinstance(cfg, DictConfig) else dict(cfg)
    return make_config(cast("dict[str, object]", plain), where="cfg")


def opened(cache_dir: str | Path) -> Cache:
    """The cache of a folder.

    Raises:
        ConfigError: It holds the files of the earlier cache.
        StokerError: It holds none.
    """
    if any(Path(cache_dir).glob("sample_*.pt")):
        raise ConfigError(
            f"{cache_dir} holds sample_*.pt files of the earlier cache, which say nothing of what made them. "
            f"Import them once with `stoker import-pt {cache_dir} --out FOLDER --name NAME`, or encode again "
            "with `stoker precompute`"
        )
    return open_cache(cache_dir, require_complete=False)


def open_or_none(cache_dir: str | Path) -> Cache | None:
    """The cache of a folder; None, with a word, where there is none that can be read."""
    try:
        return opened(cache_dir)
    except (StokerError, OSError) as error:
        log.info("%s", error)
        return None


def bytes_in_memory(cache: Cache) -> int:
    """Bytes of all records as they lie in memory."""
    columns = columns_of(cache.schema)
    if is_fixed(cache.schema):
        return record_bytes(columns) * len(cache)
    ragged = {name: int(cache.lengths(name).sum()) for name, field in columns.items() if field.ragged}
    return sum(
        ragged[name] * field.row_bytes if name in ragged else field.size_bytes() * len(cache)
        for name, field in columns.items()
    )
