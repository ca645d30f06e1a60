from __future__ import annotations

import io
import tarfile
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import stoker
from stoker.errors import ConfigError
from stoker.loader import RecordBatch
from stoker.sources.tar import TarSource
from stoker.transforms import CropImages, Decode
from tests.sources.images.pictures import write_voc

BOX = ("cell", 16, 8, 48, 40)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_voc(tmp_path / "voc", {f"image_{k}": [BOX] for k in range(8)})


def cache_of(root: Path, **settings: object) -> stoker.Cache:
    name = "_".join(settings)
    source = stoker.ImageSource(root, "voc", **settings)  # type: ignore[arg-type]
    return stoker.precompute(source, None, root.parent / "cache", name=name, workers=0)


@pytest.mark.parametrize("fit", ["stretch", "letterbox"])
def test_stored_files_are_decoded_to_the_pixels_that_would_have_been_stored(root: Path, fit: str) -> None:
    size = (24, 40)
    pixels = stoker.Loader(cache_of(root, size=size, fit=fit), 5, shuffle=True)
    files = stoker.Loader(
        cache_of(root, size=size, fit=fit, store="encoded"),
        5,
        transforms=[Decode(size, fit=fit, threads=2)],
        shuffle=True,
    )

    for one, other in zip(pixels, files, strict=True):
        assert torch.equal(one["index"], other["index"])
        assert torch.equal(one["image"], other["image"])
        assert torch.equal(one["boxes"], other["boxes"])


def test_images_of_a_tar_file_are_decoded_and_a_wrong_field_is_explained(root: Path) -> None:
    path = root.parent / "a.tar"
    with tarfile.open(path, "w") as archive:
        for number in range(4):
            image = (root / f"JPEGImages/image_{number}.jpg").read_bytes()
            for name, data in ((f"{number}.jpg", image), (f"{number}.cls", b"1")):
                member = tarfile.TarInfo(name)
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    cache = stoker.precompute(TarSource(path), None, root.parent / "cache", name="tar", workers=0)

    def first(decode: Decode, **more: str) -> RecordBatch:
        return next(iter(stoker.Loader(cache, 4, transforms=[decode], **{"shuffle": True, **more})))

    assert first(Decode((24, 40), field="jpg"))["jpg"].shape == (4, 3, 24, 40)
    with pytest.raises(ConfigError, match=r"no field 'image'.* cls, jpg.*field='jpg'"):
        first(Decode((24, 40)))
    with pytest.raises(ConfigError, match=r"'cls' holds int64 \(4,\).*field='jpg'"):
        first(Decode((24, 40), field="cls"))
    with pytest.raises(ConfigError, match=r"'jpg' holds uint8 .*ragged='pack'"):
        first(Decode((24, 40), field="jpg"), ragged="pack")


def test_threads_that_decode_ask_no_device_for_bytes(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each image would wait for all that a GPU has to do, in a stream that is not the caller's."""
    asked: set[str] = set()
    to_host = torch.Tensor.cpu

    def noted(tensor: torch.Tensor) -> torch.Tensor:
        asked.add(threading.current_thread().name)
        return to_host(tensor)

    cache = cache_of(root, size=(24, 40), store="encoded")
    loader = stoker.Loader(cache, 5, transforms=[Decode((24, 40), threads=2)], shuffle=True)
    monkeypatch.setattr(torch.Tensor, "cpu", noted)

    assert len(list(loader)) == len(loader)
    assert not any("decode" in name for name in asked)


def test_crops_are_random_by_example_and_repeat_with_the_seed(root: Path) -> None:
    cache = cache_of(root, size=24, fit="short")

    def crops(batch: int) -> dict[int, torch.Tensor]:
        loader = stoker.Loader(cache, batch, transforms=[CropImages((16, 16))], seed=3, shuffle=True)
        return {int(n): image for b in loader for n, image in zip(b["index"], b["image"], strict=True)}

    three, four = crops(3), crops(4)

    assert all(torch.equal(three[n], four[n]) for n in range(8))
    assert len({tuple(image.flatten().tolist()) for image in three.values()}) > 1
    assert three[0].shape == (3, 16, 16)


@pytest.mark.parametrize("random", [True, False])
def test_a_crop_waits_for_the_device_once(random: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each number that is read from a GPU waits for all the work that was queued there."""
    images = [torch.randint(0, 256, (24 * 32, 3), dtype=torch.uint8) for _ in range(4)]
    batch = {"image": images, "image_shape": torch.tensor([[24, 32]] * 4, dtype=torch.int32)}
    waits: list[str] = []
    for name in ("tolist", "item", "__bool__", "cpu"):
        told = getattr(torch.Tensor, name)

        def noted(tensor: torch.Tensor, name: str = name, told: Any = told) -> Any:
            waits.append(name)
            return told(tensor)

        monkeypatch.setattr(torch.Tensor, name, noted)

    made = CropImages((16, 16), random=random)(batch, torch.arange(4))

    assert waits == ["tolist"]
    assert made["image"].shape == (4, 3, 16, 16)


@pytest.mark.parametrize("random", [True, False])
@pytest.mark.parametrize("ragged", [True, False])
def test_boxes_move_with_the_crop(root: Path, random: bool, ragged: bool) -> None:
    cache = cache_of(root, size=24, fit="short", reduced=False, labels={"ragged": ragged})

    for batch in stoker.Loader(cache, 4, transforms=[CropImages((20, 20), random=random)], shuffle=True):
        for image, boxes, valid in zip(batch["image"], batch["boxes"], batch["boxes_valid"], strict=True):
            rows, columns = torch.nonzero(image[0] > 127, as_tuple=True)
            bright = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
            assert valid[0]
            assert torch.allclose(torch.stack(bright).float(), boxes[0], atol=1)


def test_a_box_outside_the_crop_is_no_longer_valid(tmp_path: Path) -> None:
    root = write_voc(tmp_path / "voc", {"x": [("a", 0, 0, 4, 4), ("a", 24, 16, 40, 32)]})
    cache = cache_of(root, size=48, fit="short")

    (batch,) = stoker.Loader(cache, 1, transforms=[CropImages((16, 16), random=False)], shuffle=True)

    assert batch["boxes_valid"].tolist() == [[False, True]]
    assert batch["boxes"][0, 1].tolist() == [0, 0, 16, 16]


def test_what_cannot_be_done_is_refused_with_the_cure(root: Path) -> None:
    short, plain = cache_of(root, size=24, fit="short"), cache_of(root, size=(8, 8))

    with pytest.raises(ConfigError, match=r"24 x 32"):
        next(iter(stoker.Loader(short, 2, transforms=[CropImages((25, 25))], shuffle=True)))
    with pytest.raises(ConfigError, match=r"'image' holds uint8 .*leave Decode out"):
        next(iter(stoker.Loader(plain, 2, transforms=[Decode((8, 8))], shuffle=True)))
    with pytest.raises(ConfigError, match="various sizes"):
        Decode((8, 8), fit="short")
