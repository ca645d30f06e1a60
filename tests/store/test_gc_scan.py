"""What is looked at before anything is removed: only what is ours, also while others write."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from stoker.errors import FormatError
from stoker.store import make_recipe, open_cache, open_folder
from stoker.store.gc import GcPolicy, collect, scan
from tests.store.fakes import assert_whole, fill
from tests.store.kill_points import make_old
from tests.store.test_gc import CURRENT, gone, make_fingerprints, snapshot, stays


def test_files_that_only_look_like_ours_stay(tmp_path: Path) -> None:
    (path,) = make_fingerprints(tmp_path, 1)
    (tmp_path / ".tmp-notes").write_text("mine")
    (tmp_path / "x" / ".gone-fishing").mkdir()
    (tmp_path / "x" / ".gone-fishing" / "a").write_text("mine")
    (tmp_path / "encoders").mkdir()
    (tmp_path / "encoders" / "dino.safetensors").write_text("mine")
    (path / ".damaged-shard-0").mkdir()
    before = snapshot(tmp_path)

    assert collect(tmp_path).removed == []
    assert snapshot(tmp_path) == before


def test_weights_behind_a_link_stay(tmp_path: Path) -> None:
    """Caches elsewhere may need them."""
    make_fingerprints(tmp_path / "cache", 1)
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / f"{'0' * 64}.safetensors").write_bytes(b"weights")
    (tmp_path / "cache" / "encoders").symlink_to(tmp_path / "shared")

    assert collect(tmp_path / "cache").removed == []
    assert [*(tmp_path / "shared").iterdir()]


@pytest.mark.parametrize("days", [0.0, 2.0])
def test_a_folder_whose_recipe_was_never_written_goes_after_a_day(tmp_path: Path, days: float) -> None:
    """A precompute that has just begun makes the folder first."""
    begun = tmp_path / "x" / ("0" * 16)
    begun.mkdir(parents=True)
    (begun / ".tmp-00-recipe.json").write_bytes(b"half")
    make_old(begun, days)

    report = collect(tmp_path, GcPolicy(older_than_s=0.0))

    assert begun.exists() == (days == 0)
    assert gone(report, "leftover") == ([] if days == 0 else [begun.name])


def test_a_first_run_that_has_no_index_yet_stays(tmp_path: Path) -> None:
    make_fingerprints(tmp_path, 2)
    begun = open_folder(tmp_path, "x", make_recipe(CURRENT, None))
    path = begun.path
    make_old(path)

    assert stays(collect(tmp_path, GcPolicy(older_than_s=0.0)))[path.name].startswith("in use")
    fill(begun, CURRENT)
    begun.finish()
    assert_whole(open_cache(path), CURRENT)


def test_a_file_that_goes_while_its_folder_is_listed_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Temporaries of writers get their names at any moment."""
    (path,) = make_fingerprints(tmp_path, 1)
    (path / ".tmp-0a-shard").write_bytes(b"being written")
    real = os.scandir

    @contextmanager
    def listing(place: Path) -> Generator[Iterator[os.DirEntry[str]]]:
        with real(place) as entries:
            listed = [*entries]
            (path / ".tmp-0a-shard").unlink(missing_ok=True)
            yield iter(listed)

    monkeypatch.setattr(os, "scandir", listing)

    (found,) = scan(tmp_path)

    assert found.broken == ""
    assert "index.json" in found.files
    assert ".tmp-0a-shard" not in found.files


def test_a_folder_that_cannot_be_listed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path,) = make_fingerprints(tmp_path, 1)
    real = Path.iterdir

    def refused(self: Path) -> Iterator[Path]:
        if self == path.parent:
            raise PermissionError(13, "Permission denied", str(self))
        return real(self)

    monkeypatch.setattr(Path, "iterdir", refused)

    with pytest.raises(FormatError, match="x cannot be listed: Permission denied"):
        collect(tmp_path, GcPolicy(keep=0, force=True))
