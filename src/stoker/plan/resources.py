"""Ask the machine what this process may really use.

The only module that does (`plan.rates` times it, on request). What counts is the tightest limit: on a rented
machine or in a container `/proc/meminfo` shows the host's memory, of which the process may have a part.
Page cache counts as free, since the kernel gives it back; memory that it cannot take back does not.
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, cast

from stoker.errors import ConfigError, ResourceError, StokerError, arg
from stoker.runtime.disk import free_space
from stoker.runtime.mounts import mount_lines, storage_of
from stoker.runtime.threads import call_within
from stoker.schema import JsonResult

if TYPE_CHECKING:
    import torch


# ----------------------------------------------------------------------------------------------------------
# Limits that control groups put above one process, version 1 and version 2.
#
# Every function takes the texts and folders it reads as arguments, so that tests hand in made-up trees and
# only `plan.resources` names the real ones. A process has one group per hierarchy, and every ancestor's
# limit holds too. On a hybrid machine version 1 and version 2 are mounted side by side; all are read.


UNLIMITED_BYTES = 1 << 62
"""Limits from here on mean none: version 1 writes 9223372036854771712 for that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimit:
    """One group's memory limit, and what in the group cannot be given back."""

    limit_bytes: int
    held_bytes: int
    """Bytes in the group that the kernel cannot reclaim (`unreclaimable`)."""
    label: str
    """Which limit it is, for messages."""

    @property
    def usable_bytes(self) -> int:
        """Bytes that a process of the group may still take."""
        return max(0, self.limit_bytes - self.held_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuLimit:
    """One group's CPU quota."""

    cpus: float
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """One group's folder in one mounted hierarchy."""

    folder: Path
    name: str
    version: int


def memory_limits(cgroup: str, mountinfo: str, root: Path) -> list[MemoryLimit]:
    """Return all memory limits above a process, its own group first; groups without a limit are left out.

    Args:
        cgroup, mountinfo: Contents of `/proc/<pid>/cgroup` and `/proc/<pid>/mountinfo`.
        root: `/`, or the folder that holds a made-up tree.
    """
    found: list[MemoryLimit] = []
    for group in _groups(cgroup, mountinfo, root, "memory"):
        names = ("memory.limit_in_bytes",) if group.version == 1 else ("memory.max", "memory.high")
        limits = [(limit, name) for name in names if (limit := _limit(group.folder / name)) is not None]
        if limits:
            limit, name = min(limits)
            held = _held_v1(group.folder) if group.version == 1 else _held_v2(group.folder)
            label = f"cgroup v{group.version} {name} of {group.name}"
            found.append(MemoryLimit(limit_bytes=limit, held_bytes=held, label=label))
    return found


def cpu_limits(cgroup: str, mountinfo: str, root: Path) -> list[CpuLimit]:
    """Return all CPU quotas above a process; arguments as for `memory_limits`."""
    found: list[CpuLimit] = []
    for group in _groups(cgroup, mountinfo, root, "cpu"):
        if group.version == 1:
            names = "cpu.cfs_quota_us", "cpu.cfs_period_us"
            words = [_read(group.folder / name).strip() for name in names]
        else:
            names = ("cpu.max",)
            words = _read(group.folder / "cpu.max").split()
        if len(words) == 2 and all(word.isdigit() for word in words) and int(words[1]):
            label = f"cgroup v{group.version} {names[0]} of {group.name}"
            found.append(CpuLimit(cpus=int(words[0]) / int(words[1]), label=label))
    return found


def unreclaimable(stat: Mapping[str, int]) -> int:
    """Return bytes of a `memory.stat` (version 2 names) that the kernel cannot take back.

    Anonymous memory, shared memory and locked pages, each page once: the anonymous lists hold the first
    two, the unevictable list holds what is locked. To these come slab and other kernel memory that stays,
    and pages that must be written before they can go. Page cache is not in it, which is why
    `memory.current` is of no use here.

    >>> unreclaimable({"active_anon": 5, "inactive_anon": 3, "unevictable": 2, "anon": 9, "file": 100})
    10
    """
    if "active_anon" in stat:
        mapped = stat["active_anon"] + stat.get("inactive_anon", 0)
    else:
        mapped = stat.get("anon", 0) + stat.get("shmem", 0)
    kernel = ("slab_unreclaimable", "kernel_stack", "pagetables", "percpu", "sock")
    unwritten = ("file_dirty", "file_writeback")
    return mapped + sum(stat.get(name, 0) for name in ("unevictable", *kernel, *unwritten))


def read_stat(text: str) -> dict[str, int]:
    """Return name and number per line, whatever else a line may hold.

    >>> read_stat("anon 12\\nfile 7\\noddity\\n")
    {'anon': 12, 'file': 7}
    """
    pairs = (line.split() for line in text.splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) >= 2 and pair[1].isdigit()}


def _held_v2(folder: Path) -> int:
    return unreclaimable(read_stat(_read(folder / "memory.stat")))


def _held_v1(folder: Path) -> int:
    """As version 2: `total_` lines count the groups below as well; the kernel's part is a file of its own."""
    stat = read_stat(_read(folder / "memory.stat"))
    total = {name.removeprefix("total_"): stat[name] for name in stat if name.startswith("total_")} or stat
    names = {"dirty": "file_dirty", "writeback": "file_writeback", "rss": "anon"}
    kernel = _read(folder / "memory.kmem.usage_in_bytes").strip()
    held = unreclaimable({names.get(name, name): size for name, size in total.items()})
    return held + (int(kernel) if kernel.isdigit() else 0)


def _groups(cgroup: str, mountinfo: str, root: Path, controller: str) -> list[_Group]:
    """Return the process's group and its ancestors, in every hierarchy that may carry `controller`."""
    mounts = _mounts(mountinfo, controller)
    found: list[_Group] = []
    for line in cgroup.splitlines():
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        version = 2 if hierarchy == "0" and not controllers else 1
        if version == 1 and controller not in controllers.split(","):
            continue
        for top, mount in mounts.get(version, [])[-1:]:  # a later mount hides an earlier one
            found += _ancestry(PurePosixPath(path), top, root / mount.lstrip("/"), version)
    return found


def _ancestry(path: PurePosixPath, top: PurePosixPath, mount: Path, version: int) -> list[_Group]:
    """Folders from the process's group up to the mount.

    A container sees the hierarchy from `top` down; a path that does not lie below it (it may even begin
    with `..`) belongs to a part we cannot see. The mount itself is then the nearest group that we can.
    """
    try:
        below = path.relative_to(top)
    except ValueError:
        below = PurePosixPath()
    if ".." in below.parts:
        below = PurePosixPath()
    levels = [below, *below.parents] if below.parts else [below]
    return [
        _Group(folder=mount / level, name=f"/{level}".rstrip(".") or "/", version=version) for level in levels
    ]


def _mounts(mountinfo: str, controller: str) -> dict[int, list[tuple[PurePosixPath, str]]]:
    """Version to (root of the mount in its hierarchy, mount point), for hierarchies with `controller`."""
    found: dict[int, list[tuple[PurePosixPath, str]]] = {}
    for top, point, kind in mount_lines(mountinfo):
        version = {"cgroup": 1, "cgroup2": 2}.get(kind[0])
        if version == 2 or (version == 1 and controller in kind[-1].split(",")):
            found.setdefault(version, []).append((PurePosixPath(top), point))
    return found


def _limit(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() and int(text) < UNLIMITED_BYTES else None


def _read(path: Path) -> str:
    """Return the file's text; empty where it is missing or we may not read it, as for a group's root, or on a
    system without it."""
    try:
        return path.read_text()
    except OSError:
        return ""


def least_cpus(limits: list[CpuLimit], affinity: int) -> CpuLimit:
    """Return the tightest of the quotas and the CPUs that this process may run on.

    >>> least_cpus([CpuLimit(cpus=1.5, label="quota")], 4)
    CpuLimit(cpus=1.5, label='quota')
    """
    allowed = CpuLimit(cpus=float(affinity), label="CPUs this process may run on")
    return min([allowed, *limits], key=lambda limit: limit.cpus, default=CpuLimit(cpus=math.inf, label=""))


# ----------------------------------------------------------------------------------------------------------
# Devices by name: what is asked for, what `auto` means here, and whether it is there.


log = logging.getLogger("stoker")
_said: set[str] = set()


def device_name(wanted: object) -> str:
    """Return the name of a device: `auto`, `cpu`, `cuda` (or `gpu`), `cuda:1`; a `torch.device` has one too.

    >>> device_name("cuda:1"), device_name("gpu")
    ('cuda:1', 'cuda')

    Raises:
        ConfigError: It is neither the CPU nor a CUDA device.
    """
    name = re.sub(r"^gpu", "cuda", str(wanted))
    if name == "all":
        raise ConfigError(
            "device is 'all', and one device is expected: auto, cpu, cuda or cuda:0",
            hint="To encode on all GPUs give stoker.precompute(device='all'), or "
            "stoker.cached(precompute={'device': 'all'})",
        )
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", name):
        raise ConfigError(f"device {wanted!r} is not known", hint="Expected auto, cpu, cuda or cuda:0")
    return name


def automatic_device() -> tuple[str, str]:
    """Return the device that `auto` stands for, and why it is that one.

    A GPU where torch sees one (the current one), else the CPU.
    """
    import torch

    if count := torch.cuda.device_count():
        return "cuda", f"torch sees {count} CUDA device{'s' * (count > 1)}"
    return "cpu", f"torch {torch.__version__} sees no CUDA device"


def resolve_device(wanted: object, say: Callable[[str], None] = log.info) -> torch.device:
    """Return the device to compute on; of `auto` a line says once in a process which it is and why.

    Args:
        wanted: `auto`, `cpu`, `cuda`, `cuda:1`, or a `torch.device`.
        say: Takes that line; the log by default.

    Raises:
        ConfigError: It is neither the CPU nor a CUDA device.
        ResourceError: There is no such GPU, or torch was built without CUDA.
    """
    import torch

    name = device_name(wanted)
    if name == "auto":
        name, why = automatic_device()
        line = f"device is auto: {name} is used, since {why}"
        if line not in _said:
            _said.add(line)
            say(line)
    else:
        require_devices(name)
    if name == "cuda" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())  # the current one may be another later
    return torch.device(name)


def require_devices(*names: str) -> None:
    """Check that devices named as by `device_name` are there; `auto` always is.

    Raises:
        ResourceError: There is no such GPU, or torch was built without CUDA.
    """
    gpus = {name: int(name.partition(":")[2] or 0) for name in names if name.startswith("cuda")}
    if not gpus:
        return
    import torch

    count = torch.cuda.device_count()
    for name, place in gpus.items():
        if place >= count:
            there = ", ".join(f"cuda:{one}" for one in range(count)) or "no CUDA device"
            raise ResourceError(
                f"device {name} is not there: torch {torch.__version__} sees {there}",
                hint=f"Use {arg('device', 'auto')}, which takes a GPU where there is one, or "
                f"{arg('device', 'cpu')}; nvidia-smi shows whether the driver works",
            )


def encode_on(wanted: object) -> tuple[str, ...]:
    """Return devices by name: one, several, or with `all` every GPU that this process sees.

    One alone is returned as it is named, `auto` included: it is resolved where encoding begins, which may be
    on another machine.

    >>> encode_on("cpu"), encode_on(["cpu", "cpu"])
    (('cpu',), ('cpu', 'cpu'))

    Raises:
        ConfigError: A name is no device that encoders run on.
        ResourceError: Of several one is not there; or all are asked for, and there is no GPU.
    """
    several = isinstance(wanted, Sequence) and not isinstance(wanted, str)
    names = tuple(cast("Sequence[object]", wanted)) if several else (wanted,)
    if names == ("all",):
        import torch

        count = torch.cuda.device_count()
        if not count:
            raise ResourceError(
                f"device is all, and torch {torch.__version__} sees no CUDA device",
                hint=f"Use {arg('device', 'auto')}, which takes a GPU where there is one, or "
                f"{arg('device', 'cpu')}",
            )
        return tuple(f"cuda:{place}" for place in range(count))
    if not names:
        raise ConfigError("devices is empty", hint="Name at least one, as [cuda:0, cuda:1], or say all")
    if len(names) == 1:
        return (device_name(names[0]),)
    return tuple(str(resolve_device(name)) for name in names)


CACHED_BY_TORCH_BYTES = 64 << 20
"""Bytes of freed tensors that torch may keep before it is asked to give them back."""
DISK_TIMEOUT_S = 10.0
"""How long a file system may take to say how full it is; a dead network mount never would."""

IN_MEMORY = 0.8
"""Part of the free host memory that files of a memory file system may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources(JsonResult):
    """Resources that one process may use now. Bytes and counts are free ones unless named total."""

    host_bytes: int
    """Host memory that can still be taken, page cache included, before any reserve."""
    host_total_bytes: int
    """The limit that decided it."""
    host_limit: str
    """Which limit that is: `machine memory`, or a control group's."""
    device: str = "cpu"
    device_bytes: int = 0
    """Free memory of the GPU as its driver reports it; 0 on a CPU, whose memory is the host's."""
    device_total_bytes: int = 0
    device_name: str = "cpu"
    device_again_bytes: int | None = None
    """Free bytes of the GPU that this process had taken at its peak and will want again (`device_again`);
    None: the model has not shown its peak yet."""
    cpus: float = 1.0
    """CPUs for this process: quota, affinity, divided by the processes that share them."""
    cpu_limit: str = "not asked"
    disk_bytes: int | None = None
    """Free bytes for us where the cache lies; None: no path was given."""
    disk_inodes: int | None = None
    """Files that may still be made there; None: no path given, or no such limit."""


def probe(*, device: str = "cpu", path: Path | None = None, local_world_size: int = 1) -> Resources:
    """Return what this process may use now.

    Args:
        device: `cpu`, or `cuda[:i]`, whose memory is asked for (this makes a CUDA context).
        path: Where the cache lies or will lie; folders that do not exist yet are no harm.
        local_world_size: Processes of this node that share its CPUs. Host memory is not divided, since they
            share one copy of the records.

    Raises:
        ConfigError: `device` is not a device.
        ResourceError: `device` is not there.
        StalledError: The file system of `path` does not answer.
    """
    host = host_memory()
    cpu = cpu_share(Path("/proc"), Path("/"), len(os.sched_getaffinity(0)))
    free, total, name = device_memory(device, reclaim=True)
    disk_bytes, disk_inodes = (None, None) if path is None else disk_space(path)
    mount = None if path is None else storage_of(path)
    if disk_bytes is not None and mount is not None and mount.in_memory:
        disk_bytes = min(disk_bytes, int(host.usable_bytes * IN_MEMORY))  # which it is taken from
    return Resources(
        host_bytes=host.usable_bytes,
        host_total_bytes=host.limit_bytes,
        host_limit=host.label,
        device=device,
        device_bytes=free,
        device_total_bytes=total,
        device_name=name,
        cpus=cpu.cpus / max(1, local_world_size),
        cpu_limit=cpu.label,
        disk_bytes=disk_bytes,
        disk_inodes=disk_inodes,
    )


def memory_now(earlier: Resources) -> Resources:
    """Return the same with the host and device memory that is free now, for a running loader."""
    host = host_memory()
    free, _, _ = device_memory(earlier.device)
    return replace(
        earlier,
        host_bytes=host.usable_bytes,
        host_total_bytes=host.limit_bytes,
        host_limit=host.label,
        device_bytes=free,
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an error says that memory is short: torch's own class, Python's, or the CPU allocator's.

    An error of ours says so if one of these caused it.
    """
    import torch  # this module is imported without it

    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if isinstance(error, StokerError) and error.__cause__ is not None and is_out_of_memory(error.__cause__):
        return True
    # Torch has no class of its own for these.
    return isinstance(error, RuntimeError | StokerError) and any(
        words in str(error) for words in ("can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
    )


def host_memory(proc: Path = Path("/proc"), root: Path = Path("/")) -> MemoryLimit:
    """Return the tightest of the machine's memory and every control group above this process.

    Args:
        proc: `/proc`, or a folder with `meminfo`, `self/cgroup` and `self/mountinfo`.
        root: `/`, or the folder below which mount points lie.
    """
    machine = machine_memory((proc / "meminfo").read_text())
    groups = memory_limits(_read(proc / "self/cgroup"), _read(proc / "self/mountinfo"), root)
    # A group may be allowed more than the machine has; then the machine's own line decides alone,
    # since what the group holds is held on the machine too.
    return min([machine, *groups], key=lambda limit: limit.usable_bytes)


def machine_memory(meminfo: str) -> MemoryLimit:
    """Return the machine's memory, from the text of `/proc/meminfo`.

    The kernel's own estimate (`MemAvailable`) counts dirty pages as free, ours misses memory that no line
    names (drivers, other file systems' caches). The lower of the two can be relied on.
    """
    found = re.findall(r"^(\S+):\s+(\d+)", meminfo, flags=re.MULTILINE)
    kib = {name: int(size) for name, size in found}
    names = {
        "active_anon": "Active(anon)", "inactive_anon": "Inactive(anon)", "unevictable": "Unevictable",
        "slab_unreclaimable": "SUnreclaim", "kernel_stack": "KernelStack", "pagetables": "PageTables",
        "percpu": "Percpu", "file_dirty": "Dirty", "file_writeback": "Writeback",
    }  # fmt: skip
    held = unreclaimable({ours: kib[theirs] for ours, theirs in names.items() if theirs in kib})
    total = kib["MemTotal"]
    held = max(held + kib.get("Hugetlb", 0), total - kib.get("MemAvailable", total))
    return MemoryLimit(limit_bytes=total * 1024, held_bytes=held * 1024, label="machine memory")


def cpu_share(proc: Path, root: Path, affinity: int) -> CpuLimit:
    """Return the tightest of affinity and every quota above this process; arguments as for `host_memory`."""
    quotas = cpu_limits(_read(proc / "self/cgroup"), _read(proc / "self/mountinfo"), root)
    return least_cpus(quotas, affinity)


def device_memory(device: str, *, reclaim: bool = False) -> tuple[int, int, str]:
    """Free bytes, total bytes and name of a GPU; `(0, 0, "cpu")` for the CPU.

    Args:
        device: `cpu` or `cuda[:i]`.
        reclaim: Count as free what torch keeps of freed tensors, and have it given back. Not while a model
            trains: its next step would ask the driver for all of it again.

    Raises:
        ConfigError: `device` is not `auto`, `cpu` or `cuda[:i]`.
        ResourceError: There is no such GPU, or torch was built without CUDA.
    """
    if device == "cpu":
        return 0, 0, "cpu"
    where = resolve_device(device)
    if where.type == "cpu":
        return 0, 0, "cpu"
    import torch

    index = where.index
    kept = torch.cuda.memory_reserved(index) - torch.cuda.memory_allocated(index)
    if reclaim and kept > CACHED_BY_TORCH_BYTES:  # which the driver counts as taken
        torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(index)
    return int(free), int(total), torch.cuda.get_device_name(index)


def use_device(device: str | torch.device) -> None:
    """Make a GPU the current one of this thread; does nothing for a CPU.

    What names no device would go to GPU 0: events, kernels of an encoder's own, a context of 500 MiB.
    """
    import torch

    where = torch.device(device)
    if where.type == "cuda" and str(where) != "cuda":  # without a number it is the current one
        torch.cuda.set_device(where)


def give_back(device: torch.device) -> None:
    """Return to the driver what torch keeps of freed memory of a GPU, and start measuring its peak again.

    After something large went that is not the model's: the peak is what the model will want again
    (`device_again`), and had it in.
    """
    if device.type == "cuda":
        import torch

        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def device_again(device: str) -> int:
    """Return bytes of a GPU that torch held in this process at its peak and has given back since."""
    import torch

    if not device.startswith("cuda") or not torch.cuda.is_initialized():
        return 0
    return max(0, torch.cuda.max_memory_reserved(device) - torch.cuda.memory_reserved(device))


def disk_space(path: Path) -> tuple[int, int | None]:
    """Free bytes and inodes for us at `path` (or its nearest existing folder); inodes None: unlimited.

    Raises:
        StalledError: No answer within `DISK_TIMEOUT_S`.
    """

    what = f"the file system of {path}"
    free = call_within(DISK_TIMEOUT_S, lambda: free_space(path, nearest=True), what)
    return free.bytes, free.inodes


# ----------------------------------------------------------------------------------------------------------
# Check the folders that settings name before hours of work, not after.


def find_obstacle(folder: Path, *, writes: bool = True) -> str | None:
    """Return why `folder`, which need not exist yet, cannot be used; None where it can. Nothing is created.

    Args:
        writes: Something will be written there; else it only has to be a folder, or able to become one.

    Raises:
        StalledError: The file system does not answer.
    """

    def look() -> str | None:
        place = folder.absolute()
        while not os.path.lexists(place):
            place = place.parent
        if not place.is_dir():
            return f"{place} is {'a link to nothing' if place.is_symlink() else 'not a folder'}"
        if writes and not os.access(place, os.W_OK | os.X_OK):
            return f"{place} may not be written to"
        return None

    return call_within(DISK_TIMEOUT_S, look, f"the file system of {folder}")


def require_folder(folder: Path, setting: str) -> Path:
    """Return `folder`, which `setting` named, if it is a folder or may become one; it need not be writable.

    Raises:
        ConfigError: It, or something above it, is not a folder.
        StalledError: Its file system does not answer.
    """
    if (why := find_obstacle(folder, writes=False)) is not None:
        raise ConfigError(f"{setting} is {folder}, but {why}", hint="Choose a folder")
    return folder


def require_writable(folder: Path, setting: str) -> Path:
    """Return `folder`, which `setting` named, if it can be written or created.

    Raises:
        ConfigError: It cannot.
        StalledError: Its file system does not answer.
    """
    if (why := find_obstacle(folder)) is not None:
        raise ConfigError(f"{setting} is {folder}, but {why}", hint="Choose another folder, or fix that one")
    return folder


def is_open(folder: Path) -> bool:
    """Return True if `folder` is there and may be listed."""
    return os.path.isdir(folder) and os.access(folder, os.R_OK | os.X_OK)  # noqa: PTH112  Path.is_dir raises
