"""With the source gone, the cache that matches every other entry is used, and one line says so."""

from __future__ import annotations

import contextlib
import logging
import shutil
from pathlib import Path

import pytest

from stoker.errors import SourceError
from stoker.run.caches import locate
from stoker.run.context import Run
from stoker.run.precompute import fill_caches
from stoker.run.train import train_config
from stoker.store.storage import idle_seconds
from tests.conftest import write_burgers
from tests.run.conftest import Configure
from tests.store.kill_points import make_old


@pytest.fixture
def filled(configure: Configure, tmp_path: Path) -> Path:
    """Caches are there, raw data is not."""
    fill_caches(Run(configure()), ["train", "val"])
    shutil.rmtree(tmp_path / "raw")
    return tmp_path


def test_training_goes_on_without_the_raw_data(
    configure: Configure, filled: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "stoker"):
        result = train_config(Run(configure("training.max_steps=2")))

    assert result.cache_reused
    assert [cache.source_gone for cache in result.caches] == [True, True]
    assert len([line for line in caplog.messages if "raw data is gone" in line]) == 1


@pytest.mark.parametrize(
    "change",
    [
        "latent.dim=6", "latent.tokens=2", "encoder.seed=1", "encoder.patch_size=8", "encoder.kind=identity",
        "encoder.fourier=[]", "training.latent_cache_dtype=float32", "data.normalize=true", "data.limit=3",
        "data.preset=well", "precompute.keep=data", "training.latent_cache_dtype=int8",
    ],
)  # fmt: skip
def test_another_setting_does_not_match(configure: Configure, filled: Path, change: str) -> None:
    with pytest.raises(SourceError):
        fill_caches(Run(configure(change)), ["train"])


def test_the_one_that_matches_is_chosen_among_several(configure: Configure, tmp_path: Path) -> None:
    wanted = fill_caches(Run(configure()), ["train"])[0]
    fill_caches(Run(configure("latent.dim=6")), ["train"])
    shutil.rmtree(tmp_path / "raw")

    found = fill_caches(Run(configure()), ["train"])[0]

    assert found.cache.fingerprint == wanted.cache.fingerprint


def test_only_the_one_that_is_chosen_counts_as_used(configure: Configure, tmp_path: Path) -> None:
    wanted = fill_caches(Run(configure()), ["train"])[0].cache.path
    other = fill_caches(Run(configure("latent.dim=6")), ["train"])[0].cache.path
    shutil.rmtree(tmp_path / "raw")
    make_old(wanted)
    make_old(other)

    assert locate(Run(configure()).for_task("burgers1d"), "train").folder == wanted

    assert idle_seconds(wanted) < 60
    assert idle_seconds(other) > 86400


@pytest.mark.parametrize(
    ("change", "hit"),
    [
        ("data.seed=0", True),
        ("data.splits={train: 0.8, valid: 0.1, test: 0.1}", True),
        ("data.seed=1", False),
        ("data.splits={train: 0.9, val: 0.1}", False),
    ],
)
def test_the_split_rule_must_match(configure: Configure, tmp_path: Path, change: str, hit: bool) -> None:
    write_burgers(tmp_path / "one.h5", samples=20)
    fill_caches(Run(configure("data.files=one.h5")), ["train"])
    (tmp_path / "one.h5").unlink()

    located = None
    with contextlib.suppress(SourceError):
        located = locate(Run(configure("data.files=one.h5", change)).for_task("one"), "train")

    assert (located is not None) is hit


def test_normalised_caches_are_found_too(configure: Configure, tmp_path: Path) -> None:
    config = configure("data.normalize=true")
    fill_caches(Run(config), ["train", "val"])
    shutil.rmtree(tmp_path / "raw")

    assert [result.source_gone for result in fill_caches(Run(config), ["train", "val"])] == [True, True]


def test_an_incomplete_cache_is_no_replacement(configure: Configure, filled: Path) -> None:
    for index in (filled / "data/latent_cache/burgers1d_train").glob("*/*"):
        if index.name.startswith(("index", "shard")):
            index.unlink()

    with pytest.raises(SourceError, match="raw"):
        fill_caches(Run(configure()), ["train"])


def test_damaged_raw_data_is_not_gone(configure: Configure, tmp_path: Path) -> None:
    """Else a broken disk would go unnoticed."""
    fill_caches(Run(configure()), ["train"])
    (tmp_path / "raw" / "burgers1d_train.h5").write_bytes(b"not HDF5 at all")

    with pytest.raises(SourceError):
        fill_caches(Run(configure()), ["train"])


def test_a_part_that_is_missing_is_an_error_not_the_cache_of_the_rest(
    configure: Configure, tmp_path: Path
) -> None:
    write_burgers(tmp_path / "a.h5", samples=20)
    fill_caches(Run(configure("data.files=a.h5")), ["train"])

    with pytest.raises(SourceError, match=r"b\.h5 does not exist"):
        fill_caches(Run(configure("data.files=[a.h5,b.h5]")), ["train"])


@pytest.mark.parametrize(
    ("made", "asked", "hit"),
    [
        ("a.h5", "[a.h5,b.h5]", False),
        ("[a.h5,b.h5]", "a.h5", False),
        ("[a.h5,b.h5]", "[a.h5,b.h5]", True),
        ("[a.h5,b.h5]", "[a.h5,'b*.h5']", True),
        ("[a.h5,b.h5]", "[a.h5,'c*.h5']", False),
        ("[a_train.h5,a_val.h5]", "[a_train.h5,a_val.h5]", True),
        ("[a/x.h5,b/x.h5]", "[a/x.h5,b/x.h5]", True),
        ("a/x.h5", "[a/x.h5,b/x.h5]", False),
    ],
)
def test_all_named_files_must_be_in_the_cache(
    configure: Configure, tmp_path: Path, made: str, asked: str, hit: bool
) -> None:
    files = [tmp_path / name for name in made.strip("[]").split(",")]
    for seed, file in enumerate(files):
        file.parent.mkdir(exist_ok=True)
        write_burgers(file, samples=20, seed=seed)
    fill_caches(Run(configure(f"data.files={made}", "data.task=t")), ["train"])
    for file in files:
        file.unlink()

    located = None
    with contextlib.suppress(SourceError):
        located = locate(Run(configure(f"data.files={asked}", "data.task=t")).for_task("t"), "train")

    assert (located is not None) is hit


@pytest.mark.parametrize(
    ("made", "asked", "hit"),
    [
        ("data.fields={data: 'tensor: n t x'}", "data.fields={data: 'tensor: n t x'}", True),
        ("data.fields={data: 'tensor: n t x'}", "data.fields={data: 'tensor: n x t'}", False),
        ("data.fields={data: 'tensor: n t x'}", "data.fields={data: 'other: n t x'}", False),
        ("data.fields={data: 'tensor: n t x'}", "data.seed=0", False),
        ("data.seed=0", "data.fields={data: 'tensor: n t x'}", False),
        ("data.fields={data: 'tensor: n t x', Nu: ''}", "data.fields={data: 'tensor: n t x', Nu: ''}", True),
        ("data.fields={data: 'tensor: n t x', Nu: ''}", "data.fields={data: 'tensor: n t x'}", False),
        ("data.fields={data: 'tensor: n t x'}", "data.fields={data: 'tensor: n t x', Nu: ''}", False),
        ("data.fields={tensor: 'n t x'}", "data.fields={tensor: 'n t x'}", True),
        ("data.fields={tensor: 'n t x'}", "data.fields={tensor: 'n x t'}", False),
    ],
)
def test_the_declared_layout_must_match(
    configure: Configure, tmp_path: Path, made: str, asked: str, hit: bool
) -> None:
    preset = ["data.preset=pdebench"] if "{tensor" in made else []
    write_burgers(tmp_path / "one.h5", samples=20)
    fill_caches(Run(configure("data.files=one.h5", made, *preset)), ["train"])
    (tmp_path / "one.h5").unlink()

    located = None
    with contextlib.suppress(SourceError):
        located = locate(Run(configure("data.files=one.h5", asked, *preset)).for_task("one"), "train")

    assert (located is not None) is hit
