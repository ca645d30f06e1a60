"""Settings of images."""

from __future__ import annotations

from typing import Literal

from stoker.config.section import Flag, PositiveInt, SettingsSection


class ImagesConfig(SettingsSection):
    """Images below `data.root`, of `data.kind: images` (docs/images.md)."""

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
