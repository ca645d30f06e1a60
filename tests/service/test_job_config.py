"""What a job may ask for: the guide's body as it is, and no field that is taken and then ignored."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from stoker.config import Config
from stoker.errors import ConfigError
from stoker.run.fitting import Classification, ImageClassifier
from stoker.service.job_config import (
    LEAST_SIDE,
    NOTHING_ON_DEVICE,
    SETTINGS,
    UNUSED_FIELDS,
    WITHOUT_EFFECT,
    JobConfig,
    JobFieldError,
    check,
    settings_of,
)

ID = "0d6c2c9e-5a3e-5b5f-9a29-6a2b6f2d9d10"
GUIDE = {
    "dataset_ids": [ID], "batch_size": 256, "epochs": 100, "learning_rate": 0.001, "preload_to_gpu": True,
    "accelerator": "gpu",
}  # fmt: skip
RADIO = {"id": ID, "name": "lab", "kind": "radio",
         "spec": {"url": "sqlite:////data/radio.db", "table": "measurement_features", "set": ID}}  # fmt: skip
HDF5 = {"id": ID, "name": "Burgers, 1D", "kind": "hdf5", "spec": {"path": "/data/burgers.hdf5"}}
IMAGES = {"id": ID, "name": "cells", "kind": "images", "spec": {"path": "/data/cells"}}


def config(**given: Any) -> JobConfig:
    return JobConfig.model_validate({"dataset_ids": [ID], **given})


def settings(dataset: dict[str, Any], **given: Any) -> Config:
    return settings_of(config(**given), [dataset], caches="/caches", run_dir="/jobs/1", epochs=7)


def test_the_guides_body_is_taken_as_it_is() -> None:
    found = JobConfig.model_validate(GUIDE)

    assert found.model_dump(include=GUIDE.keys(), mode="json") == GUIDE
    assert check(found, [RADIO]) == "radio"


def test_defaults_and_ranges_are_the_documented_ones() -> None:
    found = config()
    assert (found.batch_size, found.epochs, found.learning_rate, found.weight_decay) == (128, 100, 1e-3, 1e-4)
    assert (found.validation_split, found.dropout_rate, found.lr_scheduler) == (0.2, 0.2, "cosine")
    assert (found.early_stop_patience, found.early_stop_delta, found.max_grad_norm) == (20, 1e-3, 1.0)
    assert (found.warmup_epochs, found.num_workers, found.accelerator) == (5, 0, "auto")

    edges: dict[str, tuple[list[Any], list[Any]]] = {
        "batch_size": ([1, 1024], [0, 1025, 1.5, "256", True]),
        "num_workers": ([0, 32], [-1, 33]),
        "validation_split": ([0.5], [-0.1, 0.51]),
        "epochs": ([1, 5000], [0, 5001]),
        "learning_rate": ([1e-9], [0, -1, float("nan"), float("inf")]),
        "dropout_rate": ([0, 0.9], [-0.1, 0.91]),
        "early_stop_patience": ([0, 100], [-1, 101]),
        "accelerator": (["auto", "gpu", "cpu"], ["tpu", None]),
        "dataset_ids": ([["a"]], [[], ["a", "a"], [""], "a"]),
    }
    for name, (good, bad) in edges.items():
        for value in good:
            config(**{name: value})
        for value in bad:
            with pytest.raises(ValidationError) as refused:
                config(**{name: value})
            assert refused.value.errors()[0]["loc"][0] == name


@pytest.mark.parametrize("name", sorted(WITHOUT_EFFECT))
def test_a_field_that_can_have_no_effect_is_refused_with_its_reason(name: str) -> None:
    default = JobConfig.model_fields[name].default
    other = {str: "x", bool: not default, int: 7}.get(type(default), "x")
    assert getattr(config(**{name: default}), name) == default

    with pytest.raises(ValidationError) as refused:
        config(**{name: other})

    (error,) = refused.value.errors()
    assert error["loc"] == (name,)
    assert WITHOUT_EFFECT[name] in error["msg"]


def test_unknown_fields_are_refused() -> None:
    with pytest.raises(ValidationError, match="preload_gpu"):
        config(preload_gpu=True)


def test_early_stopping_without_validation_is_refused() -> None:
    with pytest.raises(ValidationError, match="early_stop_patience=20 has no loss to watch"):
        config(validation_split=0.0)
    assert settings(RADIO, validation_split=0.0, early_stop_patience=0).data.splits == {"train": 1.0}


@pytest.mark.parametrize(
    ("batch_size", "size", "good"),
    [(1, [4, 4], False), (1, [8, 8], False), (1, [4, 9], True), (2, [4, 4], True), (1, [9, 9], True)],
)
def test_a_batch_that_the_network_of_images_cannot_normalize_is_refused(
    batch_size: int, size: list[int], good: bool
) -> None:
    asked = config(batch_size=batch_size, settings={"data.images.size": size})
    learner = Classification(ImageClassifier(3, 2))
    images = torch.randint(0, 255, (batch_size, 3, *size), dtype=torch.uint8)
    with nullcontext() if good else pytest.raises(ValueError, match="more than 1 value"):
        learner.model(images)
    before = learner.model.features[-2].running_mean.clone()
    losses = learner.losses({"image": images[:1], "label": torch.zeros(1, dtype=torch.int64)})
    losses.mean().backward()  # as the last batch of a pass may be
    assert learner.model.training
    assert torch.equal(before, learner.model.features[-2].running_mean) == (max(size) < LEAST_SIDE)
    if good:
        assert check(asked, [IMAGES]) == "images"
        return
    with pytest.raises(JobFieldError) as refused:
        check(asked, [IMAGES])
    assert [name for name, _ in refused.value.fields] == ["batch_size"]


@pytest.mark.parametrize(("dataset", "kind"), [(RADIO, "radio"), (HDF5, "hdf5"), (IMAGES, "images")])
def test_what_a_kind_has_no_use_for_is_refused(dataset: dict[str, Any], kind: str) -> None:
    given = {
        "settings": {"model.width": 8}, "lr_scheduler": "constant", "dropout_rate": 0.5, "warmup_epochs": 1,
        "early_stop_delta": 0.0, "min_snr_db": 3.0, "max_gdop": 4.0, "max_receivers": 9,
    }  # fmt: skip
    for name, why in UNUSED_FIELDS[kind].items():
        with pytest.raises(ConfigError, match=name) as refused:
            check(config(**{name: given[name]}), [dataset])
        assert why in str(refused.value)
    for name in given.keys() - UNUSED_FIELDS[kind].keys() - {"settings"}:
        check(config(**{name: given[name]}), [dataset])


def test_data_sets_have_to_go_together() -> None:
    other = {**RADIO, "spec": {**RADIO["spec"], "url": "postgresql://db/lab"}}
    own = {**HDF5, "spec": {"path": "/data/x", "named_splits": True}}
    for datasets, given, why in (
        ([RADIO, HDF5], {}, "kinds hdf5, radio"),
        ([RADIO, other], {}, "several databases"),
        ([HDF5, HDF5], {}, "2 data sets of kind hdf5"),
        ([HDF5], {"model_architecture": "triangulation"}, "takes 'operator'"),
        ([HDF5], {"validation_split": 0.0, "early_stop_patience": 0}, "validation_split=0"),
        ([own], {"validation_split": 0.3}, "validation_split=0.3"),
        ([HDF5], {"settings": {"data.root": "/etc"}}, "'data.root' cannot be set"),
        ([HDF5], {"settings": {"model.widht": 64}}, r"Did you mean model\.width\?"),
    ):
        with pytest.raises(ConfigError, match=why):
            check(config(**given), datasets)


def test_every_field_reaches_the_pipeline() -> None:
    found = settings(
        RADIO, batch_size=256, learning_rate=0.01, weight_decay=0.5, num_workers=3, validation_split=0.25,
        preload_to_gpu=False, early_stop_patience=4, max_grad_norm=2.0, accelerator="cpu", seed=9,
        min_snr_db=10.0, max_gdop=5.0, max_receivers=10,
    )  # fmt: skip

    training, data = found.training, found.data
    assert (training.batch_size, training.lr, training.weight_decay, training.grad_clip) == (
        256,
        0.01,
        0.5,
        2.0,
    )
    assert (training.epochs, training.early_stop_patience, training.device, training.seed) == (7, 4, "cpu", 9)
    assert (training.latent_cache_dir, training.run_dir) == ("/caches", "/jobs/1")
    assert training.reserve_bytes == NOTHING_ON_DEVICE
    assert found.precompute.workers == 3
    assert (data.splits, data.seed) == ({"train": 0.75, "val": 0.25}, 9)
    assert data.sql.where == f"dataset_id IN ('{ID}') AND mean_snr_db >= 10.0 AND gdop <= 5.0"
    assert data.sql.columns["receivers"]["list"] == 10  # type: ignore[index,call-overload]
    assert settings(RADIO).training.reserve_bytes is None, "preload_to_gpu: as the plan decides"


def test_simulations_take_further_settings_and_a_name_that_a_folder_can_have() -> None:
    found = settings(HDF5, settings={"model.width": 64, "data.normalize": True, "latent.dim": 8})

    assert (found.model.width, found.data.normalize, found.latent.dim) == (64, True, 8)
    assert found.data.task == "burgers-0d6c2c9e"
    assert found.data.files == "/data/burgers.hdf5"
    renamed = settings({**HDF5, "name": "another"})
    assert renamed.data.task == found.data.task, "the same data under another name is not encoded again"
    odd = settings({**HDF5, "spec": {"path": "/data/Bürgers, 1D/é.hdf5"}})
    assert odd.data.task == "data-0d6c2c9e"
    with pytest.raises(ConfigError, match=r"model\.width"):
        settings(HDF5, settings={"model.width": -1})
    for name in (name for names in SETTINGS.values() for name in names):
        words = ("dir", "root", "file", "checkpoint.", "folder", "dataset", "url", "query")
        assert not any(word in name for word in words)


@pytest.mark.parametrize("where", ["path", "settings"])
def test_nothing_is_filled_in_from_the_environment(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "canary")
    text = "${oc.env:SECRET}"
    dataset = {**HDF5, "spec": {"path": f"/data/{text}"}} if where == "path" else HDF5
    given = {"settings": {"data.preset": text}} if where == "settings" else {}

    with pytest.raises(ConfigError, match="which is refused here") as refused:
        settings(dataset, **given)
    assert "canary" not in str(refused.value)


def test_every_field_is_documented_with_its_default() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "http-api.md").read_text()
    rows = [line.split("|") for line in page.splitlines() if line.startswith("| `")]
    told = {name.strip("` "): cells[2] for cells in rows for name in cells[1].split(",")}

    for name, field in JobConfig.model_fields.items():
        assert name in told
        default = field.default
        if isinstance(default, int | float) and not isinstance(default, bool):
            assert f"{default:g}" in told[name] or str(default) in told[name], name
