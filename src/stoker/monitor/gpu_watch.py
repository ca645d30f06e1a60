"""How busy a GPU was between two looks: sampled in the background, or in words why nothing can be said."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

from stoker.monitor.gpu import GpuAbsent, GpuSampler, open_gpu

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
        opening: Callable[[str | None], GpuSampler | GpuAbsent] = open_gpu,
        every_s: float = EVERY_S,
    ) -> None:
        """`uuid`, `opening`: which GPU, and how it is opened (in the thread: the caller does not wait)."""
        self._lock = threading.Lock()
        self._sum, self._count = 0.0, 0
        self._absent: GpuAbsent | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(
            target=self._watch, args=(uuid, opening, every_s), daemon=True, name="gpu watch"
        )
        self._thread.start()

    def take(self) -> float | GpuAbsent:
        """Mean utilisation since the last call, 0..1; or why it is not known."""
        with self._lock:
            total, count = self._sum, self._count
            self._sum, self._count = 0.0, 0
            if count:
                return total / count
            return self._absent or GpuAbsent(reason="no sample was taken yet")

    def stop(self) -> None:
        """End sampling."""
        self._over.set()
        self._thread.join(STOP_S)

    def _watch(
        self, uuid: str | None, opening: Callable[[str | None], GpuSampler | GpuAbsent], every_s: float
    ) -> None:
        gpu = opening(uuid)
        if isinstance(gpu, GpuAbsent):
            self._note(gpu)
            return
        try:
            while not self._over.is_set():
                sample = gpu.sample()
                if isinstance(sample, GpuAbsent):
                    self._note(sample)
                    return
                self._note(
                    GpuAbsent(reason=f"{sample.name} does not report how busy it is")
                    if sample.utilisation is None
                    else sample.utilisation
                )
                self._over.wait(every_s)
        finally:
            with suppress(Exception):  # the driver is gone: there is nothing to close
                gpu.close()

    def _note(self, found: float | GpuAbsent) -> None:
        with self._lock:
            if isinstance(found, GpuAbsent):
                self._absent = found
            else:
                self._sum, self._count = self._sum + found, self._count + 1
