"""What a run costs, as figures: low in the layers, so that nothing above needs a callback.

meter.py     how long training waits for data, and for what; the same as JSON lines, interval by interval
gpu.py       how busy a GPU is, or why that cannot be said; `GpuWatch` samples it in the background
trackers.py  TensorBoard, W&B, MLflow: each in a process that training never waits for
"""

from stoker.monitor.gpu import GpuAbsent, GpuSample, GpuSampler, open_gpu
from stoker.monitor.meter import StallJournal, StallMeter, StallReport

__all__ = ["GpuAbsent", "GpuSample", "GpuSampler", "StallJournal", "StallMeter", "StallReport", "open_gpu"]
