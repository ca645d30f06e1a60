"""States of loaders and mixtures, as their JSON, and the batches that come next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.pins import caches
from tests.pins.batches import digest
from tests.pins.golden import plain
from tests.pins.names import Loader, Mixture, Weights, Windows

MAKERS: dict[str, Callable[..., Any]] = {
    "records": lambda **more: Loader(caches.get("trajectories"), 3, shuffle=True, seed=8, **more),
    "windows": lambda **more: Loader(
        caches.get("trajectories"), 4, windows=Windows(stride=2, field="latent"), shuffle=True, seed=8, **more
    ),
    "windows, drawn": lambda **more: Loader(
        caches.get("int8"),
        4,
        windows=Windows(stride=(1, 2), horizon=2, field=("latent", "flow")),
        **{"shuffle": True, **more},
    ),
    "in order": lambda **more: Loader(caches.get("simulations"), 3, shuffle=False, **more),
    "block": lambda **more: Loader(caches.get("numbers 64"), 4, shuffle="block(2,8)", seed=1, **more),
    "static, second rank": lambda **more: Loader(
        caches.get("numbers 64"), 4, shuffle=True, partition="static", seed=1, rank=1, world_size=2, **more
    ),
    "weights": lambda **more: Loader(
        caches.get("numbers 13"), 2, weights=Weights([1.0] * 12 + [5.0], samples=20), **more
    ),
    "indices": lambda **more: Loader(
        caches.get("numbers 64"), 2, shuffle=True, indices=range(0, 64, 3), seed=2, **more
    ),
    "ragged": lambda **more: Loader(caches.get("ragged"), 1, shuffle=True, ragged="pack", **more),
    "version 1": lambda **more: Loader(caches.get("version 1"), 2, shuffle=True, **more),
    "version 3": lambda **more: Loader(caches.get("version 3"), 2, shuffle=True, **more),
    "mixture, concat": lambda **more: Mixture(
        [caches.get("trajectories"), caches.get("narrow")], 3, windows=Windows(field="latent"), seed=5, **more
    ),
    "mixture, examples": lambda **more: Mixture(
        [caches.get("trajectories"), caches.get("others")], 3, mix="example", seed=5, **more
    ),
    "mixture, weighted": lambda **more: Mixture(
        [caches.get("numbers 13"), caches.get("numbers 64")],
        2,
        mode="weighted",
        weights=[1, 2],
        seed=5,
        **more,
    ),
    "mixture, round robin": lambda **more: Mixture(
        [caches.get("numbers 13"), caches.get("numbers 64")], 2, mode="round_robin", seed=5, **more
    ),
}


def rest(loader: Any) -> dict[str, Any]:
    """Digest what is left of the pass, and the epoch after it."""
    return digest([*loader, *loader])


def interrupted(make: Callable[..., Any]) -> dict[str, Any]:
    """Return the state after two batches of epoch 1 and what follows, and the state at the end of a pass."""
    loader = make(tier="disk")
    loader.set_epoch(1)
    batches = iter(loader)
    next(batches)
    next(batches)
    state = plain(loader.state_dict())
    other = make(tier="host")
    other.load_state_dict(state)
    after = rest(other)
    list(batches)
    return {"state": state, "after": after, "ended": plain(loader.state_dict())}


CASES: dict[str, Callable[[], Any]] = {
    name: lambda make=make: interrupted(make) for name, make in MAKERS.items()
}
