"""Describe the files of a source once: layouts, common schema, selected rows, blocks.

The description is plain data. It travels with copies of a source, so that readers open only what they read.
"""

from __future__ import annotations

import bisect
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError, SourceError, StokerError, arg
from stoker.schema import Field, Schema
from stoker.sources import pdebench, well
from stoker.sources.declared import contents, declared_layout
from stoker.sources.files import family, refuse_together, require_listable
from stoker.sources.hdf5_blocks import BLOCK_LIMIT_BYTES, Block, plan_block
from stoker.sources.hdf5_layout import SPACE, FileLayout, stacked_field
from stoker.sources.hdf5_open import FOREIGN_ERRORS, cause_of, open_checked, readable_dataset, unwritten_rows
from stoker.sources.included import with_included
from stoker.sources.splits import SplitChoice, choose_split, split_numbers
from stoker.units import format_bytes

_log = logging.getLogger("stoker")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What the user asked for."""

    root: Path
    """What names are relative to."""
    paths: tuple[Path, ...]
    """All files, before the split."""
    keys: tuple[str, ...]
    """What each is called in keys of samples."""
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
    """What to serve in addition to the fields, see `stoker.sources.included`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScannedFile:
    """One described file with the rows that are samples of the source."""

    path: Path
    """Absolute."""
    name: str
    """Relative to the root, with `/`."""
    family: str
    """What files that differ only in a parameter are called in keys of samples."""
    layout: FileLayout
    """What it holds."""
    blocks: tuple[Block, ...]
    """How each piece of the layout is read, in order."""
    rows: NDArray[np.int64] | None
    """Selected rows, ascending; None: all."""
    first: int
    """Number of its first sample."""
    unwritten: Mapping[str, NDArray[np.bool_]]
    """Rows that lack data which was never written, by the dataset; without datasets that have all."""

    @property
    def count(self) -> int:
        """Samples of this file."""
        return self.layout.rows if self.rows is None else len(self.rows)

    def row(self, local: int) -> int:
        """The row of the file that its `local`-th sample is."""
        return local if self.rows is None else int(self.rows[local])

    def require_written(self, row: int) -> None:
        """Refuse a row that HDF5 would give as zeros or the fill value.

        Raises:
            SourceError: Names file, dataset and row.
        """
        for name, rows in self.unwritten.items():
            if rows[row]:
                raise SourceError(
                    f"{self.place(row)}: dataset {name!r} was never written there, or not all of it. Was the "
                    "program that wrote the file stopped? Write it again, or leave the sample out"
                )

    def place(self, row: int) -> str:
        """Where a row is, for messages."""
        return f"{self.path}: {self.layout.row_place(row)}"

    def key(self, local: int) -> str:
        """Stable key of its `local`-th sample; shared by files that differ only in a parameter."""
        return f"{self.family}:{self.layout.row_name(self.row(local))}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """Everything known once the files have been described."""

    preset: str
    """The preset used, or `"fields"`."""
    files: tuple[ScannedFile, ...]
    """Those with samples, in numbering order."""
    firsts: tuple[int, ...]
    """First number of each file, for bisection."""
    choice: SplitChoice
    """The split rule."""
    schema: Schema
    """Fields of every sample."""
    count: int
    """Samples in all, at least 1."""

    def find(self, number: int) -> tuple[ScannedFile, int]:
        """The file of a sample, and its row there."""
        file = self.files[bisect.bisect_right(self.firsts, number) - 1]
        return file, file.row(number - file.first)


def scan_files(wanted: Wanted) -> Scan:
    """Open each file of the split once and describe it.

    Raises:
        SourceError: A file is unreadable, ambiguous or unlike the others, or there is no sample.
        SplitError: The split does not exist.
        ConfigError: Subsampling names an axis that no file has.
    """
    names = [path.relative_to(wanted.root).as_posix() for path in wanted.paths]
    where = str(wanted.root if len(names) > 1 else wanted.paths[0])
    choice = choose_split(names, split=wanted.split, splits=wanted.splits, seed=wanted.seed, where=where)
    preset = wanted.preset
    layouts: list[FileLayout] = []
    unwritten: list[dict[str, NDArray[np.bool_]]] = []
    bad: list[SourceError] = []
    for index in choice.files:
        try:
            preset, layout, holes = _layout(wanted, wanted.paths[index], names[index], preset)
        except SourceError as error:
            bad.append(error)
        else:
            layouts.append(layout)
            unwritten.append(holes)
    refuse_together(bad, len(choice.files), where)
    require_listable(sum(layout.rows for layout in layouts), where)
    _check_subsampling(wanted.strides, layouts, where)
    paths = [wanted.paths[index] for index in choice.files]
    used = [names[index] for index in choice.files]
    families = [family(wanted.keys[index]) for index in choice.files]
    schema = _common_schema(paths, layouts, wanted.strides)
    files: list[ScannedFile] = []
    count = 0
    selected = _select(families, layouts, choice, where)
    described = zip(paths, used, families, layouts, unwritten, selected, strict=True)
    for path, name, shared, layout, holes, rows in described:
        limit_bytes = BLOCK_LIMIT_BYTES // len(layout.pieces)
        blocks = tuple(plan_block(piece, wanted.strides, limit_bytes) for piece in layout.pieces)
        file = ScannedFile(
            path=path,
            name=name,
            family=shared,
            layout=layout,
            blocks=blocks,
            rows=rows,
            first=count,
            unwritten=holes,
        )
        if file.count:
            files.append(file)
            count += file.count
    if not count:
        raise SourceError(f"{where}: {len(layouts)} files hold no sample. Check the files and the split")
    _say_once(files)
    firsts = tuple(file.first for file in files)
    kind = preset or "fields"
    return Scan(preset=kind, files=tuple(files), firsts=firsts, choice=choice, schema=schema, count=count)


def _check_subsampling(strides: Mapping[str, int], layouts: Sequence[FileLayout], where: str) -> None:
    """Refuse to subsample along an axis that no file has."""
    axes = {axis for layout in layouts for piece in layout.pieces for axis in piece.axes}
    if absent := sorted(strides.keys() - axes):
        there = ", ".join(axis for axis in ("t", *SPACE) if axis in axes) or "none of t, x, y and z"
        raise ConfigError(
            f"{where}: subsample names {', '.join(absent)}, and the axes of the data are {there}. Leave out "
            "what is not there"
        )


def _layout(
    wanted: Wanted, path: Path, name: str, preset: str | None
) -> tuple[str | None, FileLayout, dict[str, NDArray[np.bool_]]]:
    """Describe one file; also the preset used, so that all files are read alike, and what was not written."""
    file = open_checked(path)
    try:
        if preset is None and wanted.fields is None:
            preset = _detect(file, str(path))
        layout = _described(file, wanted, path, name, preset)
        layout = with_included(file, layout, wanted.include, where=str(path))
        for parameter, value in layout.values.items():
            if not math.isfinite(value):
                raise SourceError(
                    f"{path}: the parameter {parameter!r} (an attribute, or in the file's name) is {value}, "
                    f"which is not a number to train with. Correct or delete it, or name the datasets with "
                    f"{arg('fields')} and leave it out"
                )
        return preset, layout, _unwritten(file, layout, path)
    except StokerError:
        raise
    except FOREIGN_ERRORS as error:
        raise SourceError(
            f"{path}: the description of its datasets is damaged ({error}). Copy or download it again"
        ) from cause_of(error)
    finally:
        file.close()


def _unwritten(file: Any, layout: FileLayout, path: Path) -> dict[str, NDArray[np.bool_]]:
    """Rows that lack data, by dataset; on the way each dataset is checked to be in the file and readable.

    Raises:
        SourceError: A dataset lies elsewhere, needs a plugin, or none of its rows has all its data.
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
                f"{path}: dataset {name!r} has a shape, and no sample of it was ever written to the end. "
                "Write it, or leave the file out"
            )
    return found


def _described(file: Any, wanted: Wanted, path: Path, name: str, preset: str | None) -> FileLayout:
    if preset == "well":
        return well.well_layout(file, where=str(path))
    if preset == "pdebench":
        if well.looks_like(file):
            raise SourceError(f"{path} has The Well's layout, not PDEBench's. Use {arg('preset', 'well')}")
        return pdebench.pdebench_layout(file, name, where=str(path), fields=wanted.fields)
    return declared_layout(file, wanted.fields or {}, name, where=str(path))


def _detect(file: Any, where: str) -> str:
    if well.looks_like(file):
        return "well"
    if pdebench.looks_like(file):
        return "pdebench"
    raise SourceError(
        f"{where} has neither PDEBench's nor The Well's layout. {contents(file)} Declare its datasets and "
        f"axes, for example {arg('fields', {'u': 'n t x'})} (n sample, t time, x y z space, c channel)"
    )


def _common_schema(
    paths: Sequence[Path], layouts: Sequence[FileLayout], strides: Mapping[str, int]
) -> Schema:
    """The schema that all files share."""
    first: Schema = {}
    for path, layout in zip(paths, layouts, strict=True):
        schema = _file_schema(layout, strides, where=str(path))
        if first and schema != first:
            raise SourceError(_differences(paths[0], first, path, schema))
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
                f"{where}: two datasets or parameters are called {name!r}. Name them with {arg('fields')}"
            )
        schema[name] = field
    return schema


def _differences(one: Path, first: Schema, other: Path, second: Schema) -> str:
    only = sorted(first.keys() ^ second.keys())
    if only:
        fact = f"only one of {one} and {other} has {', '.join(only)}"
    else:
        name = next(name for name in first if first[name] != second[name])
        a, b = first[name], second[name]
        fact = f"{name!r} is {a.dtype} {a.shape} in {one} and {b.dtype} {b.shape} in {other}"
    return f"{fact}, expected the same in all files of a source. Make them two sources, or fix the file"


def _select(
    families: Sequence[str], layouts: Sequence[FileLayout], choice: SplitChoice, where: str
) -> list[NDArray[np.int64] | None]:
    """Rows of each file that belong to the split."""
    if choice.fractions is None:
        return [None] * len(layouts)
    keys = [
        f"{shared}:{layout.row_name(row)}"
        for shared, layout in zip(families, layouts, strict=True)
        for row in range(layout.rows)
    ]
    numbers = split_numbers(keys, choice.fractions, choice.split or "", choice.seed, where=where)
    chosen: list[NDArray[np.int64] | None] = []
    first = 0
    for layout in layouts:
        low, high = np.searchsorted(numbers, [first, first + layout.rows])
        chosen.append(numbers[low:high] - first)
        first += layout.rows
    return chosen


def _say_once(files: Sequence[ScannedFile]) -> None:
    """What a user should know about how these files are read, one line each."""
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
