"""This machine in one line, for people who compare figures."""

from __future__ import annotations

import torch

import stoker
from stoker.monitor import GpuAbsent, open_gpu
from stoker.plan import probe
from stoker.units import format_bytes


def describe_machine() -> str:
    """Version, device, memory and build of torch in one line."""
    resources = probe()
    gpu = open_gpu()
    build = "CPU build of torch" if torch.version.cuda is None else f"torch for CUDA {torch.version.cuda}"
    if isinstance(gpu, GpuAbsent):
        device = f"CPU ({resources.cpus:g} cores"
        driver = "no NVIDIA driver"
    else:
        gpu.close()
        device = f"GPU beside a CPU ({resources.cpus:g} cores"
        driver = "NVIDIA driver found"
    memory = f"{format_bytes(resources.host_bytes)} usable of {format_bytes(resources.host_total_bytes)})"
    return f"stoker {stoker.__version__} · {device}, {memory} · {driver}: {build}"
