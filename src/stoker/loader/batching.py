"""Decide which examples share a batch, where that is more than the next so many of an order.

A `BatchPlan` lists the examples of an epoch batch after batch. It follows from seed, epoch, and one number
for each example: its group, or its tokens. Two planners make plans. `GroupPlanner`: every batch has examples
of one group. `TokenPlanner`: records are packed to a budget of tokens. Each leaves no example out, repeats
none, and gives every rank the same number of batches. Planners hold no cache, so loaders may share one.
"""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError, arg
from stoker.loader.order import HostArrays, shuffled
from stoker.splitmix import keys_of, mix, stream
from stoker.units import format_count


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchPlan:
    """The batches of one epoch, step after step, and within a step rank after rank."""

    ids: NDArray[np.int64]
    """Examples in the order of the batches, `(examples,)`."""
    bounds: NDArray[np.int64]
    """Where each batch begins in `ids`, and the end, `(batches + 1,)`."""
    world_size: int
    """Batches of a step, one for each rank."""

    @property
    def steps(self) -> int:
        """Batches of each rank."""
        return (len(self.bounds) - 1) // self.world_size

    @property
    def step_bounds(self) -> NDArray[np.int64]:
        """Where each step begins in `ids`, and the end, `(steps + 1,)`."""
        return self.bounds[:: self.world_size]

    def step_at(self, position: int) -> int:
        """Return the first step that begins at or after a position of `ids`."""
        return min(self.steps, int(np.searchsorted(self.step_bounds, position)))

    def of_rank(self, rank: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return where the batches of a rank begin in `ids`, and their sizes, both `(steps,)`."""
        begins = self.bounds[:-1][rank :: self.world_size]
        return begins, self.bounds[1:][rank :: self.world_size] - begins


FULL_ONLY = ", drop_last"
"""Added to the rule of a planner that leaves batches out: the others are then served in another order."""


class BatchPlanner(ABC):
    """Makes the plan of each epoch, and keeps the last two. Safe to use from several threads."""

    text: str
    """The rule, as a loader's state keeps it: what decides its batches, in addition to the order."""
    batch_size: int
    """Examples in a full batch of one rank; where they are packed, about."""
    global_batch: int
    """Examples in a full step over all ranks; 0: it has no fixed number."""

    def __init__(self, count: int, *, seed: int, world_size: int, shuffle: bool, drop_last: bool) -> None:
        self._count, self._seed, self._shuffle = count, seed, shuffle
        self._world_size, self._drop_last = world_size, drop_last
        self._plans: dict[int, BatchPlan] = {}
        self._locks: dict[int, threading.Lock] = {}
        """By process: a lock that another thread held at a fork is never released in the child."""

    def __reduce__(self) -> str | tuple[object, ...]:
        """Pickle without the plans and locks."""
        state = {**self.__dict__, "_plans": {}, "_locks": {}}
        return object.__new__, (type(self),), state

    def epoch(self, epoch: int) -> BatchPlan:
        """Return the plan of an epoch.

        Raises:
            ConfigError: There are too few examples to give each rank as many batches.
        """
        plan = self._plans.get(epoch)
        if plan is not None:
            return plan
        with self._locks.setdefault(os.getpid(), threading.Lock()):
            if epoch not in self._plans:
                plan = self._make(stream(self._seed, epoch))
                self._plans = {**dict([*self._plans.items()][-1:]), epoch: plan}
            return self._plans[epoch]

    @abstractmethod
    def resumes(self, epoch: int, position: int, world_size: int) -> bool:
        """Return True if a state of that many ranks may resume here: the same examples are behind it."""

    @abstractmethod
    def _make(self, base: int) -> BatchPlan: ...

    def _order(self, base: int) -> NDArray[np.int64]:
        """Return all examples in the order of the epoch, before they are put into batches."""
        if not self._shuffle:
            return np.arange(self._count, dtype=np.int64)
        return shuffled(self._count, base, HostArrays())(0, self._count)

    def _serving_order(self, count: int, base: int) -> NDArray[np.int64]:
        """Return `count` steps or batches in the order in which they are served."""
        if not self._shuffle:
            return np.arange(count)
        return np.argsort(keys_of(mix(base + 1), np.arange(count, dtype=np.int64)), kind="stable")

    def _refuse(self, what: str) -> ConfigError:
        return ConfigError(
            f"{what} cannot be given to {self._world_size} ranks as equal numbers of batches without leaving "
            "some out",
            hint=f"Give {arg('drop_last', True)}, or use fewer ranks",
        )


class GroupPlanner(BatchPlanner):
    """Batches of one group each.

    The examples of a group are cut into full steps, in which every rank has a batch of it. What is left is
    one more step, shared out evenly over the ranks. Where fewer examples are left than there are ranks, a
    step has batches of several groups: batches are split in two until there are as many as ranks.
    """

    def __init__(  # noqa: PLR0913 - what a plan depends on
        self,
        groups: NDArray[np.int64],
        batch_size: int,
        *,
        by: str,
        seed: int,
        world_size: int,
        shuffle: bool,
        drop_last: bool,
    ) -> None:
        """Prepare to plan.

        Args:
            groups: Group of each example, numbered from 0, `(examples,)`.
            batch_size: Examples in a full batch of one rank.
            by: Names what groups are made of, for the state.
            seed, world_size, shuffle, drop_last: As of a `Loader`.

        Raises:
            ConfigError: `drop_last` leaves no batch.
        """
        super().__init__(len(groups), seed=seed, world_size=world_size, shuffle=shuffle, drop_last=drop_last)
        self.text = f"by {by}" + (FULL_ONLY if drop_last else "")
        self.batch_size, self.global_batch = batch_size, batch_size * world_size
        self._groups, self._counts = groups, np.bincount(groups)
        if drop_last and not (self._counts >= self.global_batch).any():
            raise ConfigError(
                f"drop_last leaves no batch: the largest of {format_count(len(self._counts), 'group')} has "
                f"{format_count(int(self._counts.max()), 'example')}, and a full step takes "
                f"{self.global_batch}",
                hint=f"Choose a smaller batch_size, or {arg('drop_last', False)}",
            )

    def resumes(self, epoch: int, position: int, world_size: int) -> bool:
        """As `BatchPlanner`; the plan is the same where no step has several groups."""
        rest = self._counts % self.global_batch
        return self._drop_last or not ((rest > 0) & (rest < max(world_size, self._world_size))).any()

    def _make(self, base: int) -> BatchPlan:
        order = self._order(base)
        grouped = order[np.argsort(self._groups[order], kind="stable")]
        begins, sizes = self._steps()
        step = self._serving_order(len(begins), base)
        begin, size = begins[step].reshape(-1), sizes[step].reshape(-1)
        bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(size)])
        places = np.arange(bounds[-1]) + np.repeat(begin - bounds[:-1], size)
        return BatchPlan(ids=grouped[places], bounds=bounds, world_size=self._world_size)

    def _steps(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return first place in the grouped order, and size, of each batch of each step: `(steps, ranks)`."""
        ranks, full = self._world_size, self.global_batch
        first = np.cumsum(self._counts) - self._counts
        full_steps, rest = self._counts // full, self._counts % full
        # Step by step in the order of the groups: those that are full, then what is left if ranks share it.
        is_shared = (rest >= ranks) & (not self._drop_last)
        steps = full_steps + is_shared
        group = np.repeat(np.arange(len(steps)), steps)
        place = np.arange(len(group)) - np.repeat(np.cumsum(steps) - steps, steps)
        length = np.where(place < full_steps[group], full, rest[group])
        begin = first[group] + place * full
        small = [] if self._drop_last else np.flatnonzero((rest > 0) & ~is_shared).tolist()
        fewest = int((-(-self._counts // self.batch_size)).sum())  # batches, if all are as large as possible
        if not self._drop_last and fewest + -fewest % ranks > self._count:
            raise self._refuse(f"{format_count(self._count, 'example')} in batches of {self.batch_size}")
        pool: list[tuple[int, int]] = []
        for g in small:
            pool += self._cut(int(first[g] + full_steps[g] * full), int(rest[g]))
        while -len(pool) % ranks > sum(size - 1 for _, size in pool):
            # Too few examples to split: those of the last of the largest steps are added.
            at = len(length) - 1 - int(np.argmax(length[::-1]))
            pool += self._cut(int(begin[at]), int(length[at]))
            begin, length = np.delete(begin, at), np.delete(length, at)
        for _ in range(-len(pool) % ranks):
            at = max(range(len(pool)), key=lambda place: (pool[place][1], place))
            start, size = pool[at]
            pool[at : at + 1] = [(start, size - size // 2), (start + size - size // 2, size // 2)]
        begins, sizes = self._parts(begin[:, None], length[:, None])
        mixed = np.array(pool, np.int64).reshape(-1, ranks, 2)
        return np.concatenate([begins, mixed[..., 0]]), np.concatenate([sizes, mixed[..., 1]])

    def _cut(self, begin: int, length: int) -> list[tuple[int, int]]:
        """Return begin and size of as few batches as hold so many examples."""
        size = self.batch_size
        return [(begin + at, min(size, length - at)) for at in range(0, length, size)]

    def _parts(self, begin: NDArray[np.int64], length: NDArray[np.int64]) -> tuple[NDArray[np.int64], ...]:
        """Return begin and size of each rank's part of steps: `(..., ranks)`."""
        cuts = length * np.arange(self._world_size + 1) // self._world_size
        return begin + cuts[..., :-1], np.diff(cuts, axis=-1)


WINDOW_BATCHES = 1024
"""Batches whose records are packed together. Part of the order, therefore fixed."""


class TokenPlanner(BatchPlanner):
    """Records packed to a budget of tokens, by best fit.

    The shuffled order is cut into windows of `WINDOW_BATCHES` budgets. In each, the longest record that is
    left goes to the batch with the least room that takes it (best-fit decreasing; Johnson, 1973; for
    training: Ding et al., ICML 2024). Then batches are shuffled. If ranks would have different numbers of
    batches, the last ones that have several records are split in two.
    """

    def __init__(
        self,
        lengths: NDArray[np.int64],
        budget: int,
        *,
        seed: int,
        world_size: int,
        shuffle: bool,
        drop_last: bool,
    ) -> None:
        """Prepare to plan.

        Args:
            lengths: Tokens of each record, none above `budget`, `(records,)`.
            budget: Tokens of a batch of one rank at most.
            seed, world_size, shuffle, drop_last: As of a `Loader`.
        """
        super().__init__(len(lengths), seed=seed, world_size=world_size, shuffle=shuffle, drop_last=drop_last)
        self._lengths, self._budget = lengths, budget
        self.text = f"{budget} tokens" + (FULL_ONLY if drop_last else "")
        self.global_batch = 0
        self.batch_size = max(1, int(len(lengths) * budget // max(1, int(lengths.sum()))))
        self.batch_size = min(self.batch_size, max(1, len(lengths)))

    def resumes(self, epoch: int, position: int, world_size: int) -> bool:
        """As `BatchPlanner`; the order of records is the same for any number of ranks."""
        return position in self.epoch(epoch).step_bounds

    def _make(self, base: int) -> BatchPlan:
        order = self._order(base)
        lengths = self._lengths[order]
        total, window = np.cumsum(lengths), WINDOW_BATCHES * self._budget
        cuts = np.searchsorted(total, np.arange(window, int(total[-1]), window), side="right")
        batch_of, batches = np.empty(len(order), np.int64), 0
        for begin, end in zip([0, *cuts.tolist()], [*cuts.tolist(), len(order)], strict=True):
            batch_of[begin:end] = best_fit(lengths[begin:end], self._budget) + batches
            batches = int(batch_of[begin:end].max(initial=batches - 1)) + 1
        batch_order = self._serving_order(batches, base)
        if not self._shuffle:  # by the first record of each
            batch_order = np.argsort(np.unique(batch_of, return_index=True)[1])
        place = np.empty(batches, np.int64)
        place[batch_order] = np.arange(batches)
        place_of = place[batch_of]
        sizes = np.bincount(place_of, minlength=batches)
        ids = order[np.argsort(place_of, kind="stable")]
        bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
        surplus = batches % self._world_size
        if self._drop_last:
            bounds = bounds[: len(bounds) - surplus]
            if len(bounds) == 1:
                raise ConfigError(
                    f"drop_last leaves no batch: batches of up to {self._budget} "
                    f"tokens, {batches} of them, are fewer than {self._world_size} ranks",
                    hint=f"Choose a smaller {arg('batch_tokens')}, or {arg('drop_last', False)}",
                )
        elif surplus:
            bounds = self._split(bounds, self._world_size - surplus)
        return BatchPlan(ids=ids[: bounds[-1]], bounds=bounds, world_size=self._world_size)

    def _split(self, bounds: NDArray[np.int64], times: int) -> NDArray[np.int64]:
        """Return the bounds with the last batches of several records split in two, so that many more."""
        cuts = bounds.tolist()
        while times:
            before = times
            for at in range(len(cuts) - 1, 0, -1):
                if times and cuts[at] - cuts[at - 1] > 1:
                    cuts.insert(at, (cuts[at - 1] + cuts[at] + 1) // 2)
                    times -= 1
            if times == before:
                raise self._refuse(
                    f"{format_count(self._count, 'record')} in batches of up to {self._budget} tokens"
                )
        return np.array(cuts, np.int64)


def best_fit(lengths: NDArray[np.int64], budget: int) -> NDArray[np.int64]:
    """Return the batch of each record, numbered from 0: the longest first, each where the least room is left.

    Args:
        lengths: Tokens of each record, none above `budget`.
        budget: Tokens of a batch.

    >>> best_fit(np.array([5, 3, 4, 2, 6]), 10).tolist()
    [1, 1, 0, 1, 0]
    """
    if not len(lengths):
        return np.empty(0, np.int64)
    order = np.argsort(-lengths, kind="stable")
    batch_of = np.empty(len(lengths), np.int64)
    # Room and number of each batch that may still take something, in one sorted list of whole numbers.
    bits = len(lengths).bit_length()
    low, shortest = (1 << bits) - 1, int(lengths.min())
    rooms: list[int] = []
    batches, numbers = 0, list[int]()
    for length in lengths[order].tolist():
        at = bisect_left(rooms, length << bits)
        if at == len(rooms):
            room, batch = budget, batches
            batches += 1
        else:
            entry = rooms.pop(at)
            room, batch = entry >> bits, entry & low
        numbers.append(batch)
        if room - length >= max(1, shortest):
            insort(rooms, (room - length) << bits | batch)
    batch_of[order] = numbers
    return batch_of
