"""One account of memory for all loaders of a process, so that two do not plan for the same free bytes.

A loader claims what it means to hold the moment it has decided, long before a byte of it is read: until then
the machine reports that memory as free to everybody. Records that the system shares (a mapped shard, which
two loaders of one cache both serve) are counted once. Arithmetic only; nothing here asks the machine.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Hashable, Mapping
from dataclasses import replace
from weakref import WeakSet

from stoker.plan.resources import Resources
from stoker.units import format_bytes


class Claim:
    """The memory that one loader reserves, and how much of it is filled. It ends with its last reference."""

    __slots__ = ("__weakref__", "_ledger", "parts", "taken")

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.parts: dict[str, Mapping[Hashable, int]] = {}
        """Per memory (`host`, or a device's name) the bytes of each part, by a key that tells parts apart."""
        self.taken: dict[str, int] = {}
        """Per memory the bytes that the machine no longer reports as free because of this claim."""

    def usable(self, resources: Resources, wanted: Collection[Hashable] = ()) -> Resources:
        """What this claim may be of: free bytes, its own again, less what others claim and have not taken.

        Args:
            resources: As the machine reports them.
            wanted: Keys of parts that this claim wants; holding what another one holds costs nothing.
        """
        host = self._ledger.balance("host", self, wanted)
        device = self._ledger.balance(resources.device, self, wanted)
        return replace(
            resources,
            host_bytes=max(0, resources.host_bytes + host),
            host_limit=resources.host_limit + _less(host),
            device_bytes=max(0, resources.device_bytes + device),
            device_name=resources.device_name + _less(device),
        )


class Ledger:
    """All claims of a process. For several threads at once."""

    def __init__(self) -> None:
        self._claims: WeakSet[Claim] = WeakSet()
        self._lock = threading.Lock()

    def claim(self) -> Claim:
        """A new claim, of nothing yet."""
        made = Claim(self)
        with self._lock:
            self._claims.add(made)
        return made

    def balance(self, memory: str, own: Claim, wanted: Collection[Hashable]) -> int:
        """Bytes to add to what the machine reports as free of `memory`, for `own`; mostly below 0."""
        with self._lock:
            others = [claim for claim in self._claims if claim is not own]
        parts: dict[Hashable, int] = {}
        for claim in others:
            parts.update(claim.parts.get(memory, {}))
        due = sum(size for key, size in parts.items() if key not in wanted)
        taken = sum(claim.taken.get(memory, 0) for claim in others)
        return own.taken.get(memory, 0) - max(0, due - taken)


def _less(balance: int) -> str:
    return f", less {format_bytes(-balance)} for other loaders" if balance < 0 else ""


LEDGER = Ledger()
"""The account of this process."""
