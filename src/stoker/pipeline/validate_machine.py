"""Whether this machine holds what a run needs: GPU and driver, memory, disk, files, shared memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from stoker.config import Config
from stoker.errors import ResourceError, StalledError, StokerError
from stoker.monitor import GpuAbsent, open_gpu
from stoker.monitor.gpu import find_driver
from stoker.pipeline.build import device_of
from stoker.pipeline.checks import Row, failed
from stoker.pipeline.folders import cache_dir_of, require_writable
from stoker.pipeline.locate import Located
from stoker.pipeline.plan import demand_of, left_by
from stoker.pipeline.together import encoders_of
from stoker.plan import Resources, plan_tiers, probe
from stoker.plan.resources import DISK_DEADLINE_S
from stoker.precompute.space import check_space, needed_bytes
from stoker.runtime.disk import free_space
from stoker.runtime.threads import call_within
from stoker.scale.ranks import ALONE
from stoker.units import GIB, format_bytes, format_count

SHARED = Path("/dev/shm")  # noqa: S108  asked for its size, not written to
SHARED_BYTES = GIB
"""Least free shared memory that is fine; containers come with 64 MiB."""


def check_driver() -> Row:
    """Whether the GPU's driver runs the CUDA that torch was built for; a CPU needs neither."""
    import torch

    built, found = torch.version.cuda, find_driver()
    if isinstance(found, GpuAbsent):
        if built is None:
            return Row(check="driver", status="pass", detail=f"{found.reason}; torch is a build for the CPU")
        detail = f"{found.reason}, and torch is built for CUDA {built}. On this machine steps run on the CPU"
        return Row(check="driver", status="warn", detail=detail)
    runs = f"driver {found.version} runs CUDA {found.cuda[0]}.{found.cuda[1]}"
    if built is None:
        detail = f"{runs}, but torch is a build for the CPU: install one for CUDA, or the GPU stands idle"
        return Row(check="driver", status="warn", detail=detail)
    # Within one major version any driver runs what was built for a later minor one.
    if found.cuda[0] < int(built.split(".")[0]):
        detail = (
            f"{runs}, torch is built for CUDA {built}. Install a newer driver, or torch for {found.cuda[0]}"
        )
        return Row(check="driver", status="fail", detail=detail, exit_code=ResourceError.exit_code)
    return Row(check="driver", status="pass", detail=f"{runs}, torch is built for {built}")


def check_shared_memory(folder: Path = SHARED) -> Row:
    """How large the memory file system is that workers of others exchange batches through."""
    whose = "workers of a torch DataLoader and NCCL need it, Stoker itself does not"
    try:
        free, _, total = call_within(DISK_DEADLINE_S, lambda: free_space(folder), str(folder))
    except (OSError, StalledError) as error:
        return Row(check="shm", status="warn", detail=f"{folder} cannot be asked ({error}); {whose}")
    detail = f"{format_bytes(free)} free of {format_bytes(total)} in {folder}; {whose}"
    if free < SHARED_BYTES:
        cure = "start the container with --shm-size=8g or --ipc=host"
        return Row(
            check="shm", status="warn", detail=f"{detail}. Expected {format_bytes(SHARED_BYTES)}: {cure}"
        )
    return Row(check="shm", status="pass", detail=detail)


def check_device(config: Config, rows: list[Row]) -> str:
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
        encoders_of(config, ALONE)
    except StokerError as error:
        rows.append(failed("encoders", error))
    try:
        resources = probe(device=device)
    except ResourceError as error:
        rows.append(failed("gpu", error))
        return "cpu"
    if device == "cpu":
        detail = f"{described or 'none'}; device is cpu"
        unused = bool(described) and config.training.device == "auto"
        rows.append(Row(check="gpu", status="warn" if unused else "pass", detail=detail))
    else:
        free = format_bytes(resources.device_bytes)
        rows.append(Row(check="gpu", status="pass", detail=f"{resources.device_name}, {free} free"))
    return device


def check_room(
    config: Config, located: list[Located], trained: Mapping[str, Located], device: str
) -> list[Row]:
    """The rows of memory and disk, neither of which waits for the other."""
    cache_dir = cache_dir_of(config)
    try:
        resources = probe(device=device, path=cache_dir)
        disk = [_disk_row(config, located, resources), _inodes_row(config, located, resources)]
    except StalledError as error:
        resources = probe(device=device)
        disk = [failed("disk", error, ResourceError.exit_code)]
    if not trained:
        detail = "not checked, since no data was found. Fix the rows above and validate again"
        return [Row(check="memory", status="warn", detail=detail), *disk]
    memory: list[Row] = []
    for task, found in trained.items():
        row, resources = _memory_row(config.for_task(task), found, resources, device)
        memory.append(row)
    return [*memory, *disk]


def _memory_row(config: Config, found: Located, resources: Resources, device: str) -> tuple[Row, Resources]:
    """The row, and what is left to the next task."""
    training = config.training
    demand = demand_of(config, found, device)
    try:
        plan = plan_tiers(demand, resources, tier=training.tier, reserve_bytes=training.reserve_bytes)
    except ResourceError as error:
        return failed("memory", error), resources
    served = plan.tier in ("host", "device") or training.tier in ("disk", "encode")
    detail = "; ".join(plan.reason.split("; ")[:2])
    row = Row(check="memory", status="pass" if served else "warn", detail=detail)
    return row, left_by(plan, resources)


def _inodes_row(config: Config, located: list[Located], resources: Resources) -> Row:
    """Whether as many files can be made."""
    cache_dir, free = cache_dir_of(config), resources.disk_inodes
    try:
        for found in located:
            if found.missing:
                room = replace(resources, disk_bytes=None)
                check_space(cache_dir, found.recipe.schema, found.missing, room)
    except StokerError as error:
        return failed("inodes", error)
    many = "as many files as wanted" if free is None else f"{format_count(free)} more files"
    return Row(check="inodes", status="pass", detail=f"room for {many} below {cache_dir}")


def _disk_row(config: Config, located: list[Located], resources: Resources) -> Row:
    """Whether each cache in turn would find the room that precompute asks for."""
    cache_dir, needed, left = cache_dir_of(config), 0, replace(resources, disk_inodes=None)
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
        return Row(check="disk", status="warn", detail=f"{detail}; free space is not known")
    return Row(check="disk", status="pass", detail=f"{detail}, {format_bytes(resources.disk_bytes)} free")
