"""Build the stages of a run from a source, an encoder, a folder and settings."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from stoker.encoders.protocol import Encoder
from stoker.encoders.weights import moved, weights_device
from stoker.errors import EncoderError, SourceError, StokerError
from stoker.plan.resources import Resources, probe, resolve_device
from stoker.precompute.arena import Layout, plan_layout, slot_size
from stoker.precompute.encode import PRECISION, Copied, Encoded, Encoding, GroupEncoder, TorchState
from stoker.precompute.encoder_processes import EncoderLaunch, EncoderProcesses, EncodeTask
from stoker.precompute.heartbeat import EncodeClock, guard_page
from stoker.precompute.in_process import EncodeWatchdog, InPlace, InProcess, Silent
from stoker.precompute.progress import ProgressSink
from stoker.precompute.queue import Feed, Ledger, Parcel, PartSpan, WorkQueue
from stoker.precompute.reading import (
    PartNames,
    SampleReader,
    Unchanged,
    digested_files,
)
from stoker.precompute.run import Pace, Run, Stages, Standing, WriteThread
from stoker.precompute.settings import PrecomputeSettings
from stoker.precompute.share import Done, Interrupts, Share
from stoker.precompute.space import fit_copies, fit_memory
from stoker.precompute.workers import Launch, Supervisor
from stoker.runtime.libc import keep_freed_memory, release_memory
from stoker.runtime.processes.child import LIGHT, TORCH, Drain, preload
from stoker.schema import Schema
from stoker.sources.files import confined_sources
from stoker.sources.protocol import Locating, Proving, Source
from stoker.sources.travel import held_bytes, packed
from stoker.store import Failure, Folder, WriterSettings
from stoker.store.cache import fill_blocks
from stoker.store.folder import SampleLookup, digest_samples
from stoker.store.recipe import Recipe
from stoker.units import MIB

# ----------------------------------------------------------------------------------------------------------
# Recognize samples that a sibling cache has a record of, so that they are read but not encoded again.


class Recognizing:
    """An `Encoding` around another one: it digests samples on their way, and keeps back those it recognizes.

    Args:
        inner: What encodes the others.
        same: Records of sibling caches; None: none are looked up.
        queue, recipe, schema: Of the run.
    """

    def __init__(
        self,
        inner: Encoding,
        same: SampleLookup | None,
        *,
        queue: WorkQueue,
        recipe: Recipe,
        schema: Schema,
    ) -> None:
        self._inner, self._same = inner, same
        self._queue, self._recipe, self._schema = queue, recipe, schema
        self._digests: dict[int, NDArray[np.uint64]] = {}
        self._looked_at: Parcel | None = None
        self._copied: list[Encoded] = []
        self.clock = inner.clock

    @property
    def hungry(self) -> bool:
        """See `Encoding`."""
        return self._inner.hungry

    def take(self, parcel: Parcel) -> bool:
        """See `Encoding`."""
        if parcel is not self._looked_at:  # one that found no room comes again
            self._look(parcel)
            self._looked_at = parcel
        taken = self._inner.take(parcel)
        if taken:
            self._looked_at = None
        return taken

    def _look(self, parcel: Parcel) -> None:
        """Digest the samples of a parcel, and settle those that are recognized.

        A sample that comes in several stretches is encoded before its end is known; it gets no digest.
        """
        if parcel.over or parcel.start or not parcel.last:
            return
        numbers = self._queue.wanted(parcel.work)
        first = parcel.work.numbers.start
        digests = digest_samples(parcel.arrays, self._schema, [number - first for number in numbers])
        if self._same is not None and len(self._same):
            offset = self._recipe.parts[parcel.work.part].offset
            for match in self._same.find(digests, [number - offset for number in numbers]):
                own = [numbers[member] for member in match.members]
                copied = Copied(
                    origin=match.cache,
                    places=match.places,
                    moved=[numbers[member] for member in match.moved],
                    lost=self._same.refuse,
                )
                self._copied.append(Encoded(numbers=own, contents=digests[match.members], copied=copied))
                self._queue.settled.update(own)
        self._digests.update(zip(numbers, digests, strict=True))

    def results(self) -> list[Encoded]:
        """See `Encoding`; with the digests of the samples."""
        found, self._copied = self._copied, []
        for encoded in self._inner.results():
            unknown = np.zeros(2, np.uint64)
            digests = [self._digests.pop(number, unknown) for number in encoded.numbers]
            found.append(replace(encoded, contents=np.array(digests, np.uint64).reshape(-1, 2)))
        return found

    def wait(self, timeout_s: float) -> None:
        """See `Encoding`."""
        self._inner.wait(timeout_s)

    def processor_s(self) -> float:
        """See `Encoding`."""
        return self._inner.processor_s()

    def close(self) -> None:
        """See `Encoding`."""
        self._inner.close()


log = logging.getLogger("stoker")

LOG_FOLDER = ".workers"
_LEFT = "Make what it holds of that kind at its first call"
_LOGS_KEPT_S = 24 * 3600
_RAGGED_GROUP_BYTES = 1024**2
_READER_SHARE = 0.75
CHILD_FOR_ONE_DEVICE = False
"""Encode in a child also on a single device or the CPU. Off until the long suites have run with it."""
FEW_GROUPS = 16
"""Encode batches that start no child: at most 128 MiB of samples and records by default, which many an
encoder takes in the second or two that the first child of a program needs to import torch."""
_CHILD_BYTES = 512 * MIB
"""Memory that an encoder process must find free: a torch of its own, and the one that it is forked from."""
_GROUPS_A_READER = 8
"""Fewer are read before another reader has started."""


class Bench:
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
    ) -> None:
        """See `run_precompute`; `rehearsal`: nothing is quarantined, and no guardian is told."""
        self.folder = folder
        device = "cpu" if encoder is None else str(resolve_device(settings.device))
        self.settings = settings = replace(settings, device=device)
        self.missing = missing
        self.name = folder.name
        self.logs = folder.path.parent.parent / LOG_FOLDER
        self._clock = EncodeClock(page=None) if rehearsal else EncodeClock()
        self._interrupts = interrupts or Interrupts()
        self._watchdog = EncodeWatchdog.of_settings(
            settings, self.logs, clock=self._clock, interrupts=self._interrupts
        )
        self._source = source
        self._encoder = encoder
        self._home = None if encoder is None else weights_device(encoder)
        self._schema = source.schema()
        recipe = folder.recipe
        self._ragged = any(spec.ragged for spec in self._schema.values())
        group = recipe.group
        if (self._ragged or group.steps is not None) and group.samples != 1:
            raise EncoderError(
                f"groups of {group.samples} samples were asked for, but samples that are ragged or cut over "
                f"time are encoded one by one. Give the encoder a group of 1"
            )
        self.quarantined = set(folder.failures()).difference(missing.tolist())
        wanted = set(missing.tolist()) if len(missing) < recipe.count else range(recipe.count)
        # No method of ours: in a cycle, this would hold the folder's lock until the collector comes by.
        keep = _forget if rehearsal else folder.quarantine_many
        refs = recipe.refs
        self._parts = PartNames(
            offsets=[part.offset for part in recipe.parts],
            names=[
                str(of[0].path) if len(of) == 1 else part.name
                for part, of in zip(recipe.parts, refs, strict=True)
            ],
            source=source if isinstance(source, Locating) else None,
        )
        self.ledger = Ledger(
            self.quarantined,
            quarantine=keep,
            wanted=wanted.__contains__,
            allowed=settings.max_quarantined * recipe.count,
            place=self._parts.place,
            nan=settings.nan,
        )
        spans = [PartSpan(offset=part.offset, count=part.count) for part in recipe.parts]
        self.queue = WorkQueue(spans, recipe.group.samples, missing, bad=self.ledger.is_bad)
        self._reading = Unchanged(source, digested_files(refs, recipe.files), self._parts.offsets)
        self._layout, self._first_workers, self.most_workers = self._plan()
        self._children = () if rehearsal else self._devices_of_children()

    def _devices_of_children(self) -> tuple[str, ...]:
        """Return the devices on which a child is to encode; none where this process is to.

        The encoder runs in children on several devices, and with `CHILD_FOR_ONE_DEVICE` on one, but for few
        groups, where memory is short for another torch, and on systems that cannot watch a child. An encoder
        that cannot be sent to one is found out later.
        """
        devices, groups = self.settings.devices, self.queue.groups
        if self._encoder is None or sys.platform != "linux":
            return ()
        if len(devices) > 1:
            return devices if len(devices) < groups else ()
        if not CHILD_FOR_ONE_DEVICE or groups <= FEW_GROUPS or probe().host_bytes < _CHILD_BYTES:
            return ()
        return (self.settings.device,)

    def _plan(self) -> tuple[Layout, int, int]:
        """The layout of each arena, workers to start with, and the most that there is room and work for."""
        settings, group = self.settings, self.folder.recipe.group
        memory = int(settings.memory_bytes * _READER_SHARE)
        asked = settings.workers
        share = memory // (asked or 2)
        layout = plan_layout(self._schema, group.samples, group.steps, share)
        most = max(1, memory // layout.flight_bytes)
        if asked is None:
            return layout, min(1, self.queue.groups), min(most, self.queue.groups)
        return layout, min(asked, most, self.queue.groups), asked

    def feed(self, *, cores: int = 1) -> Feed:
        """Workers, started; or this process itself.

        Args:
            cores: Where the number of workers is left to us, and there is no encoder, reading is all the
                work, and begins on so many cores. With an encoder, which may be what is slow, on one.

        Raises:
            SourceError: The source cannot be sent to a reader.
        """
        group_bytes = (
            _RAGGED_GROUP_BYTES if self._ragged else slot_size(self._schema, self.folder.recipe.group.samples)
        )
        self.queue.follow_runs(self._source.runs(), group_bytes)
        if self.settings.by_blocks:
            self.queue.follow_blocks(fill_blocks(self.folder.recipe))
        if self._children:
            preload(TORCH)
        if self._first_workers == 0:
            pulse = Silent()
            samples = SampleReader(
                self._reading, self._schema, self._parts.offsets, pulse=pulse, nan=self.settings.nan
            )
            return InProcess(
                samples, self._layout, self.queue, self.ledger, pulse=pulse, interrupts=self._interrupts
            )
        self._make_logs()
        feed = Supervisor(self._launch(), self.queue, self.ledger, settings=self.settings, parts=self._parts)
        try:
            feed.start(self._first_workers if self._encoder is not None else self._at_once(cores))
        except BaseException:
            feed.close()
            raise
        return feed

    def _at_once(self, cores: int) -> int:
        if self.settings.workers is not None:
            return self._first_workers
        return max(self._first_workers, min(cores, self.most_workers, self.queue.groups // _GROUPS_A_READER))

    def _launch(self) -> Launch:
        payload = packed(self._reading)
        frame = {
            "kind": "start",
            "confined": confined_sources(),
            "layout": self._layout.to_json(),
            "offsets": list(self._parts.offsets),
            "nan": self.settings.nan,
        }
        # What a pickle names it will import. A reader that needs torch all the same imports it by itself.
        modules = TORCH if b"torch" in payload else LIGHT
        return Launch(
            payload=payload,
            frame=frame,
            layout=self._layout,
            logs=self.logs,
            drain=Drain(),
            modules=modules,
        )

    def _make_logs(self) -> None:
        """The folder for workers' output; what is left there from more than a day ago goes."""
        self.logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in self.logs.glob("*.txt"):
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > _LOGS_KEPT_S:
                    path.unlink()

    def encoder(self) -> GroupEncoder:
        """The encoder on its device; getting there has the deadline of one of its calls."""
        encoder = GroupEncoder(
            self._encoder,
            self.folder.recipe,
            self._schema,
            device=self.settings.device,
            nan=self.settings.nan,
            clock=self._clock,
        )
        self._move(torch.device(self.settings.device))
        return encoder

    def _move(self, device: torch.device) -> None:
        if (encoder := self._encoder) is None:
            return
        self._watchdog.ask(lambda: encoder.to(device), f"on its way to {device}")

    def encoding(self, feed: Feed, *, compare_first: bool = True) -> Encoding:
        """Whoever encodes, begun: a child for each device, or this process.

        Args:
            compare_first: See `GroupEncoder`; needless, and twice the time, for single groups of a cache.
        """
        if self._children and (launch := self._launch_of_encoders(compare_first)) is not None:
            return EncoderProcesses(self._children, launch, feed=feed, queue=self.queue, ledger=self.ledger)
        self._children = ()
        encoder = self.encoder()
        encoder.clock.limit_s = self.settings.timeouts.encode
        encoder.compare_first = compare_first
        return InPlace(encoder, self._watchdog, feed, self.queue, self.ledger)

    def _launch_of_encoders(self, compare_first: bool) -> EncoderLaunch | None:
        """What children encode with; None where the encoder cannot be sent to another process.

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
            compare_first=compare_first,
            state=TorchState.of_caller(),
        )
        several = len(self._children) > 1
        try:
            with moved(self._encoder, torch.device("cpu")):
                payload = packed(task, "encoder", otherwise="Or encode on one device" if several else _LEFT)
        except SourceError as error:
            if several:
                raise
            log.warning(
                "%s: the encoder runs in this process, where nothing can end it: %s", self.name, error
            )
            return None
        self._make_logs()
        return EncoderLaunch(
            task_fd=EncoderLaunch.stored(payload),
            samples=self._schema,
            records=recipe.encoded,
            start_s=limits.start,
            limit_s=limits.encode,
            logs=self.logs,
        )

    def recognizing(self, inner: Encoding, same: SampleLookup | None) -> Encoding:
        """The same, which keeps back samples that sibling caches have records of."""
        recipe = self.folder.recipe
        return Recognizing(inner, same, queue=self.queue, recipe=recipe, schema=self._schema)

    def leave_device(self) -> None:
        """Put the encoder back where it was, and free the memory of a GPU: a model is about to want it.

        An encoder that is still at a call which was given up stays where it is.
        """
        if self._home is not None and not self._clock.given_up:
            self._move(self._home)
            if self.settings.device.startswith("cuda"):
                torch.cuda.empty_cache()

    def writer(self) -> WriteThread:
        """The writer thread, started."""
        settings = self.settings
        kept = WriterSettings(
            max_error=settings.max_error,
            compression=settings.compression,
            device=settings.device,
            float32=PRECISION,
            early=settings.by_blocks,
            seal_after_s=settings.seal_after_s,
        )
        return WriteThread(
            self.folder.writer(kept),
            self.folder.path,
            limit_bytes=int(settings.memory_bytes * (1 - _READER_SHARE)),
            deadline_s=settings.timeouts.write,
        )

    def stages(self, feed: Feed, encoding: Encoding, writer: WriteThread) -> Stages:
        """All of them together."""
        return Stages(
            feed=feed,
            queue=self.queue,
            ledger=self.ledger,
            encoding=encoding,
            writer=writer,
            in_process=not self._children or not isinstance(feed, Supervisor),
        )

    @staticmethod
    def seal(writer: WriteThread) -> None:
        """Seal what was handed over, also when the run fails: the error under way is the one that counts."""
        with suppress(StokerError):
            writer.close()


def _forget(failures: Sequence[Failure]) -> None:
    """What a rehearsal does with failures."""


# ----------------------------------------------------------------------------------------------------------
# Encode a share on this machine: workers beside this process, the encoder and the writer in it.
#
# Of several devices each has an encoder in a process of its own (`crew.py`).


_WORKERS_A_CORE = 2
"""At most; a reader that waits for storage needs no core. `Pace` takes back those that do not help."""
_READER_MIND_BYTES = MIB
"""Less than that in a source is nothing beside the interpreter that reads it."""


def encode_here(share: Share, sink: ProgressSink | None) -> Done:
    """Encode in this process, with workers of its own: the `Engine` of one machine.

    Raises:
        StokerError: As `run_precompute`.
    """
    source, folder = share.source, share.folder
    share = replace(share, settings=_on_device(share, sink))
    settings, copies = _with_copies(source, share.settings)
    if settings.workers != 0 and isinstance(source, Proving):
        with share.interrupts.raising():
            source.prove()
    resources = probe(path=folder.path)
    settings, most = fit_memory(source.schema(), folder.recipe, settings, resources)
    most = max(1, min(most, copies, _useful(resources)))
    pace = Pace(most=most, processors=resources.cpus)
    bench = Bench(source, share.encoder, folder, settings, missing=share.missing, interrupts=share.interrupts)
    try:
        return _encode(bench, sink, share, pace)
    finally:
        with suppress(OSError):  # not empty: a reader was lost, and its log is to be read
            bench.logs.rmdir()
        release_memory()


def _on_device(share: Share, sink: ProgressSink | None) -> PrecomputeSettings:
    """The settings with the device that `auto` stands for here."""
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
    """The settings, and how many workers may have a copy of what the source holds (`fit_copies`)."""
    held = 0 if settings.workers == 0 else held_bytes(source)
    if held < _READER_MIND_BYTES:
        return settings, sys.maxsize
    resources = probe()
    wanted = settings.workers or _useful(resources)
    return fit_copies(held, settings, resources, wanted=wanted)


def _useful(resources: Resources) -> int:
    """Workers that the cores have use for."""
    return _WORKERS_A_CORE * int(resources.cpus)


def _encode(bench: Bench, sink: ProgressSink | None, share: Share, pace: Pace) -> Done:
    """Start the stages, run them, and end them in an order that keeps what was encoded."""
    if guard_page() is not None:  # a process of ours
        keep_freed_memory()
    settings, feed = bench.settings, bench.feed(cores=pace.most // _WORKERS_A_CORE)
    pace.most = min(pace.most, bench.most_workers)
    writer = encoding = None
    try:
        if not isinstance(feed, Supervisor) and sink is not None:
            sink.note(f"{bench.name}: workers=0, reading in this process: in order and without timeouts")
        encoding = _encoding(bench, feed, share)  # the workers are starting meanwhile
        writer = bench.writer()
        run = Run(
            bench.stages(feed, encoding, writer),
            Standing(
                name=bench.name,
                total=bench.folder.recipe.count if settings.part[1] == 1 else len(bench.missing),
                missing=len(bench.missing),
                quarantined=len(bench.quarantined),
                device=", ".join(settings.devices) or settings.device,
            ),
            interrupts=share.interrupts,
            sink=sink,
            pace=pace if settings.workers is None else None,
        )
        try:
            finished = run.go(lasts_s=share.lasts_s)
        finally:
            encoding.clock.alive(bounded=False)
            feed.close()
            encoding.close()
            bench.seal(writer)
        writer.check()
        bench.leave_device()
    except BaseException:
        feed.close()
        if encoding is not None:
            encoding.close()
        if writer is not None:
            writer.abandon()
        raise
    supervised = isinstance(feed, Supervisor)
    return Done(
        finished=finished,
        encoded=run.encoded,
        adopted=writer.copied,
        encode_seconds=encoding.clock.seconds,
        workers=feed.workers if supervised else 0,
        lost_workers=feed.losses if supervised else 0,
        abandoned_workers=feed.abandoned if supervised else 0,
        failures=tuple(bench.ledger.failures),
    )


def _encoding(bench: Bench, feed: Feed, share: Share) -> Encoding:
    """Whoever encodes; a feed that waits for workers wakes up for it, and for signals."""
    inner = bench.encoding(feed, compare_first=share.compare_first)
    children = isinstance(inner, EncoderProcesses)
    if children:
        inner.watch(share.interrupts.fd)
    if isinstance(feed, Supervisor):
        feed.wake_fd = inner.fd if children else share.interrupts.fd
    return inner if share.encoder is None else bench.recognizing(inner, share.same)
