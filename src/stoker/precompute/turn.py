"""One process encodes a cache at a time; the others wait, and say for whom.

The claim saves work, nothing more: shards of two processes never collide. So whoever has waited long for a
holder that makes no progress simply goes on without it.
"""

from __future__ import annotations

import logging
import os
import select
import time
from contextlib import ExitStack
from pathlib import Path

from stoker.precompute.interrupts import Interrupts
from stoker.runtime.locks import lock_holder
from stoker.store import Folder

log = logging.getLogger("stoker")

POLL_S = 0.2
_SAY_EVERY_S = 30.0


def take_turn(
    folder: Folder, stack: ExitStack, interrupts: Interrupts, *, quiet_s: float, shared: bool = False
) -> bool:
    """Wait until nobody else encodes this cache; the claim is held until `stack` closes.

    Args:
        quiet_s: How long the holder may leave the folder unchanged before we go on beside it.
        shared: Hold it together with others that say so too: the ranks of a run.

    Returns:
        Whether we had to wait, so that the folder must be looked at again.
    """
    mark, changed, said = None, time.monotonic(), float("-inf")
    waited = False
    while interrupts.signal is None:
        with ExitStack() as attempt:
            if attempt.enter_context(folder.claim(shared=shared)):
                stack.push(attempt.pop_all())
                return waited
        waited = True
        now, present = time.monotonic(), folder_mark(folder.path)
        if present != mark:
            mark, changed = present, now
        if now - said > _SAY_EVERY_S:
            said = now
            log.warning(
                "%s is being encoded by %s; waiting for it", folder.path, lock_holder(folder.path, "encode")
            )
        if now - changed > quiet_s:
            other = lock_holder(folder.path, "encode")
            log.warning("%s did nothing for %g s; encoding beside it", other, quiet_s)
            return True
        select.select([interrupts.fd] if interrupts.fd >= 0 else [], [], [], POLL_S)
    return waited


def folder_mark(path: Path) -> tuple[int, int]:
    """Files in a folder and their bytes: a holder that writes changes it, in the open shard as well."""
    sizes: list[int] = []
    with os.scandir(path) as entries:
        for entry in entries:
            try:
                sizes.append(entry.stat(follow_symlinks=False).st_size)
            except FileNotFoundError:  # renamed or removed in between, which is progress
                sizes.append(-1)
    return len(sizes), sum(sizes)
