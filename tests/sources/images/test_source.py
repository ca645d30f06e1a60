from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import stoker
from stoker.errors import ConfigError, DecodeError, SourceError, SplitError
from stoker.precompute.worker import ChangedError, ChangeGuard, digested_files
from stoker.store import make_recipe
from stoker.testing import check_source
from tests.sources.images.pictures import encoded, square, write_coco, write_list, write_voc

BOX = ("cell", 16, 8, 48, 40)


@pytest.fixture
def voc(tmp_path: Path) -> Path:
    """Ten images, one white box each; two classes."""
    names = {f"image_{k:02d}": [BOX, ("dot", 0, 0, 8, 8)][: 1 + k % 2] for k in range(10)}
    root = write_voc(tmp_path / "voc", names)
    write_list(root, "train", list(names)[:6])
    write_list(root, "val", list(names)[6:8])
    write_list(root, "test", list(names)[8:])
    return root


def source(root: Path, *args: object, size: object = (24, 32), **more: object) -> stoker.ImageSource:
    return stoker.ImageSource(root, *args, size=size, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"fit": "letterbox", "size": (30, 30)},
        {"fit": "short", "size": 20},
        {"store": "encoded"},
        {"labels": {"ragged": True}},
        {"color": "L", "max_samples": 4},
    ],
    ids=lambda more: " ".join(more) or "plain",
)
def test_it_keeps_the_promises_of_a_source(voc: Path, more: dict) -> None:
    check_source(source(voc, "voc", **more))


@pytest.mark.parametrize(
    ("fit", "size"),
    [("stretch", (36, 40)), ("letterbox", (36, 40)), ("letterbox", (36, 80)), ("short", 36)],
    ids=["stretch", "bars-above", "bars-beside", "short"],
)
def test_a_box_lies_where_its_pixels_went(voc: Path, fit: str, size: object) -> None:
    """The box is drawn in white: what is bright in the stored image must be what the stored box says."""
    sample = source(voc, "voc", size=size, fit=fit, reduced=False).read(0)
    image = sample["image"]
    if fit == "short":
        image = image.T.reshape(3, *sample["image_shape"])

    rows, columns = np.nonzero(image[0] > 127)

    x0, y0, x1, y1 = sample["boxes"][0]
    assert np.allclose(
        [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1], [x0, y0, x1, y1], atol=1
    )
    assert sample["labels"].tolist() == [0, 0]
    assert (sample["boxes_valid"].tolist(), int(sample["num_objects"])) == ([True, False], 1)
    assert sample["original_size"].tolist() == [48, 64]


def test_splits_come_from_the_lists_and_test_is_test(voc: Path) -> None:
    found = {split: source(voc, "voc", split=split).keys() for split in ("train", "valid", "test")}

    assert {split: len(keys) for split, keys in found.items()} == {"train": 6, "valid": 2, "test": 2}
    assert found["test"] == ["image_08", "image_09"]
    with pytest.raises(SplitError, match="train, val, test"):
        len(source(voc, "voc", split="holdout"))
    with pytest.raises(SplitError, match="Leave splits out"):
        len(source(voc, "voc", split="train", splits={"train": 0.5, "val": 0.5}))


def test_without_lists_fractions_are_cut_over_names(voc: Path) -> None:
    shutil.rmtree(voc / "ImageSets")

    parts = [set(source(voc, "voc", split=split, seed=5).keys()) for split in ("train", "val", "test")]

    assert sum(len(part) for part in parts) == 10
    assert len(set.union(*parts)) == 10


def test_a_drawn_subset_is_seeded_and_spread(tmp_path: Path) -> None:
    for k in range(60):
        folder = tmp_path / f"class{k // 20}"
        folder.mkdir(exist_ok=True)
        (folder / f"{k}.png").write_bytes(encoded(square((8, 8), (0, 0, 4, 4))))

    def drawn(seed: int, count: int = 15) -> list[str]:
        return list(source(tmp_path, "folder", max_samples=count, seed=seed).keys())

    assert drawn(0) == drawn(0) != drawn(1)
    assert set(drawn(0)) < set(drawn(0, 30))
    assert len(Counter(key.split("/")[0] for key in drawn(0))) == 3


def test_folders_name_classes_and_splits(tmp_path: Path) -> None:
    for split in ("train", "test"):
        for name in ("cat", "dog"):
            (tmp_path / split / name).mkdir(parents=True)
            (tmp_path / split / name / "a.png").write_bytes(encoded(square((8, 8), (0, 0, 4, 4))))

    test = source(tmp_path, "folder", split="test")

    assert test.classes == ("cat", "dog")
    assert test.keys() == ["test/cat/a", "test/dog/a"]
    assert [int(test.read(n)["label"]) for n in range(2)] == [0, 1]
    with pytest.raises(SplitError):
        len(source(tmp_path, "folder", split="val"))


def test_coco_boxes_keypoints_and_categories(tmp_path: Path) -> None:
    train = source(write_coco(tmp_path, {"train": 4, "val": 2}), "coco", split="train")

    last = train.read(3)

    assert (len(train), train.classes) == (4, ("cat", "dog"))
    assert last["labels"][:3].tolist() == [0, 1, 0]
    assert last["boxes"][0].tolist() == [4, 4, 12, 8]
    assert last["crowd"].tolist() == [False, False, True]
    assert last["keypoints"][0].tolist() == [[4.75, 5.75], [0, 0]]
    assert last["keypoints_valid"][0].tolist() == [True, False]
    assert int(last["image_id"]) == 103
    check_source(train)


def test_coco_boxes_without_keypoints_as_in_any_instances_file(tmp_path: Path) -> None:
    path = write_coco(tmp_path, {"train": 4}) / "annotations" / "instances_train2017.json"
    content = json.loads(path.read_text())
    for entry in (*content["annotations"], *content["categories"]):
        entry.pop("keypoints", None)
    path.write_text(json.dumps(content))
    train = source(tmp_path, "coco", split="train")

    assert [int(train.read(n)["num_objects"]) for n in range(4)] == [0, 1, 2, 3]
    last = train.read(3)
    assert last["boxes"].tolist() == [[4, 4, 12, 8]] * 3
    assert last["labels"].tolist() == [0, 1, 0]
    assert "keypoints" not in last
    check_source(train)


def test_a_longer_annotation_file_leaves_the_images_before_it_alone(tmp_path: Path) -> None:
    """Else one more image would encode all of them again."""
    root = write_coco(tmp_path, {"train": 3})
    before = source(root, "coco", labels={"max_objects": 5}).identity()
    path = root / "annotations/instances_train2017.json"
    path.write_text(path.read_text().replace("{", "{ ", 1))

    assert source(root, "coco", labels={"max_objects": 5}).identity() == before


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('"iscrowd": 0', '"iscrowd": 0, "iscrowd": 1', "key 'iscrowd' comes twice in one object"),
        ('"id": 101, "file_name"', '"id": 100, "file_name"', r"gives id 100 to train2017/\d+100.jpg and to"),
        ('{"id": 3, "name": "cat"}', '{"id": 7, "name": "cat"}', "category 7 'cat', which is 'dog' already"),
    ],
)
def test_what_coco_names_twice_is_refused(tmp_path: Path, old: str, new: str, says: str) -> None:
    """Python's JSON keeps the last of two; objects of two images with one id would all be the first one's."""
    root = write_coco(tmp_path, {"train": 3})
    path = root / "annotations/instances_train2017.json"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))

    with pytest.raises(SourceError, match=says):
        len(source(root, "coco", split="train"))


@pytest.mark.parametrize(
    ("spoil", "error", "says"),
    [
        (lambda root: (root / "JPEGImages/image_00.jpg").write_bytes(b""), DecodeError, "empty"),
        (lambda root: (root / "JPEGImages/image_00.jpg").write_bytes(b"<html>"), DecodeError, "not an image"),
        (lambda root: (root / "JPEGImages/image_00.jpg").unlink(), SourceError, "is missing"),
        (lambda root: pipe(root / "JPEGImages/image_00.jpg"), SourceError, "regular file"),
        (lambda root: (root / "Annotations/image_00.xml").unlink(), SourceError, "xml is missing"),
        (lambda root: (root / "Annotations/image_00.xml").write_text("<a>"), DecodeError, "not XML"),
        (lambda root: edit(root, "48", "x"), DecodeError, "object 0 lacks"),
        (lambda root: edit(root, "<xmin>", "<xmin>3</xmin><xmin>"), DecodeError, "has xmin more than once"),
        (lambda root: edit(root, "<name>", "<name>cat</name><name>"), DecodeError, "has name more than once"),
        (lambda root: edit(root, "<width>64", "<width>65"), DecodeError, "of 65 x 48 pixels"),
        (lambda root: edit(root, "<annotation>", "<!DOCTYPE a [<!ENTITY b 'c'>]><annotation>"), DecodeError,
         "entities"),
    ],
)  # fmt: skip
def test_a_damaged_sample_is_an_error_with_its_name(voc: Path, spoil, error, says: str) -> None:
    spoil(voc)

    with pytest.raises(error, match=rf"(?s)image_00.*{says}|{says}.*image_00"):
        source(voc, "voc", labels={"classes": ["cell", "dot"], "max_objects": 2}).read(0)


@pytest.mark.parametrize("target", ["nowhere.png", "link.png"])
@pytest.mark.parametrize("repair", ["remove", "replace"])
def test_a_link_to_nothing_says_so_and_its_hint_works(tmp_path: Path, target: str, repair: str) -> None:
    whole = encoded(square((24, 32), (0, 0, 8, 8)))
    (tmp_path / "a.png").write_bytes(whole)
    link = tmp_path / "link.png"
    link.symlink_to(target)

    with pytest.raises(SourceError, match=r"link\.png .*link.*Remove the link, or put the file") as caught:
        source(tmp_path).read(1)

    assert target in str(caught.value).replace(str(link), "")
    assert caught.value.__cause__ is None, "it does not pass by waiting"
    link.unlink()
    if repair == "replace":
        link.write_bytes(whole)
    repaired = source(tmp_path)
    assert [repaired.read(number)["image"].shape for number in range(len(repaired))] == [(3, 24, 32)] * (
        1 + (repair == "replace")
    )


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def edit(root: Path, old: str, new: str) -> None:
    path = root / "Annotations/image_00.xml"
    path.write_text(path.read_text().replace(old, new))


def test_boxes_are_cut_at_the_image_and_those_without_area_are_marked(tmp_path: Path) -> None:
    boxes = [("a", -10, 8, 20, 30), ("a", 70, 8, 90, 20), ("a", 5, 5, 5, 5)]
    root = write_voc(tmp_path, {"x": boxes})

    sample = source(root, "voc", size=(48, 64)).read(0)

    assert sample["boxes"][0].tolist() == [0, 8, 20, 30]
    assert sample["boxes_valid"].tolist() == [True, False, False]
    assert int(sample["num_objects"]) == 3
    with pytest.raises(DecodeError, match=r"object 1 \(70, 8, 90, 20\) has no area inside.*64 x 48"):
        source(root, "voc", labels={"strict": True}).read(0)


def test_more_objects_than_room_is_an_error_with_the_cure(voc: Path) -> None:
    with pytest.raises(DecodeError, match="max_objects=2"):
        source(voc, "voc", labels={"max_objects": 1}).read(1)


def test_bad_images_are_set_aside_by_name_and_the_rest_is_stored(voc: Path, tmp_path: Path) -> None:
    (voc / "JPEGImages/image_02.jpg").write_bytes((voc / "JPEGImages/image_02.jpg").read_bytes()[:300])
    (voc / "JPEGImages/image_05.jpg").unlink()

    cache = stoker.precompute(
        source(voc, "voc"), None, tmp_path / "cache", name="c", workers=1, max_quarantined=0.5
    )

    aside = cache.quarantined
    assert len(cache) == 8
    assert {number: failure.stage for number, failure in aside.items()} in (
        {2: "decode", 5: "read"},
        {2: "decode", 5: "open"},
    )
    assert "image_02.jpg" in aside[2].error
    assert "image_05.jpg" in aside[5].error
    assert cache[3]["image"].dtype is not None


def test_the_recipe_names_rules_decoder_and_content(voc: Path) -> None:
    first = make_recipe(source(voc, "voc"), None).fingerprint
    others = [
        make_recipe(source(voc, "voc", **more), None).fingerprint
        for more in ({"size": (24, 33)}, {"fit": "letterbox"}, {"reduced": False}, {"store": "encoded"},
                     {"turned": False}, {"filter": "box"}, {"labels": {"classes": ["dot", "cell"]}})
    ]  # fmt: skip
    moved = shutil.copytree(voc, voc.parent / "elsewhere")

    assert len({first, *others}) == 8
    assert make_recipe(source(moved, "voc"), None).fingerprint == first
    edit(moved, "<difficult>0", "<difficult>1")
    assert make_recipe(source(moved, "voc"), None).fingerprint != first
    assert "libjpeg" in str(source(voc, "voc").identity().settings["decoder"])


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"annotations": "yolo"}, "annotations='yolo' is unknown.*'voc'"),
        ({"size": 224}, r"size=224.*\(height, width\)"),
        ({"size": (0, 5)}, r"size=\(0, 5\)"),
        ({"labels": {"clases": []}}, "'clases'.*classes"),
        ({"labels": {"classes": ["a"]}}, "classes=, which annotations=None has no use for"),
        ({"max_samples": 0}, "max_samples is 0"),
        ({"max_samples": 2.5}, "max_samples is 2.5. Expected a whole number"),
        ({"labels": 3}, r"labels is 3. Expected Labels\(...\), or some of classes"),
        ({"annotations": "folder", "labels": {"classes": "cat"}}, "classes='cat'. Expected a list of names"),
        ({"annotations": "voc", "labels": {"max_objects": 2.5}}, "max_objects is 2.5"),
        ({"split": "train", "splits": 3}, "splits is 3. Expected fractions"),
    ],
)
def test_settings_that_make_no_sense_are_refused(tmp_path: Path, more: dict, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        stoker.ImageSource(tmp_path, **more)


def test_an_empty_folder_says_what_images_end_in(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"holds no image.*\.jpg"):
        len(source(tmp_path))


def test_without_pillow_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.sources.images.find_spec", lambda name: None)

    with pytest.raises(ConfigError, match=r"stoker\[images\]"):
        source(tmp_path)


def test_an_image_that_changes_after_it_was_digested_ends_the_run(voc: Path, tmp_path: Path) -> None:
    """Its own file is looked at after each read, however many others its part has."""
    own = source(voc, "voc")
    recipe = make_recipe(own, None)
    reads = ChangeGuard(own, digested_files(recipe.refs, recipe.files), [0])
    reads.read(3)

    path = voc / "JPEGImages/image_07.jpg"
    path.write_bytes(path.read_bytes() + b"more")

    reads.read(6)
    with pytest.raises(ChangedError, match=r"image_07\.jpg changed while it was encoded"):
        reads.read(7)
