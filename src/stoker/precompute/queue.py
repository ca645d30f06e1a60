"""Order of what is left to encode, and the samples that have failed.

Groups are handed out so that what a worker has decoded serves its next group.

A group is `samples` consecutive numbers of one part, counted from the part's beginning. So it is the same
group whatever is missing, whichever worker reads it, and however far the source has grown since. Little is
held for each; a `ReadTask` is made when it is handed out.

Groups and runs (rows of chunks) rarely end together: a group that lies across two runs needs both of them
decoded. Were runs dealt out in turn, every one of them would be decoded by two workers. So each worker works
through a stretch of its own from front to back. One that has nothing left takes half of the longest stretch.
That cut costs a run decoded twice, unless a group ends there, so few cuts of the costly kind are made.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from stoker.errors import Argument, IncompleteError, SourceError, arg
from stoker.precompute.arena import LoadedBatch, ReadTask
from stoker.precompute.progress import WorkerView
from stoker.precompute.worker import CHANGED, SampleFault
from stoker.store import Failure

_ITEM_BYTES = 16 * 1024**2
_ITEM_GROUPS = 256
_RUNS_A_SHARED_ONE = 12
"""One run in so many may be decoded twice; at least one, since a second worker gains more than that costs."""
_NOBODY = -1
FIRST_START_S = 2.0
"""What the first child of a program takes to import torch; later ones are forked in milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSpan:
    """First sample and number of samples of a part."""

    offset: int
    """Number of its first sample."""
    count: int
    """Its samples."""


@dataclass(slots=True, kw_only=True)
class _Stretch:
    """Consecutive groups that one worker works through."""

    owner: int
    """Number of the worker, or `_NOBODY`."""
    next: int
    """The first group not handed out."""
    stop: int
    """The first group after it."""


class WorkQueue:
    """Groups with missing members, in order for each worker; those given back come again last."""

    def __init__(
        self,
        parts: Sequence[PartSpan],
        group_samples: int,
        missing: NDArray[np.int64],
        *,
        bad: Callable[[int], bool],
    ) -> None:
        self._parts = parts
        self._size = group_samples
        self._missing = missing
        self._bad = bad
        offsets = np.array([part.offset for part in parts], np.int64)
        self._part_of = np.searchsorted(offsets, missing, side="right") - 1
        base = offsets[self._part_of] if len(missing) else missing
        self._firsts, index = np.unique(
            base + (missing - base) // group_samples * group_samples, return_index=True
        )
        self._group_parts = self._part_of[index]
        self.settled: set[int] = set()
        """Members that are stored without being encoded."""
        self._again: deque[ReadTask] = deque()
        self.on_hold: frozenset[int] = frozenset()
        """Parts of which nothing is handed out: whether their storage answers is about to be known."""
        self._outstanding = 0
        self._stretches = [_Stretch(owner=_NOBODY, next=0, stop=len(self._firsts))]
        self._edges = np.arange(1, len(self._firsts))
        self._clean = np.ones(len(self._edges), bool)
        self._shared = 0
        self._weight = 1

    def follow_runs(self, runs: Sequence[range], group_bytes: int) -> None:
        """Cut between workers where runs end from now on.

        Args:
            runs: Of the source; a group goes with the run of its first member.
            group_bytes: Bytes of one group's samples, to judge how much to hand out at a time.
        """
        starts = np.array([run.start for run in runs], np.int64)
        owner = np.searchsorted(starts, self._firsts, side="right") - 1
        self._edges = np.flatnonzero(np.diff(owner)) + 1
        # Clean: the group before ends with its run, or earlier, so no worker needs the runs of both sides.
        ends = np.append(starts[1:], runs[-1].stop)[owner] if len(runs) else self._firsts
        parts = np.array([part.offset + part.count for part in self._parts], np.int64)
        lasts = np.minimum(self._firsts + self._size, parts[self._group_parts])
        self._clean = (lasts <= ends)[self._edges - 1]
        self._weight = max(1, group_bytes)

    def follow_blocks(self, blocks: NDArray[np.int64]) -> None:
        """Hand out block after block, to any worker, so that the first are whole before the last are begun.

        Args:
            blocks: Stretches `[start, stop)` of samples that end where groups do, `(n, 2)`.
        """
        bounds = np.searchsorted(self._firsts, blocks).tolist()
        self._stretches = [_Stretch(owner=_NOBODY, next=low, stop=high) for low, high in bounds if low < high]

    @property
    def groups(self) -> int:
        """Groups of this run in all."""
        return len(self._firsts)

    @property
    def finished(self) -> bool:
        """Nothing left to hand out, and nothing handed out that has not come back."""
        return self._outstanding == 0 and not self.has_more

    @property
    def has_more(self) -> bool:
        """Something is left to hand out."""
        return bool(self._again) or self.untaken > 0

    def wanted(self, work: ReadTask) -> list[int]:
        """Return the members to encode: missing, and neither set aside nor settled in the meantime."""
        low, high = np.searchsorted(self._missing, (work.numbers.start, work.numbers.stop))
        settled = self.settled
        return [n for n in self._missing[low:high].tolist() if not self._bad(n) and n not in settled]

    def absent(self, work: ReadTask) -> list[int]:
        """Return the members that are zeros: they have been set aside."""
        return [number for number in work.numbers if self._bad(number)]

    @property
    def untaken(self) -> int:
        """Groups that were never handed out."""
        return sum(stretch.stop - stretch.next for stretch in self._stretches)

    def is_worth_a_start(
        self, seconds: float, *, part_read: float = 0.0, times: float = 1.0, batches: float | None = None
    ) -> bool:
        """Return True if what is left takes longer than the start of the first child of a program.

        Args:
            seconds: Time spent on the groups that are done, of the kind that children could have spent.
            part_read: The part of a group that is read already.
            times: Factor on the start time: the rest must take this many times longer.
            batches: Groups on which `seconds` were spent; None: all that are done.
        """
        left = self.untaken + self._outstanding + len(self._again) - part_read
        done = self.groups - left if batches is None else batches
        return done > 0 and left * seconds / done > times * FIRST_START_S

    def take(self, worker: int, workers: int) -> list[ReadTask]:
        """Return the next item for `worker` out of `workers`: consecutive groups, or nothing."""
        while self._again:
            suits = (i for i, work in enumerate(self._again) if self._suits(work, worker, workers))
            place = next(suits, None)
            if place is None or (self.untaken and self._again[place].avoid >= 0):
                break  # what failed once comes after everything else: its storage may be back by then
            work = self._again[place]
            del self._again[place]
            if self.wanted(work):
                self._outstanding += 1
                return [work]
        while (stretch := self._stretch(worker)) is not None:
            stop = min(stretch.stop, stretch.next + self._item_groups(stretch, workers))
            if self.on_hold:
                stop = next((key for key in range(stretch.next, stop) if self._held(key)), stop)
            works = [self._work(key) for key in range(stretch.next, stop)]
            stretch.next = stop
            if works := [work for work in works if self.wanted(work)]:
                self._outstanding += len(works)
                return works
        return []

    def _suits(self, work: ReadTask, worker: int, workers: int) -> bool:
        return work.part not in self.on_hold and (workers < 2 or work.avoid != worker)

    def _held(self, key: int) -> bool:
        return bool(self.on_hold) and int(self._group_parts[key]) in self.on_hold

    def leave(self, worker: int) -> None:
        """Note that a worker is gone: its stretch is free."""
        for stretch in self._stretches:
            if stretch.owner == worker:
                stretch.owner = _NOBODY

    def _item_groups(self, stretch: _Stretch, workers: int) -> int:
        left = (stretch.stop - stretch.next) // (4 * max(workers, 1))
        return max(1, min(_ITEM_BYTES // self._weight, _ITEM_GROUPS, left))

    def _stretch(self, worker: int) -> _Stretch | None:
        """Return the stretch that `worker` continues with: its own, a free one, or half of the longest."""
        self._stretches = [stretch for stretch in self._stretches if stretch.next < stretch.stop]
        ready = [stretch for stretch in self._stretches if not self._held(stretch.next)]
        for owner in (worker, _NOBODY):
            for stretch in ready:
                if stretch.owner == owner:
                    stretch.owner = worker
                    return stretch
        for stretch in sorted(ready, key=lambda one: one.next - one.stop):
            cut = self._cut(stretch)
            if cut is not None:
                rest = _Stretch(owner=worker, next=cut, stop=stretch.stop)
                stretch.stop = cut
                self._stretches.append(rest)
                return None if self._held(cut) else rest
        return None

    def _cut(self, stretch: _Stretch) -> int | None:
        """Return where to halve a stretch: at a clean edge near the middle, else while the price is low.

        A last group goes to the other worker where that decodes nothing twice.
        """
        if stretch.stop - stretch.next == 1:
            free = not len(self._edges) or stretch.next in self._edges[self._clean]
            return stretch.next if free else None
        low, high = np.searchsorted(self._edges, (stretch.next + 1, stretch.stop))
        edges, clean = self._edges[low:high], self._clean[low:high]
        middle, size = (stretch.next + stretch.stop) / 2, stretch.stop - stretch.next
        if not len(self._edges):
            return stretch.next + size // 2  # one run: the source has no wish
        spent = self._shared >= max(1, (len(self._edges) + 1) // _RUNS_A_SHARED_ONE)
        if clean.any():
            nearest = int(edges[clean][np.abs(edges[clean] - middle).argmin()])
            if spent or abs(nearest - middle) <= size / 4:
                return nearest
        if spent:
            return None
        self._shared += 1
        return int(edges[np.abs(edges - middle).argmin()]) if len(edges) else stretch.next + size // 2

    def _work(self, key: int) -> ReadTask:
        part = int(self._group_parts[key])
        first = int(self._firsts[key])
        end = self._parts[part].offset + self._parts[part].count
        return ReadTask(key=key, part=part, numbers=range(first, min(first + self._size, end)))

    def done(self, work: ReadTask) -> None:
        """Note that a group that was handed out is dealt with."""
        del work
        self._outstanding -= 1

    def give_back(self, work: ReadTask, *, avoid: int = -1) -> None:
        """Have a group that was handed out read again; `avoid` names the worker that failed on it."""
        self._outstanding -= 1
        work.avoid = avoid
        if avoid < 0:
            self._again.appendleft(work)
        else:
            self._again.append(work)

    def part_numbers(self, part: int) -> list[int]:
        """Return every number of a part that this run was to store."""
        return self._missing[self._part_of == part].tolist()


_FOR_WORKERS = 0.9
"""Part of the free memory that workers may still take; the rest is the encoder's and the writer's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerMemory:
    """Memory of the workers of a feed, by what they have held so far."""

    workers: int
    """Those at work."""
    largest_bytes: int
    """The most that one of them has held, without its arena; 0: the kernel does not say."""
    growth_bytes: int
    """Bytes that all of them would take in addition, if each held as much as that."""
    next_bytes: int
    """Bytes that one more would take."""

    def fitting(self, usable_bytes: int) -> int:
        """Return how many workers there may be; one fewer than there are where these do not fit.

        >>> memory = WorkerMemory(workers=2, largest_bytes=300, growth_bytes=100, next_bytes=500)
        >>> [memory.fitting(usable) for usable in (1500, 800, 600, 100)]
        [4, 3, 2, 1]
        """
        room = int(_FOR_WORKERS * usable_bytes) - self.growth_bytes
        return max(1, self.workers - 1 if room < 0 else self.workers + room // max(1, self.next_bytes))


class WorkerPool(Protocol):
    """Worker processes of a feed: how many there are, and how to have more or fewer of them."""

    given_up: bool
    """A worker could not be started, or memory was too short for it, and the run continues without it."""
    wake_fd: int
    """A descriptor whose readiness ends a poll early (signals)."""

    @property
    def workers(self) -> int:
        """Number of workers to have; those that are starting count."""
        ...

    @property
    def idle(self) -> int:
        """Workers that cannot continue because the caller has not taken what they read."""
        ...

    @property
    def losses(self) -> int:
        """Workers that died or were killed."""
        ...

    @property
    def abandoned(self) -> int:
        """Workers that could not be killed in time."""
        ...

    @property
    def all_delivering(self) -> bool:
        """Every worker has delivered something, so that waiting is no longer for their start."""
        ...

    def memory(self) -> WorkerMemory:
        """Return what the workers have held, to judge whether there is memory for one more."""
        ...

    def start(self, workers: int) -> None:
        """Put that many more workers to work."""
        ...

    def park(self) -> None:
        """Give one worker no more work."""
        ...


class BatchOwner(Protocol):
    """Owner of the arrays of batches that are lent to an encoder."""

    @property
    def pool(self) -> WorkerPool | None:
        """The workers, which are looked after at every poll and have timeouts; None: this process reads."""
        ...

    @property
    def reading(self) -> bool:
        """Something is being read, or is left to read; what was read may still have to be read again."""
        ...

    def release(self, batch: LoadedBatch) -> None:
        """Give the arrays back: they are not read any more."""
        ...


class SampleFeed(BatchOwner, Protocol):
    """Origin of batches: worker processes, or this process itself."""

    def poll(self, timeout_s: float) -> list[LoadedBatch]:
        """Return the batches that are ready, after waiting at most `timeout_s` for the first."""
        ...

    @property
    def finished(self) -> bool:
        """Nothing will come any more."""
        ...

    def views(self) -> list[WorkerView]:
        """Return what each worker is doing."""
        ...

    def close(self) -> None:
        """End all workers, without waiting for what they are doing."""
        ...


# ----------------------------------------------------------------------------------------------------------
# Who failed, how often, and what follows: the one place that decides between retry and quarantine.


ATTEMPTS = 2
"""Tries that a sample gets in one run."""
FIRST = 64
"""So many samples that fail before one was read end a run that may not quarantine them."""
_DEAD_AT_FIRST = 3
_DEAD_LATER = 8
_STUCK = 2


@dataclass(slots=True, kw_only=True)
class _PartRecord:
    """State of one part in this run."""

    answered: bool = False
    """A sample of it has been read."""
    hung: set[int] = field(default_factory=set[int])
    """Samples on which workers hung or died at their first try, since one was read."""
    stuck: int = 0
    """Workers that could not even be killed in the middle of it."""


class SampleLedger:
    """Counts attempts by sample and hangs by part.

    Args:
        bad: Numbers quarantined before this run that are not tried again.
        quarantine: Records failures durably, several at the cost of one.
        wanted: Whether a number is to be stored by this run; others that fail are only replaced by zeros.
        allowed: Samples that may be set aside, before this run and in it.
        place: Where a user finds a sample; put before its error, unless that says so itself.
        nan: As `PrecomputeSettings.nan`.
    """

    def __init__(
        self,
        bad: Iterable[int],
        *,
        quarantine: Callable[[Sequence[Failure]], None],
        wanted: Callable[[int], bool],
        allowed: float = math.inf,
        place: Callable[[int], str] = "sample {}".format,
        nan: str = "reject",
    ) -> None:
        self._nan = nan
        self._bad = set(bad)
        self._allowed = allowed
        self.place = place
        self._hopeless: list[int] | None = []
        self._quarantine = quarantine
        self._wanted = wanted
        self._attempts: dict[int, int] = {}
        self._parts: dict[int, _PartRecord] = {}
        self.failures: list[Failure] = []
        """Quarantined by this run, in order."""

    def is_bad(self, number: int) -> bool:
        """Return True if a sample is set aside, and zeros stand for it in its group."""
        return number in self._bad

    def fault(self, fault: SampleFault) -> bool:
        """Take note of a failed attempt; True when the sample is to be tried again.

        A fault that another try cannot repair, or the second one, sets the sample aside.

        Raises:
            SourceError: The source changed; no sample is at fault.
            IncompleteError: The first `FIRST` samples all failed, and they are more than is allowed.
        """
        if fault.stage == CHANGED:
            raise SourceError(fault.error, hint=fault.hint)
        attempts = self._attempts.get(fault.number, 0) + 1
        self._attempts[fault.number] = attempts
        if fault.retry and attempts < ATTEMPTS:
            return True
        where = self.place(fault.number)
        if where not in fault.error:
            fault = replace(fault, error=f"{where}: {fault.error}")
        self._set_aside([fault.number], fault)
        self._check_hope(fault)
        return False

    def attempts(self, number: int) -> int:
        """Return the number of failed attempts at a sample in this run."""
        return self._attempts.get(number, 0)

    def answered(self, part: int) -> None:
        """Note that a sample of `part` has been read, so its storage answers."""
        record = self._parts.setdefault(part, _PartRecord())
        record.answered = True
        record.hung.clear()
        self._hopeless = None

    def part_is_dead(self, part: int, number: int) -> bool:
        """Take note that a worker hung or died on `number`; True when the whole part is to be given up.

        A part that never answered is given up once workers were lost on three different samples of it. One
        that used to answer is given up after eight in a row. To try each of its samples would cost two
        timeouts each. A second try that fails like the first says nothing new about the part.
        """
        record = self._parts.setdefault(part, _PartRecord())
        if self.attempts(number) < ATTEMPTS:
            record.hung.add(number)
        return len(record.hung) >= (_DEAD_LATER if record.answered else _DEAD_AT_FIRST)

    def part_holds_workers(self, part: int) -> bool:
        """Take note that a worker of `part` cannot be killed; True, at the second, to give the part up.

        Each further try would cost a process that nothing can end, even where the part answered before.
        """
        record = self._parts.setdefault(part, _PartRecord())
        record.stuck += 1
        return record.stuck >= _STUCK

    def give_up(self, numbers: Iterable[int], fault: SampleFault) -> int:
        """Set aside every one of `numbers` that is not yet, for the reason in `fault`; how many."""
        rest = [number for number in numbers if number not in self._bad]
        self._set_aside(rest, fault)
        return len(rest)

    def _check_hope(self, fault: SampleFault) -> None:
        """Stop where not one sample could be read: it is a setting or the code then, not the data."""
        if self._hopeless is None or fault.kind != "sample" or fault.stage == "encode":
            return
        self._hopeless.append(fault.number)
        if len(self._hopeless) < FIRST or len(self._bad) <= self._allowed:
            return
        raise IncompleteError(
            f"the first {len(self._hopeless)} samples all failed, and none was read. The last is sample "
            f"{fault.number} ({fault.stage}): {fault.error}",
            hint=f"Fix the cause and {retry_hint({fault.stage}, self._nan)}. Or allow more samples to fail "
            f"with {arg('max_quarantined', 1.0)}",
        )

    def _set_aside(self, numbers: Sequence[int], fault: SampleFault) -> None:
        failures = [
            Failure(
                number=number,
                stage=fault.stage,
                error=fault.error,
                attempts=max(1, self._attempts.get(number, 0)),
                kind=fault.kind,
            )
            for number in numbers
            # What is stored already is not wanted; a failed second reading takes nothing away.
            if number not in self._bad and self._wanted(number)
        ]
        self._bad.update(numbers)
        self._quarantine(failures)
        self.failures += failures

    def take_over(self, failures: Sequence[Failure]) -> None:
        """Set aside what the ledger of a shared reading has set aside."""
        fresh = [f for f in failures if f.number not in self._bad and self._wanted(f.number)]
        self._bad.update(failure.number for failure in failures)
        self._quarantine(fresh)
        self.failures += fresh


def retry_hint(stages: set[str], nan: str) -> str:
    """Return how to have samples tried again that failed in one of `stages`, where NaN is `nan`."""
    again = precompute_argument("retry_quarantined=True", "{'retry_quarantined': True}")
    cached = f"run again with {again}"
    if nan == "allow" or stages.isdisjoint(("check", "encode")):
        return cached
    return (
        f"{cached}. To store NaN and infinity as they are, run again with {arg('nan', 'allow')} and "
        + precompute_argument("retry_quarantined=True", "{'nan': 'allow', 'retry_quarantined': True}")
    )


def precompute_argument(argument: str, cached: str) -> str:
    """Return an argument of `precompute`, as `stoker.cached` takes it too; on the command line a setting."""
    name, _, value = argument.partition("=")
    return Argument(f"precompute.{name}", value, f"{argument} (cached: precompute={cached})").marked
