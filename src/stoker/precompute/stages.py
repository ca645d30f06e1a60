"""Build the stages of a run from a source, an encoder, a folder and settings."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from stoker.encoders.protocol import Encoder
from stoker.encoders.weights import moved, weights_device
from stoker.errors import EncoderError, StokerError
from stoker.plan.devices import resolve_device
from stoker.precompute.clock import EncodeClock
from stoker.precompute.crew import Crew, Equipment
from stoker.precompute.device_process import Task
from stoker.precompute.encode import GroupEncoder
from stoker.precompute.encoding import Encoding, InPlace
from stoker.precompute.fill import PartNames, SampleReader
from stoker.precompute.in_process import InProcess, Silent
from stoker.precompute.interrupts import Interrupts
from stoker.precompute.layout import Layout, plan_layout, slot_size
from stoker.precompute.ledger import Ledger
from stoker.precompute.parcel import Feed
from stoker.precompute.precision import PRECISION
from stoker.precompute.process import Launch
from stoker.precompute.queue import PartSpan, WorkQueue
from stoker.precompute.recognize import Recognizing
from stoker.precompute.run import Stages
from stoker.precompute.settings import PrecomputeSettings
from stoker.precompute.supervisor import Supervisor
from stoker.precompute.unchanged import Unchanged, digested_files
from stoker.precompute.watchdog import EncodeWatchdog
from stoker.precompute.write_thread import WriteThread
from stoker.runtime.processes.child import LIGHT, TORCH
from stoker.runtime.processes.output import Drain
from stoker.sources.files import confined_sources
from stoker.sources.protocol import Locating, Source
from stoker.sources.travel import packed
from stoker.store import Failure, Folder, WriterSettings
from stoker.store.growing import fill_blocks
from stoker.store.same_samples import SameSamples

LOG_FOLDER = ".readers"
_LOGS_KEPT_S = 24 * 3600
_RAGGED_GROUP_BYTES = 1024**2
_READER_SHARE = 0.75
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
        self._clock = EncodeClock(told=not rehearsal)
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
        self._layout, self._first_readers, self.most_readers = self._plan()

    def _plan(self) -> tuple[Layout, int, int]:
        """The layout of each arena, readers to start with, and the most that there is room and work for."""
        settings, group = self.settings, self.folder.recipe.group
        memory = int(settings.memory_bytes * _READER_SHARE)
        asked = settings.readers
        share = memory // (asked or 2)
        layout = plan_layout(self._schema, group.samples, group.steps, share)
        most = max(1, memory // layout.flight_bytes)
        if asked is None:
            return layout, min(1, self.queue.groups), min(most, self.queue.groups)
        return layout, min(asked, most, self.queue.groups), asked

    def feed(self, *, cores: int = 1) -> Feed:
        """Readers, started; or this process itself.

        Args:
            cores: Where the number of readers is left to us, and there is no encoder, reading is all the
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
        if self._first_readers == 0:
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
            feed.start(self._first_readers if self._encoder is not None else self._at_once(cores))
        except BaseException:
            feed.close()
            raise
        return feed

    def _at_once(self, cores: int) -> int:
        if self.settings.readers is not None:
            return self._first_readers
        return max(self._first_readers, min(cores, self.most_readers, self.queue.groups // _GROUPS_A_READER))

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
        """The folder for readers' output; what is left there from more than a day ago goes."""
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
        """Whoever encodes, begun: processes on several devices, or the encoder in this one.

        Args:
            compare_first: See `GroupEncoder`; needless, and twice the time, for single groups of a cache.
        """
        if self._encoder is not None and 1 < len(self.settings.devices) < self.queue.groups:
            return self._crew(self._encoder, feed)
        encoder = self.encoder()
        encoder.clock.limit_s = self.settings.deadlines.encode
        encoder.compare_first = compare_first
        return InPlace(encoder, self._watchdog, feed, self.queue, self.ledger)

    def recognizing(self, inner: Encoding, same: SameSamples | None) -> Encoding:
        """The same, which keeps back samples that sibling caches have records of."""
        recipe = self.folder.recipe
        return Recognizing(inner, same, queue=self.queue, recipe=recipe, schema=self._schema)

    def _crew(self, encoder: Encoder, feed: Feed) -> Crew:
        self._make_logs()
        recipe, limits = self.folder.recipe, self.settings.deadlines
        task = Task(encoder=encoder, recipe=recipe, schema=self._schema, nan=self.settings.nan)
        with moved(encoder, torch.device("cpu")):
            payload = packed(task, "encoder", otherwise="Or encode on one device")
        equipment = Equipment(
            payload=payload,
            samples=self._schema,
            records=recipe.encoded,
            start_s=limits.start,
            limit_s=limits.encode,
            logs=self.logs,
        )
        return Crew(self.settings.devices, equipment, feed=feed, queue=self.queue, ledger=self.ledger)

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
            deadline_s=settings.deadlines.write,
        )

    def stages(self, feed: Feed, encoding: Encoding, writer: WriteThread) -> Stages:
        """All of them together."""
        return Stages(feed=feed, queue=self.queue, ledger=self.ledger, encoding=encoding, writer=writer)

    @staticmethod
    def seal(writer: WriteThread) -> None:
        """Seal what was handed over, also when the run fails: the error under way is the one that counts."""
        with suppress(StokerError):
            writer.close()


def _forget(failures: Sequence[Failure]) -> None:
    """What a rehearsal does with failures."""
