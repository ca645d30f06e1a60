"""Opening a folder marks that one as used, and never waits for ever."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from stoker.errors import StalledError
from stoker.store import open_cache
from stoker.store.storage import UsageLock, idle_seconds
from tests.store.fakes import FakeSource, make_cache
from tests.store.kill_points import make_old


def make_two(root: Path) -> tuple[Path, Path]:
    """Two complete caches of one name, unused for long."""
    older, newer = (make_cache(root, FakeSource(settings={"i": i})).path for i in range(2))
    make_old(older)
    make_old(newer)
    return older, newer


def test_opening_by_name_marks_only_the_one_that_is_opened(tmp_path: Path) -> None:
    older, newer = make_two(tmp_path)

    assert open_cache(tmp_path / "x").path == newer

    assert idle_seconds(newer) < 60
    assert idle_seconds(older) > 86400


def test_a_recipe_that_never_looks_the_same_twice_ends_in_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a file system that numbers files anew each time they are looked at."""
    path = make_cache(tmp_path).path
    looks: list[None] = []

    def never_the_same(*_: object) -> bool:
        looks.append(None)
        assert len(looks) < 1000, "it looks again without a pause"
        return False

    monkeypatch.setattr("stoker.store.storage.WAIT_S", 0.05)
    monkeypatch.setattr(os.path, "samestat", never_the_same)

    with pytest.raises(StalledError, match=r"0\.05 s: its recipe\.json is another file each time"):
        UsageLock(path)
