"""Images below a folder, and those of a split."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from stoker.errors import DecodeError, SourceError, SplitError, arg
from stoker.schema import Field, Json, Sample, Schema
from stoker.sources.files import (
    absent_split,
    canonical_split,
    check_opened,
    confined_sources,
    natural_key,
    open_regular,
    why_unreadable,
)
from stoker.sources.images.geometry import Fit
from stoker.sources.splits import DEFAULT_SPLITS, SplitChoice, choose_split, split_numbers

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm")
MAX_FILE_BYTES = 1 << 29


class Entry(NamedTuple):
    """One image."""

    key: str
    """Its stable name: relative to the root, without suffix."""
    image: str
    """Its file, relative to the root, with `/`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """All images below a root."""

    every: Sequence[Entry]
    """All of them, in order."""
    splits: Mapping[str, Sequence[Entry]] = field(default_factory=dict[str, "Sequence[Entry]"])
    """Those of each split that the data names; empty where it names none."""


class Catalog(Protocol):
    """One way to lay out images and their labels."""

    def listing(self) -> Listing:
        """Return the images; reads names and lists, no image."""
        ...

    def schema(self) -> Schema:
        """Return fields of the labels of every image."""
        ...

    def labels(self, entry: Entry, fit: Fit) -> Sample:
        """Return the labels of one image, where the resize took them.

        Raises:
            SourceError: They are missing or cannot be read; `DecodeError`, if they make no sense.
        """
        ...

    def files(self, entry: Entry) -> Iterable[str]:
        """Return files that decide its labels, relative to the root, whether they exist or not."""
        ...

    def digest(self, entries: Sequence[Entry]) -> str | None:
        """Return the digest of labels that come from no file of `files`; None: no such labels."""
        ...

    def settings(self) -> dict[str, Json]:
        """Return what decides the labels in addition to files, for the recipe."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSelection:
    """The split and number of images that are asked for."""

    split: str | None
    splits: Mapping[str, float] | None
    seed: int
    max_samples: int | None


def choose_images(
    listing: Listing, selection: ImageSelection, where: str
) -> tuple[list[Entry], dict[str, Json]]:
    """Return the images of a split, and the rule as it goes into a recipe.

    Lists and folders named after splits win; without any, fractions are cut over the keys.

    Raises:
        SplitError: The split does not exist, or fractions would cut across lists.
        SourceError: No image is left.
    """
    taken, rule = _of_split(listing, selection, where)
    if selection.max_samples is not None and selection.max_samples < len(taken):
        order = sorted(taken, key=lambda entry: _draw(entry.key, selection.seed))
        drawn = set(order[: selection.max_samples])
        taken = [entry for entry in taken if entry in drawn]
        rule["drawn"] = {"count": selection.max_samples, "seed": selection.seed}
    if not taken:
        raise SourceError(
            f"{where} holds no image{f' of {selection.split}' if selection.split else ''}. {_SUFFIXES}"
        )
    return taken, rule


_SUFFIXES = f"Images end in {', '.join(SUFFIXES)}"


def _of_split(listing: Listing, selection: ImageSelection, where: str) -> tuple[list[Entry], dict[str, Json]]:
    if selection.split is not None and listing.splits:
        split = canonical_split(selection.split)
        if selection.splits is not None:
            raise SplitError(
                f"{where} already divides its images into {', '.join(listing.splits)}; {arg('splits')} "
                "would divide them again. Leave splits out"
            )
        if split not in listing.splits:
            raise absent_split(where, selection.split, listing.splits)
        return list(listing.splits[split]), {"split": split}
    # No file carries a split in its name here, so that this checks the fractions and says which are cut.
    choice: SplitChoice = choose_split(
        ["images"], split=selection.split, splits=selection.splits, seed=selection.seed, where=where
    )
    if choice.fractions is None or choice.split is None:
        return list(listing.every), dict(choice.to_json())
    keys = [entry.key for entry in listing.every]
    numbers = split_numbers(keys, choice.fractions, choice.split, choice.seed, where=where)
    return [listing.every[number] for number in numbers], dict(choice.to_json())


def _draw(key: str, seed: int) -> bytes:
    return hashlib.blake2b(f"drawn {seed}\0{key}".encode(), digest_size=16).digest()


def images_below(root: Path, folder: str = "") -> list[Entry]:
    """Return all entries below `root/folder` with an image's name, in natural order; none are hidden.

    What has such a name and is not a regular file is listed too: it is set aside by name when it is read.

    Raises:
        SourceError: A folder cannot be looked into.
    """

    def refused(error: OSError) -> None:
        raise SourceError(f"{error.filename} cannot be read: {error.strerror}") from error

    found: list[str] = []
    for place, folders, names in _walk(root / folder, refused):
        folders[:] = [name for name in folders if not name.startswith(".")]
        below = Path(place).relative_to(root)
        found += [
            (below / name).as_posix()
            for name in names
            if name.lower().endswith(SUFFIXES) and not name.startswith(".")
        ]
    found.sort(key=natural_key)
    return [Entry(key=name.rpartition(".")[0], image=name) for name in found]


def _walk(top: Path, refused: Callable[[OSError], None]) -> Iterator[tuple[str, list[str], list[str]]]:
    """As `os.walk`; in a confined process no folder is listed that is elsewhere."""
    if confined_sources() is None:
        yield from os.walk(top, onerror=refused)
        return
    try:
        for place, folders, names, fd in os.fwalk(top, onerror=refused):
            check_opened(fd, place)
            yield place, folders, names
    except OSError as error:  # of `top` itself, which `os.walk` gives to `onerror`
        refused(error)


def split_folders(root: Path) -> dict[str, str]:
    """Folders directly below `root` that are named after splits, by the split."""
    found: dict[str, str] = {}
    for child in sorted(root.iterdir()):
        split = canonical_split(child.name)
        if split in DEFAULT_SPLITS and child.is_dir():
            if split in found:
                raise SourceError(f"{root} has {found[split]} and {child.name}, both for {split}. Keep one")
            found[split] = child.name
    return found


def require_folder(path: Path, what: str) -> Path:
    """Return the folder, if it is one.

    Raises:
        SourceError: It is not there, or is something else.
    """
    if not path.is_dir():
        fact = "is not a folder" if path.exists() else "does not exist"
        raise SourceError(f"{path} {fact}. Expected {what}")
    return path


def read_file(path: Path, limit_bytes: int = MAX_FILE_BYTES) -> bytes:
    """Return all bytes of a file.

    Raises:
        SourceError: It is not there, cannot be read, is not a regular file, is empty or above the limit.
    """
    try:
        with open_regular(path) as file:
            size_bytes = os.fstat(file.fileno()).st_size
            if size_bytes > limit_bytes:
                raise SourceError(
                    f"{path} has {size_bytes:,} bytes, more than the {limit_bytes:,} that are read"
                )
            data = file.readall()
    except OSError as error:
        # Without their cause, which would count as an error of storage that may pass.
        if error.errno in (errno.ENOENT, errno.ELOOP) and path.is_symlink():
            raise SourceError(
                f"{path} is {why_unreadable(path)}, {path.readlink()}. Remove the link, or put the file "
                "itself in its place"
            ) from None
        if error.errno == errno.ENOENT:
            raise SourceError(
                f"{path} is missing. Put the file there, or remove it from the list that names it"
            ) from None
        raise SourceError(f"{path} cannot be read: {error.strerror}") from error
    if not data:
        raise DecodeError(f"{path} is empty (0 bytes). Copy or download it again, or leave it out")
    return data


# ----------------------------------------------------------------------------------------------------------
# Images without labels, and images in a folder for each class.


class PlainFolder:
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


class ClassFolders(PlainFolder):
    """`root/<class>/...` or `root/<split>/<class>/...`; `label` is the class's place among their names."""

    def __init__(self, root: Path, classes: Sequence[str] | None) -> None:
        super().__init__(root)
        self._depth = 1 if split_folders(root) else 0
        self._places: dict[str, int] | None = None
        if classes is not None:
            self._places = {name: place for place, name in enumerate(classes)}

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, in the order of their numbers."""
        if self._places is None:
            names = {self._class_of(entry) for entry in self.listing().every}
            self._places = {name: place for place, name in enumerate(sorted(names, key=natural_key))}
        return tuple(self._places)

    def _class_of(self, entry: Entry) -> str:
        folders = entry.image.split("/")[self._depth : -1]
        if not folders:
            raise SourceError(
                f"{self._root / entry.image} is not in a folder of a class. Expected <class>/<image>"
            )
        return folders[0]

    def schema(self) -> Schema:
        """Return `label`, the number of the class."""
        return {"label": Field(shape=(), dtype="int64")}

    def labels(self, entry: Entry, fit: Fit) -> Sample:
        """Return the class."""
        classes = self.classes
        name = self._class_of(entry)
        if name not in classes:
            raise SourceError(
                f"{self._root / entry.image} is of class {name!r}, which is not among "
                f"{arg('classes', list(classes))}. Add it, or move the image"
            )
        return {"label": np.asarray(classes.index(name), dtype=np.int64)}

    def settings(self) -> dict[str, Json]:
        """Return the classes."""
        return {"classes": list(self.classes)}
