from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from stoker.encoders.grid import GridEncoder
from stoker.errors import EncoderError, SplitError, StokerError
from stoker.run.build import build_jobs
from stoker.run.context import Run, batch_examples, stem_of
from stoker.schema import Field
from tests.conftest import write_burgers
from tests.run.conftest import Configure


def test_caches_are_named_by_task_and_split(configure: Configure) -> None:
    jobs = build_jobs(Run(configure()).for_task("burgers1d"), ["train", "val"])

    assert [(job.name, len(job.source)) for job in jobs] == [("burgers1d_train", 12), ("burgers1d_val", 4)]


@pytest.mark.parametrize(
    ("files", "name"),
    [
        ("raw/1D_Burgers_Sols_Nu0.01.hdf5", "1D_Burgers_Sols_Nu0.01"),
        ("raw/burgers_*.h5", "burgers"),
        ("raw/*.h5", "raw"),
        ("raw/[ab]/", "raw"),
        (["raw/a.h5", "raw/b.h5"], "a"),
        ("raw/my data (1).h5", "my_data_1"),
        ("*.h5", "data"),
    ],
)
def test_without_a_task_the_first_file_names_the_cache(files: str | list[str], name: str) -> None:
    assert stem_of(files) == name


def test_a_task_that_is_given_wins_over_the_files_name(configure: Configure) -> None:
    assert [*Run(configure("data.files=raw/x.h5")).tasks] == ["x"]
    assert [*Run(configure("data.files=raw/x.h5", "data.task=mine")).tasks] == ["mine"]
    assert [*Run(configure("data.task=[a,b]")).tasks] == ["a", "b"]


def test_all_splits_share_the_encoder(configure: Configure) -> None:
    train, val = build_jobs(Run(configure()).for_task("burgers1d"), ["train", "val"])

    assert train.encoder is val.encoder
    assert isinstance(train.encoder, GridEncoder)
    assert (train.encoder.grid, train.encoder.patch, train.encoder.channels) == ((1, 32), (1, 4), 1)


def test_a_patch_that_does_not_divide_says_which_would(configure: Configure) -> None:
    with pytest.raises(EncoderError, match=r"does not divide.*patch=\(1, 4\)"):
        build_jobs(Run(configure("encoder.patch_size=5")).for_task("burgers1d"), ["train"])


def test_an_absent_split_is_an_error(configure: Configure) -> None:
    with pytest.raises(SplitError, match="train, val"):
        len(build_jobs(Run(configure()).for_task("burgers1d"), ["test"])[0].source)


def test_no_encoder_stores_samples_as_they_are(configure: Configure) -> None:
    job = build_jobs(Run(configure("encoder.kind=identity")).for_task("burgers1d"), ["train"])[0]

    assert job.encoder is None


def test_val_is_normalised_by_statistics_of_train(configure: Configure, tmp_path: Path) -> None:
    write_burgers(tmp_path / "raw" / "burgers1d_val.h5", samples=4, seed=9)
    config = configure("data.normalize=true", "encoder.kind=identity")

    val = build_jobs(Run(config).for_task("burgers1d"), ["val"])[0]
    train = build_jobs(Run(config).for_task("burgers1d"), ["train", "val"])[0]

    assert val.encoder is not None
    assert train.encoder is not None
    assert val.encoder.identity() == train.encoder.identity()
    values = np.concatenate([train.source.read(n)["data"].ravel() for n in range(12)])
    assert float(val.encoder.weights()["normalize.scale"][0]) == pytest.approx(values.std(), rel=1e-5)


def test_statistics_are_fitted_once(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else every start would read all raw data again to know the fingerprint."""
    config = configure("data.normalize=true")
    first = build_jobs(Run(config).for_task("burgers1d"), ["train"])[0]
    monkeypatch.setattr("stoker.run.build.fit_statistics", None)

    again = build_jobs(Run(config).for_task("burgers1d"), ["train"])[0]

    assert first.encoder is not None
    assert again.encoder is not None
    assert again.encoder.identity() == first.encoder.identity()


def test_damaged_statistics_are_fitted_again(configure: Configure, tmp_path: Path) -> None:
    config = configure("data.normalize=true")
    first = build_jobs(Run(config).for_task("burgers1d"), ["train"])[0]
    kept = next((tmp_path / "data/latent_cache/.statistics").iterdir())
    kept.write_text(kept.read_text().replace("1", "2"))

    again = build_jobs(Run(config).for_task("burgers1d"), ["train"])[0]

    assert first.encoder is not None
    assert again.encoder is not None
    assert again.encoder.identity() == first.encoder.identity()


def test_batch_trajectories_counts_as_the_earlier_systems_did(configure: Configure) -> None:
    config = load_without_batch_size(configure, "training.batch_trajectories=3", "training.time_stride=2")

    assert Run(config).windows.start_every == 2
    schema = {"data": Field(dtype="float32", shape=(9, 4), time=True)}
    assert batch_examples(Run(config), schema) == 3 * 4  # starts 0, 2, 4, 6 of 9 steps


def load_without_batch_size(configure: Configure, *overrides: str) -> object:
    from stoker.config import make_config

    settings = configure().to_dict()
    del settings["training"]["batch_size"]  # type: ignore[index,call-overload]
    for name in ("batch_trajectories", "time_stride", "start_every"):
        del settings["training"][name]  # type: ignore[index,call-overload]
    for text in overrides:
        key, _, value = text.partition("=")
        settings["training"][key.removeprefix("training.")] = int(value)  # type: ignore[index,call-overload]
    return make_config(settings, where="test")


def test_a_root_without_files_of_the_task_is_named(configure: Configure) -> None:
    with pytest.raises(StokerError, match="advection1d"):
        build_jobs(Run(configure("data.task=advection1d")).for_task("advection1d"), ["train"])
