"""Images without labels, and images in a folder for each class."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from stoker.errors import SourceError, arg
from stoker.schema import Field, Json, Sample, Schema
from stoker.sources.files import natural_key
from stoker.sources.images.files import Entry, Listing, images_below, split_folders
from stoker.sources.images.geometry import Fit


class Plain:
    """All images below a folder; `train`, `val` and `test` directly below it are its splits."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def listing(self) -> Listing:
        """See `Catalog`."""
        folders = split_folders(self._root)
        splits = {split: images_below(self._root, folder) for split, folder in folders.items()}
        every = images_below(self._root)
        listed = sum(len(entries) for entries in splits.values())
        if splits and listed != len(every):
            raise SourceError(
                f"{self._root} has folders {', '.join(folders.values())}, and {len(every) - listed} images "
                "next to them that belong to no split. Move them, or name the folder with the images"
            )
        return Listing(every=every, splits=splits)

    def schema(self) -> Schema:
        """No field."""
        return {}

    def labels(self, entry: Entry, fit: Fit) -> Sample:
        """None."""
        return {}

    def files(self, entry: Entry) -> Iterable[str]:
        """None."""
        return ()

    def digest(self, entries: Sequence[Entry]) -> str | None:
        """None."""
        return None

    def settings(self) -> dict[str, Json]:
        """Nothing."""
        return {}


class ClassFolders:
    """`root/<class>/...` or `root/<split>/<class>/...`; `label` is the class's place among their names."""

    def __init__(self, root: Path, classes: Sequence[str] | None) -> None:
        self._root = root
        self._plain = Plain(root)
        self._depth = 1 if split_folders(root) else 0
        self._places: dict[str, int] | None = None
        if classes is not None:
            self._places = {name: place for place, name in enumerate(classes)}

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, in the order of their numbers."""
        if self._places is None:
            names = {self._class_of(entry) for entry in self._plain.listing().every}
            self._places = {name: place for place, name in enumerate(sorted(names, key=natural_key))}
        return tuple(self._places)

    def _class_of(self, entry: Entry) -> str:
        folders = entry.image.split("/")[self._depth : -1]
        if not folders:
            raise SourceError(
                f"{self._root / entry.image} is not in a folder of a class. Expected <class>/<image>"
            )
        return folders[0]

    def listing(self) -> Listing:
        """See `Catalog`."""
        return self._plain.listing()

    def schema(self) -> Schema:
        """`label`, the number of the class."""
        return {"label": Field(shape=(), dtype="int64")}

    def labels(self, entry: Entry, fit: Fit) -> Sample:
        """The class."""
        classes = self.classes
        name = self._class_of(entry)
        if name not in classes:
            raise SourceError(
                f"{self._root / entry.image} is of class {name!r}, which is not among "
                f"{arg('classes', list(classes))}. Add it, or move the image"
            )
        return {"label": np.asarray(classes.index(name), dtype=np.int64)}

    def files(self, entry: Entry) -> Iterable[str]:
        """None: the class is in the name."""
        return ()

    def digest(self, entries: Sequence[Entry]) -> str | None:
        """None: file names are part of the recipe."""
        return None

    def settings(self) -> dict[str, Json]:
        """The classes."""
        return {"classes": list(self.classes)}
