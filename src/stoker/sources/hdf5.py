"""Samples from HDF5 files: PDEBench, The Well, or datasets named by the user.

Files are described once, in the process that asks first (`len`, `schema`, `identity`); the description
travels with copies of the source. Data is never read beyond the block that a sample lies in.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError, arg
from stoker.schema import Json, Sample, Schema, digest_json
from stoker.sources.dtypes import read_as
from stoker.sources.files import Paths, find_keyed_files
from stoker.sources.given import check_splits
from stoker.sources.hdf5_blocks import BlockReader, Place, block_bytes, run_length
from stoker.sources.hdf5_layout import (
    FieldLayout,
    FieldRole,
    Piece,
    arrange,
    channel_names,
    layout_to_json,
    sample_axes,
)
from stoker.sources.hdf5_open import FilePool
from stoker.sources.hdf5_placed import placed_part
from stoker.sources.hdf5_scan import Scan, ScannedFile, Wanted, scan_files
from stoker.sources.included import INCLUDABLE, finish
from stoker.sources.placed import PlacedPart
from stoker.sources.protocol import FileRef, Part, SourceIdentity
from stoker.units import format_count

VERSION = 1
"""Bumped by hand when the same file would give other samples."""

Preset = Literal["pdebench", "well"]


class HDF5Source:
    """Simulations in HDF5 files, as one numbered list of samples.

    Args:
        path: A file, a folder, a glob pattern, or a list of these.
        preset: `"pdebench"` or `"well"`; None: detected from the first file's contents.
        fields: Without a preset, the datasets and their axes, `{"latent": "n l d", "u": "run/u: n t x"}`, and
            parameters of the files, without axes, `{"Nu": ""}`. With `"pdebench"`, axes for datasets whose
            layout the file does not tell, `{"data": "n t x c"}`.
        split: `"train"`, `"val"`, `"test"` or another name; None: all samples.
        splits: Fractions, for data without a file per split; absent: 0.8/0.1/0.1.
        seed: Seed of the cut into fractions.
        subsample: Take every k-th point along axes `t x y z`, `{"t": 2, "x": 4}`.
        include: What else the file states, as further fields: `time` (T,) and `dt` (); `coordinates`, as `x`,
            `y`, `z`; and of The Well `boundary`, as `boundary_NAME` (0 wall, 1 open, 2 periodic) with
            `boundary_NAME_mask` and `boundary_NAME_values`. Each is stored with each sample.

    Samples have `data` `(T, H, W, C)` (1D: H = 1; steady: no T) and each parameter of a file as a float32
    scalar; with `fields`, the fields named. float64 is read as float32.

    Raises:
        ConfigError: Settings contradict each other.
        SourceError: A file is missing or empty; later, on first use, unreadable or ambiguous.
        SplitError: On first use: the split does not exist.
    """

    def __init__(  # noqa: PLR0913 - a public face with a fixed signature
        self,
        path: Paths,
        *,
        preset: Preset | None = None,
        fields: Mapping[str, str] | None = None,
        split: str | None = None,
        splits: Mapping[str, float] | None = None,
        seed: int = 0,
        subsample: Mapping[str, int] | None = None,
        include: str | Sequence[str] = (),
    ) -> None:
        if preset not in {None, "pdebench", "well"}:
            raise ConfigError(f"preset {preset!r} is unknown. Presets are 'pdebench' and 'well'")
        if preset == "well" and fields:
            raise ConfigError(
                f"preset 'well' reads axes from the file, so {arg('fields')} has no meaning. Drop one"
            )
        check_splits(split, splits, seed)
        strides = dict(subsample or {})
        if any(axis not in {"t", "x", "y", "z"} or step < 1 for axis, step in strides.items()):
            raise ConfigError(f"subsample {strides} must map t, x, y or z to steps of at least 1")
        wanted = {include} if isinstance(include, str) else {*include}
        if unknown := sorted(wanted - {*INCLUDABLE}):
            raise ConfigError(f"include names {unknown}. It may name {', '.join(INCLUDABLE)}")
        root, paths, keys = find_keyed_files(path)
        self._wanted = Wanted(
            root=root,
            paths=tuple(paths),
            keys=tuple(keys),
            preset=preset,
            fields=None if fields is None else dict(fields),
            split=split,
            splits=None if splits is None else dict(splits),
            seed=seed,
            strides={axis: int(step) for axis, step in sorted(strides.items()) if step > 1},
            include=tuple(name for name in INCLUDABLE if name in wanted),
        )
        self._scanned: Scan | None = None
        self._pool = FilePool()
        self._reader = BlockReader(self._pool, self._wanted.strides)

    def __repr__(self) -> str:
        """Where the data lies and how many files it has, without opening one."""
        of = f", split={self._wanted.split!r}" if self._wanted.split else ""
        return f"HDF5Source({str(self._wanted.root)!r}, {format_count(len(self._wanted.paths), 'file')}{of})"

    def __getstate__(self) -> dict[str, Any]:
        """Settings and description travel; open files and decoded blocks stay."""
        return {"_wanted": self._wanted, "_scanned": self._scanned}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._wanted, self._scanned = state["_wanted"], state["_scanned"]
        self._pool = FilePool()
        self._reader = BlockReader(self._pool, self._wanted.strides)

    def __len__(self) -> int:
        """Samples after selection, at least one."""
        return self._scan().count

    def close(self) -> None:
        """Close files and drop decoded blocks; the next read opens them again."""
        self._pool.close()
        self._reader = BlockReader(self._pool, self._wanted.strides)

    @property
    def channels(self) -> dict[str, tuple[str, ...]]:
        """For each field on a grid the names of its channels, in order."""
        layout = self._scan().files[0].layout
        named = {one.name: channel_names(one, self._wanted.strides) for one in layout.fields}
        return {name: names for name, names in named.items() if names}

    @property
    def buffer_bytes(self) -> int:
        """The most that one copy of this source (one reader) holds in decoded blocks."""
        strides = self._wanted.strides
        return max(
            sum(block_bytes(*pair, strides) for pair in zip(file.layout.pieces, file.blocks, strict=True))
            for file in self._scan().files
        )

    def schema(self) -> Schema:
        """Fields of every sample."""
        return dict(self._scan().schema)

    def read(self, number: int, start: int | None = None, stop: int | None = None) -> Sample:
        """Read one sample; `start:stop` cuts the time axis of fields that have one.

        Returns:
            Fresh arrays as in `schema()`.
        Raises:
            SourceError: Damaged or changed data; names file, dataset and sample.
            IndexError: No such number.
        """
        scan = self._scan()
        if not 0 <= number < scan.count:
            raise IndexError(f"sample {number} does not exist: this source has {scan.count}")
        file, row = scan.find(number)
        file.require_written(row)
        sample: Sample = {}
        slot = 0
        for layout in file.layout.fields:
            field = scan.schema[layout.name]
            low, high, _ = slice(start, stop).indices(field.shape[0] if field.time else 0)
            span = (low, max(low, high)) if field.time else None
            parts: list[NDArray[Any]] = []
            for piece in layout.pieces:
                parts.append(self._read_piece(file, layout, piece, row, slot, span))
                slot += 1
            whole = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)
            sample[layout.name] = np.asarray(whole, order="C")
        for name, value in file.layout.values.items():
            where = f"{file.path}: attribute {name!r}"
            sample[name] = read_as(value, np.dtype(np.float32), where=where)
        return sample

    def _read_piece(
        self,
        file: ScannedFile,
        layout: FieldLayout,
        piece: Piece,
        row: int,
        slot: int,
        span: tuple[int, int] | None,
    ) -> NDArray[Any]:
        """One sample of one dataset, in served order."""
        group = file.layout.groups[row] if file.layout.groups else ""
        place = Place(path=file.path, row=row, group=group, label=file.place(row), slot=slot)
        raw = self._reader.read(place, piece, file.blocks[slot], span)
        if layout.role is not FieldRole.DATA:
            return finish(layout, raw, self._wanted.strides, where=place.label)
        axes = sample_axes(piece)
        # Time was thinned while reading; thinning space there would cost HDF5 a call per point.
        steps = [1 if axis == "t" else self._wanted.strides.get(axis, 1) for axis in axes]
        return arrange(raw[tuple(slice(None, None, step) for step in steps)], axes)

    def locate(self, number: int) -> str:
        """File and row, or group."""
        file, row = self._scan().find(number)
        return file.place(row)

    def runs(self) -> Sequence[range]:
        """Ranges of about 8 MiB, whole rows of chunks, never across files."""
        found: list[range] = []
        for file in self._scan().files:
            rows = np.arange(file.layout.rows) if file.rows is None else file.rows
            cuts = np.flatnonzero(np.diff(rows // run_length(file.layout, file.blocks))) + 1
            edges = [file.first, *(file.first + cuts).tolist(), file.first + len(rows)]
            found.extend(range(low, high) for low, high in itertools.pairwise(edges))
        return found

    def keys(self) -> Sequence[str]:
        """File and row; rows of files that differ only in a parameter share a key."""
        return [file.key(local) for file in self._scan().files for local in range(file.count)]

    def identity(self) -> SourceIdentity:
        """Files with their parameters and selected rows, and the layout they are read by."""
        scan = self._scan()
        parts = tuple(
            Part(
                name=file.name,
                count=file.count,
                values={**file.layout.values, **file.layout.notes},
                selection="all" if file.rows is None else digest_json(file.rows.tolist()),
                files=(FileRef(name=file.name, path=file.path),),
            )
            for file in scan.files
        )
        channels: dict[str, Json] = {name: list(names) for name, names in self.channels.items()}
        settings: dict[str, Json] = {
            "preset": scan.preset,
            "layout": layout_to_json(scan.files[0].layout),
            "channels": channels,
            "split": scan.choice.to_json(),
            "subsample": dict(self._wanted.strides),
        }
        if self._wanted.include:  # said only then: other recipes read as they did before
            settings["include"] = list(self._wanted.include)
        return SourceIdentity(kind=f"hdf5/{VERSION}", parts=parts, settings=settings)

    def places(self) -> Sequence[PlacedPart]:
        """Where samples lie in the files, for `stoker.index_in_place`.

        Raises:
            SourceError: Chunked, compressed, or stored otherwise than served.
        """
        return [placed_part(file, self._pool, self._wanted.strides) for file in self._scan().files]

    def _scan(self) -> Scan:
        if self._scanned is None:
            self._scanned = scan_files(self._wanted)
        return self._scanned
