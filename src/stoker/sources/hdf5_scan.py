"""Describe the files of a source once: layouts, common schema, selected rows, blocks.

The description is plain data. It travels with copies of a source, so that readers open only what they read.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.errors import SourceError, StokerError
from stoker.schema import Field, Schema
from stoker.sources import pdebench, well
from stoker.sources.declared import contents, declared_layout
from stoker.sources.files import family
from stoker.sources.hdf5_blocks import BLOCK_LIMIT_BYTES, Block, plan_block
from stoker.sources.hdf5_layout import FileLayout, stacked_field
from stoker.sources.hdf5_open import FOREIGN_ERRORS, cause_of, open_file, require_inside
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ScannedFile:
    """One described file with the rows that are samples of the source."""

    path: Path
    """Absolute."""
    name: str
    """Relative to the root, with `/`."""
    layout: FileLayout
    """What it holds."""
    blocks: tuple[Block, ...]
    """How each piece of the layout is read, in order."""
    rows: NDArray[np.int64] | None
    """Selected rows, ascending; None: all."""
    first: int
    """Number of its first sample."""

    @property
    def count(self) -> int:
        """Samples of this file."""
        return self.layout.rows if self.rows is None else len(self.rows)

    def row(self, local: int) -> int:
        """The row of the file that its `local`-th sample is."""
        return local if self.rows is None else int(self.rows[local])

    def key(self, local: int) -> str:
        """Stable key of its `local`-th sample; shared by files that differ only in a parameter."""
        return f"{family(self.name)}:{self.layout.row_name(self.row(local))}"


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


def scan_files(wanted: Wanted) -> Scan:
    """Open each file of the split once and describe it.

    Raises:
        SourceError: A file is unreadable, ambiguous or unlike the others, or there is no sample.
        SplitError: The split does not exist.
    """
    names = [path.relative_to(wanted.root).as_posix() for path in wanted.paths]
    where = str(wanted.root if len(names) > 1 else wanted.paths[0])
    choice = choose_split(names, split=wanted.split, splits=wanted.splits, seed=wanted.seed, where=where)
    preset = wanted.preset
    layouts: list[FileLayout] = []
    for index in choice.files:
        preset, layout = _layout(wanted, wanted.paths[index], names[index], preset)
        layouts.append(layout)
    paths = [wanted.paths[index] for index in choice.files]
    used = [names[index] for index in choice.files]
    schema = _common_schema(paths, layouts, wanted.strides)
    files: list[ScannedFile] = []
    count = 0
    for path, name, layout, rows in zip(paths, used, layouts, _select(used, layouts, choice), strict=True):
        limit_bytes = BLOCK_LIMIT_BYTES // len(layout.pieces)
        blocks = tuple(plan_block(piece, wanted.strides, limit_bytes) for piece in layout.pieces)
        file = ScannedFile(path=path, name=name, layout=layout, blocks=blocks, rows=rows, first=count)
        if file.count:
            files.append(file)
            count += file.count
    if not count:
        raise SourceError(f"{where}: {len(layouts)} files hold no sample. Check the files and the split")
    _say_once(files)
    firsts = tuple(file.first for file in files)
    kind = preset or "fields"
    return Scan(preset=kind, files=tuple(files), firsts=firsts, choice=choice, schema=schema, count=count)


def _layout(wanted: Wanted, path: Path, name: str, preset: str | None) -> tuple[str | None, FileLayout]:
    """Describe one file; also says which preset was used, so that all files are read alike."""
    file = open_file(path)
    try:
        if preset is None and wanted.fields is None:
            preset = _detect(file, str(path))
        layout = _described(file, wanted, path, name, preset)
        for group in layout.groups or ("",):
            for piece in layout.pieces:
                require_inside(file, f"{group}/{piece.dataset}".lstrip("/"), where=str(path))
        return preset, layout
    except StokerError:
        raise
    except FOREIGN_ERRORS as error:
        raise SourceError(
            f"{path}: the description of its datasets is damaged ({error}). Copy or download it again"
        ) from cause_of(error)
    finally:
        file.close()


def _described(file: Any, wanted: Wanted, path: Path, name: str, preset: str | None) -> FileLayout:
    if preset == "well":
        return well.well_layout(file, where=str(path))
    if preset == "pdebench":
        if well.looks_like(file):
            raise SourceError(f"{path} has The Well's layout, not PDEBench's. Use preset='well'")
        return pdebench.pdebench_layout(file, name, where=str(path), fields=wanted.fields)
    return declared_layout(file, wanted.fields or {}, where=str(path))


def _detect(file: Any, where: str) -> str:
    if well.looks_like(file):
        return "well"
    if pdebench.looks_like(file):
        return "pdebench"
    raise SourceError(
        f"{where} has neither PDEBench's nor The Well's layout. {contents(file)} Declare its datasets and "
        "axes, for example fields={'u': 'n t x'} (n sample, t time, x y z space, c channel)"
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
                f"{where}: two datasets or parameters are called {name!r}. Name them with fields="
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
    return f"{fact}, expected the same in all files of a source. Make them two sources, or mend the file"


def _select(
    names: Sequence[str], layouts: Sequence[FileLayout], choice: SplitChoice
) -> list[NDArray[np.int64] | None]:
    """Rows of each file that belong to the split."""
    if choice.fractions is None:
        return [None] * len(names)
    keys = [
        f"{shared}:{layout.row_name(row)}"
        for shared, layout in zip(map(family, names), layouts, strict=True)
        for row in range(layout.rows)
    ]
    numbers = split_numbers(keys, choice.fractions, choice.split or "", choice.seed)
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
    slow = next(((file, piece, block) for file, piece, block in pieces if block.redundancy > 1), None)
    if slow:
        file, piece, block = slow
        _log.warning(
            "%s: a row of chunks %s of %r exceeds %s, so that each chunk is decompressed %d times. "
            "Rewriting it with one sample per chunk (h5repack -l) makes reading faster",
            *(file.path, piece.chunks, piece.dataset, format_bytes(BLOCK_LIMIT_BYTES), block.redundancy),
        )
