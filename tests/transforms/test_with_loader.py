"""Augmented batches are a function of seed, epoch and example, like all others."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.errors import ConfigError
from stoker.loader import Loader, Windows, transform
from stoker.loader.order import example_keys
from stoker.store import Cache
from stoker.transforms import Crop, Flip, Noise, Normalize, Roll, Views, normal
from tests.kit.amount import example_count
from tests.loader.caches import trajectories, write_cache
from tests.loader.layouts import values_of

COUNT, STEPS = 24, 9


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Cache:
    fields = trajectories(COUNT, STEPS, step=(6, 4))
    return write_cache(tmp_path_factory.mktemp("c"), fields, timed=("latent", "time"), shards=(5, 7, 1))


def scaled(batch: Any, keys: torch.Tensor) -> Any:
    """A user's own: a random factor for each example."""
    return batch._replace(z1=batch.z1 * (1 + 0.1 * normal(keys, 1)[:, :, None]))


TRANSFORMS = [
    Normalize(mean=0.5, std=2.0),
    Flip(axis=-2),
    Flip(axis=-1),
    Roll(axes=(-2,)),
    Crop(size=5, axes=(-2,), padding=1, border="reflect"),
    Noise(std=0.1),
    scaled,
]
WINDOWS = Windows(field="latent", horizon=3)


def examples_of(cache: Cache, epoch: int = 0, **changes: Any) -> dict[tuple[int, ...], list[torch.Tensor]]:
    """What every example became, over all ranks."""
    given = {
        "shuffle": True,
        "batch_size": 8,
        "windows": WINDOWS,
        "transforms": TRANSFORMS,
        "seed": 3,
        **changes,
    }
    found: dict[tuple[int, ...], list[torch.Tensor]] = {}
    world_size = given.pop("world_size", 1)
    for rank in range(world_size):
        loader = Loader(cache, rank=rank, world_size=world_size, drop_last=False, **given)
        loader.set_epoch(epoch)
        for batch in loader:
            for i, index in enumerate(batch.index.tolist()):
                found[tuple(index)] = [batch.z0[i], batch.z1[i], batch.future[i]]
    return found


@functools.cache
def measure_of(cache: Cache, epoch: int) -> Any:
    return examples_of(cache, epoch)


@settings(deadline=None, max_examples=example_count(30))
@given(
    tier=st.sampled_from(["host", "disk"]),
    world_size=st.integers(1, 3),
    batch_size=st.integers(1, 40),
    epoch=st.integers(0, 2),
)
def test_augmentation_belongs_to_the_example(
    cache: Cache, tier: str, world_size: int, batch_size: int, epoch: int
) -> None:
    """Whatever the tier, batch size and ranks: batch size 8 of one rank from memory is the measure."""
    expected = measure_of(cache, epoch)

    found = examples_of(cache, epoch, tier=tier, world_size=world_size, batch_size=batch_size)

    assert found.keys() == expected.keys()
    for index, states in expected.items():
        for state, other in zip(states, found[index], strict=True):
            assert torch.equal(state, other)


def test_epochs_and_seeds_differ(cache: Cache) -> None:
    first = examples_of(cache)

    for other in (examples_of(cache, epoch=1), examples_of(cache, seed=4)):
        assert sum(torch.equal(first[index][0], other[index][0]) for index in first) == 0


def test_a_resumed_pass_is_augmented_as_an_unbroken_one(cache: Cache) -> None:
    def loader(tier: str) -> Loader:
        return Loader(cache, batch_size=7, windows=WINDOWS, transforms=TRANSFORMS, tier=tier, shuffle=True)

    whole = list(loader("host"))
    begun = loader("host")
    for _, batch in zip(range(4), begun, strict=False):
        place = begun.state_dict(batch.position)
    resumed = loader("disk")
    resumed.load_state_dict(place)
    rest = list(resumed)

    assert len(rest) == len(whole) - 4
    for expected, found in zip(whole[4:], rest, strict=True):
        assert torch.equal(expected.z0, found.z0)
        assert torch.equal(expected.future, found.future)


def test_two_of_a_kind_draw_apart(cache: Cache) -> None:
    once = Loader(cache, batch_size=24, transforms=[Noise(std=1.0, fields=("bc",))], shuffle=True)
    twice = Loader(cache, batch_size=24, transforms=[Noise(std=1.0, fields=("bc",))] * 2, shuffle=True)
    plain = Loader(cache, batch_size=24, shuffle=True)
    base, one, two = (next(iter(loader))["bc"] for loader in (plain, once, twice))

    assert not torch.allclose(two - one, one - base, atol=0.1)


def test_repeated_indices_are_augmented_each_in_its_own_way(cache: Cache) -> None:
    loader = Loader(
        cache,
        batch_size=COUNT * 3,
        indices=np.repeat(cache.indices, 3),
        shuffle=False,
        transforms=[Noise(std=1.0, fields=("bc",))],
    )
    batch = next(iter(loader))

    assert batch["index"].tolist() == [n for n in range(COUNT) for _ in range(3)]
    assert len(torch.unique(batch["bc"], dim=0)) == COUNT * 3


def test_views_from_the_loader(cache: Cache) -> None:
    views = Views(transforms=[Noise(std=1.0, fields=("latent",))])
    loader = Loader(cache, batch_size=10, transforms=[views], shuffle=True)

    batch = next(iter(loader))

    assert batch["latent"].shape == (10, 2, STEPS, 6, 4)
    assert batch["nu"].shape == (10,)
    assert loader.state_dict()["position"] == 10


def test_a_plain_dict_goes_on_as_a_batch(cache: Cache) -> None:
    loader = Loader(cache, batch_size=5, transforms=[lambda batch, keys: {"x": batch["nu"]}], shuffle=True)

    batches = list(loader)

    assert batches[0].keys() == {"x"}
    assert [batch.position for batch in batches] == [
        b.position for b in Loader(cache, batch_size=5, shuffle=True)
    ]


def test_a_function_that_forgets_to_return_is_named(cache: Cache) -> None:
    loader = Loader(cache, batch_size=5, transforms=[lambda batch, keys: None], shuffle=True)

    with pytest.raises(ConfigError, match=r"lambda.* returned None"):
        next(iter(loader))


def doubled_in_place(batch: Any, keys: torch.Tensor) -> Any:
    """A user's own over whole records: changes the dict that it was given, and adds a field."""
    batch["latent"] = batch["latent"] * 2
    batch["half"] = batch["nu"] / 2
    return batch


@pytest.mark.parametrize(
    ("windows", "transforms"),
    [(WINDOWS, TRANSFORMS), (None, [doubled_in_place]), (WINDOWS, [Noise(std=0.1)])],
    ids=["many", "in-place", "one"],
)
def test_fixed_addresses_hold_for_what_transforms_return(
    cache: Cache, windows: Windows | None, transforms: list[Any]
) -> None:
    """A captured step reads the memory of the first batch for ever."""
    given: dict[str, Any] = {
        "shuffle": True,
        "batch_size": 5,
        "windows": windows,
        "transforms": transforms,
        "seed": 3,
    }
    loader = Loader(cache, tier="device", static=True, **given)
    expected = [values_of(batch) for _ in range(2) for batch in Loader(cache, drop_last=True, **given)]
    kept: list[Any] = []
    for _ in range(2):
        loader.set_epoch(0)
        for batch in loader:
            kept.append(values_of(batch))
            wanted = expected[(len(kept) - 1) % len(loader)]
            assert all(torch.equal(a, b) for a, b in zip(kept[-1], wanted, strict=True))

    assert len(kept) == 2 * len(loader) > 2
    assert len({tuple(t.data_ptr() for t in values) for values in kept}) == 1


@pytest.mark.parametrize("first", ["z0", "z1"])
def test_a_batch_whose_states_are_exchanged_or_repeated_is_right_at_fixed_addresses(
    cache: Cache, first: str
) -> None:
    """The memory that one of them is written to holds the other, which must be read before."""
    given: dict[str, Any] = {"shuffle": True, "batch_size": 5, "windows": WINDOWS, "drop_last": True}
    plain = [(batch.z0.clone(), batch.z1.clone()) for batch in Loader(cache, **given)]
    pairs = [(first, first), ("z1", "z0"), ("z0", "z1")]
    done = iter(pairs * len(plain))

    def exchanged(batch: Any, keys: torch.Tensor) -> Any:
        a, b = next(done)
        return batch._replace(z0=getattr(batch, a), z1=getattr(batch, b))

    loader = Loader(cache, tier="device", static=True, transforms=[exchanged], **given)

    for at, (batch, values) in enumerate(zip(loader, plain, strict=True)):
        wanted = [values[int(name[1])] for name in pairs[at % len(pairs)]]
        assert torch.equal(batch.z0, wanted[0])
        assert torch.equal(batch.z1, wanted[1])
    assert len(plain) >= len(pairs)


def test_transforms_that_change_the_shape_of_a_batch_are_refused_at_fixed_addresses(cache: Cache) -> None:
    sizes = iter(range(1, 100))

    def shorter(batch: Any, keys: torch.Tensor) -> Any:
        return batch._replace(z0=batch.z0[:, : next(sizes)])

    loader = Loader(cache, 5, windows=WINDOWS, tier="device", static=True, transforms=[shorter], shuffle=True)

    with pytest.raises(ConfigError, match="static"):
        list(loader)


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_keys_are_made_for_many_batches_at_once(
    cache: Cache, monkeypatch: pytest.MonkeyPatch, tier: str
) -> None:
    """On a GPU they take some forty launches, whatever their number."""
    made: list[int] = []

    def counted(seed: int, epoch: int, examples: torch.Tensor) -> torch.Tensor:
        made.append(len(examples))
        return example_keys(seed, epoch, examples)

    monkeypatch.setattr(transform, "example_keys", counted)
    loader = Loader(cache, 2, windows=WINDOWS, tier=tier, transforms=TRANSFORMS, shuffle=True)
    list(loader)
    made.clear()

    batches = sum(1 for _ in loader)

    assert sum(made) == len(loader) * 2
    if tier == "host":
        assert len(made) * 10 < batches
