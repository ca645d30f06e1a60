"""Settings of the kinds of data that are files of other formats than the HDF5 of simulations."""

from __future__ import annotations

from typing import Literal

from stoker.config.section import Flag, SettingsSection


class ArraysConfig(SettingsSection):
    """Trajectories of varying length in HDF5 or Zarr, grids in Zarr, `.npy` files."""

    layout: Literal["rows", "groups", "offsets", "particles", "mesh", "grid"] | None = None
    """Samples along axis 0, a group each, or flat with offsets; null: as in the first (docs/meshes.md)."""
    offsets: str | None = None
    """The array that says where each trajectory begins; null: `offsets`, `ptr` or the like."""
    attributes: tuple[str, ...] = ()
    """Numbers among the attributes of each group that are fields."""
    fill_missing: Flag = False
    """Take Zarr chunks that are not stored for their fill value."""


class TarConfig(SettingsSection):
    """Tar archives in the WebDataset layout."""

    members: tuple[str, ...] | None = None
    """Extensions to read, as `[jpg, cls]`; null: all of the first sample."""


class ParquetConfig(SettingsSection):
    """Rows of Parquet files."""

    columns: tuple[str, ...] | None = None
    """Columns that are fields; null: all, which must then be numbers, lists or bytes."""
    key: str | None = None
    """The column whose values name rows for splits; null: file and row."""
