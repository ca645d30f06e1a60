"""Check everything a long run needs, before it starts: rows of pass, warn and fail.

Every row is made, also after one failed, so that one run of `stoker validate` shows all there is to mend.
What precompute and train refuse is asked of the very functions that they call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeAlias

from stoker.config import Config, load_config
from stoker.config.remedies import in_settings
from stoker.errors import ConfigError, EncoderError, ResourceError, StalledError, StokerError
from stoker.monitor import GpuAbsent, open_gpu
from stoker.monitor.trackers import check_trackers
from stoker.pipeline.build import Job, build_jobs, device_of, tasks_of
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
from stoker.pipeline.plan import demand_of, left_by
from stoker.pipeline.train import training_splits
from stoker.plan import Resources, plan_tiers, probe
from stoker.precompute.space import check_space, needed_bytes
from stoker.schema import Json
from stoker.sources.files import canonical_split
from stoker.units import format_bytes, format_count

Status: TypeAlias = Literal["pass", "warn", "fail"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One thing that was checked."""

    check: str
    """What: `config`, `training`, `data train`, `encoder`, `cache`, `windows`, `tasks`, `run folder`,
    `trackers`, `gpu`, `memory`, `disk`."""
    status: Status
    detail: str
    """What was found, with figures; for warn and fail also what to do."""
    exit_code: int = 0
    """What a `fail` of this row makes the command return."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """All rows."""

    rows: tuple[Row, ...]

    @property
    def exit_code(self) -> int:
        """0 without a failed row; 3 when a setting or file is wrong, else 6 when resources do not suffice."""
        codes = {row.exit_code for row in self.rows if row.status == "fail"}
        return ConfigError.exit_code if codes - {ResourceError.exit_code} else max(codes, default=0)

    def to_json(self) -> dict[str, Json]:
        """The keys that scripts rely on."""
        return {
            "rows": [{"check": row.check, "status": row.status, "detail": row.detail} for row in self.rows],
            "exit_code": self.exit_code,
        }


def validate_config(path: Path | str, overrides: Sequence[str] = ()) -> Validation:
    """Check a settings file and all that it names; nothing is encoded and no record is read."""
    try:
        config = load_config(path, overrides)
    except ConfigError as error:
        return Validation(rows=(_failed("config", error),))
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
    rows += _tracker_rows(config)
    device = _check_device(config, rows)
    rows += _check_room(config, located, trained, device)
    return Validation(rows=tuple(rows))


def _training_row(config: Config) -> Row:
    try:
        split, other = training_splits(config)
    except ConfigError as error:
        return _failed("training", error)
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
    return rows


def _check_cache(config: Config, key: tuple[str, str], job: Job | None, located: list[Located]) -> list[Row]:
    """Data, encoder and cache of one task and split."""
    name = "_".join(key)
    try:
        found = locate(config, *key) if job is None else locate_job(config, job)
    except EncoderError as error:
        return [_failed(f"encoder {name}", error)]
    except (StokerError, OSError) as error:
        return [_failed(f"data {name}", error)]
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
        return [_failed("tasks", error)]
    return [Row(check="tasks", status="pass", detail=f"one operator for {', '.join(trained)}")]


def _windows_row(config: Config, found: Located) -> Row:
    if windows_for(config, found.recipe.schema) is None:
        return Row(check="windows", status="warn", detail=no_operator(found.recipe.schema))
    try:
        count = windows_in(config, found.recipe.schema)
    except ConfigError as error:
        return _failed("windows", error)
    many = "as many as fit" if count is None else format_count(count)
    detail = f"{many} in each trajectory, over {windows_of(config).span + 1} steps each"
    return Row(check="windows", status="pass", detail=detail)


def _run_dir_row(config: Config) -> Row:
    run_dir = run_dir_of(config)
    try:
        require_writable(run_dir, "training.run_dir")
    except StokerError as error:
        return _failed("run folder", error, ConfigError.exit_code)
    return Row(check="run folder", status="pass", detail=f"{run_dir} can be written")


def _tracker_rows(config: Config) -> list[Row]:
    """Whether whoever shall have the figures of a run can be started; nothing where nobody is named."""
    names = config.training.trackers
    try:
        check_trackers(names)
    except ConfigError as error:
        return [_failed("trackers", error)]
    detail = f"{', '.join(names)}: packages found; none of them can end a run"
    return [Row(check="trackers", status="pass", detail=detail)] if names else []


def _parts(found: Located) -> str:
    parts = found.recipe.parts
    return parts[0].name if len(parts) == 1 else f"{len(parts)} files, {parts[0].name} to {parts[-1].name}"


def _cache_row(name: str, found: Located) -> Row:
    check, cache = f"cache {name}", found.cache
    if cache is None:
        detail = f"none yet for {found.recipe.fingerprint}; `stoker precompute` or `train` makes it"
        return Row(check=check, status="warn", detail=detail)
    if found.missing:
        detail = (
            f"{format_count(found.missing)} of {format_count(found.recipe.count)} records are missing in "
            f"{cache.path}; `stoker precompute` resumes"
        )
        return Row(check=check, status="warn", detail=detail)
    aside = len(cache.index.quarantined)
    detail = f"{format_count(len(cache))} records ready in {cache.path}"
    if aside:
        return Row(check=check, status="warn", detail=f"{detail}, {format_count(aside)} quarantined")
    return Row(check=check, status="pass", detail=detail)


def _check_device(config: Config, rows: list[Row]) -> str:
    """Add the GPU's row; returns the device to plan for."""
    gpu = open_gpu()
    described = "" if isinstance(gpu, GpuAbsent) else "NVIDIA driver found"
    if not isinstance(gpu, GpuAbsent):
        sample = gpu.sample()
        gpu.close()
        if not isinstance(sample, GpuAbsent):
            described = f"{sample.name}, {format_bytes(sample.total_bytes - sample.used_bytes)} free"
    device = device_of(config)
    try:
        resources = probe(device=device)
    except ResourceError as error:
        rows.append(_failed("gpu", error))
        return "cpu"
    if device == "cpu":
        detail = f"{described or 'none'}; device is cpu"
        unused = bool(described) and config.training.device == "auto"
        rows.append(Row(check="gpu", status="warn" if unused else "pass", detail=detail))
    else:
        free = format_bytes(resources.device_bytes)
        rows.append(Row(check="gpu", status="pass", detail=f"{resources.device_name}, {free} free"))
    return device


def _check_room(
    config: Config, located: list[Located], trained: Mapping[str, Located], device: str
) -> list[Row]:
    """The rows of memory and disk, neither of which waits for the other."""
    cache_dir = Path(config.training.latent_cache_dir)
    try:
        resources = probe(device=device, path=cache_dir)
        disk = _disk_row(config, located, resources)
    except StalledError as error:
        resources = probe(device=device)
        disk = _failed("disk", error, ResourceError.exit_code)
    if not trained:
        detail = "not checked, since no data was found. Mend the rows above and validate again"
        return [Row(check="memory", status="warn", detail=detail), disk]
    memory: list[Row] = []
    for task, found in trained.items():
        row, resources = _memory_row(config.for_task(task), found, resources, device)
        memory.append(row)
    return [*memory, disk]


def _memory_row(config: Config, found: Located, resources: Resources, device: str) -> tuple[Row, Resources]:
    """The row, and what is left to the next task."""
    training = config.training
    demand = demand_of(config, found, device)
    try:
        plan = plan_tiers(demand, resources, tier=training.tier, reserve_bytes=training.reserve_bytes)
    except ResourceError as error:
        return _failed("memory", error), resources
    served = plan.tier in ("host", "device") or training.tier in ("disk", "encode")
    detail = "; ".join(plan.reason.split("; ")[:2])
    row = Row(check="memory", status="pass" if served else "warn", detail=detail)
    return row, left_by(plan, resources)


def _disk_row(config: Config, located: list[Located], resources: Resources) -> Row:
    """Whether each cache in turn would find the room that precompute asks for."""
    cache_dir, needed, left = Path(config.training.latent_cache_dir), 0, resources
    try:
        for found in located:
            if found.missing:
                require_writable(cache_dir, "training.latent_cache_dir")
                check_space(cache_dir, found.recipe.schema, found.missing, left)
                takes = needed_bytes(found.recipe.schema, found.missing)
                needed += takes
                left = left if left.disk_bytes is None else replace(left, disk_bytes=left.disk_bytes - takes)
    except StokerError as error:
        return _failed("disk", error)
    detail = f"{format_bytes(needed)} to write below {cache_dir}"
    if resources.disk_bytes is None:
        return Row(check="disk", status="warn", detail=f"{detail}; free space is not known")
    return Row(check="disk", status="pass", detail=f"{detail}, {format_bytes(resources.disk_bytes)} free")


def _failed(check: str, error: StokerError | OSError, exit_code: int | None = None) -> Row:
    if isinstance(error, StokerError):
        detail, code = in_settings(str(error)), exit_code or error.exit_code
        return Row(check=check, status="fail", detail=detail, exit_code=code)
    detail = f"{error.filename}: {error.strerror}. Mend that, or name another"
    return Row(check=check, status="fail", detail=detail, exit_code=exit_code or ConfigError.exit_code)
