from pathlib import Path

import pytest

from stoker.errors import SourceError, SplitError
from stoker.sources.files import find_files, resolve_files, split_of


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"x")


def names(files: list[Path]) -> list[str]:
    return [file.name for file in files]


def test_all_shards_in_natural_order(tmp_path: Path) -> None:
    touch(tmp_path, *(f"burgers1d_train_{i}.h5" for i in (10, 9, 0)), "burgers1d_val.hdf5", "notes.txt")

    assert names(resolve_files(tmp_path, "burgers1d", "train")) == [
        f"burgers1d_train_{i}.h5" for i in (0, 9, 10)
    ]
    assert names(resolve_files(tmp_path, "burgers1d", "valid")) == ["burgers1d_val.hdf5"]
    assert len(resolve_files(tmp_path, "burgers1d")) == 4


def test_an_undivided_file_serves_every_split(tmp_path: Path) -> None:
    touch(tmp_path, "burgers1d.hdf5")

    assert names(resolve_files(tmp_path, "burgers1d", "val")) == ["burgers1d.hdf5"]
    assert names(resolve_files(tmp_path, "burgers1d")) == ["burgers1d.hdf5"]


def test_a_single_file_must_not_hide_shards(tmp_path: Path) -> None:
    """The earlier launch scripts renamed shard 0 and so trained on a part of the data."""
    touch(tmp_path, "b_train.h5", "b_train_001.h5")

    with pytest.raises(SourceError, match="b_train exists more than once"):
        resolve_files(tmp_path, "b", "train")


def test_a_link_to_a_shard_is_that_shard(tmp_path: Path) -> None:
    touch(tmp_path, "b_train_000.h5", "b_train_001.h5")
    (tmp_path / "b_train.h5").symlink_to(tmp_path / "b_train_000.h5")

    assert names(resolve_files(tmp_path, "b", "train")) == ["b_train_000.h5", "b_train_001.h5"]


def test_absent_split_and_absent_task(tmp_path: Path) -> None:
    touch(tmp_path, "b_train.h5", "b_test.h5")

    with pytest.raises(SplitError, match=r'split "val" has no file\. Splits found: train, test'):
        resolve_files(tmp_path, "b", "val")
    with pytest.raises(SourceError, match=r"no file for data\.task 'c'.*found b_test\.h5, b_train\.h5"):
        resolve_files(tmp_path, "c", "train")
    with pytest.raises(SourceError, match="is not a folder"):
        resolve_files(tmp_path / "gone", "b", "train")


def test_folder_pattern_and_list(tmp_path: Path) -> None:
    touch(tmp_path, "train/a_2.h5", "train/a_10.hdf5", "b.txt")

    for path in (tmp_path, str(tmp_path / "train" / "*"), str(tmp_path / "**" / "*.h*")):
        _, files = find_files(path)
        assert names(files) == ["a_2.h5", "a_10.hdf5"]
    root, files = find_files([tmp_path / "train" / "a_10.hdf5", str(tmp_path / "train" / "a_2.h5")])
    assert (root, names(files)) == (tmp_path / "train", ["a_10.hdf5", "a_2.h5"])


def test_relative_paths_become_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers may run in another working directory."""
    touch(tmp_path, "a.h5")
    monkeypatch.chdir(tmp_path)

    assert find_files("a.h5") == (tmp_path, [tmp_path / "a.h5"])


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("gone.h5", r"gone\.h5 does not exist \(its folder has a\.h5\)"),
        ("no/gone.h5", "nor does its folder"),
        ("x*.h5", "no file matches"),
        ("sub", "holds no HDF5 file"),
        (["a.h5", "a.h5"], "named twice"),
        ([], "list of files is empty"),
        ("sub/empty.hdf5", r"is empty \(0 bytes\)"),
    ],
)
def test_missing_files_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path, message: str) -> None:
    touch(tmp_path, "a.h5")
    (tmp_path / "sub").mkdir()
    if "empty" in str(path):
        (tmp_path / "sub" / "empty.hdf5").touch()
    monkeypatch.chdir(tmp_path)

    with pytest.raises(SourceError, match=message):
        find_files(path)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("burgers_train.h5", "train"),
        ("2D_CFD_M0.1_Train.hdf5", "train"),
        ("validation/x_003.h5", "val"),
        ("strained.h5", None),
        ("train_test.h5", None),
    ],
)
def test_split_in_a_name(name: str, expected: str | None) -> None:
    assert split_of(name, {"train", "val", "test"}) == expected


def test_a_task_without_files_is_answered_with_the_nearest_that_has_some(tmp_path: Path) -> None:
    touch(tmp_path, "second_train.h5", "burgers1d.h5")

    with pytest.raises(SourceError, match=r"Did you mean data\.task=second\?"):
        resolve_files(tmp_path, "secnd", "train")
    with pytest.raises(SourceError, match=r"Did you mean data\.task=burgers1d\?"):
        resolve_files(tmp_path, "burgers", "train")
    with pytest.raises(SourceError, match=r"burgers1d\.h5, second_train\.h5\. Name data\.files"):
        resolve_files(tmp_path, "ocean", "train")
