"""Encode ragged samples together with others of their padded length.

A sample is padded to the smallest of the recipe's lengths that is not shorter, and waits until the call of
that length has enough samples. A call has the same shape whenever it is made, and a sample its own row in it,
by its number. So a record's bits depend on its sample and its place alone. They do not depend on the samples
that came together: what was read earlier, by how many workers, or before a kill.

Rows are by number, since kernels may round otherwise in another row: at the ends of vectors and of what each
thread gets. The price is that a call waits for samples of each row, and that the last calls of a run have
empty rows (docs/design/050-ragged-encode-batches.md).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from stoker.errors import EncoderError
from stoker.precompute.arena import LoadedBatch, private_arrays
from stoker.schema import LENGTHS_SUFFIX, Sample, Schema

if TYPE_CHECKING:
    from stoker.encoders.protocol import EncodeBatchSize
    from stoker.precompute.encode import EncodeClock, EncodedRecords, EncodeStage
    from stoker.precompute.queue import BatchOwner, WorkQueue
    from stoker.precompute.settings import PrecomputeSettings
    from stoker.store.recipe import Recipe

MOST_READ = 4096
"""Samples that may be read while one waits for others of its length. Rare lengths wait no longer."""
MOST_READ_SERVED = 512
"""The same where training reads what is stored meanwhile: the first samples are soon complete."""
WAITING_SHARE = 0.125
"""Of the memory in flight: what samples may take that wait for others of their length."""
WAIT_S = 10.0
"""Seconds after which a sample is encoded with those that are there, once the encoder has nothing to do."""
IDLE_S = 0.5
"""The same where no sample came for so long: the encoder waits for workers, and empty rows cost little."""


def check_lengths(size: EncodeBatchSize, schema: Schema) -> None:
    """Check that samples of a schema can be padded to the lengths of an encode batch.

    Raises:
        EncoderError: No field is ragged, one has several axes in its rows, or a name is taken.
    """
    ragged = [name for name, spec in schema.items() if spec.ragged]
    if not ragged:
        raise EncoderError(
            f"the encoder pads samples to lengths {size.lengths}, and samples do not differ in length",
            hint="Give an EncodeBatchSize without lengths for these samples",
        )
    for name in ragged:
        if schema[name].folded:
            raise EncoderError(
                f"the encoder pads samples to lengths {size.lengths}, and field {name!r} has axes "
                f"{' '.join(schema[name].axes)} in its rows, which cannot be padded",
                hint="Give an EncodeBatchSize without lengths for these samples",
            )
        if name + LENGTHS_SUFFIX in schema:
            raise EncoderError(
                f"samples have a field {name + LENGTHS_SUFFIX!r}, which is what an encoder gets the lengths "
                f"of {name!r} as",
                hint="Give the field another name in its source",
            )


def padded_length(sample: LoadedBatch, size: EncodeBatchSize, schema: Schema) -> int | None:
    """Return the length of the call for a sample, by its longest ragged field; None: it is encoded alone."""
    lengths = [sample.arrays[name].shape[1] for name, spec in schema.items() if spec.ragged]
    return size.padded(max(lengths))


def pad_together(samples: Sequence[LoadedBatch], recipe: Recipe, schema: Schema) -> LoadedBatch:
    """Return one call for samples of one padded length, each of another row; or for one that is alone.

    Args:
        samples: Batches of one sample each.
        recipe: Its encode batch has lengths.
        schema: Fields of a sample, with or without their lengths.
    """
    size = recipe.encode_batch
    length = padded_length(samples[0], size, schema)
    rows = 1 if length is None else size.samples
    shapes: dict[str, tuple[int, ...]] = {}
    for name, array in samples[0].arrays.items():
        spec = schema[name]
        steps = (array.shape[1] if length is None else length,) if spec.ragged else spec.shape[:1]
        shapes[name] = (rows, *steps, *spec.shape[1:])
    ragged = [name for name in shapes if schema[name].ragged]
    lengths = {name + LENGTHS_SUFFIX: np.ones(rows, np.int64) for name in ragged}
    arrays = private_arrays(schema, shapes)  # zeros
    members = [-1] * rows
    for sample in samples:
        number = sample.work.numbers[0]
        row = row_of(sample, recipe, rows)
        members[row] = number
        for name, array in sample.arrays.items():
            if schema[name].ragged:
                arrays[name][row, : array.shape[1]] = array[0]
                lengths[name + LENGTHS_SUFFIX][row] = array.shape[1]
            else:
                arrays[name][row] = array[0]
    return LoadedBatch(
        work=samples[0].work,
        arrays=arrays | lengths,
        owned=True,
        members=tuple(members),
        works=tuple(sample.work for sample in samples),
    )


def row_of(sample: LoadedBatch, recipe: Recipe, rows: int) -> int:
    """Return the row of a sample in a call of so many."""
    work = sample.work
    return recipe.place(work.part, work.numbers[0] - recipe.parts[work.part].offset) % rows


@dataclass(slots=True)
class _Waiting:
    """Samples of one padded length that wait, by row."""

    rows: list[deque[LoadedBatch]]
    empty: int
    """Rows that have none."""


@dataclass(slots=True)
class LengthGatherer:
    """Samples that wait for others of their padded length; `add` returns calls as they get complete.

    It may be handed from one stage to the next: what waits belongs to the run.
    """

    recipe: Recipe
    schema: Schema
    """Fields of a sample."""
    limit_bytes: int
    """Bytes of samples that may wait."""
    most_read: int = MOST_READ
    """Samples that may be read while one waits."""
    waiting_bytes: int = 0
    ready: deque[LoadedBatch] = field(default_factory=deque[LoadedBatch])
    """Calls that an encoder has no room for yet."""
    _lengths: dict[int, _Waiting] = field(default_factory=dict[int, _Waiting])
    _order: deque[tuple[int, int, float, int]] = field(default_factory=deque[tuple[int, int, float, int]])
    """Samples by age: place among those read, padded length, time of arrival, key."""
    _keys: set[int] = field(default_factory=set[int])
    """Keys of those that wait; `_order` has others that do not any more."""
    _read: int = 0

    def __len__(self) -> int:
        """Return the number of samples that wait."""
        return len(self._keys)

    def add(self, sample: LoadedBatch) -> None:
        """Take a batch of one sample, and put on `ready` what is to be encoded now."""
        length = padded_length(sample, self.recipe.encode_batch, self.schema)
        if length is None:
            self.ready.append(pad_together([sample], self.recipe, self.schema))
            return
        waiting = self._lengths.get(length)
        if waiting is None:
            rows = self.recipe.encode_batch.samples
            waiting = self._lengths[length] = _Waiting([deque() for _ in range(rows)], rows)
        row = waiting.rows[row_of(sample, self.recipe, len(waiting.rows))]
        waiting.empty -= not row
        # A copy: each array of a sample that was read takes pages of its own.
        arrays = {name: array.copy() for name, array in sample.arrays.items()}
        row.append(replace(sample, arrays=arrays, origin=None))
        self.waiting_bytes += _size(arrays)
        self._read += 1
        self._keys.add(sample.work.key)
        self._order.append((self._read, length, time.monotonic(), sample.work.key))
        if not waiting.empty:
            self._call(length)
        while self.waiting_bytes > self.limit_bytes or self._oldest[0] + self.most_read < self._read:
            self._call(self._oldest[1])

    def flush(self) -> None:
        """Put on `ready` all that waits, with empty rows."""
        for length in sorted(self._lengths):
            while self._lengths[length].empty < len(self._lengths[length].rows):
                self._call(length)

    def flush_oldest(self) -> None:
        """Put on `ready` one call, with the sample that waits longest; there must be one."""
        self._call(self._oldest[1])

    @property
    def waited_s(self) -> float:
        """Seconds since the oldest of the samples that wait came; 0 without any."""
        return time.monotonic() - self._oldest[2] if self._keys else 0.0

    @property
    def _oldest(self) -> tuple[int, int, float, int]:
        while self._order and self._order[0][3] not in self._keys:
            self._order.popleft()
        return self._order[0] if self._order else (self._read, 0, 0.0, -1)

    def _call(self, length: int) -> None:
        """Make one call of the first sample of each row."""
        waiting = self._lengths[length]
        samples = [row.popleft() for row in waiting.rows if row]
        waiting.empty = sum(not row for row in waiting.rows)
        self._keys.difference_update(sample.work.key for sample in samples)
        self.waiting_bytes -= sum(_size(sample.arrays) for sample in samples)
        self.ready.append(pad_together(samples, self.recipe, self.schema))


def _size(arrays: Sample) -> int:
    return sum(array.nbytes for array in arrays.values())


def gatherer_of(recipe: Recipe, schema: Schema, settings: PrecomputeSettings) -> LengthGatherer | None:
    """Return the gatherer of a run; None where the recipe does not have samples padded."""
    if not recipe.encode_batch.lengths:
        return None
    return LengthGatherer(
        recipe,
        schema,
        limit_bytes=int(settings.memory_bytes * WAITING_SHARE),
        most_read=MOST_READ_SERVED if settings.by_blocks else MOST_READ,
    )


def calls_of(gatherer: LengthGatherer | None, batch: LoadedBatch | None) -> list[LoadedBatch]:
    """Return what to encode after one more batch was read, stages taking turns; `batch` None: the rest."""
    if gatherer is None:
        return [] if batch is None else [batch]
    if batch is None:
        gatherer.flush()
    else:
        gatherer.add(batch)
    calls = [*gatherer.ready]
    gatherer.ready.clear()
    return calls


def split_by_part(found: EncodedRecords, recipe: Recipe) -> list[EncodedRecords]:
    """Return the records of each part for itself, as shards are."""
    if len(recipe.parts) < 2:
        return [found]
    parts = np.array([recipe.part_of(number)[0] for number in found.numbers])
    split: list[EncodedRecords] = []
    for part in np.unique(parts):
        rows = np.flatnonzero(parts == part).tolist()
        numbers = [found.numbers[row] for row in rows]
        records: dict[str, Any] = {
            name: [values[row] for row in rows] if isinstance(values, list) else values[rows]
            for name, values in found.records.items()
        }
        marked = [number for number in numbers if number in found.marked]
        size = found.size_bytes * len(rows) // len(found.numbers)
        split.append(replace(found, numbers=numbers, records=records, marked=marked, size_bytes=size))
    return split


class LengthStage:
    """An `EncodeStage` around another one: gathers samples by length, and hands on complete calls.

    Args:
        inner: Encodes them.
        gatherer: Of the run.
        feed, queue: Of the run.
    """

    def __init__(
        self, inner: EncodeStage, gatherer: LengthGatherer, feed: BatchOwner, queue: WorkQueue
    ) -> None:
        self._inner, self._gatherer, self._feed, self._queue = inner, gatherer, feed, queue
        self._fed = False
        """A sample came since `results` was last called."""
        self._fed_at = time.monotonic()
        self.clock: EncodeClock = inner.clock

    @property
    def hungry(self) -> bool:
        """See `EncodeStage`."""
        return self._inner.hungry and not self._gatherer.ready

    def take(self, batch: LoadedBatch) -> bool:
        """See `EncodeStage`."""
        self._fed, self._fed_at = True, time.monotonic()
        self._hand_on()
        if self._gatherer.ready:
            return False
        self._feed.release(replace(batch, last=False))  # done with when its records are here
        if self._queue.wanted(batch.work):
            self._gatherer.add(batch)
            self._hand_on()
        else:
            self._queue.done(batch.work)
        return True

    def results(self) -> list[EncodedRecords]:
        """See `EncodeStage`; the records of each part for itself, as shards are."""
        if not self._gatherer.ready and len(self._gatherer) and not self._fed:
            self._look_ahead()
        self._fed = False
        self._hand_on()
        return [
            part for found in self._inner.results() for part in split_by_part(found, self._gatherer.recipe)
        ]

    def _look_ahead(self) -> None:
        """Encode what waits where nothing else comes: at the end, and while the encoder has nothing to do."""
        gatherer, feed = self._gatherer, self._feed
        if not feed.reading:
            gatherer.flush()
        elif self._inner.hungry:
            idle = feed.pool is not None and time.monotonic() - self._fed_at > IDLE_S
            if idle or gatherer.waited_s > WAIT_S:
                gatherer.flush_oldest()

    def _hand_on(self) -> None:
        ready = self._gatherer.ready
        while ready and self._inner.take(ready[0]):
            ready.popleft()

    def watch(self, fd: int) -> int:
        """See `EncodeStage`."""
        return self._inner.watch(fd)

    def wait(self, timeout_s: float) -> None:
        """See `EncodeStage`."""
        self._inner.wait(min(timeout_s, IDLE_S))

    def processor_s(self) -> float:
        """See `EncodeStage`."""
        return self._inner.processor_s()

    def close(self) -> None:
        """See `EncodeStage`."""
        self._inner.close()
