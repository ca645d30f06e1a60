"""Encode a few groups with nothing beside: every stage waits for the one before, and is timed by itself.

What is stored goes to a folder of the caller's, and is a complete cache of these few.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stoker.encoders.protocol import Encoder
from stoker.errors import SourceError
from stoker.precompute.precision import full_precision
from stoker.precompute.settings import PrecomputeSettings
from stoker.precompute.stages import Bench
from stoker.runtime.libc import release_memory
from stoker.schema import Sample, Schema
from stoker.sources.protocol import Part, Source, SourceIdentity, locate
from stoker.store import Cache, Failure, Recipe, make_recipe
from stoker.store.folder import Folder, open_folder

SAMPLES = 256
"""Samples of a trial, at most."""
SECONDS = 15.0
"""After which no further group is begun."""


@dataclass(slots=True)
class Trial:
    """What each stage took. While it goes on, where it stands."""

    opens_s: dict[int, float] = field(default_factory=dict[int, float])
    """Seconds to open a file and read its first sample, by that sample's number."""
    reads_s: dict[int, float] = field(default_factory=dict[int, float])
    """Seconds to read every other sample, by number."""
    encodes_s: list[tuple[float, int]] = field(default_factory=list[tuple[float, int]])
    """Seconds in the encoder, and samples of each group; the first calls choose kernels and get memory."""
    writes_s: float = 0.0
    """Converting, checksums and writing of all records."""
    seal_s: float = 0.0
    """Bringing a shard to the disk for good, once."""
    records: int = 0
    """Samples that were stored."""
    failures: list[str] = field(default_factory=list[str])
    """Samples that could not be read or encoded, in words."""
    names: dict[int, str] = field(default_factory=dict[int, str])
    """File or table of each sample that was read, by number."""
    stage: str = "open"
    number: int = -1

    @property
    def encode_s(self) -> float:
        """Seconds in the encoder for one sample.

        Without the first quarter of the calls: until its memory is in place one may take twice as long.
        """
        calls = self.encodes_s[-(-len(self.encodes_s) // 4) :] or self.encodes_s
        return sum(seconds for seconds, _ in calls) / max(1, sum(count for _, count in calls))


class _Chosen:
    """Some samples of a source as a source of their own, whose reads are noted."""

    def __init__(self, source: Source, numbers: NDArray[np.int64], trial: Trial) -> None:
        self._source, self._trial = source, trial
        self.numbers = [int(number) for number in numbers]
        whole = source.identity().parts
        ends = np.cumsum([part.count for part in whole])
        self._parts = np.searchsorted(ends, numbers, side="right").tolist()
        self._names = [part.name for part in whole]
        self._open: set[int] = set()

    def __len__(self) -> int:
        return len(self.numbers)

    def schema(self) -> Schema:
        return self._source.schema()

    def keys(self) -> Sequence[str]:
        return [str(number) for number in self.numbers]

    def locate(self, number: int) -> str:
        return locate(self._source, self.numbers[number])

    def runs(self) -> Sequence[range]:
        return [range(part.start, part.stop) for part in self._spans()]

    def identity(self) -> SourceIdentity:
        """Of no use to anybody else, so that no file has to be digested for it."""
        parts = [Part(name=self._names[self._parts[span.start]], count=len(span), digest="trial")
                 for span in self._spans()]  # fmt: skip
        return SourceIdentity(kind="trial/1", parts=tuple(parts), settings={"numbers": [*self.numbers]})

    def _spans(self) -> list[range]:
        starts = [at for at, part in enumerate(self._parts) if not at or part != self._parts[at - 1]]
        return [range(a, b) for a, b in zip(starts, [*starts[1:], len(self)], strict=True)]

    def read(self, number: int, start: int | None = None, stop: int | None = None) -> Sample:
        trial, part, number = self._trial, self._parts[number], self.numbers[number]
        first = part not in self._open
        trial.stage, trial.number = "open" if first else "read", number
        trial.names[number] = self._names[part]
        begin = time.perf_counter()
        sample = self._source.read(number, start, stop) if start is not None else self._source.read(number)
        took = trial.opens_s if first or number in trial.opens_s else trial.reads_s
        took[number] = took.get(number, 0.0) + time.perf_counter() - begin
        self._open.add(part)
        return sample


def spread(recipe: Recipe, most: int) -> NDArray[np.int64]:
    """Numbers of whole groups, evenly over all parts, `most` of them or one group.

    A group is what is encoded together, so that a part of one would cost as much.
    """
    size = recipe.group.samples
    groups = [range(p.offset + at, p.offset + min(at + size, p.count)) for p in recipe.parts
              for at in range(0, p.count, size)]  # fmt: skip
    step = max(1, -(-len(groups) * size // max(most, size)))
    return np.array([number for group in groups[::step] for number in group], dtype=np.int64)


@full_precision()
def try_stages(
    source: Source,
    encoder: Encoder | None,
    place: tuple[Path, str, Recipe],
    settings: PrecomputeSettings,
    trial: Trial,
) -> Cache:
    """Read, encode and store some samples in this process; a complete cache of those, numbered from 0.

    Args:
        source, encoder: As for precompute.
        place: Folder to write to, name, and the recipe that source and encoder give.
        settings: As for precompute; readers and what they are told have no meaning here.
        trial: Filled while it goes on, by numbers of `source`.

    Raises:
        SourceError: Not one of them can be read and encoded.
        StokerError: As precompute.
    """
    cache_dir, name, whole = place
    own = replace(settings, readers=0, progress=None, overwrite=False, by_blocks=False, identity="auto")
    chosen = _Chosen(source, spread(whole, SAMPLES), trial)
    folder = open_folder(
        cache_dir,
        name,
        make_recipe(chosen, encoder, dtype=settings.dtype, encode_batch=settings.encode_batch),
    )
    bench = Bench(chosen, encoder, folder, own, missing=np.arange(len(chosen)), rehearsal=True)
    done = _go(bench, folder, trial)
    trial.failures = [
        f"sample {chosen.numbers[f.number]} ({f.stage}: {f.error})" for f in bench.ledger.failures
    ]
    if not done:
        raise SourceError(
            f"none of {len(chosen)} samples could be read and encoded. The first: "
            f"{trial.failures[0] if trial.failures else 'nothing was said'}. Fix that, or the settings"
        )
    left = sorted(set(range(len(chosen))) - done)
    folder.quarantine_many(
        [Failure(number=n, stage="read", error="left out", attempts=1, kind="sample") for n in left]
    )
    return folder.finish()


def _go(bench: Bench, folder: Folder, trial: Trial) -> set[int]:
    """Go through the stages; the numbers of what was stored."""
    trial.stage, done = "encode", set[int]()
    feed, encoder, writer = bench.feed(), bench.encoder(), folder.writer()
    end = time.monotonic() + SECONDS
    try:
        while not feed.finished and time.monotonic() < end:
            for parcel in feed.poll(0.0):
                trial.stage, begin = "encode", time.perf_counter()
                wanted = bench.queue.wanted(parcel.work)
                encoded = encoder.encode(parcel, wanted, bench.ledger.fault)
                trial.encodes_s.append((time.perf_counter() - begin, len(wanted) if parcel.last else 0))
                feed.release(parcel)
                if encoded is not None and encoded.numbers:
                    trial.stage, begin = "write", time.perf_counter()
                    writer.append(encoded.numbers, encoded.records, marked=encoded.marked)
                    trial.writes_s += time.perf_counter() - begin
                    done.update(encoded.numbers)
    finally:
        feed.close()
        bench.leave_device()
        release_memory()
    trial.stage, begin = "seal", time.perf_counter()
    writer.seal()
    trial.seal_s, trial.records = time.perf_counter() - begin, len(done)
    return done
