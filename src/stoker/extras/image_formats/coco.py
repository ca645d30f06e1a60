"""COCO: one JSON file with the boxes and keypoints of all images.

`annotations/*.json`, one for each split (`instances_train2017.json`) or a single one; images are in a
folder of the split's name (`train2017`), in `images/<split>`, in `images`, or at the root. Segmentations are
not read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from stoker.errors import DecodeError, SourceError, arg
from stoker.runtime.jsonio import parse_json
from stoker.schema import Field, Json, Sample, Schema, digest_json
from stoker.sources.files import canonical_split, natural_key
from stoker.sources.image_geometry import Fit, ObjectRules, Objects, object_fields, object_schema
from stoker.sources.images import Entry, Listing, read_file, require_folder
from stoker.sources.splits import DEFAULT_SPLITS

MAX_JSON_BYTES = 1 << 32
_WORD = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Image:
    """One image as the file has it."""

    number: int
    size: tuple[int, int] | None
    objects: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Annotations:
    """All annotation files, read."""

    listing: Listing
    images: Mapping[str, _Image]
    """By key."""
    categories: tuple[tuple[int, str], ...]
    """(id, name) in the order of their ids."""
    rules: ObjectRules


class Coco:
    """The layout of COCO.

    Args:
        root: The folder with `annotations`.
        classes: Names in the order of their numbers; None: all categories, in the order of their ids.
        rules: How objects become fields; with `limit` 0 there is room for as many as the fullest image has.
    """

    def __init__(self, root: Path, classes: Sequence[str] | None, rules: ObjectRules) -> None:
        self._root = root
        self._wanted = None if classes is None else tuple(classes)
        self._rules = rules
        self._kept: _Annotations | None = None

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, in the order of their numbers."""
        return self._wanted or tuple(name for _, name in self._read().categories)

    def listing(self) -> Listing:
        """See `Catalog`."""
        return self._read().listing

    def schema(self) -> Schema:
        """Return boxes, labels, `crowd`, keypoints where there are some, and `image_id`."""
        return {**object_schema(self._read().rules), "image_id": Field(shape=(), dtype="int64")}

    def labels(self, entry: Entry, fit: Fit) -> Sample:
        """Return the objects of one image."""
        read = self._read()
        image, where = read.images[entry.key], f"{entry.image} in the annotations of {self._root}"
        if image.size is not None and image.size != fit.before:
            raise DecodeError(
                f"{where} has {image.size[1]} x {image.size[0]} pixels, the file {fit.before[1]} x "
                f"{fit.before[0]} as shown",
                hint="Fix the entry; if it was drawn before EXIF turned the image, give "
                f"{arg('turned', False)}",
            )
        objects = self._objects(image, read, where)
        fields = object_fields(objects, fit, read.rules, where=where)
        return {**fields, "image_id": np.asarray(image.number, dtype=np.int64)}

    def files(self, entry: Entry) -> Iterable[str]:
        """None: `digest` has the objects of each image, so that a longer file leaves other images alone."""
        return ()

    def digest(self, entries: Sequence[Entry]) -> str | None:
        """Return the digest of all annotations of these images."""
        images = self._read().images
        told = [[e.key, images[e.key].number, images[e.key].size, *images[e.key].objects] for e in entries]
        return digest_json(told)

    def settings(self) -> dict[str, Json]:
        """Return classes, keypoints and room for objects."""
        rules = self._read().rules
        return {
            "classes": list(self.classes),
            "keypoints": rules.keypoints,
            "max_objects": rules.limit,
            "strict": rules.strict,
        }

    def _objects(self, image: _Image, read: _Annotations, where: str) -> Objects:
        names, classes = dict(read.categories), self.classes
        count = read.rules.keypoints
        boxes: list[list[float]] = []
        labels: list[int] = []
        points: list[list[float]] = []
        for place, entry in enumerate(image.objects):
            box, name = entry.get("bbox"), names.get(cast("int", entry.get("category_id")))
            if name is None or not _numbers(box, 4):
                raise DecodeError(
                    f"{where}: object {place} lacks a known category_id or a bbox of four numbers"
                )
            if name not in classes:
                raise DecodeError(
                    f"{where} names {name!r}, which is not among {arg('classes', list(classes))}",
                    hint="Add it",
                )
            left, top, width, height = cast("list[float]", box)
            boxes.append([left, top, left + width, top + height])
            labels.append(classes.index(name))
            flat = entry.get("keypoints", [0] * 3 * count)
            if not _numbers(flat, 3 * count):
                raise DecodeError(f"{where}: object {place} has other keypoints than {count} of x, y, v")
            points.append(cast("list[float]", flat))
        table = np.array(points, dtype=np.float64).reshape(len(points), count, 3)
        return Objects(
            boxes=np.array(boxes, dtype=np.float64).reshape(-1, 4),
            labels=np.array(labels, dtype=np.int64),
            flags=np.array([bool(entry.get("iscrowd")) for entry in image.objects], dtype=np.bool_),
            points=table[..., :2],
            labelled=table[..., 2] > 0,
        )

    def _read(self) -> _Annotations:
        if self._kept is None:
            self._kept = self._loaded()
        return self._kept

    def _loaded(self) -> _Annotations:
        folder = require_folder(
            self._root / "annotations", "a folder in COCO's layout with annotations/*.json"
        )
        files = sorted(folder.glob("*.json"), key=lambda path: natural_key(path.name))
        if not files:
            raise SourceError(f"{folder} holds no JSON file", hint="Put the annotations there")
        images: dict[str, _Image] = {}
        categories: dict[int, str] = {}
        splits: dict[str, list[Entry]] = {}
        every: list[Entry] = []
        keypoints = 0
        for path in files:
            content = _load(path)
            named = _split_of(path)
            entries = _entries(content, path, self._folder_of(path, content), images)
            every += entries
            if named is not None:
                if named in splits:
                    raise SourceError(
                        f"{folder} has two files for {named}, {path.name} one of them", hint="Keep one"
                    )
                splits[named] = entries
            for category in content["categories"]:
                number, name = int(category["id"]), str(category["name"])
                if categories.setdefault(number, name) != name:
                    raise SourceError(
                        f"{path} calls category {number} {name!r}, which is {categories[number]!r} already",
                        hint="Give each id one name, in all files",
                    )
                keypoints = max(keypoints, len(category.get("keypoints", ())))
        if splits and sum(map(len, splits.values())) < len(every):
            raise SourceError(
                f"{folder} has files for {', '.join(splits)} and others", hint="Keep those of one kind"
            )
        most = max((len(image.objects) for image in images.values()), default=0)
        room = max(1, most) if self._rules.limit == 0 else self._rules.limit
        return _Annotations(
            listing=Listing(every=sorted(every, key=lambda e: natural_key(e.key)), splits=splits),
            images=images,
            categories=tuple(sorted(categories.items())),
            rules=replace(self._rules, limit=room, keypoints=keypoints),
        )

    def _folder_of(self, path: Path, content: Mapping[str, Any]) -> str:
        """Return where the images of one annotation file are, relative to the root."""
        first = next((str(image["file_name"]) for image in content["images"]), "")
        stem = path.stem.rpartition("_")[2]
        tried = (stem, f"images/{stem}", "images", "")
        found = next((folder for folder in tried if (self._root / folder / first).is_file()), "")
        return f"{found}/" if found else ""


def _entries(content: Mapping[str, Any], path: Path, folder: str, images: dict[str, _Image]) -> list[Entry]:
    """Return the images of one file, which are added to `images`."""
    objects: dict[int, list[Mapping[str, Any]]] = {}
    for entry in content["annotations"]:
        objects.setdefault(int(entry["image_id"]), []).append(_kept(entry))
    found: list[Entry] = []
    numbers: dict[int, str] = {}
    for image in content["images"]:
        name, number = f"{folder}{image['file_name']}", int(image["id"])
        if number in numbers:
            raise SourceError(
                f"{path} gives id {number} to {numbers[number]} and to {name}, so it is unclear which of "
                "them its objects belong to",
                hint="Give each image an id of its own",
            )
        numbers[number] = name
        key = name.rpartition(".")[0]
        if key in images:
            raise SourceError(f"{path} lists {name}, which is listed already", hint="Name each image once")
        height, width = image.get("height"), image.get("width")
        images[key] = _Image(
            number=number,
            size=(int(height), int(width)) if height and width else None,
            objects=tuple(objects.pop(number, ())),
        )
        found.append(Entry(key=key, image=name))
    if objects:
        lost = next(iter(objects))
        raise SourceError(f"{path} has objects of image {lost}, which it does not list", hint="Fix the file")
    return sorted(found, key=lambda entry: natural_key(entry.key))


def _kept(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    return {k: entry[k] for k in ("bbox", "category_id", "iscrowd", "keypoints") if k in entry}


def _load(path: Path) -> Mapping[str, Any]:
    """Read one annotation file.

    Raises:
        SourceError: It cannot be read, or is not of COCO's form: all of its images would be without labels.
    """
    try:
        content: Any = parse_json(read_file(path, MAX_JSON_BYTES))
        lists = [content["images"], content["annotations"], content["categories"]]
        [[entry["id"] for entry in some] for some in (lists[0], lists[2])]
        [entry["image_id"] for entry in lists[1]]
        [entry["file_name"] for entry in lists[0]]
        [entry["name"] for entry in lists[2]]
    except SourceError:
        raise
    except (ValueError, TypeError, KeyError) as error:
        raise SourceError(
            f"{path} is not in COCO's form ({type(error).__name__}: {error})",
            hint="Expected JSON with images, annotations and categories",
        ) from error
    return cast("Mapping[str, Any]", content)


def _split_of(path: Path) -> str | None:
    """Return the split that the last word of a file's name begins with: `instances_val2017.json` is `val`."""
    word = path.stem.rpartition("_")[2].lower()
    letters = word[: next((i for i, letter in enumerate(word) if letter not in _WORD), len(word))]
    split = canonical_split(letters)
    return split if split in DEFAULT_SPLITS else None


def _numbers(value: object, count: int) -> bool:
    if not isinstance(value, list) or len(cast("list[object]", value)) != count:
        return False
    return all(isinstance(n, int | float) and np.isfinite(n) for n in cast("list[object]", value))
