"""Batches by digest: every kind of example from every tier."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from tests.pins import caches
from tests.pins.names import (
    Decode,
    Flip,
    Loader,
    Mixture,
    Normalization,
    Normalize,
    Pad,
    Roll,
    Weights,
    Windows,
    join_table,
)

TIERS = ("host", "disk", "encode")
LATENT = {"field": "latent"}
FORMS = ("list", "pad", "pack")


def columns(batch: Any) -> Iterator[tuple[str, Any]]:
    """Yield the tensors and words of a batch with their names; lists and mappings by their entries."""
    parts = batch._asdict() if hasattr(batch, "_asdict") else dict(batch)
    stack = sorted(parts.items())
    while stack:
        name, value = stack.pop(0)
        if isinstance(value, dict):
            stack[:0] = [(f"{name}.{key}", value[key]) for key in sorted(value)]
        elif isinstance(value, list):
            yield f"{name}[]", len(value)
            stack[:0] = [(f"{name}[]", one) for one in value]
        else:
            yield name, value


def add(digests: dict[str, Any], batch: Any) -> None:
    """Take one batch into the digests of all columns: dtype, shape and bytes."""
    for name, value in columns(batch):
        digest = digests.setdefault(name, sha256())
        if isinstance(value, Tensor):
            assert value.device.type == "cpu"
            digest.update(f"{value.dtype} {tuple(value.shape)}".encode())
            whole = value.clone(memory_format=torch.contiguous_format).flatten()
            digest.update(whole.view(torch.uint8).numpy().tobytes())
        else:
            digest.update(repr(value).encode())


def digest(batches: Iterable[Any]) -> dict[str, Any]:
    """Return the number of batches, the last position, and a digest of each column over all of them."""
    digests: dict[str, Any] = {}
    count, position = 0, None
    for batch in batches:
        add(digests, batch)
        count, position = count + 1, list(batch.position)
    found = {name: made.hexdigest()[:16] for name, made in sorted(digests.items())}
    return {"batches": count, "position": position, "columns": found}


def served(name: str, batch_size: int = 3, **settings: Any) -> Callable[[str], dict[str, Any]]:
    """Return what digests two epochs of a cache, by tier."""

    def of(tier: str) -> dict[str, Any]:
        loader = Loader(caches.get(name), batch_size, tier=tier, **{"shuffle": True, "seed": 11, **settings})
        return digest([*loader, *loader])

    return of


def mixed(*names: str, **settings: Any) -> Callable[[str], dict[str, Any]]:
    """Return what digests two epochs of a mixture, by tier."""

    def of(tier: str) -> dict[str, Any]:
        members = [caches.get(name) for name in names]
        loader = Mixture(members, 3, tier=tier, seed=5, names=names, **settings)
        return digest([*loader, *loader])

    return of


def joined(tier: str) -> dict[str, Any]:
    """Digest an epoch of a cache with two columns of a table."""
    table = caches.root() / "labels.csv"
    words = ("cat", "dog")
    table.write_text("number,animal,weight\n" + "".join(f"{n},{words[n % 2]},{n / 4}\n" for n in range(11)))
    rules = {"animal": {"text": [*words]}, "weight": "float32"}
    cache = join_table(caches.get("pictures"), table, key="number", columns=rules)
    return digest(Loader(cache, 4, tier=tier, shuffle=True, seed=2))


CASES_BY_TIER: dict[str, tuple[Callable[[str], dict[str, Any]], tuple[str, ...]]] = {
    **{f"records: {name}": (served(name), TIERS) for name in caches.MAKERS if "numbers" not in name},
    **{f"records: {name}": (served(name), ("host", "disk")) for name in caches.CHECKED_IN},
    **{
        f"records: ragged, {form}": (served("ragged", ragged=form), TIERS)
        for form in ("pad", "pack", Pad(multiple=4, value=-1))
    },
    "records: bucket": (served("ragged", shuffle="bucket(2)", ragged="pad"), TIERS),
    "records: dtype": (served("float16", dtype="float32"), TIERS),
    "records: int8, dtype": (served("int8", dtype="float16"), TIERS),
    "records: indices": (served("trajectories", indices=[3, 1, 1, 12, 7]), TIERS),
    "records: weights": (served("trajectories", weights=[1.0, 0.0, 4.0] + [2.0] * 11), TIERS),
    "records: weights without repeats": (
        served("trajectories", weights=Weights([0.5] * 7 + [3.0] * 7, samples=8, replacement=False)),
        TIERS,
    ),
    "records: sequential": (served("simulations", shuffle=False), TIERS),
    "records: normalize": (
        served("pictures", normalize={"image": Normalization(mean=[0.5, 0.25, 0.0], std=0.5, divisor=256.0)}),
        TIERS,
    ),
    "records: joined": (joined, TIERS),
    "records: transforms": (
        served("pictures", transforms=[Flip(-1, fields=["image"]), Roll((-2,), fields=["image"])]),
        TIERS,
    ),
    "records: decode": (served("files", transforms=[Decode(size=(8, 8))]), TIERS),
    "windows: plain": (served("trajectories", windows=Windows(**LATENT)), TIERS),
    "windows: stride, horizon, starts": (
        served("trajectories", windows=Windows(stride=2, horizon=3, start_every=2, **LATENT)),
        TIERS,
    ),
    "windows: drawn": (
        served("trajectories", 5, windows=Windows(stride=(1, 3), horizon=(1, 2), **LATENT)),
        TIERS,
    ),
    "windows: several states": (
        served("trajectories", windows=Windows(horizon=2, field=("latent", "flow"))),
        TIERS,
    ),
    "windows: several states, drawn": (
        served("float16", windows=Windows(stride=(1, 2), horizon=2, field=("flow", "latent"))),
        TIERS,
    ),
    "windows: encoded": (served("encoded", windows=Windows(horizon=2, **LATENT)), TIERS),
    "windows: kept": (served("kept", windows=Windows(horizon=2, field="code")), TIERS),
    "windows: int8": (served("int8", windows=Windows(stride=2, **LATENT)), TIERS),
    "windows: float8": (served("float8", windows=Windows(horizon=2, **LATENT), dtype="float32"), TIERS),
    "windows: compressed": (
        served("zstd", windows=Windows(**LATENT), shuffle="block(4,8)"),
        TIERS,
    ),
    "windows: ragged": (served("ragged", windows=Windows()), TIERS),
    "windows: simulations": (served("simulations", windows=Windows(horizon=2)), TIERS),
    "windows: weights": (
        served("trajectories", windows=Windows(**LATENT), weights=[1.0] * 13 + [9.0]),
        TIERS,
    ),
    "windows: transforms": (
        served(
            "trajectories",
            windows=Windows(horizon=2, **LATENT),
            transforms=[Flip(-1), Normalize(mean=0.5, std=2.0)],
        ),
        TIERS,
    ),
    "windows: version 1": (served("version 1", windows=Windows()), ("host", "disk")),
    "windows: version 3": (served("version 3", windows=Windows()), ("host", "disk")),
    **{f"points: records, {form}": (served("particles", 2, ragged=form), TIERS) for form in FORMS},
    **{
        f"points: windows, {form}": (
            served("particles", 2, ragged=form, windows=Windows(horizon=2, field="velocities")),
            TIERS,
        )
        for form in FORMS
    },
    "points: mesh": (served("mesh", 2, ragged="pack", windows=Windows(field="u")), TIERS),
    "mixture: examples of equal fields": (
        mixed("trajectories", "others", windows=Windows(**LATENT), mix="example"),
        TIERS,
    ),
    "mixture: records": (mixed("trajectories", "others"), TIERS),
    "mixture: concat": (mixed("trajectories", "narrow", windows=Windows(**LATENT)), TIERS),
    "mixture: weighted": (
        mixed(
            "trajectories",
            "narrow",
            windows=Windows(**LATENT),
            mode="weighted",
            weights={"trajectories": 3, "narrow": 1},
            epoch_examples=40,
        ),
        TIERS,
    ),
    "mixture: round robin": (
        mixed(
            "others", "narrow", windows=Windows(horizon=2, **LATENT), mode="round_robin", exhausted="longest"
        ),
        TIERS,
    ),
}
"""What is served, and from which tiers: caches that were made elsewhere have no encoder."""


def of_all_tiers(name: str) -> dict[str, Any]:
    """Return the one result that all tiers give.

    Raises:
        AssertionError: Two tiers differ.
    """
    make, tiers = CASES_BY_TIER[name]
    first, *others = (make(tier) for tier in tiers)
    assert all(other == first for other in others), f"{name}: the tiers {tiers} differ"
    return first


CASES: dict[str, Callable[[], Any]] = {name: lambda name=name: of_all_tiers(name) for name in CASES_BY_TIER}
