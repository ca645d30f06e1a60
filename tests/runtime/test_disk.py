"""What does not fit is refused before it is begun, with the numbers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from stoker.errors import ResourceError
from stoker.runtime.disk import FreeSpace, free_space
from stoker.units import KIB


def require(free: FreeSpace, needed_bytes: int, files: int = 0) -> None:
    free.require(Path("out"), needed_bytes, "it needs", reserve_bytes=KIB, files=files, advice="or wait")


def test_what_fits_exactly_is_taken() -> None:
    require(FreeSpace(8 * KIB, 10), 7 * KIB, files=10)
    require(FreeSpace(8 * KIB, None), 7 * KIB, files=1 << 40)


def test_a_byte_or_a_file_too_many_is_refused_with_the_numbers() -> None:
    with pytest.raises(ResourceError, match=r"out has 8\.0 KiB free, it needs 7\.0 KiB and 1\.0 KiB of"):
        require(FreeSpace(8 * KIB, 10), 7 * KIB + 1)
    with pytest.raises(ResourceError, match="out has room for 10 more files, it needs 11"):
        require(FreeSpace(8 * KIB, 10), 0, files=11)


def test_what_is_free_is_what_the_system_says_of_this_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`f_bfree` and `f_ffree` count what is kept for root; no files at all means that there is no limit."""
    answer: list[Any] = [os.statvfs_result((1, 4096, 100, 50, 40, 30, 20, 10, 0, 255))]
    monkeypatch.setattr(os, "statvfs", lambda _: answer[0])

    assert free_space(tmp_path) == (40 * 4096, 10, 100 * 4096)
    answer[0] = os.statvfs_result((1, 4096, 100, 50, 40, 0, 0, 0, 0, 255))
    assert free_space(tmp_path).inodes is None


def test_a_folder_that_is_yet_to_be_made_has_the_room_of_the_one_above(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"

    assert free_space(path, nearest=True).total_bytes == free_space(tmp_path).total_bytes
    with pytest.raises(FileNotFoundError):
        free_space(path)
