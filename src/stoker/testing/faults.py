"""Faults to order: wrap a source, and the samples you name hang, kill, raise, are slow, or come out wrong."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from stoker.errors import ConfigError
from stoker.schema import Sample, Schema
from stoker.sources.protocol import Source, SourceIdentity, locate

Kind: TypeAlias = Literal["hang", "kill", "raise", "slow", "corrupt"]


@dataclass(frozen=True, slots=True)
class Fault:
    """Faults while some samples are read.

    - `hang` sleeps for an hour.
    - `kill` ends the reading process with SIGKILL, as a crash or a lack of memory does.
    - `raise` raises `error`.
    - `slow` sleeps for `seconds` and then reads.
    - `corrupt` changes one byte of the first field without an error, as a medium without checksums does.
    """

    kind: Kind
    samples: Collection[int]
    """Sample numbers."""
    attempts: int | None = None
    """How many times it happens to each of these samples, over all processes; None: always."""
    seconds: float = 1.0
    """For `slow`."""
    error: Exception | None = None
    """For `raise`; None: an OSError as of a disk that fails (EIO), which is tried again."""

    def __post_init__(self) -> None:
        """Refuse unknown kinds and numbers out of range."""
        if self.kind not in get_args(Kind):
            raise ConfigError(f"the fault {self.kind!r} is not known. Expected {', '.join(get_args(Kind))}")
        if self.attempts is not None and self.attempts < 1:
            raise ConfigError(f"attempts is {self.attempts}. Expected 1 or more, or None for always")


class FaultySource:
    """A source that fails where it is told to, and is `source` in all else, its identity too.

    So a cache that is filled through it has the fingerprint of one filled without, to be compared with it.

    Args:
        source: What to read from.
        faults: What happens; of several for one sample, the first that is not used up.
        folder: Where attempts are counted, in small files, since workers are processes that get replaced.
            Needed where a fault has `attempts`.

    Raises:
        ConfigError: `folder` is needed and not given.
    """

    def __init__(self, source: Source, faults: Sequence[Fault], *, folder: str | Path | None = None) -> None:
        if folder is None and any(fault.attempts is not None for fault in faults):
            raise ConfigError(
                "attempts are counted over processes, in files. Give folder=, as pytest's tmp_path"
            )
        self._source = source
        self._faults = list(faults)
        self._folder = None if folder is None else Path(folder)
        self._maker = os.getpid()

    def __len__(self) -> int:
        return len(self._source)

    def read(self, number: int, start: int | None = None, stop: int | None = None) -> Sample:
        """Read as the source does, unless a fault is due; each call is an attempt, also for a part."""
        due = (i for i, fault in enumerate(self._faults) if number in fault.samples)
        place = next((i for i in due if self._take(i, number)), None)
        fault = None if place is None else self._faults[place]
        if fault is not None:
            self._happen(fault, number)
        whole = start is None and stop is None
        sample = self._source.read(number) if whole else self._source.read(number, start, stop)
        return _changed(sample) if fault is not None and fault.kind == "corrupt" else sample

    def locate(self, number: int) -> str:
        """Return what the source returns."""
        return locate(self._source, number)

    def runs(self) -> Sequence[range]:
        """Return what the source returns."""
        return self._source.runs()

    def keys(self) -> Sequence[str]:
        """Return what the source returns."""
        return self._source.keys()

    def identity(self) -> SourceIdentity:
        """Return what the source returns."""
        return self._source.identity()

    def schema(self) -> Schema:
        """Return what the source returns."""
        return self._source.schema()

    def _take(self, place: int, number: int) -> bool:
        """Return True if the fault is still due for a sample; counts this attempt."""
        attempts = self._faults[place].attempts
        if attempts is None or self._folder is None:
            return True
        for attempt in range(attempts):
            try:
                (self._folder / f"fault{place}-sample{number}-{attempt}").touch(exist_ok=False)
            except FileExistsError:
                continue
            return True
        return False

    def _happen(self, fault: Fault, number: int) -> None:
        if fault.kind == "raise":
            raise fault.error or OSError(5, f"injected input/output error at sample {number}")
        if fault.kind == "kill":
            if os.getpid() == self._maker:
                raise ConfigError(
                    "the fault 'kill' would end the process that made the source. Read in another one, with "
                    "workers=1 or more"
                )
            os.kill(os.getpid(), signal.SIGKILL)
        if fault.kind in ("hang", "slow"):
            time.sleep(3600.0 if fault.kind == "hang" else fault.seconds)


def _changed(sample: Sample) -> Sample:
    """Return the sample with the top byte of its first value changed."""
    name = next(iter(sample))
    array = sample[name].copy(order="C")
    if array.nbytes:
        array.reshape(-1).view("uint8")[array.itemsize - 1] ^= 1
    return {**sample, name: array}
