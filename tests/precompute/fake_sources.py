"""Sources for the tests of precompute; worker processes import this module, so it leaves torch alone."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from stoker.errors import SourceError
from stoker.schema import Field
from stoker.sources.files import confined_sources
from stoker.sources.protocol import Part, SourceIdentity


class FakeSource:
    """Samples made from their number: `data` (T, W) float32 with time, `nu` a scalar.

    `faults` maps a number to what happens when it is read; see `_misbehave`.
    """

    def __init__(self, counts=(10,), *, steps=6, width=5, faults=None, delay_s=0.0, run=None, marker=None):
        self.counts = tuple(counts)
        self.steps, self.width = steps, width
        self.faults = faults or {}
        self.delay_s = delay_s
        self.run = run
        self.marker = marker

    def __len__(self):
        return sum(self.counts)

    def schema(self):
        return {
            "data": Field(shape=(self.steps, self.width), dtype="float32", time=True),
            "nu": Field(shape=(), dtype="float32"),
        }

    def identity(self):
        parts = tuple(
            Part(name=f"part{i}.h5", count=count, digest=f"{i:064x}", values={"i": i})
            for i, count in enumerate(self.counts)
        )
        return SourceIdentity(kind="fake/1", parts=parts, settings={"steps": self.steps, "width": self.width})

    def keys(self):
        return [str(number) for number in range(len(self))]

    def runs(self):
        size = self.run or max(1, len(self))
        found, base = [], 0
        for count in self.counts:
            found += [range(base + i, base + min(i + size, count)) for i in range(0, count, size)]
            base += count
        return found

    def read(self, number, start=None, stop=None):
        if self.delay_s:
            time.sleep(self.delay_s)
        sample = {
            "data": sample_values(number, self.steps, self.width)[start:stop],
            "nu": np.float32(number) / np.float32(7),
        }
        sample["nu"] = np.asarray(sample["nu"])
        if number in self.faults:
            sample = self._misbehave(self.faults[number], number, sample)
        return sample

    def _misbehave(self, fault, number, sample):
        if fault.endswith("-once"):
            done = Path(self.marker) / f"{fault}-{number}"
            if done.exists():
                return sample
            done.touch()
            fault = fault.removesuffix("-once")
        if fault == "raise":
            raise OSError(f"truncated at sample {number}")
        if fault == "eio":
            raise OSError(5, "Input/output error")
        if fault == "nan":
            sample["data"] = sample["data"].copy()
            sample["data"][0, 0] = np.nan
        if fault == "shape":
            sample["data"] = sample["data"][:, :-1]
        if fault == "hang":
            time.sleep(3600)
        if fault == "spin":
            while True:
                pass
        if fault == "fifo":
            (Path(self.marker) / "fifo").read_bytes()
        if fault == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "starts-another":
            child = subprocess.Popen(["sleep", "600"])
            (Path(self.marker) / f"started-{child.pid}").write_text(str(child.pid))
            time.sleep(3600)
        if fault == "nonsense":
            fds = map(int, os.listdir("/proc/self/fd"))
            sock = next(fd for fd in fds if "/socket:" in os.path.realpath(f"/proc/self/fd/{fd}"))
            os.write(sock, struct.pack("<IQ", 3, 0) + b"]]]")
            time.sleep(3600)
        if fault == "exit0":
            os._exit(0)
        return sample


class MeetingSource(FakeSource):
    """Each read waits until two processes have come to one, for ten seconds at most."""

    def read(self, number, start=None, stop=None):
        (Path(self.marker) / f"{os.getpid()}-{number}").touch()
        until = time.monotonic() + 10.0
        while len(self.workers()) < 2 and time.monotonic() < until:
            time.sleep(0.02)
        return super().read(number, start, stop)

    def workers(self):
        return {path.name.partition("-")[0] for path in Path(self.marker).iterdir()}


class ManySource(FakeSource):
    """Gives several samples at once, and notes how it was asked."""

    def __init__(self, *arguments, **settings):
        super().__init__(*arguments, **settings)
        self.asked = []

    def read(self, number, start=None, stop=None):
        self.asked.append(number)
        return super().read(number, start, stop)

    def read_many(self, numbers):
        samples = [super(ManySource, self).read(number) for number in numbers]
        self.asked.append(numbers)
        return {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}


class ChattySource(FakeSource):
    """Floods standard output."""

    def read(self, number, start=None, stop=None):
        sys.stdout.write("x" * 1_000_000)
        return super().read(number, start, stop)


class TorchWatcher(FakeSource):
    """Fails where torch has been imported."""

    def read(self, number, start=None, stop=None):
        if "torch" in sys.modules:
            raise AssertionError("torch was imported")
        return super().read(number, start, stop)


class TorchLater(FakeSource):
    """Imports torch when it is first read; `nu` is the number of its threads then."""

    def read(self, number, start=None, stop=None):
        import torch

        return super().read(number, start, stop) | {"nu": np.float32(torch.get_num_threads())}


def sample_values(number, steps, width):
    rng = np.random.default_rng(number)
    return rng.standard_normal((steps, width), dtype=np.float32)


class RaggedSource(FakeSource):
    """`data` (3 + number % 4, W) ragged."""

    def schema(self):
        return {
            "data": Field(shape=(-1, self.width), dtype="float32", ragged=True),
            "nu": Field(shape=(), dtype="float32"),
        }

    def read(self, number, start=None, stop=None):
        sample = super().read(number, start, stop)
        sample["data"] = sample_values(number, 3 + number % 4, self.width)
        return sample


class ConfinedSource(FakeSource):
    """Refuses to be read where a process is not confined to `/data/x`."""

    def read(self, number, start=None, stop=None):
        if confined_sources() != ["/data/x"]:
            raise SourceError(f"confined to {confined_sources()}")
        return super().read(number, start, stop)


class BadEnds(FakeSource):
    """Samples whose last quarter cannot be read, but for every eighth."""

    def read(self, number, start=None, stop=None):
        if number % 8 and (stop or self.steps) > self.steps * 3 // 4:
            raise OSError(f"truncated at sample {number}")
        return super().read(number, start, stop)
