"""Beside the filling of a cache: draws by weight, and windows of trajectories of varying length."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stoker.errors import ConfigError, UncountedError
from stoker.loader import Loader, Weights, Windows
from stoker.store import open_cache
from tests.loader.caches import trajectories
from tests.loader.test_filling import COUNT, Steps, damage, groups_of_one, numbers

WINDOWS = Windows(stride=2, horizon=2)
FIXED = trajectories(COUNT)


@pytest.fixture(autouse=True)
def _groups(monkeypatch: pytest.MonkeyPatch) -> None:
    groups_of_one(monkeypatch)


def varying() -> dict[str, Any]:
    """Trajectories of 1 to 11 steps, whose values say record and step; of 4 and fewer none is cut."""
    return {
        "latent": [
            torch.arange(1 + number * 5 % 11, dtype=torch.float32)[:, None] + 100 * number
            for number in range(COUNT)
        ],
        "nu": torch.arange(COUNT, dtype=torch.float32),
    }


def all_windows(own: dict[str, Any], bad: Any = ()) -> list[tuple[int, int]]:
    lengths = enumerate(map(len, own["latent"]))
    return [(n, s) for n, length in lengths if n not in bad for s in range(WINDOWS.count(length))]


def indices(batches: Any) -> list[tuple[int, int]]:
    return [tuple(row) for batch in batches for row in batch.index.tolist()]


def same_batches(ours: Any, theirs: Any) -> bool:
    pairs = list(zip(ours, theirs, strict=True))
    return bool(pairs) and all(
        torch.equal(a.index, b.index) and torch.equal(a.z1, b.z1) and torch.equal(a.future, b.future)
        for a, b in pairs
    )


def test_windows_of_varying_trajectories_come_once_each_and_then_as_of_a_complete_cache(
    tmp_path: Path,
) -> None:
    own, bad = varying(), [3, 40]
    loader = Loader(
        Steps(tmp_path, own, bad=bad).cache(), batch_size=5, windows=WINDOWS, seed=3, shuffle=True
    )
    with pytest.raises(UncountedError, match="how many windows its trajectories have"):
        len(loader)
    assert "windows still to be counted" in repr(loader)

    batches = list(loader)

    assert sorted(indices(batches)) == all_windows(own, bad)
    assert len(batches) == len(loader) == -(-len(all_windows(own, bad)) // 5)
    for batch in batches:
        number, start = batch.index.unbind(1)
        assert torch.equal(batch.z0[:, 0], 100.0 * number + start)
        assert torch.equal(batch.future[:, 0, 0], 100.0 * number + start + 4)
        assert torch.equal(batch.cond["nu"][:, 0], number.float())
    plain = Loader(open_cache(tmp_path / "c"), batch_size=5, windows=WINDOWS, seed=3, shuffle=True)
    plain.set_epoch(1)
    assert same_batches(loader, plain)


@pytest.mark.parametrize("stop", [1, 9, 30])
def test_a_place_amid_varying_trajectories_goes_on_beside_the_filling_and_after_it(
    tmp_path: Path, stop: int
) -> None:
    steps = Steps(tmp_path, varying(), bad=[7])
    loader = Loader(steps.cache(), batch_size=5, windows=WINDOWS, seed=3, shuffle=True)
    batches = iter(loader)
    head = [next(batches) for _ in range(stop)]
    state = loader.state_dict()

    beside = Loader(steps.cache(), batch_size=5, windows=WINDOWS, seed=3, shuffle=True)
    beside.load_state_dict(state)
    rest = indices(beside)
    complete = Loader(open_cache(steps.folder.path), batch_size=5, windows=WINDOWS, seed=3, shuffle=True)
    complete.load_state_dict(state)

    assert sorted(indices(head) + rest) == all_windows(steps.fields, steps.bad)
    assert indices(complete) == rest == indices(batches)


def test_the_order_of_varying_trajectories_does_not_depend_on_what_was_ready_when(tmp_path: Path) -> None:
    found = []
    for place, chance in enumerate((None, 1)):
        steps = Steps(tmp_path / str(place), varying(), bad=[17], chance=chance)
        found.append(indices(Loader(steps.cache(), batch_size=5, windows=WINDOWS, shuffle=True)))
    assert found[0] == found[1]


def test_trajectories_that_are_all_too_short_are_an_error_once_that_is_known(tmp_path: Path) -> None:
    short = {"latent": [torch.zeros(1 + number % 3, 2) for number in range(COUNT)]}
    with pytest.raises(ConfigError, match=r"spans 5 steps\. Choose a smaller stride="):
        list(Loader(Steps(tmp_path, short).cache(), windows=WINDOWS, shuffle=True))


def weights() -> np.ndarray:
    """None for a third of the records, and three times as much for some as for others."""
    return np.array([(number % 3) * (1 + 2 * (number % 2)) for number in range(COUNT)], dtype=float)


def test_draws_follow_the_weights_and_then_are_those_of_a_complete_cache(tmp_path: Path) -> None:
    bad = [1, 2, 44]
    wish = Weights(weights(), samples=4000)
    loader = Loader(Steps(tmp_path, FIXED, bad=bad).cache(), batch_size=40, weights=wish, seed=3)
    assert len(loader) == 100

    drawn = Counter(numbers(loader))

    assert sum(drawn.values()) == 4000
    likely = np.where(np.isin(np.arange(COUNT), bad), 0, weights())
    assert set(drawn) == set(np.flatnonzero(likely).tolist())
    heavy, light = (
        np.mean([drawn[n] for n in np.flatnonzero(likely == value).tolist()]) for value in (6.0, 2.0)
    )
    assert heavy == pytest.approx(3 * light, rel=0.15)
    kept = Weights(np.delete(weights(), bad), samples=4000)
    plain = Loader(open_cache(tmp_path / "c"), batch_size=40, weights=kept, seed=3)
    plain.set_epoch(1)
    assert numbers(loader) == numbers(plain)


def test_draws_of_a_window_that_is_all_quarantined_are_left_out_and_the_length_settles(
    tmp_path: Path,
) -> None:
    steps = Steps(tmp_path, FIXED)
    steps.bad = {n for block in steps.blocks[-8:] for n in block}  # the last two windows
    loader = Loader(steps.cache(), batch_size=5, weights=np.ones(COUNT))

    batches = list(loader)

    assert len(batches) == len(loader) == -(-(COUNT - 8) // 5)
    assert not steps.bad.intersection(numbers(batches))


@pytest.mark.parametrize("windows", [None, WINDOWS])
def test_a_place_amid_draws_goes_on_whatever_was_ready_when(
    tmp_path: Path,
    windows: Windows | None,
) -> None:
    settings: dict[str, Any] = {
        "shuffle": True,
        "batch_size": 5,
        "weights": weights(),
        "seed": 3,
        "windows": windows,
    }
    steps = Steps(tmp_path / "a", FIXED, bad=[5], chance=1)
    loader = Loader(steps.cache(), **settings)
    batches = iter(loader)
    for _ in range(4):
        next(batches)
    state = loader.state_dict()

    other = Loader(Steps(tmp_path / "b", FIXED, bad=[5]).cache(), **settings)
    other.load_state_dict(state)
    mended = Loader(Steps(tmp_path / "c", FIXED, bad=[5]).cache(), **settings)
    begun = iter(mended)
    for _ in range(4):
        next(begun)

    def values(rest: Any) -> list[Any]:
        return [(batch["index"] if windows is None else batch.index).tolist() for batch in rest]

    rest = values(batches)
    assert values(other) == rest == values(begun)
    again = Loader(open_cache(steps.folder.path), **settings)
    again.load_state_dict(state)
    assert values(again) == rest


def test_a_record_damaged_amid_draws_is_repaired(tmp_path: Path) -> None:
    steps = Steps(tmp_path, FIXED, bad=[1])
    loader = Loader(steps.cache(), batch_size=5, weights=np.ones(COUNT))
    list(loader)
    damage(steps)
    for batch in loader:
        assert torch.equal(batch["latent"], FIXED["latent"][batch["index"]])
    assert loader.repaired <= 1


def test_weights_without_repeats_or_of_unknown_windows_say_why_not(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"needs a complete cache: what is left to draw.*Leave wait=False"):
        Loader(Steps(tmp_path / "a", FIXED).cache(), weights=Weights(weights(), replacement=False))
    with pytest.raises(ConfigError, match="how many windows a weight is for"):
        Loader(Steps(tmp_path / "b", varying()).cache(), windows=WINDOWS, weights=weights())
    with pytest.raises(ConfigError, match="one weight per record"):
        Loader(Steps(tmp_path / "c", FIXED).cache(), weights=[1.0])
