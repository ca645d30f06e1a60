"""Check everything a long run needs, before it starts: rows of pass, warn and fail.

Every row is made, also after one failed, so that one run of `stoker validate` shows all there is to fix.
What precompute and train refuse is asked of the very functions that they call.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal, TypeAlias
from urllib.parse import urlsplit

from stoker.config import load_config
from stoker.config.names import in_settings
from stoker.encoders.wrappers import is_steady
from stoker.errors import ConfigError, EncoderError, ResourceError, StalledError, StokerError
from stoker.monitor import MissingGpu, open_gpu
from stoker.monitor.meter import find_driver
from stoker.monitor.trackers import NEEDS, check_trackers
from stoker.plan import Resources, plan_tiers, probe
from stoker.plan.resources import DISK_TIMEOUT_S, find_obstacle, require_writable
from stoker.precompute.checks import check_space, needed_bytes
from stoker.precompute.measure import try_encoder
from stoker.run.build import CacheJob, build_jobs
from stoker.run.caches import CacheLocation, locate, locate_job, nearest_differences
from stoker.run.context import Run, encode_devices, inputs_of, target_of, windows_in
from stoker.run.plan import demand_of, left_by
from stoker.run.tasks import check_together
from stoker.run.train import training_splits
from stoker.runtime.disk import free_space
from stoker.runtime.threads import call_within
from stoker.schema import JsonResult
from stoker.store import Difference
from stoker.store.storage import display_path
from stoker.units import GIB, format_bytes, format_count, format_seconds

# ----------------------------------------------------------------------------------------------------------
# Rows of `stoker validate`: what was checked, and how it came out.


Status: TypeAlias = Literal["pass", "warn", "fail"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRow(JsonResult):
    """One thing that was checked."""

    json_keys = ("check", "status", "detail")

    check: str
    """What: `config`, `training`, `data train`, `encoder`, `cache`, `windows`, `tasks`, `run folder`,
    `tracker wandb`, `gpu`, `driver`, `shm`, `memory`, `disk`, `inodes`, `launch code`."""
    status: Status
    detail: str
    """The finding, with figures; for warn and fail also the next step."""
    exit_code: int = 0
    """Exit code of the command if this row is a `fail`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation(JsonResult):
    """All rows."""

    json_keys = ("rows", "exit_code")

    rows: tuple[CheckRow, ...]

    @property
    def exit_code(self) -> int:
        """0 without a failed row; 3 when a setting or file is wrong, else 6 when resources do not suffice."""
        codes = {row.exit_code for row in self.rows if row.status == "fail"}
        return ConfigError.exit_code if codes - {ResourceError.exit_code} else max(codes, default=0)

    def and_these(self, rows: list[CheckRow]) -> Validation:
        """Return it with more rows at the end."""
        return Validation(rows=(*self.rows, *rows))


def passed(check: str, detail: str) -> CheckRow:
    """Return the row of a check that found nothing wrong."""
    return CheckRow(check=check, status="pass", detail=detail)


def warned(check: str, detail: str) -> CheckRow:
    """Return the row of a check whose finding deserves a look."""
    return CheckRow(check=check, status="warn", detail=detail)


def failed(check: str, error: StokerError | OSError, exit_code: int | None = None) -> CheckRow:
    """Return the row of what an error says; its class decides the exit code, unless one is given."""
    if isinstance(error, StokerError):
        detail, code = in_settings(error), exit_code or error.exit_code
        return CheckRow(check=check, status="fail", detail=detail, exit_code=code)
    detail = f"{error.filename}: {error.strerror}. Fix that, or name another"
    return CheckRow(check=check, status="fail", detail=detail, exit_code=exit_code or ConfigError.exit_code)


# ----------------------------------------------------------------------------------------------------------
# Whether this machine holds what a run needs: GPU and driver, memory, disk, files, shared memory.


SHARED = Path("/dev/shm")  # noqa: S108  asked for its size, not written to
SHARED_BYTES = GIB
"""Least free shared memory that is fine; containers come with 64 MiB."""


def check_driver() -> CheckRow:
    """Check that the GPU's driver runs the CUDA that torch was built for; a CPU needs neither."""
    import torch

    built, found = torch.version.cuda, find_driver()
    if isinstance(found, MissingGpu):
        if built is None:
            return passed("driver", f"{found.reason}; torch is a build for the CPU")
        return warned(
            "driver",
            f"{found.reason}, and torch is built for CUDA {built}. On this machine steps run on the CPU",
        )
    runs = f"driver {found.version} runs CUDA {found.cuda[0]}.{found.cuda[1]}"
    if built is None:
        return warned(
            "driver",
            f"{runs}, but torch is a build for the CPU: install one for CUDA, or the GPU stands idle",
        )
    # Within one major version any driver runs what was built for a later minor one.
    if found.cuda[0] < int(built.split(".")[0]):
        detail = (
            f"{runs}, torch is built for CUDA {built}. Install a newer driver, or torch for {found.cuda[0]}"
        )
        return CheckRow(check="driver", status="fail", detail=detail, exit_code=ResourceError.exit_code)
    return passed("driver", f"{runs}, torch is built for {built}")


def check_shared_memory(folder: Path = SHARED) -> CheckRow:
    """Check the size of the memory file system through which other loaders' workers exchange batches."""
    whose = "workers of a torch DataLoader and NCCL need it, Stoker itself does not"
    try:
        free, _, total = call_within(DISK_TIMEOUT_S, lambda: free_space(folder), str(folder))
    except (OSError, StalledError, ResourceError) as error:
        return warned("shm", f"{folder} cannot be asked ({error}); {whose}")
    detail = f"{format_bytes(free)} free of {format_bytes(total)} in {folder}; {whose}"
    if free < SHARED_BYTES:
        cure = "start the container with --shm-size=8g or --ipc=host"
        return warned("shm", f"{detail}. Expected {format_bytes(SHARED_BYTES)}: {cure}")
    return passed("shm", detail)


def check_device(run: Run, rows: list[CheckRow]) -> Run:
    """Add the GPU's row; returns the run with the device to plan for."""
    gpu = open_gpu()
    described = "" if isinstance(gpu, MissingGpu) else "NVIDIA driver found"
    if not isinstance(gpu, MissingGpu):
        sample = gpu.sample()
        gpu.close()
        if not isinstance(sample, MissingGpu):
            described = f"{sample.name}, {format_bytes(sample.total_bytes - sample.used_bytes)} free"
    device = run.device
    try:
        _ = encode_devices(run)
    except StokerError as error:
        rows.append(failed("encoders", error))
    try:
        resources = probe(device=device)
    except ResourceError as error:
        rows.append(failed("gpu", error))
        return run.with_training(device="cpu")
    if device == "cpu":
        detail = f"{described or 'none'}; device is cpu"
        unused = bool(described) and run.config.training.device == "auto"
        rows.append(CheckRow(check="gpu", status="warn" if unused else "pass", detail=detail))
    else:
        free = format_bytes(resources.device_bytes)
        rows.append(passed("gpu", f"{resources.device_name}, {free} free"))
    return run


def check_room(
    run: Run, located: list[CacheLocation], trained: Mapping[str, CacheLocation]
) -> list[CheckRow]:
    """Return the rows of memory and disk, neither of which waits for the other."""
    try:
        resources = probe(device=run.device, path=run.cache_dir)
        disk = [_disk_row(run.cache_dir, located, resources), _inodes_row(run.cache_dir, located, resources)]
    except (StalledError, ResourceError) as error:
        resources = probe(device=run.device)
        disk = [failed("disk", error, ResourceError.exit_code)]
    if not trained:
        detail = "not checked, since no data was found. Fix the rows above and validate again"
        return [warned("memory", detail), *disk]
    memory: list[CheckRow] = []
    for task, found in trained.items():
        row, resources = _memory_row(run.for_task(task), found, resources)
        memory.append(row)
    return [*memory, *disk]


def _memory_row(run: Run, found: CacheLocation, resources: Resources) -> tuple[CheckRow, Resources]:
    """Return the row, and what is left to the next task."""
    training = run.config.training
    demand = demand_of(run, found)
    try:
        plan = plan_tiers(demand, resources, tier=training.tier, reserve_bytes=training.reserve_bytes)
    except ResourceError as error:
        return failed("memory", error), resources
    served = plan.tier in ("host", "device") or training.tier in ("disk", "encode")
    detail = "; ".join(plan.reason.split("; ")[:2])
    row = CheckRow(check="memory", status="pass" if served else "warn", detail=detail)
    return row, left_by(plan, resources)


def _inodes_row(cache_dir: Path, located: list[CacheLocation], resources: Resources) -> CheckRow:
    """Check that enough files can be created."""
    free = resources.disk_inodes
    try:
        for found in located:
            if found.missing:
                room = replace(resources, disk_bytes=None)
                check_space(cache_dir, found.recipe.schema, found.missing, room)
    except StokerError as error:
        return failed("inodes", error)
    many = "as many files as wanted" if free is None else f"{format_count(free)} more files"
    return passed("inodes", f"room for {many} below {cache_dir}")


def _disk_row(cache_dir: Path, located: list[CacheLocation], resources: Resources) -> CheckRow:
    """Check that each cache in turn would find the space that precompute requires."""
    needed, left = 0, replace(resources, disk_inodes=None)
    try:
        for found in located:
            if found.missing:
                require_writable(cache_dir, "training.latent_cache_dir")
                check_space(cache_dir, found.recipe.schema, found.missing, left)
                takes = needed_bytes(found.recipe.schema, found.missing)
                needed += takes
                left = left if left.disk_bytes is None else replace(left, disk_bytes=left.disk_bytes - takes)
    except StokerError as error:
        return failed("disk", error)
    detail = f"{format_bytes(needed)} to write below {cache_dir}"
    if resources.disk_bytes is None:
        return warned("disk", f"{detail}; free space is not known")
    return passed("disk", f"{detail}, {format_bytes(resources.disk_bytes)} free")


# ----------------------------------------------------------------------------------------------------------
# Whether trackers can be had, and whether what they send to answers; none of them can end a run.


ANSWER_S = 5.0
"""Seconds that a server has to take a connection."""
WANDB = "https://api.wandb.ai"
PORTS = {"http": 80, "https": 443}


def check_each(names: tuple[str, ...], environment: Mapping[str, str]) -> list[CheckRow]:
    """Return a row for each tracker.

    Args:
        names: As `training.trackers` has them.
        environment: In which servers and credentials are named.
    """
    return [_row(name, environment) for name in names]


def _row(name: str, environment: Mapping[str, str]) -> CheckRow:
    check = f"tracker {name}"
    try:
        check_trackers([name])
    except ConfigError as error:
        return failed(check, error)
    if name not in NEEDS or name == "tensorboard":
        return passed(
            check, "event files in the run's folder" if name in NEEDS else "found; of another package"
        )
    server, offline = (_wandb if name == "wandb" else _mlflow)(environment)
    if server is None:
        return passed(check, offline)
    if urlsplit(server).scheme not in PORTS:
        return _of_a_file(check, server)
    why, shown = unreachable(server), _without_user(server)
    if why is None:
        return passed(check, f"{shown} answers")
    return warned(
        check, f"{shown} does not answer ({why}): figures may be lost, the run continues; {offline}"
    )


def _without_user(server: str) -> str:
    """Return a URL without the name and password that it may carry.

    >>> _without_user("https://me:secret@host:5000/path")
    'https://host:5000'
    """
    parts = urlsplit(server)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


def _wandb(environment: Mapping[str, str]) -> tuple[str | None, str]:
    """Return its server, or None and why none is asked."""
    server = environment.get("WANDB_BASE_URL") or WANDB
    mode = environment.get("WANDB_MODE", "")
    if mode in ("offline", "disabled", "dryrun"):
        return None, f"offline, as WANDB_MODE={mode} says: files in the run's folder, for `wandb sync`"
    without = "without credentials it works offline, in the run's folder"
    host = urlsplit(server).hostname or ""
    if environment.get("WANDB_API_KEY") or host in _netrc(environment):
        return server, "WANDB_MODE=offline keeps them in the run's folder"
    return None, f"offline: {without} (no WANDB_API_KEY, and {host} is not in ~/.netrc)"


def _netrc(environment: Mapping[str, str]) -> str:
    try:
        return (Path(environment.get("HOME", "")) / ".netrc").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _mlflow(environment: Mapping[str, str]) -> tuple[str | None, str]:
    """Return its server, or None and where it keeps figures instead."""
    server = environment.get("MLFLOW_TRACKING_URI")
    local = "mlflow.db in the run's folder"
    return (server, f"without MLFLOW_TRACKING_URI it is {local}") if server else (None, f"offline: {local}")


def _of_a_file(check: str, address: str) -> CheckRow:
    """Return a database or folder of this machine."""
    place = Path(address.partition(":///")[2] or address.partition(":")[2] or address)
    why = find_obstacle(place.parent) if address.startswith(("sqlite:", "file:", "/", ".")) else None
    if why is None:
        return passed(check, f"{address.partition('://')[0]} store, not a server")
    return warned(
        check, f"MLFLOW_TRACKING_URI names {place}, and {why}: figures would be lost, the run continues"
    )


def unreachable(server: str, answer_s: float = ANSWER_S) -> str | None:
    """Return why a server accepts no connection; None: it does."""
    parts = urlsplit(server)
    host, port = parts.hostname or "", parts.port or PORTS[parts.scheme]

    def connect() -> None:
        socket.create_connection((host, port), timeout=answer_s).close()

    try:  # names are looked up without a deadline of their own
        call_within(answer_s + 1, connect, server)
    except StalledError:
        return f"no answer in {answer_s:g} s"
    except ResourceError as error:
        return error.fact
    except OSError as error:
        return error.strerror or str(error)
    return None


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
    rows = [passed("config", f"{path}, {len(config.notes)} notes")]
    rows += [warned("config", note) for note in config.notes]
    run = Run(config)
    rows.append(_training_row(run))
    located: list[CacheLocation] = []
    trained: dict[str, CacheLocation] = {}
    for part in run.parts():
        found: list[CacheLocation] = []
        rows += _check_task(part, found)
        located += found
        if found:
            trained[part.task] = found[0]
    rows += [_windows_row(run.for_task(task), first) for task, first in trained.items()]
    rows += _together_rows(trained)
    rows.append(_run_dir_row(run))
    rows += check_each(config.training.trackers, environment)
    run = check_device(run, rows)
    rows += [check_driver(), check_shared_memory()]
    rows += check_room(run, located, trained)
    return Validation(rows=tuple(rows))


def _training_row(run: Run) -> CheckRow:
    try:
        split, other = training_splits(run)
    except ConfigError as error:
        return failed("training", error)
    names = ", ".join(f"{task}_{split}" for task in run.tasks)
    return passed("training", f"on {names}, judged on {other}")


def _check_task(run: Run, located: list[CacheLocation]) -> list[CheckRow]:
    """Check data, encoder and cache of each split of precompute and train; `located` gets what was found."""
    splits = dict.fromkeys([*run.splits, "val"])
    jobs: dict[str, CacheJob] = {}
    with suppress(StokerError, OSError):  # then the row of each split says which one fails
        jobs = {job.split: job for job in build_jobs(run, list(splits))}
    rows: list[CheckRow] = []
    for split in splits:
        rows += _check_cache(run, split, jobs.get(split), located)
    # All splits share the encoder, so that trying it once will do.
    return [*rows, *([_encoder_row(run, next(iter(jobs.values())))] if jobs else [])]


def _encoder_row(run: Run, job: CacheJob) -> CheckRow:
    """Check that the encoder takes a sample of zeros on its device."""
    check = f"encoder {run.task}"
    if job.encoder is None:
        return passed(check, "none: samples are stored as they are")
    device, timeout_s = run.device, run.config.precompute.timeouts.encode
    try:
        took_s = try_encoder(job.encoder, job.source.schema(), device, timeout_s)
    except StokerError as error:
        code = error.exit_code if isinstance(error, ResourceError) else ConfigError.exit_code
        return failed(check, error, code)
    return passed(check, f"loads on {device} and encodes a sample of zeros in {format_seconds(took_s)}")


def _check_cache(run: Run, split: str, job: CacheJob | None, located: list[CacheLocation]) -> list[CheckRow]:
    """Check data, encoder and cache of one task and split."""
    name = f"{run.task}_{split}"
    try:
        found = locate(run, split) if job is None else locate_job(run, job)
    except EncoderError as error:
        return [failed(f"encoder {name}", error)]
    except (StokerError, OSError) as error:
        return [failed(f"data {name}", error)]
    located.append(found)
    count = format_count(found.recipe.count)
    if found.source_gone:
        data = warned(f"data {name}", "raw data is gone; the cache is used")
    else:
        data = passed(f"data {name}", f"{count} samples in {_parts(found)}")
    shapes = ", ".join(f"{key} {field.shape} {field.dtype}" for key, field in found.recipe.schema.items())
    encoder = passed(f"encoder {name}", f"records of {shapes}")
    return [data, encoder, _cache_row(name, found)]


def _together_rows(trained: Mapping[str, CacheLocation]) -> list[CheckRow]:
    """Check that one operator can take several tasks; no row for a single task."""
    if len(trained) < 2:
        return []
    try:
        check_together({task: found.recipe.schema for task, found in trained.items()})
    except ConfigError as error:
        return [failed("tasks", error)]
    return [passed("tasks", f"one operator for {', '.join(trained)}")]


def _windows_row(run: Run, found: CacheLocation) -> CheckRow:
    if is_steady(schema := found.recipe.schema):
        return passed("windows", "none: each sample is an input and its solution")
    try:
        if (target := target_of(run, schema)) is not None:
            return passed(
                "target", f"{target} is predicted from {', '.join(inputs_of(run.config, schema, target))}"
            )
        count = windows_in(run, schema)
    except ConfigError as error:
        if run.windows_for(schema) is None and run.config.training.target is None:
            return warned("target", str(error))  # its cache may be for a training loop of one's own
        return failed("windows", error)
    many = "as many as fit" if count is None else format_count(count)
    return passed("windows", f"{many} in each trajectory, over {run.windows.span + 1} steps each")


def _run_dir_row(run: Run) -> CheckRow:
    try:
        run_dir = require_writable(run.run_dir, "training.run_dir")
    except StokerError as error:
        return failed("run folder", error, ConfigError.exit_code)
    return passed("run folder", f"{run_dir} can be written")


def _parts(found: CacheLocation) -> str:
    parts = found.recipe.parts
    return parts[0].name if len(parts) == 1 else f"{len(parts)} files, {parts[0].name} to {parts[-1].name}"


def _cache_row(name: str, found: CacheLocation) -> CheckRow:
    check, cache = f"cache {name}", found.cache
    if cache is None:
        detail = f"none yet for {found.recipe.fingerprint}; `stoker precompute` or `train` makes it"
        return warned(check, detail + _why_not(found))
    if found.missing:
        detail = (
            f"{format_count(found.missing)} of {format_count(found.recipe.count)} records are missing in "
            f"{display_path(cache.path)}; `stoker precompute` resumes"
        )
        return warned(check, detail)
    aside = len(cache.index.quarantined)
    detail = f"{format_count(len(cache), 'record')} ready in {display_path(cache.path)}"
    if aside:
        return warned(check, f"{detail}, {format_count(aside)} quarantined")
    return passed(check, detail)


def _why_not(found: CacheLocation) -> str:
    """Say how the nearest cache of that name differs; empty without one."""
    nearest = nearest_differences(found.recipe, found.folder)
    if nearest is None:
        return ""
    folder, differences = nearest
    more = "" if len(differences) <= SHOWN else f", and {len(differences) - SHOWN} more (`stoker cache why`)"
    return f". {folder.name} is of another recipe: {', '.join(map(_say, differences[:SHOWN]))}{more}"


def _say(difference: Difference) -> str:
    a, b = (_brief(side) for side in (difference.a, difference.b))
    return f"{difference.entry} is {b}, was {a}"


def _brief(value: object) -> str:
    text = str(value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]}…"
