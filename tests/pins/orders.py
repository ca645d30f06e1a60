"""The order of examples: as positions of an epoch, made by numpy and by torch, and as batches of loaders."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from hashlib import sha256
from typing import Any

import numpy as np

from tests.pins import caches
from tests.pins.names import Draws, Loader, Mixture, Windows, global_order

KINDS = ("full", "sequential", "block", "block(3,12)", "block(16,32)", "static", "static(4)")
COUNTS = (8, 9, 100, 4097)
HUGE = (1 << 27) + 12345
"""Above the number of examples up to which an epoch is sorted as a whole."""


def short(values: Any) -> list[int] | str:
    """Return few numbers as they are, and many as a digest."""
    numbers = np.asarray(values, dtype="<i8")
    return numbers.tolist() if numbers.size <= 16 else sha256(numbers.tobytes()).hexdigest()[:16]


def positions(kind: str, count: int, *, on_torch: bool) -> dict[str, Any]:
    """Return the order of examples for several seeds and epochs, whole and cut in the middle."""
    found = {}
    for seed in (0, 7, 2**63 - 1):
        for epoch in (0, 1, 5):
            ids, length = global_order(kind, count, seed, epoch, on_torch=on_torch)
            if count < HUGE:
                whole = np.asarray(ids(0, length))
                assert whole[3:8].tolist() == np.asarray(ids(3, 8)).tolist(), "a cut begins elsewhere"
            else:
                whole = np.concatenate(
                    [np.asarray(ids(start, start + 9)) for start in (0, 54321, length - 9)]
                )
            found[f"seed {seed} epoch {epoch}"] = [length, short(whole)]
    return found


def draws(*, on_torch: bool, repeats: bool) -> dict[str, Any]:
    """Return orders that are drawn by weight."""
    counts = np.arange(20) % 4 + 1
    first = np.concatenate([[0], np.cumsum(counts)])
    weights = np.arange(20, dtype=np.float64) % 5 + 0.5
    by_weight = Draws(
        cumulative=np.cumsum(weights * counts),
        first=first,
        weights=None if repeats else weights,
        samples=30,
    )
    found = {}
    for epoch in (0, 3):
        ids, length = global_order("full", int(first[-1]), 4, epoch, on_torch=on_torch, draws=by_weight)
        found[f"epoch {epoch}"] = [length, short(np.asarray(ids(0, length)))]
    return found


def of_both(make: Callable[..., dict[str, Any]], *args: Any, **named: Any) -> dict[str, Any]:
    """Return the one order that numpy and torch make.

    Raises:
        AssertionError: They differ.
    """
    by_numpy = make(*args, on_torch=False, **named)
    assert make(*args, on_torch=True, **named) == by_numpy, "torch makes another order than numpy"
    return by_numpy


def batches(
    name: str, batch_size: int, world_size: int, resume_at: int = 2, **settings: Any
) -> dict[str, Any]:
    """Return what each rank is served in two epochs; a pass that resumes, or begins later, serves alike."""
    found = {}
    for rank in range(world_size):
        made = [
            Loader(
                caches.get(name),
                batch_size,
                rank=rank,
                world_size=world_size,
                seed=3,
                tier="host",
                **{"shuffle": True, **settings},
            )
            for _ in range(2)
        ]
        epochs = [[batch.get("index").tolist() for batch in made[0]] for _ in range(2)]
        found[f"rank {rank}"] = [
            sizes(epochs[0]),
            *(short([number for one in epoch for number in one]) for epoch in epochs),
        ]
        made[0].set_epoch(0)
        begun = iter(made[0])
        before = [next(begun)["index"].tolist() for _ in range(min(resume_at, len(epochs[0]) - 1))]
        made[1].load_state_dict(made[0].state_dict())
        assert before + [batch["index"].tolist() for batch in made[1]] == epochs[0], "resumed"
        made[1].set_epoch(1)
        assert [batch["index"].tolist() for batch in made[1]] == epochs[1], "epoch 1 by set_epoch"
    return found


def sizes(batches: list[list[Any]]) -> str:
    """Return how many examples the batches of an epoch have."""
    lengths = [len(one) for one in batches]
    assert len({*lengths[:-1]}) < 2, "only the last batch is shorter"
    return f"{len(lengths)} batches of {lengths[0]}, the last of {lengths[-1]}" if lengths else "none"


def windows(world_size: int, **settings: Any) -> dict[str, Any]:
    """Return the samples and starts that each rank is served."""
    found = {}
    for rank in range(world_size):
        cut = Windows(stride=(1, 2), horizon=2, start_every=2, field="latent")
        loader = Loader(
            caches.get("trajectories"),
            3,
            windows=cut,
            rank=rank,
            world_size=world_size,
            seed=3,
            tier="disk",
            **{"shuffle": True, **settings},
        )
        indices = [batch.index.tolist() for batch in loader]
        found[f"rank {rank}"] = [sizes(indices), short([x for one in indices for x in one])]
    return found


def turns(**settings: Any) -> list[Any]:
    """Return whose turn it is at each step of a mixture, for two epochs of two ranks."""
    names = ("numbers 13", "numbers 64")
    found = []
    for rank in range(2):
        mixture = Mixture(
            [caches.get(name) for name in names],
            2,
            names=("a", "b"),
            rank=rank,
            world_size=2,
            seed=1,
            **settings,
        )
        for _ in range(2):
            served = [(batch["task"], batch["index"].tolist()) for batch in mixture]
            found += [
                "".join(task or "-" for task, _ in served),
                short([x for _, one in served for x in one]),
            ]
    return found


LOADERS = {
    "full": {"shuffle": True},
    "in order": {"shuffle": False},
    "block": {"shuffle": "block(2,4)"},
    "static": {"shuffle": True, "partition": "static"},
    "full, short batches kept": {"shuffle": True, "drop_last": False},
}
CASES: dict[str, Callable[[], Any]] = {
    **{
        f"positions: {kind} of {count}": partial(of_both, positions, kind, count)
        for kind in KINDS
        for count in COUNTS
    },
    "positions: full of very many": partial(of_both, positions, "full", HUGE),
    "positions: drawn": lambda: of_both(draws, repeats=True),
    "positions: drawn without repeats": lambda: of_both(draws, repeats=False),
    **{
        f"batches: {order} of {count} by {ranks}": lambda count=count, ranks=ranks, settings=settings: (
            batches(f"numbers {count}", 4, ranks, **settings)
        )
        for order, settings in LOADERS.items()
        for count in (13, 64, 1000)
        for ranks in (1, 3)
    },
    "batches: one example": lambda: batches("numbers 1", 4, 1, shuffle=True),
    **{
        f"windows: {order} by {world_size}": partial(windows, world_size, **settings)
        for order, settings in LOADERS.items()
        for world_size in (1, 2)
    },
    "turns: concat": lambda: turns(mode="concat", mix="batch"),
    "turns: examples": lambda: turns(mode="concat", mix="example"),
    "turns: weighted": lambda: turns(mode="weighted", weights=[1, 3], epoch_examples=60),
    "turns: round robin": lambda: turns(mode="round_robin"),
    "turns: round robin, longest": lambda: turns(mode="round_robin", exhausted="longest"),
}
