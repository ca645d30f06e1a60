"""Figures of what a run costs: low in the layers, so that nothing above needs a callback.

README.md has the map of this folder.
"""

from stoker.monitor.meter import (
    GpuSample,
    GpuSampler,
    MissingGpu,
    StallJournal,
    StallMeter,
    StallReport,
    open_gpu,
)

__all__ = ["GpuSample", "GpuSampler", "MissingGpu", "StallJournal", "StallMeter", "StallReport", "open_gpu"]
