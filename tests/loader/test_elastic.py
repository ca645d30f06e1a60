"""A run stopped anywhere goes on at another tier and with other ranks: the same global sequence."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache as remembered
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stoker.loader import Loader, Mixture, Windows
from tests.kit.amount import example_count
from tests.kit.orders import in_order
from tests.loader.caches import trajectories, write_cache

GLOBAL_BATCH, EPOCHS = 8, 2
TIERS, WORLDS = ("host", "disk", "device"), (1, 2, 4)
ORDERS = ("full", "block(4,32)", "static(4)")
KINDS = {
    "windows": Windows(field="latent", start_every=2),
    "futures": Windows(field="latent", stride=2, horizon=3),
    "records": None,
}


def values_of(batch: Any) -> list[torch.Tensor]:
    """All tensors of a batch, in a fixed order."""
    if isinstance(batch, dict):
        return [batch[name] for name in sorted(batch)]
    parts = [batch.z0, batch.z1, batch.index, *(batch.cond[name] for name in sorted(batch.cond))]
    return parts if batch.future is None else [*parts, batch.future]


class Served:
    """One cache under every tier and number of ranks."""

    def __init__(self, folder: Path) -> None:
        self._cache = write_cache(
            folder, trajectories(count=41, step=(2, 3)), timed=["latent", "time"], shards=[9, 15], skip=[3]
        )
        self.loaders = remembered(self._loaders)
        self.sequence = remembered(self._sequence)

    def _loaders(self, tier: str, world_size: int, order: str, kind: str) -> list[Loader]:
        return [
            Loader(
                self._cache, batch_size=GLOBAL_BATCH // world_size, rank=rank, world_size=world_size,
                tier=tier, **in_order(order),
                windows=KINDS[kind], seed=3, drop_last=True,
            )
            for rank in range(world_size)
        ]  # fmt: skip

    def _sequence(self, order: str, kind: str) -> list[list[torch.Tensor]]:
        """Every global batch of all epochs, from one process that is never stopped."""
        (loader,) = self._loaders("host", 1, order, kind)
        return [values_of(batch) for _ in range(EPOCHS) for batch in loader]

    def steps(self, tier: str, world_size: int, order: str, kind: str, state: str | None) -> Iterator[Any]:
        """Global batches from a saved state on, each with the state after it, which every rank agrees on."""
        ranks = self.loaders(tier, world_size, order, kind)
        for loader in ranks:
            loader.set_epoch(0)
            if state is not None:
                loader.load_state_dict(json.loads(state))
        first = ranks[0].epoch
        for _ in range(first, EPOCHS):
            for parts in zip(*ranks, strict=True):
                states = {json.dumps({**one.state_dict(), "world": 0}) for one in ranks}
                assert len(states) == 1
                columns = zip(*map(values_of, parts), strict=True)
                yield (
                    [torch.cat(column) for column in columns],
                    json.dumps(ranks[world_size - 1].state_dict()),
                )


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(tmp_path_factory.mktemp("elastic"))


setups = st.tuples(st.sampled_from(TIERS), st.sampled_from(WORLDS))


@settings(
    max_examples=example_count(200),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    order=st.sampled_from(ORDERS),
    kind=st.sampled_from(sorted(KINDS)),
    legs=st.lists(st.tuples(setups, st.floats(0, 1)), min_size=1, max_size=3),
    last=setups,
)
def test_a_run_stopped_anywhere_goes_on_at_any_tier_and_world(
    served: Served, order: str, kind: str, legs: list[tuple[tuple[str, int], float]], last: tuple[str, int]
) -> None:
    expected, seen, state = served.sequence(order, kind), list[list[torch.Tensor]](), None

    for (tier, world_size), part in legs:
        stop = round(part * (len(expected) - len(seen)))
        for step in range(stop):
            if step == 0:
                running = served.steps(tier, world_size, order, kind, state)
            batch, state = next(running)
            seen.append(batch)
    seen += [batch for batch, _ in served.steps(*last, order, kind, state)]

    assert len(seen) == len(expected)
    for number, (found, wanted) in enumerate(zip(seen, expected, strict=True)):
        for one, other in zip(found, wanted, strict=True):
            assert one.dtype == other.dtype, number
            assert torch.equal(one, other), number


@settings(
    max_examples=example_count(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(tier=st.sampled_from(TIERS), world_size=st.sampled_from((2, 4)), order=st.sampled_from(ORDERS))
def test_ranks_serve_every_example_of_an_epoch_at_most_once_and_equally_often(
    served: Served, tier: str, world_size: int, order: str
) -> None:
    for loader in served.loaders(tier, world_size, order, "windows"):
        loader.set_epoch(1)
    own = [
        [tuple(row) for batch in loader for row in batch.index.tolist()]
        for loader in served.loaders(tier, world_size, order, "windows")
    ]

    assert len({len(rows) for rows in own}) == 1
    together = [row for rows in own for row in rows]
    assert len(together) == len(set(together)) == 40 * 4 // GLOBAL_BATCH * GLOBAL_BATCH


def test_what_a_state_holds_never_changes(tmp_path: Path) -> None:
    """Runs that were stopped before an update go on after it."""
    fields = {"latent": torch.zeros(12, 5, 2), "nu": torch.zeros(12)}
    cache = write_cache(tmp_path, fields, timed=("latent",))
    plain = {
        "version": 1,
        "epoch": 0,
        "position": 0,
        "seed": 7,
        "order": "block(2,4)",
        "global_batch": 8,
        "examples": 36,
        "fingerprint": "7bdb9edf524834b8",
        "generation": 1,
        "records": "ca185a0636eb095f",
        "windows": "stride=2 horizon=1 start_every=1",
        "world": 2,
    }
    loader = Loader(cache, 4, windows=Windows(stride=2), shuffle="block(2,4)", seed=7, world_size=2, rank=1)
    one = {**plain, "order": "full", "global_batch": 4, "examples": 12, "windows": None, "world": 1}
    mixture = Mixture([cache, cache], 4, names=["a", "b"], seed=3, mode="weighted")

    assert loader.state_dict() == plain
    weighted = Loader(cache, 4, weights=[1.0] * 12, transforms=[torch.nn.Identity()])
    assert weighted.state_dict() == {**one, "seed": 0, "records": WEIGHTED, "transforms": ["Identity"]}
    assert mixture.state_dict() == {
        "version": 1,
        "epoch": 0,
        "position": 0,
        "mode": "weighted",
        "seed": 3,
        "counts": [3, 3],
        "caches": [["a", "7bdb9edf524834b8"], ["b", "7bdb9edf524834b8"]],
        "loaders": {
            "a": {**one, "seed": 3912932258107478508},
            "b": {**one, "seed": 16578438642863521019},
        },
    }
    loader.load_state_dict({**plain, "position": 16})
    assert loader.state_dict()["position"] == 16


WEIGHTED = "7c9533a87e14571a"
"""Digest of twelve samples and twelve weights of 1."""
