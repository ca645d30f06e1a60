"""Bring blocks of a shard here: each once for all processes of a machine, several requests at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeAlias

from stoker.errors import CorruptError, ResourceError, StalledError, StokerError
from stoker.runtime.locks import lock_range
from stoker.runtime.threads import Ticket, ending
from stoker.store.mirror.place import Place
from stoker.store.mirror.stand import Stand
from stoker.store.protocols import Buffer
from stoker.store.remote import ChangedError, Remote
from stoker.store.remote.retries import DEADLINE_S

Ranges: TypeAlias = Sequence[tuple[int, int]]
"""Bytes of a file, each from a first one to one past the last."""
QUEUED = 64
"""Requests ahead of need that wait or run at a time in one process; more are refused."""


class Fetcher:
    """Fetches for one folder, in this process. Safe to use from several threads."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self.counters = place.root.counters
        self._lock = threading.Lock()
        self._ahead: set[Ticket[bool]] = set()
        self._under_way: list[tuple[str, int, int]] = []
        """Blocks that threads of this process are fetching: shard, first, and one past the last."""
        self._came = threading.Condition(threading.Lock())
        """Told of every block that comes, and of every fetch that ends."""

    def origin(self, stand: Stand) -> str:
        """Where its bytes come from."""
        return self._place.url_of(stand.name)

    def runs_of(self, stand: Stand, ranges: Ranges) -> list[tuple[int, int]]:
        """Runs of blocks that are not here, each for one request: first, and one past the last."""
        blocks, most = stand.map, self._place.root.run_blocks
        together: list[tuple[int, int]] = []
        for first, last in sorted(blocks.blocks(begin, end) for begin, end in ranges if begin < end):
            if together and first <= together[-1][1]:
                together[-1] = together[-1][0], max(last, together[-1][1])
            else:
                together.append((first, last))
        missing = [run for first, last in together for run in blocks.absent(first, last)]
        return [(at, min(at + most, end)) for begin, end in missing for at in range(begin, end, most)]

    def fetch(self, stand: Stand, ranges: Ranges, deadline_s: float = DEADLINE_S) -> None:
        """Have bytes here; returns when they are, or were before they had to go again.

        Raises:
            StalledError: `deadline_s` passed; what came is kept.
            ResourceError: There is no room on the disk.
            StokerError, FileNotFoundError: As `Remote`.
        """
        deadline = time.monotonic() + deadline_s
        runs = self.runs_of(stand, ranges)
        if len(runs) == 1:
            self._fetch_run(stand, *runs[0], deadline)
            return
        pool = self._place.root.pool
        parts = [pool.submit(partial(self._fetch_run, stand, *run, deadline)) for run in runs]
        for part in parts:
            part.wait(max(0.0, deadline - time.monotonic()))
        came = [part for part in parts if part.done()]
        for part in came:
            part.result(0.0, self.origin(stand))
        if late := len(parts) - len(came):  # those not begun end at once: the deadline is theirs too
            raise StalledError(
                f"{late} of {len(parts)} parts of {self.origin(stand)} did not come in "
                f"{deadline_s:g} s. See whether the store answers, then run again: what arrived is kept"
            )

    def ahead(self, stand: Stand, ranges: Ranges) -> int:
        """Begin to fetch bytes; returns how many were begun, which are fewer when enough is under way."""
        begun = 0
        for run in self.runs_of(stand, ranges):
            with self._lock:
                self._ahead = {ticket for ticket in self._ahead if not ticket.done()}
                if len(self._ahead) >= QUEUED:
                    break
                self._ahead.add(self._place.root.ahead_pool.submit(partial(self._fetch_ahead, stand, *run)))
            begun += size_of(stand, run)
        return begun

    def bring(self, stand: Stand, ranges: Ranges) -> bool:
        """Fetch bytes ahead of need, in the thread that calls; whether they came, as in `ahead`."""
        came = [self._fetch_ahead(stand, *run) for run in self.runs_of(stand, ranges)]
        return all(came)

    def read_direct(self, stand: Stand, offset: int, out: memoryview[Any]) -> None:
        """Fill `out` from the place itself, past the mirror."""
        at = 0

        def sink(piece: Buffer) -> None:
            nonlocal at
            out[at : at + len(piece)] = piece
            at += len(piece)

        self._ask(stand, lambda remote: self._read(remote, stand, offset + at, offset + len(out), sink))
        self.counters.add(direct=1, bytes=at)

    def mend(self, stand: Stand, begin: int, end: int) -> None:
        """Forget bytes that do not match their sums, so that the next read fetches them.

        Raises:
            StalledError: Another process has been fetching them for `DEADLINE_S` seconds.
        """
        blocks = stand.map
        first, last = blocks.blocks(begin, min(end, blocks.size))
        with lock_range(stand.map_path, first, last, timeout_s=DEADLINE_S) as got:
            if not got:
                raise self._busy(stand, DEADLINE_S)
            blocks.drop(first, last)
        self.counters.add(mended=1)

    def _fetch_ahead(self, stand: Stand, first: int, last: int) -> bool:
        if ending():
            return False  # the exit of the process would wait for us
        missing = sum(size_of(stand, run) for run in stand.map.absent(first, last))
        with suppress(StokerError, OSError):  # whoever reads these bytes will meet it
            self._fetch_run(stand, first, last, time.monotonic() + DEADLINE_S)
            self.counters.add(ahead_bytes=missing)
            return True
        return False

    def _fetch_run(self, stand: Stand, first: int, last: int, deadline: float) -> None:
        if time.monotonic() >= deadline:  # it waited in line until nobody waits for it any more
            raise StalledError(f"a part of {self.origin(stand)} was not begun in time")
        with self._alone(stand, first, last, deadline) as absent:
            if not absent:
                return
            left = max(0.0, deadline - time.monotonic())
            with lock_range(stand.map_path, first, last, timeout_s=left) as got:
                if not got:
                    raise self._busy(stand, left)
                for run in stand.map.absent(first, last):
                    self._fetch_blocks(stand, *run, deadline)

    def _busy(self, stand: Stand, waited_s: float) -> StalledError:
        return StalledError(
            f"another process has been fetching {self.origin(stand)} for {waited_s:.0f} s. See whether it "
            "hangs, then run again"
        )

    @contextmanager
    def _alone(self, stand: Stand, first: int, last: int, deadline: float) -> Generator[bool]:
        """Keep the other threads of this process from blocks; yields whether some are still absent.

        Whoever waits here goes on as soon as its own blocks are there, and not when all are that come with
        them. The lock between processes has to be asked again and again, which takes up to 20 ms each time.
        """
        own = (stand.name, first, last)

        def free() -> bool:
            busy = any(name == own[0] and a < last and first < b for name, a, b in self._under_way)
            return not busy or stand.map.holds(first, last)

        left = max(0.0, deadline - time.monotonic())
        with self._came:
            if not self._came.wait_for(free, left):
                raise StalledError(f"another thread has been fetching {self.origin(stand)} for {left:.0f} s")
            absent = not stand.map.holds(first, last)
            if absent:
                self._under_way.append(own)
        try:
            yield absent
        finally:
            if absent:
                with self._came:
                    self._under_way.remove(own)
                    self._came.notify_all()

    def _tell(self) -> None:
        with self._came:
            self._came.notify_all()

    def _fetch_blocks(self, stand: Stand, first: int, last: int, deadline: float) -> None:
        blocks, space = stand.map, self._place.root.space
        _, stop = blocks.extent(first, last)
        space.take((last - first) * blocks.block_bytes, lambda: blocks.expect(first, last))
        arriving = _Arriving(stand, first, last, self._tell)

        def attempt(remote: Remote) -> None:
            self._read(remote, stand, arriving.begin(), stop, arriving.take)

        try:
            self._ask(stand, attempt, deadline - time.monotonic())
        except ResourceError:
            if not space.free((last - arriving.at) * blocks.block_bytes):
                raise
            self._ask(stand, attempt, deadline - time.monotonic())
        finally:
            self.counters.add(bytes=arriving.came)

    def _ask(self, stand: Stand, attempt: Callable[[Remote], None], deadline_s: float = DEADLINE_S) -> None:
        self._place.ask("get", stand.name, attempt, max(0.0, deadline_s))

    def _read(
        self, remote: Remote, stand: Stand, begin: int, end: int, sink: Callable[[Buffer], None]
    ) -> None:
        self.counters.add(requests=1)
        try:
            remote.read(self._place.key(stand.name), begin, end, etag=stand.map.etag, sink=sink)
        except ChangedError as error:
            self._place.forget(stand.name)
            raise CorruptError(
                f"{self.origin(stand)} was replaced since it was opened. Open the cache again"
            ) from error


class _Arriving:
    """Writes what comes of a run of blocks, and marks each block once it is whole."""

    def __init__(self, stand: Stand, first: int, last: int, tell: Callable[[], None]) -> None:
        self.at = first
        """The first block that is not here yet."""
        self.came = 0
        self._stand, self._last, self._tell = stand, last, tell
        self._stop = stand.map.extent(first, last)[1]
        self._byte = 0
        """Where the next piece goes."""

    def begin(self) -> int:
        """The first byte to ask for; what came of a block that was cut is asked for again."""
        self._byte = self._stand.map.extent(self.at, self.at + 1)[0]
        return self._byte

    def take(self, piece: Buffer) -> None:
        """Take the bytes that follow those so far."""
        self._stand.write(self._byte, piece)
        self._byte += len(piece)
        self.came += len(piece)
        whole = self._last if self._byte == self._stop else self._byte // self._stand.map.block_bytes
        if whole > self.at:
            self._stand.map.add(self.at, whole)
            self.at = whole
            self._tell()


def size_of(stand: Stand, run: tuple[int, int]) -> int:
    """Bytes of a run of blocks."""
    begin, end = stand.map.extent(*run)
    return end - begin
