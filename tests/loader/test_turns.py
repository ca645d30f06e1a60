from __future__ import annotations

from collections import Counter
from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.errors import ConfigError
from stoker.loader import turns as module
from stoker.loader.order import apportion
from stoker.loader.turns import MemberPass, TurnSchedule, make_turns, normalize_shares
from tests.kit.amount import example_count

laps = st.lists(
    st.builds(MemberPass, whole=st.integers(1, 9), tail=st.integers(0, 3), step=st.just(4)),
    min_size=1,
    max_size=4,
)
modes = st.sampled_from([("concat", "first"), ("weighted", "first"), ("round_robin", "first"),
                         ("round_robin", "longest")])  # fmt: skip


def make(
    own: list[MemberPass], mode: str = "concat", exhausted: str = "first", **changes: Any
) -> TurnSchedule:
    settings: dict[str, Any] = {"shares": [1 / len(own)] * len(own), "epoch_examples": None, "seed": 0}
    named = {str(place): lap for place, lap in enumerate(own)}
    return make_turns(named, mode=mode, exhausted=exhausted, **{**settings, **changes})  # type: ignore[arg-type]


def members(turns: TurnSchedule, epoch: int, start: int = 0) -> list[int]:
    return list(chain.from_iterable(piece.tolist() for piece in turns.members(epoch, start)))


@settings(max_examples=example_count(150), deadline=None)
@given(own=laps, mode=modes, seed=st.integers(0, 2**40), epoch=st.integers(0, 50), data=st.data())
def test_any_step_is_what_it_is_from_the_begin_on(
    own: list[MemberPass], mode: tuple[str, str], seed: int, epoch: int, data: st.DataObject
) -> None:
    turns = make(own, *mode, seed=seed)
    whole = members(turns, epoch)
    step = data.draw(st.integers(0, len(whole)))

    assert len(whole) == turns.steps
    assert members(turns, epoch, step) == whole[step:]
    assert turns.before(epoch, step) == np.bincount(whole[:step], minlength=len(own)).tolist()
    assert tuple(np.bincount(whole, minlength=len(own))) == turns.counts


@settings(max_examples=example_count(100), deadline=None)
@given(own=laps, mode=modes, epochs=st.integers(1, 4))
def test_a_pass_is_finished_before_the_next_one_begins(
    own: list[MemberPass], mode: tuple[str, str], epochs: int
) -> None:
    turns = make(own, *mode)
    for member, lap in enumerate(turns.passes):
        places = [turns.place(epoch, member, turn) for epoch in range(epochs)
                  for turn in range(turns.counts[member])]  # fmt: skip

        assert len(set(places)) == len(places), "no step of a pass is served twice"
        assert places == sorted(places)
        if not turns.restarts:
            assert places == [divmod(i, lap) for i in range(len(places))]


def test_concat_serves_every_step_of_every_member_once_in_an_epoch() -> None:
    turns = make([MemberPass(whole=3, tail=1, step=4), MemberPass(whole=20, tail=0, step=4)])

    assert turns.counts == (4, 20)
    assert [turns.place(5, 0, turn) for turn in range(4)] == [(5, 0), (5, 1), (5, 2), (5, 3)]
    assert members(turns, 0) != members(turns, 1)
    assert members(turns, 0) == members(turns, 0)


def test_the_longest_is_served_whole_and_the_others_begin_again() -> None:
    turns = make(
        [MemberPass(whole=2, tail=0, step=4), MemberPass(whole=4, tail=1, step=4)], "round_robin", "longest"
    )

    assert turns.counts == (5, 5)
    assert members(turns, 0) == [0, 1] * 5
    assert [turns.place(1, 0, turn) for turn in range(5)] == [(3, 0), (3, 1), (4, 0), (4, 1), (5, 0)]


def test_an_epoch_ends_with_the_first_that_is_exhausted_and_the_others_go_on_in_the_next() -> None:
    turns = make([MemberPass(whole=2, tail=0, step=4), MemberPass(whole=3, tail=1, step=4)], "round_robin")

    assert members(turns, 0) == [0, 1, 0, 1]
    assert [turns.place(epoch, 1, turn) for epoch in (0, 1) for turn in (0, 1)] == [
        (0, 0), (0, 1), (0, 2), (1, 0),
    ]  # fmt: skip


@settings(max_examples=example_count(100), deadline=None)
@given(weights=st.lists(st.integers(1, 50), min_size=1, max_size=5), steps=st.integers(50, 400))
def test_weights_are_met_to_within_one_batch_in_every_epoch(weights: list[int], steps: int) -> None:
    own = [MemberPass(whole=7, tail=0, step=4)] * len(weights)
    shares = normalize_shares(weights, [str(place) for place in range(len(weights))])
    if min(shares) * steps < 1:
        return
    turns = make(own, "weighted", shares=shares, epoch_examples=4 * steps)
    served = Counter(members(turns, 3))

    assert sum(served.values()) == steps
    for place, share in enumerate(shares):
        assert abs(served[place] - share * steps) < 1


def test_members_of_other_batch_sizes_are_weighted_by_example() -> None:
    own = [MemberPass(whole=9, tail=0, step=4), MemberPass(whole=9, tail=0, step=8)]

    turns = make(own, "weighted", shares=[0.5, 0.5], epoch_examples=160)

    assert turns.counts == (20, 10)


def test_a_weight_that_gives_no_batch_at_all_is_refused() -> None:
    own = [MemberPass(whole=9, tail=0, step=4)] * 2

    with pytest.raises(ConfigError, match=r"'1' 0\.01 of the batches.*epoch_examples"):
        make(own, "weighted", shares=[0.999, 0.001], epoch_examples=40)


def test_long_epochs_are_made_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = make([MemberPass(whole=30, tail=0, step=4), MemberPass(whole=9, tail=1, step=4)])
    whole = members(turns, 2)

    monkeypatch.setattr(module, "PIECE", 7)

    assert members(turns, 2) == whole
    assert turns.before(2, 23) == np.bincount(whole[:23], minlength=2).tolist()


@pytest.mark.parametrize(
    "weights", [[1], [1, 0], [1, -1], [1, float("nan")], {"a": 1}, {"a": 1, "c": 2}, "ab"]
)
def test_weights_that_are_none_are_refused(weights: Any) -> None:
    with pytest.raises(ConfigError, match="weights"):
        normalize_shares(weights, ["a", "b"])


@given(quotas=st.lists(st.floats(0, 1e4), min_size=1, max_size=8))
def test_shares_of_a_whole_number_add_up_to_it(quotas: list[float]) -> None:
    counts = apportion(quotas)

    assert sum(counts) == round(sum(quotas))
    assert all(abs(count - quota) <= 1 for count, quota in zip(counts, quotas, strict=True))
