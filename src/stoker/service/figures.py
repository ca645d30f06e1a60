"""What the service finds out about itself and its machine, each so that a hang costs that one figure."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import psutil
import pynvml

from stoker.monitor.gpu import GpuAbsent, open_gpu
from stoker.plan.resources import probe
from stoker.service.background import Recent, TimedCalls
from stoker.service.traffic import counts

if TYPE_CHECKING:
    from stoker.service.database import State
    from stoker.service.folders import StateFolder
    from stoker.service.jobs import Jobs
    from stoker.service.services import Services


# ----------------------------------------------------------------------------------------------------------
# The machine and the service in figures.


def look_at_machine(here: Services) -> dict[str, Any]:
    """Memory by the tightest limit, CPUs, disk under the state folder, GPUs; None for what is not known."""
    found = probe()
    disk, driver = here.figures.disk.get(), here.figures.gpus.get()
    disk_bytes, disk_inodes = disk.value or (None, None)
    return {
        "host_bytes": found.host_bytes,
        "host_total_bytes": found.host_total_bytes,
        "host_limit": found.host_limit,
        "cpus": found.cpus,
        "cpu_limit": found.cpu_limit,
        "disk_bytes": disk_bytes,
        "disk_inodes": disk_inodes,
        "gpus": driver.value or [],
        "stale": [text for text in (disk.stale, driver.stale) if text],
        "workers": [] if here.supervisor is None else [asdict(one) for one in here.supervisor.workers()],
    }


def count_gpus() -> int:
    """GPUs that the driver knows; 0 without a driver."""
    return len(_gpu_names())


def _gpu_names() -> list[str]:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        return [str(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles]
    except pynvml.NVMLError:
        return []
    finally:
        pynvml.nvmlShutdown()


def gpus() -> list[dict[str, Any]]:
    """What each GPU does now."""
    rows: list[dict[str, Any]] = []
    for name in _gpu_names():
        gpu = open_gpu(name)
        if isinstance(gpu, GpuAbsent):
            continue
        try:
            rows.append(gpu.sample().to_json())
        finally:
            gpu.close()
    return rows


def as_prometheus(here: Services) -> str:
    """Jobs, answers, streams, memory, disk and this process in Prometheus' text format.

    What cannot be found out now is given as it was, with its age, and left out where it never was known.
    """
    jobs, disk, driver = here.figures.jobs.get(), here.figures.disk.get(), here.figures.gpus.get()
    host, process = probe(), psutil.Process()
    gauges = {
        "stoker_up": 1,
        "stoker_database_up": int(jobs.error is None),
        "stoker_degraded": int(here.degraded is not None),
        "stoker_streams": here.feed.clients,
        "stoker_stream_held_chars": here.feed.held,
        "stoker_host_free_bytes": host.host_bytes,
        "stoker_host_limit_bytes": host.host_total_bytes,
        "stoker_disk_free_bytes": disk.value and disk.value[0],
        "process_resident_memory_bytes": process.memory_info().rss,
        "process_open_fds": process.num_fds(),
        "process_threads": process.num_threads(),
        "process_start_time_seconds": process.create_time(),
    }
    lines: list[str] = []
    for name, value in gauges.items():
        lines += [] if value is None else [f"# TYPE {name} gauge", f"{name} {value}"]
    spent = process.cpu_times()
    lines += ["# TYPE process_cpu_seconds_total counter"]
    lines += [f"process_cpu_seconds_total {spent.user + spent.system:.2f}"]
    asked = {"jobs": jobs, "disk": disk, "gpus": driver}
    ages = {name: round(one.age_s, 3) for name, one in asked.items() if one.value is not None}
    busy = {str(i): gpu["utilisation"] for i, gpu in enumerate(driver.value or ()) if gpu.get("utilisation")}
    lines += counts("stoker_figure_age_seconds", "gauge", "figure", ages)
    lines += counts("stoker_jobs", "gauge", "state", {str(one): n for one, n in (jobs.value or {}).items()})
    lines += counts("stoker_gpu_utilisation", "gauge", "gpu", busy)
    lines += here.traffic.lines()
    return "\n".join(lines) + "\n"


WAIT_S = 2.0
"""How long a figure is waited for: three that hang still leave a scrape its ten seconds."""
SCAN_S = 20.0
"""How long the folders of caches are waited for: less than an answer may take."""
FOLDERS, FOLDER_S = 8, 10.0
"""Folders of single caches that are looked into at once, and how long each look may take."""


class Figures:
    """Asks the database, the disk, the driver of the GPUs and the folder of caches."""

    def __init__(self, folder: StateFolder, jobs: Jobs) -> None:
        self.jobs: Recent[dict[State, int]] = Recent(jobs.counts, "the count of jobs", wait_s=WAIT_S)
        """Jobs by state."""
        self.disk: Recent[tuple[int | None, int | None]] = Recent(
            lambda: _room(folder), f"the disk of {folder.path}", wait_s=WAIT_S
        )
        """Bytes and inodes that are free for us."""
        self.gpus: Recent[list[dict[str, Any]]] = Recent(gpus, "the driver of the GPUs", wait_s=WAIT_S)
        """A row a GPU."""
        self.caches: Recent[list[dict[str, Any]]] = Recent(
            lambda: find_caches(folder), f"the folder of caches {folder.caches}", wait_s=SCAN_S
        )
        """A row for every cache that jobs have made."""
        self.folders = TimedCalls(at_once=FOLDERS, wait_s=FOLDER_S)
        """Looks into single folders of caches."""


def _room(folder: StateFolder) -> tuple[int | None, int | None]:
    found = probe(path=folder.path)
    return found.disk_bytes, found.disk_inodes


def find_caches(folder: StateFolder) -> list[dict[str, Any]]:
    """A row for every cache below a state folder, found by looking into each."""
    from stoker.store.gc import scan

    return [
        {
            "name": found.name,
            "fingerprint": found.path.name,
            "bytes": found.bytes,
            "complete": found.complete,
            "unused_s": max(0.0, found.unused_s),
            "claims": found.live_claims(),
            "broken": found.broken,
        }
        for found in scan(folder.caches)
    ]
