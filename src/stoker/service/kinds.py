"""Kinds of data: a table of functions for each, which the service uses for all of them alike.

Simulations and images are here. Radio rows come from `stoker.extras.radio`.
"""

from __future__ import annotations

import math
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from stoker.errors import ConfigError, SourceError, StokerError
from stoker.plugins import load_extension
from stoker.schema import Json, schema_to_json
from stoker.service.previews import describe_samples
from stoker.sources.files import find_files, split_of
from stoker.sources.protocol import Source
from stoker.sources.splits import DEFAULT_SPLITS
from stoker.units import format_count

if TYPE_CHECKING:
    from stoker.service.job_config import JobConfig
    from stoker.service.journal import Journal
    from stoker.service.runs import JobRun
    from stoker.sources.images import ImageSource

Spec = Mapping[str, Any]
"""Where a data set is, see `Dataset.spec`, with the URL of its connection."""
Row = dict[str, Json]


@dataclass(frozen=True, slots=True)
class Reading:
    """How much a check reads."""

    everything: bool = False
    """Read each sample; else some, for a bounded time."""
    tell: Callable[[int, int], None] = lambda read, count: None
    """Called with the number of samples that were read, and of all."""


class SamplesOf(Protocol):
    """Reads samples."""

    def __call__(self, spec: Spec, limit: int, offset: int, *, pictures: bool) -> list[Row]:
        """Return at most `limit` samples from `offset` on, with pictures of them if the kind has any."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What the service does with data of one kind. Only `settings` and `place` run in the service itself."""

    facts: Callable[[Spec], Row]
    """Returns figures, from headers and names or by the database: `samples` and more."""
    check: Callable[[Spec, Reading], list[Row]]
    """Returns a report of health, a row per check: see `check_row`."""
    samples: SamplesOf
    """Returns some samples in a readable form."""
    settings: Callable[[JobConfig, Sequence[Mapping[str, Any]]], dict[str, Any]]
    """Returns where the data of a job is, as settings of docs/reference/config.md."""
    train: Callable[[JobRun], dict[str, Any]]
    """Trains on it; returns the results of the job, by name."""
    place: Callable[[str, Mapping[str, Any], Path], tuple[str, Row, int]]
    """Returns id, spec and number of samples of data to generate: from its name and settings, in a folder."""
    generate: Callable[[Spec, Journal], bool]
    """Generates a data set unless it exists; returns True if it had to be made."""
    remove: Callable[[Spec], None]
    """Removes a generated data set."""


def kind_of(name: str) -> Kind:
    """Return the table of a kind.

    Raises:
        ConfigError: The kind is unknown.
    """
    if name == "radio":
        return load_extension("service.radio")
    if name not in _FILES:
        raise ConfigError(
            f"data sets of kind {name!r} are unknown", hint=f"Known are radio, {', '.join(_FILES)}"
        )
    return _FILES[name]


MOST_SHOWN = 100
"""Samples in one answer."""


READ = "read"
"""Name of the row of a report that says how many samples were read."""


def check_row(check: str, status: str, detail: str) -> Row:
    """Return a row of a report: its name, `pass`, `warn` or `fail`, and what was found."""
    return {"check": check, "status": status, "detail": detail}


# ----------------------------------------------------------------------------------------------------------
# Files: simulations in HDF5, and images in a folder for each class.


CHECKED = 1000
"""Samples that a check reads if it need not read all, spread over the data set."""
CHECK_S = 10.0
"""How long it reads them."""
_LEAST = 8
"""Samples that it reads even then."""


def _hdf5_facts(spec: Spec) -> Row:
    _refuse_links(Path(str(spec["path"])))
    root, paths = find_files(str(spec["path"]))
    named = all(split_of(str(path.relative_to(root)), DEFAULT_SPLITS) for path in paths)
    return {**_facts(_hdf5_source(spec)), "named_splits": named}


def _images_facts(spec: Spec) -> Row:
    from stoker.sources.images import split_folders

    path = Path(str(spec["path"]))
    _refuse_links(path)
    source = _images_source(spec)
    common = _facts(source)
    if len(source.classes) < 2:
        raise SourceError(
            f"{path} has {len(source.classes)} folders of images", hint="Expected two or more, one per class"
        )
    return {**common, "classes": list(source.classes), "named_splits": bool(split_folders(path))}


def _facts(source: Source) -> Row:
    return {"samples": len(source), "fields": schema_to_json(source.schema())}


def _refuse_links(path: Path) -> None:
    """Refuse a folder with links that lead out of it."""
    root = path.resolve()
    for entry in root.rglob("*") if root.is_dir() else ():
        if entry.is_symlink() and not entry.resolve().is_relative_to(root):
            raise SourceError(f"{entry} is a link that leads out of {path}", hint="Put the file itself there")


def _check_hdf5(spec: Spec, reading: Reading) -> list[Row]:
    source = _hdf5_source(spec)
    return [
        check_row("samples", "pass", format_count(len(source), "sample")),
        *_check_content(source, reading),
    ]


def _check_images(spec: Spec, reading: Reading) -> list[Row]:
    source = _images_source(spec)
    keys = source.keys()
    names: Counter[str] = Counter(key.split("/")[-2] for key in keys if "/" in key)
    least = min(names.values(), default=0)
    told = ", ".join(f"{name} {format_count(n)}" for name, n in islice(names.most_common(), 10))
    return [
        check_row("samples", "pass", format_count(len(source), "sample")),
        check_row("classes", "pass" if least > 1 else "warn", told),
        *_check_content(source, reading),
    ]


def _check_content(source: Source, reading: Reading) -> list[Row]:
    """Return rows on what was read, and on what is wrong with it."""
    count, read, bad = len(source), 0, 0
    first: list[str] = []
    until = time.monotonic() + CHECK_S
    for number in range(count) if reading.everything else spread(count, CHECKED):
        if not reading.everything and read >= _LEAST and time.monotonic() > until:
            break
        why = _fault_of(source, number)
        bad += bool(why)
        first += [why] if why and len(first) < 3 else []
        read += 1
        reading.tell(read, count)
    how = f"{format_count(read)} of {format_count(count, 'sample')}{', spread evenly' * (read < count)}"
    told = f"{format_count(bad, 'sample')} cannot be used: {'; '.join(first)}"
    sound = "the samples that were read are complete and finite"
    return [
        check_row(READ, "pass", how),
        check_row("content", "fail" if bad else "pass", told if bad else sound),
    ]


def _fault_of(source: Source, number: int) -> str:
    """Return what is wrong with a sample; empty if nothing."""
    try:
        sample = source.read(number)
    except StokerError as error:
        return str(error)
    for name, value in sample.items():
        if np.issubdtype(value.dtype, np.floating) and not np.isfinite(value).all():
            return f"sample {number}: {name} holds a NaN or an infinity"
    return ""


def spread(count: int, most: int) -> Iterator[int]:
    """Yield at most so many different numbers below `count`, of which the first few are spread as well.

    >>> [*spread(10, 4)], sorted(spread(10, 20)) == [*range(10)]
    ([0, 7, 4, 1], True)
    """
    step = max(1, round(count * 0.618))  # the golden ratio: each number lies in one of the largest gaps
    while math.gcd(step, count) > 1:
        step += 1
    for number in range(min(count, most)):
        yield number * step % count


def _hdf5_samples(spec: Spec, limit: int, offset: int, *, pictures: bool) -> list[Row]:
    return describe_samples(_hdf5_source(spec), limit, offset, pictures=pictures)


def _images_samples(spec: Spec, limit: int, offset: int, *, pictures: bool) -> list[Row]:
    return describe_samples(_images_source(spec), limit, offset, pictures=pictures)


def _hdf5_settings(_config: JobConfig, datasets: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    one = datasets[0]
    return {"data.task": _task(one), "data.files": one["spec"]["path"]}


IMAGE_SIZE = (64, 64)
"""Height and width of images unless `data.images.size` says otherwise."""


def _images_settings(_config: JobConfig, datasets: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    one = datasets[0]
    return {
        "data.kind": "images",
        "data.task": _task(one),
        "data.root": one["spec"]["path"],
        "data.images.annotations": "folder",
        "data.images.size": [*IMAGE_SIZE],
    }


def _task(dataset: Mapping[str, Any]) -> str:
    """Return the name of the caches: the data's file or folder, reduced to ASCII letters, and its id.

    The name of the data set is not part of it, so that the same data under another name is not encoded again.
    """
    stem, id = PurePath(dataset["spec"]["path"]).stem, str(dataset["id"])
    plain = "".join(c if c.isascii() and (c.isalnum() or c in "-_") else "_" for c in stem)
    return f"{'generated' if stem == id else plain[:40].strip('_-') or 'data'}-{id[:8]}"


def _place_burgers(_name: str, made_of: Mapping[str, Any], data: Path) -> tuple[str, Row, int]:
    id = str(uuid.uuid5(uuid.NAMESPACE_URL, f"stoker-burgers-1 {sorted(made_of.items())}"))
    return id, {"path": str(data / f"{id}.hdf5"), "make": dict(made_of)}, int(made_of["trajectories"])


def _generate_burgers(spec: Spec, journal: Journal) -> bool:
    from stoker.run.demo import BurgersSpec, write_burgers

    path = Path(str(spec["path"]))
    if path.is_file():  # the file appears complete or not at all
        return False
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    wanted = BurgersSpec(**spec["make"])
    journal.tell("progress", {"message": f"solves {format_count(wanted.trajectories)} trajectories"})
    write_burgers(path, wanted)
    return True


def _not_generated(*_: object) -> Any:
    raise ConfigError("images cannot be generated", hint="Register a folder of images")


def _remove_file(spec: Spec) -> None:
    Path(str(spec["path"])).unlink(missing_ok=True)


def _train_operator(run: JobRun) -> dict[str, Any]:
    from stoker.service.runs import train_operator

    return train_operator(run)


def _train_images(run: JobRun) -> dict[str, Any]:
    from stoker.service.runs import train_images

    return train_images(run)


def _hdf5_source(spec: Spec) -> Source:
    from stoker.sources.hdf5 import HDF5Source

    return HDF5Source(spec["path"])


def _images_source(spec: Spec) -> ImageSource:
    from stoker.sources.images import ImageSource

    return ImageSource(spec["path"], "folder", IMAGE_SIZE)


_FILES = {
    "hdf5": Kind(
        facts=_hdf5_facts,
        check=_check_hdf5,
        samples=_hdf5_samples,
        settings=_hdf5_settings,
        train=_train_operator,
        place=_place_burgers,
        generate=_generate_burgers,
        remove=_remove_file,
    ),
    "images": Kind(
        facts=_images_facts,
        check=_check_images,
        samples=_images_samples,
        settings=_images_settings,
        train=_train_images,
        place=_not_generated,
        generate=_not_generated,
        remove=_not_generated,
    ),
}
