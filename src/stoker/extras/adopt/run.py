"""Take over features that exist on disk: list them, digest them, and store them without an encoder."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast

from stoker.errors import ConfigError, IncompleteError, SourceError, arg
from stoker.extras.adopt.digest import digest_blocks
from stoker.extras.adopt.layouts import Layout
from stoker.extras.adopt.listing import Listing, make_listing
from stoker.extras.adopt.source import PT, AdoptRules, AdoptSource, Values, look_into
from stoker.plan.resources import probe
from stoker.precompute import PrecomputeReport, PrecomputeSettings, ProgressSink, Timeouts, run_precompute
from stoker.precompute.settings import as_timeouts
from stoker.runtime.files import make_folder
from stoker.schema import DtypeName, JsonResult, Schema, dtype_names
from stoker.sources.arguments import check_path
from stoker.sources.files import why_unreadable
from stoker.sources.torch_items import varying_axes
from stoker.store import Cache
from stoker.store.folder import CACHE_NAME
from stoker.store.recipe import FULL_BYTES
from stoker.store.storage import resolve_local
from stoker.units import format_count, format_few

log = logging.getLogger("stoker")
FOLDER = ".adopt"
"""Folder of lists and digests, in the folder of caches."""
NAMED = 20
"""Bad files that an error names."""
_ALLOW = f"{arg('nan', 'allow')}, {arg('zeros', 'allow')} or {arg('ragged', ...)}"
"""The settings that take what may be right, such as zeros or several sizes."""
FEW_PT = 100
"""Files of torch that this process reads, through the one that it has for them."""
PT_WORKERS = 4
"""Workers at most where each has a process with torch of its own."""


def one_line(text: str) -> str:
    """Return text on one line, without characters that a terminal acts on."""
    return text if text.isprintable() else repr(text)[1:-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class BadFile(JsonResult):
    """A file for which a sample is not in the cache."""

    file: str
    """Relative to the folder."""
    why: str
    number: int | None = None
    """Number of the sample; None: it belongs to none."""

    def __str__(self) -> str:
        """Return file and reason on one line."""
        return one_line(f"{self.file}: {self.why}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdoptResult(JsonResult):
    """A cache made of features that existed."""

    json_keys = (
        "name", "path", "fingerprint", "folder", "layout", "why", "adopted", "new", "records", "count", "bad",
        "ignored", "left_out", "fields", "seconds",
    )  # fmt: skip

    cache: Cache
    folder: Path
    """Where the files are."""
    layout: str
    """Name of the layout, or the pattern."""
    why: str
    """Why it is that one."""
    new: int
    """Records that this run stored."""
    bad: tuple[BadFile, ...]
    """Files for which a sample is not in the cache."""
    ignored: int
    """Files that the layout has no place for."""
    ignored_names: tuple[str, ...]
    """The first of them."""
    left_out: Mapping[str, int]
    """Entries of `.pt` files that no field can hold, and in how many of the first files they were."""
    seconds: float

    @property
    def name(self) -> str:
        """Name of the cache."""
        return self.cache.name

    @property
    def path(self) -> Path:
        """The fingerprint's folder."""
        return self.cache.path

    @property
    def fingerprint(self) -> str:
        """The cache key."""
        return self.cache.fingerprint

    @property
    def adopted(self) -> int:
        """Samples that are in the cache."""
        return len(self.cache)

    records = adopted

    @property
    def count(self) -> int:
        """Samples that were found, bad ones included."""
        return self.cache.recipe.count

    @property
    def fields(self) -> Schema:
        """Fields as stored."""
        return self.cache.schema


def adopt(  # noqa: PLR0913  the public face: every setting by name, as in the documentation
    folder: str | Path,
    cache_dir: str | Path,
    *,
    name: str,
    layout: str = "auto",
    dtype: DtypeName | Mapping[str, DtypeName] | None = None,
    ragged: str | Sequence[str] | Mapping[str, Sequence[int]] = (),
    nan: Values = "reject",
    zeros: Values = "reject",
    allow_bad: bool = False,
    identity: Literal["auto", "full"] = "auto",
    workers: int | None = None,
    timeouts: Timeouts | Mapping[str, float] | None = None,
    progress: ProgressSink | Literal["auto"] | bool | None = "auto",
) -> Cache:
    """Make a cache of features that already exist on disk. Nothing is encoded, and no file is changed.

    Args:
        folder: Where they are; or one file, such as a zip, a Parquet file or an LMDB.
        cache_dir: Folder of caches, or a URL such as `s3://bucket/caches`.
        name: Name of the cache, which goes to `<cache_dir>/<name>/<fingerprint>/`.
        layout: A name of docs/how-to/adopt.md, as `"sd-scripts"`; a pattern of file names, as
            `"{split}/{key}_{label:int}.npy"`; `"auto"` recognizes it from the first files, and logs which.
        dtype: Storage dtype of float fields, for all or by field name; None: as in the files (float64 becomes
            float32).
        ragged: A field whose axis 0 varies, or several; or by field the axes that vary, as
            `{"latent": (1, 2)}`. Where the first files do not show it.
        nan: `"reject"` sets samples with NaN or infinity aside, `"allow"` stores them.
        zeros: `"reject"` sets samples aside of which a float field is all zeros, as a killed job leaves them.
        allow_bad: Return the cache of the sound samples where files are bad; else an error names these.
        identity: How files are digested for the fingerprint. `"auto"`: the first 4 GiB in full, of further
            files above 2 MiB a sample. `"full"`: all bytes.
        workers: Processes that read; None: automatic; 0: read in this process, without timeouts.
        timeouts: Seconds by stage, as `{"read": 120}`, or `Timeouts`.
        progress: Where progress goes, as in `precompute`.

    Returns:
        A complete cache. The same call again continues after a kill, and returns when nothing is left.

    Raises:
        IncompleteError: Files are bad: unreadable, cut short, NaN, zeros, of another shape, of the same key,
            or without their partner. All others are stored.
        SourceError: The layout is not recognized, no sample can be read, or a field differs in dtype or
            number of axes.
        ConfigError: There is no such layout, field or axis, or a package that reads it is not installed.

    Examples:
        >>> import numpy, pathlib, stoker
        >>> for number in range(3):
        ...     file = pathlib.Path("latents", "cat" if number else "dog", f"{number}.npz")
        ...     file.parent.mkdir(parents=True, exist_ok=True)
        ...     numpy.savez(file, moments=numpy.full((8, 4, 4), number + 1, "float32"))
        >>> cache = stoker.adopt("latents", "caches", name="latents")
        >>> len(cache), cache[0]["moments"].shape, cache[2]["label"].item()
        (3, torch.Size([8, 4, 4]), 1)
    """
    settings = AdoptSettings(
        layout=layout,
        dtype=dtype_names(dtype),
        rules=AdoptRules(nan=nan, zeros=zeros, ragged=varying_axes(ragged)),
        identity=identity,
        workers=workers,
        timeouts=as_timeouts(timeouts),
        progress="auto" if progress is True else progress or None,
    )
    result = run_adopt(folder, cache_dir, name=name, settings=settings)
    if result.bad and not allow_bad:
        raise bad_error(result)
    return result.cache


@dataclass(frozen=True, slots=True, kw_only=True)
class AdoptSettings:
    """How features become records."""

    layout: str = "auto"
    dtype: str | Mapping[str, str] | None = None
    rules: AdoptRules = field(default_factory=AdoptRules)
    identity: Literal["auto", "full"] = "auto"
    workers: int | None = None
    timeouts: Timeouts = field(default_factory=Timeouts)
    progress: ProgressSink | Literal["auto"] | None = "auto"
    count: int | None = None
    """Of numbered samples, how many there should be; None: up to the highest number."""

    def __post_init__(self) -> None:
        """Refuse what is unknown."""
        for name in ("nan", "zeros"):
            value = getattr(self.rules, name)
            if value not in ("reject", "allow"):
                raise ConfigError(f"{name} is {value!r}", hint="Expected reject or allow")
        if self.identity not in ("auto", "full"):
            raise ConfigError(f"identity is {self.identity!r}", hint="Expected auto or full")


def run_adopt(
    folder: str | Path, cache_dir: str | Path, *, name: str, settings: AdoptSettings | None = None
) -> AdoptResult:
    """Do the work of `adopt`, and report on it; errors as there, but for bad files."""
    began, settings = time.monotonic(), settings or AdoptSettings()
    check_path("folder", folder)
    root, out = Path(folder).expanduser().absolute(), resolve_local(cache_dir, must_exist=False)
    if not os.path.lexists(root):
        raise SourceError(f"{folder} does not exist", hint="Check the path")
    if (why := why_unreadable(root)) is not None:
        raise SourceError(f"{folder} cannot be read: {why}", hint="Expected a folder or a file")
    if not isinstance(cast("object", name), str) or not CACHE_NAME.fullmatch(name):
        raise ConfigError(
            f"a cache cannot be called {name!r}", hint="Use letters, digits, '_', '-', '+', '=' and '.'"
        )
    skipped = out.absolute()
    layout, why = look_into(root, settings.layout, skipped)
    log.info("%s: layout %s, since %s", name, layout.name, one_line(why))
    place = make_folder(out) / FOLDER
    make_folder(place, 0o700)
    full_bytes = FULL_BYTES if settings.identity == "auto" else None
    listing = make_listing(
        root, layout, place, name, skipped=skipped, count=settings.count, full_bytes=full_bytes
    )
    with closing(listing):
        _say_ignored(listing)
        with closing(AdoptSource(root, layout, listing, settings.rules)) as source:
            digest_blocks(source, place / f"{name}.json", log.info)
            report = _store(source, out, name, layout, listing, settings)
    return _result(report, source, layout, why, began)


def _store(
    source: AdoptSource, out: Path, name: str, layout: Layout, listing: Listing, settings: AdoptSettings
) -> PrecomputeReport:
    workers = settings.workers
    if workers is None and listing.largest(PT) and len(listing) > FEW_PT:
        workers = min(PT_WORKERS, max(1, int(probe().cpus)))
    chosen = PrecomputeSettings(
        dtype=settings.dtype,
        workers=workers,
        timeouts=settings.timeouts,
        nan=settings.rules.nan,
        max_quarantined=1.0,  # bad files are listed, all of them
        progress=settings.progress,
    )
    return run_precompute(source, None, out, name=name, settings=chosen)


def _say_ignored(listing: Listing) -> None:
    count, names = listing.ignored
    if count:
        log.info("%s not part of the layout: %s", format_count(count, "file"), format_few(names, len(names)))


def _result(
    report: PrecomputeReport, source: AdoptSource, layout: Layout, why: str, began: float
) -> AdoptResult:
    cache = report.cache
    listing = source.listing
    bad = [
        BadFile(file=file, why=text, number=number)
        for number, failure in sorted(cache.index.quarantined.items())
        for file, text in source.faults(number, failure.error)
    ]
    bad += [BadFile(file=file, why=text) for file, text in listing.faults]
    count, names = listing.ignored
    listing.close()
    return AdoptResult(
        cache=cache,
        folder=source.folder,
        layout=layout.name,
        why=why,
        new=report.encoded,
        bad=tuple(bad),
        ignored=count,
        ignored_names=tuple(names),
        left_out=source.left_out,
        seconds=time.monotonic() - began,
    )


def bad_error(result: AdoptResult) -> IncompleteError:
    """Return the error that names bad files."""
    hint = f"Fix them, or take those that are right with {_ALLOW}; then run the same again"
    if result.adopted:
        hint += f". Or take the others alone with {arg('allow_bad', True)}"
    lines = [f"  {bad}" for bad in result.bad[:NAMED]]
    if len(result.bad) > NAMED:
        lines.append(f"  and {format_count(len(result.bad) - NAMED)} more")
    return IncompleteError(
        f"{format_count(result.adopted)} of {format_count(result.count, 'sample')} are in {result.path}; "
        f"{format_count(len(result.bad), 'file')} bad:\n" + "\n".join(lines),
        hint=hint,
    )
