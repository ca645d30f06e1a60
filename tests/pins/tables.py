"""Rows in the shape of `datasets.Dataset`, for the source that takes one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


class Rows:
    """What a source sees of a `datasets.Dataset`: a fingerprint, features, and slices as Arrow tables."""

    _fingerprint = "b0c6a7de51e2a4f3"

    def __init__(self, table: Any) -> None:
        self.table = table
        self.features = SimpleNamespace(arrow_schema=table.schema)

    def with_format(self, _: str) -> Rows:
        """Return itself: rows are Arrow's already."""
        return self

    def __len__(self) -> int:
        return self.table.num_rows

    def __getitem__(self, rows: slice) -> Any:
        return self.table.slice(rows.start, rows.stop - rows.start)


def listed_rows() -> Rows:
    """Return six rows of a number and a list."""
    import pyarrow as pa

    columns = {
        "x": pa.array([number / 4 for number in range(6)]),
        "pos": pa.array([[number, 1, 2] for number in range(6)], pa.list_(pa.int32(), 3)),
    }
    return Rows(pa.table(columns))
