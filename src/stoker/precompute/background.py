"""Fill a cache in a process of its own, while the caller trains on what is there.

Not in a thread of the caller: switches of its own (TF32, threads, deterministic algorithms) would reach the
encoder's bits, the encoder's Python would take turns with the training loop's, and what hangs in a thread
cannot be killed. The process gets source and encoder pickled over a private descriptor, encodes block after
block, and says how it ended. It ends in order, with what it encoded sealed, when it is told to or its caller
is gone.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import time
import weakref
from contextlib import nullcontext, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from stoker import errors
from stoker.encoders.protocol import Encoder
from stoker.encoders.weights import moved
from stoker.errors import ConfigError, Interrupted, ResourceError, StalledError, StokerError, arg
from stoker.precompute.settings import PrecomputeSettings
from stoker.precompute.turn import folder_mark
from stoker.runtime.processes.oom import oom_kills
from stoker.runtime.processes.output import Drain, Output
from stoker.runtime.processes.wire import Channel, pack
from stoker.sources.files import confined_sources
from stoker.sources.protocol import Source
from stoker.sources.travel import packed
from stoker.store import Cache, Folder
from stoker.store.growing import Growing

log = logging.getLogger("stoker")

_LOOK_S = 0.05
_SEAL_S = 10.0
"""How long the end of the caller waits for the sealing, which goes on without it."""
_TAIL_BYTES = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is to be filled from what; pickled for the process that does it."""

    source: Source
    encoder: Encoder | None
    cache_dir: Path
    name: str
    settings: PrecomputeSettings


class Background:
    """A `stoker.store.protocols.Filling`: a process that runs `run_precompute`.

    Raises:
        SourceError: Source or encoder cannot be sent to another process.
        ConfigError: The settings would take away what is being read.
        ResourceError: No process can be started.
    """

    def __init__(self, job: Job, folder: Folder) -> None:
        if job.settings.overwrite:
            raise ConfigError(
                f"overwrite removes what {arg('wait', False)} is to serve meanwhile. Leave one of them out"
            )
        settings = replace(job.settings, by_blocks=True, on_hang="exit", progress=None)
        missing = set(folder.missing(retry_quarantined=settings.retry_quarantined).tolist())
        again = {number: failure for number, failure in folder.failures().items() if number in missing}
        self._path = folder.path
        self._growing = Growing(folder.path, folder.recipe, again)
        limits = settings.deadlines
        self._quiet_s = sum(getattr(limits, entry.name) for entry in fields(limits))
        self._mark, self._moved = folder_mark(folder.path), time.monotonic()
        self._end: dict[str, Any] | None = None
        self._owner = os.getpid()
        self._error: StokerError | Interrupted | None = None
        self._oom_kills = oom_kills()
        payload = _pickled(replace(job, settings=settings))
        logs = folder.path.parent.parent / ".readers"
        logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._output = Output(logs / f"fill-{os.getpid()}-{folder.recipe.fingerprint}.txt")
        self._outputs = (Drain(), self._output)
        try:
            self._process, self._channel = _spawn(payload, self._output)
        except OSError as error:
            self._output.close(keep=False)
            raise ResourceError(f"a process to fill {folder.path} cannot be started: {error}") from error
        self._outputs[0].add(self._output)
        self._stop = weakref.finalize(self, _end, self._process, self._channel, self._outputs, os.getpid())
        log.info("%s is filled by process %d meanwhile", folder.path, self._process.pid)

    def look(self) -> tuple[Cache, NDArray[np.bool_]]:
        """As in the protocol."""
        self.done()
        return self._growing.look()

    def forget(self) -> None:
        """As in the protocol."""
        self._growing.forget()

    def done(self) -> bool:
        """As in the protocol."""
        if self._end is None:
            self._check_process()
            self._end = next(iter(self._channel.receive()), None)
            if self._end is None and self._process.poll() is not None:
                self._end = next(iter(self._channel.receive()), None) or {"kind": "died"}
            if self._end is not None and self._end["kind"] != "done":
                self._error = self._explained(self._end)
        if self._error is not None:
            raise self._error.with_traceback(None)
        return self._end is not None

    def wait(self, timeout_s: float) -> None:
        """As in the protocol."""
        until = time.monotonic() + timeout_s
        while not self.done() and time.monotonic() < until:
            now, present = time.monotonic(), folder_mark(self._path)
            if present != self._mark:
                self._mark, self._moved = present, now
                return
            if now - self._moved > self._quiet_s:
                self._process.kill()
                raise StalledError(
                    f"nothing was added to {self._path} for {self._quiet_s:g} s, so process "
                    f"{self._process.pid}, which fills it, was killed. Run it again to resume"
                )
            time.sleep(min(_LOOK_S, timeout_s))

    def stop(self) -> None:
        """End it in order: what was encoded is sealed, the same call resumes. Safe to call twice."""
        self._stop()

    def _check_process(self) -> None:
        """Refuse a fork of ours: what it took from the channel would never reach who began the filling."""
        if os.getpid() != self._owner:
            raise ConfigError(
                f"{self._path} is being filled for process {self._owner}, and this one is a fork of that. "
                "Make the loader here, or when the cache is complete"
            )

    def _explained(self, end: dict[str, Any]) -> StokerError | Interrupted:
        if end["kind"] == "failed":
            kind = getattr(errors, end["error"], StokerError)
            return kind(f"filling {self._path} beside the training failed: {end['message']}")
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_LOOK_S)
        code = self._process.returncode
        text = f"process {self._process.pid}, which fills {self._path}, "
        if code == StalledError.exit_code:
            return StalledError(f"{text}ended because its encoder hung: {self._output.tail(_TAIL_BYTES)}")
        how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
        tail = self._output.tail(_TAIL_BYTES)
        if code == -signal.SIGKILL and oom_kills() > self._oom_kills:
            return ResourceError(
                f"{text}{how}: memory is short. What is sealed stays; run it again to resume"
            )
        said = f". It said: {tail}" if tail else ""
        return StokerError(f"{text}{how}. What is sealed stays; run it again to resume{said}")


def _pickled(job: Job) -> bytes:
    """The job, with the encoder on the CPU: the other process brings its own to the device."""
    with nullcontext() if job.encoder is None else moved(job.encoder, torch.device("cpu")):
        return packed(job, "job", otherwise=f"Or leave {arg('wait', False)} out")


def _spawn(payload: bytes, output: Output) -> tuple[subprocess.Popen[bytes], Channel]:
    """Start the process in a session of its own, so that Ctrl-C reaches it through us alone."""
    frame = {
        "kind": "job",
        "sys_path": [entry or str(Path.cwd()) for entry in sys.path],
        "confined": confined_sources(),
        "threads": torch.get_num_threads(),
    }
    ours, theirs = socket.socketpair()
    work = os.memfd_create("stoker-fill", os.MFD_CLOEXEC)
    try:
        with theirs, open(work, "wb", closefd=False) as file:
            file.write(pack(frame, payload))
            file.write(payload)
            file.flush()
            fds = (theirs.fileno(), work)
            words = ["-m", "stoker.precompute.fill_process", *map(str, fds), str(os.getpid())]
            process = subprocess.Popen(
                [sys.executable, "-P", *words],
                stdin=subprocess.DEVNULL,
                stdout=output.write_fd,
                stderr=output.write_fd,
                pass_fds=fds,
                start_new_session=True,
            )
    except BaseException:
        ours.close()
        raise
    finally:
        os.close(work)
    output.handed_over()
    return process, Channel(ours)


def _end(
    process: subprocess.Popen[bytes], channel: Channel, outputs: tuple[Drain, Output], owner: int
) -> None:
    """Tell the process to end, and give it time to seal."""
    if os.getpid() != owner:  # a fork of ours: it is not its to end
        return
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_SEAL_S)
    channel.close()
    drain, output = outputs
    drain.remove(output)
    drain.close()
    output.close(keep=process.poll() not in (0, -signal.SIGTERM))
