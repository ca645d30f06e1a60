"""The writer: one thread that converts, checksums and commits, while the next batch is encoded.

What waits for it is bounded in bytes, so a slow disk slows the encoder and the workers down and memory stays
flat. Its errors surface in the calling thread, with the figures that matter, and leave a cache that resumes.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from pathlib import Path

from stoker.errors import ResourceError, StalledError, StokerError
from stoker.precompute.encode import CopiedRecords, EncodedRecords
from stoker.store.write import RecordWriter
from stoker.units import format_count

_TICK_S = 1.0


class WriteThread:
    """Feeds a `RecordWriter`, which no other thread touches."""

    def __init__(self, writer: RecordWriter, folder: Path, *, limit_bytes: int, timeout_s: float) -> None:
        self._writer = writer
        self._folder = folder
        self._limit = limit_bytes
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._queue: deque[EncodedRecords] = deque()
        self._waiting_bytes = 0
        self._closing = False
        self._error: Exception | None = None
        self._begun: float | None = None
        self.written = 0
        """Records handed to the store."""
        self.copied = 0
        """Those of them that another cache had."""
        self._thread = threading.Thread(target=self._run, name="stoker-writer", daemon=True)
        self._thread.start()

    @property
    def shard_fill(self) -> tuple[int, int]:
        """Bytes in the open shard, and its capacity."""
        return self._writer.shard_fill

    @property
    def bytes(self) -> int:
        """Bytes of records written by this run."""
        return self._writer.bytes

    def offer(self, encoded: EncodedRecords, timeout_s: float) -> bool:
        """Queue records if there is room within `timeout_s`; a group above the limit goes when it is alone.

        Raises:
            StalledError: The writer has been at one operation for longer than its timeout.
            ResourceError: The disk is full.
            StokerError: Whatever else the store refused.
        """
        with self._changed:
            self.check()
            if not self._room(encoded):
                self._changed.wait(timeout_s)
                self.check()
                if not self._room(encoded):
                    return False
            self._queue.append(encoded)
            self._waiting_bytes += encoded.size_bytes
            self._changed.notify_all()
            return True

    def _room(self, encoded: EncodedRecords) -> bool:
        return not self._queue or self._waiting_bytes + encoded.size_bytes <= self._limit

    def check(self) -> None:
        """Raise what went wrong in the thread, or `StalledError` when it is past its timeout."""
        if self._error is not None:
            raise self._explained(self._error) from self._error
        self._check_timeout()

    def _check_timeout(self) -> None:
        begun = self._begun
        if begun is not None and time.monotonic() - begun > self._timeout_s:
            raise StalledError(
                f"writing to {self._folder} made no progress for {self._timeout_s:g} s: the storage does "
                f"not answer. {format_count(self.written)} records were handed over. "
                "Run it again when it does, to resume"
            )

    def close(self) -> None:
        """Write what is queued, seal, and end the thread.

        Raises:
            StokerError: As for `offer`.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        while self._thread.is_alive():
            self._thread.join(0.1)
            self._check_timeout()
        self.check()

    def abandon(self) -> None:
        """Stop without waiting for more than what is in hand; what is not sealed is lost."""
        with self._changed:
            self._queue.clear()
            self._closing = True
            self._error = self._error or StalledError("the run was given up")
            self._changed.notify_all()
        self._thread.join(1.0)

    def _run(self) -> None:
        try:
            while (encoded := self._next()) is not None:
                self._step(encoded)
            self._begin()
            if self._error is None:
                self._writer.commit()
            else:
                self._writer.abort()
        except Exception as error:  # noqa: BLE001  a thread's edge: raised again in the caller's thread
            self._fail(error)
        finally:
            self._begun = None

    def _step(self, encoded: EncodedRecords) -> None:
        self._begin()
        if encoded.copied is not None:
            self._copy(encoded, encoded.copied)
        elif encoded.numbers:
            self._writer.append(
                encoded.numbers, encoded.records, marked=encoded.marked, contents=encoded.contents
            )
            self.written += len(encoded.numbers)
        else:
            self._writer.tick()
        with self._changed:
            self._begun = None
            self._waiting_bytes -= encoded.size_bytes
            self._changed.notify_all()

    def _copy(self, encoded: EncodedRecords, copied: CopiedRecords) -> None:
        damaged = self._writer.copy(encoded.numbers, copied.origin, copied.places, marked=copied.moved)
        if damaged and encoded.contents is not None:
            copied.lost(encoded.contents[[encoded.numbers.index(number) for number in damaged]])
        stored = len(encoded.numbers) - len(damaged)
        self.written += stored
        self.copied += stored

    def _begin(self) -> None:
        self._begun = time.monotonic()

    def _next(self) -> EncodedRecords | None:
        """Return what to write; an empty one to let the store look at the clock; None at the end."""
        with self._changed:
            if not self._queue and not self._closing:
                self._changed.wait(_TICK_S)
            if self._queue:
                return self._queue.popleft()
            return None if self._closing else EncodedRecords(numbers=[])

    def _fail(self, error: Exception) -> None:
        """Keep what the store still can (a refused record does not spoil those before it), then report."""
        try:
            if isinstance(error, OSError):
                self._writer.abort()
            else:
                self._writer.commit()
        except Exception as second:  # noqa: BLE001  the first error is the one to report
            error.add_note(f"and while closing: {second}")
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def _explained(self, error: Exception) -> Exception:
        if isinstance(error, StokerError) or not isinstance(error, OSError):
            return error
        return ResourceError(
            f"writing to {self._folder} failed: {error}. Sealed shards stay; run it again to resume"
        )
