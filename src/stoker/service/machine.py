"""The machine and the service in figures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import pynvml

from stoker.monitor.gpu import GpuAbsent, open_gpu
from stoker.plan.resources import probe
from stoker.service.states import State
from stoker.service.traffic import counts

if TYPE_CHECKING:
    from stoker.service.services import Services


def look_at_machine(here: Services) -> dict[str, Any]:
    """Memory by the tightest limit, CPUs, disk under the state folder, GPUs.

    Raises:
        StalledError: The file system does not answer.
    """
    found = probe(path=here.folder.path)
    return {
        "host_bytes": found.host_bytes,
        "host_total_bytes": found.host_total_bytes,
        "host_limit": found.host_limit,
        "cpus": found.cpus,
        "cpu_limit": found.cpu_limit,
        "disk_bytes": found.disk_bytes,
        "disk_inodes": found.disk_inodes,
        "gpus": list(_gpus()),
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


def _gpus() -> Iterator[dict[str, Any]]:
    for name in _gpu_names():
        gpu = open_gpu(name)
        if isinstance(gpu, GpuAbsent):
            continue
        try:
            yield gpu.sample().to_json()
        finally:
            gpu.close()


def as_prometheus(here: Services) -> str:
    """Jobs, answers, streams, memory and disk in Prometheus' text format.

    Raises:
        Degraded: The database does not answer.
    """
    lines = list(counts("stoker_jobs", "gauge", "state", {state: here.jobs.count(state) for state in State}))
    lines += here.traffic.lines()
    machine = look_at_machine(here)
    gauges = {
        "stoker_streams": here.feed.clients,
        "stoker_host_free_bytes": machine["host_bytes"],
        "stoker_host_limit_bytes": machine["host_total_bytes"],
        "stoker_disk_free_bytes": machine["disk_bytes"],
    }
    for name, value in gauges.items():
        lines += [f"# TYPE {name} gauge", f"{name} {value}"]
    busy = {str(i): gpu["utilisation"] for i, gpu in enumerate(machine["gpus"]) if gpu.get("utilisation")}
    lines += counts("stoker_gpu_utilisation", "gauge", "gpu", busy) if busy else ()
    return "\n".join(lines) + "\n"
