"""What a smaller storage dtype would buy, in bytes and tiers, and cost, measured on the cache's own records.

Bytes and tiers are arithmetic on the schema. The cost is measured on a few records, read, verified and stored
again in memory as the other dtype; nothing is written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from stoker.errors import ConfigError, RecordError
from stoker.loader.places import Places, find_places
from stoker.pipeline.locate import Located
from stoker.plan import Demand, Plan
from stoker.schema import SCALE_SUFFIX, Field, Json, Schema, columns_of
from stoker.store import Cache, Recipe
from stoker.store.convert import from_array
from stoker.store.packing import store_columns
from stoker.store.recipe import stored_schema
from stoker.units import MIB, format_bytes, format_count

DTYPES = ("float16", "int8", "float8_e4m3fn")
"""What is tried, where it is smaller than what is stored."""
SAMPLES = 8
"""Records whose error is measured."""
PIECE_BYTES = 8 * MIB
"""Of each field of such a record the first steps, up to so many bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Smaller:
    """One dtype that would take fewer bytes."""

    dtype: str
    bytes: int
    """Of all records, in place of `Plan`'s."""
    plan: Plan
    """Where the records would lie then."""
    samples: int = 0
    """Records that the errors were measured on; 0: none is stored yet."""
    max_error: float | None = None
    """The worst `max|x - y| / max|x|` of a record and field; None: not measured."""
    rms_error: float | None = None
    """The worst `rms(x - y) / rms(x)`."""
    refused: str = ""
    """Why records cannot be stored so; empty where they can."""

    def to_json(self) -> dict[str, Json]:
        """The keys that scripts rely on."""
        return {
            "dtype": self.dtype,
            "bytes": self.bytes,
            "tiers": dict(self.plan.records_by_tier()),
            "tier": self.plan.tier,
            "samples": self.samples,
            "max_error": self.max_error,
            "rms_error": self.rms_error,
            "refused": self.refused,
        }


Planned = Callable[[Demand], Plan]
"""`plan_tiers` with everything given but the demand."""


def smaller_dtypes(located: Located, demand: Demand, planned: Planned) -> tuple[Smaller, ...]:
    """Every dtype of `DTYPES` that would make records smaller, in that order."""
    recipe, cache = located.recipe, located.cache
    lengths = _mean_lengths(recipe, cache)
    now = _record_bytes(recipe.schema, lengths)
    places = _chosen(cache) if cache is not None and len(cache) else None
    found: list[Smaller] = []
    for dtype in DTYPES:
        try:
            schema = stored_schema(recipe.encoded, dtype)
        except ConfigError:  # a field takes fewer bytes in float16
            continue
        part = _record_bytes(schema, lengths) / now if now else 1.0
        if part >= 1:
            continue
        wanted = replace(
            demand, record_bytes=demand.record_bytes * part, example_bytes=demand.example_bytes * part
        )
        plan = planned(wanted)
        one = Smaller(dtype=dtype, bytes=round(wanted.records * wanted.record_bytes), plan=plan)
        found.append(one if cache is None or places is None else _measured(one, schema, cache, places))
    return tuple(found)


def say(smaller: tuple[Smaller, ...], plan: Plan, max_error: float | None) -> str:
    """The smallest dtype within the bound that the user set, in a sentence; empty where there is none."""
    allowed = [
        one
        for one in smaller
        if not one.refused and (max_error is None or one.max_error is None or one.max_error <= max_error)
    ]
    if not allowed:
        return ""
    best = min(allowed, key=lambda one: (one.bytes, one.max_error or 0.0))
    before = sum(row.bytes for row in plan.rows)
    moved = [
        f"{format_count(after, 'record')} on the {tier} tier instead of {format_count(was)}"
        for (tier, after), was in zip(
            best.plan.records_by_tier().items(), plan.records_by_tier().values(), strict=True
        )
        if after > was
    ]
    bound = "" if max_error is None else f" (limit you set: {max_error:.2g})"
    cost = "its error is known once some records are encoded"
    if best.max_error is not None:
        cost = (
            f"largest error {best.max_error:.2g} of a record's largest value{bound}, "
            f"rms {best.rms_error:.2g}, measured on {format_count(best.samples)} of them"
        )
    return (
        f"training.latent_cache_dtype={best.dtype} would take {format_bytes(best.bytes)} instead of "
        f"{format_bytes(before)}{''.join(f', {text}' for text in moved)}; {cost}"
    )


def _mean_lengths(recipe: Recipe, cache: Cache | None) -> Mapping[str, float]:
    """Mean steps of ragged fields; one where no record is there to tell."""
    ragged = [name for name, field in recipe.schema.items() if field.ragged]
    if cache is None or not len(cache):
        return dict.fromkeys(ragged, 1.0)
    return {name: float(cache.lengths(name).mean()) for name in ragged}


def _record_bytes(schema: Schema, lengths: Mapping[str, float]) -> float:
    size = 0.0
    for name, field in columns_of(schema).items():
        steps = lengths[name.removesuffix(SCALE_SUFFIX)] if field.ragged else 0.0
        size += field.row_bytes * steps if field.ragged else field.size_bytes()
    return size


def _chosen(cache: Cache) -> Places:
    count = min(SAMPLES, len(cache))
    numbers = cache.numbers[np.linspace(0, len(cache) - 1, count).round().astype(np.int64)]
    return find_places(cache, numbers)


def _measured(one: Smaller, schema: Schema, cache: Cache, places: Places) -> Smaller:
    """With the worst error over fields and records."""
    worst = rms = 0.0
    try:
        for name, field in schema.items():
            stored = cache.schema[name]
            if not field.floating or field.dtype == stored.dtype or stored.packed:
                continue
            for shard, row, number in zip(places.shard, places.row, places.numbers, strict=True):
                values = _first_steps(cache, int(shard), int(row), name, stored)
                piece = replace(field, shape=(len(values), *field.shape[1:]), ragged=False)
                rows = store_columns(name, piece, values[None], [int(number)])[name]
                worst, rms = max(worst, float(rows.max_error[0])), max(rms, float(rows.rms_error[0]))
    except RecordError as error:
        return replace(one, refused=str(error))
    return replace(one, samples=len(places.numbers), max_error=worst, rms_error=rms)


def _first_steps(cache: Cache, shard: int, row: int, name: str, field: Field) -> Tensor:
    """A record's field along axis 0, as far as `PIECE_BYTES` reach."""
    handle = cache.shard(shard)
    steps = min(handle.length(name, row), max(1, PIECE_BYTES // max(1, field.row_bytes)))
    return from_array(handle.read(name, row, 0, steps), field.dtype)
