"""Order the examples of a cache that is being filled, and give its chunks as their records become available.

Examples come in the order in which the cache is filled (`stoker.store.cache`): window after window of some
blocks, shuffled inside each. A window is served once every sample of it is settled, stored or quarantined.
So the examples and their order depend on the seed, the epoch and the samples alone, not on when anything was
ready. Samples that prove to be quarantined are passed over, and batches are filled up with those
that follow; a position counts all examples, also those passed over. From the next epoch on the cache is
complete, and the order is the one that was asked for.

Each of several ranks takes its part of the same order. None passes over a sample: another rank may have it,
since it looked later or has another copy of the cache, and would serve other batches from there on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from stoker.errors import ConfigError, IncompleteError, MissingRecordError, StalledError, arg
from stoker.loader.batch import Examples, Windows, main_field, number_examples
from stoker.loader.choose import Draw, check_rows
from stoker.loader.chunks import BatchRun, Chunk, Locator
from stoker.loader.order import Draws, Order, OrderKind, RankShare, apportion, make_draws
from stoker.loader.records import RecordTable, as_indices, find_records, lengths_of, trajectory_lengths
from stoker.splitmix import Salt, keys_of, stream
from stoker.store.cache import BLOCKS, fill_blocks
from stoker.units import format_count

if TYPE_CHECKING:
    from stoker.loader.options import Options
    from stoker.store import Cache, Recipe
    from stoker.store.cache import BackgroundFill

# ----------------------------------------------------------------------------------------------------------
# The order of examples while a cache is filled: as it is filled, shuffled within windows of blocks.


WINDOWS, WINDOW_BLOCKS, WINDOW_SAMPLES = 64, 4, 64
"""Examples are shuffled among themselves in each of about so many windows of a set. In a small set a window
is several blocks, or one block that holds enough samples. Part of the order, hence fixed."""
KIND = f"fill({BLOCKS},{WINDOWS},{WINDOW_BLOCKS},{WINDOW_SAMPLES})"
ROOM = 1 << 32
"""Numbers set aside for the examples of a record whose length is not known before it is encoded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FillWindow:
    """Records whose examples are shuffled together."""

    begin: int
    """Position of its first example."""
    stop: int
    """Position after its last one; where lengths vary, most positions are of no example."""
    slots: NDArray[np.int64]
    """The records, by their place among those that the loader serves."""


class FillOrder:
    """The order of examples as a cache is filled: a pure function of recipe, options and epoch.

    Raises:
        ConfigError, MissingRecordError: `indices` are not samples of it, or `weights` not one for each.
    """

    def __init__(self, recipe: Recipe, options: Options) -> None:
        windows, weights = options.windows, options.weights
        self.kind = KIND
        """What the state keeps of it."""
        self._seed, self._shuffled = options.seed, options.order != "sequential"
        self.indices = _numbers(recipe, options.indices)
        """Sample index of each record that is to be served, stored or not."""
        self.varying = windows is not None and recipe.schema[main_field(recipe.schema, windows)].ragged
        """How many examples a record has is known only once it is stored."""
        self.examples = _examples(recipe, windows, len(self.indices))
        self.per_record = self.examples.per_record
        self.draws = None if weights is None else make_draws(weights, self.table, self.examples)
        """What examples are drawn from by weight; None: each is served once."""
        self.windows = [*self._numbered(self._cut(fill_blocks(recipe)))]

    @property
    def table(self) -> RecordTable:
        """The records, none of them anywhere yet."""
        none = np.full(len(self.indices), -1, np.int32)
        return RecordTable(indices=self.indices, shard=none, row=none, chosen=None)

    def served(
        self, window: FillWindow, epoch: int, counts: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the examples of a window in the order of an epoch, and their positions in it.

        Args:
            counts: Examples of each of its records, 0 of one that is quarantined.
        """
        if self.draws is not None:
            return self._drawn(window, epoch, counts > 0)
        room = counts if self.varying else np.full(len(counts), self.per_record, np.int64)
        ends = np.cumsum(room)
        starts = np.arange(ends[-1] if len(ends) else 0, dtype=np.int64) - np.repeat(ends - room, room)
        examples = np.repeat(window.slots * self.per_record, room) + starts
        here = np.repeat(counts > 0, room)
        if self._shuffled:
            order = np.argsort(keys_of(stream(self._seed, epoch, Salt.FILLING), examples), kind="stable")
            examples, here = examples[order], here[order]
        return examples[here], window.begin + np.flatnonzero(here)

    def _drawn(
        self, window: FillWindow, epoch: int, here: NDArray[np.bool_]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """As many as the window has positions, by weight, of the records that are here; repeats occur."""
        assert self.draws is not None
        mass = np.diff(self.draws.cumulative, prepend=0.0)[window.slots] * here
        if not mass.any():
            return np.empty(0, np.int64), np.empty(0, np.int64)
        first = np.arange(len(here) + 1, dtype=np.int64) * self.per_record
        order = Order(
            kind=OrderKind(kind="full"),
            count=int(first[-1]),
            seed=self._seed,
            global_batch=1,
            draws=Draws(cumulative=np.cumsum(mass), first=first),
        )
        slot, start = np.divmod(order.epoch(epoch)(window.begin, window.stop), self.per_record)
        return window.slots[slot] * self.per_record + start, np.arange(window.begin, window.stop)

    def lost(self, gone: NDArray[np.bool_]) -> int:
        """Return the positions to which nothing comes where these of its records are quarantined.

        Of records of varying length none are counted: they have no examples that anybody knows of.
        """
        if self.varying:
            return 0
        if self.draws is None:
            return int(gone.sum()) * self.per_record
        left = np.diff(self.draws.cumulative, prepend=0.0) * ~gone
        return sum(w.stop - w.begin for w in self.windows if not left[w.slots].any())

    def _cut(self, blocks: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Return the records of each window."""
        if not self._shuffled:
            slots = np.arange(len(self.indices), dtype=np.int64)
            return np.array_split(slots, WINDOWS)
        by_start = np.argsort(blocks[:, 0])
        rank = by_start[np.searchsorted(blocks[by_start, 0], self.indices, side="right") - 1]
        slots = np.argsort(rank, kind="stable")
        some = -(-WINDOW_SAMPLES * len(blocks) // max(1, len(self.indices)))
        each = max(len(blocks) // WINDOWS, min(WINDOW_BLOCKS, some), 1)
        windows = -(-len(blocks) // each)
        return np.split(slots, np.searchsorted(rank[slots] // each, np.arange(1, windows)))

    def _numbered(self, pieces: Sequence[NDArray[np.int64]]) -> Iterator[FillWindow]:
        """Yield the windows with their positions; of draws each has its part by the weight of its records."""
        sizes = [len(piece) * self.per_record for piece in pieces]
        if self.draws is not None:
            mass = np.diff(self.draws.cumulative, prepend=0.0)
            wanted = (self.draws.samples or self.examples.count) / float(mass.sum())
            sizes = apportion([wanted * float(mass[piece].sum()) for piece in pieces])
        begin = 0
        for piece, size in zip(pieces, sizes, strict=True):
            if size:
                yield FillWindow(begin=begin, stop=begin + size, slots=piece)
            begin += size


def _numbers(recipe: Recipe, indices: Sequence[int] | NDArray[Any] | None) -> NDArray[np.int64]:
    if indices is None:
        return np.arange(recipe.count, dtype=np.int64)
    wanted = as_indices(indices)
    if len(wanted) == 0 or wanted.min() < 0 or wanted.max() >= recipe.count:
        raise MissingRecordError(f"indices= must name samples of the cache, from 0 to {recipe.count - 1}")
    return wanted


def _examples(recipe: Recipe, windows: Windows | None, records: int) -> Examples:
    """Return the numbers of examples, with room for any length where lengths vary."""
    if windows is None:
        return number_examples(None, records, None)
    field = recipe.schema[main_field(recipe.schema, windows)]
    if field.ragged:
        none = np.empty(0, np.int64)
        return Examples(count=records * ROOM, per_record=ROOM, first=none, start_every=windows.start_every)
    return number_examples(np.full(records, field.shape[0], np.int64), records, windows)


LOOK_S = 0.1
"""Between two looks at what is there by now."""


class FillChunks:
    """The chunks of a `FillOrder`, as their records become available. Stands where `Chunks` does."""

    def __init__(
        self,
        cache: Cache,
        options: Options,
        order: FillOrder,
        share: RankShare,
        changed: Callable[[Cache, int], None],
    ) -> None:
        """Serve the part `share` of the order.

        `changed` is told of each new handle of the cache, and how many positions get no example.
        """
        self.order, self._options, self._share, self._changed = order, options, share, changed
        self._own = range(order.windows[-1].stop if order.windows else 0)
        """Positions of this rank, where they are one piece; else of all ranks."""
        self._scale, self._stream = 1, share
        """Positions that one example of them counts for; who has which of their examples."""
        if share.contiguous:
            stop = (
                share.own.start + share.positions // share.world_size if share.drop_last else share.own.stop
            )
            self._own, self._scale = range(share.own.start, stop), share.world_size
            self._stream = replace(share, rank=0, world_size=1, contiguous=False)
        self._counted: dict[int, int] = {}
        """Examples of each window so far, by where it begins; only where lengths vary."""
        self.locator = Locator(
            examples=order.examples,
            first=order.examples.first,
            indices=order.indices,
            windowed=options.windows is not None,
            step_lengths={},
            ragged=(),
            lengths={},
        )
        self._take(cache, np.full(cache.recipe.count, cache.filling is None))

    @property
    def counted(self) -> int | None:
        """Examples of an epoch, where lengths vary; None while some are not known."""
        return None if len(self._counted) < len(self.order.windows) else sum(self._counted.values())

    def begin(self, epoch: int, batch: int) -> int:
        """As `Serving.begin`: after the batches before, and all that was passed over for them.

        Raises:
            StokerError: As `of`.
        """
        left, at = batch * self._share.step, 0
        for window in self.order.windows if left else ():
            positions = self._stored(window, epoch)[1]
            if left < len(positions):
                return int(positions[left])
            left, at = left - len(positions), window.stop
        return at

    def of(self, epoch: int, position: int) -> Iterator[Chunk]:
        """Yield the chunks of the rest of an epoch, each once its records are stored.

        Raises:
            StalledError: A window was not settled in time.
            StokerError: Filling failed.
        """
        size, begin = self._stream.step, self._own.start + position // self._scale
        # Of a last step that is short, a rank may have no example.
        more = size if self._stream.drop_last or self._stream.world_size > 1 else 1
        examples = after = np.empty(0, np.int64)
        for window in self.order.windows:
            if window.stop <= begin or window.begin >= self._own.stop:
                continue
            found, at = self._stored(window, epoch)
            rest = (at >= begin) & (at < self._own.stop)
            examples = np.append(examples, found[rest])
            after = np.append(after, (at[rest] + 1 - self._own.start) * self._scale)
            # What follows may all be quarantined: a batch is not the last one if `more` examples are here.
            whole = max(0, (len(examples) - more) // size * size)
            yield from self._chunks(epoch, examples[:whole], after[:whole], last=False)
            examples, after = examples[whole:], after[whole:]
        yield from self._chunks(epoch, examples, after, last=True)
        self._await_verdict()
        self._check_counted()

    def use_repaired(self, cache: Cache) -> None:
        """Serve from this handle, the same cache with records made again."""
        filling = cache.filling = self._cache.filling
        self._take(cache, self._settled)
        if filling is not None:
            filling.forget()

    def _chunks(
        self, epoch: int, examples: NDArray[np.int64], after: NDArray[np.int64], *, last: bool
    ) -> Iterator[Chunk]:
        """Yield this rank's chunks of these examples; a short batch comes last, where that is wanted.

        Args:
            after: Position after each of the examples.
            last: The epoch ends with them.
        """

        def ids(begin: int, stop: int) -> NDArray[np.int64]:
            return examples[begin:stop]

        own = replace(self._stream, positions=len(examples))
        whole, tail = own.whole_and_tail(0)
        begin = whole * own.step
        for short, batches, batch, ends in (
            (False, whole, own.batch_size, after[own.step - 1 : begin : own.step]),
            (True, 1, tail, after[-1:]),
        ):
            if not batches * batch:
                continue
            span = BatchRun(
                epoch=epoch,
                position=int(after[begin if short else 0]) - self._scale,
                batches=batches,
                batch=batch,
                step=0,
                short=short,
                last=last and (short or not tail),
                ends=ends.tolist(),
            )
            yield self._located(span, own.take_tail(ids, begin) if short else own.take(ids, 0, whole))

    def _located(self, span: BatchRun, examples: NDArray[np.int64]) -> Chunk:
        """Return the examples of a span, located in the cache as it is now."""
        slots, starts, index = self.locator.locate(examples)
        numbers, records = np.unique(self.order.indices[slots], return_inverse=True)
        table = find_records(self._cache, numbers)
        if len(table.indices) != len(numbers):
            lost = int(np.setdiff1d(numbers, table.indices)[0])
            raise MissingRecordError(
                f"sample {lost} was stored and is quarantined now", hint="Start the epoch again"
            )
        return Chunk(
            span=span,
            examples=examples,
            records=records,
            starts=starts,
            index=index,
            rows=None,
            memory=None,
            source=(self._cache, table),
            draw=self._draw(span.epoch, examples, table, records),
        )

    def _draw(
        self, epoch: int, examples: NDArray[np.int64], table: RecordTable, records: NDArray[np.int64]
    ) -> Draw | None:
        """Return what decides which part of each record is read; None: all is."""
        options = self._options
        if not options.choose:
            return None
        sizes: dict[str, NDArray[np.int64]] = {}
        for group in options.choose:
            rows = {name: _rows_of(self._cache, table, name) for name in group.fields}
            sizes[group.name] = check_rows(group, rows, table.indices)[records]
        return Draw(choices=options.choose, seed=options.seed, epoch=epoch, examples=examples, sizes=sizes)

    def _await_verdict(self) -> None:
        """Wait for the end of the filling if samples were left out: it fails if they are too many.

        Raises:
            StokerError: Filling failed.
        """
        filling = self._cache.filling
        if filling is not None and bool((self._settled & ~self._here)[self.order.indices].any()):
            while not filling.done():
                filling.wait(LOOK_S)

    def _check_counted(self) -> None:
        """Say so where an epoch had no batch because no trajectory is long enough for one."""
        counted, windows = self._counted.values(), self._options.windows
        if windows is not None and len(counted) == len(self.order.windows) and not any(counted):
            raise ConfigError(
                f"no trajectory of {self._cache.path} is long enough for a window of stride "
                f"{windows.strides[1]} and horizon {windows.horizons[1]}, which spans {windows.span + 1} "
                "steps",
                hint=f"Choose a smaller {arg('stride')} or {arg('horizon')}",
            )

    def _stored(self, window: FillWindow, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the examples of a window that can be served, in the order of the epoch, with positions."""
        begin = time.perf_counter()
        self._await(self.order.indices[window.slots])
        if self._options.meter is not None:
            self._options.meter.spent("read", time.perf_counter() - begin)
        self._check_whole(self.order.indices[window.slots])
        counts = self._counts(self.order.indices[window.slots])
        if self.order.varying:
            self._counted[window.begin] = int(counts.sum())
        return self.order.served(window, epoch, counts)

    def _check_whole(self, numbers: NDArray[np.int64]) -> None:
        """Refuse to pass over a sample where other ranks serve parts of the same order.

        Raises:
            IncompleteError: As said.
        """
        lost = numbers[~self._here[numbers]]
        if len(lost) and self._skips_none:
            number = int(lost[0])
            why = self._cache.quarantined.get(number)
            raise IncompleteError(
                f"sample {number} of {self._cache.path} could not be "
                f"encoded{'' if why is None else f' ({why.error})'}, and ranks skip no sample in the epoch "
                "in which a cache is filled",
                hint=f"Leave {arg('wait', False)} (and retry_quarantined) out, and begin the next epoch: it "
                "is skipped then",
            )

    @property
    def _skips_none(self) -> bool:
        """True if other ranks serve this epoch too, and may see other samples, or begin elsewhere."""
        return self._share.world_size > 1 and (self._cache.filling is not None or self._share.contiguous)

    def _counts(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the examples of these samples, which are settled."""
        here, windows = self._here[numbers], self._options.windows
        counts = here.astype(np.int64)
        if windows is None or not self.order.varying:
            return counts * self.order.per_record
        if here.any():
            lengths = trajectory_lengths(self._cache, find_records(self._cache, numbers[here]), windows)
            counts[here] = windows.counts(lengths)
        return counts

    def _await(self, numbers: NDArray[np.int64]) -> None:
        """Wait until these samples are settled, and have the handle that knows them.

        A `timeout` given to the loader is the deadline; else it is the filling's own, which moves with it.
        """
        filling, timeout_s = self._cache.filling, self._options.timeout_s
        if filling is None:
            return
        until = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        while True:
            ended = filling.done()
            self._look(filling)
            if self._settled[numbers].all():
                return
            if ended:
                lost = numbers[~self._settled[numbers]]
                raise IncompleteError(
                    f"{self._cache.path} was filled, and {format_count(len(lost))} samples of it are gone "
                    f"since, the first is {int(lost[0])}",
                    hint="Run the same precompute again",
                )
            if time.monotonic() >= until:
                raise StalledError(
                    f"{format_count(int((~self._settled[numbers]).sum()))} samples of the next window were "
                    f"not encoded within {timeout_s:g} s",
                    hint="Give the loader a longer timeout=",
                )
            filling.wait(LOOK_S)

    def _look(self, filling: BackgroundFill) -> None:
        cache, settled = filling.look()
        if settled is not self._settled:
            cache.filler, cache.filling = self._cache.filler, filling
            cache.joined = self._cache.joined
            self._take(cache, settled)

    def _take(self, cache: Cache, settled: NDArray[np.bool_]) -> None:
        """Serve from this handle, the same cache as it is now; what is settled and not stored is left out."""
        self._cache, self._settled = cache, settled
        self._here = np.zeros(cache.recipe.count, np.bool_)
        self._here[cache.indices] = True
        lost = np.zeros(len(self.order.indices), np.bool_)
        if not self._skips_none:  # or ranks would count other batches; `_check_whole` raises for it
            lost = (settled & ~self._here)[self.order.indices]
        self._changed(cache, self.order.lost(lost))


def _rows_of(cache: Cache, table: RecordTable, name: str) -> NDArray[np.int64]:
    """Return the rows of each of these records in a field."""
    field = cache.schema[name]
    return lengths_of(cache, table, name) if field.ragged else np.full(len(table.indices), field.shape[0])
