"""Kinds of sources: their names, what settings each has of its own, and which shared ones it takes.

Another kind is: its name in `Kind`; a section of its settings here, which `DataConfig` holds under that name;
its name at the shared settings that it takes, in `TAKEN_BY`; defaults that fit it better, in `DEFAULTS`; and
a function that makes the source, in `stoker.pipeline.kinds.BUILDERS`. docs/config.md and all messages follow
by themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal, TypeAlias, get_args

from pydantic import BaseModel

from stoker.config.section import Flag, PositiveInt, SettingsSection

Kind: TypeAlias = Literal["hdf5", "images"]
"""What `data.kind` can be."""

KINDS: tuple[str, ...] = get_args(Kind)

TAKEN_BY: Mapping[str, tuple[str, ...]] = {
    "files": ("hdf5",),
    "preset": ("hdf5",),
    "fields": ("hdf5",),
    "normalize": ("hdf5",),
}
"""Settings of `data` that not every kind takes, with those that do; what is not here is for all."""

DEFAULTS: Mapping[str, Mapping[str, object]] = {
    # Boxes and cameras lose too much in 16 bits, and the grid encoder is for fields.
    "images": {"encoder.kind": "identity", "training.latent_cache_dtype": None},
}
"""Defaults that are others for a kind, by dotted name."""


class ImagesConfig(SettingsSection):
    """Images below `data.root`, of `data.kind: images` (docs/images.md).

    Floats are then stored as they are, unless `training.latent_cache_dtype` is given.
    """

    annotations: Literal["voc", "coco", "dexycb", "folder"] | None = None
    """Layout of the labels; `folder`: a folder for each class; null: images alone."""
    size: PositiveInt | tuple[PositiveInt, PositiveInt] = (224, 224)
    """`[height, width]` of stored images; with `fit: short` the length of the shorter side."""
    fit: Literal["stretch", "letterbox", "short"] = "stretch"
    """How an image is brought to that size; its labels go where its pixels go."""
    colour: Literal["RGB", "L"] = "RGB"
    """`L`: grey."""
    store: Literal["pixels", "encoded"] = "pixels"
    """`encoded`: the bytes of the file, decoded when they are served."""
    filter: Literal["nearest", "box", "bilinear", "bicubic", "lanczos"] = "bilinear"
    """How pixels are weighed when an image is resized."""
    reduced: Flag = True
    """Whether JPEG is decoded at 1/2, 1/4 or 1/8 where that is enough for the size."""
    turned: Flag = True
    """Whether images are turned as their EXIF orientation says."""
    max_samples: PositiveInt | None = None
    """Draw so many images of each split, evenly and by `data.seed`; null: all."""
    classes: tuple[str, ...] | None = None
    """Names of the classes in the order of their numbers; null: those found."""
    max_objects: PositiveInt | None = None
    """Room for objects in an image; null: as many as the fullest image has."""
    ragged: Flag = False
    """Objects as ragged fields, in place of padded ones."""
    strict: Flag = False
    """Whether a box without area inside its image sets the image aside, or is marked as not valid."""
    setup: Literal["s0", "s1", "s2", "s3"] = "s0"
    """Of DexYCB: which samples are train, val and test."""
    extras: tuple[Literal["depth", "segmentation"], ...] = ()
    """Of DexYCB: maps to take along."""


def misplaced(data: BaseModel, kind: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Settings of `data` that are given though its kind takes no notice of them, and the kinds that would."""
    sections = {name: (name,) for name in KINDS if name in type(data).model_fields}
    for name, kinds in {**TAKEN_BY, **sections}.items():
        given = getattr(data, name) != type(data).model_fields[name].get_default(call_default_factory=True)
        if given and kind not in kinds:
            yield name, kinds
