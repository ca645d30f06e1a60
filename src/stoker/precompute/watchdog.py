"""Calls the encoder in a thread, so that one that hangs can be left behind and a signal ends the run.

The encoder runs in the caller's own process, where nothing can end a call of it. Past its deadline the stacks
of all threads go to a file, and the caller gets a `StalledError`; with `on_hang="exit"` the process ends with
the exit code for a stall. What was encoded before is kept either way. A process under a guardian is killed by
that, also while the interpreter's lock is held, which no thread of ours could notice: it needs no thread.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from stoker.errors import Interrupted, StalledError
from stoker.precompute.clock import EncodeClock
from stoker.precompute.guarded import guard_page
from stoker.precompute.interrupts import Interrupts
from stoker.precompute.settings import PrecomputeSettings
from stoker.runtime.threads import Pool

log = logging.getLogger("stoker")

T = TypeVar("T")

GRACE_S = 3.0
"""How long a call of the encoder may go on after a signal, so that its group is not lost."""
_LOOK_S = 0.25


class EncodeWatchdog:
    """Makes calls on an encoder, one at a time, and waits for each no longer than its deadline.

    Args:
        clock: Of the encoder; a call counts from when it last began.
        deadline_s: Seconds that a call may take.
        logs: Folder for stacks.
        exit_on_hang: End this process at a hang.
        interrupts: A signal ends a wait, `GRACE_S` later.
    """

    def __init__(
        self, clock: EncodeClock, *, deadline_s: float, logs: Path, exit_on_hang: bool, interrupts: Interrupts
    ) -> None:
        self._clock = clock
        self._deadline_s = deadline_s
        self._logs = logs
        self._exit = exit_on_hang
        self._interrupts = interrupts
        self._pool = Pool(1, "stoker-encode")
        self._enter = _state_of_caller()

    @classmethod
    def of_settings(
        cls,
        settings: PrecomputeSettings,
        logs: Path,
        *,
        clock: EncodeClock | None = None,
        interrupts: Interrupts | None = None,
    ) -> EncodeWatchdog:
        """Return one with the deadline of `settings`; without a clock, with one of its own."""
        return cls(
            clock or EncodeClock(),
            deadline_s=settings.deadlines.encode,
            logs=logs,
            exit_on_hang=settings.on_hang == "exit",
            interrupts=interrupts or Interrupts(),
        )

    def ask(self, work: Callable[[], T], what: str = "at a sample of zeros") -> T:
        """As `run`, of work that is one call by itself."""
        with self._clock.starting(self._deadline_s):
            return self.run(work, what)

    def run(self, work: Callable[[], T], what: str = "") -> T:
        """Return what `work` does; its errors are raised here.

        Args:
            work: Calls the encoder.
            what: Where the encoder is meanwhile, in words; empty: at the samples of the clock.

        Raises:
            StalledError: A call of the encoder passed the deadline. Its thread is left behind.
            Interrupted: A signal came, and the call did not end within `GRACE_S`. Likewise.
        """
        if guard_page() is not None:
            return work()
        threads = torch.get_num_threads()
        ticket = self._pool.submit(partial(self._enter, threads, work))
        until = float("inf")
        try:
            while not ticket.done():
                ticket.wait(min(_LOOK_S, self._deadline_s / 4))
                now, begun = time.monotonic(), self._clock.begun
                if ticket.done():
                    break
                if begun is not None and now - begun > self._deadline_s:
                    raise self._stalled(what)
                if self._interrupts.signal is not None:
                    until = min(until, now + GRACE_S)
                    if now >= until:
                        raise Interrupted("stopped while the encoder was at work; its group is lost")
        except BaseException:  # a KeyboardInterrupt too, where signals are the caller's
            self._clock.give_up()
            raise
        return ticket.result(0.0, "the encoder")

    def _stalled(self, what: str) -> StalledError:
        self._logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._logs / f"encoder-{os.getpid()}.txt"
        with path.open("w") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        numbers = self._clock.numbers
        where = what or f"at samples {numbers.start}-{numbers.stop - 1}"
        said = (
            f"the encoder has been {where} for more than {self._deadline_s:g} s; "
            f"stacks of all threads: {path}"
        )
        if self._exit:
            log.error("%s. This process ends (on_hang=exit)", said)
            os._exit(StalledError.exit_code)
        return StalledError(
            f"{said}. Its call is left behind in a thread of this process. What was encoded is kept; run "
            "it again to encode the rest. For an encoder that is only slow, give deadlines={'encode': "
            f"{10 * self._deadline_s:g}}}"
        )


def _state_of_caller() -> Callable[[int, Callable[[], Any]], Any]:
    """Return a function that does work in another thread as the calling thread, now, would do it.

    What torch keeps for each thread (autocast, the default device, the CUDA device and stream) is not that of
    a new thread, and the bits of a record may depend on it. Whether denormals are flushed is inherited from
    the thread that starts another, which is the caller.
    """
    context = copy_context()  # numpy's and decimal's handling of errors
    states: list[Callable[[], AbstractContextManager[object]]] = []
    for kind in ("cpu", "cuda"):
        if torch.is_autocast_enabled(kind):
            dtype, cached = torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()
            states.append(partial(torch.autocast, kind, dtype, cache_enabled=cached))
    if (default := torch.get_default_device()).type != "cpu":
        states.append(lambda: default)
    if torch.cuda.is_initialized():
        states.append(partial(torch.cuda.device, torch.cuda.current_device()))
        if (stream := torch.cuda.current_stream()) != torch.cuda.default_stream():
            states.append(partial(torch.cuda.stream, stream))
    graphs = _graphs_of_caller()

    def enter(threads: int, work: Callable[[], Any]) -> Any:
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)  # OpenMP counts for each thread by itself
        for name, value in graphs.items():
            torch._C._stash_obj_in_tls(name, value)  # pyright: ignore[reportPrivateUsage]
        with ExitStack() as entered:
            for state in states:
                entered.enter_context(state())
            return context.run(work)

    return enter


def _graphs_of_caller() -> dict[str, Any]:
    """CUDA graphs that `torch.compile(mode="reduce-overhead")` recorded in this thread, for another one."""
    module = sys.modules.get("torch._inductor.cudagraph_trees")
    local = getattr(module, "local", None)
    names = ("tree_manager_containers", "tree_manager_locks")
    return {name: getattr(local, name) for name in names if hasattr(local, name)}
