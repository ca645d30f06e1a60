"""What is fetched before it is asked for, and in how many requests."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from stoker.loader import Loader, prefetch
from stoker.loader.assembly import stored_outputs
from stoker.loader.loader import design_of
from stoker.loader.prefetch import BlockLocator
from stoker.store import mirror as folder
from stoker.store import storage
from stoker.units import KIB
from tests.loader.objects import opened, settings, size_of, stored

BLOCK = 4 * KIB
"""One for each record."""
WAIT_S = 60.0


def test_blocks_that_an_order_takes_within_the_lead_come_in_few_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each batch takes blocks here and there in a window; one request for each costs half of the rate."""
    for module in (prefetch, folder, storage):
        monkeypatch.setattr(module, "BLOCK_BYTES", BLOCK)
    stored(tmp_path / "share", 384, record=(64, 16))
    cache, mirror = opened(f"file://{tmp_path}/share/c", tmp_path / "mirrors")
    design = design_of(Loader(cache, **{"shuffle": True, **settings(batch_size=8, shuffle="block(64,192)")}))
    outputs = stored_outputs(design.outputs)

    def reach(block_bytes: int) -> BlockLocator:
        return BlockLocator(cache, design.table, design.examples, outputs, block_bytes)

    ahead = prefetch.make_block_prefetcher(cache, reach, design.share, design.order.epoch)
    assert ahead is not None
    ahead.at(0, 0)
    until = time.monotonic() + WAIT_S
    while mirror.counters.bytes < 0.95 * size_of(cache) and time.monotonic() < until:
        time.sleep(0.01)

    blocks = size_of(cache) // BLOCK
    assert mirror.counters.bytes >= 0.95 * size_of(cache)
    assert mirror.counters.requests <= blocks / folder.RUN_BLOCKS + 30 < blocks / 3
