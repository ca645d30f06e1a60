from __future__ import annotations

import time
from typing import Any, cast

from stoker.monitor import GpuSample, GpuSampler, MissingGpu
from stoker.monitor.meter import GpuWatch


class Gpu:
    """A GPU that says these one after another, and then the last one again and again."""

    def __init__(self, *said: float | MissingGpu | None) -> None:
        self.said = list(said)
        self.closed = False

    def sample(self) -> GpuSample | MissingGpu:
        found = self.said.pop(0) if len(self.said) > 1 else self.said[0]
        if isinstance(found, MissingGpu):
            return found
        return GpuSample(name="a GPU", utilization=found, used_bytes=1, total_bytes=2, power_w=None)

    def close(self) -> None:
        self.closed = True


def watched(gpu: Gpu | MissingGpu) -> GpuWatch:
    return GpuWatch(opening=lambda uuid: cast("GpuSampler", gpu), every_s=0.001)


def until(watch: GpuWatch, wanted: Any) -> Any:
    """What `take` says, once it is `wanted` (a type) or 30 s have passed."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        found = watch.take()
        if isinstance(found, wanted) and "yet" not in str(found):
            return found
        time.sleep(0.001)
    raise AssertionError(found)


def test_the_mean_since_the_last_look() -> None:
    gpu = Gpu(0.5)
    watch = watched(gpu)

    assert until(watch, float) == 0.5
    watch.stop()
    assert gpu.closed


def test_an_absent_gpu_says_why_and_is_never_0() -> None:
    assert (
        until(watched(MissingGpu(reason="no NVIDIA driver (x)")), MissingGpu).reason == "no NVIDIA driver (x)"
    )
    assert "does not report how busy" in until(watched(Gpu(None)), MissingGpu).reason
    assert until(watched(Gpu(MissingGpu(reason="fell off the bus"))), MissingGpu).reason == "fell off the bus"
