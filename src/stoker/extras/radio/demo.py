"""Measurements of transmitters by radio receivers, made here, to try rows of a database at once.

A transmitter somewhere in north-west Italy is heard by up to seven receivers at fixed places. What each one
measures follows from free-space loss, the ground between, shadows and noise. Rows are those that enough
receivers hear well enough. Equal settings give equal rows: draws come from the seed and a block's number.
"""

from __future__ import annotations

import json
import math
import sqlite3
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from stoker.config import Config, load_config
from stoker.errors import ConfigError, ReadOnlyError, SourceError
from stoker.loader import Loader
from stoker.monitor import StallMeter
from stoker.run.build import build_source
from stoker.run.caches import CacheLocation
from stoker.run.context import Run, describe_machine
from stoker.run.fitting import fit, one_thread, save_model
from stoker.run.plan import PlanResult, plan_located
from stoker.run.precompute import CacheResult, precompute_config
from stoker.runtime.files import make_folder
from stoker.schema import Json, JsonResult, canonical_json
from stoker.sources.protocol import Source
from stoker.sources.sql.databases import driver
from stoker.sources.sql.query import DatabaseURL, parse_database_url
from stoker.sources.sql.source import SQLSource
from stoker.sources.sql.values import METRES
from stoker.train.config import EventSink, TrainConfig
from stoker.units import format_count

RECEIVERS: Sequence[tuple[str, float, float, float, float]] = (
    ("aosta-south", 45.46, 7.34, 620.0, 9.0), ("turin-hill", 45.05, 7.76, 690.0, 4.0),
    ("cuneo", 44.43, 7.55, 540.0, 7.0), ("asti", 44.90, 8.21, 150.0, 11.0),
    ("novara", 45.44, 8.62, 160.0, 13.0), ("genoa-hill", 44.46, 8.88, 410.0, 5.0),
    ("pavia", 45.19, 9.08, 100.0, 12.0),
)  # fmt: skip
"""Name, latitude, longitude, metres above the sea, and how many dB the surroundings cost."""

FEATURES = (
    "rssi_dbm", "snr_db", "noise_floor_dbm", "frequency_offset_hz", "bandwidth_hz", "psd_dbm_per_hz",
    "spectral_centroid_hz", "spectral_rolloff_hz", "envelope_mean", "envelope_std", "envelope_max",
    "peak_to_avg_ratio_db", "zero_crossing_rate", "multipath_delay_spread_us", "coherence_bandwidth_khz",
    "delay_spread_confidence", "confidence_score",
)  # fmt: skip
"""Numbers of each receiver, every one as mean, std, min and max of five looks."""

NOISE_FLOOR_DBM = -120.0
_BLOCK = 512
_LOOKS = 5
_KM = 111.195
_METRES_ABOVE_SEA = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RadioSpec(JsonResult):
    """Settings of the generated rows; equal values give equal rows."""

    rows: int = 4030
    """Accepted measurements."""
    seed: int = 0
    power_dbm: float = 37.0
    """Kinds of signals that transmitters send."""
    present_snr_db: float = 3.0
    """From where on a receiver hears a signal."""
    least_receivers: int = 3
    """Receivers that hear it, at least."""
    least_snr_db: float = 5.0
    """Mean over those, at least."""
    most_gdop: float = 150.0
    """How badly the receivers' places may suit to find it, at most."""

    name: str = ""
    """Sets with different names have different keys, so that one table can hold several of one seed."""

    def __post_init__(self) -> None:
        """Refuse what would never end."""
        if self.rows < 1 or not 1 <= self.least_receivers <= len(RECEIVERS):
            raise ConfigError(
                f"{self.rows} rows of at least {self.least_receivers} receivers cannot be made",
                hint=f"Expected at least 1 row and 1 to {len(RECEIVERS)} receivers",
            )

    @property
    def dataset_id(self) -> uuid.UUID:
        """Names the set in the table: another set has another."""
        made_of = {key: value for key, value in self.to_json().items() if key != "name" or value}
        return uuid.uuid5(uuid.NAMESPACE_URL, f"stoker-radio-1 {sorted(made_of.items())}")


def radio_rows(spec: RadioSpec) -> Iterator[dict[str, Any]]:
    """Yield `spec.rows` rows by column; `receiver_features` is a list of dictionaries."""
    left, block = spec.rows, 0
    while left:
        made = _block(spec, block)
        if block == 64 and left == spec.rows:
            raise ConfigError(f"no measurement in {64 * _BLOCK:,} satisfies {spec}", hint="Ask for less")
        yield from made[:left]
        left -= min(left, len(made))
        block += 1


def _block(spec: RadioSpec, block: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng((spec.seed, block))
    places = np.array([(lat, lon) for _, lat, lon, _, _ in RECEIVERS])
    low, high = places.min(0), places.max(0)
    wide = (rng.random((_BLOCK, 1)) >= 0.7) * 0.5
    transmitter = low - wide + rng.random((_BLOCK, 2)) * (high - low + 2 * wide)
    frequency_mhz = rng.uniform(430.0, 440.0, _BLOCK)
    inside = _in_sample(rng)
    offset_km = (places[None] - transmitter[:, None]) * _KM
    offset_km[..., 1] *= np.cos(np.radians(transmitter[:, None, 0]))
    distance_km = np.hypot(np.hypot(offset_km[..., 0], offset_km[..., 1]), 0.2)
    snr = _received(spec, rng, distance_km, frequency_mhz) - NOISE_FLOOR_DBM
    present = (snr >= spec.present_snr_db) & inside
    heard = present.sum(1)
    mean_snr = np.where(present, snr, 0).sum(1) / np.maximum(heard, 1)
    gdop = _gdop(offset_km, present)
    accepted = (heard >= spec.least_receivers) & (mean_snr >= spec.least_snr_db) & (gdop <= spec.most_gdop)
    features = _features(rng, snr, present)
    ids = _keys_of(spec, rng.bytes(16 * _BLOCK))
    return [
        {
            "recording_session_id": uuid.UUID(bytes=ids[16 * i : 16 * i + 16], version=4),
            "timestamp": f"2026-01-01T{block // 60 % 24:02d}:{block % 60:02d}:00+00:00",
            "receiver_features": [
                _receiver(j, distance_km[i, j], bool(present[i, j]), features[i, j])
                for j in range(len(RECEIVERS))
                if inside[i, j]
            ],
            "tx_latitude": round(float(transmitter[i, 0]), 7),
            "tx_longitude": round(float(transmitter[i, 1]), 7),
            "tx_altitude_m": _METRES_ABOVE_SEA,
            "tx_power_dbm": spec.power_dbm,
            "tx_known": True,
            "extraction_metadata": {"frequency_mhz": round(float(frequency_mhz[i]), 4), "looks": _LOOKS},
            "overall_confidence": round(min(1.0, float(mean_snr[i]) / 30.0), 4),
            "mean_snr_db": round(float(mean_snr[i]), 4),
            "num_receivers_detected": int(heard[i]),
            "num_receivers_in_sample": int(inside[i].sum()),
            "gdop": round(float(gdop[i]), 4),
            "dataset_id": spec.dataset_id,
        }
        for i in np.flatnonzero(accepted).tolist()
    ]


def _keys_of(spec: RadioSpec, drawn: bytes) -> bytes:
    """Return the keys of a block's rows, 16 bytes each."""
    if not spec.name:
        return drawn
    own = np.frombuffer(uuid.uuid5(uuid.NAMESPACE_URL, f"stoker-radio-keys {spec.name}").bytes, np.uint8)
    return (np.frombuffer(drawn, np.uint8).reshape(-1, 16) ^ own).tobytes()


def _in_sample(rng: np.random.Generator) -> NDArray[np.bool_]:
    """Return which receivers were on: four to all of them."""
    count = rng.integers(4, len(RECEIVERS) + 1, _BLOCK)
    rank = rng.random((_BLOCK, len(RECEIVERS))).argsort(1).argsort(1)
    return rank < count[:, None]


def _received(
    spec: RadioSpec, rng: np.random.Generator, distance_km: NDArray[Any], frequency_mhz: NDArray[Any]
) -> NDArray[np.float64]:
    """Return power at each receiver in dBm. Source: free-space loss after Friis; the rest is made up."""
    free_space = 32.45 + 20 * np.log10(distance_km) + 20 * np.log10(frequency_mhz)[:, None]
    surroundings = np.array([cost for *_, cost in RECEIVERS])
    hills = np.array([altitude for _, _, _, altitude, _ in RECEIVERS])
    ground = 0.12 * distance_km * (1.2 - hills / 1000) + surroundings
    shadow = rng.normal(0.0, 1.0, distance_km.shape) * rng.uniform(3.0, 6.0, (len(distance_km), 1))
    near = rng.normal(0.0, 4.0, distance_km.shape) * np.exp(-distance_km / 8.0)
    return spec.power_dbm + 5.0 - free_space - ground - shadow - near


def _gdop(offset_km: NDArray[Any], present: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Geometric dilution of precision of two coordinates and a clock, from directions to the receivers."""
    direction = offset_km / np.maximum(np.linalg.norm(offset_km, axis=-1, keepdims=True), 1e-9)
    rows = np.concatenate([direction, np.ones((*present.shape, 1))], -1) * present[..., None]
    square = rows.transpose(0, 2, 1) @ rows
    found = np.full(len(rows), math.inf)
    sound = np.abs(np.linalg.det(square)) > 1e-9
    found[sound] = np.sqrt(np.trace(np.linalg.inv(square[sound]), axis1=1, axis2=2))
    return found


def _features(rng: np.random.Generator, snr: NDArray[Any], present: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Return mean, std, min and max of five looks at each feature: `(rows, receivers, features, 4)`."""
    shape = (*snr.shape, _LOOKS)
    level = np.where(present, snr, 0.0)[..., None]
    bandwidth = 12_500.0 * (1 + 0.02 * rng.normal(size=shape))
    noise = NOISE_FLOOR_DBM + 0.3 * rng.normal(size=shape)
    received = noise + level + 0.8 * rng.normal(size=shape)
    offset = rng.uniform(-50.0, 50.0, snr.shape)[..., None] + 0.5 * rng.normal(size=shape)
    envelope = 10 ** ((received + 120.0) / 40.0)
    spread = np.abs(1.5 + 0.5 * rng.normal(size=shape))
    confidence = 1 / (1 + np.exp(-(level - 6.0) / 4.0)) + 0 * spread
    looks = [
        received, received - noise, noise, offset, bandwidth, received - 10 * np.log10(bandwidth),
        offset + 20 * rng.normal(size=shape), 0.85 * bandwidth / 2, envelope, 0.3 * envelope, 2.1 * envelope,
        8.0 + 0.6 * rng.normal(size=shape), 0.2 + 0.02 * rng.normal(size=shape), spread, 200.0 / spread,
        confidence, np.clip(confidence + 0.02 * rng.normal(size=shape), 0, 1),
    ]  # fmt: skip
    stacked = np.stack(looks, axis=-2)
    parts = (stacked.mean(-1), stacked.std(-1), stacked.min(-1), stacked.max(-1))
    return np.stack(parts, axis=-1).round(4)


def _receiver(
    place: int, distance_km: float, present: bool, features: NDArray[np.float64]
) -> dict[str, Json]:
    name, latitude, longitude, *_ = RECEIVERS[place]
    numbers: dict[str, Json] = {
        feature: dict(zip(("mean", "std", "min", "max"), values, strict=True))
        for feature, values in zip(FEATURES, features.tolist(), strict=True)
    }
    return {
        "rx_id": name, "rx_lat": latitude, "rx_lon": longitude, "distance_km": round(float(distance_km), 3),
        "signal_present": present, **numbers,
    }  # fmt: skip


# ----------------------------------------------------------------------------------------------------------
# A small network that finds a transmitter from what receivers measured, and says how sure it is.


Batch: TypeAlias = "Mapping[str, Tensor]"

EARTH_M = METRES * 180 / math.pi
"""Radius of the sphere on which places become metres."""
WIDEST = 8.0
"""Bound of a predicted log variance to either side: a wild guess in the first steps must not end the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TriangulationShape:
    """All that decides the shapes of the weights."""

    features: int = 6
    """Numbers of a receiver."""
    hidden: int = 64
    """Width of the layer that looks at one receiver."""
    width: int = 32
    """Numbers a receiver has among the others; a multiple of `heads`."""
    heads: int = 4
    """Attention heads."""
    head: int = 64
    """Width of the layer before the answer."""


class TriangulationModel(nn.Module):
    """Receivers in, a place and a log variance out; neither the receivers' number nor their order matters.

    Its target is metres north and east of a centroid, standardized. `mean` and `deviation` of the training
    rows, `(2,)`, are among the weights: a prediction becomes a place with them.
    """

    mean: Tensor
    deviation: Tensor

    def __init__(self, shape: TriangulationShape | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        self.shape = shape = shape or TriangulationShape()
        self._dropout = dropout
        self.each = nn.Sequential(
            nn.Linear(shape.features, shape.hidden), nn.GELU(), nn.Dropout(dropout),
            nn.Linear(shape.hidden, shape.width), nn.GELU(),
        )  # fmt: skip
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.mix = nn.Linear(shape.width, shape.width)
        self.weigh = nn.Linear(shape.width, shape.heads)
        self.head = nn.Sequential(
            nn.Linear((shape.heads + 1) * shape.width, shape.head), nn.GELU(), nn.Dropout(dropout)
        )
        self.position = nn.Linear(shape.head, 2)
        self.log_variance = nn.Linear(shape.head, 1)
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("deviation", torch.ones(2))

    def set_statistics(self, statistics: Mapping[str, Any]) -> None:
        """Take over mean and deviation of the targets, as `SQLSource.statistics` gives them."""
        for name in ("mean", "deviation"):
            self.get_buffer(name).copy_(torch.tensor(statistics["target"][name]))

    def forward(self, receivers: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return places `(B, 2)` and log variances `(B, 1)`, of `(B, R, F)` and a mask `(B, R)`."""
        x: Tensor = self.each(receivers)
        x = x + self._attended(x, mask)
        weights = self.weigh(x).masked_fill(mask.unsqueeze(-1), -torch.inf).softmax(1)
        weighed = (weights.transpose(1, 2) @ x).flatten(1)
        counted = (~mask).unsqueeze(-1)
        mean = (x * counted).sum(1) / counted.sum(1)
        found = self.head(torch.cat([weighed, mean], -1))
        return self.position(found), self.log_variance(found).clamp(-WIDEST, WIDEST)

    def _attended(self, x: Tensor, mask: Tensor) -> Tensor:
        rows, receivers, width = x.shape
        q, k, v = self.qkv(x).view(rows, receivers, 3, self.shape.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=~mask[:, None, None, :])
        return self.mix(mixed.transpose(1, 2).reshape(rows, receivers, width))

    def place(self, standardized: Tensor, centroid: Tensor) -> Tensor:
        """Latitude and longitude in degrees, `(B, 2)` float64, of standardized metres from centroids."""
        north, east = (standardized.double() * self.deviation + self.mean).unbind(-1)
        latitude, longitude = centroid.double().unbind(-1)
        along = METRES * torch.cos(torch.deg2rad(latitude))
        return torch.stack([latitude + north / METRES, longitude + east / along], -1)


def position_losses(model: nn.Module, batch: Batch) -> Tensor:
    """Return negative log likelihood of each row's true place, `(B,)`, without its constant."""
    position, log_variance = model(batch["receivers"], batch["signal_mask"])
    square = (position - batch["target"]).square().sum(-1)
    spread = log_variance.squeeze(-1)
    return 0.5 * square * torch.exp(-spread) + spread


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionErrors:
    """How far predicted places are from true ones, on a sphere."""

    mean_m: float
    rmse_m: float
    p50_m: float
    p68_m: float
    p95_m: float
    expected_m: float
    """Root mean square distance that the model itself expects."""
    loss: float
    """Mean negative log likelihood."""


@torch.no_grad()
def position_errors(model: TriangulationModel, batches: Iterable[Batch]) -> PositionErrors:
    """Return errors over all rows of `batches`; the model is left in the mode that it was in."""
    before = model.training
    model.eval()
    far: list[Tensor] = []
    expected: list[Tensor] = []
    losses: list[Tensor] = []
    for batch in batches:
        position, log_variance = model(batch["receivers"], batch["signal_mask"])
        found, true = (model.place(one, batch["centroid"]) for one in (position, batch["target"]))
        far.append(haversine_m(found, true))
        expected.append(log_variance.double().exp().squeeze(-1) * model.deviation.double().square().sum())
        losses.append(position_losses(model, batch).double())
    model.train(before)
    distances = torch.cat(far)
    p50, p68, p95 = distances.quantile(distances.new_tensor([0.5, 0.68, 0.95])).tolist()
    return PositionErrors(
        mean_m=float(distances.mean()),
        rmse_m=float(distances.square().mean().sqrt()),
        p50_m=p50,
        p68_m=p68,
        p95_m=p95,
        expected_m=float(torch.cat(expected).mean().sqrt()),
        loss=float(torch.cat(losses).mean()),
    )


@dataclass(frozen=True, slots=True)
class Triangulation:
    """Learns positions from radio rows, for `stoker.run.fitting`."""

    model: TriangulationModel

    def losses(self, batch: Batch) -> Tensor:
        """Of each row, `(B,)`."""
        return position_losses(self.model, batch)

    def judge(self, batches: Iterable[Batch]) -> dict[str, float]:
        """Return errors over all rows."""
        found = asdict(position_errors(self.model, batches))
        return {"val_loss": found.pop("loss"), **found}


def haversine_m(one: Tensor, other: Tensor) -> Tensor:
    """Return metres along the sphere between places in degrees, `(..., 2)`.

    >>> round(float(haversine_m(torch.tensor([45.0, 8.0]), torch.tensor([46.0, 8.0]))))
    111195
    """
    latitude, longitude = torch.deg2rad(one.double()).unbind(-1)
    other_latitude, other_longitude = torch.deg2rad(other.double()).unbind(-1)
    share = (
        torch.sin((other_latitude - latitude) / 2).square()
        + torch.cos(latitude) * torch.cos(other_latitude)
        * torch.sin((other_longitude - longitude) / 2).square()
    )  # fmt: skip
    return 2 * EARTH_M * torch.asin(share.clamp(0, 1).sqrt())


# ----------------------------------------------------------------------------------------------------------
# The table of radio measurements: made in SQLite or PostgreSQL, and how its rows become samples.


TABLE, SETS = "measurement_features", "synthetic_datasets"

COLUMNS: Mapping[str, tuple[str, str]] = {
    "recording_session_id": ("TEXT PRIMARY KEY", "uuid PRIMARY KEY"),
    "timestamp": ("TEXT NOT NULL", "timestamptz NOT NULL"),
    "receiver_features": ("TEXT NOT NULL", "jsonb[] NOT NULL"),
    "tx_latitude": ("REAL", "double precision"),
    "tx_longitude": ("REAL", "double precision"),
    "tx_altitude_m": ("REAL", "double precision"),
    "tx_power_dbm": ("REAL", "double precision"),
    "tx_known": ("BOOLEAN", "boolean"),
    "extraction_metadata": ("TEXT NOT NULL", "jsonb NOT NULL"),
    "overall_confidence": ("REAL NOT NULL", "double precision NOT NULL"),
    "mean_snr_db": ("REAL", "double precision"),
    "num_receivers_detected": ("INTEGER", "integer"),
    "num_receivers_in_sample": ("INTEGER", "integer"),
    "gdop": ("REAL", "double precision"),
    "dataset_id": ("TEXT NOT NULL", "uuid NOT NULL"),
}
"""Columns with their types in SQLite and in PostgreSQL."""
_SETS = {
    "id": ("TEXT PRIMARY KEY", "uuid PRIMARY KEY"),
    "name": ("TEXT UNIQUE NOT NULL", "varchar(100) UNIQUE NOT NULL"),
    "num_samples": ("INTEGER NOT NULL", "integer NOT NULL"),
    "config": ("TEXT NOT NULL", "jsonb NOT NULL"),
}


def radio_columns(receivers: int = 7) -> dict[str, Json]:
    """Return the rules by which a row becomes a sample.

    There are six numbers for each of at most `receivers` receivers. Signal to noise, power density and
    frequency offset are scaled to 0..1 over the range they have here. Then come metres north and east of the
    centroid of those that hear the signal, and whether it is one of them. The target is metres from the same
    centroid.
    """
    features: list[Json] = [
        {"path": "snr_db.mean", "missing": 0.0, "range": [-20.0, 60.0]},
        {"path": "psd_dbm_per_hz.mean", "missing": -180.0, "range": [-180.0, -100.0]},
        {"path": "frequency_offset_hz.mean", "missing": 0.0, "range": [-50.0, 50.0]},
        "@north",
        "@east",
        "signal_present",
    ]
    return {
        "receivers": {
            "column": "receiver_features",
            "list": receivers,
            "features": features,
            "place": ["rx_lat", "rx_lon"],
            "present": "signal_present",
            "mask": "signal_mask",
            "standardize": ["@north", "@east"],
        },
        "target": {
            "columns": ["tx_latitude", "tx_longitude"], "metres_from": "receivers", "standardize": True
        },
        "gdop": {"dtype": "float32", "null": 50.0},
        "num_receivers": {"column": "num_receivers_detected", "dtype": "int64"},
        "centroid": {"centroid_of": "receivers"},
    }  # fmt: skip


def radio_where(
    dataset_ids: Sequence[str], *, min_snr_db: float | None = None, max_gdop: float | None = None
) -> str:
    """Return the condition on rows, in SQL; ids and numbers are checked, so nothing else gets in.

    Raises:
        ConfigError: An id is not a UUID, or none is given.
    """
    try:
        ids = [str(uuid.UUID(str(one))) for one in dataset_ids]
    except ValueError as error:
        raise ConfigError(f"dataset_ids are {[*dataset_ids]}", hint=f"Expected UUIDs: {error}") from error
    if not ids or isinstance(dataset_ids, str):
        raise ConfigError(f"dataset_ids is {dataset_ids!r}", hint="Expected a list of at least one UUID")
    quoted = ", ".join(f"'{one}'" for one in ids)
    parts = [f"dataset_id IN ({quoted})"]
    if min_snr_db is not None:
        parts.append(f"mean_snr_db >= {float(min_snr_db)!r}")
    if max_gdop is not None:
        parts.append(f"gdop <= {float(max_gdop)!r}")
    return " AND ".join(parts)


def write_radio(
    url: str | Path, spec: RadioSpec, on_row: Callable[[int], None] = lambda number: None
) -> bool:
    """Make the rows of `spec` unless they are there; rows of other sets are left alone.

    Args:
        url: The database.
        spec: Settings of the rows.
        on_row: Called with the number of rows so far.

    Returns:
        Whether they had to be made.
    Raises:
        SourceError: The database cannot be written, has such a table of another form, or rows of another set
            with the same keys.
        ReadOnlyError: SQLite's file, or its folder, cannot be written.
    """
    address = parse_database_url(url)
    write = _write_sqlite if address.kind == "sqlite" else _write_postgres
    return write(address, spec, on_row)


def _counted(spec: RadioSpec, on_row: Callable[[int], None]) -> Iterator[dict[str, Any]]:
    for number, row in enumerate(radio_rows(spec), 1):
        yield row
        on_row(number)


def _same_keys(where: str, spec: RadioSpec) -> SourceError:
    return SourceError(
        f"{where}: {TABLE} has rows of another set with the same keys, made from seed {spec.seed} as well",
        hint="Give another seed, or another database",
    )


def _write_sqlite(address: DatabaseURL, spec: RadioSpec, on_row: Callable[[int], None]) -> bool:
    path = Path(address.target)
    try:
        make_folder(path.parent)
    except ReadOnlyError as error:
        hint = f"{error.problem.hint}, with --database"
        raise ReadOnlyError(error.problem.fact, hint=hint) from error
    names = ", ".join(COLUMNS)
    try:
        with closing(sqlite3.connect(path, timeout=30.0)) as connection, connection:
            connection.execute("BEGIN IMMEDIATE")
            for statement in _statements(0):
                connection.execute(statement)
            if _there(connection, spec):
                return False
            connection.execute(f"DELETE FROM {TABLE} WHERE dataset_id = ?", (str(spec.dataset_id),))  # noqa: S608
            marks = ", ".join("?" * len(COLUMNS))
            connection.executemany(
                f"INSERT INTO {TABLE} ({names}) VALUES ({marks})",  # noqa: S608 - names of our own
                ([_sqlite_value(row[name]) for name in COLUMNS] for row in _counted(spec, on_row)),
            )
            connection.execute(
                f"INSERT INTO {SETS} VALUES (?, ?, ?, ?)",  # noqa: S608
                [_sqlite_value(value) for value in _set_row(spec)],
            )
    except sqlite3.IntegrityError as error:
        raise _same_keys(str(path), spec) from error
    except sqlite3.Error as error:
        raise SourceError(
            f"{path}: {error}", hint="Expected a SQLite database that can be written"
        ) from error
    return True


def _write_postgres(address: DatabaseURL, spec: RadioSpec, on_row: Callable[[int], None]) -> bool:
    psycopg = driver()
    names = ", ".join(COLUMNS)
    try:
        with psycopg.connect(address.target, connect_timeout=10) as connection:
            connection.execute("SET LOCAL statement_timeout = '300s'")
            connection.execute("SET LOCAL lock_timeout = '30s'")
            for statement in _statements(1):
                connection.execute(statement)
            if _there(connection, spec):
                return False
            connection.execute(f"DELETE FROM {TABLE} WHERE dataset_id = %s", (spec.dataset_id,))  # noqa: S608
            with connection.cursor().copy(f"COPY {TABLE} ({names}) FROM STDIN") as copy:
                for row in _counted(spec, on_row):
                    copy.write_row([_postgres_value(row[name], psycopg) for name in COLUMNS])
            connection.execute(
                f"INSERT INTO {SETS} VALUES (%s, %s, %s, %s)",  # noqa: S608
                [_postgres_value(value, psycopg) for value in _set_row(spec)],
            )
    except psycopg.errors.UniqueViolation:
        raise _same_keys(address.shown, spec) from None
    except psycopg.Error as error:
        text = address.hide(" ".join(str(error).split()))
        raise SourceError(
            f"{address.shown}: {text}", hint="Expected a database that can be written"
        ) from None
    return True


def remove_radio(path: str, dataset_id: str) -> None:
    """Remove a set from a SQLite database, if it is there.

    Raises:
        SourceError: The database cannot be written.
    """
    target = Path(parse_database_url(path).target)
    if not target.is_file():
        return
    try:
        with closing(sqlite3.connect(target, timeout=30.0)) as connection, connection:
            connection.execute(f"DELETE FROM {TABLE} WHERE dataset_id = ?", (dataset_id,))  # noqa: S608
            connection.execute(f"DELETE FROM {SETS} WHERE id = ?", (dataset_id,))  # noqa: S608
    except sqlite3.OperationalError as error:
        if "no such table" not in str(error):
            raise SourceError(
                f"{target}: {error}", hint="Expected a SQLite database that can be written"
            ) from error


def _statements(kind: int) -> Iterator[str]:
    for table, columns in ((TABLE, COLUMNS), (SETS, _SETS)):
        listed = ", ".join(f"{name} {types[kind]}" for name, types in columns.items())
        yield f"CREATE TABLE IF NOT EXISTS {table} ({listed})"
    yield f"CREATE INDEX IF NOT EXISTS {TABLE}_by_set ON {TABLE} (dataset_id, timestamp)"


def _there(connection: Any, spec: RadioSpec) -> bool:
    """Return True if the set is complete: it is noted last, and its rows are counted."""
    own = f"'{spec.dataset_id}'"
    noted = connection.execute(f"SELECT num_samples FROM {SETS} WHERE id = {own}").fetchone()  # noqa: S608
    counted = connection.execute(f"SELECT count(*) FROM {TABLE} WHERE dataset_id = {own}")  # noqa: S608
    (count,) = counted.fetchone()
    if noted is not None and int(count) != spec.rows:
        raise ConfigError(
            f"{TABLE} has {count} rows of data set {spec.dataset_id}, of which {noted[0]} were made",
            hint=f"Remove them and its row in {SETS}, or give another database",
        )
    return noted is not None


def _set_row(spec: RadioSpec) -> Sequence[Any]:
    name = f"radio {spec.rows} rows, seed {spec.seed} ({str(spec.dataset_id)[:8]})"
    return spec.dataset_id, name, spec.rows, spec.to_json()


def _sqlite_value(value: Any) -> Any:
    if isinstance(value, list | dict):
        return canonical_json(value)
    return value if value is None or isinstance(value, bool | int | float) else str(value)


def _postgres_value(value: Any, psycopg: Any) -> Any:
    jsonb = psycopg.types.json.Jsonb
    if isinstance(value, list):
        return [jsonb(entry) for entry in value]  # pyright: ignore[reportUnknownVariableType]
    return jsonb(value) if isinstance(value, dict) else value


def sql_settings(url: str, spec: RadioSpec) -> dict[str, str]:
    """Return settings of `data` for these rows, as they are given on a command line."""
    return {
        "data.kind": "sql",
        "data.sql.url": url,
        "data.sql.table": TABLE,
        "data.sql.key": "recording_session_id",
        "data.sql.columns": json.dumps(radio_columns()),
        "data.sql.where": f"dataset_id = '{spec.dataset_id}'",
    }


# ----------------------------------------------------------------------------------------------------------
# The job on rows of a database: make them, read them once, cache, plan, train, and say how far off it is.


DATABASE = "sqlite:///data/demo/radio.db"
SPEC = RadioSpec()
SETTINGS = {
    "data.task": "radio",
    "data.splits": "{train: 0.8, val: 0.2}",
    "training.latent_cache_dtype": "null",
    "training.run_dir": "runs/demo-radio",
    "training.epochs": "30",
    "training.batch_size": "256",
    "training.lr": "6e-3",
}
"""Settings of the demo; the command line wins over them."""
COMPARED = 4
"""Batches whose loss is taken from the database as well as from the cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RadioResult:
    """Result of the demo."""

    machine: str
    database: str
    """Without user or password."""
    rows: int
    made: bool
    """True if the rows had to be made."""
    data_s: float
    caches: tuple[CacheResult, ...]
    plan: PlanResult
    tier: str
    steps: int
    epochs: int
    train_s: float
    stall: float
    """Of the last epoch."""
    loss: float
    """Mean of the last epoch."""
    trained: PositionErrors
    """Over the validation split."""
    untrained: PositionErrors
    """The same network before its first step."""
    losses: tuple[float, float]
    """Of the untrained network over the first batches: from the cache, and from the database."""
    run_dir: str

    @property
    def record_bytes(self) -> int:
        """Bytes of one record."""
        return sum(field.size_bytes() for field in self.caches[0].cache.schema.values())

    @property
    def data_line(self) -> str:
        """What the rows are."""
        return f"{format_count(self.rows)} measurements of transmitters{'' if self.made else ', made before'}"

    def to_json(self) -> dict[str, Json]:
        """Return all figures by name."""
        return {
            "database": self.database,
            "rows": self.rows,
            "made": self.made,
            "data_s": self.data_s,
            "encode_s": sum(cache.seconds for cache in self.caches if cache.encoded),
            "caches": [cache.to_json() for cache in self.caches],
            "cache_reused": not any(cache.encoded for cache in self.caches),
            "record_bytes": self.record_bytes,
            "plan": self.plan.to_json(),
            "tier": self.tier,
            "steps": self.steps,
            "epochs": self.epochs,
            "train_s": self.train_s,
            "stall": self.stall,
            "loss": self.loss,
            "position_error_m": self.trained.mean_m,
            "median_position_error_m": self.trained.p50_m,
            "untrained_position_error_m": self.untrained.mean_m,
            "loss_from_cache": self.losses[0],
            "loss_from_database": self.losses[1],
            "run_dir": self.run_dir,
        }


def run_radio(
    overrides: Sequence[str] = (),
    *,
    database: str = DATABASE,
    spec: RadioSpec = SPEC,
    say: Callable[[str], None] = lambda _: None,
) -> RadioResult:
    """Make the rows unless they are there, then precompute, plan and train.

    Args:
        overrides: Settings as `key=value`, over the demo's own.
        database: A SQLite file or URL, or PostgreSQL's.
        spec: What rows there are to be.
        say: Told of each sixth of the epochs.
    Raises:
        StokerError: As `SQLSource`, `precompute` and `Loader`.
    """
    config = radio_config(overrides, database, spec)
    began = time.monotonic()
    made = write_radio(database, spec)
    data_s = time.monotonic() - began
    run = Run(config).parts()[0]
    caches = precompute_config(run, splits=["train", "val"]).caches
    cache = caches[0].cache
    plan = plan_located(run, CacheLocation(recipe=cache.recipe, folder=cache.path, cache=cache))
    source = _sql_source(build_source(run, "train"))
    meter = StallMeter()
    train, val = _loader(run, cache, meter=meter), _loader(run, caches[1].cache, shuffle=False)
    torch.manual_seed(config.training.seed)
    model = TriangulationModel()
    model.set_statistics(source.statistics)
    model.to(run.device)
    losses = compare_losses(model, train, source)
    untrained = position_errors(model, val)
    began, epochs = time.monotonic(), config.training.epochs
    meter.reset()

    settings = TrainConfig(epochs=epochs, lr=config.training.lr, weight_decay=config.training.weight_decay)
    with one_thread():
        report = fit(Triangulation(model), train, val, settings, meter=meter, on_event=_telling(say, epochs))
    train_s = time.monotonic() - began
    run_dir = Path(config.training.run_dir or "runs/demo-radio")
    save_model(run_dir / "regressor.safetensors", model.state_dict(), {"statistics": dict(source.statistics)})
    return RadioResult(
        machine=describe_machine(),
        database=source.where_it_is,
        rows=spec.rows,
        made=made,
        data_s=data_s,
        caches=tuple(caches),
        plan=plan,
        tier=train.plan.tier,
        steps=epochs * len(train),
        epochs=epochs,
        train_s=train_s,
        stall=cast("float", report.row["stall"]),
        loss=cast("float", report.row["train_loss"]),
        trained=position_errors(model, val),
        untrained=untrained,
        losses=losses,
        run_dir=str(run_dir),
    )


def _telling(say: Callable[[str], None], epochs: int) -> EventSink:
    """Tells of each sixth of the epochs how far off it is."""
    every = max(1, epochs // 6)

    def tell(kind: str, facts: Mapping[str, Json]) -> None:
        told = cast("Mapping[str, Any]", facts)
        if kind == "epoch" and told["epoch"] < epochs and told["epoch"] % every == 0:
            say(f"epoch {told['epoch']} · {format_count(told['mean_m'])} m off")

    return tell


def radio_config(overrides: Sequence[str], database: str, spec: RadioSpec) -> Config:
    """Return the demo's settings with `overrides` in place of their own.

    Raises:
        ConfigError: The database's URL holds a password.
    """
    given = {text.partition("=")[0].strip() for text in overrides}
    own = {**sql_settings(database, spec), **SETTINGS}
    return load_config(None, [*(f"{key}={v}" for key, v in own.items() if key not in given), *overrides])


def _loader(run: Run, cache: Any, *, shuffle: bool = True, meter: StallMeter | None = None) -> Loader:
    training = run.config.training
    return Loader(
        cache,
        training.batch_size,
        tier=training.tier,
        device=run.device,
        seed=training.seed,
        shuffle=shuffle,
        meter=meter,
    )


def _sql_source(source: Source) -> SQLSource:
    if not isinstance(source, SQLSource):
        raise ConfigError("data.limit leaves out rows, and the demo compares all", hint="Leave it out")
    return source


@torch.no_grad()
def compare_losses(model: torch.nn.Module, loader: Loader, source: Source) -> tuple[float, float]:
    """Loss over the first batches as the loader gives them, and as the database does for the same rows."""
    cached, read = [], []
    for batch in islice(loader, COMPARED):
        cached.append(position_losses(model, batch).mean())
        rows = read_batch(source, batch["index"])
        read.append(
            position_losses(
                model, {name: value.to(batch["index"].device) for name, value in rows.items()}
            ).mean()
        )
    loader.load_state_dict(loader.state_dict((0, 0)))
    return float(torch.stack(cached).mean()), float(torch.stack(read).mean())


def read_batch(source: Source, index: Tensor) -> dict[str, Tensor]:
    """Return the samples of some numbers, stacked; read from the source, not from a cache."""
    samples = [source.read(number) for number in index.tolist()]
    return {name: torch.stack([torch.from_numpy(sample[name]) for sample in samples]) for name in samples[0]}
