"""Pascal VOC: `JPEGImages`, an XML file for each image in `Annotations`, lists in `ImageSets/Main`.

Coordinates are taken as they are written, as edges in pixels from the top left corner.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree as Xml

import numpy as np

from stoker.errors import DecodeError, SourceError, arg
from stoker.schema import Json, Sample, Schema
from stoker.sources.files import canonical_split, natural_key, open_regular
from stoker.sources.image_geometry import Fit, ObjectRules, Objects, inside, object_fields, object_schema
from stoker.sources.images import Entry, Listing, images_below, read_file, require_folder

IMAGES, ANNOTATIONS, LISTS = "JPEGImages", "Annotations", "ImageSets/Main"
MAX_XML_BYTES = 1 << 24

_log = logging.getLogger("stoker")
_said: set[Path] = set()


@dataclass(frozen=True, slots=True, kw_only=True)
class Annotation:
    """One XML file, read."""

    size: tuple[int, int] | None
    """(height, width) that it states."""
    names: tuple[str, ...]
    boxes: np.ndarray  # pyright: ignore[reportMissingTypeArgument]
    difficult: tuple[bool, ...]


class Voc:
    """The layout of Pascal VOC.

    Args:
        root: The folder with `JPEGImages` and `Annotations`.
        classes: Names in the order of their numbers; None: those found, sorted.
        rules: How objects become fields; with `limit` 0 there is room for as many as the fullest image has.
    """

    def __init__(self, root: Path, classes: Sequence[str] | None, rules: ObjectRules) -> None:
        self._root = root
        self._classes = None if classes is None else tuple(classes)
        self._rules = rules
        self._scanned: tuple[tuple[str, ...], ObjectRules] | None = None

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, in the order of their numbers."""
        return self._scan()[0]

    def listing(self) -> Listing:
        """See `Catalog`."""
        require_folder(self._root / ANNOTATIONS, f"a folder in Pascal VOC's layout with {ANNOTATIONS}")
        require_folder(self._root / IMAGES, f"a folder in Pascal VOC's layout with {IMAGES}")
        stems: dict[str, Entry] = {}
        for entry in images_below(self._root, IMAGES):
            stem = entry.key.removeprefix(f"{IMAGES}/")
            if stem in stems:
                raise SourceError(
                    f"{self._root}: {stems[stem].image} and {entry.image} have one annotation",
                    hint="Keep one",
                )
            stems[stem] = Entry(key=stem, image=entry.image)
        for path in (self._root / ANNOTATIONS).glob("*.xml"):
            stems.setdefault(path.stem, _without_image(path.stem))
        splits: dict[str, Sequence[Entry]] = {}
        folder = self._root / LISTS
        for path in sorted(folder.glob("*.txt")) if folder.is_dir() else ():
            # Lists of single classes (`cat_train.txt`) have a second column; only lists of splits count.
            if "_" not in path.stem:
                names = [line.split()[0] for line in _lines_of(path) if line.strip()]
                if len(set(names)) < len(names):
                    twice = next(name for name in names if names.count(name) > 1)
                    raise SourceError(f"{path} lists {twice} twice", hint="Name each image once")
                splits[canonical_split(path.stem)] = [stems.get(n, _without_image(n)) for n in names]
        every = sorted(stems.values(), key=lambda entry: natural_key(entry.key))
        return Listing(every=every, splits=splits)

    def schema(self) -> Schema:
        """Return boxes, labels, `difficult`."""
        return object_schema(self._scan()[1])

    def labels(self, entry: Entry, fit: Fit) -> Sample:
        """Return the objects of one image."""
        classes, rules = self._scan()
        path = self._root / f"{ANNOTATIONS}/{entry.key}.xml"
        found = read_annotation(path)
        if found.size is not None and found.size != fit.before:
            raise DecodeError(
                f"{path} is of an image of {found.size[1]} x {found.size[0]} pixels, the image has "
                f"{fit.before[1]} x {fit.before[0]} as shown",
                hint="Fix it; if it was drawn on the image before EXIF turned it, give "
                f"{arg('turned', False)}",
            )
        unknown = sorted(set(found.names) - set(classes))
        if unknown:
            raise DecodeError(
                f"{path} names {unknown[0]!r}, which is not among {arg('classes', list(classes))}",
                hint="Add it",
            )
        objects = Objects(
            boxes=found.boxes,
            labels=np.array([classes.index(name) for name in found.names], dtype=np.int64),
            flags=np.array(found.difficult, dtype=np.bool_),
        )
        return object_fields(objects, fit, rules, where=str(path))

    def files(self, entry: Entry) -> Iterable[str]:
        """Return the image's XML file."""
        return (f"{ANNOTATIONS}/{entry.key}.xml",)

    def digest(self, entries: Sequence[Entry]) -> str | None:
        """Return None: labels come from files."""
        return None

    def settings(self) -> dict[str, Json]:
        """Return classes, and room for objects."""
        classes, rules = self._scan()
        return {"classes": list(classes), "max_objects": rules.limit, "strict": rules.strict}

    def _scan(self) -> tuple[tuple[str, ...], ObjectRules]:
        """Return classes and room, from all annotations where they were not given."""
        if self._scanned is None:
            rules = self._rules
            if self._classes is not None and rules.limit != 0:
                self._scanned = (self._classes, rules)
            else:
                self._scanned = self._counted(rules)
        return self._scanned

    def _counted(self, rules: ObjectRules) -> tuple[tuple[str, ...], ObjectRules]:
        names: set[str] = set()
        most, boxes, without = 1, 0, list[str]()
        for path, found in self._readable():
            names.update(found.names)
            most, boxes = max(most, len(found.names)), boxes + len(found.names)
            if found.size is not None and not inside(found.boxes, found.size)[1].all():
                without.append(path.stem)
        if without and self._root not in _said:
            _said.add(self._root)
            _log.warning(
                "%s: of %d boxes some have no area inside their image (in %s%s); they are kept with "
                "boxes_valid=False",
                *(self._root, boxes, ", ".join(without[:3]), ", ..." if len(without) > 3 else ""),
            )
        room = most if rules.limit == 0 else rules.limit
        kept = ObjectRules(limit=room, flag=rules.flag, keypoints=0, strict=rules.strict)
        return self._classes or tuple(sorted(names, key=natural_key)), kept

    def _readable(self) -> Iterator[tuple[Path, Annotation]]:
        """Yield all annotations but the damaged ones, whose samples are quarantined when they are read."""
        for path in sorted((self._root / ANNOTATIONS).glob("*.xml")):
            try:
                yield path, read_annotation(path)
            except SourceError:
                continue


def _without_image(name: str) -> Entry:
    """Return an entry without a file: it is quarantined by this name when it is read."""
    return Entry(key=name, image=f"{IMAGES}/{name}.jpg")


def _lines_of(path: Path) -> list[str]:
    """Return the lines of a list, of which an empty one has none.

    Raises:
        SourceError: It cannot be read, is not a regular file, or not text.
    """
    try:
        with open_regular(path) as file:
            return file.readall().decode().splitlines()
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SourceError(
            f"{path} is not text in UTF-8 at byte {error.start}", hint="Write it again"
        ) from error


def read_annotation(path: Path) -> Annotation:
    """Read one XML file.

    Raises:
        SourceError: It is missing or cannot be read.
        DecodeError: It is not an annotation; says what is wrong, and where.
    """
    data = read_file(path, MAX_XML_BYTES)
    if b"<!DOCTYPE" in data or b"<!ENTITY" in data:  # entities can grow without bound; labels need none
        raise DecodeError(f"{path} declares a document type or entities", hint="Expected a plain annotation")
    try:
        root = Xml.fromstring(data)  # noqa: S314 - without entities there is nothing to expand
    except (Xml.ParseError, ValueError, LookupError) as error:
        raise DecodeError(f"{path} is not XML: {error}", hint="Copy or download it again") from error
    names: list[str] = []
    boxes: list[list[float]] = []
    difficult: list[bool] = []
    for place, node in enumerate(root.findall("object")):
        if twice := _repeated(node, ("name", "bndbox", "difficult")) or _repeated(
            node.find("bndbox"), ("xmin", "ymin", "xmax", "ymax")
        ):
            raise DecodeError(f"{path}: object {place} has {twice} more than once", hint="Keep one of each")
        name = (node.findtext("name") or "").strip()
        edges = [_number(node, f"bndbox/{edge}") for edge in ("xmin", "ymin", "xmax", "ymax")]
        if not name or None in edges:
            raise DecodeError(
                f"{path}: object {place} lacks a name or an edge of its box (xmin, ymin, xmax, ymax)"
            )
        names.append(name)
        boxes.append([edge for edge in edges if edge is not None])
        difficult.append((_number(node, "difficult") or 0) != 0)
    height, width = _number(root, "size/height"), _number(root, "size/width")
    return Annotation(
        size=(int(height), int(width)) if height and width else None,
        names=tuple(names),
        boxes=np.array(boxes, dtype=np.float64).reshape(-1, 4),
        difficult=tuple(difficult),
    )


def _repeated(node: Xml.Element | None, names: Sequence[str]) -> str | None:
    """Return the first of some entries that comes more than once."""
    return next((name for name in names if node is not None and len(node.findall(name)) > 1), None)


def _number(node: Xml.Element, name: str) -> float | None:
    try:
        value = float(node.findtext(name) or "")
    except ValueError:
        return None
    return value if np.isfinite(value) else None
