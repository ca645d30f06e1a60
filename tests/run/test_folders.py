"""Folders that cannot be written are known before anything is done."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stoker.errors import ConfigError
from stoker.plan.resources import find_obstacle, is_open, require_writable


def test_a_folder_that_can_be_made_has_no_obstacle_and_is_not_made(tmp_path: Path) -> None:
    assert find_obstacle(tmp_path) is None
    assert find_obstacle(tmp_path / "a" / "b") is None
    assert list(tmp_path.iterdir()) == []


def test_what_stands_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")

    assert find_obstacle(tmp_path / "file") == f"{tmp_path}/file is not a folder"
    assert find_obstacle(tmp_path / "file" / "x" / "y") == f"{tmp_path}/file is not a folder"
    assert find_obstacle(tmp_path / "link") == f"{tmp_path}/link is a link to nothing"


def test_a_folder_without_the_right_to_write_is_named_with_its_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: not (mode & os.W_OK))

    with pytest.raises(ConfigError) as caught:
        require_writable(tmp_path / "x", "training.run_dir")

    assert f"training.run_dir is {tmp_path}/x, but {tmp_path} may not be written to" in str(caught.value)


def test_only_a_folder_that_is_there_is_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()

    assert is_open(tmp_path)
    assert not is_open(tmp_path / "file")
    assert not is_open(tmp_path / "none")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert not is_open(tmp_path)
