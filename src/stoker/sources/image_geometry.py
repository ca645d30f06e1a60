"""Move boxes, points and cameras with a resized image.

Pixels are squares: pixel `i` reaches from `i` to `i + 1` as an edge, and its center has the coordinate `i`
as a point. So edges (boxes) are scaled. Points (joints, principal points) are scaled about the
corner of the image, which for them is at -0.5: a joint stays on the pixel that it was on.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from stoker.errors import DecodeError, arg
from stoker.schema import Field, Json, Sample, Schema

FitRule: TypeAlias = Literal["stretch", "letterbox", "short"]
"""`stretch`: both axes are scaled to the size wanted. `letterbox`: both alike, what is left of the size
is black, half on either side. `short`: both alike, so that the shorter axis has the size wanted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The way an image of one size becomes one of another."""

    before: tuple[int, int]
    """(height, width) as shown, in pixels."""
    inner: tuple[int, int]
    """(height, width) after scaling."""
    canvas: tuple[int, int]
    """(height, width) of what is stored; `inner` is inside it."""
    corner: tuple[int, int]
    """(top, left) of `inner` on the canvas."""

    @property
    def scale(self) -> tuple[float, float]:
        """Stored pixels per original one, (y, x)."""
        return self.inner[0] / self.before[0], self.inner[1] / self.before[1]

    def boxes(self, boxes: NDArray[Any]) -> NDArray[np.float32]:
        """Return boxes `(n, 4)` of edges x0, y0, x1, y1, moved to the stored image."""
        y, x = self.scale
        top, left = self.corner
        moved = np.asarray(boxes, dtype=np.float64) * (x, y, x, y) + (left, top, left, top)
        return moved.astype(np.float32)

    def points(self, points: NDArray[Any]) -> NDArray[np.float32]:
        """Points `(..., 2)` of pixel centers x, y, moved to the stored image."""
        y, x = self.scale
        top, left = self.corner
        moved = (np.asarray(points, dtype=np.float64) + 0.5) * (x, y) - 0.5 + (left, top)
        return moved.astype(np.float32)

    def camera(self, matrix: NDArray[Any]) -> NDArray[np.float32]:
        """Return a camera matrix `(3, 3)` for the stored image: it projects to what `points` gives."""
        y, x = self.scale
        top, left = self.corner
        move = np.array([[x, 0, 0.5 * x - 0.5 + left], [0, y, 0.5 * y - 0.5 + top], [0, 0, 1]])
        return (move @ np.asarray(matrix, dtype=np.float64)).astype(np.float32)


def fit_image(before: tuple[int, int], size: tuple[int, int], rule: FitRule) -> Fit:
    """Return how an image of `before` (height, width) is brought to `size`.

    >>> fit_image((480, 640), (224, 224), "letterbox")
    Fit(before=(480, 640), inner=(168, 224), canvas=(224, 224), corner=(28, 0))
    >>> fit_image((480, 640), (256, 256), "short").canvas
    (256, 341)
    """
    height, width = before
    if rule == "stretch":
        return Fit(before=before, inner=size, canvas=size, corner=(0, 0))
    pick = min if rule == "letterbox" else max
    scale = pick(size[0] / height, size[1] / width)
    inner = (max(1, round(height * scale)), max(1, round(width * scale)))
    canvas = size if rule == "letterbox" else inner
    corner = ((canvas[0] - inner[0]) // 2, (canvas[1] - inner[1]) // 2)
    return Fit(before=before, inner=inner, canvas=canvas, corner=corner)


# ----------------------------------------------------------------------------------------------------------
# The rules by which every image of a source is brought to one size and color.


Filter: TypeAlias = Literal["nearest", "box", "bilinear", "bicubic", "lanczos"]
Color: TypeAlias = Literal["RGB", "L"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The changes that are made to every image."""

    size: tuple[int, int]
    """(height, width) wanted."""
    fit: FitRule = "stretch"
    color: Color = "RGB"
    filter: Filter = "bilinear"
    """Pillow's filter, which looks at all pixels that fall together when an image shrinks."""
    reduced: bool = True
    """Decode JPEG at 1/2, 1/4 or 1/8 where that is not smaller than the size wanted."""
    turned: bool = True
    """Turn images as their EXIF orientation says, like any viewer."""

    @property
    def channels(self) -> int:
        """3, or 1 for gray."""
        return 3 if self.color == "RGB" else 1

    def to_json(self) -> dict[str, Json]:
        """Return the rules as they go into a recipe, where `color` has its first name."""
        settings = asdict(self)
        color = settings.pop("color")
        return {**settings, "size": list(self.size), "colour": color}


# ----------------------------------------------------------------------------------------------------------
# Objects of an image, as padded arrays with a mask or as ragged ones, where the resize took them.


@dataclass(frozen=True, slots=True, kw_only=True)
class Objects:
    """The annotations of one image, in pixels of the original."""

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
    """The rules by which objects become fields."""

    limit: int | None
    """Objects that there is room for; None: ragged, as many as there are."""
    flag: str
    """Name of the field of flags."""
    keypoints: int = 0
    """Keypoints of an object."""
    strict: bool = False
    """A box without area inside the image is an error of the sample, in place of being marked."""


def object_schema(rules: ObjectRules) -> Schema:
    """Return fields of the objects of every image."""
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
    """Return the fields of one image: boxes cut at its edges and moved with it, padded with zeros.

    Raises:
        DecodeError: More objects than there is room for; with `strict`, a box without area in the image.
    """
    count = len(objects.labels)
    if rules.limit is not None and count > rules.limit:
        raise DecodeError(
            f"{where} has {count} objects, there is room for {rules.limit}",
            hint=f"Give {arg('max_objects', count)} or more",
        )
    cut, valid = inside(objects.boxes, fit.before)
    if rules.strict and not valid.all():
        bad = int(np.flatnonzero(~valid)[0])
        shown = ", ".join(f"{edge:g}" for edge in objects.boxes[bad])
        raise DecodeError(
            f"{where}: the box of object {bad} ({shown}) has no area inside the image of {fit.before[1]} x "
            f"{fit.before[0]} pixels",
            hint=f"Fix it, or give {arg('strict', False)} to have it marked",
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
    """Return boxes cut at the edges of an image of (height, width), and which of them keep an area.

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
