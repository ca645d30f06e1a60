"""Mixtures of caches that are being filled: each example once in that epoch, then as of complete caches."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from stoker.errors import ConfigError
from stoker.loader import Loader, Mixture, Windows
from stoker.store import Cache, open_cache
from tests.loader.caches import trajectories
from tests.loader.mixture.three import MODES, narrow, same
from tests.loader.test_filling import Steps, groups_of_one

BAD = {"a": (1, 2, 3, 20), "b": (), "c": (0,)}
COUNTS = {"a": 24, "b": 14, "c": 11}
WINDOWS = Windows(field="latent", start_every=4)


@pytest.fixture(autouse=True)
def _groups(monkeypatch: pytest.MonkeyPatch) -> None:
    groups_of_one(monkeypatch)


def steps_in(folder: Path, chance: int | None = None) -> dict[str, Steps]:
    """Fillings of three caches; those of `a` and `c` quarantine some samples."""
    fields = {"a": trajectories(24, 9), "b": narrow(14), "c": trajectories(11, 9)}
    return {name: Steps(folder / name, own, bad=BAD[name], chance=chance) for name, own in fields.items()}


def mixture(caches: list[Cache], mode: dict[str, Any]) -> Mixture:
    return Mixture(caches, 3, names=list("abc"), windows=WINDOWS, seed=5, **mode)


def complete(folder: Path) -> list[Cache]:
    return [open_cache(folder / name / "c") for name in "abc"]


def examples(batches: Any) -> Counter[tuple[str, int, int]]:
    return Counter((b.task, *place) for b in batches for place in b.index.tolist())


def all_examples() -> set[tuple[str, int, int]]:
    starts = {"a": (0, 4), "b": (0, 4), "c": (0, 4)}
    return {
        (name, number, start)
        for name, count in COUNTS.items()
        for number in range(count)
        if number not in BAD[name]
        for start in starts[name]
    }


def test_every_example_comes_once_and_the_next_epoch_is_that_of_complete_caches(tmp_path: Path) -> None:
    mode = MODES[0]
    mixed = mixture([one.cache() for one in steps_in(tmp_path).values()], mode)
    before = len(mixed)

    batches = list(mixed)

    found = examples(batches)
    assert set(found) == all_examples()
    assert set(found.values()) == {1}
    assert len(batches) < before  # as many less as are quarantined
    assert batches[-1].position == (1, 0)
    second = list(mixed)
    plain = mixture(complete(tmp_path), mode)
    plain.set_epoch(1)
    assert len(second) == len(mixed) == len(plain)
    assert all(same(a, b) for a, b in zip(second, plain, strict=True))


@pytest.mark.parametrize("mode", MODES[1:], ids=str)
def test_in_every_mode_the_next_epochs_are_those_of_complete_caches(tmp_path: Path, mode: Any) -> None:
    mixed = mixture([one.cache() for one in steps_in(tmp_path).values()], mode)
    first, *later = (list(mixed) for _ in range(3))
    plain = mixture(complete(tmp_path), mode)
    plain.set_epoch(1)

    assert set(examples(first)) <= all_examples()
    for epoch in later:
        assert all(same(a, b) for a, b in zip(epoch, plain, strict=True))


@pytest.mark.parametrize(
    ("mode", "stop"), [*((mode, 13) for mode in MODES), (MODES[0], 1), (MODES[0], 27)], ids=str
)
def test_a_place_beside_the_filling_goes_on_whatever_was_ready_when(
    tmp_path: Path, mode: Any, stop: int
) -> None:
    own = steps_in(tmp_path / "one")
    mixed = mixture([one.cache() for one in own.values()], mode)
    batches = iter(mixed)
    for _ in range(stop):
        next(batches)
    state = mixed.state_dict()
    rest, second = list(batches), list(mixed)

    beside = mixture([one.cache() for one in steps_in(tmp_path / "two", chance=1).values()], mode)
    beside.load_state_dict(state)
    after = mixture(complete(tmp_path / "one"), mode)
    after.load_state_dict(state)

    for other in (beside, after):
        assert all(same(a, b) for a, b in zip(other, rest, strict=True))
        assert all(same(a, b) for a, b in zip(other, second, strict=True))


def test_a_second_pass_in_the_same_epoch_is_over_the_complete_cache(tmp_path: Path) -> None:
    own = {"a": Steps(tmp_path / "a", trajectories(20, 9)), "b": Steps(tmp_path / "b", trajectories(6, 9))}
    settings: Any = {"names": ["a", "b"], "mode": "round_robin", "exhausted": "longest", "windows": WINDOWS}
    mixed = Mixture([one.cache() for one in own.values()], 3, **settings)
    ours = [batch for batch in mixed if batch.task == "b"]
    plain = Mixture([open_cache(tmp_path / name / "c") for name in own], 3, **settings)
    theirs = [batch for batch in plain if batch.task == "b"]

    lap = 6 * 2 // 3
    assert len(ours) == len(theirs) > lap
    assert examples(ours[:lap]) == examples(theirs[:lap])
    assert not all(same(a, b) for a, b in zip(ours[:lap], theirs[:lap], strict=True))
    assert all(same(a, b) for a, b in zip(ours[lap:], theirs[lap:], strict=True))


def test_a_place_between_epochs_is_one_of_complete_caches(tmp_path: Path) -> None:
    mixed = mixture([one.cache() for one in steps_in(tmp_path).values()], MODES[0])
    list(mixed)
    other = mixture(complete(tmp_path), MODES[0])
    other.load_state_dict(mixed.state_dict())
    assert all(same(a, b) for a, b in zip(other, mixed, strict=True))


def test_a_place_of_complete_caches_waits_for_those_that_are_being_filled(tmp_path: Path) -> None:
    done = steps_in(tmp_path / "done")
    list(mixture([one.cache() for one in done.values()], MODES[0]))
    plain = mixture(complete(tmp_path / "done"), MODES[0])
    batches = iter(plain)
    next(batches)

    late = mixture([one.cache() for one in steps_in(tmp_path / "late").values()], MODES[0])
    late.load_state_dict(plain.state_dict())

    assert all(same(a, b) for a, b in zip(late, batches, strict=True))


def test_a_cache_that_is_being_filled_may_stand_beside_a_complete_one(tmp_path: Path) -> None:
    own = steps_in(tmp_path)
    list(Loader(own["b"].cache(), shuffle=True))
    caches = [own["a"].cache(), open_cache(tmp_path / "b" / "c"), own["c"].cache()]
    assert set(examples(mixture(caches, MODES[0]))) == all_examples()


def test_one_task_alone_is_of_its_complete_cache(tmp_path: Path) -> None:
    mixed = mixture([one.cache() for one in steps_in(tmp_path).values()], MODES[0])
    found = [n for batch in mixed.only("a") for n, _ in batch.index.tolist()]
    assert sorted(set(found)) == [n for n in range(24) if n not in BAD["a"]]


def test_examples_of_several_caches_in_one_batch_need_complete_ones(tmp_path: Path) -> None:
    caches = [own.cache() for name, own in steps_in(tmp_path).items() if name != "b"]
    with pytest.raises(ConfigError, match=r"mix='example'.*is being filled.*or give mix='batch'"):
        Mixture(caches, 3, names=list("ac"), mix="example")
    assert {batch["task"] for batch in Mixture(caches, 3, names=list("ac"))} == {"a", "c"}


def test_windows_nobody_can_count_are_refused(tmp_path: Path) -> None:
    varying = {"latent": [torch.zeros(6 + number % 5, 2) for number in range(20)]}
    with pytest.raises(ConfigError, match="lays out its turns by the batches of each cache"):
        Mixture([Steps(tmp_path, varying).cache()], 3, windows=Windows())
