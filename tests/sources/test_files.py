import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import stoker
from stoker.errors import ConfigError, SourceError, SplitError
from stoker.sources.containers import find_containers
from stoker.sources.files import find_files, resolve_files, split_of
from stoker.sources.sql.tables import read_labels
from stoker.sources.tar import list_members
from tests.sources.images.pictures import write_coco, write_list, write_voc


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
    """Workers may run in another working directory."""
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


def containers(path: object) -> tuple[Path, list[Path]]:
    found = find_containers(path)  # type: ignore[arg-type]
    return found[0].path.parent, [one.path for one in found]


def dangling(path: Path) -> None:
    path.symlink_to(path.with_name("gone"))


def looped(path: Path) -> None:
    path.symlink_to(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/null")


@pytest.mark.parametrize("find", [find_files, containers])
@pytest.mark.parametrize("make", [os.mkfifo, device, dangling, looped])
@pytest.mark.parametrize("pattern", ["", "data_*.h5", "../*/data_*"], ids=["folder", "name", "path"])
def test_an_entry_that_is_no_file_is_refused_by_name(
    tmp_path: Path, find: Callable, make: Callable[[Path], None], pattern: str
) -> None:
    """It may stand for data that is missing: reading the rest would give a dataset with a hole."""
    folder = tmp_path / "d"
    touch(folder, "data_0.h5", "data_2.h5")
    make(folder / "data_1.h5")

    with pytest.raises(SourceError, match=r"data_1\.h5"):
        find(folder / pattern)


def test_all_entries_that_are_no_file_are_named_at_once(tmp_path: Path) -> None:
    touch(tmp_path, "burgers_train_0.h5")
    os.mkfifo(tmp_path / "burgers_train_1.h5")
    dangling(tmp_path / "burgers_train_2.h5")

    for find in (lambda: find_files(tmp_path), lambda: resolve_files(tmp_path, "burgers", "train")):
        with pytest.raises(SourceError, match=r"train_1\.h5.*train_2\.h5"):
            find()


@pytest.mark.parametrize("find", [find_files, containers])
@pytest.mark.parametrize("pattern", ["**/*.h5", "*/x.h5", "closed/*.h5"])
def test_a_folder_that_cannot_be_listed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, find: Callable, pattern: str
) -> None:
    touch(tmp_path, "open/x.h5", "closed/x.h5")
    if find is find_files:
        refuse_to_list(monkeypatch, tmp_path / "closed")
        with pytest.raises(SourceError, match="closed"):
            find(tmp_path)
    refuse_to_list(monkeypatch, tmp_path / "closed" if pattern != "*/x.h5" else tmp_path)

    with pytest.raises(SourceError, match=r"cannot be read"):
        find(tmp_path / pattern)


def refuse_to_list(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """As the permissions do for users who are not root."""

    def refusing(inner: Callable) -> Callable:
        def refused(path: object = ".") -> object:
            if Path(str(path)) == folder:
                raise PermissionError(13, "Permission denied", str(folder))
            return inner(path)

        return refused

    monkeypatch.setattr(os, "scandir", refusing(os.scandir))
    monkeypatch.setattr(os, "listdir", refusing(os.listdir))


def test_containers_next_to_a_folder_that_may_not_be_listed_are_read(tmp_path: Path, monkeypatch) -> None:
    touch(tmp_path, "a.h5")
    (tmp_path / "lost+found").mkdir()
    (tmp_path / "b.zarr").mkdir()
    stat = os.stat

    def refused(path: object, **how: object) -> os.stat_result:
        if "lost+found/" in str(path):
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, **how)

    monkeypatch.setattr(os, "stat", refused)
    refuse_to_list(monkeypatch, tmp_path / "b.zarr")
    with pytest.raises(SourceError, match=r"b\.zarr cannot be read"):
        find_containers(tmp_path)
    (tmp_path / "b.zarr").rmdir()
    refuse_to_list(monkeypatch, tmp_path / "lost+found")
    assert [one.name for one in find_containers(tmp_path)] == ["a.h5"]


def test_what_a_pattern_or_folder_leaves_out_is_named(tmp_path: Path, caplog) -> None:
    touch(tmp_path, "d/a.h5", "d/a.x/b.h5", "elsewhere/c.h5", "d/a.txt")
    (tmp_path / "d" / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "d" / "again").symlink_to(tmp_path / "d")

    def said(find: Callable, path: Path) -> set[str]:
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="stoker"):
            find(path)
        assert len(caplog.records) <= 1
        names = {"a.h5", "a.x", "linked", "again", "a.txt"}
        return {name for name in names if f"/{name} " in caplog.text}

    assert said(find_files, tmp_path / "d") == {"linked"}
    assert said(find_files, tmp_path / "d" / "a*") == {"a.x"} | {"again"}
    assert said(containers, tmp_path / "d" / "a.*") == {"a.x", "a.txt"}
    assert said(containers, tmp_path / "d") == {"a.x", "linked", "again"}


def test_a_zarr_folder_without_its_mark_is_refused(tmp_path: Path) -> None:
    touch(tmp_path, "a.zarr/.zgroup", "b.zarr/u/0.0")

    for path in (tmp_path, tmp_path / "*"):
        with pytest.raises(SourceError, match=r"b\.zarr"):
            find_containers(path)


def test_a_second_name_of_a_file_is_the_same_file(tmp_path: Path, caplog) -> None:
    """Scripts that convert data link `x_val.h5` to `x_valid.h5`, for programs that want the other name."""
    touch(tmp_path, "b_train.h5", "b_valid.h5")
    (tmp_path / "b_val.h5").symlink_to("b_valid.h5")
    (tmp_path / "b_test.h5").symlink_to("b_valid.h5")

    with caplog.at_level(logging.WARNING, logger="stoker"):
        assert names(resolve_files(tmp_path, "b", "val")) == ["b_valid.h5"]
        assert names(find_files(tmp_path)[1]) == ["b_test.h5", "b_train.h5", "b_valid.h5"]
    assert all("b_val.h5" in record.message for record in caplog.records)
    assert len(caplog.records) == 2
    assert names(resolve_files(tmp_path, "b", "test")) == ["b_test.h5"]


def test_files_without_data_do_not_stop_a_folder(tmp_path: Path, caplog) -> None:
    touch(tmp_path, "b_train_0.h5")
    (tmp_path / "b_train_1.h5").touch()
    (tmp_path / "._b_train_0.h5").write_bytes(b"\x00\x05\x16\x07rest")
    (tmp_path / "._real.h5").write_bytes(b"\x89HDF")

    with caplog.at_level(logging.WARNING, logger="stoker"):
        assert names(find_files(tmp_path)[1]) == ["._real.h5", "b_train_0.h5"]
        assert [one.path.name for one in find_containers(tmp_path)] == ["._real.h5", "b_train_0.h5"]
        assert names(resolve_files(tmp_path, "b", "train")) == ["b_train_0.h5"]
    for record in caplog.records[:2]:
        assert "b_train_1.h5" in record.message
        assert "._b_train_0.h5" in record.message
    with pytest.raises(SourceError, match=r"b_train_1\.h5"):
        find_files(tmp_path / "b_train_1*")


def coco(folder: Path) -> tuple[Path, Callable[[], Any]]:
    root = write_coco(folder / "coco", {"train": 2})
    return next((root / "annotations").glob("*.json")), lambda: len(
        stoker.ImageSource(root, "coco", size=(8, 8))
    )


def voc(folder: Path) -> tuple[Path, Callable[[], Any]]:
    root = write_voc(folder / "voc", {"a": [("cell", 16, 8, 48, 40)]})
    write_list(root, "train", ["a"])
    path = root / "ImageSets/Main/train.txt"
    return path, lambda: len(stoker.ImageSource(root, "voc", size=(8, 8)))


def table(kind: str) -> Callable[[Path], tuple[Path, Callable[[], Any]]]:
    def make(folder: Path) -> tuple[Path, Callable[[], Any]]:
        path = folder / f"labels.{kind}"
        path.touch()
        return path, lambda: read_labels(
            path, key="id", columns={"x": "float32"}, name="t" if kind == "db" else None
        )

    return make


def tar(folder: Path) -> tuple[Path, Callable[[], Any]]:
    (folder / "a.tar").touch()
    return folder / "a.tar", lambda: list_members("a", folder / "a.tar")


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(coco, id="coco"),
        pytest.param(voc, id="voc"),
        pytest.param(table("csv"), id="csv"),
        pytest.param(table("parquet"), id="parquet"),
        pytest.param(table("db"), id="sqlite"),
        pytest.param(tar, id="tar"),
    ],
)
def test_a_pipe_in_place_of_a_file_is_an_error_that_names_it(
    make: Callable[[Path], tuple[Path, Callable[[], Any]]], tmp_path: Path
) -> None:
    path, work = make(tmp_path)
    if path.suffix == ".parquet":
        pytest.importorskip("pyarrow")
    path.unlink()
    os.mkfifo(path)
    raised: list[Exception] = []

    def run() -> None:
        try:
            work()
        except Exception as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)  # what hangs must not hold up the others
    thread.start()
    thread.join(20)

    assert [isinstance(error, SourceError | ConfigError) for error in raised] == [True]
    assert path.name in str(raised[0])
