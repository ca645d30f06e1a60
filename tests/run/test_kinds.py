"""`stoker validate|precompute|plan|train` on data that is not HDF5."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stoker.config import Config, load_config
from stoker.encoders.features import FeatureEncoder
from stoker.errors import ConfigError
from stoker.run.context import Run
from stoker.run.plan import plan_config
from stoker.run.precompute import precompute_config
from stoker.run.train import train_config
from stoker.run.validate import validate_config
from tests.encoders.tiny_dinov2 import make_model
from tests.sources.images.pictures import write_list, write_voc


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    """Ten images with boxes, and a file of settings for them."""
    names = [f"image_{k:02d}" for k in range(10)]
    root = write_voc(tmp_path / "cells", {name: [("cell", 16, 8, 48, 41)] for name in names})
    write_list(root, "train", names[:6])
    write_list(root, "val", names[6:])
    path = tmp_path / "images.yaml"
    path.write_text(
        f"data: {{kind: images, root: {root}, images: {{annotations: voc, size: [24, 32]}}}}\n"
        f"training: {{latent_cache_dir: {tmp_path}/cache, run_dir: {tmp_path}/run, device: cpu}}\n"
        "precompute: {workers: 0}\n"
    )
    return path


def loaded(path: Path, *overrides: str) -> Config:
    return load_config(path, list(overrides))


def test_images_are_cached_by_split_under_the_folders_name_and_boxes_keep_their_precision(
    settings: Path,
) -> None:
    caches = precompute_config(Run(loaded(settings))).caches

    assert [*Run(loaded(settings)).tasks] == ["cells"]
    assert [(cache.name, cache.count) for cache in caches] == [("cells_train", 6), ("cells_val", 4)]
    assert caches[0].cache[0]["boxes"].dtype == torch.float32
    assert caches[0].cache[0]["boxes"][0].tolist() == [8, 4, 24, 20.5]
    assert precompute_config(Run(loaded(settings))).caches[0].encoded == 0


def test_images_become_features_of_a_local_model(settings: Path, tmp_path: Path) -> None:
    """As the encoder itself makes them; nothing is asked of a network, which would fail here."""
    pytest.importorskip("transformers", reason="pip install 'stoker[features]'")
    folder = make_model(tmp_path / "model")
    text = settings.read_text().replace("[24, 32]", "[28, 42]").replace("{workers", "{keep: image, workers")
    settings.write_text(f"{text}encoder: {{kind: features, folder: {folder}, pooling: mean}}\n")

    first = precompute_config(Run(loaded(settings))).caches

    encoder = FeatureEncoder(folder, "mean")
    for cache in (one.cache for one in first):
        images = torch.stack([cache[n]["image"] for n in range(len(cache))])
        found = torch.stack([cache[n]["features"] for n in range(len(cache))])
        torch.testing.assert_close(found, encoder.encode({"image": images})["features"], rtol=0, atol=1e-5)
        assert "boxes" in cache.schema
    assert [one.encoded for one in precompute_config(Run(loaded(settings))).caches] == [0, 0]
    other = precompute_config(Run(loaded(settings, "encoder.pooling=tokens"))).caches[0]
    assert other.cache[0]["features"].shape == (7, 16)
    with pytest.raises(ConfigError, match=r"encoder\.folder.* a local folder"):
        precompute_config(Run(loaded(settings, "encoder.folder=null")))


def test_a_storage_dtype_can_be_given_for_all_or_for_one_field(settings: Path) -> None:
    every = loaded(settings, "training.latent_cache_dtype=float16")
    one = loaded(settings, "training.latent_cache_dtype={boxes: float16}")

    for config in (every, one):
        assert precompute_config(Run(config)).caches[0].cache[0]["boxes"].dtype == torch.float16


def test_plan_counts_images_and_validate_passes(settings: Path) -> None:
    precompute_config(Run(loaded(settings)))

    assert plan_config(Run(loaded(settings))).records == 6
    checked = validate_config(settings)
    assert checked.exit_code == 0
    (windows,) = [row for row in checked.rows if row.check == "target"]
    assert (windows.status, "stoker.Loader" in windows.detail) == ("warn", True)


def test_train_says_that_there_is_no_operator_before_it_encodes(settings: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none with time.*stoker precompute.*stoker\.Loader"):
        train_config(Run(loaded(settings)))

    assert not (tmp_path / "cache" / "cells_train").exists()


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("data.preset=well", "data.preset is given, but data.kind=images has no use.*data.kind=hdf5"),
        ("data.files=a.h5", "data.files is given"),
        ("data.kind=hdf5", "data.images is given, but data.kind=hdf5 has no use.*data.kind=images"),
        ("data.images.fit=crop", 'data.images.fit is "crop". Expected stretch, letterbox or short'),
        ("data.images.sise=3", "data.images.sise is not a setting. Did you mean data.images.size"),
    ],
)
def test_settings_of_another_kind_are_refused(settings: Path, override: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        loaded(settings, override)


def test_hdf5_keeps_its_defaults() -> None:
    config = load_config(None, [])

    assert (config.encoder.kind, config.training.latent_cache_dtype) == ("grid", "float16")


def test_settings_in_force_read_back_as_they_are(settings: Path) -> None:
    config = loaded(settings)

    again = settings.with_name("again.yaml")
    again.write_text(config.to_yaml())

    assert loaded(again).to_dict() == config.to_dict()
