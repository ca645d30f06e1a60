"""One run on this machine: build its stages from source, encoder, folder and settings, and run them."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from stoker.encoders.protocol import EncodeBatchSize, Encoder
from stoker.encoders.weights import on_device, weights_device
from stoker.errors import DeviceError, EncoderError, Interrupted, ResourceError, SourceError, StokerError
from stoker.plan.resources import Resources, probe, resolve_device
from stoker.precompute.arena import Layout, plan_layout, slot_size
from stoker.precompute.by_length import LengthStage, check_lengths, gatherer_of
from stoker.precompute.checks import fit_copies, fit_memory, predict_worker_bytes
from stoker.precompute.encode import (
    PRECISION,
    BatchEncoder,
    EncodeClock,
    EncodeStage,
    TorchState,
)
from stoker.precompute.encoder_processes import (
    EncoderLaunch,
    EncoderProcesses,
    EncodeTask,
    SampleRecognizer,
    stored,
)
from stoker.precompute.in_process import (
    InProcessEncoder,
    InProcessReader,
    ReadingPosition,
    ReadWatch,
    ask_encoder,
    call_encoder,
    encode_pool,
)
from stoker.precompute.loop import (
    PrecomputeLoop,
    RunStages,
    RunTotals,
    WorkerPacing,
    WriteStage,
    WriteThread,
)
from stoker.precompute.progress import ProgressSink
from stoker.precompute.queue import BatchOwner, PartSpan, SampleFeed, SampleLedger, WorkerMemory, WorkQueue
from stoker.precompute.settings import EncodeShare, PrecomputeSettings, ShareOutcome
from stoker.precompute.worker import ChangeGuard, PartNames, SampleReader, digested_files, load_guard
from stoker.precompute.workers import Supervisor, WorkerLaunch
from stoker.runtime.mounts import are_local
from stoker.runtime.processes.child import LIGHT, TORCH, Drain, is_preloaded, preload, start_method
from stoker.runtime.signals import Interrupts
from stoker.schema import Schema, with_lengths
from stoker.sources.files import confined_sources
from stoker.sources.pickling import estimate_pickle_bytes, pickle_for_process
from stoker.sources.protocol import LocatableSource, SelfCheckingSource, Source
from stoker.sources.splits import whole_source
from stoker.sources.torch_dataset import TorchSource, preserve_random_state
from stoker.store import Failure, Folder, WriterSettings
from stoker.store.cache import fill_blocks
from stoker.store.folder import SampleLookup
from stoker.store.recipe import Recipe
from stoker.units import MIB, format_bytes

# ----------------------------------------------------------------------------------------------------------
# Build the stages.


log = logging.getLogger("stoker")

LOG_FOLDER = ".workers"
_MAKE_LATE_HINT = "Make what it holds of that kind at its first call"
_LOGS_KEPT_S = 24 * 3600
_RAGGED_GROUP_BYTES = 1024**2
_ARENA_SHARE = 0.75
FEW_GROUPS = 16
"""Encode batches that start no child: at most 128 MiB of samples and records by default.

Many encoders take those in the second or two that the first child of a program needs to import torch.
"""
SMALL_ENCODER_BYTES = 64 * MIB
"""A larger one is not pickled for a child that may not be needed: a child encodes from the beginning."""
_CHILD_BYTES = 512 * MIB
"""Memory that an encoder process must find free: a torch of its own, and the one that it is forked from."""
_ESTIMATE_FROM_S = 0.1
"""Seconds after which the rest is first estimated."""
_RELIABLE_AFTER_S = 0.5
"""Seconds after which the estimate is used as it is. Before that the rest must be longer."""
_TORCH_FACTOR = 2.0
"""Factor on the start time of children that import torch: the import also keeps a core busy."""
_FORKED_FACTOR = 0.25
"""The same of children that can be forked at once, because their imports are done by now."""
_TELLING_BATCHES = 2
"""Batches that were encoded before an encoder can be called quick."""
_GROUPS_A_WORKER = 8
"""Fewer are read before another worker has started."""


class StageBuilder:
    """Everything a run needs, made once; the stages are made from it in the order that suits the caller."""

    def __init__(  # noqa: PLR0913  what a run is made of, by name
        self,
        source: Source,
        encoder: Encoder | None,
        folder: Folder,
        settings: PrecomputeSettings,
        *,
        missing: NDArray[np.int64],
        interrupts: Interrupts | None = None,
        rehearsal: bool = False,
        here_until: float | None = None,
        group: EncodeBatchSize | None = None,
        adopted: int = 0,
    ) -> None:
        """Prepare a run.

        Args:
            source, encoder, folder, settings, missing, interrupts, adopted: As of `EncodeShare`.
            rehearsal: Nothing is quarantined, and no guardian is told.
            here_until: See `EncodeShare`; no child is needed then.
            group: What is read at a time; None: an encode batch of the recipe.
        """
        self.folder = folder
        self._group = group or folder.recipe.encode_batch
        device = "cpu" if encoder is None else str(resolve_device(settings.device))
        self.settings = settings = replace(settings, device=device)
        self.missing = missing
        self._adopted = adopted
        self.name = folder.name
        self.logs = folder.path.parent.parent / LOG_FOLDER
        self._mark = (
            self.logs / f"begun-here-{folder.name}-{folder.recipe.fingerprint}-{settings.part[0]}.txt"
        )
        self.clock = EncodeClock(page=None) if rehearsal else EncodeClock()
        self._interrupts = interrupts or Interrupts()
        self._here_until = here_until
        self._source = source
        self._encoder = encoder
        self._home = None if encoder is None else weights_device(encoder)
        self._schema = source.schema()
        recipe = folder.recipe
        self._ragged = any(spec.ragged for spec in self._schema.values())
        _check_group(self._group, self._schema)
        self.quarantined = set(folder.failures()).difference(missing.tolist())
        self._parts = _part_names(recipe, source)
        # No method of ours: in a cycle, this would hold the folder's lock until the collector comes by.
        note = partial(_note_failures, folder, self._kinds_noted(rehearsal=rehearsal))
        self.ledger = self._new_ledger(self.quarantined, note)
        self.spans = [PartSpan(offset=part.offset, count=part.count) for part in recipe.parts]
        self.samples_at_once = size = self._samples_at_once()
        self.queue = WorkQueue(self.spans, size, missing, bad=self.ledger.is_bad)
        self._reading = ChangeGuard(source, digested_files(recipe.refs, recipe.files), self._parts.offsets)
        group_bytes = _RAGGED_GROUP_BYTES if self._ragged else slot_size(self._schema, size)
        self.queue.follow_runs(source.runs(), group_bytes)
        if settings.by_blocks:
            self.queue.follow_blocks(fill_blocks(recipe))
        self._layout, self._first_workers, self.most_workers = self._plan()
        self.children = () if rehearsal else self._devices_of_children()
        """Devices on which a child encodes."""
        self.largest_read_bytes = 0
        """Of the ragged samples that this process has read; 0: none."""
        self.calls_a_batch = 1.0
        """Calls of encoders for what is read at a time."""
        self._encodes = encoder is not None
        self._encoded_here = False
        self._pickled: bytes | None = None
        self._wanted: set[tuple[str, ...]] = set()
        """Modules of the processes that children are forked from, once these are started."""
        self.gatherer = gatherer_of(recipe, self._schema, settings)
        self._digests: dict[int, NDArray[np.uint64]] = {}
        self._encoders: EncoderLaunch | None = None
        """Made before this process first called the encoder, for the child that follows."""

    def _new_ledger(
        self, bad: Iterable[int], quarantine: Callable[[Sequence[Failure]], None]
    ) -> SampleLedger:
        missing, count = self.missing, self.folder.recipe.count
        wanted = set(missing.tolist()) if len(missing) < count else range(count)
        return SampleLedger(
            bad,
            quarantine=quarantine,
            wanted=wanted.__contains__,
            allowed=self.settings.max_quarantined * count,
            place=self._parts.place,
            nan=self.settings.nan,
        )

    def totals(self) -> RunTotals:
        """Return what the progress display begins with."""
        settings, missing = self.settings, len(self.missing)
        return RunTotals(
            name=self.name,
            total=self.folder.recipe.count if settings.part[1] == 1 else missing,
            missing=missing,
            quarantined=len(self.quarantined),
            adopted=self._adopted if settings.part[1] == 1 else 0,
            device=", ".join(settings.devices) or settings.device,
        )

    def _samples_at_once(self) -> int:
        """Return how many samples are handed out at a time: an encode batch, or less if one is slow to read.

        Without an encoder, no bit depends on it. With small parts a kill loses little, progress is seen,
        and more workers share a small set. Blocks of the filling order still end where parts do.
        """
        size, source = self._group.consecutive, whole_source(self._source)
        if self._encoder is not None or not isinstance(source, TorchSource):
            return size
        most = min(size, _LONGEST_READ_S / max(source.seconds_per_item, 1e-9))
        return next(n for n in range(max(1, int(most)), 0, -1) if size % n == 0)

    def _kinds_noted(self, *, rehearsal: bool) -> tuple[str, ...]:
        """Return the kinds of failures that are quarantined, without those that another process retries."""
        if rehearsal:
            return ()
        if self._here_until is None:
            return ("sample", "transient")
        return () if self.settings.retry_quarantined else ("sample",)

    def _devices_of_children(self) -> tuple[str, ...]:
        """Return the devices on which a child encodes; none where this process encodes.

        This process encodes few batches, where memory is short for a second torch, and on systems that cannot
        watch a child. An encoder that cannot be sent to a child is noticed later.
        """
        settings, groups = self.settings, self.queue.groups
        if self._encoder is None or sys.platform != "linux":
            return ()
        if len(settings.devices) > 1:
            return settings.devices if len(settings.devices) < groups else ()
        few = groups <= FEW_GROUPS and not settings.always_in_child
        return () if few or probe().host_bytes < _CHILD_BYTES else (settings.device,)

    def _plan(self) -> tuple[Layout, int, int]:
        """Return the layout of each arena, workers to start with, and the limit by room and work."""
        settings, group = self.settings, self._group
        memory = int(settings.memory_bytes * _ARENA_SHARE)
        asked = settings.workers
        share = memory // (asked or 2)
        layout = plan_layout(self._schema, group.consecutive, group.steps, share)
        most = max(1, memory // layout.flight_bytes)
        if asked is None:
            return layout, min(1, self.queue.groups), min(most, self.queue.groups)
        return layout, min(asked, most, self.queue.groups), asked

    def feed(self, *, cores: int = 1) -> SampleFeed:
        """Return started workers; or this process itself.

        Args:
            cores: Where the number of workers is left to us, and there is no encoder, reading is all the
                work, and begins on so many cores. With an encoder, which may be what is slow, on one.

        Raises:
            SourceError: The source cannot be sent to a worker.
        """
        if self.children:
            preload(TORCH)
        if self._first_workers == 0:
            return self._reader(self._reading, ReadingPosition())
        self._make_logs()
        feed = Supervisor(self._launch(), self.queue, self.ledger, settings=self.settings, parts=self._parts)
        try:
            feed.start(self._first_workers if self.children else self._at_once(cores))
        except BaseException:
            feed.close()
            raise
        return feed

    def _reader(self, reading: ChangeGuard, position: ReadingPosition) -> InProcessReader:
        """Return what reads in this process."""
        samples = SampleReader(
            reading, self._schema, self._parts.offsets, heartbeat=position, nan=self.settings.nan
        )
        return InProcessReader(
            samples,
            self._layout,
            self.queue,
            self.ledger,
            position=position,
            interrupts=self._interrupts,
            encodes=self._encodes,
        )

    def head_start(self) -> HeadStart | None:
        """Return what reads and encodes in this process before there are children; None: start with children.

        It needs the main thread and local files, where a read that hangs can be ended. On a GPU, this process
        must use it already: memory that it takes there is freed only when it ends. None if the last
        program ended during it, since a sample may have crashed that. A copy of the source reads, so
        that what it opens is not sent to workers later. A Dataset that holds much is not copied:
        `TorchSource` opens files in a shallow copy anyway.
        """
        if (
            not can_begin_in_process(self.settings)
            or not self._interrupts.can_stall
            or not are_local(file.path for files in self.folder.recipe.refs for file in files)
            or self._mark.exists()
        ):
            return None
        large = estimate_pickle_bytes(self._source) > _SMALL_SOURCE_BYTES
        if large and not isinstance(whole_source(self._source), TorchSource):
            return None
        if self._here_until is None and not self.prepare_children():
            return None
        payload = None if large else self._payload()[0]
        try:
            self._make_logs()
            self._mark.touch()
        except OSError:
            return None
        limits = self.settings.timeouts
        position = ReadingPosition(limit_s=2 * max(limits.open, limits.read))
        reading = self._reading if payload is None else self._copied(payload, position)
        if reading is None:
            self.forget_head()
            return None
        return HeadStart(self, self._reader(reading, position), position, until=self._here_until)

    def prepare_children(self) -> bool:
        """Pickle what children encode with, before a call here may leave in it what cannot be sent.

        False: the encoder is so large that this process should not encode first.
        """
        if not self.children:
            return True
        if estimate_pickle_bytes(self._encoder) > SMALL_ENCODER_BYTES:
            return False
        self._encoders = self._launch_of_encoders(compare_first=False)
        if self._encoders is None:
            self.children = ()
        return True

    def _copied(self, payload: bytes, position: ReadingPosition) -> ChangeGuard | None:
        """Return the source as a worker gets it; None where it cannot be loaded, which a worker explains."""
        position.write("open")
        try:
            with self.watch(position), self._interrupts.raising():
                return load_guard(payload)
        except (Exception, Interrupted):  # noqa: BLE001  an error of the source's own code, a timeout, a signal
            return None
        finally:
            position.write("wait")

    def forget_head(self) -> None:
        """Remove the mark: this process survived its head start, or workers have read instead.

        A mark that stays does no harm: the next run begins with workers.
        """
        with suppress(OSError):
            self._mark.unlink()

    def is_ready(self) -> bool:
        """Return True if children can be forked at once; what they are forked from is started."""
        if not self._wanted:
            self._wanted = {self._payload()[1]} | ({TORCH} if self.children else set())
            for one in self._wanted:
                preload(one)
        return all(map(is_preloaded, self._wanted))

    @property
    def needs_torch(self) -> bool:
        """True if the first children have to wait until a process has imported torch."""
        return bool(self.children) or isinstance(whole_source(self._source), TorchSource)

    @property
    def seconds_for_children(self) -> float:
        """Seconds spent in the encoder here that a child could have spent; 0 where none encodes."""
        return self.clock.seconds if self.children else 0.0

    def check_source(self) -> None:
        """Have a source that can check itself in a child do so, before workers read it."""
        if self.settings.workers != 0 and isinstance(self._source, SelfCheckingSource):
            with self._interrupts.raising():
                self._source.check_in_child()

    def watch(self, position: ReadingPosition) -> ReadWatch:
        """Return what interrupts a read of this process that hangs."""
        return ReadWatch(position, self.settings.timeouts, self._interrupts, self.logs)

    def _at_once(self, cores: int) -> int:
        if self.settings.workers is not None:
            return self._first_workers
        useful = min(cores, self.most_workers, self.queue.groups // _GROUPS_A_WORKER)
        # Of ragged samples none may have been read. Then one worker shows what a worker holds.
        if useful > 1 and (self.largest_read_bytes or not self._ragged):
            largest = self.largest_read_bytes
            held = predict_worker_bytes(self._schema, largest, at_most=True)
            each = held + max(self._layout.flight_bytes, self._layout.arena_bytes + largest)
            memory = WorkerMemory(workers=0, largest_bytes=held, growth_bytes=0, next_bytes=each)
            useful = min(useful, memory.fitting(probe().host_bytes))
        return max(self._first_workers, useful)

    def _payload(self) -> tuple[bytes, tuple[str, ...]]:
        """Return the source as workers get it, and what they import.

        Raises:
            SourceError: The source cannot be sent to a worker.
        """
        if self._pickled is None:
            self._pickled = pickle_for_process(self._reading)
        # What a pickle names it will import. A worker that needs torch all the same imports it then.
        return self._pickled, TORCH if b"torch" in self._pickled else LIGHT

    def _launch(self) -> WorkerLaunch:
        payload, modules = self._payload()
        self._pickled = None
        frame = {
            "kind": "start",
            "confined": confined_sources(),
            "layout": self._layout.to_json(),
            "offsets": list(self._parts.offsets),
            "nan": self.settings.nan,
        }
        return WorkerLaunch(
            payload=payload,
            frame=frame,
            layout=self._layout,
            logs=self.logs,
            drain=Drain(),
            modules=modules,
        )

    def _make_logs(self) -> None:
        """Make the folder for workers' output; what is there from more than a day ago goes."""
        self.logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in self.logs.glob("*.txt"):
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > _LOGS_KEPT_S:
                    path.unlink()

    def keep_encoder(self) -> None:
        """Keep the encoder in this process to the end: no child will encode."""
        self.children = ()
        self._release_launch()

    def _release_launch(self) -> None:
        if self._encoders is not None:
            os.close(self._encoders.task_fd)
            self._encoders = None

    def close(self) -> None:
        """Release what no child needed, and the folder of logs unless a process was lost."""
        self._release_launch()
        with suppress(OSError):
            self.logs.rmdir()

    def encoder(self) -> BatchEncoder:
        """Return the encoder on its device, from which `leave_device` brings it back.

        Getting there has the timeout of one of its calls.
        """
        self._encoded_here = True
        encoder = BatchEncoder(
            self._encoder,
            self.folder.recipe,
            self._schema,
            device=self.settings.device,
            nan=self.settings.nan,
            clock=self.clock,
        )
        self._move(torch.device(self.settings.device))
        return encoder

    def _move(self, device: torch.device) -> None:
        if (encoder := self._encoder) is None:
            return
        ask_encoder(
            lambda: encoder.to(device),
            timeout_s=self.settings.timeouts.encode,
            logs=self.logs,
            what=f"on its way to {device}",
            clock=self.clock,
            interrupts=self._interrupts,
        )

    def encoding(self, feed: BatchOwner, *, compare_first: bool = True) -> EncodeStage:
        """Return the started stage that encodes: a child for each device, or this process.

        Args:
            compare_first: See `BatchEncoder`; needless, and twice the time, for single groups of a cache.
        """
        launch, self._encoders = self._encoders, None
        if self.children and (launch := launch or self._launch_of_encoders(compare_first)) is not None:
            try:
                return EncoderProcesses(
                    self.children,
                    replace(launch, compare_first=compare_first),
                    feed=feed,
                    queue=self.queue,
                    ledger=self.ledger,
                    clock=self.clock,
                )
            except ResourceError as error:
                if len(self.children) > 1:
                    raise
                log.warning("%s: the encoder runs in this process: %s", self.name, error)
        self.children = ()
        return self.encoding_here(feed, compare_first=compare_first)

    def encoding_here(self, feed: BatchOwner, *, compare_first: bool) -> EncodeStage:
        """Return what encodes in this process."""
        encoder = self.encoder()
        encoder.clock.limit_s = self.settings.timeouts.encode
        encoder.compare_first = compare_first
        call = partial(
            call_encoder,
            clock=self.clock,
            timeout_s=self.settings.timeouts.encode,
            logs=self.logs,
            interrupts=self._interrupts,
            pool=encode_pool(),
        )
        return InProcessEncoder(encoder, call, feed, self.queue, self.ledger)

    def _launch_of_encoders(self, compare_first: bool) -> EncoderLaunch | None:
        """Return what children encode with; None where the encoder cannot be sent to another process.

        Raises:
            SourceError: It cannot, and is to encode on several devices.
        """
        assert self._encoder is not None
        recipe, limits = self.folder.recipe, self.settings.timeouts
        task = EncodeTask(
            encoder=self._encoder,
            recipe=recipe,
            schema=self._schema,
            nan=self.settings.nan,
            state=TorchState.of_caller(),
        )
        several = len(self.children) > 1
        hint = "Or encode on one device" if several else _MAKE_LATE_HINT
        try:
            with on_device(self._encoder, torch.device("cpu")):
                payload = pickle_for_process(task, "encoder", otherwise=hint)
        except SourceError as error:
            if several:
                raise
            log.warning(
                "%s: the encoder runs in this process, where a call that hangs cannot be ended: %s",
                self.name,
                error,
            )
            return None
        self._make_logs()
        return EncoderLaunch(
            task_fd=stored(payload),
            samples=with_lengths(self._schema) if recipe.encode_batch.lengths else self._schema,
            records=recipe.encoded,
            start_s=limits.start,
            limit_s=limits.encode,
            compare_first=compare_first,
            logs=self.logs,
            cache=self.name,
        )

    def recognizing(self, inner: EncodeStage, same: SampleLookup | None) -> EncodeStage:
        """Return the same, which keeps back samples that sibling caches have records of."""
        recipe = self.folder.recipe
        return SampleRecognizer(
            inner, same, queue=self.queue, recipe=recipe, schema=self._schema, digests=self._digests
        )

    def gathering(self, inner: EncodeStage, feed: BatchOwner) -> EncodeStage:
        """Return the same, with samples gathered by length where the recipe has them padded."""
        return inner if self.gatherer is None else LengthStage(inner, self.gatherer, feed, self.queue)

    def leave_device(self) -> None:
        """Put the encoder back where it was, and free the memory of a GPU: a model will need it next.

        An encoder in children never left; one that is still at a call which was given up stays where it is.
        """
        if self._home is not None and self._encoded_here and not self.clock.given_up:
            self._move(self._home)
            self._encoded_here = False
            if self.settings.device.startswith("cuda"):
                torch.cuda.empty_cache()

    def writer(self) -> WriteStage:
        """Return the writer thread, started."""
        settings = self.settings
        kept = WriterSettings(
            max_error=settings.max_error,
            compression=settings.compression,
            device=settings.device,
            float32=PRECISION,
            early=settings.by_blocks,
            commit_after_s=settings.commit_after_s,
        )
        return WriteThread(
            self.folder.writer(kept),
            self.folder.path,
            limit_bytes=int(settings.memory_bytes * (1 - _ARENA_SHARE)),
            timeout_s=settings.timeouts.write,
        )

    def stages(self, feed: SampleFeed, encoding: EncodeStage, writer: WriteStage) -> RunStages:
        """Return all stages of the run together."""
        return RunStages(
            feed=feed,
            ledger=self.ledger,
            encoding=encoding,
            writer=writer,
            in_process=not self.children or feed.pool is None,
        )


def commit(writer: WriteStage) -> None:
    """Commit what was handed over, also when the run fails: the error under way is what counts."""
    with suppress(StokerError):
        writer.close()


class HeadStart:
    """Reads in this process, and knows when that is enough.

    The first child of a program takes seconds to import what it needs. Small sets are read and encoded by
    then; of others, the first groups are.
    """

    def __init__(
        self,
        builder: StageBuilder,
        reader: InProcessReader,
        position: ReadingPosition,
        *,
        until: float | None,
    ) -> None:
        self.reader = reader
        self.watch = builder.watch(position)
        self._builder = builder
        self._until = until
        self._begun = time.monotonic()

    def is_enough(self) -> bool:
        """Return True if children are worth their start, and can be forked at once, or a read hung."""
        if not self.reader.between_samples:
            return False
        now, queue, part_read = time.monotonic(), self._builder.queue, self.reader.part_read
        if self.reader.stalled:
            return True
        elapsed_s = now - self._begun
        if elapsed_s < _ESTIMATE_FROM_S:
            return False
        if self._until is not None:  # another process continues, and takes as long to start as a child
            if is_longer := queue.is_worth_a_start(elapsed_s, part_read=part_read):
                preload(TORCH)
            return is_longer and now >= self._until
        builder, batches = self._builder, self._builder.clock.batches / self._builder.calls_a_batch
        if batches >= _TELLING_BATCHES and not queue.is_worth_a_start(
            builder.seconds_for_children, times=_TORCH_FACTOR, batches=batches
        ):
            builder.keep_encoder()
        margin = max(1.0, _RELIABLE_AFTER_S / elapsed_s)
        if builder.needs_torch:
            margin *= _TORCH_FACTOR
        elif start_method() == "fork" and is_preloaded(LIGHT):  # a large file was digested, or children ran
            margin *= _FORKED_FACTOR
        # Writing stays in this process: a set in memory, whose samples are only copied, gains nothing.
        seconds = self.reader.seconds + builder.seconds_for_children
        return queue.is_worth_a_start(seconds, part_read=part_read, times=margin) and builder.is_ready()


def can_begin_in_process(settings: PrecomputeSettings) -> bool:
    """Return True if these settings let the calling process encode first; on a GPU, if it uses that."""
    if settings.workers is not None or settings.always_in_child or len(settings.devices) > 1:
        return False
    device = settings.device
    if device == "cpu" or not torch.cuda.is_available():
        return True
    used = None if device in ("auto", "cuda") else device
    return torch.cuda.is_initialized() and torch.cuda.memory_reserved(used) > 0


def _note_failures(folder: Folder, kinds: tuple[str, ...], failures: Sequence[Failure]) -> None:
    """Quarantine the samples with a failure of one of these kinds."""
    folder.quarantine_many([failure for failure in failures if failure.kind in kinds])


def _check_group(group: EncodeBatchSize, schema: Schema) -> None:
    if group.lengths:
        check_lengths(group, schema)
        return
    ragged = any(spec.ragged for spec in schema.values())
    if (ragged or group.steps is not None) and group.samples != 1:
        raise EncoderError(
            f"groups of {group.samples} samples were asked for, but samples that are ragged or cut over "
            "time are encoded one by one",
            hint="Give the encoder a group of 1, or lengths that samples are padded to",
        )


def _part_names(recipe: Recipe, source: Source) -> PartNames:
    parts = zip(recipe.parts, recipe.refs, strict=True)
    return PartNames(
        offsets=[part.offset for part in recipe.parts],
        names=[str(files[0].path) if len(files) == 1 else part.name for part, files in parts],
        source=source if isinstance(source, LocatableSource) else None,
    )


# ----------------------------------------------------------------------------------------------------------
# Encode a share on this machine.
#
# The encoder runs in children (`encoder_processes.py`), few batches in this process (`in_process.py`).


_WORKERS_A_CORE = 2
"""At most: a worker that waits for storage needs no core. `WorkerPacing` parks those that do not help."""
_LONGEST_READ_S = 2.0
"""Seconds that a worker should read before it hands over what it has."""
_SMALL_SOURCE_BYTES = MIB
"""Less than that in a source does not count: the interpreter that reads it takes far more."""


def encode_here(share: EncodeShare, sink: ProgressSink | None) -> ShareOutcome:
    """Encode a share in this process, with workers of its own: the `Engine` of one machine.

    Args:
        share: What to encode, and how.
        sink: Where progress goes; None: nowhere.

    Returns:
        What was encoded, and what was set aside.

    Raises:
        StokerError: As `run_precompute`.
    """
    (share,), pacing = plan_run([share], sink)
    builder = StageBuilder(
        share.source,
        share.encoder,
        share.folder,
        share.settings,
        missing=share.missing,
        interrupts=share.interrupts,
        here_until=share.here_until,
        adopted=share.adopted,
    )
    try:
        return run_stages(builder, sink, share, pacing)
    finally:
        builder.close()


def plan_run(
    shares: Sequence[EncodeShare], sink: ProgressSink | None
) -> tuple[list[EncodeShare], WorkerPacing]:
    """Return shares of one source with the memory, workers and devices of this machine, and its pacing.

    Raises:
        ResourceError: As `fit_memory`.
    """
    source = shares[0].source
    settings, copies = _with_copies(source, shares[0].settings)
    resources = probe(path=shares[0].folder.path)
    most = useful = max(1, min(copies, _useful(resources)))
    for share in shares:
        settings, fitting = fit_memory(source.schema(), share.folder.recipe, settings, resources)
        most = min(most, fitting)
    pacing = WorkerPacing(most=most, processors=resources.cpus)
    if most < useful:
        held, free = format_bytes(predict_worker_bytes(source.schema())), format_bytes(resources.host_bytes)
        pacing.memory_bound = f"one holds at least {held}, and {free} are free ({resources.host_limit})"
    found = {"workers": settings.workers, "memory_bytes": settings.memory_bytes // len(shares)}
    placed = [replace(share, settings=replace(_on_device(share, sink), **found)) for share in shares]
    return placed, pacing


def _on_device(share: EncodeShare, sink: ProgressSink | None) -> PrecomputeSettings:
    """Return the settings with the device that `auto` stands for here."""
    settings = share.settings
    if settings.device != "auto":
        return settings
    if share.encoder is None:
        device = "cpu"
    elif sink is None:
        device = resolve_device("auto")
    else:
        device = resolve_device("auto", lambda line: sink.note(f"{share.folder.name}: {line}"))
    return replace(settings, device=str(device), devices=())


def _with_copies(source: Source, settings: PrecomputeSettings) -> tuple[PrecomputeSettings, int]:
    """Return the settings, and how many workers may have a copy of what the source holds (`fit_copies`)."""
    held = 0 if settings.workers == 0 else estimate_pickle_bytes(source)
    if held < _SMALL_SOURCE_BYTES:
        return settings, sys.maxsize
    resources = probe()
    wanted = settings.workers or _useful(resources)
    return fit_copies(held, settings, resources, wanted=wanted)


def _useful(resources: Resources) -> int:
    """Return the number of workers that the cores have use for."""
    return _WORKERS_A_CORE * int(resources.cpus)


def _why_no_more(builder: StageBuilder) -> str:
    """Return why there may be no more than `most_workers`; empty where it is the work."""
    if builder.most_workers >= builder.queue.groups:
        return ""
    return f"memory_bytes is {format_bytes(builder.settings.memory_bytes)}"


def run_stages(
    builder: StageBuilder, sink: ProgressSink | None, share: EncodeShare, pacing: WorkerPacing
) -> ShareOutcome:
    """Run the stages, and end them in an order that keeps what was encoded."""
    settings, pool = builder.settings, None
    if builder.most_workers < pacing.most:
        pacing.most, pacing.memory_bound = builder.most_workers, _why_no_more(builder)
    writer = builder.writer()
    try:
        loop = PrecomputeLoop(
            builder.totals(),
            interrupts=share.interrupts,
            sink=sink,
            pacing=pacing if settings.workers is None else None,
        )
        try:
            if settings.by_blocks and share.here_until is None:  # records are committed early
                _check_source(builder, writer)
            finished = _run_head(builder, loop, writer, share)
            if not (finished or share.here_until is not None or loop.is_over(share.lasts_s)):
                if settings.workers == 0 and sink is not None:
                    sink.note(f"{builder.name}: workers=0, reading in this process: in order, no timeouts")
                _check_source(builder, writer)
                feed = builder.feed(cores=pacing.most // _WORKERS_A_CORE)
                finished = _run_with(builder, feed, loop, writer, share)
                pool = feed.pool
                builder.forget_head()
        finally:
            builder.clock.alive(bounded=False)
            commit(writer)
        writer.check()
        builder.leave_device()
    except BaseException:
        writer.abandon()
        raise
    return ShareOutcome(
        finished=finished,
        encoded=loop.encoded,
        adopted=writer.copied,
        encode_seconds=builder.clock.seconds,
        workers=0 if pool is None else pool.workers,
        lost_workers=0 if pool is None else pool.losses,
        abandoned_workers=0 if pool is None else pool.abandoned,
        failures=tuple(builder.ledger.failures),
    )


def _check_source(builder: StageBuilder, writer: WriteStage) -> None:
    """Have a source check itself. If it fails, what was read here and is not committed is dropped."""
    try:
        builder.check_source()
    except BaseException:
        writer.abandon()
        raise


def _run_head(builder: StageBuilder, loop: PrecomputeLoop, writer: WriteStage, share: EncodeShare) -> bool:
    """Work in this process until children are worth their start and can be forked at once; True: all done."""
    if (head := builder.head_start()) is None:
        return False
    try:
        encoding: EncodeStage = builder.encoding_here(head.reader, compare_first=share.compare_first)
        encoding = builder.gathering(encoding, head.reader)
        if share.encoder is not None:
            encoding = builder.recognizing(encoding, share.same)
        stages = builder.stages(head.reader, encoding, writer)
        # Workers read with random states of their own: the caller's must not tell how many samples were here.
        with preserve_random_state(), closing(head.reader), head.watch:
            finished = loop.run(stages, lasts_s=share.lasts_s, enough=head.is_enough)
        builder.largest_read_bytes = head.reader.largest_bytes
        builder.leave_device()  # children may need its memory
    except DeviceError:
        raise  # the mark stays: the next run begins with children, each of which has a context of its own
    except BaseException:
        builder.forget_head()
        raise
    builder.forget_head()
    return finished


def _run_with(
    builder: StageBuilder, feed: SampleFeed, loop: PrecomputeLoop, writer: WriteStage, share: EncodeShare
) -> bool:
    """Run the stages with workers, or reading in this process if `workers=0`; return True if all is done."""
    with ExitStack() as ends:
        ends.enter_context(preserve_random_state())  # an encoder that is kept may set it
        ends.enter_context(closing(feed))
        encoding = ends.enter_context(closing(_encoding(builder, feed, share)))  # workers start meanwhile
        try:
            return loop.run(builder.stages(feed, encoding, writer), lasts_s=share.lasts_s)
        finally:
            builder.clock.alive(bounded=False)


def _encoding(builder: StageBuilder, feed: SampleFeed, share: EncodeShare) -> EncodeStage:
    """Return the stage that encodes; a feed that waits for workers wakes up for it, and for signals."""
    inner = builder.encoding(feed, compare_first=share.compare_first and not builder.clock.calls)
    wake_fd = inner.watch(share.interrupts.fd)
    if feed.pool is not None:
        feed.pool.wake_fd = wake_fd
    stage = builder.gathering(inner, feed)
    return stage if share.encoder is None else builder.recognizing(stage, share.same)
