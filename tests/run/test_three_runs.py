"""The scenario that the earlier start-up plan promised: encode once, then never again for the same input."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from stoker.config import Config
from stoker.run.caches import explain
from stoker.run.context import Run
from stoker.run.precompute import CacheResult, fill_caches
from stoker.run.train import train_config
from stoker.store import open_cache
from tests.conftest import SHARED_DATA, write_burgers
from tests.run.conftest import Configure


@pytest.fixture
def raw(configure: Configure, tmp_path: Path) -> Path:
    """A folder with two per-parameter files: real ones where they are at hand, else generated ones."""
    folder = tmp_path / "pde"
    folder.mkdir()
    names = ("1D_Burgers_Sols_Nu0.01.hdf5", "1D_Burgers_Sols_Nu0.1.hdf5")
    for name, nu in zip(names, (0.01, 0.1), strict=True):
        real = SHARED_DATA / "pde_exponax" / name
        if real.is_file():
            shutil.copyfile(real, folder / name)
        else:
            write_burgers(folder / name, nu=nu, samples=40, points=256, steps=21)
    return folder


def fill(config: Config, splits: Sequence[str] = ("train", "val")) -> list[CacheResult]:
    return fill_caches(Run(config), splits)


def encoded(results: Sequence[CacheResult]) -> list[int]:
    return [result.encoded for result in results]


def folders(results: Sequence[CacheResult]) -> list[Path]:
    return [result.cache.path for result in results]


def test_three_runs_and_a_fourth(configure: Configure, raw: Path) -> None:
    one = f"data.files={raw}/1D_Burgers_Sols_Nu0.01.hdf5"
    first = fill(configure(one))
    second = fill(configure(one))
    third = fill(configure(one, "latent.dim=16"))
    fourth = fill(configure(one))

    assert all(encoded(first))
    assert encoded(second) == [0, 0]
    assert all(encoded(third))
    assert not set(folders(third)) & set(folders(first))
    assert open_cache(folders(first)[0]).verify().bad == []
    assert encoded(fourth) == [0, 0]
    assert folders(fourth) == folders(second) == folders(first)


@pytest.mark.slow
def test_a_cold_a_warm_and_a_changed_training_run_say_what_starting_took(
    configure: Configure, raw: Path
) -> None:
    one = [f"data.files={raw}/1D_Burgers_Sols_Nu0.01.hdf5", "training.max_steps=3", "data.limit=5"]
    cold, warm, changed, back = (
        train_config(Run(configure(*one, *more))) for more in ([], [], ["latent.dim=16"], [])
    )

    assert [run.cache_reused for run in (cold, warm, changed, back)] == [False, True, False, True]
    assert [run.metrics["startup/cache_reused"] for run in (cold, warm, changed, back)] == [
        0.0,
        1.0,
        0.0,
        1.0,
    ]
    for run in (cold, warm, changed, back):
        names = [phase.name for phase in run.phases]
        assert names == ["program and settings", "caches", "plan and loaders", "first batch"]
        assert run.report.steps == 3
        spent_s = sum(phase.seconds for phase in run.phases)
        assert run.total_s == pytest.approx(spent_s, abs=0.5)
        assert run.metrics["startup/total_startup_time_min"] >= run.cache_s / 60
    notes = [run.phases[1].note for run in (cold, warm, changed, back)]
    assert notes[1] == notes[3] == "nothing to encode"
    assert all("_train" in note and "_val" in note and "encoded" in note for note in (notes[0], notes[2]))
    assert folders(back.caches) == folders(cold.caches) != folders(changed.caches)


def test_a_moved_root_is_a_hit(configure: Configure, raw: Path, tmp_path: Path) -> None:
    first = fill(configure(f"data.files={raw}/*.hdf5", "data.task=b"))
    moved = shutil.move(raw, tmp_path / "elsewhere")

    assert encoded(fill(configure(f"data.files={moved}/*.hdf5", "data.task=b"))) == [0, 0]
    assert all(encoded(first))


@pytest.mark.parametrize(
    ("change", "entry"),
    [
        pytest.param("latent.dim=6", "encoder.config.dim", id="latent-dim"),
        pytest.param("encoder.seed=1", "encoder.weights", id="encoder-weights"),
        pytest.param("training.latent_cache_dtype=float32", "dtype.latent", id="dtype"),
        pytest.param("data.normalize=true", "encoder.normalized", id="normalization"),
        pytest.param(
            "data.splits={train: 0.5, val: 0.5}", "source.settings.split.fractions.train", id="split-rule"
        ),
        pytest.param("data.seed=1", "source.settings.split.seed", id="split-seed"),
        pytest.param("data.limit=5", "source.parts[0].selection", id="limit"),
    ],
)
def test_a_change_is_a_miss_and_why_names_it(
    configure: Configure, raw: Path, change: str, entry: str
) -> None:
    one = f"data.files={raw}/1D_Burgers_Sols_Nu0.01.hdf5"
    before = fill(configure(one), ["train"])[0]

    after = fill(configure(one, change), ["train"])[0]

    assert (after.reused, after.encoded + after.adopted) == (0, len(after.cache))
    assert entry.startswith("source.") or not after.adopted, "records of another encoder were taken over"
    differences = {d.entry: d for d in explain(before.cache.path, after.cache.path).differences}
    assert entry in differences, list(differences)
    assert open_cache(before.cache.path).verify().bad == []


def test_a_changed_byte_is_a_miss_and_why_names_the_file(configure: Configure, raw: Path) -> None:
    config = configure(f"data.files={raw}/1D_Burgers_Sols_Nu0.01.hdf5")
    before = fill(config, ["train"])[0]
    file = raw / "1D_Burgers_Sols_Nu0.01.hdf5"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)

    after = fill(config, ["train"])[0]

    assert (after.encoded, after.adopted) == (1, len(after.cache) - 1)  # that of the byte alone
    differences = explain(before.cache.path, after.cache.path).differences
    assert [d.entry for d in differences] == ["source.parts[0].digest"]
    assert "1D_Burgers_Sols_Nu0.01.hdf5" in differences[0].note


def test_another_version_of_the_encoders_code_is_a_miss(
    configure: Configure, raw: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configure(f"data.files={raw}/1D_Burgers_Sols_Nu0.01.hdf5")
    before = fill(config, ["train"])[0]
    monkeypatch.setattr("stoker.encoders.grid.VERSION", 999)

    after = fill(config, ["train"])[0]

    assert after.encoded == len(after.cache)
    assert [d.entry for d in explain(before.cache.path, after.cache.path).differences] == ["encoder.version"]


def test_workers_device_names_and_folders_are_no_part_of_the_key(configure: Configure, raw: Path) -> None:
    one = f"data.files={raw}/1D_Burgers_Sols_Nu0.01.hdf5"
    first = fill(configure(one), ["train"])[0]

    for change in (
        "precompute.workers=1",
        "training.batch_size=4",
        "training.seed=9",
        "training.time_stride=2",
    ):
        assert fill(configure(one, change), ["train"])[0].encoded == 0, change
    elsewhere = fill(configure(one, "training.latent_cache_dir=other"), ["train"])[0]
    assert elsewhere.cache.fingerprint == first.cache.fingerprint


def test_one_added_file_encodes_only_its_samples(configure: Configure, tmp_path: Path) -> None:
    write_burgers(tmp_path / "raw" / "advection_train_000.h5", samples=6)
    config = configure("data.task=advection")
    first = fill(config, ["train"])[0]
    write_burgers(tmp_path / "raw" / "advection_train_001.h5", samples=5, seed=3)

    second = fill(config, ["train"])[0]

    assert (first.encoded, second.encoded, second.adopted, len(second.cache)) == (6, 5, 6, 11)
    for number in range(6):
        assert second.cache[number]["latent"].equal(first.cache[number]["latent"])


def test_one_added_parameter_file_keeps_the_split_and_the_records(configure: Configure, raw: Path) -> None:
    """Files that differ in a parameter share row keys, so the first file's samples stay where they were."""
    late = raw / "1D_Burgers_Sols_Nu0.1.hdf5"
    hidden = late.rename(raw / "hidden")
    config = configure(f"data.files={raw}/*.hdf5")
    first = fill(config, ["train"])[0]
    hidden.rename(late)

    second = fill(config, ["train"])[0]

    assert second.adopted == len(first.cache)
    assert second.encoded == len(second.cache) - len(first.cache) > 0
