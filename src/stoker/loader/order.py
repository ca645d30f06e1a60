"""Decide which example comes at which position of an epoch.

The order is a pure function of seed, epoch, count and kind. It never depends on a library's random number
generator, so it is the same on every device, version and machine (golden vectors in the tests hold it).
Example `i` gets the key `splitmix64(seed, epoch, i)`, its low bits are replaced by `i`, and the sorted keys
are the order. Above `SORTED_LIMIT` examples a keyed bijection is computed by position, so that nothing
grows with the count.

Each kind of order is described once, in operations that numpy and torch share (`Arrays`). So a device makes
its orders without a number crossing from the host. Nothing waits for the device, with one exception: above
`SORTED_LIMIT` examples a position is walked until it falls below the count.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stoker.arguments import FLAG, check, whole
from stoker.errors import ConfigError, arg
from stoker.loader.batch import to_device
from stoker.splitmix import (
    GAMMA,
    MASK,
    MIX_A,
    MIX_B,
    Salt,
    keys_of,
    mix,
    mix_,
    remainders,
    shifted,
    signed,
    stream,
)
from stoker.units import format_count

if TYPE_CHECKING:
    from stoker.loader.batch import Examples
    from stoker.loader.batching import BatchPlanner
    from stoker.loader.records import RecordTable


# ----------------------------------------------------------------------------------------------------------
# Examples drawn by weight: how often is asked for, and draws without repeats.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Weights:
    """Weight of each record, for `weights=` where plain numbers do not say enough.

    Draws without replacement follow Efraimidis and Spirakis (2006).

    Raises:
        ConfigError: `samples` is below 1; in a `Loader`, the numbers do not fit its records.

    Examples:
        >>> import stoker, torch
        >>> data = [{"label": torch.tensor(i % 2)} for i in range(10)]
        >>> weights = stoker.Weights([0, 1] * 5, samples=20)
        >>> loader = stoker.cached(data, batch_size=20, weights=weights)
        >>> next(iter(loader))["label"].sum().item()  # all from the records of weight 1
        20
    """

    values: Sequence[float] | NDArray[Any] = field(kw_only=False)
    """One per stored record by sample index, or per entry of `indices=`; at least 0, not all 0."""
    samples: int | None = None
    """Examples of an epoch, at least 1; None: as many as there are."""
    replacement: bool = True
    """True if an example may be drawn again in the same epoch."""

    def __post_init__(self) -> None:
        """Refuse an epoch without examples."""
        check({"Weights: replacement": (self.replacement, FLAG)})
        if self.samples is not None:
            check({"Weights: samples": (self.samples, whole(least=1))})


def without_repeats(
    weights: NDArray[np.float64], keys: NDArray[np.uint64], samples: int
) -> NDArray[np.int64]:
    """Draw `samples` examples one after another by weight, each from those that are left.

    The lowest of exponential numbers, each divided by its weight (Efraimidis and Spirakis, 2006).

    Args:
        weights: One per example; `samples` of them at least are above 0.
        keys: Random, one per example.
    """
    possible = np.flatnonzero(weights)
    uniform = ((keys[possible] >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    times = -natural_log(uniform) / weights[possible]
    return possible[np.argsort(times, kind="stable")[:samples]]


def natural_log(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the logarithm to 15 digits, by additions, products and quotients alone.

    So it is the same bits on every machine. A library's logarithm differs in the last bit between processors,
    and so would the order of examples.
    """
    mantissa, exponent = np.frexp(values)
    small = mantissa < np.sqrt(0.5)
    mantissa, exponent = np.where(small, 2 * mantissa, mantissa), exponent - small
    ratio = (mantissa - 1) / (mantissa + 1)
    square, total = ratio * ratio, np.zeros_like(ratio)
    for odd in range(21, 0, -2):
        total = total * square + 1 / odd
    return 2 * ratio * total + exponent * 0.6931471805599453


SORTED_LIMIT = 1 << 27
"""Up to this many examples an order is sorted (8 bytes each); above, computed by position. Part of the order,
therefore fixed."""

PIECE = 1 << 15
"""Keys are made in pieces that stay in the L2 cache: 256 KiB and as much scratch."""

FEISTEL_ROUNDS = 6
DEFAULT_BLOCK_BYTES = 128 * 1024
"""Reads below this size are bound by the number of requests, not by bytes."""
DEFAULT_WINDOW_BLOCKS = 256
BUCKET_BATCHES = 50
"""Global batches of a window of `bucket`."""

Ids: TypeAlias = "Callable[[int, int], Any]"
"""`ids(start, stop)`: the examples at these positions, int64, numpy or on the order's device."""

Kind: TypeAlias = Literal["full", "block", "bucket", "static", "sequential"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderKind:
    """Kind of order asked for, and its numbers. `str()` gives what the state keeps."""

    kind: Kind
    block: int = 0
    """Examples that are stored next to each other and read together (`block`)."""
    window: int = 0
    """Examples that are shuffled among themselves; a multiple of `block`."""
    batches: int = 0
    """Global batches whose examples are sorted by length among themselves (`bucket`)."""
    parts: int = 0
    """Equal parts of the examples, one for each rank (`static`)."""

    def __str__(self) -> str:
        """Return the text that `parse_order` reads back."""
        if self.kind == "block":
            return f"block({self.block},{self.window})"
        if self.kind == "bucket":
            return f"bucket({self.batches})"
        return f"static({self.parts})" if self.kind == "static" else self.kind


def order_text(shuffle: object = True, partition: object = "global") -> str:
    """Return the text that `parse_order` reads.

    Args:
        shuffle: False or None: by sample index. True: over all examples. `"block"`, `"block(64,4096)"`:
            blocks of neighbors, and examples within a window of them. `"bucket"`, `"bucket(50)"`: records of
            similar length in a batch.
        partition: `"global"`: each step takes its examples from all of them. `"static"`, `"static(8)"`: each
            rank shuffles a part of its own.

    >>> order_text(True), order_text(False), order_text("block"), order_text(True, "static")
    ('full', 'sequential', 'block', 'static')

    Raises:
        ConfigError: A value is unknown, or the two do not go together.
    """
    if shuffle is None or isinstance(shuffle, bool | np.bool_):
        kind = "full" if shuffle else "sequential"
    elif isinstance(shuffle, str) and re.fullmatch(
        r"(block(\(\d+,\s*\d+\))?)|(bucket(\([1-9]\d*\))?)", shuffle
    ):
        kind = shuffle
    else:
        raise ConfigError(
            f"shuffle is {shuffle!r}",
            hint="Expected True, False, 'block', 'block(64,4096)', 'bucket' or 'bucket(50)'",
        )
    if partition == "global":
        return kind
    if not isinstance(partition, str) or not re.fullmatch(r"static(\([1-9]\d*\))?", partition):
        raise ConfigError(f"partition is {partition!r}", hint="Expected 'global', 'static' or 'static(8)'")
    if kind != "full":
        raise ConfigError(
            f"{arg('partition', partition)} shuffles the part of each rank, and shuffle is {shuffle!r}",
            hint=f"Give {arg('shuffle', True)}, or leave partition out",
        )
    return partition


def parse_order(text: str, *, world_size: int, example_bytes: int) -> OrderKind:
    """Read `full`, `block`, `block(64,4096)`, `bucket`, `bucket(50)`, `static`, `static(8)` or `sequential`.

    Args:
        text: The kind; numbers left out are chosen from the other arguments.
        world_size: Ranks, the parts of a plain `static`.
        example_bytes: Bytes read for one example; a plain `block` reads at least 128 KiB at once.

    Raises:
        ConfigError: Not a kind of order, or numbers that do not fit.
    """
    if text == "full":
        return OrderKind(kind="full")
    if text == "sequential":
        return OrderKind(kind="sequential")
    if found := re.fullmatch(r"bucket(?:\(([1-9]\d*)\))?", text):
        return OrderKind(kind="bucket", batches=int(found[1] or BUCKET_BATCHES))
    found = re.fullmatch(r"(block)(?:\((\d+),\s*(\d+)\))?|(static)(?:\((\d+)\))?", text)
    if not found:
        raise ConfigError(
            f"{text!r} is not an order",
            hint="Known: full, sequential, block, block(block,window), bucket, bucket(batches), static, "
            "static(parts)",
        )
    block_kind, block, window, _, parts = found.groups()
    if not block_kind:
        return OrderKind(kind="static", parts=int(parts or world_size))
    size = int(block) if block else max(1, -(-DEFAULT_BLOCK_BYTES // max(1, example_bytes)))
    span = int(window) if window else size * DEFAULT_WINDOW_BLOCKS
    if size < 1 or span < size or span % size:
        raise ConfigError(
            f"shuffle {text!r}: the window must be a multiple of the block, and both at least 1"
        )
    return OrderKind(kind="block", block=size, window=span)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draws:
    """Distribution to draw from with replacement: records by weight, then a window of the record."""

    cumulative: NDArray[np.float64]
    """Running sum of weight times windows, `(records,)`."""
    first: NDArray[np.int64]
    """First example of each record, `(records + 1,)`."""
    samples: int | None = None
    """Positions of an epoch; None: no limit examples."""
    weights: NDArray[np.float64] | None = None
    """One per record, to draw without repeats; None: with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Everything but the epoch that decides an order."""

    kind: OrderKind
    count: int
    """Examples to order."""
    seed: int
    global_batch: int
    """Examples per step over all ranks; decides a `static` and a `bucket` order, no other."""
    draws: Draws | None = None
    """Set when examples are drawn by weight instead of permuted."""
    lengths: NDArray[np.int64] | None = None
    """Of each example, for `bucket`; None: they have one shape."""
    batches: BatchPlanner | None = None
    """Puts examples into batches of varying size; None: the next `global_batch` are a step."""

    def __post_init__(self) -> None:
        """Refuse combinations that have no meaning."""
        parts = self.kind.parts
        if self.kind.kind == "static" and (parts < 1 or self.global_batch % parts or self.count < parts):
            raise ConfigError(
                f"partition {self.kind}: {self.count} examples and a global batch of {self.global_batch} "
                f"cannot be cut into {parts} equal parts",
                hint="Choose a batch size that is a multiple of it",
            )
        if self.draws is not None and self.kind.kind != "full":
            raise ConfigError(
                f"weights= draw examples at random from all of them, which {self.kind} does not do",
                hint=f"Give {arg('shuffle', True)}, and no partition",
            )
        if self.kind.kind == "bucket" and self.lengths is None:
            raise ConfigError(
                f"{arg('shuffle', str(self.kind))} puts records of similar length into a batch, and "
                "examples here have one shape",
                hint=f"Use {arg('shuffle', True)}",
            )

    @property
    def positions(self) -> int:
        """Positions of an epoch: all examples, except that `static` parts are cut to the shortest."""
        if self.kind.kind != "static":
            return self.count if self.draws is None else self.draws.samples or self.count
        share = self.global_batch // self.kind.parts
        return (self.count // self.kind.parts // share) * self.global_batch

    @property
    def sorted_on_host(self) -> bool:
        """True if an epoch is sorted at once, by numbers of the host's making."""
        drawn = self.draws is not None and self.draws.weights is not None
        return self.kind.kind == "bucket" or drawn or self.batches is not None

    def epochs(self, epochs: Sequence[int], device: torch.device | None = None) -> list[Ids]:
        """`epoch` of several epochs, on the host in hardly more calls than one takes."""
        on_host = device is None or device.type == "cpu"
        plain = self.kind.kind == "full" and self.draws is None and self.batches is None
        if on_host and plain and self.count <= SORTED_LIMIT:
            whole = permutations(self.count, [stream(self.seed, epoch) for epoch in epochs])
            return [partial(_between, order) for order in whole]
        return [self.epoch(epoch, device) for epoch in epochs]

    def epoch(self, epoch: int, device: torch.device | None = None) -> Ids:
        """Make the order of `epoch`; the result gives examples by position.

        Args:
            device: Where the examples are wanted; a CUDA device makes its own orders.
        """
        if device is not None and device.type == "cuda":
            return epoch_on(self, epoch, device)
        if self.batches is not None:
            return partial(_between, self.batches.epoch(epoch).ids)
        return _made(self, epoch, HostArrays())


def epoch_on(order: Order, epoch: int, device: torch.device) -> Ids:
    """Return `order.epoch(epoch)`, made on `device` by torch: `(stop - start,)` int64."""
    if not order.sorted_on_host:
        with suppress(torch.OutOfMemoryError):  # sorting takes eight times the memory of the order itself
            return _made(order, epoch, DeviceArrays(device))
    whole = to_device(order.epoch(epoch)(0, order.positions), device)  # one copy, which nothing waits for
    return lambda start, stop: whole[start:stop]


def table_bytes(order: Order, records: int) -> int:
    """Return the bytes that a device needs in addition to its records.

    Row, sample index and first example of each record are kept. While an epoch is sorted, each example takes
    about 64 bytes more: key, number, and values, indices and scratch of `torch.sort`.
    """
    in_blocks = order.kind.kind in ("sequential", "block")
    return 24 * records + (0 if in_blocks else 64 * min(order.positions, SORTED_LIMIT))


class HostArrays:
    """The operations of an order where numpy and torch differ, in numpy."""

    stack: Any = staticmethod(np.stack)
    concatenate: Any = staticmethod(np.concatenate)

    def arange(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the numbers from `start` to `stop - 1`, int64."""
        return np.arange(start, stop, dtype=np.int64)

    def permutation(self, count: int, base: int) -> NDArray[np.int64]:
        """Return one of `permutations`."""
        return permutations(count, [base])[0]

    def table(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return values that are looked up."""
        return values

    def float64(self, values: NDArray[Any]) -> NDArray[np.float64]:
        """Return the same numbers as float64."""
        return values.astype(np.float64)

    def places_after(self, table: NDArray[Any], values: NDArray[Any]) -> NDArray[np.int64]:
        """Return for each value the place of the first entry of a sorted table above it."""
        return np.searchsorted(table, values, side="right")

    def sorted_by(self, rows: NDArray[Any], keys: NDArray[np.uint64]) -> NDArray[Any]:
        """Return each row in the order of its keys, which have no sign."""
        return np.take_along_axis(rows, np.argsort(keys, axis=1, kind="stable"), axis=1)


class DeviceArrays:
    """The same in torch, on one device."""

    stack: Any = staticmethod(torch.stack)
    concatenate: Any = staticmethod(torch.cat)

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def arange(self, start: int, stop: int) -> Tensor:
        """As `HostArrays`; so are all of these."""
        return torch.arange(start, stop, dtype=torch.int64, device=self._device)

    def permutation(self, count: int, base: int) -> Tensor:
        """Return the permutation, sorted on the device."""
        return permutation_on(self._device, count, base)

    def table(self, values: NDArray[Any]) -> Tensor:
        """Return the values on the device."""
        return to_device(values, self._device)

    def float64(self, values: Tensor) -> Tensor:
        """Return the same numbers as float64."""
        return values.to(torch.float64)

    def places_after(self, table: Tensor, values: Tensor) -> Tensor:
        """Return the places of the first entries above the values."""
        return torch.searchsorted(table, values, right=True)

    def sorted_by(self, rows: Tensor, keys: Tensor) -> Tensor:
        """Return the sorted rows; keys with the highest bit flipped sort as if they had no sign."""
        return rows.gather(1, (keys ^ signed(1 << 63)).argsort(dim=1, stable=True))


Arrays: TypeAlias = "HostArrays | DeviceArrays"


def _made(order: Order, epoch: int, arrays: Arrays) -> Ids:
    base, kind = stream(order.seed, epoch), order.kind.kind
    if order.sorted_on_host:
        whole = _bucketed(order, base) if order.draws is None else _without_repeats(order.draws, base)
        return partial(_between, whole)
    if order.draws is not None:
        return _drawn(order.draws, base, arrays)
    if kind == "full":
        return shuffled(order.count, base, arrays)
    if kind == "sequential":
        return arrays.arange
    if kind == "static":
        return _static(order, base, arrays)
    return _blocks(order.count, order.kind, base, arrays)


def _between(order: Any, start: int, stop: int) -> Any:
    return order[start:stop]


def shuffled(count: int, base: int, arrays: Arrays) -> Ids:
    """Return all examples of an epoch, shuffled; `base` is the random stream of seed and epoch."""
    if count > SORTED_LIMIT:
        return lambda start, stop: bijection(arrays.arange(start, stop), count, base)
    return partial(_between, arrays.permutation(count, base))


def _drawn(draws: Draws, base: int, arrays: Any) -> Ids:
    other, total = mix(base + 1), float(draws.cumulative[-1])
    below = float(np.nextafter(total, 0.0))  # rounding may reach the total itself, which belongs to no record
    cumulative, firsts = arrays.table(draws.cumulative), arrays.table(draws.first)

    def ids(start: int, stop: int) -> Any:
        positions = arrays.arange(start, stop)
        at = arrays.float64(shifted(keys_of(base, positions), 11)) * (total * 2.0**-53)
        record = arrays.places_after(cumulative, at.clip(None, below))
        first = firsts[record]
        return first + remainders(keys_of(other, positions), firsts[record + 1] - first)

    return ids


def _without_repeats(draws: Draws, base: int) -> NDArray[np.int64]:
    assert draws.weights is not None
    keys = keys_of(base, np.arange(draws.first[-1], dtype=np.int64))
    weights = np.repeat(draws.weights, np.diff(draws.first))
    return without_repeats(weights, keys, draws.samples or len(keys))


def _bucketed(order: Order, base: int) -> NDArray[np.int64]:
    """Return the examples of an epoch by position, `(count,)`.

    Records of similar length share a batch, so that little of it is padding.

    The full shuffle is cut into windows of some global batches. Within a window examples are sorted by
    length and cut into batches again, and the batches are shuffled. So every example comes once in an epoch,
    near the place that the shuffle gave it. A short last batch is of what the shuffle puts last, of any
    length: else its lengths would always be the same ones, which `drop_last` would never serve.
    """
    assert order.lengths is not None
    size = order.global_batch
    whole = permutations(order.count, [base])[0]
    steps = order.count // size
    for first in range(0, steps, order.kind.batches):
        window = whole[first * size : min(first + order.kind.batches, steps) * size]
        rows = window[np.argsort(order.lengths[window], kind="stable")].reshape(-1, size)
        # Sorted inside a batch, the first rank would have all of the short ones.
        rows = np.take_along_axis(rows, np.argsort(keys_of(mix(base + 1), rows), axis=1), axis=1)
        turns = np.argsort(keys_of(mix(base + 2), np.arange(first, first + len(rows))))
        window[:] = rows[turns].reshape(-1)
    return whole


def _static(order: Order, base: int, arrays: Any) -> Ids:
    parts, step = order.kind.parts, order.global_batch
    share = step // parts
    begins = [order.count * part // parts for part in range(parts + 1)]
    orders = [shuffled(begins[p + 1] - begins[p], mix(base + p + 1), arrays) for p in range(parts)]

    def ids(start: int, stop: int) -> Any:
        first, last = start // step, -(-stop // step)
        own = [
            (orders[part](first * share, last * share) + begins[part]).reshape(-1, share)
            for part in range(parts)
        ]
        return arrays.stack(own, 1).reshape(-1)[start - first * step : stop - first * step]

    return ids


def _blocks(count: int, kind: OrderKind, base: int, arrays: Any) -> Ids:
    """Return blocks shuffled over the epoch, then examples inside each window of blocks.

    The numbering starts at another block each epoch and goes round, so that the short block, which is served
    last, is not always made of the same examples. Two-level shuffle of CorgiPile (Xu et al., SIGMOD 2022).
    """
    block, window = kind.block, kind.window
    blocks = count // block
    offset = mix(base + 1) % max(1, blocks) * block
    order = shuffled(blocks, mix(base + 2), arrays) if blocks else None

    def windows(begin: int, end: int, size: int) -> Any:
        """Return the examples of the positions `begin .. end`, which are entire windows of `size`."""
        positions = arrays.arange(begin, end)
        ids, whole = positions, min(end, blocks * block) - begin
        if order is not None and whole > 0:
            starts = order(begin // block, begin // block + whole // block) * block
            rows = starts[:, None] + arrays.arange(0, block)
            ids = arrays.concatenate([rows.reshape(-1), positions[whole:]])
        ids = ((ids + offset) % count).reshape(-1, size)
        return arrays.sorted_by(ids, keys_of(mix(base + 3), positions).reshape(-1, size)).reshape(-1)

    def ids(start: int, stop: int) -> Any:
        begin, end = start // window * window, min(count, -(-stop // window) * window)
        full = max(begin, end // window * window)
        pieces = [windows(begin, full, window)] if full > begin else []
        if end > full:
            pieces.append(windows(full, end, end - full))
        joined = arrays.concatenate(pieces) if pieces else arrays.arange(0, 0)
        return joined[start - begin : stop - begin]

    return ids


def bijection(positions: Any, count: int, base: int) -> Any:
    """Return where `positions` go in a keyed permutation of `range(count)`, computed one by one.

    An alternating Feistel network on just enough bits, walked until it falls below `count`
    (Black and Rogaway, CT-RSA 2002).
    """
    bits = max(2, (count - 1).bit_length())
    value = _feistel(positions, bits, base)
    above = value >= count
    outside = np.flatnonzero(above) if isinstance(above, np.ndarray) else above.nonzero().flatten()
    while len(outside):
        value[outside] = _feistel(value[outside], bits, base)
        outside = outside[value[outside] >= count]
    return value


def _feistel(value: Any, bits: int, base: int) -> Any:
    low_bits = bits // 2
    low_mask, high_mask = (1 << low_bits) - 1, (1 << (bits - low_bits)) - 1
    low, high = value & low_mask, value >> low_bits
    for step in range(FEISTEL_ROUNDS):
        if step % 2:
            high = high ^ (_int64(keys_of(mix(base + step), low)) & high_mask)
        else:
            low = low ^ (_int64(keys_of(mix(base + step), high)) & low_mask)
    return (high << low_bits) | low


def _int64(words: Any) -> Any:
    """Return the int64 of the same bits."""
    return words.view(np.int64) if isinstance(words, np.ndarray) else words


def permutations(count: int, bases: Sequence[int]) -> NDArray[np.int64]:
    """Return sorted keys with their number in the low bits: per base a permutation of `range(count)`, int64.

    Several at once take as many calls of numpy as one. That matters where a thread makes them: other threads
    wait for the interpreter's lock at each call.
    """
    first = np.array(bases, dtype=np.uint64)[:, None]
    order = np.empty((len(bases), count), dtype=np.uint64)
    scratch = np.empty((len(bases), min(PIECE, count)), dtype=np.uint64)
    for start in range(0, count, PIECE):
        x = order[:, start : start + PIECE]
        numbers = np.arange(start, start + x.shape[1], dtype=np.uint64)
        np.add((numbers + np.uint64(1)) * np.uint64(GAMMA), first, out=x)
        mix_(x, scratch[:, : x.shape[1]])
        x >>= np.uint64(1)  # so that signed and unsigned comparison agree, for torch's sake
        x &= ~np.uint64(_low_bits(count))
        x |= numbers
    order.sort(axis=1)
    order &= np.uint64(_low_bits(count))
    return order.view(np.int64)


def permutation_on(device: torch.device, count: int, base: int) -> Tensor:
    """Return the same as one of `permutations`, made on `device`: `(count,)`, int64."""
    low, numbers = _low_bits(count), torch.arange(count, dtype=torch.int64, device=device)
    keys = shifted(keys_of(base, numbers), 1).bitwise_and_(~low).bitwise_or_(numbers)
    del numbers  # what is alive while it sorts counts in `table_bytes`
    return torch.sort(keys).values.bitwise_and_(low)


def _low_bits(count: int) -> int:
    """Return the bits of a key that hold a number below `count`."""
    return (1 << max(1, (count - 1).bit_length())) - 1


# ----------------------------------------------------------------------------------------------------------
# Random numbers for transforms: row `i` depends on key `i` alone, never on how many rows there are.
#
# splitmix64 with an increment of its own per key (`split` of Steele, Lea, Flood, OOPSLA 2014). Integers are
# equal on every device and machine; so are uniform numbers, which are exact in float32. Normal numbers go
# through the device's logarithm and cosine, and are equal on one kind of device.


MASK_32 = (1 << 32) - 1


def example_keys(seed: int, epoch: int, examples: Tensor) -> Tensor:
    """Return the random key of each example in this epoch, int64, on the device of `examples`."""
    return keys_of(stream(seed, epoch, Salt.TRANSFORM), examples)


def child_keys(keys: Tensor, place: int) -> Tensor:
    """Return new keys for one of several random draws of the same examples.

    A transform that draws for several purposes uses one `place` for each, so that no draw repeats another.

    Args:
        keys: `(B,)` int64, as a transform is given them.
        place: Number of the draw, from 0.

    Returns:
        Keys of the same shape.

    Examples:
        >>> from stoker.transforms import child_keys, uniform
        >>> keys = torch.tensor([1, 2])
        >>> bool((uniform(keys, 1) != uniform(child_keys(keys, 0), 1)).all())
        True
    """
    return mix_(mix_(keys + signed(GAMMA)) + signed(MIX_A * (place + 1) & MASK))


def bits(keys: Tensor, count: int) -> Tensor:
    """Return `(B, count)` int64, all 64 bits random; column `j` is the same whatever `count` is.

    The generator is splitmix64 with an increment for each key (Steele, Lea and Flood, OOPSLA 2014).

    Args:
        keys: `(B,)` int64, as a transform is given them.
        count: Numbers for each example.

    Examples:
        >>> from stoker.transforms import bits
        >>> bits(torch.tensor([1, 2]), 2).shape
        torch.Size([2, 2])
    """
    steps = mix_(keys ^ signed(MIX_B)) | 1
    places = torch.arange(1, count + 1, device=keys.device)
    return mix_(torch.addcmul(keys[:, None], steps[:, None], places))


def uniform(keys: Tensor, count: int) -> Tensor:
    """Return uniform random numbers: `(B, count)` float32, multiples of 2^-24 in [0, 1).

    Args:
        keys: `(B,)` int64, as a transform is given them.
        count: Numbers for each example.

    Examples:
        >>> from stoker.transforms import uniform
        >>> keys = torch.tensor([1, 2])
        >>> numbers = uniform(keys, 3)
        >>> numbers.shape, bool(((numbers >= 0) & (numbers < 1)).all())
        (torch.Size([2, 3]), True)
    """
    return shifted(bits(keys, count), 40).to(torch.float32).mul_(2.0**-24)


def integers(keys: Tensor, count: int, below: int) -> Tensor:
    """Return random integers: `(B, count)` int64 from 0 to `below - 1`.

    Each is as likely as another to within `below` / 2^32.

    Args:
        keys: `(B,)` int64, as a transform is given them.
        count: Numbers for each example.
        below: One more than the largest number, 1 to 2^31.

    Raises:
        ConfigError: `below` is not between 1 and 2^31.

    Examples:
        >>> from stoker.transforms import integers
        >>> drawn = integers(torch.tensor([1, 2]), 100, below=6)
        >>> drawn.shape, drawn.min().item(), drawn.max().item()
        (torch.Size([2, 100]), 0, 5)
    """
    if not 1 <= below <= 1 << 31:
        raise ConfigError(f"integers below {below} cannot be drawn", hint=f"Expected 1 to {1 << 31}")
    return shifted(bits(keys, count), 32).mul_(below).bitwise_right_shift_(32)


def normal(keys: Tensor, count: int) -> Tensor:
    """Return normal random numbers: `(B, count)` float32 of mean 0 and deviation 1, at most 6.8 in size.

    Box and Muller (1958): the halves of one word give radius and angle of two numbers.

    Args:
        keys: `(B,)` int64, as a transform is given them.
        count: Numbers for each example.

    Examples:
        >>> from stoker.transforms import normal
        >>> drawn = normal(torch.tensor([1, 2]), 1000)
        >>> drawn.shape, bool(drawn.mean().abs() < 0.1)
        (torch.Size([2, 1000]), True)
    """
    words = bits(keys, (count + 1) // 2)
    radius = shifted(words, 32).to(torch.float32).add_(0.5).mul_(2.0**-32)
    radius.log_().mul_(-2).clamp_min_(0).sqrt_()
    angle = words.bitwise_and_(MASK_32).to(torch.float32).mul_(math.tau * 2.0**-32)
    pairs = torch.stack((angle.cos().mul_(radius), angle.sin_().mul_(radius)), dim=-1)
    return pairs.reshape(len(keys), -1)[:, :count]


# ----------------------------------------------------------------------------------------------------------
# Which positions of an epoch one rank serves, and in batches of which size.
#
# `batch_size` is per rank, so a step takes `batch_size * world_size` consecutive positions, of which rank `r`
# has slice `r`: the global batch is the same at every world size. In sequential order (evaluation) each
# rank has one contiguous piece instead, and no example is served twice.


def check_ranks(batch_size: int, rank: int, world_size: int) -> None:
    """Refuse a batch without examples, and a rank outside the world.

    Raises:
        ConfigError: As said.
    """
    if batch_size < 1 or not 0 <= rank < world_size:
        raise ConfigError(
            f"batch_size {batch_size}, rank {rank} of {world_size}",
            hint="Expected batch_size >= 1 and 0 <= rank < world_size",
        )


def own_records(order: Order, examples: Examples, rank: int, world_size: int) -> tuple[int, int | None]:
    """Return the first, and one past the last, record that a rank may serve: in static order of its parts."""
    parts = order.kind.parts
    if order.kind.kind != "static" or order.draws is not None:
        return 0, None
    begin = order.count * (rank * parts // world_size) // parts
    end = order.count * -(-(rank + 1) * parts // world_size) // parts
    if begin == end:
        return 0, None
    if examples.per_record:
        return begin // examples.per_record, -(-end // examples.per_record)
    first, last = np.searchsorted(examples.first, [begin, end - 1], side="right").tolist()
    return first - 1, last


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShare:
    """One rank's part of every epoch."""

    positions: int
    """Positions of an epoch over all ranks."""
    batch_size: int
    """Examples in a batch of one rank."""
    rank: int
    world_size: int
    drop_last: bool
    """Leave out the last, short step; every rank then has the same number of batches."""
    contiguous: bool
    """This rank's positions are one piece (sequential order) instead of a slice of every step."""
    batches: BatchPlanner | None = None
    """Puts examples into batches of varying size; `steps` and `begin` alone know of it."""

    def __post_init__(self) -> None:
        """Raise ConfigError for impossible ranks and sizes."""
        check_ranks(self.batch_size, self.rank, self.world_size)

    @property
    def step(self) -> int:
        """Positions of one step over all ranks: the global batch."""
        return self.batch_size * self.world_size

    @property
    def own(self) -> range:
        """Positions of a contiguous rank."""
        return range(
            self.positions * self.rank // self.world_size, self.positions * (self.rank + 1) // self.world_size
        )

    def begin(self, epoch: int, batch: int) -> int:
        """Return the position at which the batch of that number of an epoch begins."""
        if self.batches is not None:
            plan = self.batches.epoch(epoch)
            return int(plan.step_bounds[min(batch, plan.steps)])
        return min(batch * self.step, self.positions)

    def steps(self, position: int = 0, epoch: int = 0) -> int:
        """Return the batches that this rank serves from `position` to the end of the epoch."""
        if self.batches is not None:
            plan = self.batches.epoch(epoch)
            return plan.steps - plan.step_at(position)
        if self.contiguous:
            left, size = len(self.own) - position // self.world_size, self.batch_size
        else:
            left, size = self.positions - position, self.step
        if self.drop_last and self.contiguous:
            return max(0, self.positions // self.world_size - position // self.world_size) // size
        if self.drop_last:
            return max(0, left) // size
        whole, rest = divmod(max(0, left), size)
        return whole + (1 if self._tail(rest) else 0)

    def _tail(self, rest: int) -> int:
        """Return the examples of this rank in a last step of `rest` positions."""
        if self.contiguous:
            return rest
        return rest * (self.rank + 1) // self.world_size - rest * self.rank // self.world_size

    def whole_and_tail(self, position: int) -> tuple[int, int]:
        """Return how many full batches this rank serves from `position` on, and examples in the last one."""
        steps = self.steps(position)
        if self.contiguous:
            own, size = len(self.own) - position // self.world_size, self.batch_size
        else:
            own, size = self.positions - position, self.step
        whole = min(steps, own // size)
        return whole, self._tail(own - whole * size) if steps > whole else 0

    def take(self, ids: Ids, position: int, steps: int) -> Any:
        """Return the examples of this rank in `steps` full steps from `position`, in serving order."""
        if self.contiguous:
            begin = self.own.start + position // self.world_size
            return ids(begin, begin + steps * self.batch_size)
        examples = ids(position, position + steps * self.step)
        if self.world_size == 1:
            return examples
        return examples.reshape(steps, self.world_size, self.batch_size)[:, self.rank].reshape(-1)

    def take_tail(self, ids: Ids, position: int) -> Any:
        """Return the examples of this rank in the short last step, which begins at `position`."""
        if self.contiguous:
            return ids(self.own.start + position // self.world_size, self.own.stop)
        rest = self.positions - position
        begin = rest * self.rank // self.world_size
        return ids(position + begin, position + begin + self._tail(rest))


def make_draws(weights: Weights, table: RecordTable, examples: Examples) -> Draws:
    """Make the table that examples are drawn from, in proportion to their record's weight.

    Args:
        weights: One number per entry of `indices`, or per record in number order.

    Raises:
        ConfigError: Another number of weights, a negative one or a NaN, none above 0, or fewer examples
            above 0 than are to be drawn without repeats.
    """
    values = np.asarray(weights.values)
    if values.dtype.kind not in "biuf":
        raise ConfigError(
            f"weights are of {values.dtype}", hint="Give one number per record, or per entry of indices="
        )
    values = values.astype(np.float64)
    if values.shape != table.indices.shape:
        raise ConfigError(
            f"weights have shape {values.shape}, but {len(table.indices)} records are served",
            hint="Give one weight per record in number order, or per entry of indices=",
        )
    if not np.isfinite(values).all() or (values < 0).any() or not values.any():
        raise ConfigError("weights must be finite, at least 0, and not all 0")
    first = examples.first
    if examples.per_record:
        first = np.arange(len(values) + 1, dtype=np.int64) * examples.per_record
    cumulative = np.cumsum(values * np.diff(first))
    if not cumulative[-1] > 0:
        raise ConfigError("every record with a weight above 0 is too short for one window")
    if weights.replacement:
        return Draws(cumulative=cumulative, first=first, samples=weights.samples)
    possible = int(np.diff(first)[values > 0].sum())
    samples = examples.count if weights.samples is None else weights.samples
    if samples > possible or examples.count > SORTED_LIMIT:
        raise ConfigError(
            f"{format_count(samples)} examples cannot be drawn without repeats: {format_count(possible)} of "
            f"{format_count(examples.count)} have a weight above 0, and {format_count(SORTED_LIMIT)} can be "
            "told apart",
            hint="Choose fewer samples=, or replacement=True",
        )
    return Draws(cumulative=cumulative, first=first, samples=samples, weights=values)


def apportion(quotas: Sequence[float]) -> list[int]:
    """Return the whole numbers nearest to `quotas` with their sum, by largest remainder, ties to the first.

    >>> apportion([2.5, 1.25, 1.25]), apportion([0.5, 0.5])
    ([3, 1, 1], [1, 0])
    """
    counts = [int(quota) for quota in quotas]
    by_rest = sorted(range(len(quotas)), key=lambda place: (counts[place] - quotas[place], place))
    for place in by_rest[: round(sum(quotas)) - sum(counts)]:
        counts[place] += 1
    return counts
