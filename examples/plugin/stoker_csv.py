"""A plugin for Stoker: a source of CSV files, an engine, an exporter, a command and a tracker.

The entry points in `pyproject.toml` name the five of them. docs/how-to/plugins.md of Stoker explains each.
"""

from __future__ import annotations

import io
import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from stoker.cli.command import Debug, Json, command_output
from stoker.errors import ConfigError, SourceError
from stoker.export import Exporter, tensors_of
from stoker.schema import Field, Sample, Schema
from stoker.sources.protocol import FileRef, Part, Source, SourceIdentity
from stoker.sources.splits import SplitOf

if TYPE_CHECKING:
    from stoker.config.models import Config, DataConfig
    from stoker.monitor.trackers import TrackedRun


class CsvSource:
    """One trajectory in each CSV file of a folder: a row is a step in time, a column is a point in space."""

    def __init__(self, folder: str | Path, *, delimiter: str = ",") -> None:
        self._folder, self._delimiter = Path(folder), delimiter
        self._files = sorted(self._folder.glob("*.csv"))
        if not self._files:
            raise SourceError(f"{folder} has no .csv file. Name the folder with data.root")

    def __len__(self) -> int:
        """Number of samples."""
        return len(self._files)

    def read(self, index: int, start: int | None = None, stop: int | None = None) -> Sample:
        """Read one trajectory, or some of its steps."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} does not exist: this source has {len(self)}")
        file = self._files[index]
        try:
            table = np.loadtxt(file, np.float32, delimiter=self._delimiter, ndmin=2)
        except ValueError as error:
            raise SourceError(f"{file}: {error}. Columns are separated by {self._delimiter!r}") from error
        return {"data": table[start:stop, None, :, None]}  # (time, height, width, channels)

    def runs(self) -> Sequence[range]:
        """Each file is read alone."""
        return [range(index, index + 1) for index in range(len(self))]

    def keys(self) -> Sequence[str]:
        """The names of files decide which split a trajectory is in."""
        return [file.stem for file in self._files]

    def identity(self) -> SourceIdentity:
        """The content of the files, which Stoker digests, and how they are read."""
        files = tuple(FileRef(name=file.name, path=file) for file in self._files)
        part = Part(name="csv", count=len(self), files=files)
        return SourceIdentity(kind="csv/1", parts=(part,), settings={"delimiter": self._delimiter})

    def schema(self) -> Schema:
        """The shape of the first file; all must have it."""
        return {"data": Field(shape=self.read(0)["data"].shape, dtype="float32", time=True)}


def make_source(data: DataConfig, task: str, split: str) -> Source:
    """Make the source of one split, for `data.kind: csv`."""
    options = {"delimiter": ",", **(data.options or {})}
    if set(options) != {"delimiter"} or not isinstance(options["delimiter"], str):
        raise ConfigError(f"data.options is {data.options}. Expected a delimiter, as {{delimiter: ';'}}")
    source = CsvSource(data.root, delimiter=options["delimiter"])
    return SplitOf(source, split, splits=data.splits, seed=data.seed)


@contextmanager
def make_engine(config: Config) -> Iterator[Any]:
    """Encode on this machine and tell the time, for `precompute.engine: timed`."""
    from stoker.precompute import encode_here

    def encode(share: Any, progress: Any) -> Any:
        begun = time.monotonic()
        done = encode_here(share, progress)
        logging.getLogger("stoker").info("%d records in %.1f s", done.encoded, time.monotonic() - begun)
        return done

    yield encode


def _npy_tensors(fields: Schema, settings: Any, count: int, lengths: Mapping[str, Any]) -> list[Any]:
    if lengths:
        raise ConfigError(f"export: npy has no form for {', '.join(lengths)}, whose records differ in length")
    return tensors_of(fields, settings, count, {}, {})


def _write_npy(writer: Any, fields: Schema, settings: Any, lengths: Mapping[str, Any]) -> list[Any]:
    files: list[Any] = []
    every = (0, writer.records.count)
    for tensor in _npy_tensors(fields, settings, writer.records.count, lengths):
        head = io.BytesIO()
        descr = np.dtype(tensor.dtype).newbyteorder("<").str
        np.lib.format.write_array_header_1_0(
            head, {"descr": descr, "fortran_order": False, "shape": tensor.shape}
        )
        pieces = (piece for part in ([head.getvalue()], writer.values(tensor, every, None)) for piece in part)
        files.append(writer.file(f"{tensor.name}.npy", every, pieces))
    return files


NPY = Exporter(tensors=_npy_tensors, write=_write_npy)
"""A `.npy` file for each field, for `stoker cache export --to npy`."""


@dataclass(frozen=True)
class Info:
    """The result of `stoker csv-info`."""

    folder: str
    files: int
    shape: list[int]

    def to_json(self) -> dict[str, Any]:
        """Return what `--json` prints."""
        return asdict(self)


def csv_info(
    folder: Annotated[Path, typer.Argument(help="A folder of CSV files.")],
    delimiter: Annotated[str, typer.Option(help="What is between two columns.")] = ",",
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show what a folder of CSV files holds.

    \b
    Example:
      stoker csv-info data/waves --delimiter ";"
    """
    with command_output(as_json=as_json, debug=debug) as out:
        source = CsvSource(folder, delimiter=delimiter)
        found = Info(str(folder), len(source), list(source.schema()["data"].shape))
        out.show(found, lambda info, console: console.print(f"{info.files} files of shape {info.shape}"))


class JsonLines:
    """Figures in `figures.jsonl` of the run's folder, for `training.trackers: [jsonl]`."""

    def start(self, run: TrackedRun) -> None:
        """Open the file; a run that continues adds to it."""
        self._file = (run.folder / "figures.jsonl").open("a")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write a line."""
        self._file.write(json.dumps({"step": step, **values}) + "\n")

    def end(self, status: str) -> None:
        """Write how the run ended, and close."""
        self._file.write(json.dumps({"status": status}) + "\n")
        self._file.close()
