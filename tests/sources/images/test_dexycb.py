from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image

import stoker
from stoker.errors import ConfigError, DecodeError
from stoker.testing import check_source, write_dexycb

FIELDS = {
    "image", "original_size", "hand_joints", "hand_joints_2d", "hand_joints_valid", "has_hand", "mano_pose",
    "mano_shape", "mano_side", "object_poses", "object_ids", "objects_valid", "num_objects", "grasped_object",
    "camera_intrinsics", "depth", "segmentation",
}  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dexycb(tmp_path_factory.mktemp("dexycb"), subjects=3, sequences=5, cameras=2, frames=2)


def source(root: Path, **more: object) -> stoker.ImageSource:
    return stoker.ImageSource(root, "dexycb", size=(36, 40), **more)  # type: ignore[arg-type]


def test_every_field_is_as_the_files_have_it(root: Path) -> None:
    everything = source(root, labels={"extras": ["depth", "segmentation"]})
    number = everything.keys().index("20200709-subject-02/20200709_000002/839512060362/color_000001")
    folder = root / "20200709-subject-02/20200709_000002/839512060362"
    labels = np.load(folder / "labels_000001.npz")

    sample = everything.read(number)

    assert sample.keys() == everything.schema().keys() == FIELDS
    assert np.array_equal(sample["hand_joints"], labels["joint_3d"][0])
    assert np.array_equal(sample["mano_pose"], labels["pose_m"][0])
    assert sample["hand_joints_valid"].all()
    assert bool(sample["has_hand"])
    assert np.array_equal(sample["object_poses"][:4], labels["pose_y"])
    assert sample["object_ids"].tolist() == [3, 4, 5, 6, 0, 0, 0, 0, 0, 0]
    assert sample["objects_valid"].tolist() == [True] * 4 + [False] * 6
    assert (int(sample["num_objects"]), int(sample["grasped_object"]), int(sample["mano_side"])) == (4, 2, 1)
    betas = yaml.safe_load((root / "calibration/mano_20200709_000001_right/mano.yml").read_text())["betas"]
    assert sample["mano_shape"].tolist() == np.float32(betas).tolist()
    assert sample["original_size"].tolist() == [48, 64]
    depth = np.asarray(Image.open(folder / "aligned_depth_to_color_000001.png"))
    for name, wanted in (("depth", depth), ("segmentation", labels["seg"])):
        rows, columns = np.arange(36) * 48 // 36, np.arange(40) * 64 // 40
        near = [wanted[rows + down][:, columns + right] for down in (0, 1) for right in (0, 1)]
        assert np.any([sample[name] == one for one in near], axis=0).all()
    whole = stoker.ImageSource(root, "dexycb", (48, 64), labels={"extras": ["depth", "segmentation"]})
    plain = whole.read(number)
    assert np.array_equal(plain["depth"], depth)
    assert np.array_equal(plain["segmentation"], labels["seg"])
    assert np.allclose(plain["hand_joints_2d"], labels["joint_2d"][0], atol=1e-4)
    color = np.asarray(Image.open(folder / "color_000001.jpg")).transpose(2, 0, 1)
    assert np.array_equal(plain["image"], color)
    check_source(everything)


def test_the_camera_still_projects_joints_to_their_pixels(root: Path) -> None:
    for number in (1, 3, 25):
        sample = source(root).read(number)
        flat = sample["hand_joints"] @ sample["camera_intrinsics"].T

        assert np.allclose(flat[:, :2] / flat[:, 2:], sample["hand_joints_2d"], atol=1e-3)


def test_no_hand_is_a_mask_and_never_minus_one(root: Path) -> None:
    sample = source(root).read(0)

    assert not sample["has_hand"]
    assert not sample["hand_joints_valid"].any()
    for name in ("hand_joints", "hand_joints_2d", "mano_pose"):
        assert not sample[name].any()


@pytest.mark.parametrize(
    ("setup", "counts"),
    [
        ("s0", {"train": 48, "val": 8, "test": 4}),
        ("s1", {"train": 60}),
        ("s2", {"train": 60}),
    ],
)
def test_setups_divide_the_samples(root: Path, setup: str, counts: dict[str, int]) -> None:
    labels = {"setup": setup}

    found = {split: source(root, split=split, labels=labels).keys() for split in counts}

    assert {split: len(keys) for split, keys in found.items()} == counts
    assert sum(counts.values()) == len({key for keys in found.values() for key in keys})


def test_dtypes_survive_the_cache(root: Path, tmp_path: Path) -> None:
    """A cache of floats that swallowed masks and numbers is what this replaces."""
    own = source(root, max_samples=6, labels={"extras": ["depth", "segmentation"]})

    cache = stoker.precompute(own, None, tmp_path, name="c", workers=0)

    (batch,) = stoker.Loader(cache, 6, shuffle=False)
    assert batch.keys() == FIELDS | {"index"}
    for name, field in own.schema().items():
        assert str(batch[name].dtype).removeprefix("torch.") == field.dtype, name
        assert np.array_equal(batch[name].numpy(), np.stack([own.read(n)[name] for n in range(6)])), name


def test_labels_that_contradict_each_other_are_named(tmp_path: Path) -> None:
    root = write_dexycb(tmp_path, subjects=1, sequences=1, cameras=1)
    meta = root / "20200709-subject-01/20200709_000000/meta.yml"
    meta.write_text(meta.read_text().replace("ycb_ids:\n- 1\n", "ycb_ids:\n"))

    with pytest.raises(DecodeError, match=r"pose_y is \(2, 3, 4\), its sequence names 1 objects"):
        source(root).read(0)


def test_unknown_settings_are_refused(root: Path) -> None:
    with pytest.raises(ConfigError, match="s0, s1, s2, s3"):
        source(root, labels={"setup": "s4"})
    with pytest.raises(ConfigError, match="images of one size"):
        stoker.ImageSource(root, "dexycb", 32, fit="short", labels={"extras": ["depth"]})
