from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.errors import ConfigError
from stoker.loader import Loader, Windows
from stoker.loader.order import RankShare
from tests.kit.amount import example_count
from tests.kit.orders import in_order
from tests.loader.caches import write_cache


def share(rank: int = 0, **changes: object) -> RankShare:
    given: dict = {
        "positions": 50,
        "batch_size": 4,
        "world_size": 2,
        "drop_last": False,
        "contiguous": False,
        "rank": rank,
    }
    return RankShare(**{**given, **changes})


def served(of: RankShare) -> list[np.ndarray]:
    """Every batch of a rank, through the same two calls that chunks use."""

    def ids(start: int, stop: int) -> np.ndarray:
        assert 0 <= start <= stop <= of.positions
        return np.arange(start, stop)

    whole, tail = of.whole_and_tail(0)
    batches = np.split(of.take(ids, 0, whole), whole) if whole else []
    if tail:
        batches.append(of.take_tail(ids, whole * of.step))
    assert len(batches) == of.steps()
    return batches


@settings(max_examples=example_count(150), deadline=None)
@given(
    positions=st.integers(1, 200),
    batch_size=st.integers(1, 9),
    world_size=st.sampled_from([1, 2, 3, 4]),
    drop_last=st.booleans(),
    contiguous=st.booleans(),
)
def test_no_example_is_lost_or_doubled(
    positions: int, batch_size: int, world_size: int, drop_last: bool, contiguous: bool
) -> None:
    shares = [
        share(
            rank,
            positions=positions,
            batch_size=batch_size,
            world_size=world_size,
            drop_last=drop_last,
            contiguous=contiguous,
        )
        for rank in range(world_size)
    ]
    per_rank = [served(one) for one in shares]
    everything = [int(i) for batches in per_rank for batch in batches for i in batch]

    assert len(set(everything)) == len(everything)
    if drop_last:
        assert len({len(batches) for batches in per_rank}) == 1, "a rank would wait for ever for the others"
        assert positions - len(everything) < batch_size * world_size + (world_size if contiguous else 0)
    else:
        assert sorted(everything) == list(range(positions))
    if contiguous:
        for batches in per_rank:
            joined = np.concatenate([*batches, np.empty(0, np.int64)])
            assert np.array_equal(joined, np.arange(len(joined)) + (joined[0] if len(joined) else 0))


def test_global_batches_are_cut_by_rank() -> None:
    assert served(share(0))[0].tolist() == [0, 1, 2, 3]
    assert served(share(1))[0].tolist() == [4, 5, 6, 7]
    assert served(share(1))[1].tolist() == [12, 13, 14, 15]


@pytest.mark.parametrize("changes", [{"rank": 2}, {"rank": -1}, {"batch_size": 0}, {"world_size": 0}])
def test_ranks_and_sizes_that_are_none_are_refused(changes: dict) -> None:
    with pytest.raises(ConfigError, match="Expected batch_size"):
        share(**changes)


@pytest.mark.parametrize("ragged", [False, True])
def test_in_static_order_a_rank_holds_its_own_part_alone(tmp_path: Path, ragged: bool) -> None:
    """Which is what it is for: N ranks hold N times as much on their devices."""
    lengths = [5 + 2 * (n % 3) if ragged else 6 for n in range(40)]
    latent = [torch.randn(steps, 3) for steps in lengths]
    values = latent if ragged else torch.stack(latent)
    cache = write_cache(tmp_path, {"latent": values}, timed=["latent"], shards=[10, 10, 10])
    windows = Windows(field="latent")

    def served(rank: int, order: str, world_size: int = 2) -> tuple[int, set[int]]:
        loader = Loader(
            cache,
            batch_size=4,
            windows=windows,
            **in_order(order),
            rank=rank,
            world_size=world_size,
            tier="host",
        )
        seen = {number for _ in range(3) for batch in loader for number in batch.index[:, 0].tolist()}
        return sum(row.records for row in loader.plan.rows), seen

    for rank, half in enumerate((range(21), range(19, 40)) if ragged else (range(20), range(20, 40))):
        held, seen = served(rank, "static")
        assert held <= (30 if ragged else 20)
        assert seen <= set(half)
        assert served(rank, "full")[0] == 40
    assert served(0, "static(4)")[1] <= set(range(21))
    assert served(0, "static(2)", world_size=1)[0] == 40
