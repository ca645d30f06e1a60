"""A table of measurements in the memory of a GPU, as the earlier training service named it.

Rows are read once, in the order of their key and in one snapshot; splits follow from the key, and the numbers
that values are standardised by from the train split. What the filters drop is reported by the source.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from stoker.errors import ConfigError
from stoker.loader import Loader
from stoker.plan.devices import resolve_device
from stoker.precompute import precompute as fill_cache
from stoker.sources.sql.source import SQLSource

SPLITS: Mapping[str, float] = {"train": 0.8, "val": 0.2}


class GPUCachedDataset:
    """A split of the rows of some data sets, cached and served from the device.

    Args:
        dataset_ids: UUIDs of the data sets.
        split: `train` or `val`, or another name of `splits`.
        db_session: An address (`sqlite:///FILE`, `postgresql://...`), or an SQLAlchemy engine or session.
        device: `auto` (a GPU where there is one), `cuda`, or `cpu`.
        max_receivers: Receivers in a sample; further ones are an error, not cut.
        preload_to_gpu: False: served from host memory.
        min_snr_db, max_gdop: Only rows with at least, at most this; None: all.
        table, key, columns: What is read, see `stoker.SQLSource`; None: the rules of `stoker demo radio`.
        splits, seed: How keys are cut.
        cache_path: Folder of the caches.
        precompute: How to fill the cache, as for `stoker.cached`.

    Raises:
        ConfigError: An id is no UUID, or `db_session` has no address.
        StokerError: As `SQLSource` and `precompute`; no rows left is one.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - the earlier system's signature
        self,
        dataset_ids: Sequence[str],
        split: str,
        db_session: Any,
        device: str | torch.device = "auto",
        max_receivers: int = 7,
        preload_to_gpu: bool = True,
        min_snr_db: float | None = None,
        max_gdop: float | None = None,
        *,
        table: str = "measurement_features",
        key: str = "recording_session_id",
        columns: Mapping[str, Any] | None = None,
        splits: Mapping[str, float] | None = None,
        seed: int = 42,
        cache_path: str | Path = ".stoker",
        precompute: Mapping[str, Any] | None = None,
    ) -> None:
        self.split, self.device = split, resolve_device(device)
        self.preload_to_gpu = preload_to_gpu
        source = SQLSource(
            _address(db_session),
            table=table,
            key=key,
            columns=_rules().radio_columns(max_receivers) if columns is None else columns,
            where=_rules().radio_where(dataset_ids, min_snr_db=min_snr_db, max_gdop=max_gdop),
            split=split,
            splits=SPLITS if splits is None else splits,
            seed=seed,
        )
        self.cache = fill_cache(source, None, cache_path, name=f"{table}_{split}", **(precompute or {}))

    def __len__(self) -> int:
        """Rows of the split."""
        return len(self.cache)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """The fields of one row.

        Raises:
            IndexError: No such row.
        """
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} does not exist: this split has {len(self)}")
        return {n: v.to(self.device) for n, v in self.cache[int(self.cache.numbers[index])].items()}

    def loader(self, batch_size: int, shuffle: bool = True, drop_last: bool = False, **loader: Any) -> Loader:
        """Batches of the split, gathered where they are."""
        own: dict[str, Any] = {
            "device": str(self.device),
            "order": "full" if shuffle else "sequential",
            "tier": "auto" if self.preload_to_gpu else "host",
            "drop_last": drop_last,
            **loader,
        }
        return Loader(self.cache, batch_size=batch_size, **own)


def _address(db_session: Any) -> str | Path:
    """The address behind whatever the earlier service handed about."""
    if isinstance(db_session, str | Path):
        return db_session
    bind = db_session.get_bind() if hasattr(db_session, "get_bind") else db_session
    url = getattr(bind, "url", None)
    if url is None or not hasattr(url, "render_as_string"):
        raise ConfigError(
            f"db_session is a {type(db_session).__name__} without an address. Expected sqlite:///FILE, "
            "postgresql://HOST/DATABASE, or an SQLAlchemy engine or session"
        )
    scheme, separator, rest = str(url.render_as_string(hide_password=False)).partition("://")
    return scheme.partition("+")[0] + separator + rest  # without the name of a driver


def _rules() -> Any:
    return import_module("stoker.pipeline.radio_store")
