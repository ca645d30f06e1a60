"""Who encodes the parcels of a run: this process, or one process for each of several devices (`crew.py`)."""

from __future__ import annotations

from typing import Protocol

from stoker.errors import Interrupted
from stoker.precompute.clock import EncodeClock
from stoker.precompute.encode import Encoded, GroupEncoder
from stoker.precompute.fill import SampleFault
from stoker.precompute.ledger import Ledger
from stoker.precompute.parcel import Feed, Parcel
from stoker.precompute.queue import WorkQueue
from stoker.precompute.watchdog import EncodeWatchdog


class Encoding(Protocol):
    """Takes parcels and gives records, in whatever order. Called by one thread."""

    clock: EncodeClock
    """Time inside the encoder, on all devices."""

    @property
    def hungry(self) -> bool:
        """Some encoder has nothing to do."""
        ...

    def take(self, parcel: Parcel) -> bool:
        """Have a parcel encoded; False when there is no room for it now.

        From then on it is this object that gives it back to its feed.

        Raises:
            StokerError: No other sample, and no other device, would mend what went wrong.
        """
        ...

    def results(self) -> list[Encoded]:
        """What has been encoded since the last call. Errors as `take`."""
        ...

    def wait(self, timeout_s: float) -> None:
        """Return when there may be results or room, or after `timeout_s`."""
        ...

    def processor_s(self) -> float:
        """Processor time that processes of its own have used."""
        ...

    def close(self) -> None:
        """End the processes that it started; safe to call twice."""
        ...


class InPlace:
    """An `Encoding` in this process: what is taken is encoded at once, while `take` waits."""

    def __init__(
        self, encoder: GroupEncoder, watchdog: EncodeWatchdog, feed: Feed, queue: WorkQueue, ledger: Ledger
    ) -> None:
        self._encoder = encoder
        self._watchdog = watchdog
        self._feed = feed
        self._queue = queue
        self._ledger = ledger
        self._ready: list[Encoded] = []
        self.clock = encoder.clock

    @property
    def hungry(self) -> bool:
        """See `Encoding`."""
        return True

    def take(self, parcel: Parcel) -> bool:
        """See `Encoding`."""
        if self._ready:
            return False
        # Noted, and told here: a call that was given up must not write to the folder later on, and must not
        # keep it, with its lock, in memory.
        faults: list[SampleFault] = []
        wanted = self._queue.wanted(parcel.work)
        try:
            encoded = self._watchdog.run(lambda: self._encoder.encode(parcel, wanted, faults.append))
        except Interrupted:
            return True  # the loop that calls looks at signals itself
        finally:
            for fault in [*faults]:
                self._ledger.fault(fault)
        self._feed.release(parcel)
        if encoded is not None:
            self._ready.append(encoded)
        return True

    def results(self) -> list[Encoded]:
        """See `Encoding`."""
        ready, self._ready = self._ready, []
        return ready

    def wait(self, timeout_s: float) -> None:
        """Nothing goes on here."""

    def processor_s(self) -> float:
        """There are no such processes."""
        return 0.0

    def close(self) -> None:
        """Nothing to end."""
