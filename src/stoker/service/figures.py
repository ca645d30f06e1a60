"""Figures of the service and its machine, read so that a hang costs only the figure that hangs."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeVar

import psutil
import pynvml

from stoker.monitor.meter import MissingGpu, open_gpu
from stoker.plan.resources import probe
from stoker.runtime.threads import Pool
from stoker.service.background import CachedValue

if TYPE_CHECKING:
    from stoker.service.database import State
    from stoker.service.folders import StateFolder
    from stoker.service.jobs import Jobs
    from stoker.service.services import Services


BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds of the buckets of answer times."""


class RequestTraffic:
    """Counts of one process; changed only by its event loop."""

    def __init__(self) -> None:
        self.answers = Counter[int]()
        """Answers by status, refusals included."""
        self._buckets = [0] * (len(BOUNDS_S) + 1)
        self._seconds = 0.0

    def note(self, status: int, seconds: float) -> None:
        """Count one answer that began after `seconds`."""
        self.answers[status] += 1
        self._buckets[bisect_left(BOUNDS_S, seconds)] += 1
        self._seconds += seconds

    def lines(self) -> Iterator[str]:
        """Yield the counts in Prometheus' text format."""
        yield from counts("stoker_answers_total", "counter", "status", self.answers)
        yield "# TYPE stoker_answer_seconds histogram"
        total = 0
        for bound, count in zip((*BOUNDS_S, "+Inf"), self._buckets, strict=True):
            total += count
            yield f'stoker_answer_seconds_bucket{{le="{bound}"}} {total}'
        yield f"stoker_answer_seconds_sum {self._seconds:.6f}"
        yield f"stoker_answer_seconds_count {total}"


def counts(
    name: str, kind: str, label: str, found: Mapping[int, float] | Mapping[str, float]
) -> Iterator[str]:
    """Yield the lines of one metric with a label; no line without values.

    >>> list(counts("jobs", "gauge", "state", {"queued": 2}))
    ['# TYPE jobs gauge', 'jobs{state="queued"} 2']
    """
    if found:
        yield f"# TYPE {name} {kind}"
    for value, count in found.items():
        yield f'{name}{{{label}="{value}"}} {count}'


# ----------------------------------------------------------------------------------------------------------
# The figures of the service and its machine.


T = TypeVar("T")


def look_at_machine(services: Services) -> dict[str, Any]:
    """Return memory by the tightest limit, CPUs, disk of the state folder and GPUs; None where unknown."""
    found = probe()
    disk, driver = services.figures.disk.get(), services.figures.gpus.get()
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
        "workers": []
        if services.supervisor is None
        else [asdict(one) for one in services.supervisor.workers()],
    }


def count_gpus() -> int:
    """Return the number of GPUs of the driver; 0 without a driver."""
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
    """Return the utilization of each GPU now."""
    rows: list[dict[str, Any]] = []
    for name in _gpu_names():
        gpu = open_gpu(name)
        if isinstance(gpu, MissingGpu):
            continue
        try:
            rows.append(gpu.sample().to_json())
        finally:
            gpu.close()
    return rows


def as_prometheus(services: Services) -> str:
    """Return jobs, answers, streams, memory, disk and this process in Prometheus' text format.

    A figure that cannot be read now has its last known value and age, or is left out if it was never read.
    """
    jobs, disk, driver = services.figures.jobs.get(), services.figures.disk.get(), services.figures.gpus.get()
    host, process = probe(), psutil.Process()
    gauges = {
        "stoker_up": 1,
        "stoker_database_up": int(jobs.error is None),
        "stoker_degraded": int(services.degraded is not None),
        "stoker_streams": services.feed.clients,
        "stoker_stream_held_chars": services.feed.held,
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
    lines += services.traffic.lines()
    return "\n".join(lines) + "\n"


WAIT_S = 2.0
"""Timeout of a figure: with three that hang a scrape still takes less than ten seconds."""
SCAN_S = 20.0
"""Timeout of listing the caches: less than that of an answer."""
FOLDERS, FOLDER_S = 8, 10.0
"""How many caches are read at once, and the timeout of each."""


class Figures:
    """Reads the database, the disk, the GPU driver and the folder of caches."""

    def __init__(self, folder: StateFolder, jobs: Jobs) -> None:
        self.jobs: CachedValue[dict[State, int]] = CachedValue(
            jobs.counts, "the count of jobs", wait_s=WAIT_S
        )
        """Jobs by state."""
        self.disk: CachedValue[tuple[int | None, int | None]] = CachedValue(
            lambda: _room(folder), f"the disk of {folder.path}", wait_s=WAIT_S
        )
        """Free bytes and inodes."""
        self.gpus: CachedValue[list[dict[str, Any]]] = CachedValue(
            gpus, "the driver of the GPUs", wait_s=WAIT_S
        )
        """One row per GPU."""
        self.caches: CachedValue[list[dict[str, Any]]] = CachedValue(
            lambda: find_caches(folder), f"the folder of caches {folder.caches}", wait_s=SCAN_S
        )
        """One row per cache."""
        self._folders = Pool(FOLDERS, "stoker-look")

    def look_into_cache(self, cache: str, work: Callable[[], T]) -> T:
        """Return what `work` finds in the folder of one cache; errors as `Pool.call_within`."""
        return self._folders.call_within(FOLDER_S, work, f"cache {cache}")


def _room(folder: StateFolder) -> tuple[int | None, int | None]:
    found = probe(path=folder.path)
    return found.disk_bytes, found.disk_inodes


def find_caches(folder: StateFolder) -> list[dict[str, Any]]:
    """Return one row for each cache below a state folder."""
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
