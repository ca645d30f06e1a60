"""A folder argument where a file is in the way, and what is not a path at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import stoker
from stoker.errors import ConfigError, ReadOnlyError
from stoker.extras.fetch.run import fetch_files
from stoker.store import pull
from tests.cli.commands import run

DATA: Any = torch.zeros(4, 3)
SOURCE = stoker.TorchSource(DATA)
WRITERS: dict[str, Callable[[Path], object]] = {
    "cached": lambda folder: stoker.cached(DATA, cache_dir=folder, precompute={"workers": 0}, shuffle=True),
    "precompute": lambda folder: stoker.precompute(SOURCE, None, folder, name="x", workers=0),
    "background": lambda folder: stoker.precompute(SOURCE, None, folder, name="x", wait=False),
    "fetch": lambda folder: fetch_files([], folder),
    "pull": lambda folder: pull("file:///nowhere", folder),
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_text("kept")
    return path


@pytest.mark.parametrize("below", ["", "a", "a/b"])
@pytest.mark.parametrize("writer", WRITERS)
def test_a_file_in_the_way_of_a_folder_is_named_with_the_folder(file: Path, writer: str, below: str) -> None:
    with pytest.raises(ReadOnlyError) as raised:
        WRITERS[writer](file / below)

    assert f"{file / below} cannot be made: {file} is not a folder" in str(raised.value)
    assert file.read_text() == "kept"


@pytest.mark.parametrize("given", ["", 3, None, b"x", "a\0b"])
def test_what_is_no_path_is_refused_as_a_cache_folder(given: Any) -> None:
    with pytest.raises(ConfigError, match="path"):
        stoker.precompute(SOURCE, None, given, name="x", workers=0)


@pytest.mark.parametrize(
    "words",
    [
        ("profile", "never.py", "--page", "{0}/a.html"),
        ("profile", "c.yaml", "--page", "{0}/a/b.html"),
        ("bench", "--picture", "{0}/a.png"),
        ("plan", "--simulate", "--picture", "{0}/a.png"),
    ],
    ids=" ".join,
)
def test_a_file_in_the_way_of_a_page_is_named_before_anything_is_measured(
    file: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    monkeypatch.chdir(file.parent)
    Path("never.py").write_text("raise RuntimeError('it ran')")
    _, said = run(*(word.format(file) for word in words), exit_code=ConfigError.exit_code)

    assert f"{file} is not a folder" in said
