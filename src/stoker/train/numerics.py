"""What decides the last bits of a step besides the settings: kept with a run, compared on resume."""

from __future__ import annotations

from typing import Any

import torch

from stoker.schema import Json


def numerics_of(device: torch.device, amp: bool) -> dict[str, Json]:
    """How this process computes on `device`; `dtype` is that of products and attention."""
    return {
        "torch": str(torch.__version__),
        "processor": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "dtype": "bfloat16" if amp else "float32",
        "float32_matmul": _float32_matmul(device),
    }


def _float32_matmul(device: torch.device) -> str:
    """How products of float32 are computed: `ieee`, or `tf32` or `bf16` for less exact ones."""
    backend: Any = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    # Absent before torch 2.9. The older question raises where a program has set the newer answer.
    precision = getattr(getattr(backend, "matmul", None), "fp32_precision", None)
    if precision is None:
        precision = {"highest": "ieee", "high": "tf32"}.get(torch.get_float32_matmul_precision(), "bf16")
    return "ieee" if precision == "none" else str(precision)
