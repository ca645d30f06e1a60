"""One try at one file, in a thread of its own, which whoever started it may leave behind."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Literal, TypeAlias

from stoker.errors import TransferError
from stoker.fetch.origin import Origin, Stream
from stoker.fetch.partial import Partial
from stoker.fetch.record import Known, is_known, is_same, look
from stoker.fetch.wanted import Wanted
from stoker.runtime.disk import free_space
from stoker.units import MIB

RESERVE_BYTES = 64 * MIB
"""Room that is left on the disk."""
Stage: TypeAlias = Literal["checking", "asking", "receiving", "naming", "done"]
LOCAL_STAGES = ("checking", "naming")
"""Stages that wait for our own disk alone: trying again would wait for it once more."""


class Attempt:
    """The thread and what it came to. Fields are written by the thread and read by whoever watches it."""

    def __init__(
        self, wanted: Wanted, target: Path, origin: Origin, known: Known | None, *, stall_s: float
    ) -> None:
        self.wanted, self.target = wanted, target
        self._origin, self._known, self._stall_s = origin, known, stall_s
        self._partial: Partial | None = None
        self._stream: Stream | None = None
        self._given_up = False
        self.stage: Stage = "checking"
        self.since = time.monotonic()
        """When something last moved."""
        self.at = 0
        """Bytes that are there."""
        self.total = wanted.bytes
        self.received = 0
        """Bytes that came in this try."""
        self.present = False
        """The file was there already."""
        self.result: Known | None = None
        self.error: BaseException | None = None
        self._thread = Thread(target=self._run, name=f"stoker-fetch {wanted.name}", daemon=True)

    def start(self, woken: Callable[[], None]) -> None:
        """Begin; `woken` is called in the thread once it ended."""
        self._woken = woken
        self.since = time.monotonic()
        self._thread.start()

    def give_up(self) -> bool:
        """Let it write nothing more, whether or not its thread ever ends; False: it hangs while writing."""
        self._given_up = True
        partial, stream = self._partial, self._stream
        if stream is not None:
            stream.stop()
        return partial is None or partial.abandon()

    def _beat(self, at: int) -> None:
        self.at, self.since = at, time.monotonic()

    def _enter(self, stage: Stage) -> None:
        self.stage, self.since = stage, time.monotonic()
        if self._given_up:
            raise TransferError("given up")

    def _run(self) -> None:
        try:
            self._do()
        except BaseException as error:  # noqa: BLE001 - a thread's edge: looked at by whoever watches
            self.error = error
        self.stage = "done"
        self._woken()

    def _do(self) -> None:
        found = look(self.target)
        if found is not None and (
            is_known(self.wanted, found, self._known) or is_same(self.wanted, self.target, found, self._beat)
        ):
            self.present, self.at, self.total = True, found.st_size, found.st_size
            tag = self._known.tag if self._known is not None else ""
            self.result = self._as_known(tag)
            return
        partial = self._partial = Partial(self.wanted, self.target, self._beat)
        try:
            self._beat(partial.at)
            self._receive(partial)
            self._enter("naming")
            partial.finish()
        finally:
            partial.keep()
        self.result = self._as_known(partial.tag)

    def _receive(self, partial: Partial) -> None:
        """Fill the partial file up to what there is."""
        self._enter("asking")
        declared = self.wanted.algorithm is not None
        trusted = declared or bool(partial.tag)
        offset = partial.at if trusted else 0
        if self.wanted.bytes is not None and offset >= self.wanted.bytes:
            offset = partial.at if partial.at == self.wanted.bytes and declared else 0
            if offset:  # the last run ended between the last byte and the name
                return
        stream = self._stream = self._origin.open(
            offset, "" if declared else partial.tag, stall_s=self._stall_s
        )
        try:
            self._enter("receiving")
            self._agree(stream, partial)
            partial.begin(stream.offset, stream.version.tag)
            self._beat(partial.at)
            while piece := stream.read():
                partial.write(piece)
                self.received += len(piece)
                self._beat(partial.at)
                self._enter("receiving")
        finally:
            stream.close()
        if self.total is not None and partial.at != self.total:
            raise TransferError(
                f"ended after {partial.at:,} of {self.total:,} bytes", passing=partial.at < self.total
            )

    def _agree(self, stream: Stream, partial: Partial) -> None:
        """Compare what there is with what was declared, and with the room for it.

        Raises:
            TransferError: Another size was declared.
            ResourceError: There is no room.
        """
        size, declared = stream.version.bytes, self.wanted.bytes
        if size is not None and declared is not None and size != declared:
            raise TransferError(f"has {size:,} bytes, {declared:,} were declared")
        self.total = declared if size is None else size
        if self.total is None:
            return
        free_space(self.target.parent).require(
            self.target.parent,
            self.total - partial.at,
            f"{self.wanted.name} needs",
            reserve_bytes=RESERVE_BYTES,
            advice="or choose another folder",
        )

    def _as_known(self, tag: str) -> Known:
        found = self.target.lstat()
        return Known(
            bytes=found.st_size,
            mtime_ns=found.st_mtime_ns,
            algorithm=self.wanted.algorithm,
            digest=self.wanted.digest,
            source=self.wanted.source,
            tag=tag,
        )
