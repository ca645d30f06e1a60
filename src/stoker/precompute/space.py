"""Whether the disk holds what is about to be written; asked before the first sample is read."""

from __future__ import annotations

from pathlib import Path

from stoker.errors import ResourceError
from stoker.plan.resources import Resources
from stoker.schema import Schema
from stoker.units import MIB, format_bytes, format_count

_SHARD_BYTES = 256 * MIB
_RESERVE_BYTES = 16 * MIB
_OVERHEAD = 1.01
_SPARE_INODES = 16


def needed_bytes(schema: Schema, records: int) -> int:
    """Bytes of that many records with checksums; ragged fields, of unknown size, count as empty."""
    each = sum(field.size_bytes(0 if field.ragged else None) for field in schema.values())
    return int(records * (each + 8 + 8 * len(schema)) * _OVERHEAD)


def check_space(folder: Path, schema: Schema, records: int, resources: Resources) -> None:
    """Compare what is needed with what is free, in bytes and in inodes.

    Raises:
        ResourceError: It does not fit; nothing has been written.
    """
    needed = needed_bytes(schema, records)
    files = needed // _SHARD_BYTES + 1 + _SPARE_INODES
    free, inodes = resources.disk_bytes, resources.disk_inodes
    if free is not None and needed + _RESERVE_BYTES > free:
        raise ResourceError(
            f"{folder} has {format_bytes(free)} free, {format_count(records)} records need "
            f"{format_bytes(needed)} and {format_bytes(_RESERVE_BYTES)} of reserve. "
            f"Make room, choose another cache folder, or a smaller dtype"
        )
    if inodes is not None and inodes < files:
        raise ResourceError(
            f"{folder} has room for {format_count(inodes)} more files, {format_count(files)} are needed. "
            f"Remove files there, or choose another cache folder"
        )
