"""Make the next batches while the step computes, where that was seen to pay.

Waking a thread costs some 30 us, more than a small batch takes, and a step that leaves no core free gains
nothing. So both ways are timed, a strip of batches each, and the quicker one is kept; the other is tried
again ever more rarely. Batches are the same, in the same order: only who makes them changes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, islice
from time import perf_counter
from typing import Any, Generic, TypeVar

from stoker.runtime.threads import Pool, Ticket, ending

T = TypeVar("T")

HANDOVER_S = 30e-6
"""What it costs to have another thread make something.

Source: `benchmarks/plan_stall.py`, 2 cores.
"""
GAIN = 0.01
"""Part of a step's time that there must be to gain before the thread is tried."""
SLOWER = 3
"""Strips in a row that must be slower with the thread, by more than `GAIN`, before it is given up."""
MOST_STRIPS = 64
"""Strips, at most, until it is tried again."""
TURN_S = 1e-3
"""Small batches are made several at a time, of so many seconds together: one waking for all of them. To wake
a thread on an idle core takes the waking one 30 to 100 us too.

Source: `benchmarks/plan_stall.py`, W2 with a step of 2 ms, 2 cores.
"""
MOST_AT_ONCE = 8
DEADLINE_S = 300.0
"""Seconds that one batch from memory may take."""
BEGIN_DEADLINE_S = 3600.0
"""Seconds until the next strip is there; what is waited for meanwhile has its own, shorter ones."""


class Turn:
    """What all passes of a loader share: the last strip that was begun by a thread."""

    def __init__(self) -> None:
        self.ticket: Ticket[Any] | None = None

    def wait(self) -> None:
        """Until that strip has begun; a pass that was left may still be at it."""
        if self.ticket is not None:
            self.ticket.wait(BEGIN_DEADLINE_S)
        self.ticket = None


class Strips(Generic[T]):
    """The strips of one pass. Beginning one takes milliseconds (the order, a look at what is held, slices),
    so where batches are made by a thread, it begins the next strip too, behind the last batches of this one.
    """

    def __init__(self, source: Iterator[T], turn: Turn) -> None:
        self._source = source
        self._turn = turn
        self._ticket: Ticket[T | None] | None = None

    def __iter__(self) -> Strips[T]:
        """Itself."""
        return self

    def __next__(self) -> T:
        """The next strip, begun now unless it was before."""
        ticket, self._ticket = self._ticket, None
        if ticket is None:
            self._turn.wait()
            return next(self._source)
        self._turn.ticket = None  # it refers to what batches come from
        found = ticket.result(BEGIN_DEADLINE_S, "beginning the next batches")
        if found is None:
            raise StopIteration
        return found

    def begin(self, pool: Pool) -> None:
        """Have the next one begun by a thread."""
        self._ticket = self._turn.ticket = pool.submit(partial(next, self._source, None))

    def close(self) -> None:
        """End the pass; nothing of it is at work afterwards."""
        if self._ticket is not None and not ending():
            self._turn.wait()
        self._ticket = None


class Ahead:
    """Decides for one loader. Called by the thread that iterates."""

    def __init__(self, *, cores: int, clock: Callable[[], float] = perf_counter) -> None:
        """`cores` are those that this process may use; with one there is nothing to gain."""
        self._pool = Pool(1, "stoker-ahead") if cores > 1 else None
        self._clock = clock
        self.beside = False
        """Whether batches are made beside the step now."""
        self._begun_s = 0.0
        self._count = 0
        self._made: deque[float] = deque(maxlen=3)
        """Seconds in which the first batches of the last strips were made in line."""
        self._inline_s = 0.0
        """Seconds of a batch and its step when the last strip was made in line."""
        self._left = 0
        """Strips until the thread is tried again."""
        self._patience = 1
        self._slower = 0

    def of(self, batches: Iterable[Any], count: int, strips: Strips[Any] | None = None) -> Iterator[Any]:
        """The `count` batches of a strip, made in whichever way is the quicker one; `strips` follow."""
        source = iter(batches)
        if self._pool is None:
            return source
        self._count, self._begun_s = count, self._clock()
        if self.beside:
            at_once = max(1, min(MOST_AT_ONCE, int(TURN_S / max(self._made[-1], 1e-9))))
            then = partial(strips.begin, self._pool) if strips else _nothing
            return _made_ahead(source, self._pool, at_once, count, then)
        first = _some(source, 1)
        self._made.append(self._clock() - self._begun_s)
        return chain(_drained(first), source)

    def ended(self) -> None:
        """The last step of the strip is over: compare, and choose for the next one."""
        if self._pool is None or not self._count:
            return
        each_s, self._count = (self._clock() - self._begun_s) / self._count, 0
        if self.beside:
            self._slower = self._slower + 1 if each_s > (1 + GAIN) * self._inline_s else 0
            if self._slower == SLOWER:
                self.beside, self._slower = False, 0
                self._left = self._patience = min(MOST_STRIPS, 4 * self._patience)
            return
        self._inline_s = each_s
        self._left -= 1
        # The least that there is to hide, and the least to hide it behind: where in doubt, in line.
        gain_s = min(*self._made, each_s - max(self._made)) - HANDOVER_S
        self.beside = len(self._made) > 1 and self._left <= 0 and gain_s > GAIN * each_s


def _made_ahead(
    source: Iterator[Any], pool: Pool, at_once: int, count: int, then: Callable[[], None]
) -> Iterator[Any]:
    """The `count` batches of `source`, made while those before are used; `then`, once all are asked for."""
    size, left = 1, count - 1
    made = _some(source, 1)  # nothing is used meanwhile, so another thread would not be quicker
    ticket: Ticket[deque[Any]] | None = None
    try:
        while made:
            size = min(at_once, 2 * size, left)
            left -= size
            ticket = pool.submit(partial(_some, source, size)) if size else None
            if not left:
                then()
                then = _nothing
            yield from _drained(made)
            made = ticket.result(DEADLINE_S, "a batch from memory") if ticket else ()
    finally:
        if ticket is not None and not ending():  # alive at the exit: the thread may never come back
            ticket.wait(DEADLINE_S)  # two threads must not gather into the same buffers


def _nothing() -> None:
    """Nothing follows."""


def _some(source: Iterator[Any], count: int) -> deque[Any]:
    return deque(islice(source, count))


def _drained(made: deque[Any]) -> Iterator[Any]:
    """Batches that are let go of one by one: the memory of a large one is wanted for the next."""
    while made:
        yield made.popleft()
