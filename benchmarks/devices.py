"""Question: do several encoders fed by the same workers take the time of one, divided by their number?

The encoder waits, as a caller waits for a kernel on a GPU: 40 ms a group. Encoders share two cores here, so
what is measured is all that lies around them: reading, the copy to their processes and back, the writer. Three
sizes of groups: 64 KiB, 1 MiB and 16 MiB of samples, with records half as large. The time of a group is taken from the
first third of them to the last, so that starting processes does not count; `of_ideal` is the ideal, the wait divided
by the number of encoders, over that. One encoder runs in the calling process, several in processes of their own.

    python benchmarks/devices.py [--save] [--rounds 3]
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from measure import publish
from stoker.encoders.protocol import EncodeBatchSize
from stoker.precompute import PrecomputeSettings, run_precompute
from stoker.schema import Field
from stoker.sources.protocol import Part, SourceIdentity

WAIT_S = 0.04
GROUP = 8
GROUPS = 48
"""For each encoder."""


class Rows:
    """Samples that cost next to nothing to read: one array again and again."""

    def __init__(self, count: int, width: int) -> None:
        self.count, self.width = count, width

    def __len__(self) -> int:
        return self.count

    def schema(self) -> dict[str, Field]:
        """One field."""
        return {"data": Field(shape=(self.width,), dtype="float32")}

    def identity(self) -> SourceIdentity:
        """By its size alone."""
        part = Part(name="rows", count=self.count, digest=f"{self.width:064x}", values={})
        return SourceIdentity(kind="rows/1", parts=(part,), settings={})

    def keys(self) -> list[str]:
        """Numbers."""
        return [str(number) for number in range(self.count)]

    def runs(self) -> list[range]:
        """One."""
        return [range(self.count)]

    def read(self, number: int, start: int | None = None, stop: int | None = None) -> dict[str, Any]:
        """A sample."""
        return {"data": np.full(self.width, number, np.float32)}


class Waiting:
    """Half of each sample, after a wait."""

    def schema(self, sample_schema: Any) -> dict[str, Field]:
        """One field of half the size."""
        return {"latent": Field(shape=(sample_schema["data"].shape[0] // 2,), dtype="float32")}

    def encode_batch_size(self, sample_schema: Any) -> EncodeBatchSize:
        """Of fixed size."""
        return EncodeBatchSize(samples=GROUP, steps=None)

    independent_steps = False

    def encode(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Wait as for a kernel."""
        time.sleep(WAIT_S)
        return {"latent": batch["data"][:, ::2].contiguous()}

    def to(self, device: torch.device) -> None:
        """Nothing to move."""

    def weights(self) -> dict[str, torch.Tensor]:
        """None."""
        return {}

    def identity(self) -> dict[str, Any]:
        """By name."""
        return {"class": "Waiting", "version": 1}


class Times:
    """A progress sink that notes when how many records were encoded."""

    interval_s = 0.0

    def __init__(self) -> None:
        self.seen: list[tuple[float, int]] = []

    def update(self, snapshot: Any) -> None:
        """Note it."""
        if not self.seen or snapshot.encoded > self.seen[-1][1]:
            self.seen.append((time.perf_counter(), snapshot.encoded))

    def note(self, text: str) -> None:
        """Nothing is shown."""

    def close(self) -> None:
        """Nothing to close."""

    def group_s(self) -> float:
        """Seconds a group, from the first third on."""
        last_s, last = self.seen[-1]
        first_s, first = next(one for one in self.seen if one[1] >= last / 3)
        return (last_s - first_s) / ((last - first) / GROUP)


def group_s(devices: int, width: int, folder: Path) -> float:
    """Seconds a group with so many encoders."""
    times = Times()
    settings = PrecomputeSettings(devices=("cpu",) * devices, progress=times, workers=1)
    source = Rows(GROUPS * devices * GROUP, width)
    run_precompute(source, Waiting(), folder, name="rows", settings=settings)
    shutil.rmtree(folder)
    return times.group_s()


def scaling(devices: int, width: int, taken: list[float]) -> dict[str, Any]:
    """A row: the time of a group with so many encoders, against the ideal."""
    middle = statistics.median(taken)
    return {
        "encoders": devices,
        "group_mib": round(GROUP * width * 4 / 2**20, 3),
        "group_ms": round(middle * 1e3, 2),
        "of_ideal": round(WAIT_S / devices / middle, 3),
        "rounds": [round(WAIT_S / devices / one, 3) for one in taken],
    }


def main() -> None:
    """Measure, in turns, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    taken: dict[tuple[int, int], list[float]] = {}
    with tempfile.TemporaryDirectory() as text:
        for _ in range(arguments.rounds):
            for case in ((width, devices) for width in (2048, 32768, 524288) for devices in (1, 2, 4)):
                taken.setdefault(case, []).append(group_s(case[1], case[0], Path(text) / "cache"))
                print(case, round(taken[case][-1] * 1e3, 2), "ms", file=sys.stderr)
    rows = [scaling(devices, width, found) for (width, devices), found in taken.items()]
    publish("devices", rows, save=arguments.save)


if __name__ == "__main__":
    main()
