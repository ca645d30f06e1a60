"""Samples from HDF5 files: PDEBench, The Well, or datasets named by the user.

Files are described once, in the process that asks first (`len`, `schema`, `identity`); the description
travels with copies of the source. Data is never read beyond the block that a sample is in.
"""

from __future__ import annotations

import bisect
import itertools
import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError, SourceError, arg
from stoker.schema import Field, Json, Sample, Schema, digest_json
from stoker.sources import hdf5_formats
from stoker.sources.arguments import check_splits
from stoker.sources.files import (
    Paths,
    describe_each,
    family,
    find_keyed_files,
    require_listable,
    source_errors,
)
from stoker.sources.hdf5_declared import contents, declared_layout
from stoker.sources.hdf5_fields import (
    SPACE,
    FieldLayout,
    FieldLocations,
    FieldRole,
    FileLayout,
    PartLocations,
    Piece,
    arrange,
    channel_names,
    check_order,
    layout_to_json,
    offset_of,
    piece_field,
    plain_dtype,
    row_places,
    sample_axes,
    stacked_field,
)
from stoker.sources.hdf5_formats import INCLUDABLE, finish, with_included
from stoker.sources.hdf5_open import (
    BLOCK_LIMIT_BYTES,
    Block,
    BlockReader,
    FilePool,
    SamplePlace,
    block_bytes,
    open_checked,
    plan_block,
    readable_dataset,
    require_inside,
    run_length,
    unwritten_rows,
)
from stoker.sources.protocol import FileRef, Part, SourceIdentity, check_index, read_as
from stoker.sources.splits import SplitChoice, choose_split, split_numbers
from stoker.units import format_bytes, format_count

# ----------------------------------------------------------------------------------------------------------
# Describe the files of a source once: layouts, common schema, selected rows, blocks.
#
# The description is plain data. It travels with copies of a source, so that workers open only what they
# read.


_log = logging.getLogger("stoker")


@dataclass(frozen=True, slots=True, kw_only=True)
class HDF5Options:
    """The user's settings."""

    root: Path
    """The folder that names are relative to."""
    paths: tuple[Path, ...]
    """All files, before the split."""
    keys: tuple[str, ...]
    """The name of each in keys of samples."""
    preset: str | None
    """None: declared by `fields`, else detected."""
    fields: Mapping[str, str] | None
    """Declared datasets or axes."""
    split: str | None
    """None: all samples."""
    splits: Mapping[str, float] | None
    """Fractions."""
    seed: int
    """Of the cut into fractions."""
    strides: Mapping[str, int]
    """Subsampling by axis word; steps of 1 left out."""
    include: tuple[str, ...]
    """Further fields to serve, see `stoker.sources.hdf5_formats`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribedFile:
    """One described file with the rows that are samples of the source."""

    path: Path
    """Absolute."""
    name: str
    """Relative to the root, with `/`."""
    family: str
    """The name in keys of samples that files share which differ only in a parameter."""
    layout: FileLayout
    """Its fields and samples."""
    blocks: tuple[Block, ...]
    """The block of each piece of the layout, in order."""
    unwritten: Mapping[str, NDArray[np.bool_]]
    """Rows that lack data which was never written, by the dataset; without datasets that have all."""
    rows: NDArray[np.int64] | None = None
    """Selected rows, ascending; None: all."""
    first: int = 0
    """Index of its first sample."""

    @property
    def count(self) -> int:
        """Samples of this file."""
        return self.layout.rows if self.rows is None else len(self.rows)

    def row(self, local: int) -> int:
        """Return the row of the file that its `local`-th sample is."""
        return local if self.rows is None else int(self.rows[local])

    def require_written(self, row: int) -> None:
        """Refuse a row that HDF5 would give as zeros or the fill value.

        Raises:
            SourceError: Names file, dataset and row.
        """
        for name, rows in self.unwritten.items():
            if rows[row]:
                raise SourceError(
                    f"{self.place(row)}: dataset {name!r} was never written there, or not all of it",
                    hint="Was the program that wrote the file stopped? Write it again, or leave the sample "
                    "out",
                )

    def place(self, row: int) -> str:
        """Return the place of a row, for messages."""
        return f"{self.path}: {self.layout.row_place(row)}"

    def key(self, local: int) -> str:
        """Stable key of its `local`-th sample; shared by files that differ only in a parameter."""
        return f"{self.family}:{self.layout.row_name(self.row(local))}"


@dataclass(frozen=True, slots=True, kw_only=True)
class HDF5Description:
    """Everything known once the files have been described."""

    preset: str
    """The preset used, or `"fields"`."""
    files: tuple[DescribedFile, ...]
    """Those with samples, in numbering order."""
    firsts: tuple[int, ...]
    """First number of each file, for bisection."""
    choice: SplitChoice
    """The split rule."""
    schema: Schema
    """Fields of every sample."""
    count: int
    """Samples in all, at least 1."""

    def find(self, index: int) -> tuple[DescribedFile, int]:
        """Return the file of a sample, and its row there."""
        file = self.files[bisect.bisect_right(self.firsts, index) - 1]
        return file, file.row(index - file.first)


def describe_files(options: HDF5Options) -> HDF5Description:
    """Open each file of the split once and describe it.

    Raises:
        SourceError: A file is unreadable, ambiguous or unlike the others, or there is no sample.
        SplitError: The split does not exist.
        ConfigError: Subsampling names an axis that no file has.
    """
    names = [path.relative_to(options.root).as_posix() for path in options.paths]
    where = str(options.root if len(names) > 1 else options.paths[0])
    choice = choose_split(names, split=options.split, splits=options.splits, seed=options.seed, where=where)
    preset = options.preset

    def describe(position: int) -> DescribedFile:
        nonlocal preset  # the first file's is used for all
        path, name = options.paths[position], names[position]
        preset, layout, unwritten = _layout(options, path, name, preset)
        limit_bytes = BLOCK_LIMIT_BYTES // len(layout.pieces)
        return DescribedFile(
            path=path,
            name=name,
            family=family(options.keys[position]),
            layout=layout,
            blocks=tuple(plan_block(piece, options.strides, limit_bytes) for piece in layout.pieces),
            unwritten=unwritten,
        )

    described = describe_each(choice.files, describe, where)
    require_listable(sum(file.layout.rows for file in described), where)
    _check_subsampling(options.strides, [file.layout for file in described], where)
    schema = _common_schema(described, options.strides)
    files: list[DescribedFile] = []
    count = 0
    for file, rows in zip(described, _select(described, choice, where), strict=True):
        chosen = replace(file, rows=rows, first=count)
        if chosen.count:
            files.append(chosen)
            count += chosen.count
    if not count:
        raise SourceError(
            f"{where}: {len(described)} files hold no sample", hint="Check the files and the split"
        )
    _say_once(files)
    firsts = tuple(file.first for file in files)
    kind = preset or "fields"
    return HDF5Description(
        preset=kind, files=tuple(files), firsts=firsts, choice=choice, schema=schema, count=count
    )


def _check_subsampling(strides: Mapping[str, int], layouts: Sequence[FileLayout], where: str) -> None:
    """Refuse to subsample along an axis that no file has."""
    axes = {axis for layout in layouts for piece in layout.pieces for axis in piece.axes}
    if absent := sorted(strides.keys() - axes):
        there = ", ".join(axis for axis in ("t", *SPACE) if axis in axes) or "none of t, x, y and z"
        raise ConfigError(
            f"{where}: subsample names {', '.join(absent)}, and the axes of the data are {there}",
            hint="Leave out what is not there",
        )


def _layout(
    options: HDF5Options, path: Path, name: str, preset: str | None
) -> tuple[str | None, FileLayout, dict[str, NDArray[np.bool_]]]:
    """Describe one file; also the preset used, so that all files are read alike, and what was not written."""
    with (
        closing(open_checked(path)) as file,
        source_errors(f"{path}: the description of its datasets is damaged", "Copy or download it again"),
    ):
        if preset is None and options.fields is None:
            preset = _detect(file, str(path))
        layout = _described(file, options, path, name, preset)
        layout = with_included(file, layout, options.include, where=str(path))
        for parameter, value in layout.values.items():
            if not math.isfinite(value):
                raise SourceError(
                    f"{path}: the parameter {parameter!r} (an attribute, or in the file's name) is {value}, "
                    "which is not a number to train with",
                    hint=f"Correct or delete it, or name the datasets with {arg('fields')} and leave it out",
                )
        return preset, layout, _unwritten(file, layout, path)


def _unwritten(file: Any, layout: FileLayout, path: Path) -> dict[str, NDArray[np.bool_]]:
    """Rows that lack data, by dataset; on the way each dataset is checked to be in the file and readable.

    Raises:
        SourceError: A dataset is in another file, needs a plugin, or none of its rows has all its data.
    """
    found: dict[str, NDArray[np.bool_]] = {}
    for number, group in enumerate(layout.groups or ("",)):
        for piece in layout.pieces:
            name = f"{group}/{piece.dataset}".lstrip("/")
            dataset = readable_dataset(file, name, path)
            axis = piece.axes.index("n") if "n" in piece.axes else None
            holes = unwritten_rows(dataset, axis)
            if holes is None:
                continue
            if layout.groups:
                found.setdefault(piece.dataset, np.zeros(layout.rows, np.bool_))[number] = True
            else:
                found[piece.dataset] = holes
    for name, rows in found.items():
        if rows.all():
            raise SourceError(
                f"{path}: dataset {name!r} has a shape, and no sample of it was ever written to the end",
                hint="Write it, or leave the file out",
            )
    return found


def _described(file: Any, options: HDF5Options, path: Path, name: str, preset: str | None) -> FileLayout:
    if preset == "well":
        return hdf5_formats.well_layout(file, where=str(path))
    if preset == "pdebench":
        if hdf5_formats.is_well(file):
            raise SourceError(
                f"{path} has The Well's layout, not PDEBench's", hint=f"Use {arg('preset', 'well')}"
            )
        return hdf5_formats.pdebench_layout(file, name, where=str(path), fields=options.fields)
    return declared_layout(file, options.fields or {}, name, where=str(path))


def _detect(file: Any, where: str) -> str:
    if hdf5_formats.is_well(file):
        return "well"
    if hdf5_formats.is_pdebench(file):
        return "pdebench"
    if not len(file):
        raise SourceError(f"{where} holds no datasets", hint="Name a file that holds data")
    raise SourceError(
        f"{where} has neither PDEBench's nor The Well's layout. {contents(file)}",
        hint=f"Declare its datasets and axes, for example {arg('fields', {'u': 'n t x'})} (n sample, t "
        "time, x y z space, c channel)",
    )


def _common_schema(files: Sequence[DescribedFile], strides: Mapping[str, int]) -> Schema:
    """Return the schema that all files share."""
    first: Schema = {}
    for file in files:
        schema = _file_schema(file.layout, strides, where=str(file.path))
        if first and schema != first:
            raise _differences(files[0].path, first, file.path, schema)
        first = schema
    return first


def _file_schema(layout: FileLayout, strides: Mapping[str, int], *, where: str) -> Schema:
    schema: Schema = {}
    for name, field in (
        *((one.name, stacked_field(one, strides, where=where)) for one in layout.fields),
        *((name, Field(shape=(), dtype="float32")) for name in layout.values),
    ):
        if name in schema:
            raise SourceError(
                f"{where}: two datasets or parameters are called {name!r}",
                hint=f"Name them with {arg('fields')}",
            )
        schema[name] = field
    return schema


def _differences(one: Path, first: Schema, other: Path, second: Schema) -> SourceError:
    only = sorted(first.keys() ^ second.keys())
    if only:
        fact = f"only one of {one} and {other} has {', '.join(only)}"
    else:
        name = next(name for name in first if first[name] != second[name])
        a, b = first[name], second[name]
        fact = f"{name!r} is {a.dtype} {a.shape} in {one} and {b.dtype} {b.shape} in {other}"
    return SourceError(
        f"{fact}, expected the same in all files of a source", hint="Make them two sources, or fix the file"
    )


def _select(
    files: Sequence[DescribedFile], choice: SplitChoice, where: str
) -> list[NDArray[np.int64] | None]:
    """Return the rows of each file that belong to the split; None: all."""
    if choice.fractions is None:
        return [None] * len(files)
    keys = [file.key(row) for file in files for row in range(file.layout.rows)]
    numbers = split_numbers(keys, choice.fractions, choice.split or "", choice.seed, where=where)
    chosen: list[NDArray[np.int64] | None] = []
    first = 0
    for file in files:
        low, high = np.searchsorted(numbers, [first, first + file.layout.rows])
        chosen.append(numbers[low:high] - first)
        first += file.layout.rows
    return chosen


def _say_once(files: Sequence[DescribedFile]) -> None:
    """Warn of what a user should know about how these files are read, one line each."""
    pieces = [
        (file, piece, block)
        for file in files
        for piece, block in zip(file.layout.pieces, file.blocks, strict=True)
    ]
    if wide := sorted({piece.dataset for _, piece, _ in pieces if piece.narrowed}):
        _log.warning("%s: float64 is read as float32: %s", files[0].path.parent, ", ".join(wide))
    if left_out := sorted({name for file in files for name in file.layout.left_out}):
        _log.warning(
            "%s: fields= leaves out the parameters %s. To serve one, add it without axes: %r: ''",
            *(files[0].path.parent, ", ".join(left_out), left_out[0]),
        )
    slow = next(((file, piece, block) for file, piece, block in pieces if block.redundancy > 1), None)
    if slow:
        file, piece, block = slow
        _log.warning(
            "%s: a row of chunks %s of %r exceeds %s, so that each chunk is decompressed %d times. "
            "Rewriting it with one sample per chunk (h5repack -l) makes reading faster",
            *(file.path, piece.chunks, piece.dataset, format_bytes(BLOCK_LIMIT_BYTES), block.redundancy),
        )


# ----------------------------------------------------------------------------------------------------------
# Find the bytes of samples in HDF5 files.


def placed_part(file: DescribedFile, pool: FilePool, strides: Mapping[str, int]) -> PartLocations:
    """Return the samples of one described file.

    Raises:
        SourceError: They cannot be served in place.
    """
    if strides:
        raise SourceError(
            f"{file.path}: subsample={dict(strides)} changes what is read, and in place files are served as "
            "they are",
            hint="Leave it out, and thin batches with transforms=[stoker.transforms.Take(...)]",
        )
    with source_errors(f"{file.path} cannot be read", "Copy it again"):
        fields = {layout.name: _placed_field(file, layout, pool) for layout in file.layout.fields}
    values = {name: np.full(file.count, value, np.float32) for name, value in file.layout.values.items()}
    return PartLocations(count=file.count, fields=fields, values=values)


def _placed_field(file: DescribedFile, layout: FieldLayout, pool: FilePool) -> FieldLocations:
    where = f"{file.path}: field {layout.name!r}"
    if layout.role is not FieldRole.DATA:
        raise SourceError(
            f"{where} is computed from the file", hint="Leave include out where files are served in place"
        )
    piece, *others = layout.pieces
    if others:
        raise SourceError(
            f"{where} is put together from {len(layout.pieces)} datasets, which are stored apart",
            hint=f"Name each as a field of its own, as {arg('fields', {'density': 'n t x y'})}",
        )
    if piece.axes.index("n") if "n" in piece.axes else 0:
        raise SourceError(
            f"{where} does not have samples along axis 0, so the bytes of a sample are not contiguous"
        )
    check_order(sample_axes(piece), where=where)
    rows = np.arange(file.layout.rows, dtype=np.int64) if file.rows is None else file.rows.astype(np.int64)
    if file.layout.groups:
        names = [f"{file.layout.groups[row]}/{piece.dataset}" for row in rows.tolist()]
        found = [pool.dataset(file.path, name, keep=False) for name in names]
        at = np.array([offset_of(one, where=f"{where}, {one.name}") for one in found], np.int64)
        first = found[0]
        if any(one.dtype != first.dtype or one.shape != first.shape for one in found):
            raise SourceError(f"{where} differs in dtype or shape from group to group")
    else:
        first = pool.dataset(file.path, piece.dataset, keep=False)
        require_inside(first.file, piece.dataset, where=str(file.path))
        whole = "n" not in piece.axes
        at = np.array([offset_of(first, where=where)]) if whole else row_places(first, rows, where=where)
    field = replace(piece_field(piece, {}), dtype=plain_dtype(first.dtype, where=where))
    return FieldLocations(field=field, path=file.path, at=at)


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

    Examples:
        >>> import h5py, numpy, stoker
        >>> with h5py.File("waves.h5", "w") as file:
        ...     file["u"] = numpy.random.rand(20, 11, 64).astype("float32")  # samples, steps, points
        >>> source = stoker.HDF5Source("waves.h5", fields={"u": "n t x"}, subsample={"x": 2})
        >>> len(source), source.schema()["u"].shape  # (T, H, W, C)
        (20, (11, 1, 32, 1))
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
            raise ConfigError(f"preset {preset!r} is unknown", hint="Presets are 'pdebench' and 'well'")
        if preset == "well" and fields:
            raise ConfigError(
                f"preset 'well' reads axes from the file, so {arg('fields')} has no meaning", hint="Drop one"
            )
        check_splits(split, splits, seed)
        strides = dict(subsample or {})
        if any(axis not in {"t", "x", "y", "z"} or step < 1 for axis, step in strides.items()):
            raise ConfigError(f"subsample {strides} must map t, x, y or z to steps of at least 1")
        included = {include} if isinstance(include, str) else {*include}
        if unknown := sorted(included - {*INCLUDABLE}):
            raise ConfigError(f"include names {unknown}", hint=f"It may name {', '.join(INCLUDABLE)}")
        root, paths, keys = find_keyed_files(path)
        self._options = HDF5Options(
            root=root,
            paths=tuple(paths),
            keys=tuple(keys),
            preset=preset,
            fields=None if fields is None else dict(fields),
            split=split,
            splits=None if splits is None else dict(splits),
            seed=seed,
            strides={axis: int(step) for axis, step in sorted(strides.items()) if step > 1},
            include=tuple(name for name in INCLUDABLE if name in included),
        )
        self._described: HDF5Description | None = None
        self._pool = FilePool()
        self._reader = BlockReader(self._pool, self._options.strides)

    def __repr__(self) -> str:
        """Return the folder and the number of files, without opening one."""
        of = f", split={self._options.split!r}" if self._options.split else ""
        files = format_count(len(self._options.paths), "file")
        return f"HDF5Source({str(self._options.root)!r}, {files}{of})"

    def __getstate__(self) -> dict[str, Any]:
        """Settings and description travel; open files and decoded blocks stay."""
        return {"_options": self._options, "_described": self._described}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._options, self._described = state["_options"], state["_described"]
        self._pool = FilePool()
        self._reader = BlockReader(self._pool, self._options.strides)

    def __len__(self) -> int:
        """Return the number of samples after selection, at least one."""
        return self._describe().count

    def close(self) -> None:
        """Close files and drop decoded blocks; the next read opens them again."""
        self._pool.close()
        self._reader = BlockReader(self._pool, self._options.strides)

    @property
    def channels(self) -> dict[str, tuple[str, ...]]:
        """For each field on a grid the names of its channels, in order."""
        layout = self._describe().files[0].layout
        named = {one.name: channel_names(one, self._options.strides) for one in layout.fields}
        return {name: names for name, names in named.items() if names}

    @property
    def buffer_bytes(self) -> int:
        """The most bytes that one copy of this source, in one worker, holds in decoded blocks."""
        strides = self._options.strides
        return max(
            sum(block_bytes(*pair, strides) for pair in zip(file.layout.pieces, file.blocks, strict=True))
            for file in self._describe().files
        )

    def schema(self) -> Schema:
        """Return fields of every sample."""
        return dict(self._describe().schema)

    def read(self, index: int, start: int | None = None, stop: int | None = None) -> Sample:
        """Read one sample; `start:stop` cuts the time axis of fields that have one.

        Raises:
            SourceError: Damaged or changed data; names file, dataset and sample.
            IndexError: There is no such sample.
        """
        scan = self._describe()
        check_index(index, scan.count)
        file, row = scan.find(index)
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
        file: DescribedFile,
        layout: FieldLayout,
        piece: Piece,
        row: int,
        slot: int,
        span: tuple[int, int] | None,
    ) -> NDArray[Any]:
        """Return one sample of one dataset, in served order."""
        group = file.layout.groups[row] if file.layout.groups else ""
        place = SamplePlace(path=file.path, row=row, group=group, label=file.place(row), slot=slot)
        raw = self._reader.read(place, piece, file.blocks[slot], span)
        if layout.role is not FieldRole.DATA:
            return finish(layout, raw, self._options.strides, where=place.label)
        axes = sample_axes(piece)
        # Time was thinned while reading; thinning space there would cost HDF5 a call per point.
        steps = [1 if axis == "t" else self._options.strides.get(axis, 1) for axis in axes]
        return arrange(raw[tuple(slice(None, None, step) for step in steps)], axes)

    def locate(self, index: int) -> str:
        """Return file and row, or group."""
        file, row = self._describe().find(index)
        return file.place(row)

    def runs(self) -> Sequence[range]:
        """Return ranges of about 8 MiB, whole rows of chunks, never across files."""
        found: list[range] = []
        for file in self._describe().files:
            rows = np.arange(file.layout.rows) if file.rows is None else file.rows
            cuts = np.flatnonzero(np.diff(rows // run_length(file.layout, file.blocks))) + 1
            edges = [file.first, *(file.first + cuts).tolist(), file.first + len(rows)]
            found.extend(range(low, high) for low, high in itertools.pairwise(edges))
        return found

    def keys(self) -> Sequence[str]:
        """Return file and row; rows of files that differ only in a parameter share a key."""
        return [file.key(local) for file in self._describe().files for local in range(file.count)]

    def identity(self) -> SourceIdentity:
        """Return files with their parameters and selected rows, and the layout they are read by."""
        scan = self._describe()
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
            "subsample": dict(self._options.strides),
        }
        if self._options.include:  # said only then: other recipes read as they did before
            settings["include"] = list(self._options.include)
        return SourceIdentity(kind=f"hdf5/{VERSION}", parts=parts, settings=settings)

    def places(self) -> Sequence[PartLocations]:
        """Return where samples are in the files, for `stoker.index_in_place`.

        Raises:
            SourceError: Chunked, compressed, or stored otherwise than served.
        """
        return [placed_part(file, self._pool, self._options.strides) for file in self._describe().files]

    def _describe(self) -> HDF5Description:
        if self._described is None:
            self._described = describe_files(self._options)
        return self._described
