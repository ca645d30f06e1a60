"""Damaged records that a loader meets: set aside, encoded again from their source, and served after all.

The damage is noted in the cache, so it is mended for everybody. Of several processes that meet it (ranks,
loaders) one does the work under a claim, and the others find it done.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from stoker.errors import CorruptError, StalledError, StokerError
from stoker.runtime.locks import lock_folder, lock_holder
from stoker.store import open_cache
from stoker.store.joint import Joint
from stoker.store.repair import repair

if TYPE_CHECKING:
    from stoker.store import Cache
    from stoker.store.protocols import Filler

log = logging.getLogger("stoker")

MEND_DEADLINE_S = 600.0
"""Seconds that one mending may take: waiting for another process, reading a shard, encoding its records."""
TRIES = 2
"""How often a loader has the same record encoded again: storage that damages it each time is broken."""
_CLAIM = "mend"


class Mender:
    """Mends for one loader, and counts."""

    def __init__(self) -> None:
        self.records = 0
        """Records that were encoded again by this process."""
        self._tried: Counter[tuple[str, int | str]] = Counter()

    def mend(self, cache: Cache, error: CorruptError) -> Cache:
        """The cache with all the records that it had, those that `error` is about made again.

        Raises:
            CorruptError: Nobody can encode them, or it failed; says why and what to do.
        """
        if isinstance(cache, Joint):
            owners = cache.owners(error)
            able = next((owner for owner in owners if owner.filler is not None), owners[0])
            mended = self.mend(able, error)
            return Joint([mended if member in owners else member for member in cache.members])
        if cache.filler is None or not error.shard:
            raise error
        try:
            mended = self._mended(cache, error, cache.filler)
        except StokerError as reason:
            fact = f"{error.fact}. Encoding it again from its source failed: {reason}"
            raise CorruptError(fact, shard=error.shard, folder=error.folder) from reason
        mended.filler, mended.joined = cache.filler, cache.joined
        return mended

    def _mended(self, cache: Cache, error: CorruptError, filler: Filler) -> Cache:
        until = time.monotonic() + MEND_DEADLINE_S
        with lock_folder(cache.path, _CLAIM, timeout_s=MEND_DEADLINE_S) as got:
            if not got:
                raise StalledError(
                    f"{lock_holder(cache.path, _CLAIM)} has been repairing {cache.path} for "
                    f"{MEND_DEADLINE_S:g} s. See whether it hangs"
                )
            found = repair(cache.path, shards=[error.shard])
            lost = _lost(cache, open_cache(cache.path, require_complete=False))
            self._count(str(cache.path), lost or [error.shard])
            if lost:
                filler.fill(lost, until - time.monotonic())
                self.records += len(lost)
        opened = open_cache(cache.path, require_complete=False)
        if lost := _lost(cache, opened):
            raise CorruptError(f"{len(lost)} records are still missing, the first is sample {lost[0]}")
        self._say(error, [bad.index for bad in found.bad])
        return opened

    def _count(self, folder: str, keys: list[int] | list[str]) -> None:
        self._tried.update((folder, key) for key in keys)
        (folder, worst), times = self._tried.most_common(1)[0]
        if times > TRIES:
            what = f"sample {worst}" if isinstance(worst, int) else worst
            raise CorruptError(
                f"{what} of {folder} has been damaged {times} times in this run. Look at the storage"
            )

    def _say(self, error: CorruptError, numbers: list[int]) -> None:
        if not numbers:
            log.warning("%s. It is sound now: another process repaired it, or a read went wrong", error.fact)
            return
        shown = ", ".join(map(str, numbers[:10])) + (f" and {len(numbers) - 10} more" if numbers[10:] else "")
        log.warning("%s. Encoded again from the source: samples %s", error.fact, shown)


def _lost(before: Cache, now: Cache) -> list[int]:
    """Samples that were stored before and are not now."""
    return np.setdiff1d(before.numbers, now.numbers).tolist()
