"""Fill several caches in one pass over the source: each sample is read once, and every encoder is given it.

What is read at a time need not be an encode batch. Each cache has a batch size of its own, and its batches
are put together here from what arrives (`BatchAssembly`). So a record has the bits that it would have alone.
Each cache also has its own quarantine. A sample that cannot be read is set aside in all caches. One on which
an encoder fails is set aside in the cache of that encoder.
"""

from __future__ import annotations

import select
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from stoker.encoders.protocol import EncodeBatchSize
from stoker.errors import ConfigError, StokerError, arg
from stoker.precompute.arena import LoadedBatch, ReadTask, private_arrays
from stoker.precompute.encode import EncodedRecords, EncodeStage
from stoker.precompute.loop import RunStages, RunTotals, WriteStage
from stoker.precompute.progress import ProgressSink, WorkerView
from stoker.precompute.queue import BatchOwner, PartSpan, SampleFeed, SampleLedger, WorkerPool, WorkQueue
from stoker.precompute.run import HeadStart, StageBuilder, can_begin_in_process, plan_run, run_stages
from stoker.precompute.settings import EncodeShare, ShareOutcome
from stoker.schema import Sample, Schema
from stoker.store import Failure
from stoker.units import MIB

_UNIT_BYTES = 64 * MIB
"""Samples read at a time where encode batches are larger."""
_KEPT = 4
"""Memory of so many encode batches is used again."""


# ----------------------------------------------------------------------------------------------------------
# Arguments of a call for several caches.


def refuse_alone(
    *, wait: bool, engine: object, part: tuple[int, int], name: str, keys: Sequence[object]
) -> None:
    """Refuse arguments that are for one cache.

    Raises:
        ConfigError: As said, or there is no encoder, or a key is not part of a name.
    """
    if not keys or not all(isinstance(key, str) and key for key in keys):
        raise ConfigError(
            f"encoders are given by the keys {keys}", hint='Expected names, as {"latents": encoder}'
        )
    given = [
        text
        for text, is_given in (
            (arg("wait", False), not wait),
            (arg("engine", "..."), engine is not None),
            (arg("part", part), part != (0, 1)),
        )
        if is_given
    ]
    if given:
        raise ConfigError(
            f"{given[0]} fills one cache, and encoders for {len(keys)} are given",
            hint=f"Leave it out. Or call precompute for each encoder alone, as "
            f"name={f'{name}_{keys[0]}'!r}: the caches are the same, and samples are read for each of them",
        )


def settings_of(
    key: str, keys: Sequence[str], given: Mapping[str, Any], defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the settings of one cache of several: those for all, and its entries in mappings by key.

    Args:
        key: Of the cache.
        keys: Of all caches.
        given: Settings by name.
        defaults: Settings by name of a cache without an entry in a mapping.

    Raises:
        ConfigError: A mapping has a key that no encoder has.
    """
    found: dict[str, Any] = {}
    for name, value in given.items():
        if not isinstance(value, Mapping):
            found[name] = value
            continue
        of_caches = cast("Mapping[str, Any]", value)
        if unknown := [one for one in of_caches if one not in keys]:
            example = {keys[0]: dict(of_caches) if name == "dtype" else "..."}
            raise ConfigError(
                f"{name} has an entry {unknown[0]!r}; the encoders are {', '.join(keys)}",
                hint=f"With several encoders, give {name} for all, or by their keys, as {name}={example}",
            )
        if key in of_caches:
            found[name] = of_caches[key]
        else:
            found[name] = defaults[name]
    return found


def handed_on(samples: Schema, records: Schema) -> tuple[list[str], float]:
    """Return the fields of a sample that a record holds as they are, and their part of its bytes.

    Fields that differ in length count as one row.
    """
    size = {name: field.size_bytes(1 if field.ragged else None) for name, field in records.items()}
    names = [name for name, field in records.items() if samples.get(name) == field and not field.kept]
    return names, sum(size[name] for name in names) / max(1, sum(size.values()))


# ----------------------------------------------------------------------------------------------------------
# Put encode batches together from what is read.


@dataclass(slots=True)
class _OpenBatch:
    """Encode batch of which samples are still to come."""

    work: ReadTask
    arrays: Sample
    filled: NDArray[np.bool_]
    """Rows that hold a sample; the others become zeros."""
    arrived: int = 0
    """Members that were read, or could not be."""


class BatchAssembly(WorkQueue):
    """Encode batches of one cache: put together from what is read, and lent to its encoder.

    A batch that an encoder process lost is lent again, so that nothing is read twice.

    Args:
        parts, group_samples, missing, bad: As for `WorkQueue`.
        schema: Fields of a sample.
    """

    def __init__(
        self,
        parts: Sequence[PartSpan],
        group_samples: int,
        missing: NDArray[np.int64],
        *,
        bad: Callable[[int], bool],
        schema: Schema,
    ) -> None:
        super().__init__(parts, group_samples, missing, bad=bad)
        self._is_bad = bad
        self._schema = schema
        self._ragged = any(field.ragged for field in schema.values())
        self._begun: dict[int, _OpenBatch] = {}
        self._ready: deque[LoadedBatch] = deque()
        self._lent: dict[int, LoadedBatch] = {}
        self._free: list[Sample] = []
        self.is_read = False
        """Nothing more will come."""

    @property
    def pool(self) -> None:
        """See `BatchOwner`; the source is read elsewhere."""
        return None

    @property
    def reading(self) -> bool:
        """See `BatchOwner`."""
        return not self.is_read

    def needed(self) -> NDArray[np.int64]:
        """Return every member of the encode batches in which records are missing, ascending."""
        ends = np.array([part.offset + part.count for part in self._parts], np.int64)[self._group_parts]
        members = self._firsts[:, None] + np.arange(self._size)
        return members[members < ends[:, None]]

    @property
    def waiting(self) -> int:
        """Samples in batches that are ready to be encoded."""
        return len(self._ready) * self._size

    @property
    def is_idle(self) -> bool:
        """No batch is being put together, waits, or is lent."""
        return not (self._begun or self._ready or self._lent)

    def add(self, batch: LoadedBatch) -> None:
        """Copy from a loaded batch what encode batches of this cache need."""
        numbers = batch.work.numbers
        part = self._parts[batch.work.part]
        first = part.offset + (numbers.start - part.offset) // self._size * self._size
        for start in range(first, numbers.stop, self._size):
            stop = min(start + self._size, part.offset + part.count)
            work = ReadTask(key=start, part=batch.work.part, numbers=range(start, stop))
            begun = self._begun.get(start)
            if begun is None:
                if not self.wanted(work):
                    continue
                begun = self._begun[start] = self._begin(work, batch.arrays)
            self._copy(batch, begun)
            if begun.arrived == len(begun.work.numbers):
                self._end(begun)

    def _begin(self, work: ReadTask, like: Sample) -> _OpenBatch:
        if self._free and not self._ragged:
            arrays = self._free.pop()
        else:
            shapes = {name: (self._size, *array.shape[1:]) for name, array in like.items()}
            arrays = private_arrays(self._schema, shapes)
        return _OpenBatch(work, arrays, np.zeros(self._size, bool))

    def _copy(self, batch: LoadedBatch, begun: _OpenBatch) -> None:
        numbers, first = batch.work.numbers, begun.work.numbers.start
        low, high = max(numbers.start, first), min(numbers.stop, begun.work.numbers.stop)
        for name, array in begun.arrays.items():
            source = batch.arrays[name]
            array[low - first : high - first] = source[low - numbers.start : high - numbers.start]
        begun.filled[low - first : high - first] = [not self._is_bad(number) for number in range(low, high)]
        begun.arrived += high - low

    def _end(self, begun: _OpenBatch) -> None:
        if not begun.filled.all():
            for array in begun.arrays.values():
                array[~begun.filled] = 0
        del self._begun[begun.work.key]
        self._ready.append(LoadedBatch(work=begun.work, arrays=begun.arrays))

    def flush(self) -> None:
        """Complete the batches of which nothing more will come: the rest of their members was set aside."""
        for begun in [*self._begun.values()]:
            self._end(begun)

    def lend(self, encoding: EncodeStage) -> None:
        """Hand batches to an encoder while it takes any."""
        while self._ready:
            batch = self._ready[0]
            self._lent[batch.work.key] = batch
            if not encoding.take(batch):
                del self._lent[batch.work.key]
                return
            self._ready.popleft()

    def release(self, batch: LoadedBatch) -> None:
        """See `BatchOwner`."""
        if batch.last:
            self.done(batch.work)

    def done(self, work: ReadTask) -> None:
        """See `WorkQueue`; the memory of the batch is used again."""
        batch = self._lent.pop(work.key)
        if not self._ragged and len(self._free) < _KEPT:
            self._free.append(batch.arrays)

    def give_back(self, work: ReadTask, *, avoid: int = -1) -> None:
        """Lend a batch again: its encoder was lost."""
        del avoid
        self._ready.appendleft(self._lent.pop(work.key))


# ----------------------------------------------------------------------------------------------------------
# The stages of a run, for several caches.


class SeveralEncoders:
    """An `EncodeStage` that gives what is read to the encoder of each cache.

    Args:
        stages: Of each cache.
        assemblies: The batches of each.
        builder: Of the run.
        reading: Where samples come from.
    """

    def __init__(
        self,
        stages: Sequence[EncodeStage],
        assemblies: Sequence[BatchAssembly],
        builder: StageBuilder,
        reading: SampleFeed,
    ) -> None:
        self._stages, self._assemblies, self._reading = stages, assemblies, reading
        self._most = builder.samples_at_once
        self._epoll: select.epoll | None = None
        self.clock = builder.clock

    @property
    def hungry(self) -> bool:
        """See `EncodeStage`. All of them: with more samples, the slowest would be no faster."""
        return all(stage.hungry for stage in self._stages)

    @property
    def is_idle(self) -> bool:
        """Everything that was read is encoded, if nothing more is read."""
        return all(assembly.is_idle for assembly in self._assemblies)

    def take(self, batch: LoadedBatch) -> bool:
        """See `EncodeStage`. The arrays are copied, so that reading continues at once."""
        if any(assembly.waiting >= self._most for assembly in self._assemblies):
            return False
        for assembly in self._assemblies:
            assembly.add(batch)
        self._reading.release(batch)
        self._lend()
        return True

    def _lend(self) -> None:
        for stage, assembly in zip(self._stages, self._assemblies, strict=True):
            assembly.lend(stage)

    def results(self) -> list[EncodedRecords]:
        """See `EncodeStage`; each with the place of its cache."""
        if self._reading.finished:
            for assembly in self._assemblies:
                assembly.flush()
                assembly.is_read = True
        self._lend()
        return [
            replace(encoded, cache=place)
            for place, stage in enumerate(self._stages)
            for encoded in stage.results()
        ]

    def watch(self, fd: int) -> int:
        """See `EncodeStage`."""
        children = [own for stage in self._stages if (own := stage.watch(-1)) >= 0]
        if not children:
            return fd
        self._epoll = select.epoll()
        for one in [*children, *([fd] if fd >= 0 else [])]:
            self._epoll.register(one, select.EPOLLIN)
        return self._epoll.fileno()

    def wait(self, timeout_s: float) -> None:
        """See `EncodeStage`."""
        pairs = zip(self._stages, self._assemblies, strict=True)
        if self._epoll is not None and not any(stage.hungry and batches.waiting for stage, batches in pairs):
            self._epoll.poll(timeout_s)

    def processor_s(self) -> float:
        """See `EncodeStage`."""
        return sum(stage.processor_s() for stage in self._stages)

    def close(self) -> None:
        """See `EncodeStage`."""
        for stage in self._stages:
            stage.close()
        if self._epoll is not None:
            self._epoll.close()


class _SharedFeed:
    """A `SampleFeed` that is finished when everything is read, and encoded for every cache."""

    def __init__(self, inner: SampleFeed, encoding: SeveralEncoders) -> None:
        self._inner, self._encoding = inner, encoding

    @property
    def pool(self) -> WorkerPool | None:
        return self._inner.pool

    @property
    def reading(self) -> bool:
        return self._inner.reading

    @property
    def finished(self) -> bool:
        return self._inner.finished and self._encoding.is_idle

    def poll(self, timeout_s: float) -> list[LoadedBatch]:
        return self._inner.poll(timeout_s)

    def release(self, batch: LoadedBatch) -> None:
        self._inner.release(batch)

    def views(self) -> list[WorkerView]:
        return self._inner.views()

    def close(self) -> None:
        self._inner.close()


class _SeveralWriters:
    """A `WriteStage` that has a writer for each cache."""

    def __init__(self, writers: Sequence[WriteStage]) -> None:
        self.writers = writers

    @property
    def written(self) -> int:
        return sum(writer.written for writer in self.writers)

    @property
    def copied(self) -> int:
        return sum(writer.copied for writer in self.writers)

    @property
    def shard_fill(self) -> tuple[int, int]:
        return max((writer.shard_fill for writer in self.writers), key=lambda fill: fill[0] / max(1, fill[1]))

    @property
    def bytes(self) -> int:
        return sum(writer.bytes for writer in self.writers)

    def offer(self, encoded: EncodedRecords, timeout_s: float) -> bool:
        return self.writers[encoded.cache].offer(encoded, timeout_s)

    def catch_up(self) -> None:
        for writer in self.writers:
            writer.catch_up()

    def check(self) -> None:
        for writer in self.writers:
            writer.check()

    def close(self) -> None:
        """Close all, whatever one of them says; the first error is raised then."""
        first: StokerError | None = None
        for writer in self.writers:
            try:
                writer.close()
            except StokerError as error:
                first = first or error
        if first is not None:
            raise first

    def abandon(self) -> None:
        for writer in self.writers:
            writer.abandon()


class _AllFailures:
    """Failures of several caches, for the progress display."""

    def __init__(self, ledgers: Sequence[SampleLedger]) -> None:
        self._ledgers = ledgers

    @property
    def failures(self) -> Sequence[Failure]:
        return [failure for ledger in self._ledgers for failure in ledger.failures]


def _set_aside_in_all(ledgers: Sequence[SampleLedger], failures: Sequence[Failure]) -> None:
    for ledger in ledgers:
        ledger.take_over(failures)


class SeveralBuilder(StageBuilder):
    """Reads for several caches; each has a builder of its own for what encodes and writes.

    Args:
        shares: What each cache lacks, of one source; as `plan_run` returns them.
    """

    def __init__(self, shares: Sequence[EncodeShare]) -> None:
        self._shares = shares
        self._builders = [
            StageBuilder(
                share.source,
                share.encoder,
                share.folder,
                share.settings,
                missing=share.missing,
                interrupts=share.interrupts,
                adopted=share.adopted,
            )
            for share in shares
        ]
        first = shares[0]
        schema = first.source.schema()
        self._assemblies = [
            BatchAssembly(
                one.spans,
                one.folder.recipe.encode_batch.consecutive,
                one.missing,
                bad=one.ledger.is_bad,
                schema=schema,
            )
            for one in self._builders
        ]
        needed = [
            numbers[~np.isin(numbers, [*one.quarantined])]
            for one, numbers in zip(
                self._builders, (batches.needed() for batches in self._assemblies), strict=True
            )
        ]
        memory_bytes = sum(share.settings.memory_bytes for share in shares)
        super().__init__(
            first.source,
            None,
            first.folder,
            replace(first.settings, memory_bytes=memory_bytes, device="cpu", devices=()),
            missing=np.unique(np.concatenate(needed)),
            interrupts=first.interrupts,
            group=EncodeBatchSize(samples=_unit(schema, self._builders)),
        )
        self.name = ", ".join(one.name for one in self._builders)
        self._encodes = True
        sizes = (one.folder.recipe.encode_batch.samples for one in self._builders)
        self.calls_a_batch = sum(self.samples_at_once / size for size in sizes)
        self._count_children()
        self._writers: Sequence[WriteStage] = ()
        for one, batches in zip(self._builders, self._assemblies, strict=True):
            one.queue, one.clock = batches, self.clock

    def _count_children(self) -> None:
        self.children = tuple(device for one in self._builders for device in one.children)

    def _new_ledger(
        self, bad: Iterable[int], quarantine: Callable[[Sequence[Failure]], None]
    ) -> SampleLedger:
        """Return the ledger of reading: what it sets aside is set aside in every cache that lacks it."""
        del bad, quarantine
        aside = {number for one in self._builders for number in one.quarantined}
        ledgers = [one.ledger for one in self._builders]
        return super()._new_ledger(
            aside.difference(self.missing.tolist()), partial(_set_aside_in_all, ledgers)
        )

    def totals(self) -> RunTotals:
        """See `StageBuilder`; in records of all caches."""
        each = [one.totals() for one in self._builders]
        return RunTotals(
            name=self.name,
            total=sum(one.total for one in each),
            missing=sum(one.missing for one in each),
            quarantined=sum(one.quarantined for one in each),
            adopted=sum(one.adopted for one in each),
            caches=len(each),
            device=", ".join(dict.fromkeys(one.device for one in each)),
        )

    def head_start(self) -> HeadStart | None:
        """See `StageBuilder`."""
        here = all(can_begin_in_process(one.settings) for one in self._builders)
        return super().head_start() if here else None

    def prepare_children(self) -> bool:
        """See `StageBuilder`."""
        ready = [one.prepare_children() for one in self._builders]
        self._count_children()
        return all(ready)

    def keep_encoder(self) -> None:
        """See `StageBuilder`."""
        for one in self._builders:
            one.keep_encoder()
        super().keep_encoder()

    def encoding(self, feed: BatchOwner, *, compare_first: bool = True) -> EncodeStage:
        """See `StageBuilder`."""
        return self._together(
            feed, [partial(one.encoding, compare_first=compare_first) for one in self._builders]
        )

    def encoding_here(self, feed: BatchOwner, *, compare_first: bool) -> EncodeStage:
        """See `StageBuilder`."""
        return self._together(
            feed, [partial(one.encoding_here, compare_first=compare_first) for one in self._builders]
        )

    def gathering(self, inner: EncodeStage, feed: BatchOwner) -> EncodeStage:
        """The same: each cache gathers its own samples by length."""
        return inner

    def _together(
        self, feed: BatchOwner, begin: Sequence[Callable[[BatchOwner], EncodeStage]]
    ) -> EncodeStage:
        stages: list[EncodeStage] = []
        parts = zip(self._builders, self._shares, self._assemblies, begin, strict=True)
        try:
            for one, share, batches, start in parts:
                stage = one.gathering(start(batches), batches)
                stages.append(stage if share.encoder is None else one.recognizing(stage, share.same))
        except BaseException:
            for stage in stages:
                stage.close()
            raise
        self._count_children()
        self.clock.lanes = max(1, len(self.children))
        return SeveralEncoders(stages, self._assemblies, self, cast("SampleFeed", feed))

    def stages(self, feed: SampleFeed, encoding: EncodeStage, writer: WriteStage) -> RunStages:
        """See `StageBuilder`."""
        assert isinstance(encoding, SeveralEncoders)
        return replace(
            super().stages(_SharedFeed(feed, encoding), encoding, writer),
            ledger=_AllFailures([one.ledger for one in self._builders]),
            in_process=feed.pool is None or not all(one.children for one in self._builders),
        )

    def writer(self) -> WriteStage:
        """See `StageBuilder`."""
        self._writers = [one.writer() for one in self._builders]
        return _SeveralWriters(self._writers)

    def leave_device(self) -> None:
        """See `StageBuilder`."""
        for one in self._builders:
            one.leave_device()

    def close(self) -> None:
        """See `StageBuilder`."""
        for one in self._builders:
            one.close()
        super().close()

    def outcomes(self, done: ShareOutcome) -> Iterator[ShareOutcome]:
        """Return the part of each cache in what came of the run."""
        for one, writer in zip(self._builders, self._writers, strict=True):
            yield replace(
                done,
                encoded=writer.written - writer.copied,
                adopted=writer.copied,
                failures=tuple(one.ledger.failures),
            )


def _unit(schema: Schema, builders: Sequence[StageBuilder]) -> int:
    """Return how many samples are read at a time: at most the largest encode batch, and 64 MiB."""
    largest = max(one.folder.recipe.encode_batch.consecutive for one in builders)
    if any(field.ragged for field in schema.values()):
        return 1
    return max(1, min(largest, _UNIT_BYTES // max(1, sum(field.size_bytes() for field in schema.values()))))


def encode_together(shares: Sequence[EncodeShare], sink: ProgressSink | None) -> list[ShareOutcome]:
    """Encode what several caches of one source lack, in this process and in children of it.

    Args:
        shares: One for each cache, each with its encoder, folder, settings and missing samples.
        sink: Where progress goes; None: nowhere.

    Returns:
        What came of each share.

    Raises:
        StokerError: As `run_precompute`.
    """
    shares, pacing = plan_run(shares, sink)
    builder = SeveralBuilder(shares)
    reading = replace(shares[0], encoder=None, settings=builder.settings, missing=builder.missing, same=None)
    try:
        return [*builder.outcomes(run_stages(builder, sink, reading, pacing))]
    finally:
        builder.close()
