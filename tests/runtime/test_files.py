"""What is written under a name is there whole, durable, or not at all."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from stoker.errors import ReadOnlyError, ResourceError
from stoker.runtime.disk import explained
from stoker.runtime.files import replacing


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of what was synced, in order."""
    names: list[str] = []
    sync = os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda fd: (names.append(Path(os.readlink(f"/proc/self/fd/{fd}")).name), sync(fd))[1]
    )
    return names


def test_a_file_takes_its_name_once_it_is_durable(tmp_path: Path, synced: list[str]) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")

    with replacing(path) as temporary:
        temporary.write_text("new")
        assert path.read_text() == "old"

    assert path.read_text() == "new"
    assert synced == [temporary.name, tmp_path.name]
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]


def test_a_folder_takes_its_name_once_its_files_are_durable(tmp_path: Path, synced: list[str]) -> None:
    path = tmp_path / "step-1"

    with replacing(path) as temporary:
        temporary.mkdir()
        (temporary / "weights").write_bytes(b"w")

    assert [entry.name for entry in path.iterdir()] == ["weights"]
    assert synced == ["weights", temporary.name, tmp_path.name]


@pytest.mark.parametrize("folder", [False, True])
def test_a_block_that_raises_leaves_everything_as_it_was(tmp_path: Path, folder: bool) -> None:
    path = tmp_path / "a"
    path.write_text("old")

    def make(temporary: Path) -> None:
        if folder:
            temporary.mkdir()
            temporary = temporary / "b"
        temporary.write_text("half")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), replacing(path) as temporary:
        make(temporary)

    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("make", [Path.touch, Path.mkdir])
def test_a_folder_that_holds_something_is_never_replaced(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    path = tmp_path / "data"
    path.mkdir()
    (path / "mine").touch()

    with pytest.raises(OSError, match=r"[Dd]irectory"), replacing(path) as temporary:
        make(temporary)

    assert [entry.name for entry in tmp_path.iterdir()] == ["data"]
    assert (path / "mine").exists()


@pytest.mark.parametrize(
    ("number", "kind", "says"),
    [
        (errno.ENOSPC, ResourceError, r"inodes free\)\. What was finished is kept; make room"),
        (errno.EROFS, ReadOnlyError, "cannot be written: Read-only file system"),
        (errno.EIO, OSError, "Input/output error"),
    ],
)
def test_a_full_or_read_only_disk_is_named_and_anything_else_passes(
    tmp_path: Path, number: int, kind: type[Exception], says: str
) -> None:
    with pytest.raises(kind, match=says), explained(tmp_path / "a"):
        raise OSError(number, os.strerror(number))
