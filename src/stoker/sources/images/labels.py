"""Objects of an image, as padded arrays with a mask or as ragged ones, where the resize took them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stoker.errors import DecodeError, arg
from stoker.schema import Field, Sample, Schema
from stoker.sources.images.geometry import Fit


@dataclass(frozen=True, slots=True, kw_only=True)
class Objects:
    """What one image is annotated with, in pixels of the original."""

    boxes: NDArray[np.float64]
    """`(n, 4)`: edges x0, y0, x1, y1."""
    labels: NDArray[np.int64]
    """`(n,)`: places in the list of classes."""
    flags: NDArray[np.bool_]
    """`(n,)`: what the format marks objects with (`difficult`, `crowd`)."""
    points: NDArray[np.float64] | None = None
    """`(n, k, 2)` keypoints x, y, where the format has some."""
    labelled: NDArray[np.bool_] | None = None
    """`(n, k)`: which keypoints were annotated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectRules:
    """How objects become fields."""

    limit: int | None
    """Objects that there is room for; None: ragged, as many as there are."""
    flag: str
    """What the field of flags is called."""
    keypoints: int = 0
    """Keypoints of an object."""
    strict: bool = False
    """A box without area inside the image is an error of the sample, in place of being marked."""


def object_schema(rules: ObjectRules) -> Schema:
    """Fields of the objects of every image."""
    ragged = rules.limit is None
    count = -1 if rules.limit is None else rules.limit
    schema: Schema = {
        "boxes": Field(shape=(count, 4), dtype="float32", ragged=ragged),
        "boxes_valid": Field(shape=(count,), dtype="bool", ragged=ragged),
        "labels": Field(shape=(count,), dtype="int64", ragged=ragged),
        rules.flag: Field(shape=(count,), dtype="bool", ragged=ragged),
        "num_objects": Field(shape=(), dtype="int64"),
    }
    if rules.keypoints:
        points = (count, rules.keypoints)
        schema["keypoints"] = Field(shape=(*points, 2), dtype="float32", ragged=ragged)
        schema["keypoints_valid"] = Field(shape=points, dtype="bool", ragged=ragged)
    return schema


def object_fields(objects: Objects, fit: Fit, rules: ObjectRules, *, where: str) -> Sample:
    """The fields of one image: boxes cut at its edges and moved with it, padded with zeros.

    Raises:
        DecodeError: More objects than there is room for; with `strict`, a box without area in the image.
    """
    count = len(objects.labels)
    if rules.limit is not None and count > rules.limit:
        raise DecodeError(
            f"{where} has {count} objects, there is room for {rules.limit}. Give "
            f"{arg('max_objects', count)} or more"
        )
    cut, valid = inside(objects.boxes, fit.before)
    if rules.strict and not valid.all():
        bad = int(np.flatnonzero(~valid)[0])
        shown = ", ".join(f"{edge:g}" for edge in objects.boxes[bad])
        raise DecodeError(
            f"{where}: the box of object {bad} ({shown}) has no area inside the image of "
            f"{fit.before[1]} x {fit.before[0]} pixels. Fix it, or give {arg('strict', False)} to "
            f"have it marked"
        )
    fields: Sample = {
        "boxes": fit.boxes(cut),
        "boxes_valid": valid,
        "labels": objects.labels,
        rules.flag: objects.flags,
    }
    if rules.keypoints and objects.points is not None and objects.labelled is not None:
        fields["keypoints"] = fit.points(objects.points) * objects.labelled[..., None]
        fields["keypoints_valid"] = objects.labelled
    padded = {name: _padded(array, rules.limit) for name, array in fields.items()}
    return {**padded, "num_objects": np.asarray(count, dtype=np.int64)}


def inside(
    boxes: NDArray[np.float64], size: tuple[int, int]
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Boxes cut at the edges of an image of (height, width), and which of them keep an area.

    >>> cut, valid = inside(np.array([[-5.0, 2, 5, 9], [20, 2, 30, 9]]), (10, 10))
    >>> cut[0].tolist(), valid.tolist()
    ([0.0, 2.0, 5.0, 9.0], [True, False])
    """
    height, width = size
    cut = np.clip(boxes, 0, (width, height, width, height))
    return cut, (cut[:, 2] > cut[:, 0]) & (cut[:, 3] > cut[:, 1])


def _padded(array: np.ndarray, limit: int | None) -> np.ndarray:  # pyright: ignore[reportMissingTypeArgument]
    if limit is None:
        return np.ascontiguousarray(array)
    padded = np.zeros((limit, *array.shape[1:]), array.dtype)
    padded[: len(array)] = array
    return padded
