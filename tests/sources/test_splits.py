import logging

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import SplitError
from stoker.sources.splits import choose_split, split_counts, split_numbers

THREE = {"train": 0.8, "val": 0.1, "test": 0.1}

fractions = st.lists(st.integers(1, 20), min_size=1, max_size=4).map(
    lambda parts: {
        name: part / sum(parts) for name, part in zip(("train", "val", "test", "ood"), parts, strict=False)
    }
)
key_sets = st.sets(st.text(min_size=1, max_size=6), min_size=4, max_size=80)


@given(keys=key_sets, splits=fractions, seed=st.integers(0, 5))
def test_splits_are_disjoint_cover_and_have_exact_counts(keys: set, splits: dict, seed: int) -> None:
    ordered = sorted(keys)
    found = {name: split_numbers(ordered, splits, name, seed) for name in splits}

    assert sorted(np.concatenate(list(found.values()))) == list(range(len(keys)))
    assert {name: len(numbers) for name, numbers in found.items()} == split_counts(len(keys), splits)
    for name, numbers in found.items():
        assert len(numbers) >= 1
        assert abs(len(numbers) - splits[name] * len(keys)) < len(splits)


@given(keys=key_sets, splits=fractions, data=st.data())
def test_order_of_rows_and_of_settings_decides_nothing(keys: set, splits: dict, data) -> None:
    ordered = sorted(keys)
    mixed = data.draw(st.permutations(ordered))
    turned = dict(reversed(splits.items()))

    for name in splits:
        one = {ordered[i] for i in split_numbers(ordered, splits, name, 0)}
        other = {mixed[i] for i in split_numbers(mixed, turned, name, 0)}
        assert one == other


@given(keys=key_sets, copies=st.integers(1, 3))
def test_a_file_with_the_same_row_keys_changes_no_assignment(keys: set, copies: int) -> None:
    ordered = sorted(keys)
    for name in THREE:
        before = split_numbers(ordered, THREE, name, 0)
        after = split_numbers(ordered * (copies + 1), THREE, name, 0)

        assert before.tolist() == after[after < len(ordered)].tolist()
        assert len(after) == len(before) * (copies + 1)


def test_seeds_give_different_cuts() -> None:
    keys = [str(i) for i in range(100)]

    assert split_numbers(keys, THREE, "val", 0).tolist() != split_numbers(keys, THREE, "val", 1).tolist()


def test_the_cut_is_the_same_in_every_version() -> None:
    """A change here would move samples between train and val of caches that exist."""
    assert split_numbers([str(i) for i in range(20)], THREE, "test", 0).tolist() == [0, 13]


@pytest.mark.parametrize(
    ("total", "splits", "expected"),
    [
        pytest.param(10, THREE, {"train": 8, "val": 1, "test": 1}, id="even"),
        pytest.param(3, THREE, {"train": 1, "val": 1, "test": 1}, id="one-each"),
        pytest.param(24, {"train": 0.8, "valid": 0.2}, {"train": 19, "val": 5}, id="largest-remainder"),
        pytest.param(10, {"train": 0.5}, {"train": 5}, id="rest-unused"),
    ],
)
def test_counts(total: int, splits: dict, expected: dict) -> None:
    assert split_counts(total, splits) == expected


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
        split_numbers(["a", "b", "c"], splits, "train", 0)


def test_too_few_samples_for_the_splits() -> None:
    with pytest.raises(SplitError, match="2 independent samples cannot fill 3 splits"):
        split_numbers(["a", "b"], THREE, "train", 0)


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
