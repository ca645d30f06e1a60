"""A source that changes while it is encoded never puts samples of two versions under one fingerprint."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest

from stoker.errors import SourceError
from stoker.precompute import PrecomputeSettings, run_precompute
from stoker.precompute.worker import ChangeGuard, digested_files
from stoker.sources.hdf5 import HDF5Source
from stoker.sources.protocol import FileRef
from stoker.store import Digests, make_recipe, open_cache
from tests.conftest import write_burgers
from tests.precompute.meddled import Meddled


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = write_burgers(tmp_path / "1D_Burgers_Sols_Nu0.01.hdf5")
    shutil.copy(path, path.with_name("copy.h5"))
    write_burgers(path.with_name("other.h5"), seed=9)
    return path


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("how", ["written", "replaced", "keeping times"])
def test_a_file_that_changes_ends_the_run_and_nothing_read_since_is_stored(
    tmp_path: Path, data: Path, how: str, when: str, workers: int
) -> None:
    source = Meddled(data, how, when)
    recipe = make_recipe(source, None)
    settings = PrecomputeSettings(progress=None, workers=workers)

    with pytest.raises(SourceError, match=rf"{data.name} changed .* when sample 5 was read.* Run again"):
        run_precompute(source, None, tmp_path / "cache", name="c", settings=settings)

    stored = tmp_path / "cache" / "c" / recipe.fingerprint
    assert not list(stored.glob("failures-*")), "no sample is at fault"
    assert {*open_cache(stored, require_complete=False).indices.tolist()} <= {0, 1, 2, 3, 4}


def test_a_file_that_is_still_being_written_ends_the_run_and_is_no_samples_fault(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Meddled(data, "touched", "after")
    digest, known = hashlib.file_digest, []

    def while_it_grows(file, name):
        found = digest(file, name)
        if known:
            with data.open("ab") as more:
                more.write(b"x")
        known.append(found)
        return found

    monkeypatch.setattr(hashlib, "file_digest", while_it_grows)

    with pytest.raises(
        SourceError, match=rf"{data.name} is being written .* when sample 5 was read.* Run again"
    ):
        run_precompute(
            source, None, tmp_path / "cache", name="c", settings=PrecomputeSettings(progress=None, workers=0)
        )

    assert len(known) > 1
    assert not list((tmp_path / "cache").rglob("failures-*"))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("how", ["touched", "same bytes"])
def test_a_file_with_the_same_bytes_is_the_same_file(
    tmp_path: Path, data: Path, how: str, workers: int
) -> None:
    settings = PrecomputeSettings(progress=None, workers=workers)
    report = run_precompute(
        Meddled(data, how, "after"), None, tmp_path / "cache", name="c", settings=settings
    )

    assert (report.records, report.quarantined) == (12, 0)
    with h5py.File(data) as file:
        assert np.array_equal(report.cache[11]["data"][:, 0, :, 0].numpy(), file["tensor"][11])


def test_what_is_wrong_with_a_sample_is_named_by_file_and_number(tmp_path: Path, data: Path) -> None:
    with h5py.File(data, "r+") as file:
        file["tensor"][3, 2, 1] = np.nan
        file["tensor"][7, 0, 0] = np.inf
    settings = PrecomputeSettings(progress=None, workers=0, max_quarantined=1.0)

    report = run_precompute(
        HDF5Source(data, preset="pdebench"), None, tmp_path / "cache", name="c", settings=settings
    )

    assert sorted(report.cache.quarantined) == [3, 7]
    for failure in report.cache.quarantined.values():
        assert (failure.stage, failure.kind) == ("check", "sample")
        assert data.name in failure.error
        assert "field 'data' holds NaN or infinity" in failure.error


class Ones:
    """A source that gives one value, whatever its files hold."""

    def read(self, index: int, start: int | None = None, stop: int | None = None) -> dict[str, np.ndarray]:
        return {"data": np.ones(1, np.float32)}


def read_in_turn(guard: ChangeGuard) -> None:
    for turn in range(60):
        guard.read(1000 * (turn % 2))


@pytest.mark.parametrize("counts", [(20, 3), (16, 16), (100, 3), (100, 100)])
def test_every_file_of_every_part_is_looked_at_in_its_turn(tmp_path: Path, counts: tuple[int, ...]) -> None:
    """Also while reads of other parts come in between."""
    parts = [
        [FileRef(name=f"{part}-{n}", path=tmp_path / f"{part}-{n}") for n in range(count)]
        for part, count in enumerate(counts)
    ]
    for ref in (ref for part in parts for ref in part):
        ref.path.write_text(ref.name)
    files = digested_files(parts, Digests().files([ref for part in parts for ref in part]))
    for part, count in enumerate(counts):
        for number in (0, count // 2, count - 1):
            guard = ChangeGuard(Ones(), files, [0, 1000])
            guard.read(0)
            path = parts[part][number].path
            path.write_text("other")
            with pytest.raises(SourceError, match=f"{path.name} changed"):
                read_in_turn(guard)
            path.write_text(path.name)
            files = digested_files(parts, Digests().files([ref for part in parts for ref in part]))
