"""How busy a GPU is, by NVIDIA's management library; or, in words, why nothing can be said."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import pynvml

from stoker.runtime.threads import Pool, is_exiting
from stoker.schema import Json

# The library ships no types.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSample:
    """One look at a GPU, all processes on it taken together."""

    name: str
    utilisation: float | None
    """Part of the last sample period in which a kernel ran, 0..1; None: not reported (as on a MIG slice)."""
    used_bytes: int
    total_bytes: int
    power_w: float | None
    """Board power in watts; None: not reported."""

    def to_json(self) -> dict[str, Json]:
        """Return all figures by name."""
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingGpu:
    """There is nothing to sample."""

    reason: str

    def to_json(self) -> dict[str, Json]:
        """Return the reason, so that a report says it in place of figures."""
        return {"absent": self.reason}


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuDriver:
    """The driver of this machine's GPUs."""

    version: str
    cuda: tuple[int, int]
    """The newest version of CUDA that it runs."""


class GpuSampler:
    """One GPU, held open; made by `open_gpu`. Close it when done."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def sample(self) -> GpuSample | MissingGpu:
        """Look now; a GPU that fell off the bus is absent, not an error of the training."""
        try:
            memory = pynvml.nvmlDeviceGetMemoryInfo(self._handle)
            name = pynvml.nvmlDeviceGetName(self._handle)
        except pynvml.NVMLError as error:
            return MissingGpu(reason=str(error))
        return GpuSample(
            name=name if isinstance(name, str) else bytes(name).decode(),
            utilisation=self._utilisation(),
            used_bytes=int(memory.used),
            total_bytes=int(memory.total),
            power_w=self._power_w(),
        )

    def close(self) -> None:
        """Let go of the library."""
        pynvml.nvmlShutdown()

    def _utilisation(self) -> float | None:
        try:
            return float(pynvml.nvmlDeviceGetUtilizationRates(self._handle).gpu) / 100
        except pynvml.NVMLError:
            return None

    def _power_w(self) -> float | None:
        try:
            return float(pynvml.nvmlDeviceGetPowerUsage(self._handle)) / 1000
        except pynvml.NVMLError:
            return None


def open_gpu(uuid: str | None = None) -> GpuSampler | MissingGpu:
    """Open a GPU for sampling.

    Args:
        uuid: As in `torch.cuda.get_device_properties(i).uuid`, since this library numbers GPUs without
            regard to CUDA_VISIBLE_DEVICES; None: its first one.
    """
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return MissingGpu(reason=f"no NVIDIA driver ({error})")
    try:
        if uuid is None:
            return GpuSampler(pynvml.nvmlDeviceGetHandleByIndex(0))
        if uuid.startswith(("GPU-", "MIG-")):
            return GpuSampler(pynvml.nvmlDeviceGetHandleByUUID(uuid))
        with suppress(pynvml.NVMLError):
            return GpuSampler(pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"))
        return GpuSampler(pynvml.nvmlDeviceGetHandleByUUID(f"MIG-{uuid}"))  # a part of a GPU
    except pynvml.NVMLError as error:
        pynvml.nvmlShutdown()
        return MissingGpu(reason=f"the driver has no such GPU ({error})")


def find_driver() -> GpuDriver | MissingGpu:
    """Return the driver that is loaded, as its own library says."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return MissingGpu(reason=f"no NVIDIA driver ({error})")
    try:
        version = pynvml.nvmlSystemGetDriverVersion()
        cuda = int(pynvml.nvmlSystemGetCudaDriverVersion_v2())
    except pynvml.NVMLError as error:
        return MissingGpu(reason=f"the driver does not say what it is ({error})")
    finally:
        pynvml.nvmlShutdown()
    text = version if isinstance(version, str) else bytes(version).decode()
    return GpuDriver(version=text, cuda=(cuda // 1000, cuda % 1000 // 10))


# ----------------------------------------------------------------------------------------------------------
# How busy a GPU was between two looks: sampled in the background, or in words why nothing can be said.


EVERY_S = 1.0
"""Seconds between samples; the driver's own figure is of the last sixth of a second to a second."""
STOP_S = 5.0
"""Seconds that a sample in progress has to end; the thread of a driver that hangs is left behind."""


class GpuWatch:
    """Samples one GPU until `stop`; `take` is the mean since it was last asked."""

    def __init__(
        self,
        uuid: str | None = None,
        *,
        opening: Callable[[str | None], GpuSampler | MissingGpu] = open_gpu,
        every_s: float = EVERY_S,
    ) -> None:
        """`uuid`, `opening`: which GPU, and how it is opened (in the thread: the caller does not wait)."""
        self._lock = threading.Lock()
        self._sum, self._count = 0.0, 0
        self._absent: MissingGpu | None = None
        self._over = threading.Event()
        self._ticket = Pool(1, "stoker-gpu-watch").submit(partial(self._watch, uuid, opening, every_s))

    def take(self) -> float | MissingGpu:
        """Return mean utilisation since the last call, 0..1; or why it is not known."""
        with self._lock:
            total, count = self._sum, self._count
            self._sum, self._count = 0.0, 0
            if count:
                return total / count
            return self._absent or MissingGpu(reason="no sample was taken yet")

    def stop(self) -> None:
        """End sampling."""
        self._over.set()
        self._ticket.wait(STOP_S)

    def _watch(
        self, uuid: str | None, opening: Callable[[str | None], GpuSampler | MissingGpu], every_s: float
    ) -> None:
        gpu = opening(uuid)
        if isinstance(gpu, MissingGpu):
            self._note(gpu)
            return
        try:
            while not (self._over.is_set() or is_exiting()):
                sample = gpu.sample()
                if isinstance(sample, MissingGpu):
                    self._note(sample)
                    return
                self._note(
                    MissingGpu(reason=f"{sample.name} does not report how busy it is")
                    if sample.utilisation is None
                    else sample.utilisation
                )
                self._over.wait(every_s)
        finally:
            with suppress(Exception):  # the driver is gone: there is nothing to close
                gpu.close()

    def _note(self, found: float | MissingGpu) -> None:
        with self._lock:
            if isinstance(found, MissingGpu):
                self._absent = found
            else:
                self._sum, self._count = self._sum + found, self._count + 1
