"""Watches the encoder, which runs in the caller's own process and so cannot be killed.

Past its deadline the stacks of all threads go to a file and one line says which group is in hand. With
`on_hang="exit"` the process ends with the exit code for a stall; readers die with it, sealed shards stay.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import threading
import time
from pathlib import Path
from types import TracebackType

from stoker.errors import StalledError
from stoker.precompute.clock import EncodeClock

log = logging.getLogger("stoker")

_LOOK_S = 0.25


class EncodeWatchdog:
    """A thread that looks at an `EncodeClock` while entered."""

    def __init__(self, clock: EncodeClock, *, deadline_s: float, logs: Path, exit_on_hang: bool) -> None:
        self._clock = clock
        self._deadline_s = deadline_s
        self._logs = logs
        self._exit = exit_on_hang
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stoker-encode-watchdog", daemon=True)

    def __enter__(self) -> EncodeWatchdog:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(2 * _LOOK_S)

    def _run(self) -> None:
        reported = None
        while not self._stop.wait(min(_LOOK_S, self._deadline_s / 4)):
            begun = self._clock.begun
            if begun is None or begun == reported or time.monotonic() - begun < self._deadline_s:
                continue
            reported = begun
            self._report()
            if self._exit:
                os._exit(StalledError.exit_code)

    def _report(self) -> None:
        self._logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._logs / f"encoder-{os.getpid()}.txt"
        with path.open("w") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        numbers = self._clock.numbers
        log.error(
            "the encoder has been %s for more than %g s; stacks of all threads: %s. %s",
            f"at samples {numbers.start}-{numbers.stop - 1}" if numbers else "on its way to the device",
            self._deadline_s,
            path,
            "This process ends (on_hang=exit)" if self._exit else "Still waiting; stop it with Ctrl-C twice",
        )
