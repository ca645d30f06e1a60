"""The orders of `order.py`, made on a device: the same examples, without a number crossing from the host.

Every kind is arithmetic on positions, int64 with the bits that numpy has as uint64. Nothing here waits for
the device, with one exception: above `SORTED_LIMIT` examples a position is walked until it falls below the
count, and whether all have arrived is asked once a step for a whole chunk of batches.
"""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

from stoker.loader.buffers import sent
from stoker.loader.keyed import keys_of
from stoker.loader.order import (
    FEISTEL_ROUNDS,
    SORTED_LIMIT,
    Draws,
    Ids,
    Order,
    OrderKind,
    mix,
    permutation_on,
    stream,
)

LOWEST = -(1 << 63)
"""Added to keys, it puts int64 in the order that uint64 has."""


def epoch_on(order: Order, epoch: int, device: torch.device) -> Ids:
    """`order.epoch(epoch)` on `device`: the result gives examples by position, `(stop - start,)` int64."""
    if order.kind.kind == "bucket" or (order.draws is not None and order.draws.weights is not None):
        return _from_host(order, epoch, device)  # sorted as a whole, by numbers of the host's making
    with suppress(torch.OutOfMemoryError):
        return _made_on(order, epoch, device)
    # Sorting takes eight times the memory of the order itself.
    return _from_host(order, epoch, device)


def table_bytes(order: Order, records: int) -> int:
    """Bytes that a device needs in addition to its records.

    Row, sample number and first example of each record, which are kept; and about 64 for each example while
    an epoch is sorted: key, number, and values, indices and scratch of `torch.sort`.
    """
    in_blocks = order.kind.kind in ("sequential", "block")
    return 24 * records + (0 if in_blocks else 64 * min(order.positions, SORTED_LIMIT))


def _from_host(order: Order, epoch: int, device: torch.device) -> Ids:
    """One copy for each epoch, which nothing waits for."""
    whole = sent(order.epoch(epoch)(0, order.positions), device)
    return lambda start, stop: whole[start:stop]


def _made_on(order: Order, epoch: int, device: torch.device) -> Ids:
    base, kind = stream(order.seed, epoch), order.kind.kind
    if order.draws is not None:
        return _drawn(order.draws, base, device)
    if kind == "full":
        return _shuffled(order.count, base, device)
    if kind == "sequential":
        return lambda start, stop: torch.arange(start, stop, device=device)
    if kind == "static":
        return _static(order, base, device)
    return _blocks(order.count, order.kind, base, device)


def _shuffled(count: int, base: int, device: torch.device) -> Ids:
    if count > SORTED_LIMIT:
        return lambda start, stop: bijection_on(torch.arange(start, stop, device=device), count, base)
    whole = permutation_on(device, count, base)
    return lambda start, stop: whole[start:stop]


def bijection_on(positions: Tensor, count: int, base: int) -> Tensor:
    """`order.bijection` of these positions, int64."""
    bits = max(2, (count - 1).bit_length())
    value = _feistel(positions, bits, base)
    while bool((value >= count).any()):
        value = torch.where(value >= count, _feistel(value, bits, base), value)
    return value


def _feistel(value: Tensor, bits: int, base: int) -> Tensor:
    low_bits = bits // 2
    low_mask, high_mask = (1 << low_bits) - 1, (1 << (bits - low_bits)) - 1
    low, high = value & low_mask, value >> low_bits
    for step in range(FEISTEL_ROUNDS):
        if step % 2:
            high = high ^ (keys_of(mix(base + step), low) & high_mask)
        else:
            low = low ^ (keys_of(mix(base + step), high) & low_mask)
    return (high << low_bits) | low


def _drawn(draws: Draws, base: int, device: torch.device) -> Ids:
    other, total = mix(base + 1), float(draws.cumulative[-1])
    cumulative = sent(draws.cumulative, device)
    firsts = sent(draws.first, device)
    below = float(np.nextafter(total, 0.0))

    def ids(start: int, stop: int) -> Tensor:
        positions = torch.arange(start, stop, device=device)
        key = (keys_of(base, positions) >> 11) & ((1 << 53) - 1)
        at = (key.to(torch.float64) * (total * 2.0**-53)).clamp_max_(below)
        record = torch.searchsorted(cumulative, at, right=True)
        first = firsts[record]
        windows = firsts[record + 1] - first
        key = keys_of(other, positions)
        half = (key >> 1) & ((1 << 63) - 1)  # a remainder of uint64, in two steps that int64 can hold
        return first + (half % windows * 2 + (key & 1)) % windows

    return ids


def _static(order: Order, base: int, device: torch.device) -> Ids:
    parts, step = order.kind.parts, order.global_batch
    share = step // parts
    begins = [order.count * part // parts for part in range(parts + 1)]
    shuffled = [_shuffled(begins[p + 1] - begins[p], mix(base + p + 1), device) for p in range(parts)]

    def ids(start: int, stop: int) -> Tensor:
        first, last = start // step, -(-stop // step)
        own = [
            (shuffled[part](first * share, last * share) + begins[part]).view(-1, share)
            for part in range(parts)
        ]
        return torch.stack(own, dim=1).view(-1)[start - first * step : stop - first * step]

    return ids


def _blocks(count: int, kind: OrderKind, base: int, device: torch.device) -> Ids:
    block, window = kind.block, kind.window
    blocks = count // block
    offset = mix(base + 1) % max(1, blocks) * block
    order = _shuffled(blocks, mix(base + 2), device) if blocks else None

    def windows(begin: int, end: int, size: int) -> Tensor:
        """Examples of the positions `begin .. end`, which are whole windows of `size`."""
        positions = torch.arange(begin, end, device=device)
        ids, whole = positions, min(end, blocks * block) - begin
        if order is not None and whole > 0:
            starts = order(begin // block, begin // block + whole // block) * block
            within = torch.arange(block, device=device)
            ids = torch.cat([(starts[:, None] + within).view(-1), positions[whole:]])
        ids = ((ids + offset) % count).view(-1, size)
        keys = (keys_of(mix(base + 3), positions) + LOWEST).view(-1, size)
        return ids.gather(1, keys.argsort(dim=1, stable=True)).view(-1)

    def ids(start: int, stop: int) -> Tensor:
        begin, end = start // window * window, min(count, -(-stop // window) * window)
        full = max(begin, end // window * window)
        pieces = [windows(begin, full, window)] if full > begin else []
        if end > full:
            pieces.append(windows(full, end, end - full))
        joined = torch.cat(pieces) if pieces else torch.arange(0, device=device)
        return joined[start - begin : stop - begin]

    return ids
