"""Ask the machine what this process may really use.

The only module that does (`plan.rates` times it, on request). What counts is the tightest limit: on a rented
machine or in a container `/proc/meminfo` shows the host's memory, of which the process may have a part.
Page cache counts as free, since the kernel gives it back; memory that it cannot take back does not.
"""

from __future__ import annotations

import os
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from stoker.plan.cgroups import CpuLimit, MemoryLimit, cpu_limits, least_cpus, memory_limits, unreclaimable
from stoker.plan.devices import resolve_device
from stoker.plan.mounts import Mount, mount_of
from stoker.runtime.disk import free_space
from stoker.runtime.threads import call_within
from stoker.schema import Json

if TYPE_CHECKING:
    import torch

CACHED_BY_TORCH_BYTES = 64 << 20
"""What torch may keep of freed tensors before it is asked to give that back."""
DISK_DEADLINE_S = 10.0
"""How long a file system may take to say how full it is; a dead network mount never would."""

IN_MEMORY = 0.8
"""Part of the free host memory that files of a memory file system may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What one process may use now. Bytes and counts are free ones unless named total."""

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

    def to_json(self) -> dict[str, Json]:
        """All fields by name."""
        return asdict(self)


def probe(*, device: str = "cpu", path: Path | None = None, local_world: int = 1) -> Resources:
    """What this process may use now.

    Args:
        device: `cpu`, or `cuda[:i]`, whose memory is asked for (this makes a CUDA context).
        path: Where the cache lies or will lie; folders that do not exist yet are no harm.
        local_world: Processes of this node that share its CPUs. Host memory is not divided, since they
            share one copy of the records.

    Raises:
        ConfigError: `device` is not a device.
        ResourceError: `device` is not there.
        StalledError: The file system of `path` does not answer.
    """
    proc, root = Path("/proc"), Path("/")
    host = host_memory(proc, root)
    cpu = cpu_share(proc, root, len(os.sched_getaffinity(0)))
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
        cpus=cpu.cpus / max(1, local_world),
        cpu_limit=cpu.label,
        disk_bytes=disk_bytes,
        disk_inodes=disk_inodes,
    )


def memory_now(earlier: Resources) -> Resources:
    """The same with the memory that is free now, host's and device's: what a running loader looks at."""
    host = host_memory(Path("/proc"), Path("/"))
    free, _, _ = device_memory(earlier.device)
    return replace(
        earlier,
        host_bytes=host.usable_bytes,
        host_total_bytes=host.limit_bytes,
        host_limit=host.label,
        device_bytes=free,
    )


def host_memory(proc: Path, root: Path) -> MemoryLimit:
    """The tightest of the machine's memory and every control group above this process.

    Args:
        proc: `/proc`, or a folder with `meminfo`, `self/cgroup` and `self/mountinfo`.
        root: `/`, or the folder below which mount points lie.
    """
    machine = machine_memory((proc / "meminfo").read_text())
    groups = memory_limits(_text(proc / "self/cgroup"), _text(proc / "self/mountinfo"), root)
    # A group may be allowed more than the machine has; then the machine's own line decides by itself,
    # since what the group holds is held on the machine too.
    return min([machine, *groups], key=lambda limit: limit.usable_bytes)


def machine_memory(meminfo: str) -> MemoryLimit:
    """The machine's memory, from the text of `/proc/meminfo`.

    The kernel's own estimate (`MemAvailable`) counts dirty pages as free, ours misses memory that no line
    names (drivers, other file systems' caches); the lower of the two is what can be relied on.
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
    """The tightest of affinity and every quota above this process; arguments as for `host_memory`."""
    quotas = cpu_limits(_text(proc / "self/cgroup"), _text(proc / "self/mountinfo"), root)
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
    """Bytes of a GPU that torch held in this process at its peak and has given back since."""
    import torch

    if not device.startswith("cuda") or not torch.cuda.is_initialized():
        return 0
    return max(0, torch.cuda.max_memory_reserved(device) - torch.cuda.memory_reserved(device))


def disk_space(path: Path) -> tuple[int, int | None]:
    """Free bytes and inodes for us at `path` (or its nearest existing folder); inodes None: unlimited.

    Raises:
        StalledError: No answer within `DISK_DEADLINE_S`.
    """

    what = f"the file system of {path}"
    free = call_within(DISK_DEADLINE_S, lambda: free_space(path, nearest=True), what)
    return free.bytes, free.inodes


def storage_of(path: Path, proc: Path = Path("/proc")) -> Mount | None:
    """What a path lies on, or will once it is there; None where the system does not say."""
    real = PurePosixPath(os.path.realpath(path))
    return mount_of(real, _text(proc / "self/mountinfo"))


def _text(path: Path) -> str:
    """The file's text; empty on a system without it."""
    try:
        return path.read_text()
    except OSError:
        return ""
