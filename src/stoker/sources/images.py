"""Images and their labels as one numbered list of samples, decoded and resized while they are read."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, cast, get_args

import numpy as np

from stoker.arguments import check, whole
from stoker.errors import ConfigError, DecodeError, SourceError, SplitError, arg
from stoker.plugins import load_extension
from stoker.schema import Field, Json, Sample, Schema, digest_json
from stoker.sources.arguments import check_path, check_splits, listed
from stoker.sources.files import (
    absent_split,
    canonical_split,
    check_opened,
    confined_sources,
    natural_key,
    open_regular,
    why_unreadable,
)
from stoker.sources.image_geometry import Color, Filter, Fit, FitRule, ObjectRules, Rules
from stoker.sources.protocol import FileRef, Part, SourceIdentity, check_index, even_runs
from stoker.sources.splits import DEFAULT_SPLITS, SplitChoice, choose_split, split_numbers
from stoker.units import MIB

# ----------------------------------------------------------------------------------------------------------
# Images below a folder, and those of a split.


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
            f"{where} holds no image{f' of {selection.split}' if selection.split else ''}", hint=_SUFFIXES
        )
    return taken, rule


_SUFFIXES = f"Images end in {', '.join(SUFFIXES)}"


def _of_split(listing: Listing, selection: ImageSelection, where: str) -> tuple[list[Entry], dict[str, Json]]:
    if selection.split is not None and listing.splits:
        split = canonical_split(selection.split)
        if selection.splits is not None:
            raise SplitError(
                f"{where} already divides its images into {', '.join(listing.splits)}; {arg('splits')} "
                "would divide them again",
                hint="Leave splits out",
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
                raise SourceError(
                    f"{root} has {found[split]} and {child.name}, both for {split}", hint="Keep one"
                )
            found[split] = child.name
    return found


def require_folder(path: Path, what: str) -> Path:
    """Return the folder, if it is one.

    Raises:
        SourceError: It is not there, or is something else.
    """
    if not path.is_dir():
        fact = "is not a folder" if path.exists() else "does not exist"
        raise SourceError(f"{path} {fact}", hint=f"Expected {what}")
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
                f"{path} is {why_unreadable(path)}, {path.readlink()}",
                hint="Remove the link, or put the file itself in its place",
            ) from None
        if error.errno == errno.ENOENT:
            raise SourceError(
                f"{path} is missing", hint="Put the file there, or remove it from the list that names it"
            ) from None
        raise SourceError(f"{path} cannot be read: {error.strerror}") from error
    if not data:
        raise DecodeError(f"{path} is empty (0 bytes)", hint="Copy or download it again, or leave it out")
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
                "next to them that belong to no split",
                hint="Move them, or name the folder with the images",
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
                f"{self._root / entry.image} is not in a folder of a class", hint="Expected <class>/<image>"
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
                f"{arg('classes', list(classes))}",
                hint="Add it, or move the image",
            )
        return {"label": np.asarray(classes.index(name), dtype=np.int64)}

    def settings(self) -> dict[str, Json]:
        """Return the classes."""
        return {"classes": list(self.classes)}


# ----------------------------------------------------------------------------------------------------------
# Images and their labels as one numbered list of samples.


VERSION = 1
"""Bumped by hand when the same files would give other samples."""

Layout: TypeAlias = Literal["voc", "coco", "dexycb", "folder"]
Store: TypeAlias = Literal["pixels", "encoded"]

PART_SAMPLES = 4096
"""Images of one part, in their order: images added at the end leave the parts before them as they were."""
_RUN_BYTES = 8 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """Rules by which labels become fields; a rule that a layout does not use is refused."""

    classes: Sequence[str] | None = None
    """Names of classes in the order of their numbers; None: those in the annotations, which reads all."""
    max_objects: int | None = None
    """Objects that there is room for; None: as many as the fullest image has, which reads all of them."""
    ragged: bool = False
    """Objects as ragged fields in place of padded ones."""
    strict: bool = False
    """A box without area inside its image sets the image aside, in place of being marked as not valid."""
    setup: Literal["s0", "s1", "s2", "s3"] = "s0"
    """Of DexYCB: which of its setups decides what is train, val and test."""
    extras: Sequence[Literal["depth", "segmentation"]] = ()
    """Of DexYCB: maps to store as further fields."""

    def __post_init__(self) -> None:
        """Refuse what is not a list of names, or not a number of objects."""
        for name in ("classes", "extras"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, str) or listed(value) is None):
                raise ConfigError(
                    f"labels has {arg(name, value)}",
                    hint=f"Expected a list of names, as {arg(name, ['...'])}",
                )
        if self.max_objects is not None:
            check({"labels' max_objects": (self.max_objects, whole(least=1))})


class ImageSource:
    """Images below a folder, with labels in one of the usual layouts.

    Args:
        root: The folder.
        annotations: `voc`, `coco`, `dexycb`, `folder` (a folder for each class), or None: images alone.
        size: (height, width) of stored images in pixels; with `fit="short"` the length of the shorter side.
        split: `train`, `val`, `test` or another name; None: all images.
        splits: Fractions by name, where the data names no splits itself; None: 0.8/0.1/0.1.
        seed: Of the cut into fractions, and of the draw of `max_samples`.
        max_samples: Draw so many images of the split, evenly; None: all.
        fit: `stretch` scales both axes to `size`. `letterbox` scales both alike, and what is left is black.
            `short` scales both alike until the shorter side fits. Labels go where their pixels go.
        color: `RGB`, or `L` for gray.
        store: `pixels`, or `encoded`: the file's own bytes, decoded when they are served.
        labels: How labels become fields: `Labels`, or its arguments by name.
        filter: Pillow's filter for resizing, as `bilinear`.
        reduced: Decode JPEG at 1/2, 1/4 or 1/8 where that is not smaller than the size wanted.
        turned: Turn images as their EXIF orientation says.

    Samples have `image`, uint8 `(C, H, W)` (with `fit="short"` ragged `(pixels, C)` and `image_shape`;
    encoded ragged bytes), `original_size` (height, width), and the fields of the labels.

    Raises:
        ConfigError: A setting is unknown or contradicts another, or Pillow is not installed.
        SourceError: The folder is missing or not of this layout; later, on first use, holds no image.
        SplitError: On first use: the split does not exist.

    Examples:
        >>> import stoker
        >>> from pathlib import Path
        >>> from PIL import Image
        >>> for name in ("cat", "dog"):
        ...     Path("pets", name).mkdir(parents=True)
        ...     Image.new("RGB", (64, 48)).save(f"pets/{name}/0.png")
        >>> source = stoker.ImageSource("pets", "folder", size=(32, 32))
        >>> source.classes, source.read(1)["image"].shape, source.read(1)["label"].item()
        (('cat', 'dog'), (3, 32, 32), 1)
    """

    def __init__(  # noqa: PLR0913 - a public face with a fixed signature
        self,
        root: str | os.PathLike[str],
        annotations: Layout | None = None,
        size: int | tuple[int, int] = (224, 224),
        *,
        split: str | None = None,
        splits: Mapping[str, float] | None = None,
        seed: int = 0,
        max_samples: int | None = None,
        fit: FitRule = "stretch",
        color: Color = "RGB",
        store: Store = "pixels",
        labels: Labels | Mapping[str, object] | None = None,
        filter: Filter = "bilinear",
        reduced: bool = True,
        turned: bool = True,
    ) -> None:
        require_pillow()
        _check("annotations", annotations, (None, *get_args(Layout)))
        _check("fit", fit, get_args(FitRule))
        _check("color", color, get_args(Color))
        _check("store", store, get_args(Store))
        _check("filter", filter, get_args(Filter))
        check_path("root", root)
        check_splits(split, splits, seed)
        if max_samples is not None:
            check({"max_samples": (max_samples, whole(least=1))})
        self._rules = Rules(
            size=_size(size, fit), fit=fit, color=color, filter=filter, reduced=reduced, turned=turned
        )
        self._root = require_folder(Path(os.path.abspath(Path(root).expanduser())), "a folder with images")  # noqa: PTH100 - resolve() would follow links
        self._layout: Layout | None = annotations
        self._store: Store = store
        own = labels if isinstance(labels, Labels) else _labels({} if labels is None else labels)
        self._catalog = _catalog(self._root, annotations, own, self._rules)
        self._selection = ImageSelection(split=split, splits=splits, seed=seed, max_samples=max_samples)
        self._found: tuple[Sequence[Entry], dict[str, Json]] | None = None

    def __repr__(self) -> str:
        """Return the folder, without reading it."""
        of = f", split={self._selection.split!r}" if self._selection.split else ""
        return f"ImageSource({str(self._root)!r}, {self._layout!r}, {self._rules.size}{of})"

    def __len__(self) -> int:
        """Images after selection, at least one."""
        return len(self._entries)

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes, in the order of their numbers; none where labels have no classes."""
        return tuple(getattr(self._catalog, "classes", ()))

    def schema(self) -> Schema:
        """Return the image, and the fields of its labels."""
        rules = self._rules
        image = Field(shape=(rules.channels, *rules.size), dtype="uint8")
        schema: Schema = {"image": image, "original_size": Field(shape=(2,), dtype="int32")}
        if self._store == "encoded":
            schema["image"] = Field(shape=(-1,), dtype="uint8", ragged=True)
        elif rules.fit == "short":
            schema["image"] = Field(shape=(-1, rules.channels), dtype="uint8", ragged=True)
            schema["image_shape"] = Field(shape=(2,), dtype="int32")
        return {**schema, **self._catalog.schema()}

    def read(self, index: int, start: int | None = None, stop: int | None = None) -> Sample:
        """Read image `index` and its labels.

        Raises:
            SourceError: A file is missing or cannot be read.
            DecodeError: The image or its labels are damaged; names the file.
            IndexError: There is no such sample.
        """
        from stoker.sources.image_decoding import decode

        check_index(index, len(self))
        entry = self._entries[index]
        path = self._root / entry.image
        data = read_file(path)
        pixels, fit = decode(data, self._rules, where=str(path))
        sample: Sample = {"original_size": np.array(fit.before, dtype=np.int32)}
        if self._store == "encoded":
            sample["image"] = np.frombuffer(data, dtype=np.uint8).copy()
        elif self._rules.fit == "short":
            sample["image"] = np.ascontiguousarray(pixels.reshape(len(pixels), -1).T)
            sample["image_shape"] = np.array(pixels.shape[1:], dtype=np.int32)
        else:
            sample["image"] = pixels
        return {**sample, **self._catalog.labels(entry, fit)}

    def locate(self, index: int) -> str:
        """Return the file of the image."""
        return str(self._root / self._entries[index].image)

    def sample_files(self, index: int) -> Sequence[str]:
        """Return the files, by their names in the identity, that decide a sample.

        Args:
            index: Sample index, from 0.
        """
        entry = self._entries[index]
        return (entry.image, *self._catalog.files(entry))

    def runs(self) -> Sequence[range]:
        """Return ranges of about 8 MiB of pixels, never across parts."""
        height, width = self._rules.size
        length = max(1, _RUN_BYTES // (self._rules.channels * height * width))
        return [range(low, min(low + length, part.stop)) for part in self._spans() for low in part[::length]]

    def keys(self) -> Sequence[str]:
        """Return file names without suffix, relative to the root."""
        return [entry.key for entry in self._entries]

    def identity(self) -> SourceIdentity:
        """Return content of images and labels, the rules of decoding, and the version of what decodes."""
        from stoker.sources.image_decoding import decoder

        settings: dict[str, Json] = {
            "layout": self._layout,
            "rules": self._rules.to_json(),
            "decoder": decoder(),
            "store": self._store,
            "labels": self._catalog.settings(),
            "split": self._chosen()[1],
        }
        return SourceIdentity(
            kind=f"images/{VERSION}",
            parts=tuple(map(self._part, self._spans())),
            settings=settings,
        )

    def _part(self, span: range) -> Part:
        entries = self._entries[span.start : span.stop]
        names = {name: None for entry in entries for name in (entry.image, *self._catalog.files(entry))}
        # A file that is missing or may not be read stays out of the recipe: its sample is quarantined.
        present = ((name, self._root / name) for name in names)
        files = [FileRef(name=name, path=path) for name, path in present if _readable(path)]
        digest = digest_json([[entry.image for entry in entries], self._catalog.digest(entries)])
        name = f"images {span.start // PART_SAMPLES}"
        return Part(name=name, count=len(entries), files=tuple(files), digest=digest)

    def _spans(self) -> list[range]:
        return even_runs(len(self), PART_SAMPLES)

    @property
    def _entries(self) -> Sequence[Entry]:
        return self._chosen()[0]

    def _chosen(self) -> tuple[Sequence[Entry], dict[str, Json]]:
        """Return the images of the split, and the rule as it goes into a recipe."""
        if self._found is None:
            self._found = choose_images(self._catalog.listing(), self._selection, str(self._root))
        return self._found


def require_pillow() -> None:
    """Refuse before anything is read where images cannot be decoded.

    Raises:
        ConfigError: Pillow is not installed.
    """
    if find_spec("PIL") is None:
        raise ConfigError(
            "images are decoded with Pillow, which is not installed", hint="pip install 'stoker[images]'"
        )


def _readable(path: Path) -> bool:
    return path.is_file() and os.access(path, os.R_OK)


def _check(name: str, value: object, known: Sequence[object]) -> None:
    if value not in known:
        raise ConfigError(
            f"{arg(name, value)} is unknown", hint=f"Expected one of {', '.join(map(repr, known))}"
        )


def _size(size: object, fit: FitRule) -> tuple[int, int]:
    if fit == "short" and isinstance(size, int) and size >= 1:
        return size, size
    if isinstance(size, tuple | list) and fit != "short":
        height, width = (*size, 0, 0)[:2] if len(size) == 2 else (0, 0)
        if isinstance(height, int) and isinstance(width, int) and min(height, width) >= 1:
            return height, width
    wanted = (
        f"a whole number, as {arg('size', 256)}"
        if fit == "short"
        else f"(height, width), as {arg('size', (224, 224))}"
    )
    several = "" if size is not None else ". For pictures of several sizes give a Dataset that returns them"
    raise ConfigError(
        f"{arg('size', size)} does not fit", hint=f"With {arg('fit', fit)} expected {wanted}{several}"
    )


def _labels(given: object) -> Labels:
    known = Labels.__dataclass_fields__
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"labels is {given!r}", hint=f"Expected Labels(...), or some of {', '.join(known)} by name"
        )
    rules = cast("Mapping[str, Any]", given)
    if unknown := [name for name in rules if name not in known]:
        raise ConfigError(
            f"labels={{{unknown[0]!r}: ...}} is unknown", hint=f"Expected some of {', '.join(known)}"
        )
    return Labels(**rules)


_USES: Mapping[Layout | None, tuple[str, ...]] = {
    None: (),
    "folder": ("classes",),
    "voc": ("classes", "max_objects", "ragged", "strict"),
    "coco": ("classes", "max_objects", "ragged", "strict"),
    "dexycb": ("setup", "extras"),
}


_FLAGS: Mapping[Layout | None, str] = {"voc": "difficult", "coco": "crowd"}
"""The name of a layout's flag of objects."""


def _catalog(root: Path, layout: Layout | None, labels: Labels, rules: Rules) -> Catalog:
    """Return what finds images and reads labels of a layout.

    Raises:
        ConfigError: `labels` has a setting that the layout has no use for.
    """
    plain = Labels()
    for name in Labels.__dataclass_fields__:
        if name not in _USES[layout] and getattr(labels, name) != getattr(plain, name):
            raise ConfigError(
                f"labels has {arg(name)}, which {arg('annotations', layout)} has no use for",
                hint="Leave it out",
            )
    if labels.ragged and labels.max_objects is not None:
        raise ConfigError(
            f"labels has {arg('ragged', True)} and {arg('max_objects')}; ragged fields need no room",
            hint="Give one of them",
        )
    limit = None if labels.ragged else labels.max_objects or 0
    if layout in _FLAGS:
        own = ObjectRules(limit=limit, flag=_FLAGS[layout], strict=labels.strict)
        return load_extension(f"images.{layout}")(root, labels.classes, own)
    if layout == "dexycb":
        size = None if rules.fit == "short" else rules.size
        return load_extension("images.dexycb")(root, labels.setup, labels.extras).for_size(size)
    return ClassFolders(root, labels.classes) if layout == "folder" else PlainFolder(root)
