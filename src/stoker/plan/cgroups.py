"""Limits that control groups put above one process, version 1 and version 2.

Every function takes the texts and folders it reads as arguments, so that tests hand in made-up trees and
only `plan.resources` names the real ones. A process has one group per hierarchy, and every ancestor's
limit holds too. On a hybrid machine version 1 and version 2 are mounted side by side; all are read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

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
        """What a process of the group may still take."""
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
    """All memory limits above a process, its own group first; groups without a limit are left out.

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
    """All CPU quotas above a process; arguments as for `memory_limits`."""
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
    """Bytes of a `memory.stat` (version 2 names) that the kernel cannot take back.

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
    """Name and number per line, whatever else a line may hold.

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
    """The process's group and its ancestors, in every hierarchy that may carry `controller`."""
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
    with `..`) belongs to a part we cannot see, and the mount itself is then the nearest group we can.
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
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        version = {"cgroup": 1, "cgroup2": 2}.get(kind[0])
        if version == 2 or (version == 1 and controller in kind[2].split(",")):
            found.setdefault(version, []).append((PurePosixPath(_plain(fields[3])), _plain(fields[4])))
    return found


def _plain(path: str) -> str:
    r"""Undo mountinfo's octal escapes.

    >>> _plain("/a\\040b")
    '/a b'
    """
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), path)


def _limit(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() and int(text) < UNLIMITED_BYTES else None


def _read(path: Path) -> str:
    """The file's text; empty where there is none or we may not read it, as for a group's root."""
    try:
        return path.read_text()
    except OSError:
        return ""


def least_cpus(limits: list[CpuLimit], affinity: int) -> CpuLimit:
    """The tightest of the quotas and the CPUs that this process may run on.

    >>> least_cpus([CpuLimit(cpus=1.5, label="quota")], 4)
    CpuLimit(cpus=1.5, label='quota')
    """
    allowed = CpuLimit(cpus=float(affinity), label="CPUs this process may run on")
    return min([allowed, *limits], key=lambda limit: limit.cpus, default=CpuLimit(cpus=math.inf, label=""))
