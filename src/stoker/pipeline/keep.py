"""Repair a cache, and encode again what was damaged where the settings that made it are at hand."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from stoker.config import Config
from stoker.errors import ConfigError, ReadOnlyError
from stoker.pipeline.build import Job, build_jobs, names_of_caches
from stoker.pipeline.caches import job_recipe
from stoker.pipeline.precompute import settings_of
from stoker.precompute import run_precompute
from stoker.schema import Json
from stoker.store import load_recipe, open_cache, open_folder
from stoker.store.maintain import RepairReport, folder_to_repair, repair
from stoker.store.mirror.root import shown

log = logging.getLogger("stoker")
IMPORTED_KIND = "import-pt/1"
"""Kind of the source of a cache that was made by `stoker import-pt`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RepairResult:
    """What a repair found and did."""

    report: RepairReport
    encoded: int | None
    """Records encoded again; None where no settings were given."""
    missing: tuple[int, ...] = ()
    """Samples that are neither stored nor quarantined, in the end."""
    imported: bool = False
    """The cache was made by `import-pt`."""

    @property
    def ok(self) -> bool:
        """Whether the cache is complete now."""
        return not self.missing

    @property
    def command(self) -> str:
        """What encodes the missing samples; empty where none are missing."""
        if self.ok:
            return ""
        if not self.imported:
            place = shlex.quote(shown(Path(self.report.path)))
            return f"stoker verify {place} --repair --config CONFIG [KEY=VALUE...]"
        cache_dir, name = map(shlex.quote, _place_of(Path(self.report.path)))
        return f"stoker import-pt DIR --out {cache_dir} --name {name}"

    def to_json(self) -> dict[str, Json]:
        """The keys that scripts rely on."""
        return {
            **self.report.to_json(),
            "ok": self.ok,
            "encoded": self.encoded,
            "missing": [*self.missing],
            "encode_again": number_ranges(self.missing),
            "command": self.command,
        }


def number_ranges(numbers: Sequence[int]) -> str:
    """Sorted numbers as people write them.

    >>> number_ranges([3, 4, 5, 9])
    '3-5, 9'
    """
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in ranges)


def repair_cache(path: str | Path, config: Config | None = None) -> RepairResult:
    """Set aside what is damaged in a cache, and with `config` encode it again.

    Args:
        path: A fingerprint's folder, or the folder of a name with one fingerprint.
        config: The settings that the cache was made with.
    Raises:
        FormatError: There is no cache, or its recipe is damaged and no settings were given.
        ConfigError: The settings make another cache.
        StokerError: As `repair` and `run_precompute`.
    """
    folder = folder_to_repair(path)
    cache_dir, name = _place_of(folder)
    job = None if config is None else _job_of(config, folder)
    if config is not None and job is not None:
        # Writes the recipe where it is damaged.
        open_folder(Path(cache_dir), name, job_recipe(config, job))
    try:
        report = repair(folder)
    except ReadOnlyError as error:
        report = _nothing_to_repair(folder, error)
    if config is None or job is None or report.ok:
        imported = load_recipe(folder).entries["source"]["kind"] == IMPORTED_KIND
        return RepairResult(report=report, encoded=None, missing=tuple(report.missing), imported=imported)
    settings = replace(settings_of(config, job), overwrite=False)
    made = run_precompute(job.source, job.encoder, cache_dir, name=job.name, settings=settings)
    return RepairResult(report=report, encoded=made.encoded)


def _nothing_to_repair(folder: Path, error: ReadOnlyError) -> RepairReport:
    """What a folder that cannot be written needs: nothing.

    Raises:
        ReadOnlyError: `error`, where something is damaged or missing.
    """
    cache = open_cache(folder, require_complete=False)
    found = cache.verify()
    if not (found.ok and cache.complete):
        raise error
    log.info("%s cannot be written; it was read in full, and nothing needs repair", folder)
    return RepairReport(path=str(folder), records=found.records, generation=cache.index.generation)


def _place_of(folder: Path) -> tuple[str, str]:
    """Cache folder and name of a fingerprint's folder, however that was given."""
    parent = folder.absolute().parent
    return str(folder.parent.parent if len(folder.parts) > 2 else parent.parent), parent.name


def _job_of(config: Config, folder: Path) -> Job:
    """The job of `config` that makes the cache in `folder`.

    Raises:
        ConfigError: There is none.
    """
    name = folder.resolve().parent.name
    named = names_of_caches(config)
    if name not in named:
        raise ConfigError(
            f"the settings make {', '.join(named)}, {folder} is of {name}. Give those that made it"
        )
    task, split = named[name]
    job = build_jobs(config, task, [split])[0]
    made = job_recipe(config, job).fingerprint
    if made != folder.resolve().name:
        raise ConfigError(
            f"the settings make the cache {made} of {name}, {folder} is another one. "
            f"`stoker why {folder} CONFIG` says what differs"
        )
    return job
