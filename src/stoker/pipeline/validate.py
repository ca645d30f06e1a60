"""Check everything a long run needs, before it starts: rows of pass, warn and fail.

Every row is made, also after one failed, so that one run of `stoker validate` shows all there is to mend.
What precompute and train refuse is asked of the very functions that they call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

from stoker.config import Config, load_config
from stoker.encoders.steady import is_steady
from stoker.errors import ConfigError, EncoderError, ResourceError, StokerError
from stoker.pipeline.build import Job, build_jobs, device_of, tasks_of
from stoker.pipeline.checks import Row, Validation, failed
from stoker.pipeline.diary import run_dir_of
from stoker.pipeline.folders import require_writable
from stoker.pipeline.locate import (
    Located,
    locate,
    locate_job,
    no_operator,
    windows_for,
    windows_in,
    windows_of,
)
from stoker.pipeline.mixed import check_together
from stoker.pipeline.train import training_splits
from stoker.pipeline.validate_machine import check_device, check_driver, check_room, check_shared_memory
from stoker.pipeline.validate_trackers import check_each
from stoker.pipeline.why import nearest_differences
from stoker.precompute.probe_encoder import try_encoder
from stoker.sources.files import canonical_split
from stoker.store import Difference
from stoker.store.mirror.root import shown
from stoker.units import format_count, format_seconds

LONGEST = 24
"""Letters of a value that a row shows."""
SHOWN = 3
"""Differences to the nearest cache that a row names."""
NOTHING_SET: Mapping[str, str] = MappingProxyType({})


def validate_config(
    path: Path | str,
    overrides: Sequence[str] = (),
    *,
    environment: Mapping[str, str] = NOTHING_SET,
    earlier: bool = False,
) -> Validation:
    """Check a settings file and all that it names; no sample is encoded and no record is read.

    Args:
        path, overrides: The settings.
        environment: In which trackers find their servers and credentials.
        earlier: The file is of the earlier latent cache, see `load_config`.
    """
    try:
        config = load_config(path, overrides, earlier=earlier)
    except ConfigError as error:
        return Validation(rows=(failed("config", error),))
    rows = [Row(check="config", status="pass", detail=f"{path}, {len(config.notes)} notes")]
    rows += [Row(check="config", status="warn", detail=note) for note in config.notes]
    rows.append(_training_row(config))
    located: list[Located] = []
    trained: dict[str, Located] = {}
    for task in tasks_of(config):
        found: list[Located] = []
        rows += _check_task(config.for_task(task), task, found)
        located += found
        if found:
            trained[task] = found[0]
    rows += [_windows_row(config.for_task(task), first) for task, first in trained.items()]
    rows += _together_rows(trained)
    rows.append(_run_dir_row(config))
    rows += check_each(config.training.trackers, environment)
    device = check_device(config, rows)
    rows += [check_driver(), check_shared_memory()]
    rows += check_room(config, located, trained, device)
    return Validation(rows=tuple(rows))


def _training_row(config: Config) -> Row:
    try:
        split, other = training_splits(config)
    except ConfigError as error:
        return failed("training", error)
    names = ", ".join(f"{task}_{split}" for task in tasks_of(config))
    return Row(check="training", status="pass", detail=f"on {names}, judged on {other}")


def _check_task(config: Config, task: str, located: list[Located]) -> list[Row]:
    """Data, encoder and cache of each split that precompute or train takes; `located` gets what was found."""
    splits = dict.fromkeys([*map(canonical_split, config.data.wanted_splits), "val"])
    jobs: dict[str, Job] = {}
    with suppress(StokerError, OSError):  # then each split by itself says whose fault it is
        jobs = {job.split: job for job in build_jobs(config, task, list(splits))}
    rows: list[Row] = []
    for split in splits:
        rows += _check_cache(config, (task, split), jobs.get(split), located)
    # All splits share the encoder, so that trying it once will do.
    return [*rows, *([_encoder_row(config, next(iter(jobs.values())))] if jobs else [])]


def _encoder_row(config: Config, job: Job) -> Row:
    """Whether the encoder takes a sample of zeros on its device."""
    check = f"encoder {job.name.removesuffix(f'_{job.split}')}"
    if job.encoder is None:
        return Row(check=check, status="pass", detail="none: samples are stored as they are")
    device, deadline_s = device_of(config), config.precompute.deadlines.encode
    try:
        took_s = try_encoder(job.encoder, job.source.schema(), device, deadline_s)
    except StokerError as error:
        code = error.exit_code if isinstance(error, ResourceError) else ConfigError.exit_code
        return failed(check, error, code)
    detail = f"loads on {device} and encodes a sample of zeros in {format_seconds(took_s)}"
    return Row(check=check, status="pass", detail=detail)


def _check_cache(config: Config, key: tuple[str, str], job: Job | None, located: list[Located]) -> list[Row]:
    """Data, encoder and cache of one task and split."""
    name = "_".join(key)
    try:
        found = locate(config, *key) if job is None else locate_job(config, job)
    except EncoderError as error:
        return [failed(f"encoder {name}", error)]
    except (StokerError, OSError) as error:
        return [failed(f"data {name}", error)]
    located.append(found)
    count = format_count(found.recipe.count)
    if found.source_gone:
        data = Row(check=f"data {name}", status="warn", detail="raw data is gone; the cache is used")
    else:
        data = Row(check=f"data {name}", status="pass", detail=f"{count} samples in {_parts(found)}")
    shapes = ", ".join(f"{key} {field.shape} {field.dtype}" for key, field in found.recipe.schema.items())
    encoder = Row(check=f"encoder {name}", status="pass", detail=f"records of {shapes}")
    return [data, encoder, _cache_row(name, found)]


def _together_rows(trained: Mapping[str, Located]) -> list[Row]:
    """Whether one operator can take several tasks; nothing to say of one."""
    if len(trained) < 2:
        return []
    try:
        check_together({task: found.recipe.schema for task, found in trained.items()})
    except ConfigError as error:
        return [failed("tasks", error)]
    return [Row(check="tasks", status="pass", detail=f"one operator for {', '.join(trained)}")]


def _windows_row(config: Config, found: Located) -> Row:
    if is_steady(found.recipe.schema):
        return Row(check="windows", status="pass", detail="none: each sample is an input and its solution")
    if windows_for(config, found.recipe.schema) is None:
        return Row(check="windows", status="warn", detail=no_operator(found.recipe.schema))
    try:
        count = windows_in(config, found.recipe.schema)
    except ConfigError as error:
        return failed("windows", error)
    many = "as many as fit" if count is None else format_count(count)
    detail = f"{many} in each trajectory, over {windows_of(config).span + 1} steps each"
    return Row(check="windows", status="pass", detail=detail)


def _run_dir_row(config: Config) -> Row:
    try:
        run_dir = run_dir_of(config)
        require_writable(run_dir, "training.run_dir")
    except StokerError as error:
        return failed("run folder", error, ConfigError.exit_code)
    return Row(check="run folder", status="pass", detail=f"{run_dir} can be written")


def _parts(found: Located) -> str:
    parts = found.recipe.parts
    return parts[0].name if len(parts) == 1 else f"{len(parts)} files, {parts[0].name} to {parts[-1].name}"


def _cache_row(name: str, found: Located) -> Row:
    check, cache = f"cache {name}", found.cache
    if cache is None:
        detail = f"none yet for {found.recipe.fingerprint}; `stoker precompute` or `train` makes it"
        return Row(check=check, status="warn", detail=detail + _why_not(found))
    if found.missing:
        detail = (
            f"{format_count(found.missing)} of {format_count(found.recipe.count)} records are missing in "
            f"{shown(cache.path)}; `stoker precompute` resumes"
        )
        return Row(check=check, status="warn", detail=detail)
    aside = len(cache.index.quarantined)
    detail = f"{format_count(len(cache), 'record')} ready in {shown(cache.path)}"
    if aside:
        return Row(check=check, status="warn", detail=f"{detail}, {format_count(aside)} quarantined")
    return Row(check=check, status="pass", detail=detail)


def _why_not(found: Located) -> str:
    """In what the nearest cache of that name differs; empty where there is none."""
    nearest = nearest_differences(found.recipe, found.folder)
    if nearest is None:
        return ""
    folder, differences = nearest
    more = "" if len(differences) <= SHOWN else f", and {len(differences) - SHOWN} more (`stoker why`)"
    return f". {folder.name} is of another recipe: {', '.join(map(_say, differences[:SHOWN]))}{more}"


def _say(difference: Difference) -> str:
    a, b = (_brief(side) for side in (difference.a, difference.b))
    return f"{difference.entry} is {b}, was {a}"


def _brief(value: object) -> str:
    text = str(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]}…"
