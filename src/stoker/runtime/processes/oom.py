"""How often the kernel has killed for memory in our cgroup, so that a death by SIGKILL can be explained."""

from __future__ import annotations

from pathlib import Path

_PROC = Path("/proc/self/cgroup")
_ROOT = Path("/sys/fs/cgroup")


def oom_kills(proc: Path = _PROC, root: Path = _ROOT) -> int:
    """The `oom_kill` count of the memory cgroup of this process, v2 or v1; 0 where there is none."""
    try:
        lines = proc.read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        hierarchy, controllers, path = line.split(":", 2)
        relative = path.lstrip("/")
        if hierarchy == "0":
            found = _count(root / relative / "memory.events")
        elif "memory" in controllers.split(","):
            found = _count(root / "memory" / relative / "memory.oom_control")
        else:
            continue
        if found is not None:
            return found
    return 0


def _count(path: Path) -> int | None:
    try:
        text = path.read_text()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in text.splitlines() if line.startswith("oom_kill ")), None)
