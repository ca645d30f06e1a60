"""Epochs, passes that are left and resumed, states."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest

from stoker.errors import ConfigError, StaleStateError
from stoker.loader import Loader, Windows
from stoker.store import Cache
from stoker.transforms import Noise
from tests.loader.layouts import COUNT, indices_of_records, same


def test_epochs_differ_repeat_and_advance_by_themselves(cache: Cache) -> None:
    loader = Loader(cache, batch_size=5, seed=3, shuffle=True)
    first, second = indices_of_records(loader), indices_of_records(loader)

    assert first != second
    assert sorted(first) == sorted(second) == list(range(COUNT))
    assert indices_of_records(Loader(cache, batch_size=5, seed=3, shuffle=True)) == first
    loader.set_epoch(1)
    assert indices_of_records(loader) == second
    assert indices_of_records(Loader(cache, batch_size=5, seed=4, shuffle=True)) != first


def test_an_abandoned_pass_starts_its_epoch_again(cache: Cache) -> None:
    loader = Loader(cache, batch_size=5, shuffle=True)
    first = next(iter(loader))

    assert loader.state_dict()["position"] == 5
    assert same(next(iter(loader)), first)
    assert loader.epoch == 0


def test_the_state_after_the_last_batch_is_the_next_epoch(cache: Cache) -> None:
    loader = Loader(cache, batch_size=5, shuffle=True)
    for _batch, _ in zip(loader, range(len(loader)), strict=False):
        pass

    assert (loader.state_dict()["epoch"], loader.state_dict()["position"]) == (1, 0)
    assert loader.epoch == 1


@pytest.mark.parametrize("strip_bytes", [0, 1 << 14])
@pytest.mark.parametrize("windows", [None, Windows(field="latent", horizon=2)])
def test_two_passes_at_once_do_not_disturb_each_other(
    cache: Cache, windows: Windows | None, strip_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks are made ahead for one of them, and both take from the same loader."""
    expected = []
    for epoch in (0, 1):
        reference = Loader(cache, batch_size=3, windows=windows, tier="disk", shuffle=True)
        reference.set_epoch(epoch)
        expected.append(list(reference))
    monkeypatch.setattr("stoker.loader.chunks.CHUNK_EXAMPLES", 9)
    monkeypatch.setattr("stoker.loader.gather.STRIP_BATCHES", 2)
    monkeypatch.setattr("stoker.loader.serving.STRIP_BATCHES", 2)
    monkeypatch.setattr("stoker.loader.gather.STRIP_OUTPUT_BYTES", strip_bytes)
    loader = Loader(cache, batch_size=3, windows=windows, tier="host", shuffle=True)

    first = iter(loader)
    begun = next(first)
    loader.set_epoch(1)
    second = iter(loader)

    assert same(begun, expected[0][0])
    assert same(next(second), expected[1][0])
    for a, b, x, y in zip(first, second, expected[0][1:], expected[1][1:], strict=True):
        assert same(a, x)
        assert same(b, y)


@pytest.mark.parametrize("drop_last", [False, True])
def test_short_epochs_are_made_ahead_and_stay_what_they_are(cache: Cache, drop_last: bool) -> None:
    """Chunks of several epochs are made in one piece of work; a jump throws them away."""
    ahead = Loader(cache, batch_size=7, drop_last=drop_last, tier="host", shuffle=True)

    for epoch in [*range(9), 3, 4, 5, 20, 21]:
        alone = Loader(cache, batch_size=7, drop_last=drop_last, tier="disk", shuffle=True)
        alone.set_epoch(epoch)
        ahead.set_epoch(epoch)
        assert all(same(a, b) for a, b in zip(ahead, alone, strict=True))


def test_a_trainer_that_prefetches_saves_the_batch_it_used(cache: Cache) -> None:
    loader = Loader(cache, batch_size=5, shuffle=True)
    batches = list(loader)

    resumed = Loader(cache, batch_size=5, shuffle=True)
    resumed.load_state_dict(loader.state_dict(batches[1].position))

    assert all(same(a, b) for a, b in zip(resumed, batches[2:], strict=True))


def test_set_epoch_keeps_a_restored_position(cache: Cache) -> None:
    """Trainers restore, and then call set_epoch with the epoch that they restored themselves."""
    loader = Loader(cache, batch_size=5, shuffle=True)
    batches = list(loader)
    state = loader.state_dict(batches[0].position)
    resumed = Loader(cache, batch_size=5, shuffle=True)
    resumed.load_state_dict(state)
    resumed.set_epoch(0)

    assert same(next(iter(resumed)), batches[1])


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"seed": 1}, "seed 0 there, 1 here"),
        ({"shuffle": "block(2,4)"}, "order"),
        ({"batch_size": 6}, "global_batch 5 there, 6 here"),
        ({"indices": range(20)}, "examples 24 there, 20 here"),
        ({"indices": [*range(23), 0]}, "records"),
        ({"windows": Windows(field="latent")}, "windows"),
    ],
)
def test_a_state_of_another_loader_is_refused_by_name(cache: Cache, changes: dict, named: str) -> None:
    state = Loader(cache, batch_size=5, shuffle=True).state_dict()

    with pytest.raises(StaleStateError, match=named):
        Loader(cache, **{"shuffle": True, "batch_size": 5, **changes}).load_state_dict(state)


@pytest.mark.parametrize(
    ("state", "named"),
    [
        ({}, "without .*fingerprint"),
        ({"version": 99}, "without"),
        ({"version": 1, "epoch": 0}, "without .*seed"),
    ],
)
def test_what_is_no_state_is_refused_and_says_what_it_lacks(cache: Cache, state: dict, named: str) -> None:
    with pytest.raises(StaleStateError, match=f"not the state of a loader.*{named}"):
        Loader(cache, batch_size=5, shuffle=True).load_state_dict(state)


def test_a_state_of_other_types_is_refused(cache: Cache) -> None:
    loader: Any = Loader(cache, batch_size=5, shuffle=True)
    with pytest.raises(StaleStateError, match=r"is a dict, as state_dict.* gives it, not None"):
        loader.load_state_dict(None)
    with pytest.raises(StaleStateError, match=r"example 'a'\. Expected whole numbers"):
        loader.load_state_dict({**loader.state_dict(), "position": "a"})


def test_another_batch_size_goes_on_with_the_next_example(cache: Cache) -> None:
    loader = Loader(cache, batch_size=5, shuffle=True)
    order = indices_of_records(Loader(cache, batch_size=5, shuffle=True))
    running = iter(loader)
    next(running), next(running)
    other = Loader(cache, batch_size=3, shuffle=True)
    with pytest.raises(StaleStateError, match="allow_rebatch=True"):
        other.load_state_dict(loader.state_dict())
    other.load_state_dict(loader.state_dict(), allow_rebatch=True)

    assert indices_of_records(other) == order[10:]


@pytest.mark.parametrize("world_size", [2, 4])
def test_no_sample_is_lost_or_doubled_over_ranks(cache: Cache, world_size: int) -> None:
    training = [
        Loader(cache, batch_size=3, rank=rank, world_size=world_size, shuffle=True)
        for rank in range(world_size)
    ]
    evaluation = [
        Loader(cache, batch_size=3, rank=rank, world_size=world_size, shuffle=False)
        for rank in range(world_size)
    ]

    assert len({len(loader) for loader in training}) == 1
    assert all(loader.drop_last for loader in training)
    served = [number for loader in training for number in indices_of_records(loader)]
    assert len(set(served)) == len(served) == COUNT // (3 * world_size) * 3 * world_size
    pieces = [indices_of_records(loader) for loader in evaluation]
    assert [number for piece in pieces for number in piece] == list(range(COUNT))


@pytest.mark.parametrize("epoch", ["a", 1.5, None])
def test_an_epoch_that_is_no_number_is_refused(cache: Cache, epoch: Any) -> None:
    loader = Loader(cache, batch_size=5, shuffle=True)

    for one in (loader, loader.sampler):
        with pytest.raises(ConfigError, match=r"epoch is .* Expected a whole number, as epoch=0"):
            one.set_epoch(epoch)
    with pytest.raises(ConfigError, match="-1"):
        loader.set_epoch(-1)


def twice(batch: Any, keys: Any) -> Any:
    return batch


def test_going_on_with_other_transforms_is_said(cache: Cache, caplog: pytest.LogCaptureFixture) -> None:
    noise = partial(Noise(0.1, fields=("latent",)))
    state = Loader(cache, batch_size=5, transforms=[noise, twice], shuffle=True).state_dict((0, 5))

    Loader(cache, batch_size=5, transforms=[noise, twice], shuffle=True).load_state_dict(
        json.loads(json.dumps(state))
    )
    assert not caplog.records
    other = Loader(cache, batch_size=5, transforms=[Noise(0.2, fields=("latent",))], shuffle=True)
    other.load_state_dict(state)

    assert "transforms=Noise(std=0.1, fields=['latent']), twice" in caplog.text
    assert "this loader has Noise(std=0.2, fields=['latent'])" in caplog.text
    assert indices_of_records(other) == indices_of_records(Loader(cache, batch_size=5, shuffle=True))[5:]
    assert "transforms" not in Loader(cache, batch_size=5, shuffle=True).state_dict()
