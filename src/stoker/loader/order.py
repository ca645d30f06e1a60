"""Which example comes at which position of an epoch.

The order is a pure function of seed, epoch, count and kind. It never depends on a library's random number
generator, so it is the same on every device, version and machine (golden vectors in the tests hold it):
example `i` gets the key `splitmix64(seed, epoch, i)`, its low bits are replaced by `i` itself, and the sorted
keys are the order. Above `SORTED_LIMIT` examples a keyed bijection is computed by position, so that nothing
grows with the count.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum, unique
from functools import partial
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stoker.errors import ConfigError, arg
from stoker.loader.draws import without_repeats

SORTED_LIMIT = 1 << 27
"""Up to this many examples an order is sorted (8 bytes each); above, computed by position. Part of the order,
therefore fixed."""

GAMMA, MIX_A, MIX_B = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""Constants of splitmix64 (Steele, Lea, Flood, OOPSLA 2014)."""

MASK = (1 << 64) - 1
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


@unique
class Salt(IntEnum):
    """What a sequence of random keys is for: equal numbers would give equal keys. Part of every order."""

    ORDER = 0
    TRANSFORM = 2
    SUBSET = 3
    TURNS = 4
    FILLING = 5
    WINDOW = 6


def mix(value: int) -> int:
    """The finalizer of splitmix64 on one number.

    >>> hex(mix(0x9E3779B97F4A7C15))  # first output of splitmix64 seeded with 0
    '0xe220a8397b1dcdaf'
    """
    value &= MASK
    value = ((value ^ (value >> 30)) * MIX_A) & MASK
    value = ((value ^ (value >> 27)) * MIX_B) & MASK
    return value ^ (value >> 31)


def stream(seed: int, epoch: int, salt: Salt = Salt.ORDER) -> int:
    """Where the key sequence of one epoch starts; other salts give independent sequences."""
    return mix(mix(mix(seed + GAMMA) ^ (epoch + 1) * GAMMA) + salt * MIX_A)


def keys_of(base: int, numbers: NDArray[Any]) -> NDArray[np.uint64]:
    """splitmix64 of each of `numbers` in the sequence that starts at `base`, uint64, same shape."""
    x = (numbers.astype(np.uint64) + np.uint64(1)) * np.uint64(GAMMA) + np.uint64(base)
    _mix_into(x, np.empty_like(x))
    return x


def permutations(count: int, bases: Sequence[int]) -> NDArray[np.int64]:
    """Sorted keys with their number in the low bits: per base a permutation of `range(count)`, int64.

    Several at once take as many calls of numpy as one, which matters where a thread makes them: each call is
    a turn of the interpreter's lock that somebody else waits for.
    """
    bits = max(1, (count - 1).bit_length())
    low = np.uint64((1 << bits) - 1)
    first = np.array(bases, dtype=np.uint64)[:, None]
    order = np.empty((len(bases), count), dtype=np.uint64)
    scratch = np.empty((len(bases), min(PIECE, count)), dtype=np.uint64)
    for start in range(0, count, PIECE):
        x = order[:, start : start + PIECE]
        numbers = np.arange(start, start + x.shape[1], dtype=np.uint64)
        np.add((numbers + np.uint64(1)) * np.uint64(GAMMA), first, out=x)
        _mix_into(x, scratch[:, : x.shape[1]])
        x >>= np.uint64(1)  # so that signed and unsigned comparison agree, for torch's sake
        x &= ~low
        x |= numbers
    order.sort(axis=1)
    order &= low
    return order.view(np.int64)


def permutation_on(device: torch.device, count: int, base: int) -> Tensor:
    """The same as one of `permutations`, made on `device`: `(count,)`, int64."""
    bits = max(1, (count - 1).bit_length())
    numbers = torch.arange(count, dtype=torch.int64, device=device)
    x = (numbers + 1) * _signed(GAMMA) + _signed(base)
    x = (x ^ _shifted(x, 30)) * _signed(MIX_A)
    x = (x ^ _shifted(x, 27)) * _signed(MIX_B)
    x = _shifted(x ^ _shifted(x, 31), 1)
    low = (1 << bits) - 1
    return torch.sort((x & ~low) | numbers).values & low


def bijection(positions: NDArray[np.int64], count: int, base: int) -> NDArray[np.int64]:
    """Where `positions` go in a keyed permutation of `range(count)`, computed one by one.

    An alternating Feistel network on just enough bits, walked until it falls below `count`
    (Black and Rogaway, CT-RSA 2002).
    """
    bits = max(2, (count - 1).bit_length())
    value = _feistel(positions.astype(np.uint64), bits, base)
    outside = np.flatnonzero(value >= count)
    while len(outside):
        value[outside] = _feistel(value[outside], bits, base)
        outside = outside[value[outside] >= count]
    return value.view(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderKind:
    """What was asked for: the kind and its numbers. `str()` gives what the state keeps."""

    kind: Kind
    block: int = 0
    """Examples that lie together and are read together (`block`)."""
    window: int = 0
    """Examples that are shuffled among themselves; a multiple of `block`."""
    batches: int = 0
    """Global batches whose examples are sorted by length among themselves (`bucket`)."""
    parts: int = 0
    """Equal parts of the examples, one for each rank (`static`)."""

    def __str__(self) -> str:
        """The text that `parse_order` reads back."""
        if self.kind == "block":
            return f"block({self.block},{self.window})"
        if self.kind == "bucket":
            return f"bucket({self.batches})"
        return f"static({self.parts})" if self.kind == "static" else self.kind


def parse_order(text: str, *, world: int, example_bytes: int) -> OrderKind:
    """Read `full`, `block`, `block(64,4096)`, `bucket`, `bucket(50)`, `static`, `static(8)` or `sequential`.

    Args:
        text: The kind; numbers left out are chosen from the other arguments.
        world: Ranks, the parts of a plain `static`.
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
            f"order {text!r} is not a kind of order. "
            "Known: full, sequential, block, block(block,window), bucket, bucket(batches), static, "
            "static(parts)"
        )
    block_kind, block, window, _, parts = found.groups()
    if not block_kind:
        return OrderKind(kind="static", parts=int(parts or world))
    size = int(block) if block else max(1, -(-DEFAULT_BLOCK_BYTES // max(1, example_bytes)))
    span = int(window) if window else size * DEFAULT_WINDOW_BLOCKS
    if size < 1 or span < size or span % size:
        raise ConfigError(f"order {text!r}: the window must be a multiple of the block, and both at least 1")
    return OrderKind(kind="block", block=size, window=span)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draws:
    """What sampling with replacement draws from: records by weight, then a window of the record."""

    cumulative: NDArray[np.float64]
    """Running sum of weight times windows, `(records,)`."""
    first: NDArray[np.int64]
    """First example of each record, `(records + 1,)`."""
    samples: int | None = None
    """Positions of an epoch; None: as many as there are examples."""
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

    def __post_init__(self) -> None:
        """Refuse combinations that have no meaning."""
        parts = self.kind.parts
        if self.kind.kind == "static" and (parts < 1 or self.global_batch % parts or self.count < parts):
            raise ConfigError(
                f"order {self.kind}: {self.count} examples and a global batch of {self.global_batch} "
                f"cannot be cut into {parts} equal parts. Choose a batch size that is a multiple of it"
            )
        if self.draws is not None and self.kind.kind != "full":
            raise ConfigError(f"weights= draw examples at random, so order must be full, not {self.kind}")
        if self.kind.kind == "bucket" and self.lengths is None:
            raise ConfigError(
                f"order {self.kind} puts records of similar length into a batch, and examples here have one "
                f"shape. Use {arg('order', 'full')}"
            )

    @property
    def positions(self) -> int:
        """Positions of an epoch: all examples, except that `static` parts are cut to the shortest."""
        if self.kind.kind != "static":
            return self.count if self.draws is None else self.draws.samples or self.count
        share = self.global_batch // self.kind.parts
        return (self.count // self.kind.parts // share) * self.global_batch

    def epochs(self, epochs: Sequence[int], device: torch.device | None = None) -> list[Ids]:
        """`epoch` of several epochs, on the host in hardly more calls than one takes."""
        on_host = device is None or device.type == "cpu"
        if on_host and self.kind.kind == "full" and self.draws is None and self.count <= SORTED_LIMIT:
            whole = permutations(self.count, [stream(self.seed, epoch) for epoch in epochs])
            return [partial(_between, order) for order in whole]
        return [self.epoch(epoch, device) for epoch in epochs]

    def epoch(self, epoch: int, device: torch.device | None = None) -> Ids:
        """Make the order of `epoch`; the result gives examples by position.

        Args:
            device: Where the examples are wanted; a CUDA device makes its orders by itself.
        """
        base = stream(self.seed, epoch)
        if device is not None and device.type == "cuda":
            from stoker.loader.order_device import epoch_on

            return epoch_on(self, epoch, device)
        if self.draws is not None:
            return _drawn(self.draws, base)
        if self.kind.kind == "full":
            return _shuffled(self.count, base)
        if self.kind.kind == "bucket":
            from stoker.loader.order_bucket import bucketed

            return partial(_between, bucketed(self, epoch))
        if self.kind.kind == "sequential":
            return lambda start, stop: np.arange(start, stop, dtype=np.int64)
        if self.kind.kind == "static":
            return _static(self.count, self.kind.parts, self.global_batch, base)
        return _blocks(self.count, self.kind.block, self.kind.window, base)


def _shuffled(count: int, base: int) -> Ids:
    if count > SORTED_LIMIT:
        return lambda start, stop: bijection(np.arange(start, stop, dtype=np.int64), count, base)
    whole = permutations(count, [base])[0]
    return lambda start, stop: whole[start:stop]


def _between(order: NDArray[np.int64], start: int, stop: int) -> NDArray[np.int64]:
    return order[start:stop]


def _drawn(draws: Draws, base: int) -> Ids:
    if draws.weights is not None:
        keys = keys_of(base, np.arange(draws.first[-1], dtype=np.int64))
        weights = np.repeat(draws.weights, np.diff(draws.first))
        return partial(_between, without_repeats(weights, keys, draws.samples or len(keys)))
    other = mix(base + 1)
    total = float(draws.cumulative[-1])
    below = np.nextafter(total, 0.0)  # rounding may reach the total itself, which belongs to no record

    def ids(start: int, stop: int) -> NDArray[np.int64]:
        positions = np.arange(start, stop, dtype=np.int64)
        at = (keys_of(base, positions) >> np.uint64(11)).astype(np.float64) * (total * 2.0**-53)
        record = np.searchsorted(draws.cumulative, np.minimum(at, below), side="right")
        first = draws.first[record]
        windows = (draws.first[record + 1] - first).astype(np.uint64)
        return first + (keys_of(other, positions) % windows).astype(np.int64)

    return ids


def _static(count: int, parts: int, global_batch: int, base: int) -> Ids:
    share = global_batch // parts
    begins = [count * part // parts for part in range(parts + 1)]
    shuffled = [_shuffled(begins[p + 1] - begins[p], mix(base + p + 1)) for p in range(parts)]

    def ids(start: int, stop: int) -> NDArray[np.int64]:
        first, last = start // global_batch, -(-stop // global_batch)
        steps = np.empty((last - first, parts, share), dtype=np.int64)
        for part in range(parts):
            own = shuffled[part](first * share, last * share)
            steps[:, part] = (own + begins[part]).reshape(-1, share)
        return steps.reshape(-1)[start - first * global_batch : stop - first * global_batch]

    return ids


def _blocks(count: int, block: int, window: int, base: int) -> Ids:
    """Blocks shuffled over the epoch, then examples inside each window of blocks.

    The numbering starts at another block each epoch and goes round, so that the short block, which is served
    last, is not always made of the same examples. Two-level shuffle of CorgiPile (Xu et al., SIGMOD 2022).
    """
    blocks = count // block
    offset = mix(base + 1) % max(1, blocks) * block
    order = _shuffled(blocks, mix(base + 2)) if blocks else None

    def one_window(begin: int) -> NDArray[np.int64]:
        positions = np.arange(begin, min(begin + window, count), dtype=np.int64)
        ids = positions.copy()
        whole = min(len(ids), max(0, blocks * block - begin)) // block
        if order is not None and whole:
            starts = order(begin // block, begin // block + whole) * block
            ids[: whole * block] = (starts[:, None] + np.arange(block, dtype=np.int64)).reshape(-1)
        ids = (ids + offset) % count
        return ids[np.argsort(keys_of(mix(base + 3), positions), kind="stable")]

    def ids(start: int, stop: int) -> NDArray[np.int64]:
        begins = range(start // window * window, stop, window)
        if not begins:
            return np.empty(0, dtype=np.int64)
        joined = np.concatenate([one_window(begin) for begin in begins])
        return joined[start - begins[0] : stop - begins[0]]

    return ids


def _feistel(value: NDArray[np.uint64], bits: int, base: int) -> NDArray[np.uint64]:
    low_bits = np.uint64(bits // 2)
    low_mask = np.uint64((1 << (bits // 2)) - 1)
    high_mask = np.uint64((1 << (bits - bits // 2)) - 1)
    low, high = value & low_mask, value >> low_bits
    for step in range(FEISTEL_ROUNDS):
        if step % 2:
            high ^= keys_of(mix(base + step), low) & high_mask
        else:
            low ^= keys_of(mix(base + step), high) & low_mask
    return (high << low_bits) | low


def _mix_into(x: NDArray[np.uint64], scratch: NDArray[np.uint64]) -> None:
    """Apply the finalizer of splitmix64 in place."""
    for shift, factor in ((30, MIX_A), (27, MIX_B), (31, None)):
        np.right_shift(x, np.uint64(shift), out=scratch)
        x ^= scratch
        if factor is not None:
            x *= np.uint64(factor)


def _signed(value: int) -> int:
    """The int64 that has the same bits."""
    return value - (1 << 64) if value >> 63 else value


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Logical shift right of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
