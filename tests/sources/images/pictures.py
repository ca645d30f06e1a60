"""Small images in all layouts, made on the spot."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

Box = tuple[str, float, float, float, float]


def square(size: tuple[int, int], box: Sequence[float]) -> Image.Image:
    """A black image of (height, width) with a white rectangle (x0, y0, x1, y1)."""
    pixels = np.zeros((*size, 3), np.uint8)
    x0, y0, x1, y1 = (round(edge) for edge in box)
    pixels[y0:y1, x0:x1] = 255
    return Image.fromarray(pixels)


def encoded(image: Image.Image, form: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def write_voc(root: Path, images: Mapping[str, Sequence[Box]], size: tuple[int, int] = (48, 64)) -> Path:
    """Images with white boxes on black, and their annotations."""
    for folder in ("JPEGImages", "Annotations", "ImageSets/Main"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    for name, boxes in images.items():
        inner = boxes[0][1:] if boxes else (0, 0, 0, 0)
        square(size, inner).save(root / "JPEGImages" / f"{name}.jpg", quality=95)
        objects = "".join(
            f"<object><name>{label}</name><difficult>0</difficult><bndbox><xmin>{x0}</xmin><ymin>{y0}</ymin>"
            f"<xmax>{x1}</xmax><ymax>{y1}</ymax></bndbox></object>"
            for label, x0, y0, x1, y1 in boxes
        )
        stated = f"<size><width>{size[1]}</width><height>{size[0]}</height></size>"
        text = f"<annotation>{stated}{objects}</annotation>"
        (root / "Annotations" / f"{name}.xml").write_text(text)
    return root


def write_list(root: Path, split: str, names: Sequence[str]) -> None:
    (root / "ImageSets/Main" / f"{split}.txt").write_text("\n".join(names) + "\n")


def write_coco(root: Path, splits: Mapping[str, int], size: tuple[int, int] = (48, 64)) -> Path:
    """`count` images for each split, image k with k objects, the first with keypoints."""
    (root / "annotations").mkdir(parents=True)
    number = 100
    for split, count in splits.items():
        folder = root / f"{split}2017"
        folder.mkdir()
        images, objects = [], []
        for k in range(count):
            square(size, (8, 8, 24, 16)).save(folder / f"{number:012d}.jpg", quality=95)
            images.append(
                {"id": number, "file_name": f"{number:012d}.jpg", "height": size[0], "width": size[1]}
            )
            for j in range(k):
                points = [10, 12, 2, 20, 14, 0] if j == 0 else [0] * 6
                objects.append(
                    {
                        "id": 1000 * number + j,
                        "image_id": number,
                        "category_id": 7 if j % 2 else 3,
                        "bbox": [8, 8, 16, 8],
                        "iscrowd": int(j == 2),
                        "keypoints": points,
                    }
                )
            number += 1
        categories = [{"id": 7, "name": "dog", "keypoints": ["nose", "tail"]}, {"id": 3, "name": "cat"}]
        content = {"images": images, "annotations": objects, "categories": categories}
        (root / "annotations" / f"instances_{split}2017.json").write_text(json.dumps(content))
    return root
