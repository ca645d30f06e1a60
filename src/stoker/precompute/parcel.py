"""What reaches the encoder: the arrays of a group, or of a stretch of time of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from stoker.precompute.arena import private_arrays
from stoker.precompute.layout import Layout
from stoker.precompute.queue import GroupWork
from stoker.schema import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Parcel:
    """Arrays ready to be encoded."""

    work: GroupWork
    """The group they belong to."""
    arrays: Sample
    """`(samples, *shape)` by field; rows of members that are missing are zeros."""
    start: int = 0
    """First time step held; above 0 for later stretches of a long sample."""
    last: bool = True
    """Nothing of this group comes after it."""
    owned: bool = False
    """The memory is this parcel's alone, and need not be copied to outlive it."""
    origin: Any = None
    """For whoever made it: what to free on release."""
    over: bool = False
    """It holds nothing: no more of a sample will come of which stretches came before."""

    @classmethod
    def end(cls, work: GroupWork) -> Parcel:
        """Return one that says that a sample is over before its end: what is there of its record can go."""
        return cls(work=work, arrays={}, last=False, origin=(-1, -1), over=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderView:
    """What a reader is doing, for progress displays."""

    number: int
    """Counted from 1 in order of starting."""
    stage: str
    """`start`, `open`, `read` or `wait`."""
    sample: int
    """Sample in hand, or -1."""
    seconds: float
    """Time since its last sign of life."""
    processor_s: float = 0.0
    """Processor time that it has used so far."""
    name: str = ""
    """What it is called in place of `reader` and its number: a node that reads and encodes."""


class Feed(Protocol):
    """Where parcels come from: reader processes, or this process itself."""

    def poll(self, timeout_s: float) -> list[Parcel]:
        """Parcels that are ready, after waiting at most `timeout_s` for the first."""
        ...

    def release(self, parcel: Parcel) -> None:
        """The arrays are not looked at any more."""
        ...

    @property
    def finished(self) -> bool:
        """Nothing will come any more."""
        ...

    def views(self) -> list[ReaderView]:
        """What each reader is doing."""
        ...

    def close(self) -> None:
        """End all readers, without waiting for what they are doing."""
        ...


@dataclass(slots=True)
class Assembly:
    """Puts one group together from pieces (mode `pieces`)."""

    layout: Layout
    arrays: Sample = field(default_factory=dict[str, Any])

    def add(self, slot: memoryview, chunk: list[Any]) -> None:
        """Copy one run of bytes: `[field, member, offset, size, length]`, length -1 for a fixed shape."""
        name, member, offset, size, length = chunk
        if name not in self.arrays:
            self.arrays |= self._allocate(name, length)
        row = self.arrays[name][member : member + 1]
        row.reshape(-1).view(np.uint8)[offset : offset + size] = np.frombuffer(slot[:size], np.uint8)

    def finish(self) -> Sample:
        """The whole group; fields of which nothing came (all members absent or failing) are zeros."""
        for name in self.layout.schema:
            if name not in self.arrays:
                self.arrays |= self._allocate(name, 0)
        return {name: self.arrays[name] for name in self.layout.schema}

    def _allocate(self, name: str, length: int) -> Sample:
        spec = self.layout.schema[name]
        shape = (self.layout.samples, *((length, *spec.shape[1:]) if spec.ragged else spec.shape))
        return private_arrays(self.layout.schema, {name: shape})
