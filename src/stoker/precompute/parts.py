"""Machines that fill one cache: group `g` belongs to machine `g mod nodes`, counted over all groups.

Whoever encodes a part holds its claim. Once its own is done it looks at the others': a part whose machine
died, or never came, is free and is taken over. So a run ends with every record stored as long as one process
lives, and each group is encoded once unless somebody died. Of the ranks on a machine the first encodes; the
rest wait, and take over only what has lain free for as long as a start may take.

At an address nobody sees the claims of other machines, only their shards. There the parts of others are
waited for, and taken over when no shard has come for as long as one who holds a claim may show nothing.
"""

from __future__ import annotations

import logging
import select
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stoker.errors import Interrupted
from stoker.precompute.interrupts import Interrupts
from stoker.precompute.settings import PrecomputeSettings
from stoker.precompute.turn import POLL_S, folder_mark
from stoker.store import Folder, Recipe
from stoker.store.local import LocalStorage

log = logging.getLogger("stoker")
ADDRESS_POLL_S = 5.0
"""Seconds between two looks at which shards an address has."""


def part_of(recipe: Recipe, missing: NDArray[np.int64], part: tuple[int, int]) -> NDArray[np.int64]:
    """Those of `missing` whose groups belong to rank `part[0]` of `part[1]`."""
    size = recipe.group.samples
    offsets = np.array([entry.offset for entry in recipe.parts], np.int64)
    counts = np.array([entry.count for entry in recipe.parts], np.int64)
    before = np.cumsum(-(-counts // size)) - -(-counts // size)
    where = np.searchsorted(offsets, missing, side="right") - 1
    group = before[where] + (missing - offsets[where]) // size
    return missing[group % part[1] == part[0]]


def encode_parts(
    folder: Folder,
    settings: PrecomputeSettings,
    encode: Callable[[int, bool], bool],
    interrupts: Interrupts,
    *,
    quiet_s: float,
) -> None:
    """Encode the part of this process, then every other that nobody works on, until all are dealt with.

    Args:
        folder: The cache.
        settings: Which part of how many, and whether others have the same.
        encode: Encodes what a part lacks, if told to; whether it lacks nothing then.
        interrupts: Ends a wait.
        quiet_s: How long those who hold the rest may leave the folder unchanged before we go on beside them.

    Raises:
        Interrupted: A signal came while waiting.
    """
    rank, world = settings.part
    if not settings.together:  # whoever holds the claim of the cache holds that of its only part
        encode(0, True)
        return
    left = [(rank + step) % world for step in range(world)]
    patience_s = settings.deadlines.start if settings.among == "rest" else 0.0
    apart, said = LocalStorage(folder.path).mirror is not None and world > 1, False
    mark, changed = _mark(folder.path, apart), time.monotonic()
    while left:
        if interrupts.signal is not None:
            raise Interrupted("stopped while waiting for other ranks; what is encoded is stored")
        quiet = time.monotonic() - changed
        beside, done = quiet > quiet_s, list[int]()
        for number in left:
            mine = quiet >= patience_s and (number == rank or not apart)
            if _take(folder, number, world, encode, mine, beside=beside):
                done.append(number)
        left = [number for number in left if number not in done]
        if left and not done:
            if apart and not said and rank not in left:
                said = True
                log.info(
                    "%s: waiting for %d of %d machines to store their parts; they are encoded here when "
                    "nothing was stored for %.0f s", folder.path, len(left), world, quiet_s,
                )  # fmt: skip
            poll_s = ADDRESS_POLL_S if apart else POLL_S
            select.select([interrupts.fd] if interrupts.fd >= 0 else [], [], [], poll_s)
        now = _mark(folder.path, apart)
        if done or now != mark:
            mark, changed = now, time.monotonic()


def _mark(folder: Path, apart: bool) -> tuple[int, int]:
    """Changes when somebody stores something: here, or at the address that the folder stands for."""
    if not apart:
        return folder_mark(folder)
    sizes = LocalStorage(folder).sizes()
    return len(sizes), sum(sizes.values())


def _take(
    folder: Folder, number: int, world: int, encode: Callable[[int, bool], bool], mine: bool, *, beside: bool
) -> bool:
    """Deal with a part unless somebody else is at it; whether it is dealt with."""
    with folder.claim(f"encode-{number}-of-{world}", shared=not mine) as got:
        return (got or beside) and encode(number, mine or beside)
