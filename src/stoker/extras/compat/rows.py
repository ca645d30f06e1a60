"""A table of measurements in the memory of a GPU, as the earlier training service named it.

Rows are read once, in the order of their key and in one snapshot. Splits follow from the key. All splits are
standardized by numbers of the train split. What the filters drop is reported.

    dataset = GPUCachedRows(dataset_ids, "train", session, "cuda")
    DataLoader(dataset, batch_size=256, shuffle=True, collate_fn=collate_gpu_cached)    # as it was
    GPUDataLoader(dataset, batch_size=256, shuffle=True)                                # seeded, resumable
    create_gpu_cached_dataloaders(config, session)                                      # both splits
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from stoker.errors import ConfigError
from stoker.extras.compat.caches import check_sufficient_ram
from stoker.extras.compat.images import GPUDataLoader
from stoker.extras.compat.settings import device_or_cpu
from stoker.loader import Loader
from stoker.precompute import precompute as fill_cache
from stoker.sources.sql.source import SQLSource
from stoker.store.format import record_bytes

SPLITS: Mapping[str, float] = {"train": 0.8, "val": 0.2}
TABLE = "measurement_features"
"""Where the rows are in SQLite; in PostgreSQL they are in the schema `heimdall`."""
COORDS = ("coord_mean_lat_meters", "coord_mean_lon_meters", "coord_std_lat_meters", "coord_std_lon_meters")
"""By what targets are standardized: of the train split, in every split."""
ROOM = 0.8
"""Part of a GPU's free memory that rows may take; a model needs the rest."""
_RECORD = {"receivers", "signal_mask", "target", "gdop", "num_receivers", "centroid"}
"""Fields of a cached row whose batches can have the earlier names."""

log = logging.getLogger("stoker")


class GPUCachedRows:
    """A split of the rows of some data sets, cached and served from the device.

    An item is `receiver_features` `(R, 6)` float32, `signal_mask` `(R,)` bool (True: no signal),
    `target_position` `(2,)` float32 (meters north and east of the centroid, standardized) and `metadata`.
    That has `gdop`, `num_receivers`, `centroid` `(2,)` in degrees, and the four numbers of `COORDS`. With
    `columns` of your own an item has your fields instead.

    Args:
        dataset_ids: UUIDs of the data sets.
        split: `train` or `val`, or another name of `splits`.
        db_session: An address (`sqlite:///FILE`, `postgresql://...`), or an SQLAlchemy engine or session.
        device: `auto` or `cuda` (a GPU; the CPU with one line where torch sees none), or `cpu`.
        max_receivers: Receivers in a sample; further ones are an error, not cut.
        preload_to_gpu: False: served from host memory.
        min_snr_db, max_gdop: Only rows with at least, at most this; None: all.
        validation_split: Part of the keys that is `val`, in place of `splits`; 0.2 if neither is given.
        table, key, columns: What is read, see `stoker.SQLSource`; None: the earlier table, and the rules of
            `stoker demo radio`.
        splits, seed: How keys are cut.
        cache_path: Folder of the caches.
        precompute: How to fill the cache, as for `stoker.cached`.

    Raises:
        ConfigError: An id is not a UUID, `db_session` has no address, or a number is out of range.
        ResourceError: There are GPUs, but not the one that `device` names; nothing was read yet.
        StokerError: As `SQLSource` and `precompute`; no rows left is one.
    """

    shuffles = False

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
        validation_split: float | None = None,
        table: str | None = None,
        key: str = "recording_session_id",
        columns: Mapping[str, Any] | None = None,
        splits: Mapping[str, float] | None = None,
        seed: int = 42,
        cache_path: str | Path = ".stoker",
        precompute: Mapping[str, Any] | None = None,
    ) -> None:
        self.device = device_or_cpu(device, "rows")
        self.split, self.preload_to_gpu = split, preload_to_gpu
        address = _address(db_session)
        postgresql = str(address).startswith(("postgresql:", "postgres:"))
        source = SQLSource(
            address,
            table=table or (f"heimdall.{TABLE}" if postgresql else TABLE),
            key=key,
            columns=_rules().radio_columns(max_receivers) if columns is None else columns,
            where=_rules().radio_where(dataset_ids, min_snr_db=min_snr_db, max_gdop=max_gdop),
            split=split,
            splits=_splits(validation_split, splits),
            seed=seed,
        )
        name = f"{(table or TABLE).rpartition('.')[2]}_{split}"
        self.cache = fill_cache(source, None, cache_path, name=name, **(precompute or {}))
        self.statistics: Mapping[str, Any] = source.statistics
        """Mean and deviation by standardized field, of the train split."""
        source.close()
        self._has_earlier_names = set(self.cache.schema) >= _RECORD
        self._in_memory: dict[str, Tensor] | None = None

    def __len__(self) -> int:
        """Return the number of rows of the split."""
        return len(self.cache)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return the fields of one row.

        Raises:
            IndexError: No such row.
        """
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} does not exist: this split has {len(self)}")
        return self.__getitems__([index % len(self)])[0]

    def __getitems__(self, indices: Sequence[int]) -> RadioBatch:
        """Several rows at once, which is what a `DataLoader` asks for: one gather for each field."""
        fields = self._rows()
        if fields is None:
            one_by_one = [self.cache[int(self.cache.indices[index])] for index in indices]
            picked = {name: torch.stack([row[name] for row in one_by_one]) for name in self.cache.schema}
        else:
            at = torch.as_tensor(indices, device=next(iter(fields.values())).device)
            picked = {name: values.index_select(0, at) for name, values in fields.items()}
        return RadioBatch(self.shaped({name: values.to(self.device) for name, values in picked.items()}))

    def shaped(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return a batch of cached rows under the earlier names; of fields of your own as it is."""
        if not self._has_earlier_names:
            return dict(batch)
        mean, deviation = (self.statistics["target"][name] for name in ("mean", "deviation"))
        metadata: dict[str, Any] = {
            "gdop": batch["gdop"],
            "num_receivers": (~batch["signal_mask"]).sum(-1),
            "centroids": batch["centroid"],
            **dict(zip(COORDS, (*mean, *deviation), strict=True)),
        }
        return {
            "receiver_features": batch["receivers"],
            "signal_mask": batch["signal_mask"],
            "target_position": batch["target"],
            "metadata": metadata,
        }

    def loader(self, batch_size: int, shuffle: bool = True, drop_last: bool = False, **loader: Any) -> Loader:
        """Return batches of the split under the names of the cache, gathered where they are."""
        own: dict[str, Any] = {
            "device": str(self.device),
            "shuffle": shuffle,
            "tier": "auto" if self.preload_to_gpu else "host",
            "drop_last": drop_last,
            **loader,
        }
        return Loader(self.cache, batch_size=batch_size, **own)

    def _rows(self) -> dict[str, Tensor] | None:
        """Return all rows in memory, made when the first is asked for; None where there is no room."""
        if self._in_memory is None:
            size = record_bytes(self.cache.schema) * len(self)
            if not check_sufficient_ram(size / 2**20):
                return None
            batches = list(Loader(self.cache, batch_size=4096, device="cpu"))
            fields = {name: torch.cat([batch[name] for batch in batches]) for name in self.cache.schema}
            if self.preload_to_gpu and self.device.type == "cuda":
                free, _ = torch.cuda.mem_get_info(self.device)
                if size <= ROOM * free:
                    fields = {name: values.to(self.device) for name, values in fields.items()}
                else:
                    log.warning(
                        "%d rows take %d bytes, %d are free on %s: they are served from host memory",
                        len(self), size, free, self.device,
                    )  # fmt: skip
            self._in_memory = fields
        return self._in_memory


class RadioBatch(Sequence[dict[str, Any]]):
    """Rows that were gathered together: a batch for `collate_gpu_cached`, rows for others."""

    def __init__(self, batch: Mapping[str, Any]) -> None:
        self.batch = dict(batch)
        self._count = len(next(value for value in self.batch.values() if isinstance(value, Tensor)))

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, place: int) -> dict[str, Any]:  # type: ignore[override]
        """Return one row; its metadata are numbers, as they were."""
        if not 0 <= place < self._count:
            raise IndexError(f"row {place} of {self._count}")
        row: dict[str, Any] = {
            name: value[place] for name, value in self.batch.items() if isinstance(value, Tensor)
        }
        if "metadata" in self.batch:
            known = self.batch["metadata"]
            row["metadata"] = {
                "gdop": known["gdop"][place].item(),
                "num_receivers": known["num_receivers"][place].item(),
                "centroid": known["centroids"][place],
                **{name: known[name] for name in COORDS},
            }
        return row


def collate_gpu_cached(batch: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return rows as one batch: `receiver_features` `(B, R, 6)`, `signal_mask` `(B, R)`, `target_position`
    `(B, 2)`, and `metadata` with `gdop` `(B,)` float32, `num_receivers` `(B,)` int64, `centroids` `(B, 2)`
    and the four numbers of `COORDS`.

    For a `DataLoader` over a `GPUCachedRows`, with `num_workers=0`. Rows come to it gathered already, so
    nothing is stacked; a list of single rows is.
    """
    if isinstance(batch, RadioBatch):
        return batch.batch
    rows = [*batch]
    whole = {name: torch.stack([row[name] for row in rows]) for name in rows[0] if name != "metadata"}
    if "metadata" not in rows[0]:
        return whole
    known = [cast("Mapping[str, Any]", row["metadata"]) for row in rows]
    device = next(iter(whole.values())).device
    metadata = {
        "gdop": torch.tensor([one["gdop"] for one in known], dtype=torch.float32, device=device),
        "num_receivers": torch.tensor([one["num_receivers"] for one in known], device=device),
        "centroids": torch.stack([one["centroid"] for one in known]),
        **{name: known[0][name] for name in COORDS},
    }
    return {**whole, "metadata": metadata}


def create_gpu_cached_dataloaders(
    config: Mapping[str, Any], db_session: Any, **dataset: Any
) -> tuple[GPUDataLoader[GPUCachedRows], GPUDataLoader[GPUCachedRows] | None]:
    """Return the loaders of `train` (shuffled) and of `val` (in order; None if `validation_split` is 0).

    Args:
        config: The earlier `TrainingConfig` as a mapping. Its `dataset_ids`, `batch_size` (128),
            `validation_split` (0.2), `preload_to_gpu`, `accelerator`, `min_snr_db`, `max_gdop` and
            `max_receivers` have an effect here; one line lists the others. A filter that is not in it is off:
            the earlier defaults (10 and 5) rejected complete data sets.
        db_session: As for `GPUCachedRows`; so are further arguments.

    Raises:
        ConfigError: `dataset_ids` is missing, or a value is out of range.
        StokerError: As `GPUCachedRows`.
    """
    if "dataset_ids" not in config:
        raise ConfigError(
            "config has no dataset_ids", hint=f"It has: {', '.join(map(str, config)) or 'nothing'}"
        )
    if unused := sorted(str(key) for key in config if key not in {*_DATASET, *_LOADER}):
        log.warning("these keys of config have no effect on the rows: %s", ", ".join(unused))
    given = {key: config[key] for key in _DATASET if key in config}
    given["device"] = given.pop("accelerator", "auto")
    given |= dataset
    train = GPUCachedRows(split="train", db_session=db_session, **given)
    batch_size = int(config.get("batch_size", 128))
    first = GPUDataLoader(train, batch_size, shuffle=True)
    if given.get("validation_split") == 0:
        return first, None
    val = GPUCachedRows(split="val", db_session=db_session, **given)
    return first, GPUDataLoader(val, batch_size)


_DATASET = (
    "dataset_ids", "validation_split", "preload_to_gpu", "accelerator", "min_snr_db", "max_gdop",
    "max_receivers",
)  # fmt: skip
_LOADER = ("batch_size",)


def _splits(validation: float | None, splits: Mapping[str, float] | None) -> Mapping[str, float]:
    if validation is None:
        return SPLITS if splits is None else splits
    if splits is not None:
        raise ConfigError(
            f"validation_split={validation} and splits={dict(splits)} contradict", hint="Give one of them"
        )
    if not 0 <= validation <= 0.5:
        raise ConfigError(f"validation_split is {validation}", hint="Expected 0 to 0.5")
    return {"train": 1 - validation, "val": validation} if validation else {"train": 1.0}


def _address(db_session: Any) -> str | Path:
    """Return the address behind whatever the earlier service passed around."""
    if isinstance(db_session, str | Path):
        return db_session
    bind = db_session.get_bind() if hasattr(db_session, "get_bind") else db_session
    url = getattr(bind, "url", None)
    if url is None or not hasattr(url, "render_as_string"):
        raise ConfigError(
            f"db_session is a {type(db_session).__name__} without an address",
            hint="Expected sqlite:///FILE, postgresql://HOST/DATABASE, or an SQLAlchemy engine or session",
        )
    scheme, separator, rest = str(url.render_as_string(hide_password=False)).partition("://")
    return scheme.partition("+")[0] + separator + rest  # without the name of a driver


def _rules() -> Any:
    return import_module("stoker.extras.radio.demo")
