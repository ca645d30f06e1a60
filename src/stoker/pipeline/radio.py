"""Measurements of transmitters by radio receivers, made here, to try rows of a database at once.

A transmitter somewhere in north-west Italy is heard by up to seven receivers at fixed places. What each one
measures follows from free-space loss, the ground between, shadows and noise. Rows are those that enough
receivers hear well enough. Equal settings give equal rows: draws come from the seed and a block's number.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError
from stoker.schema import Json, JsonResult

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
    """What to make; equal values give equal rows."""

    rows: int = 4030
    """Accepted measurements."""
    seed: int = 0
    power_dbm: float = 37.0
    """What transmitters send."""
    present_snr_db: float = 3.0
    """From where on a receiver hears a signal."""
    least_receivers: int = 3
    """Receivers that hear it, at least."""
    least_snr_db: float = 5.0
    """Mean over those, at least."""
    most_gdop: float = 150.0
    """How badly the receivers' places may suit to find it, at most."""

    def __post_init__(self) -> None:
        """Refuse what would never end."""
        if self.rows < 1 or not 1 <= self.least_receivers <= len(RECEIVERS):
            raise ConfigError(
                f"{self.rows} rows of at least {self.least_receivers} receivers cannot be made. Expected at "
                f"least 1 row and 1 to {len(RECEIVERS)} receivers"
            )

    @property
    def dataset_id(self) -> uuid.UUID:
        """Names the set in the table: another set has another."""
        return uuid.uuid5(uuid.NAMESPACE_URL, f"stoker-radio-1 {sorted(self.to_json().items())}")


def radio_rows(spec: RadioSpec) -> Iterator[dict[str, Any]]:
    """`spec.rows` rows by column; `receiver_features` is a list of dictionaries."""
    left, block = spec.rows, 0
    while left:
        made = _block(spec, block)
        if block == 64 and left == spec.rows:
            raise ConfigError(f"no measurement in {64 * _BLOCK:,} satisfies {spec}. Ask for less")
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
    ids = rng.bytes(16 * _BLOCK)
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


def _in_sample(rng: np.random.Generator) -> NDArray[np.bool_]:
    """Which receivers were on: four to all of them."""
    count = rng.integers(4, len(RECEIVERS) + 1, _BLOCK)
    rank = rng.random((_BLOCK, len(RECEIVERS))).argsort(1).argsort(1)
    return rank < count[:, None]


def _received(
    spec: RadioSpec, rng: np.random.Generator, distance_km: NDArray[Any], frequency_mhz: NDArray[Any]
) -> NDArray[np.float64]:
    """Power at each receiver in dBm. Source: free-space loss after Friis; the rest is made up."""
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
    """Mean, std, min and max of five looks at each feature: `(rows, receivers, features, 4)`."""
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
