import logging
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import SplitError
from stoker.sources.splits import choose_split, split_numbers

THREE = {"train": 0.8, "val": 0.1, "test": 0.1}

fractions = st.lists(st.integers(1, 20), min_size=1, max_size=4).map(
    lambda parts: {
        name: part / sum(parts) for name, part in zip(("train", "val", "test", "ood"), parts, strict=False)
    }
)
key_sets = st.sets(st.text(min_size=1, max_size=6), min_size=4, max_size=80)


def cut(keys: list, splits: dict = THREE, seed: int = 0) -> dict[str, str]:
    """The split of each key; an empty split has no key."""
    found: dict[str, str] = {}
    for name in splits:
        try:
            numbers = split_numbers(keys, splits, name, seed, where="rows")
        except SplitError:
            continue
        for number in numbers:
            assert found.setdefault(keys[number], name) == name
    return found


@given(keys=key_sets, splits=fractions, seed=st.integers(0, 5))
def test_splits_are_disjoint_and_leave_no_sample_out(keys: set, splits: dict, seed: int) -> None:
    assert cut(sorted(keys), splits, seed).keys() == keys


@given(keys=key_sets, splits=fractions, data=st.data())
def test_order_of_rows_and_of_settings_decides_nothing(keys: set, splits: dict, data) -> None:
    mixed = data.draw(st.permutations(sorted(keys)))

    assert cut(sorted(keys), splits) == cut(mixed, dict(reversed(splits.items())))


@given(keys=key_sets, more=key_sets, splits=fractions)
def test_samples_that_are_added_move_no_other(keys: set, more: set, splits: dict) -> None:
    before, after = cut(sorted(keys), splits), cut(sorted(keys | more), splits)

    assert {key: after[key] for key in keys} == before


def test_sizes_are_near_the_fractions() -> None:
    found = [*cut([f"file.h5:{row}" for row in range(10_000)]).values()]

    for name, share in THREE.items():
        assert abs(found.count(name) - share * 10_000) < 150


def test_seeds_give_different_cuts() -> None:
    keys = [str(i) for i in range(100)]

    assert cut(keys, seed=0) != cut(keys, seed=1)


def test_the_cut_is_the_same_in_every_version() -> None:
    """A change here would move samples between train and val of caches that exist."""
    found = split_numbers([str(i) for i in range(40)], THREE, "test", 0, where="rows")

    assert found.tolist() == [0, 13, 28, 29, 38]


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        ({"train": 0.8, "val": 0.3}, "sum to at most 1"),
        ({"train": 1.0, "val": 0.0}, "positive fractions"),
        ({"train": float("nan")}, "positive fractions"),
        ({}, "positive fractions"),
        ({"val": 0.1, "valid": 0.1}, "one split twice"),
    ],
)
def test_fractions_that_make_no_sense_are_refused(splits: dict, message: str) -> None:
    with pytest.raises(SplitError, match=message):
        split_numbers(["a", "b", "c"], splits, "train", 0, where="rows")


def test_an_empty_split_is_refused_with_a_seed_that_fills_it() -> None:
    keys = [f"image_{k:02d}" for k in range(10)]
    empty = next(seed for seed in range(20) if "val" not in cut(keys, seed=seed).values())

    with pytest.raises(SplitError, match="10 independent samples") as raised:
        split_numbers(keys, THREE, "val", empty, where="pictures")

    said = re.search(r"seed=(\d+)", str(raised.value))
    assert said is not None
    assert "pictures" in str(raised.value)
    assert {*cut(keys, seed=int(said[1])).values()} == THREE.keys()


def test_too_few_samples_for_the_splits() -> None:
    keys = ["a", "b"]
    empty = next(name for name in THREE if name not in cut(keys).values())

    with pytest.raises(SplitError, match=r"2 independent samples.* 2 cannot fill 3 splits"):
        split_numbers(keys, THREE, empty, 0, where="rows")


def choose(names: list, split: str | None, splits: dict | None = None):
    return choose_split(names, split=split, splits=splits, seed=0, where="data/b")


FILES = ["b_train.h5", "b_test.h5"]


def test_files_named_by_split_win() -> None:
    choice = choose([*FILES, "b_valid.h5"], "val")

    assert (choice.files, choice.fractions) == ((2,), None)


def test_an_absent_split_is_an_error_that_lists_the_others() -> None:
    with pytest.raises(
        SplitError, match=r'data/b: split "val" has no file\. Splits found: train, test\. Give data'
    ):
        choose(FILES, "val")


def test_fractions_beside_split_files_cut_the_train_files_only() -> None:
    """Otherwise samples of the test file would be trained on."""
    train, val, test = (choose(FILES, name, THREE) for name in ("train", "val", "test"))

    assert (train.files, val.files, test.files) == ((0,), (0,), (1,))
    assert train.fractions == val.fractions == {"train": pytest.approx(8 / 9), "val": pytest.approx(1 / 9)}
    assert test.fractions is None


def test_a_file_without_split_beside_others_is_refused() -> None:
    with pytest.raises(SplitError, match=r"b\.h5 carries no split in its name, others do \(train\)"):
        choose(["b_train.h5", "b.h5"], "train")


def test_fractions_without_a_split_are_refused() -> None:
    with pytest.raises(SplitError, match="no split was asked for"):
        choose(["b.h5"], None, THREE)


def test_default_fractions_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="stoker"):
        assert choose(["b.h5"], "val").fractions == THREE

    assert [record.message for record in caplog.records] == [
        "data/b: no split files and no data.splits; cut as train 0.8, val 0.1, test 0.1 with seed 0"
    ]


def test_a_split_that_is_not_among_the_fractions() -> None:
    with pytest.raises(SplitError, match='split "ood" is not among the fractions train, val, test'):
        choose(["b.h5"], "ood")
