"""How many records the memory of a GPU holds, for those that one might rent; arithmetic, like `tiers`.

A record's bytes come from the schema and the storage dtype, so the answer is of one's own data: no rule of
thumb in gigabytes per thousand samples.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from stoker.errors import ConfigError
from stoker.plan.tiers import DEVICE_RESERVE, DEVICE_RESERVE_UNSEEN
from stoker.schema import JsonResult
from stoker.units import GIB, format_bytes, format_count

MEMORY_GIB: Mapping[str, float] = {
    "V100 16 GB": 15.7,
    "V100 32 GB": 31.7,
    "A100 40 GB": 39.4,
    "A100 80 GB": 79.1,
    "H100 80 GB": 79.1,
    "H200 141 GB": 139.7,
}
"""What torch reports as `total_memory`, a few tenths less than what is on the label."""
PEAK_FLOPS: Mapping[str, float] = {"V100": 125e12, "A100": 312e12, "H100": 989e12, "H200": 989e12}
"""Products of half precision a second, without sparsity. Source: the makers' data sheets (SXM forms)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRow(JsonResult):
    """One GPU."""

    gpu: str
    memory_bytes: int
    """All of it."""
    usable_bytes: int
    """What is left for records."""
    records: int
    """Records that it holds."""
    share: float
    """Part of the data set that this is, 0..1."""


def gpu_table(record_bytes: float, records: int, *, model_bytes: int | None = None) -> tuple[GpuRow, ...]:
    """Return what each GPU of `MEMORY_GIB` would hold.

    Args:
        record_bytes: Of one record, as stored: `stoker.store.format.record_bytes` of a cache's columns.
        records: How many there are.
        model_bytes: Peak of the model's own memory; None: by the rule for one that was not seen yet.

    Raises:
        ConfigError: A record has no bytes.

    >>> [row.records for row in gpu_table(602_112, 100_000, model_bytes=8 * GIB)][::5]
    [13171, 100000]
    """
    if not record_bytes > 0 or records < 0:
        raise ConfigError(f"{records} records of {record_bytes} bytes cannot be placed. Expected above 0")
    rows: list[GpuRow] = []
    for name, gib in MEMORY_GIB.items():
        memory = int(gib * GIB)
        reserve = DEVICE_RESERVE_UNSEEN if model_bytes is None else DEVICE_RESERVE
        usable = max(0, int(memory * (1 - reserve)) - (model_bytes or 0))
        held = min(records, int(usable // record_bytes))
        rows.append(
            GpuRow(
                gpu=name,
                memory_bytes=memory,
                usable_bytes=usable,
                records=held,
                share=held / records if records else 1.0,
            )
        )
    return tuple(rows)


def known_gpu(name: str, memory_bytes: int) -> str | None:
    """Return the entry of `MEMORY_GIB` that a GPU is, by the name that its driver gives; None: none of them.

    >>> known_gpu("NVIDIA A100-SXM4-40GB", int(39.4 * GIB)), known_gpu("NVIDIA L4", 23 * GIB)
    ('A100 40 GB', None)
    >>> known_gpu("NVIDIA GH200 480GB", 95 * GIB)  # no H200
    """
    alike = [entry for entry in MEMORY_GIB if re.search(rf"\b{entry.split()[0]}\b", name)]
    return min(alike, key=lambda entry: abs(MEMORY_GIB[entry] * GIB - memory_bytes), default=None)


def peak_flops(name: str) -> float:
    """`PEAK_FLOPS` of an entry of `MEMORY_GIB`."""
    return PEAK_FLOPS[name.split(maxsplit=1)[0]]


def say_gpus(record_bytes: float, records: int, *, model_bytes: int | None = None) -> str:
    """Return the table in one sentence; arguments as for `gpu_table`.

    >>> say_gpus(1e9, 100, model_bytes=0).partition("; ")[2]
    '16 on V100 16 GB, 33 on V100 32 GB, 41 on A100 40 GB, 83 on A100 80 GB, 83 on H100 80 GB'
    """
    rows = gpu_table(record_bytes, records, model_bytes=model_bytes)
    whole = ", ".join(row.gpu for row in rows if row.share == 1)
    parts = ", ".join(f"{format_count(row.records)} on {row.gpu}" for row in rows if row.share < 1)
    places = "; ".join(filter(None, (whole and f"whole on {whole}", parts)))
    left = (
        "half of each left to the model"
        if model_bytes is None
        else f"{format_bytes(model_bytes)} for the model"
    )
    return f"{format_count(records, 'record')} of {format_bytes(record_bytes)}, {left}: {places}"


def say_together(held: int, records: int) -> str:
    """Say how many devices like this one hold what it cannot hold alone; empty if none are needed.

    >>> say_together(300, 1000)[:66]
    'one device holds 300 of 1,000 records, 4 of them hold all together'
    >>> say_together(1000, 1000), say_together(0, 1000)
    ('', '')
    """
    if not 0 < held < records:
        return ""
    count = -(-records // held)
    return (
        f"one device holds {format_count(held)} of {format_count(records)} records, {count} of them hold all "
        f"together: `torchrun --nproc-per-node {count} -m stoker train CONFIG training.order=static`, "
        f"1/{count} of the examples each, shuffled separately"
    )
