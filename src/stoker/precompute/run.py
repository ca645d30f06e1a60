"""The loop of one run: take parcels, encode, hand to the writer, look after readers, show progress."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from stoker.precompute.encoding import Encoding
from stoker.precompute.interrupts import Interrupts
from stoker.precompute.ledger import Ledger
from stoker.precompute.pace import Pace
from stoker.precompute.parcel import Feed, Parcel
from stoker.precompute.precision import full_precision
from stoker.precompute.progress import ProgressSink, Rate, Snapshot
from stoker.precompute.queue import WorkQueue
from stoker.precompute.supervisor import Supervisor
from stoker.precompute.write_thread import WriteThread

_LOOK_S = 0.25
_OFFER_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What was so before the run, for its progress display."""

    name: str
    """The cache's name."""
    total: int
    """Samples of the source."""
    missing: int
    """Samples that this run is to encode."""
    quarantined: int
    """Samples set aside before and not tried again."""
    device: str
    """Where the encoder runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """The parts a run is made of."""

    feed: Feed
    queue: WorkQueue
    ledger: Ledger
    encoding: Encoding
    writer: WriteThread


class Run:
    """Drives the stages until everything is encoded or a signal asks for an end."""

    def __init__(
        self,
        stages: Stages,
        standing: Standing,
        *,
        interrupts: Interrupts,
        sink: ProgressSink | None,
        pace: Pace | None,
    ) -> None:
        self._stages = stages
        self._standing = standing
        self._interrupts = interrupts
        self._sink = sink
        self._pace = pace
        self._parcels: deque[Parcel] = deque()
        self._begun = time.monotonic()
        self._first: float | None = None
        self._processor_s: float | None = None
        """Processor time used when the window of `pace` began."""
        self._shown = 0.0
        self._rate = Rate(self._begun)
        self.encoded = 0
        """Records handed to the writer that were encoded."""
        self.copied = 0
        """Records handed to the writer that another cache has already."""

    @full_precision()
    def go(self, until: float = float("inf"), lasts_s: float = float("inf")) -> bool:
        """Work; False when a signal came first, the time `until` (`time.monotonic()`), or that of `lasts_s`
        after the first group was encoded: so something always is.

        Torch's products of float32 are in full precision meanwhile, for the encoder and for what is read in
        this process (`precision.py`).

        Raises:
            StokerError: A stage failed for good.
        """
        stages = self._stages
        feed = stages.feed
        while not (feed.finished and not self._parcels):
            if self._first is not None:
                until = min(until, self._first + lasts_s)
            if self._interrupts.signal is not None or time.monotonic() >= until:
                self._show(last=True)
                return False
            self._alive()
            begun, waited, hungry = time.monotonic(), 0.0, stages.encoding.hungry
            groups = self._deal()
            if not self._store() and not groups:
                self._wait(min(_LOOK_S, max(0.0, until - begun)))
                waited = time.monotonic() - begun if hungry else 0.0
            stages.writer.check()
            self._adjust(waited, time.monotonic() - begun, groups)
            self._show()
        self._show(last=True)
        return True

    def _deal(self) -> int:
        """Hand a parcel to an encoder that has room; how many were handed over."""
        if not self._parcels:
            return 0
        self._first = self._first or time.monotonic()
        if not self._stages.encoding.take(self._parcels[0]):
            return 0
        self._parcels.popleft()
        return 1

    def _store(self) -> bool:
        """Hand to the writer what has been encoded; whether there was something."""
        results = self._stages.encoding.results()
        for encoded in results:
            while not self._stages.writer.offer(encoded, _OFFER_S):
                # A slow disk has a deadline of its own, and must not keep us from noticing readers that hang.
                self._alive()
                if isinstance(self._stages.feed, Supervisor):
                    self._parcels.extend(self._stages.feed.poll(0.0))
                self._show()
            if encoded.copied is None:
                self.encoded += len(encoded.numbers)
            else:
                self.copied += len(encoded.numbers)
        return bool(results)

    def _wait(self, timeout_s: float) -> None:
        """Wait for parcels, or for encoders where only they can go on."""
        feed = self._stages.feed
        # Reading in this process fills one buffer again and again; readers are looked after at all times.
        if isinstance(feed, Supervisor) or not self._parcels:
            self._parcels.extend(feed.poll(timeout_s))
        if not isinstance(feed, Supervisor) and not self._parcels:
            self._stages.encoding.wait(timeout_s)

    def _alive(self) -> None:
        """Say that the loop goes round; what is read in this process may take any time."""
        self._stages.encoding.clock.alive(bounded=isinstance(self._stages.feed, Supervisor))

    def _adjust(self, waited_s: float, elapsed_s: float, groups: int) -> None:
        feed, pace = self._stages.feed, self._pace
        if pace is None or not isinstance(feed, Supervisor):
            return
        if feed.given_up:
            pace.settle()
        if not feed.all_delivering:
            pace.restart()
            self._processor_s = None
            return
        if self._processor_s is None:
            self._processor_s = self._used_s(feed)
        pace.step(waited_s, elapsed_s, groups, feed.idle)
        if not pace.full(feed.readers):
            return
        used = self._used_s(feed)
        change = pace.change(feed.readers, used - self._processor_s)
        self._processor_s = used
        if change > 0:
            feed.start(1)
        elif change < 0:
            feed.park()

    def _used_s(self, feed: Supervisor) -> float:
        """Processor time that this process and those below it have used so far."""
        others = sum(view.processor_s for view in feed.views()) + self._stages.encoding.processor_s()
        return time.process_time() + others

    def _show(self, *, last: bool = False) -> None:
        now = time.monotonic()
        if self._sink is None or (not last and now - self._shown < self._sink.interval_s):
            return
        self._shown = now
        self._sink.update(self._snapshot(now))

    def _snapshot(self, now: float) -> Snapshot:
        standing, clock, failures = self._standing, self._stages.encoding.clock, self._stages.ledger.failures
        done = standing.total - standing.missing + self.encoded + self.copied + len(failures)
        last = (
            f"sample {failures[-1].number:,} ({failures[-1].stage}: {failures[-1].error})" if failures else ""
        )
        return Snapshot(
            name=standing.name,
            total=standing.total,
            done=done,
            encoded=self.encoded,
            seconds=now - self._begun,
            rate=self._rate(now, self.encoded + self.copied),
            written_bytes=self._stages.writer.bytes,
            readers=tuple(self._stages.feed.views()),
            device=standing.device,
            group=clock.numbers,
            call_s=clock.seconds / max(1, clock.calls),
            busy=self._busy(now),
            shard_fill=self._stages.writer.shard_fill,
            quarantined=standing.quarantined + len(failures),
            last_failure=last,
        )

    def _busy(self, now: float) -> float:
        clock = self._stages.encoding.clock
        if self._first is None or now <= self._first:
            return 0.0
        return min(1.0, clock.seconds / clock.lanes / (now - self._first))
